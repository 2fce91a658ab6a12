//! Assigns nodes to endpoints that join.

use std::time::Instant;

use bluebridge_p4::pipeline::{MacAddr, SwitchPort};
use bluebridge_wire::{ArenaGeneration, MTU_MIN, NodeId, Space};

use super::record::{Carrier, Change, NodeRecord, Role, SpaceRecord};
use super::{
    Core, FLOOD_GROUP, GATEWAY_MAC, GROUP_PORTS_MAX, GROUPS_MAX, MemberChange, MemberEvent, Node,
    PORT_MAX, Place, Ports, SwitchId, weight,
};

/// Arena generations that a memory node gets when it joins. Few, because unused ones are lost when it
/// joins again; it requests more before it needs them.
const JOIN_GENERATIONS: u16 = 2;

/// The port to which an endpoint is connected, as it states.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Attachment {
    /// That of the switch's interface of this name.
    Interface(String),
    /// This port.
    Port(SwitchPort),
}

/// The result of an endpoint's earlier join.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Previous {
    /// Its node id.
    pub node: NodeId,
    /// Its token.
    pub token: [u8; 16],
    /// The first generation of its arena's contents, if it still has them.
    pub contents: Option<ArenaGeneration>,
}

/// The request of an endpoint to join.
#[derive(Clone, Debug)]
pub struct Join {
    /// Its name.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// The space to join.
    pub space: Space,
    /// Its MAC address.
    pub mac: MacAddr,
    /// The name of the switch to which it is connected; may be empty if there is only one.
    pub switch: String,
    /// The switch's port to which it is connected.
    pub attachment: Attachment,
    /// Pages that it can hold.
    pub capacity_pages: u64,
    /// Its serving cores.
    pub shard_count: u16,
    /// How it sends and receives.
    pub carrier: Carrier,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// The same in every attempt of this join.
    pub nonce: u64,
    /// The result of its earlier join.
    pub previous: Option<Previous>,
    /// Whether it requests the space's notices.
    pub notices: bool,
}

/// The result of a join: the endpoint's record.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Assigned(pub NodeRecord);

/// Why a join was refused.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The caller's request breaks a rule.
    #[error("{0}")]
    Invalid(&'static str),
    /// A name in the caller's request breaks a rule.
    #[error("{given} is not {what}; it must have {rule}")]
    BadName {
        /// What it should be a name of.
        what: &'static str,
        /// The name, escaped and shortened.
        given: String,
        /// The rule.
        rule: &'static str,
    },
    /// The name belongs permanently to another endpoint, with another role or space.
    #[error("the name {name} belongs to {owner}; choose another name")]
    NameBelongs {
        /// The name.
        name: String,
        /// Its owner.
        owner: String,
    },
    /// A live endpoint has it. Temporary: it may become silent.
    #[error("{what} is in use by the live endpoint {by}; end that one or choose another")]
    Taken {
        /// The contested name, port or address.
        what: String,
        /// The endpoint that has it.
        by: String,
    },
    /// A server answers for the caller, which was gone, and was told to end that. Temporary.
    #[error(
        "the memory server {by} answers for {name}, which was drained and gone, and has not confirmed yet that it stops; \
         try again, and if this goes on, see the log of {by}"
    )]
    Deputized {
        /// The caller's name.
        name: String,
        /// Its deputy.
        by: String,
    },
    /// The caller claims an address or port of the infrastructure, and would get its
    /// traffic.
    #[error(
        "{what} is reserved for {owner}; join with the endpoint's own interface, port and MAC address"
    )]
    Reserved {
        /// The claimed address or port.
        what: String,
        /// Its owner.
        owner: &'static str,
    },
    /// The caller's arena is another endpoint's.
    #[error(
        "the contents of the server's memory are those of {owner} (node {node}), not of {name}"
    )]
    ContentsOfOther {
        /// The node.
        node: u16,
        /// The endpoint whose contents they are.
        owner: String,
        /// The caller's name.
        name: String,
    },
    /// The caller's arena has a token that its node no longer has.
    #[error(
        "the contents of the server's memory are of node {node} with another token than {name} has now: {name} \
         began empty since, or they are from another rack"
    )]
    ContentsOfPast {
        /// The node.
        node: u16,
        /// The caller's name.
        name: String,
    },
    /// The caller's arena is of a node that this rack does not have.
    #[error(
        "the contents of the server's memory are of node {node} and not from this rack, or its controller lost its \
         store"
    )]
    ContentsUnknown {
        /// The node.
        node: u16,
    },
    /// The caller's arena has contents that the node no longer has.
    #[error(
        "the contents of the server's memory are outdated: they are of generation {given} of node {node}, which has \
         had generation {current} since"
    )]
    OutdatedContents {
        /// The node.
        node: u16,
        /// The first generation of the arena's contents.
        given: u16,
        /// The first generation of the node's contents.
        current: u16,
    },
    /// The switch does not have the caller's port or interface.
    #[error("the switch has no {0}")]
    NoSuchPort(String),
    /// There is no such switch, or the caller named none of several.
    #[error("{given} is not one of the switches; choose from {known}")]
    NoSuchSwitch {
        /// The given name, escaped and shortened.
        given: String,
        /// The names of all switches.
        known: String,
    },
    /// The switch was not reached yet, so its ports are unknown. Temporary.
    #[error("the switch was not reached yet, so {0} is unknown; try again")]
    PortsUnknown(String),
    /// The space has as many endpoints as a switch can copy notices to. Temporary: one may leave.
    #[error(
        "space {space} has {most} endpoints, which is the maximum; end one or use another space"
    )]
    SpaceFull {
        /// The space.
        space: u16,
        /// The most endpoints of a space.
        most: usize,
    },
    /// The rack has used up its node ids, incarnations or groups.
    #[error("the rack has no {0} left")]
    Exhausted(&'static str),
}

impl Core {
    /// Assigns a node to an endpoint, or the same node again. `token` is a new secret; the endpoint gets it
    /// unless it shows the token of its predecessor.
    ///
    /// # Errors
    /// [`JoinError`]; nothing changed.
    pub fn join(
        &mut self,
        now: Instant,
        join: &Join,
        token: [u8; 16],
    ) -> Result<Assigned, JoinError> {
        check_shape(join)?;
        let known = self.names.get(&join.name).copied();
        let place = self.resolve(join, known)?;
        self.check_reserved(join.mac, place)?;
        let same = self.check_name(join, place, known)?;
        if let Some(assigned) = same.and_then(|id| self.repeated(join, place, id)) {
            return Ok(assigned);
        }
        let replaced = self.conflicts(join, place, same)?;
        self.check_room(join.space, place.switch, same, &replaced)?;
        self.check_flood(place, same, &replaced)?;
        let group = self.group_for(join.space)?;
        self.check_deputy(now, join, same)?;
        let mut record = self.identity(now, join, place.switch, same, token)?;
        let kept = keeps_contents(join);
        if !kept {
            record.level = weight::level(join.capacity_pages, None);
        }
        record.attached = true;
        record.nonce = join.nonce;
        record.space = join.space.0;
        record.mac = join.mac.0;
        self.config.topology.name(place.switch).clone_into(&mut record.switch);
        record.port = place.port.0;
        record.carrier = join.carrier;
        record.mtu = join.mtu;
        record.shard_count = join.shard_count;
        record.capacity_pages = join.capacity_pages;
        record.notices = join.notices;
        for id in replaced {
            self.detach(now, id, MemberChange::Replaced);
        }
        if let Some(group) = group {
            self.take_group(join.space, group);
        }
        self.attach(now, known, record.clone());
        if let Some(node) = self.nodes.get_mut(&record.id()).filter(|_| !kept) {
            // Nothing is allocated yet; the level is only an estimate.
            node.free_pages = (record.role == Role::Memory).then_some(record.capacity_pages);
            node.reported_pages = node.free_pages.unwrap_or(0);
        }
        Ok(Assigned(record))
    }

    /// A server whose deputy still answers for it must wait until that one has ended, or both would say where pages are.
    fn check_deputy(
        &mut self,
        now: Instant,
        join: &Join,
        same: Option<NodeId>,
    ) -> Result<(), JoinError> {
        let Some(deputy) = same.and_then(|id| self.migrations.returns(now, id)) else {
            return Ok(());
        };
        Err(JoinError::Deputized { name: join.name.clone(), by: self.migrations.name(deputy) })
    }

    fn resolve(&self, join: &Join, known: Option<NodeId>) -> Result<Place, JoinError> {
        let topology = &self.config.topology;
        let switch = topology.find(&join.switch).ok_or_else(|| JoinError::NoSuchSwitch {
            given: quoted(&join.switch),
            known: topology.switches().map(|it| topology.name(it)).collect::<Vec<_>>().join(", "),
        })?;
        Ok(Place { switch, port: self.resolve_port(switch, join, known)? })
    }

    fn resolve_port(
        &self,
        switch: SwitchId,
        join: &Join,
        known: Option<NodeId>,
    ) -> Result<SwitchPort, JoinError> {
        let name = |port: SwitchPort| format!("port {}", port.0);
        match (self.ports(switch), &join.attachment) {
            (Ports::Listed(ports), Attachment::Port(port)) => {
                ports.contains_key(port).then_some(*port).ok_or(JoinError::NoSuchPort(name(*port)))
            }
            (Ports::Listed(ports), Attachment::Interface(interface)) => ports
                .iter()
                .find_map(|(port, known)| (known == interface).then_some(*port))
                .ok_or_else(|| JoinError::NoSuchPort(format!("interface {interface}"))),
            (Ports::Unlisted, Attachment::Port(port)) => Ok(*port),
            (Ports::Unlisted, Attachment::Interface(_)) => Err(JoinError::Invalid(
                "this switch does not report the names of its interfaces; use the port's number",
            )),
            // The endpoint may be back earlier than the switch, at the port that it had before.
            (Ports::Unknown, Attachment::Port(port)) => {
                let record = known.and_then(|id| self.nodes.get(&id)).map(|node| &node.record);
                let place = Some(Place { switch, port: *port });
                let back = record.is_some_and(|record| {
                    record.attached && self.place(record) == place && record.mac() == join.mac
                });
                back.then_some(*port).ok_or(JoinError::PortsUnknown(name(*port)))
            }
            (Ports::Unknown, Attachment::Interface(interface)) => {
                Err(JoinError::PortsUnknown(format!("interface {interface}")))
            }
        }
    }

    /// Refuses reserved addresses and ports: an `l2` entry for the controller's address would lead
    /// all control traffic to the endpoint.
    fn check_reserved(&self, mac: MacAddr, place: Place) -> Result<(), JoinError> {
        let address = || format!("the MAC address {mac}");
        if mac == GATEWAY_MAC {
            let owner = "the gateway, to which every host sends pointers";
            return Err(JoinError::Reserved { what: address(), owner });
        }
        let port = || self.port_words(place);
        if self.config.topology.is_trunk(place) {
            return Err(JoinError::Reserved { what: port(), owner: "a link to another switch" });
        }
        match self.config.own_port {
            Some(own) if own.mac == mac => {
                Err(JoinError::Reserved { what: address(), owner: "the controller" })
            }
            Some(own) if own.place == place => {
                Err(JoinError::Reserved { what: port(), owner: "the controller" })
            }
            _ => Ok(()),
        }
    }

    /// The existing node that the caller continues, if any.
    fn check_name(
        &self,
        join: &Join,
        place: Place,
        known: Option<NodeId>,
    ) -> Result<Option<NodeId>, JoinError> {
        let claims_contents = join.previous.filter(|previous| previous.contents.is_some());
        let Some(node) = known.and_then(|id| self.nodes.get(&id)) else {
            return claims_contents
                .map_or(Ok(None), |previous| Err(self.not_its_contents(join, &previous)));
        };
        let record = &node.record;
        let proven = proves(join, record);
        if let Some(previous) = claims_contents.filter(|_| !proven) {
            return Err(self.not_its_contents(join, &previous));
        }
        // The node may have had other contents meanwhile: those that are shown are outdated.
        let shown = claims_contents.and_then(|previous| previous.contents);
        if let Some(given) = shown.filter(|given| given.number() != record.generation) {
            let (node, current) = (record.node, record.generation);
            return Err(JoinError::OutdatedContents { node, given: given.number(), current });
        }
        // One interface carries one endpoint, so a caller from the same one is its successor.
        let same_interface = self.place(record) == Some(place) && record.mac() == join.mac;
        if node.live && !proven && !same_interface {
            let what = format!("the name {}", join.name);
            let port = self
                .place(record)
                .map_or_else(String::new, |it| format!(" at {}", self.port_words(it)));
            let by = format!("node {}{port}", record.node);
            return Err(JoinError::Taken { what, by });
        }
        let same_kind = record.role == join.role && record.space() == join.space;
        match (same_kind, record.role) {
            (true, _) => Ok(Some(record.id())),
            // The name of a client that is gone is free; that of a memory node stands for its pages.
            (false, Role::Client) => claims_contents
                .map_or(Ok(None), |previous| Err(self.not_its_contents(join, &previous))),
            (false, Role::Memory) => Err(JoinError::NameBelongs {
                name: join.name.clone(),
                owner: format!("a memory node of space {}", record.space),
            }),
        }
    }

    /// Why the contents of the caller's arena are not those of its name. Only a caller that shows the token of an
    /// endpoint learns whose it is.
    fn not_its_contents(&self, join: &Join, previous: &Previous) -> JoinError {
        let (node, name) = (previous.node.0, join.name.clone());
        match self.nodes.get(&previous.node).map(|node| &node.record) {
            Some(record) if record.name == name && record.role == Role::Memory => {
                JoinError::ContentsOfPast { node, name }
            }
            Some(record) if record.name != name && proves(join, record) => {
                JoinError::ContentsOfOther { node, owner: record.name.clone(), name }
            }
            _ => JoinError::ContentsUnknown { node },
        }
    }

    /// The response to a join whose first response was lost.
    fn repeated(&self, join: &Join, place: Place, id: NodeId) -> Option<Assigned> {
        let record = &self.nodes.get(&id)?.record;
        let same = record.attached
            && record.nonce == join.nonce
            && self.place(record) == Some(place)
            && record.mac() == join.mac;
        same.then(|| Assigned(record.clone()))
    }

    /// The silent endpoints that must be removed for this join.
    fn conflicts(
        &self,
        join: &Join,
        place: Place,
        same: Option<NodeId>,
    ) -> Result<Vec<NodeId>, JoinError> {
        let mut silent = Vec::new();
        for (id, node) in &self.nodes {
            let record = &node.record;
            let at_same_port = self.place(record) == Some(place);
            let clash = at_same_port || record.mac() == join.mac;
            let namesake = record.name == join.name;
            if !record.attached || Some(*id) == same || !(clash || namesake) {
                continue;
            }
            if node.live && !namesake {
                let what = if at_same_port {
                    self.port_words(place)
                } else {
                    format!("the MAC address {}", join.mac)
                };
                return Err(JoinError::Taken { what, by: record.name.clone() });
            }
            silent.push(*id);
        }
        Ok(silent)
    }

    /// Checks that the space's group in the switch has room for one more port: every attached endpoint has its
    /// own port, and links to other switches may be in every group.
    fn check_room(
        &self,
        space: Space,
        switch: SwitchId,
        same: Option<NodeId>,
        replaced: &[NodeId],
    ) -> Result<(), JoinError> {
        let stays = |id: &NodeId| Some(*id) != same && !replaced.contains(id);
        let is_here = |record| self.place(record).is_some_and(|place| place.switch == switch);
        let others = self.nodes.iter().filter(|(id, Node { record, .. })| {
            record.attached && record.space() == space && stays(id) && is_here(record)
        });
        let most = GROUP_PORTS_MAX.saturating_sub(self.config.topology.trunks(switch).count());
        if others.count() < most {
            return Ok(());
        }
        Err(JoinError::SpaceFull { space: space.0, most })
    }

    /// Checks that the flood's group has room for the port, if the switch does not list its ports.
    fn check_flood(
        &self,
        place: Place,
        same: Option<NodeId>,
        replaced: &[NodeId],
    ) -> Result<(), JoinError> {
        if matches!(self.ports(place.switch), Ports::Listed(_)) {
            return Ok(());
        }
        let mut ports = self.flood_ports(place.switch);
        for id in same.iter().chain(replaced) {
            let left = self.nodes.get(id).and_then(|node| self.place(&node.record));
            ports.retain(|port| left != Some(Place { port: *port, ..place }));
        }
        ports.insert(place.port);
        if ports.len() <= GROUP_PORTS_MAX {
            return Ok(());
        }
        Err(JoinError::Exhausted("ports in the flood group"))
    }

    /// The group that a space still needs; `None` if it has one.
    fn group_for(&self, space: Space) -> Result<Option<u16>, JoinError> {
        if self.spaces.contains_key(&space.0) {
            return Ok(None);
        }
        let mut used: Vec<u16> = self.spaces.values().copied().collect();
        used.sort_unstable();
        let free = (FLOOD_GROUP + 1..=GROUPS_MAX).find(|group| used.binary_search(group).is_err());
        let recycled = || self.spaces.iter().find(|(space, _)| self.is_empty(**space));
        free.or_else(|| recycled().map(|(_, group)| *group))
            .map(Some)
            .ok_or(JoinError::Exhausted("multicast groups (one per space)"))
    }

    fn is_empty(&self, space: u16) -> bool {
        !self.nodes.values().any(|node| node.record.attached && node.record.space == space)
    }

    fn take_group(&mut self, space: Space, group: u16) {
        if let Some(former) = self.spaces.iter().find(|(_, g)| **g == group).map(|(s, _)| *s) {
            self.spaces.remove(&former);
            self.changes.push(Change::SpaceGone(former));
        }
        self.spaces.insert(space.0, group);
        self.changes.push(Change::Space(SpaceRecord { space: space.0, group }));
    }

    /// A record with the next incarnation, generation and epoch.
    fn identity(
        &self,
        now: Instant,
        join: &Join,
        switch: SwitchId,
        same: Option<NodeId>,
        token: [u8; 16],
    ) -> Result<NodeRecord, JoinError> {
        if let Some(record) = same.and_then(|id| self.nodes.get(&id)).map(|node| &node.record) {
            let kept = keeps_contents(join);
            let generations = match join.role {
                Role::Memory if !kept => next_generations(record),
                _ => Some((record.generation, record.last_generation)),
            };
            // A node whose generations are used up becomes a new one.
            if let Some((generation, last_generation)) = generations {
                // A caller without the token must not get it: the holder uses it as well.
                let token = if proves(join, record) { record.token } else { token };
                return Ok(NodeRecord { generation, last_generation, token, ..succeed(record)? });
            }
        }
        let (generation, last_generation) = match join.role {
            Role::Client => (0, 0),
            Role::Memory => {
                (self.first_generation, last_of(self.first_generation, JOIN_GENERATIONS))
            }
        };
        let fresh = NodeRecord {
            node: 0,
            name: join.name.clone(),
            role: join.role,
            space: join.space.0,
            incarnation: 1,
            first_incarnation: 1,
            generation,
            last_generation,
            range_epoch: 1,
            token,
            nonce: join.nonce,
            mac: join.mac.0,
            switch: String::new(),
            port: 0,
            carrier: join.carrier,
            mtu: join.mtu,
            shard_count: join.shard_count,
            capacity_pages: join.capacity_pages,
            level: None,
            attached: false,
            retired: false,
            notices: false,
        };
        if join.role == Role::Client
            && let Some(rested) = self.quarantined_client(now, switch)
        {
            let record = succeed(rested)?;
            let (node, incarnation) = (record.node, record.incarnation);
            // The client may get an id again that it had before it joined in another space.
            let was_its_own = record.name == join.name && record.space() == join.space;
            return Ok(NodeRecord {
                node,
                incarnation,
                first_incarnation: if was_its_own { record.first_incarnation } else { incarnation },
                range_epoch: record.range_epoch,
                ..fresh
            });
        }
        let node = self.unused_id(join.role, switch).ok_or(JoinError::Exhausted("node ids"))?;
        Ok(NodeRecord { node: node.0, ..fresh })
    }

    /// The client's id of the switch's block with the longest quarantine, if it is over.
    fn quarantined_client(&self, now: Instant, switch: SwitchId) -> Option<&NodeRecord> {
        let block = self.config.topology.block(switch);
        let gone = self
            .nodes
            .values()
            .filter(|node| block.contains(&node.record.node))
            .filter(|node| node.record.role == Role::Client && !node.record.attached)
            .filter(|node| node.record.incarnation != u32::MAX);
        let oldest = gone.min_by_key(|node| node.gone_since)?;
        let rest = now.saturating_duration_since(oldest.gone_since);
        (rest >= self.config.client_quarantine).then_some(&oldest.record)
    }

    /// Memory nodes are numbered from below, clients from above, in the block of their switch. If that is full,
    /// any other id will do.
    fn unused_id(&self, role: Role, switch: SwitchId) -> Option<NodeId> {
        let unused = |id: &u16| !self.nodes.contains_key(&NodeId(*id));
        let mut block = self.config.topology.block(switch);
        let mut all = 1..=NodeId::ALL.0 - 1;
        let found = match role {
            Role::Memory => block.find(unused).or_else(|| all.find(unused)),
            Role::Client => block.rfind(unused).or_else(|| all.rfind(unused)),
        };
        found.map(NodeId)
    }

    fn attach(&mut self, now: Instant, known: Option<NodeId>, record: NodeRecord) {
        let id = record.id();
        if let Some(former) = known.filter(|former| *former != id) {
            self.retire(now, former);
        }
        // An id in quarantine had another name.
        if let Some(former) = self.nodes.get(&id).map(|node| node.record.name.clone())
            && self.names.get(&former) == Some(&id)
        {
            self.names.remove(&former);
        }
        self.names.insert(record.name.clone(), id);
        self.events.push(MemberEvent::new(MemberChange::Joined, &record));
        let node = Node::restored(record.clone(), now);
        self.nodes.insert(id, node);
        self.migrations.note_server(&record);
        self.changes.push(Change::Node(record));
        self.note(id);
    }

    /// Removes the name from a node, because another node has it from now on.
    fn retire(&mut self, now: Instant, id: NodeId) {
        if let Some(node) = self.nodes.get_mut(&id) {
            node.record.retired = true;
            node.gone_since = now;
            node.live = false;
            node.record.attached = false;
            self.migrations.note_server(&node.record);
            self.changes.push(Change::Node(node.record.clone()));
            self.note(id);
        }
    }
}

/// The first and the last generation of a memory node's next incarnation: after all that were reserved for
/// it. `None` if all are used up.
fn next_generations(record: &NodeRecord) -> Option<(u16, u16)> {
    let next = ArenaGeneration::new(*record.generations().end()).and_then(ArenaGeneration::next);
    next.map(|first| (first.number(), last_of(first.number(), JOIN_GENERATIONS)))
}

/// The last of `count` generations, or the last that exists.
fn last_of(first: u16, count: u16) -> u16 {
    first.saturating_add(count - 1).min(ArenaGeneration::MAX.number())
}

/// Whether the caller's arena still has its contents.
fn keeps_contents(join: &Join) -> bool {
    join.previous.is_some_and(|previous| previous.contents.is_some())
}

/// Whether the caller shows the token of the record.
fn proves(join: &Join, record: &NodeRecord) -> bool {
    join.previous.is_some_and(|shown| shown.node == record.id() && shown.token == record.token)
}

fn succeed(record: &NodeRecord) -> Result<NodeRecord, JoinError> {
    let incarnation = record.incarnation.checked_add(1);
    let range_epoch = record.range_epoch.checked_add(1);
    Ok(NodeRecord {
        incarnation: incarnation.ok_or(JoinError::Exhausted("incarnations"))?,
        range_epoch: range_epoch.ok_or(JoinError::Exhausted("range epochs"))?,
        ..record.clone()
    })
}

/// The longest name of a Linux interface in bytes.
const INTERFACE_NAME_MAX: usize = 15;

/// The most characters of outside text that are quoted.
const QUOTED_MAX: usize = 64;

/// Outside text in quotation marks: control characters are escaped, so that it cannot pretend to be other lines of
/// a log, and the rest of a long text is left out.
fn quoted(text: &str) -> String {
    let mut shown: String = text.chars().take(QUOTED_MAX).collect();
    let is_whole = shown.len() == text.len();
    shown = format!("{shown:?}");
    if !is_whole {
        shown = format!("{shown}... ({} bytes)", text.len());
    }
    shown
}

/// Checks the texts of a join, before any of them is used in an error or log.
pub(crate) fn check_names(join: &Join) -> Result<(), JoinError> {
    if !bluebridge_northbound::is_name(&join.name) {
        let rule = "1 to 64 letters, digits, '.', '_' and '-'";
        return Err(JoinError::BadName { what: "a name", given: quoted(&join.name), rule });
    }
    if let Attachment::Interface(name) = &join.attachment {
        let is_bad = |c: char| c == '/' || c.is_whitespace() || c.is_control();
        if !(1..=INTERFACE_NAME_MAX).contains(&name.len()) || name.contains(is_bad) {
            let rule = "1 to 15 bytes, without '/', spaces and control characters";
            let what = "the name of an interface";
            return Err(JoinError::BadName { what, given: quoted(name), rule });
        }
    }
    Ok(())
}

fn check_shape(join: &Join) -> Result<(), JoinError> {
    check_names(join)?;
    const { assert!(PORT_MAX == 509, "a rule contains it") };
    let is_port = match &join.attachment {
        Attachment::Port(port) => (1..=PORT_MAX).contains(&port.0),
        Attachment::Interface(_) => true,
    };
    let rules = [
        (is_port, "ports of a switch are numbered 1 to 509"),
        (
            join.mac.0[0] & 1 == 0 && join.mac != MacAddr::default(),
            "the MAC address must be that of an interface, not 0 and not a group address",
        ),
        (
            usize::try_from(join.mtu).is_ok_and(|mtu| mtu >= MTU_MIN),
            "the MTU must be at least 1280 bytes",
        ),
        (join.nonce != 0, "the nonce must not be 0"),
        (
            join.role == Role::Client || (1..=256).contains(&join.shard_count),
            "a memory node must have 1 to 256 shards",
        ),
        (
            join.role == Role::Client || join.capacity_pages != 0,
            "a memory node must have at least one page",
        ),
        (
            join.role == Role::Memory || (join.capacity_pages, join.shard_count) == (0, 0),
            "a client must have neither pages nor shards",
        ),
    ];
    rules.iter().find(|(holds, _)| !holds).map_or(Ok(()), |(_, rule)| Err(JoinError::Invalid(rule)))
}
