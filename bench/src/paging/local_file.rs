//! A file of this machine as the memory behind a region.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bluebridge::{Error, ReadRequest, Region, WriteRequest};
use bluebridge_pager::RemoteMemory;
use bluebridge_wire::address::PAGE_BYTES;

use super::{Aligned, region_at};

/// Whether the kernel keeps a file's pages in memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Caching {
    /// In its page cache.
    PageCache,
    /// Nowhere: each access goes to the disk (`O_DIRECT`).
    Direct,
}

/// Allocations in a file without a name, which ends with its last user.
///
/// An error of the file is the cause of an [`Error::Carrier`].
pub struct LocalFile {
    file: Arc<File>,
    caching: Caching,
    /// Where the next allocation begins.
    end: Arc<AtomicU64>,
    /// Direct input and output need an aligned place.
    page: Box<Aligned<PAGE_BYTES>>,
}

impl LocalFile {
    /// Creates the file. There must be none at `path`; its name is removed at once.
    ///
    /// # Errors
    /// The system's; EINVAL if the file system has no direct input and output.
    pub fn create(path: &Path, caching: Caching) -> io::Result<Self> {
        let flags = match caching {
            Caching::PageCache => 0,
            Caching::Direct => libc::O_DIRECT,
        };
        let mut options = File::options();
        let file = options.read(true).write(true).create_new(true).custom_flags(flags).open(path);
        // If O_DIRECT is refused, the file was created nevertheless.
        if !matches!(&file, Err(error) if error.kind() == io::ErrorKind::AlreadyExists) {
            let _ = fs::remove_file(path);
        }
        Ok(Self::over(Arc::new(file?), caching, Arc::default()))
    }

    fn over(file: Arc<File>, caching: Caching, end: Arc<AtomicU64>) -> Self {
        Self { file, caching, end, page: Box::new(Aligned([0; PAGE_BYTES])) }
    }

    /// Another access to the same file.
    #[must_use]
    pub fn another(&self) -> Self {
        Self::over(Arc::clone(&self.file), self.caching, Arc::clone(&self.end))
    }

    /// Waits until everything that was written is on the disk, so that this is not done later.
    ///
    /// # Errors
    /// The system's.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn read(&mut self, buffer: &mut [u8], start: u64) -> io::Result<()> {
        if self.caching == Caching::PageCache {
            return self.file.read_exact_at(buffer, start);
        }
        for (at, part) in (start..).step_by(PAGE_BYTES).zip(buffer.chunks_mut(PAGE_BYTES)) {
            self.file.read_exact_at(&mut self.page.0, at)?;
            part.copy_from_slice(&self.page.0[..part.len()]);
        }
        Ok(())
    }

    fn write(&mut self, data: &[u8], start: u64) -> io::Result<()> {
        if self.caching == Caching::PageCache {
            return self.file.write_all_at(data, start);
        }
        // The pager writes whole pages.
        for (at, part) in (start..).step_by(PAGE_BYTES).zip(data.chunks(PAGE_BYTES)) {
            self.page.0[..part.len()].copy_from_slice(part);
            self.file.write_all_at(&self.page.0, at)?;
        }
        Ok(())
    }
}

fn carrier(error: io::Error) -> Error {
    Error::Carrier { cause: Arc::new(error) }
}

impl RemoteMemory for LocalFile {
    fn create(&mut self, length_bytes: u64) -> Result<Region, Error> {
        let start = self.end.fetch_add(length_bytes, Ordering::Relaxed);
        self.file.set_len(start.saturating_add(length_bytes)).map_err(carrier)?;
        region_at(start, length_bytes)
    }

    fn delete(&mut self, _region: Region) -> Result<(), Error> {
        Ok(())
    }

    fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), Error> {
        for request in requests {
            let start = request.pointer.location.offset();
            request.result = self.read(request.buffer, start).map_err(carrier);
        }
        Ok(())
    }

    fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), Error> {
        for request in requests {
            let start = request.pointer.location.offset();
            request.result = self.write(request.data, start).map_err(carrier);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_testkit::Scratch;

    use super::*;

    #[test]
    fn a_file_keeps_pages_and_has_no_name() {
        let scratch = Scratch::new("local-file");
        let path = scratch.file("pages");
        for caching in [Caching::PageCache, Caching::Direct] {
            let mut file = match LocalFile::create(&path, caching) {
                Ok(file) => file,
                // Some file systems have no direct input and output.
                Err(_) if caching == Caching::Direct => continue,
                Err(error) => panic!("{error}"),
            };
            assert!(!path.exists());
            let first = file.create(2 * PAGE_BYTES as u64).expect("created");
            let second = file.another().create(PAGE_BYTES as u64).expect("created");
            for (region, byte) in [(first, 1), (second, 2)] {
                let data = vec![byte; usize::try_from(region.length_bytes()).expect("short")];
                let mut writes = [WriteRequest::new(region.base(), &data)];
                file.write_many(&mut writes).expect("written");
                assert!(writes[0].result.is_ok());
            }
            for (region, byte) in [(second, 2), (first, 1)] {
                let mut data = vec![0; usize::try_from(region.length_bytes()).expect("short")];
                let mut reads = [ReadRequest::new(region.base(), &mut data)];
                file.another().read_many(&mut reads).expect("read");
                assert!(reads[0].result.is_ok() && data.iter().all(|seen| *seen == byte));
            }
        }
    }

    #[test]
    fn an_existing_file_stays() {
        let scratch = Scratch::new("local-file-taken");
        let path = scratch.file("pages");
        fs::write(&path, "mine").expect("written");
        assert!(LocalFile::create(&path, Caching::PageCache).is_err());
        assert_eq!(fs::read_to_string(&path).expect("there"), "mine");
    }
}
