//! The command line of BlueBridge: every subcommand of the one binary, and its exit codes.

mod command;
mod exit;
mod output;

pub use command::run;
pub use exit::Exit;
