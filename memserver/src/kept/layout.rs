//! Where in an arena's file everything is.
//!
//! An arena begins with a page of its own, the [`Header`]. Then come the counters of direct readers,
//! and the shards' redo records, worn colours, fences, lines, page states, creators and what they share with
//! direct readers, shard by shard, and at the end the pages of all shards. Each part begins at a page.
//!
//! In an arena that the kernel reads, each page is a value of a BPF map, and the header is in a file of
//! its own.

use core::{mem::offset_of, ops::Range};
use std::sync::Arc;

use bluebridge_bpf::fs::{
    ARENA_BACKING_AT, ARENA_ID_AT, ARENA_IN_MAP, ARENA_INODE_AT, ARENA_MAGIC, ARENA_STATE_AT,
    ARENA_STATE_MAX, ARENA_VERSION, ARENA_VERSION_AT,
};
use bluebridge_wire::{
    ArenaGeneration, NodeId, Space,
    address::{LINE_BYTES, PAGE_BYTES},
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{
    CreatorRecord, KeptShard, PageRecord, ShardMemory,
    lines::{ALLOWANCES, AllowanceRecord, Floors, LineEntry, LineTables},
    redo,
};
use crate::{
    direct::{Counters, PROCESSORS, Places as DirectPlaces, SESSIONS, SharedPart},
    memory::{self, Memory, Part, Table, Windows},
    sizes::{SHARD_BYTES_MAX, Sizes},
};

/// The first bytes of every arena's file.
pub(crate) const MAGIC: [u8; 8] = ARENA_MAGIC;

/// The version of this layout: it changes with every change of it.
pub(crate) const VERSION: u32 = ARENA_VERSION;

/// The most spaces of a server with kept memory.
pub(crate) const SPACES_MAX: usize = 64;

/// Node numbers.
const NODES: usize = u16::MAX as usize + 1;
/// How many fences are looked at together.
const FENCES_AT_ONCE: usize = 64;

/// The file is being made.
pub(crate) const STATE_NEW: u32 = 0;
/// It holds nothing yet.
pub(crate) const STATE_EMPTY: u32 = 1;
/// It holds the contents of the node and generation that it names.
pub(crate) const STATE_FULL: u32 = 2;

/// Everything is in the file.
pub(crate) const IN_FILE: u32 = 0;
/// Everything but the header is in a map.
pub(crate) const IN_MAP: u32 = ARENA_IN_MAP;

/// The first page of a file.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(crate) struct Header {
    pub(crate) magic: [u8; 8],
    pub(crate) version: u32,
    pub(crate) state: u32,
    /// Bytes of the pages of one shard.
    pub(crate) shard_bytes: u64,
    pub(crate) shard_count: u16,
    pub(crate) space_count: u16,
    /// The node whose contents it holds.
    pub(crate) node: u16,
    /// The first generation of the contents.
    pub(crate) generation: u16,
    /// The token of the node.
    pub(crate) token: [u8; 16],
    /// The process that uses it, or used it last.
    pub(crate) process: u32,
    /// [`IN_FILE`] or [`IN_MAP`].
    pub(crate) backing: u32,
    /// No other arena has it; the map's name, and the same in the map.
    pub(crate) id: [u8; 16],
    /// The inode number of the file: a copy of the file names the same map, but does not have its lock.
    pub(crate) inode: u64,
    pub(crate) spaces: [u16; SPACES_MAX],
}

impl Header {
    /// What cannot be in a header of this version; `None` if all can.
    pub(crate) fn damage(&self) -> Option<&'static str> {
        if self.magic != MAGIC {
            return Some("its first bytes are damaged");
        }
        let is_of_pages =
            self.shard_bytes != 0 && self.shard_bytes.is_multiple_of(PAGE_BYTES as u64);
        let is_small = self.shard_bytes <= SHARD_BYTES_MAX;
        if !(1..=256).contains(&self.shard_count) || !is_of_pages || !is_small {
            return Some("its number or size of shards cannot be");
        }
        if usize::from(self.space_count) > SPACES_MAX {
            return Some("its number of spaces cannot be");
        }
        let is_known = matches!(self.state, STATE_NEW | STATE_EMPTY | STATE_FULL)
            && matches!(self.backing, IN_FILE | IN_MAP);
        if !is_known {
            return Some("its state is unknown");
        }
        let has_holder =
            self.state != STATE_FULL || ArenaGeneration::new(self.generation).is_some();
        if has_holder { None } else { Some("its generation is none") }
    }

    /// Whether it is that of the file with this inode number, although its first bytes are damaged: no other file has
    /// that number and this version in these places.
    pub(crate) const fn is_of(&self, inode: u64) -> bool {
        self.version == VERSION && self.inode == inode
    }
}

const _: () = assert!(size_of::<Header>() <= PAGE_BYTES);
const _: () = assert!(offset_of!(Header, version) == ARENA_VERSION_AT);
const _: () = assert!(offset_of!(Header, state) == ARENA_STATE_AT && STATE_FULL == ARENA_STATE_MAX);
const _: () = assert!(offset_of!(Header, backing) == ARENA_BACKING_AT);
const _: () = assert!(offset_of!(Header, id) == ARENA_ID_AT);
const _: () = assert!(offset_of!(Header, inode) == ARENA_INODE_AT);

/// The sizes from which everything follows.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Layout {
    pub(crate) shard_bytes: usize,
    pub(crate) shard_count: u16,
    pub(crate) spaces: Vec<Space>,
}

/// The parts of one shard.
struct ShardRanges {
    redo_head: Range<usize>,
    redo_data: Range<usize>,
    worn: Range<usize>,
    fences: Range<usize>,
    floors: Range<usize>,
    allowances: Range<usize>,
    frames: Range<usize>,
    lines: Range<usize>,
    states: Range<usize>,
    creators: Range<usize>,
    shared: Range<usize>,
}

/// Hands out ranges one after the other, each beginning at a page.
struct Cursor(usize);

impl Cursor {
    fn take(&mut self, bytes: usize) -> Range<usize> {
        let start = self.0;
        self.0 = (start + bytes).next_multiple_of(PAGE_BYTES);
        start..start + bytes
    }
}

impl Layout {
    /// That of a file whose header is not damaged.
    pub(crate) fn of(header: &Header) -> Self {
        let Header { shard_bytes, shard_count, space_count, spaces, .. } = header;
        let spaces = spaces.iter().take((*space_count).into());
        Self {
            shard_bytes: usize::try_from(*shard_bytes).unwrap_or(usize::MAX),
            shard_count: *shard_count,
            spaces: spaces.copied().map(Space).collect(),
        }
    }

    fn sizes(&self) -> Sizes {
        Sizes::of(self.shard_bytes)
    }

    fn shard(&self, cursor: &mut Cursor) -> ShardRanges {
        let (sizes, spaces) = (self.sizes(), self.spaces.len());
        ShardRanges {
            redo_head: cursor.take(redo::RECORD_BYTES - LINE_BYTES),
            redo_data: cursor.take(LINE_BYTES),
            worn: cursor.take(spaces * size_of::<u64>()),
            fences: cursor.take(spaces * NODES * size_of::<u32>()),
            floors: cursor.take(size_of::<Floors>()),
            allowances: cursor.take(ALLOWANCES * size_of::<AllowanceRecord>()),
            frames: cursor.take(sizes.lines() * size_of::<u32>()),
            lines: cursor.take(sizes.lines() * size_of::<LineEntry>()),
            states: cursor.take(sizes.pages() * size_of::<PageRecord>()),
            creators: cursor.take(sizes.pages() * size_of::<CreatorRecord>()),
            shared: cursor.take(SharedPart::BYTES),
        }
    }

    /// Where everything behind the header is.
    fn ranges(&self) -> Ranges {
        let mut cursor = Cursor(PAGE_BYTES);
        let counters = cursor.take(Counters::BYTES);
        let shards: Vec<_> = (0..self.shard_count).map(|_| self.shard(&mut cursor)).collect();
        let pages = (0..self.shard_count).map(|_| cursor.take(self.shard_bytes)).collect();
        Ranges { counters, shards, pages, end: cursor.0 }
    }

    /// What the program in the kernel must know of it; each page of the arena is a value of a map.
    pub(crate) fn direct_places(&self) -> DirectPlaces {
        let Ranges { counters, shards, pages, .. } = self.ranges();
        let value = |range: Option<&Range<usize>>| {
            range.map_or(0, |range| u32::try_from(range.start / PAGE_BYTES).unwrap_or(u32::MAX))
        };
        let states: Vec<_> = shards.iter().map(|shard| value(Some(&shard.states))).collect();
        let first = states.first().copied().unwrap_or(0);
        DirectPlaces {
            states: first,
            lines: value(shards.first().map(|shard| &shard.lines)),
            frames: value(shards.first().map(|shard| &shard.frames)),
            shared: value(shards.first().map(|shard| &shard.shared)),
            pages: value(pages.first()),
            counters: value(Some(&counters)),
            // All shards have the same parts.
            stride: states.get(1).map_or(0, |second| second - first),
            // Pages whose bytes have the same number. All others are refused to direct readers.
            shard_pages: u32::try_from(self.sizes().memory_pages).unwrap_or(u32::MAX),
            shard_count: self.shard_count.into(),
            session_count: SESSIONS,
            processors: PROCESSORS,
            ..DirectPlaces::default()
        }
    }

    /// Lines of other servers that all shards together may have.
    pub(crate) fn adopted_lines(&self) -> usize {
        self.sizes().adopted_lines * usize::from(self.shard_count)
    }

    /// Bytes of the whole file.
    pub(crate) fn file_bytes(&self) -> usize {
        self.ranges().end
    }

    /// Bytes of everything before the pages.
    pub(crate) fn tables_bytes(&self) -> usize {
        let Ranges { pages, end, .. } = self.ranges();
        pages.first().map_or(end, |first| first.start)
    }

    /// The bytes of all shards' pages.
    pub(crate) fn pages_range(&self) -> Range<usize> {
        self.tables_bytes()..self.file_bytes()
    }

    /// Cuts the mapping of an arena into its parts.
    pub(crate) fn cut(&self, mapped: Mapped, has_contents: bool) -> Cut {
        let Ranges { counters, shards, pages, .. } = self.ranges();
        let is_direct = matches!(mapped, Mapped::InWindows { .. });
        let metadata = shards.into_iter().flat_map(|shard| {
            let ShardRanges { redo_head, redo_data, worn, fences, floors, allowances, .. } = shard;
            let ShardRanges { frames, lines, states, creators, shared, .. } = shard;
            let tables = [floors, allowances, frames, lines, states, creators, shared];
            [redo_head, redo_data, worn, fences].into_iter().chain(tables)
        });
        let front = [0..PAGE_BYTES, counters];
        let mut ranges: Vec<_> = front.into_iter().chain(metadata).collect();
        let table_count = ranges.len();
        let (parts, memories) = match mapped {
            Mapped::Whole(whole) => {
                ranges.extend(pages);
                let mut parts = memory::carve(whole, &ranges);
                let pages = parts.split_off(table_count);
                (parts, pages.into_iter().map(Memory::mapped).collect())
            }
            Mapped::InWindows { tables, pages: windows } => {
                let first = self.pages_range().start;
                let behind = |range: Range<usize>| range.start - first..range.end - first;
                let pages: Vec<_> = pages.into_iter().map(behind).collect();
                (memory::carve(tables, &ranges), memory::carve_windows(windows, &pages))
            }
        };
        let mut parts = parts.into_iter();
        let mut next = || parts.next().expect("as many parts as ranges");
        let header = Table::mapped(next(), 1);
        let counters = Counters::new(next());
        let sizes = self.sizes();
        let (space_count, places) = (self.spaces.len(), Places(self.spaces.clone().into()));
        let kept: Vec<_> = (0..self.shard_count)
            .map(|_| {
                let redo = redo::RedoRecord {
                    head: Table::mapped(next(), 1),
                    data: Table::mapped(next(), LINE_BYTES),
                };
                let (worn, fences) = (
                    Table::mapped(next(), space_count),
                    Table::mapped(next(), space_count * NODES),
                );
                let (floors, allowances) =
                    (Table::mapped(next(), 1), Table::mapped(next(), ALLOWANCES));
                let (frames, entries) =
                    (Table::mapped(next(), sizes.lines()), Table::mapped(next(), sizes.lines()));
                let lines = LineTables { frames, entries, floors, allowances };
                let (states, creators) =
                    (Table::mapped(next(), sizes.pages()), Table::mapped(next(), sizes.pages()));
                let shared = SharedPart::new(next());
                let shared = is_direct.then_some(shared);
                let places = places.clone();
                KeptShard {
                    redo,
                    worn,
                    fences,
                    lines,
                    states,
                    creators,
                    shared,
                    hints: None,
                    places,
                    has_contents,
                }
            })
            .collect();
        let shards = kept
            .into_iter()
            .zip(memories)
            .map(|(kept, pages)| ShardMemory { pages, kept: Some(kept) })
            .collect();
        Cut { header, counters, shards }
    }
}

/// How an arena is mapped.
pub(crate) enum Mapped {
    /// All of it at once.
    Whole(Part),
    /// The pages when they are needed. Direct readers may share it.
    InWindows {
        /// Everything before the pages.
        tables: Part,
        pages: Windows,
    },
}

/// The parts of an arena.
pub(crate) struct Cut {
    pub(crate) header: Table<Header>,
    pub(crate) counters: Counters,
    pub(crate) shards: Vec<ShardMemory>,
}

/// Where everything behind the header is.
struct Ranges {
    counters: Range<usize>,
    shards: Vec<ShardRanges>,
    pages: Vec<Range<usize>>,
    end: usize,
}

/// Which space and node has which place in the tables.
#[derive(Clone, Debug)]
pub(crate) struct Places(Arc<[Space]>);

impl Places {
    /// The spaces, by their places.
    pub(crate) fn spaces(&self) -> &[Space] {
        &self.0
    }

    /// The place of a space among the worn colours; `None` if the server does not serve it.
    pub(crate) fn space(&self, space: Space) -> Option<usize> {
        self.0.iter().position(|served| *served == space)
    }

    /// The place of a node's fence.
    pub(crate) fn fence(&self, space: Space, node: NodeId) -> Option<usize> {
        Some(self.space(space)? * NODES + usize::from(node.0))
    }

    /// Calls `each` with the fences that are set.
    pub(crate) fn each_fence(&self, fences: &[u32], each: &mut dyn FnMut(Space, NodeId, u32)) {
        for (space, nodes) in self.0.iter().zip(fences.chunks(NODES)) {
            for (first, some) in
                (0..=u16::MAX).step_by(FENCES_AT_ONCE).zip(nodes.chunks(FENCES_AT_ONCE))
            {
                // Nearly all are not set, and without a branch for each the processor looks at several at once.
                if some.iter().fold(0, |any, fence| any | fence) == 0 {
                    continue;
                }
                for (node, incarnation) in
                    (first..=u16::MAX).zip(some).filter(|(_, fence)| **fence != 0)
                {
                    each(*space, NodeId(node), *incarnation);
                }
            }
        }
    }
}

#[cfg(test)]
impl Layout {
    /// Where the redo record and the states of a shard begin.
    pub(crate) fn places_of(&self, shard: usize) -> (usize, usize) {
        let shard = &self.ranges().shards[shard];
        (shard.redo_head.start, shard.states.start)
    }
}
