//! What an arena contains for direct readers.

#![allow(unsafe_code, reason = "the program in the kernel accesses the same memory")]

use core::sync::atomic::{AtomicU64, Ordering};

use bluebridge_protocol::direct::{Shared, SharedSession, SharedShard};

use crate::memory::Part;

/// Sessions of a shard that readers know.
pub(crate) const SESSIONS: u32 = 1024;

/// Processors with counters of their own.
pub(crate) const PROCESSORS: u32 = 256;

/// A shard's record and its sessions.
#[derive(Debug)]
pub(crate) struct SharedPart(Part);

impl SharedPart {
    pub(crate) const BYTES: usize =
        size_of::<SharedShard>() + SESSIONS as usize * size_of::<SharedSession>();

    /// A part of [`Self::BYTES`] in a mapping, closed and without sessions, whatever it was before. A program of an
    /// earlier process may still be in the middle of a READ, so the counts of the slots' uses go on.
    ///
    /// # Panics
    /// If the part is too short, or not aligned: its layout is wrong.
    pub(crate) fn new(part: Part) -> Self {
        assert!(part.len() >= Self::BYTES && part.as_ptr().cast::<SharedSession>().is_aligned());
        let shared = Self(part);
        let Shared { sessions, shard } = shared.all();
        shard.into_iter().for_each(SharedShard::close);
        sessions.iter().for_each(SharedSession::withdraw);
        shared
    }

    pub(crate) fn all(&self) -> Shared<'_> {
        let shard = self.0.as_ptr().cast::<SharedShard>();
        // SAFETY: the part is longer, by `new`.
        let first = unsafe { shard.add(1) }.cast::<SharedSession>();
        // SAFETY: the record is in the part, aligned, by `new`; it consists of atomics, for which every bit pattern is
        // valid, and which others may change.
        let shard = unsafe { &*shard };
        // SAFETY: as above, for as many records as the part has room for.
        let sessions = unsafe { core::slice::from_raw_parts(first, SESSIONS as usize) };
        Shared { sessions, shard: Some(shard) }
    }
}

/// How many READs the kernel answered or passed on, since the server started.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct ReadCounts {
    /// Answered by the kernel.
    pub answered: u64,
    /// Passed on, because a datagram of the plain form for each page does not answer them: several pieces of a page, repetitions, options.
    pub passed_form: u64,
    /// Passed on while the server did not serve.
    pub passed_closed: u64,
    /// Passed on because the session is not known, or the server executed another request of it.
    pub passed_session: u64,
    /// Passed on because of the page: leased, not written, not confirmed, or of another colour.
    pub passed_page: u64,
    /// Passed on because the page changed meanwhile.
    pub passed_change: u64,
    /// Passed on because the datagram is damaged, or its UDP checksum could be a partial or a complete one.
    pub passed_checksum: u64,
    /// Passed on because the kernel had no memory.
    pub passed_send: u64,
}

impl ReadCounts {
    /// The reasons for which READs were passed on, with their counts.
    #[must_use]
    pub const fn passed(&self) -> [(&'static str, u64); 7] {
        [
            ("several datagrams, or an unusual form", self.passed_form),
            ("the server does not serve", self.passed_closed),
            ("the session is unknown or busy", self.passed_session),
            ("the page is leased, not written, or not this pointer's", self.passed_page),
            ("the page changed", self.passed_change),
            ("damaged, or a checksum that may be partial or complete", self.passed_checksum),
            ("no memory in the kernel", self.passed_send),
        ]
    }

    /// All READs that were passed on.
    #[must_use]
    pub fn passed_count(&self) -> u64 {
        self.passed().iter().map(|(_, count)| count).sum()
    }
}

/// `struct read_counters` of `bpf/shared.h`.
const COUNTERS: usize = 8;

/// The counters of all processors.
#[derive(Debug)]
pub(crate) struct Counters(Part);

impl Counters {
    pub(crate) const BYTES: usize = PROCESSORS as usize * COUNTERS * size_of::<u64>();

    /// A part of [`Self::BYTES`] in a mapping, all zeros from now on.
    ///
    /// # Panics
    /// If the part is too short, or not aligned: its layout is wrong.
    pub(crate) fn new(mut part: Part) -> Self {
        assert!(part.len() >= Self::BYTES && part.as_ptr().cast::<AtomicU64>().is_aligned());
        part.fill(0);
        Self(part)
    }

    /// The sums over all processors.
    pub(crate) fn counts(&self) -> ReadCounts {
        // SAFETY: the part is that long and aligned, by `new`; every bit pattern is valid for atomics, which others may
        // change.
        let all = unsafe {
            core::slice::from_raw_parts(
                self.0.as_ptr().cast::<AtomicU64>(),
                PROCESSORS as usize * COUNTERS,
            )
        };
        let mut sums = [0_u64; COUNTERS];
        for own in all.chunks_exact(COUNTERS) {
            for (sum, count) in sums.iter_mut().zip(own) {
                *sum = sum.wrapping_add(count.load(Ordering::Relaxed));
            }
        }
        let [
            answered,
            passed_form,
            passed_closed,
            passed_session,
            passed_page,
            passed_change,
            passed_checksum,
            passed_send,
        ] = sums;
        ReadCounts {
            answered,
            passed_form,
            passed_closed,
            passed_session,
            passed_page,
            passed_change,
            passed_checksum,
            passed_send,
        }
    }
}

/// `struct places` of `bpf/shared.h`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(crate) struct Places {
    pub(crate) states: u32,
    pub(crate) lines: u32,
    pub(crate) frames: u32,
    pub(crate) shared: u32,
    pub(crate) pages: u32,
    pub(crate) counters: u32,
    pub(crate) stride: u32,
    pub(crate) shard_pages: u32,
    pub(crate) shard_count: u32,
    pub(crate) session_count: u32,
    pub(crate) processors: u32,
    pub(crate) incarnation: u32,
    pub(crate) node: u16,
    pub(crate) to_peer: u16,
    pub(crate) mtu: u32,
}

// SAFETY: it is plain data without padding.
unsafe impl aya::Pod for Places {}
