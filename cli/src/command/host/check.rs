//! `bluebridge host check`: what this machine can do with BlueBridge, and what is missing for the rest.

use bluebridge_memserver::direct;
use bluebridge_northbound::environment::SPACE_VARIABLE;
use bluebridge_pager::FaultScope;
use bluebridge_rack::network::host::HostFabric;
use bluebridge_rack::network::{Netlink, NetworkError};
use bluebridge_wire::Space;
use clap::Args;
use serde::Serialize;
use serde_json::json;

use super::Interface;
use crate::command::Global;
use crate::exit::Exit;
use crate::output;

/// Show what this machine can do, and what is missing for the rest
///
/// Ends with 1 if the interface does not lead to the fabric; everything else is optional. Nothing is changed for good:
/// whether the kernel can answer READs is found out with a program that is attached to the interface for a moment.
#[derive(Debug, Args)]
pub(in crate::command) struct Check {
    #[command(flatten)]
    interface: Interface,
    /// The space (tenant) whose pointers are looked at
    #[arg(long, env = SPACE_VARIABLE, value_name = "N", default_value_t = 1)]
    space: u16,
}

/// An ability of the machine.
#[derive(Debug, Serialize)]
struct Ability {
    name: &'static str,
    is_ready: bool,
    /// What there is, or what is missing and how to get it.
    words: String,
}

impl Ability {
    fn of(name: &'static str, found: Result<String, String>) -> Self {
        let is_ready = found.is_ok();
        Self { name, is_ready, words: found.unwrap_or_else(|missing| missing) }
    }
}

pub(super) fn run(asked: Check, netlink: &Netlink, global: Global) -> anyhow::Result<Exit> {
    let Check { interface: Interface { interface }, space } = asked;
    let fabric = match HostFabric::new(&interface).check(netlink, Space(space)) {
        Ok(()) => Ok(format!("{interface} sends and receives pointers")),
        Err(missing @ NetworkError::NotInFabric { .. }) => Err(missing.to_string()),
        // Nothing else can be found out either.
        Err(error) => return Err(error.into()),
    };
    let leads_to_fabric = fabric.is_ok();
    let direct = direct::probe(&interface);
    let direct = direct.map(|()| {
        format!("the kernel can answer READs on {interface}, of memory that is kept in a file")
    });
    let scope = bluebridge_pager::probe();
    let programs = match scope {
        Ok(FaultScope::UserAndKernel) => Ok("`bluebridge run` gives them remote memory".to_owned()),
        Ok(FaultScope::UserOnly) => Err(USER_ONLY.to_owned()),
        Err(_) => Err("they need a pager".to_owned()),
    };
    let pager = scope.map(|_| "userfaultfd resolves page faults of its own regions".to_owned());
    let abilities = [
        Ability::of("fabric", fabric),
        Ability::of("direct reads", direct.map_err(|reason| reason.to_string())),
        Ability::of("pager", pager.map_err(|error| error.to_string())),
        Ability::of("unmodified programs", programs),
        Ability::of("rdma", rdma()),
    ];
    if global.json {
        output::json(&json!({ "interface": interface, "abilities": abilities }))?;
    } else {
        let row = |ability: &Ability| {
            let state = if ability.is_ready { "yes" } else { "no" };
            vec![ability.name.to_owned(), state.to_owned(), ability.words.clone()]
        };
        output::table(&["ability", "ready", "why"], abilities.iter().map(row).collect())?;
    }
    Ok(if leads_to_fabric { Exit::Ok } else { Exit::Failure })
}

/// As the preloaded library says.
const USER_ONLY: &str = "system calls on memory that is not local would fail: run as root, allow access to \
                         /dev/userfaultfd, or `sysctl vm.unprivileged_userfaultfd=1`";

#[cfg(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64"))]
fn rdma() -> Result<String, String> {
    let names = bluebridge_rdma::device_names().map_err(|error| error.to_string())?;
    for name in &names {
        bluebridge_rdma::Device::open(name).map_err(|error| error.to_string())?;
    }
    Ok(format!("{} can be opened; nothing uses it yet", names.join(", ")))
}

#[cfg(not(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64")))]
fn rdma() -> Result<String, String> {
    Err("this program was built for a system without RDMA: build it for 64-bit Linux with glibc"
        .to_owned())
}
