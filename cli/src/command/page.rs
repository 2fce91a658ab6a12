//! `bluebridge page demo`: the paper's Figures 4 and 5, in a temporary rack.

use std::net::{SocketAddr, UdpSocket};
use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge_bench::directory::Directory;
use bluebridge_bench::pin;
use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::spec::{ByteSize, DataPlane, LinkMtus, Node, RackName, RackSpec, Redirects};
use bluebridge_rack::{Rack, Site};
use clap::{Args, Subcommand};

use super::bench::machine;
use super::experiment::Folder;
use super::experiment::paging_latency::{CLIENT, CLIENT_CORE, SERVER_CORE, join};
use super::steps::Steps;
use super::workload::faults::{self, Measured, Plan};
use super::{Global, interrupt};
use crate::exit::Exit;

/// The host of the directory service, which does not join the rack.
const DIRECTORY: Node = Node::Client(2);
const DIRECTORY_PORT: u16 = 9101;
/// Cores for a client, a server, a directory and a switch that poll, without waiting for another.
const POLLING_CORES: usize = 4;
/// How long client and directory poll if there are so many cores.
const SPIN: Duration = Duration::from_micros(50);
/// How long a page fault may take.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug, Subcommand)]
pub(super) enum Page {
    Demo(Demo),
}

/// Measure page faults on remote pages, with and without a directory service, and on a local file, and divide them into
/// their parts: the paper's Figures 4 and 5, in a temporary rack
#[derive(Debug, Args)]
pub(super) struct Demo {
    #[command(flatten)]
    plan: Plan,
    /// The switch's data plane; the default is ebpf with root if this build has it, otherwise soft
    #[arg(long)]
    switch: Option<DataPlane>,
}

pub(super) fn run(page: Page, global: Global) -> anyhow::Result<Exit> {
    let Page::Demo(Demo { plan, switch }) = page;
    let folder = Folder::make(plan.output())?;
    let site = Site::prepare()?;
    let cores = thread::available_parallelism().context("cannot count the cores")?.get();
    let spin = if cores < POLLING_CORES { Duration::ZERO } else { SPIN };
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let steps = Steps::new(2, global);
    steps.begin("a rack of one server, one client and a directory");
    let spec = RackSpec {
        name: format!("faults{}", process::id()).parse::<RackName>()?,
        servers: 1,
        clients: 2,
        mtu: LinkMtus::default(),
        switch: switch.unwrap_or(site.data_plane()),
        memory: ByteSize(plan.bytes().saturating_mul(4).max(64 << 20)),
        redirects: Redirects::default(),
        direct_reads: true,
    };
    let program = std::env::current_exe().context("cannot find this program's own path")?;
    let mut rack = Rack::build(&site, spec, cancel.clone())?;
    rack.start_daemons(&program, READY_DEADLINE)?;
    if cores > SERVER_CORE {
        machine::pin_daemons(&rack, Node::Server(1), SERVER_CORE)?;
    }
    let rack = Arc::new(rack);
    steps.begin(&format!("{} faults of each kind", plan.page_count()));
    let (asked, place) = (plan.clone(), folder.clone());
    let work = move |rack: &Rack| in_rack(rack, &asked, &place, cores, spin);
    let measured = interrupt::measure(&rack, &cancel, work)?;
    interrupt::take_down(rack)?;
    steps.end();
    faults::report(&plan, spin, measured, &folder, global)
}

/// Measures with a directory service on a host of its own.
fn in_rack(
    rack: &Rack,
    plan: &Plan,
    folder: &Folder,
    cores: usize,
    spin: Duration,
) -> anyhow::Result<Measured> {
    let port = rack.layout().port_of(DIRECTORY).context("the rack has no second client")?;
    let address = SocketAddr::from((port.control_address, DIRECTORY_PORT));
    let socket = rack.enter(DIRECTORY, || UdpSocket::bind(address))?;
    let socket = socket.with_context(|| format!("cannot listen at {address}"))?;
    let mut directory = Directory::new(plan.directory_pages());
    let is_done = AtomicBool::new(false);
    // Without polling, the client's core is free while it waits for the directory.
    let core = if cores < POLLING_CORES { CLIENT_CORE } else { SERVER_CORE + 1 };
    thread::scope(|scope| {
        let serving = scope.spawn(|| -> std::io::Result<()> {
            pin(core)?;
            directory.serve(&socket, spin, || is_done.load(Ordering::Relaxed))
        });
        let measured = rack.enter(CLIENT, || {
            pin(CLIENT_CORE).context("cannot pin the client")?;
            let client = join(rack, spin)?;
            let measured = plan.measure(&client, Some(address), spin, DEADLINE, folder);
            // Its end is not what is measured.
            let _ = client.close();
            measured
        });
        is_done.store(true, Ordering::Relaxed);
        let served = serving.join().map_err(|_| anyhow!("the directory's thread panicked"))?;
        let measured = measured?;
        served.context("the directory cannot serve")?;
        measured
    })
}
