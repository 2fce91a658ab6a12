//! BlueBridge requester and responder: state machines without I/O.
//!
//! Datagrams and the time go in; datagrams, completions and the next deadline come out. Neither
//! machine has a clock, a socket or a source of randomness of its own (a seed is an argument), so
//! they run unchanged in simulation, under a model checker, and on every carrier. The rules that
//! both follow are in `docs/protocol.md`.
//!
//! * `requester`: the end that asks.
//! * `owner`: what an endpoint answers for pages that it has leases on.
//! * `responder`: the end that serves a shard of memory through the [`store::PageStore`] seam.
//!
//! * `pieces`: how a range is cut into pieces; `store`: the seam to memory; `events`: counters by name.

#![forbid(unsafe_code)]

mod events;
pub mod owner;
pub mod pieces;
pub mod requester;
pub mod responder;
pub mod store;
pub use bluebridge_time::Timestamp;
