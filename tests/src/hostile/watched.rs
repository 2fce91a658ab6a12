//! A store that records every change.

use core::ops::Range;

use bluebridge_memserver::Arena;
use bluebridge_protocol::store::{Access, Grant, LineStore, PageStore, StoreUsage};
use bluebridge_wire::{ArenaGeneration, Location, Space, Status, address::PAGE_BYTES};

/// A change of a store.
#[derive(Clone, Debug)]
pub enum Change {
    /// Pages were allocated.
    Create {
        /// The space.
        space: Space,
        /// The number of pages.
        pages: u32,
        /// The location and tag.
        grant: Grant,
    },
    /// An allocation was freed.
    Delete {
        /// The access.
        access: Access,
        /// The number of pages.
        pages: u32,
    },
    /// Bytes were overwritten.
    Write {
        /// The page's number.
        page: u64,
        /// The position in the page.
        start: usize,
        /// The new bytes.
        data: Vec<u8>,
    },
    /// Bytes were zeroed.
    Zero {
        /// The page's number.
        page: u64,
        /// The range in the page.
        range: Range<usize>,
    },
}

/// A real arena whose changes are recorded.
#[derive(Debug)]
pub struct Watched {
    /// The arena.
    pub arena: Arena,
    /// The changes since it was last emptied.
    pub journal: Vec<Change>,
}

impl PageStore for Watched {
    fn generation(&self) -> ArenaGeneration {
        self.arena.generation()
    }

    fn create(&mut self, space: Space, pages: u32) -> Result<Grant, Status> {
        let grant = self.arena.create(space, pages)?;
        self.journal.push(Change::Create { space, pages, grant });
        Ok(grant)
    }

    fn delete(&mut self, access: Access, pages: u32) -> Result<u32, Status> {
        let pages = self.arena.delete(access, pages)?;
        self.journal.push(Change::Delete { access, pages });
        Ok(pages)
    }

    fn allocation(&self, access: Access, pages: u32) -> Result<Range<u64>, Status> {
        self.arena.allocation(access, pages)
    }

    fn check(&self, access: Access) -> Result<(), Status> {
        self.arena.check(access)
    }

    fn read(&self, page: u64, range: Range<usize>) -> &[u8] {
        self.arena.read(page, range)
    }

    fn write(&mut self, page: u64, start: usize, data: &[u8]) {
        self.arena.write(page, start, data);
        self.journal.push(Change::Write { page, start, data: data.to_vec() });
    }

    fn write_page(&mut self, page: u64, data: &[u8; PAGE_BYTES], crc: u32) {
        self.arena.write_page(page, data, crc);
        self.journal.push(Change::Write { page, start: 0, data: data.to_vec() });
    }

    fn page_crc(&self, page: u64) -> Option<u32> {
        self.arena.page_crc(page)
    }

    fn zero(&mut self, page: u64, range: Range<usize>) {
        self.arena.zero(page, range.clone());
        self.journal.push(Change::Zero { page, range });
    }

    fn version(&self, page: u64) -> u64 {
        self.arena.version(page)
    }

    fn complete(&mut self, location: Location) {
        self.arena.complete(location);
    }

    fn lines(&self) -> &dyn LineStore {
        self.arena.lines()
    }

    fn lines_mut(&mut self) -> &mut dyn LineStore {
        self.arena.lines_mut()
    }

    fn usage(&self, space: Space) -> StoreUsage {
        self.arena.usage(space)
    }
}
