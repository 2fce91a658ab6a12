//! Racks whose switch is Open vSwitch, driven by OpenFlow.

use bluebridge::NodeId;
use bluebridge_rack::control::tables::TableLine;
use bluebridge_rack::spec::DataPlane;
use bluebridge_testkit::until;
use bluebridge_tests::rack::endpoint::{Endpoint, await_used};
use bluebridge_tests::rack::traffic::Traffic;
use bluebridge_tests::rack::{RackOptions, TestRack};

/// Operations that are waited for to see that traffic flows.
const FLOW: u64 = 200;

fn options() -> RackOptions {
    RackOptions::new(DataPlane::Ovs, "9000")
}

fn memory_nodes(endpoint: &Endpoint) -> Vec<NodeId> {
    endpoint.memory_nodes().iter().map(|node| node.node).collect()
}

/// The entries without the weights of the anywhere-CREATE, which follow the free memory.
fn tables(rack: &TestRack) -> Vec<TableLine> {
    let tables = rack.tables().unwrap_or_default().into_iter();
    tables.filter(|line| line.table != "anycast").collect()
}

#[test]
fn traffic_continues_while_the_controller_is_dead() {
    let mut rack = TestRack::up("of-control", &options());
    let endpoints = [Endpoint::join(&rack, 1), Endpoint::join(&rack, 2)];
    let [one, two] = &endpoints;
    let whole = tables(&rack);
    assert!(whole.len() > 8, "{whole:?}");
    let traffic = Traffic::start(&rack, &[one, two], &memory_nodes(one));
    traffic.await_more(FLOW);
    rack.kill("controller");
    traffic.await_more(FLOW);
    assert_eq!(tables(&rack), whole);
    rack.start("controller");
    rack.await_heartbeats(4);
    traffic.await_more(FLOW);
    assert_eq!(tables(&rack), whole);
    let (count, longest) = traffic.end();
    println!("controller: {count} operations, the longest took {longest:?}");
    await_used(&mut one.client(&rack, 1), &one.memory_nodes(), 0);
}

#[test]
fn a_switch_that_lost_everything_serves_again() {
    let mut rack = TestRack::up("of-switch", &options());
    let endpoint = Endpoint::join(&rack, 1);
    let whole = tables(&rack);
    assert!(whole.len() > 8, "{whole:?}");
    let traffic = Traffic::start(&rack, &[&endpoint], &memory_nodes(&endpoint));
    traffic.await_more(FLOW);
    rack.kill("switch");
    rack.start("switch");
    let time = until("the tables are complete", || tables(&rack) == whole);
    traffic.await_more(FLOW);
    let (count, longest) = traffic.end();
    println!("whole after {time:?}; {count} operations, the longest took {longest:?}");
}
