//! Racks of the real daemons with real packets, in network namespaces of this machine.

mod hostile_rack;
mod rack_astray;
mod rack_colours;
mod rack_direct_reads;
mod rack_examples;
mod rack_floods;
mod rack_idle;
mod rack_impaired;
mod rack_leases;
mod rack_members;
mod rack_migration;
mod rack_pager;
mod rack_pointers;
mod rack_redirects;
mod rack_restarts;
mod rack_transfers;
mod rack_updates;
