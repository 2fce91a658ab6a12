//! Section 7 of the contract: every check, and that the earlier one takes precedence.

use bluebridge_wire::{ArenaGeneration, Features};

use super::*;

fn read_at(world: &mut World, at: Pointer) -> TestRequest {
    world.read_request(at, 64)
}

#[test]
pub(super) fn malformed_datagrams_are_dropped_and_counted() {
    let mut world = World::new();
    let mut request = TestRequest::server(Command::Ping);
    request.from = Ipv6Addr::LOCALHOST;
    assert_eq!(world.send(&request), []);
    assert_eq!(world.event(Event::DropForeignSource), 1);
}

#[test]
pub(super) fn destination_comes_first() {
    let mut world = World::new();
    let at = world.create(1);
    // Everything is invalid; the node is checked first.
    let other = Pointer { node: NodeId(11), ..at };
    let mut request = read_at(&mut world, other);
    request.header.required = Features(1);
    request.header.session = 99;
    request.header.target = pointer(0, 0).to_ipv6();
    assert_eq!(world.status(&request), Status::WrongNode);
    // Next is whether the addresses and the header agree.
    let mut request = read_at(&mut world, at);
    request.header.required = Features(1);
    request.header.target = page_of(at, 1).to_ipv6();
    assert_eq!(world.status(&request), Status::Malformed);
    let mut request = read_at(&mut world, at);
    request.header.target = Pointer { tag: Tag(at.tag.0 + 1), ..at }.to_ipv6();
    assert_eq!(world.status(&request), Status::Malformed);
    let mut request = read_at(&mut world, at);
    request.header.target = Pointer { space: Space(4), ..at }.to_ipv6();
    assert_eq!(world.status(&request), Status::Malformed);
}

#[test]
pub(super) fn features_command_and_key_come_next() {
    let mut world = World::new();
    let mut request = TestRequest::server(Command::Update);
    request.header.required = Features(0x8001);
    request.header.key_id = 1;
    let reply = world.one(&request);
    assert_eq!((reply.status, reply.header.detail), (Status::UnsupportedFeature, 0x8001));
    request.header.required = Features(0);
    for code in (19..24).chain(26..64) {
        request.to.command = code;
        let reply = world.one(&request);
        assert_eq!((reply.status, reply.from.command), (Status::UnknownCommand, 0x80 | code));
    }
    let mut request = TestRequest::server(Command::Ping);
    request.header.key_id = 1;
    request.from = EndpointAddress::new(Space(4), CLIENT, 0).to_ipv6();
    assert_eq!(world.status(&request), Status::Unauthenticated);
    let mut request = TestRequest::server(Command::Ping).carrying(&[0; 16]);
    request.header.flags = Flags::default().with_trailer_units(1);
    assert_eq!(world.status(&request), Status::Unauthenticated);
}

#[test]
pub(super) fn spaces_are_checked_before_sessions() {
    let mut world = World::new();
    let mut request = TestRequest::server(Command::Ping);
    request.from = EndpointAddress::new(Space(4), CLIENT, 0).to_ipv6();
    assert_eq!(world.status(&request), Status::WrongSpace);
    // The reply to a request of a space that is not served comes from the served one.
    let address = EndpointAddress::of_shard(Space(4), SERVER, 0, 0).to_ipv6();
    let mut request = TestRequest::new(Command::Ping, address);
    request.from = EndpointAddress::new(Space(4), CLIENT, 0).to_ipv6();
    let reply = world.one(&request);
    assert_eq!((reply.status, reply.from.space), (Status::WrongSpace, SPACE));
}

#[test]
pub(super) fn sessions_are_checked_before_the_shape() {
    let mut world = World::new();
    let at = world.create(1);
    let mut request = read_at(&mut world, at).with(|header| header.length = 0);
    request.header.session ^= 1 << 40;
    assert_eq!(world.status(&request), Status::NoSession);
    request.header.session = 0;
    assert_eq!(world.status(&request), Status::NoSession);
    request.header.session = world.session;
    request.from = endpoint(NodeId(21));
    assert_eq!(world.status(&request), Status::NoSession);
    request.from = endpoint(CLIENT);
    request.header.incarnation = 0;
    assert_eq!(world.status(&request), Status::StaleIncarnation);
    request.header.incarnation = 2;
    assert_eq!(world.status(&request), Status::NoSession);
    request.header.incarnation = 1;
    request.header.sequence = 0;
    assert_eq!(world.status(&request), Status::Expired);
    request.header.sequence = world.sequence + 600;
    request.header.answered_distance = 600;
    assert_eq!(world.status(&request), Status::BeyondWindow);
}

#[test]
pub(super) fn shapes_are_checked_before_the_range() {
    let mut world = World::new();
    let stale = pointer(0, 200);
    let end = pointer(7 * 4096 + 4000, 200);
    let mut bad = |request: TestRequest, change: fn(&mut TestRequest), status| {
        let mut request = world.next(request);
        change(&mut request);
        assert_eq!(world.status(&request), status, "{request:?}");
    };
    let request = |command, at: Pointer| TestRequest::new(command, at.to_ipv6());
    for command in [Command::Read, Command::Write] {
        bad(request(command, stale), |_| {}, Status::BadLength);
        bad(request(command, end), |request| request.header.length = 97, Status::BadLength);
        bad(request(command, stale), |request| request.header.length = 32769, Status::BadLength);
        bad(request(command, stale), |request| request.header.length = u32::MAX, Status::BadLength);
        bad(request(command, stale), |request| request.header.page_shift = 13, Status::Malformed);
    }
    let long = |request: &mut TestRequest| request.header.length = 8;
    bad(request(Command::Read, stale).carrying(b"x"), long, Status::Malformed);
    let nothing_wanted = |request: &mut TestRequest| {
        (request.header.length, request.header.flags) = (8, Flags::SELECTIVE);
        request.header.detail = 2;
    };
    bad(request(Command::Read, stale), nothing_wanted, Status::Malformed);
    bad(request(Command::Write, stale).carrying(b"1234567"), long, Status::Malformed);
    let inside =
        |request: &mut TestRequest| (request.header.length, request.header.offset) = (8, 1);
    bad(request(Command::Write, stale).carrying(b"1234567"), inside, Status::Malformed);
    let zero = |request: &mut TestRequest| zeroing(&mut request.header);
    bad(request(Command::Delete, stale), zero, Status::BadLength);
    bad(request(Command::Delete, moved_by(stale, 8)), |_| {}, Status::Unaligned);
    bad(request(Command::Confirm, moved_by(stale, 8)), long, Status::Unaligned);
    bad(request(Command::Confirm, stale), |_| {}, Status::BadLength);
    bad(request(Command::CompareSwap, moved_by(stale, 4)), long, Status::Unaligned);
    bad(
        request(Command::CompareSwap, stale),
        |request| request.header.length = 4,
        Status::BadLength,
    );
    bad(request(Command::CompareSwap, stale).carrying(&[0; 8]), long, Status::Malformed);
    bad(request(Command::FetchAdd, stale).carrying(&[0; 16]), long, Status::Malformed);
    bad(request(Command::FetchAdd, stale).carrying(&[0; 9]), long, Status::Malformed);
    let server = TestRequest::server;
    bad(server(Command::Read), long, Status::Malformed);
    bad(server(Command::Write), long, Status::Malformed);
    bad(server(Command::Delete), |_| {}, Status::Malformed);
    bad(server(Command::FetchAdd), long, Status::Malformed);
    bad(server(Command::Confirm), long, Status::Malformed);
    bad(server(Command::Create), |_| {}, Status::BadLength);
    bad(request(Command::Create, stale), long, Status::Malformed);
    bad(server(Command::Create).carrying(b"x"), long, Status::Malformed);
    bad(server(Command::AllocWrite), |_| {}, Status::BadLength);
    bad(server(Command::AllocWrite), |request| request.header.length = 32769, Status::BadLength);
    bad(server(Command::AllocWrite), long, Status::Malformed);
    bad(request(Command::AllocWrite, stale).carrying(&[0; 8]), long, Status::Malformed);
    bad(server(Command::Stat).carrying(b"x"), |_| {}, Status::Malformed);
    bad(server(Command::Ping).carrying(&[0; 65]), |_| {}, Status::BadLength);
    bad(server(Command::Ping), |request| request.header.page_shift = 0, Status::Malformed);
    assert_eq!(world.store.used_pages(), 0, "a refusal changed something");
}

#[test]
pub(super) fn the_range_is_checked_in_order() {
    let mut world = World::new();
    let at = world.create(1);
    world.responder.add_moved(8..16, NodeId(30)).unwrap();
    let moved = pointer(8 * 4096, 9);
    let stale_epoch = read_at(&mut world, moved).with(|header| header.range_epoch = 2);
    assert_eq!(world.status(&stale_epoch), Status::StaleRangeEpoch);
    let request = read_at(&mut world, moved).with(|header| header.range_epoch = 1);
    let reply = world.one(&request);
    assert_eq!((reply.status, reply.header.node), (Status::Moved, 30));
    assert_eq!(reply.header.range_epoch, 1);
    let mut via = read_at(&mut world, Pointer { node: NodeId(31), ..at });
    via.to.node = SERVER;
    assert_eq!(world.status(&via), Status::WrongNode);

    world.responder.set_authority(None);
    let request = read_at(&mut world, moved);
    assert_eq!(world.status(&request), Status::Moved);
    let request = read_at(&mut world, at);
    assert_eq!(world.status(&request), Status::NoAuthority);
    let ends = world.now + Duration::from_millis(1);
    let authority = Authority { range_epoch: 4, expires_at: Some(ends) };
    world.responder.set_authority(Some(authority));
    let request = read_at(&mut world, at);
    assert_eq!(world.one(&request).header.range_epoch, 4);
    world.now = ends;
    let request = read_at(&mut world, at);
    assert_eq!(world.status(&request), Status::NoAuthority);
    let create = TestRequest::server(Command::Create).with(|header| header.length = 1);
    let request = world.next(create);
    assert_eq!(world.status(&request), Status::NoAuthority);
    let request = TestRequest::anywhere(Command::Create, 5, 1);
    assert_eq!(world.status(&request), Status::NoAuthority);
    world.responder.set_authority(Some(Authority { range_epoch: 4, expires_at: None }));

    let old = Location::new(ArenaGeneration::new(1).unwrap(), 1 << 39).unwrap();
    let request = read_at(&mut world, Pointer { location: old, ..at });
    assert_eq!(world.status(&request), Status::StaleGeneration);
    let request = read_at(&mut world, pointer(1 << 39, 9));
    assert_eq!(world.status(&request), Status::OutOfRange);
    let request = read_at(&mut world, pointer(4096, 9));
    assert_eq!(world.status(&request), Status::NotAllocated);
    let request = read_at(&mut world, Pointer { tag: Tag(9), ..at });
    assert_eq!(world.status(&request), Status::StaleTag);
}

#[test]
pub(super) fn another_spaces_page_is_refused() {
    let config = Config { spaces: vec![SPACE, Space(4)], ..config() };
    let mut world = World::with(&config, 8, 4096);
    let at = world.create(1);
    let address = EndpointAddress::of_shard(Space(4), SERVER, 0, 0).to_ipv6();
    let from = EndpointAddress::new(Space(4), CLIENT, 0).to_ipv6();
    let mut open = TestRequest::new(Command::Open, address).with(|header| header.length = 4096);
    open.from = from;
    let session = world.one(&open).header.session;
    let mut request = TestRequest::new(Command::Read, Pointer { space: Space(4), ..at }.to_ipv6());
    request.from = from;
    (request.header.session, request.header.sequence, request.header.length) = (session, 1, 8);
    let reply = world.one(&request);
    assert_eq!((reply.status, reply.from.space), (Status::WrongSpace, Space(4)));
}

#[test]
pub(super) fn whole_refusals_of_reads_name_every_page() {
    let mut world = World::new();
    world.responder.add_moved(0..8, NodeId(30)).unwrap();
    let request = world.read_request(pointer(100, 1), 3 * 4096);
    let replies = world.send(&request);
    let offsets: Vec<_> = replies.iter().map(|reply| reply.header.offset).collect();
    assert_eq!(offsets, [0, 3996, 8092, 12188]);
    for reply in &replies {
        assert_eq!((reply.status, reply.header.node), (Status::Moved, 30));
        assert_eq!(reply.target.location, request.to.location + u64::from(reply.header.offset));
    }
    let request = request.with(|header| header.page_shift = 1);
    assert_eq!(world.status(&request), Status::Malformed);
}

#[test]
pub(super) fn requests_that_must_get_no_reply_are_dropped() {
    let mut world = World::new();
    let multicast = |command| {
        let mut request = TestRequest::server(command);
        request.to.node = NodeId::ALL;
        request.header.target = Fields { command: 0, ..request.to }.to_ipv6();
        request
    };
    for (request, event) in [
        (multicast(Command::Invalidate), Event::DropNotice),
        (multicast(Command::Create), Event::DropMulticast),
        (
            TestRequest { from: endpoint(NodeId::ANY), ..TestRequest::server(Command::Ping) },
            Event::DropSource,
        ),
        (
            TestRequest { from: endpoint(NodeId::ALL), ..TestRequest::server(Command::Ping) },
            Event::DropSource,
        ),
    ] {
        let before = world.event(event);
        assert_eq!(world.send(&request), []);
        assert_eq!(world.event(event), before + 1, "{event:?}");
    }
    let mut request = TestRequest::server(Command::Create);
    (request.to.node, request.to.command) =
        (NodeId::ANY, WireCommand::request(Command::Read, true).bits());
    assert_eq!(world.status(&request), Status::WrongNode);
}

#[test]
pub(super) fn shards_reply_only_to_their_own_requests() {
    let config = Config { shard: 1, shard_count: 3, ..config() };
    let mut world = World::unopened(&config, 8);
    let to_shard = |shard| {
        let address = EndpointAddress::of_shard(SPACE, SERVER, shard, 9).to_ipv6();
        TestRequest::new(Command::Open, address).with(|header| header.length = 4096)
    };
    for shard in [0, 2, 3, 255] {
        assert_eq!(world.send(&to_shard(shard)), [], "{shard}");
    }
    for shard in [1, 4, 253] {
        assert_eq!(world.status(&to_shard(shard)), Status::Ok, "{shard}");
    }
    assert_eq!(world.event(Event::DropWrongShard), 4);
}

#[test]
pub(super) fn adopted_ranges_are_served_via_and_directly() {
    let mut world = World::new();
    let at = world.create(16);
    assert_eq!(at.location.page(), 0);
    let generation = at.location.generation();
    let adopted = Adopted {
        node: NodeId(30),
        // The contents began with an earlier one than the allocation has.
        generation: ArenaGeneration::new(generation.number() - 1).unwrap(),
        first_page: 80,
        page_count: 8,
        local_page: 8,
    };
    world.responder.add_adopted(adopted).unwrap();
    assert_eq!(world.responder.add_adopted(adopted), Err(RangeError::Overlap));
    let location = Location::new(generation, 81 * 4096 + 8).unwrap();
    let foreign = Pointer { node: NodeId(30), location, ..at };
    let train = world.write_train(foreign, b"adopted!");
    let mut via = train[0].clone();
    via.to.node = SERVER;
    assert_eq!(world.status(&via), Status::Ok);
    assert_eq!(world.read(page_of(at, 9), 16)[8..], *b"adopted!");
    let request = world.read_request(foreign, 8).with(|header| header.range_epoch = 1);
    let reply = world.one(&request);
    assert_eq!((reply.status, &reply.data[..]), (Status::Ok, &b"adopted!"[..]));
    assert_eq!((reply.from.node, reply.target.node), (SERVER, NodeId(30)));
    let outside = Location::new(generation, 88 * 4096).unwrap();
    let request = world.read_request(Pointer { location: outside, ..foreign }, 8);
    assert_eq!(world.status(&request), Status::WrongNode);
    let before = Location::new(ArenaGeneration::default(), location.offset()).unwrap();
    let request = world.read_request(Pointer { location: before, ..foreign }, 8);
    assert_eq!(world.status(&request), Status::WrongNode, "it belongs to earlier contents");
    assert!(world.responder.remove_adopted(&adopted));
    let request = world.read_request(foreign, 8);
    assert_eq!(world.status(&request), Status::WrongNode);
    assert_eq!(world.event(Event::ServedAdopted), 2);
}

#[test]
pub(super) fn an_endpoint_address_must_be_the_servers_and_fit_the_pointer() {
    let mut world = World::new();
    let (own, _, foreign) = world.create_adopted();
    for at in [own, foreign] {
        let request = read_at(&mut world, at).at_endpoint();
        let reply = world.one(&request);
        assert_eq!((reply.status, reply.from.node), (Status::Ok, SERVER), "{at}");
        assert_eq!(reply.from.location, request.to.location);
        assert_eq!(reply.header.target, at.to_ipv6());
        let mut entropy = read_at(&mut world, at).at_endpoint();
        entropy.to.location |= 0xfeed_f00d;
        assert_eq!(world.status(&entropy), Status::Ok, "the other bits do not count");

        let mut refused = |change: fn(&mut TestRequest), status| {
            let mut request = read_at(&mut world, at).at_endpoint();
            change(&mut request);
            assert_eq!(world.status(&request), status, "{at} {request:?}");
        };
        refused(|request| request.to.tag = 1, Status::Malformed);
        refused(|request| request.to.location ^= 1 << 40, Status::Malformed);
        refused(|request| request.to.space = Space(4), Status::Malformed);
        refused(|request| request.to.node = NodeId(11), Status::WrongNode);
        refused(|request| request.to.node = NodeId::ANY, Status::WrongNode);
        // That its ranges are served here does not make another node's endpoint this one.
        refused(|request| request.to.node = NodeId(4), Status::WrongNode);
    }
    let mut ping = TestRequest::server(Command::Ping);
    ping.to.node = NodeId(4);
    ping.header.target = Fields { command: 0, ..ping.to }.to_ipv6();
    assert_eq!(world.status(&ping), Status::WrongNode);
    let elsewhere = read_at(&mut world, Pointer { node: NodeId(11), ..own }).at_endpoint();
    assert_eq!(world.status(&elsewhere), Status::WrongNode, "the pages of node 11 are not here");
    let mut create = TestRequest::anywhere(Command::Create, 5, 1);
    create.header.target = own.to_ipv6();
    assert_eq!(world.status(&create), Status::Malformed);
}

#[test]
pub(super) fn every_shard_serves_its_pointers_at_its_own_endpoint_address() {
    let config = Config { shard: 1, shard_count: 3, ..config() };
    let mut world = World::unopened(&config, 8);
    let own = |shard| EndpointAddress::of_shard(SPACE, SERVER, shard, 0).to_ipv6();
    let open = TestRequest::new(Command::Open, own(1)).with(|header| header.length = 4096);
    world.session = world.one(&open).header.session;
    let in_shard = |shard: u64| pointer(shard << 40, 1);
    let request = read_at(&mut world, in_shard(1)).at_endpoint();
    assert_eq!(world.status(&request), Status::OutOfRange, "as at the pointer");
    // The core that serves shard 4 is this one, but the pointer is of shard 1.
    let mut request = read_at(&mut world, in_shard(1)).at_endpoint();
    request.to.location = Fields::unpack(own(4)).unwrap().location;
    assert_eq!(world.status(&request), Status::Malformed);
    let before = world.event(Event::DropWrongShard);
    let request = read_at(&mut world, in_shard(2)).at_endpoint();
    assert_eq!(world.send(&request), []);
    assert_eq!(world.event(Event::DropWrongShard), before + 1);
}

#[test]
pub(super) fn ranges_are_whole_lines_without_overlap_and_bounded() {
    let config = Config { limits: Limits { range_count: 2, ..Limits::default() }, ..config() };
    let mut responder = Responder::new(&config).unwrap();
    assert_eq!(responder.add_moved(4..8, CLIENT), Err(RangeError::Unaligned));
    assert_eq!(responder.add_moved(8..8, CLIENT), Err(RangeError::Unaligned));
    responder.add_moved(16..32, CLIENT).unwrap();
    for overlap in [8..24, 16..24, 24..40, 0..80] {
        assert_eq!(responder.add_moved(overlap, CLIENT), Err(RangeError::Overlap));
    }
    responder.add_moved(8..16, CLIENT).unwrap();
    assert_eq!(responder.add_moved(40..48, CLIENT), Err(RangeError::Full));
    assert!(responder.remove_moved(&(8..16)));
    assert!(!responder.remove_moved(&(8..16)));
}

#[test]
pub(super) fn invalid_configurations_are_refused() {
    let refused = |change: fn(&mut Config)| {
        let mut config = config();
        change(&mut config);
        Responder::new(&config).err().expect("refused").to_string()
    };
    assert!(refused(|config| config.node = NodeId::ANY).contains("node 0"));
    assert!(refused(|config| config.spaces.clear()).contains("space"));
    assert!(refused(|config| config.spaces.push(SPACE)).contains("space"));
    assert!(refused(|config| config.shard = 1).contains("shard 1 of 1"));
    assert!(refused(|config| config.piece_bytes = 1023).contains("1023"));
    assert!(refused(|config| config.limits.reply_count = 63).contains("reply_count"));
}

/// Authors of another implementation have the documentation only.
#[test]
fn the_documentation_states_the_limits() {
    let book = include_str!("../../../../docs/protocol.md");
    let thousands = |number: u64| match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", number / 1000, number % 1000),
    };
    let limits = Limits::default();
    for (name, number) in [
        ("sessions", u64::from(limits.session_count)),
        ("sessions of one node", limits.node_session_count.into()),
        ("window of a session, in numbers", bluebridge_wire::SESSION_WINDOW),
        ("credit of all sessions together, in pages", limits.credit_pages.into()),
        ("buffered pages of trains", limits.buffer_pages.into()),
        ("buffered pages of one node", limits.node_buffer_pages.into()),
        ("anywhere-CREATEs without CONFIRM", limits.provisional_count.into()),
        ("leased pages", limits.lease_count.into()),
        ("requests that wait for leased pages", limits.wait_count.into()),
    ] {
        let row = format!("| {name} | {} |", thousands(number));
        assert!(book.contains(&row), "{row}");
    }
    let credit =
        format!("| credit of a session, in pages | at most {}", Limits::SESSION_CREDIT_PAGES);
    assert!(book.contains(&credit), "{credit}");
    for mtu in [1280, 1500, 2180, 4228] {
        let bytes = bluebridge_wire::piece_bytes(mtu).unwrap();
        let row = format!("{bytes} | {} |", PAGE_BYTES.div_ceil(bytes));
        let line = book.lines().find(|line| line.starts_with(&format!("| {mtu}")));
        assert!(line.is_some_and(|line| line.ends_with(&row)), "{mtu}: {row}");
    }
    assert_eq!(bluebridge_wire::piece_bytes(4227), Some(2048), "4228 is the least for a page");
    let mut world = World::unopened(&config(), 1);
    for command in [Command::Ping, Command::Stat] {
        assert_eq!(world.status(&TestRequest::server(command)), Status::NoSession, "as documented");
    }
    let small = open(CLIENT, 1, 1, 1023);
    assert_eq!(world.status(&small), Status::BadLength, "as documented");
}

#[test]
fn limits_accept_their_documented_bounds() {
    type Field = fn(&mut Limits) -> &mut u16;
    let check = |limits| Config { limits, ..config() }.check();
    let set: [(Field, u16, u16); 6] = [
        (|limits| &mut limits.session_count, 1, 65535),
        (|limits| &mut limits.buffer_pages, 8, 65534),
        (|limits| &mut limits.lease_count, 8, 65535),
        (|limits| &mut limits.wait_count, 1, 65534),
        (|limits| &mut limits.range_count, 1, 65535),
        (|limits| &mut limits.reply_count, 64, 65535),
    ];
    for (field, least, most) in set {
        for (value, is_allowed) in
            [(least, true), (most, true), (least - 1, false), (most.wrapping_add(1), false)]
        {
            let mut limits = Limits::default();
            *field(&mut limits) = value;
            assert_eq!(check(limits).is_ok(), is_allowed, "{value} of {least} to {most}");
        }
    }
}
