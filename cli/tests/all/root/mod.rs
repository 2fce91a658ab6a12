//! Racks of namespaces on this machine, by the library and by the binary.

mod command;
mod host;
mod memory;
mod rack;
