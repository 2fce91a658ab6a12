//! Unconfirmed pages of anywhere-CREATEs (`docs/protocol.md`, section 6).

use bluebridge_wire::{Command, NodeId, Space, Status};

use super::{config::Limits, sessions::RequesterId};
use crate::{Timestamp, store::Grant};

/// One anywhere-CREATE or anywhere-ALLOC_WRITE.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Provisional {
    pub(super) requester: RequesterId,
    pub(super) nonce: u64,
    pub(super) command: Command,
    pub(super) grant: Grant,
    pub(super) pages: u32,
    /// The length in the request: pages of a CREATE, bytes of an ALLOC_WRITE.
    pub(super) length: u32,
    /// Of an ALLOC_WRITE; else 0.
    pub(super) piece_bytes: u16,
    /// Pieces of an ALLOC_WRITE that arrived.
    pub(super) arrived: u32,
    pub(super) expires_at: Timestamp,
}

/// A bounded table, in the order of the pages' locations.
pub(super) struct ProvisionalTable {
    entries: Vec<Provisional>,
    /// The entries' nonces, in a separate array because every anywhere-CREATE searches them.
    nonces: Vec<u64>,
    /// The use of each node, in the order of spaces and nodes.
    shares: Vec<Share>,
    limit: usize,
    page_limit: u64,
    node_limit: usize,
    node_page_limit: u64,
    pages: u64,
}

/// The sum of the entries of one node; only nodes with entries have one.
#[derive(Clone, Copy, Debug)]
struct Share {
    of: (Space, NodeId),
    count: usize,
    pages: u64,
}

/// Why an anywhere-CREATE is refused.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Excess {
    /// It has more pages than one node may ever have unconfirmed.
    Permanent,
    /// Its node has used its share.
    Node,
    /// The table is full.
    Table,
}

impl From<Excess> for Status {
    fn from(excess: Excess) -> Self {
        match excess {
            Excess::Permanent => Self::QuotaExceeded,
            Excess::Node | Excess::Table => Self::Overloaded,
        }
    }
}

impl ProvisionalTable {
    pub(super) fn new(limits: &Limits) -> Self {
        let limit = usize::from(limits.provisional_count);
        Self {
            entries: Vec::with_capacity(limit),
            nonces: Vec::with_capacity(limit),
            shares: Vec::with_capacity(limit),
            limit,
            page_limit: limits.provisional_pages,
            node_limit: usize::from(limits.node_provisional_count),
            node_page_limit: limits.node_provisional_pages.min(limits.provisional_pages),
            pages: 0,
        }
    }

    pub(super) const fn pages(&self) -> u64 {
        self.pages
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn next_expiry(&self) -> Option<Timestamp> {
        self.entries.iter().map(|entry| entry.expires_at).min()
    }

    pub(super) fn find(&self, requester: &RequesterId, nonce: u64) -> Option<usize> {
        (0..)
            .zip(&self.nonces)
            .find(|&(index, &other)| other == nonce && self.entries[index].requester == *requester)
            .map(|(index, _)| index)
    }

    pub(super) fn at(&mut self, index: usize) -> &mut Provisional {
        &mut self.entries[index]
    }

    /// Whether `pages` more pages of a node fit, so that one node cannot fill the table.
    ///
    /// # Errors
    /// Unless the refusal is permanent, the requester may retry when others are confirmed or freed.
    pub(super) fn admit(&self, requester: &RequesterId, pages: u32) -> Result<(), Excess> {
        let pages = u64::from(pages);
        let (count, held) = self
            .share(requester)
            .map_or((0, 0), |at| (self.shares[at].count, self.shares[at].pages));
        if pages > self.node_page_limit {
            Err(Excess::Permanent)
        } else if count >= self.node_limit || held + pages > self.node_page_limit {
            Err(Excess::Node)
        } else if self.entries.len() >= self.limit || self.pages + pages > self.page_limit {
            Err(Excess::Table)
        } else {
            Ok(())
        }
    }

    pub(super) fn has_node_of(&self, requester: &RequesterId) -> bool {
        self.share(requester).is_ok()
    }

    /// The position of the requester's node in `shares`; `Err`: where it would be inserted.
    fn share(&self, requester: &RequesterId) -> Result<usize, usize> {
        self.shares.binary_search_by_key(&(requester.space, requester.node), |share| share.of)
    }

    /// Adds an entry that was admitted, and returns its position.
    pub(super) fn insert(&mut self, entry: Provisional) -> usize {
        let index = self
            .entries
            .partition_point(|other| other.grant.location.page() < entry.grant.location.page());
        let pages = u64::from(entry.pages);
        match self.share(&entry.requester) {
            Ok(at) => {
                self.shares[at].count += 1;
                self.shares[at].pages += pages;
            }
            Err(at) => {
                let of = (entry.requester.space, entry.requester.node);
                self.shares.insert(at, Share { of, count: 1, pages });
            }
        }
        self.pages += pages;
        self.entries.insert(index, entry);
        self.nonces.insert(index, entry.nonce);
        index
    }

    /// The entry whose pages include `page`.
    pub(super) fn holding(&self, page: u64) -> Option<usize> {
        let index = self
            .entries
            .partition_point(|entry| entry.grant.location.page() <= page)
            .checked_sub(1)?;
        let entry = &self.entries[index];
        (page - entry.grant.location.page() < u64::from(entry.pages)).then_some(index)
    }

    pub(super) fn remove(&mut self, index: usize) -> Provisional {
        let entry = self.entries.remove(index);
        self.nonces.remove(index);
        self.pages -= u64::from(entry.pages);
        if let Ok(at) = self.share(&entry.requester) {
            self.shares[at].count -= 1;
            self.shares[at].pages -= u64::from(entry.pages);
            if self.shares[at].count == 0 {
                self.shares.remove(at);
            }
        }
        entry
    }

    /// Removes the entry whose pages include `page`, because they were freed.
    pub(super) fn forget(&mut self, page: u64) {
        if let Some(index) = self.holding(page) {
            self.remove(index);
        }
    }

    /// Removes an entry that expired by `now`.
    pub(super) fn take_expired(&mut self, now: Timestamp) -> Option<Provisional> {
        let index = self.entries.iter().position(|entry| entry.expires_at <= now)?;
        Some(self.remove(index))
    }
}
