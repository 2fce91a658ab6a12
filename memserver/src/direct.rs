//! READs that the kernel answers.
//!
//! A program on the server's interface answers READs from the arena, before they reach the server: no process is woken
//! up. For that the arena must be in a BPF map, which both access: `kept::file` makes it so where the kernel allows it.
//!
//! * `shared`: what the arena contains for readers: sessions, authority, counters. The protocol is
//!   [`bluebridge_protocol::direct`].
//! * `map`: the arena as a map that outlives the process.
//! * `hints`: where lines of other servers are.
//! * `program`: the program, `bpf/read.bpf.c`, and its tables.

mod crc;
pub(crate) mod hints;
pub(crate) mod map;
mod program;
mod shared;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use rustix::fd::OwnedFd;

use self::hints::Hints;
use crate::memory::Mapper;

pub use program::{DirectReads, NoDirectReads, check_namespace, probe};
pub use shared::ReadCounts;
pub(crate) use shared::{Counters, PROCESSORS, Places, SESSIONS, SharedPart};

/// The part of an arena that a program needs to answer READs of it.
#[derive(Debug)]
pub struct DirectMemory {
    /// The arena.
    pub(crate) id: [u8; 16],
    /// Its map.
    pub(crate) map: OwnedFd,
    /// Maps its pages for this process.
    pub(crate) mapper: Mapper,
    /// Where its parts are.
    pub(crate) places: Places,
    /// Where lines of other servers are.
    pub(crate) hints: Hints,
    /// What the program counts.
    pub(crate) counters: Arc<Counters>,
}
