//! Serving allocates nothing once a session is open.

#![allow(unsafe_code, reason = "a counting allocator cannot be written without")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    net::Ipv6Addr,
};

use bluebridge_memserver::{Arena, ArenaConfig};
use bluebridge_protocol::{
    Timestamp,
    responder::{Config, Responder},
};
use bluebridge_wire::{
    Command, Datagram, EndpointAddress, Flags, Header, HeaderView, NodeId, Pointer, Space, Status,
    WireCommand, address::Fields, header::HEADER_BYTES, seal,
};

const SPACE: Space = Space(7);
const SERVER: NodeId = NodeId(9);

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    // While a thread ends its counter may be gone already.
    let _ = ALLOCATIONS.try_with(|allocations| allocations.set(allocations.get() + 1));
}

// SAFETY: every call is passed on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the pointer came from `System` with this layout.
        unsafe { System.dealloc(pointer, layout) };
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count();
        // SAFETY: the pointer came from `System` with this layout.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

struct Server {
    responder: Responder,
    arena: Arena,
    now: Timestamp,
    session: u64,
    sequence: u64,
    allocations: u64,
}

impl Server {
    /// Sends a request and returns the last reply.
    fn ask(&mut self, command: Command, target: Ipv6Addr, header: Header, data: &[u8]) -> Reply {
        let from = EndpointAddress::new(SPACE, NodeId(20), 1).to_ipv6();
        let bits = WireCommand::request(command, false).bits();
        let to = Fields { command: bits, ..Fields::unpack(target).unwrap() }.to_ipv6();
        let mut bytes = vec![0; HEADER_BYTES];
        let (session, sequence) = match header.session {
            0 => (self.session, self.sequence),
            _ => (0, header.sequence),
        };
        Header { target, incarnation: 1, session, sequence, ..header }.emit(&mut bytes, 0);
        seal(from, to, &mut bytes, data);
        bytes.extend_from_slice(data);

        let before = ALLOCATIONS.get();
        let datagram = Datagram::parse(from, to, &bytes).unwrap();
        while self.responder.handle_datagram(self.now, 1, &datagram, &mut self.arena).is_err() {
            self.responder.release(usize::MAX);
        }
        self.responder.handle_timeout(self.now, &mut self.arena).ok();
        self.allocations += ALLOCATIONS.get() - before;

        let mut last = None;
        for reply in self.responder.transmits(&self.arena) {
            let header = HeaderView::new(reply.head).unwrap().header();
            let status = Status::from_code(Fields::unpack(reply.source).unwrap().tag).unwrap();
            last = Some(Reply { status, header });
        }
        self.responder.release(usize::MAX);
        last.unwrap_or(Reply { status: Status::Incomplete, header: Header::default() })
    }

    fn next(&mut self, command: Command, target: Ipv6Addr, header: Header, data: &[u8]) -> Reply {
        self.sequence += 1;
        self.ask(command, target, header, data)
    }
}

struct Reply {
    status: Status,
    header: Header,
}

#[test]
fn no_request_allocates_after_open() {
    let config = Config::new(SPACE, SERVER, 1, 1);
    let mut server = Server {
        responder: Responder::new(&config).unwrap(),
        arena: Arena::on_heap(&ArenaConfig::default(), 1024),
        now: Timestamp::from_nanos(1),
        session: 0,
        sequence: 99,
        allocations: 0,
    };
    let own = EndpointAddress::of_shard(SPACE, SERVER, 0, 0).to_ipv6();
    let anywhere = EndpointAddress::of_shard(SPACE, NodeId::ANY, 0, 0).to_ipv6();
    let length = |length| Header { length, ..Header::default() };
    let open = Header { credit: 64, ..length(1024) };
    server.session = server.ask(Command::Open, own, open, &[]).header.session;
    server.sequence = 0;
    assert!(server.allocations > 0, "OPEN allocates a window, so the counter works");
    // The first CREATE of a space allocates its entry in the arena's quotas.
    server.next(Command::Create, own, length(1), &[]);
    server.allocations = 0;

    for round in 0..300 {
        let created = server.next(Command::Create, own, length(8), &[]);
        assert_eq!(created.status, Status::Ok);
        let at = created.header.target;
        assert!(Pointer::from_ipv6(at).is_ok());
        server.sequence += 1;
        for piece in 0..4_u16 {
            let header = Header { offset: piece * 1024, ..length(4096) };
            let reply = server.ask(Command::Write, at, header, &[7; 1024]);
            assert_eq!(reply.status.is_ok(), piece == 3);
        }
        let alloc = server.next(Command::AllocWrite, own, length(5), b"hello");
        assert_eq!(alloc.status, Status::Ok);
        let steps = [
            (Command::Read, length(4096), &b""[..]),
            (Command::FetchAdd, length(8), &[1; 8]),
            (Command::CompareSwap, length(8), &[1; 16]),
            (Command::Stat, length(0), b""),
            (Command::Ping, length(0), b"alive?"),
            (Command::Delete, Header { flags: Flags::ZERO, ..length(4096) }, b""),
            (Command::Confirm, length(8), b""),
            (Command::Delete, length(8), b""),
        ];
        for (command, header, data) in steps {
            assert_eq!(server.next(command, at, header, data).status, Status::Ok, "{command}");
        }
        assert_ne!(server.next(Command::Read, at, length(8), b"").status, Status::Ok);
        let gone = alloc.header.target;
        assert_eq!(server.next(Command::Delete, gone, length(1), b"").status, Status::Ok);
        // An incomplete train, and pages that are never confirmed.
        let kept = server.next(Command::Create, own, length(2), &[]).header.target;
        server.next(Command::Write, kept, length(4096), &[1; 1024]);
        assert_eq!(server.next(Command::Delete, kept, length(0), &[]).status, Status::Ok);
        let nonce = Header { session: 1, sequence: 5000 + round, ..length(2) };
        assert_eq!(server.ask(Command::Create, anywhere, nonce, &[]).status, Status::Ok);
        server.now = server.now + core::time::Duration::from_millis(30);
    }
    assert_eq!(server.allocations, 0);
}
