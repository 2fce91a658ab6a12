//! What the pager needs of a memory server, and where the pages of a region are stored.

use std::fmt;
use std::sync::Mutex;
use std::time::Instant;

use bluebridge::{Client, Error, Pointer, ReadRequest, Region, Transport, WriteRequest};
use crossbeam_utils::atomic::AtomicCell;

use crate::kernel::PAGE_BYTES;

/// Remote memory, as one thread at a time uses it; [`Client`] is the implementation.
pub trait RemoteMemory: Send {
    /// Allocates `length_bytes` bytes of zeros.
    ///
    /// # Errors
    /// [`Error`].
    fn create(&mut self, length_bytes: u64) -> Result<Region, Error>;

    /// Frees an allocation.
    ///
    /// # Errors
    /// [`Error`].
    fn delete(&mut self, region: Region) -> Result<(), Error>;

    /// Reads many ranges; each gets its own result.
    ///
    /// # Errors
    /// If no request could be executed.
    fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), Error>;

    /// Writes many ranges; each gets its own result.
    ///
    /// # Errors
    /// If no request could be executed.
    fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), Error>;

    /// Called before the pages of a fault are read, with the time at which the fault reached the pager. For
    /// measurements; it must not wait.
    fn fault_begun(&mut self, _at: Instant) {}
}

impl<T: Transport + Send> RemoteMemory for Client<T> {
    fn create(&mut self, length_bytes: u64) -> Result<Region, Error> {
        Self::create(self, length_bytes)
    }

    fn delete(&mut self, region: Region) -> Result<(), Error> {
        Self::delete(self, region)
    }

    fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), Error> {
        Self::read_many(self, requests)
    }

    fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), Error> {
        Self::write_many(self, requests)
    }
}

/// Pages of an extent: the unit in which remote memory is allocated.
pub(crate) const EXTENT_PAGES: u64 = 512;

/// The remote memory of a region: extents, allocated when a page of them is first written back.
///
/// Page `n` of the region has a fixed place in extent `n / 512`, so neighbours are read and written together.
pub(crate) struct Extents {
    bases: Box<[AtomicCell<Option<Pointer>>]>,
    page_count: u64,
    /// All allocations, to free them; held while one is added.
    allocations: Mutex<Vec<Region>>,
}

impl Extents {
    pub(crate) fn new(page_count: u64) -> Self {
        let count = usize::try_from(page_count.div_ceil(EXTENT_PAGES)).unwrap_or(usize::MAX);
        Self {
            bases: (0..count).map(|_| AtomicCell::new(None)).collect(),
            page_count,
            allocations: Mutex::default(),
        }
    }

    /// Where a page is stored; `None` if its extent is not allocated.
    pub(crate) fn pointer(&self, page: u64) -> Option<Pointer> {
        let base = self.base(page)?.load()?;
        base.checked_add(page % EXTENT_PAGES * PAGE_BYTES as u64).ok()
    }

    /// Allocates the extent of a page if that was not done.
    pub(crate) fn allocate(&self, page: u64, remote: &mut dyn RemoteMemory) -> Result<(), Error> {
        let Some(base) = self.base(page) else { return Err(Error::Length) };
        let mut allocations = self.allocations.lock().unwrap_or_else(|broken| broken.into_inner());
        if base.load().is_none() {
            let first = page / EXTENT_PAGES * EXTENT_PAGES;
            let pages = EXTENT_PAGES.min(self.page_count.saturating_sub(first));
            let region = remote.create(pages * PAGE_BYTES as u64)?;
            allocations.push(region);
            base.store(Some(region.base()));
        }
        Ok(())
    }

    /// Forgets an extent whose contents are lost, so that the next page of it that is written back gets a new one.
    pub(crate) fn forget(&self, page: u64) {
        let Some(base) = self.base(page) else { return };
        let mut allocations = self.allocations.lock().unwrap_or_else(|broken| broken.into_inner());
        if let Some(pointer) = base.swap(None) {
            allocations.retain(|region| region.base() != pointer);
        }
    }

    /// Frees all remote memory; returns the first error.
    pub(crate) fn free(&self, remote: &mut dyn RemoteMemory) -> Result<(), Error> {
        let mut allocations = self.allocations.lock().unwrap_or_else(|broken| broken.into_inner());
        let mut result = Ok(());
        for region in allocations.drain(..) {
            // After the first server that does not respond, each of the others would take its whole deadline too.
            if result.is_ok() {
                result = remote.delete(region);
            }
        }
        self.bases.iter().for_each(|base| base.store(None));
        result
    }

    pub(crate) fn allocated_bytes(&self) -> u64 {
        let allocations = self.allocations.lock().unwrap_or_else(|broken| broken.into_inner());
        allocations.iter().map(|region| region.length_bytes()).sum()
    }

    fn base(&self, page: u64) -> Option<&AtomicCell<Option<Pointer>>> {
        self.bases.get(usize::try_from(page / EXTENT_PAGES).ok()?)
    }
}

impl fmt::Debug for Extents {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Extents").field("count", &self.bases.len()).finish_non_exhaustive()
    }
}
