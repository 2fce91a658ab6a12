//! Routes and rules, through requests of [`Netlink`].

use std::io;
use std::net::Ipv6Addr;

use bluebridge_wire::UDP_PORT;
use futures::TryStreamExt;
use ipnet::Ipv6Net;
use rtnetlink::packet_route::IpProtocol;
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteScope, RouteType,
};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage, RulePortRange};
use rtnetlink::{IpVersion, RouteMessageBuilder};
use rustix::io::Errno;

use super::netlink::{check_interface_name, existed};
use super::{Netlink, NetworkError};

impl Netlink {
    /// Routes `prefix` through a gateway that needs no other route.
    pub fn add_gateway_route(
        &self,
        prefix: Ipv6Net,
        gateway: Ipv6Addr,
        interface: &str,
    ) -> Result<(), NetworkError> {
        let route = gateway_route(prefix, gateway, self.link(interface)?.index);
        self.execute(
            || format!("route {prefix} via {gateway} on {interface}"),
            self.handle.route().add(route).replace().execute(),
        )
    }

    /// Removes a route of [`Self::add_gateway_route`]; returns whether there was one.
    pub fn delete_gateway_route(
        &self,
        prefix: Ipv6Net,
        gateway: Ipv6Addr,
        interface: &str,
    ) -> Result<bool, NetworkError> {
        let route = gateway_route(prefix, gateway, self.link(interface)?.index);
        let request = self.handle.route().del(route);
        existed(self.execute(|| format!("remove the route to {prefix}"), request.execute()))
    }

    /// Whether there is a route of [`Self::add_gateway_route`].
    pub fn has_gateway_route(
        &self,
        prefix: Ipv6Net,
        gateway: Ipv6Addr,
        interface: &str,
    ) -> Result<bool, NetworkError> {
        let index = self.link(interface)?.index;
        let is_it = |route: &RouteMessage| {
            route_prefix(route) == Some(prefix)
                && route_table(route) == u32::from(RouteHeader::RT_TABLE_MAIN)
                && route_interface(route) == Some(index)
                && route_gateway(route) == Some(gateway)
        };
        Ok(self.routes()?.iter().any(is_it))
    }

    /// Whether the link of `own`, an address of the interface, is directly reachable through it.
    pub fn has_connected_route(&self, own: Ipv6Net, interface: &str) -> Result<bool, NetworkError> {
        let index = self.link(interface)?.index;
        let is_it = |route: &RouteMessage| {
            route_prefix(route) == Some(own.trunc())
                && route_table(route) == u32::from(RouteHeader::RT_TABLE_MAIN)
                && route_interface(route) == Some(index)
                && route_gateway(route).is_none()
        };
        Ok(self.routes()?.iter().any(is_it))
    }

    /// Whether there is a route of [`Self::add_local_route`].
    pub fn has_local_route(&self, prefix: Ipv6Net, table: u32) -> Result<bool, NetworkError> {
        let is_it = |route: &RouteMessage| {
            route_prefix(route) == Some(prefix)
                && route_table(route) == table
                && route.header.kind == RouteType::Local
        };
        Ok(self.routes()?.iter().any(is_it))
    }

    fn routes(&self) -> Result<Vec<RouteMessage>, NetworkError> {
        let every = RouteMessageBuilder::<Ipv6Addr>::new().build();
        let request = self.handle.route().get(every);
        self.execute(|| "list the routes".to_owned(), request.execute().try_collect())
    }

    /// The length of the prefix with which the kernel would send to `address` through `interface`; `None` if it
    /// would not.
    pub fn sends_by(&self, address: Ipv6Addr, interface: &str) -> Result<Option<u8>, NetworkError> {
        let index = self.link(interface)?.index;
        let found = self.look_up(address, &[RouteAttribute::Oif(index)])?;
        let found = found.filter(|route| {
            route.header.kind == RouteType::Unicast && route_interface(route) == Some(index)
        });
        Ok(found.map(|route| route.header.destination_prefix_length))
    }

    /// Whether the kernel would deliver packets that arrive at `interface` for `address` to this host.
    pub fn delivers(&self, address: Ipv6Addr, interface: &str) -> Result<bool, NetworkError> {
        let index = self.link(interface)?.index;
        // As a request arrives: of other protocols a host that guards RDMA gets less.
        let udp = i32::from(IpProtocol::Udp).to_le_bytes()[0];
        let conditions = [
            RouteAttribute::Iif(index),
            RouteAttribute::IpProto(udp),
            RouteAttribute::Dport(UDP_PORT),
        ];
        let found = self.look_up(address, &conditions)?;
        Ok(found.is_some_and(|route| route.header.kind == RouteType::Local))
    }

    /// Looks up an address as the kernel does for a packet; returns the table's entry.
    fn look_up(
        &self,
        address: Ipv6Addr,
        conditions: &[RouteAttribute],
    ) -> Result<Option<RouteMessage>, NetworkError> {
        let mut message = RouteMessageBuilder::<Ipv6Addr>::new().build();
        message.header.destination_prefix_length = 128;
        message.header.flags = RouteFlags::FibMatch;
        let destination = RouteAttribute::Destination(RouteAddress::Inet6(address));
        message.attributes = [&[destination][..], conditions].concat();
        let request = self.handle.route().get(message);
        let found: Result<Vec<RouteMessage>, _> =
            self.execute(|| format!("look up {address}"), request.execute().try_collect());
        match found {
            Ok(routes) => Ok(routes.into_iter().next()),
            // No route, or one that says that there is none.
            Err(NetworkError::Netlink { source, .. })
                if matches!(
                    Errno::from_io_error(&source),
                    Some(Errno::NETUNREACH | Errno::HOSTUNREACH | Errno::ACCESS | Errno::INVAL)
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Delivers `prefix` locally for packets that use `table`.
    pub fn add_local_route(&self, prefix: Ipv6Net, table: u32) -> Result<(), NetworkError> {
        let route = local_route(prefix, table, self.link("lo")?.index);
        self.execute(
            || format!("deliver {prefix} locally in table {table}"),
            self.handle.route().add(route).replace().execute(),
        )
    }

    /// Removes a route of [`Self::add_local_route`]; returns whether there was one.
    pub fn delete_local_route(&self, prefix: Ipv6Net, table: u32) -> Result<bool, NetworkError> {
        let route = local_route(prefix, table, self.link("lo")?.index);
        let request = self.handle.route().del(route);
        existed(
            self.execute(|| format!("remove the local route of table {table}"), request.execute()),
        )
    }

    /// Directs packets for `prefix` that arrive on `interface` to `table`; returns whether the rule is new.
    pub fn add_arrival_rule(
        &self,
        interface: &str,
        prefix: Ipv6Net,
        table: u32,
        priority: u32,
    ) -> Result<bool, NetworkError> {
        check_interface_name(interface)?;
        let request = self
            .handle
            .rule()
            .add()
            .v6()
            .input_interface(interface)
            .destination_prefix(prefix.addr(), prefix.prefix_len())
            .table_id(table)
            .priority(priority)
            .action(RuleAction::ToTable);
        let result = self.execute(|| format!("add the rule of {interface}"), request.execute());
        match result {
            Ok(()) => Ok(true),
            Err(NetworkError::Netlink { source, .. })
                if source.kind() == io::ErrorKind::AlreadyExists =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Removes every rule that directs arrivals on `interface` to `table`; returns their number.
    pub fn delete_arrival_rules(&self, interface: &str, table: u32) -> Result<usize, NetworkError> {
        let mut count = 0;
        for rule in self.rules(table)? {
            if rule_interface(&rule) == Some(interface) {
                let request = self.handle.rule().del(rule);
                self.execute(|| format!("remove the rule of {interface}"), request.execute())?;
                count += 1;
            }
        }
        Ok(count)
    }

    /// The interfaces whose arrivals are directed to `table`.
    pub fn arrival_interfaces(&self, table: u32) -> Result<Vec<String>, NetworkError> {
        let rules = self.rules(table)?;
        Ok(rules.iter().filter_map(rule_interface).map(str::to_owned).collect())
    }

    fn rules(&self, table: u32) -> Result<Vec<RuleMessage>, NetworkError> {
        let rules = self.all_rules()?.into_iter();
        Ok(rules.filter(|rule| rule_table(rule) == table && !is_guard(rule)).collect())
    }

    fn all_rules(&self) -> Result<Vec<RuleMessage>, NetworkError> {
        let request = self.handle.rule().get(IpVersion::V6);
        self.execute(|| "list the rules".to_owned(), request.execute().try_collect())
    }

    /// Of the packets for `prefix` that arrive on `interface`, directs only TCP, ICMPv6, and UDP of other ports than that of
    /// RDMA to `table`, and drops all others. They are before the arrival rule, and after the addresses that the host has.
    pub fn add_rdma_guard(
        &self,
        interface: &str,
        prefix: Ipv6Net,
        table: u32,
    ) -> Result<(), NetworkError> {
        check_interface_name(interface)?;
        // What drops comes first: no moment lets such a packet through.
        let rules: Vec<_> = (GUARD_PRIORITY..).zip(GUARDS).collect();
        for (priority, allowed) in rules.into_iter().rev() {
            let mut request = self
                .handle
                .rule()
                .add()
                .v6()
                .input_interface(interface)
                .destination_prefix(prefix.addr(), prefix.prefix_len())
                .priority(priority);
            request = match allowed {
                None => request.action(RuleAction::Blackhole),
                Some((protocol, ports)) => {
                    let mut request = request.table_id(table).action(RuleAction::ToTable);
                    let attributes = &mut request.message_mut().attributes;
                    attributes.push(RuleAttribute::IpProtocol(protocol));
                    attributes.extend(ports.map(RuleAttribute::DestinationPortRange));
                    request
                }
            };
            let done = self.execute(|| format!("guard RDMA of {interface}"), request.execute());
            match done {
                Err(NetworkError::Netlink { source, .. })
                    if source.kind() == io::ErrorKind::AlreadyExists => {}
                other => other?,
            }
        }
        Ok(())
    }

    /// Whether all rules of [`Self::add_rdma_guard`] are there.
    pub fn has_rdma_guard(&self, interface: &str) -> Result<bool, NetworkError> {
        let rules = self.all_rules()?;
        let is_there = |priority| {
            rules.iter().any(|rule| {
                rule_priority(rule) == Some(priority) && rule_interface(rule) == Some(interface)
            })
        };
        Ok((GUARD_PRIORITY..).take(GUARDS.len()).all(is_there))
    }

    /// Removes the rules of [`Self::add_rdma_guard`], the dropping one last; returns whether there were any.
    pub fn delete_rdma_guard(&self, interface: &str) -> Result<bool, NetworkError> {
        let mut rules = self.all_rules()?;
        rules.retain(|rule| is_guard(rule) && rule_interface(rule) == Some(interface));
        rules.sort_by_key(rule_priority);
        let is_there = !rules.is_empty();
        for rule in rules {
            let request = self.handle.rule().del(rule);
            self.execute(|| format!("remove the guard of {interface}"), request.execute())?;
        }
        Ok(is_there)
    }
}

/// The port of RDMA over UDP (RoCE version 2).
const RDMA_PORT: u16 = 4791;

/// The first of the priorities of a guard's rules, which end before that of the arrival rule.
const GUARD_PRIORITY: u32 = 1865;

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

/// A protocol, and the ports that packets are sent to.
type Allowed = (IpProtocol, Option<RulePortRange>);

const ICMPV6: i32 = 58;

fn is_guard(rule: &RuleMessage) -> bool {
    let mut priorities = (GUARD_PRIORITY..).take(GUARDS.len());
    rule_priority(rule).is_some_and(|priority| priorities.any(|it| it == priority))
}

fn rule_priority(rule: &RuleMessage) -> Option<u32> {
    rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Priority(priority) => Some(*priority),
        _ => None,
    })
}

/// A usual metric (`IP6_RT_PRIO_USER`), to which the number of the interface is added.
const METRIC: u32 = 1024;

fn gateway_route(prefix: Ipv6Net, gateway: Ipv6Addr, index: u32) -> RouteMessage {
    // With the same metric, the route of one interface would replace that of another.
    RouteMessageBuilder::<Ipv6Addr>::new()
        .destination_prefix(prefix.addr(), prefix.prefix_len())
        .gateway(gateway)
        .output_interface(index)
        .priority(METRIC.saturating_add(index))
        .build()
}

fn local_route(prefix: Ipv6Net, table: u32, loopback: u32) -> RouteMessage {
    RouteMessageBuilder::<Ipv6Addr>::new()
        .destination_prefix(prefix.addr(), prefix.prefix_len())
        .output_interface(loopback)
        .kind(RouteType::Local)
        .scope(RouteScope::Universe)
        .table_id(table)
        .build()
}

/// The destination; a route without one is the default route.
fn route_prefix(route: &RouteMessage) -> Option<Ipv6Net> {
    let address = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet6(address)) => Some(*address),
        _ => None,
    });
    let length = route.header.destination_prefix_length;
    Ipv6Net::new(address.unwrap_or(Ipv6Addr::UNSPECIFIED), length).ok()
}

fn route_gateway(route: &RouteMessage) -> Option<Ipv6Addr> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Gateway(RouteAddress::Inet6(address)) => Some(*address),
        _ => None,
    })
}

fn route_interface(route: &RouteMessage) -> Option<u32> {
    route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Oif(index) => Some(*index),
        _ => None,
    })
}

fn route_table(route: &RouteMessage) -> u32 {
    let attribute = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Table(table) => Some(*table),
        _ => None,
    });
    attribute.unwrap_or_else(|| u32::from(route.header.table))
}

fn rule_interface(rule: &RuleMessage) -> Option<&str> {
    rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Iifname(name) => Some(name.as_str()),
        _ => None,
    })
}

fn rule_table(rule: &RuleMessage) -> u32 {
    let attribute = rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Table(table) => Some(*table),
        _ => None,
    });
    attribute.unwrap_or_else(|| u32::from(rule.header.table))
}
