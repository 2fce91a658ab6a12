//! Pure controller state machine: its inputs are events and the time, its output is the desired state.
//!
//! There is no I/O and no clock here. A call whose change must survive a restart leaves it in
//! [`Core::take_changes`]; the caller stores it before it sends the response.
//!
//! * `join`: which endpoint gets which node; `attached`: the endpoints that the switch has entries for.
//! * `topology`: the switches and their links.
//! * `desired`: the tables that follow; `moved`: those for pages that moved; `tables`: tables as values; `weight`: anycast weights.
//! * `record`: what is stored; `event`: what is logged; `operator`: operators' requests; `drain`: servers that are drained;
//!   `deputy`: who answers for those that are gone;
//!   `rebalance`: memory that moves by itself; `free_lines`: lines that go home because none of their pages is allocated.

mod attached;
mod deputy;
mod desired;
mod drain;
mod event;
mod free_lines;
mod join;
mod moved;
mod operator;
mod rebalance;
mod record;
mod tables;
mod topology;
mod weight;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bluebridge_p4::declaration;
use bluebridge_p4::pipeline::{Key, MacAddr, SwitchPort, Ternary};
use bluebridge_wire::{ArenaGeneration, NodeId, Space, piece_bytes};

use crate::migration::Migrations;
use crate::redirect::{REDIRECT_BUDGET, RedirectPolicy};
pub use attached::{Attached, Endpoints};
pub use drain::DrainStep;
pub use event::{MemberChange, MemberEvent};
pub(crate) use join::check_names;
pub use join::{Assigned, Attachment, Join, JoinError, Previous};
pub use moved::MovedUse;
pub use operator::{Incarnations, Named, OperatorError};
use rebalance::Rebalancing;
pub(crate) use rebalance::directory_counters;
pub use rebalance::{RebalanceStep, RebalanceView, ServerView, SwitchCounters};
pub use record::{Carrier, Change, NodeRecord, Role, SpaceRecord, Stored};
pub use tables::{Body, Tables};
pub(crate) use tables::{compared, entry_words, ports_words};
pub use topology::{LinkEnd, Place, SWITCHES_MAX, SwitchId, Topology, TopologyError};

/// The multicast group through which `l2` floods.
pub const FLOOD_GROUP: u16 = 1;

/// The most multicast groups, including that of the flood.
pub const GROUPS_MAX: u16 = declaration::GROUPS_MAX;

/// The most ports of a multicast group in the embedded switch, and therefore the most endpoints of
/// a space. A larger group would be refused with every plan.
pub const GROUP_PORTS_MAX: usize = declaration::GROUP_PORTS_MAX;

/// The Ethernet address to which every host sends pointers. No interface has it: the switch forwards
/// frames to it by their IPv6 address. No endpoint may have it.
pub const GATEWAY_MAC: MacAddr = MacAddr([0x02, 0xbb, 0x00, 0x00, 0x00, 0x01]);

/// Missing heartbeats after which a node counts as silent.
pub const HEARTBEATS_MISSED: u32 = 3;

/// Missing heartbeats after which another server answers instead of one that has no page: a deputy, or a server that is
/// drained and empty. Both may hang while their connections stay open.
///
/// A heartbeat comes from a thread of its own, which waits for no request and no page, and one that got no response is
/// repeated after at most 250 ms. So a machine that is only loaded would have to give that thread nothing for
/// four seconds, or the network would have to lose more than ten attempts in a row; time in which the controller itself
/// was stopped does not count. It is the default deadline of an operation, and two intervals more than until a server
/// counts as silent. If it happens nevertheless, clients open their sessions again, and nothing is lost.
pub const HEARTBEATS_GONE: u32 = 5;

/// The most arena generations that one heartbeat reserves, so that a caller that requests too many wastes few.
pub const HEARTBEAT_GENERATIONS_MAX: u16 = 64;

/// The greatest number of a port; entries for a greater one cannot be expressed.
pub(crate) const PORT_MAX: u16 = declaration::PORT_MAX;

/// A rule for packets that the controller wants copies of.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct NotifyRule {
    /// The source's command byte, for replies.
    pub src_command: Ternary,
    /// The destination's command byte, for requests.
    pub dst_command: Ternary,
    /// The status, for replies.
    pub src_status: Ternary,
}

impl NotifyRule {
    pub(crate) const fn key(&self) -> Key {
        let Self { src_command, dst_command, src_status } = *self;
        Key::Notify { src_command, dst_command, src_status, priority: 1 }
    }
}

/// How the controller itself is connected to a switch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ControllerPort {
    /// The port that leads to the controller.
    pub place: Place,
    /// The Ethernet address of the controller's interface there.
    pub mac: MacAddr,
}

/// The core's rules.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// The switches, and the links between them.
    pub topology: Topology,
    /// The controller's own port, if endpoints reach it through the switch. No endpoint may have
    /// this port or address. The switches send frames for the address to this port only, and do
    /// not flood the endpoints' control traffic, tokens included, to all of them.
    pub own_port: Option<ControllerPort>,
    /// The interval of heartbeats.
    pub heartbeat_interval: Duration,
    /// The time after which a silent client counts as having left. Memory nodes have no such limit.
    pub client_expiry: Duration,
    /// How long a client's node id is quarantined before another client gets it.
    pub client_quarantine: Duration,
    /// Ports to flood through of a switch that does not list its ports.
    pub ports: Vec<Place>,
    /// Copies in addition to those that redirects need; nothing depends on them.
    pub notify: Vec<NotifyRule>,
    /// The entries that the table `directory` of each switch can hold.
    pub directory_size: usize,
    /// Which leased pages are redirected to their owners.
    pub redirects: RedirectPolicy,
    /// The most redirects, up to [`crate::redirect::REDIRECTS_MAX`].
    pub redirect_budget: usize,
}

impl Default for CoreConfig {
    fn default() -> Self {
        Self {
            topology: Topology::default(),
            own_port: None,
            heartbeat_interval: Duration::from_secs(1),
            client_expiry: Duration::from_secs(600),
            client_quarantine: Duration::from_secs(120),
            ports: Vec::new(),
            notify: Vec::new(),
            directory_size: moved::DIRECTORY_SIZE as usize,
            redirects: RedirectPolicy::default(),
            redirect_budget: REDIRECT_BUDGET,
        }
    }
}

/// The known ports of a switch.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum Ports {
    /// The ports and the names of their interfaces.
    Listed(BTreeMap<SwitchPort, String>),
    /// Unknown: the switch was not reached yet.
    #[default]
    Unknown,
    /// The switch does not list them.
    Unlisted,
}

impl Ports {
    /// What changed since an earlier list, for people: a port that is gone or new, or an interface that has another
    /// number. Without two lists there is nothing to compare.
    #[must_use]
    pub fn changes_since(&self, earlier: &Self) -> Vec<String> {
        let (Self::Listed(before), Self::Listed(after)) = (earlier, self) else {
            return Vec::new();
        };
        let number_in = |ports: &BTreeMap<SwitchPort, String>, name: &str| {
            ports.iter().find(|(_, other)| *other == name).map(|(port, _)| *port)
        };
        let mut changes = Vec::new();
        for (port, name) in before {
            match (number_in(after, name), after.get(port)) {
                (Some(now), _) if now != *port => {
                    changes.push(format!("{name} has the port {}, not {} any more", now.0, port.0));
                }
                (None, None) => changes.push(format!("port {} ({name}) is gone", port.0)),
                (None, Some(other)) => {
                    changes.push(format!("port {} is {other}, not {name} any more", port.0));
                }
                _ => {}
            }
        }
        let is_new = |(port, name): &(&SwitchPort, &String)| {
            number_in(before, name).is_none() && !before.contains_key(port)
        };
        let new = after.iter().filter(is_new);
        changes.extend(new.map(|(port, name)| format!("port {} ({name}) is new", port.0)));
        changes
    }
}

/// An endpoint in the core's state.
#[derive(Clone, Debug)]
pub struct Node {
    /// Its stored record.
    pub record: NodeRecord,
    /// Whether its heartbeats arrive; false if it is not attached.
    pub live: bool,
    /// When it was last seen, or when the controller started.
    pub last_seen: Instant,
    /// When it left, or when the controller started.
    pub gone_since: Instant,
    /// Its last reported number of free pages; after a restart an estimate until its next report.
    pub free_pages: Option<u64>,
    /// The READs that the kernel answers for a memory node, as last reported.
    pub direct_reads: Option<DirectReads>,
    /// The free pages that clients were last notified of.
    reported_pages: u64,
    /// Whether it said how many pages are free; before, that is an estimate.
    has_reported: bool,
}

/// The READs of a memory node that the kernel answers before they reach it.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct DirectReads {
    /// Why it answers none; empty if it answers.
    pub refusal: String,
    /// READs that it answered.
    pub answered_count: u64,
    /// READs that it passed on.
    pub passed_count: u64,
}

impl Node {
    fn restored(record: NodeRecord, now: Instant) -> Self {
        let live = record.attached;
        let free_pages = record.level.map(|level| weight::pages(level).min(record.capacity_pages));
        let reported_pages = free_pages.unwrap_or(0);
        Self {
            record,
            live,
            last_seen: now,
            gone_since: now,
            free_pages,
            direct_reads: None,
            reported_pages,
            has_reported: false,
        }
    }
}

/// Why a heartbeat or a leave was refused; the caller can resolve it only by joining again.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MemberError {
    /// The controller never assigned this node id, or its store was lost.
    #[error("node {0} is not known here; join again")]
    Unknown(u16),
    /// The caller joined later than this controller's store knows: the store is an old copy.
    #[error(
        "incarnation {caller} of node {node} joined after {current}, the last one in the controller's store: \
         the store is an old copy; start the controller with the one that it had"
    )]
    Ahead {
        /// The node.
        node: u16,
        /// The caller's incarnation.
        caller: u32,
        /// The last incarnation in the store.
        current: u32,
    },
    /// Another incarnation took over.
    #[error("incarnation {caller} of node {node} is over, {current} is current; join again")]
    Stale {
        /// The node.
        node: u16,
        /// The caller's incarnation.
        caller: u32,
        /// The current incarnation.
        current: u32,
    },
    /// It was drained and gone, so another server answers for it under a later incarnation.
    #[error(
        "{name} was drained and gone, so the memory server {by} answers for it, and this process is no member any more; \
         start it again: {by} then stops answering"
    )]
    Deputized {
        /// The server's name.
        name: String,
        /// Its deputy.
        by: String,
    },
    /// It left, was silent for too long, or another endpoint took its port.
    #[error("node {0} left or was removed after a long silence; join again")]
    Gone(u16),
    /// The token does not belong to the node.
    #[error("the token is not that of node {0}")]
    WrongToken(u16),
}

/// The identity that an endpoint shows with every call after its join.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Its node id.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: u32,
    /// Its token.
    pub token: [u8; 16],
}

/// Pure controller state machine.
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    first_generation: u16,
    nodes: BTreeMap<NodeId, Node>,
    names: BTreeMap<String, NodeId>,
    /// Spaces and their groups.
    spaces: BTreeMap<u16, u16>,
    /// The known ports, by switch.
    ports: Vec<Ports>,
    migrations: Migrations,
    rebalancing: Rebalancing,
    returning: free_lines::Returning,
    changes: Vec<Change>,
    altered: BTreeSet<NodeId>,
    events: Vec<MemberEvent>,
    dirty: bool,
    nodes_version: u64,
}

impl Core {
    /// Continues from the stored state. A node that was attached counts as live until its heartbeat
    /// is overdue. `first_version` is greater than any that an earlier run used.
    #[must_use]
    pub fn new(config: CoreConfig, stored: Stored, first_version: u64, now: Instant) -> Self {
        let nodes: BTreeMap<NodeId, Node> = stored
            .nodes
            .into_iter()
            .map(|record| (record.id(), Node::restored(record, now)))
            .collect();
        let names = nodes
            .iter()
            .filter(|(_, node)| !node.record.retired)
            .map(|(id, node)| (node.record.name.clone(), *id))
            .collect();
        let ports = vec![Ports::default(); config.topology.switch_count()];
        let records = nodes.values().map(|node| &node.record);
        let migrations = Migrations::new(stored.migrations, records);
        Self {
            config,
            first_generation: stored.first_generation,
            nodes,
            names,
            spaces: stored.spaces.iter().map(|record| (record.space, record.group)).collect(),
            ports,
            migrations,
            rebalancing: Rebalancing::new(stored.rebalance),
            returning: free_lines::Returning::default(),
            changes: Vec::new(),
            altered: BTreeSet::new(),
            events: Vec::new(),
            dirty: true,
            nodes_version: first_version,
        }
    }

    /// Every node, including those that left.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// A node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(&id)
    }

    /// The rules.
    #[must_use]
    pub const fn config(&self) -> &CoreConfig {
        &self.config
    }

    /// The known ports of a switch.
    #[must_use]
    pub fn ports(&self, switch: SwitchId) -> &Ports {
        self.ports.get(switch.index()).unwrap_or(&Ports::Unknown)
    }

    /// The known ports, by switch.
    #[must_use]
    pub fn all_ports(&self) -> &[Ports] {
        &self.ports
    }

    /// The switch to which an endpoint is connected; `None` if the controller no longer has it.
    pub(crate) fn switch_of(&self, record: &NodeRecord) -> Option<SwitchId> {
        self.place(record).map(|place| place.switch)
    }

    /// Where an endpoint is connected; `None` if the controller no longer has the switch.
    pub(crate) fn place(&self, record: &NodeRecord) -> Option<Place> {
        let switch = match record.switch.as_str() {
            // It joined when there was one switch without a name; that is the first one now.
            "" => SwitchId(0),
            name => self.config.topology.find(name)?,
        };
        Some(Place { switch, port: record.port() })
    }

    /// A port in messages; the switch is named only if there are several.
    pub(crate) fn port_words(&self, Place { switch, port }: Place) -> String {
        match self.config.topology.switch_count() {
            1 => format!("port {}", port.0),
            _ => format!("port {} of the switch {}", port.0, self.config.topology.name(switch)),
        }
    }

    /// Counts the changes of the lists of memory nodes.
    #[must_use]
    pub const fn nodes_version(&self) -> u64 {
        self.nodes_version
    }

    /// The attached memory nodes of a space, in the order of their ids.
    pub fn memory_nodes(&self, space: Space) -> impl Iterator<Item = &Node> {
        self.nodes.values().filter(move |node| {
            let record = &node.record;
            record.attached && record.role == Role::Memory && record.space() == space
        })
    }

    /// The largest piece that fits the smallest link of a space, in bytes.
    #[must_use]
    pub fn piece_bytes(&self, space: Space) -> usize {
        let attached = self.nodes.values().filter(|node| node.record.attached);
        let of_space = attached.filter(|node| node.record.space() == space);
        let smallest = of_space.map(|node| node.record.mtu).min();
        let mtu = smallest.and_then(|mtu| usize::try_from(mtu).ok());
        mtu.and_then(piece_bytes).unwrap_or(bluebridge_wire::address::PAGE_BYTES)
    }

    /// The changes that must be stored before the last response is sent.
    #[must_use]
    pub fn take_changes(&mut self) -> Vec<Change> {
        let mut changes = std::mem::take(&mut self.changes);
        changes.append(&mut self.migrations.take_changes());
        changes
    }

    /// The nodes whose changes watchers must receive.
    #[must_use]
    pub fn take_altered(&mut self) -> BTreeSet<NodeId> {
        std::mem::take(&mut self.altered)
    }

    /// The changes of endpoints since the last call, in order.
    #[must_use]
    pub fn take_events(&mut self) -> Vec<MemberEvent> {
        std::mem::take(&mut self.events)
    }

    /// Whether the desired tables may have changed since the last call.
    #[must_use]
    pub fn take_dirty(&mut self) -> bool {
        let has_moved = self.migrations.take_moved();
        std::mem::take(&mut self.dirty) || has_moved
    }

    /// Which pages are moving, or have moved.
    #[must_use]
    pub const fn migrations(&self) -> &Migrations {
        &self.migrations
    }

    /// To note what servers report.
    pub const fn migrations_mut(&mut self) -> &mut Migrations {
        &mut self.migrations
    }

    /// The configured ports that their switches do not have: the operator named the wrong ones.
    #[must_use]
    pub fn missing_ports(&self) -> Vec<Place> {
        let topology = &self.config.topology;
        let trunks = topology
            .switches()
            .flat_map(|switch| topology.trunks(switch).map(move |port| Place { switch, port }));
        let own = self.config.own_port.map(|own| own.place);
        trunks.chain(own).filter(|place| !self.may_exist(*place)).collect()
    }

    /// Sets the ports of a switch.
    pub fn learn_ports(&mut self, switch: SwitchId, ports: Ports) {
        if let Some(known) = self.ports.get_mut(switch.index()).filter(|known| **known != ports) {
            *known = ports;
            self.dirty = true;
        }
    }

    /// Reserves arena generations for a memory node, up to `wanted` if that is not too many at once.
    ///
    /// # Errors
    /// [`MemberError`]; nothing changed.
    pub fn reserve(&mut self, who: Member, wanted: u16) -> Result<(), MemberError> {
        self.check_member(who)?;
        let node = self.nodes.get_mut(&who.node).filter(|node| node.record.role == Role::Memory);
        let Some(node) = node else { return Ok(()) };
        // The caller names the last one that it wants, not how many more, so that a repetition
        // reserves none twice.
        let last = *node.record.generations().end();
        let most =
            last.saturating_add(HEARTBEAT_GENERATIONS_MAX).min(ArenaGeneration::MAX.number());
        let wanted = wanted.min(most);
        if wanted > last {
            node.record.last_generation = wanted;
            self.changes.push(Change::Node(node.record.clone()));
            // Redirects are made for pages of these generations only.
            self.dirty = true;
        }
        Ok(())
    }

    /// Records what a memory node reported of READs that the kernel answers.
    pub fn note_direct_reads(&mut self, node: NodeId, report: Option<DirectReads>) {
        if let Some(node) = self.nodes.get_mut(&node) {
            node.direct_reads = report;
        }
    }

    /// Handles a heartbeat, with a memory node's number of free pages.
    ///
    /// # Errors
    /// [`MemberError`]; nothing changed.
    pub fn heartbeat(
        &mut self,
        now: Instant,
        who: Member,
        free_pages: u64,
    ) -> Result<(), MemberError> {
        self.check_member(who)?;
        let Some(node) = self.nodes.get_mut(&who.node) else {
            return Err(MemberError::Unknown(who.node.0));
        };
        node.last_seen = now;
        let revived = !std::mem::replace(&mut node.live, true);
        if revived {
            self.migrations.note_heard(who.node);
            self.events.push(MemberEvent::new(MemberChange::Returned, &node.record));
        }
        let mut changed = revived;
        let mut moved = revived;
        if node.record.role == Role::Memory {
            let free = free_pages.min(node.record.capacity_pages);
            node.free_pages = Some(free);
            node.has_reported = true;
            let level = weight::level(free, node.record.level);
            if level != node.record.level {
                moved = true;
                node.record.level = level;
                self.changes.push(Change::Node(node.record.clone()));
            }
            if free.abs_diff(node.reported_pages) > node.reported_pages / 8 {
                node.reported_pages = free;
                changed = true;
            }
        }
        if moved {
            self.dirty = true;
            self.altered.insert(who.node);
        }
        if moved || changed {
            self.nodes_version += 1;
        }
        Ok(())
    }

    /// Ends an incarnation. A repetition is no error.
    ///
    /// # Errors
    /// [`MemberError`]; nothing changed.
    pub fn leave(&mut self, now: Instant, who: Member) -> Result<(), MemberError> {
        match self.check_member(who) {
            Ok(()) => {
                self.detach(now, who.node, MemberChange::Left);
                self.tend_deputies(now);
                Ok(())
            }
            Err(MemberError::Gone(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    pub(crate) fn check_member(&self, who: Member) -> Result<(), MemberError> {
        let node = who.node.0;
        let record = &self.nodes.get(&who.node).ok_or(MemberError::Unknown(node))?.record;
        let (caller, current) = (who.incarnation, record.incarnation);
        // A successor that did not show the token has another one; the predecessor must get this reason.
        if caller < current {
            let deputy = self.migrations.deputy_of(who.node).map(|of| of.deputy());
            return Err(match deputy {
                Some(deputy) => MemberError::Deputized {
                    name: self.migrations.name(who.node),
                    by: self.migrations.name(deputy),
                },
                None => MemberError::Stale { node, caller, current },
            });
        }
        // The token in an old store is an old one, so this comes before its comparison.
        if caller > current {
            return Err(MemberError::Ahead { node, caller, current });
        }
        if record.token != who.token {
            return Err(MemberError::WrongToken(node));
        }
        if record.attached { Ok(()) } else { Err(MemberError::Gone(node)) }
    }

    fn detach(&mut self, now: Instant, id: NodeId, why: MemberChange) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        self.events.push(MemberEvent::new(why, &node.record));
        node.record.attached = false;
        node.record.level = None;
        node.live = false;
        node.gone_since = now;
        node.free_pages = None;
        node.reported_pages = 0;
        node.has_reported = false;
        self.migrations.note_server(&node.record);
        self.changes.push(Change::Node(node.record.clone()));
        self.note(id);
    }

    fn note(&mut self, id: NodeId) {
        self.dirty = true;
        self.nodes_version += 1;
        self.altered.insert(id);
    }

    fn silence(&self) -> Duration {
        self.config.heartbeat_interval * HEARTBEATS_MISSED
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let attached = self.nodes.values().filter(|node| node.record.attached);
        let due = attached.filter_map(|node| match (node.live, node.record.role) {
            (true, _) => Some(node.last_seen + self.silence()),
            (false, Role::Client) => Some(node.last_seen + self.config.client_expiry),
            (false, Role::Memory) => None,
        });
        due.min()
    }

    /// Whether nothing is due before [`Self::poll_timeout`].
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        let mut attached = self.nodes.values().filter(|node| node.record.attached);
        attached.all(|node| node.live) && self.migrations.is_quiet()
    }

    /// Ignores missing heartbeats for a time in which this controller was stopped and received nothing.
    pub fn excuse_silence(&mut self, now: Instant, stalled: Duration) {
        for node in self.nodes.values_mut() {
            node.last_seen = now.min(node.last_seen + stalled);
        }
    }

    /// Marks nodes as silent, and removes clients that were silent for too long.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.migrations.handle_timeout(now);
        let silence = self.silence();
        let unheard = |node: &Node| now.saturating_duration_since(node.last_seen);
        let attached = self.nodes.iter().filter(|(_, node)| node.record.attached);
        let (expired, silent): (Vec<_>, Vec<_>) = attached
            .filter(|(_, node)| unheard(node) >= silence)
            .map(|(id, node)| {
                let expired = node.record.role == Role::Client
                    && unheard(node) >= self.config.client_expiry.max(silence);
                (*id, expired)
            })
            .partition(|(_, expired)| *expired);
        for (id, _) in expired {
            self.detach(now, id, MemberChange::GivenUp);
        }
        for (id, _) in silent {
            let Some(node) = self.nodes.get_mut(&id) else { continue };
            if std::mem::replace(&mut node.live, false) {
                self.events.push(MemberEvent::new(MemberChange::Silent, &node.record));
                self.note(id);
            }
        }
        let gone = self.config.heartbeat_interval * HEARTBEATS_GONE;
        let is_gone = |node: &Node| {
            node.record.attached
                && !node.live
                && now.saturating_duration_since(node.last_seen) >= gone
        };
        let hung = self.nodes.iter().filter(|(_, node)| is_gone(node)).map(|(id, _)| *id);
        self.migrations.note_hung(hung.collect());
        self.tend_deputies(now);
    }
}

#[cfg(test)]
mod tests;
