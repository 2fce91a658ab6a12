//! What the responder shares with readers that answer READs without it.
//!
//! A direct reader, such as a program in the kernel, sees the pages of a store and answers some READs before they reach
//! the responder. It only answers if the responder would answer OK; everything else it passes on unchanged. For that it
//! needs to know the sessions ([`SharedSession`]) and under which authority the shard serves ([`SharedShard`]).
//!
//! The responder alone writes both, with one exception: a reader raises a session's low water *before* it looks at a
//! page. Otherwise a late copy of a WRITE that its client gave up could be executed after a READ that did not see it.
//! Low water and the mark that the responder executes a request of the session are in one word, so that one of the two
//! always sees the other: either the reader finds the mark and passes on, or the responder finds the raised low water and
//! refuses the late copy.
//!
//! `memserver/bpf/shared.h` declares the same layout for the program.

#[cfg(test)]
mod tests;

use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use bluebridge_wire::{NodeId, Space};

use crate::Timestamp;

/// Bits of the low water in [`SharedSession`]'s word; a session with a greater one is not shared.
const LOW_WATER_BITS: u32 = 47;
const LOW_WATER_MASK: u64 = (1 << LOW_WATER_BITS) - 1;
/// The responder executes a request of the session.
const EXECUTING: u64 = 1 << LOW_WATER_BITS;
/// The lowest bit of the count of the slot's uses. A reader that was slow cannot raise the low water of a later session
/// in the same slot, because the count differs.
const USE_SHIFT: u32 = LOW_WATER_BITS + 1;

/// A session, as readers see it: one per slot, zero at first.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct SharedSession {
    /// 0 while no session is in the slot.
    id: AtomicU64,
    /// Low water, whether a request is executed, and the use of the slot.
    word: AtomicU64,
    /// When a reader last answered, by the responder's clock; in nanoseconds.
    last_seen: AtomicU64,
    incarnation: AtomicU32,
    space: AtomicU16,
    node: AtomicU16,
    piece_bytes: AtomicU16,
    takes_pages: AtomicU16,
    unused: [u64; 3],
}

const _: () = assert!(size_of::<SharedSession>() == 64);

/// What readers know of a session.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SessionFacts {
    /// The id that requests name.
    pub id: u64,
    /// The requester's space.
    pub space: Space,
    /// The requester's node.
    pub node: NodeId,
    /// The requester's incarnation.
    pub incarnation: u32,
    /// The largest piece of a reply, in bytes.
    pub piece_bytes: u16,
    /// Pages of reply data that the requester can receive at once.
    pub takes_pages: u16,
}

impl SharedSession {
    /// Shows a new session with low water 1 to readers.
    pub fn publish(&self, facts: &SessionFacts) {
        self.id.store(0, Ordering::Relaxed);
        let used = self.word.load(Ordering::Relaxed) >> USE_SHIFT;
        self.word.store((used.wrapping_add(1) << USE_SHIFT) | 1, Ordering::Release);
        self.last_seen.store(0, Ordering::Relaxed);
        self.incarnation.store(facts.incarnation, Ordering::Relaxed);
        self.space.store(facts.space.0, Ordering::Relaxed);
        self.node.store(facts.node.0, Ordering::Relaxed);
        self.piece_bytes.store(facts.piece_bytes, Ordering::Relaxed);
        self.takes_pages.store(facts.takes_pages, Ordering::Relaxed);
        self.id.store(facts.id, Ordering::Release);
    }

    /// Hides the slot's session from readers, if there is one.
    pub fn withdraw(&self) {
        self.id.store(0, Ordering::Release);
    }

    /// Readers pass the session's requests on from now until [`Self::leave`]. Returns the low water to which readers
    /// raised it.
    pub fn enter(&self) -> u64 {
        // One word is in one order for all cores: a reader's exchange is before this and seen, or after it and fails.
        self.word.fetch_or(EXECUTING, Ordering::AcqRel) & LOW_WATER_MASK
    }

    /// Ends [`Self::enter`] with the responder's low water, which is at least the returned one. A session whose low
    /// water no longer fits is hidden.
    pub fn leave(&self, low_water: u64) {
        if low_water > LOW_WATER_MASK {
            return self.withdraw();
        }
        let used = self.word.load(Ordering::Relaxed) >> USE_SHIFT;
        self.word.store((used << USE_SHIFT) | low_water, Ordering::Release);
    }

    /// The low water to which readers raised it.
    #[must_use]
    pub fn low_water(&self) -> u64 {
        self.word.load(Ordering::Acquire) & LOW_WATER_MASK
    }

    /// When a reader last answered in this session; zero if none did.
    #[must_use]
    pub fn last_seen(&self) -> Timestamp {
        Timestamp::from_nanos(self.last_seen.load(Ordering::Relaxed))
    }

    /// What a reader does before it looks at a page: checks that a READ belongs to this session, and raises the low
    /// water. `None`: the reader must pass the READ on.
    ///
    /// This is the specification of the program in the kernel, which does the same.
    #[must_use]
    pub fn admit_read(&self, read: &DirectRead) -> Option<SessionFacts> {
        let compared = self.compare(read)?;
        self.raise(compared)?;
        self.last_seen.fetch_max(read.now.as_nanos(), Ordering::Relaxed);
        Some(compared.facts)
    }

    /// The first step of [`Self::admit_read`], which changes nothing.
    fn compare(&self, read: &DirectRead) -> Option<Compared> {
        let word = self.word.load(Ordering::Acquire);
        let facts = SessionFacts {
            id: self.id.load(Ordering::Acquire),
            space: Space(self.space.load(Ordering::Relaxed)),
            node: NodeId(self.node.load(Ordering::Relaxed)),
            incarnation: self.incarnation.load(Ordering::Relaxed),
            piece_bytes: self.piece_bytes.load(Ordering::Relaxed),
            takes_pages: self.takes_pages.load(Ordering::Relaxed),
        };
        let is_its = read.session != 0
            && (facts.id, facts.space, facts.node, facts.incarnation)
                == (read.session, read.space, read.node, read.incarnation);
        let known = word & LOW_WATER_MASK;
        let low_water = known.max(read.low_water);
        let fits = low_water <= LOW_WATER_MASK
            && read
                .sequence
                .checked_sub(low_water)
                .is_some_and(|ahead| ahead < bluebridge_wire::SESSION_WINDOW);
        if !is_its || word & EXECUTING != 0 || !fits {
            return None;
        }
        Some(Compared { facts, word, raised: word - known + low_water })
    }

    /// The second step: raises the low water, unless anything changed since the first.
    fn raise(&self, Compared { word, raised, .. }: Compared) -> Option<()> {
        if raised != word {
            self.word.compare_exchange(word, raised, Ordering::AcqRel, Ordering::Acquire).ok()?;
        }
        Some(())
    }
}

/// What a reader found before it raises the low water.
#[derive(Clone, Copy)]
struct Compared {
    facts: SessionFacts,
    word: u64,
    /// The word with the low water of the READ.
    raised: u64,
}

/// The fields of a READ that [`SharedSession::admit_read`] compares.
#[derive(Clone, Copy, Debug)]
pub struct DirectRead {
    /// The session that it names.
    pub session: u64,
    /// The space of its source.
    pub space: Space,
    /// The node of its source.
    pub node: NodeId,
    /// The requester's incarnation.
    pub incarnation: u32,
    /// Its number.
    pub sequence: u64,
    /// The lowest number without a reply.
    pub low_water: u64,
    /// The current time.
    pub now: Timestamp,
}

/// How a shard serves, as readers see it; zero at first, which is closed.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct SharedShard {
    /// The shard serves until this time of the responder's clock, in nanoseconds; 0 while it does not.
    open_until: AtomicU64,
    range_epoch: AtomicU32,
    credit_pages: AtomicU32,
    unused: [u64; 6],
}

const _: () = assert!(size_of::<SharedShard>() == 64);

/// How a shard serves.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ShardFacts {
    /// Until when the shard serves; zero if it does not.
    pub open_until: Timestamp,
    /// The epoch of its authority.
    pub range_epoch: u32,
    /// Pages that may be outstanding in each session.
    pub credit_pages: u16,
}

impl SharedShard {
    /// Shows how the shard serves from now on.
    pub fn publish(&self, facts: &ShardFacts) {
        if self.range_epoch.load(Ordering::Relaxed) != facts.range_epoch {
            self.close();
        }
        self.range_epoch.store(facts.range_epoch, Ordering::Relaxed);
        self.credit_pages.store(facts.credit_pages.into(), Ordering::Relaxed);
        self.open_until.store(facts.open_until.as_nanos(), Ordering::Release);
    }

    /// Readers pass everything on from now on.
    pub fn close(&self) {
        self.open_until.store(0, Ordering::Release);
    }

    /// How the shard serves.
    #[must_use]
    pub fn facts(&self) -> ShardFacts {
        ShardFacts {
            open_until: Timestamp::from_nanos(self.open_until.load(Ordering::Acquire)),
            range_epoch: self.range_epoch.load(Ordering::Relaxed),
            credit_pages: u16::try_from(self.credit_pages.load(Ordering::Relaxed))
                .unwrap_or(u16::MAX),
        }
    }
}

/// What a store shares with direct readers, for one shard.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shared<'a> {
    /// The sessions by their slots, which are the low 16 bits of their ids. Sessions of further slots are not shared.
    pub sessions: &'a [SharedSession],
    /// How the shard serves; `None` without readers.
    pub shard: Option<&'a SharedShard>,
}
