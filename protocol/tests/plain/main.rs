//! Tests of rules of the protocol, without its code.

mod direct;
mod direct_model;
mod migration;
mod migration_model;
mod one_sided;
mod one_sided_model;
