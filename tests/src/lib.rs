//! Tests that need a world: simulation, racks of real packets, conformance.

pub mod hostile;
pub mod rack;
pub mod sim;
