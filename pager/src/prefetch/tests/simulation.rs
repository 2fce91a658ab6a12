//! Simulated programs: which faults are avoided, and which prefetched pages are used.

use std::collections::{HashMap, VecDeque};

use rand::{Rng, SeedableRng, rngs::SmallRng};

use super::super::{Prefetcher, Window};

/// Local pages; the one that was loaded first leaves.
const CAPACITY: usize = 1024;

/// Pages of the region; more cannot be loaded.
const REGION_PAGES: u64 = 1 << 20;

const LIMIT_PAGES: u32 = 32;

const ACCESSES: u64 = 40_000;

/// What a thread does.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Program {
    Up,
    Down,
    /// Every 7th page.
    Stride,
    /// The columns of a matrix with 256 rows of 13 pages each.
    Columns,
    /// Streams that advance in turn, at random.
    Merge2,
    Merge4,
    Merge8,
    /// Two pointers converge over the whole, then over each half, and so on.
    Quicksort,
    /// A stream with a random page after each 4 of its pages.
    Noise,
    /// Random pages of the region.
    Random,
    /// Random pages of 4096.
    RandomDense,
    /// Runs of 2 to 8 pages at random places.
    Runs,
    /// Random pages, a stream, and so on.
    Phases,
    /// Random pages of 16,384, of which some are used much more often.
    Skewed,
}

impl Program {
    const ALL: [Self; 14] = [
        Self::Up,
        Self::Down,
        Self::Stride,
        Self::Columns,
        Self::Merge2,
        Self::Merge4,
        Self::Merge8,
        Self::Quicksort,
        Self::Noise,
        Self::Random,
        Self::RandomDense,
        Self::Runs,
        Self::Phases,
        Self::Skewed,
    ];

    fn trace(self) -> Vec<u64> {
        let mut random = SmallRng::seed_from_u64(3);
        let random = &mut random;
        let all = |page: &mut dyn FnMut(u64) -> u64| (0..ACCESSES).map(page).collect();
        let mut merge = |streams: usize| {
            let mut next: Vec<u64> = (0..streams as u64).map(|run| run * 50_021).collect();
            all(&mut |_| {
                let page = &mut next[random.random_range(0..streams)];
                *page += 1;
                *page
            })
        };
        match self {
            Self::Up => all(&mut |n| n),
            Self::Down => all(&mut |n| ACCESSES - n),
            Self::Stride => all(&mut |n| 7 * n),
            Self::Columns => all(&mut |n| n % 256 * 13 + n / 256 % 13 + n / 3328 * 3328),
            Self::Merge2 => merge(2),
            Self::Merge4 => merge(4),
            Self::Merge8 => merge(8),
            Self::Quicksort => {
                let mut trace = Vec::new();
                quicksort(0, 8192, &mut trace);
                trace
            }
            Self::Noise => all(&mut |n| match n % 5 {
                4 => random.random_range(0..REGION_PAGES),
                _ => n,
            }),
            Self::Random => all(&mut |_| random.random_range(0..REGION_PAGES)),
            Self::RandomDense => all(&mut |_| random.random_range(0..4096)),
            Self::Runs => {
                let runs = (0..ACCESSES / 5).flat_map(|_| {
                    let from = random.random_range(0..REGION_PAGES);
                    from..from + random.random_range(2..=8)
                });
                runs.collect()
            }
            Self::Phases => all(&mut |n| match n / 1000 % 2 {
                0 => random.random_range(0..REGION_PAGES),
                _ => n,
            }),
            Self::Skewed => all(&mut |_| {
                let rank = (0..3).fold(16383, |rank, _| random.random_range(0..=rank));
                rank * 797 % 16384
            }),
        }
    }
}

fn quicksort(from: u64, to: u64, trace: &mut Vec<u64>) {
    if to - from < 2 {
        return;
    }
    for step in 0..(to - from) / 2 {
        trace.extend([from + step, to - 1 - step]);
    }
    let middle = from.midpoint(to);
    quicksort(from, middle, trace);
    quicksort(middle, to, trace);
}

/// Local pages in the order of their arrival, and whether each is still waiting for its first use
/// since it was prefetched.
#[derive(Default)]
struct Local {
    queue: VecDeque<u64>,
    pages: HashMap<u64, bool>,
}

impl Local {
    fn insert(&mut self, page: u64, is_unused: bool) {
        if self.queue.len() >= CAPACITY {
            let victim = self.queue.pop_front().expect("full");
            self.pages.remove(&victim);
        }
        self.queue.push_back(page);
        self.pages.insert(page, is_unused);
    }
}

#[derive(Default)]
struct Outcome {
    faults: u64,
    /// Pages that were loaded beside others.
    prefetched: u64,
    used: u64,
    /// The accuracy that the prefetcher's counters show.
    accuracy_seen: f64,
}

impl Outcome {
    fn run(trace: &[u64], limit_pages: u32) -> Self {
        let mut prefetcher = Prefetcher::new(limit_pages);
        let mut local = Local::default();
        let mut outcome = Self::default();
        for &page in trace {
            if let Some(is_unused) = local.pages.get_mut(&page) {
                outcome.used += u64::from(core::mem::take(is_unused));
                continue;
            }
            outcome.faults += 1;
            local.insert(page, false);
            let Window { first, stride, count } = prefetcher.fault(1, page).window;
            let window = (0..i64::from(count)).filter_map(|n| first.checked_add_signed(n * stride));
            for page in window.filter(|&page| page < REGION_PAGES) {
                if !local.pages.contains_key(&page) {
                    local.insert(page, true);
                    outcome.prefetched += 1;
                }
            }
        }
        let counters = prefetcher.counters();
        outcome.accuracy_seen = ratio(counters.pages_confirmed, counters.pages_requested);
        outcome
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 1.0 } else { part as f64 / whole as f64 }
}

#[test]
fn accuracy_and_coverage() {
    println!(
        "coverage: faults avoided; accuracy: prefetched pages that were used, and as the counters show"
    );
    println!("program      faults  with   coverage  prefetched  accuracy  shown  time");
    for program in Program::ALL {
        let trace = program.trace();
        let without = Outcome::run(&trace, 0);
        let with = Outcome::run(&trace, LIMIT_PAGES);
        let coverage = 1.0 - ratio(with.faults, without.faults);
        let accuracy = ratio(with.used, with.prefetched);
        let shown = with.accuracy_seen;
        // In us: 17 for a fault, 2.2 for a page beside it.
        let time = (17.0 * with.faults as f64 + 2.2 * with.prefetched as f64)
            / (17.0 * without.faults as f64);
        println!(
            "{:<12} {:>6}  {:>5}  {coverage:>8.3}  {:>10}  {accuracy:>8.3}  {shown:.3}  {time:.3}",
            format!("{program:?}"),
            without.faults,
            with.faults,
            with.prefetched,
        );
        let case = format!("{program:?}: coverage {coverage}, accuracy {accuracy}, time {time}");
        match program {
            Program::Up
            | Program::Down
            | Program::Stride
            | Program::Merge2
            | Program::Merge4
            | Program::Merge8
            | Program::Quicksort => {
                assert!(coverage > 0.95 && accuracy > 0.99 && shown > 0.9, "{case}");
            }
            Program::Columns => assert!(coverage > 0.95 && accuracy > 0.85, "{case}"),
            // 4 of 5 accesses, and 4 of 5 pages of the stream.
            Program::Noise => assert!(coverage > 0.75 && accuracy > 0.75, "{case}"),
            Program::Random => assert!(with.prefetched < 20, "{case}"),
            Program::RandomDense | Program::Skewed => assert!(time < 1.02, "{case}"),
            Program::Runs => assert!(coverage > 0.5 && accuracy > 0.45, "{case}"),
            // Half of the accesses.
            Program::Phases => assert!(coverage > 0.45 && accuracy > 0.95, "{case}"),
        }
    }
}
