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
use rtnetlink::packet_route::rule::RuleMessage;
use rtnetlink::{IpVersion, RouteMessageBuilder};
use rustix::io::Errno;

use super::netlink::{check_interface_name, existed};
use super::{Netlink, NetworkError, rule};

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

    /// Directs packets of the fabric that arrive on `interface` to the arrival table; returns whether the rule is new.
    ///
    /// # Errors
    /// The kernel refused, or takes another program's rule for this one.
    pub fn add_arrival_rule(&self, interface: &str) -> Result<bool, NetworkError> {
        check_interface_name(interface)?;
        self.add_rule(interface, &rule::arrival(interface))
    }

    /// Removes the rule of [`Self::add_arrival_rule`]; returns whether there was one.
    ///
    /// # Errors
    /// The kernel refused, or would remove another program's rule.
    pub fn delete_arrival_rule(&self, interface: &str) -> Result<bool, NetworkError> {
        self.delete_rule(interface, &rule::arrival(interface))
    }

    /// The interfaces whose arrivals are directed to the arrival table.
    ///
    /// # Errors
    /// The kernel does not respond.
    pub fn arrival_interfaces(&self) -> Result<Vec<String>, NetworkError> {
        let rules = self.rules()?;
        let interfaces = rules.iter().filter_map(|it| {
            rule::interface(it).filter(|name| rule::is_same(it, &rule::arrival(name)))
        });
        Ok(interfaces.map(str::to_owned).collect())
    }

    /// Adds rules before the arrival rule that let no RDMA packet through to an address which the host does not have.
    ///
    /// # Errors
    /// The kernel refused, or takes another program's rule for one of these.
    pub fn add_rdma_guard(&self, interface: &str) -> Result<(), NetworkError> {
        check_interface_name(interface)?;
        // What drops comes first: no moment lets such a packet through.
        let mut rules = rule::guard(interface).into_iter().rev();
        rules.try_for_each(|made| self.add_rule(interface, &made).map(drop))
    }

    /// Whether all rules of [`Self::add_rdma_guard`] are there.
    ///
    /// # Errors
    /// The kernel does not respond.
    pub fn has_rdma_guard(&self, interface: &str) -> Result<bool, NetworkError> {
        let rules = self.rules()?;
        let is_there = |made| rules.iter().any(|found| rule::is_same(found, made));
        Ok(rule::guard(interface).iter().all(is_there))
    }

    /// Removes the rules of [`Self::add_rdma_guard`], the dropping one last; returns whether there were any.
    ///
    /// # Errors
    /// The kernel refused, or would remove another program's rule.
    pub fn delete_rdma_guard(&self, interface: &str) -> Result<bool, NetworkError> {
        let mut was_there = false;
        for made in rule::guard(interface) {
            was_there |= self.delete_rule(interface, &made)?;
        }
        Ok(was_there)
    }

    fn rules(&self) -> Result<Vec<RuleMessage>, NetworkError> {
        let request = self.handle.rule().get(IpVersion::V6);
        self.execute(|| "list the rules".to_owned(), request.execute().try_collect())
    }

    /// Adds a rule; returns whether it is new.
    fn add_rule(&self, interface: &str, made: &RuleMessage) -> Result<bool, NetworkError> {
        let mut request = self.handle.rule().add();
        *request.message_mut() = made.clone();
        match self.execute(|| format!("add a rule of {interface}"), request.execute()) {
            Ok(()) => Ok(true),
            Err(NetworkError::Netlink { source, .. })
                if source.kind() == io::ErrorKind::AlreadyExists =>
            {
                // For the kernel, one with another source is the same.
                if self.rules()?.iter().any(|found| rule::is_same(found, made)) {
                    Ok(false)
                } else {
                    Err(foreign(interface, rule::priority(made)))
                }
            }
            Err(error) => Err(error),
        }
    }

    /// Removes a rule; returns whether it was there.
    fn delete_rule(&self, interface: &str, made: &RuleMessage) -> Result<bool, NetworkError> {
        let rules = self.rules()?;
        if !rules.iter().any(|found| rule::is_same(found, made)) {
            return Ok(false);
        }
        if let Some(priority) = rule::in_the_way(&rules, made) {
            return Err(foreign(interface, Some(priority)));
        }
        let request = self.handle.rule().del(made.clone());
        existed(self.execute(|| format!("remove a rule of {interface}"), request.execute()))
    }
}

fn foreign(interface: &str, priority: Option<u32>) -> NetworkError {
    let priority = priority.unwrap_or_default();
    NetworkError::ForeignRule { interface: interface.to_owned(), priority }
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
