//! Side-by-side measurements: contestants, turns, and what they sum up to.
//!
//! A speed is claimed as a ratio. Two contestants are measured in one run, over the same links
//! and the same two cores, in turns that are short and alternate, because the machine's own
//! speed changes by more than what is to be told apart.
//!
//! * [`turns`]: who is served now; one thread serves every contestant, so no contestant's idle
//!   server takes a core from another.
//! * [`contest`]: the rounds, and a [`summary`] of each contestant.
//! * [`ours`]: the client library's operations; [`update`]: an UPDATE with its COMMIT.
//! * [`echo`] and [`flood`]: the plain UDP floors, one outstanding and many.
//! * [`ownership`]: leases handed from client to client, and how fair that is.
//! * [`plot`]: series as SVG.
//! * [`placement`]: how far apart the host has put the two cores, which moves all results.

pub mod contest;
pub mod echo;
pub mod flood;
pub mod ours;
pub mod ownership;
pub mod placement;
pub mod plot;
pub mod summary;
pub mod turns;
pub mod update;

/// Keeps the calling thread on one core.
///
/// # Errors
/// What the system says, if there is no such core.
pub fn pin(core: usize) -> std::io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}
