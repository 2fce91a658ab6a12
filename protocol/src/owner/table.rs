//! The pages that are held: a table of fixed size, and buffers for the contents of some pages.

use core::ops::Range;

use bluebridge_wire::{
    NodeId, Pointer, Tag,
    address::{PAGE_BYTES, PAGE_SHIFT},
};

use super::Policy;
use crate::Timestamp;

/// A page of a space.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Page {
    node: NodeId,
    tag: Tag,
    /// The location without the byte offset in the page.
    number: u64,
}

impl Page {
    pub(super) const fn of(pointer: Pointer) -> Self {
        let number = pointer.location.bits() >> PAGE_SHIFT;
        Self { node: pointer.node, tag: pointer.tag, number }
    }

    const fn hash(self) -> u64 {
        let key = self.number ^ ((self.node.0 as u64) << 48) ^ ((self.tag.0 as u64) << 40);
        key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32
    }
}

/// The part of a page whose last committed contents are kept.
#[derive(Clone, Copy, Debug)]
struct Contents {
    slot: u16,
    start: u16,
    end: u16,
}

/// A lease on a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    page: Page,
    pub(super) epoch: u64,
    pub(super) expires_at: Timestamp,
    pub(super) policy: Policy,
    contents: Option<Contents>,
}

/// Open addressing with linear probing, with at least twice as many places as leases.
#[derive(Debug)]
pub(super) struct Table {
    places: Box<[Option<Held>]>,
    count: usize,
    limit: usize,
    contents: Box<[u8]>,
    free_slots: Vec<u16>,
}

impl Table {
    pub(super) fn new(lease_count: u16, contents_count: u16) -> Self {
        let limit = usize::from(lease_count.max(1));
        Self {
            places: vec![None; (limit * 2).next_power_of_two()].into_boxed_slice(),
            count: 0,
            limit,
            contents: vec![0; usize::from(contents_count) * PAGE_BYTES].into_boxed_slice(),
            free_slots: (0..contents_count).rev().collect(),
        }
    }

    pub(super) const fn count(&self) -> usize {
        self.count
    }

    pub(super) const fn is_full(&self) -> bool {
        self.count >= self.limit
    }

    pub(super) fn find(&self, page: Page) -> Option<&Held> {
        self.places.get(self.place_of(page)?)?.as_ref()
    }

    /// Records a lease, and replaces an earlier one on the same page; false if there is no room.
    pub(super) fn hold(
        &mut self,
        page: Page,
        epoch: u64,
        expires_at: Timestamp,
        policy: Policy,
    ) -> bool {
        if let Some(place) = self.place_of(page)
            && let Some(Some(held)) = self.places.get_mut(place)
        {
            let dropped = if held.epoch == epoch { None } else { held.contents.take() };
            (held.epoch, held.expires_at, held.policy) = (epoch, expires_at, policy);
            self.free_slots.extend(dropped.map(|contents| contents.slot));
            return true;
        }
        if self.is_full() {
            return false;
        }
        let mut place = self.first_place(page);
        while self.places[place].is_some() {
            place = self.next_place(place);
        }
        self.places[place] = Some(Held { page, epoch, expires_at, policy, contents: None });
        self.count += 1;
        true
    }

    /// Keeps the contents of a part of a page that is held; false if there is no room for them.
    pub(super) fn keep(&mut self, page: Page, start: usize, bytes: &[u8]) -> bool {
        let Some(place) = self.place_of(page) else { return false };
        let Some(Some(held)) = self.places.get_mut(place) else { return false };
        let part = u16::try_from(start).ok().zip(u16::try_from(start + bytes.len()).ok());
        let Some((start, end)) = part.filter(|(_, end)| usize::from(*end) <= PAGE_BYTES) else {
            return false;
        };
        let known = held.contents.map(|contents| contents.slot);
        let Some(slot) = known.or_else(|| self.free_slots.pop()) else { return false };
        held.contents = Some(Contents { slot, start, end });
        let base = usize::from(slot) * PAGE_BYTES;
        self.contents[base + usize::from(start)..base + usize::from(end)].copy_from_slice(bytes);
        true
    }

    /// The kept contents of a range of a page under an epoch; `None` if they are not kept.
    pub(super) fn contents(&self, page: Page, epoch: u64, range: Range<usize>) -> Option<&[u8]> {
        let held = self.find(page).filter(|held| held.epoch == epoch)?;
        let known = held.contents?;
        let inside = range.start >= usize::from(known.start) && range.end <= usize::from(known.end);
        let base = usize::from(known.slot) * PAGE_BYTES;
        if inside { self.contents.get(base + range.start..base + range.end) } else { None }
    }

    /// Removes a page.
    pub(super) fn remove(&mut self, page: Page) {
        let Some(mut hole) = self.place_of(page) else { return };
        if let Some(held) = self.places[hole].take() {
            self.free_slots.extend(held.contents.map(|contents| contents.slot));
            self.count -= 1;
        }
        // Entries that probed past the hole move into it.
        let mut place = self.next_place(hole);
        while let Some(held) = self.places[place] {
            let first = self.first_place(held.page);
            if self.distance(first, hole) < self.distance(first, place) {
                self.places[hole] = self.places[place].take();
                hole = place;
            }
            place = self.next_place(place);
        }
    }

    /// The first place from `from` on, and the page in it, whose lease ended by `now`.
    pub(super) fn expired(&self, now: Timestamp, from: usize) -> Option<(usize, Page)> {
        let mut places = self.places.iter().enumerate().skip(from);
        places.find_map(|(place, held)| {
            held.filter(|held| held.expires_at <= now).map(|held| (place, held.page))
        })
    }

    fn place_of(&self, page: Page) -> Option<usize> {
        let mut place = self.first_place(page);
        while let Some(held) = &self.places[place] {
            if held.page == page {
                return Some(place);
            }
            place = self.next_place(place);
        }
        None
    }

    #[allow(clippy::cast_possible_truncation, reason = "32 bits")]
    const fn first_place(&self, page: Page) -> usize {
        page.hash() as usize & (self.places.len() - 1)
    }

    const fn next_place(&self, place: usize) -> usize {
        (place + 1) & (self.places.len() - 1)
    }

    const fn distance(&self, from: usize, to: usize) -> usize {
        to.wrapping_sub(from) & (self.places.len() - 1)
    }
}
