//! The actual tables of a switch, with their present counters.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use bluebridge_p4::declaration::{DROPS_ID, TABLES, TableDeclaration};
use bluebridge_p4::entry::{
    ActionSpec, decode_default_action, decode_drops, decode_key, decode_table_action,
};
use bluebridge_p4::pipeline::{Action, Counter, DropReason, Key, SwitchPort};
use bluebridge_p4::proto::p4::v1;
pub use bluebridge_p4::words::{Act, Choice, MaskedByte, Match, Port, PortNames, act_of, match_of};
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;
use v1::entity::Entity as Kind;
use v1::p4_runtime_client::P4RuntimeClient;
use v1::packet_replication_engine_entry::Type as Replication;

use super::{ControlError, Peer, RESPONSE_BYTES_MAX, call};

/// An entry, for people and programs.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct TableLine {
    /// The table.
    pub table: &'static str,
    /// Its key.
    #[serde(rename = "match")]
    pub matches: Match,
    /// Its action.
    pub action: Act,
    /// Packets that hit it.
    pub packets: u64,
    /// Their bytes, whole frames.
    pub bytes: u64,
}

/// What a switch has, and what it dropped.
#[derive(Clone, Debug, Default)]
pub struct SwitchTables {
    /// Its entries, in the order of the pipeline's tables.
    pub lines: Vec<TableLine>,
    /// The frames that it dropped, by reason. A reason is missing if the switch does not count it.
    pub drops: BTreeMap<DropReason, u64>,
}

/// An entry without counters.
pub fn describe(
    key: &Key,
    action: &Action,
    groups: &BTreeMap<u32, Vec<u16>>,
    names: &PortNames,
) -> TableLine {
    TableLine {
        table: bluebridge_switch::dataplane::Table::of(key).name(),
        matches: match_of(key, names),
        action: act_of(action, groups, names),
        packets: 0,
        bytes: 0,
    }
}

/// Reads every table over P4Runtime, which does not need to be the primary.
///
/// # Errors
/// [`ControlError`].
pub fn read(
    address: SocketAddr,
    device_id: u64,
    names: &PortNames,
) -> Result<SwitchTables, ControlError> {
    let entities = call(Peer::Switch, &address.into(), async |channel| {
        read_entities(channel, device_id).await
    })?;
    let groups = groups(&entities);
    let mut reading = SwitchTables::default();
    for entity in &entities {
        match &entity.entity {
            Some(Kind::TableEntry(entry)) => {
                let table = TABLES.iter().find(|table| table.id == entry.table_id);
                let line = table.map(|table| line(table, entry, &groups, names)).transpose()?;
                reading.lines.extend(line.flatten());
            }
            Some(Kind::CounterEntry(entry)) => reading.drops.extend(decode_drops(entry)),
            _ => {}
        }
    }
    in_order(&mut reading.lines);
    Ok(reading)
}

/// Sorts lines by table, in the order of the pipeline, then by key.
fn in_order(lines: &mut [TableLine]) {
    let order = |line: &TableLine| TABLES.iter().position(|table| table.alias == line.table);
    lines.sort_by(|a, b| order(a).cmp(&order(b)).then_with(|| a.cmp(b)));
}

/// Entries that were read in another way, with their counters, and the group through which `l2` floods.
pub fn lines<'a>(
    entries: impl IntoIterator<Item = (&'a Key, &'a Action, Counter)>,
    flood_group: Option<u16>,
    groups: &BTreeMap<u16, BTreeSet<SwitchPort>>,
    names: &PortNames,
) -> Vec<TableLine> {
    let groups = groups.iter().map(|(group, ports)| {
        (u32::from(*group), ports.iter().map(|SwitchPort(port)| *port).collect())
    });
    let groups = &groups.collect();
    let entry = |(key, action, counter): (&Key, &Action, Counter)| TableLine {
        packets: counter.packets,
        bytes: counter.bytes,
        ..describe(key, action, groups, names)
    };
    let mut lines: Vec<_> = entries.into_iter().map(entry).collect();
    lines.extend(flood_group.map(|group| TableLine {
        table: bluebridge_switch::dataplane::Table::L2.name(),
        matches: Match::Default,
        action: act_of(&Action::SetMulticastGroup { group }, groups, names),
        packets: 0,
        bytes: 0,
    }));
    in_order(&mut lines);
    lines
}

async fn read_entities(channel: Channel, device_id: u64) -> Result<Vec<v1::Entity>, Status> {
    let tables = TABLES.iter().map(|table| {
        Kind::TableEntry(v1::TableEntry {
            table_id: table.id,
            counter_data: Some(v1::CounterData::default()),
            ..v1::TableEntry::default()
        })
    });
    let flood = TABLES.iter().find(|table| table.alias == "l2").map(|table| {
        Kind::TableEntry(v1::TableEntry {
            table_id: table.id,
            is_default_action: true,
            ..v1::TableEntry::default()
        })
    });
    let groups = Kind::PacketReplicationEngineEntry(v1::PacketReplicationEngineEntry {
        r#type: Some(Replication::MulticastGroupEntry(v1::MulticastGroupEntry::default())),
    });
    let drops = Kind::CounterEntry(v1::CounterEntry {
        counter_id: DROPS_ID,
        ..v1::CounterEntry::default()
    });
    let entities = tables
        .chain(flood)
        .chain([groups, drops])
        .map(|kind| v1::Entity { entity: Some(kind) })
        .collect();
    let request = v1::ReadRequest { device_id, entities, ..v1::ReadRequest::default() };
    let mut client = P4RuntimeClient::new(channel).max_decoding_message_size(RESPONSE_BYTES_MAX);
    let mut responses = client.read(request).await?.into_inner();
    let mut found = Vec::new();
    while let Some(response) = responses.message().await? {
        found.extend(response.entities);
    }
    Ok(found)
}

/// The ports of every multicast group.
fn groups(entities: &[v1::Entity]) -> BTreeMap<u32, Vec<u16>> {
    let groups = entities.iter().filter_map(|entity| match &entity.entity {
        Some(Kind::PacketReplicationEngineEntry(entry)) => match &entry.r#type {
            Some(Replication::MulticastGroupEntry(group)) => Some(group),
            _ => None,
        },
        _ => None,
    });
    let port = |replica: &v1::Replica| match &replica.port_kind {
        Some(v1::replica::PortKind::Port(bytes)) => bytes
            .iter()
            .try_fold(0_u16, |number, byte| Some(number.checked_mul(256)? | u16::from(*byte))),
        _ => None,
    };
    groups
        .map(|group| (group.multicast_group_id, group.replicas.iter().filter_map(port).collect()))
        .collect()
}

fn line(
    table: &TableDeclaration,
    entry: &v1::TableEntry,
    groups: &BTreeMap<u32, Vec<u16>>,
    names: &PortNames,
) -> Result<Option<TableLine>, ControlError> {
    let bad = |error: bluebridge_p4::entry::ConversionError| ControlError::BadResponse {
        peer: Peer::Switch,
        reason: error.to_string(),
    };
    if entry.action.is_none() {
        return Ok(None);
    }
    let spec = match entry.action.as_ref().and_then(|action| action.r#type.as_ref()) {
        // The default action of a table, such as the drop of the flood table.
        Some(v1::table_action::Type::Action(action)) if entry.is_default_action => {
            decode_default_action(table, action).map(ActionSpec::Direct)
        }
        _ => decode_table_action(table, entry.action.as_ref()),
    };
    let action = match spec.map_err(bad)? {
        ActionSpec::Direct(action) => act_of(&action, groups, names),
        ActionSpec::Member(member) => Act::Member { member },
        ActionSpec::Group(group) => Act::Group { group },
    };
    let matches = if entry.is_default_action {
        Match::Default
    } else {
        match_of(&decode_key(entry).map_err(bad)?, names)
    };
    let count = entry.counter_data.unwrap_or_default();
    let number = |count: i64| u64::try_from(count).unwrap_or(0);
    Ok(Some(TableLine {
        table: table.alias,
        matches,
        action,
        packets: number(count.packet_count),
        bytes: number(count.byte_count),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_that_was_never_filled_shows_its_own_default() {
        let l2 = TABLES.iter().find(|table| table.alias == "l2").expect("it is declared");
        let action = v1::Action { action_id: l2.default_action.id, ..v1::Action::default() };
        let entry = v1::TableEntry {
            table_id: l2.id,
            is_default_action: true,
            action: Some(v1::TableAction { r#type: Some(v1::table_action::Type::Action(action)) }),
            ..v1::TableEntry::default()
        };
        let shown = line(l2, &entry, &BTreeMap::new(), &PortNames::new());
        let shown = shown.expect("it is understood").expect("there is an action");
        assert_eq!((shown.matches, shown.action), (Match::Default, Act::Drop));
    }
}
