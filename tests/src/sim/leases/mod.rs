//! Leases in virtual time: real requesters, owners, a responder and the real pipeline with its
//! redirects, under loss, damage, delay, crashes, and endpoints that pause during a lease.
//! [`crate::history`] checks the results of the clients.
//!
//! One server has two pages. The first is read, overwritten and updated as a whole, always with a new
//! value; a word of the second is a counter, which is added to and updated. Every endpoint's clock has
//! its own rate. The seed alone determines a run.
//!
//! The checks: the histories of both pages are linearizable, no page is read half old and half new, no
//! page is granted while another client, by its clock, still holds a lease on it, and after all faults
//! every operation succeeds.
//!
//! * `client`: a requester and an owner; `job`: its work on the pages.
//! * `controller`: changes redirects according to copies of replies.
//! * `world`: the events; `world/jobs`: the steps of jobs; `world/traffic`: datagrams and planted bugs.

mod client;
mod controller;
mod job;
mod world;

pub use world::run;

/// A planted bug.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bug {
    /// The server accepts a COMMIT of the page's owner with any epoch.
    AnyEpoch,
    /// The server executes a repeated FETCH_ADD again.
    ForgetWindow,
    /// The store skips some writes.
    LoseWrites,
    /// A client uses its lease for longer than it was granted.
    Overstay,
    /// An owner executes a redirected request, and the client accepts the reply.
    OwnerExecutes,
    /// An owner does not learn that its lease ended, and serves the contents before the COMMIT.
    ServeReleased,
}

impl Bug {
    /// Every bug.
    pub const ALL: [Self; 6] = [
        Self::AnyEpoch,
        Self::ForgetWindow,
        Self::LoseWrites,
        Self::Overstay,
        Self::OwnerExecutes,
        Self::ServeReleased,
    ];
}

/// The configuration of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The seed of all random numbers.
    pub seed: u64,
    /// The bug that this run must find.
    pub bug: Option<Bug>,
}
