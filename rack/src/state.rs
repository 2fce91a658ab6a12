//! A rack's record on disk, written before each step so that every started step can be undone.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::namespace::NamespaceId;
use crate::process::ProcessRecord;
use crate::readiness::KeptMemory;
use crate::spec::{Node, RackName, RackSpec, SpecError};

/// Overrides the directory of rack records; set for every process that a rack starts.
pub const STATE_VARIABLE: &str = "BLUEBRIDGE_STATE";

/// Marks every process that a rack starts with the rack's random id.
pub const RACK_VARIABLE: &str = "BLUEBRIDGE_RACK_ID";

/// The log filter of a rack's process, in the syntax of `tracing`.
pub const LOG_VARIABLE: &str = "BLUEBRIDGE_LOG";

/// How a process of a rack writes its log lines: `text` or `json`.
pub const LOG_FORMAT_VARIABLE: &str = "BLUEBRIDGE_LOG_FORMAT";

/// Selects the rack for commands.
pub const CHOICE_VARIABLE: &str = "BLUEBRIDGE_RACK";

const FILE: &str = "state.json";

/// The longest path of a socket (unix(7), sun_path without its last byte).
pub(crate) const SOCKET_PATH_MAX: usize = 107;

/// The permissions of a directory of racks that this program made. The sticky bit has no effect on a directory in
/// which only its owner can write: here it says that the directory may be removed with its last rack.
const MADE_MODE: u32 = 0o1700;

/// The bit of [`MADE_MODE`] that says so.
const MADE: u32 = 0o1000;

/// Why a rack's record could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// `BLUEBRIDGE_RACK` is not a valid name.
    #[error("{CHOICE_VARIABLE}: {0}")]
    Choice(#[source] SpecError),
    /// Another command is working on the rack.
    #[error("the rack {0} is in use by another bluebridge command; wait for it, or stop it")]
    Busy(RackName),
    /// A rack of that name is recorded already.
    #[error("there is a rack {0} already: take it down first, or choose another --rack")]
    Exists(RackName),
    /// The record cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The failed action.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The record was truncated, or another version wrote it.
    #[error(
        "cannot understand {}: {reason}; `bluebridge rack down --rack {name}` removes the rest of the rack",
        path.display()
    )]
    Damaged {
        /// The rack.
        name: RackName,
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// No rack is recorded, and none was named.
    #[error("no rack is up; `bluebridge rack up` builds one")]
    None,
    /// The directory belongs to another user, or other users can write in it.
    #[error("{} must be a directory of this user in which no other user can write", .0.display())]
    NotPrivate(PathBuf),
    /// A daemon could not report that it is ready.
    #[error(
        "{} is {} bytes too long for the address of a socket; set {STATE_VARIABLE} to a shorter path, or choose a \
         shorter --rack",
        path.display(),
        path.as_os_str().len() - SOCKET_PATH_MAX
    )]
    TooLong {
        /// The path of the socket.
        path: PathBuf,
    },
    /// The rack is ambiguous.
    #[error(
        "there are several racks ({}): select one with --rack or {CHOICE_VARIABLE}",
        .0.iter().map(RackName::as_str).collect::<Vec<_>>().join(", ")
    )]
    Several(Vec<RackName>),
    /// No rack of that name.
    #[error("there is no rack {0}; `bluebridge rack list` lists the racks")]
    Unknown(RackName),
}

/// The state of a rack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Being built, or its builder died.
    Building,
    /// Built.
    Up,
}

/// The user namespace of a rack without root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserNamespaceRecord {
    /// Its identity, valid as long as `holder` runs.
    pub id: NamespaceId,
    /// The process that keeps it, its mounts and its network namespaces.
    pub holder: ProcessRecord,
}

/// One namespace of the rack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceRecord {
    /// Its node.
    pub node: Node,
    /// Its mount point.
    pub path: PathBuf,
}

/// One daemon of the rack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DaemonRecord {
    /// Its name: the subcommand, and the node for a memory server.
    pub name: String,
    /// The namespace it runs in.
    pub node: Node,
    /// Its arguments after the program's name.
    pub arguments: Vec<String>,
    /// Its output.
    pub log: PathBuf,
    /// The process, once started.
    pub process: Option<ProcessRecord>,
    /// Whether it reported ready.
    pub ready: bool,
    /// Whether its memory outlives it, as a memory server that is ready reported.
    #[serde(default)]
    pub kept_memory: Option<KeptMemory>,
    /// The ids of the arenas that processes of a memory server had, in hexadecimal: those in BPF maps, and last the one
    /// of the current process.
    #[serde(default)]
    pub arena_ids: Vec<String>,
}

/// The record of a rack.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RackState {
    /// The rack's name and a random number, never used again: see [`mark`].
    pub id: String,
    /// Its specification.
    pub spec: RackSpec,
    /// Its state.
    pub phase: Phase,
    /// Present for a rack without root.
    pub user_namespace: Option<UserNamespaceRecord>,
    /// The namespaces, started or complete.
    pub namespaces: Vec<NamespaceRecord>,
    /// The file system of the switch's pinned maps, started or mounted.
    pub bpf_directory: Option<PathBuf>,
    /// The daemons, started or running.
    pub daemons: Vec<DaemonRecord>,
    /// The log filter of its daemons, in the syntax of `tracing`; `None` for their default.
    #[serde(default)]
    pub log_filter: Option<String>,
    /// How its daemons write their log lines, as [`LOG_FORMAT_VARIABLE`] has it; `None` leaves it to them.
    #[serde(default)]
    pub log_format: Option<String>,
}

impl RackState {
    /// A rack that is not built yet.
    pub fn new(spec: RackSpec) -> Self {
        Self {
            id: format!("{}{:032x}", mark(&spec.name), StdRng::from_os_rng().random::<u128>()),
            spec,
            phase: Phase::Building,
            user_namespace: None,
            namespaces: Vec::new(),
            bpf_directory: None,
            daemons: Vec::new(),
            log_filter: None,
            log_format: None,
        }
    }

    /// The path of a node's namespace.
    pub fn namespace(&self, node: Node) -> Option<&Path> {
        self.namespaces
            .iter()
            .find(|record| record.node == node)
            .map(|record| record.path.as_path())
    }
}

/// The common prefix of the ids of all racks of a name, which mark their processes. No name has a dot.
pub(crate) fn mark(name: &RackName) -> String {
    format!("{name}.")
}

/// The directory of all racks of this user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateRoot(PathBuf);

impl StateRoot {
    /// `/run/bluebridge` for root; otherwise `$XDG_RUNTIME_DIR/bluebridge` or a private directory beside other
    /// temporary files. Call it before entering a user namespace, in which every user is root.
    pub fn locate() -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        if let Some(path) = variable(STATE_VARIABLE) {
            // The rack's processes run in other directories than this one.
            return Self(std::path::absolute(&path).unwrap_or_else(|_| path.into()));
        }
        if crate::namespace::is_privileged() {
            return Self("/run/bluebridge".into());
        }
        match variable("XDG_RUNTIME_DIR") {
            Some(path) => Self(Path::new(&path).join("bluebridge")),
            None => {
                let user = rustix::process::geteuid().as_raw();
                Self(std::env::temp_dir().join(format!("bluebridge-{user}")))
            }
        }
    }

    /// The directory `path`.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The names of all recorded racks.
    pub fn names(&self) -> Result<Vec<RackName>, StateError> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(source) => return Err(failed("read", &self.0, source)),
        };
        let directories = entries.flatten().filter(|entry| entry.path().is_dir());
        let mut names: Vec<RackName> =
            directories.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        names.sort();
        Ok(names)
    }

    /// The rack for a command: the one named by the command or by `BLUEBRIDGE_RACK`; otherwise the only
    /// one that is up; otherwise the only one.
    ///
    /// # Errors
    /// [`StateError::None`] and [`StateError::Several`] if nothing is named.
    pub fn choose(&self, named: Option<&RackName>) -> Result<RackName, StateError> {
        if let Some(name) = named {
            return Ok(name.clone());
        }
        let (name, how) = match Self::named(None)? {
            Some(name) => (name, CHOICE_VARIABLE),
            None => (self.only()?, "it is the only one"),
        };
        // The caller did not name it, so it may be another one than expected.
        tracing::info!(rack = %name, reason = how, "selected the rack");
        Ok(name)
    }

    /// The rack named by the command or by `BLUEBRIDGE_RACK`.
    ///
    /// # Errors
    /// [`StateError::Choice`].
    pub fn named(named: Option<&RackName>) -> Result<Option<RackName>, StateError> {
        if let Some(name) = named {
            return Ok(Some(name.clone()));
        }
        let variable = std::env::var(CHOICE_VARIABLE).ok().filter(|value| !value.is_empty());
        variable.map(|name| name.parse().map_err(StateError::Choice)).transpose()
    }

    fn only(&self) -> Result<RackName, StateError> {
        let names = self.names()?;
        let is_up = |name: &&RackName| self.read(name).is_ok_and(|it| it.phase == Phase::Up);
        let up: Vec<RackName> = names.iter().filter(is_up).cloned().collect();
        let mut candidates = if up.is_empty() { names } else { up };
        match (candidates.pop(), candidates.is_empty()) {
            (Some(name), true) => Ok(name),
            (None, _) => Err(StateError::None),
            (Some(last), false) => {
                candidates.push(last);
                Err(StateError::Several(candidates))
            }
        }
    }

    /// The directory of a rack's record.
    pub(crate) fn directory_of(&self, name: &RackName) -> PathBuf {
        self.0.join(name.as_str())
    }

    /// Creates the directory for a new rack and locks it.
    pub fn create(&self, name: &RackName) -> Result<RackDirectory, StateError> {
        let is_gone = |error: &StateError| match error {
            StateError::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
            StateError::Unknown(_) => true,
            _ => false,
        };
        match self.try_create(name) {
            // Another command has just removed the last rack, and the directory with it.
            Err(error) if is_gone(&error) => self.try_create(name),
            created => created,
        }
    }

    fn try_create(&self, name: &RackName) -> Result<RackDirectory, StateError> {
        if let Some(parent) = self.0.parent() {
            let mut builder = DirBuilder::new();
            builder.recursive(true).mode(0o700);
            builder.create(parent).map_err(|source| failed("make", parent, source))?;
        }
        match DirBuilder::new().mode(MADE_MODE).create(&self.0) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(failed("make", &self.0, error));
            }
            _ => {}
        }
        self.check_private()?;
        let path = self.directory_of(name);
        match DirBuilder::new().mode(0o700).create(&path) {
            Ok(()) => RackDirectory::lock(name, path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(StateError::Exists(name.clone()))
            }
            Err(source) => Err(failed("make", &path, source)),
        }
    }

    /// Locks a rack's directory; [`StateError::Unknown`] if there is none.
    pub fn lock(&self, name: &RackName) -> Result<RackDirectory, StateError> {
        self.check_private_if_there(name)?;
        RackDirectory::lock(name, self.directory_of(name))
    }

    /// Reads a rack's record, which may change at any time.
    pub fn read(&self, name: &RackName) -> Result<RackState, StateError> {
        self.check_private_if_there(name)?;
        let directory = self.directory_of(name);
        match read(name, &directory)? {
            Some(state) => Ok(state),
            // Its processes and namespaces may still exist.
            None if directory.is_dir() => Err(StateError::Damaged {
                name: name.clone(),
                path: directory.join(FILE),
                reason: "there is no such file".to_owned(),
            }),
            None => Err(StateError::Unknown(name.clone())),
        }
    }

    fn check_private_if_there(&self, name: &RackName) -> Result<(), StateError> {
        match self.check_private() {
            Err(StateError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                Err(StateError::Unknown(name.clone()))
            }
            checked => checked,
        }
    }

    /// A record says what to signal and unmount, so it must belong to this user.
    fn check_private(&self) -> Result<(), StateError> {
        let metadata =
            fs::symlink_metadata(&self.0).map_err(|source| failed("read", &self.0, source))?;
        let own = metadata.uid() == rustix::process::geteuid().as_raw();
        if metadata.is_dir() && own && metadata.mode() & 0o022 == 0 {
            Ok(())
        } else {
            Err(StateError::NotPrivate(self.0.clone()))
        }
    }
}

/// One rack's directory, locked until dropped.
#[derive(Debug)]
pub struct RackDirectory {
    name: RackName,
    path: PathBuf,
    _lock: File,
}

impl RackDirectory {
    fn lock(name: &RackName, path: PathBuf) -> Result<Self, StateError> {
        let lock = match File::open(&path) {
            Ok(lock) => lock,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(StateError::Unknown(name.clone()));
            }
            Err(source) => return Err(failed("open", &path, source)),
        };
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(StateError::Busy(name.clone())),
            Err(errno) => return Err(failed("lock", &path, errno.into())),
        }
        // Another command may have removed the directory between opening and locking.
        let locked = lock.metadata().map_err(|source| failed("read", &path, source))?;
        match fs::metadata(&path) {
            Ok(there) if there.ino() == locked.ino() => {
                Ok(Self { name: name.clone(), path, _lock: lock })
            }
            _ => Err(StateError::Unknown(name.clone())),
        }
    }

    /// The rack's name.
    pub fn name(&self) -> &RackName {
        &self.name
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of all racks of this user.
    pub(crate) fn root(&self) -> StateRoot {
        StateRoot::at(self.path.parent().unwrap_or(Path::new("/")))
    }

    /// Reads the record; `None` if the builder died before it wrote one.
    pub fn read(&self) -> Result<Option<RackState>, StateError> {
        read(&self.name, &self.path)
    }

    /// Writes the record so that a reader sees the old or the new one, never a part.
    pub fn write(&self, state: &RackState) -> Result<(), StateError> {
        let (file, next) = (self.path.join(FILE), self.path.join("state.json.next"));
        let text = serde_json::to_vec_pretty(state)
            .map_err(|error| failed("write", &file, io::Error::other(error)))?;
        fs::write(&next, text).map_err(|source| failed("write", &next, source))?;
        fs::rename(&next, &file).map_err(|source| failed("write", &file, source))
    }

    /// Removes the directory with its contents, and its parent with the last rack, unless the user made it.
    pub fn remove(&self) -> Result<(), StateError> {
        fs::remove_dir_all(&self.path).map_err(|source| failed("remove", &self.path, source))?;
        let is_made = |root: &&Path| {
            fs::symlink_metadata(root).is_ok_and(|metadata| metadata.mode() & MADE != 0)
        };
        if let Some(root) = self.path.parent().filter(is_made) {
            // This fails, correctly, if other racks exist.
            let _ = fs::remove_dir(root);
        }
        Ok(())
    }
}

fn read(name: &RackName, directory: &Path) -> Result<Option<RackState>, StateError> {
    let path = directory.join(FILE);
    let text = match fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(failed("read", &path, source)),
    };
    serde_json::from_slice(&text).map(Some).map_err(|error| StateError::Damaged {
        name: name.clone(),
        path,
        reason: error.to_string(),
    })
}

fn failed(action: &'static str, path: &Path, source: io::Error) -> StateError {
    StateError::Io { action, path: path.to_owned(), source }
}
