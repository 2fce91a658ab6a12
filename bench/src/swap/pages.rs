//! Accesses to pages that are out: in swap, and in no cache.
//!
//! A page that was written to swap stays in memory until it is needed for something else, and an access then finds it
//! there (the *swap cache*). `mincore` says that such a page is in memory, so only pages are accessed of which it says
//! the opposite. An access counts only if the kernel counted a major fault for it.

use std::fs::File;
use std::io::{self, BufRead};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rand::{Rng, SeedableRng, rngs::SmallRng};
use rustix::mm::{Advice, MapFlags, MlockAllFlags, ProtFlags};
use serde::{Deserialize, Serialize};

use super::area::Area;
use super::cgroup::{Cgroup, Relief};
use super::machine::Compression;
use super::worker::{Job, Worker, answer, major_faults, receive};
use super::{SwapError, failed};
use crate::contest::{Contestant, Length};
use crate::paging::is_local;
use crate::pin;
use crate::placement::now;
use crate::summary::Samples;

const PAGE_BYTES: usize = 4096;
/// Accesses after which pages are pressed out again: fewer than the limit has room for, so that no access has to wait
/// until others are out.
const BATCH: usize = 400;
/// Accesses that are not timed after pages were pressed out.
const WARM_UP: usize = 5;
/// The share of pages that must be out, in percent.
const OUT_PERCENT: usize = 90;
/// How long pressing out may take.
const PRESSING: Duration = Duration::from_secs(60);
/// How long a turn may take.
const TURN: Duration = Duration::from_secs(300);

/// Pages, and their limit.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct PagesJob {
    /// How many pages.
    pub count: usize,
    /// The core of the accesses.
    pub core: usize,
    /// The cgroup of the process, and its limit.
    pub group: Cgroup,
    /// The limit in bytes.
    pub limit_bytes: u64,
    /// The area in which the pages are.
    pub area: Area,
}

/// What is known when the pages are out.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
pub struct Filled {
    /// Pages that are out.
    pub out_count: usize,
    /// The size of zram's contents after compression, as a share.
    pub compressed_share: Option<f64>,
}

/// A turn.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct Turn {
    warm_up_count: usize,
    operation_count: usize,
}

/// The contents of a word: half of a page is as good as random, and half is zeros, so that a page can be compressed to a
/// little more than half.
fn word(page: usize, at: usize) -> u64 {
    if at >= PAGE_BYTES / 16 {
        return 0;
    }
    ((page as u64 + 1) << 9 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

struct Pages {
    start: *mut u8,
    count: usize,
    map: File,
    /// The number of the swap area with the pages.
    area: u64,
    random: SmallRng,
    job: PagesJob,
}

#[allow(unsafe_code, reason = "mapped memory is used by address, because every access counts")]
impl Pages {
    fn fill(job: &PagesJob) -> Result<Self, SwapError> {
        pin(job.core).map_err(failed(format!("use core {}", job.core)))?;
        // The process's own memory stays, so that a fault is on the pages alone.
        let locked = rustix::mm::mlockall(MlockAllFlags::CURRENT);
        locked.map_err(|error| failed("lock the process's own memory")(error.into()))?;
        let bytes = job.count * PAGE_BYTES;
        // SAFETY: the kernel chooses unused addresses.
        let start = unsafe {
            let none = core::ptr::null_mut();
            let writable = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap_anonymous(none, bytes, writable, MapFlags::PRIVATE)
        };
        let start = start.map_err(|error| failed("map memory")(error.into()))?;
        // SAFETY: the range is the mapping's. Huge pages would go out as one; a kernel without them refuses.
        let _ = unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxNoHugepage) };
        let map = File::open("/proc/self/pagemap").map_err(failed("open /proc/self/pagemap"))?;
        let random = SmallRng::seed_from_u64(0x0fa7);
        let mut pages =
            Self { start: start.cast(), count: job.count, map, area: 0, random, job: job.clone() };
        for page in 0..pages.count {
            for at in 0..PAGE_BYTES / 8 {
                // SAFETY: the word is inside the mapping, and aligned; nobody else uses it.
                unsafe { pages.word_address(page, at).write(word(page, at)) };
            }
        }
        pages.press()?;
        pages.area = pages.only_area()?;
        Ok(pages)
    }

    fn address(&self, page: usize) -> *mut u8 {
        self.start.wrapping_add(page * PAGE_BYTES)
    }

    fn word_address(&self, page: usize, at: usize) -> *mut u64 {
        self.address(page).wrapping_add(at * 8).cast()
    }

    /// Whether each page is in memory, also in a cache.
    fn residency(&self) -> Result<Vec<u8>, SwapError> {
        let mut states = vec![0; self.count];
        // SAFETY: the system call writes a byte for each page of the range, and the vector has one for each.
        let result = unsafe {
            libc::mincore(self.start.cast(), self.count * PAGE_BYTES, states.as_mut_ptr())
        };
        match result {
            0 => Ok(states),
            _ => Err(failed("find out which pages are out (mincore)")(io::Error::last_os_error())),
        }
    }

    fn is_out(&self, page: usize) -> Result<bool, SwapError> {
        let local = is_local(self.address(page));
        let local = local.map_err(failed("find out which pages are out (mincore)"))?;
        Ok(!local && self.swapped_to(page)? == Some(self.area))
    }

    fn out_count(&self) -> Result<usize, SwapError> {
        Ok(self.residency()?.iter().filter(|state| **state & 1 == 0).count())
    }

    /// The number of the swap area with a page (`Documentation/admin-guide/mm/pagemap.rst`), if it is in one.
    fn swapped_to(&self, page: usize) -> Result<Option<u64>, SwapError> {
        let mut entry = [0; 8];
        let at = self.address(page).addr() / PAGE_BYTES * 8;
        let read = self.map.read_exact_at(&mut entry, at as u64);
        read.map_err(failed("read /proc/self/pagemap"))?;
        let entry = u64::from_ne_bytes(entry);
        Ok((entry >> 62 & 1 == 1).then_some(entry & 0x1f))
    }

    /// The number of the area, if all pages that are out are in one.
    fn only_area(&self) -> Result<u64, SwapError> {
        let mut found = None;
        for page in 0..self.count {
            match (self.swapped_to(page)?, found) {
                (Some(area), None) => found = Some(area),
                (Some(area), Some(other)) if area != other => {
                    return Err(SwapError::Worker("its pages are in two swap areas".to_owned()));
                }
                _ => {}
            }
        }
        found.ok_or_else(|| SwapError::Worker("none of its pages is in swap".to_owned()))
    }

    /// Presses pages out, until nearly all are.
    fn press(&self) -> Result<(), SwapError> {
        let until = Instant::now() + PRESSING;
        loop {
            self.job.group.press(self.job.limit_bytes)?;
            if self.out_count()? * 100 >= self.count * OUT_PERCENT {
                return Ok(());
            }
            if Instant::now() > until {
                let seconds = PRESSING.as_secs();
                return Err(SwapError::Deadline { what: "pressing pages out", seconds });
            }
            // They leave when they are written.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Times an access to a page that is out, and checks the page.
    fn access(&mut self) -> Result<Duration, SwapError> {
        // Few accesses find a page that is being read at this moment.
        for _ in 0..1000 {
            let page = self.random.random_range(0..self.count);
            if !self.is_out(page)? {
                continue;
            }
            let address = self.word_address(page, 0);
            let before = major_faults(libc::RUSAGE_THREAD);
            let begin = now();
            // SAFETY: the word is inside the mapping, and aligned; nobody else uses it.
            core::hint::black_box(unsafe { address.read_volatile() });
            let time = now() - begin;
            let is_major = major_faults(libc::RUSAGE_THREAD) > before;
            for at in 0..PAGE_BYTES / 8 {
                // SAFETY: as above.
                if unsafe { self.word_address(page, at).read() } != word(page, at) {
                    return Err(SwapError::Worker(format!("page {page} has other contents")));
                }
            }
            if is_major {
                return Ok(time);
            }
        }
        Err(SwapError::Worker("too few pages are out".to_owned()))
    }

    fn turn(&mut self, turn: Turn) -> Result<Vec<u64>, SwapError> {
        let mut times = Vec::with_capacity(turn.operation_count);
        self.press()?;
        for _ in 0..turn.warm_up_count {
            self.access()?;
        }
        for at in 1..=turn.operation_count {
            times.push(u64::try_from(self.access()?.as_nanos()).unwrap_or(u64::MAX));
            if at % BATCH == 0 && at < turn.operation_count {
                self.press()?;
                for _ in 0..WARM_UP {
                    self.access()?;
                }
            }
        }
        Ok(times)
    }
}

impl Drop for Pages {
    #[allow(unsafe_code, reason = "memory is unmapped")]
    fn drop(&mut self) {
        // SAFETY: the range is the mapping's, and nobody uses it any more.
        let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.count * PAGE_BYTES) };
    }
}

/// The worker's side: fills the pages, then does a turn for each request.
pub(super) fn serve(
    job: &PagesJob,
    requests: &mut (impl BufRead + AsSocket),
) -> Result<(), SwapError> {
    let mut pages = match Pages::fill(job) {
        Ok(pages) => pages,
        Err(error) => return answer::<Filled>(requests.socket(), Err(error)),
    };
    let filled = pages.out_count().map(|out_count| Filled {
        out_count,
        compressed_share: Compression::of(&job.area.path).and_then(Compression::share),
    });
    answer(requests.socket(), filled)?;
    while let Some(turn) = receive(requests)? {
        let times = pages.turn(turn);
        answer(requests.socket(), times)?;
    }
    Ok(())
}

/// A reader over a socket.
pub(super) trait AsSocket {
    fn socket(&self) -> &UnixStream;
}

impl AsSocket for io::BufReader<UnixStream> {
    fn socket(&self) -> &UnixStream {
        self.get_ref()
    }
}

/// A contestant whose pages are those of a worker.
#[derive(Debug)]
pub struct Swapped {
    name: String,
    worker: Worker,
    /// While the pages are filled, they are pressed out.
    _relief: Relief,
    filled: Filled,
}

impl Swapped {
    /// Starts the worker, and waits until its pages are out.
    ///
    /// # Errors
    /// The worker's.
    pub fn new(
        name: impl Into<String>,
        command: std::process::Command,
        job: &PagesJob,
    ) -> Result<Self, SwapError> {
        job.group.set_limit(Some(job.limit_bytes))?;
        let relief = Relief::start(&job.group, job.limit_bytes)?;
        let mut worker = Worker::start(command, &job.group, &Job::Pages(job.clone()), TURN)?;
        let filled = worker.answer()?;
        Ok(Self { name: name.into(), worker, _relief: relief, filled })
    }

    /// What is known of its pages.
    #[must_use]
    pub const fn filled(&self) -> Filled {
        self.filled
    }
}

impl Contestant for Swapped {
    fn name(&self) -> &str {
        &self.name
    }

    fn operate(&mut self) -> Result<(), String> {
        self.turn(Length { round_count: 1, warm_up_count: 0, operation_count: 1 }).map(drop)
    }

    fn turn(&mut self, length: Length) -> Result<Samples, String> {
        let Length { warm_up_count, operation_count, .. } = length;
        let asked = self.worker.ask(&Turn { warm_up_count, operation_count });
        let times = asked.and_then(|()| self.worker.answer::<Vec<u64>>());
        let mut samples = Samples::default();
        for nanos in times.map_err(|error| format!("{}: {error}", self.name))? {
            samples.add(Duration::from_nanos(nanos));
        }
        Ok(samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_of_a_page_is_zeros_and_no_two_pages_are_alike() {
        let page = |page| (0..PAGE_BYTES / 8).map(|at| word(page, at)).collect::<Vec<_>>();
        let (one, two) = (page(0), page(1));
        assert_eq!(one.iter().filter(|word| **word == 0).count(), PAGE_BYTES / 16);
        let alike = one.iter().zip(&two).filter(|(one, two)| one == two && **one != 0);
        assert_eq!(alike.count(), 0);
    }
}
