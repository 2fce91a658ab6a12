//! Hostile input: malformed, mutated, contradictory and spoofed packets against switch and server.
//!
//! * [`forge`]: a datagram that may lie in every field, and its frame.
//! * [`damage`]: what can be wrong below UDP.
//! * [`attack`]: the classes of attacks, drawn from a seed.
//! * [`World`]: a soft switch and three memory servers in one process. Each server's store is
//!   watched, and a [`shadow`] of it decides after every packet whether what changed is exactly
//!   what an accepted packet named, and whether what was read was the asker's to read. It knows who
//!   holds which page, so that only a COMMIT of the owner changes one, and no page has two owners.
//! * [`OwnerSiege`]: an endpoint's owner of leases, and what it must answer.

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
pub use owner::OwnerSiege;
pub use vectors::{Vector, golden_vectors};
pub use world::{Attacker, GENERATION, Recorded, Tally, VICTIM, World, usual_limits};
