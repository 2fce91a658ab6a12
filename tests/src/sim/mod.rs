//! Whole racks in virtual time: real requesters, responders, arenas and the real switch pipeline,
//! under seeded loss, damage, delay, partitions, restarts and pauses, against a reference model.
//!
//! The seed alone determines a run. It fails with the first result that no correct rack could have
//! produced: bytes that were never written or must have been replaced, torn pages, pages granted
//! twice, effects that happened twice, operations that end after their deadline, leaked pages.
//!
//! * `plan`: the parameters of a seed; `world`: the events; `network`, `server`, `client`, `prober`, `clock`: the parts of a rack.
//! * `workload`, `task`: the clients' operations; `ledger`, `region`, `model`: the possible results; `report`: the counts.
//! * `bugs`: planted bugs; `migration`: lines that another server serves.
//! * `leases`: a separate simulation of UPDATE, owners and redirects.

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

/// The space of all endpoints.
const SPACE: Space = Space(1);

/// Runs a plan to its end; `trace` prints every event.
///
/// # Errors
/// A description of a result that no correct rack can produce.
pub fn run(plan: Plan, trace: bool) -> Result<Report, String> {
    world::World::new(plan, trace).run()
}

fn client_node(index: usize) -> NodeId {
    NodeId(0x0100 + u16::try_from(index).expect("few clients"))
}

fn server_node(index: usize) -> NodeId {
    NodeId(1 + u16::try_from(index).expect("few servers"))
}
