//! Tests that need a world: simulation, racks of real packets, conformance.
