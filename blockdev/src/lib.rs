//! Remote memory as a disk: an NBD server over the client library.
//!
//! [`nbd`] is the protocol without I/O, [`device`] the disk in remote memory, [`server`] the threads and sockets between
//! them.
//!
//! ```no_run
//! use bluebridge::JoinOptions;
//! use bluebridge_blockdev::device::{Disk, DiskOptions, OpenOptions, Placement};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut client = JoinOptions::from_env()?.join()?;
//! let options = DiskOptions {
//!     size_bytes: 1 << 30,
//!     slab_bytes: 16 << 20,
//!     placement: Placement::TwoChoices,
//!     name: "disk".to_owned(),
//!     id: 1,
//! };
//! let pointer = Disk::create(&mut client, &options)?;
//! let nodes = client.rack().map_or_else(Vec::new, |rack| rack.memory_nodes.to_vec());
//! let options = OpenOptions {
//!     deadline: core::time::Duration::from_secs(5),
//!     lease: core::time::Duration::from_secs(4),
//!     nodes: nodes.into_iter().map(|node| node.node).collect(),
//! };
//! let (disk, keeper) = Disk::attach(client, pointer, options)?;
//! assert_eq!(disk.size_bytes(), 1 << 30);
//! # drop(keeper);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod device;
pub mod nbd;
pub mod server;
