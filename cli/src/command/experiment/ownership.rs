//! Ownership passed from client to client: contention of 1 to 16 clients, and the delay of a redirect.

mod contention;
mod redirect;
mod report;

use std::path::PathBuf;
use std::process;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use bluebridge::{Client, JoinOptions};
use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, Node, RackName, RackSpec, Redirects};
use bluebridge_rack::{Rack, Site};
use bluebridge_transport::udp::UdpTransport;
use clap::Args;
use serde::Serialize;

use self::contention::Contended;
use self::redirect::Redirected;
use super::super::steps::Steps;
use super::super::{Global, interrupt};
use super::Folder;
use crate::exit::Exit;

/// How long an UPDATE may wait for its turn.
const DEADLINE: Duration = Duration::from_secs(5);

/// The options of the experiment.
#[derive(Debug, Args)]
pub(in crate::command) struct Ownership {
    /// Numbers of clients that contend for one page; one run for each number
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16",
          value_parser = clap::value_parser!(u16).range(1..=32))]
    clients: Vec<u16>,
    /// Seconds of each run
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u16).range(1..=600))]
    seconds: u16,
    /// How long an owner keeps the page, in microseconds; 0 commits at once
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    hold_us: u32,
    /// Number of leases for which the redirect is measured
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=10_000))]
    leases: u16,
    /// The directory of the CSV files and plots
    #[arg(long, default_value = "ownership")]
    output: PathBuf,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
}

/// The results under one policy.
#[derive(Clone, Debug, Serialize)]
struct Findings {
    policy: Redirects,
    contention: Vec<Contended>,
    redirect: Redirected,
}

pub(super) fn run(asked: Ownership, global: Global) -> anyhow::Result<Exit> {
    let folder = Folder::make(&asked.output)?;
    let site = Site::prepare()?;
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let most = asked.clients.iter().copied().max().unwrap_or(1).max(2);
    let mut findings = Vec::new();
    let policies = [Redirects::Contended, Redirects::Always];
    let steps = Steps::new(policies.len() * (1 + asked.clients.len()), global);
    for policy in policies {
        let spec = RackSpec {
            name: format!("own{}-{}", process::id(), policy.as_str()).parse::<RackName>()?,
            servers: 1,
            clients: most,
            mtu: LinkMtus::default(),
            switch: asked.switch.unwrap_or(site.data_plane()),
            memory: ByteSize(64 << 20),
            redirects: policy,
            direct_reads: true,
        };
        let mut rack = Rack::build(&site, spec, cancel.clone())?;
        rack.start_daemons(&program, READY_DEADLINE)?;
        let rack = Arc::new(rack);
        let leases = asked.leases.into();
        steps.begin(&format!("{}: redirects of {leases} leases", policy.as_str()));
        let work = move |rack: &Rack| redirect::measure(rack, leases);
        let redirect = interrupt::measure(&rack, &cancel, work)?;
        let mut contention = Vec::new();
        for count in asked.clients.iter().copied() {
            steps.begin(&format!("{}: {count} clients for {} s", policy.as_str(), asked.seconds));
            let time = Duration::from_secs(asked.seconds.into());
            let hold = Duration::from_micros(asked.hold_us.into());
            let work = move |rack: &Rack| contention::measure(rack, count, hold, time);
            contention.push(interrupt::measure(&rack, &cancel, work)?);
        }
        findings.push(Findings { policy, contention, redirect });
        interrupt::take_down(rack)?;
    }
    steps.end();
    report::print(&findings, &folder, global.json)?;
    Ok(Exit::Ok)
}

/// A client of the rack; called in its namespace.
fn join(rack: &Rack, node: Node) -> anyhow::Result<Client<UdpTransport>> {
    let port = rack.layout().port_of(node).context("the rack has no such client")?.number;
    let controller = format!("http://{}", rack.layout().controller());
    let mut options =
        JoinOptions::named(node.to_string()).interface(ENDPOINT_INTERFACE).switch_port(port);
    options.behaviour.deadline = DEADLINE;
    // More clients than cores: a spinning client would take time from those that have work.
    options.behaviour.spin = Some(Duration::ZERO);
    Ok(Client::join(&controller, options)?)
}
