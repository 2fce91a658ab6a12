//! The tables that a switch really has, with their counters as they are now.

use std::collections::BTreeMap;
use std::net::{Ipv6Addr, SocketAddr};

use bluebridge_p4::declaration::{TABLES, TableDeclaration};
use bluebridge_p4::entry::{ActionSpec, decode_default_action, decode_key, decode_table_action};
use bluebridge_p4::pipeline::{Action, Forward, Key, SwitchPort, Ternary};
use bluebridge_p4::proto::p4::v1;
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;
use v1::entity::Entity as Kind;
use v1::p4_runtime_client::P4RuntimeClient;
use v1::packet_replication_engine_entry::Type as Replication;

use super::{ANSWER_BYTES_MAX, ControlError, Whom, ask};

/// Bits of scope and node, before the location.
const NODE_BITS: u8 = 48;

/// An entry for people and programs.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct TableLine {
    /// The table.
    pub table: &'static str,
    /// What it matches.
    #[serde(rename = "match")]
    pub matches: String,
    /// What it does.
    pub action: String,
    /// Packets that met it.
    pub packets: u64,
    /// Their bytes, whole frames.
    pub bytes: u64,
}

/// Names for ports; a port without one is shown by its number.
pub type PortNames = BTreeMap<u16, String>;

/// An entry that no switch counted yet.
pub fn describe(
    key: &Key,
    action: &Action,
    groups: &BTreeMap<u32, Vec<u16>>,
    names: &PortNames,
) -> TableLine {
    TableLine {
        table: bluebridge_switch::dataplane::Table::of(key).name(),
        matches: key_text(key, names),
        action: action_text(action, groups, names),
        packets: 0,
        bytes: 0,
    }
}

/// Reads every table over P4Runtime, which anyone may who is not the primary.
///
/// # Errors
/// [`ControlError`].
pub fn read(
    address: SocketAddr,
    device_id: u64,
    names: &PortNames,
) -> Result<Vec<TableLine>, ControlError> {
    let entities = ask(Whom::Switch, &address.into(), async |channel| {
        read_entities(channel, device_id).await
    })?;
    let groups = groups(&entities);
    let mut lines = Vec::new();
    for entity in &entities {
        if let Some(Kind::TableEntry(entry)) = &entity.entity
            && let Some(table) = TABLES.iter().find(|table| table.id == entry.table_id)
        {
            lines.extend(line(table, entry, &groups, names)?);
        }
    }
    let order = |line: &TableLine| TABLES.iter().position(|table| table.alias == line.table);
    lines.sort_by(|a, b| order(a).cmp(&order(b)).then_with(|| a.cmp(b)));
    Ok(lines)
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
    let entities =
        tables.chain(flood).chain([groups]).map(|kind| v1::Entity { entity: Some(kind) }).collect();
    let request = v1::ReadRequest { device_id, entities, ..v1::ReadRequest::default() };
    let mut client = P4RuntimeClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX);
    let mut answers = client.read(request).await?.into_inner();
    let mut found = Vec::new();
    while let Some(answer) = answers.message().await? {
        found.extend(answer.entities);
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
    let bad = |error: bluebridge_p4::entry::ConversionError| ControlError::BadAnswer {
        whom: Whom::Switch,
        reason: error.to_string(),
    };
    if entry.action.is_none() {
        return Ok(None);
    }
    let spec = match entry.action.as_ref().and_then(|action| action.r#type.as_ref()) {
        // A table may keep an action for what meets no entry, such as the flood table's drop.
        Some(v1::table_action::Type::Action(action)) if entry.is_default_action => {
            decode_default_action(table, action).map(ActionSpec::Direct)
        }
        _ => decode_table_action(table, entry.action.as_ref()),
    };
    let action = match spec.map_err(bad)? {
        ActionSpec::Direct(action) => action_text(&action, groups, names),
        ActionSpec::Member(member) => format!("member {member}"),
        ActionSpec::Group(group) => format!("group {group}"),
    };
    let matches = if entry.is_default_action {
        "anything else".to_owned()
    } else {
        key_text(&decode_key(entry).map_err(bad)?, names)
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

fn key_text(key: &Key, names: &PortNames) -> String {
    match *key {
        Key::IngressGuard { port, src_scope, src_node } => {
            format!("{} from {}/48", name(port, names), node_address(src_scope, src_node))
        }
        Key::Redirect { dst_scope, dst_node, page } => {
            format!("{} page {page:#x}", node_address(dst_scope, dst_node))
        }
        Key::Directory { prefix, prefix_len } => directory_text(prefix, prefix_len),
        Key::Anycast { dst_scope } => {
            format!("{}/48 (CREATE anywhere)", node_address(dst_scope, 0))
        }
        Key::Multicast { dst_scope } => {
            format!("{}/48 (notices)", node_address(dst_scope, 0xffff))
        }
        Key::Notify { src_command, dst_command, src_status, .. } => {
            let parts = [("reply", src_command), ("request", dst_command), ("status", src_status)];
            let parts = parts.iter().filter(|(_, ternary)| ternary.mask != 0);
            let text = |(what, Ternary { value, mask }): &(&str, Ternary)| {
                format!("{what} {value:#04x}&{mask:#04x}")
            };
            parts.map(text).collect::<Vec<_>>().join(" ")
        }
        Key::L2 { dst_mac } => dst_mac.to_string(),
        Key::PortMac { port } => name(port, names),
    }
}

/// A prefix of the 112 bits without command and tag, written as the address that has them zero.
fn directory_text(prefix: u128, prefix_len: u8) -> String {
    let node = (prefix >> 64) << 80;
    let location = prefix & u128::from(u64::MAX);
    let address = Ipv6Addr::from(node | location);
    // Command and tag lie between node and location, and match anything.
    let length = if prefix_len > NODE_BITS { prefix_len + 16 } else { prefix_len };
    format!("{address}/{length}")
}

fn node_address(scope: u32, node: u16) -> Ipv6Addr {
    Ipv6Addr::from((u128::from(scope) << 96) | (u128::from(node) << 80))
}

fn name(port: SwitchPort, names: &PortNames) -> String {
    names.get(&port.0).cloned().unwrap_or_else(|| format!("port {}", port.0))
}

fn action_text(action: &Action, groups: &BTreeMap<u32, Vec<u16>>, names: &PortNames) -> String {
    let to = |forward: &Forward| name(forward.port, names);
    match action {
        Action::Allow => "allow".to_owned(),
        Action::Drop => "drop".to_owned(),
        Action::Forward(forward) => format!("to {}", to(forward)),
        Action::RedirectUntil { forward, lease_ms } => {
            format!("to {} for {lease_ms} ms more", to(forward))
        }
        Action::Multicast { group } => {
            let ports = groups.get(&u32::from(*group)).map(Vec::as_slice).unwrap_or_default();
            let ports: Vec<_> = ports.iter().map(|port| name(SwitchPort(*port), names)).collect();
            format!("copy to {}", ports.join(" "))
        }
        Action::Notify => "copy to the controller".to_owned(),
        Action::Select(members) => {
            let members: Vec<_> = members
                .iter()
                .map(|member| format!("{} (weight {})", to(&member.forward), member.weight))
                .collect();
            format!("one of {}", members.join(", "))
        }
        Action::SetDstMac(mac) => format!("copies leave as {mac}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_prefix_reads_as_the_pointers_that_it_matches() {
        let node = (u128::from(0xfdbb_0001_u32) << 80) | (3 << 64);
        assert_eq!(directory_text(node, 48), "fdbb:1:3::/48");
        let range = node | 0x1_0000_0000;
        assert_eq!(directory_text(range, 112 - 32), "fdbb:1:3::1:0:0/96");
        assert_eq!(directory_text(0, 0), "::/0");
    }

    #[test]
    fn ports_are_named_where_names_are_known() {
        let names = PortNames::from([(4, "c1".to_owned())]);
        let guard = |port| Key::IngressGuard {
            port: SwitchPort(port),
            src_scope: 0xfdbb_0001,
            src_node: 4,
        };
        assert_eq!(key_text(&guard(4), &names), "c1 from fdbb:1:4::/48");
        assert_eq!(key_text(&guard(5), &names), "port 5 from fdbb:1:4::/48");
        let groups = BTreeMap::from([(7, vec![4, 5])]);
        let copy = action_text(&Action::Multicast { group: 7 }, &groups, &names);
        assert_eq!(copy, "copy to c1 port 5");
    }
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
        assert_eq!((shown.matches.as_str(), shown.action.as_str()), ("anything else", "drop"));
    }
}
