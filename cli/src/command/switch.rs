//! `bluebridge switch`: the embedded switch and its P4Runtime agent, in the foreground.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_switch::agent::{Agent, AgentConfig};
use bluebridge_switch::dataplane::DataPlane;
use bluebridge_switch::{ebpf::EbpfSwitch, soft};
use clap::Args;

use super::switch_control::SwitchCommand;
use super::{Global, shutdown, switch_control};
use crate::exit::Exit;
use crate::rack::spec::DataPlane as Kind;
use crate::readiness;

/// How long the soft switch polls after the last frame before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Switch {
    #[command(subcommand)]
    command: Option<SwitchCommand>,
    /// Which data plane: in the kernel (root), or in this process
    #[arg(long, value_name = "ebpf|soft", default_value = "ebpf")]
    data_plane: Kind,
    /// Where to serve P4Runtime
    #[arg(long, value_name = "ADDRESS", default_value = "[::1]:9559")]
    listen: SocketAddr,
    /// P4Runtime's number for this switch, at least 1
    #[arg(long, value_name = "N", default_value_t = 1)]
    device_id: u64,
    /// A port and its interface; can be given many times
    #[arg(long = "port", value_name = "N=INTERFACE")]
    ports: Vec<PortArgument>,
    /// Where the eBPF data plane pins its maps, on a BPF file system; a switch that is there already
    /// goes on with its tables
    #[arg(long, value_name = "DIRECTORY", default_value = "/sys/fs/bpf/bluebridge")]
    bpf_directory: PathBuf,
}

/// A port on the command line.
#[derive(Clone, Debug)]
struct PortArgument {
    port: SwitchPort,
    interface: String,
}

impl FromStr for PortArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, interface) =
            text.split_once('=').ok_or("a port is N=INTERFACE, for example 1=eth0")?;
        let number = number.parse().map_err(|_| format!("{number} is not a port number"))?;
        Ok(Self { port: SwitchPort(number), interface: interface.to_owned() })
    }
}

pub(super) fn run(switch: Switch, global: Global) -> anyhow::Result<Exit> {
    match switch.command {
        Some(command) => switch_control::run(command, global),
        None => serve(switch),
    }
}

fn serve(switch: Switch) -> anyhow::Result<Exit> {
    let mut plane: Box<dyn DataPlane> = match switch.data_plane {
        Kind::Ebpf => Box::new(EbpfSwitch::open_in(&switch.bpf_directory)?),
        Kind::Soft => Box::new(soft::Switch::start(SPIN)?),
    };
    attach(plane.as_mut(), &switch.ports)?;
    let config = AgentConfig { listen: switch.listen, device_id: switch.device_id };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("cannot start the agent's runtime")?;
    runtime.block_on(async {
        let shutdown = shutdown::signals()?;
        let agent = Agent::bind(config, plane).await?;
        readiness::notify_ready().context("cannot report that the switch is ready")?;
        agent.serve(shutdown).await?;
        Ok(Exit::Ok)
    })
}

/// Gives the data plane the ports that it does not have yet.
fn attach(plane: &mut dyn DataPlane, ports: &[PortArgument]) -> anyhow::Result<()> {
    let there = plane.ports()?;
    for PortArgument { port, interface } in ports {
        let known = there.iter().find(|status| status.port == *port);
        if known.is_some_and(|status| status.name == *interface) {
            continue;
        }
        if known.is_some() {
            plane.remove_port(*port)?;
        }
        plane.add_port(*port, interface)?;
    }
    Ok(())
}
