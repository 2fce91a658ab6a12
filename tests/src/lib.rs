//! Tests of whole systems: simulation, racks with real packets, conformance.
//!
//! * [`sim`]: whole racks in virtual time; [`history`]: whether client results are linearizable.
//! * [`ownership`]: the model of leases whose states a model checker visits.
//! * [`hostile`]: invalid packets to switch, servers and owners.
//! * [`rack`]: racks of real daemons, the clients in them, and the checks.

pub mod history;
pub mod hostile;
pub mod ownership;
pub mod rack;
pub mod sim;
