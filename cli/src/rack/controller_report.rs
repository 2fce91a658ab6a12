//! What a rack's controller knows, for people and programs.

use bluebridge_northbound::proto::{self, NodeState, Role, SwitchState};
use bluebridge_wire::address::{Fields, NODE_PREFIX_LEN};
use bluebridge_wire::{NodeId, Space};
use serde::Serialize;

const SYNCING: &str = "syncing";

/// The controller's view of the rack.
#[derive(Clone, Debug, Serialize)]
pub struct ControllerReport {
    /// Every endpoint that ever joined and was not forgotten.
    pub nodes: Vec<NodeReport>,
    /// How it stands with the switch, in a word.
    pub switch_state: &'static str,
    /// Whether the switch has what it should have.
    pub in_sync: bool,
    /// What went wrong last, if all is not well.
    pub problem: Option<String>,
    /// Entries, groups and settings that the switch should have.
    pub desired_entry_count: u64,
    /// Those that it has.
    pub installed_entry_count: u64,
    /// Entries that read-backs found missing, different or foreign.
    pub repaired_count: u64,
    /// Connections to the switch since the controller started.
    pub connect_count: u64,
    /// Milliseconds since the controller started.
    pub uptime_ms: u64,
}

/// One endpoint.
#[derive(Clone, Debug, Serialize)]
pub struct NodeReport {
    /// Its name.
    pub name: String,
    /// Its node id.
    pub id: u16,
    /// The prefix of all pointers to it.
    pub prefix: String,
    /// `memory` or `client`.
    pub role: &'static str,
    /// `live`, `silent` or `gone`.
    pub state: &'static str,
    /// Its space.
    pub space: u16,
    /// The switch's port that it is connected to.
    pub switch_port: u32,
    /// How often it joined.
    pub incarnation: u32,
    /// How often its memory lost what it held.
    pub arena_generation: u32,
    /// Pages of a memory node.
    pub capacity_pages: u64,
    /// Those that it had left when it last said so.
    pub free_pages: u64,
    /// Its share of what is created anywhere.
    pub anycast_weight: u32,
}

impl ControllerReport {
    /// The report in the controller's answer.
    pub fn of(status: &proto::StatusResponse) -> Self {
        let switch = status.switch.clone().unwrap_or_default();
        let switch_state = match switch.state() {
            SwitchState::Disconnected | SwitchState::Unspecified => "disconnected",
            SwitchState::InSync => "in sync",
            SwitchState::Syncing => SYNCING,
        };
        Self {
            nodes: status.nodes.iter().map(NodeReport::of).collect(),
            switch_state,
            in_sync: switch.state() == SwitchState::InSync,
            problem: (!switch.problem.is_empty()).then_some(switch.problem),
            desired_entry_count: status.desired_entry_count,
            installed_entry_count: status.installed_entry_count,
            repaired_count: switch.repaired_count,
            connect_count: switch.connect_count,
            uptime_ms: status.uptime_ms,
        }
    }
}

impl ControllerReport {
    /// Whether the switch is being brought up to date and nothing went wrong with that so far.
    pub fn is_syncing(&self) -> bool {
        self.switch_state == SYNCING && self.problem.is_none()
    }
}

impl NodeReport {
    fn of(node: &proto::Node) -> Self {
        let id = NodeId(u16::try_from(node.node).unwrap_or(0));
        let space = Space(u16::try_from(node.space).unwrap_or(0));
        let first = Fields { space, node: id, command: 0, tag: 0, location: 0 };
        Self {
            name: node.name.clone(),
            id: id.0,
            prefix: format!("{}/{NODE_PREFIX_LEN}", first.to_ipv6()),
            role: match node.role() {
                Role::Memory => "memory",
                Role::Client => "client",
                Role::Unspecified => "unknown",
            },
            state: match node.state() {
                NodeState::Live => "live",
                NodeState::Silent => "silent",
                NodeState::Gone => "gone",
                NodeState::Unspecified => "unknown",
            },
            space: space.0,
            switch_port: node.switch_port,
            incarnation: node.incarnation,
            arena_generation: node.arena_generation,
            capacity_pages: node.capacity_pages,
            free_pages: node.free_pages,
            anycast_weight: node.anycast_weight,
        }
    }
}
