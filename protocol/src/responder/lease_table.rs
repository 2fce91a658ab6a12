//! Which pages are leased, to which endpoint and until when, and how the last lease of a page
//! ended.

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "the numbers of these tests are small")]
mod tests;

use core::{ops::Range, time::Duration};

use bluebridge_wire::{LeaseEnd, NodeId, Space, header::LEASE_EPOCH_MAX};

use super::{
    config::Limits,
    sessions::RequesterId,
    shares::{Holder, Shares},
};
use crate::Timestamp;

/// A contended lease is reported to the switch only when it has run for this time, ...
const CONTENDED_AFTER: Duration = Duration::from_millis(2);

/// ... when at least this time remains, ...
const CONTENDED_LEFT: Duration = Duration::from_millis(5);

/// ... and at most once in this time.
const CONTENDED_INTERVAL: Duration = Duration::from_millis(50);

/// Bits of an epoch that count grants; the bits above are of the server's incarnation.
const EPOCH_COUNT_BITS: u32 = 40;

const NONE: u32 = u32::MAX;

/// The last lease of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lease {
    /// The page's number in the store.
    pub(super) page: u64,
    pub(super) owner: RequesterId,
    pub(super) epoch: u64,
    pub(super) granted_at: Timestamp,
    pub(super) expires_at: Timestamp,
    /// When a reply last reported it as contended; `None` if never.
    pub(super) contended_at: Option<Timestamp>,
    /// `None` while it runs, or if it expired and that was not noticed yet.
    end: Option<LeaseEnd>,
}

impl Lease {
    fn holds_at(&self, now: Timestamp) -> bool {
        self.end.is_none() && now < self.expires_at
    }

    /// Whole milliseconds until it ends.
    pub(super) fn remaining_ms(&self, now: Timestamp) -> u16 {
        u16::try_from((self.expires_at - now).as_millis()).unwrap_or(u16::MAX)
    }
}

/// Why a lease is not held.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Lost {
    pub(super) end: LeaseEnd,
    /// The current owner of the page, and its epoch.
    pub(super) to: Option<(NodeId, u64)>,
}

impl From<LeaseEnd> for Lost {
    fn from(end: LeaseEnd) -> Self {
        Self { end, to: None }
    }
}

/// Slots that one call searches for expired leases, so that requests without room in the table
/// cannot occupy the serving core.
const SWEEP_SLOTS: usize = 512;

/// Why a lease cannot be granted now.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum NoRoom {
    /// The requester's node has used its share.
    Node,
    /// The requester's space has used its share.
    Space,
    /// The table is full.
    Table,
}

#[derive(Clone, Copy)]
struct Slot {
    lease: Lease,
    /// Neighbours in the order in which leases ended; unused while it runs.
    older: u32,
    newer: u32,
}

/// A bounded table; a new lease replaces the one that ended longest ago.
pub(super) struct LeaseTable {
    slots: Vec<Slot>,
    vacant: Vec<u32>,
    /// Slots by their pages, linear probing; at most half full.
    index: Vec<u32>,
    oldest_ended: u32,
    newest_ended: u32,
    ended_count: usize,
    running_count: usize,
    /// The number of running leases by node and space.
    shares: Shares,
    last_epoch: u64,
    /// No running lease ends by time before this.
    expires_from: Timestamp,
    /// The next slot to search for expired leases.
    sweep_at: usize,
    /// The value of `expires_from` after all slots were searched.
    sweep_from: Timestamp,
    /// Pages whose lease began or ended since [`Self::take_change`] returned them; `None` if nobody asks. It never
    /// grows: a lease is only granted if its end has room too.
    changes: Option<Vec<u64>>,
}

/// Changes that are remembered per entry of the table: before they are taken, all leases that run at first can end, and
/// as many others can begin and end.
const CHANGES_PER_ENTRY: usize = 4;

impl LeaseTable {
    pub(super) fn new(limits: &Limits, spaces: &[Space], incarnation: u32) -> Self {
        let limit = u32::from(limits.lease_count);
        let index = (2 * usize::from(limits.lease_count)).next_power_of_two();
        let capacity = usize::from(limits.lease_count);
        let shares = Shares::new(capacity, spaces, limits.lease_shares(spaces.len()));
        Self {
            slots: Vec::with_capacity(capacity),
            vacant: (0..limit).rev().collect(),
            index: vec![NONE; index],
            oldest_ended: NONE,
            newest_ended: NONE,
            ended_count: 0,
            running_count: 0,
            shares,
            last_epoch: u64::from(incarnation & 0xff) << EPOCH_COUNT_BITS,
            expires_from: Timestamp::MAX,
            sweep_at: 0,
            sweep_from: Timestamp::MAX,
            changes: None,
        }
    }

    /// Remembers from now on which pages' leases began or ended, at first those that run; `None`: not any more.
    pub(super) fn track_changes(&mut self, limit: Option<u16>) {
        self.changes = limit.map(|limit| {
            let mut changes = Vec::with_capacity(CHANGES_PER_ENTRY * usize::from(limit));
            let leases = self.slots.iter().map(|slot| &slot.lease);
            changes.extend(leases.filter(|lease| lease.end.is_none()).map(|lease| lease.page));
            changes
        });
    }

    /// A page whose lease began or ended, and whether it is leased now; to be called until there is none.
    pub(super) fn take_change(&mut self) -> Option<(u64, bool)> {
        let page = self.changes.as_mut()?.pop()?;
        let is_running = |slot: usize| self.slots[slot].lease.end.is_none();
        Some((page, self.find(page).is_some_and(is_running)))
    }

    /// Whether [`Self::take_change`] returns any.
    pub(super) fn has_changes(&self) -> bool {
        self.changes.as_ref().is_some_and(|changes| !changes.is_empty())
    }

    fn note_change(&mut self, page: u64) {
        if let Some(changes) = &mut self.changes
            && changes.len() < changes.capacity()
        {
            changes.push(page);
        }
    }

    /// Whether `count` more leases can begin and all leases can end before the changes are taken.
    fn has_room_for_changes(&self, count: usize) -> bool {
        self.changes.as_ref().is_none_or(|changes| {
            changes.len() + self.running_count + 2 * count <= changes.capacity()
        })
    }

    /// Whether no page is leased: the first check of every access.
    pub(super) const fn is_idle(&self) -> bool {
        self.running_count == 0
    }

    /// Whether the table has no entry.
    pub(super) const fn is_empty(&self) -> bool {
        self.running_count == 0 && self.ended_count == 0
    }

    /// Leases that run, or expired and were not ended yet.
    pub(super) const fn running_count(&self) -> usize {
        self.running_count
    }

    /// The last epoch that was granted, or that grants began above.
    pub(super) const fn last_epoch(&self) -> u64 {
        self.last_epoch
    }

    /// The part of epochs that differs from the server's other processes, as far as it is that large.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "epochs have 8 bits above those that count grants"
    )]
    pub(super) const fn process(&self) -> u8 {
        (self.last_epoch >> EPOCH_COUNT_BITS) as u8
    }

    /// Grants have epochs above this one from now on.
    pub(super) const fn raise_epoch(&mut self, epoch: u64) {
        if epoch > self.last_epoch && epoch <= LEASE_EPOCH_MAX {
            self.last_epoch = epoch;
        }
    }

    /// Grants have epochs above all that another process can have granted, whose epochs are above this one: unless
    /// there are 2^40 of them, they have the same upper part. Above the last one there is none; then the epochs are those
    /// of the server's incarnation, so that at least the next processes do not have the same.
    pub(super) const fn begin_above(&mut self, floor: u64) {
        let next = ((floor >> EPOCH_COUNT_BITS) + 1) << EPOCH_COUNT_BITS;
        if next > self.last_epoch && next <= LEASE_EPOCH_MAX {
            self.last_epoch = next;
        }
    }

    /// The next epoch for a grant. It wraps after 2^48 grants, when the first ones are long over.
    pub(super) const fn next_epoch(&mut self) -> u64 {
        self.last_epoch = if self.last_epoch >= LEASE_EPOCH_MAX { 1 } else { self.last_epoch + 1 };
        self.last_epoch
    }

    /// The lease that a page is under.
    pub(super) fn holder(&self, now: Timestamp, page: u64) -> Option<&Lease> {
        if self.is_idle() {
            return None;
        }
        let lease = &self.slots[self.find(page)?].lease;
        lease.holds_at(now).then_some(lease)
    }

    /// A lease on one of the pages of a range; on the first leased page if the range is short.
    pub(super) fn holder_in(&self, now: Timestamp, pages: Range<u64>) -> Option<&Lease> {
        if self.is_idle() {
            return None;
        }
        let is_short = pages.end - pages.start <= self.slots.len() as u64;
        if is_short {
            return pages.into_iter().find_map(|page| self.holder(now, page));
        }
        let leases = self.slots.iter().map(|slot| &slot.lease);
        leases.filter(|lease| pages.contains(&lease.page)).find(|lease| lease.holds_at(now))
    }

    /// Whether `requester` holds a page under `epoch`.
    ///
    /// # Errors
    /// How that lease ended.
    pub(super) fn held(
        &self,
        now: Timestamp,
        page: u64,
        requester: &RequesterId,
        epoch: u64,
    ) -> Result<&Lease, Lost> {
        let Some(slot) = self.find(page) else { return Err(LeaseEnd::Unknown.into()) };
        let lease = &self.slots[slot].lease;
        if lease.epoch != epoch {
            // Epochs of a page only grow, so an older one may have been granted.
            if epoch == 0 || epoch > lease.epoch {
                return Err(LeaseEnd::Unknown.into());
            }
            let to = lease.holds_at(now).then_some((lease.owner.node, lease.epoch));
            return Err(Lost { end: LeaseEnd::LeasedAgain, to });
        }
        if !lease.owner.is_node_of(requester) {
            return Err(LeaseEnd::Unknown.into());
        }
        match lease.end {
            Some(end) => Err(end.into()),
            None if now >= lease.expires_at => Err(LeaseEnd::Expired.into()),
            None if lease.owner != *requester => Err(LeaseEnd::Unknown.into()),
            None => Ok(lease),
        }
    }

    /// Leases pages under one epoch; none of them may be leased.
    ///
    /// # Errors
    /// [`NoRoom`]; then nothing changed. [`Self::end_some_expired`] may free entries.
    pub(super) fn grant(
        &mut self,
        now: Timestamp,
        owner: RequesterId,
        pages: Range<u64>,
        expires_at: Timestamp,
    ) -> Result<u64, NoRoom> {
        self.admit(&owner, pages.clone())?;
        let epoch = self.next_epoch();
        let new = |page| Lease {
            page,
            owner,
            epoch,
            granted_at: now,
            expires_at,
            contended_at: None,
            end: None,
        };
        // Pages with an entry first, so that new entries replace none of theirs.
        for page in pages.clone() {
            if let Some(slot) = self.find(page) {
                self.end_slot(slot, LeaseEnd::Expired);
                self.unlink_ended(slot);
                self.start(slot, new(page));
            }
        }
        for page in pages {
            if self.find(page).is_none() {
                let slot = self.take_slot(new(page));
                self.insert(page, slot);
                self.start(slot, new(page));
            }
        }
        Ok(epoch)
    }

    fn admit(&self, owner: &RequesterId, pages: Range<u64>) -> Result<(), NoRoom> {
        let count = pages.clone().count();
        // Leases that expired and were not ended yet count; ending them may make room.
        if !self.shares.node_has_room(owner.holder(), count) {
            return Err(NoRoom::Node);
        }
        let known = pages.filter_map(|page| self.find(page));
        let (mut known_count, mut known_ended) = (0, 0);
        for slot in known {
            known_count += 1;
            known_ended += usize::from(self.slots[slot].lease.end.is_some());
        }
        let room = self.vacant.len() + self.ended_count - known_ended;
        if count - known_count > room || !self.has_room_for_changes(count) {
            return Err(NoRoom::Table);
        }
        if self.shares.space_has_room(owner.space, count) { Ok(()) } else { Err(NoRoom::Space) }
    }

    /// Sets a new deadline for the running lease of a page.
    pub(super) fn renew(&mut self, page: u64, expires_at: Timestamp) {
        if let Some(slot) = self.find(page) {
            self.slots[slot].lease.expires_at = expires_at;
            self.expect_end(expires_at);
        }
    }

    /// Ends the running lease of a page; returns whether it was ever reported as contended.
    pub(super) fn end(&mut self, page: u64, how: LeaseEnd) -> bool {
        let Some(slot) = self.find(page) else { return false };
        self.end_slot(slot, how);
        self.slots[slot].lease.contended_at.is_some()
    }

    /// Records that a request was refused because of a page's lease; returns whether to notify the
    /// switch.
    pub(super) fn contend(&mut self, now: Timestamp, page: u64) -> bool {
        let Some(slot) = self.find(page) else { return false };
        let lease = &mut self.slots[slot].lease;
        let is_due = lease.contended_at.is_none_or(|at| now - at >= CONTENDED_INTERVAL);
        let is_reported = is_due
            && now - lease.granted_at >= CONTENDED_AFTER
            && lease.expires_at - now >= CONTENDED_LEFT;
        if is_reported {
            lease.contended_at = Some(now);
        }
        is_reported
    }

    fn expect_end(&mut self, expires_at: Timestamp) {
        self.expires_from = self.expires_from.min(expires_at);
        self.sweep_from = self.sweep_from.min(expires_at);
    }

    /// Ends the leases that expired by `now`, and calls `ended` with their pages.
    pub(super) fn end_expired(&mut self, now: Timestamp, mut ended: impl FnMut(u64)) {
        self.sweep_at = 0;
        for _ in 0..self.slots.len().div_ceil(SWEEP_SLOTS) {
            self.end_some_expired(now, &mut ended);
        }
    }

    /// Ends the leases that expired by `now` in the next slots, and calls `ended` with their pages:
    /// repeated calls find all.
    pub(super) fn end_some_expired(&mut self, now: Timestamp, mut ended: impl FnMut(u64)) {
        if self.is_idle() || now < self.expires_from {
            return;
        }
        if self.sweep_at == 0 {
            self.sweep_from = Timestamp::MAX;
        }
        let end = (self.sweep_at + SWEEP_SLOTS).min(self.slots.len());
        for slot in self.sweep_at..end {
            let Lease { page, expires_at, end, .. } = self.slots[slot].lease;
            if end.is_some() {
                continue;
            }
            if expires_at <= now {
                self.end_slot(slot, LeaseEnd::Expired);
                ended(page);
            } else {
                self.sweep_from = self.sweep_from.min(expires_at);
            }
        }
        self.sweep_at = end;
        if end == self.slots.len() {
            // This includes leases that were granted or renewed since the first slot was searched.
            self.expires_from = self.sweep_from;
            self.sweep_at = 0;
        }
    }

    /// Ends a page's lease if it expired by `now`; returns whether it did.
    pub(super) fn end_if_expired(&mut self, now: Timestamp, page: u64) -> bool {
        let Some(slot) = self.find(page) else { return false };
        let lease = &self.slots[slot].lease;
        let is_over = lease.end.is_none() && lease.expires_at <= now;
        if is_over {
            self.end_slot(slot, LeaseEnd::Expired);
        }
        is_over
    }

    /// Ends the leases of older incarnations of the requester's node, and calls `ended` with their
    /// pages and how they ended: leases that expired by `now` ended by that.
    pub(super) fn end_superseded(
        &mut self,
        now: Timestamp,
        requester: &RequesterId,
        mut ended: impl FnMut(u64, LeaseEnd),
    ) {
        let mut left = self.shares.of_node(requester.holder());
        for slot in 0..self.slots.len() {
            if left == 0 {
                break;
            }
            let Lease { page, owner, end, expires_at, .. } = self.slots[slot].lease;
            if end.is_some() || !owner.is_node_of(requester) {
                continue;
            }
            left -= 1;
            let is_over = expires_at <= now;
            if is_over || owner.incarnation < requester.incarnation {
                let how = if is_over { LeaseEnd::Expired } else { LeaseEnd::Superseded };
                self.end_slot(slot, how);
                ended(page, how);
            }
        }
    }

    /// Ends the leases of a node on pages of a range, and calls `ended` with those that still ran.
    pub(super) fn end_withdrawn(
        &mut self,
        now: Timestamp,
        holder: Holder,
        pages: &Range<u64>,
        mut ended: impl FnMut(u64),
    ) {
        for slot in 0..self.slots.len() {
            let lease = &self.slots[slot].lease;
            let page = lease.page;
            let is_its = lease.owner.holder() == holder && pages.contains(&page);
            if is_its && lease.holds_at(now) {
                self.end_slot(slot, LeaseEnd::Withdrawn);
                ended(page);
            }
        }
    }

    /// Removes the entries of the pages of a range, because the pages were freed, zeroed or moved;
    /// calls `ended` with the pages whose leases ran.
    pub(super) fn forget(&mut self, pages: Range<u64>, mut ended: impl FnMut(u64)) {
        if self.is_empty() {
            return;
        }
        let is_short = pages.end - pages.start <= self.slots.len() as u64;
        if is_short {
            for page in pages {
                if let Some(slot) = self.find(page)
                    && self.forget_slot(slot)
                {
                    ended(page);
                }
            }
            return;
        }
        for slot in 0..self.slots.len() {
            let page = self.slots[slot].lease.page;
            // A vacant slot still contains a page, which then maps to no slot or to another.
            if pages.contains(&page) && self.find(page) == Some(slot) && self.forget_slot(slot) {
                ended(page);
            }
        }
    }

    /// Removes the entry in a slot; returns whether its lease ran.
    fn forget_slot(&mut self, slot: usize) -> bool {
        let has_run = self.slots[slot].lease.end.is_none();
        self.end_slot(slot, LeaseEnd::Unknown);
        self.unlink_ended(slot);
        self.remove(self.slots[slot].lease.page);
        self.vacant.push(narrow(slot));
        has_run
    }

    fn start(&mut self, slot: usize, lease: Lease) {
        self.slots[slot].lease = lease;
        self.expect_end(lease.expires_at);
        self.running_count += 1;
        self.shares.take(lease.owner.holder());
        self.note_change(lease.page);
    }

    /// Ends the lease in a slot if it runs.
    fn end_slot(&mut self, slot: usize, how: LeaseEnd) {
        let Lease { page, owner, end, .. } = self.slots[slot].lease;
        if end.is_some() {
            return;
        }
        self.note_change(page);
        self.slots[slot].lease.end = Some(how);
        self.running_count -= 1;
        self.shares.give_back(owner.holder());
        self.ended_count += 1;
        let newest = core::mem::replace(&mut self.newest_ended, narrow(slot));
        (self.slots[slot].older, self.slots[slot].newer) = (newest, NONE);
        match self.slots.get_mut(newest as usize) {
            Some(before) => before.newer = narrow(slot),
            None => self.oldest_ended = narrow(slot),
        }
    }

    fn unlink_ended(&mut self, slot: usize) {
        let Slot { older, newer, .. } = self.slots[slot];
        match self.slots.get_mut(older as usize) {
            Some(before) => before.newer = newer,
            None => self.oldest_ended = newer,
        }
        match self.slots.get_mut(newer as usize) {
            Some(behind) => behind.older = older,
            None => self.newest_ended = older,
        }
        self.ended_count -= 1;
    }

    /// A slot for a page that has none; room was checked.
    fn take_slot(&mut self, lease: Lease) -> usize {
        if let Some(slot) = self.vacant.pop() {
            let slot = slot as usize;
            if slot >= self.slots.len() {
                // The capacity was allocated at the start.
                self.slots.resize(slot + 1, Slot { lease, older: NONE, newer: NONE });
            }
            return slot;
        }
        let slot = self.oldest_ended as usize;
        self.unlink_ended(slot);
        self.remove(self.slots[slot].lease.page);
        slot
    }

    fn place(&self, page: u64) -> usize {
        // Fibonacci hashing (Knuth, volume 3, section 6.4): the upper bits are the mixed ones.
        let mixed = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        usize::try_from(mixed).unwrap_or(0) & (self.index.len() - 1)
    }

    fn find(&self, page: u64) -> Option<usize> {
        let mut place = self.place(page);
        loop {
            let slot = self.index[place];
            if slot == NONE {
                return None;
            }
            if self.slots[slot as usize].lease.page == page {
                return Some(slot as usize);
            }
            place = (place + 1) & (self.index.len() - 1);
        }
    }

    fn insert(&mut self, page: u64, slot: usize) {
        let mut place = self.place(page);
        while self.index[place] != NONE {
            place = (place + 1) & (self.index.len() - 1);
        }
        self.index[place] = narrow(slot);
        self.slots[slot].lease.page = page;
    }

    fn remove(&mut self, page: u64) {
        let mask = self.index.len() - 1;
        let mut hole = self.place(page);
        while self.index[hole] != NONE && self.slots[self.index[hole] as usize].lease.page != page {
            hole = (hole + 1) & mask;
        }
        // Entries that probed past the hole move up, so that no search ends early.
        let mut place = hole;
        loop {
            self.index[hole] = NONE;
            loop {
                place = (place + 1) & mask;
                let slot = self.index[place];
                if slot == NONE {
                    return;
                }
                let wanted = self.place(self.slots[slot as usize].lease.page);
                if (place.wrapping_sub(wanted) & mask) >= (place.wrapping_sub(hole) & mask) {
                    self.index[hole] = slot;
                    hole = place;
                    break;
                }
            }
        }
    }
}

/// A slot's number; there are at most 65,535.
fn narrow(slot: usize) -> u32 {
    u32::try_from(slot).unwrap_or(NONE)
}
