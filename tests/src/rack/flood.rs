//! An endpoint that sends as fast as possible and ignores replies and credit.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{JoinHandle, spawn};
use std::time::Duration;
use std::{net::Ipv6Addr, sync::Arc};

use bluebridge::{NodeId, Pointer};
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::spec::Node;
use bluebridge_transport::udp::{UdpConfig, UdpTransport};
use bluebridge_transport::{Outgoing, Transport as _, Wait};
use bluebridge_wire::address::{Fields, PAGE_BYTES};
use bluebridge_wire::{
    Command, Datagram, EndpointAddress, Header, UDP_PORT, WireCommand, header::HEADER_BYTES, seal,
};

use super::TestRack;
use super::endpoint::{Endpoint, SPACE};

/// Datagrams that are sent in one call.
const BATCH: usize = 32;

/// The requests of a flood.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// PING whose CRC is wrong.
    BadCrc,
    /// PING in a session that does not exist.
    BadSession,
    /// OPEN, each with another nonce.
    Open,
    /// PING in an open session.
    Ping,
    /// WRITE of whole pages in an open session: an endless train.
    Write,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::BadCrc, Self::BadSession, Self::Open, Self::Ping, Self::Write];
}

/// A flood that runs until it is dropped.
#[derive(Debug)]
pub struct Flood {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// The sender of a flood.
struct Source {
    transport: UdpTransport,
    server: NodeId,
    own: Ipv6Addr,
    incarnation: u32,
    session: u64,
    sequence: u64,
    /// The page that it writes.
    page: Pointer,
}

impl Flood {
    /// Starts a flood from the client `number`, which joined as `endpoint`, to a server; WRITEs go
    /// to `page`.
    ///
    /// # Panics
    /// If the socket cannot be opened, or the server opens no session.
    pub fn start(
        rack: &TestRack,
        (endpoint, number): (&Endpoint, u16),
        server: NodeId,
        page: Pointer,
        kind: Kind,
    ) -> Self {
        let assignment = endpoint.membership().assignment();
        let own = EndpointAddress::new(SPACE, assignment.node, 0xf100d).to_ipv6();
        let carrier = UdpConfig {
            address: Some(own),
            device: Some(ENDPOINT_INTERFACE.to_owned()),
            ..UdpConfig::default()
        };
        let transport = rack.enter(Node::Client(number), || UdpTransport::open(&carrier));
        let transport = transport.unwrap_or_else(|error| panic!("{error}"));
        let incarnation = assignment.incarnation;
        let mut source =
            Source { transport, server, own, incarnation, session: 0, sequence: 0, page };
        source.open();
        let (stop, sent) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let ends = (Arc::clone(&stop), Arc::clone(&sent));
        let thread = spawn(move || {
            yield_to_others();
            while !ends.0.load(Ordering::Relaxed) {
                ends.1.fetch_add(source.send(kind), Ordering::Relaxed);
            }
        });
        Self { stop, sent, thread: Some(thread) }
    }

    /// Datagrams that were sent so far.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }
}

/// Lets every other thread preempt the calling one at once (`SCHED_IDLE`), as if the flood came from
/// a host of its own. With a usual policy the others wait for the end of its time slice, which is
/// longer than the times under test. A failure changes nothing but these times.
#[allow(unsafe_code, reason = "no safe crate sets the scheduling policy")]
fn yield_to_others() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread, and `parameters` lives until the call returns.
    let _ = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const parameters) };
}

impl Drop for Flood {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Source {
    fn open(&mut self) {
        let deadline = self.transport.now() + Duration::from_secs(5);
        while self.session == 0 {
            assert!(self.transport.now() < deadline, "the server opens no session");
            let (destination, payload) = self.datagram(Kind::Open);
            self.transmit(&[(destination, payload)]);
            let wait = Wait::until(self.transport.now() + Duration::from_millis(100));
            for index in 0..self.transport.receive(wait).expect("the socket works") {
                let it = self.transport.incoming(index);
                let reply = Datagram::parse(it.source, it.destination, it.payload);
                self.session = reply.map_or(0, |reply| reply.header.session);
            }
        }
    }

    /// Sends a batch and returns how many datagrams were sent.
    fn send(&mut self, kind: Kind) -> u64 {
        let batch: Vec<_> = (0..BATCH).map(|_| self.datagram(kind)).collect();
        self.transmit(&batch)
    }

    fn transmit(&mut self, batch: &[(Ipv6Addr, Vec<u8>)]) -> u64 {
        let outgoing: Vec<_> = batch
            .iter()
            .map(|(destination, payload)| Outgoing {
                source: self.own,
                destination: *destination,
                destination_port: UDP_PORT,
                header: payload,
                data: &[],
            })
            .collect();
        self.transport.transmit(&outgoing).expect("the socket works") as u64
    }

    fn datagram(&mut self, kind: Kind) -> (Ipv6Addr, Vec<u8>) {
        self.sequence += 1;
        let server = EndpointAddress::of_shard(SPACE, self.server, 0, 0).to_ipv6();
        let (command, target, data) = match kind {
            Kind::BadCrc | Kind::BadSession | Kind::Ping => (Command::Ping, server, 0),
            Kind::Open => (Command::Open, server, 0),
            Kind::Write => (Command::Write, self.page.to_ipv6(), PAGE_BYTES),
        };
        let session = match kind {
            Kind::Open => 0,
            Kind::BadSession => self.session ^ (self.sequence << 20),
            Kind::BadCrc | Kind::Ping | Kind::Write => self.session,
        };
        let length = if kind == Kind::Ping { 0 } else { 4096 };
        let header = Header {
            target,
            session,
            incarnation: self.incarnation,
            sequence: self.sequence,
            length,
            credit: 512,
            ..Header::default()
        };
        let bits = WireCommand::request(command, false).bits();
        let fields = Fields::unpack(target).expect("a fabric address");
        let destination = Fields { command: bits, ..fields }.to_ipv6();
        let mut payload = vec![0; HEADER_BYTES];
        header.emit(&mut payload, 0);
        payload.resize(HEADER_BYTES + data, 0xf1);
        seal(self.own, destination, &mut payload, &[]);
        if kind == Kind::BadCrc {
            payload[HEADER_BYTES - 1] ^= 1;
        }
        (destination, payload)
    }
}
