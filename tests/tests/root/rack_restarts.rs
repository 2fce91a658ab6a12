//! All daemons are restarted while clients work.

use std::fs;
use std::time::Duration;

use bluebridge::{Error, NodeId, Placement, Space, Status};
use bluebridge_northbound::proto;
use bluebridge_rack::control::tables::TableLine;
use bluebridge_rack::spec::{DataPlane, Node};
use bluebridge_testkit::until;
use bluebridge_tests::rack::endpoint::{Endpoint, await_used};
use bluebridge_tests::rack::traffic::Traffic;
use bluebridge_tests::rack::{RackOptions, TestRack, stamp};

/// Operations that are waited for to see that traffic flows.
const FLOW: u64 = 400;

/// What must never change by itself.
fn identities(rack: &TestRack) -> Vec<(u32, String, u32, u32, u32, u32)> {
    let nodes = rack.controller_status().nodes.into_iter();
    let identity = |it: proto::Node| {
        (it.node, it.name, it.incarnation, it.arena_generation, it.range_epoch, it.switch_port)
    };
    nodes.map(identity).collect()
}

fn memory_nodes(endpoint: &Endpoint) -> Vec<NodeId> {
    endpoint.memory_nodes().iter().map(|node| node.node).collect()
}

/// The entries without the weights of the anywhere-CREATE, which follow the free memory; none while the
/// switch has no pipeline.
fn tables(rack: &TestRack) -> Vec<TableLine> {
    let tables = rack.tables().unwrap_or_default().into_iter();
    tables.filter(|line| line.table != "anycast").collect()
}

/// The state of the switch, and what was done since the controller started.
fn switch(rack: &TestRack) -> proto::SwitchStatus {
    rack.switch_status()
}

/// A controller dies and starts again without an effect on clients.
fn restart_controller(name: &str, switch: DataPlane) {
    let mut rack = TestRack::up(name, &RackOptions::new(switch, "9000"));
    let endpoints = [Endpoint::join(&rack, 1), Endpoint::join(&rack, 2)];
    let [one, two] = &endpoints;
    let (known, whole) = (identities(&rack), tables(&rack));
    assert!(whole.len() > 8, "{whole:?}");
    assert_eq!(known.len(), 4);
    let traffic = Traffic::start(&rack, &[one, two], &memory_nodes(one));
    traffic.await_more(FLOW);
    rack.kill("controller");
    traffic.await_more(FLOW);
    assert_eq!(tables(&rack), whole, "a switch needs no controller to keep its tables");
    rack.start("controller");
    rack.await_heartbeats(4);
    traffic.await_more(FLOW);
    assert_eq!(identities(&rack), known);
    assert_eq!(tables(&rack), whole);
    let (count, longest) = traffic.end();
    println!("controller: {count} operations, the longest took {longest:?}");
    await_used(&mut one.client(&rack, 1), &one.memory_nodes(), 0);
}

#[test]
fn a_controller_restarts_without_an_effect_on_clients() {
    restart_controller("re-control", DataPlane::Ebpf);
}

#[test]
fn a_controller_of_open_vswitch_restarts_without_an_effect_on_clients() {
    restart_controller("re-of-control", DataPlane::Ovs);
}

#[test]
fn a_memory_server_that_starts_while_the_controller_is_away_waits_for_it() {
    let mut rack = TestRack::up("re-wait", &RackOptions::new(DataPlane::Soft, "9000"));
    let known = identities(&rack);
    rack.kill("controller");
    rack.kill("memserver-s1");
    let starting = rack.spawn("memserver-s1");
    let lines = || starting.log().matches("waiting for the controller").count();
    until("it reports that it waits", || lines() > 0);
    rack.start("controller");
    assert_eq!(lines(), 1, "{}", starting.log());
    starting.await_ready();
    rack.await_heartbeats(known.len());
    let endpoint = Endpoint::join(&rack, 1);
    await_used(&mut endpoint.client(&rack, 1), &endpoint.memory_nodes(), 0);
}

#[test]
fn an_ebpf_switch_continues_without_its_agent() {
    let mut rack = TestRack::up("re-agent", &RackOptions::new(DataPlane::Ebpf, "9000"));
    let endpoint = Endpoint::join(&rack, 1);
    let (known, whole) = (identities(&rack), tables(&rack));
    assert!(whole.len() > 8, "{whole:?}");
    let traffic = Traffic::start(&rack, &[&endpoint], &memory_nodes(&endpoint));
    traffic.await_more(FLOW);
    rack.kill("switch");
    let before = switch(&rack);
    traffic.await_more(FLOW);
    rack.start("switch");
    traffic.await_more(FLOW);
    until("the controller is back at the switch and has read its tables", || {
        let now = switch(&rack);
        now.connect_count > before.connect_count && now.full_sync_count > before.full_sync_count
    });
    assert_eq!(switch(&rack).pipeline_push_count, before.pipeline_push_count, "they were kept");
    assert_eq!(tables(&rack), whole);
    assert_eq!(identities(&rack), known);
    let (count, longest) = traffic.end();
    println!("eBPF agent: {count} operations, the longest took {longest:?}");
}

/// A switch is killed, starts empty, and gets its tables from the controller.
fn lose_switch(name: &str, switch: DataPlane) {
    let mut rack = TestRack::up(name, &RackOptions::new(switch, "9000"));
    let endpoint = Endpoint::join(&rack, 1);
    let (known, whole) = (identities(&rack), tables(&rack));
    assert!(whole.len() > 8, "{whole:?}");
    let traffic = Traffic::start(&rack, &[&endpoint], &memory_nodes(&endpoint));
    traffic.await_more(FLOW);
    rack.kill("switch");
    rack.start("switch");
    let time = until("the tables are complete", || tables(&rack) == whole);
    traffic.await_more(FLOW);
    assert_eq!(identities(&rack), known);
    let (count, longest) = traffic.end();
    println!("{name}: whole after {time:?}; {count} operations, the longest took {longest:?}");
}

#[test]
fn a_soft_switch_that_lost_everything_serves_again() {
    lose_switch("re-soft", DataPlane::Soft);
}

#[test]
fn an_open_vswitch_that_lost_everything_serves_again() {
    lose_switch("re-ovs", DataPlane::Ovs);
}

#[test]
fn wiped_tables_are_filled_again_under_traffic() {
    for data_plane in [DataPlane::Ebpf, DataPlane::Soft] {
        let name = format!("re-wipe-{}", data_plane.as_str());
        let rack = TestRack::up(&name, &RackOptions::new(data_plane, "9000"));
        let endpoint = Endpoint::join(&rack, 1);
        let (known, whole) = (identities(&rack), tables(&rack));
        assert!(whole.len() > 8, "{whole:?}");
        let traffic = Traffic::start(&rack, &[&endpoint], &memory_nodes(&endpoint));
        for _ in 0..3 {
            traffic.await_more(FLOW);
            let before = switch(&rack).pipeline_push_count;
            rack.wipe_tables();
            // Complete tables alone prove nothing: a check that had read the pipeline's cookie before the wipe
            // finds the tables empty and fills them; only the next check detects the foreign pipeline
            // and pushes. Nothing else makes the controller push.
            let is_pushed = || switch(&rack).pipeline_push_count > before;
            let noticed = until("the pipeline is pushed again", is_pushed);
            let filled = until("the tables are complete", || tables(&rack) == whole);
            println!("{name}: pushed again after {noticed:?}, whole {filled:?} later");
        }
        traffic.await_more(FLOW);
        assert_eq!(identities(&rack), known);
        let (count, longest) = traffic.end();
        println!("{name}: {count} operations, the longest took {longest:?}");
    }
}

#[test]
fn pointers_to_a_server_that_lost_its_memory_are_refused() {
    let mut rack = TestRack::up("re-empty", &RackOptions::new(DataPlane::Ebpf, "9000"));
    let endpoint = Endpoint::join(&rack, 1);
    let (dead, alive) = (endpoint.server(1), endpoint.server(2));
    let known = identities(&rack);
    let mut old = endpoint.client(&rack, 1);
    let region = old.create_at(40_000, Placement::Node(dead)).expect("created");
    old.write(region.base(), &stamp::page(1, 1)).expect("written");
    let traffic = Traffic::start(&rack, &[&endpoint], &[alive]);
    rack.kill("memserver-s1");
    old.set_deadline(Duration::from_millis(500));
    let mut byte = [0];
    let gone = old.read(region.base(), &mut byte).expect_err("it is gone");
    let is_reported =
        matches!(gone, Error::Unreachable { node } | Error::TimedOut { node } if node == dead);
    assert!(is_reported, "{gone:?}");
    assert!(gone.to_string().contains(&format!("node {dead}")), "{gone}");
    rack.start("memserver-s1");
    old.set_deadline(Duration::from_secs(10));
    let new = Endpoint::join(&rack, 2);
    let mut young = new.client(&rack, 2);
    for client in [&mut old, &mut young] {
        let stale = |result: Result<(), Error>| {
            let error = result.expect_err("the contents are lost");
            let Error::Refused { status: Status::StaleGeneration, node, .. } = &error else {
                panic!("{error:?}");
            };
            assert_eq!(*node, dead);
            assert!(error.to_string().contains("lost"), "{error}");
        };
        stale(client.read(region.base(), &mut byte));
        stale(client.read(region.base(), &mut vec![0; 40_000]));
        stale(client.write(region.base(), b"x"));
        stale(client.zero(region.base(), 4096));
        stale(client.fetch_add(region.base(), 1).map(|_| ()));
        stale(client.delete(region));
        let fresh = client.create_at(8, Placement::Node(dead)).expect("created");
        assert_ne!(fresh.base().location.generation(), region.base().location.generation());
        client.write(fresh.base(), b"new").expect("written");
        let mut found = [0; 3];
        client.read(fresh.base(), &mut found).expect("read");
        assert_eq!(&found, b"new");
        client.delete(fresh).expect("deleted");
    }
    traffic.await_more(FLOW);
    traffic.end();
    let now = identities(&rack);
    for before in &known {
        let after = now.iter().find(|it| it.1 == before.1).expect("no member is forgotten");
        let moved = u32::from(before.1 == "s1");
        // Two generations are reserved for a server that requests no more.
        let generation = before.3 + 2 * moved;
        assert_eq!((after.0, after.2, after.3), (before.0, before.2 + moved, generation));
    }
}

#[test]
fn a_server_that_left_is_distinguished_from_one_that_serves() {
    let rack = TestRack::up("re-stopped", &RackOptions::new(DataPlane::Ebpf, "9000"));
    let endpoint = Endpoint::join(&rack, 1);
    let (left, there) = (endpoint.server(1), endpoint.server(2));
    let mut client = endpoint.client(&rack, 1);
    let region = client.create_at(4096, Placement::Node(left)).expect("created");
    rack.stop("memserver-s1");
    client.set_deadline(Duration::from_millis(400));
    let mut byte = [0];
    let away = |error: Error| {
        assert!(matches!(error, Error::Unreachable { node } if node == left), "{error:?}");
        assert!(error.to_string().contains(&format!("node {left} does not respond")), "{error}");
    };
    away(client.read(region.base(), &mut byte).expect_err("it left"));
    away(client.stat(left).map(|_| ()).expect_err("it left"));
    // In an open session the request was sent, so its outcome is unknown; without a session it was not sent.
    let create = client.create_at(1, Placement::Node(left)).map(|_| ()).expect_err("it left");
    assert!(matches!(create, Error::OutcomeUnknown { node, .. } if node == left), "{create:?}");
    let mut config = endpoint.config(2);
    config.deadline = Duration::from_millis(400);
    let mut young = endpoint.open(&rack, config);
    away(young.create_at(1, Placement::Node(left)).map(|_| ()).expect_err("it left"));
    client.set_deadline(Duration::from_secs(10));
    // The controller confirms that a server left before the switch is updated.
    let way = format!("port {} (", rack.port(Node::Server(1)));
    until("the switch forwards no CREATE there any more", || {
        let is_other =
            |it: &TableLine| it.table == "anycast" && !it.action.to_string().contains(&way);
        rack.tables().is_ok_and(|lines| lines.iter().any(is_other))
    });
    for _ in 0..50 {
        let region = client.create_at(4096, Placement::Anywhere).expect("created");
        assert_eq!(region.base().node, there);
        client.delete(region).expect("deleted");
    }
    // The endpoint learns of it with its next heartbeat.
    until("the endpoint knows", || memory_nodes(&endpoint) == [there]);
}

#[test]
fn two_racks_do_not_see_each_other() {
    let options =
        RackOptions { servers: 1, clients: 1, ..RackOptions::new(DataPlane::Ebpf, "9000") };
    let first = TestRack::up("re-rack-a", &options);
    let second = TestRack::beside("re-rack-b", &options);
    let endpoints = [Endpoint::join(&first, 1), Endpoint::join(&second, 1)];
    let [here, there] = &endpoints;
    let mut one = here.client(&first, 1);
    let mut two = there.client(&second, 2);
    let region = one.alloc_write(&stamp::page(1, 1)).expect("allocated");
    let mut byte = [0];
    let error = two.read(region.base(), &mut byte).expect_err("nothing is there");
    // Each rack begins with different generations, so a pointer of the other rack hardly ever matches.
    let Error::Refused { status: Status::StaleGeneration | Status::NotAllocated, .. } = error
    else {
        panic!("{error:?}");
    };
    let twin = two.alloc_write(&stamp::page(2, 1)).expect("allocated");
    assert_eq!(twin.base().node, region.base().node, "both racks begin with the same node");
    for (client, region, number) in [(&mut one, region, 1), (&mut two, twin, 2)] {
        let mut found = [0; 4096];
        client.read(region.base(), &mut found).expect("read");
        assert_eq!(stamp::writer(&found), Some((number, 1)));
        client.delete(region).expect("deleted");
        await_used(client, &here.memory_nodes(), 0);
    }
    drop(second);
    one.create(4096).expect("the other one continues");
}

#[test]
fn two_spaces_of_a_rack_do_not_see_each_other() {
    let mut rack = TestRack::up("re-spaces", &RackOptions::new(DataPlane::Ebpf, "9000"));
    rack.stop("memserver-s2");
    let mut record = rack.daemon("memserver-s2").clone();
    record.arguments.extend(["--space", "2", "--name", "other", "--fresh"].map(str::to_owned));
    let name = record.arguments.iter().position(|word| word == "--name").expect("a name");
    record.arguments.drain(name..name + 2);
    rack.start_as("memserver-s2", &record);
    let one = Endpoint::join(&rack, 1);
    let two = Endpoint::join_space(&rack, 2, Space(2), "tenant");
    until("each sees its own server only", || {
        memory_nodes(&one).len() == 1 && memory_nodes(&two).len() == 1
    });
    // A client places memory on the nodes that its endpoint knew when it was opened.
    let (mut first, mut second) = (one.client(&rack, 1), two.client(&rack, 2));
    let (ours, theirs) = (memory_nodes(&one), memory_nodes(&two));
    assert_ne!(ours, theirs);
    let region = first.alloc_write(&stamp::page(1, 1)).expect("allocated");
    let mut byte = [0];
    let error = second.read(region.base(), &mut byte).expect_err("another space");
    assert!(matches!(error, Error::WrongSpace), "{error:?}");
    for _ in 0..50 {
        let region = second.create(1).expect("created");
        assert_eq!((region.base().space, vec![region.base().node]), (Space(2), theirs.clone()));
    }
    // The same node and location in the other space is not allocated.
    second.set_deadline(Duration::from_millis(300));
    let mut forged = region.base();
    forged.space = Space(2);
    let error = second.write(forged, b"x").expect_err("no server has it");
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    let mut found = [0; 4096];
    first.read(region.base(), &mut found).expect("read");
    assert_eq!(stamp::writer(&found), Some((1, 1)));
}

/// The logs would show the panic of a daemon that still responded in the tests above.
#[test]
fn no_daemon_panics_when_the_rest_of_the_rack_ends() {
    let rack = TestRack::up("re-end", &RackOptions::new(DataPlane::Soft, "1500"));
    let endpoint = Endpoint::join(&rack, 1);
    let traffic = Traffic::start(&rack, &[&endpoint], &memory_nodes(&endpoint));
    traffic.await_more(FLOW);
    traffic.end();
    let daemons = rack.rack().state().daemons.clone();
    for name in ["switch", "controller", "memserver-s1", "memserver-s2"] {
        rack.stop(name);
    }
    for daemon in daemons {
        let log = fs::read_to_string(&daemon.log).expect("a log");
        assert!(!log.contains("panicked"), "{}: {log}", daemon.name);
    }
}
