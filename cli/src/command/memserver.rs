//! `bluebridge memserver`: a memory server, in the foreground.

use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::{Context, bail};
use bluebridge_memserver::serve::Order;
use bluebridge_memserver::{
    Claim, Reservation, ReserveError, Reserved, Server, ServerConfig, run_with,
};
use bluebridge_northbound::{
    Attachment, Carrier, Connection, Membership, Options as MembershipOptions, Registration, Role,
    Snapshot,
};
use bluebridge_protocol::responder::Authority;
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

/// How often the server looks at its membership, its shards and the wish to stop.
const LOOK: Duration = Duration::from_millis(50);

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
    /// The most pages that a space may have on this server; no limit without it. Every serving core
    /// has its share of them, so that with --shards a space can fill its quota only from all of them
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
    let membership = join(&options)?;
    let server = start_server(&options, &membership, reserved, carriers)?;
    readiness::notify_ready().context("cannot report that the server is ready")?;
    let tended = tend(&server, &membership, &cancel);
    // First no new requests are sent here, then those on their way are answered.
    if let Err(error) = membership.leave() {
        tracing::warn!(%error, "leaving the rack was not confirmed");
    }
    let totals = server.stop()?;
    for (shard, total) in totals.iter().enumerate() {
        let answered: u64 = total.answers.iter().map(|(_, count)| count).sum();
        tracing::info!(shard, answered, "shard stopped");
    }
    tended.map(|()| Exit::Ok)
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

fn join(options: &MemoryServer) -> anyhow::Result<Membership> {
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
    let options = MembershipOptions { tls, ..MembershipOptions::default() };
    Ok(Membership::join_with(&uri, registration, options)?)
}

fn start_server(
    options: &MemoryServer,
    membership: &Membership,
    reserved: Reserved,
    carriers: Vec<UdpTransport>,
) -> anyhow::Result<Server> {
    let assignment = membership.assignment();
    let mut config = ServerConfig::new(
        assignment.space,
        assignment.node,
        assignment.incarnation,
        options.memory.0,
        seed()?,
    );
    config.generation = assignment.generation;
    config.authority = authority(assignment.range_epoch);
    config.piece_bytes = u16::try_from(assignment.piece_bytes).context("impossible piece size")?;
    config.claim = options.claim.into();
    config.default_quota_pages = options.quota.unwrap_or(u64::MAX);
    config.idle.spin = Duration::from_micros(options.spin);
    Ok(run_with(&config, reserved, carriers)?)
}

/// Session ids drawn from it cannot be guessed.
fn seed() -> anyhow::Result<u64> {
    OsRng.try_next_u64().context("the system gives no random numbers")
}

/// Range epoch 0 grants nothing.
fn authority(range_epoch: u32) -> Option<Authority> {
    (range_epoch != 0).then_some(Authority { range_epoch, expires_at: None })
}

/// Reports what is free and obeys the controller, until told to stop.
fn tend(server: &Server, membership: &Membership, cancel: &Cancel) -> anyhow::Result<()> {
    let mut known = membership.snapshot();
    let mut notices = false;
    while !cancel.is_cancelled() {
        if server.is_failed() {
            bail!("a serving core ended; see its log line");
        }
        let free = server.statistics().iter().map(|shard| shard.arena.free_pages).sum();
        membership.report_free_pages(free);
        if known.notices_wanted != notices
            && order_notices(server, membership.assignment().space, known.notices_wanted)
        {
            notices = known.notices_wanted;
        }
        let snapshot = membership.wait_newer(known.version, LOOK);
        obey(server, &known, &snapshot)?;
        known = snapshot;
    }
    Ok(())
}

/// Tells every serving core whether anybody wants notices; false if one has to be told again later.
fn order_notices(server: &Server, space: Space, wanted: bool) -> bool {
    let shards = (0_u16..).zip(server.statistics());
    // All of them, also behind one that is behind with its orders.
    let told = shards.map(|(shard, _)| server.order(shard, Order::Notices(space, wanted)).is_ok());
    told.fold(true, |all, told| all & told)
}

fn obey(server: &Server, before: &Snapshot, now: &Snapshot) -> anyhow::Result<()> {
    if now.connection == Connection::Expelled {
        bail!("the controller gave this server's place to another; start it again to join anew");
    }
    if now.range_epoch != before.range_epoch {
        server.set_authority(authority(now.range_epoch))?;
    }
    Ok(())
}
