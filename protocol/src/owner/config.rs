//! What an owner is told when it is made.

use core::time::Duration;

use bluebridge_wire::{NodeId, Space};

/// What an owner answers to a request for a page that it has a lease on.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum Policy {
    /// The page is leased: ask the home.
    #[default]
    Reject,
    /// As [`Self::Reject`], but a READ that takes last committed contents gets them.
    Serve,
    /// The request may wait here until the lease ends, if it wants to and there is room; else as
    /// [`Self::Reject`].
    Wait,
}

/// Who the owner is and how much it may use.
#[derive(Clone, Debug)]
pub struct OwnerConfig {
    /// The tenant; nothing of another one is answered.
    pub space: Space,
    /// The endpoint's node.
    pub node: NodeId,
    /// The endpoint's incarnation, as the controller issued it.
    pub incarnation: u32,
    /// Pages whose leases are known at once, at least 1; others are answered NOT_OWNER.
    pub lease_count: u16,
    /// Pages whose last committed contents are kept at once, 4 KiB each.
    pub contents_count: u16,
    /// Requests that wait at once.
    pub wait_count: u16,
    /// Replies that wait to be sent, besides those that tell waiting requests of a lease's end.
    pub reply_count: u16,
    /// How long a request may wait at most; at most a minute.
    pub wait: Duration,
    /// What is answered for pages that are held without a policy of their own.
    pub policy: Policy,
}

impl OwnerConfig {
    /// The usual bounds for an endpoint.
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

/// Longer than this nothing waits: what is told in milliseconds stays a small number.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(60);
