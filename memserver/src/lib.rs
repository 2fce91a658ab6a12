//! The memory server: arena, allocator, serving loop.
//!
//! * [`Arena`]: the pages of one shard, a [`PageStore`](bluebridge_protocol::store::PageStore);
//!   over memory of a [`Reservation`], or over plain process memory.
//! * [`serve::Shard`]: one carrier, one responder, one store, one thread.
//! * [`run`]: a whole server with a shard per carrier, its live statistics, and its stop.
//! * [`survey`]: lists or frees allocations of a shard for an operator.
//! * [`Member`]: a server that joined a rack, serves as its controller allows, and leaves.
//! * [`migration`]: the lines that a shard takes from other servers; [`deputies`]: nodes that are gone, for which it answers.
//! * [`direct`]: READs that a program in the kernel answers.
//! * `sizes`: how many pages and lines a shard has; `extent_tree` finds free ones, `backlog` decides which request is next; [`memory`] and `reserve`
//!   provide the bytes of an arena, [`statistics`] the counters of a shard; [`watch`] tells an observer of a change that
//!   it waits for.
//!
//! ```
//! use bluebridge_memserver::{ServerConfig, run};
//! use bluebridge_transport::memory::Hub;
//! use bluebridge_wire::{NodeId, Space, UDP_PORT};
//!
//! let hub = Hub::new(1024);
//! let carrier = hub.attach(UDP_PORT, &["fdbb:7:9::/48".parse()?])?;
//! let config = ServerConfig::new(Space(7), NodeId(9), 1, 4 << 20, 0x5eed);
//! let server = run(&config, vec![carrier])?;
//! assert_eq!(server.statistics().len(), 1);
//! let totals = server.stop()?;
//! assert_eq!(totals[0].arena.capacity_pages, 1024);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(unsafe_code)]

pub mod arena;
mod backlog;
mod contention;
pub mod deputies;
pub mod direct;
mod extent_tree;
mod freeings;
pub mod kept;
mod member;
pub mod memory;
pub mod migration;
mod reserve;
pub mod serve;
pub mod server;
mod sizes;
pub mod statistics;
pub mod survey;
pub mod watch;

pub use arena::{Arena, ArenaConfig, ArenaUsage, Damaged};
pub use kept::{ArenaFile, ArenaFileError, ShardMemory};
pub use member::{Member, MemberError};
pub use memory::{Memory, PageKind};
pub use reserve::{Claim, Reservation, ReserveError, Reserved};
pub use server::{DirectInterface, Server, ServerConfig, StartError, run, run_with};
