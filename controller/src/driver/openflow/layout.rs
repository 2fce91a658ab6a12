//! The pipeline as OpenFlow tables: their numbers and the flows that are always there.
//!
//! | table | role | miss |
//! | --- | --- | --- |
//! | 0 `CLASSIFY` | drops tagged frames, foreign destinations, fragments, other next headers; checks and decrements the hop limit | to `L2` |
//! | 1 `INGRESS_GUARD` | source address and ingress port; the destination must have the source's scope | drop |
//! | 2 `NOTIFY` | copies to the controller, with the decremented hop limit | to `ROUTE` |
//! | 3 `ROUTE` | selects a table by destination node and command | |
//! | 4 `ANYCAST` | a group per space | drop |
//! | 5 `MULTICAST` | a group per space | drop |
//! | 6 `REDIRECT` | leased pages | to `DIRECTORY` |
//! | 7 `DIRECTORY` | longest prefix by priority | drop |
//! | 8 `L2` | traffic outside the fabric | the flood group, or drop |
//! | 9 `PORT_MAC` | never reached: it stores the MAC addresses that multicast buckets write | |
//! | 10 `EGRESS` | output to the port in the metadata, also if it is the ingress port | drop |
//! | 11 `RECORDS` | never reached: it stores the pipeline's version and the last primary | |
//!
//! OpenFlow sends nothing to the ingress port unless it is called `IN_PORT`. `EGRESS` therefore has two
//! flows for each port, so that `REDIRECT`, `DIRECTORY` and `L2` need only one for each entry.
//!
//! Every reason to drop a frame has flows of its own, so that their counters are the drop counters. The cookie of such
//! a flow names the reason.

use bluebridge_p4::pipeline::{DropReason, MacAddr, SwitchPort};
use bluebridge_wire::{Command, WireCommand};

use super::flow::{Flow, Ipv6, Match, Steps, Value};

pub(super) const CLASSIFY: u8 = 0;
pub(super) const INGRESS_GUARD: u8 = 1;
pub(super) const NOTIFY: u8 = 2;
pub(super) const ROUTE: u8 = 3;
pub(super) const ANYCAST: u8 = 4;
pub(super) const MULTICAST: u8 = 5;
pub(super) const REDIRECT: u8 = 6;
pub(super) const DIRECTORY: u8 = 7;
pub(super) const L2: u8 = 8;
pub(super) const PORT_MAC: u8 = 9;
pub(super) const EGRESS: u8 = 10;
pub(super) const RECORDS: u8 = 11;

/// The number of tables.
pub(super) const TABLE_COUNT: u8 = 12;

/// The priority of an entry without an order of its own; above every miss.
pub(super) const ENTRY_PRIORITY: u16 = 1000;

/// The priority of an entry for one ingress port, above that for all.
pub(super) const ENTRY_PORT_PRIORITY: u16 = 1001;

/// The priority of the flow that floods, above the miss of `L2`.
pub(super) const FLOOD_PRIORITY: u16 = 1;

/// The cookie of the flows that are always there. The bits outside [`BASE_MASK`] are 0, or 1 more than the index of the
/// reason for which the flow drops frames.
pub(super) const BASE_COOKIE: u64 = 0xbb00_0000_0000_0000;

/// The bits of [`BASE_COOKIE`] that are the same in all of these flows.
pub(super) const BASE_MASK: u64 = !0xff;

/// The cookie of the flows of entries.
pub(super) const ENTRY_COOKIE: u64 = 0xbb01_0000_0000_0000;

/// The metadata of the record of the pipeline's version.
pub(super) const VERSION_RECORD: u64 = 1;

/// The metadata of the record of the last primary.
pub(super) const PRIMARY_RECORD: u64 = 2;

/// Groups whose number is below are multicast groups that do not rewrite frames (`l2`).
const GROUP_SPAN: u32 = 0x1_0000;

/// The first group of copies with the MAC addresses of their ports.
const REWRITING_GROUPS: u32 = GROUP_SPAN;

/// The first group of anycast choices.
const ANYCAST_GROUPS: u32 = 0x0400_0000;

/// The bits of a scope that differ between spaces; the others are the fabric's.
const SPACE_BITS: u32 = 16;

/// The bits of a port number in the number of an anycast group.
const PORT_BITS: u32 = 10;

/// The version of this layout; a switch with another one is emptied first.
const LAYOUT_VERSION: u64 = 2;

/// Next headers that pass: TCP, UDP, ICMPv6.
const NEXT_HEADERS: [u8; 3] = [6, 17, 58];

/// The group that copies frames unchanged.
pub(super) const fn plain_group(group: u16) -> u32 {
    group as u32
}

/// The group that gives every copy the MAC address of its port.
pub(super) const fn rewriting_group(group: u16) -> u32 {
    REWRITING_GROUPS + group as u32
}

/// The multicast group of a plain group's number.
pub(super) fn multicast_group(group: u32) -> Option<u16> {
    u16::try_from(group).ok()
}

/// The group of a space's anycast choice; `ingress` is 0 for all ports without a group of their own.
pub(super) const fn anycast_group(scope: u32, ingress: u16) -> u32 {
    let space = scope & ((1 << SPACE_BITS) - 1);
    ANYCAST_GROUPS + (space << PORT_BITS) + ingress as u32
}

/// What the record of the pipeline's version contains: a hash of the layout and of the flows that are always
/// there.
pub(super) fn version() -> u64 {
    let text = format!("{LAYOUT_VERSION} {:?}", base_flows());
    // FNV-1a: the same in every build, which a hasher of the standard library does not promise.
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// The record of the pipeline's version.
pub(super) fn version_record() -> Flow {
    record(VERSION_RECORD, version(), 0)
}

/// A flow that is never hit and stores two numbers.
pub(super) fn record(name: u64, low: u64, high: u64) -> Flow {
    Flow {
        table: RECORDS,
        priority: ENTRY_PRIORITY,
        matching: Match { metadata: Some(Value::exact(name)), ..Match::default() },
        steps: Steps::Record(high),
        cookie: low,
        idle_seconds: 0,
        hard_seconds: 0,
    }
}

/// The output of a port: to other ports, and to itself.
pub(super) fn egress(port: SwitchPort) -> [Flow; 2] {
    let metadata = Some(Value::exact(u64::from(port.0)));
    let others = Match { metadata, ..Match::default() };
    let itself = Match { in_port: Some(port), metadata, ..Match::default() };
    [
        Flow::new(EGRESS, ENTRY_PRIORITY, others, Steps::Output(Some(port))),
        Flow::new(EGRESS, ENTRY_PORT_PRIORITY, itself, Steps::Output(None)),
    ]
}

/// The flow of `port_mac` for a port.
pub(super) fn port_mac(port: SwitchPort, mac: MacAddr) -> Flow {
    let matching = Match { in_port: Some(port), ..Match::default() };
    Flow::new(PORT_MAC, ENTRY_PRIORITY, matching, Steps::SetDstMac(mac))
}

/// The reason for which a flow that is always there drops frames.
pub(super) fn drop_reason(flow: &Flow) -> Option<DropReason> {
    if flow.cookie & BASE_MASK != BASE_COOKIE {
        return None;
    }
    let index = (flow.cookie & !BASE_MASK).checked_sub(1)?;
    DropReason::ALL.get(usize::try_from(index).ok()?).copied()
}

/// The flows that do not depend on any entry.
pub(super) fn base_flows() -> Vec<Flow> {
    let mut flows = classify();
    flows.extend(route());
    let any = Match::default;
    flows.extend([
        drops(INGRESS_GUARD, 0, any(), DropReason::Guard),
        base(NOTIFY, 0, any(), Steps::Goto(ROUTE)),
        drops(ANYCAST, 0, any(), DropReason::Anycast),
        drops(MULTICAST, 0, any(), DropReason::Multicast),
        base(REDIRECT, 0, any(), Steps::Goto(DIRECTORY)),
        drops(DIRECTORY, 0, any(), DropReason::NoRoute),
        drops(L2, 0, any(), DropReason::NoRoute),
        drops(EGRESS, 0, any(), DropReason::Egress),
    ]);
    flows
}

fn base(table: u8, priority: u16, matching: Match, steps: Steps) -> Flow {
    Flow { cookie: BASE_COOKIE, ..Flow::new(table, priority, matching, steps) }
}

fn drops(table: u8, priority: u16, matching: Match, reason: DropReason) -> Flow {
    let cookie = BASE_COOKIE + 1 + reason as u64;
    Flow { cookie, ..Flow::new(table, priority, matching, Steps::Drop) }
}

fn classify() -> Vec<Flow> {
    let ipv6 = |ipv6| Match { ipv6: Some(ipv6), ..Match::default() };
    let fabric = Value::new(0xfdbb << 112, 0xffff << 112);
    let nowhere = Value::new(0, u128::MAX);
    let from = Ipv6 { src: fabric, ..Ipv6::default() };
    let to = Ipv6 { dst: fabric, ..Ipv6::default() };
    let tagged = Match { tagged: true, ..Match::default() };
    let unparsed = Ipv6 { src: nowhere, dst: nowhere, ..Ipv6::default() };
    let mut flows = vec![
        drops(CLASSIFY, 600, tagged, DropReason::Tagged),
        // The switch leaves the addresses of an IPv6 header empty that it cannot parse.
        drops(CLASSIFY, 500, ipv6(unparsed), DropReason::Malformed),
        drops(CLASSIFY, 400, ipv6(Ipv6 { fragment: true, ..to }), DropReason::NextHeader),
        drops(CLASSIFY, 250, ipv6(to), DropReason::NextHeader),
        drops(CLASSIFY, 200, ipv6(from), DropReason::ForeignDestination),
        base(CLASSIFY, 0, Match::default(), Steps::Goto(L2)),
    ];
    for next_header in NEXT_HEADERS {
        let known = Ipv6 { next_header: Some(next_header), ..to };
        flows.push(base(CLASSIFY, 300, ipv6(known), Steps::DecrementAndGoto(INGRESS_GUARD)));
        // The switch does not count what it drops when it decrements.
        flows.extend([0, 1].map(|ended| {
            let ended = Ipv6 { hop_limit: Some(ended), ..known };
            drops(CLASSIFY, 350, ipv6(ended), DropReason::HopLimit)
        }));
    }
    flows
}

fn route() -> Vec<Flow> {
    let to = |dst| Match { ipv6: Some(Ipv6 { dst, ..Ipv6::default() }), ..Match::default() };
    let mut flows = Vec::new();
    for (node, table, reason, admits) in [
        (0, ANYCAST, DropReason::Anycast, Command::is_anycast as fn(Command) -> bool),
        (u16::MAX, MULTICAST, DropReason::Multicast, Command::is_notice),
    ] {
        let node = Value::new(u128::from(node) << NODE_SHIFT, 0xffff << NODE_SHIFT);
        flows.push(drops(ROUTE, 200, to(node), reason));
        for bits in 0..=u8::MAX {
            let command = WireCommand::from_bits(bits);
            if !command.is_reply() && command.command().is_some_and(admits) {
                let both = node.and(command_byte(Value::exact(bits)));
                flows.push(base(ROUTE, 300, to(both), Steps::Goto(table)));
            }
        }
    }
    // A reply or a request to the home, or an endpoint's own address.
    let redirectable = command_byte(Value::new(0, WireCommand::REPLY | WireCommand::HOME))
        .and(Value::new(0, 1 << (u64::BITS - 1)));
    flows.push(base(ROUTE, 100, to(redirectable), Steps::Goto(REDIRECT)));
    flows.push(base(ROUTE, 0, to(Value::default()), Steps::Goto(DIRECTORY)));
    flows
}

/// The position of the node in an address.
pub(super) const NODE_SHIFT: u32 = 80;

/// The position of the command byte in an address.
pub(super) const COMMAND_SHIFT: u32 = 72;

/// The position of the tag (in replies: the status) in an address.
pub(super) const TAG_SHIFT: u32 = 64;

/// The position of the scope in an address.
pub(super) const SCOPE_SHIFT: u32 = 96;

/// A condition on the command byte as one on an address.
pub(super) fn command_byte(byte: Value<u8>) -> Value<u128> {
    byte_at(byte, COMMAND_SHIFT)
}

/// A condition on a byte of an address.
pub(super) fn byte_at(byte: Value<u8>, shift: u32) -> Value<u128> {
    Value::new(u128::from(byte.value) << shift, u128::from(byte.mask) << shift)
}
