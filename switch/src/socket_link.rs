//! Links that are pairs of Unix datagram sockets; one datagram is one Ethernet frame.
//!
//! Virtual machines have such links (qemu's `-netdev dgram`), and they need no privileges.

use std::{
    ffi::OsString,
    fs, io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::{
            fs::FileTypeExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    path::{Path, PathBuf},
};

/// What a port's name begins with instead of the name of an interface, which has no colon.
const PREFIX: &str = "unix:";

/// The ending of the socket at the other end.
const PEER: &str = ".peer";

/// The end of a link at a switch's port.
#[derive(Debug)]
pub struct SocketLink {
    socket: UnixDatagram,
    own: PathBuf,
    peer: SocketAddr,
}

impl SocketLink {
    /// The path of the switch's socket in the name of a port: `unix:PATH`.
    #[must_use]
    pub fn path_in(name: &str) -> Option<&Path> {
        name.strip_prefix(PREFIX).map(Path::new)
    }

    /// The path at which the other end must have its socket: that of the switch with `.peer` appended.
    #[must_use]
    pub fn peer_of(own: &Path) -> PathBuf {
        let mut path = OsString::from(own);
        path.push(PEER);
        PathBuf::from(path)
    }

    /// Creates the switch's socket. The other end need not exist yet; frames are lost until it does.
    ///
    /// # Errors
    /// If the path is too long, is in use, or cannot be written.
    pub fn open(own: &Path) -> io::Result<Self> {
        let peer = SocketAddr::from_pathname(Self::peer_of(own))?;
        let socket = match UnixDatagram::bind(own) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_abandoned(own)? => {
                fs::remove_file(own)?;
                UnixDatagram::bind(own)?
            }
            bound => bound?,
        };
        socket.set_nonblocking(true)?;
        Ok(Self { socket, own: own.to_owned(), peer })
    }

    /// Sends one frame.
    ///
    /// # Errors
    /// `WouldBlock` if the other end's queue is full; `NotFound` or `ConnectionRefused` if there is none.
    pub fn send(&self, frame: &[u8]) -> io::Result<()> {
        self.socket.send_to_addr(frame, &self.peer).map(drop)
    }
}

impl AsFd for SocketLink {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for SocketLink {
    fn drop(&mut self) {
        // If it is already gone, so is what this removes.
        let _ = fs::remove_file(&self.own);
    }
}

/// Whether a path is the socket of a process that has ended.
fn is_abandoned(path: &Path) -> io::Result<bool> {
    if !fs::symlink_metadata(path)?.file_type().is_socket() {
        return Ok(false);
    }
    match UnixDatagram::unbound()?.connect(path) {
        Err(error) => Ok(error.kind() == io::ErrorKind::ConnectionRefused),
        Ok(()) => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_testkit::Scratch;

    use super::*;

    #[test]
    fn only_a_name_with_the_prefix_is_a_path() {
        assert_eq!(SocketLink::path_in("unix:/run/p1"), Some(Path::new("/run/p1")));
        assert_eq!(SocketLink::path_in("unix0"), None);
        assert_eq!(SocketLink::peer_of(Path::new("/run/p1")), Path::new("/run/p1.peer"));
    }

    #[test]
    fn a_path_is_taken_only_from_a_process_that_has_ended() {
        let scratch = Scratch::new("socket-link");
        let path = scratch.file("p1");
        let link = SocketLink::open(&path).expect("nothing is there");
        let error = SocketLink::open(&path).expect_err("the link uses it");
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(link);
        assert!(!path.exists(), "the socket goes with its link");
        drop(UnixDatagram::bind(&path).expect("nothing is there"));
        SocketLink::open(&path).expect("that socket was abandoned");
        fs::write(&path, "a file").expect("written");
        assert!(SocketLink::open(&path).is_err(), "a file is not a socket");
        assert!(path.exists());
    }

    #[test]
    fn frames_are_lost_until_the_other_end_is_there() {
        let scratch = Scratch::new("socket-link");
        let path = scratch.file("p1");
        let link = SocketLink::open(&path).expect("opened");
        assert_eq!(link.send(&[1; 60]).unwrap_err().kind(), io::ErrorKind::NotFound);
        let peer = UnixDatagram::bind(SocketLink::peer_of(&path)).expect("bound");
        link.send(&[2; 60]).expect("sent");
        let mut frame = [0; 100];
        assert_eq!(peer.recv(&mut frame).expect("received"), 60);
        assert_eq!(frame[..60], [2; 60]);
    }
}
