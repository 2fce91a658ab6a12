//! Converts plans to P4Runtime messages, and read-back messages to tables.

use std::collections::BTreeSet;

use bluebridge_p4::bytestring;
use bluebridge_p4::declaration::{DROPS_ID, PORT_BITS, TABLES, TableDeclaration};
use bluebridge_p4::entry::{
    ActionSpec, ConversionError, decode_default_action, decode_drops, decode_key,
    decode_table_action, encode, encode_action, encode_key,
};
use bluebridge_p4::pipeline::{Action, CPU_PORT, Counter, NOTIFY_SESSION, SwitchPort};
use bluebridge_p4::proto::google::rpc;
use bluebridge_p4::proto::p4::v1;
use prost::Message as _;
use tonic::{Code, Status};
use v1::entity::Entity as Kind;
use v1::packet_replication_engine_entry::Type as Replication;

use crate::core::{Body, Tables};
use crate::driver::{Installed, UpdateError};
use crate::plan::{Object, TableUpdate};

/// The table whose misses are flooded.
const L2: &TableDeclaration = &TABLES[5];

/// An update as a message.
pub(super) fn update(update: &TableUpdate) -> Result<v1::Update, ConversionError> {
    use v1::update::Type;
    let (kind, entity) = match update {
        TableUpdate::Insert(object) => (Type::Insert, entity(object, true)?),
        TableUpdate::Modify(object) => (Type::Modify, entity(object, true)?),
        // Without an action, a default entry is reset to the declared one.
        TableUpdate::Delete(object @ Object::FloodGroup(_)) => {
            (Type::Modify, entity(object, false)?)
        }
        TableUpdate::Delete(object) => (Type::Delete, entity(object, false)?),
    };
    Ok(v1::Update { r#type: kind.into(), entity: Some(v1::Entity { entity: Some(entity) }) })
}

fn entity(object: &Object, with_value: bool) -> Result<Kind, ConversionError> {
    Ok(match object {
        Object::Entry(key, body) => Kind::TableEntry(match body.entry(*key) {
            Some(entry) if with_value => encode(&entry)?,
            _ => encode_key(key)?,
        }),
        Object::FloodGroup(group) => {
            let action = encode_action(L2, &Action::SetMulticastGroup { group: *group })?;
            let action = v1::TableAction { r#type: Some(v1::table_action::Type::Action(action)) };
            Kind::TableEntry(v1::TableEntry {
                action: with_value.then_some(action),
                ..default_of_l2()
            })
        }
        Object::Group(group, ports) => {
            replication(Replication::MulticastGroupEntry(v1::MulticastGroupEntry {
                multicast_group_id: u32::from(*group),
                replicas: if with_value { replicas(ports.iter()) } else { Vec::new() },
                ..v1::MulticastGroupEntry::default()
            }))
        }
        Object::NotifySession => {
            replication(Replication::CloneSessionEntry(v1::CloneSessionEntry {
                session_id: NOTIFY_SESSION,
                replicas: if with_value { replicas([&CPU_PORT].into_iter()) } else { Vec::new() },
                // The pipeline truncates by itself; not every switch can do it here.
                ..v1::CloneSessionEntry::default()
            }))
        }
    })
}

fn default_of_l2() -> v1::TableEntry {
    v1::TableEntry { table_id: L2.id, is_default_action: true, ..v1::TableEntry::default() }
}

fn replication(entry: Replication) -> Kind {
    Kind::PacketReplicationEngineEntry(v1::PacketReplicationEngineEntry { r#type: Some(entry) })
}

fn replicas<'a>(ports: impl Iterator<Item = &'a SwitchPort>) -> Vec<v1::Replica> {
    let replica = |port: &SwitchPort| v1::Replica {
        port_kind: Some(v1::replica::PortKind::Port(bytestring::encode(port.0.into()))),
        instance: 1,
        ..v1::Replica::default()
    };
    ports.map(replica).collect()
}

/// The queries of a full reading.
pub(super) fn wildcards() -> Vec<v1::Entity> {
    let tables = TABLES.iter().map(|table| {
        Kind::TableEntry(v1::TableEntry {
            table_id: table.id,
            counter_data: Some(v1::CounterData::default()),
            ..v1::TableEntry::default()
        })
    });
    let rest = [
        Kind::TableEntry(default_of_l2()),
        replication(Replication::MulticastGroupEntry(v1::MulticastGroupEntry::default())),
        replication(Replication::CloneSessionEntry(v1::CloneSessionEntry::default())),
    ];
    let drops = Kind::CounterEntry(v1::CounterEntry {
        counter_id: DROPS_ID,
        ..v1::CounterEntry::default()
    });
    tables.chain([drops]).chain(rest).map(|entity| v1::Entity { entity: Some(entity) }).collect()
}

/// Groups and clone sessions, which a push does not remove.
pub(super) fn replication_wildcards() -> Vec<v1::Entity> {
    wildcards().into_iter().rev().take(2).collect()
}

/// Adds an entity that was read to the installed state.
pub(super) fn install(entity: v1::Entity, installed: &mut Installed) {
    match entity.entity {
        Some(Kind::TableEntry(message)) if message.is_default_action => {
            if message.table_id == L2.id {
                installed.tables.flood_group = flood_group(&message);
            }
        }
        Some(Kind::TableEntry(message)) => install_entry(&message, installed),
        Some(Kind::CounterEntry(counter)) => installed.drops.extend(decode_drops(&counter)),
        Some(Kind::PacketReplicationEngineEntry(entry)) => {
            install_replication(entry, &mut installed.tables);
        }
        other => tracing::warn!(?other, "the switch returned an entity that was not requested"),
    }
}

fn flood_group(message: &v1::TableEntry) -> Option<u16> {
    let Some(v1::table_action::Type::Action(action)) = message.action.as_ref()?.r#type.as_ref()
    else {
        return None;
    };
    match decode_default_action(L2, action) {
        Ok(Action::SetMulticastGroup { group }) => Some(group),
        _ => None,
    }
}

fn install_entry(message: &v1::TableEntry, installed: &mut Installed) {
    let table = TABLES.iter().find(|table| table.id == message.table_id);
    let (Some(table), Ok(key)) = (table, decode_key(message)) else {
        tracing::warn!(
            table = message.table_id,
            "the switch has an entry that is not of this pipeline"
        );
        return;
    };
    let action = match decode_table_action(table, message.action.as_ref()) {
        Ok(ActionSpec::Direct(action)) => Some(action),
        // Another controller's choice by members: to be replaced or deleted.
        Ok(ActionSpec::Member(_) | ActionSpec::Group(_)) | Err(_) => None,
    };
    let timeout = u64::try_from(message.idle_timeout_ns).ok().filter(|ns| *ns != 0);
    let body = Body {
        action,
        idle_timeout: timeout.map(std::time::Duration::from_nanos),
        metadata: message.metadata.clone(),
    };
    installed.tables.entries.insert(key, body);
    if let Some(counter) = &message.counter_data {
        let number = |count: i64| u64::try_from(count).unwrap_or(0);
        let (packets, bytes) = (number(counter.packet_count), number(counter.byte_count));
        installed.counters.insert(key, Counter { packets, bytes });
    }
}

fn install_replication(entry: v1::PacketReplicationEngineEntry, tables: &mut Tables) {
    match entry.r#type {
        Some(Replication::MulticastGroupEntry(group)) => {
            let ports: BTreeSet<SwitchPort> = group.replicas.iter().filter_map(port_of).collect();
            if let Ok(id) = u16::try_from(group.multicast_group_id) {
                tables.groups.insert(id, ports);
            }
        }
        Some(Replication::CloneSessionEntry(session)) if session.session_id == NOTIFY_SESSION => {
            tables.notify_session = true;
        }
        Some(Replication::CloneSessionEntry(session)) => {
            tracing::warn!(
                session = session.session_id,
                "the switch has a clone session of another controller"
            );
        }
        None => {}
    }
}

#[expect(deprecated, reason = "what was written with the old field is read back with it")]
fn port_of(replica: &v1::Replica) -> Option<SwitchPort> {
    let number = match replica.port_kind.as_ref()? {
        v1::replica::PortKind::Port(bytes) => bytestring::decode(bytes, PORT_BITS).ok()?,
        v1::replica::PortKind::EgressPort(port) => u128::from(*port),
    };
    u16::try_from(number).ok().map(SwitchPort)
}

/// Deletions of the entities in a reading.
pub(super) fn deletions(entities: Vec<v1::Entity>) -> Vec<v1::Update> {
    let delete =
        |entity| v1::Update { r#type: v1::update::Type::Delete.into(), entity: Some(entity) };
    entities.into_iter().map(delete).collect()
}

/// The results of each update in a failed write; `None` if the status does not list them.
pub(super) fn results(status: &Status, count: usize) -> Option<Vec<Result<(), UpdateError>>> {
    let details = rpc::Status::decode(status.details()).ok()?.details;
    if details.len() != count || count == 0 {
        return None;
    }
    let parse = |detail: &[u8]| v1::Error::decode(detail).ok().map(|error| outcome(&error));
    details.iter().map(|detail| parse(&detail.value)).collect()
}

fn outcome(error: &v1::Error) -> Result<(), UpdateError> {
    let text = error.message.clone();
    match Code::from_i32(error.canonical_code) {
        Code::Ok => Ok(()),
        Code::AlreadyExists => Err(UpdateError::Exists(text)),
        Code::NotFound => Err(UpdateError::NotFound(text)),
        code => Err(UpdateError::Refused(format!("{code:?}: {text}"))),
    }
}
