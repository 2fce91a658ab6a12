//! A mapping whose page faults the pager resolves, by page number.
#![allow(unsafe_code, reason = "the contents of pages are copied out")]

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::OnceLock;

use rustix::mm::Advice;

use super::PAGE_BYTES;
use super::memory::{Discarder, Mapping, runs};
use super::userfault::{Delivery, FaultScope, Userfault, UserfaultError};

/// Whether the first write to a page is to be reported.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Protection {
    /// It faults.
    Protected,
    /// It passes.
    Writable,
}

/// Addresses whose faults are the pager's.
///
/// The methods do not check who uses a page: the page table gives each page to one thread at a time.
#[derive(Debug)]
pub(crate) struct PagedMemory {
    mapping: Mapping,
    userfault: Userfault,
    discarder: Discarder,
    /// This process's memory as a file, if the program may have made pages unreadable.
    unreadable: OnceLock<File>,
}

impl PagedMemory {
    /// Maps `page_count` pages, all of them missing.
    pub(crate) fn map(page_count: usize, delivery: Delivery) -> Result<Self, UserfaultError> {
        let bytes = page_count.saturating_mul(PAGE_BYTES);
        let mapping = Mapping::reserve(bytes).map_err(UserfaultError::Registration)?;
        // The pager works page by page. A child process has no pager for the pages, so it does not get them.
        let advice = [Advice::LinuxNoHugepage, Advice::LinuxDontFork];
        for advice in advice {
            match mapping.advise(advice) {
                // A kernel without huge pages does not know the advice.
                Err(error) if advice == Advice::LinuxDontFork => {
                    return Err(UserfaultError::Registration(error));
                }
                _ => {}
            }
        }
        let userfault = Userfault::open(delivery)?;
        userfault.register(mapping.address(), bytes as u64)?;
        Ok(Self { mapping, userfault, discarder: Discarder::new(), unreadable: OnceLock::new() })
    }

    /// The pages that a child process has because its parent had `other`; faults of the others are the pager's.
    ///
    /// # Safety
    /// As for [`Mapping::inherited`].
    pub(crate) unsafe fn inherited(
        other: &Self,
        delivery: Delivery,
    ) -> Result<Self, UserfaultError> {
        // SAFETY: the caller's promise is the same.
        let mapping = unsafe { Mapping::inherited(&other.mapping) };
        let userfault = Userfault::open(delivery)?;
        userfault.register(mapping.address(), mapping.bytes() as u64)?;
        let unreadable = OnceLock::new();
        let memory = Self { mapping, userfault, discarder: Discarder::new(), unreadable };
        if other.unreadable.get().is_some() {
            memory.expect_protection().map_err(UserfaultError::Registration)?;
        }
        memory.set_inheritable(false).map_err(UserfaultError::Registration)?;
        Ok(memory)
    }

    /// Whether children of the process get the pages.
    pub(crate) fn set_inheritable(&self, is_inheritable: bool) -> io::Result<()> {
        self.mapping.advise(match is_inheritable {
            true => Advice::LinuxDoFork,
            false => Advice::LinuxDontFork,
        })
    }

    /// Lets all threads that wait for a page try again.
    pub(crate) fn wake_all(&self) -> io::Result<()> {
        self.userfault.wake(self.mapping.address(), self.mapping.bytes() as u64)
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.mapping.start().cast()
    }

    pub(crate) fn userfault(&self) -> &Userfault {
        &self.userfault
    }

    pub(crate) fn scope(&self) -> FaultScope {
        self.userfault.scope()
    }

    pub(crate) fn discards_in_batches(&self) -> bool {
        self.discarder.is_batched()
    }

    /// The number of the page at an address, if it is one of these.
    pub(crate) fn page_at(&self, address: u64) -> Option<u64> {
        let offset = address.checked_sub(self.mapping.address())?;
        (offset < self.mapping.bytes() as u64).then_some(offset / PAGE_BYTES as u64)
    }

    /// Fills missing pages, which follow each other. With an error comes the number of pages that were filled before.
    pub(crate) fn install(
        &self,
        first: u64,
        contents: &[u8],
        protection: Protection,
    ) -> Result<(), (usize, io::Error)> {
        let is_protected = protection == Protection::Protected;
        self.userfault
            .copy(self.address(first), contents, is_protected)
            .map_err(|(bytes, error)| (bytes / PAGE_BYTES, error))
    }

    /// Makes the next writes to local pages fault; runs of neighbours take one system call.
    pub(crate) fn protect(&self, pages: &[u64]) -> io::Result<()> {
        runs(pages).try_for_each(|(first, count)| {
            self.userfault.protect(self.address(first), (count * PAGE_BYTES) as u64, true)
        })
    }

    /// Lets writes to a local page pass.
    pub(crate) fn unprotect(&self, page: u64) -> io::Result<()> {
        self.userfault.protect(self.address(page), PAGE_BYTES as u64, false)
    }

    /// From now on the program may make pages unreadable.
    pub(crate) fn expect_protection(&self) -> io::Result<()> {
        if self.unreadable.get().is_none() {
            // Reading it does not depend on the protection of pages: proc_pid_mem(5).
            let file = super::open_own("/proc/self/mem")?;
            let _ = self.unreadable.set(file);
        }
        Ok(())
    }

    /// Copies a local page that nobody can write now.
    pub(crate) fn copy_out(&self, page: u64, target: &mut [u8; PAGE_BYTES]) {
        let offset = usize::try_from(page).unwrap_or(usize::MAX).saturating_mul(PAGE_BYTES);
        assert!(offset < self.mapping.bytes(), "page {page} is not in the region");
        if let Some(file) = self.unreadable.get() {
            let result = file.read_exact_at(target, self.address(page));
            result.expect("a process can read its own local pages");
            return;
        }
        let source = self.start().as_ptr().wrapping_add(offset);
        // SAFETY: the page is in the mapping and local; the page table gave it to this thread, and it is protected
        // against writes by the program. The target is the caller's own.
        unsafe { source.copy_to_nonoverlapping(target.as_mut_ptr(), PAGE_BYTES) };
    }

    /// Makes pages missing again; their contents are gone.
    pub(crate) fn discard(&self, pages: &[u64]) -> io::Result<()> {
        // SAFETY: the page table gave the pages to this thread, and their contents are saved or not needed.
        unsafe { self.discarder.discard(&self.mapping, pages) }
    }

    /// Lets threads that wait for a page try again.
    pub(crate) fn wake(&self, page: u64) -> io::Result<()> {
        self.userfault.wake(self.address(page), PAGE_BYTES as u64)
    }

    /// Makes each access to a missing page fail with SIGBUS.
    pub(crate) fn poison(&self, page: u64) -> io::Result<()> {
        if !self.userfault.has_poison() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.userfault.poison(self.address(page), PAGE_BYTES as u64)
    }

    fn address(&self, page: u64) -> u64 {
        self.mapping.address().saturating_add(page.saturating_mul(PAGE_BYTES as u64))
    }
}
