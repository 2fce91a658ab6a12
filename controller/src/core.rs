//! The pure state machine of the controller: events and the time in, desired state out.
//!
//! No I/O and no clock in here. A call that changes what must survive a restart leaves it in
//! [`Core::take_changes`]; whoever calls stores it before anybody hears the answer.

mod attached;
mod desired;
mod event;
mod join;
mod record;
mod tables;
mod weight;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use bluebridge_p4::declaration;
use bluebridge_p4::pipeline::{Key, MacAddr, SwitchPort, Ternary};
use bluebridge_wire::{ArenaGeneration, NodeId, Space, piece_bytes};

use crate::redirect::{REDIRECT_BUDGET, RedirectPolicy};
pub use attached::{Attached, Endpoints};
pub use event::{MemberChange, MemberEvent};
pub use join::{Assigned, Attachment, Join, JoinError, Previous};
pub use record::{Carrier, Change, NodeRecord, Role, SpaceRecord, Stored};
pub(crate) use tables::compared;
pub use tables::{Body, Tables};

/// The multicast group through which `l2` floods.
pub const FLOOD_GROUP: u16 = 1;

/// The most multicast groups, that of the flood included.
pub const GROUPS_MAX: u16 = declaration::GROUPS_MAX;

/// The most ports of a multicast group that the embedded switch takes, and so the most endpoints of
/// a space. A larger group would be refused with every plan.
pub const GROUP_PORTS_MAX: usize = declaration::GROUP_PORTS_MAX;

/// The Ethernet address that every host sends pointers to. No interface has it: a switch takes what
/// is sent to it, by the IPv6 address. So no endpoint may have it.
pub const GATEWAY_MAC: MacAddr = MacAddr([0x02, 0xbb, 0x00, 0x00, 0x00, 0x01]);

/// Heartbeats that may be missing before a node counts as silent.
pub const BEATS_MISSED: u32 = 3;

/// Arena generations that a heartbeat reserves at most: a caller that asks for too many wastes few.
pub const BEAT_GENERATIONS_MAX: u16 = 64;

/// The most ports of a switch that does not list them: 9 bits, less the controller's and 511.
const PORT_MAX: u16 = declaration::ENDPOINT_PORT_MAX;

/// What the controller wants copies of.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct NotifyRule {
    /// The source's command byte: of replies.
    pub src_command: Ternary,
    /// The destination's command byte: of requests.
    pub dst_command: Ternary,
    /// The status of a reply.
    pub src_status: Ternary,
}

impl NotifyRule {
    pub(crate) const fn key(&self) -> Key {
        let Self { src_command, dst_command, src_status } = *self;
        Key::Notify { src_command, dst_command, src_status, priority: 1 }
    }
}

/// How the controller itself is connected to the switch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ControllerPort {
    /// The switch's port that leads to the controller.
    pub port: SwitchPort,
    /// The Ethernet address of the controller's interface there.
    pub mac: MacAddr,
}

/// The core's rules.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// The controller's own port, if endpoints reach it through the switch. No endpoint may have
    /// this port or address; the switch sends frames for the address to this port only, and does
    /// not flood the endpoints' control traffic, tokens included, to all of them.
    pub own_port: Option<ControllerPort>,
    /// How often endpoints beat.
    pub heartbeat_interval: Duration,
    /// After how long a silent client is given up. Memory nodes never are.
    pub client_expiry: Duration,
    /// How long a client's node id rests before another client gets it.
    pub client_rest: Duration,
    /// Ports to flood through if the switch does not list its ports.
    pub ports: Vec<SwitchPort>,
    /// What the switch copies to the controller beside what redirects need; nothing depends on it.
    pub notify: Vec<NotifyRule>,
    /// Which leased pages are redirected to their owners.
    pub redirects: RedirectPolicy,
    /// The most redirects, up to [`crate::redirect::REDIRECTS_MAX`].
    pub redirect_budget: usize,
}

impl Default for CoreConfig {
    fn default() -> Self {
        Self {
            own_port: None,
            heartbeat_interval: Duration::from_secs(1),
            client_expiry: Duration::from_secs(600),
            client_rest: Duration::from_secs(120),
            ports: Vec::new(),
            notify: Vec::new(),
            redirects: RedirectPolicy::default(),
            redirect_budget: REDIRECT_BUDGET,
        }
    }
}

/// What is known of the switch's ports.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub enum Ports {
    /// They and the names of their interfaces.
    Listed(BTreeMap<SwitchPort, String>),
    /// Nothing yet: the switch was not reached.
    #[default]
    Unknown,
    /// The switch does not tell.
    Unlisted,
}

/// An endpoint as the core sees it.
#[derive(Clone, Debug)]
pub struct Node {
    /// What is stored of it.
    pub record: NodeRecord,
    /// Whether its heartbeats come; false if it is not attached.
    pub live: bool,
    /// When it was last heard of, or when the controller began to listen.
    pub last_heard: Instant,
    /// When it left, or when the controller began to count.
    pub gone_since: Instant,
    /// What it said that it has left; an estimate after a restart, until it says so again.
    pub free_pages: Option<u64>,
    /// The free pages that clients were last told.
    told_pages: u64,
}

impl Node {
    fn restored(record: NodeRecord, now: Instant) -> Self {
        let live = record.attached;
        let free_pages = record.level.map(|level| weight::pages(level).min(record.capacity_pages));
        let told_pages = free_pages.unwrap_or(0);
        Self { record, live, last_heard: now, gone_since: now, free_pages, told_pages }
    }
}

/// Why a heartbeat or a goodbye was refused; always the caller's to mend by joining again.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MemberError {
    /// The controller never gave this node id, or its store was lost.
    #[error("node {0} is not known here; join again")]
    Unknown(u16),
    /// Another incarnation took over.
    #[error("incarnation {caller} of node {node} is over, {current} is current; join again")]
    Stale {
        /// The node.
        node: u16,
        /// The caller's incarnation.
        caller: u32,
        /// The one that counts.
        current: u32,
    },
    /// It left, was silent for too long, or its port was taken by another.
    #[error("node {0} left or was given up; join again")]
    Gone(u16),
    /// The token is another's.
    #[error("the token is not that of node {0}")]
    WrongToken(u16),
}

/// What an endpoint shows with every call after its join.
#[derive(Clone, Copy, Debug)]
pub struct Member {
    /// Its node id.
    pub node: NodeId,
    /// Its incarnation.
    pub incarnation: u32,
    /// Its proof.
    pub token: [u8; 16],
}

/// The pure state machine of the controller.
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    first_generation: u16,
    nodes: BTreeMap<NodeId, Node>,
    names: BTreeMap<String, NodeId>,
    /// Spaces and their groups.
    spaces: BTreeMap<u16, u16>,
    ports: Ports,
    changes: Vec<Change>,
    altered: BTreeSet<NodeId>,
    events: Vec<MemberEvent>,
    dirty: bool,
    nodes_version: u64,
}

impl Core {
    /// Goes on from what was stored. Whoever was attached counts as live until it has had the
    /// time to be heard. `first_version` is greater than any that an earlier run used.
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
        Self {
            config,
            first_generation: stored.first_generation,
            nodes,
            names,
            spaces: stored.spaces.iter().map(|record| (record.space, record.group)).collect(),
            ports: Ports::default(),
            changes: Vec::new(),
            altered: BTreeSet::new(),
            events: Vec::new(),
            dirty: true,
            nodes_version: first_version,
        }
    }

    /// Every node, also those gone.
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

    /// What is known of the switch's ports.
    #[must_use]
    pub const fn ports(&self) -> &Ports {
        &self.ports
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

    /// What must be stored before the last answer goes out.
    #[must_use]
    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    /// The nodes that watchers should hear about.
    #[must_use]
    pub fn take_altered(&mut self) -> BTreeSet<NodeId> {
        std::mem::take(&mut self.altered)
    }

    /// What happened to endpoints since the last call, in order.
    #[must_use]
    pub fn take_events(&mut self) -> Vec<MemberEvent> {
        std::mem::take(&mut self.events)
    }

    /// Whether the desired tables may have changed since the last call.
    #[must_use]
    pub fn take_dirty(&mut self) -> bool {
        std::mem::take(&mut self.dirty)
    }

    /// The controller's own port, if the switch turns out not to have it: the operator named the
    /// wrong one.
    #[must_use]
    pub fn missing_own_port(&self) -> Option<SwitchPort> {
        let Ports::Listed(ports) = &self.ports else { return None };
        self.config.own_port.map(|own| own.port).filter(|port| !ports.contains_key(port))
    }

    /// Learns the switch's ports.
    pub fn learn_ports(&mut self, ports: Ports) {
        if self.ports != ports {
            self.ports = ports;
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
        let most = last.saturating_add(BEAT_GENERATIONS_MAX).min(ArenaGeneration::MAX.number());
        let wanted = wanted.min(most);
        if wanted > last {
            node.record.last_generation = wanted;
            self.changes.push(Change::Node(node.record.clone()));
            // Redirects are made for pages of these generations only.
            self.dirty = true;
        }
        Ok(())
    }

    /// A sign of life, with the pages that a memory node has left.
    ///
    /// # Errors
    /// [`MemberError`]; nothing changed.
    pub fn beat(&mut self, now: Instant, who: Member, free_pages: u64) -> Result<(), MemberError> {
        self.check_member(who)?;
        let Some(node) = self.nodes.get_mut(&who.node) else {
            return Err(MemberError::Unknown(who.node.0));
        };
        node.last_heard = now;
        let revived = !std::mem::replace(&mut node.live, true);
        if revived {
            self.events.push(MemberEvent::new(MemberChange::Returned, &node.record));
        }
        let mut told = revived;
        let mut moved = revived;
        if node.record.role == Role::Memory {
            let free = free_pages.min(node.record.capacity_pages);
            node.free_pages = Some(free);
            let level = weight::level(free, node.record.level);
            if level != node.record.level {
                moved = true;
                node.record.level = level;
                self.changes.push(Change::Node(node.record.clone()));
            }
            if free.abs_diff(node.told_pages) > node.told_pages / 8
                || (free == 0) != (node.told_pages == 0)
            {
                node.told_pages = free;
                told = true;
            }
        }
        if moved {
            self.dirty = true;
            self.altered.insert(who.node);
        }
        if moved || told {
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
                Ok(())
            }
            Err(MemberError::Gone(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn check_member(&self, who: Member) -> Result<(), MemberError> {
        let node = who.node.0;
        let record = &self.nodes.get(&who.node).ok_or(MemberError::Unknown(node))?.record;
        let (caller, current) = (who.incarnation, record.incarnation);
        // A successor that did not know the token has another: the predecessor should hear why.
        if caller < current {
            return Err(MemberError::Stale { node, caller, current });
        }
        if record.token != who.token {
            return Err(MemberError::WrongToken(node));
        }
        if caller != current {
            return Err(MemberError::Stale { node, caller, current });
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
        node.told_pages = 0;
        self.changes.push(Change::Node(node.record.clone()));
        self.note(id);
    }

    fn note(&mut self, id: NodeId) {
        self.dirty = true;
        self.nodes_version += 1;
        self.altered.insert(id);
    }

    fn silence(&self) -> Duration {
        self.config.heartbeat_interval * BEATS_MISSED
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Instant> {
        let attached = self.nodes.values().filter(|node| node.record.attached);
        let due = attached.filter_map(|node| match (node.live, node.record.role) {
            (true, _) => Some(node.last_heard + self.silence()),
            (false, Role::Client) => Some(node.last_heard + self.config.client_expiry),
            (false, Role::Memory) => None,
        });
        due.min()
    }

    /// Lets nodes fall silent, and gives up clients that were silent for long.
    pub fn handle_timeout(&mut self, now: Instant) {
        let silence = self.silence();
        let unheard = |node: &Node| now.saturating_duration_since(node.last_heard);
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
    }
}

#[cfg(test)]
mod tests;
