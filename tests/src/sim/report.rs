//! The counts of one run, or of many.

use core::{fmt, time::Duration};
use std::collections::{BTreeMap, BTreeSet};

use bluebridge_p4::pipeline::DropReason;
use bluebridge_protocol::{requester::Requester, responder::Responder};
use bluebridge_switch::dataplane::{Drops, ImpairmentCounters};

use super::{network::LinkCounters, plan::Fault};

/// Counts of all events.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Operations that ended.
    pub operations: u64,
    /// Events of the simulation.
    pub events: u64,
    /// The duration of the run in virtual time.
    pub virtual_time: Duration,
    /// Differs if any event of the run differs.
    pub digest: u64,
    /// Datagrams that clients found malformed.
    pub malformed: u64,
    /// Kinds of tasks and how they ended.
    pub outcomes: BTreeMap<(&'static str, String), u64>,
    /// Everything else, by group and name.
    pub counts: BTreeMap<(&'static str, String), u64>,
    pub(super) frozen: BTreeSet<usize>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { operations, events, virtual_time, digest, malformed, .. } = self;
        writeln!(f, "{operations} operations, {events} events, {virtual_time:?} of virtual time")?;
        writeln!(f, "digest {digest:016x}, {malformed} malformed datagrams at clients")?;
        for ((task, outcome), count) in &self.outcomes {
            writeln!(f, "  task         {task:<22} {outcome:<28} {count:>10}")?;
        }
        for ((group, name), count) in &self.counts {
            writeln!(f, "  {group:<12} {name:<51} {count:>10}")?;
        }
        Ok(())
    }
}

impl Report {
    /// Adds the counts of another run.
    pub fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.events += other.events;
        self.virtual_time += other.virtual_time;
        self.digest ^= other.digest;
        self.malformed += other.malformed;
        for (name, count) in &other.outcomes {
            *self.outcomes.entry(name.clone()).or_default() += count;
        }
        for (name, count) in &other.counts {
            *self.counts.entry(name.clone()).or_default() += count;
        }
    }

    pub(super) fn count(&mut self, group: &'static str, name: &str, count: u64) {
        *self.counts.entry((group, name.to_owned())).or_default() += count;
    }

    pub(super) fn count_fault(&mut self, fault: Fault) {
        let name = match fault {
            Fault::Astray { .. } => "requests led astray",
            Fault::Authority { .. } => "authority taken",
            Fault::ClientRestart { zombie: true, .. } => "client restarted, the old one still runs",
            Fault::ClientRestart { .. } => "client restarted",
            Fault::Migrate => "line moved",
            Fault::MoveBack => "line moved back",
            Fault::Freeze { .. } => "endpoint frozen",
            Fault::Partition { up: true, down: false, .. } => "partition up",
            Fault::Partition { up: false, down: true, .. } => "partition down",
            Fault::Partition { .. } => "partition",
            Fault::ServerRestart { contents: true, .. } => "server restarted with contents",
            Fault::ServerRestart { contents: false, .. } => "server restarted without contents",
            Fault::ServerShutdown { .. } => "server shut down",
            Fault::SwitchRestart { .. } => "switch restarted",
            Fault::SwitchWipe { .. } => "switch wiped",
        };
        self.count("fault", name, 1);
    }

    pub(super) fn add_requester(&mut self, requester: &Requester) {
        for (name, count) in requester.counters().iter() {
            self.count("requester", name, count);
        }
        for (status, count) in requester.counters().statuses() {
            self.count("received", &format!("{status:?}"), count);
        }
    }

    pub(super) fn add_responder(&mut self, responder: &Responder) {
        for (event, count) in responder.counters().events() {
            self.count("responder", event.name(), count);
        }
        for (status, count) in responder.counters().statuses() {
            self.count("answered", &format!("{status:?}"), count);
        }
    }

    pub(super) fn add_network(
        &mut self,
        (links, drops, impaired): (LinkCounters, Drops, Vec<ImpairmentCounters>),
    ) {
        for (name, count) in [
            ("sent", links.sent),
            ("lost", links.lost),
            ("duplicated", links.duplicated),
            ("held back", links.held_back),
            ("corrupted", links.corrupted),
            ("cut on the way up", links.cut_up),
            ("cut on the way down", links.cut_down),
        ] {
            self.count("link", name, count);
        }
        for reason in DropReason::ALL {
            self.count("switch drop", reason.name(), drops.of(reason));
        }
        for port in impaired {
            for (name, count) in [
                ("lost", port.lost),
                ("duplicated", port.duplicated),
                ("reordered", port.reordered),
                ("corrupted", port.corrupted),
                ("delayed", port.delayed),
            ] {
                self.count("switch port", name, count);
            }
        }
    }
}
