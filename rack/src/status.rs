//! What a rack is doing now.

use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::RackError;
use crate::access;
use crate::control;
use crate::controller_report::ControllerReport;
use crate::layout::{Layout, SwitchPort};
use crate::network::{MacAddress, Netlink, NetworkError};
use crate::spec::{Node, RackName};
use crate::state::{Phase, RackState};

/// A rack and all its parts.
#[derive(Clone, Debug, Serialize)]
pub struct RackStatus {
    /// Its name.
    pub name: RackName,
    /// How far its builder came.
    pub phase: Phase,
    /// Whether it needs no root.
    pub rootless: bool,
    /// Whether every link is up and every daemon runs.
    pub healthy: bool,
    /// The links.
    pub links: Vec<LinkReport>,
    /// The daemons.
    pub daemons: Vec<DaemonReport>,
    /// What the controller knows; `None` when there is none or it does not answer.
    pub controller: Option<ControllerReport>,
}

/// One link, seen from the node.
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
    pub mac: MacAddress,
    /// Largest IP packet in bytes, as the kernel has it; `None` when the link is gone.
    pub mtu: Option<u32>,
    /// Whether both ends are up.
    pub running: bool,
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
    /// Whether it reported ready.
    pub ready: bool,
    /// What it prints.
    pub log: PathBuf,
}

/// Looks at every part of a rack; after [`access::join`].
pub fn look(state: &RackState) -> RackStatus {
    let layout = Layout::of(&state.spec);
    let links: Vec<_> = layout.ports().iter().map(|port| link(state, port)).collect();
    let daemons: Vec<_> = state
        .daemons
        .iter()
        .map(|daemon| DaemonReport {
            name: daemon.name.clone(),
            node: daemon.node,
            pid: daemon.process.as_ref().map(|process| process.pid),
            running: daemon.process.as_ref().is_some_and(|process| process.is_running()),
            ready: daemon.ready,
            log: daemon.log.clone(),
        })
        .collect();
    let controller = (!daemons.is_empty()).then(|| controller(state, &layout));
    RackStatus {
        name: state.spec.name.clone(),
        phase: state.phase,
        rootless: state.user_namespace.is_some(),
        healthy: state.phase == Phase::Up
            && links.iter().all(|link| link.running)
            && daemons.iter().all(|daemon| daemon.running && daemon.ready)
            && controller.as_ref().is_none_or(|it| it.as_ref().is_some_and(|it| it.in_sync)),
        links,
        daemons,
        controller: controller.flatten(),
    }
}

/// How long a controller may take to bring the switch up to date before that counts as trouble:
/// whenever somebody comes or goes, the two differ for a moment.
const SYNC_DEADLINE: Duration = Duration::from_secs(1);

/// How often it is asked meanwhile.
const LOOK: Duration = Duration::from_millis(20);

/// The controller's view, once the switch has what it should have or [`SYNC_DEADLINE`] is over.
fn controller(state: &RackState, layout: &Layout) -> Option<ControllerReport> {
    let deadline = Instant::now() + SYNC_DEADLINE;
    loop {
        let report = ask_controller(state, layout)?;
        if !report.is_syncing() || Instant::now() >= deadline {
            return Some(report);
        }
        thread::sleep(LOOK);
    }
}

/// Asks the controller inside of its namespace.
fn ask_controller(state: &RackState, layout: &Layout) -> Option<ControllerReport> {
    let address = layout.controller().into();
    let asked = access::namespace(state, Node::Switch)
        .and_then(|namespace| Ok(namespace.enter(|| control::controller_status(address))?));
    match asked {
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

fn link(state: &RackState, port: &SwitchPort) -> LinkReport {
    let asked = access::namespace(state, port.peer).and_then(|namespace| {
        let asked = namespace.enter(|| Netlink::open()?.link(port.peer_interface))?;
        asked.map_err(|source: NetworkError| RackError::Network { node: port.peer, source })
    });
    if let Err(error) = &asked {
        tracing::debug!(node = %port.peer, %error, "no link");
    }
    let status = asked.ok();
    LinkReport {
        node: port.peer,
        namespace: state.namespace(port.peer).map(Into::into),
        interface: port.peer_interface,
        switch_port: port.number,
        control_address: port.control_address,
        mac: port.peer_mac,
        mtu: status.as_ref().map(|status| status.mtu),
        running: status.is_some_and(|status| status.running),
    }
}
