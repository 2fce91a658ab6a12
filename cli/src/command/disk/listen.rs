//! Where a disk is served.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use bluebridge_blockdev::server::Listener;
use bluebridge_rack::network::host::FABRIC;

use crate::exit::UsageError;

/// How long a process that was killed may take to give its socket up, and how often that is looked at.
const DYING: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(20);

/// A place to listen.
#[derive(Clone, Debug)]
pub(super) enum Place {
    Socket(PathBuf),
    Tcp(SocketAddr),
}

/// A socket that listens. The file of a unix socket is removed at the end.
#[derive(Debug)]
pub(super) struct Listening {
    listener: Option<Listener>,
    place: Place,
}

impl Place {
    pub(super) fn of(
        socket: Option<&Path>,
        listen: Option<SocketAddr>,
        expose: bool,
    ) -> Result<Self, UsageError> {
        match (socket, listen) {
            // Absolute: who is told where it is may be elsewhere.
            (Some(path), _) => {
                Ok(Self::Socket(std::path::absolute(path).unwrap_or_else(|_| path.to_owned())))
            }
            (None, Some(address)) if expose || is_inside(address.ip()) => Ok(Self::Tcp(address)),
            (None, Some(address)) => Err(UsageError(format!(
                "every host that reaches {address} could read and write the disk; use an address of loopback or of the \
                 fabric, or add --expose"
            ))),
            (None, None) => Err(UsageError(
                "say where clients connect: --socket FILE, or --listen ADDRESS:PORT".to_owned(),
            )),
        }
    }

    pub(super) fn listen(self) -> anyhow::Result<Listening> {
        match self {
            Self::Tcp(address) => {
                let listener = TcpListener::bind(address)
                    .with_context(|| format!("cannot listen on {address}"))?;
                let bound = listener.local_addr().context("cannot read the socket's address")?;
                let listener = Some(Listener::Tcp(listener));
                Ok(Listening { listener, place: Self::Tcp(bound) })
            }
            Self::Socket(path) => {
                remove_unused(&path)?;
                let failed = || format!("cannot listen on {}", path.display());
                let listener = UnixListener::bind(&path).with_context(failed)?;
                let listener = Some(Listener::Unix(listener));
                let listening = Listening { listener, place: Self::Socket(path.clone()) };
                // Whoever may write to the file may write to the disk.
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
                    .with_context(failed)?;
                Ok(listening)
            }
        }
    }
}

/// Whether only this machine and the fabric reach an address.
fn is_inside(address: IpAddr) -> bool {
    match address {
        IpAddr::V6(address) => address.is_loopback() || FABRIC.contains(&address),
        IpAddr::V4(address) => address.is_loopback(),
    }
}

/// Removes a socket's file that a killed process left.
fn remove_unused(path: &Path) -> anyhow::Result<()> {
    let Ok(found) = fs::symlink_metadata(path) else { return Ok(()) };
    let taken =
        |why: &str| UsageError(format!("{} {why}; choose another --socket", path.display()));
    if !found.file_type().is_socket() {
        return Err(taken("exists, and is no socket").into());
    }
    let until = Instant::now() + DYING;
    loop {
        match UnixStream::connect(path) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                let removed = fs::remove_file(path);
                return removed.with_context(|| format!("cannot remove {}", path.display()));
            }
            // One that was killed may still be about to end.
            _ if Instant::now() < until => thread::sleep(LOOK),
            _ => return Err(taken("is in use by another process").into()),
        }
    }
}

impl Listening {
    /// The socket, once.
    pub(super) const fn take(&mut self) -> Option<Listener> {
        self.listener.take()
    }

    pub(super) fn socket(&self) -> Option<&Path> {
        match &self.place {
            Place::Socket(path) => Some(path),
            Place::Tcp(_) => None,
        }
    }

    pub(super) const fn address(&self) -> Option<SocketAddr> {
        match &self.place {
            Place::Socket(_) => None,
            Place::Tcp(address) => Some(*address),
        }
    }

    /// By the specification of NBD's URIs.
    pub(super) fn uri(&self, export: &str) -> String {
        let export = escaped(export);
        match &self.place {
            Place::Socket(path) => {
                format!("nbd+unix:///{export}?socket={}", escaped(&path.display().to_string()))
            }
            Place::Tcp(address) => format!("nbd://{address}/{export}"),
        }
    }

    /// The option that says this place.
    pub(super) fn option(&self) -> String {
        match &self.place {
            Place::Socket(path) => format!("--socket {}", path.display()),
            Place::Tcp(address) => format!("--listen {address}"),
        }
    }

    /// The command that makes it a block device of Linux.
    pub(super) fn nbd_client(&self, export: &str) -> String {
        let place = match &self.place {
            Place::Socket(path) => format!("-unix {}", path.display()),
            Place::Tcp(address) => format!("{} {}", address.ip(), address.port()),
        };
        format!("nbd-client {place} /dev/nbd0 -N '{export}' -b 4096 -C 4 -persist")
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Place::Socket(path) = &self.place {
            // Another process may have removed it.
            let _ = fs::remove_file(path);
        }
    }
}

/// Text as a part of a URI.
fn escaped(text: &str) -> String {
    let mut escaped = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            escaped.push(byte.into());
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listening(place: Place) -> Listening {
        Listening { listener: None, place }
    }

    #[test]
    fn clients_are_told_where_to_connect() {
        let tcp = listening(Place::Tcp("[::1]:10809".parse().expect("an address")));
        assert_eq!(tcp.uri("disk"), "nbd://[::1]:10809/disk");
        assert!(tcp.nbd_client("disk").starts_with("nbd-client ::1 10809 /dev/nbd0 -N 'disk'"));
        let unix = listening(Place::Socket("/no/such dir/socket".into()));
        assert_eq!(unix.uri("a b"), "nbd+unix:///a%20b?socket=/no/such%20dir/socket");
    }

    #[test]
    fn strangers_are_kept_out_unless_they_are_let_in() {
        let of = |address: &str, expose| {
            let address = address.parse().expect("an address");
            Place::of(None, Some(address), expose).is_ok()
        };
        for inside in ["[::1]:10809", "127.0.0.1:0", "[fdbb:1:fffe::1]:10809"] {
            assert!(of(inside, false), "{inside}");
        }
        for outside in ["[::]:10809", "0.0.0.0:1", "192.0.2.1:1", "[2001:db8::1]:1"] {
            assert!(!of(outside, false) && of(outside, true), "{outside}");
        }
        assert!(Place::of(None, None, false).is_err());
        let place = Place::of(Some(Path::new("here")), None, false).expect("a socket");
        assert!(matches!(place, Place::Socket(path) if path.is_absolute()));
    }

    #[test]
    fn only_the_socket_of_a_process_that_is_gone_is_replaced() {
        let scratch = bluebridge_testkit::Scratch::new("disk-listen");
        let path = scratch.path().join("socket");
        let place = || Place::Socket(path.clone());
        let mut first = place().listen().expect("it is free");
        let error = place().listen().expect_err("it is in use");
        assert!(error.to_string().contains("in use by another process"), "{error}");
        drop(first.take());
        let second = place().listen().expect("nobody listens any more");
        std::mem::forget(first);
        drop(second);
        assert!(!path.exists(), "it is removed at the end");
        fs::write(&path, "precious").expect("written");
        let error = place().listen().expect_err("it is no socket");
        assert!(error.to_string().contains("no socket"), "{error}");
        assert_eq!(fs::read(&path).expect("readable"), b"precious");
    }
}
