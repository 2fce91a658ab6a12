//! Section 7 of the contract: every check, and that the earlier one speaks first.

use bluebridge_wire::{ArenaGeneration, Features};

use super::*;

fn read_at(world: &mut World, at: Pointer) -> Ask {
    world.read_ask(at, 64)
}

#[test]
pub(super) fn malformed_datagrams_are_dropped_and_counted() {
    let mut world = World::new();
    let mut ask = Ask::server(Command::Ping);
    ask.from = Ipv6Addr::LOCALHOST;
    assert_eq!(world.send(&ask), []);
    assert_eq!(world.event(Event::DropForeignSource), 1);
}

#[test]
pub(super) fn destination_comes_first() {
    let mut world = World::new();
    let at = world.create(1);
    // Everything is wrong with it; the node speaks first.
    let other = Pointer { node: NodeId(11), ..at };
    let mut ask = read_at(&mut world, other);
    ask.header.required = Features(1);
    ask.header.session = 99;
    ask.header.target = pointer(0, 0).to_ipv6();
    assert_eq!(world.status(&ask), Status::WrongNode);
    // Then whether the addresses and the header agree.
    let mut ask = read_at(&mut world, at);
    ask.header.required = Features(1);
    ask.header.target = page_of(at, 1).to_ipv6();
    assert_eq!(world.status(&ask), Status::Malformed);
    let mut ask = read_at(&mut world, at);
    ask.header.target = Pointer { tag: Tag(at.tag.0 + 1), ..at }.to_ipv6();
    assert_eq!(world.status(&ask), Status::Malformed);
    let mut ask = read_at(&mut world, at);
    ask.header.target = Pointer { space: Space(4), ..at }.to_ipv6();
    assert_eq!(world.status(&ask), Status::Malformed);
}

#[test]
pub(super) fn features_command_and_key_come_next() {
    let mut world = World::new();
    let mut ask = Ask::server(Command::Update);
    ask.header.required = Features(0x8001);
    ask.header.key_id = 1;
    let reply = world.one(&ask);
    assert_eq!((reply.status, reply.header.detail), (Status::UnsupportedFeature, 0x8001));
    ask.header.required = Features(0);
    for code in (17..24).chain(26..64) {
        ask.to.command = code;
        let reply = world.one(&ask);
        assert_eq!((reply.status, reply.from.command), (Status::UnknownCommand, 0x80 | code));
    }
    let mut ask = Ask::server(Command::Ping);
    ask.header.key_id = 1;
    ask.from = EndpointAddress::new(Space(4), CLIENT, 0).to_ipv6();
    assert_eq!(world.status(&ask), Status::Unauthenticated);
    let mut ask = Ask::server(Command::Ping).carrying(&[0; 16]);
    ask.header.flags = Flags::default().with_trailer_units(1);
    assert_eq!(world.status(&ask), Status::Unauthenticated);
}

#[test]
pub(super) fn spaces_are_checked_before_sessions() {
    let mut world = World::new();
    let mut ask = Ask::server(Command::Ping);
    ask.from = EndpointAddress::new(Space(4), CLIENT, 0).to_ipv6();
    assert_eq!(world.status(&ask), Status::WrongSpace);
    // A space that is not served is answered from the own one.
    let address = EndpointAddress::of_shard(Space(4), SERVER, 0, 0).to_ipv6();
    let mut ask = Ask::new(Command::Ping, address);
    ask.from = EndpointAddress::new(Space(4), CLIENT, 0).to_ipv6();
    let reply = world.one(&ask);
    assert_eq!((reply.status, reply.from.space), (Status::WrongSpace, SPACE));
}

#[test]
pub(super) fn sessions_are_checked_before_the_shape() {
    let mut world = World::new();
    let at = world.create(1);
    let mut ask = read_at(&mut world, at).with(|header| header.length = 0);
    ask.header.session ^= 1 << 40;
    assert_eq!(world.status(&ask), Status::NoSession);
    ask.header.session = 0;
    assert_eq!(world.status(&ask), Status::NoSession);
    ask.header.session = world.session;
    ask.from = endpoint(NodeId(21));
    assert_eq!(world.status(&ask), Status::NoSession);
    ask.from = endpoint(CLIENT);
    ask.header.incarnation = 0;
    assert_eq!(world.status(&ask), Status::StaleIncarnation);
    ask.header.incarnation = 2;
    assert_eq!(world.status(&ask), Status::NoSession);
    ask.header.incarnation = 1;
    ask.header.sequence = 0;
    assert_eq!(world.status(&ask), Status::Expired);
    ask.header.sequence = world.sequence + 600;
    ask.header.answered_distance = 600;
    assert_eq!(world.status(&ask), Status::BeyondWindow);
}

#[test]
pub(super) fn shapes_are_checked_before_the_range() {
    let mut world = World::new();
    let stale = pointer(0, 200);
    let end = pointer(7 * 4096 + 4000, 200);
    let mut bad = |ask: Ask, change: fn(&mut Ask), status| {
        let mut ask = world.next(ask);
        change(&mut ask);
        assert_eq!(world.status(&ask), status, "{ask:?}");
    };
    let ask = |command, at: Pointer| Ask::new(command, at.to_ipv6());
    for command in [Command::Read, Command::Write] {
        bad(ask(command, stale), |_| {}, Status::BadLength);
        bad(ask(command, end), |ask| ask.header.length = 97, Status::BadLength);
        bad(ask(command, stale), |ask| ask.header.length = 32769, Status::BadLength);
        bad(ask(command, stale), |ask| ask.header.length = u32::MAX, Status::BadLength);
        bad(ask(command, stale), |ask| ask.header.page_shift = 13, Status::Malformed);
    }
    let long = |ask: &mut Ask| ask.header.length = 8;
    bad(ask(Command::Read, stale).carrying(b"x"), long, Status::Malformed);
    let nothing_wanted = |ask: &mut Ask| {
        (ask.header.length, ask.header.flags) = (8, Flags::SELECTIVE);
        ask.header.detail = 2;
    };
    bad(ask(Command::Read, stale), nothing_wanted, Status::Malformed);
    bad(ask(Command::Write, stale).carrying(b"1234567"), long, Status::Malformed);
    let inside = |ask: &mut Ask| (ask.header.length, ask.header.offset) = (8, 1);
    bad(ask(Command::Write, stale).carrying(b"1234567"), inside, Status::Malformed);
    let zero = |ask: &mut Ask| zeroing(&mut ask.header);
    bad(ask(Command::Delete, stale), zero, Status::BadLength);
    bad(ask(Command::Delete, moved_by(stale, 8)), |_| {}, Status::Unaligned);
    bad(ask(Command::Confirm, moved_by(stale, 8)), long, Status::Unaligned);
    bad(ask(Command::Confirm, stale), |_| {}, Status::BadLength);
    bad(ask(Command::CompareSwap, moved_by(stale, 4)), long, Status::Unaligned);
    bad(ask(Command::CompareSwap, stale), |ask| ask.header.length = 4, Status::BadLength);
    bad(ask(Command::CompareSwap, stale).carrying(&[0; 8]), long, Status::Malformed);
    bad(ask(Command::FetchAdd, stale).carrying(&[0; 16]), long, Status::Malformed);
    bad(ask(Command::FetchAdd, stale).carrying(&[0; 9]), long, Status::Malformed);
    let server = Ask::server;
    bad(server(Command::Read), long, Status::Malformed);
    bad(server(Command::Write), long, Status::Malformed);
    bad(server(Command::Delete), |_| {}, Status::Malformed);
    bad(server(Command::FetchAdd), long, Status::Malformed);
    bad(server(Command::Confirm), long, Status::Malformed);
    bad(server(Command::Create), |_| {}, Status::BadLength);
    bad(ask(Command::Create, stale), long, Status::Malformed);
    bad(server(Command::Create).carrying(b"x"), long, Status::Malformed);
    bad(server(Command::AllocWrite), |_| {}, Status::BadLength);
    bad(server(Command::AllocWrite), |ask| ask.header.length = 32769, Status::BadLength);
    bad(server(Command::AllocWrite), long, Status::Malformed);
    bad(ask(Command::AllocWrite, stale).carrying(&[0; 8]), long, Status::Malformed);
    bad(server(Command::Stat).carrying(b"x"), |_| {}, Status::Malformed);
    bad(server(Command::Ping).carrying(&[0; 65]), |_| {}, Status::BadLength);
    bad(server(Command::Ping), |ask| ask.header.page_shift = 0, Status::Malformed);
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
    let ask = read_at(&mut world, moved).with(|header| header.range_epoch = 1);
    let reply = world.one(&ask);
    assert_eq!((reply.status, reply.header.node), (Status::Moved, 30));
    assert_eq!(reply.header.range_epoch, 1);
    let mut via = read_at(&mut world, Pointer { node: NodeId(31), ..at });
    via.to.node = SERVER;
    assert_eq!(world.status(&via), Status::WrongNode);

    world.responder.set_authority(None);
    let ask = read_at(&mut world, moved);
    assert_eq!(world.status(&ask), Status::Moved);
    let ask = read_at(&mut world, at);
    assert_eq!(world.status(&ask), Status::NoAuthority);
    let ends = world.now + Duration::from_millis(1);
    let authority = Authority { range_epoch: 4, expires_at: Some(ends) };
    world.responder.set_authority(Some(authority));
    let ask = read_at(&mut world, at);
    assert_eq!(world.one(&ask).header.range_epoch, 4);
    world.now = ends;
    let ask = read_at(&mut world, at);
    assert_eq!(world.status(&ask), Status::NoAuthority);
    let create = Ask::server(Command::Create).with(|header| header.length = 1);
    let ask = world.next(create);
    assert_eq!(world.status(&ask), Status::NoAuthority);
    let ask = Ask::anywhere(Command::Create, 5, 1);
    assert_eq!(world.status(&ask), Status::NoAuthority);
    world.responder.set_authority(Some(Authority { range_epoch: 4, expires_at: None }));

    let old = Location::new(ArenaGeneration::new(1).unwrap(), 1 << 39).unwrap();
    let ask = read_at(&mut world, Pointer { location: old, ..at });
    assert_eq!(world.status(&ask), Status::StaleGeneration);
    let ask = read_at(&mut world, pointer(1 << 39, 9));
    assert_eq!(world.status(&ask), Status::OutOfRange);
    let ask = read_at(&mut world, pointer(4096, 9));
    assert_eq!(world.status(&ask), Status::NotAllocated);
    let ask = read_at(&mut world, Pointer { tag: Tag(9), ..at });
    assert_eq!(world.status(&ask), Status::StaleTag);
}

#[test]
pub(super) fn another_spaces_page_is_refused() {
    let config = Config { spaces: vec![SPACE, Space(4)], ..config() };
    let mut world = World::with(&config, 8, 4096);
    let at = world.create(1);
    let address = EndpointAddress::of_shard(Space(4), SERVER, 0, 0).to_ipv6();
    let from = EndpointAddress::new(Space(4), CLIENT, 0).to_ipv6();
    let mut open = Ask::new(Command::Open, address).with(|header| header.length = 4096);
    open.from = from;
    let session = world.one(&open).header.session;
    let mut ask = Ask::new(Command::Read, Pointer { space: Space(4), ..at }.to_ipv6());
    ask.from = from;
    (ask.header.session, ask.header.sequence, ask.header.length) = (session, 1, 8);
    let reply = world.one(&ask);
    assert_eq!((reply.status, reply.from.space), (Status::WrongSpace, Space(4)));
}

#[test]
pub(super) fn whole_refusals_of_reads_name_every_page() {
    let mut world = World::new();
    world.responder.add_moved(0..8, NodeId(30)).unwrap();
    let ask = world.read_ask(pointer(100, 1), 3 * 4096);
    let replies = world.send(&ask);
    let offsets: Vec<_> = replies.iter().map(|reply| reply.header.offset).collect();
    assert_eq!(offsets, [0, 3996, 8092, 12188]);
    for reply in &replies {
        assert_eq!((reply.status, reply.header.node), (Status::Moved, 30));
        assert_eq!(reply.target.location, ask.to.location + u64::from(reply.header.offset));
    }
    let ask = ask.with(|header| header.page_shift = 1);
    assert_eq!(world.status(&ask), Status::Malformed);
}

#[test]
pub(super) fn what_nobody_may_answer_is_dropped() {
    let mut world = World::new();
    let multicast = |command| {
        let mut ask = Ask::server(command);
        ask.to.node = NodeId::ALL;
        ask.header.target = Fields { command: 0, ..ask.to }.to_ipv6();
        ask
    };
    for (ask, event) in [
        (multicast(Command::Invalidate), Event::DropNotice),
        (multicast(Command::Create), Event::DropMulticast),
        (Ask { from: endpoint(NodeId::ANY), ..Ask::server(Command::Ping) }, Event::DropSource),
        (Ask { from: endpoint(NodeId::ALL), ..Ask::server(Command::Ping) }, Event::DropSource),
    ] {
        let before = world.event(event);
        assert_eq!(world.send(&ask), []);
        assert_eq!(world.event(event), before + 1, "{event:?}");
    }
    let mut ask = Ask::server(Command::Create);
    (ask.to.node, ask.to.command) = (NodeId::ANY, WireCommand::request(Command::Read, true).bits());
    assert_eq!(world.status(&ask), Status::WrongNode);
}

#[test]
pub(super) fn shards_answer_only_for_themselves() {
    let config = Config { shard: 1, shard_count: 3, ..config() };
    let mut world = World::unopened(&config, 8);
    let to_shard = |shard| {
        let address = EndpointAddress::of_shard(SPACE, SERVER, shard, 9).to_ipv6();
        Ask::new(Command::Open, address).with(|header| header.length = 4096)
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
    let generation = ArenaGeneration::new(7).unwrap();
    let adopted = Adopted {
        node: NodeId(30),
        generation,
        first_page: 80,
        page_count: 8,
        local_page: 8,
        local_generation: store::GENERATION,
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
    let ask = world.read_ask(foreign, 8).with(|header| header.range_epoch = 1);
    let reply = world.one(&ask);
    assert_eq!((reply.status, &reply.data[..]), (Status::Ok, &b"adopted!"[..]));
    assert_eq!((reply.from.node, reply.target.node), (SERVER, NodeId(30)));
    let outside = Location::new(generation, 88 * 4096).unwrap();
    let ask = world.read_ask(Pointer { location: outside, ..foreign }, 8);
    assert_eq!(world.status(&ask), Status::WrongNode);
    assert!(world.responder.remove_adopted(&adopted));
    let ask = world.read_ask(foreign, 8);
    assert_eq!(world.status(&ask), Status::WrongNode);
    assert_eq!(world.event(Event::ServedAdopted), 2);
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
pub(super) fn wrong_configurations_are_refused() {
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

/// Whoever writes another implementation has the book only.
#[test]
fn the_book_tells_the_limits() {
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
    for mtu in [1280, 1500, 4228] {
        let bytes = bluebridge_wire::piece_bytes(mtu).unwrap();
        let row = format!("{bytes} | {} |", PAGE_BYTES.div_ceil(bytes));
        let line = book.lines().find(|line| line.starts_with(&format!("| {mtu}")));
        assert!(line.is_some_and(|line| line.ends_with(&row)), "{mtu}: {row}");
    }
    assert_eq!(bluebridge_wire::piece_bytes(4227), Some(4088), "4228 is the least for a page");
    let mut world = World::unopened(&config(), 1);
    for command in [Command::Ping, Command::Stat] {
        assert_eq!(world.status(&Ask::server(command)), Status::NoSession, "as the book says");
    }
    let small = open(CLIENT, 1, 1, 1023);
    assert_eq!(world.status(&small), Status::BadLength, "as the book says");
}

#[test]
fn limits_may_be_as_small_and_as_large_as_is_said() {
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
