//! The state of a rack's controller, for people and programs.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};

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
    /// The switches, at least one.
    pub switches: Vec<SwitchReport>,
    /// Milliseconds since the controller started.
    pub uptime_ms: u64,
}

/// A switch in the controller's view.
#[derive(Clone, Debug, Serialize)]
pub struct SwitchReport {
    /// Its name; empty if it is the only one and has none.
    pub name: String,
    /// The state of the connection to it, in one word.
    pub state: &'static str,
    /// Whether it has the desired entries.
    pub in_sync: bool,
    /// The last problem, if there is one.
    pub problem: Option<String>,
    /// Its desired entries, groups and settings.
    pub desired_entry_count: u64,
    /// Installed entries, groups and settings.
    pub installed_entry_count: u64,
    /// Entries that read-backs found missing, different or foreign.
    pub repaired_count: u64,
    /// Read-backs that found such entries: a number that grows shows that another program changes the tables.
    pub differing_check_count: u64,
    /// What the last of them found.
    pub last_difference: Option<String>,
    /// The fewest entries of `directory` for all pages that moved.
    pub moved_needed_count: u64,
    /// Those that it gets. Without an entry, a home leads clients to its pages.
    pub moved_entry_count: u64,
    /// The most that it may get.
    pub moved_entry_budget: u64,
    /// Connections since the controller started.
    pub connect_count: u64,
    /// Its ports, if it lists them.
    pub ports: Vec<PortReport>,
    /// How often it had other ports than before.
    pub port_change_count: u64,
    /// The last change of its ports.
    pub last_port_change: Option<String>,
    /// Leases and redirects.
    pub leases: LeaseReport,
}

/// A port of a switch.
#[derive(Clone, Debug, Serialize)]
pub struct PortReport {
    /// Its number.
    pub port: u32,
    /// Its interface.
    pub interface: String,
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
            "redirects {policy}: {redirect_count} of {redirect_budget}, refused as full: {budget_full_count}; \
             leases known: {known_count}; copies: {copies_accepted} accepted, {copies_lost} lost"
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
    /// `draining` or `drained`, if an operator drains this memory node.
    pub drain: Option<&'static str>,
    /// The memory node that answers for this one, because it is drained and gone.
    pub deputy: Option<String>,
    /// Why none answers although it is drained and gone, and what to do.
    pub unanswered: Option<String>,
    /// Its space.
    pub space: u16,
    /// The name of the switch to which it is connected; empty if the only switch has none.
    pub switch: String,
    /// The switch's port.
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
    /// The READs of a memory node that the kernel answers, as last reported.
    pub direct_reads: Option<DirectReadsReport>,
}

/// The READs of a memory node that the kernel answers before they reach it.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct DirectReadsReport {
    /// Why it answers none.
    pub refusal: Option<String>,
    /// READs that it answered.
    pub answered_count: u64,
    /// READs that it passed on to the memory node.
    pub passed_count: u64,
}

impl From<&proto::DirectReads> for DirectReadsReport {
    fn from(reads: &proto::DirectReads) -> Self {
        let refusal = (!reads.refusal.is_empty()).then(|| reads.refusal.clone());
        let (answered_count, passed_count) = (reads.answered_count, reads.passed_count);
        Self { refusal, answered_count, passed_count }
    }
}

impl fmt::Display for DirectReadsReport {
    /// Their share of all READs, in a column of a table.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.refusal.is_some(), self.answered_count + self.passed_count) {
            (true, _) => f.write_str("off"),
            (false, 0) => f.write_str("on"),
            (false, all) => write!(f, "{} %", self.answered_count.saturating_mul(100) / all),
        }
    }
}

/// An entry, group or setting of a switch in the controller's view.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct EntryReport {
    /// The name of the switch; empty if the only switch has none.
    pub switch: String,
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
            switch: entry.switch.clone(),
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
        Self {
            nodes: status.nodes.iter().map(NodeReport::of).collect(),
            switches: status.switches.iter().map(SwitchReport::of).collect(),
            uptime_ms: status.uptime_ms,
        }
    }
}

fn times(count: u64) -> String {
    match count {
        1 => "once".to_owned(),
        count => format!("{count} times"),
    }
}

/// A text, unless it is empty.
fn some(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

impl SwitchReport {
    fn of(switch: &proto::SwitchStatus) -> Self {
        let state = match switch.state() {
            SwitchState::Disconnected | SwitchState::Unspecified => "disconnected",
            SwitchState::InSync => "in sync",
            SwitchState::Syncing => SYNCING,
        };
        Self {
            name: switch.name.clone(),
            state,
            in_sync: switch.state() == SwitchState::InSync,
            problem: some(&switch.problem),
            desired_entry_count: switch.desired_entry_count,
            installed_entry_count: switch.installed_entry_count,
            repaired_count: switch.repaired_count,
            differing_check_count: switch.differing_check_count,
            last_difference: some(&switch.last_difference),
            moved_needed_count: switch.moved_needed_count,
            moved_entry_count: switch.moved_entry_count,
            moved_entry_budget: switch.moved_entry_budget,
            connect_count: switch.connect_count,
            ports: switch
                .ports
                .iter()
                .map(|port| PortReport { port: port.number, interface: port.name.clone() })
                .collect(),
            port_change_count: switch.port_change_count,
            last_port_change: some(&switch.last_port_change),
            leases: switch.leases.as_ref().map(LeaseReport::of).unwrap_or_default(),
        }
    }

    /// The switch in a sentence.
    fn words(&self) -> String {
        match self.name.as_str() {
            "" => "the switch".to_owned(),
            name => format!("the switch {name}"),
        }
    }

    /// Its problem, as a sentence.
    fn fault(&self) -> Option<String> {
        let problem = self.problem.as_ref().map_or_else(String::new, |it| format!(": {it}"));
        let words = self.words();
        (!self.in_sync).then(|| match self.state {
            SYNCING => format!("{words} is not up to date{problem}"),
            state => format!("{words} is {state}{problem}"),
        })
    }

    /// Why an endpoint cannot be at a port of this switch: there is no such port.
    fn fault_of(&self, node: &NodeReport) -> Option<String> {
        let is_here = node.state == "live" && node.switch == self.name;
        let has = |port: &PortReport| port.port == node.switch_port;
        if !is_here || !self.in_sync || self.ports.is_empty() || self.ports.iter().any(has) {
            return None;
        }
        let change = self.last_port_change.as_ref();
        let change =
            change.map_or_else(String::new, |it| format!(" (last change of its ports: {it})"));
        let (words, NodeReport { name, switch_port, .. }) = (self.words(), node);
        Some(format!(
            "{words} has no port {switch_port}, where {name} joined{change}; give its interface this number again, \
             or let {name} join at its present port"
        ))
    }

    /// Its state, in two to five lines.
    pub fn summary(&self) -> String {
        let Self { state, desired_entry_count, installed_entry_count, repaired_count, .. } = self;
        let name = if self.name.is_empty() { String::new() } else { format!(" {}", self.name) };
        let ports = self.last_port_change.as_ref().map_or_else(String::new, |last| {
            format!(
                "\nports{name} changed, {} in all, the last: {last}",
                times(self.port_change_count)
            )
        });
        let differences = self.last_difference.as_ref().map_or_else(String::new, |last| {
            let count = times(self.differing_check_count);
            format!("\ntables{name} differed {count} from what was written, the last time: {last}")
        });
        let (needed, there) = (self.moved_needed_count, self.moved_entry_count);
        let budget = self.moved_entry_budget;
        let moved = (needed > budget).then(|| {
            format!(
                "\ndirectory{name}: pages that moved need {needed} entries, and {there} of at most {budget} are there; \
                 homes lead clients to the other pages"
            )
        });
        let moved = moved.unwrap_or_default();
        format!(
            "switch{name} {state}: {desired_entry_count} entries desired, {installed_entry_count} installed, \
             {repaired_count} repaired, connected {}{differences}{moved}{ports}\n{}",
            times(self.connect_count),
            self.leases
        )
    }
}

impl ControllerReport {
    /// The problems, as sentences: the switch is lost or not up to date, an endpoint's port is gone, or a memory
    /// server is silent. A silent client may have crashed, which is no fault of the rack.
    pub fn faults(&self) -> Vec<String> {
        let switches = self.switches.iter().filter_map(SwitchReport::fault);
        let misplaced = self
            .nodes
            .iter()
            .flat_map(|node| self.switches.iter().filter_map(|switch| switch.fault_of(node)));
        let silent =
            self.nodes.iter().filter(|node| (node.role, node.state) == ("memory", "silent"));
        let silent = silent.map(|node| {
            format!(
                "no heartbeat from the memory server {} for {} s",
                node.name,
                node.silent_ms / 1000
            )
        });
        switches.chain(misplaced).chain(silent).chain(self.unanswered()).collect()
    }

    /// The servers that are drained and gone, and for which nobody answers, as sentences.
    pub fn unanswered(&self) -> impl Iterator<Item = String> {
        self.nodes.iter().filter_map(|node| {
            let why = node.unanswered.as_ref()?;
            Some(format!("nobody answers for {}, which is drained and gone: {why}", node.name))
        })
    }

    /// The state of the members and the switches, in lines.
    pub fn summary(&self) -> String {
        let with = |state| self.nodes.iter().filter(|node| node.state == state).count();
        let members = format!(
            "members: {} live, {} silent, {} gone",
            with("live"),
            with("silent"),
            with("gone")
        );
        let uptime = format!("up for {} s", self.uptime_ms / 1000);
        let switches = self.switches.iter().map(SwitchReport::summary);
        [members].into_iter().chain(switches).chain([uptime]).collect::<Vec<_>>().join("\n")
    }

    /// Whether a switch is being updated, and none has a problem so far.
    pub fn is_syncing(&self) -> bool {
        let is_syncing = |switch: &SwitchReport| switch.state == SYNCING;
        self.switches.iter().any(is_syncing)
            && self.switches.iter().all(|it| it.in_sync || is_syncing(it) && it.problem.is_none())
    }

    /// Whether every switch has the desired entries.
    pub fn in_sync(&self) -> bool {
        self.switches.iter().all(|switch| switch.in_sync)
    }
}

impl NodeReport {
    /// Its state, and whether it is drained, for people.
    pub fn state_words(&self) -> String {
        let mut drain = self.drain.map_or_else(String::new, |drain| format!(", {drain}"));
        if let Some(deputy) = &self.deputy {
            let _ = write!(drain, ", {deputy} answers for it");
        }
        if self.unanswered.is_some() {
            drain.push_str(", nobody answers for it");
        }
        match self.state {
            "silent" => format!("silent {} s{drain}", self.silent_ms / 1000),
            state => format!("{state}{drain}"),
        }
    }

    /// Its port, with the name of the switch if that has one.
    pub fn port(&self) -> String {
        match self.switch.as_str() {
            "" => self.switch_port.to_string(),
            switch => format!("{switch}/{}", self.switch_port),
        }
    }

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
            drain: node.is_draining.then_some(if node.is_drained { "drained" } else { "draining" }),
            deputy: some(&node.deputy),
            unanswered: some(&node.unanswered),
            space: space.0,
            switch: node.switch.clone(),
            switch_port: node.switch_port,
            incarnation: node.incarnation,
            arena_generation: node.arena_generation,
            last_arena_generation: node.last_arena_generation,
            capacity_pages: node.capacity_pages,
            free_pages: node.free_pages,
            anycast_weight: node.anycast_weight,
            silent_ms: node.silent_ms,
            direct_reads: node.direct_reads.as_ref().map(DirectReadsReport::from),
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
            switches: vec![switch(SwitchState::InSync, "")],
            ..proto::StatusResponse::default()
        };
        assert_eq!(ControllerReport::of(&well).faults(), Vec::<String>::new());
        let silent = node("s2", Role::Memory, NodeState::Silent);
        let ill = proto::StatusResponse {
            nodes: [nodes, vec![silent]].concat(),
            switches: vec![
                switch(SwitchState::Disconnected, "refused"),
                proto::SwitchStatus { name: "tor1".to_owned(), ..switch(SwitchState::Syncing, "") },
            ],
            ..proto::StatusResponse::default()
        };
        assert_eq!(
            ControllerReport::of(&ill).faults(),
            [
                "the switch is disconnected: refused",
                "the switch tor1 is not up to date",
                "no heartbeat from the memory server s2 for 7 s"
            ]
        );
    }

    #[test]
    fn who_answers_for_a_server_that_is_gone_is_said() {
        let mut gone = proto::Node {
            is_draining: true,
            is_drained: true,
            deputy: "s2".to_owned(),
            ..node("s1", Role::Memory, NodeState::Gone)
        };
        let report = NodeReport::of(&gone);
        assert_eq!(report.state_words(), "gone, drained, s2 answers for it");
        assert_eq!(serde_json::to_value(&report).expect("it is JSON")["deputy"], "s2");
        gone.deputy.clear();
        let report = NodeReport::of(&gone);
        assert_eq!(report.state_words(), "gone, drained");
        assert!(serde_json::to_value(&report).expect("it is JSON")["deputy"].is_null());
        gone.unanswered = "its deputy s2 left; start s2".to_owned();
        assert_eq!(NodeReport::of(&gone).state_words(), "gone, drained, nobody answers for it");
        let nodes = vec![gone];
        let status = proto::StatusResponse { nodes, ..proto::StatusResponse::default() };
        assert_eq!(
            ControllerReport::of(&status).faults(),
            ["nobody answers for s1, which is drained and gone: its deputy s2 left; start s2"]
        );
    }

    #[test]
    fn an_endpoint_whose_port_is_gone_is_a_fault() {
        let at = |name, state, switch_port| proto::Node {
            switch_port,
            ..node(name, Role::Client, state)
        };
        let port = |number| proto::SwitchPort { number, name: format!("eth{number}") };
        let switch = proto::SwitchStatus {
            state: SwitchState::InSync.into(),
            ports: vec![port(1), port(4)],
            port_change_count: 1,
            last_port_change: "eth3 has the port 4, not 3 any more".to_owned(),
            differing_check_count: 7,
            last_difference: "directory fdbb:1:2::/48 is missing".to_owned(),
            moved_needed_count: 513,
            moved_entry_count: 500,
            moved_entry_budget: 512,
            ..proto::SwitchStatus::default()
        };
        let status = |switch| proto::StatusResponse {
            nodes: vec![
                at("c1", NodeState::Live, 1),
                at("c3", NodeState::Live, 3),
                at("c9", NodeState::Silent, 9),
            ],
            switches: vec![switch],
            ..proto::StatusResponse::default()
        };
        let report = ControllerReport::of(&status(switch.clone()));
        assert_eq!(
            report.faults(),
            [
                "the switch has no port 3, where c3 joined (last change of its ports: eth3 has the port 4, not 3 any \
              more); give its interface this number again, or let c3 join at its present port"
            ]
        );
        let line = "ports changed, once in all, the last: eth3 has the port 4, not 3 any more";
        assert!(report.summary().contains(line), "{}", report.summary());
        let line = "tables differed 7 times from what was written, the last time: directory fdbb:1:2::/48 is missing";
        assert!(report.summary().contains(line), "{}", report.summary());
        let line = "directory: pages that moved need 513 entries, and 500 of at most 512 are there; homes lead";
        assert!(report.summary().contains(line), "{}", report.summary());
        let unlisted = proto::SwitchStatus { ports: Vec::new(), moved_needed_count: 512, ..switch };
        let report = ControllerReport::of(&status(unlisted.clone()));
        assert!(!report.summary().contains("directory:"), "{}", report.summary());
        assert_eq!(ControllerReport::of(&status(unlisted)).faults(), Vec::<String>::new());
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
