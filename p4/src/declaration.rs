//! Every table, action and counter of the pipeline, declared once.
//!
//! P4Info ([`crate::p4info`]) and the C header of the eBPF data plane ([`crate::c_header`]) are
//! generated from this file. The conversions check against it ([`crate::entry`]), the data planes and the
//! controller take their limits from it, and a P4 program of this pipeline must compile to the same
//! ids and names.

use crate::pipeline::{Action, CPU_PORT, DropReason, Key};

/// How a field matches.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MatchKind {
    /// Equal.
    Exact,
    /// Equal in the first bits; the longest prefix wins.
    Lpm,
    /// Equal under a mask; the greatest priority wins.
    Ternary,
}

/// One field of a key.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MatchField {
    /// Its number in the table.
    pub id: u32,
    /// Its name.
    pub name: &'static str,
    /// Its width in bits.
    pub bitwidth: u32,
    /// How it matches.
    pub kind: MatchKind,
}

/// A parameter of an action, or a field of a packet-in or packet-out header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Param {
    /// Its number in the action.
    pub id: u32,
    /// Its name.
    pub name: &'static str,
    /// Its width in bits.
    pub bitwidth: u32,
}

/// An action.
#[derive(Debug, Eq, PartialEq)]
pub struct ActionDeclaration {
    /// Its P4Info id.
    pub id: u32,
    /// Its full name, with the control block.
    pub name: &'static str,
    /// Its name in tables and on command lines.
    pub alias: &'static str,
    /// Its parameters.
    pub params: &'static [Param],
}

/// Where a table may use an action.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scope {
    /// Only as the default action.
    DefaultOnly,
    /// In entries and as the default action.
    TableAndDefault,
    /// Only in entries.
    TableOnly,
}

impl ActionDeclaration {
    /// Its number within the pipeline, as stored in eBPF maps: the low 16 bits of the P4Info id.
    #[must_use]
    pub const fn number(&self) -> u16 {
        let [_, _, high, low] = self.id.to_be_bytes();
        u16::from_be_bytes([high, low])
    }
}

/// An action and where a table may use it.
#[derive(Clone, Copy, Debug)]
pub struct ActionRef {
    /// The action.
    pub action: &'static ActionDeclaration,
    /// Where.
    pub scope: Scope,
}

/// A table.
#[derive(Debug)]
pub struct TableDeclaration {
    /// Its P4Info id.
    pub id: u32,
    /// Its full name, with the control block.
    pub name: &'static str,
    /// Its name in every data plane.
    pub alias: &'static str,
    /// Its key.
    pub fields: &'static [MatchField],
    /// The actions of its entries; with a selector, those of the members.
    pub actions: &'static [ActionRef],
    /// The action for packets without a matching entry.
    pub default_action: &'static ActionDeclaration,
    /// Whether the default action is fixed.
    pub default_is_const: bool,
    /// The number of entries it can hold.
    pub size: u32,
    /// Whether entries can have an idle timeout.
    pub idle_timeout: bool,
    /// The id of its direct counter (packets and bytes).
    pub counter_id: u32,
    /// The id of its action profile.
    pub action_profile: Option<u32>,
}

impl TableDeclaration {
    /// The bits of its key, without prefix length, masks and priority.
    #[must_use]
    pub fn key_bits(&self) -> u32 {
        self.fields.iter().map(|field| field.bitwidth).sum()
    }

    /// Whether entries need a priority.
    #[must_use]
    pub fn has_priority(&self) -> bool {
        self.fields.iter().any(|field| field.kind == MatchKind::Ternary)
    }
}

/// Lets the packet pass.
pub static ALLOW: ActionDeclaration =
    ActionDeclaration { id: 0x0100_0001, name: "ingress.allow", alias: "allow", params: &[] };

/// Drops the packet.
pub static DROP: ActionDeclaration =
    ActionDeclaration { id: 0x0100_0002, name: "ingress.drop", alias: "drop", params: &[] };

/// Sends the packet to a port with a new destination MAC address.
pub static FORWARD: ActionDeclaration = ActionDeclaration {
    id: 0x0100_0003,
    name: "ingress.forward",
    alias: "forward",
    params: &[
        Param { id: 1, name: "port", bitwidth: PORT_BITS },
        Param { id: 2, name: "dst_mac", bitwidth: 48 },
    ],
};

/// Sends a copy to every port of a group except the ingress port.
pub static SET_MULTICAST_GROUP: ActionDeclaration = ActionDeclaration {
    id: 0x0100_0004,
    name: "ingress.set_multicast_group",
    alias: "set_multicast_group",
    params: &[Param { id: 1, name: "group", bitwidth: 16 }],
};

/// Copies the packet to the controller.
pub static COPY_TO_CONTROLLER: ActionDeclaration = ActionDeclaration {
    id: 0x0100_0005,
    name: "ingress.copy_to_controller",
    alias: "copy_to_controller",
    params: &[],
};

/// Rewrites the destination MAC address.
pub static SET_DST_MAC: ActionDeclaration = ActionDeclaration {
    id: 0x0100_0006,
    name: "egress.set_dst_mac",
    alias: "set_dst_mac",
    params: &[Param { id: 1, name: "dst_mac", bitwidth: 48 }],
};

/// Like [`FORWARD`], for this number of milliseconds after it was written; then the entry is ignored.
/// When it is read back, `lease_ms` is the remaining time, 0 after the end. A target that cannot measure
/// time leaves the expiry to the client that wrote the entry.
pub static REDIRECT_UNTIL: ActionDeclaration = ActionDeclaration {
    id: 0x0100_0007,
    name: "ingress.redirect_until",
    alias: "redirect_until",
    params: &[
        Param { id: 1, name: "port", bitwidth: PORT_BITS },
        Param { id: 2, name: "dst_mac", bitwidth: 48 },
        Param { id: 3, name: "lease_ms", bitwidth: 16 },
    ],
};

/// Does nothing; declared by P4's core library, with the id that its compiler gives.
pub static NO_ACTION: ActionDeclaration =
    ActionDeclaration { id: 21_257_015, name: "NoAction", alias: "NoAction", params: &[] };

/// Every action, in the order of P4Info.
pub static ACTIONS: [&ActionDeclaration; 8] = [
    &NO_ACTION,
    &ALLOW,
    &DROP,
    &FORWARD,
    &SET_MULTICAST_GROUP,
    &COPY_TO_CONTROLLER,
    &SET_DST_MAC,
    &REDIRECT_UNTIL,
];

/// The width of a port number in v1model.
pub const PORT_BITS: u32 = 9;

/// The greatest number of a port with a cable: below the controller's ([`CPU_PORT`]). Greater numbers than that
/// do not fit the tables, or are special in v1model (511 drops).
pub const PORT_MAX: u16 = CPU_PORT.0 - 1;

/// The width of the page number that `redirect` matches: generation and page of a location.
pub const PAGE_BITS: u32 = 52;

/// The width of the key of `directory`: scope, node and location.
pub const LOCATION_BITS: u32 = 112;

/// The most multicast groups; P4Info does not have this limit.
pub const GROUPS_MAX: u16 = 1024;

/// The most ports of a multicast group; P4Info does not have this limit.
pub const GROUP_PORTS_MAX: usize = 128;

/// The most bytes of an entry's metadata.
pub const METADATA_BYTES_MAX: usize = 32;

/// The capacity of `redirect`.
pub const REDIRECTS_MAX: u32 = 16_384;

/// The id of the action profile of `anycast`.
pub const ANYCAST_SELECTOR_ID: u32 = 0x1100_0001;

/// The number of members that the action profile of `anycast` can hold in all groups.
pub const ANYCAST_SELECTOR_SIZE: u32 = 1024;

/// The most members of an anycast choice.
pub const ANYCAST_GROUP_SIZE: u32 = 256;

/// The greatest weight of a member.
pub const ANYCAST_MEMBER_WEIGHT: u32 = 65_535;

/// The id of the counter array `drops`, indexed by [`DropReason`].
pub const DROPS_ID: u32 = 0x1200_0001;

/// The number of counters in `drops`.
pub const DROPS_SIZE: usize = DropReason::ALL.len();

/// The id that P4's compiler gives the header `packet_in`.
pub const PACKET_IN_ID: u32 = 81_826_293;

/// The id that P4's compiler gives the header `packet_out`.
pub const PACKET_OUT_ID: u32 = 76_689_799;

/// The fields of `packet_in`.
pub const PACKET_IN_FIELDS: [Param; 2] = [
    Param { id: 1, name: "ingress_port", bitwidth: PORT_BITS },
    Param { id: 2, name: "pad", bitwidth: 7 },
];

/// The fields of `packet_out`.
pub const PACKET_OUT_FIELDS: [Param; 2] = [
    Param { id: 1, name: "egress_port", bitwidth: PORT_BITS },
    Param { id: 2, name: "pad", bitwidth: 7 },
];

const fn exact(id: u32, name: &'static str, bitwidth: u32) -> MatchField {
    MatchField { id, name, bitwidth, kind: MatchKind::Exact }
}

const fn ternary(id: u32, name: &'static str) -> MatchField {
    MatchField { id, name, bitwidth: 8, kind: MatchKind::Ternary }
}

const fn both(action: &'static ActionDeclaration) -> ActionRef {
    ActionRef { action, scope: Scope::TableAndDefault }
}

const fn default_only(action: &'static ActionDeclaration) -> ActionRef {
    ActionRef { action, scope: Scope::DefaultOnly }
}

const fn table_only(action: &'static ActionDeclaration) -> ActionRef {
    ActionRef { action, scope: Scope::TableOnly }
}

/// Every table, in the order of the ids, which is that of [`Key`]'s variants.
pub static TABLES: [TableDeclaration; 8] = [
    TableDeclaration {
        id: 0x0200_0001,
        name: "ingress.ingress_guard",
        alias: "ingress_guard",
        fields: &[exact(1, "port", PORT_BITS), exact(2, "src_scope", 32), exact(3, "src_node", 16)],
        actions: &[both(&ALLOW), both(&DROP)],
        default_action: &DROP,
        default_is_const: true,
        size: 4096,
        idle_timeout: false,
        counter_id: 0x1300_0001,
        action_profile: None,
    },
    TableDeclaration {
        id: 0x0200_0002,
        name: "ingress.redirect",
        alias: "redirect",
        fields: &[exact(1, "dst_scope", 32), exact(2, "dst_node", 16), exact(3, "page", PAGE_BITS)],
        actions: &[both(&FORWARD), table_only(&REDIRECT_UNTIL), default_only(&NO_ACTION)],
        default_action: &NO_ACTION,
        default_is_const: true,
        size: REDIRECTS_MAX,
        idle_timeout: true,
        counter_id: 0x1300_0002,
        action_profile: None,
    },
    TableDeclaration {
        id: 0x0200_0003,
        name: "ingress.directory",
        alias: "directory",
        fields: &[MatchField {
            id: 1,
            name: "prefix",
            bitwidth: LOCATION_BITS,
            kind: MatchKind::Lpm,
        }],
        actions: &[both(&FORWARD), both(&DROP)],
        default_action: &DROP,
        default_is_const: true,
        size: 65_536,
        idle_timeout: false,
        counter_id: 0x1300_0003,
        action_profile: None,
    },
    TableDeclaration {
        id: 0x0200_0004,
        name: "ingress.anycast",
        alias: "anycast",
        fields: &[exact(1, "dst_scope", 32)],
        actions: &[both(&FORWARD), default_only(&NO_ACTION)],
        default_action: &NO_ACTION,
        default_is_const: true,
        size: 1024,
        idle_timeout: false,
        counter_id: 0x1300_0004,
        action_profile: Some(ANYCAST_SELECTOR_ID),
    },
    TableDeclaration {
        id: 0x0200_0005,
        name: "ingress.notify",
        alias: "notify",
        fields: &[ternary(1, "src_command"), ternary(2, "dst_command"), ternary(3, "src_status")],
        actions: &[both(&COPY_TO_CONTROLLER), default_only(&NO_ACTION)],
        default_action: &NO_ACTION,
        default_is_const: true,
        size: 64,
        idle_timeout: false,
        counter_id: 0x1300_0005,
        action_profile: None,
    },
    TableDeclaration {
        id: 0x0200_0006,
        name: "ingress.l2",
        alias: "l2",
        fields: &[exact(1, "dst_mac", 48)],
        actions: &[table_only(&FORWARD), both(&SET_MULTICAST_GROUP), default_only(&DROP)],
        default_action: &DROP,
        default_is_const: false,
        size: 4096,
        idle_timeout: false,
        counter_id: 0x1300_0006,
        action_profile: None,
    },
    TableDeclaration {
        id: 0x0200_0007,
        name: "egress.port_mac",
        alias: "port_mac",
        fields: &[exact(1, "port", PORT_BITS)],
        actions: &[both(&SET_DST_MAC), default_only(&NO_ACTION)],
        default_action: &NO_ACTION,
        default_is_const: true,
        size: 512,
        idle_timeout: false,
        counter_id: 0x1300_0007,
        action_profile: None,
    },
    TableDeclaration {
        id: 0x0200_0008,
        name: "ingress.multicast",
        alias: "multicast",
        fields: &[exact(1, "dst_scope", 32)],
        actions: &[both(&SET_MULTICAST_GROUP), default_only(&DROP)],
        default_action: &DROP,
        default_is_const: true,
        size: 1024,
        idle_timeout: false,
        counter_id: 0x1300_0008,
        action_profile: None,
    },
];

/// The table with this P4Info id.
#[must_use]
pub fn table(id: u32) -> Option<&'static TableDeclaration> {
    TABLES.iter().find(|table| table.id == id)
}

/// The table that a key belongs to.
#[must_use]
pub const fn table_of(key: &Key) -> &'static TableDeclaration {
    Table::of(key).declaration()
}

/// The declaration of an action; for a choice that of its members.
#[must_use]
pub const fn action_of(action: &Action) -> &'static ActionDeclaration {
    match action {
        Action::Allow => &ALLOW,
        Action::Drop => &DROP,
        Action::Forward(_) | Action::Select(_) => &FORWARD,
        Action::RedirectUntil { .. } => &REDIRECT_UNTIL,
        Action::SetMulticastGroup { .. } => &SET_MULTICAST_GROUP,
        Action::CopyToController => &COPY_TO_CONTROLLER,
        Action::SetDstMac(_) => &SET_DST_MAC,
    }
}

/// A table of the pipeline, in the order of [`TABLES`].
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Table {
    /// Which source addresses a port may use.
    IngressGuard,
    /// Leased pages whose requests go to the owner.
    Redirect,
    /// Nodes and migrated ranges.
    Directory,
    /// Requests to any memory node.
    Anycast,
    /// Packets that the controller wants copies of.
    Notify,
    /// Traffic outside the fabric.
    L2,
    /// Destination MAC addresses of multicast copies.
    PortMac,
    /// Notices to every node of a space.
    Multicast,
}

impl Table {
    /// Every table.
    pub const ALL: [Self; TABLES.len()] = [
        Self::IngressGuard,
        Self::Redirect,
        Self::Directory,
        Self::Anycast,
        Self::Notify,
        Self::L2,
        Self::PortMac,
        Self::Multicast,
    ];

    /// The table that a key belongs to.
    #[must_use]
    pub const fn of(key: &Key) -> Self {
        match key {
            Key::IngressGuard { .. } => Self::IngressGuard,
            Key::Redirect { .. } => Self::Redirect,
            Key::Directory { .. } => Self::Directory,
            Key::Anycast { .. } => Self::Anycast,
            Key::Notify { .. } => Self::Notify,
            Key::L2 { .. } => Self::L2,
            Key::PortMac { .. } => Self::PortMac,
            Key::Multicast { .. } => Self::Multicast,
        }
    }

    /// Its declaration.
    #[must_use]
    pub const fn declaration(self) -> &'static TableDeclaration {
        &TABLES[self as usize]
    }

    /// The number of entries it can hold.
    #[must_use]
    pub const fn capacity(self) -> usize {
        self.declaration().size as usize
    }

    /// Its name in P4, in eBPF and in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        let TableDeclaration { alias, .. } = self.declaration();
        alias
    }

    /// Whether its entries may have this action.
    #[must_use]
    pub fn allows(self, action: &Action) -> bool {
        let declaration = self.declaration();
        let wanted = action_of(action);
        let is_choice = matches!(action, Action::Select(_));
        is_choice == declaration.action_profile.is_some()
            && declaration
                .actions
                .iter()
                .any(|known| known.action.id == wanted.id && known.scope != Scope::DefaultOnly)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{Forward, MacAddr, SwitchPort, WeightedForward};

    #[test]
    fn tables_are_in_the_order_of_their_declarations() {
        let names = Table::ALL.map(Table::name);
        let expected = [
            "ingress_guard",
            "redirect",
            "directory",
            "anycast",
            "notify",
            "l2",
            "port_mac",
            "multicast",
        ];
        assert_eq!(names, expected);
        for (place, table) in Table::ALL.into_iter().enumerate() {
            assert_eq!(table as usize, place);
        }
    }

    #[test]
    fn tables_allow_what_is_declared_for_their_entries() {
        let forward = Forward { port: SwitchPort(1), dst_mac: MacAddr::default() };
        let member = WeightedForward { forward, weight: 1 };
        let cases: [(Action, &[Table]); 8] = [
            (Action::Allow, &[Table::IngressGuard]),
            (Action::Drop, &[Table::IngressGuard, Table::Directory]),
            (Action::Forward(forward), &[Table::Redirect, Table::Directory, Table::L2]),
            (Action::RedirectUntil { forward, lease_ms: 1 }, &[Table::Redirect]),
            (Action::SetMulticastGroup { group: 1 }, &[Table::L2, Table::Multicast]),
            (Action::CopyToController, &[Table::Notify]),
            (Action::Select(vec![member]), &[Table::Anycast]),
            (Action::SetDstMac(MacAddr::default()), &[Table::PortMac]),
        ];
        for (action, tables) in cases {
            let allowing: Vec<_> =
                Table::ALL.into_iter().filter(|table| table.allows(&action)).collect();
            assert_eq!(allowing, tables, "{action:?}");
        }
    }

    #[test]
    fn actions_have_numbers_of_their_own() {
        let mut numbers: Vec<_> = ACTIONS.iter().map(|action| action.number()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), ACTIONS.len());
        assert!(!numbers.contains(&0), "a zeroed element has no action");
    }
}
