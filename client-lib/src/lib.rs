//! Remote memory whose pointers are IPv6 addresses: the client library.
//!
//! A [`Client`] belongs to one thread, which drives its own input and output: a call sends,
//! spins briefly, then sleeps until the response arrives or the deadline passes. Nothing is
//! allocated per operation.
//!
//! * [`Client::create`], [`Client::alloc_write`], [`Client::delete`]: allocations, as [`Region`]s.
//! * [`Client::read`], [`Client::write`], [`Client::zero`]: any length, any alignment. A page
//!   (4096 bytes) is read or written whole or not at all; a longer range is not atomic.
//! * [`Client::compare_swap`], [`Client::fetch_add`]: atomics on 8 aligned bytes.
//! * [`Client::read_many`], [`Client::write_many`], [`Client::create_many`],
//!   [`Client::delete_many`]: many ranges on many servers at once.
//! * [`Placement`]: where new pages go.
//!
//! Every call ends by its deadline. An [`Error`] says who is at fault ([`Error::fault`]) and what
//! to do; after [`Error::OutcomeUnknown`] the operation may have been done, once.
//!
//! ```
//! # include!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/rack.rs"));
//! use bluebridge::{Client, EndpointConfig, MemoryNode, NodeId, Space};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // What the controller assigns at a join; `Client::join` does this.
//! let mut config = EndpointConfig::new(Space(1), NodeId(1000), 1);
//! config.memory_nodes = vec![MemoryNode { node: NodeId(1), shard_count: 1 }];
//! # let rack = rack::LocalRack::start(&[NodeId(1)], 1 << 20);
//! # let transport = rack.attach(NodeId(1000));
//! let mut client = Client::open(config, transport);
//!
//! let region = client.create(10_000)?;
//! client.write(region.at(5000)?, b"far away")?;
//! let mut bytes = [0; 8];
//! client.read(region.at(5000)?, &mut bytes)?;
//! assert_eq!(&bytes, b"far away");
//! println!("it is at {}", region.base());
//! client.delete(region)?;
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

// A call is a `work`; `drive` executes it with requester and carrier, on the calling thread. `client`,
// `allocate`, `allocate_many`, `many` and `update` are the calls; `lock` and `barrier` use them.
// `service` is the endpoint's thread beside the calls; `join` and `config` say who the client is.
mod allocate;
mod allocate_many;
#[cfg(feature = "tokio")]
mod asynchronous;
mod barrier;
mod client;
mod config;
mod drive;
mod error;
#[cfg(feature = "join")]
mod join;
mod lock;
mod many;
mod placement;
mod service;
mod update;
mod work;

pub use allocate_many::{CreateRequest, DeleteRequest};
#[cfg(feature = "tokio")]
pub use asynchronous::{AsyncClient, Decision, QUEUE_LENGTH};
pub use barrier::{BARRIER_BYTES, Barrier};
#[cfg(feature = "join")]
pub use bluebridge_northbound::Attachment;
pub use bluebridge_protocol::requester::{Counters, Event};
pub use bluebridge_transport::{
    OpenError, Transport,
    udp::{UdpConfig, UdpTransport},
};
pub use bluebridge_wire::{
    ArenaGeneration, LeaseEnd, Location, NodeId, Pointer, PointerError, Region, Space, Status, Tag,
    Usage,
};
pub use client::Client;
pub use config::{EndpointConfig, MemoryNode};
pub use error::{Error, Fault};
#[cfg(feature = "join")]
pub use join::{JoinError, JoinOptions, OptionsError, ServiceStart};
pub use lock::{LOCK_BYTES, Lock, LockError, LockGuard};
pub use many::{ReadRequest, WriteRequest};
pub use placement::Placement;
pub use service::{
    NOTICES_WAITING_MAX, Notice, NoticeKind, Notices, OwnerPolicy, Service, ServiceCounters,
    ServiceState,
};
pub use update::{Update, UpdateMany, UpdateOptions, UpdateRequest};

/// What a client that joined knows about its rack, and how its membership is kept.
#[cfg(feature = "join")]
pub mod membership {
    #[cfg(feature = "tls")]
    pub use bluebridge_northbound::tls::TlsFileError;
    #[cfg(feature = "tls")]
    pub use bluebridge_northbound::{Certificate, ClientTlsConfig, Identity};
    pub use bluebridge_northbound::{
        Connection, ConnectionError, MembershipError, MemoryNodeStatus, Options, Snapshot,
    };
}

/// Compiles the examples of the README.
#[cfg(all(doctest, feature = "join"))]
#[doc = include_str!("../README.md")]
struct Readme;
