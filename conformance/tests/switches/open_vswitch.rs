//! The packet vectors on Open vSwitch, programmed through OpenFlow.

use std::time::{Duration, Instant};

use bluebridge_conformance::{Hosts, Limit, Outputs, PORTS, Tables, Target, driven::Driven};
use bluebridge_controller::driver::{OpenFlowAddress, OpenFlowConnector, OpenFlowSwitch};
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_rack::open_vswitch::{OpenVswitch, OvsError};
use bluebridge_testkit::{Scratch, ip};

/// How long the switch may take until it has processed all frames.
const DEADLINE: Duration = Duration::from_secs(20);

/// Where the switch listens, in the test's own namespace.
const LISTEN: &str = "127.0.0.1:6653";

pub(super) struct Ovs {
    driven: Driven,
    hosts: Hosts,
    switch: OpenVswitch,
    _directory: Scratch,
}

impl Ovs {
    pub(super) fn new() -> Self {
        ip("link set lo up");
        let hosts = Hosts::new();
        let directory = Scratch::new("ovs");
        let listen = LISTEN.parse().expect("an address");
        let names: Vec<(u16, String)> = PORTS.map(|port| (port, format!("s{port}"))).collect();
        let ports = names.iter().map(|(port, name)| (*port, name.as_str()));
        let switch = OpenVswitch::start(directory.path(), listen, ports)
            .unwrap_or_else(|error| panic!("{error}"));
        // Its cache follows changes sooner, so that the test waits less.
        let sooner = ["set", "Open_vSwitch", ".", "other_config:max-revalidator=100"];
        switch.control(sooner).unwrap_or_else(|error| panic!("{error}"));
        let mut connector = OpenFlowConnector::new(OpenFlowAddress::Connect(listen));
        let driven = Driven::connect(&mut connector).unwrap_or_else(|error| panic!("{error}"));
        Self { driven, hosts, switch, _directory: directory }
    }
}

impl Target for Ovs {
    fn tables(&mut self) -> &mut dyn Tables {
        &mut self.driven
    }

    fn send(&mut self, port: SwitchPort, frame: &[u8], expected: usize) -> Outputs {
        self.hosts.send(port, frame).expect("the link takes it");
        self.hosts.gather(expected)
    }

    fn packet_ins(&mut self, expected: usize) -> Result<Outputs, String> {
        self.driven.packet_ins(expected)
    }

    fn settle(&mut self) {
        // A frame that must be dropped was not waited for, and may still be in the port's queue. It would pass the
        // next tables.
        let began = Instant::now();
        loop {
            // Its cache follows changes of flows some milliseconds later, and counts are added up then.
            self.switch.settle().unwrap_or_else(|error| panic!("{error}"));
            let passed = self.switch.frame_count().unwrap_or_else(|error| panic!("{error}"));
            let sent = self.hosts.sent_count();
            if passed >= sent {
                return;
            }
            assert!(began.elapsed() < DEADLINE, "{passed} of {sent} frames entered the pipeline");
        }
    }

    fn limit(&self, vector: &str) -> Option<Limit> {
        match vector {
            "anycast_weighted" => Some(Limit::OTHER_CHOICE),
            "cross_space_counted" => Some(Limit::new(
                "its guard checks source and destination with one flow",
                &["Packets(\"one\") is 0, not 1"],
            )),
            "notify_no_session" => Some(Limit::new(
                "its copies need no session",
                &["packet 1: port 510 sent an unexpected frame"],
            )),
            "redirect_until" => Some(Limit::new(
                "OpenFlow counts time in seconds",
                // It reads back, or is used, for longer than was written.
                &["lease_ms: 61000 }", Limit::STILL_REDIRECTED],
            )),
            "l2_payload_length" => Some(Limit::new(
                "it drops every IPv6 packet that it cannot parse",
                &["packet 1: port 2 did not send"],
            )),
            "malformed_version" => Some(Limit::new(
                "it does not look at the version",
                &["packet 1: port 2 sent an unexpected frame"],
            )),
            "multicast_counted" => {
                Some(Limit::new("its buckets are not counted", &["Packets(\"mac2\") is 0, not 1"]))
            }
            "extension_header" => Some(Limit::new(
                "it looks behind them; endpoints drop them",
                &[
                    "packet 1: port 2 sent an unexpected frame",
                    // It may forward the first packet, for which it asks its daemon, only when the second one was sent:
                    // the byte behind the length is the next header, which tells them apart.
                    "packet 2: port 2 sent an unexpected frame: [02, 00, 00, 00, 00, 02, 02, 00, 00, 00, 00, 01, 86, dd, \
                     60, 00, 00, 00, 00, 30, 00,",
                ],
            )),
            _ => None,
        }
    }
}

mod root {
    use std::collections::BTreeSet;
    use std::time::{Duration, Instant};

    use bluebridge_controller::{
        core::Body,
        driver::{
            DriverError, Pipeline, SwitchConnector as _, SwitchDriver, SwitchEvent, UpdateError,
        },
        plan::{Object, TableUpdate},
        store::ElectionId,
    };
    use bluebridge_p4::pipeline::{Action, Forward, Key, MacAddr, WeightedForward};
    use bluebridge_testkit::namespace::in_thread;
    use tokio::runtime::Runtime;

    use super::*;

    const SCOPE: u32 = 0xfdbb_0001;
    /// How long a switch may take to connect to its controller.
    const CONNECT_PATIENCE: Duration = Duration::from_secs(60);

    fn runtime() -> Runtime {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().expect("a runtime")
    }

    /// A switch without hosts, and how to connect to it.
    fn switch() -> (OpenVswitch, OpenFlowConnector, Scratch) {
        ip("link set lo up");
        let directory = Scratch::new("ovs");
        let listen = LISTEN.parse().expect("an address");
        let switch = OpenVswitch::start(directory.path(), listen, [])
            .unwrap_or_else(|error| panic!("{error}"));
        let connector = OpenFlowConnector::new(OpenFlowAddress::Connect(listen));
        (switch, connector, directory)
    }

    const fn id(high: u64, low: u64) -> ElectionId {
        ElectionId { high, low }
    }

    fn forward(port: u16) -> Forward {
        Forward { port: SwitchPort(port), dst_mac: MacAddr([2, 0, 0, 0, 0, 9]) }
    }

    fn insert(key: Key, action: Action) -> TableUpdate {
        TableUpdate::Insert(Object::Entry(key, Body::new(action)))
    }

    fn node(number: u16) -> TableUpdate {
        let prefix = (u128::from(SCOPE) << 80) | (u128::from(number) << 64);
        let key = Key::Directory { prefix, prefix_len: 48 };
        insert(key, Action::Forward(forward(number)))
    }

    async fn one(
        driver: &mut dyn SwitchDriver,
        update: TableUpdate,
    ) -> Result<Result<(), UpdateError>, DriverError> {
        Ok(driver.apply(&[update]).await?.remove(0))
    }

    #[test]
    fn only_the_controller_with_the_greatest_election_id_can_write() {
        in_thread(|| {
            let (switch, mut connector, _directory) = switch();
            runtime().block_on(async {
                let mut first = connector.connect(id(1, 1)).await.expect("free");
                assert_eq!(first.ensure_pipeline().await, Ok(Pipeline::Pushed));
                assert_eq!(one(&mut *first, node(1)).await, Ok(Ok(())));
                let mut second = connector.connect(id(2, 1)).await.expect("greater");
                assert_eq!(second.ensure_pipeline().await, Ok(Pipeline::Kept));
                let fenced = DriverError::Fenced { ours: id(1, 1), theirs: id(2, 1) };
                assert_eq!(one(&mut *first, node(2)).await, Err(fenced.clone()));
                assert_eq!(first.ensure_pipeline().await, Err(fenced));
                // The loser learns why, and disturbs nobody.
                let (ours, theirs) = (id(1, 2), id(2, 1));
                let fenced = connector.connect(ours).await.map(drop);
                assert_eq!(fenced, Err(DriverError::Fenced { ours, theirs }));
                assert_eq!(one(&mut *second, node(3)).await, Ok(Ok(())));
                let installed = second.read().await.expect("the tables").tables;
                assert_eq!(installed.entries.len(), 2, "{installed:?}");
                // A controller with a copy of the store has the same ids.
                let (ours, theirs) = (id(2, 1), id(2, 1));
                let fenced = connector.connect(ours).await.map(drop);
                assert_eq!(fenced, Err(DriverError::Fenced { ours, theirs }));
                // The record of the primary is restored.
                switch.change_flows("del-flows", "table=11").expect("deleted");
                assert_eq!(second.ensure_pipeline().await, Ok(Pipeline::Pushed));
                let ours = id(1, 3);
                let fenced = connector.connect(ours).await.map(drop);
                assert_eq!(fenced, Err(DriverError::Fenced { ours, theirs }));
                assert_eq!(one(&mut *second, node(1)).await, Ok(Ok(())));
                assert_eq!(one(&mut *second, node(3)).await, Ok(Ok(())));
                // The record outlives the connection.
                drop(second);
                let fenced = connector.connect(ours).await.map(drop);
                assert_eq!(fenced, Err(DriverError::Fenced { ours, theirs }));
                let looked = connector.look().await.expect("reading needs no role").tables;
                assert_eq!(looked, installed);
            });
        });
    }

    #[test]
    fn what_others_change_is_found_and_repaired() {
        in_thread(|| {
            let (switch, mut connector, _directory) = switch();
            runtime().block_on(async {
                let mut driver = connector.connect(id(1, 1)).await.expect("free");
                assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Pushed));
                assert_eq!(one(&mut *driver, node(1)).await, Ok(Ok(())));
                let whole = driver.read().await.expect("the tables").tables;
                // A flow of somebody else, and one of the pipeline that is gone.
                switch
                    .change_flows("add-flow", "table=7,priority=9000,actions=drop")
                    .expect("added");
                switch.change_flows("del-flows", "table=6").expect("deleted");
                assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Kept));
                assert_eq!(driver.read().await.expect("the tables").tables, whole);
                let flows = switch.flows().expect("they are shown");
                assert!(!flows.contains("priority=9000"), "{flows}");
                assert!(flows.contains("table=6"), "{flows}");
                // Everything is gone: the pipeline is pushed, and the tables are empty.
                switch.change_flows("del-flows", "").expect("deleted");
                assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Pushed));
                assert_eq!(driver.read().await.expect("the tables").tables.count(), 0);
                // The record of the primary is there again.
                let (ours, theirs) = (id(0, 9), id(1, 1));
                let fenced = connector.connect(ours).await.map(drop);
                assert_eq!(fenced, Err(DriverError::Fenced { ours, theirs }));
            });
        });
    }

    #[test]
    fn a_full_table_is_named_and_nothing_half_installed_is_left() {
        in_thread(|| {
            let (switch, mut connector, _directory) = switch();
            runtime().block_on(async {
                let mut driver = connector.connect(id(1, 1)).await.expect("free");
                assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Pushed));
                // Room for the miss and three entries; an anycast choice of two ports needs three.
                for table in [4, 7] {
                    let limit = format!("set bridge bb flow_tables:{table}=@limit");
                    let create =
                        "-- --id=@limit create flow_table flow_limit=4 overflow_policy=refuse";
                    let words = format!("{limit} {create}");
                    switch.control(words.split(' ')).expect("limited");
                }
                for number in 1..=3 {
                    assert_eq!(one(&mut *driver, node(number)).await, Ok(Ok(())));
                }
                let full = one(&mut *driver, node(4)).await;
                let reason = "the table is full".to_owned();
                assert_eq!(full, Ok(Err(UpdateError::Refused(reason.clone()))));
                let choice = |scope, ports: &[u16]| {
                    let member =
                        |port: &u16| WeightedForward { forward: forward(*port), weight: 1 };
                    let members = ports.iter().map(member).collect();
                    insert(Key::Anycast { dst_scope: scope }, Action::Select(members))
                };
                assert_eq!(one(&mut *driver, choice(SCOPE, &[1, 2])).await, Ok(Ok(())));
                let whole = driver.read().await.expect("the tables");
                let groups = switch.groups().expect("they are shown");
                let full = one(&mut *driver, choice(SCOPE + 1, &[1, 2])).await;
                assert_eq!(full, Ok(Err(UpdateError::Refused(reason))));
                assert_eq!(driver.read().await.expect("the tables").tables, whole.tables);
                assert_eq!(switch.groups().expect("they are shown"), groups);
            });
        });
    }

    #[test]
    fn a_changed_entry_keeps_its_counters_and_groups_follow_the_macs_of_ports() {
        in_thread(|| {
            let (switch, mut connector, _directory) = switch();
            runtime().block_on(async {
                let mut driver = connector.connect(id(1, 1)).await.expect("free");
                assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Pushed));
                let port = SwitchPort(3);
                let mac = |last| Action::SetDstMac(MacAddr([2, 0, 0, 0, 0, last]));
                assert_eq!(
                    one(&mut *driver, insert(Key::PortMac { port }, mac(7))).await,
                    Ok(Ok(()))
                );
                let ports = BTreeSet::from([port, SwitchPort(4)]);
                let group = TableUpdate::Insert(Object::Group(5, ports.clone()));
                assert_eq!(one(&mut *driver, group).await, Ok(Ok(())));
                assert!(switch.groups().expect("shown").contains("02:00:00:00:00:07"));
                let body = Body::new(mac(8));
                let change = TableUpdate::Modify(Object::Entry(Key::PortMac { port }, body));
                assert_eq!(one(&mut *driver, change).await, Ok(Ok(())));
                let groups = switch.groups().expect("shown");
                assert!(
                    groups.contains("02:00:00:00:00:08") && !groups.contains("02:00:00:00:00:07")
                );
                let installed = driver.read().await.expect("the tables").tables;
                assert_eq!(installed.groups.get(&5), Some(&ports));
                // Two ports of a group get other addresses at once.
                let other = SwitchPort(4);
                let both = [
                    TableUpdate::Modify(Object::Entry(Key::PortMac { port }, Body::new(mac(5)))),
                    insert(Key::PortMac { port: other }, mac(6)),
                ];
                assert_eq!(driver.apply(&both).await, Ok(vec![Ok(()), Ok(())]));
                let groups = switch.groups().expect("shown");
                assert!(
                    groups.contains("02:00:00:00:00:05") && groups.contains("02:00:00:00:00:06")
                );
                let installed = driver.read().await.expect("the tables").tables;
                assert_eq!(installed.groups.get(&5), Some(&ports));
                // A choice with other members has other groups, and the old ones are gone.
                let choice = |ports: &[u16]| {
                    let member =
                        |port: &u16| WeightedForward { forward: forward(*port), weight: 2 };
                    let action = Action::Select(ports.iter().map(member).collect());
                    Object::Entry(Key::Anycast { dst_scope: SCOPE }, Body::new(action))
                };
                let (small, large) = (choice(&[1]), choice(&[1, 2, 3]));
                let before = switch.groups().expect("shown");
                for update in [
                    TableUpdate::Insert(large.clone()),
                    TableUpdate::Modify(small.clone()),
                    TableUpdate::Modify(large),
                    TableUpdate::Modify(small.clone()),
                ] {
                    let Object::Entry(key, body) = update.object().clone() else { continue };
                    assert_eq!(one(&mut *driver, update).await, Ok(Ok(())));
                    let installed = driver.read().await.expect("the tables").tables;
                    assert_eq!(installed.entries.get(&key), Some(&body));
                }
                assert_eq!(one(&mut *driver, TableUpdate::Delete(small)).await, Ok(Ok(())));
                assert_eq!(switch.groups().expect("shown"), before);
            });
        });
    }

    #[test]
    fn the_database_of_another_and_an_address_in_use_are_refused() {
        in_thread(|| {
            ip("link set lo up");
            let listen = LISTEN.parse().expect("an address");
            let scratch = Scratch::new("ovs-foreign");
            let database = scratch.path().join("conf.db");
            std::fs::write(&database, "of another").expect("written");
            let refused = OpenVswitch::start(scratch.path(), listen, []).expect_err("foreign");
            assert!(matches!(refused, OvsError::Foreign(_)), "{refused}");
            assert_eq!(std::fs::read_to_string(database).expect("kept"), "of another");

            let _holder = std::net::TcpListener::bind(LISTEN).expect("free");
            let scratch = Scratch::new("ovs-listen");
            let refused = OpenVswitch::start(scratch.path(), listen, []).expect_err("in use");
            assert!(refused.to_string().contains("cannot listen on 127.0.0.1:6653"), "{refused}");
        });
    }

    #[test]
    fn a_directory_is_used_again_and_keeps_files_of_others() {
        in_thread(|| {
            let (running, _, directory) = switch();
            let listen = LISTEN.parse().expect("an address");
            let start = || OpenVswitch::start(directory.path(), listen, []);
            let own = directory.path().join("notes.txt");
            std::fs::write(&own, "keep").expect("written");
            assert!(matches!(start(), Err(OvsError::InUse(_))), "it runs");
            running.flows().expect("it was not disturbed");
            drop(running);
            let again = start().unwrap_or_else(|error| panic!("{error}"));
            again.flows().expect("it runs");
            assert_eq!(std::fs::read_to_string(&own).expect("still there"), "keep");
        });
    }

    /// Repeats a call while the switch does not connect, as a controller does: the switch waits longer after each
    /// attempt that came too early.
    macro_rules! patiently {
        ($call:expr) => {{
            let begun = Instant::now();
            loop {
                match $call.await {
                    Ok(result) => break result,
                    Err(DriverError::Lost(_) | DriverError::Timeout(_))
                        if begun.elapsed() < CONNECT_PATIENCE => {}
                    Err(error) => panic!("it does not connect: {error}"),
                }
            }
        }};
    }

    #[test]
    fn a_switch_may_connect_to_its_controller() {
        in_thread(|| {
            let (switch, _, _directory) = switch();
            let listen = "127.0.0.1:6654".parse().expect("an address");
            let mut connector = OpenFlowConnector::new(OpenFlowAddress::Listen(listen));
            assert_eq!(connector.uri(), "openflow-listen://127.0.0.1:6654");
            runtime().block_on(async {
                let words = ["set-controller", "bb", "tcp:127.0.0.1:6654"];
                switch.control(words).expect("it takes another controller");
                // Reading and becoming the primary need one connection.
                let looked = patiently!(connector.look());
                assert_eq!(looked.tables.count(), 0);
                let mut driver = connector.connect(id(1, 1)).await.expect("free");
                assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Pushed));
                assert_eq!(one(&mut *driver, node(1)).await, Ok(Ok(())));
                // It connects again by itself.
                drop(driver);
                let mut driver = patiently!(connector.connect(id(1, 2)));
                assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Kept));
                assert_eq!(driver.read().await.expect("the tables").tables.count(), 1);
            });
        });
    }

    #[test]
    fn a_switch_is_known_by_its_datapath_id() {
        in_thread(|| {
            let (switch, connector, _directory) = switch();
            drop(connector);
            let words = ["set", "bridge", "bb", "other_config:datapath-id=00000000000000bb"];
            switch.control(words).expect("it takes a datapath id");
            let address = OpenFlowAddress::Connect(LISTEN.parse().expect("an address"));
            runtime().block_on(async {
                for (wanted, fits) in [(0xbb, true), (0xaa, false)] {
                    let datapath_id = Some(wanted);
                    let mut connector =
                        OpenFlowConnector::new(OpenFlowSwitch { address, datapath_id });
                    let looked = connector.look().await.map(drop);
                    let expected = if fits {
                        Ok(())
                    } else {
                        Err(DriverError::OtherSwitch { found: 0xbb, wanted })
                    };
                    assert_eq!(looked, expected);
                }
            });
        });
    }

    #[test]
    fn other_ports_are_reported_at_once() {
        in_thread(|| {
            let (switch, mut connector, _directory) = switch();
            ip("link add eth1 type veth peer name far1");
            runtime().block_on(async {
                let mut driver = connector.connect(id(1, 1)).await.expect("free");
                assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Pushed));
                let mut before = driver.ports().await.expect("it lists them");
                for (words, expected) in [
                    (
                        "add-port bb eth1 -- set interface eth1 ofport_request=3",
                        "port 3 (eth1) is new",
                    ),
                    ("set interface eth1 ofport_request=4", "eth1 has the port 4, not 3 any more"),
                    ("del-port bb eth1", "port 4 (eth1) is gone"),
                ] {
                    switch.control(words.split(' ')).expect("it takes the change");
                    // It may report a change in several steps.
                    let began = Instant::now();
                    loop {
                        let event = tokio::time::timeout(DEADLINE, driver.next_event()).await;
                        assert_eq!(event, Ok(SwitchEvent::PortsChanged), "{words}");
                        let after = driver.ports().await.expect("it lists them");
                        let changes = after.changes_since(&before);
                        if changes == [expected] {
                            before = after;
                            break;
                        }
                        assert!(began.elapsed() < DEADLINE, "{words}: {changes:?}");
                    }
                }
            });
        });
    }

    #[test]
    fn a_switch_that_ends_is_noticed() {
        in_thread(|| {
            let (switch, mut connector, _directory) = switch();
            runtime().block_on(async {
                let mut driver = connector.connect(id(1, 1)).await.expect("free");
                assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Pushed));
                drop(switch);
                let event = driver.next_event().await;
                assert!(matches!(event, SwitchEvent::Broken(DriverError::Lost(_))), "{event:?}");
                assert!(matches!(driver.read().await, Err(DriverError::Lost(_))));
                assert!(matches!(
                    connector.connect(id(1, 2)).await.map(drop),
                    Err(DriverError::Lost(_))
                ));
            });
        });
    }
}
