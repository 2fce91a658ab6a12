//! Switches that lack something: each refusal is named, and nothing half installed stays.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bluebridge_openflow::{
    Body, ErrorMessage, Features, Field, FlowCommand, FlowMod, FlowStats, GROUP_ALL, GroupCommand,
    GroupDescription, GroupKind, Hello, Message, MultipartPart, MultipartReply, MultipartRequest,
    Role, RoleRequest, VERSION, frame_length,
};
use bluebridge_p4::pipeline::{Action, Forward, Key, MacAddr, SwitchPort, WeightedForward};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use super::flow::Flow;
use super::layout::{PRIMARY_RECORD, TABLE_COUNT, record};
use super::{OpenFlowAddress, OpenFlowConnector};
use crate::core::Body as Value;
use crate::driver::{DriverError, Pipeline, SwitchConnector as _, SwitchDriver, UpdateError};
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
    /// The most flows in each table.
    flows_max: usize,
    group_kinds: Vec<GroupKind>,
    /// Whether it has Open vSwitch's own fields.
    has_own_fields: bool,
    flows: BTreeMap<(u8, u16, Vec<Field>), FlowMod>,
    groups: BTreeMap<u32, GroupDescription>,
}

impl Switch {
    fn whole() -> Self {
        Self {
            table_count: TABLE_COUNT,
            flows_max: usize::MAX,
            group_kinds: vec![GroupKind::All, GroupKind::Select],
            has_own_fields: true,
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
                let table_count = self.table_count;
                return Some(Body::FeaturesReply(Features { table_count, ..Features::default() }));
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
