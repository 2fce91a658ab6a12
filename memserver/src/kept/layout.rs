//! Where in an arena's file everything is.
//!
//! A file begins with a page of its own, the [`Header`]. Then come the shards' redo records, worn
//! colours, fences, page states and creators, shard by shard, and at the end the pages of all shards.
//! Each part begins at a page.

use core::ops::Range;
use std::sync::Arc;

use bluebridge_wire::{
    NodeId, Space,
    address::{LINE_BYTES, PAGE_BYTES},
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::{CreatorRecord, KeptShard, PageRecord, ShardMemory, redo};
use crate::memory::{self, Memory, Part, Table};

/// The first bytes of every arena's file.
pub(crate) const MAGIC: [u8; 8] = *b"BBARENA\0";

/// The version of this layout: it changes with every change of it.
pub(crate) const VERSION: u32 = 1;

/// The most spaces of a server with kept memory.
pub(crate) const SPACES_MAX: usize = 64;

/// Node numbers.
const NODES: usize = u16::MAX as usize + 1;

/// The file is being made.
pub(crate) const STATE_NEW: u32 = 0;
/// It holds nothing yet.
pub(crate) const STATE_EMPTY: u32 = 1;
/// It holds the contents of the node and generation that it names.
pub(crate) const STATE_FULL: u32 = 2;

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
    pub(crate) unused: u32,
    pub(crate) spaces: [u16; SPACES_MAX],
}

const _: () = assert!(size_of::<Header>() <= PAGE_BYTES);

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
    states: Range<usize>,
    creators: Range<usize>,
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
    fn page_count(&self) -> usize {
        self.shard_bytes / PAGE_BYTES
    }

    fn shard(&self, cursor: &mut Cursor) -> ShardRanges {
        let (pages, spaces) = (self.page_count(), self.spaces.len());
        ShardRanges {
            redo_head: cursor.take(redo::RECORD_BYTES - LINE_BYTES),
            redo_data: cursor.take(LINE_BYTES),
            worn: cursor.take(spaces * size_of::<u64>()),
            fences: cursor.take(spaces * NODES * size_of::<u32>()),
            states: cursor.take(pages * size_of::<PageRecord>()),
            creators: cursor.take(pages * size_of::<CreatorRecord>()),
        }
    }

    /// Everything before the pages, and where the pages of each shard are.
    fn ranges(&self) -> (Vec<ShardRanges>, Vec<Range<usize>>, usize) {
        let mut cursor = Cursor(PAGE_BYTES);
        let shards: Vec<_> = (0..self.shard_count).map(|_| self.shard(&mut cursor)).collect();
        let pages = (0..self.shard_count).map(|_| cursor.take(self.shard_bytes)).collect();
        (shards, pages, cursor.0)
    }

    /// Bytes of the whole file.
    pub(crate) fn file_bytes(&self) -> usize {
        self.ranges().2
    }

    /// Bytes of everything before the pages.
    pub(crate) fn tables_bytes(&self) -> usize {
        let (_, pages, all) = self.ranges();
        pages.first().map_or(all, |first| first.start)
    }

    /// Cuts a mapping of the file into the header and the shards.
    pub(crate) fn cut(&self, whole: Part, has_contents: bool) -> (Table<Header>, Vec<ShardMemory>) {
        let (shards, pages, _) = self.ranges();
        let metadata = shards.into_iter().flat_map(|shard| {
            let ShardRanges { redo_head, redo_data, worn, fences, states, creators } = shard;
            [redo_head, redo_data, worn, fences, states, creators]
        });
        let ranges: Vec<_> = core::iter::once(0..PAGE_BYTES).chain(metadata).chain(pages).collect();
        let mut parts = memory::carve(whole, &ranges).into_iter();
        let mut next = || parts.next().expect("as many parts as ranges");
        let header = Table::mapped(next(), 1);
        let page_count = self.page_count();
        let (space_count, places) = (self.spaces.len(), Places(self.spaces.clone().into()));
        let kept: Vec<_> = (0..self.shard_count)
            .map(|_| {
                let redo = redo::RedoRecord {
                    head: Table::mapped(next(), 1),
                    data: Memory::mapped(next()),
                };
                KeptShard {
                    redo,
                    worn: Table::mapped(next(), space_count),
                    fences: Table::mapped(next(), space_count * NODES),
                    states: Table::mapped(next(), page_count),
                    creators: Table::mapped(next(), page_count),
                    places: places.clone(),
                    has_contents,
                }
            })
            .collect();
        let shards = kept
            .into_iter()
            .map(|kept| ShardMemory { pages: Memory::mapped(next()), kept: Some(kept) })
            .collect();
        (header, shards)
    }
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
            for (node, incarnation) in (0..=u16::MAX).zip(nodes).filter(|(_, fence)| **fence != 0) {
                each(*space, NodeId(node), *incarnation);
            }
        }
    }
}
