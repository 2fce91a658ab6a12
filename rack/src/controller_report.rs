//! The state of a rack's controller, for people and programs.

use std::collections::BTreeMap;
use std::fmt;

use bluebridge_northbound::proto::{self, NodeState, Role, SwitchState};
use bluebridge_wire::address::{Fields, NODE_PREFIX_LEN};
use bluebridge_wire::{NodeId, Space};
use serde::Serialize;

const SYNCING: &str = "syncing";

/// The controller's view of the rack.
#[derive(Clone, Debug, Serialize)]
pub struct ControllerReport {
    /// Every endpoint that ever joined and is still recorded.
    pub nodes: Vec<NodeReport>,
    /// The state of the connection to the switch, in one word.
    pub switch_state: &'static str,
    /// Whether the switch has the desired entries.
    pub in_sync: bool,
    /// The last problem, if there is one.
    pub problem: Option<String>,
    /// Desired entries, groups and settings of the switch.
    pub desired_entry_count: u64,
    /// Installed entries, groups and settings.
    pub installed_entry_count: u64,
    /// Entries that read-backs found missing, different or foreign.
    pub repaired_count: u64,
    /// Connections to the switch since the controller started.
    pub connect_count: u64,
    /// Milliseconds since the controller started.
    pub uptime_ms: u64,
    /// Leases and redirects.
    pub leases: LeaseReport,
}

/// The known leases, and redirects to their owners.
#[derive(Clone, Debug, Default, Serialize)]
pub struct LeaseReport {
    /// `always`, `contended` or `off`.
    pub policy: String,
    /// Tracked leases.
    pub known_count: u64,
    /// Redirects in the switch.
    pub redirect_count: u64,
    /// The most redirects.
    pub redirect_budget: u64,
    /// Copies that needed a redirect when the budget was full.
    pub budget_full_count: u64,
    /// Redirects installed or renewed since the controller started.
    pub installed_count: u64,
    /// Redirects removed.
    pub removed_count: u64,
    /// Copies of replies that the controller accepted.
    pub copies_accepted: u64,
    /// Copies that were lost because the controller was too slow.
    pub copies_lost: u64,
    /// Refused copies, by reason.
    pub copies_refused: BTreeMap<String, u64>,
}

impl LeaseReport {
    fn of(leases: &proto::LeaseStatus) -> Self {
        let refused = leases.refused.iter().map(|copies| (copies.reason.clone(), copies.count));
        Self {
            policy: leases.policy.clone(),
            known_count: leases.known_count,
            redirect_count: leases.redirect_count,
            redirect_budget: leases.redirect_budget,
            budget_full_count: leases.budget_full_count,
            installed_count: leases.installed_count,
            removed_count: leases.removed_count,
            copies_accepted: leases.accepted_count,
            copies_lost: leases.lost_count,
            copies_refused: refused.collect(),
        }
    }
}

impl fmt::Display for LeaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { policy, known_count, redirect_count, redirect_budget, .. } = self;
        let Self { budget_full_count, copies_accepted, copies_lost, .. } = self;
        write!(
            f,
            "redirects {policy}: {known_count} leases known, {redirect_count} of {redirect_budget} \
             redirects, {budget_full_count} times full; copies: {copies_accepted} accepted, \
             {copies_lost} lost"
        )?;
        self.copies_refused.iter().try_for_each(|(reason, count)| write!(f, ", {count} {reason}"))
    }
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
    /// The switch's port to which it is connected.
    pub switch_port: u32,
    /// The number of its joins.
    pub incarnation: u32,
    /// How often its memory lost its contents.
    pub arena_generation: u32,
    /// The last generation that is reserved for it, up to 32767.
    pub last_arena_generation: u32,
    /// Pages of a memory node.
    pub capacity_pages: u64,
    /// Its free pages as last reported.
    pub free_pages: u64,
    /// Its share of anywhere-CREATEs.
    pub anycast_weight: u32,
    /// Milliseconds since its last heartbeat.
    pub silent_ms: u64,
}

/// An entry, group or setting of the switch in the controller's view.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct EntryReport {
    /// The table.
    pub table: String,
    /// Its key.
    #[serde(rename = "match")]
    pub matches: String,
    /// Its action.
    pub action: String,
    /// `in sync`, `not in sync` (the switch has none, or another action), or `foreign` (the
    /// controller does not desire it).
    pub state: &'static str,
    /// Packets that hit it, as of the last reading.
    pub packets: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl EntryReport {
    /// The entry in the controller's response.
    pub fn of(entry: &proto::TableEntry) -> Self {
        Self {
            table: entry.table.clone(),
            matches: entry.r#match.clone(),
            action: entry.action.clone(),
            state: match (entry.desired, entry.installed) {
                (true, true) => "in sync",
                (true, false) => "not in sync",
                (false, _) => "foreign",
            },
            packets: entry.packets,
            bytes: entry.bytes,
        }
    }
}

impl ControllerReport {
    /// The report in the controller's response.
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
            leases: status.leases.as_ref().map(LeaseReport::of).unwrap_or_default(),
        }
    }
}

impl ControllerReport {
    /// The problems, as sentences: the switch is lost or not up to date, or a memory server is
    /// silent. A silent client may have crashed, which is no fault of the rack.
    pub fn faults(&self) -> Vec<String> {
        let problem = self.problem.as_ref().map_or_else(String::new, |it| format!(": {it}"));
        let switch = (!self.in_sync).then(|| match self.switch_state {
            SYNCING => format!("the switch is not up to date{problem}"),
            state => format!("the switch is {state}{problem}"),
        });
        let silent =
            self.nodes.iter().filter(|node| (node.role, node.state) == ("memory", "silent"));
        let silent = silent.map(|node| {
            format!(
                "no heartbeat from the memory server {} for {} s",
                node.name,
                node.silent_ms / 1000
            )
        });
        switch.into_iter().chain(silent).collect()
    }

    /// The state of the connection to the switch, in lines.
    pub fn summary(&self) -> String {
        let with = |state| self.nodes.iter().filter(|node| node.state == state).count();
        format!(
            "members: {} live, {} silent, {} gone\n\
             switch {}: {} entries desired, {} installed, {} repaired, connected {}\n\
             {}\n\
             up for {} s",
            with("live"),
            with("silent"),
            with("gone"),
            self.switch_state,
            self.desired_entry_count,
            self.installed_entry_count,
            self.repaired_count,
            match self.connect_count {
                1 => "once".to_owned(),
                count => format!("{count} times"),
            },
            self.leases,
            self.uptime_ms / 1000,
        )
    }

    /// Whether the switch is being updated without a problem so far.
    pub fn is_syncing(&self) -> bool {
        self.switch_state == SYNCING && self.problem.is_none()
    }
}

impl NodeReport {
    /// The endpoint in the controller's response.
    pub fn of(node: &proto::Node) -> Self {
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
            last_arena_generation: node.last_arena_generation,
            capacity_pages: node.capacity_pages,
            free_pages: node.free_pages,
            anycast_weight: node.anycast_weight,
            silent_ms: node.silent_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, role: Role, state: NodeState) -> proto::Node {
        proto::Node {
            name: name.to_owned(),
            node: 1,
            role: role.into(),
            state: state.into(),
            silent_ms: 7300,
            ..proto::Node::default()
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let switch = |state: SwitchState, problem: &str| proto::SwitchStatus {
            state: state.into(),
            problem: problem.to_owned(),
            ..proto::SwitchStatus::default()
        };
        let nodes = vec![
            node("s1", Role::Memory, NodeState::Live),
            node("c1", Role::Client, NodeState::Silent),
            node("s0", Role::Memory, NodeState::Gone),
        ];
        let well = proto::StatusResponse {
            nodes: nodes.clone(),
            switch: Some(switch(SwitchState::InSync, "")),
            ..proto::StatusResponse::default()
        };
        assert_eq!(ControllerReport::of(&well).faults(), Vec::<String>::new());
        let silent = node("s2", Role::Memory, NodeState::Silent);
        let ill = proto::StatusResponse {
            nodes: [nodes, vec![silent]].concat(),
            switch: Some(switch(SwitchState::Disconnected, "refused")),
            ..proto::StatusResponse::default()
        };
        assert_eq!(
            ControllerReport::of(&ill).faults(),
            [
                "the switch is disconnected: refused",
                "no heartbeat from the memory server s2 for 7 s"
            ]
        );
    }

    #[test]
    fn an_entry_is_in_sync_missing_or_foreign() {
        let state = |desired, installed| {
            let entry = proto::TableEntry { desired, installed, ..proto::TableEntry::default() };
            EntryReport::of(&entry).state
        };
        assert_eq!(state(true, true), "in sync");
        assert_eq!(state(true, false), "not in sync");
        assert_eq!((state(false, true), state(false, false)), ("foreign", "foreign"));
    }
}
