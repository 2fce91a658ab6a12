//! The program against the responder: what it answers equals what the responder answers, and what it
//! passes on is unchanged. The kernel runs it on frames without an interface (`BPF_PROG_TEST_RUN`).

use std::{
    collections::BTreeSet,
    fs, hint, iter,
    net::Ipv6Addr,
    num::NonZeroU32,
    ops::ControlFlow,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use aya::{
    Ebpf,
    programs::{TestRun as _, TestRunOptions},
};
use bluebridge_protocol::{
    Timestamp,
    direct::SharedSession,
    responder::{Config, Responder},
    store::{Access, Grant, PageStore},
};
use bluebridge_testkit::{UdpFrame, ip, namespace::in_thread, require_root};
use bluebridge_wire::{
    ArenaGeneration, Command, Datagram, EndpointAddress, Flags, Header, HeaderView, Location,
    NodeId, Pointer, Space, Status, UDP_PORT,
    address::{Fields, LINE_PAGES, PAGE_BYTES},
    header::HEADER_BYTES,
    seal,
};
use rand::{Rng, RngCore, SeedableRng, rngs::StdRng};
use rustix::{
    net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with},
    time::{ClockId, clock_gettime},
};

use super::super::{
    map,
    program::{classifier, load},
    *,
};
use crate::{
    Arena, ArenaConfig, ArenaFile, Claim,
    kept::{Holder, Listed},
    memory::Windows,
};

const SPACE: Space = Space(7);
const OTHER: Space = Space(8);
const SERVER: NodeId = NodeId(9);
const CLIENT: NodeId = NodeId(20);
const PORT: u16 = 40_001;
const PAGES: u64 = 64;
const SHARDS: u16 = 2;
/// Return values of programs (linux/bpf.h).
const NEXT: u32 = u32::MAX;
const REDIRECT: u32 = 7;
const ETHERNET_BYTES: usize = 14;
const UDP_END: usize = ETHERNET_BYTES + 40 + 8;

fn now() -> Timestamp {
    let time = clock_gettime(ClockId::Monotonic);
    let [seconds, nanos] = [time.tv_sec, time.tv_nsec].map(|part| u64::try_from(part).unwrap_or(0));
    Timestamp::from_nanos(seconds * 1_000_000_000 + nanos)
}

/// An arena's file that is removed at the end, with its map.
struct File(PathBuf);

impl File {
    fn new(name: &str) -> Self {
        Self(format!("/dev/shm/bluebridge-test-{}-{name}", std::process::id()).into())
    }

    fn options(&self) -> ArenaFile {
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
struct Rig {
    responder: Responder,
    arena: Arena,
    program: Ebpf,
    memory: DirectMemory,
    session: u64,
    sequence: u64,
    _file: File,
}

const SHARD: u8 = 1;

impl Rig {
    fn new(name: &str) -> Self {
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
        let arena = Arena::open(&config, part).expect("it is new");
        let config = Config {
            shard: SHARD,
            shard_count: SHARDS,
            spaces: vec![SPACE, OTHER],
            ..Config::new(SPACE, SERVER, 3, 11)
        };
        let mut responder = Responder::new(&config).expect("the usual");
        responder.begin(now(), &arena);
        let places = Places { node: SERVER.0, incarnation: 3, mtu: 9000, ..memory.places };
        let program = load(&places, Some(&memory.map)).expect("the kernel takes it");
        let mut rig =
            Self { responder, arena, program, memory, session: 0, sequence: 0, _file: file };
        rig.open();
        rig
    }

    fn open(&mut self) {
        self.session = self.open_as(SPACE, 4096);
    }

    /// Opens a session of a space, with pieces of that size.
    fn open_as(&mut self, space: Space, piece_bytes: u32) -> u64 {
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
    fn shared(&self) -> &SharedSession {
        let slot = usize::try_from(self.session & 0xffff).expect("16 bits");
        &self.arena.shared().sessions[slot]
    }

    fn create(&mut self, pages: u32) -> Grant {
        let grant = self.arena.create(SPACE, pages).expect("room");
        self.arena.complete(grant.location);
        grant
    }

    fn write(&mut self, grant: Grant, data: &[u8]) {
        self.arena.write(grant.location.page(), 0, data);
    }

    /// A READ of some bytes with the next number.
    fn read(&mut self, grant: Grant, start: u64, length: u32) -> (Ipv6Addr, Header) {
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
    fn respond(&mut self, frame: &[u8]) -> Option<Vec<u8>> {
        self.respond_all(frame).into_iter().next()
    }

    /// All that the responder sends, as frames.
    fn respond_all(&mut self, frame: &[u8]) -> Vec<Vec<u8>> {
        let (source, destination, payload) = parts(frame);
        let Ok(datagram) = Datagram::parse(source, destination, payload) else { return Vec::new() };
        let handled = self.responder.handle_datagram(now(), PORT, &datagram, &mut self.arena);
        handled.expect("nothing waits");
        iter::from_fn(|| self.next_reply()).collect()
    }

    fn next_reply(&mut self) -> Option<Vec<u8>> {
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
    fn run(&mut self, frame: &[u8]) -> (u32, Vec<u8>) {
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
    fn assert_answered(&mut self, frame: &[u8]) {
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
    fn assert_passed(&mut self, frame: &[u8], reason: fn(&ReadCounts) -> u64) {
        let before = reason(&self.memory.counters.counts());
        let (action, after) = self.run(frame);
        assert_eq!(action, NEXT, "it is passed on");
        assert!(after == frame, "unchanged");
        assert_eq!(reason(&self.memory.counters.counts()), before + 1);
    }
}

fn head(frame: &[u8]) -> &[u8] {
    &frame[..frame.len().min(180)]
}

/// The client's; that of the server is the test interface's, zero.
const MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

fn pointer(grant: Grant, start: u64) -> Ipv6Addr {
    let location = grant.location.bits() + start;
    Fields { space: SPACE, node: SERVER, command: 0, tag: grant.tag.0, location }.to_ipv6()
}

fn frame(command: Command, target: Ipv6Addr, header: &Header, data: &[u8]) -> Vec<u8> {
    frame_to(command.code(), target, target, header, data)
}

fn frame_to(code: u8, to: Ipv6Addr, target: Ipv6Addr, header: &Header, data: &[u8]) -> Vec<u8> {
    frame_of(SPACE, CLIENT, code, (to, target), header, data)
}

/// A frame of a node in a space; `places` are its destination and its target.
fn frame_of(
    space: Space,
    node: NodeId,
    code: u8,
    (to, target): (Ipv6Addr, Ipv6Addr),
    header: &Header,
    data: &[u8],
) -> Vec<u8> {
    let mut to = Fields::unpack(to).expect("in the fabric");
    to.command = code;
    let (source, destination) = (EndpointAddress::new(space, node, 1).to_ipv6(), to.to_ipv6());
    let mut bytes = vec![0; HEADER_BYTES];
    Header { target, incarnation: 1, ..*header }.emit(&mut bytes, 0);
    seal(source, destination, &mut bytes, data);
    bytes.extend_from_slice(data);
    udp_frame(source, destination, &bytes)
}

fn udp_frame(source: Ipv6Addr, destination: Ipv6Addr, payload: &[u8]) -> Vec<u8> {
    UdpFrame {
        source_mac: MAC,
        destination_mac: [0; 6],
        source,
        destination,
        source_port: PORT,
        destination_port: UDP_PORT,
        payload,
    }
    .bytes()
}

fn parts(frame: &[u8]) -> (Ipv6Addr, Ipv6Addr, &[u8]) {
    let address = |from: usize| {
        Ipv6Addr::from(<[u8; 16]>::try_from(&frame[from..from + 16]).expect("16 bytes"))
    };
    (address(ETHERNET_BYTES + 8), address(ETHERNET_BYTES + 24), &frame[UDP_END..])
}

fn header_of(frame: &[u8]) -> Header {
    HeaderView::new(&frame[UDP_END..]).expect("a header").header()
}

#[test]
fn what_the_kernel_answers_is_what_the_responder_answers() {
    let mut rig = Rig::new("direct-answers");
    let mut random = StdRng::seed_from_u64(1);
    let grants = [1, 3, 8].map(|pages| rig.create(pages));
    for grant in grants {
        let mut data = vec![0; PAGE_BYTES];
        random.fill_bytes(&mut data);
        rig.write(grant, &data);
    }
    for round in 0..500 {
        let grant = grants[random.random_range(0..grants.len())];
        let length = match random.random_range(0..4) {
            0 => 4096,
            1 => 64,
            _ => random.random_range(1..=4096_u32),
        };
        let start = random.random_range(0..=4096 - u64::from(length));
        let (target, header) = rig.read(grant, start, length);
        let frame = frame(Command::Read, target, &header, &[]);
        rig.assert_answered(&frame);
        if round % 7 == 0 {
            let mut data = vec![0; random.random_range(1..=64)];
            random.fill_bytes(&mut data);
            let access =
                Access { location: grant.location, length_bytes: 64, tag: grant.tag, space: SPACE };
            rig.arena.check(access).expect("its own");
            rig.arena.write(grant.location.page(), random.random_range(0..4000), &data);
        }
    }
    assert!(rig.memory.counters.counts().answered >= 500);
}

/// What arrives at the loopback interface, where programs that run without an interface send.
struct Clones(OwnedFd);

impl Clones {
    /// In a network namespace of its own.
    fn new() -> Self {
        ip("link set lo mtu 9000 up");
        let every_ipv6 = NonZeroU32::new(u32::from(0x86dd_u16.to_be())).map(Protocol::from_raw);
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, every_ipv6);
        Self(socket.expect("the namespace is ours"))
    }

    fn take(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; 10_000];
        let (bytes, _) = recv(&self.0, &mut frame[..], RecvFlags::empty()).ok()?;
        frame.truncate(bytes);
        Some(frame)
    }

    /// The next `count`; fewer if no more arrive.
    fn collect(&self, count: usize) -> Vec<Vec<u8>> {
        let until = Instant::now() + Duration::from_secs(2);
        let mut frames = Vec::new();
        while frames.len() < count && Instant::now() < until {
            frames.extend(self.take());
        }
        frames
    }
}

/// The first page of an allocation of several lines that begins a line.
fn first_of_line(grant: Grant) -> u64 {
    let pages = LINE_PAGES as u64;
    grant.location.page().next_multiple_of(pages) - grant.location.page()
}

/// A READ of pages, counted from the allocation's first.
fn line_read(rig: &mut Rig, grant: Grant, first: u64, pages: u32) -> Vec<u8> {
    let (target, header) = rig.read(grant, first * PAGE_BYTES as u64, pages << 12);
    frame_to(Command::Read.code() | HOME, target, target, &header, &[])
}

/// No redirect is to catch the request (`read.bpf.c`).
const HOME: u8 = 0x40;

#[test]
fn whole_pages_of_a_line_are_answered_as_the_responder_answers() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-lines"), Clones::new());
        let grant = rig.create(24);
        let start = first_of_line(grant);
        let mut random = StdRng::seed_from_u64(5);
        // One is not written: zeros.
        for page in (0..16).filter(|page| *page != 3) {
            let mut data = vec![0; PAGE_BYTES];
            random.fill_bytes(&mut data);
            rig.arena.write(grant.location.page() + page, 0, &data);
        }
        for round in 0..100 {
            let pages = random.random_range(2..=8_u32);
            let first = start + random.random_range(0..=8 - u64::from(pages));
            let read = line_read(&mut rig, grant, first, pages);
            let (action, last) = rig.run(&read);
            assert_eq!(action, REDIRECT, "{pages} pages: {:?}", rig.memory.counters.counts());
            let mut answers = clones.collect(pages as usize - 1);
            answers.push(last);
            let wanted = rig.respond_all(&read);
            assert_eq!(answers.len(), wanted.len(), "{pages} pages");
            for (number, (answer, wanted)) in answers.iter().zip(&wanted).enumerate() {
                assert!(
                    answer == wanted,
                    "page {number} of {pages} in round {round}, program:\n{:02x?}\nresponder:\n{:02x?}",
                    head(answer),
                    head(wanted)
                );
            }
            if round % 3 == 0 {
                let page = grant.location.page() + first;
                rig.arena.write(page, random.random_range(0..4000), &[1, 2, 3]);
            }
        }
        assert_eq!(rig.memory.counters.counts().answered, 100);
        assert_eq!(clones.take(), None, "nothing else was sent");
    });
}

#[test]
fn lines_that_may_not_be_read_as_a_whole_are_for_the_server() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-part-lines"), Clones::new());
        let form = |counts: &ReadCounts| counts.passed_form;
        let grant = rig.create(24);
        let start = first_of_line(grant);
        for page in 0..24 {
            rig.arena.write(grant.location.page() + page, 0, &[7; PAGE_BYTES]);
        }
        // Over the line's end, parts of pages, and one page with the home bit.
        let beyond = line_read(&mut rig, grant, start + 5, 4);
        rig.assert_passed(&beyond, form);
        let page_bytes = PAGE_BYTES as u64;
        for (from, length) in [(0, 8191), (1, 8192), (0, 8193), (64, 4096), (0, 4096), (0, 64)] {
            let (target, header) = rig.read(grant, start * page_bytes + from, length);
            let code = Command::Read.code() | HOME;
            let read = frame_to(code, target, target, &header, &[]);
            rig.assert_passed(&read, form);
        }
        // Any page of it is leased, changes, or was freed.
        for bad in 0..4 {
            let page = grant.location.page() + start + bad;
            rig.arena.set_leased(page, true);
            let read = line_read(&mut rig, grant, start, 4);
            rig.assert_passed(&read, |counts| counts.passed_page);
            rig.arena.set_leased(page, false);
        }
        let read = line_read(&mut rig, grant, start, 4);
        assert_eq!(rig.run(&read).0, REDIRECT, "nothing is wrong any more");
        assert_eq!(clones.collect(3).len(), 3);
        rig.arena.stop_in_change(grant.location.page() + start + 2);
        let read = line_read(&mut rig, grant, start, 4);
        rig.assert_passed(&read, |counts| counts.passed_change);
        assert_eq!(clones.take(), None, "nothing was sent before");
    });
}

#[test]
fn lines_beyond_a_piece_a_link_or_a_session_are_for_the_server() {
    in_thread(|| {
        let mut rig = Rig::new("direct-other-lines");
        let grant = rig.create(24);
        let start = first_of_line(grant);
        for page in 0..24 {
            rig.arena.write(grant.location.page() + page, 0, &[7; PAGE_BYTES]);
        }
        // The interface is down, so its queue drops the clones: that is what queues do.
        let read = line_read(&mut rig, grant, start, 8);
        assert_eq!(rig.run(&read).0, REDIRECT);
        let form = |counts: &ReadCounts| counts.passed_form;
        // Pages in several pieces; a link that is too short for a page; no session.
        rig.session = rig.open_as(SPACE, 2048);
        rig.sequence = 0;
        let read = line_read(&mut rig, grant, start, 2);
        rig.assert_passed(&read, form);
        rig.open();
        rig.sequence = 0;
        let session = std::mem::replace(&mut rig.session, 0xdead_0001);
        let read = line_read(&mut rig, grant, start, 2);
        rig.assert_passed(&read, |counts| counts.passed_session);
        rig.session = session;
        let mtu = 4096 + 131;
        let places = Places { node: SERVER.0, incarnation: 3, mtu, ..rig.memory.places };
        rig.program = load(&places, Some(&rig.memory.map)).expect("the kernel takes it");
        let read = line_read(&mut rig, grant, start, 2);
        rig.assert_passed(&read, form);
    });
}

#[test]
fn lines_that_are_written_all_the_time_are_never_torn() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-torn-lines"), Clones::new());
        let grant = rig.create(16);
        let start = first_of_line(grant);
        let pages = grant.location.page() + start..grant.location.page() + start + 8;
        pages.clone().for_each(|page| rig.arena.write(page, 0, &[0; PAGE_BYTES]));
        let read = line_read(&mut rig, grant, start, 8);
        let Rig { mut arena, mut program, memory, .. } = rig;
        let stop = AtomicBool::new(false);
        let (mut answered, mut passed) = (0_u32, 0_u32);
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut written = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    written += 1;
                    // Mostly the last page, which is read when others have been sent.
                    let page =
                        pages.start + if written.is_multiple_of(16) { written / 16 % 8 } else { 7 };
                    arena.write(page, 0, &[written.to_le_bytes()[0]; PAGE_BYTES]);
                    // So that it hits every step of the program, and leaves some alone.
                    (0..written % 3000).for_each(|_| hint::spin_loop());
                }
            });
            // Also if an assertion fails: the scope waits for the writer.
            let end = Stop(&stop);
            let began = Instant::now();
            let mut out = vec![0; 10_000];
            while is_worth_it(began, answered > 10 && passed > 10) {
                let options = TestRunOptions {
                    data_in: Some(&read),
                    data_out: Some(&mut out),
                    ..TestRunOptions::new()
                };
                let program = classifier(&mut program).expect("it is there");
                let result = program.test_run(options).expect("it runs");
                let after = &out[..result.data_size_out as usize];
                if result.return_value == NEXT {
                    assert!(after == read, "it is passed on as it was");
                    passed += 1;
                } else {
                    answered += 1;
                    check_piece(after);
                }
                iter::from_fn(|| clones.take()).for_each(|clone| check_piece(&clone));
            }
            drop(end);
            writer.join().expect("it writes");
        });
        println!("{answered} answered, {passed} passed on, {:?}", memory.counters.counts());
        assert!(answered > 10 && passed > 10, "the writer was beside the reader");
    });
}

/// Whether to go on: for two seconds, or longer if not everything was seen on a busy machine.
fn is_worth_it(began: Instant, is_all_seen: bool) -> bool {
    let limit = Duration::from_secs(if is_all_seen { 2 } else { 30 });
    began.elapsed() < limit
}

/// A piece of a page whose bytes are all the same.
#[track_caller]
fn check_piece(frame: &[u8]) {
    let (source, destination, payload) = parts(frame);
    let datagram = Datagram::parse(source, destination, payload).expect("the CRC fits");
    assert_eq!(datagram.data.len(), PAGE_BYTES);
    let first = datagram.data[0];
    assert!(datagram.data.iter().all(|byte| *byte == first), "torn");
}

/// A frame whose payload's header was changed after it was sealed, with checksums that fit.
fn resealed(frame: &[u8], change: impl FnOnce(&mut [u8])) -> Vec<u8> {
    let (source, destination, payload) = parts(frame);
    let mut payload = payload.to_vec();
    change(&mut payload);
    let (head, data) = payload.split_at_mut(HEADER_BYTES);
    seal(source, destination, head, data);
    udp_frame(source, destination, &payload)
}

#[test]
fn what_is_not_plain_is_for_the_server() {
    let mut rig = Rig::new("direct-passes");
    let grant = rig.create(2);
    rig.write(grant, &[5; PAGE_BYTES]);
    let (target, header) = rig.read(grant, 0, 4096);
    let plain = frame(Command::Read, target, &header, &[]);
    rig.assert_answered(&plain);
    let reseal = |change: &dyn Fn(&mut [u8])| resealed(&plain, change);
    let form = |counts: &ReadCounts| counts.passed_form;
    // The places of wire/src/header.rs.
    for (what, at, value) in [
        ("a further version", 0, 2),
        ("a flag that nobody knows", 2, 0x40),
        ("a repetition", 2, 0x10),
        ("stale data is acceptable", 3, 1),
        ("some pieces", 3, 0x10),
        ("a required feature", 5, 1),
        ("another target", 20, 1),
        ("a longer length", 57, 1),
        ("an offset", 61, 1),
        ("pages of another size", 62, 13),
        ("a key", 63, 1),
    ] {
        let before = form(&rig.memory.counters.counts());
        let changed = reseal(&|payload| payload[at] = value);
        rig.assert_passed(&changed, form);
        assert_eq!(form(&rig.memory.counters.counts()), before + 1, "{what}");
    }
    for (start, length) in [(1, 4096), (4095, 2), (0, 0), (0, 8192), (0, u32::MAX)] {
        let (target, header) = rig.read(grant, start, length);
        rig.assert_passed(&frame(Command::Read, target, &header, &[]), form);
    }
    // READs of several pages, and repetitions, bypass redirects.
    let (target, header) = rig.read(grant, 0, 64);
    rig.assert_passed(&frame_to(Command::Read.code() | 0x40, target, target, &header, &[]), form);
    // Not of this server, or no READ at all: not even counted.
    let counts = rig.memory.counters.counts();
    let (target, header) = rig.read(grant, 0, 64);
    let mut others = Vec::new();
    for command in Command::ALL.into_iter().filter(|command| *command != Command::Read) {
        others.push(frame(command, target, &header, &[]));
    }
    others.push(frame_to(Command::Read.code() | 0x80, target, target, &header, &[]));
    others.push(frame(Command::Read, target, &header, &[0; 8]));
    let read = frame(Command::Read, target, &header, &[]);
    let (source, destination, payload) = parts(&read);
    let mut fields = Fields::unpack(destination).expect("in the fabric");
    fields.node = NodeId(10);
    others.push(udp_frame(source, fields.to_ipv6(), payload));
    others.push(udp_frame(source, Ipv6Addr::LOCALHOST, payload));
    for (at, value) in [(12, 0x81), (14, 0x50), (19, 93), (20, 43), (56, 1), (59, 91)] {
        let mut other = read.clone();
        other[at] = value;
        others.push(other);
    }
    // To another host: mirrored by a switch, or flooded.
    others.push([&[2, 0, 0, 0, 0, 9], &read[6..]].concat());
    // The kernel runs no program on shorter ones.
    for length in UDP_END..read.len() {
        others.push(read[..length].to_vec());
    }
    others.push([&read[..], &[0]].concat());
    for other in &others {
        let (action, after) = rig.run(other);
        assert_eq!(action, NEXT, "{:02x?}", head(other));
        assert!(after == *other, "unchanged");
    }
    assert_eq!(rig.memory.counters.counts(), counts);
}

#[test]
fn damaged_requests_are_for_the_server() {
    let mut rig = Rig::new("direct-damage");
    let grant = rig.create(1);
    rig.write(grant, &[5; PAGE_BYTES]);
    let (target, header) = rig.read(grant, 0, 4096);
    let plain = frame(Command::Read, target, &header, &[]);
    let mut random = StdRng::seed_from_u64(2);
    for _ in 0..2000 {
        let mut damaged = plain.clone();
        let at = random.random_range(ETHERNET_BYTES + 8..damaged.len());
        damaged[at] ^= 1 << random.random_range(0..8);
        let (action, after) = rig.run(&damaged);
        assert_eq!(action, NEXT, "byte {at}");
        assert!(after == damaged, "unchanged");
    }
    // The CRC of the datagram is checked even where the UDP checksum fits.
    for at in 64..HEADER_BYTES {
        let (source, destination, payload) = parts(&plain);
        let mut payload = payload.to_vec();
        payload[at] ^= 1;
        rig.assert_passed(&udp_frame(source, destination, &payload), |it| it.passed_checksum);
    }
    rig.assert_answered(&plain);
}

#[test]
fn pages_that_may_not_be_read_are_for_the_server() {
    let mut rig = Rig::new("direct-pages");
    let page_reason = |counts: &ReadCounts| counts.passed_page;
    let grant = rig.create(3);
    rig.write(grant, &[5; PAGE_BYTES]);
    let read_of = |rig: &mut Rig, grant: Grant, start| {
        let (target, header) = rig.read(grant, start, 4096);
        frame(Command::Read, target, &header, &[])
    };
    for start in [0, 4096, 8192] {
        let read = read_of(&mut rig, grant, start);
        rig.assert_answered(&read);
    }
    // Another colour, a page of no allocation, a page beyond the arena.
    let stale = Grant { tag: bluebridge_wire::Tag(grant.tag.0 + 1), ..grant };
    let read = read_of(&mut rig, stale, 0);
    rig.assert_passed(&read, page_reason);
    let read = read_of(&mut rig, grant, 3 << 12);
    rig.assert_passed(&read, page_reason);
    let read = read_of(&mut rig, grant, PAGES << 12);
    rig.assert_passed(&read, |counts| counts.passed_form);
    // Also of the first shard, behind whose pages are those of the next.
    let location = Location::new(grant.location.generation(), PAGES << 12).expect("small");
    let read = read_of(&mut rig, Grant { location, ..grant }, 0);
    rig.assert_passed(&read, |counts| counts.passed_form);
    // Leased.
    let page = grant.location.page();
    rig.arena.set_leased(page, true);
    let read = read_of(&mut rig, grant, 0);
    rig.assert_passed(&read, page_reason);
    rig.arena.set_leased(page, false);
    rig.assert_answered(&read);
    // Not confirmed: also a body's READ.
    let unconfirmed = rig.arena.create(SPACE, 2).expect("room");
    rig.arena.write(unconfirmed.location.page() + 1, 0, &[6; PAGE_BYTES]);
    let read = read_of(&mut rig, unconfirmed, 4096);
    rig.assert_passed(&read, page_reason);
    rig.arena.complete(unconfirmed.location);
    rig.assert_answered(&read);
    // Freed, and allocated again: what the earlier allocation left is not shown.
    let access = |grant: Grant| Access {
        location: grant.location,
        length_bytes: 1,
        tag: grant.tag,
        space: SPACE,
    };
    let read = read_of(&mut rig, grant, 0);
    rig.arena.delete(access(grant), 3).expect("its own");
    rig.assert_passed(&read, page_reason);
    let mut again = None;
    for _ in 0..200 {
        let other = rig.create(1);
        if other.location.page() == page {
            again = Some(other);
            break;
        }
    }
    let again = again.expect("the page is allocated again");
    assert_ne!(again.tag, grant.tag);
    rig.assert_passed(&read, page_reason);
    let read = read_of(&mut rig, again, 0);
    rig.assert_passed(&read, page_reason);
    rig.arena.write(page, 10, &[7; 8]);
    rig.assert_answered(&read);
}

#[test]
fn a_page_that_changes_is_for_the_server() {
    let mut rig = Rig::new("direct-changes");
    let grant = rig.create(1);
    rig.write(grant, &[5; PAGE_BYTES]);
    let (target, header) = rig.read(grant, 0, 4096);
    let read = frame(Command::Read, target, &header, &[]);
    rig.arena.stop_in_change(grant.location.page());
    rig.assert_passed(&read, |counts| counts.passed_change);
}

#[test]
fn a_map_outlives_its_process_and_is_dropped_with_its_file() {
    require_root();
    let file = File::new("direct-kept");
    let holder = Holder {
        node: SERVER,
        generation: ArenaGeneration::new(5).expect("small"),
        token: [7; 16],
    };
    let open = |options: ArenaFile| options.open(|_, _| ControlFlow::Continue(()));
    let config = ArenaConfig { generation: holder.generation, ..ArenaConfig::default() };
    let grant = {
        let reserved = open(file.options()).unwrap().assign(holder).unwrap();
        assert!(open(file.options()).is_err(), "it is in use as long as its pages are");
        let mut parts = reserved.parts.into_iter();
        let mut arena = Arena::open(&config, parts.next().unwrap()).unwrap();
        let grant = arena.create(SPACE, 1).unwrap();
        arena.complete(grant.location);
        arena.write(grant.location.page(), 0, &[9; PAGE_BYTES]);
        arena.set_leased(grant.location.page(), true);
        grant
    };
    let listed = Listed::of(&file.0).unwrap();
    assert_eq!((listed.is_arena, listed.holder, listed.process), (true, Some(holder), None));
    // With the page of the file.
    let page_bytes = PAGE_BYTES as u64;
    assert_eq!(listed.bytes, (PAGES * u64::from(SHARDS) + 1) * page_bytes);
    // Also by a server that no longer wants it.
    let kept = open(ArenaFile { is_direct: false, ..file.options() }).unwrap();
    assert_eq!(kept.holder(), Some(holder));
    assert!(kept.direct_refusal().is_none(), "it is where it is");
    let mut reserved = kept.assign(holder).unwrap();
    let arena = Arena::open(&config, reserved.parts.remove(0)).unwrap();
    drop(reserved);
    assert!(arena.read(grant.location.page(), 0..PAGE_BYTES) == [9; PAGE_BYTES]);
    drop(arena);
    // Under another spelling of its name.
    let (directory, name) = (file.0.parent().unwrap(), file.0.file_name().unwrap());
    let respelled = File(directory.join(".").join(name));
    assert_eq!(open(respelled.options()).unwrap().holder(), Some(holder));
    std::mem::forget(respelled);
    // Another map cannot take its place, and none cannot, either; nothing of it is changed.
    let pin = pins(&file.0).pop().expect("it is pinned");
    fs::remove_file(&pin).unwrap();
    let gone = open(file.options()).unwrap_err().to_string();
    assert!(gone.contains("is gone") && gone.contains("--fresh"), "{gone}");
    let other = map::create(&[1; 16], usize::try_from(listed.bytes).unwrap()).unwrap();
    map::pin(&other, &pin).unwrap();
    map::remove(&[1; 16]).unwrap();
    assert!(open(file.options()).is_err());
    drop(other);
    // An empty one takes the place of one with contents, here and in a file.
    let fresh = ArenaFile { is_fresh: true, ..file.options() };
    drop(open(fresh.clone()).unwrap().assign(holder).unwrap());
    assert_eq!(pins(&file.0).len(), 1);
    let in_file = ArenaFile { is_direct: false, ..fresh.clone() };
    drop(open(in_file).unwrap().assign(holder).unwrap());
    assert_eq!(pins(&file.0), Vec::<PathBuf>::new(), "its map is given up");
    drop(open(fresh).unwrap().assign(holder).unwrap());
    Listed::drop_file(&file.0).unwrap();
    assert!(!file.0.exists());
    assert_eq!(pins(&file.0), Vec::<PathBuf>::new());
}

/// The pins of a file's arena; of another file, none.
#[test]
fn a_window_that_the_kernel_refuses_stays_reserved() {
    require_root();
    let id = *b"it ends too soon";
    // The map ends long before the range does.
    let map = map::create(&id, 4 * PAGE_BYTES).expect("room for a map");
    map::remove(&id).expect("it has a name");
    let descriptor = || map.try_clone().expect("a descriptor");
    let windows = Windows::new(descriptor(), &(0..32 << 20), descriptor()).expect("addresses");
    let mapper = windows.mapper();
    let mut steps = 0;
    mapper.map_all(|| {
        steps += 1;
        ControlFlow::Continue(())
    });
    assert_eq!(steps, 1, "it gives up at the first window");
    assert!(mapper.is_all_reserved(), "another mapping may take the addresses");
}

fn pins(file: &Path) -> Vec<PathBuf> {
    let id = bluebridge_bpf::fs::arena_id(file).ok().flatten();
    id.map(|id| bluebridge_bpf::fs::arena_pin(&id)).filter(|pin| pin.exists()).into_iter().collect()
}

/// The virtual machines' tests read what this prints on older kernels.
#[test]
fn a_kernel_answers_or_says_what_it_lacks() {
    require_root();
    let missing = probe("no-such-interface").unwrap_err();
    assert!(matches!(missing, NoDirectReads::Attach(_)), "{missing}");
    match in_thread(|| probe("lo")) {
        Ok(()) => println!("the kernel answers READs"),
        Err(reason @ (NoDirectReads::Attach(_) | NoDirectReads::Kernel(_))) => println!("{reason}"),
        Err(other) => panic!("{other}"),
    }
}

/// The one's complement sum of 16-bit words in network order.
fn sum_of(bytes: &[u8]) -> u16 {
    let words =
        bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
    let sum = words.sum::<u32>();
    let folded = (sum & 0xffff) + (sum >> 16);
    u16::try_from((folded & 0xffff) + (folded >> 16)).expect("folded twice")
}

/// The sum of the pseudo-header of a frame, which a sender leaves for its device to complete.
fn pseudo_sum_of(frame: &[u8]) -> [u8; 2] {
    let udp_bytes = [&[0, 0], &frame[58..60]].concat();
    sum_of(&[&frame[ETHERNET_BYTES + 8..54], &udp_bytes, &[0, 0, 0, 17]].concat()).to_be_bytes()
}

#[test]
fn a_sum_that_the_device_completes_stays_so() {
    let mut rig = Rig::new("direct-partial");
    let grant = rig.create(1);
    rig.write(grant, &[5; PAGE_BYTES]);
    for length in [4096, 64, 7] {
        let (target, header) = rig.read(grant, 0, length);
        let mut read = frame(Command::Read, target, &header, &[]);
        let sum = pseudo_sum_of(&read);
        read[60..62].copy_from_slice(&sum);
        let (action, answer) = rig.run(&read);
        assert_eq!(action, REDIRECT);
        assert_eq!(answer[60..62], pseudo_sum_of(&answer));
        let (source, destination, payload) = parts(&answer);
        let datagram = Datagram::parse(source, destination, payload).expect("the CRC is right");
        assert!(datagram.data == vec![5; length as usize]);
        let complete = rig.respond(&read).expect("an answer");
        assert!(answer[..60] == complete[..60] && answer[62..] == complete[62..]);
    }
}

/// Ends the writer.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn pages_that_are_written_all_the_time_are_never_torn() {
    let mut rig = Rig::new("direct-torn");
    let grant = rig.create(1);
    rig.write(grant, &[0; PAGE_BYTES]);
    let (target, header) = rig.read(grant, 0, 4096);
    let read = frame(Command::Read, target, &header, &[]);
    let page = grant.location.page();
    let Rig { mut arena, mut program, memory, .. } = rig;
    let stop = AtomicBool::new(false);
    let is_over = || stop.load(Ordering::Relaxed);
    let (mut answered, mut changed) = (0_u32, BTreeSet::new());
    let written = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut written = 0_u64;
            while !is_over() {
                written += 1;
                arena.write(page, 0, &[written.to_le_bytes()[0]; PAGE_BYTES]);
                // Otherwise the program finds the page unchanged only by chance.
                (0..written % 2000).for_each(|_| hint::spin_loop());
            }
            written
        });
        // Also if an assertion fails: the scope waits for the writer.
        let end = Stop(&stop);
        let began = Instant::now();
        let mut out = vec![0; 10_000];
        let is_seen = |changed: &BTreeSet<u64>| {
            changed.len() > 10 && memory.counters.counts().passed_change > 0
        };
        while is_worth_it(began, is_seen(&changed)) {
            let options = TestRunOptions {
                data_in: Some(&read),
                data_out: Some(&mut out),
                ..TestRunOptions::new()
            };
            let program = classifier(&mut program).expect("it is there");
            let result = program.test_run(options).expect("it runs");
            let after = &out[..result.data_size_out as usize];
            if result.return_value == NEXT {
                assert!(after == read, "it is passed on as it was");
                continue;
            }
            let (source, destination, payload) = parts(after);
            let datagram = Datagram::parse(source, destination, payload).expect("the CRC fits");
            let first = datagram.data[0];
            assert!(datagram.data.iter().all(|byte| *byte == first), "torn");
            answered += 1;
            changed.insert(datagram.header.page_version);
        }
        drop(end);
        writer.join().expect("it writes")
    });
    let counts = memory.counters.counts();
    println!("{written} writes, {answered} answers of {} versions, {counts:?}", changed.len());
    assert!(changed.len() > 10 && counts.passed_change > 0, "the writer was beside the reader");
}

#[test]
fn sessions_and_numbers_that_the_responder_refuses_are_for_the_server() {
    let mut rig = Rig::new("direct-sessions");
    let in_session = |counts: &ReadCounts| counts.passed_session;
    let grant = rig.create(1);
    rig.write(grant, &[5; PAGE_BYTES]);
    let (target, header) = rig.read(grant, 0, 64);
    let read_with = |header: Header| frame(Command::Read, target, &header, &[]);
    rig.assert_answered(&read_with(header));
    let seen = rig.shared().last_seen();
    assert!(seen > Timestamp::ZERO && seen <= now(), "{seen:?}");

    // Numbers: the program raises the low water, and nothing below it is answered any more.
    let numbered = |sequence, answered_distance| Header { sequence, answered_distance, ..header };
    let (action, _) = rig.run(&read_with(numbered(100, 5)));
    // Before the responder sees anything of it.
    assert_eq!((action, rig.shared().low_water()), (REDIRECT, 95));
    rig.assert_passed(&read_with(numbered(94, 5)), in_session);
    rig.assert_answered(&read_with(numbered(95, 5)));
    assert_eq!(rig.shared().low_water(), 95, "it is never lowered");
    rig.assert_passed(&read_with(numbered(95 + 512, 512)), in_session);
    rig.assert_answered(&read_with(numbered(95 + 511, 511)));
    rig.assert_passed(&read_with(numbered(1 << 47, 0)), in_session);
    rig.assert_passed(&read_with(numbered(u64::MAX, 0)), in_session);
    let mut given_up = numbered(94, 0);
    given_up.length = 8;
    let late = frame(Command::Write, target, &given_up, &[6; 8]);
    let refused = rig.respond(&late).expect("a refusal");
    let (source, _, _) = parts(&refused);
    assert_eq!(Fields::unpack(source).expect("of the fabric").tag, Status::Expired.code());
    rig.assert_answered(&read_with(numbered(101, 0)));

    // While the responder executes a request of the session.
    let low_water = rig.shared().enter();
    rig.assert_passed(&read_with(numbered(102, 0)), in_session);
    rig.shared().leave(low_water);
    rig.assert_answered(&read_with(numbered(102, 0)));

    // Other sessions, incarnations and nodes.
    for session in [0, rig.session ^ 1 << 40, rig.session + 1, rig.session | 0xffff] {
        rig.assert_passed(&read_with(Header { session, ..numbered(102, 0) }), in_session);
    }
    let other = Header { incarnation: 2, ..numbered(102, 0) };
    let mut bytes = vec![0; HEADER_BYTES];
    Header { target, ..other }.emit(&mut bytes, 0);
    let plain = read_with(numbered(102, 0));
    let (source, destination, _) = parts(&plain);
    seal(source, destination, &mut bytes, &[]);
    rig.assert_passed(&udp_frame(source, destination, &bytes), in_session);
    let of_node = |node| {
        let places = (target, target);
        frame_of(SPACE, node, Command::Read.code(), places, &numbered(102, 0), &[])
    };
    rig.assert_passed(&of_node(NodeId(21)), in_session);
    rig.assert_answered(&of_node(CLIENT));

    // A space's session reads no page of another space.
    let foreign = Pointer { space: OTHER, node: SERVER, tag: grant.tag, location: grant.location };
    let to = foreign.to_ipv6();
    let session = rig.open_as(OTHER, 4096);
    let stranger = Header { session, ..numbered(1, 0) };
    let read = frame_of(OTHER, CLIENT, Command::Read.code(), (to, to), &stranger, &[]);
    rig.assert_passed(&read, |counts| counts.passed_page);

    // Closed sessions, and shards without authority.
    let close = Header { sequence: 400, length: 0, ..header };
    let mut reads = (0..3).map(|number| read_with(numbered(300 + number, 0)));
    let [under_epoch, of_other_epoch] =
        [1, 2].map(|range_epoch| read_with(Header { range_epoch, ..numbered(299, 0) }));
    rig.assert_answered(&under_epoch);
    rig.assert_passed(&of_other_epoch, |counts| counts.passed_closed);
    rig.arena.shared().shard.expect("it is shared").close();
    rig.assert_passed(&reads.next().expect("three"), |counts| counts.passed_closed);
    rig.responder.publish(&rig.arena);
    rig.assert_answered(&reads.next().expect("three"));
    let closed = rig.respond(&frame(Command::Close, target, &close, &[]));
    let closed = closed.expect("an answer");
    let (source, _, _) = parts(&closed);
    assert_eq!(Fields::unpack(source).expect("of the fabric").tag, Status::Ok.code());
    rig.assert_passed(&reads.next().expect("three"), in_session);
}

#[test]
fn several_datagrams_are_for_the_server() {
    let mut rig = Rig::new("direct-pieces");
    let grant = rig.create(1);
    rig.write(grant, &[5; PAGE_BYTES]);
    let form = |counts: &ReadCounts| counts.passed_form;
    rig.session = rig.open_as(SPACE, 1024);
    rig.sequence = 0;
    for (length, is_answered) in [(1024, true), (1025, false), (4096, false)] {
        let (target, header) = rig.read(grant, 0, length);
        let read = frame(Command::Read, target, &header, &[]);
        if is_answered { rig.assert_answered(&read) } else { rig.assert_passed(&read, form) }
    }
    // A link that is too short for the answer.
    rig.open();
    rig.sequence = 0;
    let places = Places { node: SERVER.0, incarnation: 3, mtu: 1500, ..rig.memory.places };
    rig.program = load(&places, Some(&rig.memory.map)).expect("the kernel takes it");
    for (length, is_answered) in [(1500 - 132, true), (1500 - 131, false)] {
        let (target, header) = rig.read(grant, 0, length);
        let read = frame(Command::Read, target, &header, &[]);
        if is_answered { rig.assert_answered(&read) } else { rig.assert_passed(&read, form) }
    }
}
