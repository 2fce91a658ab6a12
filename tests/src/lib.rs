//! Tests that need a world: simulation, racks of real packets, conformance.
//!
//! * [`sim`]: whole racks in virtual time; [`history`]: whether what clients saw is linearizable.
//! * [`ownership`]: the model of leases whose states a checker visits.
//! * [`hostile`]: packets that lie, against switch, servers and owners.
//! * [`rack`]: racks of real daemons, what runs in them and what is checked.

pub mod history;
pub mod hostile;
pub mod ownership;
pub mod rack;
pub mod sim;
