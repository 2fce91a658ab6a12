//! Page faults: a page of a remote region, the same resolved from memory or a file, and what the system offers beside
//! it.

mod local_file;

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bluebridge::{
    Client, Error as RemoteError, Location, NodeId, Pointer, ReadRequest, Region, Space, Tag,
    Transport, WriteRequest,
};
use bluebridge_pager::{FaultMode, RegionOptions, RemoteMemory, RemoteRegion};
use bluebridge_wire::ArenaGeneration;
use bluebridge_wire::address::PAGE_BYTES;
use rand::{Rng, SeedableRng, rngs::SmallRng, seq::SliceRandom};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::Serialize;

pub use self::local_file::{Caching, LocalFile};
use crate::contest::Contestant;
use crate::directory::{DirectoryClient, DirectoryError};
use crate::summary::{Samples, Summary, quantile};

/// An allocation of memory that is no server's.
fn region_at(offset: u64, length_bytes: u64) -> Result<Region, RemoteError> {
    let location = Location::new(ArenaGeneration::default(), offset).ok_or(RemoteError::Length)?;
    let base = Pointer { space: Space(1), node: NodeId(1), tag: Tag(1), location };
    Ok(Region::new(base, length_bytes)?)
}

/// Remote memory in this process: what a fault costs without a network.
#[derive(Clone, Debug, Default)]
pub struct Nearby(Arc<Mutex<Vec<u8>>>);

impl Nearby {
    fn range(pointer: Pointer, length: usize) -> core::ops::Range<usize> {
        let start = usize::try_from(pointer.location.offset()).unwrap_or(usize::MAX);
        start..start.saturating_add(length)
    }

    fn with<R>(&self, use_bytes: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        use_bytes(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl RemoteMemory for Nearby {
    fn create(&mut self, length_bytes: u64) -> Result<Region, RemoteError> {
        let length = usize::try_from(length_bytes).map_err(|_| RemoteError::Length)?;
        let offset = self.with(|bytes| {
            let offset = bytes.len() as u64;
            bytes.resize(bytes.len().saturating_add(length), 0);
            offset
        });
        region_at(offset, length_bytes)
    }

    fn delete(&mut self, _region: Region) -> Result<(), RemoteError> {
        Ok(())
    }

    fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), RemoteError> {
        self.with(|bytes| {
            for request in requests {
                let range = Self::range(request.pointer, request.buffer.len());
                match bytes.get(range) {
                    Some(bytes) => request.buffer.copy_from_slice(bytes),
                    None => request.result = Err(RemoteError::Length),
                }
            }
        });
        Ok(())
    }

    fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), RemoteError> {
        self.with(|bytes| {
            for request in requests {
                let range = Self::range(request.pointer, request.data.len());
                match bytes.get_mut(range) {
                    Some(bytes) => bytes.copy_from_slice(request.data),
                    None => request.result = Err(RemoteError::Length),
                }
            }
        });
        Ok(())
    }
}

/// Why pages could not be faulted in as planned.
#[derive(Debug, thiserror::Error)]
pub enum FaultError {
    /// The pager's.
    #[error(transparent)]
    Pager(#[from] bluebridge_pager::Error),
    /// A memory server's or the network's.
    #[error("the pages cannot be used: {0}")]
    Remote(#[from] RemoteError),
    /// The directory service's.
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    /// A file's.
    #[error("the file of pages cannot be used: {0}; choose another place for it")]
    File(#[from] io::Error),
    /// What was read is not what was written.
    #[error("page {0} holds other bytes than were written; this is a defect of BlueBridge")]
    WrongBytes(usize),
    /// The directory's entry differs from the pointer; nothing moves here.
    #[error("the directory says that {pointer} is on node {node}; start the directory again")]
    WrongNode {
        /// The page.
        pointer: Pointer,
        /// The node of its entry.
        node: NodeId,
    },
    /// A page did not leave, so that there is no fault to measure.
    #[error("page {0} did not leave local memory; run the command again")]
    StillLocal(usize),
    /// The system does not say which pages are local.
    #[error("cannot find out which pages are local (mincore): {0}")]
    Mincore(#[source] io::Error),
    /// Each page is used once.
    #[error("all pages were used; make a new region")]
    UsedUp,
}

impl FaultError {
    /// A file's error arrives as a carrier's ([`LocalFile`]).
    fn of_remote(error: RemoteError) -> Self {
        match &error {
            RemoteError::Carrier { cause } => match cause.downcast_ref::<io::Error>() {
                Some(cause) => Self::File(io::Error::new(cause.kind(), cause.to_string())),
                None => Self::Remote(error),
            },
            _ => Self::Remote(error),
        }
    }
}

/// What the resolution of the last fault left behind: times in nanoseconds since `start`, and the first failure.
#[derive(Debug)]
struct Record {
    start: Instant,
    /// The fault reached the pager.
    begun: AtomicU64,
    /// The pager requested the page.
    asked: AtomicU64,
    /// The page's node was known.
    found: AtomicU64,
    /// The page was there.
    read: AtomicU64,
    failure: Mutex<Option<FaultError>>,
}

impl Record {
    fn new() -> Self {
        let [begun, asked, found, read] = [(); 4].map(|()| AtomicU64::new(0));
        Self { start: Instant::now(), begun, asked, found, read, failure: Mutex::new(None) }
    }

    fn at(&self, time: Instant) -> u64 {
        u64::try_from(time.saturating_duration_since(self.start).as_nanos()).unwrap_or(u64::MAX)
    }

    fn note(&self, time: &AtomicU64) {
        time.store(self.at(Instant::now()), Ordering::Relaxed);
    }

    fn fail(&self, error: FaultError) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error);
    }

    fn has_failed(&self) -> bool {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The first failure, or the result if there was none.
    fn settle<R>(&self, result: Result<R, FaultError>) -> Result<R, FaultError> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        failure.map_or(result, Err)
    }
}

/// Access to the memory that holds a region's pages.
pub struct Source {
    memory: Box<dyn RemoteMemory>,
    directory: Option<DirectoryClient>,
}

impl<M: RemoteMemory + 'static> From<M> for Source {
    fn from(memory: M) -> Self {
        Self { memory: Box::new(memory), directory: None }
    }
}

impl Source {
    /// The same memory, with a directory service that knows each page from its creation on, and is asked before each
    /// read.
    #[must_use]
    pub fn with_directory(self, directory: DirectoryClient) -> Self {
        Self { directory: Some(directory), ..self }
    }
}

/// Remote memory whose reads are timed, after a question to a directory service if there is one.
///
/// A read that fails is recorded, and the page is filled with zeros: the fault goes on, and [`Faults`] returns the
/// failure. Otherwise the process would get SIGBUS.
struct Timed {
    source: Source,
    record: Arc<Record>,
}

impl Timed {
    fn read(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), FaultError> {
        if let Some(directory) = &mut self.source.directory {
            for pointer in requests.iter().map(|request| request.pointer) {
                let node = directory.find(pointer)?;
                if node != pointer.node {
                    return Err(FaultError::WrongNode { pointer, node });
                }
            }
            self.record.note(&self.record.found);
        } else {
            let asked = self.record.asked.load(Ordering::Relaxed);
            self.record.found.store(asked, Ordering::Relaxed);
        }
        self.source.memory.read_many(requests).map_err(FaultError::of_remote)?;
        let failed = requests.iter().find_map(|request| request.result.as_ref().err());
        failed.map_or(Ok(()), |error| Err(FaultError::of_remote(error.clone())))
    }
}

/// The addresses of an allocation's pages.
fn pages(region: Region) -> impl Iterator<Item = Pointer> {
    let starts = (0..region.length_bytes()).step_by(PAGE_BYTES);
    starts.filter_map(move |start| region.at(start).ok())
}

impl RemoteMemory for Timed {
    fn create(&mut self, length_bytes: u64) -> Result<Region, RemoteError> {
        // The pager tries again for each page; each would wait until the deadline.
        if self.record.has_failed() {
            return Err(RemoteError::NoMemoryNode);
        }
        let region = self.source.memory.create(length_bytes).inspect_err(|error| {
            self.record.fail(FaultError::of_remote(error.clone()));
        })?;
        let Some(directory) = &mut self.source.directory else { return Ok(region) };
        if let Err(error) = pages(region).try_for_each(|page| directory.register(page)) {
            self.record.fail(error.into());
            let _ = self.source.memory.delete(region);
            return Err(RemoteError::NoMemoryNode);
        }
        Ok(region)
    }

    fn delete(&mut self, region: Region) -> Result<(), RemoteError> {
        if let Some(directory) = &mut self.source.directory {
            // A directory that does not respond must not delay the end once for each page.
            let removed = pages(region).try_for_each(|page| directory.remove(page).map(drop));
            if removed.is_err() {
                self.source.directory = None;
            }
        }
        self.source.memory.delete(region)
    }

    fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), RemoteError> {
        self.record.note(&self.record.asked);
        let result = self.read(requests);
        self.record.note(&self.record.read);
        if let Err(error) = result {
            self.record.fail(error);
            for request in requests {
                request.buffer.fill(0);
                request.result = Ok(());
            }
        }
        Ok(())
    }

    fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), RemoteError> {
        let result = self.source.memory.write_many(requests);
        let failed = requests.iter().find_map(|request| request.result.as_ref().err());
        if let Some(error) = result.as_ref().err().or(failed) {
            self.record.fail(FaultError::of_remote(error.clone()));
        }
        result
    }

    fn fault_begun(&mut self, at: Instant) {
        self.record.begun.store(self.record.at(at), Ordering::Relaxed);
    }
}

/// The parts of a fault, as in Figure 5 of the paper, in microseconds.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Parts {
    /// From the access until the fault reached the pager.
    pub enter_us: f64,
    /// The question to the directory service and its response; 0 without one.
    pub directory_us: f64,
    /// The request for the page, until the page is there.
    pub data_us: f64,
    /// From then until the access is done: the page is copied to its place, and the thread goes on.
    pub exit_us: f64,
    /// The rest: what the pager does between the fault and the first request.
    pub other_us: f64,
}

/// Which page the next fault is on.
enum Order {
    /// Any that is not local.
    Random(SmallRng),
    /// Each once; the last one is next.
    Once(Vec<usize>),
}

/// Faults on pages of a region that are not local, in random order.
pub struct Faults {
    name: String,
    region: RemoteRegion,
    record: Arc<Record>,
    order: Order,
    next: usize,
    samples: Samples,
    /// The parts of each fault in microseconds, in the order of [`Parts`].
    parts: [Vec<f64>; 5],
}

/// The smallest limit of local memory that the pager accepts.
const LOCAL_BYTES_MIN: u64 = 64 << 10;

impl Faults {
    /// A region of `options` whose pages are all filled, over memory that `open` gives access to.
    ///
    /// # Errors
    /// What the pager or `open` returns.
    pub fn new(
        name: impl Into<String>,
        options: &RegionOptions,
        open: impl FnMut() -> Result<Source, FaultError>,
    ) -> Result<Self, FaultError> {
        let order = Order::Random(SmallRng::seed_from_u64(0xfa17));
        let mut faults = Self::over(name.into(), options, order, open)?;
        faults.fill()?;
        Ok(faults)
    }

    /// Faults on each of `page_count` pages once, without other work of the pager meanwhile: at the beginning all
    /// pages are remote, and all may become local.
    ///
    /// # Errors
    /// What the pager or `open` returns; [`FaultError::StillLocal`].
    pub fn once_each(
        name: impl Into<String>,
        page_count: u32,
        limits: Limits,
        open: impl FnMut() -> Result<Source, FaultError>,
    ) -> Result<Self, FaultError> {
        let bytes = u64::from(page_count) * PAGE_BYTES as u64;
        let options = RegionOptions::new(bytes, bytes.max(LOCAL_BYTES_MIN));
        let options =
            options.mode(limits.mode).deadline(limits.deadline).prefetch_pages(0).lanes(1);
        let page_count = page_count as usize;
        let mut order: Vec<_> = (0..page_count).collect();
        order.shuffle(&mut SmallRng::seed_from_u64(0xfa17));
        let mut faults = Self::over(name.into(), &options, Order::Once(order), open)?;
        faults.fill()?;
        faults.region.evict(0..page_count * PAGE_BYTES)?;
        Ok(faults)
    }

    fn over(
        name: String,
        options: &RegionOptions,
        order: Order,
        mut open: impl FnMut() -> Result<Source, FaultError>,
    ) -> Result<Self, FaultError> {
        let record = Arc::new(Record::new());
        let region = RemoteRegion::with_remotes(options, || {
            let timed = Timed { source: open()?, record: Arc::clone(&record) };
            Ok::<_, FaultError>(Box::new(timed) as Box<dyn RemoteMemory>)
        })?;
        let (samples, parts) = Default::default();
        Ok(Self { name, region, record, order, next: 0, samples, parts })
    }

    /// Fills all pages, and writes them back.
    fn fill(&mut self) -> Result<(), FaultError> {
        let pages = self.region.as_mut_slice().chunks_exact_mut(PAGE_BYTES);
        for (number, page) in pages.enumerate() {
            for (at, word) in page.chunks_exact_mut(8).enumerate() {
                word.copy_from_slice(&stamp(number, at));
            }
        }
        let flushed = self.region.flush().map_err(FaultError::from);
        self.record.settle(flushed)
    }

    fn is_local(&self, page: usize) -> Result<bool, FaultError> {
        let start = self.region.as_ptr().as_ptr().wrapping_add(page * PAGE_BYTES);
        is_local(start).map_err(FaultError::Mincore)
    }

    /// Executes the next fault, whose time is a sample, and checks all bytes of the page.
    ///
    /// # Errors
    /// [`FaultError`].
    pub fn fault(&mut self) -> Result<(), FaultError> {
        self.choose()?;
        self.access()?;
        let page = self.next * PAGE_BYTES..(self.next + 1) * PAGE_BYTES;
        let words = self.region.as_slice().get(page).unwrap_or_default().chunks_exact(8);
        let is_right = words.enumerate().all(|(at, word)| word == stamp(self.next, at));
        if is_right { Ok(()) } else { Err(FaultError::WrongBytes(self.next)) }
    }

    fn choose(&mut self) -> Result<(), FaultError> {
        loop {
            let (next, is_only) = match &mut self.order {
                Order::Random(random) => {
                    (random.random_range(0..self.region.len() / PAGE_BYTES), false)
                }
                Order::Once(pages) => (pages.pop().ok_or(FaultError::UsedUp)?, true),
            };
            self.next = next;
            match self.is_local(next)? {
                false => return Ok(()),
                true if is_only => return Err(FaultError::StillLocal(next)),
                true => {}
            }
        }
    }

    /// Reads the first word of the chosen page. A contest times this, so the other words are not looked at here.
    fn access(&mut self) -> Result<(), FaultError> {
        let start = self.next * PAGE_BYTES;
        let started = Instant::now();
        let region = core::hint::black_box(self.region.as_slice());
        core::hint::black_box(region.get(start).copied());
        let ended = Instant::now();
        let is_right = region.get(start..start + 8) == Some(&stamp(self.next, 0));
        self.record.settle(if is_right {
            Ok(())
        } else {
            Err(FaultError::WrongBytes(self.next))
        })?;
        self.samples.add(ended - started);
        self.add_parts(started, ended);
        Ok(())
    }

    fn add_parts(&mut self, started: Instant, ended: Instant) {
        let record = &self.record;
        let [begun, asked, found, read] =
            [&record.begun, &record.asked, &record.found, &record.read]
                .map(|time| time.load(Ordering::Relaxed));
        let (started, ended) = (record.at(started), record.at(ended));
        let known = [(started, begun), (asked, found), (found, read), (read, ended)]
            .map(|(from, to)| to.saturating_sub(from));
        let other = ended.saturating_sub(started).saturating_sub(known.iter().sum());
        for (part, time) in self.parts.iter_mut().zip(known.into_iter().chain([other])) {
            part.push(micros(time));
        }
    }

    /// The times of the faults so far.
    #[must_use]
    pub fn summary(&self) -> Summary {
        self.samples.summary()
    }

    /// A quantile of each part of the faults so far.
    #[must_use]
    pub fn parts(&self, at: f64) -> Parts {
        let [enter_us, directory_us, data_us, exit_us, other_us] =
            self.parts.each_ref().map(|part| quantile(part, at));
        Parts { enter_us, directory_us, data_us, exit_us, other_us }
    }

    /// How the faults are resolved on this machine.
    #[must_use]
    pub fn mechanisms(&self) -> bluebridge_pager::Mechanisms {
        self.region.mechanisms()
    }

    /// What the pager counted.
    #[must_use]
    pub fn statistics(&self) -> bluebridge_pager::Statistics {
        self.region.statistics()
    }
}

/// Faults between two turns: few, so that all ways see the same changes of the machine's speed.
const TURN_FAULTS: u32 = 50;

/// Executes `count` faults of each region, in turns.
///
/// # Errors
/// The first [`FaultError`].
pub fn take_turns(regions: &mut [Faults], count: u32) -> Result<(), FaultError> {
    let mut left = count;
    while left > 0 {
        let turn = left.min(TURN_FAULTS);
        for region in &mut *regions {
            for _ in 0..turn {
                region.fault()?;
            }
        }
        left -= turn;
    }
    Ok(())
}

/// How faults on each page once are resolved.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// By whom.
    pub mode: FaultMode,
    /// How long one may take.
    pub deadline: Duration,
}

/// The content of a word of a page: not 0, so that the page is stored, and the same nowhere else.
fn stamp(page: usize, word: usize) -> [u8; 8] {
    ((page as u64 + 1) << 9 | word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()
}

impl Contestant for Faults {
    fn name(&self) -> &str {
        &self.name
    }

    fn prepare(&mut self) -> Result<(), String> {
        self.choose().map_err(|error| error.to_string())
    }

    fn operate(&mut self) -> Result<(), String> {
        self.access().map_err(|error| error.to_string())
    }
}

#[allow(clippy::cast_precision_loss, reason = "a fault takes less than a second")]
fn micros(nanos: u64) -> f64 {
    nanos as f64 / 1000.0
}

/// Whether the page at an address is in memory, also only in a cache.
#[allow(unsafe_code, reason = "mincore")]
pub(crate) fn is_local(start: *mut u8) -> io::Result<bool> {
    let mut state = 0_u8;
    // SAFETY: the system call writes one byte for one page, whatever the address is.
    match unsafe { libc::mincore(start.cast(), PAGE_BYTES, &raw mut state) } {
        0 => Ok(state & 1 == 1),
        _ => Err(io::Error::last_os_error()),
    }
}

/// READ of a page by the client library.
pub struct Reads<T: Transport> {
    client: Client<T>,
    region: Region,
    random: SmallRng,
    buffer: Box<[u8; PAGE_BYTES]>,
}

impl<T: Transport> Reads<T> {
    /// Allocates `pages` pages.
    ///
    /// # Errors
    /// The client's.
    pub fn new(mut client: Client<T>, pages: u64) -> Result<Self, RemoteError> {
        let region = client.create(pages * PAGE_BYTES as u64)?;
        let random = SmallRng::seed_from_u64(0x4ead);
        Ok(Self { client, region, random, buffer: Box::new([0; PAGE_BYTES]) })
    }
}

impl<T: Transport> Contestant for Reads<T> {
    fn name(&self) -> &'static str {
        "READ of 4096 bytes"
    }

    fn operate(&mut self) -> Result<(), String> {
        let pages = self.region.length_bytes() / PAGE_BYTES as u64;
        let page = self.random.random_range(0..pages) * PAGE_BYTES as u64;
        let pointer = self.region.at(page).map_err(|error| error.to_string())?;
        self.client.read(pointer, &mut *self.buffer).map_err(|error| error.to_string())
    }
}

/// Faults on pages of a mapped file that are in the page cache.
pub struct PageCache {
    start: *mut u8,
    bytes: usize,
    random: SmallRng,
    next: usize,
}

/// A file of `bytes` bytes, all of them written.
fn file(path: &Path, bytes: usize, flags: i32) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .custom_flags(flags)
        .open(path)?;
    let mut block = Box::new(Aligned([1; 1 << 16]));
    for start in (0..bytes).step_by(block.0.len()) {
        let length = block.0.len().min(bytes - start);
        block.0.fill(u8::try_from((start >> 16) % 250 + 1).unwrap_or(1));
        file.write_all_at(&block.0[..length], start as u64)?;
    }
    file.sync_all()?;
    Ok(file)
}

/// Memory as direct input and output needs it.
#[repr(align(4096))]
struct Aligned<const N: usize>([u8; N]);

#[allow(unsafe_code, reason = "a file is mapped")]
impl PageCache {
    /// Writes a file of `bytes` bytes at `path` and maps it.
    ///
    /// # Errors
    /// The system's.
    pub fn new(path: &Path, bytes: usize) -> io::Result<Self> {
        let file = file(path, bytes, 0)?;
        // SAFETY: the kernel chooses unused addresses. The experiment alone uses the file.
        let start = unsafe {
            let none = core::ptr::null_mut();
            rustix::mm::mmap(none, bytes, ProtFlags::READ, MapFlags::SHARED, &file, 0)
        }?;
        // SAFETY: the range is the mapping's; the advice does not change its contents. Without it, a fault also maps
        // neighbours.
        unsafe { rustix::mm::madvise(start, bytes, Advice::Random) }?;
        let random = SmallRng::seed_from_u64(0xcace);
        Ok(Self { start: start.cast(), bytes, random, next: 0 })
    }
}

impl Drop for PageCache {
    #[allow(unsafe_code, reason = "a file is unmapped")]
    fn drop(&mut self) {
        // SAFETY: the range is the mapping's, and nobody uses it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.bytes) };
    }
}

#[allow(unsafe_code, reason = "a mapped file is read")]
impl Contestant for PageCache {
    fn name(&self) -> &'static str {
        "fault on a page in the page cache"
    }

    fn prepare(&mut self) -> Result<(), String> {
        self.next = self.random.random_range(0..self.bytes / PAGE_BYTES) * PAGE_BYTES;
        let start = self.start.wrapping_add(self.next).cast();
        // SAFETY: the page is the mapping's; the file keeps its contents.
        let result = unsafe { rustix::mm::madvise(start, PAGE_BYTES, Advice::LinuxDontNeed) };
        result.map_err(|error| format!("madvise: {error}"))
    }

    fn operate(&mut self) -> Result<(), String> {
        // SAFETY: the page is the mapping's, and the file has it.
        let byte = unsafe { self.start.wrapping_add(self.next).read_volatile() };
        if byte == 0 { Err("the file has zeros".to_owned()) } else { Ok(()) }
    }
}

/// Reads of a page from a disk, without the page cache.
pub struct Disk {
    file: File,
    pages: u64,
    random: SmallRng,
    buffer: Box<Aligned<PAGE_BYTES>>,
}

impl Disk {
    /// Writes a file of `bytes` bytes at `path`.
    ///
    /// # Errors
    /// The system's; EINVAL if the file system has no direct input and output.
    pub fn new(path: &Path, bytes: usize) -> io::Result<Self> {
        let file = file(path, bytes, libc::O_DIRECT)?;
        let random = SmallRng::seed_from_u64(0xd15c);
        let buffer = Box::new(Aligned([0; PAGE_BYTES]));
        Ok(Self { file, pages: (bytes / PAGE_BYTES) as u64, random, buffer })
    }
}

impl Contestant for Disk {
    fn name(&self) -> &'static str {
        "read of 4096 bytes from the disk (O_DIRECT)"
    }

    fn operate(&mut self) -> Result<(), String> {
        let start = self.random.random_range(0..self.pages) * PAGE_BYTES as u64;
        self.file.read_exact_at(&mut self.buffer.0, start).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    const LIMITS: Limits =
        Limits { mode: FaultMode::InThread, deadline: Duration::from_millis(200) };

    fn nearby(pages: u32, mode: FaultMode) -> (Faults, Nearby) {
        let memory = Nearby::default();
        let limits = Limits { mode, ..LIMITS };
        let faults =
            Faults::once_each("nearby", pages, limits, || Ok(Source::from(memory.clone())));
        (faults.expect("memory"), memory)
    }

    #[test]
    fn each_page_faults_once() {
        for mode in [FaultMode::InThread, FaultMode::Threads { count: 2 }] {
            let (faults, _memory) = nearby(700, mode);
            let mut faults = [faults];
            let before = faults[0].statistics().remote_faults;
            take_turns(&mut faults, 700).expect("all are there");
            let [mut faults] = faults;
            assert_eq!(faults.statistics().remote_faults - before, 700);
            assert_eq!(faults.summary().sample_count, 700);
            let parts = faults.parts(0.5);
            assert!(parts.enter_us > 0.0 && parts.exit_us > 0.0, "{parts:?}");
            assert!(parts.directory_us == 0.0, "{parts:?}");
            assert!(matches!(faults.fault(), Err(FaultError::UsedUp)));
        }
    }

    /// The process must not get SIGBUS.
    #[test]
    fn wrong_and_missing_pages_are_errors() {
        let (mut faults, memory) = nearby(20, FaultMode::InThread);
        // The last byte of each page.
        memory.with(|bytes| bytes.iter_mut().skip(4095).step_by(4096).for_each(|byte| *byte ^= 1));
        assert!(matches!(faults.fault(), Err(FaultError::WrongBytes(_))));
        memory.with(Vec::clear);
        assert!(matches!(faults.fault(), Err(FaultError::Remote(RemoteError::Length))));
    }

    #[test]
    fn a_silent_directory_is_an_error() {
        let socket = UdpSocket::bind("[::1]:0").expect("a socket");
        let address = socket.local_addr().expect("it is bound");
        let faults = Faults::once_each("directory", 20, LIMITS, || {
            let directory = DirectoryClient::open(address, Duration::ZERO, LIMITS.deadline)?;
            Ok(Source::from(Nearby::default()).with_directory(directory))
        });
        assert!(matches!(faults, Err(FaultError::Directory(DirectoryError::TimedOut))));
    }
}
