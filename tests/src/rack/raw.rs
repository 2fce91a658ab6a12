//! Single operations with real packets that the client library would not send.

use bluebridge::NodeId;
use bluebridge_protocol::Timestamp;
use bluebridge_protocol::requester::{
    Buffers, Config, Failure, Lease, Operation, Output, Requester, SealedRequest,
};
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::network::host::FABRIC;
use bluebridge_rack::spec::Node;
use bluebridge_transport::udp::{UdpConfig, UdpTransport};
use bluebridge_transport::{Outgoing, Transport as _, Wait};
use bluebridge_wire::{Datagram, Pointer, UDP_PORT};

use super::TestRack;
use super::endpoint::{Endpoint, SPACE};

/// A requester with its own socket, without service, ledger or guard.
pub struct RawClient {
    requester: Requester,
    transport: UdpTransport,
}

/// The memory of the one outstanding operation.
struct Memory<'a> {
    outgoing: &'a [u8],
    incoming: &'a mut [u8],
}

impl Buffers for Memory<'_> {
    fn outgoing(&self, _token: u64) -> &[u8] {
        self.outgoing
    }

    fn incoming(&mut self, _token: u64) -> &mut [u8] {
        self.incoming
    }
}

impl RawClient {
    /// A client in the namespace of client `number`, which joined as `endpoint`; each client needs
    /// another `seed`.
    ///
    /// # Panics
    /// If the socket cannot be opened.
    pub fn open(rack: &TestRack, endpoint: &Endpoint, number: u16, seed: u32) -> Self {
        let assignment = endpoint.membership().assignment();
        let mut config =
            Config::new(SPACE, assignment.node, assignment.incarnation, u64::from(seed) + 1);
        // Different from the selectors of the endpoint's other clients, which are random.
        config.selector = 0xfeed_0000 | seed;
        let carrier = UdpConfig {
            address: Some(config.address().to_ipv6()),
            device: Some(ENDPOINT_INTERFACE.to_owned()),
            filter: Some(FABRIC),
            ..UdpConfig::default()
        };
        let transport = rack.enter(Node::Client(number), || UdpTransport::open(&carrier));
        let transport = transport.unwrap_or_else(|error| panic!("{error}"));
        Self { requester: Requester::new(config), transport }
    }

    /// The endpoint's node.
    pub const fn node(&self) -> NodeId {
        self.requester.config().node
    }

    /// Leases a page for `lease_ms` milliseconds, without waiting; also returns its bytes.
    ///
    /// # Errors
    /// The requester's failures.
    ///
    /// # Panics
    /// If the operation ends with another result than a lease.
    pub fn update(&mut self, page: Pointer, lease_ms: u16) -> Result<(Lease, Vec<u8>), Failure> {
        let mut incoming = vec![0; 4096];
        let operation = Operation::Update { pointer: page, length: 4096, lease_ms, wait: false };
        match self.ask(operation, &[], &mut incoming)? {
            Output::Leased(lease) => Ok((lease, incoming)),
            other => panic!("an UPDATE ends with a lease: {other:?}"),
        }
    }

    /// Writes a page under a lease.
    ///
    /// # Errors
    /// The requester's failures.
    pub fn commit(&mut self, page: Pointer, epoch: u64, data: &[u8]) -> Result<Output, Failure> {
        let length = u32::try_from(data.len()).expect("a page");
        self.ask(Operation::Commit { pointer: page, length, epoch }, data, &mut [])
    }

    /// Executes one operation, until it ends or its deadline passes.
    ///
    /// # Errors
    /// The requester's failures.
    ///
    /// # Panics
    /// If it cannot be started, or the socket fails.
    pub fn ask(
        &mut self,
        operation: Operation,
        outgoing: &[u8],
        incoming: &mut [u8],
    ) -> Result<Output, Failure> {
        let mut memory = Memory { outgoing, incoming };
        let mut now = self.transport.now();
        self.requester.start(now, operation, 0).expect("it can be sent");
        loop {
            self.send(now, &memory);
            if let Some(completion) = self.requester.poll_completion() {
                return completion.result;
            }
            let timer = self.requester.poll_timeout().expect("an operation has a deadline");
            let wait = Wait::until(timer);
            let count = self.transport.receive(wait).expect("the socket works");
            now = self.transport.now();
            for index in 0..count {
                let it = self.transport.incoming(index);
                if let Ok(datagram) = Datagram::parse(it.source, it.destination, it.payload) {
                    self.requester.handle_datagram(now, &datagram, &mut memory);
                }
            }
            self.requester.handle_timeout(now);
        }
    }

    /// A datagram that the socket does not accept is lost, and retransmitted by the requester's
    /// timer.
    fn send(&mut self, now: Timestamp, memory: &Memory<'_>) {
        while let Some(transmit) = self.requester.poll_transmit(now, memory) {
            let _ = self.transport.transmit(&[datagram(&transmit)]).expect("the socket works");
        }
    }
}

fn datagram<'a>(transmit: &'a SealedRequest<'a>) -> Outgoing<'a> {
    Outgoing {
        source: transmit.source,
        destination: transmit.destination,
        destination_port: UDP_PORT,
        header: transmit.head(),
        data: transmit.data,
    }
}
