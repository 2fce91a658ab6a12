//! The memory server: arena, allocator, serving loop.

pub mod arena;
mod extent_tree;
pub mod memory;
mod reserve;

pub use arena::{Arena, ArenaConfig, ArenaUsage};
pub use memory::{Memory, PageKind};
pub use reserve::{Claim, Reservation, ReserveError, Reserved};
