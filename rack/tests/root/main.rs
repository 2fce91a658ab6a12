//! Racks of namespaces on this machine, and the network of a host in one.

mod host;
mod rack;
