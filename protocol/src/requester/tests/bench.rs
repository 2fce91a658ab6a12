//! A requester with its clock, its caller's memory, and a server simulated by the test.

use core::{net::Ipv6Addr, time::Duration};
use std::collections::HashMap;

use bluebridge_wire::{
    ArenaGeneration, Command, Datagram, Flags, Header, Location, NodeId, Pointer, ReplySource,
    Space, Status, Tag, header::HEADER_BYTES, seal,
};

use super::super::{
    Buffers, Completion, Config, Counters, Event, Failure, Operation, OperationId, Origin, Output,
    Requester, Server, StartError,
};
use crate::Timestamp;

pub(super) const SPACE: Space = Space(7);
pub(super) const CLIENT: NodeId = NodeId(1000);
pub(super) const HOME: NodeId = NodeId(3);
pub(super) const OTHER: NodeId = NodeId(4);
pub(super) const SERVER: Server = Server { node: HOME, shard: 0 };
pub(super) const SESSION: u64 = 0x5e55_1011;
pub(super) const SERVER_INCARNATION: u32 = 21;
pub(super) const PIECE: u16 = 1400;

/// The caller's memory by token.
#[derive(Default)]
pub(super) struct Memory(pub(super) HashMap<u64, Vec<u8>>);

impl Buffers for Memory {
    fn outgoing(&self, token: u64) -> &[u8] {
        self.0.get(&token).map_or(&[], Vec::as_slice)
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        self.0.entry(token).or_default()
    }
}

/// A parsed request.
#[derive(Clone, Debug)]
pub(super) struct Sent {
    pub(super) source: Ipv6Addr,
    pub(super) destination: Ipv6Addr,
    pub(super) node: NodeId,
    pub(super) command: Command,
    pub(super) home: bool,
    pub(super) header: Header,
    pub(super) data: Vec<u8>,
    pub(super) origin: Origin,
}

impl Sent {
    pub(super) fn attempt(&self) -> u8 {
        self.header.flags.attempt()
    }
}

/// A reply that can still be changed before it is sealed.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) from: ReplySource,
    pub(super) to: Ipv6Addr,
    pub(super) header: Header,
    pub(super) options: Vec<u8>,
    pub(super) data: Vec<u8>,
}

impl Reply {
    /// The reply of the contacted server to a request.
    pub(super) fn to(sent: &Sent, status: Status) -> Self {
        let request = sent.header;
        let location = bluebridge_wire::address::Fields::unpack(sent.destination);
        Self {
            from: ReplySource {
                space: SPACE,
                node: sent.node,
                command: sent.command,
                contended: false,
                status,
                location_bits: location.expect("a fabric address").location,
            },
            to: sent.source,
            header: Header {
                flags: Flags::default().with_attempt(request.flags.attempt()),
                node: 0,
                session: request.session,
                incarnation: SERVER_INCARNATION,
                sequence: request.sequence,
                credit: 64,
                length: request.length,
                target: request.target,
                ..Header::default()
            },
            options: Vec::new(),
            data: Vec::new(),
        }
    }

    pub(super) fn with(mut self, change: impl FnOnce(&mut Header)) -> Self {
        change(&mut self.header);
        self
    }

    pub(super) fn by_node(mut self, node: NodeId) -> Self {
        self.from.node = node;
        self
    }

    pub(super) fn with_data(mut self, data: &[u8]) -> Self {
        self.data = data.to_vec();
        self
    }

    /// The piece of the reply to a READ that begins at `offset`.
    pub(super) fn piece(sent: &Sent, offset: usize, version: u64, data: &[u8]) -> Self {
        Self::to(sent, Status::Ok).with_data(data).with(|header| {
            header.offset = u16::try_from(offset).expect("inside of a line");
            header.page_version = version;
        })
    }
}

pub(super) struct Bench {
    pub(super) now: Timestamp,
    pub(super) requester: Requester,
    pub(super) memory: Memory,
    /// Whether servers accept requests for memory at their endpoint addresses.
    pub(super) at_endpoint: bool,
}

impl Bench {
    pub(super) fn new() -> Self {
        Self::with(|_| {})
    }

    pub(super) fn with(change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(SPACE, CLIENT, 5, 42);
        config.selector = 9;
        config.piece_bytes = PIECE;
        config.operation_count = 32;
        config.server_count = 4;
        change(&mut config);
        Self {
            now: Timestamp::from_nanos(1_000_000_000),
            requester: Requester::new(config),
            memory: Memory::default(),
            at_endpoint: false,
        }
    }

    /// A bench whose session with [`SERVER`] is open.
    pub(super) fn open() -> Self {
        let mut bench = Self::new();
        bench.open_session(SERVER, SESSION);
        bench
    }

    /// The same with a server that accepts requests for memory at its endpoint address.
    pub(super) fn open_at_endpoint() -> Self {
        let mut bench = Self { at_endpoint: true, ..Self::new() };
        bench.open_session(SERVER, SESSION);
        bench
    }

    pub(super) fn open_session(&mut self, server: Server, session: u64) {
        self.start(Operation::Ping { server, length: 0 }, u64::MAX);
        let open = self.sent_one();
        assert_eq!(open.command, Command::Open);
        self.accept(&open, session);
        let ping = self.sent_one();
        self.reply(&Reply::to(&ping, Status::Ok));
        assert_eq!(self.completed().result, Ok(Output::Done));
    }

    /// Replies to OPEN.
    pub(super) fn accept(&mut self, open: &Sent, session: u64) {
        let flag = if self.at_endpoint { Flags::AT_ENDPOINT } else { Flags::default() };
        let reply = Reply::to(open, Status::Ok).with(|header| {
            header.flags = header.flags.with(flag);
            header.session = session;
            header.length = u32::from(PIECE);
            header.detail = u32::from(generation().number());
        });
        self.reply(&reply);
    }

    pub(super) fn start(&mut self, operation: Operation, token: u64) -> OperationId {
        self.try_start(operation, token).expect("it can be started")
    }

    pub(super) fn try_start(
        &mut self,
        operation: Operation,
        token: u64,
    ) -> Result<OperationId, StartError> {
        self.requester.start(self.now, operation, token)
    }

    /// A READ into zeroed memory.
    pub(super) fn read(&mut self, offset: u64, length: u32, token: u64) -> OperationId {
        self.memory.0.insert(token, vec![0; length as usize]);
        self.start(Operation::Read { pointer: pointer(offset), length }, token)
    }

    /// A WRITE of [`pattern`].
    pub(super) fn write(&mut self, offset: u64, length: u32, token: u64) -> OperationId {
        self.memory.0.insert(token, pattern(length as usize));
        self.start(Operation::Write { pointer: pointer(offset), length }, token)
    }

    /// All datagrams to be sent now, checked as a server would.
    pub(super) fn sent(&mut self) -> Vec<Sent> {
        let mut all = Vec::new();
        while let Some(transmit) = self.requester.poll_transmit(self.now, &self.memory) {
            let payload = [transmit.head(), transmit.data].concat();
            let (source, destination) = (transmit.source, transmit.destination);
            let datagram = Datagram::parse(source, destination, &payload).expect("well formed");
            assert!(!datagram.is_reply());
            assert_eq!(datagram.header.incarnation, 5);
            assert_eq!((datagram.from.space, datagram.from.node), (SPACE, CLIENT));
            all.push(Sent {
                source,
                destination,
                node: datagram.to.node,
                command: datagram.command().command().expect("known"),
                home: datagram.command().is_home(),
                header: datagram.header,
                data: datagram.data.to_vec(),
                origin: transmit.origin,
            });
            assert!(all.len() < 1000, "transmission does not end");
        }
        all
    }

    pub(super) fn sent_one(&mut self) -> Sent {
        let mut sent = self.sent();
        assert_eq!(sent.len(), 1, "{sent:?}");
        sent.remove(0)
    }

    pub(super) fn sent_nothing(&mut self) {
        let sent = self.sent();
        assert!(sent.is_empty(), "{sent:?}");
    }

    pub(super) fn reply(&mut self, reply: &Reply) {
        let mut head = vec![0; HEADER_BYTES + reply.options.len()];
        reply.header.emit(&mut head, reply.options.len());
        head[HEADER_BYTES..].copy_from_slice(&reply.options);
        let source = reply.from.to_ipv6();
        seal(source, reply.to, &mut head, &reply.data);
        let payload = [head, reply.data.clone()].concat();
        let datagram = Datagram::parse(source, reply.to, &payload).expect("well formed");
        self.requester.handle_datagram(self.now, &datagram, &mut self.memory);
    }

    pub(super) fn completed(&mut self) -> Completion {
        self.requester.poll_completion().expect("an operation ended")
    }

    pub(super) fn completed_nothing(&mut self) {
        assert_eq!(self.requester.poll_completion(), None);
    }

    pub(super) fn failure(&mut self) -> Failure {
        self.completed().result.expect_err("it failed")
    }

    pub(super) fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.requester.handle_timeout(self.now);
    }

    /// Lets time pass until the next timer, which must run.
    pub(super) fn pass_to_timer(&mut self) {
        let timer = self.requester.poll_timeout().expect("a timer runs");
        self.now = self.now.max(timer);
        self.requester.handle_timeout(self.now);
    }

    /// Lets time pass until something is to be sent.
    pub(super) fn pass_to_sent(&mut self) -> Vec<Sent> {
        for _ in 0..100 {
            let sent = self.sent();
            if !sent.is_empty() {
                return sent;
            }
            self.pass_to_timer();
        }
        panic!("no datagram is sent");
    }

    /// Lets time pass without replies until an operation ends.
    pub(super) fn pass_to_end(&mut self) -> Completion {
        for _ in 0..1000 {
            self.sent();
            if let Some(completion) = self.requester.poll_completion() {
                return completion;
            }
            self.pass_to_timer();
        }
        panic!("no operation ends");
    }

    pub(super) fn count(&self, event: Event) -> u64 {
        self.requester.counters().of(event)
    }

    /// All pieces of a READ of whole pages.
    pub(super) fn reply_with_pages(&mut self, request: &Sent) {
        let length = usize::try_from(request.header.length).expect("a line at most");
        for page in (0..length).step_by(4096) {
            for start in (0..4096).step_by(PIECE.into()) {
                let bytes = usize::from(PIECE).min(4096 - start);
                self.reply(&Reply::piece(request, page + start, 1, &pattern(bytes)));
            }
        }
    }

    /// No completion or datagram is left; returns the counters.
    pub(super) fn end(mut self) -> Counters {
        self.completed_nothing();
        assert_eq!(self.requester.operation_count(), 0);
        assert_eq!(self.requester.poll_timeout(), None);
        assert_eq!(self.requester.outstanding_pages, 0);
        self.requester.counters().clone()
    }
}

pub(super) fn generation() -> ArenaGeneration {
    ArenaGeneration::new(2).expect("15 bits")
}

pub(super) fn pointer(offset: u64) -> Pointer {
    let location = Location::new(generation(), 0x10_0000 + offset).expect("48 bits");
    Pointer { space: SPACE, node: HOME, tag: Tag(77), location }
}

/// Bytes that depend on their position.
pub(super) fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|at| u8::try_from(at % 251).expect("small") ^ 0x5a).collect()
}
