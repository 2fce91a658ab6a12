//! The pages that simulated programs use.

use rand::{Rng, SeedableRng, rngs::SmallRng};

/// Pages of a program's region, except of scans and phases, which have more.
pub(super) const REGION_PAGES: u64 = 2048;

const ACCESSES: u64 = 60_000;

/// The use of a page. Repeated uses of a page in a row count as one.
#[derive(Clone, Copy)]
pub(super) struct Access {
    pub(super) page: u64,
    pub(super) is_write: bool,
}

/// What a program does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Program {
    /// Zipf's distribution with exponent 0.99 (as in YCSB), only reads.
    Zipf,
    /// The same with 30 % writes.
    ZipfWrites,
    /// Half of the time, every second access belongs to a scan; the others are in a hot set of 0.6
    /// times the capacity.
    Scans,
    /// A loop over 2 times the capacity.
    Loop2,
    /// A loop over 1.2 times the capacity.
    Loop1,
    /// Quicksort: two pointers converge over the whole, then over each half, and so on.
    Quicksort,
    /// Uniformly random pages.
    Uniform,
    /// A random working set of 0.8 times the capacity; after each 1/6 of the time, another one.
    Phases,
    /// A loop over 1.5 times the capacity and Zipf's distribution in turns.
    LoopsAndZipf,
    /// Every second access is of a loop over 2 times the capacity, the others are Zipf's.
    LoopBesideZipf,
}

impl Program {
    pub(super) const ALL: [Self; 10] = [
        Self::Zipf,
        Self::ZipfWrites,
        Self::Scans,
        Self::Loop2,
        Self::Loop1,
        Self::Quicksort,
        Self::Uniform,
        Self::Phases,
        Self::LoopsAndZipf,
        Self::LoopBesideZipf,
    ];

    /// The accesses, for some programs in proportion to the capacity.
    pub(super) fn trace(self, capacity: u64) -> Vec<Access> {
        const ELSEWHERE: u64 = 1 << 40;
        let mut random = SmallRng::seed_from_u64(7);
        let random = &mut random;
        let zipf = Zipf::new(0.99);
        let read = |page| Access { page, is_write: false };
        let all = |access: &mut dyn FnMut(u64) -> Access| (0..ACCESSES).map(access).collect();
        match self {
            Self::Zipf => all(&mut |_| read(zipf.sample(random))),
            Self::ZipfWrites => all(&mut |_| Access {
                page: zipf.sample(random),
                is_write: random.random_bool(0.3),
            }),
            Self::Scans => all(&mut |n| {
                let is_scanning = n / 500 % 2 == 1;
                if is_scanning && n % 2 == 0 {
                    read(ELSEWHERE + n / 2 % (4 * REGION_PAGES))
                } else {
                    read(random.random_range(0..capacity * 6 / 10))
                }
            }),
            Self::Loop2 => all(&mut |n| read(n % (2 * capacity))),
            Self::Loop1 => all(&mut |n| read(n % (capacity * 12 / 10))),
            Self::Quicksort => {
                let mut trace = Vec::new();
                for _ in 0..3 {
                    quicksort(0, REGION_PAGES, &mut trace);
                }
                trace
            }
            Self::Uniform => all(&mut |_| read(random.random_range(0..REGION_PAGES))),
            Self::Phases => all(&mut |n| {
                let set = capacity * 8 / 10;
                read(n * 6 / ACCESSES * set + random.random_range(0..set))
            }),
            Self::LoopsAndZipf => all(&mut |n| match n * 4 / ACCESSES % 2 {
                0 => read(n % (capacity * 3 / 2)),
                _ => read(ELSEWHERE + zipf.sample(random)),
            }),
            Self::LoopBesideZipf => all(&mut |n| match n % 2 {
                0 => read(n / 2 % (2 * capacity)),
                _ => read(ELSEWHERE + zipf.sample(random)),
            }),
        }
    }
}

/// Zipf's distribution over the region; the hot pages are spread over it.
struct Zipf {
    /// Sums of the weights of the pages up to each rank.
    sums: Vec<f64>,
}

impl Zipf {
    fn new(exponent: f64) -> Self {
        let ranks = (1..=u32::try_from(REGION_PAGES).expect("small")).map(f64::from);
        let sums = ranks.scan(0.0, |sum, rank| {
            *sum += rank.powf(-exponent);
            Some(*sum)
        });
        Self { sums: sums.collect() }
    }

    fn sample(&self, random: &mut SmallRng) -> u64 {
        let point = random.random::<f64>() * self.sums.last().expect("not empty");
        let rank = self.sums.partition_point(|&sum| sum < point);
        rank as u64 * 797 % REGION_PAGES
    }
}

pub(super) fn quicksort(from: u64, to: u64, trace: &mut Vec<Access>) {
    if to - from < 2 {
        return;
    }
    for step in 0..(to - from) / 2 {
        trace.extend([from + step, to - 1 - step].map(|page| Access { page, is_write: true }));
    }
    let middle = from.midpoint(to);
    quicksort(from, middle, trace);
    quicksort(middle, to, trace);
}
