//! The command line of BlueBridge: every subcommand of the one binary, and its exit codes.
//!
//! * `command`: the subcommands, one file each.
//! * `output`: what is printed, as text or JSON; `exit`: exit codes, and what an error says to do.

mod command;
mod exit;
mod output;

pub use command::run;
pub use exit::Exit;
