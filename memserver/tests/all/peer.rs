//! A plain requester.

use core::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use std::net::Ipv6Addr;

use bluebridge_transport::{Outgoing, Transport, Wait};
use bluebridge_wire::{
    Command, Datagram, EndpointAddress, Flags, Header, NodeId, Pointer, Space, Status, UDP_PORT,
    Usage, WireCommand, address::Fields, header::HEADER_BYTES, seal,
};

pub(crate) const SPACE: Space = Space(7);
pub(crate) const SERVER: NodeId = NodeId(9);
pub(crate) const CLIENT: NodeId = NodeId(20);

/// Each session has another nonce, because a repeated nonce means the same session.
static NONCES: AtomicU64 = AtomicU64::new(4711);

const TIMEOUT: Duration = Duration::from_secs(20);

/// A reply.
#[derive(Clone, Debug)]
pub(crate) struct Reply {
    pub(crate) status: Status,
    pub(crate) header: Header,
    pub(crate) data: Vec<u8>,
}

/// A requester with one session and one request at a time; it never retransmits.
pub(crate) struct Peer<T> {
    pub(crate) transport: T,
    pub(crate) session: u64,
    pub(crate) piece_bytes: usize,
    sequence: u64,
    shard: u8,
}

impl<T: Transport> Peer<T> {
    pub(crate) fn open(transport: T, piece_bytes: u32) -> Self {
        Self::open_shard(transport, piece_bytes, 0)
    }

    pub(crate) fn open_shard(transport: T, piece_bytes: u32, shard: u8) -> Self {
        let nonce = NONCES.fetch_add(1, Ordering::Relaxed);
        let mut peer = Self { transport, session: 0, piece_bytes: 0, sequence: nonce, shard };
        let open = Header { length: piece_bytes, credit: 64, ..peer.header(peer.server_address()) };
        let reply = peer.ask(Command::Open, &[(open, &[])], 1).remove(0);
        assert_eq!(reply.status, Status::Ok);
        peer.session = reply.header.session;
        peer.piece_bytes = reply.header.length as usize;
        peer.sequence = 0;
        peer
    }

    fn server_address(&self) -> Ipv6Addr {
        EndpointAddress::of_shard(SPACE, SERVER, self.shard, 0).to_ipv6()
    }

    fn header(&self, target: Ipv6Addr) -> Header {
        let (session, sequence) = (self.session, self.sequence);
        Header { target, session, sequence, incarnation: 1, ..Header::default() }
    }

    /// Sends the datagrams of a request and waits for `count` replies.
    fn ask(&mut self, command: Command, train: &[(Header, &[u8])], count: usize) -> Vec<Reply> {
        self.send(command, train);
        self.replies(count)
    }

    pub(crate) fn send(&mut self, command: Command, train: &[(Header, &[u8])]) {
        let from = EndpointAddress::new(SPACE, CLIENT, 5).to_ipv6();
        let home = train.len() > 1;
        let heads: Vec<_> = train
            .iter()
            .map(|(header, data)| {
                let target = Fields::unpack(header.target).unwrap();
                let bits = WireCommand::request(command, home).bits();
                let to = Fields { command: bits, ..target }.to_ipv6();
                let mut head = [0; HEADER_BYTES];
                header.emit(&mut head, 0);
                seal(from, to, &mut head, data);
                (to, head)
            })
            .collect();
        let batch: Vec<_> = heads
            .iter()
            .zip(train)
            .map(|((to, head), (_, data))| Outgoing {
                source: from,
                destination: *to,
                destination_port: UDP_PORT,
                header: head,
                data,
            })
            .collect();
        assert_eq!(self.transport.transmit(&batch).unwrap(), batch.len());
    }

    pub(crate) fn replies(&mut self, count: usize) -> Vec<Reply> {
        let deadline = self.transport.now() + TIMEOUT;
        let mut replies = Vec::new();
        while replies.len() < count && self.transport.now() < deadline {
            let wait = Wait::spinning(Duration::from_micros(50), deadline);
            for number in 0..self.transport.receive(wait).unwrap() {
                let incoming = self.transport.incoming(number);
                let datagram =
                    Datagram::parse(incoming.source, incoming.destination, incoming.payload)
                        .expect("a reply is well formed");
                replies.push(Reply {
                    status: Status::from_code(datagram.from.tag).unwrap(),
                    header: datagram.header,
                    data: datagram.data.to_vec(),
                });
            }
        }
        assert_eq!(replies.len(), count);
        replies
    }

    fn next(&mut self, target: Ipv6Addr, length: usize) -> Header {
        self.sequence += 1;
        Header { length: u32::try_from(length).unwrap(), ..self.header(target) }
    }

    pub(crate) fn create(&mut self, pages: usize) -> Result<Pointer, Status> {
        let header = self.next(self.server_address(), pages);
        let reply = self.ask(Command::Create, &[(header, &[])], 1).remove(0);
        if reply.status.is_ok() {
            Ok(Pointer::from_ipv6(reply.header.target).unwrap())
        } else {
            Err(reply.status)
        }
    }

    /// Writes to the beginning of a line.
    pub(crate) fn write(&mut self, at: Pointer, data: &[u8]) -> Status {
        let header = self.next(at.to_ipv6(), data.len());
        let train: Vec<_> = self
            .offsets(data.len())
            .into_iter()
            .map(|range| {
                let offset = u16::try_from(range.start).unwrap();
                (Header { offset, ..header }, &data[range])
            })
            .collect();
        self.ask(Command::Write, &train, 1).remove(0).status
    }

    /// Reads from the beginning of a line.
    pub(crate) fn read(&mut self, at: Pointer, length: usize) -> Vec<u8> {
        let header = self.next(at.to_ipv6(), length);
        let count = self.offsets(length).len();
        let mut bytes = vec![0; length];
        for reply in self.ask(Command::Read, &[(header, &[])], count) {
            assert_eq!(reply.status, Status::Ok);
            let start = usize::from(reply.header.offset);
            bytes[start..start + reply.data.len()].copy_from_slice(&reply.data);
        }
        bytes
    }

    pub(crate) fn delete(&mut self, at: Pointer) -> Status {
        let header = self.next(at.to_ipv6(), 0);
        self.ask(Command::Delete, &[(header, &[])], 1).remove(0).status
    }

    pub(crate) fn zero(&mut self, at: Pointer, length: usize) -> Status {
        let header = self.next(at.to_ipv6(), length);
        let header = Header { flags: Flags::ZERO, ..header };
        self.ask(Command::Delete, &[(header, &[])], 1).remove(0).status
    }

    /// Leases the page at `at` for some milliseconds.
    pub(crate) fn lease(&mut self, at: Pointer, lease_remaining_ms: u16) -> Reply {
        let header = Header { lease_remaining_ms, ..self.next(at.to_ipv6(), 8) };
        self.ask(Command::Update, &[(header, &[])], 1).remove(0)
    }

    /// Begins to wait for 8 bytes of a leased page.
    pub(crate) fn wait_to_read(&mut self, at: Pointer) -> Reply {
        let header = Header { flags: Flags::QUEUED, ..self.next(at.to_ipv6(), 8) };
        self.ask(Command::Read, &[(header, &[])], 1).remove(0)
    }

    pub(crate) fn ping(&mut self) -> Status {
        let header = self.next(self.server_address(), 0);
        self.ask(Command::Ping, &[(header, b"alive?")], 1).remove(0).status
    }

    pub(crate) fn stat(&mut self) -> Usage {
        let header = self.next(self.server_address(), 0);
        Usage::parse(&self.ask(Command::Stat, &[(header, &[])], 1).remove(0).data).unwrap()
    }

    /// The pieces of an operation at the beginning of a line.
    fn offsets(&self, length: usize) -> Vec<core::ops::Range<usize>> {
        let mut ranges = Vec::new();
        let mut start = 0;
        while start < length {
            let page_end = (start / 4096 + 1) * 4096;
            let end = (start + self.piece_bytes).min(page_end).min(length);
            ranges.push(start..end);
            start = end;
        }
        ranges
    }
}

/// Creates, writes, reads back, zeroes and deletes regions of many sizes.
pub(crate) fn exercise<T: Transport>(peer: &mut Peer<T>, rounds: usize) {
    let before = peer.stat();
    for round in 0..rounds {
        let length = [1, 64, 1368, 4096, 5000, 8192, 20_000, 32_768][round % 8];
        let data: Vec<u8> = pattern(length, round);
        // Line-aligned regions of 8 pages: the first fit in an empty arena.
        let at = peer.create(8).unwrap();
        assert_eq!(at.location.offset() % 32768, 0);
        assert!(peer.read(at, 32768).iter().all(|&byte| byte == 0), "new pages are zero");
        assert_eq!(peer.write(at, &data), Status::Ok);
        assert!(peer.read(at, length) == data);
        assert_eq!(peer.zero(at, 32768), Status::Ok);
        assert!(peer.read(at, 32768).iter().all(|&byte| byte == 0));
        assert_eq!(peer.delete(at), Status::Ok);
        assert_eq!(peer.delete(at), Status::NotAllocated);
    }
    assert_eq!(peer.stat().used_pages, before.used_pages);
}

fn pattern(length: usize, round: usize) -> Vec<u8> {
    (0..length).map(|place| u8::try_from((place + round) % 251).unwrap()).collect()
}
