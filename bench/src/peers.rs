//! Other systems as contestants: memcached, redis, and a disk over NBD, each by its own protocol.
//!
//! A client here does what a good client library does, and no more: a request whose bytes are known before, one system call
//! to send it, and as few as possible for a response whose length is known. The first and the last bytes of every response
//! are compared, and all bytes of the last one of a turn.

mod exchange;
pub mod memcached;
pub mod nbd;
pub mod redis;
mod stream;

pub use exchange::Exchange;
pub use stream::{Stream, Waiting};

/// What a contestant stores and reads under its one key, or at its one place.
#[must_use]
pub fn value(bytes: usize) -> Vec<u8> {
    (b'a'..=b'z').cycle().take(bytes).collect()
}

/// The key, where there is one.
pub const KEY: &str = "bluebridge";
