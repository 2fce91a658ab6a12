//! Pages of anywhere-CREATEs that nobody confirmed yet (`docs/protocol.md`, section 6).

use bluebridge_wire::{Command, Status};

use super::sessions::Asker;
use crate::{Instant, store::Grant};

/// One anywhere-CREATE or anywhere-ALLOC_WRITE.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Provisional {
    pub(super) asker: Asker,
    pub(super) nonce: u64,
    pub(super) command: Command,
    pub(super) grant: Grant,
    pub(super) pages: u32,
    /// As the request said: pages of a CREATE, bytes of an ALLOC_WRITE.
    pub(super) length: u32,
    /// Of an ALLOC_WRITE; else 0.
    pub(super) piece_bytes: u16,
    /// Pieces of an ALLOC_WRITE that arrived.
    pub(super) arrived: u32,
    pub(super) expires_at: Instant,
}

/// A bounded table, in the order of the pages' locations.
pub(super) struct ProvisionalTable {
    entries: Vec<Provisional>,
    /// The entries' nonces, apart because every anywhere-CREATE looks through them.
    nonces: Vec<u64>,
    limit: usize,
    page_limit: u64,
    pages: u64,
}

impl ProvisionalTable {
    pub(super) fn new(limit: u16, page_limit: u64) -> Self {
        let limit = usize::from(limit);
        let (entries, nonces) = (Vec::with_capacity(limit), Vec::with_capacity(limit));
        Self { entries, nonces, limit, page_limit, pages: 0 }
    }

    pub(super) const fn pages(&self) -> u64 {
        self.pages
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn next_expiry(&self) -> Option<Instant> {
        self.entries.iter().map(|entry| entry.expires_at).min()
    }

    pub(super) fn find(&self, asker: &Asker, nonce: u64) -> Option<usize> {
        (0..)
            .zip(&self.nonces)
            .find(|&(index, &other)| other == nonce && self.entries[index].asker == *asker)
            .map(|(index, _)| index)
    }

    pub(super) fn at(&mut self, index: usize) -> &mut Provisional {
        &mut self.entries[index]
    }

    /// Whether `pages` more fit.
    ///
    /// # Errors
    /// OVERLOADED: the requester may try again when others are confirmed or freed.
    pub(super) fn admit(&self, pages: u32) -> Result<(), Status> {
        let fits = self.entries.len() < self.limit
            && self.pages.saturating_add(u64::from(pages)) <= self.page_limit;
        if fits { Ok(()) } else { Err(Status::Overloaded) }
    }

    /// Adds an entry that was admitted, and says where.
    pub(super) fn insert(&mut self, entry: Provisional) -> usize {
        let index = self
            .entries
            .partition_point(|other| other.grant.location.page() < entry.grant.location.page());
        self.pages += u64::from(entry.pages);
        self.entries.insert(index, entry);
        self.nonces.insert(index, entry.nonce);
        index
    }

    /// The entry whose pages hold `page`.
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
        entry
    }

    /// Forgets the entry whose pages hold `page`, because they were freed.
    pub(super) fn forget(&mut self, page: u64) {
        if let Some(index) = self.holding(page) {
            self.remove(index);
        }
    }

    /// Takes out an entry that expired by `now`.
    pub(super) fn take_expired(&mut self, now: Instant) -> Option<Provisional> {
        let index = self.entries.iter().position(|entry| entry.expires_at <= now)?;
        Some(self.remove(index))
    }
}
