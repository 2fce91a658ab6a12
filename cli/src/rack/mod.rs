//! Racks: a switch, servers and clients, each in a network namespace, joined by veth pairs.
//!
//! [`Rack::build`] makes one in this process and its drop takes it down; [`Rack::detach`] leaves it to
//! other commands, which find it by its record ([`state`]).

pub mod access;
pub mod controller_report;
pub mod daemon;
pub mod layout;
mod links;
pub mod spec;
pub mod state;
pub mod status;
pub mod teardown;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bluebridge_switch::ebpf::EbpfSwitch;

use crate::namespace::{self, NamespaceError, NamespaceId, NetworkNamespace, UserNamespaceError};
use crate::network::NetworkError;
use crate::process::ProcessRecord;
use layout::Layout;
use spec::{DataPlane, Node, RackSpec, SpecError};
use state::{
    NamespaceRecord, Phase, RackDirectory, RackState, StateError, StateRoot, UserNamespaceRecord,
};

/// Where namespaces with names live, as `ip netns` knows them.
const NAMED_NAMESPACES: &str = "/run/netns";

/// How long daemons may take to end when they are asked to.
pub const GRACE: Duration = Duration::from_secs(5);

/// Why a rack could not be built, used or taken down.
#[derive(Debug, thiserror::Error)]
pub enum RackError {
    /// The caller asked to stop.
    #[error("interrupted")]
    Cancelled,
    /// A daemon did not start; the last lines it printed follow.
    #[error("{name} {reason}; the end of its log:\n{log_tail}")]
    Daemon {
        /// The daemon.
        name: String,
        /// What happened.
        reason: DaemonFailure,
        /// The end of its log.
        log_tail: String,
    },
    /// The eBPF data plane cannot be loaded in a user namespace.
    #[error("the ebpf switch needs root; without it choose --switch soft")]
    EbpfNeedsRoot,
    /// A file, mount or process operation failed.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried.
        action: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A namespace cannot be made or entered.
    #[error(transparent)]
    Namespace(#[from] NamespaceError),
    /// A name that the rack was about to use belongs to somebody else.
    #[error("{} exists already and is not this rack's; remove it or choose another --name", .0.display())]
    NamespaceTaken(PathBuf),
    /// Links or routes cannot be made.
    #[error("in {node}: {source}")]
    Network {
        /// Where.
        node: Node,
        /// Why.
        source: NetworkError,
    },
    /// The rack has no such daemon.
    #[error("the rack has no daemon {0}; `bluebridge rack status` shows those it has")]
    NoDaemon(String),
    /// The rack has no such node.
    #[error("the rack {name} has no node {node}; `bluebridge rack status` shows those it has")]
    NoNode {
        /// The rack.
        name: spec::RackName,
        /// The node asked for.
        node: Node,
    },
    /// The builder of the rack died.
    #[error("the rack {0} was not built to its end; take it down and build it again")]
    NotBuilt(spec::RackName),
    /// The process that holds a rack without root is gone.
    #[error(
        "the rack {0} lost the process that holds its namespaces; take it down and build it again"
    )]
    NotHeld(spec::RackName),
    /// The specification is wrong.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The record cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// No user namespace.
    #[error(transparent)]
    UserNamespace(#[from] UserNamespaceError),
}

/// How a daemon failed to start.
#[derive(Debug)]
pub enum DaemonFailure {
    /// It ended.
    Exited(ExitStatus),
    /// It did not report ready in time.
    Late {
        /// How long it was waited for.
        waited: Duration,
        /// What it was doing, if it said so.
        doing: Option<String>,
    },
}

impl std::fmt::Display for DaemonFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exited(status) => write!(f, "ended before it was ready ({status})"),
            Self::Late { waited, doing: None } => write!(f, "was not ready after {waited:.1?}"),
            Self::Late { waited, doing: Some(doing) } => {
                write!(f, "was not ready after {waited:.1?}, but still {doing}")
            }
        }
    }
}

/// Where racks can be built: with root on the machine, without in a user namespace of the process.
#[derive(Clone, Debug)]
pub struct Site {
    state_root: StateRoot,
    user_namespace: Option<NamespaceId>,
}

impl Site {
    /// Finds out what this process may do, and enters a new user namespace if it must.
    ///
    /// To be called once, early in main: without root it moves the whole process, which may have one
    /// thread only. One site serves any number of racks.
    pub fn prepare() -> Result<Self, RackError> {
        Self::with_state_root(StateRoot::locate())
    }

    /// As [`Self::prepare`], with the records elsewhere.
    pub fn with_state_root(state_root: StateRoot) -> Result<Self, RackError> {
        if namespace::is_privileged() {
            return Ok(Self { state_root, user_namespace: None });
        }
        Self::in_user_namespace(state_root)
    }

    /// Enters a new user namespace also if the process has root; see [`Self::prepare`].
    pub fn prepare_rootless() -> Result<Self, RackError> {
        Self::in_user_namespace(StateRoot::locate())
    }

    fn in_user_namespace(state_root: StateRoot) -> Result<Self, RackError> {
        namespace::enter_new()?;
        let id =
            NamespaceId::of("/proc/self/ns/user").map_err(failed("name the user namespace"))?;
        Ok(Self { state_root, user_namespace: Some(id) })
    }

    /// Whether racks here have no root and no eBPF.
    pub fn is_rootless(&self) -> bool {
        self.user_namespace.is_some()
    }

    /// The kernel's data plane where it can be loaded and this build has it, else the soft one.
    pub fn data_plane(&self) -> DataPlane {
        if self.is_rootless() || !EbpfSwitch::is_built() {
            DataPlane::Soft
        } else {
            DataPlane::Ebpf
        }
    }

    /// Where racks are recorded.
    pub fn state_root(&self) -> &StateRoot {
        &self.state_root
    }
}

/// A wish to stop, seen between the steps of building.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was asked.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// An error once it was asked.
    pub fn check(&self) -> Result<(), RackError> {
        if self.is_cancelled() { Err(RackError::Cancelled) } else { Ok(()) }
    }
}

/// A rack of this process.
#[derive(Debug)]
pub struct Rack {
    directory: RackDirectory,
    state_root: StateRoot,
    state: RackState,
    layout: Layout,
    namespaces: BTreeMap<Node, NetworkNamespace>,
    cancel: Cancel,
    owned: bool,
}

impl Rack {
    /// Makes the namespaces and links of a rack, without daemons.
    pub fn build(site: &Site, spec: RackSpec, cancel: Cancel) -> Result<Self, RackError> {
        spec.check()?;
        if site.is_rootless() && spec.switch == DataPlane::Ebpf {
            return Err(RackError::EbpfNeedsRoot);
        }
        let mut rack = Self {
            directory: site.state_root.create(&spec.name)?,
            state_root: site.state_root.clone(),
            layout: Layout::of(&spec),
            state: RackState::new(spec),
            namespaces: BTreeMap::new(),
            cancel,
            owned: true,
        };
        if let Some(id) = site.user_namespace {
            let holder = ProcessRecord::of_caller().map_err(failed("read the own process"))?;
            rack.state.user_namespace = Some(UserNamespaceRecord { id, holder });
        }
        rack.save()?;
        rack.make_namespaces()?;
        links::make(&rack.layout, rack.state.spec.switch, &rack.namespaces, &rack.cancel)?;
        if rack.state.spec.switch == DataPlane::Ebpf {
            rack.mount_bpf()?;
        }
        Ok(rack)
    }

    /// Opens a rack that another command built, to change it; nobody else can meanwhile. Its drop
    /// leaves it as it is.
    ///
    /// Without root this moves the calling process, which may have one thread only, into the rack's
    /// user namespace.
    pub fn open(
        root: &StateRoot,
        name: &spec::RackName,
        cancel: Cancel,
    ) -> Result<Self, RackError> {
        let directory = root.lock(name)?;
        let state = directory.read()?.filter(|state| state.phase == Phase::Up);
        let state = state.ok_or_else(|| RackError::NotBuilt(name.clone()))?;
        access::join(&state)?;
        let mut namespaces = BTreeMap::new();
        for record in &state.namespaces {
            namespaces.insert(record.node, NetworkNamespace::open(&record.path)?);
        }
        let layout = Layout::of(&state.spec);
        let state_root = root.clone();
        Ok(Self { directory, state_root, state, layout, namespaces, cancel, owned: false })
    }

    /// Takes another wish to stop.
    pub fn set_cancel(&mut self, cancel: Cancel) {
        self.cancel = cancel;
    }

    /// What it was built to.
    pub fn spec(&self) -> &RackSpec {
        &self.state.spec
    }

    /// Where everything is.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The rack's record.
    pub fn state(&self) -> &RackState {
        &self.state
    }

    /// Runs `work` on a thread in a node's namespace and answers its result.
    pub fn enter<T: Send>(
        &self,
        node: Node,
        work: impl FnOnce() -> T + Send,
    ) -> Result<T, RackError> {
        Ok(self.namespace(node)?.enter(work)?)
    }

    /// Leaves the rack to later commands. `program` is the `bluebridge` binary: without root it runs once
    /// more to hold the namespaces.
    pub fn detach(mut self, program: &Path) -> Result<RackState, RackError> {
        self.cancel.check()?;
        if let Some(record) = &self.state.user_namespace {
            let holder = self.spawn_holder(program)?;
            self.state.user_namespace = Some(UserNamespaceRecord { id: record.id, holder });
        }
        self.state.phase = Phase::Up;
        self.save()?;
        self.owned = false;
        Ok(self.state.clone())
    }

    /// Takes the rack down and says what that took; a drop does so silently.
    pub fn take_down(mut self) -> Result<teardown::TakenDown, RackError> {
        self.owned = false;
        self.namespaces.clear();
        teardown::take_down(&self.directory, GRACE)
    }

    fn save(&self) -> Result<(), RackError> {
        Ok(self.directory.write(&self.state)?)
    }

    fn namespace(&self, node: Node) -> Result<&NetworkNamespace, RackError> {
        self.namespaces
            .get(&node)
            .ok_or_else(|| RackError::NoNode { name: self.state.spec.name.clone(), node })
    }

    fn make_namespaces(&mut self) -> Result<(), RackError> {
        let directory = self.namespace_directory()?;
        for node in self.state.spec.nodes() {
            self.cancel.check()?;
            let path = directory.join(format!("bb-{}-{node}", self.state.spec.name));
            if fs::symlink_metadata(&path).is_ok() {
                return Err(RackError::NamespaceTaken(path));
            }
            self.state.namespaces.push(NamespaceRecord { node, path: path.clone() });
            self.save()?;
            let made = NetworkNamespace::create(&path).inspect_err(|error| {
                // Another rack was quicker: what it made must not go with this one.
                if error.is_taken() {
                    self.state.namespaces.pop();
                }
            });
            match made {
                Ok(namespace) => self.namespaces.insert(node, namespace),
                Err(error) => {
                    self.save()?;
                    return Err(error.into());
                }
            };
        }
        Ok(())
    }

    /// With root the usual place, without a private file system that goes with its last process.
    fn namespace_directory(&self) -> Result<PathBuf, RackError> {
        if self.state.user_namespace.is_none() {
            let directory = PathBuf::from(NAMED_NAMESPACES);
            fs::create_dir_all(&directory).map_err(failed("make /run/netns"))?;
            namespace::share_mounts(&directory).map_err(failed("share /run/netns"))?;
            return Ok(directory);
        }
        let directory = self.directory.path().join(teardown::PRIVATE_NAMESPACES);
        fs::create_dir(&directory).map_err(failed("make a directory for namespaces"))?;
        namespace::mount_file_system("tmpfs", &directory)
            .map_err(failed("mount a directory for namespaces"))?;
        Ok(directory)
    }

    fn mount_bpf(&mut self) -> Result<(), RackError> {
        let directory = self.directory.path().join("bpf");
        fs::create_dir(&directory).map_err(failed("make a directory for pinned maps"))?;
        self.state.bpf_directory = Some(directory.clone());
        self.save()?;
        namespace::mount_file_system("bpf", &directory)
            .map_err(failed("mount a file system for pinned maps"))
    }

    fn spawn_holder(&self, program: &Path) -> Result<ProcessRecord, RackError> {
        let mut command = Command::new(program);
        command.args(["rack", "hold"]).env(state::RACK_VARIABLE, &self.state.id);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
        let child = command.spawn().map_err(failed("start the holder of the namespaces"))?;
        ProcessRecord::of(child.id()).map_err(failed("read the holder's process"))
    }
}

impl Drop for Rack {
    fn drop(&mut self) {
        if !self.owned {
            return;
        }
        self.namespaces.clear();
        if let Err(error) = teardown::take_down(&self.directory, GRACE) {
            tracing::error!(rack = %self.state.spec.name, %error, "rack not taken down completely");
        }
    }
}

fn failed(action: impl Into<String>) -> impl FnOnce(io::Error) -> RackError {
    |source| RackError::Io { action: action.into(), source }
}

#[cfg(test)]
mod tests;
