//! Racks of namespaces on this machine, built and used by the binary.

mod book;
mod command;
mod json;
mod memory;
