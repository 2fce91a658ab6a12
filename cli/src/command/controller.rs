//! `bluebridge controller`: runs a controller in the foreground, or queries a running one.

pub(super) mod query;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use bluebridge_controller::core::{ControllerPort, LinkEnd, Place, Topology};
use bluebridge_controller::redirect::{REDIRECT_BUDGET, REDIRECTS_MAX, RedirectPolicy};
use bluebridge_controller::{Config, Controller as Running, TlsPaths, config};
use bluebridge_northbound::environment::{EnvironmentError, SwitchPort as PortName};
use bluebridge_p4::declaration::PORT_MAX;
use bluebridge_p4::pipeline::{MacAddr, SwitchPort};
use bluebridge_p4::program::BMV2_CONFIG;
use bluebridge_rack::readiness;
use bluebridge_rack::spec::Redirects;
use bluebridge_transport::interface::Interface;
use clap::{Args, ValueEnum};

use self::query::Query;
use super::switch_address::{Link, NamedSwitch, SwitchAddress};
use super::{Global, shutdown};
use crate::exit::{Exit, UsageError};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct Controller {
    #[command(subcommand)]
    query: Option<Query>,
    #[command(flatten)]
    serve: Serve,
}

impl Controller {
    /// Whether it runs a controller, not a query.
    pub(super) fn is_daemon(&self) -> bool {
        self.query.is_none()
    }
}

/// A kind of P4Runtime switch.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum P4Target {
    /// The embedded switch, which compiles nothing
    #[default]
    Embedded,
    /// BMv2's simple_switch_grpc, with the compiled P4 program
    Bmv2,
}

/// The options of a controller.
#[derive(Debug, Args)]
struct Serve {
    /// The address on which endpoints join
    #[arg(long, value_name = "ADDRESS", default_value = "[::]:7700")]
    listen: SocketAddr,
    /// The switch: the ADDRESS of its P4Runtime server, openflow://ADDRESS of a switch that listens for OpenFlow
    /// controllers, or openflow-listen://ADDRESS, to which an OpenFlow switch connects. ?datapath-id=ID after an
    /// OpenFlow address refuses other switches. With NAME= before it, it can be repeated; endpoints then name
    /// their switch
    #[arg(long = "switch", value_name = "[NAME=]ADDRESS", default_value = "[::1]:9559")]
    switches: Vec<NamedSwitch>,
    /// A link between two switches, such as tor1/9-spine/1. The switches must form a tree
    #[arg(long = "link", value_name = "SWITCH/PORT-SWITCH/PORT")]
    links: Vec<Link>,
    /// The kind of P4Runtime switch, which decides the device configuration that it gets; once for all switches, or
    /// once for each in their order
    #[arg(long = "target", value_enum, default_values_t = [P4Target::default()])]
    targets: Vec<P4Target>,
    /// P4Runtime's number for the switch; once for all switches, or once for each in their order
    #[arg(long = "device-id", value_name = "N", default_values_t = [1], value_parser = clap::value_parser!(u64).range(1..))]
    device_ids: Vec<u64>,
    /// The file that stores node ids, generations, incarnations and epochs; created if it is missing
    #[arg(long, value_name = "FILE", required = true)]
    store: Option<PathBuf>,
    /// Take the switch from another controller: after this one was fenced, or with an empty store in
    /// front of a switch that serves endpoints. Use it for one start by hand, never in a supervisor: two
    /// controllers with this option take the switch from each other in turns
    #[arg(long)]
    force: bool,
    /// The controller's interface to the switch, if endpoints reach it through the switch: no endpoint can
    /// join with its MAC address, and the switch sends traffic for it only to its port
    #[arg(long, value_name = "NAME", requires = "switch_port")]
    interface: Option<String>,
    /// The switch's port to which this interface is connected, such as 3 or p3, or spine/3 if there are several
    /// switches; no endpoint can have it
    #[arg(long, value_name = "[SWITCH/]PORT", requires = "interface", value_parser = parse_own_port)]
    switch_port: Option<PortName>,
    /// The ports of a switch that does not list them, such as BMv2: traffic outside the fabric is flooded to all of
    /// them, so that endpoints can join through the switch
    #[arg(long, value_name = "[SWITCH/]PORT,..", value_delimiter = ',', value_parser = parse_own_port)]
    ports: Vec<PortName>,
    /// Which leased pages the switch redirects to their owners
    #[arg(long, value_enum, default_value_t)]
    redirects: Redirects,
    /// The most redirects at a time
    #[arg(long, value_name = "N", default_value_t = REDIRECT_BUDGET as u64, value_parser = clap::value_parser!(u64).range(..=REDIRECTS_MAX as u64))]
    redirect_budget: u64,
    /// The controller's certificate chain (PEM): endpoints then join with TLS
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    tls_certificate: Option<PathBuf>,
    /// The certificate's private key (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// The root (PEM) of the endpoints' certificates; each endpoint then joins only under a
    /// DNS name of its certificate
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_client_root: Option<PathBuf>,
    /// A DNS name of an operator's certificate; operators may list and purge the memory of all spaces. Can be
    /// repeated. Without --tls-client-root every caller that reaches the controller may do so
    #[arg(long = "operator", value_name = "NAME", requires = "tls_client_root")]
    operators: Vec<String>,
}

pub(super) fn run(controller: Controller, global: Global) -> anyhow::Result<Exit> {
    match controller.query {
        Some(query) => query::run(query, global),
        None => serve(controller.serve),
    }
}

fn configure(options: Serve) -> anyhow::Result<Config> {
    let topology = topology(&options)?;
    let mut config = Config::new(options.listen, addresses(&options)?);
    config.core.own_port = own_port(&topology, options.interface.zip(options.switch_port))?;
    let ports = options.ports.iter().map(|port| place(&topology, port, "--ports"));
    config.core.ports = ports.collect::<Result<_, _>>()?;
    config.core.topology = topology;
    config.core.redirects = policy(options.redirects);
    config.core.redirect_budget = usize::try_from(options.redirect_budget)?;
    config.store = options.store;
    config.force = options.force;
    config.operators = options.operators;
    config.tls = options.tls_certificate.zip(options.tls_key).map(|(certificate, key)| TlsPaths {
        certificate,
        key,
        client_root: options.tls_client_root,
    });
    Ok(config)
}

fn serve(options: Serve) -> anyhow::Result<Exit> {
    let config = configure(options)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_io()
        .enable_time()
        .build()
        .context("cannot start the controller's runtime")?;
    runtime.block_on(async {
        let shutdown = shutdown::signals()?;
        let mut running = Running::bind(config).await?;
        let installed = running.installed();
        let serving = running.run(shutdown);
        tokio::pin!(serving);
        tokio::select! {
            ended = &mut serving => return Ok(ended.map(|()| Exit::Ok)?),
            // Before the switch has its tables, no endpoint could reach the controller through it.
            _ = installed => readiness::report_ready(),
        };
        serving.await?;
        Ok(Exit::Ok)
    })
}

/// The switches and their links.
fn topology(options: &Serve) -> anyhow::Result<Topology> {
    let names = options.switches.iter().map(|switch| switch.name.clone()).collect();
    let links: Vec<_> =
        options.links.iter().map(|Link(one, other)| (end(one), end(other))).collect();
    Topology::new(names, &links).map_err(|error| UsageError(error.to_string()).into())
}

fn end(PortName { switch, number }: &PortName) -> LinkEnd {
    (switch.clone(), SwitchPort(*number))
}

/// The addresses of the switches, with their device ids and configurations.
fn addresses(options: &Serve) -> anyhow::Result<Vec<config::SwitchAddress>> {
    let count = options.switches.len();
    let targets = for_each(count, &options.targets, "--target")?;
    let device_ids = for_each(count, &options.device_ids, "--device-id")?;
    let address = |(switch, (target, device_id)): (&NamedSwitch, _)| match switch.address {
        SwitchAddress::OpenFlow(switch) => config::SwitchAddress::OpenFlow(switch),
        SwitchAddress::P4Runtime(address) => config::SwitchAddress::P4Runtime {
            uri: format!("http://{address}"),
            device_id,
            device_config: match target {
                P4Target::Embedded => None,
                P4Target::Bmv2 => Some(BMV2_CONFIG.to_vec()),
            },
        },
    };
    let found: Vec<_> = options.switches.iter().zip(targets.zip(device_ids)).map(address).collect();
    let is_same = |one: &config::SwitchAddress, other: &config::SwitchAddress| match (one, other) {
        (
            config::SwitchAddress::P4Runtime { uri, device_id, .. },
            config::SwitchAddress::P4Runtime { uri: other, device_id: other_id, .. },
        ) => (uri, device_id) == (other, other_id),
        // One address has one switch, whatever its datapath id is.
        (config::SwitchAddress::OpenFlow(one), config::SwitchAddress::OpenFlow(other)) => {
            one.address == other.address
        }
        _ => one == other,
    };
    let twice = (0..count)
        .find(|index| found[..*index].iter().any(|earlier| is_same(earlier, &found[*index])));
    match twice {
        Some(index) => {
            Err(UsageError(format!("{} is given for two switches", found[index])).into())
        }
        None => Ok(found),
    }
}

/// A value for each of `count` switches: their own, or one for all.
fn for_each<T: Copy>(
    count: usize,
    given: &[T],
    option: &str,
) -> Result<impl Iterator<Item = T>, UsageError> {
    if given.len() != 1 && given.len() != count {
        let words = format!("{option} is needed once, or once for each of the {count} switches");
        return Err(UsageError(words));
    }
    Ok(given.iter().copied().cycle().take(count))
}

/// A port that exists on a switch: the first has 1.
fn parse_own_port(text: &str) -> Result<PortName, EnvironmentError> {
    let port: PortName = text.parse()?;
    match port.number {
        1..=PORT_MAX => Ok(port),
        _ => Err(EnvironmentError::SwitchPort(text.to_owned())),
    }
}

/// The controller's own port.
fn own_port(
    topology: &Topology,
    given: Option<(String, PortName)>,
) -> anyhow::Result<Option<ControllerPort>> {
    let Some((name, port)) = given else { return Ok(None) };
    let interface = Interface::by_name(&name)
        .map_err(|error| UsageError(format!("cannot use interface {name}: {error}")))?;
    let place = place(topology, &port, "--switch-port")?;
    Ok(Some(ControllerPort { place, mac: MacAddr(interface.mac) }))
}

/// The port that an option names.
fn place(topology: &Topology, port: &PortName, option: &str) -> Result<Place, UsageError> {
    let switch = topology.find(&port.switch).ok_or_else(|| {
        UsageError(format!("{option} {port} names none of the switches; write SWITCH/PORT"))
    })?;
    Ok(Place { switch, port: SwitchPort(port.number) })
}

const fn policy(redirects: Redirects) -> RedirectPolicy {
    match redirects {
        Redirects::Always => RedirectPolicy::Always,
        Redirects::Contended => RedirectPolicy::Contended,
        Redirects::Off => RedirectPolicy::Off,
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_controller::core::{GATEWAY_MAC, SwitchId};
    use clap::Parser;
    use clap::error::ErrorKind;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        controller: Controller,
    }

    #[test]
    fn without_a_store_it_does_not_start() {
        let refused = Line::try_parse_from(["controller"]).expect_err("no store");
        assert_eq!(refused.kind(), ErrorKind::MissingRequiredArgument);
        assert!(refused.to_string().contains("--store <FILE>"), "{refused}");
        let line = Line::try_parse_from(["controller", "--store", "c.redb"]).expect("complete");
        assert_eq!(line.controller.serve.store, Some(PathBuf::from("c.redb")));
    }

    #[test]
    fn ports_of_a_switch_that_lists_none_are_numbers_of_ports() {
        let ports =
            |text| Line::try_parse_from(["controller", "--store", "c.redb", "--ports", text]);
        assert_eq!(
            ports("1,2,509").expect("ports").controller.serve.ports,
            [1, 2, 509].map(PortName::from)
        );
        let given = ports("1,p2").expect("ports").controller.serve;
        let at = |port| Place { switch: SwitchId(0), port: SwitchPort(port) };
        assert_eq!(configure(given).expect("valid").core.ports, [1, 2].map(at));
        for bad in ["0", "1,510", "1,,2", "eth0"] {
            assert!(ports(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_query_needs_no_store_and_takes_none() {
        for query in ["status", "members", "tables", "watch"] {
            let line = Line::try_parse_from(["controller", query]).expect("complete");
            assert!(!line.controller.is_daemon(), "{query}");
            let mixed = ["controller", "--store", "c.redb", query];
            assert!(Line::try_parse_from(mixed).is_err(), "{query} runs no controller");
        }
        let line = Line::try_parse_from(["controller", "--store", "c.redb"]).expect("complete");
        assert!(line.controller.is_daemon());
    }

    #[test]
    fn the_own_port_is_an_interface_and_a_number() {
        let parse = |more: &[&str]| {
            let line = ["controller", "--store", "c.redb"].iter().chain(more);
            Line::try_parse_from(line).map(|line| line.controller.serve)
        };
        assert!(parse(&["--interface", "lo"]).is_err() && parse(&["--switch-port", "6"]).is_err());
        let given = parse(&["--interface", "lo", "--switch-port", "6"]).expect("complete");
        let only = Topology::default();
        let own = own_port(&only, given.interface.zip(given.switch_port)).expect("a loopback");
        let place = Place { switch: SwitchId(0), port: SwitchPort(6) };
        assert_eq!(own, Some(ControllerPort { place, mac: MacAddr([0; 6]) }));
        for (interface, port) in [("no-such-if", "1"), ("lo", "spine/1")] {
            let given = (interface.to_owned(), port.parse().expect("a port"));
            let error = own_port(&only, Some(given)).expect_err("there is none");
            assert_eq!(Exit::of(&error), Exit::Usage);
        }
    }

    #[test]
    fn the_gateway_that_hosts_use_is_the_one_that_is_reserved() {
        assert_eq!(GATEWAY_MAC.0, bluebridge_rack::network::host::GATEWAY_MAC.0);
    }

    #[test]
    fn several_switches_have_names_and_links() {
        let parse = |more: &[&str]| {
            let line = ["controller", "--store", "c.redb"].iter().chain(more);
            Line::try_parse_from(line).map(|line| line.controller.serve)
        };
        let twice = ["--switch", "a=[::1]:1", "--switch", "b=[::1]:1"];
        assert!(addresses(&parse(&twice).expect("complete")).is_err(), "one switch, two names");
        let listening = "openflow-listen://[::1]:1?datapath-id=";
        let (one, other) = (format!("a={listening}1"), format!("b={listening}2"));
        let ids = ["--switch", &one, "--switch", &other];
        assert!(addresses(&parse(&ids).expect("complete")).is_err(), "one address, two switches");
        let devices = [&twice[..], &["--device-id", "1", "--device-id", "2"]].concat();
        assert!(addresses(&parse(&devices).expect("complete")).is_ok(), "two devices of a server");
        let two = ["--switch", "tor=[::1]:1", "--switch", "spine=openflow://[::1]:2"];
        let linked = [&two[..], &["--link", "tor/9-spine/1"]].concat();
        let given = parse(&linked).expect("complete");
        let tree = topology(&given).expect("a tree");
        let host = Place { switch: SwitchId(1), port: SwitchPort(4) };
        assert_eq!(tree.port_toward(SwitchId(0), host), SwitchPort(9));
        assert_eq!(addresses(&given).expect("two").len(), 2);
        let ids = [&linked[..], &["--device-id", "4", "--device-id", "5"]].concat();
        let of_each = addresses(&parse(&ids).expect("complete")).expect("one for each");
        let first = |address: &config::SwitchAddress| {
            matches!(address, config::SwitchAddress::P4Runtime { device_id: 4, .. })
        };
        assert!(of_each.first().is_some_and(first), "{of_each:?}");
        let too_many = [&linked[..], &["--device-id", "4"].repeat(3)].concat();
        let refused = addresses(&parse(&too_many).expect("complete")).expect_err("three for two");
        assert_eq!(Exit::of(&refused), Exit::Usage);
        let refused = topology(&parse(&two).expect("complete")).expect_err("there is no link");
        assert!(
            refused.to_string().contains("from the switch tor to the switch spine"),
            "{refused}"
        );
    }

    #[test]
    fn a_policy_has_one_name() {
        for redirects in [Redirects::Always, Redirects::Contended, Redirects::Off] {
            assert_eq!(redirects.as_str(), policy(redirects).name());
        }
    }

    #[test]
    fn redirects_default_to_contended_and_fit_the_switch() {
        let parse = |more: &[&str]| {
            let line = ["controller", "--store", "c.redb"].iter().chain(more);
            Line::try_parse_from(line).map(|line| line.controller.serve)
        };
        let usual = parse(&[]).expect("complete");
        assert_eq!((usual.redirects, usual.redirect_budget), (Redirects::Contended, 4096));
        let parsed =
            parse(&["--redirects", "always", "--redirect-budget", "16384"]).expect("valid");
        assert_eq!((parsed.redirects, parsed.redirect_budget), (Redirects::Always, 16_384));
        let refused = parse(&["--redirect-budget", "16385"]).expect_err("more than a switch holds");
        assert_eq!(refused.kind(), ErrorKind::ValueValidation);
        assert!(parse(&["--redirects", "sometimes"]).is_err());
    }
}
