//! Which pages a process has: `/proc/pid/pagemap`.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::PAGE_BYTES;
use super::memory::Mapping;

const ENTRY_BYTES: usize = size_of::<u64>();
/// The page is in memory, or in the system's swap space (or marked as poisoned).
const POPULATED: u64 = 0b11 << 62;

/// This process's pages.
#[derive(Debug)]
pub(crate) struct Pagemap(File);

impl Pagemap {
    pub(crate) fn open() -> io::Result<Self> {
        super::open_own("/proc/self/pagemap").map(Self)
    }

    /// Calls `visit` with a page's number in the mapping, and whether the process has it, for `count` pages from `first`.
    pub(crate) fn read(
        &self,
        mapping: &Mapping,
        first: u64,
        count: u64,
        mut visit: impl FnMut(u64, bool),
    ) -> io::Result<()> {
        let mut buffer = [0; 512 * ENTRY_BYTES];
        let mut page = first;
        let end = first.saturating_add(count);
        while page < end {
            let wanted = usize::try_from(end - page).unwrap_or(usize::MAX).min(512);
            let bytes = buffer.get_mut(..wanted * ENTRY_BYTES).unwrap_or_default();
            let number = mapping.address() / PAGE_BYTES as u64 + page;
            self.0.read_exact_at(bytes, number * ENTRY_BYTES as u64)?;
            let (entries, _) = bytes.as_chunks::<ENTRY_BYTES>();
            for entry in entries {
                visit(page, u64::from_ne_bytes(*entry) & POPULATED != 0);
                page += 1;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn pages_that_were_touched_are_there() {
        let mapping = Mapping::reserve(2000 * PAGE_BYTES).expect("there is memory");
        mapping.advise(rustix::mm::Advice::LinuxNoHugepage).expect("it is possible");
        let words = PAGE_BYTES / 4;
        for page in (100..2000).step_by(7) {
            mapping.words()[page * words].store(1, Ordering::Relaxed);
        }
        let pagemap = Pagemap::open().expect("it is there");
        let mut seen = 90;
        pagemap
            .read(&mapping, 90, 1900, |page, is_there| {
                assert_eq!(page, seen);
                assert_eq!(is_there, page >= 100 && (page - 100) % 7 == 0, "page {page}");
                seen += 1;
            })
            .expect("it can be read");
        assert_eq!(seen, 1990);
    }
}
