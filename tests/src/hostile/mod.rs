//! Hostile input: malformed, mutated, contradictory and spoofed packets against switch and server.
//!
//! * [`forge`]: a datagram with arbitrary values in every field, and its frame.
//! * [`damage`]: damage below UDP.
//! * [`attack`]: the classes of attacks, drawn from a seed.
//! * [`World`]: a soft switch and three memory servers in one process. Each server's store records its
//!   changes, and a [`shadow`] of the server checks after every packet whether the changes are exactly
//!   those that an accepted packet named, and whether the requester had the right to what was read. It
//!   knows the owner of each page, so that only a COMMIT of the owner changes a leased one, and no page
//!   has two owners.
//! * [`OwnerHarness`]: an endpoint's owner of leases, and the replies that it must send.

pub mod attack;
pub mod damage;
mod draw;
pub mod forge;
mod host;
mod owner;
pub mod shadow;
mod vectors;
pub mod watched;
mod world;

pub use attack::Class;
pub use host::{HostDrop, Received, receive};
pub use owner::OwnerHarness;
pub use vectors::{Vector, golden_vectors};
pub use world::{Attacker, GENERATION, Recorded, Tally, VICTIM, World, usual_limits};
