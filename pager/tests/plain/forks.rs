//! A process that forks: both processes go on with the contents of that moment.

//!
//! The children need a store that both processes have, so these tests use shared memory; `tests/tests/root/rack_run.rs`
//! has forks over real packets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64};
use std::time::{Duration, Instant};

use bluebridge::{
    ArenaGeneration, Location, Pointer, ReadRequest, Region, Space, Status, Tag, WriteRequest,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;

/// Remote memory that a process and its children share. It checks that each allocation has one writer.
#[derive(Clone)]
struct Store(Arc<Shared>);

/// The store, as one client uses it.
struct StoreClient {
    store: Store,
    is_lane: bool,
}

struct Shared {
    next: &'static AtomicU64,
    /// Extents that are allocated.
    count: &'static AtomicU64,
    /// Processes.
    processes: &'static AtomicU64,
    /// For each 2 MiB, the process that has written there.
    writers: &'static [AtomicU64],
    bytes: &'static [AtomicU8],
    /// How many clients this process has opened.
    opened: AtomicU64,
    /// Reads of the lanes wait while this is set.
    reads_wait: AtomicBool,
    /// Writes to this extent are refused, because its contents are lost. 0: none.
    lost: AtomicU64,
}

const STORE_BYTES: usize = 1 << 30;
const EXTENT: usize = 2 << 20;

impl Store {
    fn new() -> Self {
        let map = |bytes: usize| {
            let (protection, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            );
            // SAFETY: the kernel chooses unused addresses.
            let start =
                unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
            assert_ne!(start, libc::MAP_FAILED);
            start
        };
        // SAFETY: the mapping is never unmapped, is aligned to pages, and zeros are valid.
        let bytes = unsafe { std::slice::from_raw_parts(map(STORE_BYTES).cast(), STORE_BYTES) };
        let words = map(STORE_BYTES / EXTENT * 8 + 24).cast::<AtomicU64>();
        // SAFETY: as above.
        let words = unsafe { std::slice::from_raw_parts(words, STORE_BYTES / EXTENT + 3) };
        let [next, count, processes, writers @ ..] = words else { unreachable!("there are words") };
        processes.store(1, Ordering::Relaxed);
        // The first byte of the store is never used, so that 0 is no extent.
        next.store(EXTENT as u64, Ordering::Relaxed);
        let (opened, reads_wait, lost) = Default::default();
        let shared = Shared { next, count, processes, writers, bytes, opened, reads_wait, lost };
        Self(Arc::new(shared))
    }

    /// The first clients are the lanes', the last one the evictor's.
    fn open(&self) -> Result<Box<dyn RemoteMemory>, Error> {
        let is_lane = self.0.opened.fetch_add(1, Ordering::Relaxed) % 3 < 2;
        Ok(Box::new(StoreClient { store: self.clone(), is_lane }))
    }

    fn at(pointer: Pointer) -> usize {
        usize::try_from(pointer.location.offset()).expect("it is in the store")
    }
}

impl RemoteMemory for StoreClient {
    fn create(&mut self, length_bytes: u64) -> Result<Region, bluebridge::Error> {
        let start = self.store.0.next.fetch_add(EXTENT as u64, Ordering::SeqCst);
        self.store.0.count.fetch_add(1, Ordering::Relaxed);
        let location = Location::new(ArenaGeneration::MAX, start).expect("it is in an arena");
        let base = Pointer { space: Space(1), node: NodeId(1), tag: Tag(1), location };
        Ok(Region::new(base, length_bytes).expect("it is in an arena"))
    }

    fn delete(&mut self, region: Region) -> Result<(), bluebridge::Error> {
        self.store.0.count.fetch_sub(1, Ordering::Relaxed);
        let start = Store::at(region.base());
        let bytes = usize::try_from(region.length_bytes()).expect("it is in the store");
        // Who still reads it gets wrong bytes.
        self.store.0.bytes[start..start + bytes]
            .iter()
            .for_each(|byte| byte.store(0xdb, Ordering::Relaxed));
        Ok(())
    }

    fn is_alone(&mut self) -> bool {
        self.store.0.processes.load(Ordering::SeqCst) == 1
    }

    fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), bluebridge::Error> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.is_lane && self.store.0.reads_wait.load(Ordering::Acquire) {
            assert!(Instant::now() < deadline, "reads wait for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
        for request in requests {
            let stored = self.store.0.bytes[Store::at(request.pointer)..].iter();
            request
                .buffer
                .iter_mut()
                .zip(stored)
                .for_each(|(to, from)| *to = from.load(Ordering::Relaxed));
            request.result = Ok(());
        }
        Ok(())
    }

    fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), bluebridge::Error> {
        for request in requests {
            let at = Store::at(request.pointer);
            if self.store.0.lost.load(Ordering::Relaxed) == (at / EXTENT * EXTENT) as u64 {
                let (status, node) = (Status::StaleGeneration, NodeId(1));
                request.result = Err(bluebridge::Error::Refused { status, node, pointer: None });
                continue;
            }
            let own = u64::from(std::process::id());
            let writer = self.store.0.writers[at / EXTENT].swap(own, Ordering::Relaxed);
            assert!(writer == 0 || writer == own, "another process uses the extent");
            let stored = self.store.0.bytes[at..].iter();
            request
                .data
                .iter()
                .zip(stored)
                .for_each(|(from, to)| to.store(*from, Ordering::Relaxed));
            request.result = Ok(());
        }
        Ok(())
    }
}

fn options() -> RegionOptions {
    RegionOptions::new(8 << 20, 512 << 10)
        .mode(FaultMode::Threads { count: 2 })
        .lanes(2)
        .forks(true)
}

/// Forks; the child goes on with `work`, and ends well if it returns true.
fn fork(
    region: &RemoteRegion,
    store: &Store,
    work: impl FnOnce(RemoteRegion) -> bool,
) -> libc::pid_t {
    store.0.processes.fetch_add(1, Ordering::SeqCst);
    let forking = region.begin_fork().expect("it is possible");
    // SAFETY: the child does nothing that needs another thread.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: this is the child, and it ends below without using the old region.
            let inherited = unsafe { forking.inherit(|| store.open()) };
            let is_well = match inherited {
                Ok(region) => work(region),
                Err(error) => {
                    eprintln!("the child has no region: {error}");
                    false
                }
            };
            // SAFETY: nothing of the parent is to be dropped.
            unsafe { libc::_exit(i32::from(!is_well)) }
        }
        pid => {
            assert!(pid > 0, "fork: {}", std::io::Error::last_os_error());
            forking.resume();
            pid
        }
    }
}

/// Sets a flag when it is dropped, also by a panic.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until a child has ended well.
fn join(store: &Store, pid: libc::pid_t) {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let mut status = 0;
        // SAFETY: the status is a valid place for the result.
        match unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } {
            0 if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            0 => {
                // SAFETY: it is this test's child.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                panic!("the child hangs");
            }
            result => {
                assert_eq!(result, pid);
                store.0.processes.fetch_sub(1, Ordering::SeqCst);
                assert_eq!(status, 0, "the child failed");
                return;
            }
        }
    }
}

/// Compares the region with what is expected, byte by byte in random order, and changes half of it.
fn check_and_change(region: &mut RemoteRegion, expected: &mut [u8], seed: u64) -> bool {
    let mut random = SmallRng::seed_from_u64(seed);
    let memory = region.as_mut_slice();
    for _ in 0..4000 {
        let at = random.random_range(0..expected.len());
        if memory[at] != expected[at] {
            eprintln!("byte {at} is {}, not {}", memory[at], expected[at]);
            return false;
        }
        if random.random() {
            expected[at] = random.random();
            memory[at] = expected[at];
        }
    }
    memory[..expected.len()] == *expected
}

#[test]
fn a_child_and_its_child_go_on_with_the_contents_of_their_forks() {
    let store = Store::new();
    let mut region = RemoteRegion::with_remotes(&options(), || store.open()).expect("a region");
    let mut expected = vec![0; region.len()];
    assert!(check_and_change(&mut region, &mut expected, 1));
    let child = fork(&region, &store, |mut region| {
        let mut expected = expected.clone();
        let grandchild = fork(&region, &store, |mut region| {
            let mut expected = expected.clone();
            check_and_change(&mut region, &mut expected, 2)
                && check_and_change(&mut region, &mut expected, 3)
                && region.statistics().local_pages_max <= 128
        });
        let is_well = check_and_change(&mut region, &mut expected, 4)
            && check_and_change(&mut region, &mut expected, 5)
            && region.statistics().local_pages_max <= 128;
        join(&store, grandchild);
        is_well
    });
    assert!(check_and_change(&mut region, &mut expected, 6));
    assert!(check_and_change(&mut region, &mut expected, 7));
    join(&store, child);
    assert!(check_and_change(&mut region, &mut expected, 8));
    let statistics = region.statistics();
    assert!(statistics.local_pages_max <= 128, "{statistics:?}");
    assert_eq!(statistics.lost_pages, 0);
}

#[test]
fn what_children_needed_is_moved_and_freed_when_they_have_ended() {
    let store = Store::new();
    let mut region = RemoteRegion::with_remotes(&options(), || store.open()).expect("a region");
    let mut expected = vec![0; region.len()];
    let extents = region.len() / EXTENT;
    // More forks than layers: without moving, the seventeenth would be impossible.
    for round in 0..20 {
        assert!(check_and_change(&mut region, &mut expected, round), "round {round}");
        let child = fork(&region, &store, |mut region| {
            let mut expected = expected.clone();
            check_and_change(&mut region, &mut expected, round + 100)
        });
        assert!(check_and_change(&mut region, &mut expected, round + 200), "round {round}");
        join(&store, child);
        let deadline = Instant::now() + Duration::from_secs(30);
        while region.statistics().allocated_bytes > region.len() as u64 {
            assert!(Instant::now() < deadline, "round {round}: {:?}", region.statistics());
            std::thread::sleep(Duration::from_millis(10));
        }
        let differing: Vec<_> = region
            .as_slice()
            .chunks(PAGE)
            .zip(expected.chunks(PAGE))
            .enumerate()
            .filter(|(_, (is, was))| is != was)
            .map(|(page, (is, _))| (page, is[0], is[PAGE - 1]))
            .collect();
        assert!(differing.is_empty(), "round {round}: {differing:?}");
    }
    // The children's own extents are the supervisor's to free.
    let children = 20 * extents as u64;
    let count = store.0.count.load(Ordering::Relaxed);
    assert!(count <= children + 2 * extents as u64, "{count} extents are left");
    assert_eq!(region.statistics().lost_pages, 0);
}

#[test]
fn a_process_whose_children_need_too_many_generations_cannot_fork() {
    let store = Store::new();
    let mut region = RemoteRegion::with_remotes(&options(), || store.open()).expect("a region");
    let mut expected = vec![0; region.len()];
    // As if a child went on for ever.
    store.0.processes.fetch_add(1, Ordering::SeqCst);
    for round in 0..15 {
        assert!(check_and_change(&mut region, &mut expected, round));
        assert!(region.can_fork(), "round {round}");
        region.begin_fork().expect("there is a layer").resume();
    }
    assert!(check_and_change(&mut region, &mut expected, 16));
    assert!(!region.can_fork());
    assert!(matches!(region.begin_fork(), Err(Error::Option { .. })));
    assert!(check_and_change(&mut region, &mut expected, 17), "it goes on");
    // The child has ended.
    store.0.processes.fetch_sub(1, Ordering::SeqCst);
    let deadline = Instant::now() + Duration::from_secs(30);
    while !region.can_fork() {
        assert!(Instant::now() < deadline, "nothing is moved");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(region.as_slice() == expected);
}

/// The first page that is stored and not local.
fn first_missing(region: &RemoteRegion) -> usize {
    let page = region.len() / PAGE - 1;
    region.evict(page * PAGE..region.len()).expect("the store takes it");
    page
}

#[test]
fn an_extent_is_not_freed_while_a_page_of_it_is_read() {
    let store = Store::new();
    let mut region = RemoteRegion::with_remotes(&options().prefetch_pages(0), || store.open())
        .expect("a region");
    let mut expected = vec![0; region.len()];
    assert!(check_and_change(&mut region, &mut expected, 1));
    let page = first_missing(&region);
    let child = fork(&region, &store, |_| true);
    store.0.reads_wait.store(true, Ordering::Release);
    let faults = region.statistics().remote_faults;
    std::thread::scope(|scope| {
        let (region, expected) = (&region, &expected);
        let reader = scope.spawn(move || {
            let at = page * PAGE;
            region.as_slice()[at] == expected[at]
        });
        let deadline = Instant::now() + Duration::from_secs(30);
        while region.counts().remote_faults == faults {
            assert!(Instant::now() < deadline, "the page is not read");
            std::thread::sleep(Duration::from_millis(1));
        }
        // Now the pages can be moved, but not the one that is being read.
        join(&store, child);
        std::thread::sleep(Duration::from_millis(500));
        store.0.reads_wait.store(false, Ordering::Release);
        assert!(reader.join().expect("it reads"), "the page was freed");
    });
    assert!(region.as_slice() == expected);
}

#[test]
fn an_extent_that_is_lost_after_a_fork_takes_no_older_page_with_it() {
    let store = Store::new();
    let mut region = RemoteRegion::with_remotes(&options(), || store.open()).expect("a region");
    let mut expected = vec![0; region.len()];
    assert!(check_and_change(&mut region, &mut expected, 1));
    // The child goes on, so nothing is moved.
    store.0.processes.fetch_add(1, Ordering::SeqCst);
    region.begin_fork().expect("it is possible").resume();
    // The next extent that is written to.
    store.0.lost.store(store.0.next.load(Ordering::Relaxed), Ordering::Relaxed);
    assert!(check_and_change(&mut region, &mut expected, 2));
    assert!(region.statistics().failed_writes > 0, "{:?}", region.statistics());
    assert_eq!(region.statistics().lost_pages, 0);
}

#[test]
fn threads_that_go_on_during_forks_lose_nothing() {
    const WORDS: usize = 1 << 20;
    let store = Store::new();
    let region = RemoteRegion::with_remotes(&options(), || store.open()).expect("a region");
    let start = region.as_ptr().cast::<AtomicU64>().as_ptr();
    // SAFETY: the range is the region's, aligned, and accessed as atomics only.
    let words = unsafe { std::slice::from_raw_parts(start, WORDS) };
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Each thread has the words of its own remainder, of all pages, and raises them in turn.
        for thread in 1..4 {
            let is_done = &is_done;
            scope.spawn(move || {
                let mut random = SmallRng::seed_from_u64(thread as u64);
                let mut counts = vec![0_u64; WORDS / 4];
                while !is_done.load(Ordering::Relaxed) {
                    let at = random.random_range(0..WORDS / 4);
                    let before = words[at * 4 + thread].fetch_add(1, Ordering::Relaxed);
                    assert_eq!(before, counts[at], "word {at} of thread {thread}");
                    counts[at] += 1;
                }
            });
        }
        let _done = Done(&is_done);
        // The forking thread's own words have to be exact in every child; the others must not go back.
        let mut own = vec![0_u64; WORDS / 4];
        let mut random = SmallRng::seed_from_u64(9);
        for round in 0..10 {
            for _ in 0..3000 {
                let at = random.random_range(0..WORDS / 4);
                own[at] += 1;
                words[at * 4].store(own[at], Ordering::Relaxed);
            }
            let before: Vec<u64> =
                (0..WORDS).step_by(101).map(|at| words[at].load(Ordering::Relaxed)).collect();
            // The other threads use up the room; they must go on afterwards.
            let forking = region.begin_fork().expect("it is possible");
            std::thread::sleep(Duration::from_millis(30));
            forking.resume();
            let child = fork(&region, &store, |region| {
                let exact =
                    (0..WORDS / 4).all(|at| words[at * 4].load(Ordering::Relaxed) == own[at]);
                let samples = (0..WORDS).step_by(101).zip(&before);
                let later: Vec<u64> =
                    samples.clone().map(|(at, _)| words[at].load(Ordering::Relaxed)).collect();
                let forward = later.iter().zip(&before).all(|(later, before)| later >= before);
                // Most of it has left meanwhile, and comes back from the store.
                let stable = samples
                    .zip(&later)
                    .all(|((at, _), later)| words[at].load(Ordering::Relaxed) == *later);
                if !(exact && forward && stable) {
                    eprintln!("round {round}: exact {exact}, forward {forward}, stable {stable}");
                }
                std::mem::forget(region);
                exact && forward && stable
            });
            join(&store, child);
        }
    });
    assert_eq!(region.statistics().lost_pages, 0);
}
