//! Computes the desired tables of each switch from the nodes.
//!
//! A switch forwards to its own endpoints by their node ids and MAC addresses. To the endpoints of another
//! switch it forwards by one prefix per space and block of node ids, to the gateway's MAC address, so that the
//! next switch decides in the same way.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use bluebridge_p4::pipeline::{Action, Forward, Key, SwitchPort, WeightedForward};
use bluebridge_wire::address::NODE_PREFIX_LEN;
use bluebridge_wire::{NodeId, Space};

use super::moved::MovedUse;
use super::tables::{Body, Tables};
use super::topology::BLOCK_NODES;
use super::{
    Attached, ControllerPort, Core, Endpoints, FLOOD_GROUP, GATEWAY_MAC, Node, NodeRecord,
    PORT_MAX, Place, Ports, SwitchId, weight,
};

/// The length of the directory's prefix of a block of node ids: the scope, and the first bits of the node.
#[expect(clippy::cast_possible_truncation, reason = "at most 16 bits of a node id are left out")]
const BLOCK_PREFIX_LEN: u8 = NODE_PREFIX_LEN - BLOCK_NODES.trailing_zeros() as u8;

/// The directory's key for all of a node's locations.
pub(crate) const fn node_prefix(space: Space, NodeId(node): NodeId) -> Key {
    // The key is scope ++ node ++ location, 32 + 16 + 64 bits.
    let prefix = (space.scope() as u128) << 80 | (node as u128) << 64;
    Key::Directory { prefix, prefix_len: NODE_PREFIX_LEN }
}

/// The directory's key for all nodes of the block of a node.
pub(crate) const fn block_prefix(space: Space, NodeId(node): NodeId) -> Key {
    let block = node / BLOCK_NODES * BLOCK_NODES;
    let prefix = (space.scope() as u128) << 80 | (block as u128) << 64;
    Key::Directory { prefix, prefix_len: BLOCK_PREFIX_LEN }
}

/// How the frames of a switch reach an endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Route {
    /// The port through which they leave.
    pub(super) port: SwitchPort,
    /// Whether the endpoint is connected there. Otherwise the port leads to another switch.
    pub(super) is_local: bool,
}

impl Core {
    /// The desired tables of a switch for the present state.
    #[must_use]
    pub fn desired(&self, switch: SwitchId) -> Tables {
        self.desired_with_use(switch).0
    }

    /// As [`Self::desired`], with how much of `directory` pages that moved need.
    #[must_use]
    pub fn desired_with_use(&self, switch: SwitchId) -> (Tables, MovedUse) {
        let mut tables = Tables::default();
        for node in self.nodes.values() {
            if let Some(route) = self.route(switch, node) {
                self.add_node(&mut tables, node, route);
            }
        }
        self.add_deputies(&mut tables, switch);
        let moved = self.add_moved(&mut tables, switch);
        self.add_counting(&mut tables, switch);
        for space in self.spaces.keys() {
            self.add_anycast(&mut tables, switch, Space(*space));
        }
        self.add_flood(&mut tables, switch);
        // After the endpoints' entries: a record of an older controller may claim the same address.
        if let Some(ControllerPort { place, mac }) = self.config.own_port
            && let Some(port) = self.port_toward(switch, place)
        {
            let forward = Action::Forward(Forward { port, dst_mac: mac });
            tables.entries.insert(Key::L2 { dst_mac: mac }, Body::new(forward));
        }
        let rules = self.config.redirects.notify_rules();
        for rule in self.config.notify.iter().chain(&rules) {
            tables.entries.insert(rule.key(), Body::new(Action::CopyToController));
            tables.notify_session = true;
        }
        (tables, moved)
    }

    /// The endpoints that a switch should have entries for.
    #[must_use]
    pub fn endpoints(&self, switch: SwitchId) -> Endpoints {
        let with_route = self.nodes.values().filter_map(|node| {
            let Route { port, is_local } = self.route(switch, node)?;
            Some((node.record.id(), Attached::new(&node.record, port, is_local)))
        });
        with_route.collect()
    }

    /// How a switch reaches an attached node, if all ports on the way exist, as far as known.
    pub(super) fn route(&self, switch: SwitchId, node: &Node) -> Option<Route> {
        let place = self.place(&node.record).filter(|_| node.record.attached)?;
        if !self.may_exist(place) {
            return None;
        }
        let port = self.port_toward(switch, place)?;
        Some(Route { port, is_local: place.switch == switch })
    }

    /// The port of a switch through which a place is reached, if the switch has it, as far as known.
    fn port_toward(&self, switch: SwitchId, place: Place) -> Option<SwitchPort> {
        let port = self.config.topology.port_toward(switch, place);
        self.may_exist(Place { switch, port }).then_some(port)
    }

    /// Whether a port may exist; true if the switch does not list its ports.
    pub(super) fn may_exist(&self, Place { switch, port }: Place) -> bool {
        match self.ports(switch) {
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

    fn add_node(&self, tables: &mut Tables, node: &Node, route: Route) {
        let record = &node.record;
        let (space, dst_mac) = (record.space(), record.mac());
        let Route { port, is_local } = route;
        let src_scope = space.scope();
        let guard = Key::IngressGuard { port, src_scope, src_node: record.node };
        tables.entries.insert(guard, Body::new(Action::Allow));
        let to_endpoint = Action::Forward(Forward { port, dst_mac });
        tables.entries.insert(Key::L2 { dst_mac }, Body::new(to_endpoint.clone()));
        let (prefix, action, copies_mac) = if is_local {
            (node_prefix(space, record.id()), to_endpoint, dst_mac)
        } else {
            let to_switch = Action::Forward(Forward { port, dst_mac: GATEWAY_MAC });
            (self.remote_prefix(record), to_switch, GATEWAY_MAC)
        };
        tables.entries.insert(prefix, Body::new(action));
        tables.entries.insert(Key::PortMac { port }, Body::new(Action::SetDstMac(copies_mac)));
        if let Some(group) = self.group_of(space).filter(|_| record.notices) {
            let multicast = Key::Multicast { dst_scope: src_scope };
            tables.entries.insert(multicast, Body::new(Action::SetMulticastGroup { group }));
            tables.groups.entry(group).or_default().insert(port);
        }
    }

    /// The prefix by which another switch reaches an endpoint: that of its block. An endpoint that
    /// moved to another switch, and kept its id, has a longer one of its own.
    fn remote_prefix(&self, record: &NodeRecord) -> Key {
        let block = self.place(record).map(|place| self.config.topology.block(place.switch));
        if block.is_some_and(|block| block.contains(&record.node)) {
            return block_prefix(record.space(), record.id());
        }
        node_prefix(record.space(), record.id())
    }

    /// The nodes from which a switch chooses for a space's anycast, with their weights, in order of their ids:
    /// those of the nearest switches that have any. Each switch on the way is nearer than the one before it, so
    /// a request cannot go back and forth between two of them.
    #[must_use]
    pub fn anycast_members(&self, switch: SwitchId, space: Space) -> Vec<(NodeId, u16)> {
        let candidates = || {
            let of_space =
                self.nodes.values().filter(|node| node.record.space() == space && node.live);
            let of_space = of_space.filter(|node| !self.migrations.is_draining(node.record.id()));
            of_space.filter_map(|node| {
                let level = node.record.level?;
                self.route(switch, node)?;
                let distance =
                    self.config.topology.distance(switch, self.place(&node.record)?.switch);
                Some((distance, level, node.record.id()))
            })
        };
        let Some(nearest) = candidates().map(|(distance, ..)| distance).min() else {
            return Vec::new();
        };
        let mut levels: Vec<(u8, NodeId)> = candidates()
            .filter(|(distance, ..)| *distance == nearest)
            .map(|(_, level, id)| (level, id))
            .collect();
        if levels.len() > weight::SLOTS {
            levels.sort_by_key(|(level, id)| (Reverse(*level), *id));
            levels.truncate(weight::SLOTS);
            levels.sort_by_key(|(_, id)| *id);
        }
        let weights = weight::weights(&levels.iter().map(|(level, _)| *level).collect::<Vec<_>>());
        levels.into_iter().map(|(_, id)| id).zip(weights).collect()
    }

    /// The share of a node in the anycast of its own switch, 0 for none.
    #[must_use]
    pub fn anycast_weight(&self, node: &Node) -> u16 {
        let Some(place) = self.place(&node.record) else { return 0 };
        let members = self.anycast_members(place.switch, node.record.space());
        let own = members.into_iter().find(|(member, _)| *member == node.record.id());
        own.map_or(0, |(_, weight)| weight)
    }

    fn add_anycast(&self, tables: &mut Tables, switch: SwitchId, space: Space) {
        let mut weights: BTreeMap<Forward, u16> = BTreeMap::new();
        let mut order = Vec::new();
        for (id, weight) in self.anycast_members(switch, space) {
            let Some(node) = self.nodes.get(&id) else { continue };
            let Some(Route { port, is_local }) = self.route(switch, node) else { continue };
            let dst_mac = if is_local { node.record.mac() } else { GATEWAY_MAC };
            let forward = Forward { port, dst_mac };
            if !weights.contains_key(&forward) {
                order.push(forward);
            }
            *weights.entry(forward).or_default() += weight;
        }
        if !order.is_empty() {
            let member = |forward| WeightedForward { forward, weight: weights[&forward] };
            let members = order.into_iter().map(member).collect();
            let key = Key::Anycast { dst_scope: space.scope() };
            tables.entries.insert(key, Body::new(Action::Select(members)));
        }
    }

    /// Traffic outside the fabric is flooded to every port, unless its MAC address is known.
    fn add_flood(&self, tables: &mut Tables, switch: SwitchId) {
        let ports = self.flood_ports(switch);
        if !ports.is_empty() {
            tables.groups.insert(FLOOD_GROUP, ports);
            tables.flood_group = Some(FLOOD_GROUP);
        }
    }

    /// The ports to flood through: those that the switch lists, or all that the controller uses.
    pub(super) fn flood_ports(&self, switch: SwitchId) -> BTreeSet<SwitchPort> {
        if let Ports::Listed(ports) = self.ports(switch) {
            return ports.keys().copied().collect();
        }
        let attached = self.nodes.values().filter(|node| node.record.attached);
        let places = attached.filter_map(|node| self.place(&node.record));
        let own = self.config.own_port.map(|own| own.place);
        let configured = self.config.ports.iter().copied().chain(own);
        let of_switch = places.chain(configured).filter(|place| place.switch == switch);
        of_switch.map(|place| place.port).chain(self.config.topology.trunks(switch)).collect()
    }
}
