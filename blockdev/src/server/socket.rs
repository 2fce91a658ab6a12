//! Sockets that do not block, and waiting for them.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

/// A TCP client that is silent for so long is asked whether it is there, then so often and so many times, and then the
/// connection is closed: one whose machine is gone would keep its thread.
const KEEP_IDLE: Duration = Duration::from_secs(30);
/// See [`KEEP_IDLE`].
const KEEP_INTERVAL: Duration = Duration::from_secs(10);
/// See [`KEEP_IDLE`].
const KEEP_COUNT: u32 = 3;
/// A TCP client whose machine confirms none of what it was sent for so long is gone, too.
const USER_TIMEOUT_MS: u32 = 60_000;

/// Where clients connect.
#[derive(Debug)]
pub enum Listener {
    /// By TCP.
    Tcp(TcpListener),
    /// On the same machine, through a file.
    Unix(UnixListener),
}

impl Listener {
    pub(super) fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Tcp(listener) => listener.set_nonblocking(true),
            Self::Unix(listener) => listener.set_nonblocking(true),
        }
    }

    /// The next connection; `None` if there is none any more.
    pub(super) fn accept(&self) -> io::Result<Option<Socket>> {
        let accepted = match self {
            Self::Tcp(listener) => listener.accept().and_then(|(stream, _)| {
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
                keep_alive(&stream)?;
                Ok(Socket::Tcp(stream))
            }),
            Self::Unix(listener) => listener.accept().and_then(|(stream, _)| {
                stream.set_nonblocking(true)?;
                Ok(Socket::Unix(stream))
            }),
        };
        match accepted {
            Err(error) if is_of_gone(&error) => Ok(None),
            accepted => accepted.map(Some),
        }
    }
}

fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    // Without it, replies that are not confirmed keep the kernel from asking, and it sends them again for a quarter of an
    // hour.
    sockopt::set_tcp_user_timeout(stream, USER_TIMEOUT_MS)?;
    sockopt::set_tcp_keepidle(stream, KEEP_IDLE)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_INTERVAL)?;
    sockopt::set_tcp_keepcnt(stream, KEEP_COUNT)?;
    Ok(sockopt::set_socket_keepalive(stream, true)?)
}

/// Whether a client that was to be accepted is not there any more.
fn is_of_gone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock
            | io::ErrorKind::Interrupted
            | io::ErrorKind::ConnectionAborted
            | io::ErrorKind::InvalidInput
    )
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            Self::Unix(listener) => listener.as_fd(),
        }
    }
}

/// A connection.
#[derive(Debug)]
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    /// Takes what has arrived; `None` if nothing has. 0 is the end.
    pub(super) fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let received = match self {
            Self::Tcp(stream) => stream.read(buffer),
            Self::Unix(stream) => stream.read(buffer),
        };
        some_unless_blocked(received)
    }

    /// How many bytes have arrived.
    pub(super) fn arrived(&self) -> io::Result<usize> {
        let bytes = rustix::io::ioctl_fionread(self)?;
        Ok(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    /// Ends the connection so that the client gets what was sent. A socket that is closed with bytes that were not read
    /// tells its client to forget what it has not received yet; so they are read over, for a time.
    pub(super) fn end(mut self, until: Instant, buffer: &mut [u8]) -> io::Result<()> {
        match &self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Write)?,
            Self::Unix(stream) => stream.shutdown(Shutdown::Write)?,
        }
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || self.receive(buffer)? == Some(0) {
                return Ok(());
            }
            let mut waiting = [PollFd::from_borrowed_fd(self.as_fd(), PollFlags::IN)];
            wait(&mut waiting, Some(left))?;
        }
    }

    /// Sends a part of the bytes; `None` if nothing fits.
    pub(super) fn send(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        let sent = match self {
            Self::Tcp(stream) => stream.write_vectored(bytes),
            Self::Unix(stream) => stream.write_vectored(bytes),
        };
        some_unless_blocked(sent)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

fn some_unless_blocked(result: io::Result<usize>) -> io::Result<Option<usize>> {
    match result {
        Ok(count) => Ok(Some(count)),
        Err(error)
            if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// What a wait found.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Ready {
    Stop,
    TimedOut,
    Yes,
}

/// Waits until there is something to receive or to accept, or until the server is to stop.
pub(super) fn await_readable(
    socket: BorrowedFd<'_>,
    stop: BorrowedFd<'_>,
    timeout: Option<Duration>,
) -> io::Result<Ready> {
    let mut waiting = [
        PollFd::from_borrowed_fd(socket, PollFlags::IN),
        PollFd::from_borrowed_fd(stop, PollFlags::IN),
    ];
    wait(&mut waiting, timeout)
}

/// Waits until something can be sent, or until the event to stop, if there is one.
pub(super) fn await_writable(
    socket: BorrowedFd<'_>,
    stop: Option<BorrowedFd<'_>>,
    timeout: Duration,
) -> io::Result<Ready> {
    let mut waiting = ArrayVec::<PollFd<'_>, 2>::new();
    waiting.push(PollFd::from_borrowed_fd(socket, PollFlags::OUT));
    waiting.extend(stop.map(|stop| PollFd::from_borrowed_fd(stop, PollFlags::IN)));
    wait(&mut waiting, Some(timeout))
}

/// The first is the socket, the second, if there is one, the event to stop.
fn wait(waiting: &mut [PollFd<'_>], timeout: Option<Duration>) -> io::Result<Ready> {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    match poll(waiting, timeout.as_ref()) {
        Ok(0) => Ok(Ready::TimedOut),
        Ok(_) => {
            let is_ready = |at: usize| waiting.get(at).is_some_and(|it| !it.revents().is_empty());
            Ok(if is_ready(1) { Ready::Stop } else { Ready::Yes })
        }
        // The caller tries again, and finds nothing.
        Err(rustix::io::Errno::INTR) => Ok(Ready::Yes),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connected() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("[::1]:0").expect("a port");
        let address = listener.local_addr().expect("it is bound");
        let listener = Listener::Tcp(listener);
        let client = TcpStream::connect(address).expect("it listens");
        (listener.accept().expect("it is open").expect("a client has connected"), client)
    }

    #[test]
    fn a_client_whose_machine_is_gone_is_noticed() {
        let (socket, _client) = connected();
        assert!(sockopt::socket_keepalive(&socket).expect("a socket"));
        assert_eq!(sockopt::tcp_keepidle(&socket).expect("TCP"), KEEP_IDLE);
        assert_eq!(sockopt::tcp_keepintvl(&socket).expect("TCP"), KEEP_INTERVAL);
        assert_eq!(sockopt::tcp_keepcnt(&socket).expect("TCP"), KEEP_COUNT);
    }

    /// More than the client's socket holds is on its way when the server ends the connection without having read all.
    #[test]
    fn a_client_gets_what_was_sent_before_the_end() {
        let (mut socket, mut client) = connected();
        let chunk = vec![7; 1 << 16];
        let mut sent = 0;
        while let Some(count) = socket.send(&[IoSlice::new(&chunk)]).expect("it is connected") {
            sent += count;
        }
        client.write_all(&[1; 5000]).expect("there is room");
        let ending = std::thread::spawn(move || {
            socket.end(Instant::now() + Duration::from_secs(20), &mut [0; 512])
        });
        let mut received = Vec::new();
        // Reading over goes on until the client ends, too.
        client.read_to_end(&mut received).expect("no reset");
        assert_eq!(received.len(), sent);
        drop(client);
        ending.join().expect("no panic").expect("the client ended");
    }
}
