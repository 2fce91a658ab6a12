//! Some pages that are allocated from the start.

use core::ops::Range;

use bluebridge_protocol::store::{Access, Grant, PageStore, StoreUsage};
use bluebridge_wire::{
    ArenaGeneration, Location, NodeId, Pointer, Space, Status, Tag,
    address::{LINE_BYTES, PAGE_BYTES},
};

const TAG: Tag = Tag(7);

pub(crate) struct Pages(Vec<(Vec<u8>, u64)>);

impl Pages {
    pub(crate) fn new(count: usize) -> Self {
        Self(vec![(vec![0; PAGE_BYTES], 1); count])
    }
}

/// The start of a page, each of which stands in a line of its own.
pub(crate) fn pointer(space: Space, node: NodeId, page: usize) -> Pointer {
    let location = Location::new(generation(), (page * LINE_BYTES) as u64).expect("small");
    Pointer { space, node, tag: TAG, location }
}

fn generation() -> ArenaGeneration {
    ArenaGeneration::new(3).expect("small")
}

const fn place(page: u64) -> usize {
    page as usize / (LINE_BYTES / PAGE_BYTES)
}

impl PageStore for Pages {
    fn generation(&self) -> ArenaGeneration {
        generation()
    }

    fn create(&mut self, _: Space, _: u32) -> Result<Grant, Status> {
        Err(Status::OutOfMemory)
    }

    fn delete(&mut self, _: Access, _: u32) -> Result<u32, Status> {
        Err(Status::Forbidden)
    }

    fn allocation(&self, _: Access, _: u32) -> Result<Range<u64>, Status> {
        Err(Status::Forbidden)
    }

    fn check(&self, access: Access) -> Result<(), Status> {
        let inside = access.location.in_page() as u64 + access.length_bytes <= PAGE_BYTES as u64;
        let known = place(access.location.page()) < self.0.len();
        if inside && known && access.tag == TAG { Ok(()) } else { Err(Status::OutOfRange) }
    }

    fn read(&self, page: u64, range: Range<usize>) -> &[u8] {
        &self.0[place(page)].0[range]
    }

    fn write(&mut self, page: u64, start: usize, data: &[u8]) {
        let (bytes, version) = &mut self.0[place(page)];
        bytes[start..start + data.len()].copy_from_slice(data);
        *version += 1;
    }

    fn zero(&mut self, page: u64, range: Range<usize>) {
        let (bytes, version) = &mut self.0[place(page)];
        bytes[range].fill(0);
        *version += 1;
    }

    fn version(&self, page: u64) -> u64 {
        self.0[place(page)].1
    }

    fn usage(&self, _: Space) -> StoreUsage {
        StoreUsage::default()
    }
}
