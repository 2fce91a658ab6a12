//! Switches that lack something: each refusal is named, and nothing half installed stays.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bluebridge_openflow::{
    Body, ErrorMessage, Features, Field, FlowCommand, FlowMod, FlowStats, GROUP_ALL, GroupCommand,
    GroupDescription, GroupKind, Hello, Message, MultipartPart, MultipartReply, MultipartRequest,
    Port, PortReason, PortStatus, Role, RoleRequest, VERSION, frame_length,
};
use bluebridge_p4::pipeline::{Action, Forward, Key, MacAddr, SwitchPort, WeightedForward};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::flow::Flow;
use super::layout::{EGRESS, PRIMARY_RECORD, TABLE_COUNT, record};
use super::{OpenFlowAddress, OpenFlowConnector, OpenFlowSwitch};
use crate::core::Body as Value;
use crate::driver::{
    DriverError, P4RuntimeConnector, Pipeline, SwitchConnector as _, SwitchDriver, SwitchEvent,
    UpdateError,
};
use crate::plan::{Object, TableUpdate};
use crate::store::ElectionId;

/// Errors of OpenFlow 1.3: type and code.
const BAD_MATCH_FIELD: (u16, u16) = (4, 6);
const TABLE_FULL: (u16, u16) = (5, 1);
const GROUP_TYPE: (u16, u16) = (6, 9);
const UNKNOWN_GROUP: (u16, u16) = (6, 8);

/// What a switch has, without anything that it needs to forward frames.
#[derive(Clone, Debug)]
struct Switch {
    table_count: u8,
    datapath_id: u64,
    /// The most flows in each table.
    flows_max: usize,
    group_kinds: Vec<GroupKind>,
    /// Whether it has Open vSwitch's own fields.
    has_own_fields: bool,
    /// What it sends without a request, after its features.
    unrequested: Vec<Body>,
    flows: BTreeMap<(u8, u16, Vec<Field>), FlowMod>,
    groups: BTreeMap<u32, GroupDescription>,
}

impl Switch {
    fn whole() -> Self {
        Self {
            table_count: TABLE_COUNT,
            datapath_id: 1,
            flows_max: usize::MAX,
            group_kinds: vec![GroupKind::All, GroupKind::Select],
            has_own_fields: true,
            unrequested: Vec::new(),
            flows: BTreeMap::new(),
            groups: BTreeMap::new(),
        }
    }

    fn change_flow(&mut self, change: FlowMod) -> Result<(), (u16, u16)> {
        let key = (change.table, change.priority, change.fields.clone());
        match change.command {
            FlowCommand::Delete => self.flows.clear(),
            FlowCommand::DeleteStrict => drop(self.flows.remove(&key)),
            _ => {
                let is_unknown = |field: &Field| matches!(field, Field::Other(_));
                if !self.has_own_fields && change.fields.iter().any(is_unknown) {
                    return Err(BAD_MATCH_FIELD);
                }
                let count = self.flows.keys().filter(|(table, ..)| *table == key.0).count();
                if count >= self.flows_max && !self.flows.contains_key(&key) {
                    return Err(TABLE_FULL);
                }
                self.flows.insert(key, change);
            }
        }
        Ok(())
    }

    fn answer(&mut self, body: Body) -> Option<Body> {
        let result = match body {
            Body::Hello(_) => return Some(Body::Hello(Hello::for_version(VERSION))),
            Body::FeaturesRequest => {
                let &mut Self { table_count, datapath_id, .. } = self;
                let features = Features { table_count, datapath_id, ..Features::default() };
                return Some(Body::FeaturesReply(features));
            }
            Body::RoleRequest(_) => {
                return Some(Body::RoleReply(RoleRequest {
                    role: Role::Primary,
                    generation_id: 1,
                }));
            }
            Body::BarrierRequest => return Some(Body::BarrierReply),
            Body::MultipartRequest(request) => {
                let part = match request {
                    MultipartRequest::Flows(wanted) => {
                        let flows = self.flows.values().filter(|flow| {
                            (flow.cookie ^ wanted.cookie) & wanted.cookie_mask == 0
                                && [flow.table, u8::MAX].contains(&wanted.table)
                        });
                        MultipartPart::Flows(flows.map(stats).collect())
                    }
                    MultipartRequest::Groups => {
                        MultipartPart::Groups(self.groups.values().cloned().collect())
                    }
                    other => panic!("{other:?}"),
                };
                return Some(Body::MultipartReply(MultipartReply { more: false, part }));
            }
            Body::FlowMod(change) => self.change_flow(change),
            Body::GroupMod(change) => {
                let is_there = self.groups.contains_key(&change.group);
                match change.command {
                    GroupCommand::Delete if change.group == GROUP_ALL => {
                        self.groups.clear();
                        Ok(())
                    }
                    GroupCommand::Delete => {
                        self.groups.remove(&change.group);
                        Ok(())
                    }
                    GroupCommand::Modify if !is_there => Err(UNKNOWN_GROUP),
                    _ if !self.group_kinds.contains(&change.kind) => Err(GROUP_TYPE),
                    _ => {
                        let (kind, group, buckets) = (change.kind, change.group, change.buckets);
                        self.groups.insert(group, GroupDescription { kind, group, buckets });
                        Ok(())
                    }
                }
            }
            _ => Ok(()),
        };
        let (kind, code) = result.err()?;
        Some(Body::Error(ErrorMessage { kind, code, data: Vec::new() }))
    }
}

/// A flow as the switch reports it.
fn stats(flow: &FlowMod) -> FlowStats {
    FlowStats {
        table: flow.table,
        priority: flow.priority,
        cookie: flow.cookie,
        fields: flow.fields.clone(),
        instructions: flow.instructions.clone(),
        ..FlowStats::default()
    }
}

async fn serve(mut stream: TcpStream, switch: Arc<Mutex<Switch>>) -> std::io::Result<()> {
    let mut buffer = Vec::new();
    loop {
        while let Some(length) = frame_length(&buffer).expect("the driver sends messages") {
            let message = Message::decode(&buffer[..length]).expect("a message");
            buffer.drain(..length);
            let answer = switch.lock().expect("no panic").answer(message.body);
            let mut bytes = Vec::new();
            if matches!(answer, Some(Body::FeaturesReply(_))) {
                let unrequested = std::mem::take(&mut switch.lock().expect("no panic").unrequested);
                for body in unrequested {
                    Message { xid: 0, body }.encode(&mut bytes).expect("it fits");
                }
            }
            if let Some(body) = answer {
                Message { xid: message.xid, body }.encode(&mut bytes).expect("it fits");
            }
            stream.write_all(&bytes).await?;
        }
        if stream.read_buf(&mut buffer).await? == 0 {
            return Ok(());
        }
    }
}

/// Starts a switch and returns how to connect to it.
async fn start(switch: Switch) -> (OpenFlowConnector, Arc<Mutex<Switch>>) {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let switch = Arc::new(Mutex::new(switch));
    let served = Arc::clone(&switch);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, Arc::clone(&served)));
        }
    });
    (OpenFlowConnector::new(OpenFlowAddress::Connect(address)), switch)
}

const ID: ElectionId = ElectionId { high: 1, low: 1 };
const SCOPE: u32 = 0xfdbb_0001;

fn forward(port: u16) -> Forward {
    Forward { port: SwitchPort(port), dst_mac: MacAddr([2, 0, 0, 0, 0, 1]) }
}

fn node(number: u16) -> TableUpdate {
    let prefix = u128::from(SCOPE) << 80 | u128::from(number) << 64;
    let key = Key::Directory { prefix, prefix_len: 48 };
    TableUpdate::Insert(Object::Entry(key, Value::new(Action::Forward(forward(1)))))
}

fn choice() -> TableUpdate {
    let member = |port| WeightedForward { forward: forward(port), weight: 1 };
    let select = Action::Select(vec![member(1), member(2)]);
    let key = Key::Anycast { dst_scope: SCOPE };
    TableUpdate::Insert(Object::Entry(key, Value::new(select)))
}

async fn ready(connector: &mut OpenFlowConnector) -> Box<dyn SwitchDriver> {
    let mut driver = connector.connect(ID).await.expect("free");
    assert_eq!(driver.ensure_pipeline().await, Ok(Pipeline::Pushed));
    driver
}

#[tokio::test]
async fn too_few_tables_are_named_before_anything_is_written() {
    let (mut connector, switch) = start(Switch { table_count: 8, ..Switch::whole() }).await;
    let refused = connector.connect(ID).await.map(drop);
    let reason = "it needs 12 tables, the switch has 8".to_owned();
    assert_eq!(refused, Err(DriverError::Refused { what: "the pipeline", reason }));
    assert!(switch.lock().expect("no panic").flows.is_empty());
}

/// A part of the pipeline could let frames pass that the missing part must drop.
#[tokio::test]
async fn a_pipeline_of_which_a_flow_is_refused_is_removed() {
    let full = |switch| Switch { flows_max: 10, ..switch };
    let no_fields = |switch| Switch { has_own_fields: false, ..switch };
    for (switch, text) in
        [(no_fields(Switch::whole()), "BAD_FIELD"), (full(Switch::whole()), "the table is full")]
    {
        let (mut connector, switch) = start(switch).await;
        let mut driver = connector.connect(ID).await.expect("free");
        match driver.ensure_pipeline().await {
            Err(DriverError::Refused { what: "the pipeline", reason }) => {
                assert!(reason.contains(text), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        let flows = switch.lock().expect("no panic").flows.clone();
        let left: Vec<Flow> = flows.values().map(stats).flat_map(|it| Flow::read(&it)).collect();
        assert_eq!(left, [record(PRIMARY_RECORD, ID.low, ID.high)]);
    }
}

#[tokio::test]
async fn a_group_type_that_is_refused_leaves_nothing() {
    let kinds = vec![GroupKind::All];
    let (mut connector, switch) = start(Switch { group_kinds: kinds, ..Switch::whole() }).await;
    let mut driver = ready(&mut connector).await;
    assert_eq!(driver.apply(&[node(1)]).await, Ok(vec![Ok(())]));
    let before = switch.lock().expect("no panic").clone();
    let results = driver.apply(&[choice(), node(2)]).await.expect("the connection holds");
    let refused = matches!(&results[0], Err(UpdateError::Refused(why)) if why.contains("group"));
    assert!(refused && results[1] == Ok(()), "{results:?}");
    let deletion = node(2).object().clone();
    assert_eq!(driver.apply(&[TableUpdate::Delete(deletion)]).await, Ok(vec![Ok(())]));
    let after = switch.lock().expect("no panic").clone();
    assert_eq!((after.flows, after.groups), (before.flows, before.groups));
}

#[tokio::test]
async fn without_groups_neither_a_group_nor_what_needs_it_stays() {
    let (mut connector, switch) = start(Switch { group_kinds: vec![], ..Switch::whole() }).await;
    let mut driver = ready(&mut connector).await;
    let before = switch.lock().expect("no panic").clone();
    let ports = BTreeSet::from([SwitchPort(1), SwitchPort(2)]);
    let group = TableUpdate::Insert(Object::Group(7, ports));
    for update in [group, choice()] {
        let results = driver.apply(std::slice::from_ref(&update)).await.expect("it holds");
        assert!(matches!(&results[..], [Err(UpdateError::Refused(_))]), "{results:?}");
    }
    let read = driver.read().await.expect("the tables");
    assert_eq!(read.tables.count(), 0);
    let after = switch.lock().expect("no panic").clone();
    assert_eq!((after.flows, after.groups), (before.flows, before.groups));
}

#[tokio::test]
async fn a_full_table_refuses_one_entry_and_keeps_the_others() {
    // `classify` has the most flows that are always there.
    let (mut connector, switch) = start(Switch { flows_max: 15, ..Switch::whole() }).await;
    let mut driver = ready(&mut connector).await;
    let nodes: Vec<TableUpdate> = (1..=15).map(node).collect();
    let mut expected = vec![Ok(()); 14];
    expected.push(Err(UpdateError::Refused("the table is full".to_owned())));
    assert_eq!(driver.apply(&nodes).await, Ok(expected));
    assert_eq!(driver.read().await.expect("the tables").tables.count(), 14);
    let count = switch.lock().expect("no panic").flows.len();
    assert_eq!(driver.apply(&[node(16)]).await.map(|results| results[0].is_err()), Ok(true));
    assert_eq!(switch.lock().expect("no panic").flows.len(), count);
}

/// The P4Runtime library only reports an error of HTTP/2.
#[tokio::test]
async fn a_p4runtime_address_of_an_openflow_switch_is_named() {
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut hello = Vec::new();
            let message = Message { xid: 1, body: Body::Hello(Hello::for_version(VERSION)) };
            message.encode(&mut hello).expect("it fits");
            stream.write_all(&hello).await.expect("a short message");
            open.push(stream);
        }
    });
    let mut connector = P4RuntimeConnector::new(&format!("http://{address}"), 1);
    let failures = [connector.look().await.map(drop), connector.connect(ID).await.map(drop)];
    for failure in failures {
        let words = failure.expect_err("it is another protocol").to_string();
        let expected = format!(
            "{address} looks like an OpenFlow switch, not like a P4Runtime server; \
             write openflow://{address} as the address of the switch"
        );
        assert_eq!(words, expected);
    }
}

async fn free_port() -> SocketAddr {
    let probe = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a port");
    probe.local_addr().expect("bound")
}

/// Connects a switch as soon as somebody listens.
async fn come(address: SocketAddr, switch: Switch) {
    let stream = loop {
        match TcpStream::connect(address).await {
            Ok(stream) => break stream,
            Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
        }
    };
    // A refused switch sees the end of its connection.
    drop(serve(stream, Arc::new(Mutex::new(switch))).await);
}

#[tokio::test]
async fn who_connects_and_says_nothing_does_not_hold_up_the_switch() {
    let address = free_port().await;
    let mut connector = OpenFlowConnector::new(OpenFlowAddress::Listen(address));
    let coming = async {
        let mut silent = Vec::new();
        while silent.len() < 20 {
            match TcpStream::connect(address).await {
                Ok(stream) => silent.push(stream),
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
        come(address, Switch::whole()).await;
    };
    let began = std::time::Instant::now();
    tokio::select! {
        looked = connector.look() => assert_eq!(looked.expect("it came").tables.count(), 0),
        () = coming => panic!("the switch was refused"),
    }
    assert!(began.elapsed() < Duration::from_secs(2), "before the deadline of the silent ones");
}

#[tokio::test]
async fn a_silent_connection_gives_up_its_place() {
    let address = free_port().await;
    let mut connector = OpenFlowConnector::new(OpenFlowAddress::Listen(address));
    let mut stranger = None;
    let coming = async {
        while stranger.is_none() {
            stranger = TcpStream::connect(address).await.ok();
        }
        std::future::pending::<()>().await;
    };
    let looked = tokio::select! {
        looked = connector.look() => looked.map(drop),
        () = coming => unreachable!(),
    };
    let words = looked.expect_err("there is no switch").to_string();
    assert!(words.contains(&format!("did not connect to {address} within 5 s")), "{words}");
    assert!(words.contains("did not respond in time: the handshake"), "{words}");
    let mut bytes = Vec::new();
    let mut stranger = stranger.expect("it connected");
    let ended = stranger.read_to_end(&mut bytes);
    assert!(tokio::time::timeout(Duration::from_secs(5), ended).await.is_ok(), "it was closed");
}

#[tokio::test]
async fn another_switch_than_the_given_one_is_refused() {
    let address = free_port().await;
    let given =
        |id| OpenFlowSwitch { address: OpenFlowAddress::Listen(address), datapath_id: Some(id) };
    let mut connector = OpenFlowConnector::new(given(0xbb));
    let other = tokio::spawn(come(address, Switch { datapath_id: 0xaa, ..Switch::whole() }));
    let right = async {
        other.await.expect("it was refused and ended");
        come(address, Switch { datapath_id: 0xbb, ..Switch::whole() }).await;
    };
    tokio::select! {
        looked = connector.look() => drop(looked.expect("the right one came")),
        () = right => panic!("the right switch was refused"),
    }
    let (connecting, _) = start(Switch { datapath_id: 0xaa, ..Switch::whole() }).await;
    let mut connector =
        OpenFlowConnector::new(OpenFlowSwitch { datapath_id: Some(0xbb), ..connecting.switch });
    let refused = connector.look().await.map(drop);
    assert_eq!(refused, Err(DriverError::OtherSwitch { found: 0xaa, wanted: 0xbb }));
}

#[tokio::test]
async fn an_address_that_cannot_be_used_ends_the_controller() {
    let holder = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await.expect("a port");
    let taken = holder.local_addr().expect("bound");
    let foreign: SocketAddr = "192.0.2.1:6653".parse().expect("an address");
    for (address, advice) in
        [(taken, "end the program that uses it"), (foreign, "use an address of this machine")]
    {
        let mut connector = OpenFlowConnector::new(OpenFlowAddress::Listen(address));
        let error = connector.look().await.map(drop).expect_err("it cannot listen");
        assert!(error.is_final() && error.to_string().contains(advice), "{error}");
        assert!(error.to_string().contains(&address.to_string()), "{error}");
    }
}

#[tokio::test]
async fn a_change_of_a_port_is_an_event() {
    let status = |reason| Body::PortStatus(PortStatus { reason, port: Port::default() });
    let unrequested = [PortReason::Delete, PortReason::Add, PortReason::Modify].map(status);
    let (mut connector, _) =
        start(Switch { unrequested: unrequested.into(), ..Switch::whole() }).await;
    let mut driver = ready(&mut connector).await;
    assert_eq!(driver.next_event().await, SwitchEvent::PortsChanged);
    let another = tokio::time::timeout(Duration::from_millis(20), driver.next_event()).await;
    assert!(another.is_err(), "several reports are one change: {another:?}");
}

#[tokio::test]
async fn flows_of_ports_without_entries_are_removed() {
    let (mut connector, switch) = start(Switch::whole()).await;
    let mut driver = ready(&mut connector).await;
    let at = |number: u16, port| {
        let TableUpdate::Insert(Object::Entry(key, _)) = node(number) else { unreachable!() };
        TableUpdate::Insert(Object::Entry(key, Value::new(Action::Forward(forward(port)))))
    };
    let egress = || {
        let switch = switch.lock().expect("no panic");
        let flows = switch.flows.values().filter(|flow| flow.table == EGRESS).map(stats);
        let read = flows.filter_map(|flow| Flow::read(&flow)?.matching.metadata);
        read.map(|port| port.value).collect::<BTreeSet<u64>>()
    };
    let all_made = |results: Vec<_>| results.iter().all(Result::is_ok);
    let made = driver.apply(&[at(1, 1), at(2, 2), at(3, 3)]).await;
    assert_eq!(made.map(all_made), Ok(true));
    driver.read().await.expect("the tables");
    assert_eq!(egress(), [1, 2, 3].into());
    let gone = TableUpdate::Delete(at(2, 2).object().clone());
    let moved = TableUpdate::Modify(at(3, 4).object().clone());
    assert_eq!(driver.apply(&[gone, moved]).await.map(all_made), Ok(true));
    let tables = driver.read().await.expect("the tables").tables;
    assert_eq!((tables.count(), egress()), (2, [1, 4].into()));
    assert_eq!(driver.read().await.expect("the tables").tables, tables, "nothing else changed");
    // They are written again when an entry needs them.
    assert_eq!(driver.apply(&[at(2, 2)]).await.map(all_made), Ok(true));
    assert_eq!(egress(), [1, 2, 4].into());
    let read = driver.read().await.expect("the tables");
    assert!(read.tables.entries.values().all(|body| body.action.is_some()), "{:?}", read.tables);
}
