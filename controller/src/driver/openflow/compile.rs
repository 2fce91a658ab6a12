//! What an entry, a group or a setting is in OpenFlow.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bluebridge_openflow::GroupKind;
use bluebridge_p4::declaration::Table;
use bluebridge_p4::pipeline::{
    Action, Forward, Key, MacAddr, SwitchPort, Ternary, WeightedForward,
};

use super::flow::{Flow, Group, Ipv6, Match, Output, Steps, Value};
use super::layout::{
    ANYCAST, COMMAND_SHIFT, DIRECTORY, ENTRY_PORT_PRIORITY, ENTRY_PRIORITY, FLOOD_PRIORITY,
    INGRESS_GUARD, L2, MULTICAST, NODE_SHIFT, NOTIFY, REDIRECT, ROUTE, SCOPE_SHIFT, TAG_SHIFT,
    anycast_group, byte_at, egress, plain_group, port_mac, rewriting_group,
};
use crate::core::{Body, Tables};
use crate::plan::Object;

/// How much longer than its lease a redirect may stay, if the controller that must delete it is gone.
const LEASE_SLACK: Duration = Duration::from_secs(1);

/// The bits of a location below the page number.
const PAGE_SHIFT: u32 = 12;

/// The bits of a location.
const LOCATION_BITS: u32 = 64;

/// Flows and groups.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(super) struct Compiled {
    pub(super) flows: Vec<Flow>,
    pub(super) groups: BTreeMap<u32, Group>,
    /// Ports to which its flows lead, through `EGRESS`.
    pub(super) egress: BTreeSet<SwitchPort>,
}

impl Compiled {
    fn flow(flow: Flow) -> Self {
        Self { flows: vec![flow], ..Self::default() }
    }

    fn forward(flow: Flow, port: SwitchPort) -> Self {
        Self { flows: vec![flow], egress: BTreeSet::from([port]), ..Self::default() }
    }

    /// Its flows, with those of `EGRESS` that they need.
    pub(super) fn all_flows(&self) -> impl Iterator<Item = Flow> {
        self.egress.iter().flat_map(|port| egress(*port)).chain(self.flows.iter().copied())
    }
}

/// Translates an object; `tables` has the MAC addresses of ports.
///
/// # Errors
/// A text that says what OpenFlow cannot express.
pub(super) fn compile(object: &Object, tables: &Tables) -> Result<Compiled, String> {
    Ok(match object {
        Object::Entry(key, body) => entry(key, body)?,
        Object::FloodGroup(group) => {
            let steps = Steps::Group(plain_group(*group));
            Compiled::flow(Flow::new(L2, FLOOD_PRIORITY, Match::default(), steps))
        }
        Object::Group(group, ports) => self::group(*group, ports, tables),
        // Copies go to the primary by the flows of `notify` alone; the record makes the setting readable.
        Object::NotifySession => Compiled::flow(super::layout::record(SESSION_RECORD, 0, 0)),
    })
}

/// The metadata of the record of the clone session.
pub(super) const SESSION_RECORD: u64 = 3;

fn entry(key: &Key, body: &Body) -> Result<Compiled, String> {
    let Some(action) = &body.action else { return Err("an unknown action".to_owned()) };
    if !body.metadata.is_empty() {
        return Err("OpenFlow entries have no metadata".to_owned());
    }
    if !Table::of(key).allows(action) {
        return Err(format!("{} does not have this action", Table::of(key).name()));
    }
    let mut compiled = compile_entry(*key, action)?;
    if let Some(timeout) = body.idle_timeout {
        for flow in &mut compiled.flows {
            flow.idle_seconds = seconds(timeout);
        }
    }
    Ok(compiled)
}

fn compile_entry(key: Key, action: &Action) -> Result<Compiled, String> {
    Ok(match (key, action) {
        (Key::IngressGuard { port, src_scope, src_node }, action) => {
            guard(port, src_scope, src_node, *action == Action::Allow)
        }
        (Key::Redirect { dst_scope, dst_node, page }, action) => {
            redirect(dst_scope, dst_node, page, action)?
        }
        (Key::Directory { prefix, prefix_len }, action) => {
            let matching = to(location_prefix(prefix, prefix_len));
            let flow = Flow::new(
                DIRECTORY,
                ENTRY_PRIORITY + u16::from(prefix_len),
                matching,
                match action {
                    Action::Forward(forward) => Steps::Forward(forward.port, forward.dst_mac),
                    _ => Steps::Drop,
                },
            );
            let egress = match action {
                Action::Forward(forward) => BTreeSet::from([forward.port]),
                _ => BTreeSet::new(),
            };
            Compiled { flows: vec![flow], egress, ..Compiled::default() }
        }
        (Key::Anycast { dst_scope }, Action::Select(members)) => anycast(dst_scope, members),
        (Key::Notify { src_command, dst_command, src_status, priority }, _) => {
            let priority = u16::try_from(priority)
                .map_err(|_| format!("OpenFlow has no priority {priority}, only up to 65535"))?;
            let src = ternary(src_command, COMMAND_SHIFT).and(ternary(src_status, TAG_SHIFT));
            let dst = ternary(dst_command, COMMAND_SHIFT);
            let ipv6 = Some(Ipv6 { src, dst, ..Ipv6::default() });
            let matching = Match { ipv6, ..Match::default() };
            Compiled::flow(Flow::new(NOTIFY, priority, matching, Steps::CopyAndGoto(ROUTE)))
        }
        (Key::L2 { dst_mac }, action) => {
            let matching = Match { dst_mac: Some(dst_mac), ..Match::default() };
            let flow = |steps| Flow::new(L2, ENTRY_PRIORITY, matching, steps);
            match action {
                Action::Forward(to) => {
                    Compiled::forward(flow(Steps::Forward(to.port, to.dst_mac)), to.port)
                }
                Action::SetMulticastGroup { group } => {
                    Compiled::flow(flow(Steps::Group(plain_group(*group))))
                }
                _ => Compiled::flow(flow(Steps::Drop)),
            }
        }
        (Key::PortMac { port }, Action::SetDstMac(mac)) => Compiled::flow(port_mac(port, *mac)),
        (Key::Multicast { dst_scope }, Action::SetMulticastGroup { group }) => {
            let steps = Steps::Group(rewriting_group(*group));
            Compiled::flow(Flow::new(MULTICAST, ENTRY_PRIORITY, to(scope(dst_scope)), steps))
        }
        _ => return Err("the table does not have this action".to_owned()),
    })
}

/// Whether an entry with this key and action has exactly this flow, with its table, priority and conditions. Without a
/// known action it must be one that the entry has if it does not drop.
pub(super) fn has_flow(key: Key, action: Option<&Action>, flow: &Flow) -> bool {
    let forward = Forward { port: SwitchPort(1), dst_mac: MacAddr::default() };
    let any = [
        Action::Allow,
        Action::Forward(forward),
        Action::Select(Vec::new()),
        Action::SetMulticastGroup { group: 1 },
        Action::CopyToController,
        Action::SetDstMac(MacAddr::default()),
    ];
    let actions = action.map_or(&any[..], std::slice::from_ref);
    let compiled = actions.iter().filter_map(|action| compile_entry(key, action).ok());
    compiled.flat_map(|compiled| compiled.flows).any(|expected| expected.key() == flow.key())
}

fn guard(port: SwitchPort, src_scope: u32, src_node: u16, allow: bool) -> Compiled {
    let src = scope(src_scope).and(node(src_node));
    // Spaces are separate: no source may send into another space.
    let dst = if allow { scope(src_scope) } else { Value::default() };
    let ipv6 = Some(Ipv6 { src, dst, ..Ipv6::default() });
    let matching = Match { in_port: Some(port), ipv6, ..Match::default() };
    let steps = if allow { Steps::Goto(NOTIFY) } else { Steps::Drop };
    Compiled::flow(Flow::new(INGRESS_GUARD, ENTRY_PRIORITY, matching, steps))
}

fn redirect(dst_scope: u32, dst_node: u16, page: u64, action: &Action) -> Result<Compiled, String> {
    let page = page.checked_shl(PAGE_SHIFT).unwrap_or(0);
    let location = Value::new(u128::from(page), u128::from(u64::MAX << PAGE_SHIFT));
    let matching = to(scope(dst_scope).and(node(dst_node)).and(location));
    let (forward, hard_seconds) = match action {
        Action::Forward(forward) => (forward, 0),
        // OpenFlow counts seconds: the controller deletes the entry in time, this is for its absence.
        Action::RedirectUntil { forward, lease_ms } => {
            (forward, seconds(Duration::from_millis((*lease_ms).into()) + LEASE_SLACK))
        }
        _ => return Err("redirect does not have this action".to_owned()),
    };
    let steps = Steps::Forward(forward.port, forward.dst_mac);
    let flow = Flow { hard_seconds, ..Flow::new(REDIRECT, ENTRY_PRIORITY, matching, steps) };
    Ok(Compiled::forward(flow, forward.port))
}

/// A choice for all ports, and one for each port that is itself a choice.
fn anycast(dst_scope: u32, members: &[WeightedForward]) -> Compiled {
    let ports: BTreeSet<SwitchPort> = members.iter().map(|member| member.forward.port).collect();
    let ingresses = std::iter::once(None).chain(ports.into_iter().map(Some));
    let mut compiled = Compiled::default();
    for ingress in ingresses {
        let id = anycast_group(dst_scope, ingress.map_or(0, |port| port.0));
        let output = |member: &WeightedForward| {
            let port = Some(member.forward.port).filter(|port| Some(*port) != ingress);
            Output { weight: member.weight, dst_mac: Some(member.forward.dst_mac), port }
        };
        let outputs = members.iter().map(output).collect();
        compiled.groups.insert(id, Group { kind: GroupKind::Select, outputs });
        let matching = Match { in_port: ingress, ..to(scope(dst_scope)) };
        let priority = if ingress.is_some() { ENTRY_PORT_PRIORITY } else { ENTRY_PRIORITY };
        compiled.flows.push(Flow::new(ANYCAST, priority, matching, Steps::Group(id)));
    }
    compiled
}

/// A group that copies frames unchanged, and one that rewrites their destination.
fn group(group: u16, ports: &BTreeSet<SwitchPort>, tables: &Tables) -> Compiled {
    let mac = |port: SwitchPort| match &tables.entries.get(&Key::PortMac { port })?.action {
        Some(Action::SetDstMac(mac)) => Some(*mac),
        _ => None,
    };
    let copies = |mac: &dyn Fn(SwitchPort) -> Option<MacAddr>| {
        let output =
            |port: &SwitchPort| Output { weight: 0, dst_mac: mac(*port), port: Some(*port) };
        Group { kind: GroupKind::All, outputs: ports.iter().map(output).collect() }
    };
    let groups = BTreeMap::from([
        (plain_group(group), copies(&|_| None)),
        (rewriting_group(group), copies(&mac)),
    ]);
    Compiled { groups, ..Compiled::default() }
}

/// A condition on the destination address.
fn to(dst: Value<u128>) -> Match {
    Match { ipv6: Some(Ipv6 { dst, ..Ipv6::default() }), ..Match::default() }
}

fn scope(scope: u32) -> Value<u128> {
    Value::new(u128::from(scope) << SCOPE_SHIFT, u128::from(u32::MAX) << SCOPE_SHIFT)
}

fn node(node: u16) -> Value<u128> {
    Value::new(u128::from(node) << NODE_SHIFT, u128::from(u16::MAX) << NODE_SHIFT)
}

fn ternary(byte: Ternary, shift: u32) -> Value<u128> {
    byte_at(Value::new(byte.value, byte.mask), shift)
}

/// The 112 bits of a directory key (scope, node, location) as bits of an address, which has the command byte
/// and the tag in between.
pub(super) fn location_prefix(prefix: u128, prefix_len: u8) -> Value<u128> {
    let spread = |bits: u128| {
        let location = bits & u128::from(u64::MAX);
        ((bits >> LOCATION_BITS) << NODE_SHIFT) | location
    };
    let bits = u32::from(prefix_len).min(112);
    let mask = if bits == 0 { 0 } else { (u128::MAX << (112 - bits)) & (u128::MAX >> 16) };
    Value::new(spread(prefix), spread(mask))
}

/// The inverse of [`location_prefix`]; `None` if the bits are not a prefix.
pub(super) fn prefix_of(value: Value<u128>) -> Option<(u128, u8)> {
    let gather =
        |bits: u128| ((bits >> NODE_SHIFT) << LOCATION_BITS) | (bits & u128::from(u64::MAX));
    let prefix_len = u8::try_from(value.mask.count_ones()).ok()?;
    let prefix = gather(value.value);
    (location_prefix(prefix, prefix_len) == value).then_some((prefix, prefix_len))
}

/// Whole seconds, at least as long, for OpenFlow's time limits.
fn seconds(duration: Duration) -> u16 {
    let up = u64::from(duration.subsec_nanos() != 0);
    u16::try_from(duration.as_secs() + up).unwrap_or(u16::MAX).max(1)
}
