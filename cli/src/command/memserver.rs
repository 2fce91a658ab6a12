//! `bluebridge memserver`: a memory server, in the foreground.

use std::io::ErrorKind;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use bluebridge_memserver::direct::{self, NoDirectReads};
use bluebridge_memserver::kept::{Holder, Kept, Lack, Listed, Place, Reader};
use bluebridge_memserver::{
    ArenaFile, ArenaFileError, Claim, DirectInterface, Member, Reservation, ReserveError, Reserved,
    ServerConfig, StartError,
};
use bluebridge_northbound::{
    Assignment, Attachment, Carrier, Membership, MembershipError, Options as MembershipOptions,
    Previous, Registration, Role, Token,
};
use bluebridge_rack::Cancel;
use bluebridge_rack::daemon::{READY_DEADLINE, RESTART_VARIABLE};
use bluebridge_rack::network::{
    Netlink,
    host::{FABRIC, HostFabric},
};
use bluebridge_rack::process::holder_of_udp_port;
use bluebridge_rack::readiness::{self, KeptMemory};
use bluebridge_rack::spec::ByteSize;
use bluebridge_switch::interface::Interface as Link;
use bluebridge_transport::{
    OpenError,
    interface::Interface,
    udp::{UdpConfig, UdpTransport},
};
use bluebridge_wire::{Space, UDP_PORT, address::PAGE_BYTES, address::SHARD_ADDRESS_BYTE};
use clap::Args;
use rand::{TryRngCore, rngs::OsRng};

use super::endpoint::Endpoint;
use super::interrupt;
use super::trust::controller_uri;
use crate::exit::{Exit, UsageError};

#[derive(Debug, Args)]
pub(super) struct MemoryServer {
    #[command(flatten)]
    endpoint: Endpoint,
    /// Memory to serve, for example 256M or 8G; this is also the limit for pages
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    memory: ByteSize,
    /// Serving cores, each with an equal share of the memory, rounded down to 2 MiB (to 4 KiB if it is smaller)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    shards: u16,
    /// The most pages that a space may have on this server. By default the served spaces have equal
    /// shares; a single space has all pages. Every serving core has an equal share, so with --shards a
    /// space can use its whole quota only on all cores together
    #[arg(long, value_name = "PAGES")]
    quota: Option<u64>,
    /// When the memory is allocated: at the start, at the start without swapping,
    /// or page by page
    #[arg(long, value_enum, default_value_t = MemoryClaim::Prefault)]
    claim: MemoryClaim,
    /// Keep the memory in this file of a file system in memory, so that it outlives the process: the next server of
    /// this file goes on with the contents. `none` keeps nothing. The default is none, and under systemd a file in
    /// /dev/shm that is named after the server
    #[arg(long, value_name = "FILE|none")]
    arena_file: Option<ArenaChoice>,
    /// What a server does that cannot keep its memory in the file of --arena-file: `on` does not start, with `auto` it
    /// tells why, and its memory ends with it
    #[arg(long, value_enum, default_value_t = KeptChoice::On, requires = "arena_file")]
    kept_memory: KeptChoice,
    /// Drop what the arena's file holds, and begin empty. Needs --arena-file, except under systemd
    #[arg(long)]
    fresh: bool,
    /// Let the kernel answer READs of whole pages, and of a part of one, before they reach this process. It needs root, Linux 6.6 and
    /// --arena-file. With `auto` the server tells why it cannot, and answers them itself
    #[arg(long, value_enum, default_value_t = DirectChoice::Auto)]
    direct_reads: DirectChoice,
    /// Microseconds to poll for the next request before sleeping; without it as long as is worth it, up to 50,
    /// and up to 300 while memory moves and nobody else wants the processors
    #[arg(long, value_name = "US")]
    spin: Option<u64>,
}

/// Whether the memory outlives the process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ArenaChoice {
    None,
    File(PathBuf),
}

impl FromStr for ArenaChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "" => Err("name a file, such as /dev/shm/bluebridge-arena-0-s1, or none"),
            "none" => Ok(Self::None),
            // Another directory would be another file, and `arena list` would not find a map's file.
            file if !Path::new(file).is_absolute() => {
                Err("name the file with its whole path, such as /dev/shm/bluebridge-arena-0-s1")
            }
            file => Ok(Self::File(file.into())),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum KeptChoice {
    Auto,
    On,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum DirectChoice {
    Auto,
    On,
    Off,
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
    let result = serve(options);
    if let Err(error) = &result
        && error.chain().any(is_about_contents)
    {
        readiness::report_failure(&error.to_string());
    }
    result
}

/// Whether a server does not start because of the memory that it was to go on with.
fn is_about_contents(cause: &(dyn std::error::Error + 'static)) -> bool {
    cause.is::<ArenaFileError>()
        || matches!(cause.downcast_ref(), Some(MembershipError::NotPrevious(_)))
        || matches!(cause.downcast_ref(), Some(StartError::Damaged(_)))
}

fn serve(options: MemoryServer) -> anyhow::Result<Exit> {
    let has_no_file = match options.arena_file {
        Some(ArenaChoice::File(_)) => false,
        Some(ArenaChoice::None) => true,
        None => !is_systemd_service(),
    };
    if options.fresh && has_no_file {
        return Err(UsageError(
            "--fresh drops what an arena's file holds, and this server has no such file; name it with --arena-file, \
             or leave out --fresh: the memory begins empty then"
                .to_owned(),
        )
        .into());
    }
    let cancel = interrupt::watch().context("cannot watch for signals")?;
    let carriers = open_carriers(&options)?;
    match carriers.first().map(UdpTransport::frames_refusal) {
        Some(Some(reason)) => tracing::info!(%reason, "the UDP socket sends all datagrams"),
        Some(None) | None => tracing::info!("datagrams are sent as frames"),
    }
    // The memory comes first: the rack must not send requests to a server without memory.
    let mut refusal = probe_direct_reads(&options);
    if options.direct_reads == DirectChoice::On
        && let Err(reason) = &refusal
    {
        return Err(not_answered(reason));
    }
    let Some(memory) = ServerMemory::take(&options, &mut refusal, &cancel)? else {
        return Ok(Exit::Ok);
    };
    if options.direct_reads == DirectChoice::On
        && let Some(reason) = memory.direct_refusal()
    {
        return Err(not_answered(reason));
    }
    let kept = memory.outlives();
    match (&kept, memory.file()) {
        (KeptMemory { is_kept: true, reason: None, .. }, Some(file)) => {
            tracing::info!(file = %file.display(), "the memory {kept}");
        }
        // Its user wanted it.
        _ if matches!(options.arena_file, None | Some(ArenaChoice::None)) => {
            tracing::info!("the memory {kept}");
        }
        _ => tracing::warn!("the memory {kept}"),
    }
    let served_bytes = memory.capacity_pages() * PAGE_BYTES as u64;
    if served_bytes < options.memory.0 {
        tracing::warn!(
            served_bytes,
            asked_bytes = options.memory.0,
            "less memory is served than --memory says: the equal shares of {} serving cores are rounded down",
            options.shards
        );
    }
    let mut route = RequestRoute::open(&options.endpoint)?;
    report_progress("joining the rack");
    let Some(membership) = join(&options, &memory, &cancel)? else { return Ok(Exit::Ok) };
    let config = config(&options, membership.assignment())?;
    let file = memory.file().map(Path::to_owned);
    let mut reserved = memory.assign(membership.assignment())?;
    if let Err(refusal) = refusal {
        reserved.direct = Err(refusal);
    }
    let member = Member::start(membership, &config, reserved, carriers);
    let mut member = member.map_err(|error| with_remedy_of_damage(error, file.as_deref()))?;
    if options.direct_reads == DirectChoice::On
        && let Err(reason) = member.server().direct_reads()
    {
        let error = not_answered(reason);
        member.stop()?;
        return Err(error);
    }
    readiness::report_server_ready(&kept);
    let caller = member.caller();
    cancel.when_cancelled(move || caller.call());
    let served = member.serve_until(LOOK, || {
        route.look(Instant::now());
        cancel.is_cancelled()
    });
    let totals = member.stop()?;
    for (shard, total) in totals.iter().enumerate() {
        let replied: u64 = total.replies.iter().map(|(_, count)| count).sum();
        tracing::info!(shard, replied, "shard stopped");
    }
    served?;
    Ok(Exit::Ok)
}

/// How often a server checks whether requests can still reach it.
const LOOK: Duration = Duration::from_secs(1);

/// The route of requests to the server, and of its responses.
struct RequestRoute {
    fabric: HostFabric,
    netlink: Netlink,
    space: Space,
    is_lost: bool,
    looked_at: Instant,
}

impl RequestRoute {
    /// A server without a route would get its share of new memory, but never receive requests.
    fn open(endpoint: &Endpoint) -> anyhow::Result<Self> {
        let fabric = HostFabric::new(&endpoint.interface);
        let (netlink, space) = (Netlink::open()?, Space(endpoint.space));
        fabric.check(&netlink, space)?;
        Ok(Self { fabric, netlink, space, is_lost: false, looked_at: Instant::now() })
    }

    /// Logs once that the route is lost, and once that it is back. `bluebridge host up --watch` restores it:
    /// a server may lack the privileges, and would undo an operator's `bluebridge host down`.
    fn look(&mut self, now: Instant) {
        if now.saturating_duration_since(self.looked_at) < LOOK {
            return;
        }
        self.looked_at = now;
        let interface = &self.fabric.interface;
        match self.fabric.check(&self.netlink, self.space) {
            Ok(()) => {
                if std::mem::take(&mut self.is_lost) {
                    tracing::info!(interface, "requests can reach this server again");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut self.is_lost, true) {
                    tracing::warn!(interface, %error, "requests cannot reach this server");
                }
            }
        }
    }
}

fn open_carriers(options: &MemoryServer) -> anyhow::Result<Vec<UdpTransport>> {
    let config = UdpConfig {
        port: UDP_PORT,
        device: Some(options.endpoint.interface.clone()),
        filter: Some(FABRIC),
        frames: options.endpoint.frames,
        ..UdpConfig::default()
    };
    let opened = if options.shards == 1 {
        UdpTransport::open(&config).map(|carrier| vec![carrier])
    } else {
        UdpTransport::open_steered(&config, options.shards, SHARD_ADDRESS_BYTE)
    };
    opened.map_err(|error| {
        let taken =
            matches!(&error, OpenError::Bind { error, .. } if error.kind() == ErrorKind::AddrInUse);
        let holder = taken.then(|| holder_of_udp_port(UDP_PORT)).flatten();
        match not_bound(UDP_PORT, &error, holder) {
            Some(words) => anyhow::Error::new(error).context(words),
            None => error.into(),
        }
    })
}

/// Why a server is not the endpoint, and what its user can do. A network namespace has one endpoint.
fn not_bound(port: u16, error: &OpenError, holder: Option<(u32, String)>) -> Option<String> {
    let OpenError::Bind { error: cause, .. } = error else { return None };
    Some(match (holder, cause.kind()) {
        (Some((pid, name)), _) => format!(
            "{error}: the process {pid} ({name}) is the endpoint already; end it first (`kill {pid}`)"
        ),
        (None, ErrorKind::AddrInUse) => {
            format!(
                "{error}; end the process that has it (as root, `ss -lunp sport = :{port}` shows it)"
            )
        }
        (None, ErrorKind::PermissionDenied) => format!("{error}; start the server as root"),
        (None, _) => format!(
            "{error}; the system must have IPv6 (`sysctl net.ipv6.conf.all.disable_ipv6` is 0)"
        ),
    })
}

fn not_answered(reason: &NoDirectReads) -> anyhow::Error {
    let remedy = match reason {
        NoDirectReads::NotKept => "name a file for it with --arena-file, ",
        NoDirectReads::InHugePages => "name a file on a tmpfs with --arena-file, ",
        NoDirectReads::InFile => "start with --fresh, which drops the contents, ",
        _ => "",
    };
    anyhow!("the kernel cannot answer READs: {reason}; {remedy}or start with --direct-reads auto")
}

/// Whether the kernel can answer READs of this server, as far as that can be known before it has memory.
fn probe_direct_reads(options: &MemoryServer) -> Result<(), NoDirectReads> {
    if matches!(options.direct_reads, DirectChoice::Off) {
        return Err(NoDirectReads::Off);
    }
    match &options.arena_file {
        // The kernel could when this arena was made, and a restart is faster without another attempt.
        Some(ArenaChoice::File(path)) if !options.fresh && is_in_map(path) => Ok(()),
        Some(ArenaChoice::File(_)) => probe_new_arena(options),
        None if is_systemd_service() => probe_new_arena(options),
        // What the kernel could do does not matter, and to find it out takes a part of a second.
        Some(ArenaChoice::None) | None => Err(NoDirectReads::NotKept),
    }
}

fn is_in_map(path: &Path) -> bool {
    Listed::of(path).is_ok_and(|listed| {
        matches!(listed.place, Place::InMap | Place::Gone | Place::NotVisible | Place::OfOriginal)
    })
}

fn probe_new_arena(options: &MemoryServer) -> Result<(), NoDirectReads> {
    direct::probe(&options.endpoint.interface)?;
    // Memory that is kept is worth more than faster READs, unless the user says otherwise.
    if options.direct_reads == DirectChoice::Auto { direct::check_namespace() } else { Ok(()) }
}

/// The memory of a server that has not joined yet.
enum ServerMemory {
    /// It ends with this process, for a reason.
    Own(Reserved, String),
    /// It outlives this process.
    Kept(Kept),
}

impl ServerMemory {
    /// Allocates the memory, or takes over that of an earlier process; `None` if it was stopped meanwhile.
    fn take(
        options: &MemoryServer,
        refusal: &mut Result<(), NoDirectReads>,
        cancel: &Cancel,
    ) -> anyhow::Result<Option<Self>> {
        let own = |reason: String| {
            Ok(reserve(options, cancel)?.map(|reserved| Self::Own(reserved, reason)))
        };
        let (path, is_required) = match &options.arena_file {
            Some(ArenaChoice::File(path)) => (path.clone(), options.kept_memory == KeptChoice::On),
            None if is_systemd_service() => {
                (ArenaFile::default_path(&options.endpoint.name), false)
            }
            Some(ArenaChoice::None) => return own("--arena-file none says so".to_owned()),
            None => return own("--arena-file names no file to keep it in".to_owned()),
        };
        // Contents that cannot be used must not be forgotten silently.
        let has_contents = !options.fresh && may_hold_contents(&path);
        let file = ArenaFile {
            path,
            bytes: options.memory.0,
            shard_count: options.shards,
            spaces: vec![Space(options.endpoint.space)],
            claim: options.claim.into(),
            is_fresh: options.fresh,
            is_direct: refusal.is_ok(),
        };
        let mut opened = file.open(|done, total| report_allocation(done, total, cancel));
        if let Err(ArenaFileError::NoMap { error, .. }) = &mut opened
            && options.direct_reads == DirectChoice::Auto
        {
            let error = std::mem::replace(error, ErrorKind::Other.into());
            *refusal = Err(NoDirectReads::Map(error));
            let file = ArenaFile { is_direct: false, ..file };
            opened = file.open(|done, total| report_allocation(done, total, cancel));
        }
        match opened {
            Err(ArenaFileError::GivenUp) => Ok(None),
            Err(error) => {
                // A map would not be made of huge pages.
                let needs_room = matches!(
                    &error, ArenaFileError::NoRoom { lack, .. } if !matches!(lack, Lack::HugePages(_))
                );
                let no_map = if needs_room { no_map(refusal) } else { None };
                let words = advice(&error, no_map.as_deref(), !options.fresh);
                // Nothing is lost, and its user does not insist.
                let may_go_on =
                    !is_required && !has_contents && options.direct_reads != DirectChoice::On;
                if may_go_on && (error.is_about_place() || error.is_about_name()) {
                    // Where the memory would be kept does not matter then.
                    if matches!(refusal, Err(NoDirectReads::Namespace)) {
                        *refusal = Err(NoDirectReads::NotKept);
                    }
                    return own(words);
                }
                Err(anyhow::Error::new(error).context(words))
            }
            Ok(kept) => Ok(Some(Self::Kept(kept))),
        }
    }

    /// Whether the memory outlives this process.
    fn outlives(&self) -> KeptMemory {
        match self {
            Self::Own(_, reason) => KeptMemory::lost(reason),
            Self::Kept(kept) if kept.ends_with_namespace() => KeptMemory::limited(
                "the BPF file system ends with this mount namespace; mount one at /sys/fs/bpf before the namespace is made",
            ),
            Self::Kept(_) => KeptMemory::KEPT,
        }
    }

    fn file(&self) -> Option<&Path> {
        match self {
            Self::Own(..) => None,
            Self::Kept(kept) => Some(kept.path()),
        }
    }

    /// Why the kernel cannot answer READs of it.
    fn direct_refusal(&self) -> Option<&NoDirectReads> {
        match self {
            Self::Own(reserved, _) => reserved.direct.as_ref().err(),
            Self::Kept(kept) => kept.direct_refusal(),
        }
    }

    fn capacity_pages(&self) -> u64 {
        match self {
            // Each shard's part of the memory is rounded down.
            Self::Own(reserved, _) => {
                reserved.parts.iter().map(|part| (part.page_bytes() / PAGE_BYTES) as u64).sum()
            }
            Self::Kept(kept) => kept.page_bytes() / PAGE_BYTES as u64,
        }
    }

    /// The node whose contents it holds.
    fn previous(&self) -> Option<Previous> {
        let Self::Kept(kept) = self else { return None };
        let Holder { node, generation, token } = kept.holder()?;
        Some(Previous { node, token: Token(token), contents: Some(generation) })
    }

    fn assign(self, assignment: &Assignment) -> anyhow::Result<Reserved> {
        let Assignment { node, generation, token, .. } = *assignment;
        match self {
            Self::Own(reserved, _) => Ok(reserved),
            Self::Kept(kept) => {
                let assigned = kept.assign(Holder { node, generation, token: token.0 });
                assigned.map_err(|error| {
                    let words = advice(&error, None, true);
                    anyhow::Error::new(error).context(words)
                })
            }
        }
    }
}

/// Whether a file may hold contents of an earlier process.
fn may_hold_contents(path: &Path) -> bool {
    if path.symlink_metadata().is_err() {
        return false;
    }
    match Listed::of(path) {
        Ok(listed) => !listed.is_arena || listed.holder.is_some() || listed.damage.is_some(),
        // Another user may have put it there.
        Err(ArenaFileError::Foreign { what, .. }) => !what.is_of_others(),
        Err(_) => true,
    }
}

/// Why memory needs room in a file, if its user did not choose that.
fn no_map(refusal: &Result<(), NoDirectReads>) -> Option<String> {
    match refusal {
        Ok(()) | Err(NoDirectReads::Off) => None,
        // Without its remedy: that of the file is said, too.
        Err(NoDirectReads::Map(error)) => {
            Some(format!("the memory cannot be in the kernel instead of a file ({error})"))
        }
        Err(refusal) => {
            Some(format!("the memory cannot be in the kernel instead of a file ({refusal})"))
        }
    }
}

/// What is wrong with the memory's file, and what the user of this server can do. If only its directory is wrong, the
/// words are the same for all servers with files in it.
fn advice(error: &ArenaFileError, no_map: Option<&str>, keeps: bool) -> String {
    let no_map = no_map.map_or_else(String::new, |no_map| format!(", and {no_map}"));
    let remedy =
        error.remedy(&reader(keeps)).map_or_else(String::new, |remedy| format!("; {remedy}"));
    format!("{error}{no_map}{remedy}")
}

/// Who reads what this server says about its memory. `keeps`: it was to go on with that of an earlier one.
fn reader(keeps: bool) -> Reader {
    let restart = std::env::var(RESTART_VARIABLE).ok().filter(|command| !command.is_empty());
    restart.map_or(Reader::Server, |restart| Reader::Rack { restart, keeps })
}

/// A service manager starts a service again with the same name; a shell does not.
fn is_systemd_service() -> bool {
    ["INVOCATION_ID", readiness::VARIABLE].iter().all(|name| std::env::var_os(name).is_some())
}

fn report_allocation(done: u64, total: u64, cancel: &Cancel) -> ControlFlow<()> {
    report_progress(&format!("allocating memory: {} MiB of {} MiB", done >> 20, total >> 20));
    if cancel.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// Allocates the memory and reports progress; `None` if it was stopped meanwhile.
fn reserve(options: &MemoryServer, cancel: &Cancel) -> anyhow::Result<Option<Reserved>> {
    let reservation = Reservation {
        bytes: options.memory.0,
        shard_count: options.shards,
        claim: options.claim.into(),
        prefer_huge_pages: true,
    };
    let reserved =
        reservation.reserve_with_progress(|done, total| report_allocation(done, total, cancel));
    match reserved {
        Err(ReserveError::GivenUp { .. }) => Ok(None),
        Err(error @ ReserveError::Size { .. }) => {
            let words = format!("{error}; change --memory or --shards");
            Err(anyhow::Error::new(error).context(words))
        }
        reserved => Ok(Some(reserved?)),
    }
}

/// The start does not fail if progress cannot be reported.
fn report_progress(doing: &str) {
    if let Err(error) = readiness::notify_progress(doing, READY_DEADLINE) {
        tracing::debug!(%error, "progress is not reported");
    }
}

/// Joins the rack, even if its controller is unreachable for long; `None` if it was stopped meanwhile.
fn join(
    options: &MemoryServer,
    memory: &ServerMemory,
    cancel: &Cancel,
) -> anyhow::Result<Option<Membership>> {
    let endpoint = &options.endpoint;
    let interface = Interface::by_name(&endpoint.interface)
        .with_context(|| format!("cannot use interface {}", endpoint.interface))?;
    let registration = Registration {
        name: endpoint.name.clone(),
        role: Role::Memory { capacity_pages: memory.capacity_pages(), shard_count: options.shards },
        space: Space(endpoint.space),
        mac: interface.mac,
        switch: endpoint.switch_port.switch.clone(),
        attachment: Attachment::Port(endpoint.switch_port.number),
        carrier: Carrier::Socket,
        mtu: interface.mtu,
        previous: memory.previous(),
        notices: false,
    };
    let tls = endpoint.trust.config(endpoint.controller)?;
    let uri = controller_uri(endpoint.controller, tls.as_ref());
    let options = MembershipOptions {
        tls,
        wait_for_controller: true,
        migrates: true,
        ..MembershipOptions::default()
    };
    let joined = Membership::join_while(&uri, registration, options, |waited| {
        report_progress(&format!("joining the rack for {} s", waited.as_secs()));
        if cancel.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    match joined {
        Err(MembershipError::GivenUp) => Ok(None),
        Ok(joined) => Ok(Some(joined)),
        Err(error @ MembershipError::NotPrevious(_)) => Err(with_remedy(error, memory)),
        Err(error) => Err(endpoint.trust.explain(error.into())),
    }
}

/// Adds what to do with memory whose contents the controller does not accept; it does not know where they are.
fn with_remedy(error: MembershipError, memory: &ServerMemory) -> anyhow::Error {
    let ServerMemory::Kept(kept) = memory else { return error.into() };
    let remedy = match reader(true) {
        Reader::Rack { restart, .. } => {
            // They may be the only ones of another server.
            format!(
                "put the server's own file back in its place if this is another's; if no server needs these contents, \
                 `{restart}` drops them, and the server begins empty"
            )
        }
        Reader::Arenas | Reader::Server => {
            "name the server's own file with --arena-file; if no server needs these contents, start with --fresh, \
             which drops them"
                .to_owned()
        }
    };
    let words = format!("{error} (they are in {}); {remedy}", kept.path().display());
    anyhow::Error::new(error).context(words)
}

/// Adds what to do with contents that turn out to be damaged when it is known which generations are reserved.
fn with_remedy_of_damage(error: StartError, file: Option<&Path>) -> anyhow::Error {
    let (StartError::Damaged(damage), Some(file)) = (&error, file) else {
        return error.into();
    };
    let damaged = ArenaFileError::Damaged { path: file.to_owned(), what: damage.to_string() };
    let words = advice(&damaged, None, true);
    anyhow::Error::new(error).context(words)
}

fn config(options: &MemoryServer, assignment: &Assignment) -> anyhow::Result<ServerConfig> {
    let mut config = ServerConfig::assigned(assignment, options.memory.0, seed()?);
    config.claim = options.claim.into();
    config.default_quota_pages = options.quota;
    config.idle.spin = options.spin.map(Duration::from_micros);
    let name = &options.endpoint.interface;
    let found = Link::by_name(name).ok().flatten();
    config.direct = found.map(|link| DirectInterface {
        name: name.clone(),
        mtu: link.mtu,
        has_far_peer: link.has_far_peer,
    });
    Ok(config)
}

/// Session ids drawn from it cannot be guessed.
fn seed() -> anyhow::Result<u64> {
    OsRng.try_next_u64().context("the system gives no random numbers")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_remedy_is_said_once_and_after_the_causes() {
        let (path, bytes) = ("/dev/shm/arena".into(), 1 << 40);
        let error = ArenaFileError::NoRoom { path, bytes, lack: Lack::Memory };
        let no_map = no_map(&Err(NoDirectReads::Map(ErrorKind::OutOfMemory.into())));
        let said = advice(&error, no_map.as_deref(), false);
        assert!(said.contains(", and the memory cannot be in the kernel"), "{said}");
        let (_, remedy) = said.split_once("; ").expect("a remedy");
        assert_eq!(
            (remedy.matches(';').count(), said.matches("--memory").count()),
            (0, 1),
            "{said}"
        );
    }
}
