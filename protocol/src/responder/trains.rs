//! Pages that are being put together from pieces, in a fixed pool of buffers.

use core::time::Duration;

use bluebridge_wire::address::{LINE_PAGES, PAGE_BYTES};

use super::cut::{PagePart, Piece};
use crate::Instant;

const NO_BUFFER: u16 = u16::MAX;

/// Whose pieces a train holds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct TrainOwner {
    pub(super) session: u16,
    pub(super) sequence: u64,
}

#[derive(Clone, Copy)]
struct Train {
    owner: TrainOwner,
    heard_at: Instant,
    /// Pieces in the buffers.
    arrived: u32,
    buffers: [u16; LINE_PAGES],
    in_use: bool,
}

/// What storing a piece came to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Stored {
    /// All pieces of the page are there.
    Complete,
    /// The piece was there already.
    Duplicate,
    /// More pieces of the page are missing.
    More,
    /// No buffer is free.
    NoBuffer,
}

/// A fixed number of page buffers, and the trains that use them.
pub(super) struct TrainPool {
    trains: Vec<Train>,
    vacant: Vec<u16>,
    buffers: Vec<u8>,
    free_buffers: Vec<u16>,
}

impl TrainPool {
    pub(super) fn new(buffer_pages: u16) -> Self {
        let empty = Train {
            owner: TrainOwner { session: 0, sequence: 0 },
            heard_at: Instant::default(),
            arrived: 0,
            buffers: [NO_BUFFER; LINE_PAGES],
            in_use: false,
        };
        Self {
            trains: vec![empty; usize::from(buffer_pages)],
            vacant: (0..buffer_pages).rev().collect(),
            buffers: vec![0; usize::from(buffer_pages) * PAGE_BYTES],
            free_buffers: (0..buffer_pages).rev().collect(),
        }
    }

    /// Begins a train; `None` if all are in use.
    pub(super) fn begin(&mut self, now: Instant, owner: TrainOwner) -> Option<u16> {
        let train = self.vacant.pop()?;
        let buffers = [NO_BUFFER; LINE_PAGES];
        self.trains[usize::from(train)] =
            Train { owner, heard_at: now, arrived: 0, buffers, in_use: true };
        Some(train)
    }

    /// The pieces that a train holds.
    pub(super) fn arrived(&self, train: u16) -> u32 {
        self.trains.get(usize::from(train)).map_or(0, |train| train.arrived)
    }

    /// Stores a piece, which is not larger than a page from where it begins.
    pub(super) fn store(
        &mut self,
        now: Instant,
        train: u16,
        (part, piece): (PagePart, Piece),
        data: &[u8],
    ) -> Stored {
        let train = &mut self.trains[usize::from(train)];
        train.heard_at = now;
        if train.arrived & piece.bit != 0 {
            return Stored::Duplicate;
        }
        if train.buffers[piece.page] == NO_BUFFER {
            let Some(buffer) = self.free_buffers.pop() else { return Stored::NoBuffer };
            train.buffers[piece.page] = buffer;
        }
        let start = usize::from(train.buffers[piece.page]) * PAGE_BYTES + piece.start;
        self.buffers[start..start + data.len()].copy_from_slice(data);
        train.arrived |= piece.bit;
        if train.arrived & part.bits == part.bits { Stored::Complete } else { Stored::More }
    }

    /// The bytes of a page's part; all its pieces were stored.
    pub(super) fn part(&self, train: u16, page: usize, part: PagePart) -> &[u8] {
        let buffer = usize::from(self.trains[usize::from(train)].buffers[page]);
        let start = buffer * PAGE_BYTES + part.start;
        &self.buffers[start..start + part.bytes]
    }

    /// Gives up the pieces of one page.
    pub(super) fn release_page(&mut self, train: u16, page: usize, part: PagePart) {
        let train = &mut self.trains[usize::from(train)];
        train.arrived &= !part.bits;
        let buffer = core::mem::replace(&mut train.buffers[page], NO_BUFFER);
        if buffer != NO_BUFFER {
            self.free_buffers.push(buffer);
        }
    }

    /// Ends a train and gives its buffers up.
    pub(super) fn end(&mut self, train: u16) {
        let slot = &mut self.trains[usize::from(train)];
        debug_assert!(slot.in_use, "a train ends once");
        slot.in_use = false;
        slot.arrived = 0;
        for buffer in &mut slot.buffers {
            let buffer = core::mem::replace(buffer, NO_BUFFER);
            if buffer != NO_BUFFER {
                self.free_buffers.push(buffer);
            }
        }
        self.vacant.push(train);
    }

    /// The train that was silent longest, with its owner and when it was heard.
    pub(super) fn oldest(&self) -> Option<(u16, TrainOwner, Instant)> {
        (0..)
            .zip(&self.trains)
            .filter(|(_, train)| train.in_use)
            .map(|(number, train)| (number, train.owner, train.heard_at))
            .min_by_key(|&(_, _, heard_at)| heard_at)
    }

    /// The train to take buffers from: silent for at least `silence`, and not `except`.
    pub(super) fn oldest_silent(
        &self,
        now: Instant,
        silence: Duration,
        except: TrainOwner,
    ) -> Option<(u16, TrainOwner)> {
        let (number, owner, heard_at) = self.oldest()?;
        (now - heard_at >= silence && owner != except).then_some((number, owner))
    }

    #[cfg(test)]
    pub(super) fn free_buffer_count(&self) -> usize {
        self.free_buffers.len()
    }
}
