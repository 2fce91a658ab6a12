//! Whole racks in virtual time: real requesters, responders, arenas and the real switch pipeline,
//! under seeded loss, damage, delay, partitions, restarts and pauses, against a reference model.
//!
//! A run is decided by its seed alone. It fails with the first answer that no correct rack could
//! have given: bytes that were never written or cannot be there any more, torn pages, pages
//! granted twice, effects that happened twice, operations that outlive their deadline, pages that
//! leaked.
//!
//! * `plan`: what a seed stands for; `world`: the events; `network`, `server`, `client`, `prober`, `clock`: the parts of a rack.
//! * `workload`, `task`: what clients do; `ledger`, `region`, `model`: what they may be told; `report`: what happened.
//! * `bugs`: planted mistakes; `migration`: lines that another server serves.
//! * `leases`: a world of its own, for UPDATE, owners and redirects.

pub mod bugs;
mod client;
mod clock;
pub mod leases;
mod ledger;
mod migration;
pub mod model;
mod network;
pub mod plan;
mod prober;
mod region;
mod report;
mod server;
mod task;
mod workload;
mod world;

use bluebridge_wire::{NodeId, Space};

pub use bugs::Bug;
pub use plan::Plan;
pub use report::Report;

/// The space of all ends.
const SPACE: Space = Space(1);

/// Runs a plan to its end; `trace` prints everything that happens.
///
/// # Errors
/// What happened that no correct rack does.
pub fn run(plan: Plan, trace: bool) -> Result<Report, String> {
    world::World::new(plan, trace).run()
}

fn client_node(index: usize) -> NodeId {
    NodeId(0x0100 + u16::try_from(index).expect("few clients"))
}

fn server_node(index: usize) -> NodeId {
    NodeId(1 + u16::try_from(index).expect("few servers"))
}
