//! Leases in virtual time: real requesters, owners, a responder and the real pipeline with its
//! redirects, under loss, damage, delay, crashes and endpoints that stand still in the middle of
//! a lease; and what the clients saw, decided by [`crate::history`].
//!
//! One server holds two pages. The first is read, overwritten and updated as a whole, always with
//! a value that is new; a word of the second is a counter, which is added to and updated. Every
//! endpoint's clock runs at a rate of its own. A run is decided by its seed alone.
//!
//! What must hold: the histories of both pages are linearizable, no page is read half old and half
//! new, nobody is granted a page while another believes by the own clock to have it, and once all
//! is well again every operation succeeds.
//!
//! * `client`: a requester and an owner; `job`: what it does with the pages.
//! * `controller`: what copies of replies make of the redirects.
//! * `world`: the events; `world/jobs`: how jobs go on and end; `world/traffic`: datagrams and mistakes.

mod client;
mod controller;
mod job;
mod world;

pub use world::run;

/// A mistake made on purpose.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bug {
    /// The server takes a COMMIT of the page's owner whatever its epoch.
    AnyEpoch,
    /// The server executes a repeated FETCH_ADD again.
    ForgetWindow,
    /// The store does not do every write that it was asked to do.
    LoseWrites,
    /// A client believes in its lease for longer than it was granted.
    Overstay,
    /// An owner executes what is redirected to it, and is believed.
    OwnerExecutes,
    /// An owner is not told that its lease is over, and serves on what was committed before.
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

/// Everything that is decided before a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where all randomness comes from.
    pub seed: u64,
    /// The mistake that this run must find.
    pub bug: Option<Bug>,
}
