//! Configuration of an owner.

use core::time::Duration;

use bluebridge_wire::{NodeId, Space};

/// How an owner replies to a request for a page that it has a lease on.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Policy {
    /// BUSY: the page is leased, and the requester repeats the request at the home.
    #[default]
    Reject,
    /// As [`Self::Reject`], but a READ that accepts last committed contents gets them.
    Serve,
    /// The request may wait here until the lease ends, if its flags permit that and there is room;
    /// else as [`Self::Reject`].
    Wait,
}

/// The owner's identity and limits.
#[derive(Clone, Debug)]
pub struct OwnerConfig {
    /// The tenant; requests of other spaces are dropped.
    pub space: Space,
    /// The endpoint's node.
    pub node: NodeId,
    /// The endpoint's incarnation, as the controller issued it.
    pub incarnation: u32,
    /// Leases that can be recorded at once, at least 1; requests for other pages get NOT_OWNER.
    pub lease_count: u16,
    /// Pages whose last committed contents can be kept at once, 4 KiB each.
    pub contents_count: u16,
    /// Requests that can wait at once.
    pub wait_count: u16,
    /// Replies that can wait to be sent, besides those that notify waiting requests of a lease's
    /// end.
    pub reply_count: u16,
    /// The longest wait of a request; at most a minute.
    pub wait: Duration,
    /// The policy for pages that are held without a policy of their own.
    pub policy: Policy,
}

impl OwnerConfig {
    /// The default limits for an endpoint.
    #[must_use]
    pub const fn new(space: Space, node: NodeId, incarnation: u32) -> Self {
        Self {
            space,
            node,
            incarnation,
            lease_count: 1024,
            contents_count: 64,
            wait_count: 64,
            reply_count: 64,
            wait: Duration::from_millis(100),
            policy: Policy::Reject,
        }
    }
}

/// The limit of [`OwnerConfig::wait`]: the milliseconds in a reply stay a small number.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(60);
