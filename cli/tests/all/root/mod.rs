//! Racks of namespaces on this machine, built and used by the binary.

mod book;
mod command;
mod daemons;
mod disk;
mod json;
mod kept;
mod memory;
mod mininet;
mod operators;
mod run;
mod same_directory;
mod terminal;
mod test_rack;
mod workload;
mod workout;
