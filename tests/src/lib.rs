//! Tests that need a world: simulation, racks of real packets, conformance.

pub mod history;
pub mod hostile;
pub mod ownership;
pub mod rack;
pub mod sim;
