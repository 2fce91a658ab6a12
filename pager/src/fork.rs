//! A process that forks, and its child, which goes on with the same contents.
//!
//! Local pages are the kernel's work: the child gets them as copies on write. Stored pages are frozen: both processes
//! read them, and each writes to extents of its own from then on ([`crate::remote::Extents`]). So nothing is copied, and
//! nothing is sent.
//!
//! The parent's other threads go on while the kernel copies the process, so a page may be in the middle of a fault, and
//! the child's page table may be older than its pages. No page leaves meanwhile, because the forking thread holds the
//! evictor. So the child takes what is local from the kernel, and where the rest is from its page table
//! ([`crate::page_table::PageTable::settle`]).
#![allow(unsafe_code, reason = "a child process takes over its parent's mappings")]

use std::mem;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::evict::{Evictor, Merge, Urgency};
use crate::frames::Frames;
use crate::kernel::PAGE_BYTES;
use crate::kernel::paged::PagedMemory;
use crate::kernel::pagemap::Pagemap;
use crate::options::FORK_FRAMES;
use crate::page_table::{LAYER_COUNT, PageTable};
use crate::region::{Parts, RemoteRegion, Remotes, open_remotes};
use crate::remote::{Extents, RemoteMemory};

/// A thread is about to fork, or has just done so. Until [`Self::resume`] or [`Self::inherit`], it can use the region,
/// but only a few pages that are not local; other threads may have to wait.
pub struct Forking<'a> {
    region: &'a RemoteRegion,
    evictor: MutexGuard<'a, Evictor>,
}

impl RemoteRegion {
    /// Whether [`Self::begin_fork`] is possible: not if 16 generations of children still need pages that this process has
    /// changed since.
    #[must_use]
    pub fn can_fork(&self) -> bool {
        self.options.forks && self.pager.extents.can_freeze()
    }

    /// As [`Self::can_fork`], after pages were moved together that no child needs any more: so that half of the generations
    /// are left for the children of the child. Waits for children to end if it is not possible otherwise, at most for
    /// `limit`.
    #[must_use]
    pub fn can_fork_within(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        let pager = &*self.pager;
        while self.options.forks && pager.extents.free_layers() < LAYER_COUNT / 2 {
            let mut evictor = pager.evictor.lock().unwrap_or_else(|broken| broken.into_inner());
            let merge = evictor.merge(pager, Urgency::Waited);
            drop(evictor);
            let pause = match merge {
                _ if Instant::now() > until => break,
                Merge::Moved => continue,
                Merge::Done | Merge::Shared if self.can_fork() => break,
                Merge::Done | Merge::Shared => Duration::from_millis(10),
                Merge::Delayed => Duration::from_millis(1),
            };
            std::thread::sleep(pause);
        }
        self.can_fork()
    }

    /// Prepares a fork. The calling thread must be the one that forks, and do little else before it.
    ///
    /// # Errors
    /// If the region was not made for it ([`crate::RegionOptions::forks`]), or it is not possible now.
    pub fn begin_fork(&self) -> Result<Forking<'_>, Error> {
        let impossible = |requirement| Error::Option { option: "forks", value: 0, requirement };
        if !self.options.forks {
            return Err(impossible("the region was not made for forks"));
        }
        let pager = &*self.pager;
        let mut evictor = pager.evictor.lock().unwrap_or_else(|broken| broken.into_inner());
        // Room for what this thread still touches; more than the frames that are reserved for it.
        while pager.frames.free() < 2 * FORK_FRAMES && evictor.evict(pager, Urgency::Waited) > 0 {}
        if !pager.extents.freeze() {
            return Err(impossible("too many children need older contents of the pages"));
        }
        let system = |what| move |error| Error::System { what, error };
        pager.memory.set_inheritable(true).map_err(system("let a child inherit the region"))?;
        let thread = rustix::thread::gettid().as_raw_nonzero().get();
        pager.forking_thread.store(thread.unsigned_abs(), Ordering::Release);
        Ok(Forking { region: self, evictor })
    }
}

impl Forking<'_> {
    /// Goes on in the parent, or if there was no fork.
    pub fn resume(self) {
        let pager = &*self.region.pager;
        // If the kernel refuses, a child that forks by itself gets pages without a pager.
        let _ = pager.memory.set_inheritable(false);
        pager.forking_thread.store(0, Ordering::SeqCst);
        drop(self.evictor);
        // Those that found no room.
        let _ = pager.memory.wake_all();
        pager.wake_evictor();
    }

    /// Goes on in the child; `open` opens clients of the child's own.
    ///
    /// # Errors
    /// As [`RemoteRegion::with_remotes`]. The region is unusable in the child then.
    ///
    /// # Safety
    /// The process is the child of the one that began to fork, and the calling thread its only one. The parent's region is
    /// never used or dropped in it, with success or without.
    pub unsafe fn inherit<E: From<Error>>(
        self,
        mut open: impl FnMut() -> Result<Box<dyn RemoteMemory>, E>,
    ) -> Result<RemoteRegion, E> {
        let Self { region, evictor, .. } = self;
        // The lock is the parent's.
        mem::forget(evictor);
        let options = &region.options;
        let old = &*region.pager;
        // First of all: until then, a page that is not local reads as zeros.
        // SAFETY: the caller promises that the old region is not used any more.
        let memory = unsafe { PagedMemory::inherited(&old.memory, options.delivery()) };
        let memory = memory.map_err(Error::from)?;
        let Remotes { lanes, background, evictor: remote } = open_remotes(options, &mut open)?;
        let total = old.frames.total();
        let mut evictor = Evictor::new(remote, total);
        // SAFETY: as above.
        let table = unsafe { PageTable::inherited(&old.table) };
        let system = |what| move |error| Error::System { what, error };
        let taken = settle(&memory, &table, &mut evictor)
            .map_err(system("find out which pages are local"))?;
        let parts = Parts {
            memory,
            table,
            frames: Frames::with_taken(total, taken),
            extents: Extents::inherited(&old.extents),
            evictor,
        };
        Ok(RemoteRegion::build(options, parts, lanes, background)?)
    }
}

/// Sets the child's page table; returns how many pages are local.
fn settle(memory: &PagedMemory, table: &PageTable, evictor: &mut Evictor) -> std::io::Result<u32> {
    let pagemap = Pagemap::open()?;
    // Parts of the table that were never touched say that the pages are zero.
    let words = table.mapping();
    let words_per_page = (PAGE_BYTES / size_of::<u32>()) as u64;
    let mut touched = Vec::new();
    pagemap.read(words, 0, words.bytes() as u64 / PAGE_BYTES as u64, |page, is_there| {
        if is_there {
            touched.push(page * words_per_page);
        }
    })?;
    let mut local = 0;
    for first in touched {
        let count = words_per_page.min(table.page_count().saturating_sub(first));
        pagemap.read(memory.mapping(), first, count, |page, is_there| {
            if table.settle(page, is_there) {
                evictor.insert(page);
                local += 1;
            }
        })?;
    }
    Ok(local)
}
