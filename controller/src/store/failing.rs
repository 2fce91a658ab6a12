//! A backend whose disk fails on demand.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use redb::backends::InMemoryBackend;
use redb::{Builder, StorageBackend};

use super::{Store, StoreError};

#[derive(Debug)]
struct Disk {
    memory: InMemoryBackend,
    broken: Arc<AtomicBool>,
}

impl Disk {
    fn check(&self) -> io::Result<()> {
        if self.broken.load(Ordering::SeqCst) {
            return Err(io::Error::other("injected disk failure"));
        }
        Ok(())
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        self.memory.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.memory.read(offset, out)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.check()?;
        self.memory.set_len(len)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.check()?;
        self.memory.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.check()?;
        self.memory.write(offset, data)
    }
}

impl Store {
    /// A store that fails to write once the returned switch is set.
    pub(crate) fn breakable() -> Result<(Self, Arc<AtomicBool>), StoreError> {
        let broken = Arc::new(AtomicBool::new(false));
        let disk = Disk { memory: InMemoryBackend::new(), broken: Arc::clone(&broken) };
        let database = Builder::new()
            .create_with_backend(disk)
            .map_err(|error| StoreError::Io(error.to_string()))?;
        Ok((Self::start(database)?, broken))
    }
}
