//! `bluebridge host check`: what this machine can do with BlueBridge, and what is missing for the rest.

use bluebridge_memserver::direct;
use bluebridge_pager::FaultScope;
use bluebridge_rack::network::Netlink;
use bluebridge_rack::network::host::HostFabric;
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
    #[arg(long, value_name = "N", default_value_t = 1)]
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

pub(super) fn run(asked: Check, global: Global) -> anyhow::Result<Exit> {
    let Check { interface: Interface { interface }, space } = asked;
    let netlink = Netlink::open()?;
    let fabric = HostFabric::new(&interface).check(&netlink, Space(space));
    let leads_to_fabric = fabric.is_ok();
    let fabric = fabric.map(|()| format!("{interface} sends and receives pointers"));
    let direct = direct::probe(&interface);
    let abilities = [
        Ability::of("fabric", fabric.map_err(|error| error.to_string())),
        Ability::of(
            "direct reads",
            direct
                .map(|()| format!("the kernel can answer READs on {interface}"))
                .map_err(|reason| reason.to_string()),
        ),
        Ability::of("pager", pager()),
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

/// Whether unmodified programs can have remote memory.
fn pager() -> Result<String, String> {
    match bluebridge_pager::probe() {
        Ok(FaultScope::UserAndKernel) => Ok("userfaultfd resolves all page faults".to_owned()),
        Ok(FaultScope::UserOnly) => Ok("userfaultfd resolves faults of programs, and not of \
                                        system calls on their behalf, which need root or \
                                        `sysctl vm.unprivileged_userfaultfd=1`"
            .to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64"))]
fn rdma() -> Result<String, String> {
    match bluebridge_rdma::device_names() {
        Ok(names) => Ok(format!("there is {}; nothing uses it yet", names.join(", "))),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu", target_pointer_width = "64")))]
fn rdma() -> Result<String, String> {
    Err("this program was built for a system without RDMA: build it for 64-bit Linux with glibc"
        .to_owned())
}
