//! The cases from which the vector files are written; committed files are authoritative.

use std::net::Ipv6Addr;

use bluebridge_wire::{
    ArenaGeneration, Command, Destination, EndpointAddress, Features, Fence, Flags, Header,
    LeaseEnd, LinePage, Location, NodeId, Pointer, ReplySource, Space, Status, Tag, Usage,
    WireCommand,
    address::{Fields, PAGE_BYTES},
    header::{HEADER_BYTES, LEASE_EPOCH_MAX},
    line::{LineRecord, PageContents, Part, emit_line},
    seal, tlv,
};

use super::{Expect, Parts, Vector};

/// Every file: its name, its title, its vectors.
pub(crate) fn files() -> [(&'static str, &'static str, Vec<Vector>); 5] {
    [
        ("requests.txt", "Requests: every command, flag, trailer and way to send one.", requests()),
        ("replies.txt", "Replies: every command and every status.", replies()),
        ("notices.txt", "Notices.", notices()),
        ("options.txt", "Options between the fixed header and the data.", options()),
        ("refusals.txt", "What a parser must refuse, and why.", refusals()),
    ]
}

const SPACE: Space = Space(1);
const CLIENT: NodeId = NodeId(0x0101);
const SERVER: NodeId = NodeId(7);
const TAKER: NodeId = NodeId(9);

fn client() -> Ipv6Addr {
    EndpointAddress::new(SPACE, CLIENT, 0).to_ipv6()
}

fn server() -> EndpointAddress {
    EndpointAddress::of_shard(SPACE, SERVER, 0, 0)
}

fn pointer(offset: u64) -> Pointer {
    let generation = ArenaGeneration::new(3).expect("15 bits");
    let location = Location::new(generation, offset).expect("48 bits");
    Pointer { space: SPACE, node: SERVER, tag: Tag(0x2a), location }
}

fn ask(pointer: Pointer, command: Command, home: bool) -> Ipv6Addr {
    Destination { pointer, command, home }.to_ipv6()
}

fn ask_endpoint(endpoint: EndpointAddress, command: u8) -> Ipv6Addr {
    let EndpointAddress { space, node, .. } = endpoint;
    Fields { space, node, command, tag: 0, location: endpoint.location_bits() }.to_ipv6()
}

fn answer(command: Command, status: Status, location_bits: u64) -> Ipv6Addr {
    let contended = false;
    ReplySource { space: SPACE, node: SERVER, command, contended, status, location_bits }.to_ipv6()
}

/// A header in the middle of a session.
fn header(target: Ipv6Addr) -> Header {
    Header {
        target,
        session: 0x1122_3344_5566_7788,
        incarnation: 5,
        sequence: 1000,
        answered_distance: 12,
        ..Header::default()
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| u8::try_from(index % 251).expect("below 251")).collect()
}

/// A datagram under construction.
struct Case {
    name: String,
    source: Ipv6Addr,
    destination: Ipv6Addr,
    parts: Parts,
}

impl Case {
    fn new(
        name: impl Into<String>,
        source: Ipv6Addr,
        destination: Ipv6Addr,
        header: Header,
    ) -> Self {
        Self { name: name.into(), source, destination, parts: Parts { header, ..Parts::default() } }
    }

    fn data(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.parts.data = data.into();
        self
    }

    fn trailer(mut self, key_id: u8, units: u8) -> Self {
        let header = &mut self.parts.header;
        header.key_id = key_id;
        header.flags = header.flags.with_trailer_units(units);
        self.parts.trailer = vec![0xa0 | units; usize::from(units) * 16];
        self
    }

    fn option(mut self, kind: u8, value: &[u8]) -> Self {
        self.parts.options.push((kind, value.to_vec()));
        self
    }

    fn bytes(&self) -> Vec<u8> {
        let mut options = Vec::new();
        for (kind, value) in &self.parts.options {
            let end = options.len() + tlv::emitted_bytes(value.len());
            options.extend([*kind, u8::try_from(value.len()).expect("one byte of length")]);
            options.extend(value);
            options.resize(end, 0);
        }
        let rest = [&self.parts.data[..], &self.parts.trailer].concat();
        datagram(self.source, self.destination, &self.parts.header, &options, &rest)
    }

    fn vector(mut self) -> Vector {
        let payload = self.bytes();
        let [from, to] = [self.source, self.destination]
            .map(|address| Fields::unpack(address).expect("in the fabric"));
        self.parts.reply = from.command != 0;
        let carrier = if self.parts.reply { from } else { to };
        (self.parts.command, self.parts.tag) = (carrier.command, carrier.tag);
        let Self { name, source, destination, parts } = self;
        Vector { name, source, destination, payload, expect: Expect::Parts(Box::new(parts)) }
    }

    fn refused(self, reason: &str) -> Vector {
        let payload = self.bytes();
        self.refused_as(payload, reason)
    }

    fn refused_as(self, payload: Vec<u8>, reason: &str) -> Vector {
        let Self { name, source, destination, .. } = self;
        Vector { name, source, destination, payload, expect: Expect::Refusal(reason.into()) }
    }
}

fn datagram(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    header: &Header,
    options: &[u8],
    rest: &[u8],
) -> Vec<u8> {
    let mut head = vec![0; HEADER_BYTES];
    header.emit(&mut head, options.len());
    head.extend(options);
    seal(source, destination, &mut head, rest);
    [&head[..], rest].concat()
}

/// A request for memory, with a pointer and a length.
fn to_memory(name: &str, command: Command, at: u64, length: u32) -> Case {
    let target = pointer(at);
    let home = command.is_always_home();
    let header = Header { length, ..header(target.to_ipv6()) };
    Case::new(name, client(), ask(target, command, home), header)
}

fn to_server(name: &str, command: Command, length: u32) -> Case {
    let header = Header { length, ..header(server().to_ipv6()) };
    Case::new(name, client(), ask_endpoint(server(), command.code()), header)
}

fn requests() -> Vec<Vector> {
    let mut cases = memory_requests();
    cases.extend(endpoint_requests());
    cases.extend(odd_requests());
    cases.into_iter().map(Case::vector).collect()
}

fn memory_requests() -> Vec<Case> {
    let mut cases = vec![
        to_memory("confirm", Command::Confirm, 0x5000, 4),
        to_memory("read", Command::Read, 0x5123, 64),
        to_memory("write", Command::Write, 0x5ffb, 5).data(*b"hello"),
        to_memory("update", Command::Update, 0x5000, 4096),
        to_memory("commit", Command::Commit, 0x5010, 3).data(*b"new"),
        to_memory("abort", Command::Abort, 0x5000, 4096),
        to_memory("renew", Command::Renew, 0x5000, 4096),
        to_memory("cas", Command::CompareSwap, 0x5008, 8)
            .data([1_u64.to_be_bytes(), 2_u64.to_be_bytes()].concat()),
        to_memory("fetch_add", Command::FetchAdd, 0x5ff8, 8).data(u64::MAX.to_be_bytes()),
        to_memory("delete_free", Command::Delete, 0x5000, 0),
        to_memory("delete_zero", Command::Delete, 0x5001, 9000),
        to_memory("read_may_be_stale", Command::Read, 0x5000, 4096),
        to_memory("read_selective", Command::Read, 0x8000, 32768),
        to_memory("read_queued", Command::Read, 0x5000, 64),
        to_memory("update_queued", Command::Update, 0x8000, 32768),
        to_memory("write_last_piece", Command::Write, 0x8000, 32768).data(pattern(1144)),
        to_memory("write_whole_page", Command::Write, 0xffff_ffff_f000, 4096)
            .data(pattern(PAGE_BYTES)),
    ];
    for case in &mut cases {
        let header = &mut case.parts.header;
        match case.name.as_str() {
            "delete_zero" => header.flags = Flags::ZERO,
            "read_may_be_stale" => header.flags = Flags::MAY_BE_STALE,
            "read_selective" => {
                header.flags = Flags::SELECTIVE.with_attempt(2);
                header.detail = 0x8000_0001;
                case.destination = ask(pointer(0x8000), Command::Read, true);
            }
            "read_queued" => header.flags = Flags::QUEUED,
            "update_queued" => {
                (header.flags, header.lease_remaining_ms) = (Flags::QUEUED, 1500);
                case.destination = ask(pointer(0x8000), Command::Update, true);
            }
            "write_last_piece" => {
                (header.offset, header.flags) = (31624, Flags::default().with_attempt(15));
                case.destination = ask(pointer(0x8000), Command::Write, true);
            }
            "commit" | "abort" | "renew" => {
                (header.lease_epoch, header.lease_remaining_ms) = (0x0001_0000_0002, 1500);
            }
            _ => {}
        }
    }
    cases
}

fn endpoint_requests() -> Vec<Case> {
    let any = EndpointAddress::new(SPACE, NodeId::ANY, 0xdead_beef);
    let mut cases = vec![
        to_server("open", Command::Open, 1368),
        to_server("close", Command::Close, 0),
        to_server("create", Command::Create, 3),
        to_server("alloc_write", Command::AllocWrite, 5).data(*b"hello"),
        to_server("stat", Command::Stat, 0),
        to_server("ping", Command::Ping, 0).data(*b"are you there?"),
        to_server("create_anywhere", Command::Create, 1),
        to_server("alloc_write_anywhere", Command::AllocWrite, 4096).data(pattern(1368)),
    ];
    for case in &mut cases {
        let header = &mut case.parts.header;
        if matches!(case.name.as_str(), "open" | "create_anywhere" | "alloc_write_anywhere") {
            (header.session, header.sequence) = (0, 0x0123_4567_89ab_cdef);
            header.answered_distance = 0;
        }
        match case.name.as_str() {
            "open" => header.credit = 256,
            "create_anywhere" => {
                header.target = any.to_ipv6();
                case.destination = ask_endpoint(any, Command::Create.code());
            }
            "alloc_write_anywhere" => {
                (header.target, header.detail) = (any.to_ipv6(), 1368);
                case.destination = ask_endpoint(any, Command::AllocWrite.code());
            }
            _ => {}
        }
    }
    cases
}

fn odd_requests() -> Vec<Case> {
    let read = |name: &str| to_memory(name, Command::Read, 0x5000, 64);
    let mut via = read("read_via");
    via.destination = Destination { pointer: pointer(0x5000), command: Command::Read, home: true }
        .via(NodeId(9))
        .to_ipv6();
    let mut home = read("read_home");
    home.destination = ask(pointer(0x5000), Command::Read, true);
    let mut every = to_memory("every_field_differs", Command::Write, 0x0102_0304_0506, 0x1314_1516);
    every.parts.header = Header {
        flags: Flags::from_bits(0xdcfe),
        required: Features(0xa1a2),
        node: 0xa3a4,
        target: every.parts.header.target,
        lease_epoch: 0xb1b2_b3b4_b5b6,
        lease_remaining_ms: 0xb7b8,
        session: 0xc1c2_c3c4_c5c6_c7c8,
        incarnation: 0xd1d2_d3d4,
        sequence: 0xe1e2_e3e4_e5e6_e7e8,
        answered_distance: 0xf1f2,
        credit: 0xf3f4,
        length: 0x1314_1516,
        offset: 0x1718,
        page_shift: 0x19,
        key_id: 0x1a,
        page_version: 0x2122_2324_2526_2728,
        range_epoch: 0x3132_3334,
        detail: 0x4142_4344,
    };
    let mut largest = to_memory("largest_values", Command::Read, (1 << 48) - 1, u32::MAX);
    largest.parts.header = Header {
        lease_epoch: LEASE_EPOCH_MAX,
        session: u64::MAX,
        sequence: u64::MAX,
        page_version: u64::MAX,
        ..largest.parts.header
    };
    let unknown = |name: &str, byte: u8| {
        let mut case = read(name);
        let to = Fields::unpack(case.destination).expect("in the fabric");
        case.destination = Fields { command: byte, ..to }.to_ipv6();
        case
    };
    let mut feature = read("required_feature");
    feature.parts.header.required = Features(1 << 15);
    let mut epoch = read("range_epoch");
    epoch.parts.header.range_epoch = 77;
    vec![
        via,
        home,
        every,
        largest,
        feature,
        epoch,
        unknown("unknown_command", 63),
        unknown("command_zero_with_home_bit", WireCommand::HOME),
        read("trailer_16").trailer(1, 1),
        read("trailer_32").trailer(2, 2),
        to_memory("trailer_48_behind_data", Command::Write, 0x5000, 7)
            .data(*b"payload")
            .trailer(255, 3),
        read("key_without_trailer").trailer(9, 0),
        again_at_endpoint(),
        via_at_endpoint(),
        to_giver("take", Command::Take),
        to_giver("keep", Command::Keep),
    ]
}

/// A taker's request about a line.
fn to_giver(name: &str, command: Command) -> Case {
    let target = pointer(0x0300_0000_8000);
    let mut case = to_memory(name, command, 0x0300_0000_8000, 32768);
    let taker = EndpointAddress::new(SPACE, TAKER, 0).to_ipv6();
    (case.source, case.destination) =
        (taker, EndpointAddress::for_memory(SERVER, target).destination(command, true));
    let header = &mut case.parts.header;
    (header.range_epoch, header.page_version) = (12, 0x0123_4567_89ab_cdef);
    if command == Command::Take {
        (header.flags, header.lease_remaining_ms) = (Flags::QUEUED, 1000);
    } else {
        (header.lease_epoch, header.detail) = (0x0001_0000_0002, 30);
    }
    case
}

/// A retransmission to the endpoint address of the session's server.
fn again_at_endpoint() -> Case {
    let target = pointer(0x0300_0000_5ffb);
    let mut again = to_memory("again_at_endpoint", Command::Write, 0x0300_0000_5ffb, 5);
    again.destination =
        EndpointAddress::for_memory(SERVER, target).destination(Command::Write, true);
    again.parts.header.flags = Flags::default().with_attempt(1);
    again.data(*b"hello")
}

/// A first try to another node than the pointer's, at its endpoint address.
fn via_at_endpoint() -> Case {
    let target = pointer(0x0300_0000_5000);
    let mut via = to_memory("via_at_endpoint", Command::Read, 0x0300_0000_5000, 64);
    via.destination =
        EndpointAddress::for_memory(NodeId(9), target).destination(Command::Read, true);
    via
}

fn reply(name: impl Into<String>, command: Command, status: Status) -> Case {
    let target = pointer(0x5000);
    let source = answer(command, status, target.location.bits());
    let header = Header { credit: 64, incarnation: 2, range_epoch: 4, ..header(target.to_ipv6()) };
    Case::new(name, source, client(), header)
}

fn replies() -> Vec<Vector> {
    let mut cases = Vec::new();
    for command in Command::ALL.into_iter().filter(|command| !command.is_notice()) {
        cases.push(ok_reply(command));
    }
    for &status in Status::ALL {
        cases.push(refusal_reply(status));
    }
    let mut provisional = ok_reply(Command::Create);
    provisional.name = "provisional".into();
    let header = &mut provisional.parts.header;
    (header.session, header.sequence, header.answered_distance) = (0, 0x0123_4567_89ab_cdef, 0);
    (header.flags, header.detail) = (Flags::PROVISIONAL, 2000);
    let mut committed = ok_reply(Command::Read);
    committed.name = "last_committed".into();
    committed.parts.header.flags = Flags::LAST_COMMITTED.with_attempt(1);
    let mut unknown = reply("unknown_status", Command::Read, Status::Ok);
    let from = Fields::unpack(unknown.source).expect("in the fabric");
    unknown.source = Fields { tag: 200, ..from }.to_ipv6();
    let mut page = reply("one_page_of_several_refused", Command::Read, Status::StaleTag);
    page.parts.header = Header {
        target: pointer(0x6000).to_ipv6(),
        length: 32768 - 0x5000,
        offset: 0x1000,
        ..page.parts.header
    };
    cases.extend([provisional, committed, unknown, page]);
    cases.extend(lease_replies());
    let mut stat = ok_reply(Command::Stat).data(usage().emit());
    stat.name = "stat_with_retired_pages".into();
    cases.push(stat);
    let mut open = ok_reply(Command::Open);
    open.name = "open_at_endpoint".into();
    open.parts.header.flags = Flags::AT_ENDPOINT;
    cases.push(open);
    // A first try that a switch led astray.
    let mut astray = reply("refused_by_another_node", Command::Write, Status::NoSession);
    let from = Fields::unpack(astray.source).expect("in the fabric");
    astray.source = Fields { node: NodeId(9), ..from }.to_ipv6();
    cases.push(astray);
    cases.into_iter().map(Case::vector).collect()
}

/// BUSY with a place in the queue, the contended bit, and every kind of lease end.
fn lease_replies() -> Vec<Case> {
    let contended = |mut case: Case| {
        let from = Fields::unpack(case.source).expect("in the fabric");
        let command = from.command | WireCommand::CONTENDED;
        case.source = Fields { command, ..from }.to_ipv6();
        case
    };
    let leased = |name: String, command: Command, status: Status| {
        let mut case = reply(name, command, status);
        let header = &mut case.parts.header;
        (header.node, header.lease_epoch, header.length) = (9, 0x0001_0000_0002, 64);
        header.lease_remaining_ms = 731;
        case
    };
    let mut queued = leased("busy_queued".into(), Command::Read, Status::Busy);
    (queued.parts.header.flags, queued.parts.header.detail) = (Flags::QUEUED, 50);
    let mut cases = vec![
        queued,
        contended(leased("busy_contended".into(), Command::Write, Status::Busy)),
        contended(leased("renew_contended".into(), Command::Renew, Status::Ok)),
        contended(reply("commit_contended", Command::Commit, Status::Ok)),
        contended(reply("abort_contended", Command::Abort, Status::Ok)),
    ];
    for end in LeaseEnd::ALL {
        let name = format!("lease_lost_{}", end.code());
        let mut case = match end {
            LeaseEnd::LeasedAgain => leased(name, Command::Commit, Status::LeaseLost),
            _ => reply(name, Command::Commit, Status::LeaseLost),
        };
        case.parts.header.detail = end.code();
        cases.push(case);
    }
    cases
}

fn ok_reply(command: Command) -> Case {
    let name = format!("{}_answered", command.to_string().to_lowercase());
    let mut case = reply(name, command, Status::Ok);
    let header = &mut case.parts.header;
    match command {
        Command::Open => {
            (header.target, header.detail, header.length) = (server().to_ipv6(), 3, 1368);
            case.source = answer(command, Status::Ok, server().location_bits());
        }
        Command::Create | Command::AllocWrite => {
            header.length = 3;
            case.source = answer(command, Status::Ok, server().location_bits());
        }
        Command::Read | Command::Update => {
            (header.length, header.page_version) = (64, 9);
            case = case.data(pattern(64));
            if command == Command::Update {
                let header = &mut case.parts.header;
                (header.node, header.lease_epoch) = (CLIENT.0, 0x0001_0000_0002);
                header.lease_remaining_ms = 2000;
            }
        }
        Command::CompareSwap | Command::FetchAdd => case = case.data(41_u64.to_be_bytes()),
        Command::Stat => {
            // The response of an earlier server, without the number of retired pages.
            case = case.data(&usage().emit()[..64]);
        }
        Command::Ping => case = case.data(*b"are you there?"),
        Command::Take => {
            (header.length, header.node, header.lease_epoch) = (32768, TAKER.0, 0x0001_0000_0002);
            header.lease_remaining_ms = 1000;
            case = case.data(emit_line(&line()));
        }
        Command::Keep => {
            (header.length, header.page_version, header.detail) = (32768, 32, 32);
            let fences = [(CLIENT, 5), (NodeId(0x0102), 0x0a0b_0c0d)]
                .map(|(node, incarnation)| Fence { node, incarnation }.emit());
            case = case.data(fences.concat());
        }
        _ => {}
    }
    case
}

/// A line with the end of an allocation, a free page that had one, one that had none, two whole allocations, and the
/// beginning of another.
fn line() -> LineRecord {
    let generation = ArenaGeneration::new(3).expect("15 bits");
    let page = |tag, part, contents| LinePage {
        version: 9,
        part,
        colour: Some((generation, Tag(tag))),
        space: SPACE,
        contents,
        ..LinePage::default()
    };
    let first = |tag, pages, contents| LinePage {
        creator: CLIENT,
        creator_incarnation: 4,
        ..page(tag, Part::First { pages }, contents)
    };
    let further = |tag, distance| page(tag, Part::Further { distance }, PageContents::Written);
    [
        LinePage { version: u64::MAX, ..further(255, 0x0a0b_0c0d) },
        further(255, 0x0a0b_0c0e),
        page(7, Part::Free, PageContents::Leftover),
        LinePage::default(),
        first(2, 1, PageContents::Written),
        first(1, 2, PageContents::Zeros),
        further(1, 1),
        first(9, u32::MAX, PageContents::Leftover),
    ]
}

fn usage() -> Usage {
    Usage {
        capacity_pages: 1 << 20,
        free_pages: 1000,
        quota_pages: u64::MAX,
        used_pages: 17,
        provisional_pages: 1,
        session_count: 2,
        answered_count: 3,
        shard_count: 4,
        retired_pages: 5,
    }
}

fn refusal_reply(status: Status) -> Case {
    let mut case = reply(format!("status_{}", status.code()), Command::Write, status);
    let header = &mut case.parts.header;
    match status {
        Status::Busy => {
            (header.node, header.lease_epoch) = (9, 0x0001_0000_0002);
            header.lease_remaining_ms = 731;
        }
        Status::Moved => header.node = 9,
        Status::Incomplete => header.detail = 0b1011,
        Status::UnsupportedFeature => header.detail = 0x8000,
        Status::UnsupportedVersion => header.detail = 1,
        Status::Partial => case = case.option(1, &[0, 17, 0]),
        _ => {}
    }
    case
}

fn notices() -> Vec<Vector> {
    [Command::Invalidate, Command::Notice]
        .into_iter()
        .map(|command| {
            let target = pointer(0x5000);
            let to = Destination { pointer: target, command, home: false }.via(NodeId::ALL);
            let header = Header { length: 4, page_version: 12, ..header(target.to_ipv6()) };
            let source = EndpointAddress::new(SPACE, SERVER, 0).to_ipv6();
            Case::new(command.to_string().to_lowercase(), source, to.to_ipv6(), header).vector()
        })
        .collect()
}

fn options() -> Vec<Vector> {
    let partial = |name: &str| reply(name, Command::Write, Status::Partial);
    vec![
        partial("page_statuses_1").option(1, &[17]),
        partial("page_statuses_2").option(1, &[0, 17]),
        partial("page_statuses_8").option(1, &[0, 0, 17, 19, 1, 2, 18, 16]),
        partial("unknown_option_skipped").option(200, b"whatever").option(1, &[0, 17]),
        partial("option_type_zero_empty").option(0, b"").option(1, &[0, 17]),
        partial("option_twice").option(1, &[0, 17]).option(1, &[17, 0]),
        to_memory("options_data_and_trailer", Command::Write, 0x5000, 4)
            .option(77, b"abc")
            .data(*b"data")
            .trailer(3, 1),
        // 255 words of header: the fixed 84 bytes and 936 of options.
        [255, 255, 255, 154]
            .into_iter()
            .fold(partial("largest_header"), |case, bytes| case.option(90, &pattern(bytes))),
    ]
    .into_iter()
    .map(Case::vector)
    .collect()
}

fn refusals() -> Vec<Vector> {
    let mut vectors = foreign();
    vectors.extend(damaged());
    vectors.extend(contradicting());
    vectors
}

fn read(name: &str) -> Case {
    to_memory(name, Command::Read, 0x5000, 64)
}

fn foreign() -> Vec<Vector> {
    let other: Ipv6Addr = "fdbc:1:101::8000:0:0:0".parse().expect("an address");
    let mut source = read("foreign_source");
    source.source = other;
    let mut destination = read("foreign_destination");
    destination.destination = other;
    vec![source.refused("foreign_source"), destination.refused("foreign_destination")]
}

fn damaged() -> Vec<Vector> {
    let cut = |name: &str, bytes: usize, reason: &str| {
        let case = read(name);
        let payload = case.bytes()[..bytes].to_vec();
        case.refused_as(payload, reason)
    };
    let changed = |name: &str, at: usize, to: u8, reason: &str| {
        let case = read(name).data(*b"some data");
        let mut payload = case.bytes();
        payload[at] = to;
        // The checks before the CRC must refuse it even if the CRC is valid.
        if reason != "crc" {
            let (head, data) = payload.split_at_mut(HEADER_BYTES);
            seal(case.source, case.destination, head, data);
        }
        case.refused_as(payload, reason)
    };
    vec![
        cut("empty", 0, "header_truncated"),
        cut("cut_before_crc", 80, "header_truncated"),
        cut("cut_last_byte", 83, "header_truncated"),
        changed("version_zero", 0, 0, "header_version"),
        changed("version_two", 0, 2, "header_version"),
        changed("header_shorter_than_fixed", 1, 20, "header_length"),
        changed("header_longer_than_datagram", 1, 24, "header_length"),
        changed("crc_field_changed", 80, 0x55, "crc"),
        changed("sequence_changed", 51, 0x55, "crc"),
        changed("data_changed", 90, 0x55, "crc"),
        {
            let case = read("crc_of_another_destination");
            let payload = case.bytes();
            let destination = ask(pointer(0x6000), Command::Read, false);
            Case { destination, ..case }.refused_as(payload, "crc")
        },
        {
            let case = read("data_appended");
            let mut payload = case.bytes();
            payload.push(0);
            case.refused_as(payload, "crc")
        },
    ]
}

fn contradicting() -> Vec<Vector> {
    let with_options = |name: &str, options: &[u8]| {
        let case = read(name);
        let payload = datagram(case.source, case.destination, &case.parts.header, options, b"data");
        case.refused_as(payload, "options")
    };
    let fields = |address: Ipv6Addr| Fields::unpack(address).expect("in the fabric");
    let changed = |name: &str, reason: &str, change: &dyn Fn(&mut Case)| {
        let mut case = read(name);
        change(&mut case);
        case.refused(reason)
    };
    let source = |change: fn(Fields) -> Fields| {
        move |case: &mut Case| case.source = change(fields(case.source)).to_ipv6()
    };
    let both_ask = source(|from| Fields { command: 6, ..from });
    let both_answer = |case: &mut Case| {
        case.source = answer(Command::Read, Status::Ok, 0x5000);
        let to = Fields { command: 0x86, ..fields(client()) };
        case.destination = to.to_ipv6();
    };
    let to_memory_answer = |case: &mut Case| {
        case.source = answer(Command::Read, Status::Ok, 0x5000);
        case.destination = pointer(0x5000).to_ipv6();
    };
    vec![
        with_options("option_beyond_header", &[1, 3, 0, 0]),
        with_options("option_value_beyond_header", &[1, 200, 0, 0]),
        with_options("option_padding_not_zero", &[1, 1, 17, 1]),
        with_options("second_option_beyond_header", &[9, 2, 0, 0, 1, 3, 0, 0]),
        changed("trailer_without_bytes", "trailer", &|case| {
            case.parts.header.flags = Flags::default().with_trailer_units(1);
        }),
        changed("trailer_longer_than_data", "trailer", &|case| {
            case.parts.header.flags = Flags::default().with_trailer_units(3);
            case.parts.data = vec![0; 47];
        }),
        changed("target_outside_fabric", "target", &|case| {
            case.parts.header.target = Ipv6Addr::LOCALHOST;
        }),
        changed("target_with_command", "target", &|case| {
            case.parts.header.target = case.destination;
        }),
        changed("two_requests", "direction", &both_ask),
        changed("two_replies", "direction", &both_answer),
        changed("no_command", "direction", &|case| {
            case.destination = pointer(0x5000).to_ipv6();
        }),
        changed("reply_bit_in_destination", "direction", &|case| {
            let to = fields(case.destination);
            case.destination = Fields { command: 0x86, ..to }.to_ipv6();
        }),
        changed("no_reply_bit_in_source", "direction", &|case| {
            case.source = Fields { command: 6, ..fields(server().to_ipv6()) }.to_ipv6();
            case.destination = client();
        }),
        changed("contended_without_reply", "direction", &|case| {
            case.source = Fields { command: 0x46, ..fields(server().to_ipv6()) }.to_ipv6();
            case.destination = client();
        }),
        changed(
            "source_is_memory",
            "endpoint",
            &source(|from| Fields { location: 0x5000, ..from }),
        ),
        changed("source_with_tag", "endpoint", &source(|from| Fields { tag: 1, ..from })),
        changed("answer_to_memory", "endpoint", &to_memory_answer),
    ]
}
