//! `bluebridge switch`: a switch in the foreground: the embedded one with its P4Runtime agent, Open vSwitch or BMv2.

mod child;
pub(super) mod openflow;
mod pins;

use std::io;
use std::net::SocketAddr;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::thread;
use std::time::Duration;

use anyhow::Context;
use bluebridge_p4::declaration::PORT_MAX;
use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_rack::bmv2::{self, Bmv2, Bmv2Error};
use bluebridge_rack::layout::{OPENFLOW, P4RUNTIME};
use bluebridge_rack::open_vswitch::OpenVswitch;
use bluebridge_rack::readiness;
use bluebridge_rack::spec::DataPlane as Kind;
use bluebridge_switch::agent::{Agent, AgentConfig};
use bluebridge_switch::dataplane::{DataPlane, PlaneError, PortError};
use bluebridge_switch::ebpf::{EbpfSwitch, PortMode};
use bluebridge_switch::socket_link::SocketLink;
use bluebridge_switch::soft;
use bluebridge_transport::interface::Interface;
use clap::{Args, Subcommand};

use self::pins::{Pins, Place};
use super::switch_control::Query;
use super::{Global, shutdown, switch_control};
use crate::exit::{Exit, UsageError};

/// How long the soft switch polls after the last frame before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(super) struct Switch {
    #[command(subcommand)]
    command: Option<SwitchCommand>,
    /// The data plane: in the kernel (root), in this process, Open vSwitch (root, package openvswitch-switch), or BMv2
    #[arg(long, value_name = "ebpf|soft|ovs|bmv2", default_value = "ebpf")]
    data_plane: Kind,
    /// The address on which the switch serves P4Runtime ([::1]:9559), or on which Open vSwitch listens for OpenFlow
    /// controllers ([::1]:6653)
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// The directory of Open vSwitch's database, sockets and logs; created if it is missing
    #[arg(long, value_name = "DIR", required_if_eq("data_plane", "ovs"))]
    ovs_directory: Option<PathBuf>,
    /// BMv2's simple_switch_grpc
    #[arg(long = "bmv2-program", value_name = "FILE", env = bmv2::VARIABLE)]
    bmv2: Option<PathBuf>,
    /// A port and its interface; can be repeated. An existing switch loses the ports that are not
    /// given. With the soft data plane, unix:PATH instead of an interface is a link to a process such as a virtual
    /// machine: one datagram is one frame, the switch's socket is PATH, and the other end's PATH.peer. The mode says how the eBPF data plane sends: `peer`, into the stack
    /// behind a veth pair (the default if possible); `redirect`, through the interface;
    /// `xdp`, like `redirect`, and in the driver between ports of this mode: hosts behind it must send
    /// complete checksums and no trains
    #[arg(long = "port", value_name = "N=INTERFACE[:peer|redirect|xdp]|N=unix:PATH")]
    ports: Vec<PortArgument>,
    #[command(flatten)]
    place: Place,
}

impl Switch {
    /// Whether it runs a switch, not a query.
    pub(super) fn is_daemon(&self) -> bool {
        self.command.is_none()
    }
}

#[derive(Debug, Subcommand)]
enum SwitchCommand {
    #[command(flatten)]
    Control(Query),
    /// Remove a switch in the kernel whose agent has ended, with its pins
    Remove(Place),
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
            text.split_once('=').ok_or("a port must be N=INTERFACE, for example 1=eth0")?;
        let parsed = number.parse().ok().filter(|number| (1..=PORT_MAX).contains(number));
        let number =
            parsed.ok_or_else(|| format!("{number} is not a port number, 1 to {PORT_MAX}"))?;
        if let Some(path) = SocketLink::path_in(interface) {
            let interface = interface.to_owned();
            return match path.as_os_str().is_empty() {
                true => Err("unix: needs a path, for example 1=unix:/run/machine1".to_owned()),
                false => Ok(Self { port: SwitchPort(number), interface, mode: None }),
            };
        }
        // No interface name has a colon.
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
        Some(SwitchCommand::Remove(place)) => pins::remove(&place, global),
        Some(SwitchCommand::Control(query)) => switch_control::run(query, global),
        None => serve(switch),
    }
}

fn serve(switch: Switch) -> anyhow::Result<Exit> {
    if switch.ovs_directory.is_some() && switch.data_plane != Kind::Ovs {
        return Err(UsageError("--ovs-directory is for --data-plane ovs".to_owned()).into());
    }
    let mut pins = match switch.data_plane {
        Kind::Ebpf => Some(switch.place.take()?),
        Kind::Soft => None,
        Kind::Ovs => return serve_ovs(&switch),
        Kind::Bmv2 => return serve_bmv2(&switch),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_io()
        .enable_time()
        .build()
        .context("cannot start the agent's runtime")?;
    runtime.block_on(async {
        let (shutdown, agent) = match start(&switch, pins.as_mut()).await {
            Ok(started) => started,
            Err(error) => {
                if let Some(pins) = pins {
                    pins.forget_start();
                }
                return Err(error);
            }
        };
        agent.serve(shutdown).await?;
        Ok(Exit::Ok)
    })
}

fn serve_ovs(switch: &Switch) -> anyhow::Result<Exit> {
    let directory = switch.ovs_directory.as_deref().unwrap_or(Path::new("."));
    let listen = switch.listen.unwrap_or(OPENFLOW.into());
    let ports = numbered(&switch.ports)?;
    let start = || Ok(OpenVswitch::start(directory, listen, ports)?);
    let logs = format!("see the logs of Open vSwitch in {}", directory.display());
    child::serve(start, OpenVswitch::try_wait, &logs)
}

fn serve_bmv2(switch: &Switch) -> anyhow::Result<Exit> {
    let program = switch.bmv2.as_deref().ok_or(Bmv2Error::Unset)?;
    let listen = switch.listen.unwrap_or(P4RUNTIME.into());
    let ports = numbered(&switch.ports)?;
    let start = || Ok(Bmv2::start(program, listen, switch.place.device_id, ports)?);
    let id = switch.place.device_id;
    let hint = format!(
        "BMv2 logs no reason. It ends so if a controller has another --device-id than {id}, or no `--target bmv2`"
    );
    child::serve(start, Bmv2::try_wait, &hint)
}

/// Ports without modes, which only those of the eBPF data plane have. A switch in another program would start without
/// the ports that it cannot use.
fn numbered(ports: &[PortArgument]) -> Result<impl Iterator<Item = (u16, &str)>, UsageError> {
    refuse_modes(ports)?;
    refuse_socket_links(ports)?;
    for (index, PortArgument { port, interface, .. }) in ports.iter().enumerate() {
        Interface::by_name(interface)
            .map_err(|error| UsageError(format!("cannot use interface {interface}: {error}")))?;
        let earlier = &ports[..index];
        if earlier.iter().any(|other| other.port == *port || other.interface == *interface) {
            return Err(UsageError(format!("port {} or {interface} is given twice", port.0)));
        }
    }
    Ok(ports.iter().map(|port| (port.port.0, port.interface.as_str())))
}

/// Only ports of the eBPF data plane have modes.
fn refuse_modes(ports: &[PortArgument]) -> Result<(), UsageError> {
    match ports.iter().find(|port| port.mode.is_some()) {
        None => Ok(()),
        Some(port) => Err(UsageError(format!(
            "port {} has a mode, but only ports of the eBPF data plane have modes",
            port.port.0
        ))),
    }
}

/// Only ports of the soft data plane can be links of sockets.
fn refuse_socket_links(ports: &[PortArgument]) -> Result<(), UsageError> {
    match ports.iter().find(|port| SocketLink::path_in(&port.interface).is_some()) {
        None => Ok(()),
        Some(port) => Err(UsageError(format!(
            "port {} is {}, but only the soft data plane has such ports: use --data-plane soft",
            port.port.0, port.interface
        ))),
    }
}

/// Opens the data plane and starts listening; if this fails, no process holds the data plane.
async fn start(
    switch: &Switch,
    pins: Option<&mut Pins>,
) -> anyhow::Result<(impl Future<Output = ()> + Send + use<>, Agent)> {
    let shutdown = shutdown::signals()?;
    // A signal makes the kernel's verifier stop in the middle of a program, and the signal wakes this thread
    // first: so another thread loads the programs.
    let opened = thread::scope(|scope| scope.spawn(|| open(switch, pins)).join());
    let plane = opened.unwrap_or_else(|panic| resume_unwind(panic))?;
    let listen = switch.listen.unwrap_or(P4RUNTIME.into());
    let config = AgentConfig { listen, device_id: switch.place.device_id };
    let agent = Agent::bind(config, plane).await?;
    readiness::report_ready();
    Ok((shutdown, agent))
}

/// Opens the data plane with exactly the ports of the command line; with pins it is the one in the kernel.
fn open(switch: &Switch, pins: Option<&mut Pins>) -> anyhow::Result<Box<dyn DataPlane>> {
    match pins {
        Some(pins) => {
            if !EbpfSwitch::is_built() {
                return Err(PlaneError::NoEbpf.into());
            }
            refuse_socket_links(&switch.ports)?;
            let mut plane = pins.open()?;
            attach(&mut plane, &switch.ports, |plane, port| {
                plane.add_port_with(port.port, &port.interface, port.mode)
            })?;
            Ok(Box::new(plane))
        }
        None => {
            refuse_modes(&switch.ports)?;
            let mut plane = soft::Switch::start(SPIN)?;
            let attached = attach(&mut plane, &switch.ports, |plane, port| {
                plane.add_port(port.port, &port.interface)
            });
            attached.map_err(|error| match &error {
                PortError::Plane(PlaneError::Io { source, .. })
                    if source.kind() == io::ErrorKind::PermissionDenied =>
                {
                    anyhow::Error::new(error).context("this needs root, or CAP_NET_RAW")
                }
                _ => error.into(),
            })?;
            Ok(Box::new(plane))
        }
    }
}

/// Removes ports that have changed from a data plane, and adds all ports that it must have; an existing
/// port takes the mode.
fn attach<P: DataPlane>(
    plane: &mut P,
    ports: &[PortArgument],
    add: impl Fn(&mut P, &PortArgument) -> Result<(), PortError>,
) -> Result<(), PortError> {
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
        for bad in [
            "eth0",
            "x=eth0",
            "0=eth0",
            "510=eth0",
            "511=eth0",
            "65536=eth0",
            "1=eth0:",
            "1=eth0:XDP",
            "1=eth0:xdp:peer",
        ] {
            assert!(bad.parse::<PortArgument>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_port_may_be_a_link_of_sockets_of_the_soft_data_plane() {
        let link = port("4=unix:/run/a:b");
        assert_eq!((link.port, link.interface.as_str()), (SwitchPort(4), "unix:/run/a:b"));
        assert!("4=unix:".parse::<PortArgument>().is_err());
        let refused = refuse_socket_links(&[port("3=eth0"), link]).expect_err("it is one");
        assert!(refused.to_string().contains("--data-plane soft"), "{refused}");
        refuse_socket_links(&[port("3=eth0:xdp")]).expect("an interface");
    }

    #[test]
    fn a_port_that_the_tables_cannot_name_is_refused_with_the_limit() {
        assert_eq!(port("509=eth0").port, SwitchPort(509));
        let refused = "600=eth0".parse::<PortArgument>().expect_err("9 bits");
        assert_eq!(refused, "600 is not a port number, 1 to 509");
        let mut plane = Pipeline::new(Instant::now());
        plane.add_port(SwitchPort(509), "a").expect("the greatest");
        for number in [0, 510, 511, 1023, 1024] {
            let refused = plane.add_port(SwitchPort(number), "b").expect_err("not below 510");
            assert!(matches!(refused, PortError::Invalid { .. }), "{number}: {refused}");
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

    #[test]
    fn a_build_without_clang_says_what_to_do() {
        let words = PlaneError::NoEbpf.to_string();
        for remedy in ["clang was missing", "install clang and build again", "soft data plane"] {
            assert!(words.contains(remedy), "{words}");
        }
    }
}
