//! What the pager needs of a memory server, and where the pages of a region are stored.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use bluebridge::{Client, Error, Pointer, ReadRequest, Region, Transport, WriteRequest};
use crossbeam_utils::atomic::AtomicCell;

use crate::kernel::PAGE_BYTES;
use crate::page_table::LAYER_COUNT;

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

    /// Whether no other process uses what was allocated before a fork: neither a child, nor the parent, nor other children
    /// of it. Only then may it be changed or freed.
    fn is_alone(&mut self) -> bool {
        true
    }

    /// Whether later calls may poll before they sleep; they may at first.
    fn set_polling(&mut self, _polls: bool) {}

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

    fn set_polling(&mut self, polls: bool) {
        Self::set_polling(self, polls);
    }
}

/// Pages of an extent: the unit in which remote memory is allocated.
pub(crate) const EXTENT_PAGES: u64 = 512;

/// The remote memory of a region: extents, allocated when a page of them is first written back.
///
/// Page `n` of the region has a fixed place in extent `n / 512`, so neighbours are read and written together.
///
/// A region of one process has one layer of extents. When a process forks, both processes go on to read the pages that
/// are stored, so their extents must not change any more: each process writes to a layer of its own from then on, and the
/// page's word says in which layer the page is.
pub(crate) struct Extents {
    layers: [OnceLock<Layer>; LAYER_COUNT],
    /// The layer that is written.
    current: AtomicUsize,
    page_count: u64,
    /// All allocations, to free them; held while one is added. Only who holds the evictor takes it, so no other thread has
    /// it while one forks.
    allocations: Mutex<Vec<Allocation>>,
    /// How many extents each layer has.
    counts: [AtomicUsize; LAYER_COUNT],
    allocated_bytes: AtomicU64,
}

type Layer = Box<[AtomicCell<Option<Pointer>>]>;

#[derive(Clone, Copy)]
struct Allocation {
    layer: usize,
    region: Region,
    /// Whether other processes may use it too.
    is_shared: bool,
}

impl Extents {
    pub(crate) fn new(page_count: u64) -> Self {
        Self {
            layers: [const { OnceLock::new() }; LAYER_COUNT],
            current: AtomicUsize::new(0),
            page_count,
            allocations: Mutex::default(),
            counts: Default::default(),
            allocated_bytes: AtomicU64::new(0),
        }
    }

    /// The same extents, for a child process; both must go on in another layer.
    pub(crate) fn inherited(&self) -> Self {
        let copy = |layer: &OnceLock<Layer>| match layer.get() {
            Some(bases) => OnceLock::from(
                bases.iter().map(|base| AtomicCell::new(base.load())).collect::<Layer>(),
            ),
            None => OnceLock::new(),
        };
        Self {
            layers: self.layers.each_ref().map(copy),
            current: AtomicUsize::new(self.current()),
            page_count: self.page_count,
            allocations: Mutex::new(self.lock().clone()),
            counts: self
                .counts
                .each_ref()
                .map(|count| AtomicUsize::new(count.load(Ordering::Relaxed))),
            allocated_bytes: AtomicU64::new(self.allocated_bytes()),
        }
    }

    /// The layer that is written.
    pub(crate) fn current(&self) -> usize {
        self.current.load(Ordering::Acquire)
    }

    /// Goes on in another layer if the present one has extents; false if all layers are in use. What is allocated must not
    /// change from then on while other processes exist.
    pub(crate) fn freeze(&self) -> bool {
        let mut allocations = self.lock();
        if self.is_used(self.current()) {
            let mut layers = 0..LAYER_COUNT;
            let Some(free) = layers.find(|layer| !self.is_used(*layer)) else { return false };
            self.current.store(free, Ordering::Release);
        }
        allocations.iter_mut().for_each(|one| one.is_shared = true);
        true
    }

    /// Whether [`Self::freeze`] would find a layer.
    pub(crate) fn can_freeze(&self) -> bool {
        !self.is_used(self.current()) || (0..LAYER_COUNT).any(|layer| !self.is_used(layer))
    }

    /// How many layers have no extents.
    pub(crate) fn free_layers(&self) -> usize {
        (0..LAYER_COUNT).filter(|layer| !self.is_used(*layer)).count()
    }

    fn is_used(&self, layer: usize) -> bool {
        self.counts.get(layer).is_some_and(|count| count.load(Ordering::Relaxed) > 0)
    }

    /// Counts an extent that was added.
    fn added(&self, layer: usize, region: Region) {
        if let Some(count) = self.counts.get(layer) {
            count.fetch_add(1, Ordering::Relaxed);
        }
        self.allocated_bytes.fetch_add(region.length_bytes(), Ordering::Relaxed);
    }

    /// Counts an extent that was removed.
    fn removed(&self, layer: usize, region: Region) {
        if let Some(count) = self.counts.get(layer) {
            count.fetch_sub(1, Ordering::Relaxed);
        }
        self.allocated_bytes.fetch_sub(region.length_bytes(), Ordering::Relaxed);
    }

    /// An extent of another layer than the present one: its first page, and its layer.
    pub(crate) fn older(&self) -> Option<(u64, usize)> {
        let allocations = self.lock();
        let current = self.current();
        let layer = allocations.iter().find(|one| one.layer != current)?.layer;
        let bases = self.layers.get(layer)?.get()?;
        let extent = bases.iter().position(|base| base.load().is_some())?;
        Some((extent as u64 * EXTENT_PAGES, layer))
    }

    /// Frees an extent of which no page is used any more.
    pub(crate) fn remove(
        &self,
        page: u64,
        layer: usize,
        remote: &mut dyn RemoteMemory,
    ) -> Result<(), Error> {
        let Some(base) = self.base(page, layer) else { return Ok(()) };
        let mut allocations = self.lock();
        let Some(pointer) = base.swap(None) else { return Ok(()) };
        let Some(at) = allocations.iter().position(|one| one.region.base() == pointer) else {
            return Ok(());
        };
        let Allocation { region, .. } = allocations.swap_remove(at);
        self.removed(layer, region);
        drop(allocations);
        remote.delete(region)
    }

    /// Where a page is stored in a layer; `None` if its extent there is not allocated.
    pub(crate) fn pointer(&self, page: u64, layer: usize) -> Option<Pointer> {
        let base = self.base(page, layer)?.load()?;
        base.checked_add(page % EXTENT_PAGES * PAGE_BYTES as u64).ok()
    }

    /// Allocates the extent of a page in the present layer if that was not done.
    pub(crate) fn allocate(&self, page: u64, remote: &mut dyn RemoteMemory) -> Result<(), Error> {
        let layer = self.current();
        let bases = self.layers.get(layer).ok_or(Error::Length)?;
        bases.get_or_init(|| {
            let count =
                usize::try_from(self.page_count.div_ceil(EXTENT_PAGES)).unwrap_or(usize::MAX);
            (0..count).map(|_| AtomicCell::new(None)).collect()
        });
        let Some(base) = self.base(page, layer) else { return Err(Error::Length) };
        let mut allocations = self.lock();
        if base.load().is_none() {
            let first = page / EXTENT_PAGES * EXTENT_PAGES;
            let pages = EXTENT_PAGES.min(self.page_count.saturating_sub(first));
            let region = remote.create(pages * PAGE_BYTES as u64)?;
            allocations.push(Allocation { layer, region, is_shared: false });
            self.added(layer, region);
            base.store(Some(region.base()));
        }
        Ok(())
    }

    /// Forgets an extent whose contents are lost, so that the next page of it that is written back gets a new one.
    pub(crate) fn forget(&self, page: u64, layer: usize) {
        let Some(base) = self.base(page, layer) else { return };
        let mut allocations = self.lock();
        let lost = base.swap(None);
        if let Some(at) = allocations.iter().position(|one| Some(one.region.base()) == lost) {
            let Allocation { region, .. } = allocations.swap_remove(at);
            self.removed(layer, region);
        }
    }

    /// Frees all remote memory that no other process uses; returns the first error.
    pub(crate) fn free(&self, remote: &mut dyn RemoteMemory) -> Result<(), Error> {
        let mut allocations = self.lock();
        let mut result = Ok(());
        let is_alone = remote.is_alone();
        for Allocation { layer, region, is_shared } in allocations.drain(..) {
            self.removed(layer, region);
            if is_shared && !is_alone {
                continue;
            }
            // After the first server that does not respond, each of the others would take its whole deadline too.
            if result.is_ok() {
                result = remote.delete(region);
            }
        }
        let layers = self.layers.iter().filter_map(OnceLock::get);
        layers.for_each(|bases| bases.iter().for_each(|base| base.store(None)));
        result
    }

    pub(crate) fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Allocation>> {
        self.allocations.lock().unwrap_or_else(|broken| broken.into_inner())
    }

    fn base(&self, page: u64, layer: usize) -> Option<&AtomicCell<Option<Pointer>>> {
        let bases = self.layers.get(layer)?.get()?;
        bases.get(usize::try_from(page / EXTENT_PAGES).ok()?)
    }
}

impl fmt::Debug for Extents {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.lock().len();
        formatter.debug_struct("Extents").field("count", &count).finish_non_exhaustive()
    }
}
