//! `bluebridge switch`: the embedded switch and its P4Runtime agent, in the foreground.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_switch::agent::{Agent, AgentConfig};
use bluebridge_switch::dataplane::{DataPlane, PortError};
use bluebridge_switch::ebpf::{EbpfSwitch, PortMode};
use bluebridge_switch::soft;
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
    /// A port and its interface; can be given many times, and a switch that is there already loses
    /// the ports that are not given. How the eBPF data plane sends by it: `peer`, into the stack
    /// behind a veth pair (the default where that is possible); `redirect`, through the interface;
    /// `xdp`, as `redirect`, and in the driver between ports of this mode: hosts behind it must send
    /// whole checksums and no trains
    #[arg(long = "port", value_name = "N=INTERFACE[:peer|redirect|xdp]")]
    ports: Vec<PortArgument>,
    /// Where the eBPF data plane pins its maps, on a BPF file system that is mounted; a switch that
    /// is there already goes on with its tables. Without it /sys/fs/bpf/bluebridge/switchDEVICE-ID,
    /// mounted and made as needed
    #[arg(long, value_name = "DIRECTORY")]
    bpf_directory: Option<PathBuf>,
}

/// A port on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PortArgument {
    port: SwitchPort,
    interface: String,
    mode: Option<PortMode>,
}

impl FromStr for PortArgument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, interface) =
            text.split_once('=').ok_or("a port is N=INTERFACE, for example 1=eth0")?;
        let number = number.parse().map_err(|_| format!("{number} is not a port number"))?;
        // No interface's name has a colon.
        let (interface, mode) = match interface.split_once(':') {
            None => (interface, None),
            Some((interface, "peer")) => (interface, Some(PortMode::Peer)),
            Some((interface, "redirect")) => (interface, Some(PortMode::Redirect)),
            Some((interface, "xdp")) => (interface, Some(PortMode::Xdp)),
            Some((_, other)) => {
                return Err(format!("{other:?} is not peer, redirect or xdp"));
            }
        };
        Ok(Self { port: SwitchPort(number), interface: interface.to_owned(), mode })
    }
}

pub(super) fn run(switch: Switch, global: Global) -> anyhow::Result<Exit> {
    match switch.command {
        Some(command) => switch_control::run(command, global),
        None => serve(switch),
    }
}

fn serve(switch: Switch) -> anyhow::Result<Exit> {
    let plane = open(&switch)?;
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

/// The data plane with exactly the ports of the command line.
fn open(switch: &Switch) -> anyhow::Result<Box<dyn DataPlane>> {
    match switch.data_plane {
        Kind::Ebpf => {
            let mut plane = match &switch.bpf_directory {
                Some(directory) => EbpfSwitch::open_in(directory)?,
                None => EbpfSwitch::open(&format!("switch{}", switch.device_id))?,
            };
            attach(&mut plane, &switch.ports, |plane, port| {
                plane.add_port_with(port.port, &port.interface, port.mode)
            })?;
            Ok(Box::new(plane))
        }
        Kind::Soft => {
            if let Some(port) = switch.ports.iter().find(|port| port.mode.is_some()) {
                anyhow::bail!(
                    "port {} has a mode, which only the eBPF data plane has",
                    port.port.0
                );
            }
            let mut plane = soft::Switch::start(SPIN)?;
            attach(&mut plane, &switch.ports, |plane, port| {
                plane.add_port(port.port, &port.interface)
            })?;
            Ok(Box::new(plane))
        }
    }
}

/// Takes the ports from a data plane that are others now, and adds all that it shall have; one
/// that it has already takes the mode.
fn attach<P: DataPlane>(
    plane: &mut P,
    ports: &[PortArgument],
    add: impl Fn(&mut P, &PortArgument) -> Result<(), PortError>,
) -> anyhow::Result<()> {
    for there in plane.ports()? {
        let stays = |it: &PortArgument| it.port == there.port && it.interface == there.name;
        if !ports.iter().any(stays) {
            plane.remove_port(there.port)?;
        }
    }
    for port in ports {
        add(plane, port)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use bluebridge_switch::soft::Pipeline;

    use super::*;

    fn port(text: &str) -> PortArgument {
        text.parse().expect("a port")
    }

    #[test]
    fn a_port_may_have_a_mode() {
        assert_eq!(port("3=eth0").mode, None);
        for (mode, is) in
            [("peer", PortMode::Peer), ("redirect", PortMode::Redirect), ("xdp", PortMode::Xdp)]
        {
            let port = port(&format!("3=eth0:{mode}"));
            assert_eq!((port.port, port.interface.as_str()), (SwitchPort(3), "eth0"));
            assert_eq!(port.mode, Some(is));
        }
        for bad in ["eth0", "x=eth0", "1=eth0:", "1=eth0:XDP", "1=eth0:xdp:peer"] {
            assert!(bad.parse::<PortArgument>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_switch_has_exactly_the_ports_of_the_command_line() {
        let mut plane = Pipeline::new(Instant::now());
        for (ports, names) in [
            (&["1=a", "2=b", "3=c"][..], vec![(1, "a"), (2, "b"), (3, "c")]),
            (&["1=b", "2=a"], vec![(1, "b"), (2, "a")]),
            (&["4=a", "1=b"], vec![(1, "b"), (4, "a")]),
        ] {
            let ports: Vec<_> = ports.iter().map(|text| port(text)).collect();
            attach(&mut plane, &ports, |plane, port| plane.add_port(port.port, &port.interface))
                .expect("attached");
            let there = plane.ports().expect("listed");
            let there: Vec<_> = there.iter().map(|is| (is.port.0, is.name.as_str())).collect();
            assert_eq!(there, names);
        }
    }
}
