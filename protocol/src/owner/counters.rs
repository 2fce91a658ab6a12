//! Everything that happened, counted.

use crate::events::events;

events! {
    "What an owner counts.";

    /// A page's lease was told.
    Hold = "held",
    /// A lease was not taken note of: too many are held.
    HoldFull = "hold_full",
    /// A page's last committed contents were not kept: too many are.
    ContentsFull = "contents_full",
    /// A lease ended by being committed or given up.
    Release = "released",
    /// A lease ended by its deadline.
    Expire = "expired",
    /// A request was answered BUSY.
    Reject = "rejected",
    /// A request was answered NOT_OWNER: no lease is held on its page.
    NotOwner = "not_owner",
    /// A request waits.
    Wait = "waited",
    /// A request that waits came once more.
    WaitAgain = "waited_again",
    /// A request could not wait because too many do, and was answered BUSY.
    WaitFull = "wait_full",
    /// A request that waited was told that the lease ended.
    WaitEnd = "wait_ended",
    /// A request waited for its whole time.
    WaitOver = "wait_over",
    /// A READ was answered with last committed contents.
    Serve = "served",
    /// A lease ended between a READ and the sending of its last committed contents.
    ServeLate = "served_too_late",
    /// A notice was taken.
    Notice = "noticed",
    /// Dropped: of another space.
    DropSpace = "drop_space",
    /// Dropped: a reply.
    DropReply = "drop_reply",
    /// Dropped: a command that no redirect leads here, or one that passes over redirects.
    DropCommand = "drop_command",
    /// Dropped: a request that contradicts itself.
    DropForm = "drop_form",
    /// Dropped: a notice that does not come from its memory's node.
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
