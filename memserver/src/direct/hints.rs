//! Where the lines of other servers are, for the program.
//!
//! Such a line has a place in its shard, with any number. The program finds the place by a hint, in a table of the kernel
//! that ends with the process, and then compares the place's own name. So a hint that is missing or wrong costs no more than
//! a READ that the process answers. A hint stays until its place gets another line, which saves two calls of the system for
//! each line that leaves.

use std::io;

use aya::maps::{HashMap, Map, MapData};
use bluebridge_wire::{
    NodeId,
    address::{LINE_PAGES, PAGE_SHIFT},
};
use rustix::fd::OwnedFd;

use super::map::{cause, create_table};

/// Bits of a location that are no generation.
const LOCATION_BITS: u32 = 48;

/// By line: its place.
type Places = HashMap<MapData, u64, u32>;

/// The table, and what a shard wrote to it.
#[derive(Debug)]
pub(crate) struct Hints {
    places: Places,
    map: OwnedFd,
    /// By place: the last line that it had, or [`NO_LINE`]. No table has more hints than places.
    lines: Vec<u64>,
}

/// No line has this key, because no node has the number 0.
const NO_LINE: u64 = 0;

/// A line of another server: its home, and its first page there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForeignLine {
    pub(crate) home: NodeId,
    pub(crate) first_page: u64,
}

impl ForeignLine {
    /// As `find_place` of the program has it.
    fn key(self) -> u64 {
        let line = self.first_page / LINE_PAGES as u64;
        u64::from(self.home.0) << (LOCATION_BITS - PAGE_SHIFT) | line
    }
}

impl Hints {
    /// An empty table of an arena with room for so many lines. No shard has a place in this one.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn create(id: &[u8; 16], lines: usize) -> io::Result<Self> {
        let room = u32::try_from(lines.max(1)).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Self::of(create_table::<u64, u32>(id, room)?, 0)
    }

    fn of(map: OwnedFd, place_count: usize) -> io::Result<Self> {
        let data = MapData::from_fd(map.try_clone()?).map_err(cause)?;
        let places = Map::from_map_data(data).and_then(Places::try_from).map_err(cause)?;
        Ok(Self { places, map, lines: vec![NO_LINE; place_count] })
    }

    /// The same table, for a shard with so many places.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn share(&self, place_count: usize) -> io::Result<Self> {
        Self::of(self.map.try_clone()?, place_count)
    }

    pub(super) const fn map(&self) -> &OwnedFd {
        &self.map
    }

    /// A line is at a place now, instead of another one.
    pub(crate) fn set(&mut self, line: ForeignLine, place: u32) {
        let key = line.key();
        if let Some(last) = self.lines.get_mut(place as usize) {
            let before = core::mem::replace(last, key);
            if ![NO_LINE, key].contains(&before) {
                self.forget(before, place);
            }
        }
        if let Err(error) = self.places.insert(key, place, 0) {
            tracing::debug!(%error, ?line, "this process answers the READs of a line");
        }
    }

    /// A line is not at a place any more. It may be at another one: it may have come back, and lines of lost contents have
    /// the names of later ones.
    fn forget(&mut self, key: u64, place: u32) {
        if self.places.get(&key, 0).is_ok_and(|known| known == place)
            && let Err(error) = self.places.remove(&key)
        {
            tracing::debug!(%error, key, "a hint of a line that is not here stays");
        }
    }
}
