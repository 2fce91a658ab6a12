//! Pages that are assembled from pieces, in a fixed pool of buffers.

use core::time::Duration;

use bluebridge_wire::{
    Space,
    address::{LINE_PAGES, PAGE_BYTES},
};

use super::{
    config::Limits,
    cut::{PagePart, PlacedPiece},
    shares::{Holder, Shares},
};
use crate::Timestamp;

const NONE: u16 = u16::MAX;

/// The request that a train belongs to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct TrainOwner {
    pub(super) holder: Holder,
    pub(super) session: u16,
    pub(super) sequence: u64,
}

/// A train with at least one buffer.
#[derive(Clone, Copy)]
struct Train {
    owner: TrainOwner,
    /// When its last new piece was stored.
    stored_at: Timestamp,
    /// Pieces in the buffers.
    arrived: u32,
    buffers: [u16; LINE_PAGES],
    /// Neighbours in the order of `stored_at`; unused while the train is vacant.
    older: u16,
    newer: u16,
}

/// The result of storing a piece.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Stored {
    /// All pieces of the page are stored.
    Complete,
    /// The piece was stored before.
    Duplicate,
    /// More pieces of the page are missing.
    More,
    /// No buffer is available.
    No(NoBuffer),
}

/// Why a page of a train gets no buffer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum NoBuffer {
    /// Its node has used its share.
    Node,
    /// All are in use.
    Pool,
    /// Its space has used its share.
    Space,
}

/// A train whose buffers may be reclaimed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct IdleTrain {
    pub(super) train: u16,
    pub(super) owner: TrainOwner,
    pub(super) stored_at: Timestamp,
}

/// A fixed number of page buffers, and the trains that use them.
///
/// Each train has at least one buffer, so there are never more trains than buffers.
pub(super) struct TrainPool {
    trains: Vec<Train>,
    vacant: Vec<u16>,
    /// The ends of the list of trains in the order of their last new pieces.
    oldest: u16,
    newest: u16,
    buffers: Vec<u8>,
    free_buffers: Vec<u16>,
    /// The number of used buffers by node and space.
    shares: Shares,
}

impl TrainPool {
    pub(super) fn new(limits: &Limits, spaces: &[Space]) -> Self {
        let count = limits.buffer_pages;
        let empty = Train {
            owner: TrainOwner { holder: Holder::default(), session: 0, sequence: 0 },
            stored_at: Timestamp::default(),
            arrived: 0,
            buffers: [NONE; LINE_PAGES],
            older: NONE,
            newer: NONE,
        };
        let capacity = usize::from(count);
        Self {
            trains: vec![empty; capacity],
            vacant: (0..count).rev().collect(),
            oldest: NONE,
            newest: NONE,
            buffers: vec![0; capacity * PAGE_BYTES],
            free_buffers: (0..count).rev().collect(),
            shares: Shares::new(capacity, spaces, limits.buffer_shares(spaces.len())),
        }
    }

    /// The pieces that a train holds.
    pub(super) fn arrived(&self, train: u16) -> u32 {
        self.trains.get(usize::from(train)).map_or(0, |train| train.arrived)
    }

    /// Stores a piece, which does not cross the end of its page, in a train or, if that is `None`,
    /// in a new one; returns the train. Only a stored piece keeps a train active: a repeated one
    /// must not keep the buffers from others.
    pub(super) fn store(
        &mut self,
        now: Timestamp,
        train: Option<u16>,
        owner: TrainOwner,
        PlacedPiece { part, piece }: PlacedPiece,
        data: &[u8],
    ) -> (Option<u16>, Stored) {
        if train.is_some_and(|train| self.arrived(train) & piece.bit != 0) {
            return (train, Stored::Duplicate);
        }
        let known = train.map_or(NONE, |train| self.trains[usize::from(train)].buffers[piece.page]);
        let buffer = match known {
            NONE => match self.take_buffer(owner.holder) {
                Ok(buffer) => buffer,
                Err(why) => return (train, Stored::No(why)),
            },
            buffer => buffer,
        };
        let Some(number) = train.or_else(|| self.begin(owner)) else {
            debug_assert!(false, "a train without a buffer is in use");
            self.give_buffer_back(owner.holder, buffer);
            return (None, Stored::No(NoBuffer::Pool));
        };
        let start = usize::from(buffer) * PAGE_BYTES + piece.start;
        self.buffers[start..start + data.len()].copy_from_slice(data);
        self.unlink(number);
        self.link_newest(number);
        let train = &mut self.trains[usize::from(number)];
        train.stored_at = now;
        train.buffers[piece.page] = buffer;
        train.arrived |= piece.bit;
        let is_complete = train.arrived & part.bits == part.bits;
        (Some(number), if is_complete { Stored::Complete } else { Stored::More })
    }

    /// The bytes of a page's part; all its pieces were stored.
    pub(super) fn part(&self, train: u16, page: usize, part: PagePart) -> &[u8] {
        let buffer = usize::from(self.trains[usize::from(train)].buffers[page]);
        let start = buffer * PAGE_BYTES + part.start;
        &self.buffers[start..start + part.bytes]
    }

    /// Frees the buffer of one page; returns whether the train ended with its last buffer.
    pub(super) fn release_page(&mut self, train: u16, page: usize, part: PagePart) -> bool {
        let slot = &mut self.trains[usize::from(train)];
        slot.arrived &= !part.bits;
        let holder = slot.owner.holder;
        let buffer = core::mem::replace(&mut slot.buffers[page], NONE);
        if buffer != NONE {
            self.give_buffer_back(holder, buffer);
        }
        let is_over = self.trains[usize::from(train)].buffers.iter().all(|&buffer| buffer == NONE);
        if is_over {
            self.end(train);
        }
        is_over
    }

    /// Ends a train and frees its buffers.
    pub(super) fn end(&mut self, train: u16) {
        let slot = &mut self.trains[usize::from(train)];
        let holder = slot.owner.holder;
        slot.arrived = 0;
        let buffers = core::mem::replace(&mut slot.buffers, [NONE; LINE_PAGES]);
        for buffer in buffers.into_iter().filter(|&buffer| buffer != NONE) {
            self.give_buffer_back(holder, buffer);
        }
        self.unlink(train);
        self.vacant.push(train);
    }

    /// The train whose last new piece is oldest.
    pub(super) fn oldest(&self) -> Option<IdleTrain> {
        self.idle(self.oldest)
    }

    /// The train to reclaim buffers from for a page of `owner` that got none: idle for at least
    /// `idle_time`, and not the owner itself. A node or space that has used its share reclaims its
    /// own.
    pub(super) fn oldest_idle(
        &self,
        now: Timestamp,
        idle_time: Duration,
        owner: TrainOwner,
        why: NoBuffer,
    ) -> Option<IdleTrain> {
        let mut next = self.idle(self.oldest);
        while let Some(idle) = next.filter(|idle| now - idle.stored_at >= idle_time) {
            let is_eligible = match why {
                NoBuffer::Node => idle.owner.holder == owner.holder,
                NoBuffer::Pool => true,
                NoBuffer::Space => idle.owner.holder.0 == owner.holder.0,
            };
            if is_eligible && idle.owner != owner {
                return Some(idle);
            }
            next = self.idle(self.trains[usize::from(idle.train)].newer);
        }
        None
    }

    fn idle(&self, train: u16) -> Option<IdleTrain> {
        let Train { owner, stored_at, .. } = *self.trains.get(usize::from(train))?;
        Some(IdleTrain { train, owner, stored_at })
    }

    fn take_buffer(&mut self, holder: Holder) -> Result<u16, NoBuffer> {
        if !self.shares.node_has_room(holder, 1) {
            return Err(NoBuffer::Node);
        }
        if !self.shares.space_has_room(holder.0, 1) {
            return Err(NoBuffer::Space);
        }
        let buffer = self.free_buffers.pop().ok_or(NoBuffer::Pool)?;
        self.shares.take(holder);
        Ok(buffer)
    }

    fn give_buffer_back(&mut self, holder: Holder, buffer: u16) {
        self.free_buffers.push(buffer);
        self.shares.give_back(holder);
    }

    /// Starts a train without buffers.
    fn begin(&mut self, owner: TrainOwner) -> Option<u16> {
        let number = self.vacant.pop()?;
        let train = &mut self.trains[usize::from(number)];
        train.owner = owner;
        self.link_newest(number);
        Some(number)
    }

    fn unlink(&mut self, train: u16) {
        let Train { older, newer, .. } = self.trains[usize::from(train)];
        match self.trains.get_mut(usize::from(older)) {
            Some(before) => before.newer = newer,
            None => self.oldest = newer,
        }
        match self.trains.get_mut(usize::from(newer)) {
            Some(behind) => behind.older = older,
            None => self.newest = older,
        }
    }

    fn link_newest(&mut self, train: u16) {
        let before = core::mem::replace(&mut self.newest, train);
        match self.trains.get_mut(usize::from(before)) {
            Some(before) => before.newer = train,
            None => self.oldest = train,
        }
        let slot = &mut self.trains[usize::from(train)];
        (slot.older, slot.newer) = (before, NONE);
    }

    #[cfg(test)]
    pub(super) fn free_buffer_count(&self) -> usize {
        let count = self.free_buffers.len();
        let used = self.buffers.len() / PAGE_BYTES - count;
        assert_eq!(self.shares.totals(), (used, used), "the shares are of the buffers in use");
        count
    }
}
