//! Takes a rack down with its record alone, in whatever state its builder left it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde::Serialize;

use crate::arena;
use crate::daemon::{CONTROLLER, SWITCH};
use crate::error::failed;
use crate::namespace::{self, NamespaceId, NetworkNamespace};
use crate::network::Netlink;
use crate::process::{self, ProcessRecord, Stopped};
use crate::spec::{Node, RackName};
use crate::state::{
    Phase, RACK_VARIABLE, RackDirectory, RackState, STATE_VARIABLE, StateError, StateRoot,
    UserNamespaceRecord, mark,
};
use crate::{NAMED_NAMESPACES, RackError};

/// The directory of a rootless rack's namespaces, inside the rack's directory.
pub(super) const PRIVATE_NAMESPACES: &str = "ns";

/// The interface of each namespace whose alias names the directory in which the rack is recorded.
pub(super) const LABELLED_INTERFACE: &str = "lo";

/// How often to look again for processes that appear while others are stopped.
const ROUNDS: usize = 10;

/// How long a process that a killed builder has just started may run without the rack's mark.
const UNMARKED: Duration = Duration::from_millis(100);

/// How many checks, [`UNMARKED`] apart, must find nothing after the builder was killed.
const LOOKS: usize = 3;

/// The result of taking a rack down.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct TakenDown {
    /// Whether the record was missing or unreadable, so that everything with the rack's name or mark was removed.
    pub unrecorded: bool,
    /// The daemons that were still running.
    pub daemons: Vec<StoppedProcess>,
    /// Other processes found in the rack, such as shells.
    pub others: Vec<StoppedProcess>,
    /// How many namespaces were removed.
    pub namespace_count: usize,
    /// The number of mounts in the rack's directory that were found there and not where a record names them, and
    /// removed.
    pub mount_count: usize,
    /// How many files with the memory of its servers were removed, and BPF maps without such a file.
    pub arena_count: usize,
}

impl TakenDown {
    /// Whether there was anything to take down.
    pub fn is_empty(&self) -> bool {
        let Self { unrecorded: _, daemons, others, namespace_count, mount_count, arena_count } =
            self;
        let counts = [namespace_count, mount_count, arena_count];
        daemons.is_empty() && others.is_empty() && counts.iter().all(|count| **count == 0)
    }
}

/// A process and its end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct StoppedProcess {
    /// The daemon's name, or that of the command.
    pub name: String,
    /// Its pid.
    pub pid: u32,
    /// How it ended.
    pub end: Stopped,
}

/// Stops the processes of the rack, removes its namespaces and mounts, then its directory.
///
/// # Errors
/// The first step that failed; all others are done, and the record stays for another try.
pub fn take_down(directory: &RackDirectory, grace: Duration) -> Result<TakenDown, RackError> {
    clear(directory, grace, false)
}

/// Takes down a rack that another process built, which may have been killed at any moment.
///
/// # Errors
/// As for [`take_down`].
pub fn take_down_of_another(
    directory: &RackDirectory,
    grace: Duration,
) -> Result<TakenDown, RackError> {
    clear(directory, grace, true)
}

fn clear(
    directory: &RackDirectory,
    grace: Duration,
    of_another: bool,
) -> Result<TakenDown, RackError> {
    let mut report = TakenDown::default();
    let state = match directory.read() {
        Ok(Some(state)) => state,
        Ok(None) => return clear_unrecorded(directory, grace),
        Err(error @ StateError::Damaged { .. }) => {
            tracing::warn!(%error, "removing everything with the rack's name or mark instead");
            return clear_unrecorded(directory, grace);
        }
        Err(error) => return Err(error.into()),
    };
    let mut first = None;
    let mut note = |result: Result<(), RackError>| {
        if let Err(error) = result {
            tracing::warn!(%error, "left behind");
            first.get_or_insert(error);
        }
    };
    note(stop_daemons(&state, grace, &mut report.daemons));
    let looks = if of_another && state.phase == Phase::Building { LOOKS } else { 1 };
    note(stop_others(&state, looks, grace, &mut report.others));
    let arenas = arena::remove(directory.path(), Some(&state));
    note(arenas.map(|count| report.arena_count = count));
    if let Some(bpf) = &state.bpf_directory {
        note(namespace::unmount(bpf).map_err(failed("unmount the pinned maps")));
        // The directory may have been moved, and the mount in it.
        note(remove_mounts(directory.path(), &mut report.mount_count));
    }
    note(remove_namespaces(&state, directory, &mut report.namespace_count));
    if let Some(holder) = other_holder(&state) {
        let stopped = process::stop_all(&[holder], grace);
        note(stopped.map(drop).map_err(failed("stop the holder of the namespaces")));
    }
    match first {
        Some(error) => Err(error),
        None => {
            directory.remove()?;
            Ok(report)
        }
    }
}

fn clear_unrecorded(directory: &RackDirectory, grace: Duration) -> Result<TakenDown, RackError> {
    let mut report = take_down_unrecorded(&directory.root(), directory.name(), grace)?;
    report.arena_count = arena::remove(directory.path(), None)?;
    directory.remove()?;
    Ok(report)
}

/// Takes down the rest of a rack without a record: processes with its mark or in its namespaces, the namespaces
/// with its name, and mounts in its directory.
///
/// # Errors
/// [`RackError::Elsewhere`] if the rack is recorded in another directory; otherwise as for [`take_down`].
pub fn take_down_unrecorded(
    root: &StateRoot,
    name: &RackName,
    grace: Duration,
) -> Result<TakenDown, RackError> {
    let named = named_namespaces(name);
    let networks: Vec<_> = named.iter().filter_map(|path| NamespaceId::of(path).ok()).collect();
    let mark = mark(name);
    let marked = |pid: u32| {
        process::environment(pid, RACK_VARIABLE)
            .is_some_and(|id| id.as_encoded_bytes().starts_with(mark.as_bytes()))
    };
    // Racks of the same name may be recorded in several directories, for example by other users.
    let recorded_in = |pid: u32| process::environment(pid, STATE_VARIABLE).map(PathBuf::from);
    let inside = |pid: u32| process::lives_in(pid, "net", &networks);
    let others = process::find(|pid| {
        inside(pid) && marked(pid) && recorded_in(pid).is_some_and(|it| !is_same(&it, root.path()))
    });
    let of_process = others.iter().find_map(|other| recorded_in(other.pid));
    // A rack without processes, for example after they were killed, is known by its namespaces.
    let label =
        || named.iter().filter_map(|path| label_of(path)).find(|it| !is_same(it, root.path()));
    if let Some(root) = of_process.or_else(label) {
        return Err(RackError::Elsewhere { name: name.clone(), root });
    }
    let mut report = TakenDown { unrecorded: true, ..TakenDown::default() };
    let ours = |pid: u32| {
        inside(pid) || (marked(pid) && recorded_in(pid).is_some_and(|it| is_same(&it, root.path())))
    };
    let mut stopped = Ok(());
    // Daemons are identified by their command line; the holder of a rootless rack is the last.
    for stage in 0..=3 {
        let in_stage = |pid: u32| ours(pid) && stage_of_process(pid) == stage;
        let taken = if stage == 0 { &mut report.others } else { &mut report.daemons };
        let looks = if stage == 0 { LOOKS } else { 1 };
        if let Err(error) = stop_all_found(in_stage, looks, grace, taken) {
            stopped = Err(error);
        }
    }
    stopped?;
    let directory = root.directory_of(name);
    remove_mounts(&directory, &mut report.mount_count)?;
    for path in &named {
        report.namespace_count += usize::from(namespace::delete(path)?);
    }
    leave_named_namespaces(Path::new(NAMED_NAMESPACES));
    Ok(report)
}

fn remove_mounts(directory: &Path, count: &mut usize) -> Result<(), RackError> {
    let mounts = namespace::mounts_below(directory).map_err(failed("list the mounts"))?;
    for path in mounts {
        let unmounted = namespace::unmount(&path);
        unmounted.map_err(failed(format!("unmount {}", path.display())))?;
        *count += 1;
    }
    Ok(())
}

/// The directory of records that a namespace names; `None` if it was being created, or is no namespace.
fn label_of(path: &Path) -> Option<PathBuf> {
    let look = || Netlink::open()?.link(LABELLED_INTERFACE);
    let link = NetworkNamespace::open(path).ok()?.enter(look).ok()?.ok()?;
    link.alias.map(PathBuf::from)
}

/// Whether two paths lead to the same directory.
fn is_same(one: &Path, other: &Path) -> bool {
    // The label has no bytes that are not UTF-8.
    one.to_string_lossy() == other.to_string_lossy()
        || fs::canonicalize(one).ok().zip(fs::canonicalize(other).ok()).is_some_and(|(a, b)| a == b)
}

/// The mounted namespaces that a rack of this name has or had; without root there are none with names.
fn named_namespaces(name: &RackName) -> Vec<PathBuf> {
    if !namespace::is_privileged() {
        return Vec::new();
    }
    let prefix = format!("bb-{name}-");
    let entries = fs::read_dir(NAMED_NAMESPACES).into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            let name = entry.file_name();
            let node = name.to_str().and_then(|name| name.strip_prefix(&prefix));
            node.is_some_and(|node| node.parse::<Node>().is_ok())
        })
        .map(|entry| entry.path())
        // A file with contents is not a namespace; an empty one is the name of a namespace that was being created.
        .filter(|path| fs::metadata(path).is_ok_and(|it| it.len() == 0))
        .collect()
}

/// The stage in which a process without a record is stopped: 0 if it is not a daemon.
fn stage_of_process(pid: u32) -> usize {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let mut words = line.split(|byte| *byte == 0).skip(1);
    match (words.next(), words.next()) {
        (Some(b"memserver"), _) | (Some(b"rack"), Some(b"watch")) => 1,
        (Some(b"controller"), _) => 2,
        (Some(b"switch"), _) | (Some(b"rack"), Some(b"hold")) => 3,
        _ => 0,
    }
}

/// Memory servers first, so that they can still leave; the switch last.
fn stop_daemons(
    state: &RackState,
    grace: Duration,
    stopped: &mut Vec<StoppedProcess>,
) -> Result<(), RackError> {
    let stage = |name: &str| match name {
        SWITCH => 2,
        CONTROLLER => 1,
        _ => 0,
    };
    let mut failure = Ok(());
    for current in 0..=2 {
        let group: Vec<_> = state
            .daemons
            .iter()
            .filter(|daemon| stage(&daemon.name) == current)
            .filter_map(|daemon| Some((daemon.name.clone(), daemon.process.clone()?)))
            .collect();
        if let Err(error) = stop(group, grace, stopped) {
            failure = Err(error);
        }
    }
    failure
}

/// Daemons whose record was truncated, shells, captures: every process with the rack's mark or in its namespaces.
fn stop_others(
    state: &RackState,
    looks: usize,
    grace: Duration,
    stopped: &mut Vec<StoppedProcess>,
) -> Result<(), RackError> {
    let holder = other_holder(state);
    let named = state.user_namespace.is_none();
    let paths = state.namespaces.iter().map(|record| &record.path);
    // The path of a former mount has a file's identity, which matches no process.
    let networks: Vec<_> = paths.filter_map(|path| NamespaceId::of(path).ok()).collect();
    let users: Vec<_> = match &state.user_namespace {
        Some(UserNamespaceRecord { id, .. }) if holder.is_some() => vec![*id],
        _ => Vec::new(),
    };
    let ours = |pid: u32| {
        process::has_environment(pid, RACK_VARIABLE, &state.id)
            || ((named || is_inside(state)) && process::lives_in(pid, "net", &networks))
            || process::lives_in(pid, "user", &users)
    };
    let wanted = |pid: u32| holder.as_ref().is_none_or(|it| it.pid != pid) && ours(pid);
    stop_all_found(wanted, looks, grace, stopped)
}

/// Stops the processes that `wanted` selects, until `looks` checks find no more.
fn stop_all_found(
    wanted: impl Fn(u32) -> bool,
    looks: usize,
    grace: Duration,
    stopped: &mut Vec<StoppedProcess>,
) -> Result<(), RackError> {
    let mut quiet = 0;
    for _ in 0..ROUNDS {
        let found = process::find(&wanted);
        quiet = if found.is_empty() { quiet + 1 } else { 0 };
        if quiet == looks {
            return Ok(());
        }
        if found.is_empty() {
            thread::sleep(UNMARKED);
        }
        stop(found.into_iter().map(|it| (name_of(it.pid), it)).collect(), grace, stopped)?;
    }
    Err(failed("stop the rack's processes")(io::Error::other("new ones keep appearing")))
}

fn stop(
    group: Vec<(String, ProcessRecord)>,
    grace: Duration,
    stopped: &mut Vec<StoppedProcess>,
) -> Result<(), RackError> {
    let (names, records): (Vec<_>, Vec<_>) = group.into_iter().unzip();
    let ends =
        process::stop_all(&records, grace).map_err(failed(format!("stop {}", names.join(", "))))?;
    let ended = names.into_iter().zip(records).zip(ends);
    stopped.extend(
        ended
            .filter(|(_, end)| *end != Stopped::AlreadyGone)
            .map(|((name, record), end)| StoppedProcess { name, pid: record.pid, end }),
    );
    Ok(())
}

fn name_of(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

/// The process that holds a rootless rack, if it is not the caller and still runs.
fn other_holder(state: &RackState) -> Option<ProcessRecord> {
    let holder = &state.user_namespace.as_ref()?.holder;
    (holder.pid != std::process::id() && holder.is_running()).then(|| holder.clone())
}

/// Whether the caller sees the mounts of a rootless rack.
fn is_inside(state: &RackState) -> bool {
    let own = NamespaceId::of("/proc/self/ns/user").ok();
    state.user_namespace.as_ref().is_some_and(|record| Some(record.id) == own)
}

/// From outside there is nothing to remove: a rootless rack's namespaces end with its processes.
fn remove_namespaces(
    state: &RackState,
    directory: &RackDirectory,
    count: &mut usize,
) -> Result<(), RackError> {
    let rootless = state.user_namespace.is_some();
    if rootless && !is_inside(state) {
        *count = state.namespaces.len();
        return Ok(());
    }
    let mut failure = Ok(());
    for record in &state.namespaces {
        match namespace::delete(&record.path) {
            Ok(true) => *count += 1,
            Ok(false) => {}
            Err(error) => failure = Err(error.into()),
        }
    }
    if rootless {
        let private = directory.path().join(PRIVATE_NAMESPACES);
        namespace::unmount(&private).map_err(failed("unmount the namespaces"))?;
    } else {
        leave_named_namespaces(Path::new(NAMED_NAMESPACES));
    }
    failure
}

/// The last user of `/run/netns` unmounts it; the next user mounts it again. If it is in use, this is refused.
fn leave_named_namespaces(directory: &Path) {
    if fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none()) {
        namespace::unmount_unused(directory);
    }
}
