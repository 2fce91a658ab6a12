//! The flows and groups that this controller uses, as values that can be compared.
//!
//! A switch may return a flow in another form than it was written: fields in another order, or a full mask
//! where there was none. These types have one form for each meaning.

use std::ops::BitAnd;

use bluebridge_openflow::{
    Action, Bucket, Field, FlowCommand, FlowFlags, FlowMod, FlowStats, GroupCommand,
    GroupDescription, GroupKind, GroupMod, Instruction, Masked, port,
};
use bluebridge_p4::pipeline::{MacAddr, PACKET_IN_BYTES, SwitchPort};

use super::layout::{EGRESS, ENTRY_COOKIE};

/// The Ethernet type of IPv6.
const IPV6: u16 = 0x86dd;

/// The bit of a VLAN field that says that the frame has a tag (specification, table 15).
const VLAN_PRESENT: u16 = 0x1000;

/// The bit of the fragment field that is set in every fragment (Open vSwitch's own field).
const ANY_FRAGMENT: u8 = 1;

/// A value and the bits that count. Bits that do not count are 0.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Value<T> {
    pub(super) value: T,
    pub(super) mask: T,
}

/// A number as a set of bits.
pub(super) trait Bits: Copy + Eq + BitAnd<Output = Self> {
    /// All bits.
    const ALL: Self;
}

impl Bits for u8 {
    const ALL: Self = Self::MAX;
}

impl Bits for u64 {
    const ALL: Self = Self::MAX;
}

impl Bits for u128 {
    const ALL: Self = Self::MAX;
}

impl<T: Bits> Value<T> {
    /// The bits of `value` under `mask`.
    pub(super) fn new(value: T, mask: T) -> Self {
        Self { value: value & mask, mask }
    }

    /// All bits of `value`.
    pub(super) const fn exact(value: T) -> Self {
        Self { value, mask: T::ALL }
    }

    /// What a switch returned; no mask means all bits.
    fn read(field: &Masked<T>) -> Self {
        Self::new(field.value, field.mask.unwrap_or(T::ALL))
    }

    fn masked(self) -> Masked<T> {
        Masked { value: self.value, mask: Some(self.mask).filter(|mask| *mask != T::ALL) }
    }
}

impl Value<u128> {
    /// Both conditions, which are about different bits.
    pub(super) const fn and(self, other: Self) -> Self {
        Self { value: self.value | other.value, mask: self.mask | other.mask }
    }
}

/// Conditions on an IPv6 header.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Ipv6 {
    pub(super) src: Value<u128>,
    pub(super) dst: Value<u128>,
    pub(super) next_header: Option<u8>,
    pub(super) hop_limit: Option<u8>,
    /// Whether the packet must be a fragment.
    pub(super) fragment: bool,
}

/// The conditions of a flow.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Match {
    pub(super) in_port: Option<SwitchPort>,
    pub(super) metadata: Option<Value<u64>>,
    /// Whether the frame must have an 802.1Q tag.
    pub(super) tagged: bool,
    pub(super) dst_mac: Option<MacAddr>,
    pub(super) ipv6: Option<Ipv6>,
}

impl Match {
    fn fields(&self) -> Vec<Field> {
        let mut fields = Vec::new();
        fields.extend(self.in_port.map(|port| Field::InPort(port.0.into())));
        fields.extend(self.metadata.map(|metadata| Field::Metadata(metadata.masked())));
        fields.extend(self.dst_mac.map(|mac| Field::EthDst(Masked { value: mac.0, mask: None })));
        if self.tagged {
            let present = Masked { value: VLAN_PRESENT, mask: Some(VLAN_PRESENT) };
            fields.push(Field::VlanVid(present));
        }
        let Some(ipv6) = self.ipv6 else { return fields };
        fields.push(Field::EthType(IPV6));
        fields.extend(ipv6.next_header.map(Field::IpProto));
        fields.extend(ipv6.hop_limit.map(Field::ip_ttl));
        if ipv6.src.mask != 0 {
            fields.push(Field::Ipv6Src(ipv6.src.masked()));
        }
        if ipv6.dst.mask != 0 {
            fields.push(Field::Ipv6Dst(ipv6.dst.masked()));
        }
        if ipv6.fragment {
            let any = Masked { value: ANY_FRAGMENT, mask: Some(ANY_FRAGMENT) };
            fields.push(Field::ip_fragment(any));
        }
        fields
    }

    /// What a switch returned; `None` if this controller never writes such conditions.
    fn read(fields: &[Field]) -> Option<Self> {
        let mut read = Self::default();
        let mut ipv6 = Ipv6::default();
        let mut is_ipv6 = false;
        let any_fragment = Masked { value: ANY_FRAGMENT, mask: Some(ANY_FRAGMENT) };
        for field in fields {
            match field {
                Field::InPort(port) => read.in_port = Some(SwitchPort(u16::try_from(*port).ok()?)),
                Field::Metadata(metadata) => read.metadata = Some(Value::read(metadata)),
                Field::EthDst(mac) if mac.mask.is_none_or(|mask| mask == [0xff; 6]) => {
                    read.dst_mac = Some(MacAddr(mac.value));
                }
                Field::VlanVid(vlan)
                    if vlan.value == VLAN_PRESENT && vlan.mask == Some(VLAN_PRESENT) =>
                {
                    read.tagged = true;
                }
                Field::EthType(IPV6) => is_ipv6 = true,
                Field::IpProto(next_header) => ipv6.next_header = Some(*next_header),
                Field::Ipv6Src(address) => ipv6.src = Value::read(address),
                Field::Ipv6Dst(address) => ipv6.dst = Value::read(address),
                field if *field == Field::ip_fragment(any_fragment) => ipv6.fragment = true,
                field => ipv6.hop_limit = Some(field.as_ip_ttl()?),
            }
        }
        if is_ipv6 {
            read.ipv6 = Some(ipv6);
        } else if ipv6 != Ipv6::default() {
            return None;
        }
        Some(read)
    }
}

/// What a flow does with a frame.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Steps {
    /// Drops it.
    Drop,
    /// Goes to a table.
    Goto(u8),
    /// Decrements the hop limit, which must stay above 0, and goes to a table.
    DecrementAndGoto(u8),
    /// Copies its first bytes to the controller and goes to a table.
    CopyAndGoto(u8),
    /// Rewrites the destination MAC address and goes to `EGRESS` with the port.
    Forward(SwitchPort, MacAddr),
    /// Gives it to a group.
    Group(u32),
    /// Sends it to a port; `None` is the ingress port.
    Output(Option<SwitchPort>),
    /// Rewrites the destination MAC address.
    SetDstMac(MacAddr),
    /// Stores a number.
    Record(u64),
}

impl Steps {
    fn instructions(self) -> Vec<Instruction> {
        let goto = Instruction::GotoTable;
        match self {
            Self::Drop => Vec::new(),
            Self::Goto(table) => vec![goto(table)],
            Self::DecrementAndGoto(table) => {
                vec![Instruction::ApplyActions(vec![Action::DecrementIpTtl]), goto(table)]
            }
            Self::CopyAndGoto(table) => {
                vec![Instruction::ApplyActions(vec![copy_to_controller()]), goto(table)]
            }
            Self::Forward(port, mac) => vec![
                Instruction::ApplyActions(vec![set_dst_mac(mac)]),
                write_metadata(u64::from(port.0)),
                goto(EGRESS),
            ],
            Self::Group(group) => vec![Instruction::ApplyActions(vec![Action::Group(group)])],
            Self::Output(port) => vec![Instruction::ApplyActions(vec![output(port)])],
            Self::SetDstMac(mac) => vec![Instruction::ApplyActions(vec![set_dst_mac(mac)])],
            Self::Record(number) => vec![write_metadata(number)],
        }
    }

    /// What a switch returned; `None` if this controller never writes such instructions.
    fn read(instructions: &[Instruction]) -> Option<Self> {
        Some(match instructions {
            [] => Self::Drop,
            [Instruction::GotoTable(table)] => Self::Goto(*table),
            [Instruction::WriteMetadata(metadata)]
                if metadata.mask.is_none_or(|m| m == u64::MAX) =>
            {
                Self::Record(metadata.value)
            }
            [Instruction::ApplyActions(actions), rest @ ..] => match (actions.as_slice(), rest) {
                ([Action::DecrementIpTtl], [Instruction::GotoTable(table)]) => {
                    Self::DecrementAndGoto(*table)
                }
                ([copy], [Instruction::GotoTable(table)]) if *copy == copy_to_controller() => {
                    Self::CopyAndGoto(*table)
                }
                ([Action::Group(group)], []) => Self::Group(*group),
                ([Action::Output { port: port::IN_PORT, .. }], []) => Self::Output(None),
                ([Action::Output { port, .. }], []) => {
                    Self::Output(Some(SwitchPort(u16::try_from(*port).ok()?)))
                }
                ([set], []) => Self::SetDstMac(dst_mac(set)?),
                ([set], [Instruction::WriteMetadata(metadata), Instruction::GotoTable(EGRESS)])
                    if metadata.mask.is_none_or(|mask| mask == u64::MAX) =>
                {
                    Self::Forward(SwitchPort(u16::try_from(metadata.value).ok()?), dst_mac(set)?)
                }
                _ => return None,
            },
            _ => return None,
        })
    }
}

fn write_metadata(value: u64) -> Instruction {
    Instruction::WriteMetadata(Masked { value, mask: Some(u64::MAX) })
}

fn set_dst_mac(mac: MacAddr) -> Action {
    Action::SetField(Field::EthDst(Masked { value: mac.0, mask: None }))
}

fn dst_mac(action: &Action) -> Option<MacAddr> {
    match action {
        Action::SetField(Field::EthDst(mac)) => Some(MacAddr(mac.value)),
        _ => None,
    }
}

fn copy_to_controller() -> Action {
    let max_bytes = u16::try_from(PACKET_IN_BYTES).unwrap_or(u16::MAX);
    Action::Output { port: port::CONTROLLER, max_bytes }
}

fn output(port: Option<SwitchPort>) -> Action {
    Action::Output { port: port.map_or(port::IN_PORT, |port| port.0.into()), max_bytes: 0 }
}

/// A flow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Flow {
    pub(super) table: u8,
    pub(super) priority: u16,
    pub(super) matching: Match,
    pub(super) steps: Steps,
    pub(super) cookie: u64,
    pub(super) idle_seconds: u16,
    pub(super) hard_seconds: u16,
}

/// What distinguishes a flow from others: table, priority and conditions.
pub(super) type FlowKey = (u8, u16, Match);

impl Flow {
    /// A flow of an entry, without time limits.
    pub(super) const fn new(table: u8, priority: u16, matching: Match, steps: Steps) -> Self {
        Self {
            table,
            priority,
            matching,
            steps,
            cookie: ENTRY_COOKIE,
            idle_seconds: 0,
            hard_seconds: 0,
        }
    }

    pub(super) const fn key(&self) -> FlowKey {
        (self.table, self.priority, self.matching)
    }

    /// What a switch returned; `None` if this controller never writes such a flow.
    pub(super) fn read(stats: &FlowStats) -> Option<Self> {
        Some(Self {
            table: stats.table,
            priority: stats.priority,
            matching: Match::read(&stats.fields)?,
            steps: Steps::read(&stats.instructions)?,
            cookie: stats.cookie,
            idle_seconds: stats.idle_timeout,
            hard_seconds: stats.hard_timeout,
        })
    }

    /// Adds it, or replaces the flow with the same key.
    pub(super) fn add(&self) -> FlowMod {
        FlowMod {
            cookie: self.cookie,
            idle_timeout: self.idle_seconds,
            hard_timeout: self.hard_seconds,
            instructions: self.steps.instructions(),
            ..command(FlowCommand::Add, self.table, self.priority, self.matching.fields())
        }
    }

    /// Replaces the instructions of a flow that exists and keeps its counters.
    pub(super) fn modify(&self) -> FlowMod {
        FlowMod { command: FlowCommand::ModifyStrict, ..self.add() }
    }
}

/// Deletes one flow.
pub(super) fn delete((table, priority, matching): &FlowKey) -> FlowMod {
    command(FlowCommand::DeleteStrict, *table, *priority, matching.fields())
}

/// Deletes a flow that this controller does not know.
pub(super) fn delete_foreign(stats: &FlowStats) -> FlowMod {
    command(FlowCommand::DeleteStrict, stats.table, stats.priority, stats.fields.clone())
}

/// Deletes every flow.
pub(super) fn delete_all() -> FlowMod {
    command(FlowCommand::Delete, bluebridge_openflow::TABLE_ALL, 0, Vec::new())
}

fn command(command: FlowCommand, table: u8, priority: u16, fields: Vec<Field>) -> FlowMod {
    FlowMod {
        cookie: 0,
        cookie_mask: 0,
        table,
        command,
        idle_timeout: 0,
        hard_timeout: 0,
        priority,
        out_port: port::ANY,
        out_group: bluebridge_openflow::GROUP_ANY,
        flags: FlowFlags::default(),
        fields,
        instructions: Vec::new(),
    }
}

/// One output of a group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Output {
    /// Its share of a choice; 0 in a group that copies.
    pub(super) weight: u16,
    /// The new destination MAC address.
    pub(super) dst_mac: Option<MacAddr>,
    /// The port; `None` is the ingress port.
    pub(super) port: Option<SwitchPort>,
}

/// A group.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct Group {
    pub(super) kind: GroupKind,
    pub(super) outputs: Vec<Output>,
}

impl Group {
    /// What a switch returned; `None` if this controller never writes such a group.
    pub(super) fn read(description: &GroupDescription) -> Option<Self> {
        let read = |bucket: &Bucket| {
            let (dst_mac, output) = match bucket.actions.as_slice() {
                [output] => (None, output),
                [set, output] => (Some(dst_mac(set)?), output),
                _ => return None,
            };
            let Action::Output { port, .. } = output else { return None };
            let port = match *port {
                port::IN_PORT => None,
                port => Some(SwitchPort(u16::try_from(port).ok()?)),
            };
            Some(Output { weight: bucket.weight, dst_mac, port })
        };
        let mut outputs = description.buckets.iter().map(read).collect::<Option<Vec<_>>>()?;
        if description.kind == GroupKind::All {
            // Some switches return a weight that they do not use.
            for output in &mut outputs {
                output.weight = 0;
            }
        }
        Some(Self { kind: description.kind, outputs })
    }

    pub(super) fn message(&self, command: GroupCommand, group: u32) -> GroupMod {
        let bucket = |out: &Output| {
            let mut actions: Vec<Action> = out.dst_mac.map(set_dst_mac).into_iter().collect();
            actions.push(output(out.port));
            Bucket {
                weight: out.weight,
                watch_port: port::ANY,
                watch_group: bluebridge_openflow::GROUP_ANY,
                actions,
            }
        };
        let buckets = self.outputs.iter().map(bucket).collect();
        GroupMod { command, kind: self.kind, group, buckets }
    }
}

/// Deletes a group.
pub(super) fn delete_group(group: u32) -> GroupMod {
    GroupMod { command: GroupCommand::Delete, kind: GroupKind::All, group, buckets: Vec::new() }
}
