//! `bluebridge host`: a machine with a real interface in the fabric.

use bluebridge_rack::network::Netlink;
use bluebridge_rack::network::host::HostFabric;
use clap::{Args, Subcommand};

use super::Global;
use crate::exit::Exit;
use crate::output;

#[derive(Debug, Subcommand)]
pub(super) enum HostCommand {
    /// Route pointers through the interface and receive those that arrive there
    Up(Interface),
    /// Undo that
    Down(Interface),
}

#[derive(Debug, Args)]
pub(super) struct Interface {
    /// The interface that leads to the switch
    #[arg(long)]
    interface: String,
}

pub(super) fn run(command: HostCommand, global: Global) -> anyhow::Result<Exit> {
    let netlink = Netlink::open()?;
    match command {
        HostCommand::Up(Interface { interface }) => {
            let report = HostFabric::new(interface).up(&netlink)?;
            if global.json {
                output::json(&report)?;
            } else {
                let limit = |bytes: Option<u32>| {
                    bytes.map_or_else(
                        || "unknown".to_owned(),
                        |bytes| format!("{} KiB", bytes >> 10),
                    )
                };
                output::text(&format!(
                    "{} leads to the fabric; socket buffers up to {} receiving, {} sending",
                    report.interface,
                    limit(report.receive_buffer_bytes),
                    limit(report.send_buffer_bytes)
                ))?;
            }
        }
        HostCommand::Down(Interface { interface }) => {
            let removal = HostFabric::new(interface).down(&netlink)?;
            if global.json {
                output::json(&removal)?;
            } else {
                let word = if removal.was_up { "leads no more" } else { "did not lead" };
                output::text(&format!("{} {word} to the fabric", removal.interface))?;
            }
        }
    }
    Ok(Exit::Ok)
}
