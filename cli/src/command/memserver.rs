//! `bluebridge memserver`: a memory server, in the foreground.

use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::Context;
use bluebridge_memserver::{Claim, Member, Reservation, ReserveError, Reserved, ServerConfig};
use bluebridge_northbound::{
    Assignment, Attachment, Carrier, Membership, MembershipError, Options as MembershipOptions,
    Registration, Role,
};
use bluebridge_rack::Cancel;
use bluebridge_rack::daemon::READY_DEADLINE;
use bluebridge_rack::network::{Netlink, host::HostFabric};
use bluebridge_rack::readiness;
use bluebridge_rack::spec::ByteSize;
use bluebridge_transport::{
    interface::Interface,
    udp::{UdpConfig, UdpTransport},
};
use bluebridge_wire::{Space, UDP_PORT, address::PAGE_BYTES, address::SHARD_ADDRESS_BYTE};
use clap::Args;
use rand::{TryRngCore, rngs::OsRng};

use super::endpoint::{Endpoint, fabric};
use super::interrupt;
use super::trust::controller_uri;
use crate::exit::Exit;

#[derive(Debug, Args)]
pub(super) struct MemoryServer {
    #[command(flatten)]
    endpoint: Endpoint,
    /// Memory to serve, for example 256M or 8G; never more is used for pages
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    memory: ByteSize,
    /// Serving cores, each with a share of the memory
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    shards: u16,
    /// The most pages that a space may have on this server. Without it the spaces that it serves have
    /// equal shares; that is all of it if it serves one. Every serving core has its share of them, so
    /// that with --shards a space can fill its quota only from all of them
    #[arg(long, value_name = "PAGES")]
    quota: Option<u64>,
    /// When the memory is taken from the system: at the start, at the start and never swapped,
    /// or page by page
    #[arg(long, value_enum, default_value_t = MemoryClaim::Prefault)]
    claim: MemoryClaim,
    /// Microseconds to poll for the next request before sleeping
    #[arg(long, value_name = "US", default_value_t = 50)]
    spin: u64,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum MemoryClaim {
    Prefault,
    Lock,
    OnDemand,
}

impl From<MemoryClaim> for Claim {
    fn from(claim: MemoryClaim) -> Self {
        match claim {
            MemoryClaim::Prefault => Self::Prefault,
            MemoryClaim::Lock => Self::Lock,
            MemoryClaim::OnDemand => Self::OnDemand,
        }
    }
}

pub(super) fn run(options: MemoryServer) -> anyhow::Result<Exit> {
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let carriers = open_carriers(&options)?;
    // The memory comes first: the rack shall not send requests to a server that has none yet.
    let Some(reserved) = reserve(&options, &cancel)? else { return Ok(Exit::Ok) };
    check_fabric(&options.endpoint)?;
    report_progress("joining the rack");
    let Some(membership) = join(&options, &cancel)? else { return Ok(Exit::Ok) };
    let config = config(&options, membership.assignment())?;
    let mut member = Member::start(membership, &config, reserved, carriers)?;
    readiness::notify_ready().context("cannot report that the server is ready")?;
    let served = member.serve_until(|| cancel.is_cancelled());
    let totals = member.stop()?;
    for (shard, total) in totals.iter().enumerate() {
        let answered: u64 = total.answers.iter().map(|(_, count)| count).sum();
        tracing::info!(shard, answered, "shard stopped");
    }
    served?;
    Ok(Exit::Ok)
}

/// A server that requests do not reach would get its share of new memory, and never answer.
fn check_fabric(endpoint: &Endpoint) -> anyhow::Result<()> {
    let fabric = HostFabric::new(&endpoint.interface);
    Ok(fabric.check(&Netlink::open()?, Space(endpoint.space))?)
}

fn open_carriers(options: &MemoryServer) -> anyhow::Result<Vec<UdpTransport>> {
    let config = UdpConfig {
        port: UDP_PORT,
        device: Some(options.endpoint.interface.clone()),
        filter: Some(fabric()),
        ..UdpConfig::default()
    };
    Ok(if options.shards == 1 {
        vec![UdpTransport::open(&config)?]
    } else {
        UdpTransport::open_steered(&config, options.shards, SHARD_ADDRESS_BYTE)?
    })
}

/// Takes the memory from the system, telling how far it is; `None` if it was told to stop meanwhile.
fn reserve(options: &MemoryServer, cancel: &Cancel) -> anyhow::Result<Option<Reserved>> {
    let reservation = Reservation {
        bytes: options.memory.0,
        shard_count: options.shards,
        claim: options.claim.into(),
        prefer_huge_pages: true,
    };
    let reserved = reservation.reserve_telling(|done, total| {
        report_progress(&format!("taking memory: {} MiB of {} MiB", done >> 20, total >> 20));
        if cancel.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    match reserved {
        Err(ReserveError::GivenUp { .. }) => Ok(None),
        reserved => Ok(Some(reserved?)),
    }
}

/// The start does not fail because nobody can be told how far it is.
fn report_progress(doing: &str) {
    if let Err(error) = readiness::notify_progress(doing, READY_DEADLINE) {
        tracing::debug!(%error, "progress is not told");
    }
}

/// Joins the rack, however long its controller is away; `None` if it was told to stop meanwhile.
fn join(options: &MemoryServer, cancel: &Cancel) -> anyhow::Result<Option<Membership>> {
    let endpoint = &options.endpoint;
    let interface = Interface::by_name(&endpoint.interface)
        .with_context(|| format!("cannot use interface {}", endpoint.interface))?;
    let registration = Registration {
        name: endpoint.name.clone(),
        role: Role::Memory {
            capacity_pages: options.memory.0 / PAGE_BYTES as u64,
            shard_count: options.shards,
        },
        space: Space(endpoint.space),
        mac: interface.mac,
        attachment: Attachment::Port(endpoint.switch_port),
        carrier: Carrier::Socket,
        mtu: interface.mtu,
        previous: None,
        notices: false,
    };
    let tls = endpoint.trust.config(endpoint.controller)?;
    let uri = controller_uri(endpoint.controller, tls.as_ref());
    let options =
        MembershipOptions { tls, wait_for_controller: true, ..MembershipOptions::default() };
    let joined = Membership::join_while(&uri, registration, options, |waited| {
        report_progress(&format!("joining the rack for {} s", waited.as_secs()));
        if cancel.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    match joined {
        Err(MembershipError::GivenUp) => Ok(None),
        joined => Ok(Some(joined?)),
    }
}

fn config(options: &MemoryServer, assignment: &Assignment) -> anyhow::Result<ServerConfig> {
    let mut config = ServerConfig::assigned(assignment, options.memory.0, seed()?);
    config.claim = options.claim.into();
    config.default_quota_pages = options.quota;
    config.idle.spin = Duration::from_micros(options.spin);
    Ok(config)
}

/// Session ids drawn from it cannot be guessed.
fn seed() -> anyhow::Result<u64> {
    OsRng.try_next_u64().context("the system gives no random numbers")
}
