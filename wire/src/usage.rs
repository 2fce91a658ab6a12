//! The usage record: the data of a STAT's reply.

/// Bytes of the record.
pub const USAGE_BYTES: usize = 72;

/// Bytes of the record of a server that does not report how many pages are retired.
const USAGE_BYTES_MIN: usize = 64;

/// The result of a STAT: nine 64-bit numbers, big endian, in the order of the fields.
///
/// A longer record is from a newer server; the additional bytes are skipped. A record of eight numbers
/// is from an older server, which does not report how many pages are retired.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Usage {
    /// Pages of the shard's arena.
    pub capacity_pages: u64,
    /// Pages that can be allocated now.
    pub free_pages: u64,
    /// Pages that the requester's space may have; `u64::MAX` without a quota.
    pub quota_pages: u64,
    /// Pages that the requester's space has.
    pub used_pages: u64,
    /// Pages of anywhere-CREATEs that are not confirmed yet.
    pub provisional_pages: u64,
    /// Open sessions.
    pub session_count: u64,
    /// Requests that got a reply since the start.
    pub answered_count: u64,
    /// Shards (serving cores) of the server.
    pub shard_count: u64,
    /// Pages that cannot be allocated because their colours are used up: until the server has
    /// reserved more generations, or for good if none are left (docs/protocol.md, section 8).
    pub retired_pages: u64,
}

impl Usage {
    /// The record in `bytes`; `None` if they are too short.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < USAGE_BYTES_MIN {
            return None;
        }
        let (words, _) = bytes.as_chunks::<8>();
        let mut words = words.iter().map(|word| u64::from_be_bytes(*word));
        let mut next = || words.next();
        Some(Self {
            capacity_pages: next()?,
            free_pages: next()?,
            quota_pages: next()?,
            used_pages: next()?,
            provisional_pages: next()?,
            session_count: next()?,
            answered_count: next()?,
            shard_count: next()?,
            retired_pages: next().unwrap_or(0),
        })
    }

    /// The record on the wire.
    #[must_use]
    pub fn emit(&self) -> [u8; USAGE_BYTES] {
        let words = [
            self.capacity_pages,
            self.free_pages,
            self.quota_pages,
            self.used_pages,
            self.provisional_pages,
            self.session_count,
            self.answered_count,
            self.shard_count,
            self.retired_pages,
        ];
        let mut bytes = [0; USAGE_BYTES];
        for (out, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *out = word.to_be_bytes();
        }
        bytes
    }
}
