//! A directory service as a separate server: the baseline for a directory in the switch.
//!
//! It stores which node holds which page. A client registers a page after it created it, asks for its node
//! before each access, and removes it when it frees it. Each of these is one UDP round trip, sent again
//! if its response is lost.

use std::{
    collections::HashMap,
    io,
    net::{Ipv6Addr, SocketAddr, UdpSocket},
    time::Duration,
};

use bluebridge_wire::{NodeId, Pointer};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::placement::now;

/// A request: its number, what it asks, a node, and the page's address.
const REQUEST_BYTES: usize = 28;
/// A response: the request's number, the result, and the page's node.
const RESPONSE_BYTES: usize = 12;

/// The longest sleep of the server: how late it can notice that it is stopped.
const SLEEP: Duration = Duration::from_millis(20);
/// A client waits this long before it sends a request again, then twice as long, and so on.
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LAST_RETRY: Duration = Duration::from_millis(320);

const REGISTER: u8 = 1;
const FIND: u8 = 2;
const REMOVE: u8 = 3;

const DONE: u8 = 0;
const UNKNOWN_PAGE: u8 = 1;
const FULL: u8 = 2;

/// Why the directory did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It has no room for another page.
    #[error("the directory is full; start it with more --pages")]
    Full,
    /// The socket failed, or nobody listens there.
    #[error("the directory cannot be used: {0}; check that it runs, and its address")]
    Io(#[from] io::Error),
    /// There was no response.
    #[error("the directory does not respond; check that it runs, and its address")]
    TimedOut,
    /// It does not know the page.
    #[error("the directory does not know {0}")]
    UnknownPage(Ipv6Addr),
    /// The response is not one of this protocol.
    #[error("what responds is not this program's directory")]
    Violation,
}

/// The table of the service.
#[derive(Debug)]
pub struct Directory {
    nodes: HashMap<u128, u16>,
    page_limit: usize,
}

impl Directory {
    /// An empty table for up to `page_limit` pages.
    #[must_use]
    pub fn new(page_limit: usize) -> Self {
        // A table that is at most half full is cleaned in place and never grows: nothing is allocated later.
        Self { nodes: HashMap::with_capacity(page_limit.saturating_mul(2)), page_limit }
    }

    /// Serves until `is_stopped`: like a memory server, it polls for `spin` after a request, then it sleeps.
    ///
    /// # Errors
    /// The system's error; a response that cannot be sent is none, because its client asks again.
    pub fn serve(
        &mut self,
        socket: &UdpSocket,
        spin: Duration,
        is_stopped: impl Fn() -> bool,
    ) -> io::Result<()> {
        socket.set_nonblocking(true)?;
        let mut request = [0; REQUEST_BYTES];
        let mut spin_end = Duration::ZERO;
        loop {
            match socket.recv_from(&mut request) {
                Ok((length, from)) => {
                    if let Some(response) = self.respond(request.get(..length).unwrap_or_default())
                    {
                        let _ = socket.send_to(&response, from);
                    }
                    spin_end = now() + spin;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if now() >= spin_end {
                        if is_stopped() {
                            return Ok(());
                        }
                        sleep(socket, SLEEP)?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// The response to a request; none to a datagram that is not one.
    fn respond(&mut self, request: &[u8]) -> Option<[u8; RESPONSE_BYTES]> {
        let request: &[u8; REQUEST_BYTES] = request.try_into().ok()?;
        let (number, rest) = request.split_first_chunk::<8>()?;
        let ([kind, _, node @ ..], page) = rest.split_first_chunk::<4>()?;
        let (node, page) = (u16::from_be_bytes(*node), u128::from_be_bytes(*page.first_chunk()?));
        let found = match *kind {
            REGISTER if self.nodes.len() >= self.page_limit && !self.nodes.contains_key(&page) => {
                Err(FULL)
            }
            REGISTER => {
                self.nodes.insert(page, node);
                Ok(node)
            }
            FIND => self.nodes.get(&page).copied().ok_or(UNKNOWN_PAGE),
            REMOVE => self.nodes.remove(&page).ok_or(UNKNOWN_PAGE),
            _ => return None,
        };
        let (result, node) = found.map_or_else(|result| (result, 0), |node| (DONE, node));
        let mut response = [0; RESPONSE_BYTES];
        response[..8].copy_from_slice(number);
        response[8] = result;
        response[10..].copy_from_slice(&node.to_be_bytes());
        Some(response)
    }
}

/// Sleeps until the socket has a datagram, or the time is over.
fn sleep(socket: &UdpSocket, time: Duration) -> io::Result<()> {
    // The time is at most seconds.
    let time = Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: time.subsec_nanos().into(),
    };
    match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&time)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// A client of the service.
#[derive(Debug)]
pub struct DirectoryClient {
    socket: UdpSocket,
    spin: Duration,
    deadline: Duration,
    number: u64,
}

impl DirectoryClient {
    /// A client that polls for `spin` before it sleeps, and waits for a response up to `deadline`.
    ///
    /// # Errors
    /// The system's error.
    pub fn open(directory: SocketAddr, spin: Duration, deadline: Duration) -> io::Result<Self> {
        let any: (std::net::IpAddr, u16) = match directory {
            SocketAddr::V4(_) => (std::net::Ipv4Addr::UNSPECIFIED.into(), 0),
            SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED.into(), 0),
        };
        let socket = UdpSocket::bind(any)?;
        socket.connect(directory)?;
        socket.set_nonblocking(true)?;
        // A former client with the same port used smaller numbers.
        let number = u64::try_from(now().as_nanos()).unwrap_or(0);
        Ok(Self { socket, spin, deadline, number })
    }

    /// Stores the node of a new page, which the pointer names.
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub fn register(&mut self, page: Pointer) -> Result<(), DirectoryError> {
        self.ask(REGISTER, page).map(drop)
    }

    /// The node that holds the page.
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub fn find(&mut self, page: Pointer) -> Result<NodeId, DirectoryError> {
        self.ask(FIND, page).map(|(node, _)| node)
    }

    /// Removes a page; returns the node that holds it. `None`: a request whose response was lost has
    /// removed it.
    ///
    /// # Errors
    /// [`DirectoryError`].
    pub fn remove(&mut self, page: Pointer) -> Result<Option<NodeId>, DirectoryError> {
        let (node, send_count) = self.ask(REMOVE, page)?;
        Ok((node != NodeId::ANY || send_count == 1).then_some(node))
    }

    /// Sends a request until there is a response; returns the page's node and how often it was sent.
    fn ask(&mut self, kind: u8, page: Pointer) -> Result<(NodeId, u32), DirectoryError> {
        self.number = self.number.wrapping_add(1);
        let address = page.to_ipv6();
        let mut request = [0; REQUEST_BYTES];
        request[..8].copy_from_slice(&self.number.to_be_bytes());
        request[8] = kind;
        request[10..12].copy_from_slice(&page.node.0.to_be_bytes());
        request[12..].copy_from_slice(&address.octets());
        let start = now();
        let (mut retry, mut send_count) = (FIRST_RETRY, 0);
        loop {
            self.socket.send(&request)?;
            send_count += 1;
            let until = (now() + retry).min(start + self.deadline);
            if let Some((result, node)) = self.await_response(until)? {
                return match result {
                    DONE => Ok((node, send_count)),
                    UNKNOWN_PAGE if kind == REMOVE && send_count > 1 => {
                        Ok((NodeId::ANY, send_count))
                    }
                    UNKNOWN_PAGE => Err(DirectoryError::UnknownPage(address)),
                    FULL => Err(DirectoryError::Full),
                    _ => Err(DirectoryError::Violation),
                };
            }
            if now() >= start + self.deadline {
                return Err(DirectoryError::TimedOut);
            }
            retry = (retry * 2).min(LAST_RETRY);
        }
    }

    /// The response to the present request; `None` if there is none in time.
    fn await_response(&self, until: Duration) -> Result<Option<(u8, NodeId)>, DirectoryError> {
        let spin_end = now() + self.spin;
        loop {
            let mut response = [0; RESPONSE_BYTES];
            match self.socket.recv(&mut response) {
                Ok(RESPONSE_BYTES) if response[..8] == self.number.to_be_bytes() => {
                    let node = NodeId(u16::from_be_bytes([response[10], response[11]]));
                    return Ok(Some((response[8], node)));
                }
                // A late response to an earlier request.
                Ok(RESPONSE_BYTES) => {}
                Ok(_) => return Err(DirectoryError::Violation),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let time = now();
                    if time >= until {
                        return Ok(None);
                    }
                    if time >= spin_end {
                        sleep(&self.socket, until - time)?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        panic::{self, AssertUnwindSafe},
        sync::atomic::{AtomicBool, Ordering},
        thread,
    };

    use super::*;

    const DEADLINE: Duration = Duration::from_secs(10);

    fn page(number: u16) -> Pointer {
        let address = Ipv6Addr::new(0xfdbb, 1, number % 7 + 1, 0, 0, 0, number, 0);
        Pointer::from_ipv6(address).expect("a pointer")
    }

    fn with_directory(page_limit: usize, work: impl FnOnce(SocketAddr)) {
        let socket = UdpSocket::bind("[::1]:0").expect("a socket");
        let address = socket.local_addr().expect("it is bound");
        let stop = AtomicBool::new(false);
        let serve = || {
            let is_stopped = || stop.load(Ordering::Relaxed);
            Directory::new(page_limit).serve(&socket, Duration::from_micros(50), is_stopped)
        };
        thread::scope(|scope| {
            let serving = scope.spawn(serve);
            let done = panic::catch_unwind(AssertUnwindSafe(|| work(address)));
            stop.store(true, Ordering::Relaxed);
            serving.join().expect("no panic").expect("the socket works");
            done.unwrap_or_else(|failure| panic::resume_unwind(failure));
        });
    }

    #[test]
    fn pages_are_found_from_their_registration_to_their_removal() {
        with_directory(100, |address| {
            let open = || DirectoryClient::open(address, Duration::ZERO, DEADLINE).expect("opened");
            let (mut one, mut other) = (open(), open());
            assert!(matches!(one.find(page(1)), Err(DirectoryError::UnknownPage(_))));
            for number in 0..100 {
                one.register(page(number)).expect("there is room");
            }
            one.register(page(0)).expect("a repeated request finds its own entry");
            assert!(matches!(one.register(page(100)), Err(DirectoryError::Full)));
            for number in 0..100 {
                assert_eq!(other.find(page(number)).expect("known"), page(number).node);
                assert_eq!(other.remove(page(number)).expect("known"), Some(page(number).node));
                assert!(matches!(one.find(page(number)), Err(DirectoryError::UnknownPage(_))));
            }
            assert!(matches!(one.remove(page(1)), Err(DirectoryError::UnknownPage(_))));
        });
    }

    #[test]
    fn the_table_never_grows() {
        let mut directory = Directory::new(1000);
        let capacity = directory.nodes.capacity();
        for round in 0..50_u128 {
            for number in 0..1000_u128 {
                directory.nodes.insert(round << 64 | number, 1);
            }
            for number in 0..1000_u128 {
                directory.nodes.remove(&(round << 64 | number));
            }
        }
        // Places of removed entries may count as used, until the table is cleaned up.
        assert!(directory.nodes.capacity() <= capacity);
    }

    #[test]
    fn what_is_no_request_gets_no_response() {
        let mut directory = Directory::new(10);
        for length in [0, REQUEST_BYTES - 1, REQUEST_BYTES] {
            assert_eq!(directory.respond(&vec![0; length]), None);
        }
        with_directory(10, |address| {
            let mut client =
                DirectoryClient::open(address, Duration::ZERO, DEADLINE).expect("opened");
            client.socket.send(&[9; 100]).expect("sent");
            client.register(page(1)).expect("the service goes on");
        });
    }

    /// A service that loses the first responses.
    #[test]
    fn a_lost_response_is_asked_for_again() {
        let socket = UdpSocket::bind("[::1]:0").expect("a socket");
        socket.set_read_timeout(Some(DEADLINE)).expect("set");
        let address = socket.local_addr().expect("it is bound");
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut directory = Directory::new(10);
                let mut request = [0; REQUEST_BYTES];
                for count in 0..9 {
                    let (_, from) = socket.recv_from(&mut request).expect("a request");
                    let response = directory.respond(&request).expect("it is one");
                    if count % 3 == 2 {
                        socket.send_to(&response, from).expect("sent");
                    }
                }
            });
            let mut client =
                DirectoryClient::open(address, Duration::ZERO, DEADLINE).expect("opened");
            client.register(page(1)).expect("registered");
            assert_eq!(client.find(page(1)).expect("found"), page(1).node);
            // The first of three requests removed it; its response was lost.
            assert_eq!(client.remove(page(1)).expect("removed"), None);
        });
    }

    #[test]
    fn a_service_that_is_silent_is_reported_at_the_deadline() {
        let socket = UdpSocket::bind("[::1]:0").expect("a socket");
        let address = socket.local_addr().expect("it is bound");
        let deadline = Duration::from_millis(100);
        let mut client = DirectoryClient::open(address, Duration::ZERO, deadline).expect("opened");
        assert!(matches!(client.find(page(1)), Err(DirectoryError::TimedOut)));
    }
}
