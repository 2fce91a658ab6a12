//! Model checking, and runs so long that chance meets nearly everything.

mod hostile_packets;
mod ownership_model;
