//! The interface between the P4Runtime agent and a data plane.
//!
//! A data plane stores the tables of [`bluebridge_p4::pipeline`], forwards frames by them, and is
//! programmed through [`DataPlane`]. There are two, `soft` and `ebpf`; one suite of packet vectors
//! (`p4/vectors`) runs on both.
//!
//! Common behaviour that the types do not express:
//! * A miss in `l2` uses the table's default action ([`DataPlane::set_flood_group`]): the frame is flooded
//!   through a group, or dropped as [`DropReason::NoRoute`] if there is none. Flooded frames keep their
//!   destination MAC address; only copies made by `multicast` pass `port_mac`.
//! * `notify` copies the frame as received (before rewriting), like an ingress-to-egress clone of
//!   v1model, and only while a clone session is set.
//! * An expired `redirect_until` entry is ignored, but stays in its table until it is deleted. Reading an
//!   entry returns the remaining whole milliseconds, so an entry that is read and written again never
//!   lives longer.
//! * A segmented train (one frame, several datagrams) is one packet to counters. An impaired port of
//!   the soft plane splits it first; one of the eBPF plane loses, duplicates or corrupts it as a whole.

use core::time::Duration;
use std::os::fd::BorrowedFd;

use bluebridge_p4::declaration::{ANYCAST_GROUP_SIZE, LOCATION_BITS, PAGE_BITS};
pub use bluebridge_p4::declaration::{
    GROUP_PORTS_MAX, GROUPS_MAX, METADATA_BYTES_MAX, PORT_MAX, Table,
};
use bluebridge_p4::pipeline::{
    Action, CPU_PORT, Counter, DropReason, Entry, Impairment, Key, MacAddr, PACKET_IN_BYTES,
    SwitchPort,
};

/// The most members of an anycast choice, and the sum of their weights after scaling.
pub const ANYCAST_SLOTS: usize = ANYCAST_GROUP_SIZE as usize;

/// The most packet-ins that wait for the controller; further ones are lost and counted.
pub const EVENTS_MAX: usize = 4096;

/// Why a table, group or session did not change.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The caller inserted an existing key; modify it instead.
    #[error("{} already has an entry with this key; modify it instead", .0.name())]
    Exists(Table),
    /// The caller named a missing key; insert it first.
    #[error("{} has no entry with this key", .0.name())]
    NotFound(Table),
    /// The table is full; delete entries first.
    #[error("{} is full ({} entries)", .0.name(), .0.capacity())]
    Full(Table),
    /// The caller named an action that the table does not have.
    #[error("{} does not have this action", .0.name())]
    UnsupportedAction(Table),
    /// The caller used another feature that the table does not have.
    #[error("{} does not have {what}", .table.name())]
    Unsupported {
        /// The table.
        table: Table,
        /// The missing feature.
        what: &'static str,
    },
    /// The caller's key or action breaks a rule of the table.
    #[error("{}: {rule}", .table.name())]
    Invalid {
        /// The table.
        table: Table,
        /// The rule that is broken.
        rule: &'static str,
    },
    /// The caller named a port that the switch does not have.
    #[error("the switch has no port {}", .0.0)]
    UnknownPort(SwitchPort),
    /// The caller named a multicast group that does not exist.
    #[error("multicast group {0} does not exist")]
    UnknownGroup(u16),
    /// The switch cannot hold the caller's multicast group.
    #[error("multicast group {group}: {rule}")]
    InvalidGroup {
        /// The group.
        group: u16,
        /// The rule that is broken.
        rule: &'static str,
    },
    /// The data plane itself failed.
    #[error(transparent)]
    Plane(#[from] PlaneError),
}

/// Why a data plane failed at a valid request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlaneError {
    /// A system call failed.
    #[error("cannot {doing}: {source}")]
    Io {
        /// The failed action.
        doing: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The data plane's thread ended or did not respond in time; restart the switch.
    #[error("the data plane does not respond; restart the switch")]
    Gone,
    /// The kernel refused the program or a map; the text says which.
    #[error("eBPF: {0}")]
    Ebpf(String),
    /// This build has no eBPF data plane: clang was missing when it was built.
    #[error(
        "this build has no eBPF data plane, because clang was missing when it was built; install clang and build \
         again, or use the soft data plane"
    )]
    NoEbpf,
    /// Only root (CAP_BPF, CAP_NET_ADMIN) may do this; run as root or use the soft data plane.
    #[error("{0} needs root; run as root or use the soft data plane")]
    NeedsRoot(&'static str),
}

/// Why a port was not added, or a frame not sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// The caller's port number is in use or outside 1..=[`PORT_MAX`].
    #[error("port {} cannot be used: {rule}", .port.0)]
    Invalid {
        /// The port.
        port: SwitchPort,
        /// The rule that is broken.
        rule: &'static str,
    },
    /// This network namespace has no such interface.
    #[error("there is no interface {0} in this network namespace")]
    NoInterface(String),
    /// The caller named a port that the switch does not have.
    #[error("the switch has no port {}", .0.0)]
    Unknown(SwitchPort),
    /// The caller's frame is shorter than an Ethernet header or longer than the port allows.
    #[error("a frame of {0} bytes does not fit the port")]
    FrameSize(usize),
    /// The data plane itself failed.
    #[error(transparent)]
    Plane(#[from] PlaneError),
}

/// Why an impairment was not set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImpairmentError {
    /// This data plane does not support this impairment; the soft one supports all.
    #[error("this data plane does not support {0}; the soft one does")]
    Unsupported(&'static str),
    /// The caller's share is not between 0.0 and 1.0.
    #[error("{0} must be between 0 and 1")]
    OutOfRange(&'static str),
    /// The caller named a port that the switch does not have.
    #[error("the switch has no port {}", .0.0)]
    UnknownPort(SwitchPort),
    /// The data plane itself failed.
    #[error(transparent)]
    Plane(#[from] PlaneError),
}

/// An entry in the data plane.
#[derive(Clone, Debug, PartialEq)]
pub struct InstalledEntry {
    /// The entry as it was inserted; a `redirect_until` has its remaining time.
    pub entry: Entry,
    /// The packets and bytes that hit it.
    pub counter: Counter,
    /// Time since the last hit, or since the insertion; `redirect` only.
    pub since_hit: Option<Duration>,
}

/// Counts of impaired frames that left through a port.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ImpairmentCounters {
    /// Frames lost.
    pub lost: u64,
    /// Frames sent twice.
    pub duplicated: u64,
    /// Frames held back so that others overtook them.
    pub reordered: u64,
    /// Frames with a flipped bit.
    pub corrupted: u64,
    /// Frames held for the delay.
    pub delayed: u64,
}

/// The state of a port.
#[derive(Clone, Debug, PartialEq)]
pub struct PortStatus {
    /// Its number.
    pub port: SwitchPort,
    /// Its interface's name.
    pub name: String,
    /// Its interface's MAC address.
    pub mac: MacAddr,
    /// Its interface's MTU in bytes (without the Ethernet header).
    pub mtu: u32,
    /// Frames that entered the switch through it.
    pub rx: Counter,
    /// Frames that left the switch through it.
    pub tx: Counter,
    /// Counts of impaired frames.
    pub impaired: ImpairmentCounters,
}

/// The clone session [`bluebridge_p4::pipeline::NOTIFY_SESSION`], which `notify` uses for copies.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct CloneSession {
    /// Bytes copied of a frame, at most [`PACKET_IN_BYTES`].
    pub packet_bytes: usize,
}

impl Default for CloneSession {
    fn default() -> Self {
        Self { packet_bytes: PACKET_IN_BYTES }
    }
}

/// A copy of a frame for the controller.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PacketIn {
    /// The port through which the frame entered.
    pub ingress_port: SwitchPort,
    /// The first bytes of the frame as received.
    pub frame: Vec<u8>,
}

/// Frames dropped, by [`DropReason`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Drops(pub [u64; DropReason::ALL.len()]);

impl Drops {
    /// The number of frames dropped for a reason.
    #[must_use]
    pub const fn of(&self, reason: DropReason) -> u64 {
        self.0[reason as usize]
    }
}

/// A data plane, as the agent programs it.
///
/// No call waits for traffic.
pub trait DataPlane: Send {
    /// The data plane's name: `soft` or `ebpf`.
    fn name(&self) -> &'static str;

    /// Adds an entry.
    ///
    /// # Errors
    /// [`TableError::Exists`], `Full`, `UnsupportedAction`, `Invalid`, `UnknownPort`,
    /// `UnknownGroup`: nothing changed.
    fn insert(&mut self, entry: &Entry) -> Result<(), TableError>;

    /// Replaces an entry's action, idle timeout and metadata; its counter and last hit stay.
    ///
    /// # Errors
    /// [`TableError::NotFound`], otherwise as for [`Self::insert`]: nothing changed.
    fn modify(&mut self, entry: &Entry) -> Result<(), TableError>;

    /// Removes an entry.
    ///
    /// # Errors
    /// [`TableError::NotFound`].
    fn delete(&mut self, key: &Key) -> Result<(), TableError>;

    /// An entry with its counter.
    ///
    /// # Errors
    /// [`TableError::NotFound`].
    fn entry(&mut self, key: &Key) -> Result<InstalledEntry, TableError>;

    /// Every entry of a table in the order of the keys, including those from before a restart of the
    /// agent.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn entries(&mut self, table: Table) -> Result<Vec<InstalledEntry>, PlaneError>;

    /// Sets the counter of an entry.
    ///
    /// # Errors
    /// [`TableError::NotFound`].
    fn set_counter(&mut self, key: &Key, counter: Counter) -> Result<(), TableError>;

    /// The entries whose idle timeout has passed, each with the time since its last hit.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn expired(&mut self) -> Result<Vec<InstalledEntry>, PlaneError> {
        let mut entries = self.entries(Table::Redirect)?;
        entries.retain(|installed| {
            installed
                .entry
                .idle_timeout
                .zip(installed.since_hit)
                .is_some_and(|(timeout, since)| since >= timeout)
        });
        Ok(entries)
    }

    /// The default action of `l2`: flood frames without a matching entry through a group, or drop them.
    ///
    /// # Errors
    /// [`TableError::UnknownGroup`].
    fn set_flood_group(&mut self, group: Option<u16>) -> Result<(), TableError>;

    /// The group that `l2` floods through.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn flood_group(&mut self) -> Result<Option<u16>, PlaneError>;

    /// Creates or replaces a multicast group (1 and up; at most [`GROUP_PORTS_MAX`] ports).
    ///
    /// # Errors
    /// [`TableError::InvalidGroup`] and `UnknownPort`: nothing changed.
    fn set_group(&mut self, group: u16, ports: &[SwitchPort]) -> Result<(), TableError>;

    /// Removes a multicast group; entries that name it drop from then on.
    ///
    /// # Errors
    /// [`TableError::UnknownGroup`].
    fn delete_group(&mut self, group: u16) -> Result<(), TableError>;

    /// Every multicast group with its ports, in the order of their numbers.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn groups(&mut self) -> Result<Vec<(u16, Vec<SwitchPort>)>, PlaneError>;

    /// Sets or ends the clone session of `notify`; without one there are no copies.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn set_clone_session(&mut self, session: Option<CloneSession>) -> Result<(), PlaneError>;

    /// The clone session of `notify`.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn clone_session(&mut self) -> Result<Option<CloneSession>, PlaneError>;

    /// The cookie of the pushed pipeline configuration; it lives as long as the tables.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn pipeline_cookie(&mut self) -> Result<Option<u64>, PlaneError>;

    /// Empties tables, groups, the clone session, counters and drops, and stores the cookie of the
    /// new pipeline. Ports and impairments stay.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn clear(&mut self, pipeline_cookie: Option<u64>) -> Result<(), PlaneError>;

    /// Frames dropped since the last [`Self::clear`].
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn drops(&mut self) -> Result<Drops, PlaneError>;

    /// Adds a port on an interface of the network namespace in which the data plane was started.
    ///
    /// An existing port with the same interface does not change; a port whose interface no longer exists
    /// gets the new one.
    ///
    /// # Errors
    /// [`PortError::Invalid`] and `NoInterface`: nothing changed.
    fn add_port(&mut self, port: SwitchPort, interface: &str) -> Result<(), PortError>;

    /// Removes a port; entries that name it drop from then on.
    ///
    /// # Errors
    /// [`PortError::Unknown`].
    fn remove_port(&mut self, port: SwitchPort) -> Result<(), PortError>;

    /// Every port, in the order of their numbers.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn ports(&mut self) -> Result<Vec<PortStatus>, PlaneError>;

    /// Sends a frame through a port, without the tables.
    ///
    /// # Errors
    /// [`PortError::Unknown`] and `FrameSize`: nothing was sent.
    fn packet_out(&mut self, port: SwitchPort, frame: &[u8]) -> Result<(), PortError>;

    /// Moves waiting packet-ins, at most `limit`, to the end of `out`.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn poll(&mut self, limit: usize, out: &mut Vec<PacketIn>) -> Result<(), PlaneError>;

    /// Becomes readable when [`Self::poll`] has something; `None` if polling is the only way.
    fn event_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Packet-ins lost because more than [`EVENTS_MAX`] were waiting.
    ///
    /// # Errors
    /// Only if the data plane fails.
    fn events_lost(&mut self) -> Result<u64, PlaneError>;

    /// Sets the impairment of a port; `Impairment::default()` ends it.
    ///
    /// # Errors
    /// [`ImpairmentError::Unsupported`] if this data plane does not support one of them: none changed.
    fn set_impairment(
        &mut self,
        port: SwitchPort,
        impairment: Impairment,
    ) -> Result<(), ImpairmentError>;
}

/// Checks the rules for entries that are the same in every data plane.
///
/// # Errors
/// The rule that the entry breaks.
pub fn check_entry(entry: &Entry) -> Result<(), TableError> {
    let table = Table::of(&entry.key);
    let invalid = |rule| Err(TableError::Invalid { table, rule });
    if !table.allows(&entry.action) {
        return Err(TableError::UnsupportedAction(table));
    }
    if entry.idle_timeout.is_some() && table != Table::Redirect {
        return Err(TableError::Unsupported { table, what: "idle timeouts" });
    }
    if entry.metadata.len() > METADATA_BYTES_MAX {
        return invalid("metadata is longer than 32 bytes");
    }
    if let Action::Select(members) = &entry.action {
        if members.is_empty() || members.len() > ANYCAST_SLOTS {
            return invalid("a choice must have 1 to 256 members");
        }
        if members.iter().any(|member| member.weight == 0) {
            return invalid("a weight must be at least 1");
        }
    }
    check_key(&entry.key)
}

fn check_key(key: &Key) -> Result<(), TableError> {
    let table = Table::of(key);
    let invalid = |rule| Err(TableError::Invalid { table, rule });
    match *key {
        Key::Redirect { page, .. } if page >> PAGE_BITS != 0 => invalid("a page has 52 bits"),
        Key::Directory { prefix_len, .. } if u32::from(prefix_len) > LOCATION_BITS => {
            invalid("a prefix has at most 112 bits")
        }
        Key::Directory { prefix, prefix_len } if prefix & !location_mask(prefix_len) != 0 => {
            invalid("bits after the prefix must be 0")
        }
        Key::Notify { src_command, dst_command, src_status, priority } => {
            if [src_command, dst_command, src_status].iter().any(|t| t.value & !t.mask != 0) {
                return invalid("bits outside the mask must be 0");
            }
            if priority < 1 {
                return invalid("a priority must be at least 1");
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// Checks the number of a new port.
///
/// # Errors
/// [`PortError::Invalid`] with the rule that it breaks.
pub(crate) fn check_port(port: SwitchPort) -> Result<(), PortError> {
    match port {
        CPU_PORT => Err(PortError::Invalid { port, rule: "it is the controller's port" }),
        SwitchPort(1..=PORT_MAX) => Ok(()),
        _ => {
            const { assert!(PORT_MAX == 509, "the rule contains it") };
            Err(PortError::Invalid { port, rule: "ports are numbered 1 to 509" })
        }
    }
}

/// Checks a multicast group before it is set.
///
/// # Errors
/// [`TableError::InvalidGroup`] with the rule that it breaks.
pub(crate) fn check_group(
    group: u16,
    ports: &[SwitchPort],
    exists: bool,
    groups: usize,
) -> Result<(), TableError> {
    let invalid = |rule| Err(TableError::InvalidGroup { group, rule });
    if group == 0 {
        return invalid("groups are numbered from 1");
    }
    if ports.len() > GROUP_PORTS_MAX {
        return invalid("a group has at most 128 ports");
    }
    if !exists && groups >= usize::from(GROUPS_MAX) {
        return invalid("there are 1024 groups already");
    }
    Ok(())
}

/// The mask of a directory prefix: its first `prefix_len` of 112 bits.
#[must_use]
pub const fn location_mask(prefix_len: u8) -> u128 {
    const ALL: u128 = (1 << LOCATION_BITS) - 1;
    if prefix_len == 0 { 0 } else { ALL & !(ALL >> prefix_len) }
}

/// The order in which `notify` entries win: greater priority first, then by key.
pub(crate) fn notify_order(key: &Key) -> (core::cmp::Reverse<i32>, Key) {
    let priority = if let Key::Notify { priority, .. } = key { *priority } else { 0 };
    (core::cmp::Reverse(priority), *key)
}

/// An action with its remaining time.
pub(crate) fn with_time_left(action: &Action, left: Option<Duration>) -> Action {
    match (action, left) {
        (Action::RedirectUntil { forward, .. }, Some(left)) => {
            let lease_ms = u16::try_from(left.as_millis()).unwrap_or(u16::MAX);
            Action::RedirectUntil { forward: *forward, lease_ms }
        }
        _ => action.clone(),
    }
}

/// How long an action is valid from its writing; `None` without an end.
pub(crate) const fn lifetime(action: &Action) -> Option<Duration> {
    match action {
        Action::RedirectUntil { lease_ms, .. } => Some(Duration::from_millis(*lease_ms as u64)),
        _ => None,
    }
}

/// The ports that an action names directly.
pub(crate) fn action_ports(action: &Action) -> Vec<SwitchPort> {
    match action {
        Action::Forward(forward) | Action::RedirectUntil { forward, .. } => vec![forward.port],
        Action::Select(members) => members.iter().map(|member| member.forward.port).collect(),
        _ => Vec::new(),
    }
}

/// Checks the shares of an impairment.
///
/// # Errors
/// [`ImpairmentError::OutOfRange`] with the name of the first share that is not in 0.0 to 1.0.
pub fn check_impairment(impairment: &Impairment) -> Result<(), ImpairmentError> {
    let shares = [
        (impairment.loss, "loss"),
        (impairment.duplicate, "duplicate"),
        (impairment.reorder, "reorder"),
        (impairment.corrupt, "corrupt"),
    ];
    match shares.iter().find(|(share, _)| !(0.0..=1.0).contains(share)) {
        Some((_, name)) => Err(ImpairmentError::OutOfRange(name)),
        None => Ok(()),
    }
}
