//! BlueBridge requester and responder: state machines without I/O.
//!
//! Inputs are datagrams and the time; outputs are datagrams, completions and the next deadline.
//! Neither machine has its own clock, socket or source of randomness (a seed is an argument), so
//! they run unchanged in simulation, under a model checker, and on every carrier.
//! `docs/protocol.md` specifies the rules of both.
//!
//! * `requester`: the end that sends requests.
//! * `owner`: how an endpoint replies to requests for pages that it holds leases on.
//! * `responder`: the end that serves a shard of memory through the [`store::PageStore`] trait.
//! * `taker`: takes lines from another server and serves them, with a requester and the responder.
//! * `freer`: has parts of allocations freed that are at other servers, likewise.
//! * `direct`: what the responder shares with readers that answer READs without it.
//! * `one_sided`: what a reader must see that reads memory by RDMA.
//! * `pieces`: how a range is divided into pieces; `store`: the interface to memory; `events`:
//!   named counters.

#![forbid(unsafe_code)]

pub mod direct;
mod events;
pub mod freer;
pub mod one_sided;
pub mod owner;
pub mod pieces;
pub mod requester;
pub mod responder;
pub mod store;
pub mod taker;
pub use bluebridge_time::Timestamp;
