//! A line, as servers have it.

use super::PAGES;

/// The contents of a page: 0 is zeros, each change makes another number.
pub(super) type Value = u8;

/// A lease epoch: the upper half grows with restarts, as in the protocol.
pub(super) type Epoch = u8;

/// What the frames of servers hold before a line comes to them.
pub(super) const LEFTOVER: Value = 99;

/// How a page belongs to an allocation.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) enum Link {
    #[default]
    Free,
    Head,
    Body,
}

#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Page {
    /// The bytes of the frame.
    pub(super) value: Value,
    /// Without it the page reads as zeros.
    pub(super) is_written: bool,
    pub(super) version: u8,
    /// Of a free page: the last one.
    pub(super) tag: u8,
    pub(super) link: Link,
}

impl Page {
    /// What a READ returns.
    pub(super) fn served(&self) -> Value {
        if self.is_written { self.value } else { 0 }
    }
}

/// A line in the memory of a server, which outlives its process if the memory does.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Copy {
    /// The arena generation in its pointers.
    pub(super) generation: u8,
    /// Every lease epoch of the line here is above it.
    pub(super) floor: Epoch,
    pub(super) pages: [Page; PAGES],
}

/// A line belongs to the taker.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Mark {
    pub(super) migration: u8,
    pub(super) taker: u8,
    /// The incarnation of the taker that asked.
    pub(super) incarnation: u8,
    /// The session in which it asked.
    pub(super) session: u8,
}

/// A line on its way, at the taker.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Staged {
    pub(super) migration: u8,
    pub(super) epoch: Epoch,
    /// The incarnation of the taker that took it.
    pub(super) incarnation: u8,
    /// The giver's process that granted the lease, and with which memory.
    pub(super) granted_by: u8,
    pub(super) life: u8,
    pub(super) copy: Copy,
    /// Pages that were read, from the first one on.
    pub(super) read: u8,
    /// KEEP was sent: from now on only the giver knows whose line it is.
    pub(super) is_asked: bool,
    /// The last answer decided nothing, and the next one would not either.
    pub(super) is_vain: bool,
    pub(super) session: u8,
}

/// Who holds a lease.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Owner {
    Client(u8),
    Taker { migration: u8, incarnation: u8 },
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Lease {
    pub(super) owner: Owner,
    pub(super) epoch: Epoch,
    /// The tick at which it ends, in scenarios with a clock.
    pub(super) until: u8,
}

/// What a server has of a line.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Slot {
    pub(super) copy: Option<Copy>,
    pub(super) mark: Option<Mark>,
    pub(super) staged: Option<Staged>,
    pub(super) leases: [Option<Lease>; PAGES],
    /// The page of an ALLOC_WRITE of which pieces are missing.
    pub(super) unfinished: Option<u8>,
    /// Since when a TAKE waits.
    pub(super) waits: Option<u8>,
}
