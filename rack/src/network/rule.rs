//! The rules of a host of the fabric, and how they are recognised among those of other programs: by all that they say.

use std::net::{IpAddr, Ipv6Addr};

use bluebridge_wire::address::{FABRIC_PREFIX, FABRIC_PREFIX_LEN};
use rtnetlink::packet_route::route::RouteHeader;
use rtnetlink::packet_route::rule::{
    RuleAction, RuleAttribute, RuleFlags, RuleMessage, RulePortRange,
};
use rtnetlink::packet_route::{AddressFamily, IpProtocol};

/// The port of RDMA over UDP (RoCE version 2).
const RDMA_PORT: u16 = 4791;

/// The routing table that delivers arriving fabric traffic locally.
pub const ARRIVAL_TABLE: u32 = 187;

/// The priority of the arrival rule: after `local` (0), before `main` (32766).
pub const ARRIVAL_PRIORITY: u32 = 1870;

/// The first of the priorities of a guard's rules, which end before that of the arrival rule.
const GUARD_PRIORITY: u32 = 1865;

/// A protocol, and the ports that packets are sent to.
type Allowed = (IpProtocol, Option<RulePortRange>);

/// What a guard lets through, in the order of priorities, and then nothing else. The rules name what is let through, not
/// what is dropped: in a fragment the kernel sees no ports, and behind other headers no UDP.
const GUARDS: [Option<Allowed>; 5] = [
    Some((IpProtocol::Udp, Some(RulePortRange { start: 1, end: RDMA_PORT - 1 }))),
    Some((IpProtocol::Udp, Some(RulePortRange { start: RDMA_PORT + 1, end: LAST_PORT }))),
    Some((IpProtocol::Tcp, None)),
    Some((IpProtocol::Other(ICMPV6), None)),
    None,
];

/// The kernel allows no rule with the port 65,535.
const LAST_PORT: u16 = u16::MAX - 1;

const ICMPV6: i32 = 58;

/// Directs packets of the fabric that arrive on the interface to the arrival table.
pub(super) fn arrival(interface: &str) -> RuleMessage {
    of_fabric(interface, ARRIVAL_PRIORITY, RuleAction::ToTable)
}

/// Of the packets of the fabric that arrive on the interface, direct only TCP, ICMPv6, and UDP of other ports than that
/// of RDMA to the arrival table, and drop all others. They are before the arrival rule, and after the addresses that the
/// host has.
pub(super) fn guard(interface: &str) -> Vec<RuleMessage> {
    let rule = |(priority, allowed): (u32, Option<Allowed>)| {
        let Some((protocol, ports)) = allowed else {
            return of_fabric(interface, priority, RuleAction::Blackhole);
        };
        let mut rule = of_fabric(interface, priority, RuleAction::ToTable);
        rule.attributes.push(RuleAttribute::IpProtocol(protocol));
        rule.attributes.extend(ports.map(RuleAttribute::DestinationPortRange));
        rule
    };
    (GUARD_PRIORITY..).zip(GUARDS).map(rule).collect()
}

fn of_fabric(interface: &str, priority: u32, action: RuleAction) -> RuleMessage {
    let prefix = Ipv6Addr::new(FABRIC_PREFIX, 0, 0, 0, 0, 0, 0, 0);
    // One that drops has no use for a table, and has had this one since the first version.
    let table = match action {
        RuleAction::ToTable => ARRIVAL_TABLE,
        _ => RouteHeader::RT_TABLE_MAIN.into(),
    };
    let mut rule = RuleMessage::default();
    rule.header.family = AddressFamily::Inet6;
    rule.header.dst_len = FABRIC_PREFIX_LEN;
    rule.header.action = action;
    rule.attributes = vec![
        RuleAttribute::Iifname(interface.to_owned()),
        RuleAttribute::Destination(IpAddr::V6(prefix)),
        RuleAttribute::Priority(priority),
        RuleAttribute::Table(table),
    ];
    rule
}

/// Whether a rule of the kernel's list does what `made` does, and nothing else. A condition that this program does not
/// know makes it another rule.
pub(super) fn is_same(found: &RuleMessage, made: &RuleMessage) -> bool {
    let is_inverted = |rule: &RuleMessage| rule.header.flags.contains(RuleFlags::Invert);
    found.header.src_len == made.header.src_len
        && found.header.tos == made.header.tos
        && is_inverted(found) == is_inverted(made)
        && conditions(found).count() == conditions(made).count()
        && would_be_removed(found, made)
}

/// Whether the kernel would take the rule for the one that it is asked to remove: it looks only at the conditions that
/// the request has, so a rule with more of them fits, too.
fn would_be_removed(found: &RuleMessage, request: &RuleMessage) -> bool {
    found.header.dst_len == request.header.dst_len
        && found.header.action == request.header.action
        && table(found) == table(request)
        && conditions(request).all(|wanted| conditions(found).any(|it| it == wanted))
}

/// The priority of the rule of somebody else that the kernel would remove in the place of `made`.
pub(super) fn in_the_way(all: &[RuleMessage], made: &RuleMessage) -> Option<u32> {
    let first = all.iter().find(|rule| would_be_removed(rule, made))?;
    if is_same(first, made) { None } else { priority(first) }
}

/// What a rule says, without what the kernel adds to each.
fn conditions(rule: &RuleMessage) -> impl Iterator<Item = &RuleAttribute> {
    rule.attributes.iter().filter(|attribute| {
        !matches!(
            attribute,
            // Who made it is only a note.
            RuleAttribute::Protocol(_)
                // In the header, too.
                | RuleAttribute::Table(_)
                // Not suppressed.
                | RuleAttribute::SuppressPrefixLen(u32::MAX)
                | RuleAttribute::SuppressIfGroup(u32::MAX)
        )
    })
}

fn table(rule: &RuleMessage) -> u32 {
    let attribute = rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Table(table) => Some(*table),
        _ => None,
    });
    attribute.unwrap_or_else(|| u32::from(rule.header.table))
}

pub(super) fn priority(rule: &RuleMessage) -> Option<u32> {
    rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Priority(priority) => Some(*priority),
        _ => None,
    })
}

pub(super) fn interface(rule: &RuleMessage) -> Option<&str> {
    rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Iifname(name) => Some(name.as_str()),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use rtnetlink::packet_route::route::RouteProtocol;

    use super::*;

    /// As the kernel lists it.
    fn listed(made: &RuleMessage) -> RuleMessage {
        let mut rule = made.clone();
        rule.header.table = u8::try_from(table(made)).expect("a small table");
        rule.header.flags = RuleFlags::IifDetached;
        rule.attributes.reverse();
        rule.attributes.push(RuleAttribute::SuppressPrefixLen(u32::MAX));
        rule.attributes.push(RuleAttribute::Protocol(RouteProtocol::Unspec));
        rule
    }

    fn all() -> Vec<RuleMessage> {
        [guard("eth0"), vec![arrival("eth0")]].concat()
    }

    #[test]
    fn each_rule_is_recognised_as_the_kernel_lists_it_and_for_no_other_one() {
        for (at, found) in all().iter().map(listed).enumerate() {
            for (other, made) in all().iter().enumerate() {
                assert_eq!(is_same(&found, made), at == other, "{found:?} {made:?}");
            }
        }
    }

    #[test]
    fn a_rule_that_differs_in_anything_is_of_somebody_else() {
        type Change = fn(&mut RuleMessage);
        let changes: [(&str, Change); 12] = [
            ("inverted", |it| it.header.flags = RuleFlags::Invert),
            ("source", |it| {
                it.header.src_len = 16;
                it.attributes.push(RuleAttribute::Source(IpAddr::V6(Ipv6Addr::LOCALHOST)));
            }),
            ("class", |it| it.header.tos = 4),
            ("prefix", |it| it.header.dst_len = 32),
            ("action", |it| it.header.action = RuleAction::Prohibit),
            ("table", |it| it.attributes.push(RuleAttribute::Table(100))),
            ("mark", |it| it.attributes.push(RuleAttribute::FwMark(1))),
            ("suppressed", |it| it.attributes.push(RuleAttribute::SuppressPrefixLen(0))),
            ("ports", |it| {
                let range = RulePortRange { start: 1, end: 2 };
                it.attributes.push(RuleAttribute::SourcePortRange(range));
            }),
            ("outgoing", |it| it.attributes.push(RuleAttribute::Oifname("eth1".to_owned()))),
            ("interface", |it| {
                it.attributes.retain(|it| !matches!(it, RuleAttribute::Iifname(_)));
                it.attributes.push(RuleAttribute::Iifname("eth1".to_owned()));
            }),
            ("priority", |it| {
                it.attributes.retain(|it| !matches!(it, RuleAttribute::Priority(_)));
                it.attributes.push(RuleAttribute::Priority(7));
            }),
        ];
        for made in all() {
            for (what, change) in changes {
                let mut found = listed(&made);
                found.attributes.retain(|it| !matches!(it, RuleAttribute::Table(_)));
                assert!(is_same(&found, &made), "{what}");
                change(&mut found);
                assert!(!is_same(&found, &made), "{what}: {made:?}");
            }
        }
    }

    #[test]
    fn a_rule_with_more_conditions_is_in_the_way_only_if_it_comes_first() {
        for made in all() {
            let own = listed(&made);
            let mut other = own.clone();
            other.attributes.push(RuleAttribute::FwMark(1));
            let priority = priority(&made);
            assert_eq!(in_the_way(&[own.clone(), other.clone()], &made), None);
            assert_eq!(in_the_way(&[other, own], &made), priority);
            assert_eq!(in_the_way(&[], &made), None);
        }
    }
}
