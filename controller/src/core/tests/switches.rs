//! Several switches: frames pass a tree of real pipelines with the desired tables.

use std::collections::VecDeque;
use std::net::Ipv6Addr;
use std::ops::Range;
use std::time::Duration;

use bluebridge_northbound::migration::{Generations, Report, ServedRow};
use bluebridge_p4::declaration::Table as DeclaredTable;
use bluebridge_p4::pipeline::Entry;
use bluebridge_switch::dataplane::DataPlane as _;
use bluebridge_switch::soft::{Link, Offload, Pipeline};
use bluebridge_testkit::UdpFrame;
use bluebridge_wire::address::Fields;
use bluebridge_wire::{Command, EndpointAddress, UDP_PORT, WireCommand};
use proptest::prelude::*;

use super::*;
use crate::core::SwitchCounters;
use crate::migration::Wanted;
use crate::migration::rebalance::{Rate, Reading};
use crate::migration::testing::{finish, progress};

/// The ports of each switch.
const PORTS: u16 = 12;

fn end(name: &str, port: u16) -> LinkEnd {
    (name.to_owned(), SwitchPort(port))
}

fn at(switch: u16, port: u16) -> Place {
    Place { switch: SwitchId(switch), port: SwitchPort(port) }
}

/// Two switches with endpoints, t0 and t1, and a spine between them, at the ports 11 and 12.
fn two_racks() -> Topology {
    let links = [(end("t0", 11), end("spine", 1)), (end("t1", 12), end("spine", 2))];
    Topology::new(["t0", "t1", "spine"].map(str::to_owned).to_vec(), &links).unwrap()
}

fn core_of(topology: Topology) -> (Core, Instant) {
    let now = Instant::now();
    let switches = topology.switches();
    let mut core =
        Core::new(CoreConfig { topology, ..CoreConfig::default() }, Stored::default(), 1, now);
    switches.for_each(|switch| core.learn_ports(switch, ports(PORTS)));
    (core, now)
}

fn on(switch: &str, join: Join) -> Join {
    // One MAC address for each port of each switch.
    let mut mac = join.mac;
    mac.0[2] = switch.bytes().fold(0, u8::wrapping_add);
    Join { switch: switch.to_owned(), mac, ..join }
}

/// The switches with their tables; frames pass from one to the next.
struct Fabric<'a> {
    core: &'a Core,
    pipelines: Vec<Pipeline>,
    now: Instant,
}

impl<'a> Fabric<'a> {
    fn of(core: &'a Core, now: Instant) -> Self {
        let topology = &core.config.topology;
        let pipelines = topology.switches().map(|switch| pipeline(&core.desired(switch), now));
        Self { core, pipelines: pipelines.collect(), now }
    }

    /// The places outside the switches where a frame arrives, and its hop limits there.
    fn send(&mut self, from: Place, frame: Vec<u8>) -> Vec<(Place, [u8; 6], u8)> {
        let mut arrived = Vec::new();
        let mut queue = VecDeque::from([(from, frame)]);
        let mut passed = 0;
        while let Some((place, mut frame)) = queue.pop_front() {
            passed += 1;
            assert!(passed <= 64, "the frame goes around");
            let mut out: Vec<(SwitchPort, Vec<u8>)> = Vec::new();
            let pipeline = &mut self.pipelines[place.switch.index()];
            pipeline.process(self.now, place.port, &mut frame, Offload::default(), &mut out);
            for (port, frame) in out {
                let place = Place { port, ..place };
                match self.other_end(place) {
                    Some(other) => queue.push_back((other, frame)),
                    None => arrived.push((place, frame[..6].try_into().unwrap(), frame[21])),
                }
            }
        }
        arrived
    }

    /// The other end of a link between two switches.
    fn other_end(&self, place: Place) -> Option<Place> {
        let topology = &self.core.config.topology;
        let neighbour = topology.switches().find(|other| {
            let route =
                topology.port_toward(place.switch, Place { switch: *other, port: SwitchPort(0) });
            topology.distance(place.switch, *other) == 1 && route == place.port
        })?;
        let back = topology.port_toward(neighbour, place);
        Some(Place { switch: neighbour, port: back })
    }
}

fn pipeline(tables: &Tables, now: Instant) -> Pipeline {
    let mut pipeline = Pipeline::new(now);
    for port in 1..=PORTS {
        let link = Link { name: format!("p{port}"), mac: mac(0), mtu: 9000 };
        pipeline.add_link(SwitchPort(port), link).unwrap();
    }
    for (group, ports) in &tables.groups {
        pipeline.set_group(*group, &ports.iter().copied().collect::<Vec<_>>()).unwrap();
    }
    pipeline.set_flood_group(tables.flood_group).unwrap();
    for (key, body) in &tables.entries {
        let entry: Entry = body.entry(*key).unwrap();
        pipeline.insert(&entry).unwrap();
    }
    pipeline
}

fn request(space: Space, node: NodeId, command: Command) -> Ipv6Addr {
    let command = WireCommand::request(command, false).bits();
    Fields { space, node, command, tag: 0, location: 0x1000 }.to_ipv6()
}

/// A request for a page of a generation.
fn read_of(space: Space, node: NodeId, generation: u16, page: u64) -> Ipv6Addr {
    let command = WireCommand::request(Command::Read, false).bits();
    let location = u64::from(generation) << 48 | page << 12;
    Fields { space, node, command, tag: 3, location }.to_ipv6()
}

/// A frame from an endpoint as its host sends it.
fn frame(from: &NodeRecord, source: NodeId, destination: Ipv6Addr) -> Vec<u8> {
    UdpFrame {
        source_mac: from.mac,
        destination_mac: GATEWAY_MAC.0,
        source: EndpointAddress::new(from.space(), source, 7).to_ipv6(),
        destination,
        source_port: UDP_PORT,
        destination_port: UDP_PORT,
        payload: &[0; 64],
    }
    .bytes()
}

/// Checks where the frames of every attached endpoint arrive.
fn check(core: &Core, now: Instant) {
    let mut fabric = Fabric::of(core, now);
    let nodes: Vec<&Node> = core.nodes().filter(|node| node.record.attached).collect();
    let place = |record: &NodeRecord| core.place(record).unwrap();
    let topology = &core.config.topology;
    for from in nodes.iter().map(|node| &node.record) {
        let start = place(from);
        for to in nodes.iter().map(|node| &node.record) {
            let sent = frame(from, from.id(), request(to.space(), to.id(), Command::Read));
            let hops = topology.distance(start.switch, place(to).switch) + 1;
            let arrived = fabric.send(start, sent);
            if from.space() == to.space() {
                let hop_limit = 64 - u8::try_from(hops).unwrap();
                assert_eq!(arrived, [(place(to), to.mac, hop_limit)], "{from:?} to {to:?}");
            } else {
                assert_eq!(arrived, [], "{} is in another space than {}", to.name, from.name);
            }
            if from.node != to.node {
                let forged = frame(from, to.id(), request(to.space(), to.id(), Command::Read));
                assert_eq!(
                    fabric.send(start, forged),
                    [],
                    "{} pretends to be {}",
                    from.name,
                    to.name
                );
            }
        }
        let anywhere = frame(from, from.id(), request(from.space(), NodeId::ANY, Command::Create));
        let servers = nodes.iter().map(|node| &node.record).filter(|record| {
            record.role == Role::Memory && record.space() == from.space() && record.level.is_some()
        });
        let nearest =
            servers.clone().map(|it| topology.distance(start.switch, place(it).switch)).min();
        match (fabric.send(start, anywhere).as_slice(), nearest) {
            ([], None) => {}
            ([(there, mac, _)], Some(nearest)) => {
                let server =
                    servers.clone().find(|it| place(it) == *there && it.mac == *mac).unwrap();
                assert_eq!(topology.distance(start.switch, place(server).switch), nearest);
            }
            (arrived, nearest) => panic!("{from:?}: {arrived:?}, nearest {nearest:?}"),
        }
        let notice = frame(from, from.id(), request(from.space(), NodeId::ALL, Command::Notice));
        let mut told: Vec<_> =
            fabric.send(start, notice).iter().map(|(place, mac, _)| (*place, *mac)).collect();
        told.sort_unstable();
        let wanted = nodes
            .iter()
            .map(|node| &node.record)
            .filter(|to| to.notices && to.space() == from.space() && to.node != from.node);
        let mut wanted: Vec<_> = wanted.map(|to| (place(to), to.mac)).collect();
        wanted.sort_unstable();
        assert_eq!(told, wanted, "notices of {}", from.name);
    }
}

#[test]
fn another_switch_is_one_prefix() {
    let (mut core, now) = core_of(two_racks());
    let [s1, s2] =
        [1, 2].map(|port| join(&mut core, now, &on("t1", memory(&format!("s{port}"), port, 1000))));
    let c1 = join(&mut core, now, &on("t0", client("c1", 1)));
    assert_eq!([s1.node, s2.node, c1.node], [0x1000, 0x1001, 0x0fff]);
    let there = core.desired(SwitchId(0));
    let directory: Vec<_> = there
        .entries
        .iter()
        .filter(|(key, _)| matches!(key, Key::Directory { .. }))
        .map(|(key, body)| (*key, body.action.clone().unwrap()))
        .collect();
    let block = Key::Directory { prefix: 0xfdbb_0001_1000 << 64, prefix_len: 36 };
    let up = Action::Forward(Forward { port: SwitchPort(11), dst_mac: GATEWAY_MAC });
    let own = Action::Forward(Forward { port: SwitchPort(1), dst_mac: c1.mac() });
    let own = (desired::node_prefix(SPACE, c1.id()), own);
    assert_eq!(directory, [own, (block, up)]);
    assert_eq!(core.anycast_members(SwitchId(0), SPACE), core.anycast_members(SwitchId(1), SPACE));
    check(&core, now);
}

#[test]
fn an_endpoint_that_moves_to_another_switch_keeps_its_id_and_is_found() {
    let (mut core, now) = core_of(two_racks());
    let first = join(&mut core, now, &on("t1", memory("s1", 1, 1000)));
    join(&mut core, now, &on("t1", memory("s2", 2, 1000)));
    join(&mut core, now, &on("t0", client("c1", 1)));
    join(&mut core, now, &on("spine", client("c2", 5)));
    let proof = shown(&first, false);
    let moved = Join { previous: proof, ..on("t0", memory("s1", 2, 1000)) };
    let moved = join(&mut core, now, &again(&moved));
    assert_eq!((moved.node, moved.switch.as_str()), (first.node, "t0"));
    check(&core, now);
}

#[test]
fn endpoints_of_a_switch_without_a_name_are_at_the_first_one_when_there_are_several() {
    let (mut core, now) = core();
    let mut disk = Disk::default();
    join(&mut core, now, &memory("s1", 1, 1000));
    join(&mut core, now, &client("c1", 2));
    disk.write(core.take_changes());
    let config = CoreConfig { topology: two_racks(), ..CoreConfig::default() };
    let mut core = Core::new(config, disk.load(), 2, now);
    for switch in core.config.topology.switches() {
        core.learn_ports(switch, ports(PORTS));
    }
    join(&mut core, now, &on("t1", client("c2", 1)));
    assert!(core.nodes().all(|node| core.place(&node.record).is_some()));
    check(&core, now);
}

#[test]
fn a_redirect_leads_only_to_an_endpoint_of_the_same_switch() {
    let (mut core, now) = core_of(two_racks());
    let owner = join(&mut core, now, &on("t0", client("c1", 1)));
    let is_local = [0, 1, 2].map(|switch| core.endpoints(SwitchId(switch))[&owner.id()].is_local);
    assert_eq!(is_local, [true, false, false]);
}

#[test]
fn links_between_switches_are_no_ports_of_endpoints_and_switches_have_names() {
    let (mut core, now) = core_of(two_racks());
    let text = refusal(&mut core, now, &on("t0", client("a", 11)));
    assert!(text.contains("port 11 of the switch t0 is reserved for a link to another"), "{text}");
    join(&mut core, now, &on("spine", client("a", 11)));
    for name in ["", "t2"] {
        let text = refusal(&mut core, now, &on(name, client("b", 1)));
        assert!(text.contains("choose from t0, t1, spine"), "{text}");
    }
    let text = refusal(&mut core, now, &on("spine", client("b", 11)));
    assert!(text.contains("port 11 of the switch spine is in use"), "{text}");
    join(&mut core, now, &on("t1", client("b", 11)));
}

#[test]
fn configured_ports_that_are_missing_are_named() {
    let own = ControllerPort { place: at(2, 9), mac: mac(9) };
    let config = CoreConfig { topology: two_racks(), own_port: Some(own), ..CoreConfig::default() };
    let mut core = Core::new(config, Stored::default(), 1, Instant::now());
    assert_eq!(core.missing_ports(), [], "the switches were not reached yet");
    core.learn_ports(SwitchId(0), ports(10));
    core.learn_ports(SwitchId(2), ports(2));
    assert_eq!(core.missing_ports(), [at(0, 11), at(2, 9)]);
    let way = Key::L2 { dst_mac: own.mac };
    assert!(!core.desired(SwitchId(0)).entries.contains_key(&way), "no port leads there");
    core.learn_ports(SwitchId(0), ports(PORTS));
    core.learn_ports(SwitchId(2), ports(PORTS));
    let to = |switch| core.desired(SwitchId(switch)).entries[&way].action.clone();
    let forward =
        |port| Some(Action::Forward(Forward { port: SwitchPort(port), dst_mac: own.mac }));
    assert_eq!([0, 1, 2].map(to), [11, 12, 9].map(forward));
}

#[test]
fn pages_that_moved_are_found_at_every_switch_while_they_move_and_afterwards() {
    let (mut core, now) = core_of(two_racks());
    let s1 = join(&mut core, now, &on("t0", memory("s1", 1, 64)));
    let s2 = join(&mut core, now, &on("t1", memory("s2", 1, 64)));
    let s3 = join(&mut core, now, &on("t1", memory("s3", 2, 64)));
    let clients = [("t0", 3, "c1"), ("t1", 3, "c2"), ("spine", 3, "c3")]
        .map(|(switch, port, name)| join(&mut core, now, &on(switch, client(name, port))));
    for server in [&s1, &s2, &s3] {
        core.migrations_mut().connect(server.id(), u64::from(server.node), true);
    }
    let (first, last) = (s1.generation, s1.generation + 1);
    let generation = |number| ArenaGeneration::new(number).unwrap();
    let rows = |pages| {
        let generations = Generations { first: generation(first), last: generation(last) };
        [ServedRow { pages, generations }]
    };
    // The server of each page and generation, for every client.
    let check = |core: &Core, expected: &dyn Fn(u64, u16) -> NodeRecord| {
        let mut fabric = Fabric::of(core, now);
        for from in &clients {
            for (page, generation) in
                (0..64).flat_map(|page| [(page, first), (page, last), (page, last + 1)])
            {
                let to = expected(page, generation);
                let frame = frame(from, from.id(), read_of(SPACE, s1.id(), generation, page));
                let arrived: Vec<_> = fabric
                    .send(core.place(from).unwrap(), frame)
                    .into_iter()
                    .map(|(place, mac, _)| (place, mac))
                    .collect();
                let words = format!("page {page} of {generation} from {}", from.name);
                assert_eq!(arrived, [(core.place(&to).unwrap(), to.mac)], "{words}");
            }
        }
    };
    let wanted = |pages, taker: &NodeRecord| Wanted {
        home: s1.id(),
        space: SPACE,
        generation: None,
        pages: Some(pages),
        taker: taker.id(),
    };
    let moved = |range: Range<u64>, to: &NodeRecord, otherwise: &NodeRecord| {
        let (to, otherwise) = (to.clone(), otherwise.clone());
        move |page, generation: u16| {
            let is_moved = range.contains(&page) && generation <= last;
            if is_moved { to.clone() } else { otherwise.clone() }
        }
    };
    let id = core.migrate(&wanted(8..40, &s2)).unwrap()[0];
    check(&core, &moved(0..0, &s2, &s1));
    let hear = |core: &mut Core, from: &NodeRecord, report| {
        core.migrations_mut().handle(now, from.id(), u64::from(from.node), report).unwrap();
    };
    hear(&mut core, &s2, Report::Reserved(id));
    hear(&mut core, &s1, Report::Allowed { migration: id, fences: Vec::new() });
    assert!(core.take_dirty());
    hear(&mut core, &s2, progress(id, &rows(16..24), false));
    assert!(core.take_dirty(), "the tables change");
    check(&core, &moved(16..24, &s2, &s1));
    finish(core.migrations_mut(), id, &rows(8..40));
    check(&core, &moved(8..40, &s2, &s1));
    // Within the other rack, where the switch of the home sees no difference, and back.
    let id = core.migrate(&wanted(8..40, &s3)).unwrap()[0];
    finish(core.migrations_mut(), id, &rows(8..40));
    check(&core, &moved(8..40, &s3, &s1));
    // A server that begins empty gets no more requests for them.
    join_anew(&mut core, now, &again(&on("t1", memory("s3", 2, 64))), 9);
    check(&core, &moved(0..0, &s3, &s1));
}

/// Three servers at two switches, of which the first has pages at the second, and a client at each of three switches.
struct Racks {
    core: Core,
    now: Instant,
    servers: [NodeRecord; 3],
    clients: [NodeRecord; 3],
    /// What each switch has counted.
    counts: BTreeMap<(SwitchId, Key), u64>,
}

impl Racks {
    const WINDOW: Duration = Duration::from_secs(2);

    fn new() -> Self {
        let (mut core, now) = core_of(two_racks());
        let servers = [("t0", 1, "s1"), ("t1", 1, "s2"), ("t1", 2, "s3")]
            .map(|(switch, port, name)| join(&mut core, now, &on(switch, memory(name, port, 64))));
        let clients = [("t0", 3, "c1"), ("t1", 3, "c2"), ("spine", 3, "c3")]
            .map(|(switch, port, name)| join(&mut core, now, &on(switch, client(name, port))));
        for server in &servers {
            core.migrations_mut().connect(server.id(), server.node.into(), true);
            core.heartbeat(now, member(server), 40).unwrap();
        }
        let [s1, s2, _] = &servers;
        let (home, pages) = (s1.id(), 8..40);
        let wanted = Wanted {
            home,
            space: SPACE,
            generation: None,
            pages: Some(pages.clone()),
            taker: s2.id(),
        };
        let id = core.migrate(&wanted).unwrap()[0];
        let first = ArenaGeneration::new(s1.generation).unwrap();
        let generations = Generations { first, last: first };
        finish(core.migrations_mut(), id, &[ServedRow { pages, generations }]);
        Self { core, now, servers, clients, counts: BTreeMap::new() }
    }

    /// A second in which every client reads some pages of the first server, so many times. The switches then say what they
    /// counted since they were started.
    fn step(&mut self, pages: &[u64], times: usize) {
        self.now += Duration::from_secs(1);
        self.core.rebalance_asked(self.now, Self::WINDOW);
        let mut fabric = Fabric::of(&self.core, self.now);
        let s1 = &self.servers[0];
        for from in &self.clients {
            let place = self.core.place(from).unwrap();
            for page in pages {
                for _ in 0..times {
                    let to = read_of(SPACE, s1.id(), s1.generation, *page);
                    assert_eq!(fabric.send(place, frame(from, from.id(), to)).len(), 1);
                }
            }
        }
        let mut counters = Vec::new();
        for (switch, pipeline) in (0..).map(SwitchId).zip(&mut fabric.pipelines) {
            let installed = pipeline.entries(DeclaredTable::Directory).unwrap();
            let installed: BTreeMap<Key, _> =
                installed.into_iter().map(|it| (it.entry.key, it)).collect();
            self.counts.retain(|(of, key), _| *of != switch || installed.contains_key(key));
            let entries = installed.into_iter().map(|(key, it)| {
                let Action::Forward(forward) = it.entry.action else { panic!("{it:?}") };
                let count = self.counts.entry((switch, key)).or_default();
                *count += it.counter.packets;
                (key, forward, *count)
            });
            let entries = entries.collect();
            counters.push(SwitchCounters { switch, at: self.now, entries });
        }
        self.core.rebalance_step(self.now, &counters, &BTreeMap::new());
    }

    fn reading(&self) -> Reading {
        self.core.reading(self.now, Self::WINDOW, &BTreeMap::new())
    }

    fn rates(&self) -> Vec<Option<f64>> {
        let rate = |of: Rate| of.is_learned.then(|| of.per_second.round());
        self.reading().servers.iter().map(|server| rate(server.rate)).collect()
    }

    /// What is counted for the pages of the first server, by the server to which it leads.
    fn counted(&self) -> BTreeMap<NodeId, f64> {
        let mut sums = BTreeMap::new();
        for count in self.reading().counts {
            if count.block.home != self.servers[0].id() {
                assert!(count.rate.per_second.abs() < 1e-9, "{count:?}");
                continue;
            }
            *sums.entry(count.at).or_default() += count.rate.per_second.round();
        }
        sums
    }
}

#[test]
fn a_request_that_passes_several_switches_is_counted_once() {
    let mut racks = Racks::new();
    // Two pages at the first server, and one that moved to the other rack: each is read 60 times per second.
    for _ in 0..20 {
        racks.step(&[3, 50, 20], 20);
    }
    let [s1, s2, s3] = [0, 1, 2].map(|index: usize| racks.servers[index].id());
    assert_eq!(racks.rates(), [120.0, 60.0, 0.0].map(Some));
    // The first server has twice the mean, so its blocks are counted, at its own switch alone.
    assert_eq!(racks.counted(), BTreeMap::from([(s1, 120.0), (s2, 60.0)]));
    let is_longer =
        |key: &&Key| matches!(key, Key::Directory { prefix_len, .. } if *prefix_len > 48);
    let longer = [0, 1, 2].map(|switch| {
        racks.core.desired(SwitchId(switch)).entries.keys().filter(is_longer).count()
    });
    let moved = longer[2];
    assert!(moved > 0 && longer[1] == moved && longer[0] > moved + 2, "{longer:?}");
    // Another one is hot: now what moved there is counted in parts, and still once.
    for _ in 0..20 {
        racks.step(&[20, 20, 30, 3], 20);
    }
    assert_eq!(racks.rates(), [60.0, 180.0, 0.0].map(Some));
    let counted = racks.counted();
    assert_eq!((counted[&s2], counted.get(&s3)), (180.0, None));
}

#[test]
fn a_server_that_goes_to_another_switch_is_counted_there_alone() {
    let mut racks = Racks::new();
    for _ in 0..20 {
        racks.step(&[3, 3, 20], 20);
    }
    assert_eq!(racks.rates(), [120.0, 60.0, 0.0].map(Some));
    // The switch where it was is not read again.
    let proof = shown(&racks.servers[1], true);
    let moved = Join { previous: proof, ..on("t0", memory("s2", 2, 64)) };
    racks.servers[1] = join(&mut racks.core, racks.now, &again(&moved));
    assert_eq!(racks.rates(), [Some(120.0), None, Some(0.0)]);
    assert_eq!(racks.counted().get(&racks.servers[1].id()), None);
    let s2 = &racks.servers[1];
    racks.core.migrations_mut().connect(s2.id(), s2.node.into(), true);
    for _ in 0..20 {
        racks.step(&[3, 3, 20], 20);
    }
    assert_eq!(racks.rates(), [120.0, 60.0, 0.0].map(Some));
}

/// The join of an endpoint: its name, switch, port and space, and whether it is a server.
fn joining() -> impl Strategy<Value = (u8, u16, u16, u16, bool)> {
    (0..8_u8, 0..6_u16, 1..6_u16, 0..2_u16, any::<bool>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn every_frame_takes_the_only_path_in_any_tree(
        parents in prop::collection::vec(any::<prop::sample::Index>(), 0..5),
        joins in prop::collection::vec(joining(), 1..20),
    ) {
        // Switch n + 1 is connected to an earlier one; ports 6 and up are for links.
        let count = u16::try_from(parents.len()).unwrap() + 1;
        let names: Vec<String> = (0..count).map(|number| format!("t{number}")).collect();
        let mut used = vec![6; usize::from(count)];
        let mut links = Vec::new();
        for (child, parent) in (1..).zip(&parents) {
            let parent = parent.index(child);
            let link = [parent, child].map(|index| {
                used[index] += 1;
                end(&names[index], used[index])
            });
            links.push(link.into());
        }
        let (mut core, now) = core_of(Topology::new(names, &links).unwrap());
        for (nonce, (name, switch, port, space, serves)) in (1..).zip(joins) {
            let name = format!("n{name}");
            // An endpoint that shows its token may be at another switch than before.
            let previous = core.names.get(&name).and_then(|id| shown(&core.nodes[id].record, false));
            let who = if serves { memory(&name, port, 64) } else { client(&name, port) };
            let join = on(&format!("t{}", switch % count), who);
            // Refused joins change nothing.
            let _ = core.join(now, &Join { space: Space(space), nonce, previous, ..join }, [7; 16]);
        }
        check(&core, now);
    }
}
