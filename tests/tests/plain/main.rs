//! The book, simulations, and misuse of clients and owners, in one process.

mod book;
mod generations;
mod handover;
mod hostile_misuse;
mod hostile_owner;
mod hot_paths;
mod lease_simulation;
mod moving;
mod simulation;
