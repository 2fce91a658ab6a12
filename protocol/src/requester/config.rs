//! What a requester is told when it is made.

use core::time::Duration;

use bluebridge_wire::{EndpointAddress, NodeId, Space};

/// Who the requester is and how much it may use.
#[derive(Clone, Debug)]
pub struct Config {
    /// The tenant; all pointers must be of it.
    pub space: Space,
    /// The endpoint's node.
    pub node: NodeId,
    /// The endpoint's incarnation, as the controller issued it.
    pub incarnation: u32,
    /// Tells the requesters of one endpoint apart: part of the one source address of all they send.
    pub selector: u32,
    /// The largest piece of the space in bytes, as the controller told it; from
    /// [`crate::pieces::PIECE_BYTES_MIN`] to a page.
    pub piece_bytes: u16,
    /// Pages of data that may be outstanding over all sessions: what the carrier's receive buffer
    /// holds.
    pub credit_pages: u16,
    /// Operations that may be under way or done and not yet polled; below 65535.
    pub operation_count: u16,
    /// Servers (node and shard) that may be talked to at once; below 65535.
    pub server_count: u16,
    /// Moved lines that are remembered; rounded up to a power of two.
    pub moved_count: u16,
    /// Where nonces and the spread of back-offs come from; differ it per requester.
    pub seed: u64,
    /// Time limits.
    pub timing: Timing,
}

impl Config {
    /// The usual bounds for an endpoint.
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

    /// The address that all requests come from, and all replies go to.
    #[must_use]
    pub const fn address(&self) -> EndpointAddress {
        EndpointAddress::new(self.space, self.node, (self.selector as u64) << 16)
    }
}

/// Time limits (protocol, section 9).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Timing {
    /// The deadline of an operation that is started without one.
    pub deadline: Duration,
    /// The retransmission timer before a round trip was measured.
    pub retransmit_initial: Duration,
    /// The retransmission timer at least.
    pub retransmit_min: Duration,
    /// The retransmission timer at most, also after doubling.
    pub retransmit_max: Duration,
    /// The first pause after BUSY or OVERLOADED; doubled per time.
    pub back_off_min: Duration,
    /// The longest pause after BUSY or OVERLOADED.
    pub back_off_max: Duration,
    /// After how long without a request a server ends a session.
    pub session_idle: Duration,
}

impl Timing {
    /// The protocol's values.
    pub const DEFAULT: Self = Self {
        deadline: Duration::from_secs(5),
        retransmit_initial: Duration::from_millis(20),
        retransmit_min: Duration::from_millis(1),
        retransmit_max: Duration::from_millis(250),
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
