//! Model checking, and runs so long that random choices cover nearly everything.

mod hostile_packets;
mod ownership_model;
