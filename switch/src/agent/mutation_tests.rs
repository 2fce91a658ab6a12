//! Batches of valid updates with some changed bytes: the agent always responds, and its state
//! remains readable.

use std::time::Instant;

use bluebridge_p4::declaration::DROPS_SIZE;
use bluebridge_p4::entry::encode;
use bluebridge_p4::p4info::p4info;
use bluebridge_p4::pipeline::{
    Action, Entry, Forward, Key, MacAddr, SwitchPort, Ternary, WeightedForward,
};
use bluebridge_p4::proto::p4::v1;
use proptest::prelude::*;
use prost::Message as _;
use tokio::sync::mpsc::{Receiver, channel};
use v1::entity::Entity;

use super::state::AgentState;
use crate::dataplane::DataPlane as _;
use crate::soft::Pipeline;

const ELECTION_ID: v1::Uint128 = v1::Uint128 { high: 0, low: 1 };

type Inbox = Receiver<Result<v1::StreamMessageResponse, tonic::Status>>;

/// An agent whose pipeline is committed, and the stream of its primary.
fn agent() -> (AgentState, Inbox) {
    let mut pipeline = Pipeline::new(Instant::now());
    for port in 1..=3 {
        pipeline.add_port(SwitchPort(port), &format!("test{port}")).unwrap();
    }
    let mut state = AgentState::new(1, Box::new(pipeline)).unwrap();
    let (outbox, inbox) = channel(128);
    let stream = state.arbitration.open(outbox, tokio::sync::oneshot::channel().0).unwrap();
    let bid = v1::MasterArbitrationUpdate {
        device_id: 1,
        election_id: Some(ELECTION_ID),
        ..v1::MasterArbitrationUpdate::default()
    };
    state.arbitration.arbitrate(stream, &bid).unwrap();
    state
        .set_pipeline(v1::SetForwardingPipelineConfigRequest {
            device_id: 1,
            election_id: Some(ELECTION_ID),
            action: v1::set_forwarding_pipeline_config_request::Action::VerifyAndCommit.into(),
            config: Some(v1::ForwardingPipelineConfig {
                p4info: Some(p4info()),
                ..v1::ForwardingPipelineConfig::default()
            }),
            ..v1::SetForwardingPipelineConfigRequest::default()
        })
        .unwrap();
    (state, inbox)
}

fn entry(key: Key, action: Action) -> Entity {
    let entry = Entry { key, action, idle_timeout: None, metadata: vec![1, 2] };
    Entity::TableEntry(v1::TableEntry {
        counter_data: Some(v1::CounterData { byte_count: 3, packet_count: 4 }),
        ..encode(&entry).unwrap()
    })
}

fn replication(kind: v1::packet_replication_engine_entry::Type) -> Entity {
    let entry = v1::PacketReplicationEngineEntry { r#type: Some(kind) };
    Entity::PacketReplicationEngineEntry(entry)
}

fn replica(port: Vec<u8>) -> v1::Replica {
    let port_kind = Some(v1::replica::PortKind::Port(port));
    v1::Replica { port_kind, instance: 1, backup_replicas: Vec::new() }
}

/// One valid entity of every writable kind; most of them need an earlier one.
fn entities() -> Vec<Entity> {
    use v1::packet_replication_engine_entry::Type;
    let forward = Forward { port: SwitchPort(2), dst_mac: MacAddr([2; 6]) };
    let choice = Action::Select(vec![WeightedForward { forward, weight: 3 }]);
    let ternary = Ternary { value: 7, mask: 0x3f };
    let redirect = Key::Redirect { dst_scope: 5, dst_node: 6, page: 7 };
    let profile = bluebridge_p4::declaration::ANYCAST_SELECTOR_ID;
    let table = bluebridge_p4::declaration::Table::Redirect.declaration();
    let action = bluebridge_p4::entry::encode_action(table, &Action::Forward(forward)).unwrap();
    let member = v1::action_profile_group::Member { member_id: 1, weight: 2, watch_kind: None };
    vec![
        replication(Type::MulticastGroupEntry(v1::MulticastGroupEntry {
            multicast_group_id: 1,
            replicas: vec![replica(vec![1]), replica(vec![2])],
            metadata: Vec::new(),
        })),
        replication(Type::CloneSessionEntry(v1::CloneSessionEntry {
            session_id: 99,
            replicas: vec![replica(vec![1, 0xfe])],
            ..v1::CloneSessionEntry::default()
        })),
        Entity::ActionProfileMember(v1::ActionProfileMember {
            action_profile_id: profile,
            member_id: 1,
            action: Some(action),
        }),
        Entity::ActionProfileGroup(v1::ActionProfileGroup {
            action_profile_id: profile,
            group_id: 1,
            members: vec![member],
            max_size: 4,
        }),
        entry(Key::IngressGuard { port: SwitchPort(1), src_scope: 1, src_node: 2 }, Action::Allow),
        entry(redirect, Action::Forward(forward)),
        entry(Key::Directory { prefix: 0xff << 64, prefix_len: 48 }, Action::Forward(forward)),
        entry(Key::Anycast { dst_scope: 1 }, choice),
        entry(
            Key::Notify {
                src_command: ternary,
                dst_command: ternary,
                src_status: ternary,
                priority: 2,
            },
            Action::CopyToController,
        ),
        entry(Key::L2 { dst_mac: MacAddr([4; 6]) }, Action::SetMulticastGroup { group: 1 }),
        entry(Key::PortMac { port: SwitchPort(2) }, Action::SetDstMac(MacAddr([2; 6]))),
        entry(Key::Multicast { dst_scope: 1 }, Action::SetMulticastGroup { group: 1 }),
        Entity::CounterEntry(v1::CounterEntry {
            counter_id: bluebridge_p4::declaration::DROPS_ID,
            index: Some(v1::Index { index: 1 }),
            data: Some(v1::CounterData { byte_count: 0, packet_count: 9 }),
        }),
        Entity::DirectCounterEntry(v1::DirectCounterEntry {
            table_entry: Some(bluebridge_p4::entry::encode_key(&redirect).unwrap()),
            data: Some(v1::CounterData { byte_count: 1, packet_count: 1 }),
        }),
    ]
}

fn write(state: &mut AgentState, kind: i32, entity: Entity) -> Result<(), tonic::Status> {
    let entity = Some(v1::Entity { entity: Some(entity) });
    state.write(&v1::WriteRequest {
        device_id: 1,
        election_id: Some(ELECTION_ID),
        updates: vec![v1::Update { r#type: kind, entity }],
        ..v1::WriteRequest::default()
    })
}

/// A request to read all entities of every kind.
fn everything() -> v1::ReadRequest {
    let wildcards = [
        Entity::TableEntry(v1::TableEntry {
            counter_data: Some(v1::CounterData::default()),
            time_since_last_hit: Some(v1::table_entry::IdleTimeout::default()),
            ..v1::TableEntry::default()
        }),
        Entity::ActionProfileMember(v1::ActionProfileMember::default()),
        Entity::ActionProfileGroup(v1::ActionProfileGroup::default()),
        Entity::CounterEntry(v1::CounterEntry::default()),
        Entity::DirectCounterEntry(v1::DirectCounterEntry::default()),
        Entity::PacketReplicationEngineEntry(v1::PacketReplicationEngineEntry::default()),
        Entity::ExternEntry(v1::ExternEntry::default()),
    ];
    v1::ReadRequest {
        device_id: 1,
        entities: wildcards.map(|entity| v1::Entity { entity: Some(entity) }).to_vec(),
        ..v1::ReadRequest::default()
    }
}

#[test]
fn valid_entities_are_taken() {
    let (mut state, _inbox) = agent();
    for entity in entities() {
        let kind = match entity {
            Entity::CounterEntry(_) | Entity::DirectCounterEntry(_) => 2,
            // An action set may be present beside members as long as no entry names those.
            _ => 1,
        };
        write(&mut state, kind, entity).unwrap();
    }
    let read: usize = state.read(&everything()).unwrap().iter().map(|r| r.entities.len()).sum();
    assert_eq!(read, 8 + 1 + 1 + DROPS_SIZE + 8 + 2);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn changed_bytes_break_nothing(changes in prop::collection::vec(
        (0..14_usize, 1..4_i32, prop::option::of((any::<u16>(), any::<u8>())), any::<u16>()), 1..40,
    )) {
        let (mut state, _inbox) = agent();
        for entity in entities() {
            let _ = write(&mut state, 1, entity);
        }
        for (index, kind, change, cut) in changes {
            let entity = v1::Entity { entity: Some(entities().remove(index)) };
            let mut bytes = entity.encode_to_vec();
            if let Some((place, value)) = change {
                let place = usize::from(place) % bytes.len();
                bytes[place] = value;
            }
            if cut % 8 == 0 {
                bytes.truncate(usize::from(cut) % bytes.len());
            }
            let Ok(changed) = v1::Entity::decode(bytes.as_slice()) else { continue };
            let query = v1::ReadRequest {
                device_id: 1,
                entities: vec![changed.clone()],
                ..v1::ReadRequest::default()
            };
            let _ = state.read(&query);
            let Some(changed) = changed.entity else { continue };
            let _ = write(&mut state, kind, changed);
        }
        let read = state.read(&everything());
        prop_assert!(read.is_ok(), "{:?}", read.err());
    }
}
