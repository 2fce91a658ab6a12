//! Where a disk is served.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use bluebridge_blockdev::server::Listener;
use bluebridge_rack::network::host::FABRIC;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::exit::UsageError;

/// How long a process that was killed may take to give its socket up, and how often that is looked at.
const DYING: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(20);
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

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
    /// The device and the number of a unix socket's file.
    file: Option<(u64, u64)>,
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

    /// Checks a path, before anything is done for it.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let Self::Socket(path) = self else { return Ok(()) };
        let folder = folder(path);
        if !folder.is_dir() {
            let words = format!("{} is no folder; choose another --socket", folder.display());
            return Err(UsageError(words).into());
        }
        unused(path, Then::Keep).map(drop)
    }

    pub(super) fn listen(self) -> anyhow::Result<Listening> {
        match self {
            Self::Tcp(address) => {
                let listener = TcpListener::bind(address)
                    .with_context(|| format!("cannot listen on {address}"))?;
                let bound = listener.local_addr().context("cannot read the socket's address")?;
                let listener = Some(Listener::Tcp(listener));
                Ok(Listening { listener, place: Self::Tcp(bound), file: None })
            }
            Self::Socket(path) => {
                let failed = || format!("cannot listen on {}", path.display());
                let (bound, file) =
                    bind(&path, unused(&path, Then::Remove)?).with_context(failed)?;
                let place = Self::Socket(path.clone());
                let mut listening = Listening { listener: None, place, file: Some(file) };
                // Whoever may write to the file may write to the disk. Before anybody can connect.
                fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
                    .with_context(failed)?;
                rustix::net::listen(&bound, BACKLOG).with_context(failed)?;
                listening.listener = Some(Listener::Unix(UnixListener::from(bound)));
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

/// What to do with the file of a socket that nobody uses.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    Keep,
    Remove,
}

/// Makes sure that no process uses a path, or has another kind of file there; what a killed process left is removed. The
/// lock that is returned keeps other processes from using it.
fn unused(path: &Path, then: Then) -> anyhow::Result<Option<Locked>> {
    let taken =
        |why: &str| UsageError(format!("{} {why}; choose another --socket", path.display()));
    let until = Instant::now() + DYING;
    loop {
        // Not while waiting: the other process may need it in order to end.
        let locked = match then {
            Then::Keep => None,
            Then::Remove => Locked::take(path),
        };
        let Ok(found) = fs::symlink_metadata(path) else { return Ok(locked) };
        if !found.file_type().is_socket() {
            return Err(taken("exists, and is no socket").into());
        }
        if !is_bound(path) {
            if then == Then::Remove {
                fs::remove_file(path)
                    .with_context(|| format!("cannot remove {}", path.display()))?;
            }
            return Ok(locked);
        }
        if Instant::now() >= until {
            return Err(taken("is in use by another process").into());
        }
        // One that was killed may still be about to end.
        drop(locked);
        thread::sleep(LOOK);
    }
}

/// Whether a process has the socket of a file. One that listens does not notice: a socket of another kind cannot connect.
fn is_bound(path: &Path) -> bool {
    let probed = UnixDatagram::unbound().and_then(|probe| probe.connect(path));
    probed.map_or_else(|error| error.kind() != ErrorKind::ConnectionRefused, |()| true)
}

/// Makes a socket with a file that nobody can connect to yet; returns the file's device and number.
fn bind(path: &Path, locked: Option<Locked>) -> anyhow::Result<(OwnedFd, (u64, u64))> {
    let address = SocketAddrUnix::new(path)?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &address)?;
    let file = identity(&fs::symlink_metadata(path)?);
    drop(locked);
    Ok((socket, file))
}

fn identity(found: &fs::Metadata) -> (u64, u64) {
    (found.dev(), found.ino())
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The lock on the folder of a socket, which processes hold while they look whether a file in it is used and remove it.
struct Locked(#[expect(dead_code, reason = "closed when dropped")] OwnedFd);

impl Locked {
    /// `None` if it cannot be had: anybody who may read the folder can hold it, and it closes a gap of an instant only.
    fn take(path: &Path) -> Option<Self> {
        let folder = folder(path);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let until = Instant::now() + 2 * DYING;
        let taken = rustix::fs::open(folder, flags, Mode::empty()).and_then(|opened| {
            loop {
                match flock(&opened, FlockOperation::NonBlockingLockExclusive) {
                    Ok(()) => return Ok(Self(opened)),
                    Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < until => {
                        thread::sleep(LOOK);
                    }
                    Err(error) => return Err(error),
                }
            }
        });
        match taken {
            Ok(locked) => Some(locked),
            Err(error) => {
                tracing::warn!(
                    folder = %folder.display(),
                    %error,
                    "cannot lock the folder of the socket; start no other disk at the same path now"
                );
                None
            }
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
            Place::Socket(path) => format!("--socket {}", quoted(&path.display().to_string())),
            Place::Tcp(address) => format!("--listen {address}"),
        }
    }

    /// The command that makes it a block device of Linux.
    pub(super) fn nbd_client(&self, export: &str) -> String {
        let place = match &self.place {
            Place::Socket(path) => format!("-unix {}", quoted(&path.display().to_string())),
            Place::Tcp(address) => format!("{} {}", address.ip(), address.port()),
        };
        format!("nbd-client {place} /dev/nbd0 -N {} -b 4096 -C 4 -persist", quoted(export))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let (Place::Socket(path), Some(_)) = (&self.place, self.file) else { return };
        self.listener = None;
        let _locked = Locked::take(path);
        // Another process may have replaced it, and its file may have the same number.
        let is_own = fs::symlink_metadata(path).ok().map(|found| identity(&found)) == self.file;
        if is_own && !is_bound(path) {
            let _ = fs::remove_file(path);
        }
    }
}

/// Text as one word of a shell's command.
pub(super) fn quoted(text: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~/:@%+=,[]".contains(&byte);
    if !text.is_empty() && text.bytes().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
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
    use std::os::unix::net::UnixStream;

    use super::*;

    fn listening(place: Place) -> Listening {
        Listening { listener: None, place, file: None }
    }

    #[test]
    fn clients_are_told_where_to_connect() {
        let tcp = listening(Place::Tcp("[::1]:10809".parse().expect("an address")));
        assert_eq!(tcp.uri("disk"), "nbd://[::1]:10809/disk");
        assert!(tcp.nbd_client("disk").starts_with("nbd-client ::1 10809 /dev/nbd0 -N disk "));
        let unix = listening(Place::Socket("/no/such dir/socket".into()));
        assert_eq!(unix.uri("a b"), "nbd+unix:///a%20b?socket=/no/such%20dir/socket");
        assert_eq!(unix.option(), "--socket '/no/such dir/socket'");
        let command = unix.nbd_client("it's");
        assert!(
            command.starts_with("nbd-client -unix '/no/such dir/socket' /dev/nbd0"),
            "{command}"
        );
        assert!(command.contains(r"-N 'it'\''s' -b"), "{command}");
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
        let mode = fs::metadata(&path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = place().listen().expect_err("it is in use");
        assert!(error.to_string().contains("in use by another process"), "{error}");
        let error = place().check().expect_err("it is in use");
        assert!(error.to_string().contains("in use by another process"), "{error}");
        let Some(Listener::Unix(listener)) = first.take() else { panic!("a unix socket") };
        listener.set_nonblocking(true).expect("a socket");
        let accepted = listener.accept().expect_err("nobody has connected to see that");
        assert_eq!(accepted.kind(), ErrorKind::WouldBlock);
        drop(listener);
        place().check().expect("nobody listens any more");
        assert!(path.exists(), "a check removes nothing");
        let second = place().listen().expect("nobody listens any more");
        drop(first);
        UnixStream::connect(&path).expect("the file is that of the second one");
        drop(second);
        assert!(!path.exists(), "it is removed at the end");
        let elsewhere = Place::Socket(scratch.path().join("no such folder/socket"));
        elsewhere.check().expect_err("there is no folder");
        fs::write(&path, "precious").expect("written");
        let error = place().listen().expect_err("it is no socket");
        assert!(error.to_string().contains("no socket"), "{error}");
        assert_eq!(fs::read(&path).expect("readable"), b"precious");
    }
}
