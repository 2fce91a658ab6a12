//! The actual tables of a switch, with their present counters.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv6Addr, SocketAddr};

use bluebridge_p4::declaration::{DROPS_ID, TABLES, TableDeclaration};
use bluebridge_p4::entry::{
    ActionSpec, decode_default_action, decode_drops, decode_key, decode_table_action,
};
use bluebridge_p4::pipeline::{Action, Counter, DropReason, Forward, Key, SwitchPort, Ternary};
use bluebridge_p4::proto::p4::v1;
use serde::Serialize;
use tonic::Status;
use tonic::transport::Channel;
use v1::entity::Entity as Kind;
use v1::p4_runtime_client::P4RuntimeClient;
use v1::packet_replication_engine_entry::Type as Replication;

use super::{ControlError, Peer, RESPONSE_BYTES_MAX, call};

/// Bits of scope and node, before the location.
const NODE_BITS: u8 = 48;

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

/// Names for ports; a port without one is shown by its number.
pub type PortNames = BTreeMap<u16, String>;

/// A port of the switch.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Port {
    /// Its number.
    pub port: u16,
    /// The node at the port, if known.
    pub node: Option<String>,
}

impl Port {
    fn of(SwitchPort(port): SwitchPort, names: &PortNames) -> Self {
        Self { port, node: names.get(&port).cloned() }
    }
}

impl fmt::Display for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.node {
            Some(node) => f.write_str(node),
            None => write!(f, "port {}", self.port),
        }
    }
}

/// A byte of which only some bits are compared.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct MaskedByte {
    /// The required bits, 0 where they are not compared.
    pub value: u8,
    /// The bits that are compared; 0 matches any byte.
    pub mask: u8,
}

impl From<Ternary> for MaskedByte {
    fn from(Ternary { value, mask }: Ternary) -> Self {
        Self { value, mask }
    }
}

/// The key of an entry; programs identify the fields by `kind`, which is the table's name or `default`.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Match {
    /// Requests whose server the switch chooses.
    Anycast {
        /// The space, as the prefix of its node 0.
        destination: String,
    },
    /// Packets without another matching entry of the table.
    Default,
    /// Requests and replies in transit.
    Directory {
        /// Destinations as a prefix.
        destination: String,
    },
    /// Source addresses that a port may use.
    IngressGuard {
        /// The ingress port.
        #[serde(flatten)]
        port: Port,
        /// Sources as a prefix.
        source: String,
    },
    /// Traffic outside the fabric.
    L2 {
        /// The destination.
        mac: String,
    },
    /// Notices.
    Multicast {
        /// The space, as the prefix of its multicast node.
        destination: String,
    },
    /// Packets that are copied to the controller.
    Notify {
        /// The command of a reply.
        reply: MaskedByte,
        /// The command of a request.
        request: MaskedByte,
        /// The status of a reply.
        status: MaskedByte,
    },
    /// Copies that leave through a port.
    PortMac {
        /// The port.
        #[serde(flatten)]
        port: Port,
    },
    /// A leased page.
    Redirect {
        /// Its home.
        home: Ipv6Addr,
        /// The upper 52 bits of its location.
        page: u64,
    },
}

impl fmt::Display for Match {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Anycast { destination } => write!(f, "{destination} (CREATE anywhere)"),
            Self::Default => f.write_str("anything else"),
            Self::Directory { destination } => f.write_str(destination),
            Self::IngressGuard { port, source } => write!(f, "{port} from {source}"),
            Self::L2 { mac } => f.write_str(mac),
            Self::Multicast { destination } => write!(f, "{destination} (notices)"),
            Self::Notify { reply, request, status } => {
                let parts = [("reply", reply), ("request", request), ("status", status)];
                let mut parts = parts.iter().filter(|(_, byte)| byte.mask != 0).peekable();
                while let Some((what, MaskedByte { value, mask })) = parts.next() {
                    let space = if parts.peek().is_some() { " " } else { "" };
                    write!(f, "{what} {value:#04x}&{mask:#04x}{space}")?;
                }
                Ok(())
            }
            Self::PortMac { port } => port.fmt(f),
            Self::Redirect { home, page } => write!(f, "{home} page {page:#x}"),
        }
    }
}

/// A port from which the switch chooses.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Choice {
    /// The port.
    #[serde(flatten)]
    pub port: Port,
    /// Its share.
    pub weight: u16,
}

/// The action of an entry; programs identify the fields by `kind`.
#[derive(Clone, Debug, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Act {
    /// Lets it pass.
    Allow,
    /// Drops it.
    Drop,
    /// Sends it through a port.
    Forward {
        /// The port.
        #[serde(flatten)]
        port: Port,
    },
    /// Executes a group of the action profile.
    Group {
        /// Its number.
        group: u32,
    },
    /// Executes a member of the action profile.
    Member {
        /// Its number.
        member: u32,
    },
    /// Copies it to ports.
    Multicast {
        /// The multicast group.
        group: u32,
        /// Its ports.
        ports: Vec<Port>,
    },
    /// Copies it to the controller.
    Notify,
    /// Sends it to the owner of the page.
    Redirect {
        /// The port.
        #[serde(flatten)]
        port: Port,
        /// The remaining time, in milliseconds.
        lease_ms: u16,
    },
    /// Sends it through one of several ports.
    Select {
        /// The ports.
        choices: Vec<Choice>,
    },
    /// Rewrites the destination of copies.
    SetDestinationMac {
        /// The Ethernet address.
        mac: String,
    },
}

impl fmt::Display for Act {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Allow => f.write_str("allow"),
            Self::Drop => f.write_str("drop"),
            Self::Forward { port } => write!(f, "to {port}"),
            Self::Group { group } => write!(f, "group {group}"),
            Self::Member { member } => write!(f, "member {member}"),
            Self::Multicast { ports, .. } => {
                f.write_str("copy to")?;
                ports.iter().try_for_each(|port| write!(f, " {port}"))
            }
            Self::Notify => f.write_str("copy to the controller"),
            Self::Redirect { port, lease_ms } => write!(f, "to {port} for {lease_ms} ms more"),
            Self::Select { choices } => {
                let choices: Vec<_> = choices
                    .iter()
                    .map(|choice| format!("{} (weight {})", choice.port, choice.weight))
                    .collect();
                write!(f, "one of {}", choices.join(", "))
            }
            Self::SetDestinationMac { mac } => write!(f, "copies leave as {mac}"),
        }
    }
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

fn match_of(key: &Key, names: &PortNames) -> Match {
    let prefix = |scope, node| format!("{}/{NODE_BITS}", node_address(scope, node));
    match *key {
        Key::IngressGuard { port, src_scope, src_node } => {
            Match::IngressGuard { port: Port::of(port, names), source: prefix(src_scope, src_node) }
        }
        Key::Redirect { dst_scope, dst_node, page } => {
            Match::Redirect { home: node_address(dst_scope, dst_node), page }
        }
        Key::Directory { prefix, prefix_len } => {
            Match::Directory { destination: directory_text(prefix, prefix_len) }
        }
        Key::Anycast { dst_scope } => Match::Anycast { destination: prefix(dst_scope, 0) },
        Key::Multicast { dst_scope } => Match::Multicast { destination: prefix(dst_scope, 0xffff) },
        Key::Notify { src_command, dst_command, src_status, .. } => Match::Notify {
            reply: src_command.into(),
            request: dst_command.into(),
            status: src_status.into(),
        },
        Key::L2 { dst_mac } => Match::L2 { mac: dst_mac.to_string() },
        Key::PortMac { port } => Match::PortMac { port: Port::of(port, names) },
    }
}

/// A prefix of the 112 bits without command and tag, printed as the address with command and tag 0.
fn directory_text(prefix: u128, prefix_len: u8) -> String {
    let node = (prefix >> 64) << 80;
    let location = prefix & u128::from(u64::MAX);
    let address = Ipv6Addr::from(node | location);
    // Command and tag are between node and location, and match anything.
    let length = if prefix_len > NODE_BITS { prefix_len + 16 } else { prefix_len };
    format!("{address}/{length}")
}

fn node_address(scope: u32, node: u16) -> Ipv6Addr {
    Ipv6Addr::from((u128::from(scope) << 96) | (u128::from(node) << 80))
}

fn act_of(action: &Action, groups: &BTreeMap<u32, Vec<u16>>, names: &PortNames) -> Act {
    let to = |forward: &Forward| Port::of(forward.port, names);
    match action {
        Action::Allow => Act::Allow,
        Action::Drop => Act::Drop,
        Action::Forward(forward) => Act::Forward { port: to(forward) },
        Action::RedirectUntil { forward, lease_ms } => {
            Act::Redirect { port: to(forward), lease_ms: *lease_ms }
        }
        Action::SetMulticastGroup { group } => {
            let group = u32::from(*group);
            let ports = groups.get(&group).map(Vec::as_slice).unwrap_or_default();
            let ports = ports.iter().map(|port| Port::of(SwitchPort(*port), names)).collect();
            Act::Multicast { group, ports }
        }
        Action::CopyToController => Act::Notify,
        Action::Select(members) => Act::Select {
            choices: members
                .iter()
                .map(|member| Choice { port: to(&member.forward), weight: member.weight })
                .collect(),
        },
        Action::SetDstMac(mac) => Act::SetDestinationMac { mac: mac.to_string() },
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
        assert_eq!(match_of(&guard(4), &names).to_string(), "c1 from fdbb:1:4::/48");
        assert_eq!(match_of(&guard(5), &names).to_string(), "port 5 from fdbb:1:4::/48");
        let groups = BTreeMap::from([(7, vec![4, 5])]);
        let copy = act_of(&Action::SetMulticastGroup { group: 7 }, &groups, &names);
        assert_eq!(copy.to_string(), "copy to c1 port 5");
    }

    #[test]
    fn programs_get_the_fields_of_an_entry() {
        use serde_json::{json, to_value};
        let names = PortNames::from([(4, "c1".to_owned())]);
        let key = Key::IngressGuard { port: SwitchPort(4), src_scope: 0xfdbb_0001, src_node: 4 };
        let expected =
            json!({ "kind": "ingress_guard", "port": 4, "node": "c1", "source": "fdbb:1:4::/48" });
        assert_eq!(to_value(match_of(&key, &names)).expect("JSON"), expected);
        let groups = BTreeMap::from([(7, vec![4, 5])]);
        let copy = act_of(&Action::SetMulticastGroup { group: 7 }, &groups, &names);
        let ports = json!([{ "port": 4, "node": "c1" }, { "port": 5, "node": null }]);
        let expected = json!({ "kind": "multicast", "group": 7, "ports": ports });
        assert_eq!(to_value(copy).expect("JSON"), expected);
        let any = MaskedByte { value: 0, mask: 0 };
        let notify = Match::Notify {
            reply: MaskedByte { value: 0x8a, mask: 0xff },
            request: any,
            status: MaskedByte { value: 1, mask: 0x0f },
        };
        assert_eq!(notify.to_string(), "reply 0x8a&0xff status 0x01&0x0f");
        assert_eq!(to_value(&notify).expect("JSON")["reply"], json!({ "value": 138, "mask": 255 }));
        assert_eq!(to_value(Act::Drop).expect("JSON"), json!({ "kind": "drop" }));
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
        assert_eq!((shown.matches, shown.action), (Match::Default, Act::Drop));
    }
}
