//! Racks and their hosts, and the binary that makes and uses them.

mod demo;
mod root;
mod usage;
