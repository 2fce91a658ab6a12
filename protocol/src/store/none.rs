//! A store without pages.

use core::ops::Range;

use bluebridge_wire::{ArenaGeneration, Space, Status, line::LineRecord};

use super::{
    Access, Allowance, Grant, HomeLine, Line, LineStore, PageCrcs, PageStore, Placed, StageError,
    StoreUsage, Taken,
};

/// The store of a deputy: it stands for a node of which no page is left, so that its responder only says where they are.
///
/// Every pointer with a generation before its own is to pages that are elsewhere, or nowhere. About later ones it knows
/// nothing, because only the node itself allocates pages: requests for them get NO_AUTHORITY.
#[derive(Clone, Copy, Debug)]
pub struct NoPages {
    after: ArenaGeneration,
}

impl NoPages {
    /// No page of pointers up to a generation, the last that the node may have used. Of the greatest generation of all
    /// a deputy says nothing.
    #[must_use]
    pub fn up_to(last: ArenaGeneration) -> Self {
        Self { after: last.next().unwrap_or(ArenaGeneration::MAX) }
    }
}

impl PageStore for NoPages {
    fn generation(&self) -> ArenaGeneration {
        self.after
    }

    fn create(&mut self, _: Space, _: u32) -> Result<Grant, Status> {
        Err(Status::OutOfMemory)
    }

    fn delete(&mut self, _: Access, _: u32) -> Result<u32, Status> {
        Err(Status::NoAuthority)
    }

    fn allocation(&self, _: Access, _: u32) -> Result<Range<u64>, Status> {
        Err(Status::NoAuthority)
    }

    fn check(&self, _: Access) -> Result<(), Status> {
        Err(Status::NoAuthority)
    }

    fn read(&self, _: u64, _: Range<usize>) -> &[u8] {
        &[]
    }

    fn write(&mut self, _: u64, _: usize, _: &[u8]) {}

    fn zero(&mut self, _: u64, _: Range<usize>) {}

    fn version(&self, _: u64) -> u64 {
        0
    }

    fn lines(&self) -> &dyn LineStore {
        self
    }

    fn lines_mut(&mut self) -> &mut dyn LineStore {
        self
    }

    fn usage(&self, _: Space) -> StoreUsage {
        StoreUsage::default()
    }
}

impl LineStore for NoPages {
    fn line(&self, _: u64) -> Option<Line> {
        None
    }

    fn withhold(&mut self, _: Range<u64>, _: bool) {}

    fn give(&mut self, _: u64) {}

    fn clear_given(&mut self, _: Range<u64>) {}

    fn reserve(&mut self, _: u32) -> Option<Vec<Range<u64>>> {
        None
    }

    fn reserve_own(&mut self, _: Range<u64>) -> bool {
        false
    }

    fn release(&mut self, _: Range<u64>) {}

    fn memory(&mut self, _: u64) -> Option<&mut [u8]> {
        None
    }

    fn stage(
        &mut self,
        _: u64,
        _: (HomeLine, Taken),
        _: &LineRecord,
        _: &PageCrcs,
    ) -> Result<(), StageError> {
        Err(StageError::NoPlace)
    }

    fn adopt(&mut self, _: u64) {}

    fn drop_staged(&mut self, _: u64) {}

    fn pages_of_allocation(&self, _: Access, _: u32) -> Result<u32, Status> {
        Err(Status::StaleGeneration)
    }

    fn begin_freeing(&mut self, _: u64) {}

    fn freeings(&self, _: &mut dyn FnMut(u64, Access, u32)) {}

    fn end_freeing(&mut self, _: u64) {}

    fn free_part(&mut self, _: Range<u64>) {}

    fn is_free(&self, _: u64) -> bool {
        false
    }

    fn discard(&mut self, _: u64) {}

    fn placed(&self, _: &mut dyn FnMut(u64, Placed)) {}

    fn keep_allowance(&mut self, _: &Allowance, _: bool) -> bool {
        false
    }

    fn forget_allowance(&mut self, _: u64) {}

    fn allowances(&self, _: &mut dyn FnMut(&Allowance, bool)) {}

    fn last_migration(&self) -> u64 {
        0
    }

    fn lease_floor(&self) -> u64 {
        0
    }

    fn raise_lease_floor(&mut self, _: u64) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stands_for_all_generations_up_to_the_last() {
        let generation = |number| ArenaGeneration::new(number).expect("small");
        assert_eq!(NoPages::up_to(generation(7)).generation(), generation(8));
        assert_eq!(NoPages::up_to(ArenaGeneration::MAX).generation(), ArenaGeneration::MAX);
    }
}
