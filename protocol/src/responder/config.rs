//! Configuration of a responder at its start, and changes by the controller.

use core::time::Duration;
use std::collections::BTreeSet;

use bluebridge_wire::{NodeId, SESSION_WINDOW, Space};

use crate::{Timestamp, pieces};

/// The smallest piece size of a session in bytes: a quarter of a page.
pub(super) const PIECE_BYTES_MIN: u16 = 1024;

/// The largest piece size of a session in bytes: a page.
pub(super) const PIECE_BYTES_MAX: u16 = 4096;

const _: () = assert!(PIECE_BYTES_MIN as usize == pieces::PIECE_BYTES_MIN);

/// How a [`Responder`](super::Responder) serves one shard.
#[derive(Clone, Debug)]
pub struct Config {
    /// The server's node.
    pub node: NodeId,
    /// The server's incarnation, as the controller issued it.
    pub incarnation: u32,
    /// The spaces that are served; requests of other spaces are refused with WRONG_SPACE.
    pub spaces: Vec<Space>,
    /// The shard that is served, below `shard_count`.
    pub shard: u8,
    /// Shards of the server, 1 or more.
    pub shard_count: u16,
    /// The right to serve; `None` until the controller grants it.
    pub authority: Option<Authority>,
    /// The largest piece of the space, in bytes.
    pub piece_bytes: u16,
    /// The limits.
    pub limits: Limits,
    /// The timers.
    pub timers: Timers,
    /// Makes session ids unpredictable; must differ at every start.
    pub seed: u64,
}

impl Config {
    /// A server with one shard, one space and the default limits.
    #[must_use]
    pub fn new(space: Space, node: NodeId, incarnation: u32, seed: u64) -> Self {
        Self {
            node,
            incarnation,
            spaces: vec![space],
            shard: 0,
            shard_count: 1,
            authority: Some(Authority { range_epoch: 1, expires_at: None }),
            piece_bytes: PIECE_BYTES_MAX,
            limits: Limits::default(),
            timers: Timers::default(),
            seed,
        }
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        if !self.node.is_unicast() {
            return Err(ConfigError::Node(self.node));
        }
        let distinct: BTreeSet<_> = self.spaces.iter().collect();
        if self.spaces.is_empty() || distinct.len() != self.spaces.len() {
            return Err(ConfigError::Spaces);
        }
        if u16::from(self.shard) >= self.shard_count || self.shard_count > 256 {
            return Err(ConfigError::Shard { shard: self.shard, shard_count: self.shard_count });
        }
        if !(PIECE_BYTES_MIN..=PIECE_BYTES_MAX).contains(&self.piece_bytes) {
            return Err(ConfigError::PieceBytes(self.piece_bytes));
        }
        self.timers.check()?;
        self.limits.check()
    }
}

/// The right to serve a range under an epoch.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Authority {
    /// The epoch; not 0.
    pub range_epoch: u32,
    /// When the authority expires; `None` if it does not.
    pub expires_at: Option<Timestamp>,
}

/// The limits; they determine the responder's memory.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Sessions at once, 65,535 at most; each takes about 20 KiB after its first use.
    pub session_count: u16,
    /// Sessions that one node may have at once.
    pub node_session_count: u16,
    /// Pages of incomplete trains at once, 4 KiB each, 65,534 at most. If several spaces are
    /// served, each may use an equal share of them.
    pub buffer_pages: u16,
    /// Those of one node, 8 or more.
    pub node_buffer_pages: u16,
    /// Anywhere-CREATEs that may wait for their CONFIRM.
    pub provisional_count: u16,
    /// Pages that they may hold.
    pub provisional_pages: u64,
    /// Anywhere-CREATEs of one node that wait for their CONFIRM.
    pub node_provisional_count: u16,
    /// Pages that those may hold; a larger anywhere-CREATE is refused permanently.
    pub node_provisional_pages: u64,
    /// Pages that are leased, or whose last lease is remembered; about 100 bytes each. If several
    /// spaces are served, each may lease an equal share of them.
    pub lease_count: u16,
    /// Pages that one node may lease at once.
    pub node_lease_count: u16,
    /// READs and UPDATEs that wait for leased pages, 65,534 at most; about 256 bytes each. If
    /// several spaces are served, each may use an equal share of them.
    pub wait_count: u16,
    /// Those of one node.
    pub node_wait_count: u16,
    /// Ranges that moved away, and adopted ranges.
    pub range_count: u16,
    /// Migrations that this server gives to at once; each takes a bit per line of its range.
    pub migration_count: u16,
    /// Replies that may wait to be sent; 64 or more.
    pub reply_count: u16,
    /// Pages that may be outstanding in all sessions together, and at least one per session.
    pub credit_pages: u32,
}

/// The shares of a space and of a node, each at least `least`.
fn shares((all, of_node): (usize, usize), space_count: usize, least: usize) -> (usize, usize) {
    let of_space = (all / space_count.max(1)).max(least);
    (of_space, of_node.min(of_space))
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            session_count: 1024,
            node_session_count: 256,
            buffer_pages: 1024,
            node_buffer_pages: 256,
            provisional_count: 4096,
            provisional_pages: 65536,
            node_provisional_count: 1024,
            node_provisional_pages: 16384,
            lease_count: 16384,
            node_lease_count: 4096,
            wait_count: 1024,
            node_wait_count: 256,
            range_count: 1024,
            migration_count: 64,
            reply_count: 256,
            credit_pages: 16384,
        }
    }
}

impl Limits {
    /// Replies that one request can cause, and a few more.
    pub(super) const REPLIES_PER_REQUEST: usize = 40;

    /// The pages that one space and one node may lease if `space_count` spaces are served: leases
    /// of one space do not reduce the shares of the others.
    pub(super) fn lease_shares(&self, space_count: usize) -> (usize, usize) {
        let whole = (usize::from(self.lease_count), usize::from(self.node_lease_count));
        shares(whole, space_count, bluebridge_wire::address::LINE_PAGES)
    }

    /// The same for requests that wait.
    pub(super) fn wait_shares(&self, space_count: usize) -> (usize, usize) {
        let whole = (usize::from(self.wait_count), usize::from(self.node_wait_count));
        shares(whole, space_count, 1)
    }

    /// The same for the pages of trains; a COMMIT needs a whole line of them at once.
    pub(super) fn buffer_shares(&self, space_count: usize) -> (usize, usize) {
        let whole = (usize::from(self.buffer_pages), usize::from(self.node_buffer_pages));
        shares(whole, space_count, bluebridge_wire::address::LINE_PAGES)
    }

    /// The largest window of a session in pages.
    pub(super) const SESSION_CREDIT_PAGES: u32 = 512;

    fn check(&self) -> Result<(), ConfigError> {
        const { assert!(Self::SESSION_CREDIT_PAGES as u64 == SESSION_WINDOW) };
        let counts = [
            ("session_count", u64::from(self.session_count), 1, 65535),
            ("node_session_count", u64::from(self.node_session_count), 1, 65535),
            ("buffer_pages", u64::from(self.buffer_pages), 8, 65534),
            ("node_buffer_pages", u64::from(self.node_buffer_pages), 8, 65534),
            ("provisional_count", u64::from(self.provisional_count), 1, 65535),
            ("node_provisional_count", u64::from(self.node_provisional_count), 1, 65535),
            ("lease_count", u64::from(self.lease_count), 8, 65535),
            ("node_lease_count", u64::from(self.node_lease_count), 8, 65535),
            ("wait_count", u64::from(self.wait_count), 1, 65534),
            ("node_wait_count", u64::from(self.node_wait_count), 1, 65534),
            ("range_count", u64::from(self.range_count), 1, 65535),
            ("migration_count", u64::from(self.migration_count), 1, 65535),
            ("reply_count", u64::from(self.reply_count), 64, 65535),
        ];
        match counts.into_iter().find(|&(_, value, least, most)| value < least || value > most) {
            Some((name, value, least, most)) => {
                Err(ConfigError::Limit { name, value, least, most })
            }
            None => Ok(()),
        }
    }
}

/// The times of `docs/protocol.md`, section 9.
#[derive(Clone, Copy, Debug)]
pub struct Timers {
    /// A session ends after this time without a request.
    pub session_idle: Duration,
    /// A node that had no session for this time may use a lower incarnation: longer than
    /// `session_idle`, and shorter than the controller's quarantine of client ids.
    pub incarnation_quarantine: Duration,
    /// Unconfirmed pages of an anywhere-CREATE are freed after this time; 1 ms to 49 days.
    pub provisional: Duration,
    /// The time of a lease if the request does not state one; 1 ms to `lease_max`.
    pub lease_default: Duration,
    /// The longest time of a lease, which may be renewed; 65,535 ms at most.
    pub lease_max: Duration,
    /// A request that waits for a leased page must be repeated within this time; 1 ms to 49 days.
    pub lease_wait: Duration,
    /// A train without a new piece for this time loses its buffers.
    pub train: Duration,
    /// A train without a new piece for this time loses its buffers if another train needs them.
    pub train_pressed: Duration,
}

impl Default for Timers {
    fn default() -> Self {
        Self {
            session_idle: Duration::from_secs(60),
            incarnation_quarantine: Duration::from_secs(90),
            provisional: Duration::from_secs(2),
            lease_default: Duration::from_secs(1),
            lease_max: Duration::from_secs(10),
            lease_wait: Duration::from_millis(200),
            train: Duration::from_secs(1),
            train_pressed: Duration::from_millis(20),
        }
    }
}

impl Timers {
    fn check(&self) -> Result<(), ConfigError> {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let lease_max = millis(self.lease_max);
        let times = [
            ("lease_max", lease_max, u64::from(u16::MAX)),
            ("lease_default", millis(self.lease_default), lease_max),
            ("lease_wait", millis(self.lease_wait), u64::from(u32::MAX)),
        ];
        match times.into_iter().find(|&(_, value, most)| value < 1 || value > most) {
            Some((name, value, most)) => Err(ConfigError::Timer { name, value, most }),
            None => Ok(()),
        }
    }
}

/// The configuration is invalid; its author must correct it.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A limit is out of bounds.
    #[error("the limit {name} is {value}; it must be {least} to {most}")]
    Limit {
        /// Its field's name.
        name: &'static str,
        /// The configured value.
        value: u64,
        /// The smallest valid value.
        least: u64,
        /// The largest valid value.
        most: u64,
    },
    /// A time is out of bounds.
    #[error("the time {name} is {value} ms; it must be 1 to {most} ms")]
    Timer {
        /// Its field's name.
        name: &'static str,
        /// The configured value, in milliseconds.
        value: u64,
        /// The largest valid value, in milliseconds.
        most: u64,
    },
    /// The node is 0 or 65535, which are not the id of a single node.
    #[error("node {0} is not the id of one node")]
    Node(NodeId),
    /// The piece size does not divide a page into at most four pieces.
    #[error("pieces of {0} bytes; they must be 1024 to 4096")]
    PieceBytes(u16),
    /// The shard does not exist.
    #[error("shard {shard} of {shard_count}; there are 1 to 256, counted from 0")]
    Shard {
        /// The shard.
        shard: u8,
        /// The number of shards.
        shard_count: u16,
    },
    /// No space, or one named twice.
    #[error("name at least one space, and each once")]
    Spaces,
}
