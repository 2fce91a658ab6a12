//! `bluebridge disk`: remote memory as a disk, in the foreground.

mod delete;
mod listen;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use bluebridge::{Client, NodeId, Pointer};
use bluebridge_blockdev::device::{Disk, DiskOptions, Keeper, LEASE_MIN, OpenOptions, Placement};
use bluebridge_blockdev::nbd::{Export, NAME_BYTES_MAX};
use bluebridge_blockdev::server::{Limits, Server, lock_memory, mark_as_io_thread};
use bluebridge_rack::{Cancel, readiness, spec::ByteSize};
use bluebridge_transport::udp::UdpTransport;
use clap::{Args, Subcommand, ValueEnum};
use rand::{TryRngCore, rngs::OsRng};
use serde_json::json;

use self::listen::{Listening, Place, quoted};
use super::member::{Deadline, Member};
use super::{Global, interrupt};
use crate::exit::{Exit, UsageError};
use crate::output;

/// The most data of a request: more than Linux sends at once.
const PAYLOAD_BYTES_MAX: u32 = 4 << 20;
/// How often the list of servers is renewed, and how often it is checked that the disk is still this process's.
const LOOK: Duration = Duration::from_millis(250);

/// What is missing without --size and --attach.
const NEITHER: &str =
    "say which disk: --size SIZE makes one, and --attach POINTER serves one that exists";

/// Serve remote memory as a disk, over NBD, in the foreground.
///
/// A new disk needs --size; --attach serves one that exists. Memory is allocated in slabs when they are first written,
/// and freed when they are discarded. The pointer that is printed names the disk. It is all that is needed to attach
/// it again, also from another machine.
///
/// Do not swap to the disk on the machine that serves it: when memory is short, the kernel waits for this process to
/// write pages out, and this process may wait for the kernel to give it memory. Such a machine can stand still for ever.
/// Swap to it from another machine.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct DiskCommand {
    #[command(subcommand)]
    order: Option<Order>,
    #[command(flatten)]
    serve: Serve,
}

#[derive(Debug, Subcommand)]
enum Order {
    Delete(delete::Delete),
}

/// Whether memory is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Lock {
    No,
    Yes,
}

#[derive(Debug, Args)]
struct Serve {
    /// Make a disk of this size, such as 4G
    #[arg(long)]
    size: Option<ByteSize>,
    /// Serve the disk that this pointer names
    #[arg(long, value_name = "POINTER", conflicts_with_all = ["size", "slab", "placement"])]
    attach: Option<Pointer>,
    /// The unit in which memory is allocated: 1M, 2M, 4M, 8M, 16M, 32M or 64M
    #[arg(long, value_name = "SIZE", default_value = "16M")]
    slab: ByteSize,
    /// The distribution of slabs over the memory servers: linear, striped (neighbours on different servers), or
    /// two-choices (the one of two random servers that has more free memory)
    #[arg(long, value_name = "KIND", default_value_t)]
    placement: Placement,
    /// Listen on a unix socket, at this path
    #[arg(long, value_name = "FILE", conflicts_with = "listen")]
    socket: Option<PathBuf>,
    /// Listen by TCP on this address, of loopback or of the fabric, such as [::1]:10809
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// Let --listen have any address: every host that reaches it can read and write the disk, because nobody is
    /// authenticated and nothing is encrypted
    #[arg(long, requires = "listen")]
    expose: bool,
    /// The name of the export, for clients; by default that of the disk, or `disk` for a new one
    #[arg(long, value_name = "NAME")]
    export: Option<String>,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Connections that are served at once; each has a thread and 8 MiB of memory
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=64))]
    connections: u16,
    /// Lock this process's memory, which a disk to swap to needs
    #[arg(long, value_enum, value_name = "yes|no", default_value = "yes")]
    lock: Lock,
    /// How long this process may go on without a response of the map's server, 500ms to 10s: after it was killed, the
    /// next one waits for that time, and another endpoint for up to two and a quarter of it and a second
    #[arg(long, value_name = "TIME", default_value = "4s")]
    lease: Deadline,
    #[command(flatten)]
    member: Member,
}

impl DiskCommand {
    /// Whether it serves a disk.
    pub(super) const fn is_daemon(&self) -> bool {
        self.order.is_none()
    }
}

pub(super) fn run(command: DiskCommand, global: Global) -> anyhow::Result<Exit> {
    match command.order {
        Some(Order::Delete(delete)) => delete::run(&delete, global),
        None => serve(&command.serve, global),
    }
}

/// A disk that is served.
struct Served {
    disk: Arc<Disk>,
    keeper: Keeper<UdpTransport>,
    server: Server,
    cancel: Cancel,
    /// Its file is removed when this is dropped.
    listening: Listening,
}

fn serve(options: &Serve, global: Global) -> anyhow::Result<Exit> {
    if !(LEASE_MIN..=Duration::from_secs(10)).contains(&options.lease.0) {
        return Err(UsageError("--lease must be 500ms to 10s".to_owned()).into());
    }
    if options.size.is_none() && options.attach.is_none() {
        return Err(UsageError(NEITHER.to_owned()).into());
    }
    if options.export.as_ref().is_some_and(|name| name.len() > NAME_BYTES_MAX) {
        let words = format!("the name of an export can have {NAME_BYTES_MAX} bytes");
        return Err(UsageError(words).into());
    }
    let properties = properties(options)?;
    if let Some(properties) = &properties {
        properties.check()?;
    }
    let place = Place::of(options.socket.as_deref(), options.listen, options.expose)?;
    place.check()?;
    let session = options.member.join_as_owner(None)?;
    // An attach may wait for a long time, and nothing is lost if a signal ends the process meanwhile.
    let cancel = options.attach.is_none().then(watch).transpose()?;
    if options.lock == Lock::Yes {
        lock_memory()?;
        if let Err(error) = mark_as_io_thread()
            // Other machines, which may swap to it, come this way.
            && options.listen.is_some()
            && !options.read_only
        {
            tracing::warn!(%error, "not marked as a process that frees memory, which needs CAP_SYS_RESOURCE");
        }
    }
    let mut client = session.client;
    // For the list of servers: the keeper has the first client.
    let mut watcher = client.try_clone()?;
    let pointer = match (options.attach, &properties) {
        (Some(pointer), _) => pointer,
        (None, Some(properties)) => Disk::create(&mut client, properties)?,
        (None, None) => return Err(UsageError(NEITHER.to_owned()).into()),
    };
    let served = match start(options, client, &watcher, pointer, place, cancel, global) {
        Err(error) if options.attach.is_none() => {
            return Err(deleted_again(&mut watcher, pointer, error));
        }
        served => served?,
    };
    readiness::report_ready();
    let ended = until_end(&served.disk, &watcher, &served.cancel);
    served.server.stop();
    // Nobody listens any more.
    drop(served.listening);
    if let Some(client) = served.keeper.stop() {
        // Its sessions would expire anyway.
        let _ = client.close();
    }
    tracing::info!(%pointer, slabs = served.disk.allocated_slabs(), "the disk is not served any more");
    ended.map(|()| Exit::Ok)
}

/// The properties of the disk that is to be made, if one is.
fn properties(options: &Serve) -> anyhow::Result<Option<DiskOptions>> {
    let Some(size) = options.size else { return Ok(None) };
    Ok(Some(DiskOptions {
        size_bytes: size.0,
        slab_bytes: options.slab.0,
        placement: options.placement,
        name: options.export.clone().unwrap_or_else(|| "disk".to_owned()),
        id: OsRng.try_next_u64().context("the system gives no random numbers")?,
    }))
}

fn start(
    options: &Serve,
    client: Client<UdpTransport>,
    watcher: &Client<UdpTransport>,
    pointer: Pointer,
    place: Place,
    cancel: Option<Cancel>,
    global: Global,
) -> anyhow::Result<Served> {
    let clients: Result<Vec<_>, _> = (0..options.connections).map(|_| client.try_clone()).collect();
    let open = OpenOptions {
        deadline: options.member.deadline(),
        lease: options.lease.0,
        nodes: nodes(watcher),
    };
    let (disk, keeper) = Disk::attach(client, pointer, open)?;
    let cancel = cancel.map_or_else(watch, Ok)?;
    // Not before: a signal while an attach waits would leave the socket's file. In the rack's namespace, if it is for one.
    let mut listening = place.listen()?;
    let export = Export {
        name: options.export.as_deref().unwrap_or_else(|| disk.name()).into(),
        description: format!("remote memory at {pointer}").into(),
        size_bytes: disk.size_bytes(),
        is_read_only: options.read_only,
        payload_bytes_max: PAYLOAD_BYTES_MAX,
    };
    let name = export.name.clone();
    let listener = listening.take().context("the socket is used once")?;
    let server = Server::start(&disk, clients?, listener, export, Limits::default())
        .context("cannot serve connections")?;
    print(options, &disk, &name, &listening, global)?;
    Ok(Served { disk, keeper, server, cancel, listening })
}

/// Watches for signals.
fn watch() -> anyhow::Result<Cancel> {
    interrupt::watch().context("cannot watch for signals")
}

/// Frees a disk whose pointer nobody knows.
fn deleted_again(
    client: &mut Client<UdpTransport>,
    pointer: Pointer,
    error: anyhow::Error,
) -> anyhow::Error {
    match Disk::delete(client, pointer, false) {
        Ok(_) => error,
        Err(why) => {
            let words = format!(
                "the new disk {pointer} was not freed again ({why}); delete it with `bluebridge disk delete`"
            );
            error.context(words)
        }
    }
}

/// Prints how to use the disk, with the only copy of its pointer.
fn print(
    options: &Serve,
    disk: &Disk,
    name: &str,
    listening: &Listening,
    global: Global,
) -> anyhow::Result<()> {
    let (pointer, uri) = (disk.pointer(), listening.uri(name));
    if global.json {
        let document = json!({
            "pointer": pointer.to_string(),
            "export": name,
            "uri": uri,
            "socket": listening.socket().map(|path| path.display().to_string()),
            "address": listening.address().map(|address| address.to_string()),
            "size_bytes": disk.size_bytes(),
            "slab_bytes": disk.slab_bytes(),
            "slab_count": disk.size_bytes().div_ceil(disk.slab_bytes()),
            "allocated_slab_count": disk.allocated_slabs(),
            "placement": disk.placement().to_string(),
            "is_read_only": options.read_only,
            "connections": options.connections,
            "is_locked": options.lock == Lock::Yes,
        });
        return output::delivered(&format!("{}\n", serde_json::to_string_pretty(&document)?));
    }
    let size = ByteSize(disk.size_bytes());
    let (kernel, place, quoted) = (listening.nbd_client(name), listening.option(), quoted(&uri));
    let member = options.member.chosen();
    output::delivered(&format!(
        "The disk {pointer} of {size} is served as {uri}\n\
         look at it:     nbdinfo {quoted}\n\
         copy to it:     qemu-img convert -n -O raw IMAGE {quoted}\n\
         use it:         {kernel}\n\
         serve it again: bluebridge disk --attach {pointer} {place}{member}\n\
         free it:        bluebridge disk delete {pointer}{member}\n\
         Do not swap to it on this machine.\n"
    ))
}

/// The live memory servers.
fn nodes(client: &Client<UdpTransport>) -> Vec<NodeId> {
    let rack = client.rack().map_or_else(Vec::new, |rack| rack.memory_nodes.to_vec());
    rack.iter().filter(|node| node.live).map(|node| node.node).collect()
}

/// Waits for a signal, or until this process is not the disk's any more.
fn until_end(disk: &Disk, watcher: &Client<UdpTransport>, cancel: &Cancel) -> anyhow::Result<()> {
    let mut version = None;
    while !cancel.is_cancelled() {
        if let Some(error) = disk.end() {
            return Err(error.into());
        }
        let now = watcher.rack().map(|rack| rack.version);
        if now != version {
            version = now;
            disk.set_nodes(nodes(watcher).into_iter());
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}
