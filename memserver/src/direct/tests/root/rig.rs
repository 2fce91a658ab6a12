//! A shard with a responder, an arena in a map, and the program.

use std::{fs, iter, net::Ipv6Addr, ops::ControlFlow, path::PathBuf};

use aya::{
    Ebpf,
    programs::{TestRun as _, TestRunOptions},
};
use bluebridge_protocol::{
    Timestamp,
    direct::SharedSession,
    responder::{Config, Responder},
    store::{Grant, PageStore},
};
use bluebridge_testkit::{UdpFrame, require_root};
use bluebridge_wire::{
    ArenaGeneration, Command, Datagram, EndpointAddress, Flags, Header, NodeId, Space, UDP_PORT,
    address::PAGE_BYTES,
};
use rustix::time::{ClockId, clock_gettime};

use super::frames::{MAC, frame_of, head, header_of, parts, pointer};
use crate::{
    Arena, ArenaConfig, ArenaFile, Claim,
    direct::{
        DirectMemory, Places, ReadCounts,
        program::{classifier, load},
    },
    kept::{Holder, Listed},
};

pub(super) const SPACE: Space = Space(7);
pub(super) const OTHER: Space = Space(8);
pub(super) const SERVER: NodeId = NodeId(9);
pub(super) const CLIENT: NodeId = NodeId(20);
pub(super) const PORT: u16 = 40_001;
pub(super) const PAGES: u64 = 64;
pub(super) const SHARDS: u16 = 2;
/// Return values of programs (linux/bpf.h).
pub(super) const NEXT: u32 = u32::MAX;
pub(super) const REDIRECT: u32 = 7;

pub(super) fn now() -> Timestamp {
    let time = clock_gettime(ClockId::Monotonic);
    let [seconds, nanos] = [time.tv_sec, time.tv_nsec].map(|part| u64::try_from(part).unwrap_or(0));
    Timestamp::from_nanos(seconds * 1_000_000_000 + nanos)
}

/// An arena's file that is removed at the end, with its map.
pub(super) struct File(pub(super) PathBuf);

impl File {
    pub(super) fn new(name: &str) -> Self {
        Self(format!("/dev/shm/bluebridge-test-{}-{name}", std::process::id()).into())
    }

    pub(super) fn options(&self) -> ArenaFile {
        ArenaFile {
            path: self.0.clone(),
            bytes: PAGES * PAGE_BYTES as u64 * u64::from(SHARDS),
            shard_count: SHARDS,
            spaces: vec![SPACE, OTHER],
            claim: Claim::Prefault,
            is_fresh: false,
            is_direct: true,
        }
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = Listed::drop_file(&self.0);
        let _ = fs::remove_file(&self.0);
    }
}

/// A server's second shard, without a carrier, and the program.
pub(super) struct Rig {
    pub(super) responder: Responder,
    pub(super) arena: Arena,
    pub(super) program: Ebpf,
    pub(super) memory: DirectMemory,
    pub(super) session: u64,
    pub(super) sequence: u64,
    _file: File,
}

pub(super) const SHARD: u8 = 1;

impl Rig {
    pub(super) fn new(name: &str) -> Self {
        require_root();
        let file = File::new(name);
        let kept = file.options().open(|_, _| ControlFlow::Continue(())).expect("a new arena");
        let generation = ArenaGeneration::new(5).expect("small");
        let holder = Holder { node: SERVER, generation, token: [7; 16] };
        let mut reserved = kept.assign(holder).expect("it is new");
        let memory = reserved.direct.expect("it is direct");
        let config = ArenaConfig {
            generation,
            last_generation: generation.saturating_add(3),
            shard: SHARD,
            ..ArenaConfig::default()
        };
        let part = reserved.parts.remove(usize::from(SHARD));
        let mut arena = Arena::open(&config, part).expect("it is new");
        let config = Config {
            shard: SHARD,
            shard_count: SHARDS,
            spaces: vec![SPACE, OTHER],
            ..Config::new(SPACE, SERVER, 3, 11)
        };
        let mut responder = Responder::new(&config).expect("the usual");
        responder.begin(now(), &mut arena);
        let places = Places { node: SERVER.0, incarnation: 3, mtu: 9000, ..memory.places };
        let program = load(&places, Some(&memory)).expect("the kernel takes it");
        let mut rig =
            Self { responder, arena, program, memory, session: 0, sequence: 0, _file: file };
        rig.open();
        rig
    }

    pub(super) fn open(&mut self) {
        self.session = self.open_as(SPACE, 4096);
    }

    /// Opens a session of a space, with pieces of that size.
    pub(super) fn open_as(&mut self, space: Space, piece_bytes: u32) -> u64 {
        let (sequence, length) = (77 + u64::from(piece_bytes), piece_bytes);
        let header = Header { sequence, length, credit: 64, ..Header::default() };
        let to = EndpointAddress::of_shard(space, SERVER, SHARD, 0).to_ipv6();
        let frame = frame_of(space, CLIENT, Command::Open.code(), (to, to), &header, &[]);
        let answer = self.respond(&frame).expect("an answer");
        let session = header_of(&answer).session;
        assert_ne!(session, 0);
        session
    }

    /// The session's slot, as the program sees it.
    pub(super) fn shared(&self) -> &SharedSession {
        let slot = usize::try_from(self.session & 0xffff).expect("16 bits");
        &self.arena.shared().sessions[slot]
    }

    pub(super) fn create(&mut self, pages: u32) -> Grant {
        let grant = self.arena.create(SPACE, pages).expect("room");
        self.arena.complete(grant.location);
        grant
    }

    pub(super) fn write(&mut self, grant: Grant, data: &[u8]) {
        self.arena.write(grant.location.page(), 0, data);
    }

    /// A READ of some bytes with the next number.
    pub(super) fn read(&mut self, grant: Grant, start: u64, length: u32) -> (Ipv6Addr, Header) {
        self.sequence += 1;
        let target = pointer(grant, start);
        let header = Header {
            flags: Flags::QUEUED,
            session: self.session,
            sequence: self.sequence,
            length,
            detail: 9,
            ..Header::default()
        };
        (target, header)
    }

    /// What the responder sends first; as a frame.
    pub(super) fn respond(&mut self, frame: &[u8]) -> Option<Vec<u8>> {
        self.respond_all(frame).into_iter().next()
    }

    /// All that the responder sends, as frames.
    pub(super) fn respond_all(&mut self, frame: &[u8]) -> Vec<Vec<u8>> {
        let (source, destination, payload) = parts(frame);
        let Ok(datagram) = Datagram::parse(source, destination, payload) else { return Vec::new() };
        let handled = self.responder.handle_datagram(now(), PORT, &datagram, &mut self.arena);
        handled.expect("nothing waits");
        iter::from_fn(|| self.next_reply()).collect()
    }

    pub(super) fn next_reply(&mut self) -> Option<Vec<u8>> {
        let reply = self.responder.poll_transmit(&self.arena)?;
        let payload = [reply.head, reply.data].concat();
        let bytes = UdpFrame {
            source_mac: [0; 6],
            destination_mac: MAC,
            source: reply.source,
            destination: reply.destination,
            source_port: UDP_PORT,
            destination_port: reply.destination_port,
            payload: &payload,
        };
        Some(bytes.bytes())
    }

    /// Runs the program: its return value, and the frame afterwards.
    pub(super) fn run(&mut self, frame: &[u8]) -> (u32, Vec<u8>) {
        let mut out = vec![0; 10_000];
        let options = TestRunOptions {
            data_in: Some(frame),
            data_out: Some(&mut out),
            ..TestRunOptions::new()
        };
        let program = classifier(&mut self.program).expect("it is there");
        let result = program.test_run(options).expect("it runs");
        out.truncate(result.data_size_out as usize);
        (result.return_value, out)
    }

    /// The program answers as the responder would.
    #[track_caller]
    pub(super) fn assert_answered(&mut self, frame: &[u8]) {
        let (action, answer) = self.run(frame);
        assert_eq!(action, REDIRECT, "it is answered: {:?}", self.memory.counters.counts());
        let wanted = self.respond(frame).expect("the responder answers");
        assert!(
            answer == wanted,
            "program:\n{:02x?}\nresponder:\n{:02x?}",
            head(&answer),
            head(&wanted)
        );
    }

    /// The program passes the frame on, unchanged, and counts it under a reason.
    #[track_caller]
    pub(super) fn assert_passed(&mut self, frame: &[u8], reason: fn(&ReadCounts) -> u64) {
        let before = reason(&self.memory.counters.counts());
        let (action, after) = self.run(frame);
        assert_eq!(action, NEXT, "it is passed on");
        assert!(after == frame, "unchanged");
        assert_eq!(reason(&self.memory.counters.counts()), before + 1);
    }
}
