//! Keys and actions of entries, for people and programs: the one format in which every command shows them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::Ipv6Addr;

use serde::Serialize;

use crate::pipeline::{Action, Forward, Key, SwitchPort, Ternary, WeightedForward};

/// Bits of scope and node, before the location.
const NODE_BITS: u8 = 48;

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
    /// A port, with its name if that is known.
    #[must_use]
    pub fn of(SwitchPort(port): SwitchPort, names: &PortNames) -> Self {
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
    /// The new destination.
    pub mac: String,
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
        /// Its new destination.
        mac: String,
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
        /// Its new destination.
        mac: String,
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
            Self::Forward { port, mac } => write!(f, "to {port} as {mac}"),
            Self::Group { group } => write!(f, "group {group}"),
            Self::Member { member } => write!(f, "member {member}"),
            // The ports are not known, or there are none.
            Self::Multicast { group, ports } if ports.is_empty() => {
                write!(f, "copy to group {group}")
            }
            Self::Multicast { ports, .. } => {
                f.write_str("copy to")?;
                ports.iter().try_for_each(|port| write!(f, " {port}"))
            }
            Self::Notify => f.write_str("copy to the controller"),
            Self::Redirect { port, mac, lease_ms } => {
                write!(f, "to {port} as {mac} for {lease_ms} ms more")
            }
            Self::Select { choices } => {
                // The MAC addresses are those of the nodes' entries in `directory`.
                let choices: Vec<_> = choices
                    .iter()
                    .map(|Choice { port, weight, .. }| format!("{port} (weight {weight})"))
                    .collect();
                write!(f, "one of {}", choices.join(", "))
            }
            Self::SetDestinationMac { mac } => write!(f, "copies leave as {mac}"),
        }
    }
}

/// The key of an entry.
#[must_use]
pub fn match_of(key: &Key, names: &PortNames) -> Match {
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

/// The action of an entry; `groups` are the ports of the multicast groups.
#[must_use]
pub fn act_of(action: &Action, groups: &BTreeMap<u32, Vec<u16>>, names: &PortNames) -> Act {
    let to = |forward: &Forward| Port::of(forward.port, names);
    let mac = |forward: &Forward| forward.dst_mac.to_string();
    match action {
        Action::Allow => Act::Allow,
        Action::Drop => Act::Drop,
        Action::Forward(forward) => Act::Forward { port: to(forward), mac: mac(forward) },
        Action::RedirectUntil { forward, lease_ms } => {
            Act::Redirect { port: to(forward), mac: mac(forward), lease_ms: *lease_ms }
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
                .map(|WeightedForward { forward, weight }| Choice {
                    port: to(forward),
                    mac: mac(forward),
                    weight: *weight,
                })
                .collect(),
        },
        Action::SetDstMac(mac) => Act::SetDestinationMac { mac: mac.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::MacAddr;

    #[test]
    fn a_directory_prefix_reads_as_the_pointers_that_it_matches() {
        let node = (u128::from(0xfdbb_0001_u32) << 80) | (3 << 64);
        assert_eq!(directory_text(node, 48), "fdbb:1:3::/48");
        let range = node | 0x1_0000_0000;
        assert_eq!(directory_text(range, 112 - 32), "fdbb:1:3::1:0:0/96");
        assert_eq!(directory_text(0, 0), "::/0");
        let block = (u128::from(0xfdbb_0001_u32) << 80) | (0x3000 << 64);
        assert_eq!(directory_text(block, 36), "fdbb:1:3000::/36", "the nodes of another switch");
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
        let unknown = act_of(&Action::SetMulticastGroup { group: 8 }, &groups, &names);
        assert_eq!(unknown.to_string(), "copy to group 8");
        let forward = Forward { port: SwitchPort(4), dst_mac: MacAddr([2, 0, 0, 0, 0, 4]) };
        let text = |action| act_of(&action, &groups, &names).to_string();
        assert_eq!(text(Action::Forward(forward)), "to c1 as 02:00:00:00:00:04");
        let ended = Action::RedirectUntil { forward, lease_ms: 9 };
        assert_eq!(text(ended), "to c1 as 02:00:00:00:00:04 for 9 ms more");
        let choice = Action::Select(vec![WeightedForward { forward, weight: 2 }]);
        assert_eq!(text(choice), "one of c1 (weight 2)");
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
}
