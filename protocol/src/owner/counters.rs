//! Counters of an owner's events.

use crate::events::events;

events! {
    "Events that an owner counts.";

    /// The endpoint reported a lease on a page.
    Hold = "held",
    /// A lease was not recorded: the table is full.
    HoldFull = "hold_full",
    /// A page's last committed contents were not kept: no room is left.
    ContentsFull = "contents_full",
    /// A lease ended by COMMIT or ABORT.
    Release = "released",
    /// A lease expired.
    Expire = "expired",
    /// The reply to a request was BUSY.
    Reject = "rejected",
    /// The reply to a request was NOT_OWNER: no lease is held on its page.
    NotOwner = "not_owner",
    /// A request began to wait.
    Wait = "waited",
    /// A request that waits was repeated.
    WaitAgain = "waited_again",
    /// A request could not wait because no room is left; the reply was BUSY.
    WaitFull = "wait_full",
    /// A request that waited was notified that the lease ended.
    WaitEnd = "wait_ended",
    /// A request waited for its whole time.
    WaitOver = "wait_over",
    /// The reply to a READ was the last committed contents.
    Serve = "served",
    /// A lease ended before the last committed contents in a queued reply were sent.
    ServeLate = "served_too_late",
    /// A notice was received.
    Notice = "noticed",
    /// Dropped: of another space.
    DropSpace = "drop_space",
    /// Dropped: a reply.
    DropReply = "drop_reply",
    /// Dropped: a command that no redirect forwards, or a request that bypasses redirects.
    DropCommand = "drop_command",
    /// Dropped: an inconsistent request.
    DropForm = "drop_form",
    /// Dropped: a notice that is wrong in itself, or from a node that is no memory server.
    DropNotice = "drop_notice",
    /// Dropped: too many replies wait to be sent.
    DropFull = "drop_full",
}

/// How often each [`Event`] happened.
#[derive(Clone, Debug)]
pub struct Counters([u64; Event::ALL.len()]);

impl Default for Counters {
    fn default() -> Self {
        Self([0; Event::ALL.len()])
    }
}

impl Counters {
    /// How often an event happened.
    #[must_use]
    pub const fn of(&self, event: Event) -> u64 {
        self.0[event as usize]
    }

    /// All events with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Event::ALL.iter().map(|event| (event.name(), self.of(*event)))
    }

    pub(super) const fn count(&mut self, event: Event) {
        self.0[event as usize] += 1;
    }
}
