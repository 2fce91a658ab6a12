//! The present state of a rack.

use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use bluebridge_p4::pipeline::MacAddr;
use serde::Serialize;

use crate::RackError;
use crate::access;
pub use crate::arena::Loss;
use crate::control;
use crate::controller_report::ControllerReport;
use crate::daemon::{CONTROLLER, HOSTS, MEMORY_SERVER, Part, SWITCH, arena_of};
use crate::layout::{Layout, P4RUNTIME, RackPort};
use crate::links::wanted;
use crate::network::{Netlink, NetworkError};
use crate::readiness::KeptMemory;
use crate::spec::{Node, RackName};
use crate::state::{DaemonRecord, Phase, RackState};

/// A rack and all its parts.
#[derive(Clone, Debug, Serialize)]
pub struct RackStatus {
    /// Its name.
    pub name: RackName,
    /// The state of its building.
    pub phase: Phase,
    /// Whether it needs no root.
    pub rootless: bool,
    /// Whether there are no problems.
    pub healthy: bool,
    /// The problems, a sentence each, with a remedy.
    pub problems: Vec<String>,
    /// The links.
    pub links: Vec<LinkReport>,
    /// The daemons.
    pub daemons: Vec<DaemonReport>,
    /// The controller's view; `None` if there is no controller or it does not respond.
    pub controller: Option<ControllerReport>,
}

/// One link, from the node's side.
#[derive(Clone, Debug, Serialize)]
pub struct LinkReport {
    /// The node.
    pub node: Node,
    /// Its namespace.
    pub namespace: Option<PathBuf>,
    /// Its interface.
    pub interface: &'static str,
    /// The switch's port.
    pub switch_port: u16,
    /// Its address on the control network.
    pub control_address: Ipv6Addr,
    /// Its Ethernet address.
    pub mac: MacAddr,
    /// Largest IP packet in bytes, as set in the kernel; `None` if the link does not exist.
    pub mtu: Option<u32>,
    /// Whether both ends are up.
    pub running: bool,
    /// The addresses and routes that the node's interface lost, if known.
    pub missing: Vec<String>,
}

/// One daemon.
#[derive(Clone, Debug, Serialize)]
pub struct DaemonReport {
    /// Its name.
    pub name: String,
    /// The namespace it runs in.
    pub node: Node,
    /// Its pid, once started.
    pub pid: Option<u32>,
    /// Whether it runs.
    pub running: bool,
    /// Whether it is stopped by a signal (SIGSTOP) or a debugger.
    pub stopped: bool,
    /// Whether it reported ready, or responds as one that is ready.
    pub ready: bool,
    /// Its output.
    pub log: PathBuf,
    /// Whether the memory of a memory server outlives it: as it reported when it was ready, if its file is there still.
    pub kept_memory: Option<KeptMemory>,
    /// Whether the next process may go on with its memory.
    #[serde(skip)]
    pub may_keep_memory: bool,
    /// Why not, because of its file, and what to do.
    #[serde(skip)]
    pub(crate) loss: Option<Loss>,
}

/// Looks into the file of a server with this pid, if it runs; the command is the one that begins with empty memory.
pub type LookIntoFile<'a> = &'a dyn Fn(&Path, Option<u32>, &str) -> Option<Loss>;

/// Checks every part of a rack; call [`access::join`] first.
pub fn look(state: &RackState) -> RackStatus {
    look_with(state, &|_, _, _| None)
}

/// The same, and what else keeps the next process of a server from going on with its memory.
pub fn look_with(state: &RackState, into_file: LookIntoFile<'_>) -> RackStatus {
    let layout = Layout::of(&state.spec);
    let links: Vec<_> = layout.ports().iter().map(|port| link(state, port)).collect();
    let mut daemons: Vec<_> = state
        .daemons
        .iter()
        .map(|daemon| DaemonReport {
            name: daemon.name.clone(),
            node: daemon.node,
            pid: daemon.process.as_ref().map(|process| process.pid),
            running: daemon.process.as_ref().is_some_and(|process| process.is_running()),
            stopped: daemon.process.as_ref().is_some_and(|process| process.is_stopped()),
            ready: daemon.ready,
            log: daemon.log.clone(),
            kept_memory: None,
            may_keep_memory: daemon.may_keep_memory(state),
            loss: None,
        })
        .zip(&state.daemons)
        .map(|(report, daemon)| report.with_loss(daemon, state, into_file))
        .collect();
    // A daemon that cannot respond is not queried: that would only take time.
    let can_respond = |name: &str| {
        daemons.iter().any(|daemon| daemon.name == name && daemon.running && !daemon.stopped)
    };
    let controller_can_respond = can_respond(CONTROLLER);
    let controller = controller_can_respond.then(|| controller(state, &layout)).flatten();
    // Other switches are seen through the controller alone.
    let has_agent = state.spec.switch.is_embedded();
    let switch = (has_agent && can_respond(SWITCH)).then(|| query_switch(state));
    let seen = Seen {
        switch_responds: match switch {
            Some(Ok(())) => true,
            None => !has_agent && controller.as_ref().is_some_and(|it| it.in_sync()),
            Some(Err(_)) => false,
        },
        controller: controller.as_ref(),
        links: &links,
    };
    for daemon in daemons.iter_mut().filter(|daemon| daemon.running && !daemon.stopped) {
        daemon.ready = daemon.ready || seen.is_ready(daemon);
    }
    let mut problems = Vec::new();
    if state.phase != Phase::Up {
        problems.push("it was not built completely; take it down and build it again".to_owned());
    }
    problems.extend(links.iter().flat_map(LinkReport::problems));
    problems.extend(daemons.iter().filter_map(|daemon| daemon.problem(&state.spec.name)));
    if controller_can_respond {
        match &controller {
            Some(controller) => problems.extend(problems_of_controller(controller, &daemons)),
            None => problems.push("the controller does not respond; see its log".to_owned()),
        }
    }
    if let Some(Err(error)) = switch {
        problems.push(format!("{error}; see the log of the switch"));
    }
    RackStatus {
        name: state.spec.name.clone(),
        phase: state.phase,
        rootless: state.user_namespace.is_some(),
        healthy: problems.is_empty(),
        problems,
        links,
        daemons,
        controller,
    }
}

/// What shows that a daemon is ready. The record says only whether it reported so in time; a daemon that
/// became ready after its starter had stopped waiting must not count as unready for ever.
struct Seen<'a> {
    switch_responds: bool,
    controller: Option<&'a ControllerReport>,
    links: &'a [LinkReport],
}

impl Seen<'_> {
    fn is_ready(&self, daemon: &DaemonReport) -> bool {
        match daemon.name.as_str() {
            SWITCH => self.switch_responds,
            CONTROLLER => self.controller.is_some(),
            HOSTS => self.links.iter().all(|link| link.mtu.is_some() && link.missing.is_empty()),
            _ => self.controller.is_some_and(|controller| {
                let name = daemon.node.to_string();
                controller.nodes.iter().any(|node| node.name == name && node.state == "live")
            }),
        }
    }
}

impl LinkReport {
    fn problems(&self) -> Vec<String> {
        let Self { node, interface, .. } = self;
        if self.mtu.is_none() {
            return vec![format!("{node} has no interface {interface}")];
        }
        if !self.running {
            return vec![format!("the link of {node} is down: one of its ends is not up")];
        }
        let lost =
            |what| format!("{interface} of {node} lost its {what}; the daemon hosts restores it");
        self.missing.iter().map(lost).collect()
    }
}

impl DaemonReport {
    /// Whether the next process cannot go on with the memory because of its file; a problem says so.
    #[must_use]
    pub const fn is_memory_at_risk(&self) -> bool {
        self.loss.is_some()
    }

    /// What a server reported is not true any more if its file is gone, or was put in order since.
    fn with_loss(
        mut self,
        daemon: &DaemonRecord,
        state: &RackState,
        into_file: LookIntoFile<'_>,
    ) -> Self {
        let Ok(part) = self.name.parse::<Part>() else { return self };
        let restart = part.restart(&state.spec.name);
        self.kept_memory = daemon.reported_memory(&restart);
        // A server that runs and has not reported may be making it.
        let may_be_kept = match &self.kept_memory {
            Some(kept) => kept.is_kept,
            None => !self.running,
        };
        let pid = self.pid.filter(|_| self.running);
        let inside = || into_file(Path::new(arena_of(daemon)?), pid, &restart);
        let loss = may_be_kept.then(|| daemon.loss(state, &restart).or_else(inside));
        self.loss = loss.flatten();
        if let Some(Loss { words, is_recoverable }) = &self.loss {
            self.kept_memory = Some(match is_recoverable {
                true => KeptMemory::unreachable(words),
                false => KeptMemory::lost(words),
            });
        }
        self
    }

    /// What follows the name of a memory server that does not run.
    fn memory_left(&self, restart: &str) -> String {
        match (&self.loss, &self.kept_memory) {
            (Some(loss), _) => format!("and it cannot go on with its memory: {}", loss.words),
            (None, Some(kept)) if kept.is_kept => {
                format!("and its memory is kept; {restart} starts it with that")
            }
            (None, None) if self.may_keep_memory => {
                format!("and its memory may be kept; {restart} starts it if it is")
            }
            (None, _) => format!("and its memory ended with it; {restart} starts it"),
        }
    }

    fn problem(&self, rack: &RackName) -> Option<String> {
        let Self { name, .. } = self;
        let part = name.strip_prefix(MEMORY_SERVER).and_then(|it| it.strip_prefix('-'));
        let keep = if self.may_keep_memory { " --keep" } else { "" };
        let restart =
            format!("`bluebridge rack restart {} --rack {rack}{keep}`", part.unwrap_or(name));
        if !self.running && name == CONTROLLER {
            Some(format!(
                "{name} does not run; {restart} starts it, with --force if its log says that another controller \
                 took the switch"
            ))
        } else if !self.running && part.is_some() {
            Some(format!("{name} does not run, {}", self.memory_left(&restart)))
        } else if !self.running {
            Some(format!("{name} does not run; {restart} starts it"))
        } else if self.stopped {
            let pid = self.pid.unwrap_or_default();
            Some(format!("{name} is stopped by a signal; `kill -CONT {pid}` lets it continue"))
        } else if !self.ready {
            Some(format!("{name} is not ready; see its log"))
        } else {
            // It serves, but its memory is about to be lost.
            let loss = self.loss.as_ref()?;
            Some(format!("the next process of {name} cannot go on with its memory: {}", loss.words))
        }
    }
}

/// The problems in the controller's view: with the switch, and with members that should be daemons of the rack.
fn problems_of_controller(controller: &ControllerReport, daemons: &[DaemonReport]) -> Vec<String> {
    let mut problems = Vec::new();
    for switch in controller.switches.iter().filter(|switch| !switch.in_sync) {
        let reason = switch.problem.as_ref().map_or_else(String::new, |it| format!(": {it}"));
        let state = switch.state;
        problems.push(format!("the switch's tables are not as desired: {state}{reason}"));
    }
    problems.extend(controller.unanswered());
    // A daemon that does not run, or is stopped, is a problem already.
    let servers = daemons.iter().filter(|it| it.running && it.ready && !it.stopped);
    for daemon in servers.filter(|it| it.name.starts_with(MEMORY_SERVER)) {
        let name = daemon.node.to_string();
        match controller.nodes.iter().find(|node| node.name == name).map(|node| node.state) {
            Some("live") => {}
            Some("silent") => problems.push(format!(
                "{name} sends no heartbeats, so it is stuck or unreachable; see the log of {}",
                daemon.name
            )),
            _ => problems.push(format!(
                "{name} is not a member of the rack, although {} runs; see its log",
                daemon.name
            )),
        }
    }
    problems
}

/// How long a controller may take to update the switch before that counts as a problem:
/// after every join and leave the two differ for a moment.
const SYNC_DEADLINE: Duration = Duration::from_secs(1);

/// How often it is queried meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// The controller's view, once the switch has the desired tables or [`SYNC_DEADLINE`] is over.
fn controller(state: &RackState, layout: &Layout) -> Option<ControllerReport> {
    let deadline = Instant::now() + SYNC_DEADLINE;
    loop {
        let report = query_controller(state, layout)?;
        if !report.is_syncing() || Instant::now() >= deadline {
            return Some(report);
        }
        thread::sleep(LOOK);
    }
}

/// Queries the controller in its namespace.
fn query_controller(state: &RackState, layout: &Layout) -> Option<ControllerReport> {
    let address = layout.controller().into();
    let result = access::namespace(state, Node::Switch)
        .and_then(|namespace| Ok(namespace.enter(|| control::controller_status(address))?));
    match result {
        Ok(Ok(status)) => Some(ControllerReport::of(&status)),
        Ok(Err(error)) => {
            tracing::warn!(%error, "the controller's view is not shown");
            None
        }
        Err(error) => {
            tracing::warn!(%error, "the controller's view is not shown");
            None
        }
    }
}

/// Whether the switch's agent responds.
fn query_switch(state: &RackState) -> Result<(), RackError> {
    let namespace = access::namespace(state, Node::Switch)?;
    Ok(namespace.enter(|| control::switch_ports(P4RUNTIME.into()))?.map(drop)?)
}

fn link(state: &RackState, port: &RackPort) -> LinkReport {
    let look = || {
        let netlink = Netlink::open()?;
        let link = netlink.link(port.peer_interface)?;
        Ok((link, wanted(port).missing(&netlink)?))
    };
    let result = access::namespace(state, port.peer).and_then(|namespace| {
        let found = namespace.enter(look)?;
        found.map_err(|source: NetworkError| RackError::Network { node: port.peer, source })
    });
    if let Err(error) = &result {
        tracing::debug!(node = %port.peer, %error, "no link");
    }
    let (status, missing) = result.ok().unzip();
    LinkReport {
        node: port.peer,
        namespace: state.namespace(port.peer).map(Into::into),
        interface: port.peer_interface,
        switch_port: port.number,
        control_address: port.control_address,
        mac: port.peer_mac,
        mtu: status.as_ref().map(|status| status.mtu),
        running: status.is_some_and(|status| status.running),
        missing: missing.unwrap_or_default().iter().map(ToString::to_string).collect(),
    }
}
