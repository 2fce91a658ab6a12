//! The client against real memory servers in one process.

include!("../support/rack.rs");

mod asynchronous;
mod in_process;
mod leaving;
mod updates;
