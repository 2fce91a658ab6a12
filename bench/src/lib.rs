//! Side-by-side measurements: contestants, turns, and their results.
//!
//! A speed is stated as a ratio. Two contestants are measured in one run, over the same links
//! and the same two cores, in short alternating turns, because the machine's own speed changes by
//! more than the difference to be measured.
//!
//! * [`turns`]: which contestant is served; one thread serves every contestant, so no contestant's idle
//!   server takes a core from another.
//! * [`contest`]: the rounds, and a [`summary`] of each contestant.
//! * [`ours`]: the client library's operations; [`update`]: an UPDATE with its COMMIT.
//! * [`echo`] and [`flood`]: the plain UDP baselines, with one and with many outstanding requests.
//! * [`bulk`]: a bare stream of UDP trains, for transfers of many megabytes.
//! * [`crud`] and [`pages`]: workloads of an endpoint of any rack; [`directory`]: a directory service, and its
//!   client.
//! * [`ownership`]: leases passed from client to client, and their fairness.
//! * [`peers`]: memcached, redis and disks over NBD as contestants.
//! * [`paging`]: page faults of remote regions and of files.
//! * [`plot`]: series as SVG.
//! * [`moving`]: a mixed load on memory that moves between servers.
//! * [`survival`]: clients of a memory server that is killed and comes back.
//! * [`swap`]: the machine's own swap, to a file or to zram.
//! * [`workout`]: programs that use much memory.
//! * [`placement`]: the distance between the two cores as the host placed them, which affects all results.

pub mod bulk;
pub mod contest;
pub mod crud;
pub mod directory;
pub mod echo;
pub mod flood;
pub mod moving;
pub mod ours;
pub mod ownership;
pub mod pages;
pub mod paging;
pub mod peers;
pub mod placement;
pub mod plot;
pub mod summary;
pub mod survival;
pub mod swap;
pub mod turns;
pub mod update;
pub mod workout;

/// Keeps the calling thread on one core.
///
/// # Errors
/// The system's error, if there is no such core.
pub fn pin(core: usize) -> std::io::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(core);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}
