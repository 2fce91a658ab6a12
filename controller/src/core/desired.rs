//! Computes the desired tables from the nodes.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use bluebridge_p4::pipeline::{Action, Forward, Key, SwitchPort, WeightedForward};
use bluebridge_wire::address::NODE_PREFIX_LEN;
use bluebridge_wire::{NodeId, Space};

use super::tables::{Body, Tables};
use super::{
    Attached, ControllerPort, Core, Endpoints, FLOOD_GROUP, Node, PORT_MAX, Ports, weight,
};

/// The directory's key for all of a node's locations.
pub(crate) const fn node_prefix(space: Space, node: NodeId) -> Key {
    // The key is scope ++ node ++ location, 32 + 16 + 64 bits.
    let prefix = (space.scope() as u128) << 80 | (node.0 as u128) << 64;
    Key::Directory { prefix, prefix_len: NODE_PREFIX_LEN }
}

impl Core {
    /// The desired tables for the present state.
    #[must_use]
    pub fn desired(&self) -> Tables {
        let mut tables = Tables::default();
        for node in self.nodes.values().filter(|node| self.has_entries(node)) {
            add_node(&mut tables, node, self.group_of(node.record.space()));
        }
        for space in self.spaces.keys() {
            self.add_anycast(&mut tables, Space(*space));
        }
        self.add_flood(&mut tables);
        // After the endpoints' entries: a record of an older controller may claim the same address.
        if let Some(ControllerPort { port, mac }) = self.own_port_there() {
            let forward = Action::Forward(Forward { port, dst_mac: mac });
            tables.entries.insert(Key::L2 { dst_mac: mac }, Body::new(forward));
        }
        let rules = self.config.redirects.notify_rules();
        for rule in self.config.notify.iter().chain(&rules) {
            tables.entries.insert(rule.key(), Body::new(Action::CopyToController));
            tables.notify_session = true;
        }
        tables
    }

    /// The endpoints that the switch should have entries for.
    #[must_use]
    pub fn endpoints(&self) -> Endpoints {
        let nodes = self.nodes.values().filter(|node| self.has_entries(node));
        nodes.map(|node| (node.record.id(), Attached::new(&node.record))).collect()
    }

    /// Whether it is an attached node whose port exists, as far as known.
    fn has_entries(&self, node: &Node) -> bool {
        node.record.attached && self.may_exist(node.record.port())
    }

    /// The controller's own port, if the switch has it, as far as known.
    fn own_port_there(&self) -> Option<ControllerPort> {
        self.config.own_port.filter(|own| self.may_exist(own.port))
    }

    /// Whether the switch may have a port; true if it does not list its ports.
    fn may_exist(&self, port: SwitchPort) -> bool {
        match &self.ports {
            Ports::Listed(ports) => ports.contains_key(&port),
            Ports::Unknown | Ports::Unlisted => (1..=PORT_MAX).contains(&port.0),
        }
    }

    /// Whether any endpoint in a space requested notices.
    #[must_use]
    pub fn notices_wanted(&self, space: Space) -> bool {
        let attached = self.nodes.values().filter(|node| node.record.attached);
        attached.map(|node| &node.record).any(|record| record.notices && record.space() == space)
    }

    fn group_of(&self, space: Space) -> Option<u16> {
        self.spaces.get(&space.0).copied()
    }

    /// The nodes from which a space's anycast chooses, with their weights, in order of their ids.
    #[must_use]
    pub fn anycast_members(&self, space: Space) -> Vec<(NodeId, u16)> {
        let mut levels: Vec<(u8, NodeId)> = self
            .nodes
            .values()
            .filter(|node| node.record.space() == space && node.live && self.has_entries(node))
            .filter_map(|node| node.record.level.map(|level| (level, node.record.id())))
            .collect();
        if levels.len() > weight::SLOTS {
            levels.sort_by_key(|(level, id)| (Reverse(*level), *id));
            levels.truncate(weight::SLOTS);
            levels.sort_by_key(|(_, id)| *id);
        }
        let weights = weight::weights(&levels.iter().map(|(level, _)| *level).collect::<Vec<_>>());
        levels.into_iter().map(|(_, id)| id).zip(weights).collect()
    }

    fn add_anycast(&self, tables: &mut Tables, space: Space) {
        let members: Vec<WeightedForward> = self
            .anycast_members(space)
            .into_iter()
            .filter_map(|(id, weight)| {
                let record = &self.nodes.get(&id)?.record;
                let forward = Forward { port: record.port(), dst_mac: record.mac() };
                Some(WeightedForward { forward, weight })
            })
            .collect();
        if !members.is_empty() {
            let key = Key::Anycast { dst_scope: space.scope() };
            tables.entries.insert(key, Body::new(Action::Select(members)));
        }
    }

    /// Traffic outside the fabric is flooded to every port, unless its MAC address is known.
    fn add_flood(&self, tables: &mut Tables) {
        let ports: BTreeSet<SwitchPort> = match &self.ports {
            Ports::Listed(ports) => ports.keys().copied().collect(),
            Ports::Unknown | Ports::Unlisted => {
                let attached = self.nodes.values().filter(|node| node.record.attached);
                let known = attached.map(|node| node.record.port());
                let own = self.config.own_port.map(|own| own.port);
                known.chain(self.config.ports.iter().copied()).chain(own).collect()
            }
        };
        if !ports.is_empty() {
            tables.groups.insert(FLOOD_GROUP, ports);
            tables.flood_group = Some(FLOOD_GROUP);
        }
    }
}

fn add_node(tables: &mut Tables, node: &Node, group: Option<u16>) {
    let record = &node.record;
    let (space, port, dst_mac) = (record.space(), record.port(), record.mac());
    let src_scope = space.scope();
    let forward = Action::Forward(Forward { port, dst_mac });
    let guard = Key::IngressGuard { port, src_scope, src_node: record.node };
    tables.entries.insert(guard, Body::new(Action::Allow));
    tables.entries.insert(node_prefix(space, record.id()), Body::new(forward.clone()));
    tables.entries.insert(Key::L2 { dst_mac }, Body::new(forward));
    tables.entries.insert(Key::PortMac { port }, Body::new(Action::SetDstMac(dst_mac)));
    if let Some(group) = group.filter(|_| record.notices) {
        let multicast = Key::Multicast { dst_scope: src_scope };
        tables.entries.insert(multicast, Body::new(Action::SetMulticastGroup { group }));
        tables.groups.entry(group).or_default().insert(port);
    }
}
