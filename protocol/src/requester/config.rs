//! Configuration of a requester.

use core::time::Duration;

use bluebridge_wire::{EndpointAddress, NodeId, Space};

/// The requester's identity and limits.
#[derive(Clone, Debug)]
pub struct Config {
    /// The tenant; all pointers must be in it.
    pub space: Space,
    /// The endpoint's node.
    pub node: NodeId,
    /// The endpoint's incarnation, as the controller issued it.
    pub incarnation: u32,
    /// Distinguishes the requesters of one endpoint: part of the source address of all their
    /// requests.
    pub selector: u32,
    /// The largest piece of the space in bytes, as the controller issued it; from
    /// [`crate::pieces::PIECE_BYTES_MIN`] to a page.
    pub piece_bytes: u16,
    /// Pages of data that may be outstanding over all sessions: the capacity of the carrier's
    /// receive buffer.
    pub credit_pages: u16,
    /// Operations that may be in progress, or done and not yet polled; below 65535.
    pub operation_count: u16,
    /// Servers (node and shard) that can be in use at once; below 65535.
    pub server_count: u16,
    /// Moved blocks that are cached; rounded up to a power of two.
    pub moved_count: u16,
    /// Seed of nonces and of the random part of back-offs; use another one for each requester.
    pub seed: u64,
    /// Time limits.
    pub timing: Timing,
}

impl Config {
    /// The default limits for an endpoint.
    #[must_use]
    pub const fn new(space: Space, node: NodeId, incarnation: u32, seed: u64) -> Self {
        Self {
            space,
            node,
            incarnation,
            selector: 0,
            piece_bytes: 1144,
            credit_pages: 64,
            operation_count: 512,
            server_count: 256,
            moved_count: 256,
            seed,
            timing: Timing::DEFAULT,
        }
    }

    /// The source address of all requests, and the destination of all replies.
    #[must_use]
    pub const fn address(&self) -> EndpointAddress {
        EndpointAddress::new(self.space, self.node, (self.selector as u64) << 16)
    }
}

/// Time limits (protocol, section 9).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Timing {
    /// The deadline of operations that are started without one.
    pub deadline: Duration,
    /// The retransmission timer before the first measured round trip.
    pub retransmit_initial: Duration,
    /// The shortest retransmission timer.
    pub retransmit_min: Duration,
    /// The longest retransmission timer, also after doubling.
    pub retransmit_max: Duration,
    /// The longest one of the oldest request of a session, and of OPEN, so that a server that comes back is noticed soon.
    /// The others wait longer, so that a server that is away, or overloaded, gets one datagram of each session.
    pub retransmit_oldest_max: Duration,
    /// The first pause after BUSY or OVERLOADED; doubled each time.
    pub back_off_min: Duration,
    /// The longest pause after BUSY or OVERLOADED.
    pub back_off_max: Duration,
    /// A server ends a session after this time without a request.
    pub session_idle: Duration,
}

impl Timing {
    /// The protocol's values.
    pub const DEFAULT: Self = Self {
        deadline: Duration::from_secs(5),
        retransmit_initial: Duration::from_millis(20),
        retransmit_min: Duration::from_millis(1),
        retransmit_max: Duration::from_millis(250),
        retransmit_oldest_max: Duration::from_millis(25),
        back_off_min: Duration::from_millis(1),
        back_off_max: Duration::from_millis(100),
        session_idle: Duration::from_secs(60),
    };
}

impl Default for Timing {
    fn default() -> Self {
        Self::DEFAULT
    }
}
