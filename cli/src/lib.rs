//! The command line of BlueBridge, and the racks of network namespaces that it builds.
//!
//! The rack is a library: the demo, the bench and the tests build one in their own process with
//! [`rack::Rack::build`].

mod command;
pub mod control;
mod exit;
pub mod namespace;
pub mod network;
mod output;
pub mod process;
pub mod rack;
pub mod readiness;

pub use command::run;
pub use exit::Exit;
