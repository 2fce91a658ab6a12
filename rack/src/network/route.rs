//! Routes and rules, by the requests of [`Netlink`].

use std::io;
use std::net::Ipv6Addr;

use futures::TryStreamExt;
use rtnetlink::packet_route::route::{RouteMessage, RouteScope, RouteType};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use rtnetlink::{IpVersion, RouteMessageBuilder};

use super::netlink::{check_interface_name, existed};
use super::{Netlink, NetworkError};

impl Netlink {
    /// Routes `prefix` through a gateway that need not be reachable by any other route.
    pub fn add_gateway_route(
        &self,
        (prefix, length): (Ipv6Addr, u8),
        gateway: Ipv6Addr,
        interface: &str,
    ) -> Result<(), NetworkError> {
        let route = gateway_route((prefix, length), gateway, self.link(interface)?.index);
        self.ask(
            || format!("route {prefix}/{length} via {gateway} on {interface}"),
            self.handle.route().add(route).replace().execute(),
        )
    }

    /// Removes a route made by [`Self::add_gateway_route`]; says whether there was one.
    pub fn delete_gateway_route(
        &self,
        (prefix, length): (Ipv6Addr, u8),
        gateway: Ipv6Addr,
        interface: &str,
    ) -> Result<bool, NetworkError> {
        let route = gateway_route((prefix, length), gateway, self.link(interface)?.index);
        let request = self.handle.route().del(route);
        existed(self.ask(|| format!("remove the route to {prefix}/{length}"), request.execute()))
    }

    /// Delivers `prefix` locally for those packets that look into `table`.
    pub fn add_local_route(
        &self,
        (prefix, length): (Ipv6Addr, u8),
        table: u32,
    ) -> Result<(), NetworkError> {
        let route = local_route((prefix, length), table, self.link("lo")?.index);
        self.ask(
            || format!("deliver {prefix}/{length} locally in table {table}"),
            self.handle.route().add(route).replace().execute(),
        )
    }

    /// Removes a route made by [`Self::add_local_route`]; says whether there was one.
    pub fn delete_local_route(
        &self,
        (prefix, length): (Ipv6Addr, u8),
        table: u32,
    ) -> Result<bool, NetworkError> {
        let route = local_route((prefix, length), table, self.link("lo")?.index);
        let request = self.handle.route().del(route);
        existed(self.ask(|| format!("remove the local route of table {table}"), request.execute()))
    }

    /// Makes packets for `prefix` that arrive on `interface` look into `table`; says whether the rule is new.
    pub fn add_arrival_rule(
        &self,
        interface: &str,
        (prefix, length): (Ipv6Addr, u8),
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
            .destination_prefix(prefix, length)
            .table_id(table)
            .priority(priority)
            .action(RuleAction::ToTable);
        let asked = self.ask(|| format!("add the rule of {interface}"), request.execute());
        match asked {
            Ok(()) => Ok(true),
            Err(NetworkError::Netlink { source, .. })
                if source.kind() == io::ErrorKind::AlreadyExists =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Removes every rule that sends arrivals on `interface` to `table`; answers how many there were.
    pub fn delete_arrival_rules(&self, interface: &str, table: u32) -> Result<usize, NetworkError> {
        let mut count = 0;
        for rule in self.rules(table)? {
            if rule_interface(&rule) == Some(interface) {
                let request = self.handle.rule().del(rule);
                self.ask(|| format!("remove the rule of {interface}"), request.execute())?;
                count += 1;
            }
        }
        Ok(count)
    }

    /// The interfaces whose arrivals look into `table`.
    pub fn arrival_interfaces(&self, table: u32) -> Result<Vec<String>, NetworkError> {
        let rules = self.rules(table)?;
        Ok(rules.iter().filter_map(rule_interface).map(str::to_owned).collect())
    }

    fn rules(&self, table: u32) -> Result<Vec<RuleMessage>, NetworkError> {
        let request = self.handle.rule().get(IpVersion::V6);
        let rules: Vec<RuleMessage> =
            self.ask(|| "list the rules".to_owned(), request.execute().try_collect())?;
        Ok(rules.into_iter().filter(|rule| rule_table(rule) == table).collect())
    }
}

fn gateway_route((prefix, length): (Ipv6Addr, u8), gateway: Ipv6Addr, index: u32) -> RouteMessage {
    RouteMessageBuilder::<Ipv6Addr>::new()
        .destination_prefix(prefix, length)
        .gateway(gateway)
        .output_interface(index)
        .build()
}

fn local_route((prefix, length): (Ipv6Addr, u8), table: u32, loopback: u32) -> RouteMessage {
    RouteMessageBuilder::<Ipv6Addr>::new()
        .destination_prefix(prefix, length)
        .output_interface(loopback)
        .kind(RouteType::Local)
        .scope(RouteScope::Universe)
        .table_id(table)
        .build()
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
