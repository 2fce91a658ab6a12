//! `bluebridge host`: connects a real interface of this machine to the fabric.

mod check;

use bluebridge_rack::network::host::HostFabric;
use bluebridge_rack::network::watch::{InterfaceWatch, Wanted};
use bluebridge_rack::network::{Netlink, NetworkError};
use bluebridge_rack::readiness;
use bluebridge_switch::offload::disable_transmit_offloads;
use clap::{Args, Subcommand};
use ipnet::Ipv6Net;
use serde_json::json;

use super::{Global, shutdown};
use crate::exit::Exit;
use crate::output;

#[derive(Debug, Subcommand)]
pub(super) enum HostCommand {
    /// Route pointers through the interface and receive packets for pointers that arrive there
    Up(Up),
    /// Undo `host up`
    Down(Interface),
    #[command(name = "check")]
    Check(check::Check),
    /// Send complete checksums and no trains through the interface, as every switch outside the kernel needs
    NoOffload(Interface),
}

#[derive(Debug, Args)]
pub(super) struct Interface {
    /// The interface that leads to the switch
    #[arg(long)]
    interface: String,
}

#[derive(Debug, Args)]
pub(super) struct Up {
    #[command(flatten)]
    interface: Interface,
    /// Drop RDMA packets for pointers, which end a kernel that has the device `rxe`; set before that is made
    #[arg(long)]
    guard_rdma: bool,
    /// Stay in the foreground and restore what the interface loses when it goes down and up again
    #[arg(long)]
    watch: bool,
    /// An address that the interface should keep, such as 2001:db8::7/64; with --watch
    #[arg(long = "address", value_name = "ADDRESS/LENGTH", requires = "watch")]
    addresses: Vec<Ipv6Net>,
}

impl HostCommand {
    /// Whether it stays in the foreground until it is stopped.
    pub(super) const fn is_daemon(&self) -> bool {
        matches!(self, Self::Up(Up { watch: true, .. }))
    }
}

/// The remedy for a lack of permission.
const NEEDS: &str = "this needs root, or CAP_NET_ADMIN";

/// The error, with a remedy if this user lacks the permission.
fn explained(error: NetworkError) -> anyhow::Error {
    let forbidden = error.is_permission();
    let error = anyhow::Error::new(error);
    if forbidden { error.context(NEEDS) } else { error }
}

pub(super) fn run(command: HostCommand, global: Global) -> anyhow::Result<Exit> {
    let netlink = Netlink::open()?;
    match command {
        HostCommand::Check(asked) => return check::run(asked, &netlink, global),
        HostCommand::Up(Up {
            interface: Interface { interface },
            guard_rdma,
            watch,
            addresses,
        }) => {
            let fabric = HostFabric::new(interface).guarding_rdma(guard_rdma);
            let watch = watch.then(|| {
                InterfaceWatch::open(Wanted {
                    interface: fabric.interface.clone(),
                    fabric: Some(fabric.clone()),
                    addresses,
                })
            });
            let watch = watch.transpose()?;
            let report = fabric.up(&netlink).map_err(explained)?;
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
            if let Some(mut watch) = watch {
                shutdown::until_signal(move || {
                    watch.settle()?;
                    readiness::report_ready();
                    Ok(watch.run()?)
                })?;
            }
        }
        HostCommand::NoOffload(Interface { interface }) => {
            disable_transmit_offloads(&interface).map_err(|error| {
                let forbidden = error.is_permission();
                let error = anyhow::Error::new(error);
                if forbidden { error.context(NEEDS) } else { error }
            })?;
            if global.json {
                output::json(&json!({ "interface": interface }))?;
            }
        }
        HostCommand::Down(Interface { interface }) => {
            let removal = HostFabric::new(interface).down(&netlink).map_err(explained)?;
            if global.json {
                output::json(&removal)?;
            } else {
                let word = if removal.was_up { "no longer leads" } else { "did not lead" };
                output::text(&format!("{} {word} to the fabric", removal.interface))?;
            }
        }
    }
    Ok(Exit::Ok)
}
