use std::collections::{BTreeMap, BTreeSet};

use bluebridge_p4::pipeline::{Action, Forward, MacAddr, WeightedForward};
use proptest::prelude::*;

use super::*;

const SPACE: Space = Space(1);

fn ports(count: u16) -> Ports {
    Ports::Listed((1..=count).map(|port| (SwitchPort(port), format!("sw{port}"))).collect())
}

fn mac(number: u16) -> MacAddr {
    let [high, low] = number.to_be_bytes();
    MacAddr([2, 0, 0, 0, high, low])
}

fn client(name: &str, port: u16) -> Join {
    Join {
        name: name.to_owned(),
        role: Role::Client,
        space: SPACE,
        mac: mac(port),
        attachment: Attachment::Port(SwitchPort(port)),
        capacity_pages: 0,
        shard_count: 0,
        carrier: Carrier::Socket,
        mtu: 9000,
        nonce: 1,
        previous: None,
        notices: true,
    }
}

fn memory(name: &str, port: u16, capacity_pages: u64) -> Join {
    Join { role: Role::Memory, capacity_pages, shard_count: 1, ..client(name, port) }
}

fn again(join: &Join) -> Join {
    Join { nonce: join.nonce + 1, ..join.clone() }
}

fn core() -> (Core, Instant) {
    let now = Instant::now();
    let mut core = Core::new(CoreConfig::default(), Stored::default(), 1, now);
    core.learn_ports(ports(16));
    (core, now)
}

fn join(core: &mut Core, now: Instant, join: &Join) -> NodeRecord {
    core.join(now, join, [7; 16]).unwrap().0
}

fn member(record: &NodeRecord) -> Member {
    Member { node: record.id(), incarnation: record.incarnation, token: record.token }
}

fn shown(record: &NodeRecord, contents_kept: bool) -> Option<Previous> {
    Some(Previous { node: record.id(), token: record.token, contents_kept })
}

fn refusal(core: &mut Core, now: Instant, join: &Join) -> String {
    let before = core.desired();
    let text = core.join(now, join, [8; 16]).unwrap_err().to_string();
    assert_eq!(core.desired(), before, "a refused join changed the tables");
    text
}

#[test]
fn memory_is_numbered_from_below_and_clients_from_above() {
    let (mut core, now) = core();
    assert_eq!(join(&mut core, now, &memory("m1", 1, 10)).node, 1);
    assert_eq!(join(&mut core, now, &client("c1", 2)).node, 0xfffe);
    assert_eq!(join(&mut core, now, &memory("m2", 3, 10)).node, 2);
}

#[test]
fn a_repeated_join_is_answered_alike_and_a_new_one_is_a_new_incarnation() {
    let (mut core, now) = core();
    let request = memory("m1", 1, 10);
    let first = join(&mut core, now, &request);
    assert_eq!(join(&mut core, now, &request), first);
    let second = join(&mut core, now, &again(&request));
    assert_eq!((second.node, second.incarnation), (first.node, 2));
    assert_eq!((first.generations(), second.generations()), (0..=1, 2..=3));
}

/// Joins with a new secret, as the service does.
fn join_anew(core: &mut Core, now: Instant, join: &Join, secret: u8) -> NodeRecord {
    core.join(now, join, [secret; 16]).unwrap().0
}

#[test]
fn only_who_shows_the_token_keeps_it() {
    let (mut core, now) = core();
    let request = memory("m1", 1, 10);
    let first = join_anew(&mut core, now, &request, 1);
    let proven = Join { previous: shown(&first, false), ..again(&request) };
    let second = join_anew(&mut core, now, &proven, 2);
    assert_eq!((second.token, second.incarnation), (first.token, 2));

    // From the same interface, while the holder is live.
    let unproven = Join { previous: None, ..again(&proven) };
    let third = join_anew(&mut core, now, &unproven, 3);
    assert_eq!((third.node, third.token, third.incarnation), (first.node, [3; 16], 3));
    let stale = MemberError::Stale { node: 1, caller: 2, current: 3 };
    assert_eq!(core.heartbeat(now, member(&second), 1), Err(stale), "it gets the reason");
    let forged = Member { token: second.token, ..member(&third) };
    assert_eq!(core.leave(now, forged), Err(MemberError::WrongToken(1)));
    let kept = Join { previous: shown(&second, true), ..again(&unproven) };
    assert!(
        refusal(&mut core, now, &kept).contains("not from this rack"),
        "the old token is invalid"
    );

    // From any port, once the holder is silent; a wrong token is no better than none.
    let silent = now + core.silence();
    core.handle_timeout(silent);
    let wrong = Previous { token: [9; 16], ..shown(&third, false).unwrap() };
    let elsewhere = Join { previous: Some(wrong), ..memory("m1", 2, 10) };
    let fourth = join_anew(&mut core, silent, &Join { nonce: 77, ..elsewhere }, 4);
    assert_eq!((fourth.node, fourth.token, fourth.port), (first.node, [4; 16], 2));

    // And after it left.
    core.leave(silent, member(&fourth)).unwrap();
    let fifth = join_anew(&mut core, silent, &Join { nonce: 78, ..memory("m1", 1, 10) }, 5);
    assert_eq!((fifth.node, fifth.token), (first.node, [5; 16]));
}

#[test]
fn a_clients_token_proves_no_contents() {
    let (mut core, now) = core();
    let first = join(&mut core, now, &client("a", 1));
    core.leave(now, member(&first)).unwrap();
    let kept = Join { previous: shown(&first, true), ..again(&memory("a", 1, 10)) };
    assert!(refusal(&mut core, now, &kept).contains("not from this rack"));
    assert_eq!(join(&mut core, now, &Join { previous: None, ..kept }).node, 1);
}

#[test]
fn kept_contents_keep_the_generation_and_need_the_token() {
    let (mut core, now) = core();
    let request = memory("m1", 1, 10);
    let first = join(&mut core, now, &request);
    let kept = Join { previous: shown(&first, true), ..again(&request) };
    let second = join(&mut core, now, &kept);
    assert_eq!((second.generations(), second.incarnation), (0..=1, 2));
    assert!(second.range_epoch > first.range_epoch);
    let mut forged = again(&kept);
    forged.previous = Some(Previous { token: [9; 16], ..forged.previous.unwrap() });
    assert!(refusal(&mut core, now, &forged).contains("not from this rack"));
    let stranger = Join { name: "m9".to_owned(), ..memory("m9", 2, 10) };
    let stranger = Join { previous: shown(&first, true), ..stranger };
    assert!(refusal(&mut core, now, &stranger).contains("not from this rack"));
}

#[test]
fn memory_begins_at_the_generation_of_the_store() {
    let now = Instant::now();
    let stored = Stored { first_generation: 0x1234, ..Stored::default() };
    let mut core = Core::new(CoreConfig::default(), stored, 1, now);
    core.learn_ports(ports(16));
    let request = memory("m1", 1, 10);
    assert_eq!(join(&mut core, now, &request).generation, 0x1234);
    assert_eq!(join(&mut core, now, &again(&request)).generation, 0x1236);
    assert_eq!(join(&mut core, now, &memory("m2", 2, 10)).generation, 0x1234);
    assert_eq!(join(&mut core, now, &client("c1", 3)).generation, 0);
}

#[test]
fn generations_are_reserved_once_and_for_good() {
    let (mut core, now) = core();
    let request = memory("m1", 1, 10);
    let first = join(&mut core, now, &request);
    drop((core.take_changes(), core.take_dirty()));
    let last = |core: &Core| core.node(first.id()).unwrap().record.last_generation;
    core.reserve(member(&first), 0).unwrap();
    core.reserve(member(&first), 1).unwrap();
    assert_eq!((last(&core), core.take_changes()), (1, vec![]));
    core.reserve(member(&first), 5).unwrap();
    let stored = core.node(first.id()).unwrap().record.clone();
    assert_eq!((last(&core), core.take_changes()), (5, vec![Change::Node(stored)]));
    assert!(core.take_dirty());
    assert_eq!(core.endpoints()[&first.id()].generations, (0, 5), "for redirects");
    // A repetition, also one that comes late.
    core.reserve(member(&first), 5).unwrap();
    core.reserve(member(&first), 3).unwrap();
    assert_eq!((last(&core), core.take_changes()), (5, vec![]));
    core.reserve(member(&first), u16::MAX).unwrap();
    assert_eq!(last(&core), 5 + HEARTBEAT_GENERATIONS_MAX, "no more at once");
    // The next life begins behind, and the one before gets no more.
    let second = join(&mut core, now, &again(&request));
    assert_eq!(second.generations(), 70..=71);
    assert!(matches!(core.reserve(member(&first), 75), Err(MemberError::Stale { .. })));
    let c1 = join(&mut core, now, &client("c1", 3));
    core.reserve(member(&c1), 9).unwrap();
    assert_eq!(core.node(c1.id()).unwrap().record.last_generation, 0, "a client has no arena");
    // A record of a controller that reserved one for each life.
    core.nodes.get_mut(&second.id()).unwrap().record.last_generation = 0;
    assert_eq!(join(&mut core, now, &again(&again(&request))).generations(), 71..=72);
}

#[test]
fn used_up_generations_make_a_new_node() {
    let (mut core, now) = core();
    let request = memory("m1", 1, 10);
    let first = join(&mut core, now, &request);
    core.nodes.get_mut(&first.id()).unwrap().record.last_generation = 0x7ffe;
    core.reserve(member(&first), u16::MAX).unwrap();
    assert_eq!(core.node(first.id()).unwrap().record.last_generation, 0x7fff);
    let second = join(&mut core, now, &again(&request));
    assert_eq!((second.node, second.generation, second.incarnation), (2, 0, 1));
    assert!(core.node(first.id()).unwrap().record.retired);
    let kept = Join { previous: shown(&second, true), ..again(&again(&request)) };
    assert_eq!(join(&mut core, now, &kept).node, 2);
}

#[test]
fn live_endpoints_keep_name_port_and_mac() {
    let (mut core, now) = core();
    join(&mut core, now, &memory("m1", 1, 10));
    join(&mut core, now, &client("c1", 2));
    assert!(refusal(&mut core, now, &client("c2", 2)).contains("port 2 is in use"));
    let same_mac = Join { mac: mac(2), ..client("c2", 3) };
    assert!(refusal(&mut core, now, &same_mac).contains("02:00:00:00:00:02 is in use"));
    assert!(refusal(&mut core, now, &again(&client("c1", 3))).contains("the name c1 is in use"));
    let silent = now + core.silence();
    core.handle_timeout(silent);
    let successor = join(&mut core, silent, &client("c2", 2));
    assert!(core.node(successor.id()).unwrap().live);
    let c1 = core.nodes().find(|node| node.record.name == "c1").unwrap();
    assert!(!c1.record.attached, "the silent endpoint made room");
}

#[test]
fn a_successor_on_the_same_interface_fences_its_predecessor() {
    let (mut core, now) = core();
    let first = join(&mut core, now, &client("c1", 2));
    let second = join(&mut core, now, &again(&client("c1", 2)));
    assert_eq!(second.node, first.node);
    let error = core.heartbeat(now, member(&first), 0).unwrap_err();
    assert_eq!(error, MemberError::Stale { node: first.node, caller: 1, current: 2 });
    assert!(core.heartbeat(now, member(&second), 0).is_ok());
    let forged = Member { token: [0; 16], ..member(&second) };
    assert_eq!(core.leave(now, forged), Err(MemberError::WrongToken(first.node)));
    let unknown = Member { node: NodeId(99), ..forged };
    assert_eq!(core.heartbeat(now, unknown, 0), Err(MemberError::Unknown(99)));
}

#[test]
fn names_of_memory_nodes_stay_theirs() {
    let (mut core, now) = core();
    let first = join(&mut core, now, &memory("a", 1, 10));
    core.leave(now, member(&first)).unwrap();
    core.leave(now, member(&first)).unwrap();
    assert!(refusal(&mut core, now, &client("a", 1)).contains("a memory node of space 1"));
    let elsewhere = Join { space: Space(2), ..memory("a", 1, 10) };
    assert!(refusal(&mut core, now, &again(&elsewhere)).contains("a memory node of space 1"));
    let client_first = join(&mut core, now, &client("b", 2));
    core.leave(now, member(&client_first)).unwrap();
    assert_eq!(join(&mut core, now, &again(&memory("b", 2, 10))).node, 2);
}

#[test]
fn client_ids_are_quarantined_before_reuse() {
    let (mut core, now) = core();
    let first = join(&mut core, now, &client("a", 1));
    core.leave(now, member(&first)).unwrap();
    let early = join(&mut core, now, &client("b", 1));
    assert_eq!(early.node, 0xfffd);
    let rested = now + core.config.client_quarantine;
    let late = core.join(rested, &client("c", 2), [9; 16]).unwrap().0;
    assert_eq!((late.node, late.incarnation), (0xfffe, 2));
    assert_ne!(late.token, first.token);
    let stale = MemberError::Stale { node: first.node, caller: 1, current: 2 };
    assert_eq!(core.heartbeat(rested, member(&first), 0), Err(stale), "the id's former holder");
    let forged = Member { incarnation: 2, ..member(&first) };
    assert_eq!(core.heartbeat(rested, forged, 0), Err(MemberError::WrongToken(first.node)));
    let back = join(&mut core, rested, &again(&client("a", 3)));
    assert_ne!(back.node, late.node, "the name went with the id");
}

#[test]
fn addresses_and_ports_of_the_infrastructure_are_refused() {
    let now = Instant::now();
    let own = ControllerPort { port: SwitchPort(16), mac: mac(16) };
    let config = CoreConfig { own_port: Some(own), ..CoreConfig::default() };
    let mut core = Core::new(config.clone(), Stored::default(), 1, now);
    core.learn_ports(ports(16));
    let claim = |mac, port| Join { mac, ..client("thief", port) };
    let way = Key::L2 { dst_mac: own.mac };
    let to_controller = Action::Forward(Forward { port: own.port, dst_mac: own.mac });
    assert_eq!(core.desired().entries[&way], Body::new(to_controller.clone()), "before any join");
    for (join, owner) in [
        (claim(own.mac, 1), "02:00:00:00:00:10 is reserved for the controller"),
        (claim(mac(1), 16), "port 16 is reserved for the controller"),
        (claim(GATEWAY_MAC, 1), "02:bb:00:00:00:01 is reserved for the gateway"),
    ] {
        let refused = refusal(&mut core, now, &join);
        assert!(refused.contains(owner), "{refused}");
    }
    join(&mut core, now, &client("honest", 1));
    assert_eq!(core.desired().entries[&way].action, Some(to_controller.clone()));

    // A controller without knowledge of its own port may have admitted such an endpoint.
    let mut careless = Core::new(CoreConfig::default(), Stored::default(), 1, now);
    careless.learn_ports(ports(16));
    join(&mut careless, now, &claim(own.mac, 1));
    let mut disk = Disk::default();
    disk.write(careless.take_changes());
    let mut core = Core::new(config, disk.load(), 2, now);
    core.learn_ports(ports(16));
    assert_eq!(core.desired().entries[&way].action, Some(to_controller));
    core.learn_ports(ports(15));
    assert!(
        !core.desired().entries.values().any(|body| matches!(
            body.action,
            Some(Action::Forward(Forward { port: SwitchPort(16), .. }))
        )),
        "a switch without the port gets no entry for it"
    );
}

#[test]
fn attachments_are_checked_against_the_switch() {
    let (mut core, now) = core();
    assert!(refusal(&mut core, now, &client("a", 17)).contains("no port 17"));
    let by_name =
        |name: &str| Join { attachment: Attachment::Interface(name.to_owned()), ..client("a", 3) };
    assert!(refusal(&mut core, now, &by_name("sw99")).contains("no interface sw99"));
    assert_eq!(join(&mut core, now, &by_name("sw3")).port, 3);

    let mut unreached = Core::new(CoreConfig::default(), Stored::default(), 1, now);
    assert!(refusal(&mut unreached, now, &client("a", 1)).contains("not reached"));
    unreached.learn_ports(Ports::Unlisted);
    assert!(refusal(&mut unreached, now, &client("a", 510)).contains("no port 510"));
    assert!(refusal(&mut unreached, now, &by_name("sw1")).contains("use the port's number"));
    assert_eq!(join(&mut unreached, now, &client("a", 509)).port, 509);
}

#[test]
fn malformed_joins_are_refused() {
    let (mut core, now) = core();
    let good = memory("m", 1, 10);
    let bad = [
        Join { name: "a b".to_owned(), ..good.clone() },
        Join { name: String::new(), ..good.clone() },
        Join { mac: MacAddr([1, 0, 0, 0, 0, 1]), ..good.clone() },
        Join { mac: MacAddr::default(), ..good.clone() },
        Join { mtu: 1279, ..good.clone() },
        Join { nonce: 0, ..good.clone() },
        Join { shard_count: 0, ..good.clone() },
        Join { shard_count: 257, ..good.clone() },
        Join { capacity_pages: 0, ..good.clone() },
        Join { capacity_pages: 1, ..client("c", 1) },
    ];
    let refusals: BTreeSet<String> = bad.iter().map(|join| refusal(&mut core, now, join)).collect();
    assert_eq!(refusals.len(), 7, "{refusals:?}");
    join(&mut core, now, &good);
}

#[test]
fn the_piece_fits_the_smallest_link_of_the_space() {
    let (mut core, now) = core();
    assert_eq!(core.piece_bytes(SPACE), 4096);
    join(&mut core, now, &memory("m", 1, 10));
    let small = join(&mut core, now, &Join { mtu: 1500, ..client("c", 2) });
    assert_eq!(core.piece_bytes(SPACE), piece_bytes(1500).unwrap());
    core.leave(now, member(&small)).unwrap();
    assert_eq!(core.piece_bytes(SPACE), 4096);
}

#[test]
fn a_space_has_no_more_endpoints_than_a_group_has_ports() {
    assert_eq!(GROUP_PORTS_MAX, bluebridge_switch::dataplane::GROUP_PORTS_MAX);
    let (mut core, now) = core();
    core.learn_ports(ports(70));
    for port in 1..=64 {
        join(&mut core, now, &client(&format!("c{port}"), port));
    }
    let one_more = client("c65", 65);
    let text = refusal(&mut core, now, &one_more);
    assert!(text.contains("space 1 has 64 endpoints"), "{text}");
    assert!(
        core.desired().groups.iter().all(|(id, ports)| *id == FLOOD_GROUP || ports.len() == 64)
    );
    let again = join(&mut core, now, &again(&client("c64", 64)));
    assert_eq!(again.incarnation, 2, "an existing endpoint needs no room");
    join(&mut core, now, &Join { space: Space(2), ..client("other", 66) });
    core.leave(now, member(&again)).unwrap();
    join(&mut core, now, &one_more);
}

#[test]
fn a_switch_that_does_not_list_its_ports_is_flooded_through_64_at_most() {
    let now = Instant::now();
    let config = CoreConfig { ports: vec![SwitchPort(100)], ..CoreConfig::default() };
    let mut core = Core::new(config, Stored::default(), 1, now);
    core.learn_ports(Ports::Unlisted);
    for port in 1..=63 {
        let space = Space(1 + port % 2);
        join(&mut core, now, &Join { space, ..client(&format!("c{port}"), port) });
    }
    let text = refusal(&mut core, now, &client("c64", 64));
    assert!(text.contains("no ports in the flood group of 64"), "{text}");
    join(&mut core, now, &again(&client("c2", 2)));
    join(&mut core, now, &Join { space: Space(3), ..client("uplink", 100) });
    assert_eq!(core.desired().groups[&FLOOD_GROUP].len(), 64);
}

#[test]
fn notices_go_to_endpoints_that_ask_for_them_and_need_no_group_otherwise() {
    let (mut core, now) = core();
    let quiet = |join: Join| Join { notices: false, ..join };
    let key = Key::Multicast { dst_scope: SPACE.scope() };
    join(&mut core, now, &quiet(memory("m1", 1, 10)));
    join(&mut core, now, &quiet(client("c1", 2)));
    assert!(!core.notices_wanted(SPACE));
    let groups = |core: &Core| core.desired().groups.into_keys().collect::<Vec<_>>();
    assert!(!core.desired().entries.contains_key(&key));
    assert_eq!(groups(&core), [FLOOD_GROUP]);
    let c2 = join(&mut core, now, &client("c2", 3));
    join(&mut core, now, &client("c3", 4));
    join(&mut core, now, &Join { space: Space(2), ..client("d1", 5) });
    assert!(core.notices_wanted(SPACE));
    let desired = core.desired();
    let Some(Action::SetMulticastGroup { group }) = desired.entries[&key].action else { panic!() };
    assert_eq!(desired.groups[&group], BTreeSet::from([SwitchPort(3), SwitchPort(4)]));
    core.leave(now, member(&c2)).unwrap();
    // Joining again without `notices` ends them.
    join(&mut core, now, &quiet(again(&client("c3", 4))));
    assert!(!core.notices_wanted(SPACE) && core.notices_wanted(Space(2)));
    assert!(!core.desired().entries.contains_key(&key));
}

#[test]
fn silence_takes_the_anycast_share_but_not_the_directory() {
    let (mut core, now) = core();
    let first = join(&mut core, now, &memory("m1", 1, 1000));
    let second = join(&mut core, now, &memory("m2", 2, 1000));
    let anycast = Key::Anycast { dst_scope: SPACE.scope() };
    assert_eq!(core.anycast_members(SPACE), [(first.id(), 16), (second.id(), 16)]);
    let later = core.poll_timeout().unwrap();
    core.heartbeat(later, member(&second), 1000).unwrap();
    core.handle_timeout(later);
    let tables = core.desired();
    let forward = Forward { port: SwitchPort(2), dst_mac: mac(2) };
    let only = vec![WeightedForward { forward, weight: 16 }];
    assert_eq!(tables.entries[&anycast], Body::new(Action::Select(only)));
    assert!(tables.entries.contains_key(&desired::node_prefix(SPACE, first.id())));
    core.handle_timeout(later + core.config.client_expiry * 2);
    assert!(core.desired().entries.contains_key(&desired::node_prefix(SPACE, first.id())));
    assert!(!core.desired().entries.contains_key(&anycast));
    core.heartbeat(later, member(&first), 0).unwrap();
    assert!(!core.desired().entries.contains_key(&anycast), "a full node gets no CREATE");
}

#[test]
fn silent_clients_are_removed_and_memory_nodes_are_not() {
    let (mut core, now) = core();
    let lost = join(&mut core, now, &client("c", 1));
    join(&mut core, now, &memory("m", 2, 10));
    let mut last = now;
    while let Some(due) = core.poll_timeout() {
        assert!(due > last, "time goes on");
        last = due;
        core.handle_timeout(due);
    }
    assert_eq!(last, now + core.config.client_expiry);
    let attached: Vec<&str> = core
        .nodes()
        .filter(|node| node.record.attached)
        .map(|node| node.record.name.as_str())
        .collect();
    assert_eq!(attached, ["m"]);
    assert_eq!(core.heartbeat(last, member(&lost), 0), Err(MemberError::Gone(lost.node)));
}

#[test]
fn each_change_of_an_endpoint_is_one_event() {
    use MemberChange::{GivenUp, Joined, Left, Replaced, Returned, Silent};
    let (mut core, now) = core();
    let changes = |core: &mut Core| -> Vec<(String, MemberChange)> {
        core.take_events().into_iter().map(|event| (event.name, event.change)).collect()
    };
    let event = |name: &str, change| (name.to_owned(), change);
    let m1 = join(&mut core, now, &memory("m1", 1, 10));
    join(&mut core, now, &memory("m1", 1, 10));
    join(&mut core, now, &client("c1", 2));
    assert_eq!(changes(&mut core), [event("m1", Joined), event("c1", Joined)], "not a repetition");
    core.heartbeat(now, member(&m1), 10).unwrap();
    assert_eq!(changes(&mut core), []);
    let silent = now + core.silence();
    core.handle_timeout(silent);
    core.handle_timeout(silent);
    assert_eq!(changes(&mut core), [event("m1", Silent), event("c1", Silent)]);
    core.heartbeat(silent, member(&m1), 10).unwrap();
    core.heartbeat(silent, member(&m1), 10).unwrap();
    assert_eq!(changes(&mut core), [event("m1", Returned)]);
    join(&mut core, silent, &client("c2", 2));
    assert_eq!(changes(&mut core), [event("c1", Replaced), event("c2", Joined)]);
    core.leave(silent, member(&m1)).unwrap();
    core.leave(silent, member(&m1)).unwrap();
    assert_eq!(changes(&mut core), [event("m1", Left)]);
    core.handle_timeout(silent + core.silence());
    core.handle_timeout(silent + core.config.client_expiry);
    assert_eq!(changes(&mut core), [event("c2", Silent), event("c2", GivenUp)]);
}

#[test]
fn small_changes_of_free_memory_rewrite_nothing() {
    let (mut core, now) = core();
    let record = join(&mut core, now, &memory("m", 1, 100_000));
    let (_, _, _) = (core.take_dirty(), core.take_changes(), core.take_altered());
    for free in (90_000..100_000).rev().step_by(100) {
        core.heartbeat(now, member(&record), free).unwrap();
    }
    assert!(!core.take_dirty());
    assert!(core.take_changes().is_empty());
    core.heartbeat(now, member(&record), 10).unwrap();
    assert!(core.take_dirty());
    assert_eq!(core.take_altered().len(), 1);
}

#[test]
fn a_restart_changes_no_table() {
    let (mut core, now) = core();
    let mut stored = Disk::default();
    for (name, port) in [("m1", 1), ("m2", 2)] {
        let record = join(&mut core, now, &memory(name, port, 1 << 20));
        core.heartbeat(now, member(&record), u64::from(port) << 12).unwrap();
    }
    join(&mut core, now, &Join { space: Space(9), ..client("c1", 3) });
    stored.write(core.take_changes());
    let mut restarted = Core::new(CoreConfig::default(), stored.load(), 2, now);
    restarted.learn_ports(ports(16));
    assert_eq!(restarted.desired(), core.desired());
}

#[test]
fn spaces_without_endpoints_give_their_groups_back() {
    let (mut core, now) = core();
    for space in 0..2000 {
        let record = join(
            &mut core,
            now,
            &Join { space: Space(space), nonce: u64::from(space) + 1, ..client("c", 1) },
        );
        core.leave(now, member(&record)).unwrap();
    }
    assert_eq!(core.spaces.len(), usize::from(GROUPS_MAX - FLOOD_GROUP));
    let groups: BTreeSet<u16> = core.spaces.values().copied().collect();
    assert_eq!(groups.len(), core.spaces.len());
}

#[test]
fn notify_rules_bring_their_clone_session() {
    let now = Instant::now();
    let rule =
        NotifyRule { src_command: Ternary { value: 0x80, mask: 0x80 }, ..NotifyRule::default() };
    let off = CoreConfig { redirects: RedirectPolicy::Off, ..CoreConfig::default() };
    let config = CoreConfig { notify: vec![rule], ..off.clone() };
    let tables = Core::new(config, Stored::default(), 1, now).desired();
    assert!(tables.notify_session);
    assert_eq!(tables.entries[&rule.key()], Body::new(Action::CopyToController));
    assert!(!Core::new(off, Stored::default(), 1, now).desired().notify_session);
}

#[test]
fn what_is_copied_follows_from_the_policy() {
    let rules = |redirects| {
        let config = CoreConfig { redirects, ..CoreConfig::default() };
        let tables = Core::new(config, Stored::default(), 1, Instant::now()).desired();
        assert_eq!(tables.notify_session, redirects != RedirectPolicy::Off);
        let ternaries = tables.entries.into_keys().map(|key| match key {
            Key::Notify { src_command: c, src_status: s, .. } => (c.value, c.mask, s.value, s.mask),
            other => panic!("{other:?}"),
        });
        ternaries.collect::<Vec<_>>()
    };
    let contended = (0xc0, 0xc0, 0, 0);
    assert_eq!(rules(RedirectPolicy::Off), []);
    assert_eq!(rules(RedirectPolicy::Contended), [contended]);
    // UPDATE, COMMIT, ABORT and RENEW, with the contended bit or without it, if they are OK.
    let mut always = rules(RedirectPolicy::Always);
    always.retain(|rule| *rule != contended);
    assert_eq!(always, [0x88, 0x89, 0x8a, 0x8b].map(|command| (command, 0xbf, 0, 0xff)));
}

/// The contents of a store.
#[derive(Clone, Default)]
struct Disk {
    nodes: BTreeMap<u16, NodeRecord>,
    spaces: BTreeMap<u16, u16>,
}

impl Disk {
    fn write(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Node(record) => drop(self.nodes.insert(record.node, record)),
                Change::Space(record) => drop(self.spaces.insert(record.space, record.group)),
                Change::SpaceGone(space) => drop(self.spaces.remove(&space)),
            }
        }
    }

    fn load(&self) -> Stored {
        Stored {
            first_generation: 0,
            nodes: self.nodes.values().cloned().collect(),
            spaces: self
                .spaces
                .iter()
                .map(|(space, group)| SpaceRecord { space: *space, group: *group })
                .collect(),
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Beat { name: u8, free: u64 },
    Join { name: u8, port: u16, space: u16, kept: bool, proof: bool, fresh: bool },
    Leave { name: u8 },
    LosePort { port: u16 },
    Reserve { name: u8, more: u16 },
    Restart,
    Wait { seconds: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..6_u8, any::<u64>().prop_map(|bits| bits % 1000)).prop_map(|(name, free)| Step::Beat { name, free }),
        6 => (0..6_u8, 1..6_u16, 0..2_u16, any::<[bool; 3]>()).prop_map(
            |(name, port, space, [kept, proof, fresh])| Step::Join { name, port, space, kept, proof, fresh }),
        2 => (0..6_u8).prop_map(|name| Step::Leave { name }),
        1 => (1..6_u16).prop_map(|port| Step::LosePort { port }),
        2 => (0..3_u8, 0..200_u16).prop_map(|(name, more)| Step::Reserve { name, more }),
        1 => Just(Step::Restart),
        2 => (1..200_u64).prop_map(|seconds| Step::Wait { seconds }),
    ]
}

/// A rack under random events, and its invariants.
struct Model {
    core: Core,
    disk: Disk,
    now: Instant,
    nonce: u64,
    /// The last secret drawn.
    secret: u128,
    /// The last response to each name.
    given: BTreeMap<u8, NodeRecord>,
    /// The greatest incarnation of each node id.
    incarnations: BTreeMap<u16, u32>,
    /// The first and the last generation that were reserved for each memory node, and the names that had each memory node id.
    generations: BTreeMap<u16, (u16, u16)>,
    homes: BTreeMap<u16, u8>,
}

impl Model {
    fn new() -> Self {
        let (core, now) = core();
        Self {
            core,
            disk: Disk::default(),
            now,
            nonce: 0,
            secret: 0,
            given: BTreeMap::new(),
            incarnations: BTreeMap::new(),
            generations: BTreeMap::new(),
            homes: BTreeMap::new(),
        }
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Beat { name, free } => {
                if let Some(record) = self.given.get(&name) {
                    drop(self.core.heartbeat(self.now, member(record), free));
                }
            }
            Step::Reserve { name, more } => {
                let Some(record) = self.given.get(&name) else { return };
                let node = record.node;
                let before = self.generations.get(&node).map_or(0, |(_, last)| *last);
                drop(self.core.reserve(member(record), before + more));
                if let Some(last) = self.generations.get_mut(&node).map(|(_, last)| last) {
                    *last = *self.core.node(NodeId(node)).unwrap().record.generations().end();
                    assert!(*last >= before, "what was reserved stays so");
                }
            }
            Step::Join { name, port, space, kept, proof, fresh } => {
                self.join(name, port, space, kept, proof, fresh);
            }
            Step::Leave { name } => {
                if let Some(record) = self.given.get(&name) {
                    drop(self.core.leave(self.now, member(record)));
                }
            }
            Step::LosePort { port } => {
                let left = (1..6).filter(|p| *p != port);
                let left = left.map(|port| (SwitchPort(port), format!("sw{port}")));
                self.core.learn_ports(Ports::Listed(left.collect()));
                check(&self.core);
                self.core.learn_ports(ports(6));
            }
            Step::Restart => {
                let config = self.core.config.clone();
                self.core =
                    Core::new(config, self.disk.load(), self.core.nodes_version + 1, self.now);
                self.core.learn_ports(ports(6));
            }
            Step::Wait { seconds } => {
                self.now += Duration::from_secs(seconds);
                self.core.handle_timeout(self.now);
                assert!(self.core.poll_timeout().is_none_or(|due| due > self.now));
            }
        }
        self.disk.write(self.core.take_changes());
    }

    fn join(&mut self, name: u8, port: u16, space: u16, kept: bool, proof: bool, fresh: bool) {
        if fresh {
            self.nonce += 1;
        }
        let text = format!("n{name}");
        let request = if name < 3 { memory(&text, port, 1000) } else { client(&text, port) };
        let previous =
            self.given.get(&name).filter(|_| proof).and_then(|record| shown(record, kept));
        let request = Join { space: Space(space), nonce: self.nonce.max(1), previous, ..request };
        self.secret += 1;
        let secret = self.secret.to_be_bytes();
        let Ok(Assigned(record)) = self.core.join(self.now, &request, secret) else { return };
        let before = self.given.get(&name);
        let repeated = before.is_some_and(|before| {
            (before.node, before.incarnation, before.nonce)
                == (record.node, record.incarnation, request.nonce)
        });
        let proof = previous.map(|previous| previous.token);
        if !repeated && proof != Some(record.token) {
            assert_eq!(record.token, secret, "a caller without the token got it");
        }
        let before = self.incarnations.insert(record.node, record.incarnation);
        if !repeated {
            assert!(before.is_none_or(|before| before < record.incarnation), "incarnation");
        }
        if record.role == Role::Memory {
            let owner = self.homes.insert(record.node, name);
            assert!(owner.is_none_or(|owner| owner == name), "a memory node's id came again");
            let (first, last) = record.generations().into_inner();
            let before = self.generations.insert(record.node, (first, last));
            let kept = previous.is_some_and(|previous| previous.contents_kept);
            if !repeated && !kept {
                assert!(before.is_none_or(|before| before.1 < first), "generation");
            } else if kept {
                assert!(before.is_none_or(|before| before.0 <= first), "generation");
            }
        }
        self.given.insert(name, record);
    }
}

/// Invariants of the tables.
fn check(core: &Core) {
    let tables = core.desired();
    let attached: Vec<&NodeRecord> =
        core.nodes().map(|node| &node.record).filter(|record| record.attached).collect();
    let of = |what: fn(&NodeRecord) -> u64| -> BTreeSet<u64> {
        attached.iter().map(|record| what(record)).collect()
    };
    assert_eq!(of(|r| r.port.into()).len(), attached.len(), "one endpoint per port");
    assert_eq!(of(|r| u64::from(r.mac[5])).len(), attached.len(), "one endpoint per MAC address");
    let names: BTreeSet<&str> = attached.iter().map(|record| record.name.as_str()).collect();
    assert_eq!(names.len(), attached.len(), "one endpoint per name");
    let Ports::Listed(ports) = core.ports() else { panic!("the ports are listed") };
    let exists = |port: SwitchPort| assert!(ports.contains_key(&port), "{port:?} does not exist");
    let mut guarded = 0;
    for (key, body) in &tables.entries {
        match (key, body.action.as_ref().unwrap()) {
            (Key::IngressGuard { port, src_scope, src_node }, Action::Allow) => {
                guarded += 1;
                exists(*port);
                let record = &core.node(NodeId(*src_node)).unwrap().record;
                assert!(record.attached && record.port() == *port);
                assert_eq!(record.space().scope(), *src_scope);
                let way = desired::node_prefix(record.space(), record.id());
                assert!(tables.entries.contains_key(&way), "who may send can be answered");
            }
            (_, Action::Forward(forward)) => exists(forward.port),
            (Key::Anycast { dst_scope }, Action::Select(members)) => {
                for member in members {
                    exists(member.forward.port);
                    assert!(attached.iter().any(|record| record.role == Role::Memory
                        && record.space().scope() == *dst_scope
                        && record.port() == member.forward.port));
                }
            }
            (Key::Multicast { .. } | Key::L2 { .. }, Action::SetMulticastGroup { group }) => {
                assert!(tables.groups.contains_key(group));
            }
            (Key::PortMac { port }, Action::SetDstMac(_)) => exists(*port),
            (Key::Notify { .. }, Action::CopyToController) => assert!(tables.notify_session),
            other => panic!("unexpected {other:?}"),
        }
    }
    assert_eq!(guarded, attached.iter().filter(|r| ports.contains_key(&r.port())).count());
    assert!(tables.groups.values().flatten().all(|port| ports.contains_key(port)));
}

proptest! {
    #[test]
    fn identities_are_unique_and_tables_consistent(
        steps in prop::collection::vec(step(), 1..120)
    ) {
        let mut model = Model::new();
        model.core.learn_ports(ports(6));
        for step in &steps {
            model.take(step);
            check(&model.core);
        }
        let mut restarted =
            Core::new(CoreConfig::default(), model.disk.load(), u64::MAX / 2, model.now);
        restarted.learn_ports(ports(6));
        let live: Vec<NodeId> = model.core.nodes().filter(|n| n.live).map(|n| n.record.id()).collect();
        let mut same = restarted;
        for node in same.nodes.values_mut() {
            node.live = live.contains(&node.record.id());
        }
        prop_assert_eq!(same.desired(), model.core.desired(), "a restart changes no table");
    }
}

#[test]
fn what_is_left_of_a_client_is_what_its_lives_that_are_over_had() {
    let (mut core, now) = core();
    let request = client("c1", 1);
    let first = join(&mut core, now, &request);
    let name = Named::Name("c1");
    let lives = |first: u32, last: u32| Lives { node: NodeId(0xfffe), incarnations: first..=last };
    assert_eq!(core.lives(SPACE, name), Ok(lives(1, 1)));
    let there = OperatorError::StillThere("c1".to_owned());
    assert_eq!(core.lives_over(SPACE, name), Err(there.clone()));
    let second = join(&mut core, now, &again(&request));
    assert_eq!((second.node, second.incarnation), (first.node, 2));
    assert_eq!(core.lives_over(SPACE, name), Ok(lives(1, 1)), "the second is there");
    let one = |incarnation| Named::One(NodeId(0xfffe), incarnation);
    assert_eq!(core.lives_over(SPACE, one(1)), Ok(lives(1, 1)));
    assert_eq!(core.lives_over(SPACE, one(2)), Err(there));
    assert!(core.is_heard(second.id(), 2) && !core.is_heard(second.id(), 1));
    // One that is not heard is as good as gone.
    core.handle_timeout(now + core.silence());
    assert_eq!(core.lives_over(SPACE, name), Ok(lives(1, 2)));
    for unknown in ["c2", ""] {
        let error = core.lives(SPACE, Named::Name(unknown)).expect_err("nobody has that name");
        assert!(matches!(error, OperatorError::NoClient { .. }), "{error}");
    }
    assert!(core.lives(Space(2), name).is_err(), "a client of another space");
}

#[test]
fn a_name_stands_for_its_own_lives_when_its_id_was_anothers() {
    let (mut core, now) = core();
    let former = join(&mut core, now, &client("c1", 1));
    core.leave(now, member(&former)).unwrap();
    let later = now + CoreConfig::default().client_quarantine;
    let heir = join(&mut core, later, &client("c2", 1));
    assert_eq!((heir.node, heir.incarnation), (former.node, 2));
    let lives = core.lives(SPACE, Named::Name("c2")).unwrap();
    assert_eq!(lives, Lives { node: heir.id(), incarnations: 2..=2 });
    assert!(core.lives(SPACE, Named::Name("c1")).is_err(), "it is forgotten");
    assert_eq!(core.client(heir.id(), 1), None, "that was another's");
    assert_eq!(core.client(heir.id(), 2).map(|record| record.name.as_str()), Some("c2"));
    assert_eq!(core.client(heir.id(), 3), None);
    let heir = join(&mut core, later, &again(&client("c2", 1)));
    assert_eq!((heir.incarnation, heir.first_incarnation), (3, 2));
}

#[test]
fn memory_servers_are_asked_about_their_own_space() {
    let (mut core, now) = core();
    let server = join(&mut core, now, &memory("m1", 1, 10));
    let client = join(&mut core, now, &client("c1", 2));
    assert_eq!(core.memory_server(server.id(), SPACE).unwrap().record, server);
    let other = core.memory_server(server.id(), Space(2)).map(|_| ()).unwrap_err();
    assert_eq!(other.to_string(), "m1 serves space 1, not space 2");
    for id in [client.id(), NodeId(77)] {
        let error = core.memory_server(id, SPACE).map(|_| ()).unwrap_err();
        assert_eq!(error, OperatorError::NoServer(id.0));
    }
}
