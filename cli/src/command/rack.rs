//! `bluebridge rack`: namespaces, links and daemons on this machine.

mod logs;
mod part;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process;

use anyhow::Context;
use bluebridge_rack::controller_report::ControllerReport;
use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, Node, RackName, RackSpec, Redirects};
use bluebridge_rack::state::{LOG_VARIABLE, StateError, StateRoot};
use bluebridge_rack::status::{RackStatus, look, look_with};
use bluebridge_rack::teardown::{TakenDown, take_down_of_another, take_down_unrecorded};
use bluebridge_rack::{GRACE, Rack, RackError, Site, access, hosts, readiness};
use clap::{Args, Subcommand};

use super::member::Deadline;
use super::{Global, interrupt, shutdown, switch_control};
use crate::exit::{ExecError, Exit};
use crate::output;

#[derive(Debug, Subcommand)]
pub(super) enum RackCommand {
    /// Build a rack and start its switch, controller and memory servers
    Up(Up),
    /// Show the links, daemons and members of a rack; fails and names the problems if there are any
    Status(Named),
    /// Stop and remove a rack, even after a crash or without its record; it is no error if there is
    /// no such rack
    Down(Named),
    /// Run a command in a node of a rack; the exit code is that of the command, 127 if the program was not
    /// found, 126 if it cannot be executed
    Exec(Exec),
    /// Kill a daemon of a rack (SIGKILL), to show the effect of its failure
    Kill(part::Kill),
    /// List the racks of this user
    List,
    /// Show what the daemons of a rack logged
    Logs(logs::Logs),
    /// Start a daemon of a rack again, after ending it if it runs
    Restart(part::Restart),
    /// Show the tables of a rack's switch with their counters
    Tables(Named),
    /// Keep the namespaces of a rack without root (started by `rack up`)
    #[command(hide = true)]
    Hold,
    /// Keep the interfaces of a rack's nodes configured (started by `rack up`)
    #[command(hide = true)]
    Watch(Named),
}

impl RackCommand {
    /// Whether it is one of the rack's own daemons.
    pub(super) const fn is_daemon(&self) -> bool {
        matches!(self, Self::Watch(_))
    }
}

/// The default name of a rack.
const USUAL_NAME: &str = "rack";

#[derive(Debug, Args)]
pub(super) struct Named {
    /// The rack; the default is the one in BLUEBRIDGE_RACK, or the only one that is up
    #[arg(long, visible_alias = "name", value_name = "NAME")]
    rack: Option<RackName>,
}

impl Named {
    fn choose(&self, root: &StateRoot) -> Result<RackName, RackError> {
        Ok(root.choose(self.rack.as_ref())?)
    }
}

#[derive(Debug, Args)]
pub(super) struct Up {
    /// The rack's name; the default is the one in BLUEBRIDGE_RACK, or "rack"
    #[arg(long, visible_alias = "name", value_name = "NAME")]
    rack: Option<RackName>,
    /// Number of memory servers: s1, s2, ..
    #[arg(long, default_value_t = 3)]
    servers: u16,
    /// Number of clients: c1, c2, ..
    #[arg(long, default_value_t = 2)]
    clients: u16,
    /// Largest IP packet of the links: for all (9000), for some (s1=1500,c2=1280), or both (9000,s1=1500)
    #[arg(long, default_value = "9000")]
    mtu: LinkMtus,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
    /// The memory of each server, such as 256M; allocated at once
    #[arg(long, default_value = "64M")]
    memory: ByteSize,
    /// Which leased pages the switch redirects to their owners
    #[arg(long, value_enum, default_value_t)]
    redirects: Redirects,
    /// The servers' processes answer all READs, none is answered by the kernel
    #[arg(long)]
    no_direct_reads: bool,
    /// Time that each daemon may take to start, such as 15s
    #[arg(long, value_name = "TIME", default_value_t = Deadline(READY_DEADLINE))]
    deadline: Deadline,
    /// Create only namespaces and links, and start no daemons
    #[arg(long)]
    network_only: bool,
}

#[derive(Debug, Args)]
pub(super) struct Exec {
    #[command(flatten)]
    named: Named,
    /// The node: switch, s1, .., c1, ..
    node: Node,
    /// The command and its arguments, after --
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

pub(super) fn run(command: RackCommand, global: Global) -> anyhow::Result<Exit> {
    match command {
        RackCommand::Up(up) => self::up(up, global),
        RackCommand::Status(named) => status(&named, global),
        RackCommand::Down(named) => down(&named, global),
        RackCommand::Exec(exec) => self::exec(exec),
        RackCommand::Kill(options) => part::kill(&options, global),
        RackCommand::List => list(global),
        RackCommand::Logs(options) => logs::run(&options),
        RackCommand::Restart(options) => part::restart(&options, global),
        RackCommand::Tables(named) => {
            let name = named.choose(&StateRoot::locate())?;
            switch_control::tables_of_rack(&name, global)
        }
        RackCommand::Hold => loop {
            std::thread::park();
        },
        RackCommand::Watch(named) => watch(&named),
    }
}

fn up(up: Up, global: Global) -> anyhow::Result<Exit> {
    let name = StateRoot::named(up.rack.as_ref()).map_err(RackError::from)?;
    let name = name.map_or_else(|| USUAL_NAME.parse(), Ok)?;
    let site = Site::prepare()?;
    let spec = RackSpec {
        name,
        servers: up.servers,
        clients: up.clients,
        mtu: up.mtu,
        switch: up.switch.unwrap_or(site.data_plane()),
        memory: up.memory,
        redirects: up.redirects,
        direct_reads: !up.no_direct_reads,
    };
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let mut rack = Rack::build(&site, spec, cancel)?;
    rack.set_logging(log_filter(global), log_format(global))?;
    if !up.network_only {
        rack.start_daemons(&program, up.deadline.0)?;
    }
    let state = rack.detach(&program)?;
    report(&look(&state), global)?;
    Ok(Exit::Ok)
}

/// The daemons' log filter: the one that this command got, or the level of its -v.
fn log_filter(global: Global) -> Option<String> {
    let filter = std::env::var(LOG_VARIABLE).ok().filter(|filter| !filter.is_empty());
    let level = match global.verbose {
        0 => None,
        1 => Some("info"),
        2 => Some("debug"),
        _ => Some("trace"),
    };
    filter.or_else(|| level.map(str::to_owned))
}

/// The daemons' log format, if this command got one.
fn log_format(global: Global) -> Option<String> {
    global.log_format.map(|format| format.as_str().to_owned())
}

fn watch(named: &Named) -> anyhow::Result<Exit> {
    let root = StateRoot::locate();
    let state = root.read(&named.choose(&root)?).map_err(RackError::from)?;
    shutdown::until_signal(move || Ok(hosts::watch(&state, readiness::report_ready)?))?;
    Ok(Exit::Ok)
}

fn status(named: &Named, global: Global) -> anyhow::Result<Exit> {
    let root = StateRoot::locate();
    let state = root.read(&named.choose(&root)?).map_err(RackError::from)?;
    if let Err(error) = access::join(&state) {
        tracing::warn!(%error, "cannot check the links");
    }
    let status = look_with(&state, &part::look_into_file);
    report(&status, global)?;
    Ok(if status.healthy { Exit::Ok } else { Exit::Failure })
}

fn down(named: &Named, global: Global) -> anyhow::Result<Exit> {
    let root = StateRoot::locate();
    let name = match root.choose(named.rack.as_ref()) {
        // The rest of a rack may have its name without a record.
        Err(StateError::None) => USUAL_NAME.parse()?,
        name => name.map_err(RackError::from)?,
    };
    let taken = match root.lock(&name) {
        Ok(directory) => take_down_of_another(&directory, GRACE).map(Some),
        Err(StateError::Unknown(_)) => take_down_unrecorded(&root, &name, GRACE)
            .map(|taken| (!taken.is_empty()).then_some(taken)),
        Err(error) => Err(RackError::from(error)),
    };
    let Some(taken) = taken? else {
        if global.json {
            output::json(&serde_json::json!({ "name": name, "was_there": false }))?;
        } else {
            output::text(&format!("there is no rack {name}"))?;
        }
        return Ok(Exit::Ok);
    };
    if global.json {
        output::json(&serde_json::json!({ "name": name, "was_there": true, "stopped": taken }))?;
    } else {
        output::text(&sentence(&name, &taken))?;
    }
    Ok(Exit::Ok)
}

fn sentence(name: &RackName, taken: &TakenDown) -> String {
    let mut text = format!(
        "rack {name} is down: {} stopped, {} removed",
        output::counted(taken.daemons.len() as u64, "daemon"),
        output::counted(taken.namespace_count as u64, "namespace")
    );
    if taken.unrecorded && !taken.is_empty() {
        text.push_str(&format!(
            ", {} removed; there was no readable record of it, so these were found by the rack's name",
            output::counted(taken.mount_count as u64, "mount")
        ));
    }
    for other in &taken.others {
        text.push_str(&format!("\nalso stopped: {} ({})", other.name, other.pid));
    }
    text
}

fn exec(exec: Exec) -> anyhow::Result<Exit> {
    let root = StateRoot::locate();
    let state = root.read(&exec.named.choose(&root)?).map_err(RackError::from)?;
    access::join(&state)?;
    access::namespace(&state, exec.node)?.move_caller_in().map_err(RackError::from)?;
    let mut words = exec.command.into_iter();
    let program = words.next().context("no command")?;
    let failure = process::Command::new(&program)
        .args(words)
        .envs(access::rack_environment(&root, &state, exec.node))
        .exec();
    Err(ExecError { program: program.display().to_string(), source: failure }.into())
}

fn list(global: Global) -> anyhow::Result<Exit> {
    let root = StateRoot::locate();
    let mut states = Vec::new();
    for name in root.names().map_err(RackError::from)? {
        states.push((name.clone(), root.read(&name).ok()));
    }
    if global.json {
        let racks: Vec<_> = states
            .iter()
            .map(|(name, state)| {
                let (spec, phase) = state.as_ref().map(|it| (&it.spec, it.phase)).unzip();
                serde_json::json!({ "name": name, "phase": phase, "spec": spec })
            })
            .collect();
        output::json(&racks)?;
        return Ok(Exit::Ok);
    }
    let rows = states.into_iter().map(|(name, state)| {
        let state = state.as_ref();
        let show =
            |show: fn(&RackSpec) -> String| state.map_or_else(String::new, |it| show(&it.spec));
        vec![
            name.to_string(),
            state.map_or_else(
                || "unreadable".to_owned(),
                |it| format!("{:?}", it.phase).to_lowercase(),
            ),
            show(|spec| spec.servers.to_string()),
            show(|spec| spec.clients.to_string()),
            show(|spec| spec.switch.as_str().to_owned()),
            show(|spec| spec.mtu.to_string()),
        ]
    });
    output::table(&["rack", "phase", "servers", "clients", "switch", "mtu"], rows.collect())?;
    Ok(Exit::Ok)
}

fn report(status: &RackStatus, global: Global) -> anyhow::Result<()> {
    if global.json {
        return output::json(status);
    }
    let word = if status.healthy { "healthy" } else { "not healthy" };
    let root = if status.rootless { ", without root" } else { "" };
    output::text(&format!("rack {}: {word}{root}", status.name))?;
    for problem in &status.problems {
        output::prose(&format!("  {problem}"))?;
    }
    let up = |up: bool| if up { "up" } else { "down" }.to_owned();
    let links = status.links.iter().map(|link| {
        vec![
            link.node.to_string(),
            link.interface.to_owned(),
            format!("p{}", link.switch_port),
            up(link.running),
            link.mtu.map_or_else(String::new, |mtu| mtu.to_string()),
            link.control_address.to_string(),
        ]
    });
    let columns = ["node", "interface", "port", "link", "mtu", "control address"];
    output::table(&columns, links.collect())?;
    if status.daemons.is_empty() {
        return Ok(());
    }
    let daemons = status.daemons.iter().map(|daemon| {
        vec![
            daemon.name.clone(),
            daemon.pid.map_or_else(String::new, |pid| pid.to_string()),
            if daemon.stopped { "stopped".to_owned() } else { up(daemon.running && daemon.ready) },
            daemon.log.display().to_string(),
        ]
    });
    output::table(&["daemon", "pid", "state", "log"], daemons.collect())?;
    report_memory(status)?;
    status.controller.as_ref().map_or(Ok(()), report_controller)
}

/// Says whose memory ends with its process, or is kept only for some time, and why.
fn report_memory(status: &RackStatus) -> anyhow::Result<()> {
    let mut by_words = BTreeMap::<_, Vec<_>>::new();
    for daemon in &status.daemons {
        // What is left of one that does not run is a problem, and reported as such.
        let is_lost = daemon.kept_memory.as_ref().is_some_and(|it| !it.is_kept);
        let is_said = daemon.is_memory_at_risk() || (!daemon.running && is_lost);
        if let Some(kept) = daemon.kept_memory.as_ref().filter(|it| it.reason.is_some() && !is_said)
        {
            by_words.entry(kept.to_string()).or_default().push(daemon.node.to_string());
        }
    }
    by_words.into_iter().try_for_each(|(words, names)| {
        output::prose(&format!("The memory of {} {words}.", names.join(", ")))
    })
}

/// The columns of the table of members.
pub(crate) const MEMBER_COLUMNS: [&str; 13] = [
    "member",
    "id",
    "prefix",
    "role",
    "state",
    "space",
    "port",
    "incarnation",
    "generation",
    "free pages",
    "of",
    "weight",
    "direct reads",
];

fn report_controller(controller: &ControllerReport) -> anyhow::Result<()> {
    let nodes = controller.nodes.iter().map(|node| {
        let pages =
            |pages: u64| if node.role == "memory" { pages.to_string() } else { String::new() };
        vec![
            node.name.clone(),
            node.id.to_string(),
            node.prefix.clone(),
            node.role.to_owned(),
            node.state_words(),
            node.space.to_string(),
            format!("p{}", node.switch_port),
            node.incarnation.to_string(),
            node.arena_generation.to_string(),
            pages(node.free_pages),
            pages(node.capacity_pages),
            pages(node.anycast_weight.into()),
            node.direct_reads.as_ref().map_or_else(String::new, ToString::to_string),
        ]
    });
    output::table(&MEMBER_COLUMNS, nodes.collect())?;
    let refusals = controller.nodes.iter().filter_map(|node| {
        let refusal = node.direct_reads.as_ref()?.refusal.as_deref()?;
        Some((refusal, node.name.as_str()))
    });
    let mut by_reason = BTreeMap::<_, Vec<_>>::new();
    refusals.for_each(|(refusal, name)| by_reason.entry(refusal).or_default().push(name));
    by_reason.into_iter().try_for_each(|(refusal, names)| {
        output::prose(&format!("The kernel answers no READs of {}: {refusal}.", names.join(", ")))
    })?;
    controller.switches.iter().try_for_each(|switch| output::prose(&switch.summary()))
}
