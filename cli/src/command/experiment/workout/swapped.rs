//! The same program in plain memory, in a cgroup whose limit presses it into swap.

use std::time::Duration;

use anyhow::anyhow;
use bluebridge_bench::summary::median;
use bluebridge_bench::swap::Kind;
use bluebridge_bench::swap::cgroup::Relief;
use bluebridge_bench::swap::worker::{Job, Worker, WorkoutJob, WorkoutResult};
use bluebridge_bench::workout::{Finished, Together};
use serde::Serialize;

use super::super::comparison::Swap;
use super::{Options, Share};

/// How long a run may take.
const DEADLINE: Duration = Duration::from_secs(3600);
const PAGE_BYTES: u64 = 4096;

/// The runs with one share and one kind of swap.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SwapRun {
    pub(super) kind: Kind,
    pub(super) local_percent: u8,
    /// The limit of the process: the share of its memory, and what the process needs besides.
    pub(super) limit_bytes: u64,
    /// What the process needs besides.
    pub(super) own_bytes: u64,
    /// The time of each round, in seconds.
    pub(super) seconds: Vec<f64>,
    /// Median over the rounds: the time divided by that in plain memory.
    pub(super) ratio: f64,
    /// In the timed part of the last round, as what follows.
    pub(super) major_faults: u64,
    pub(super) read_bytes: u64,
    pub(super) written_bytes: u64,
    /// How often the kernel found nothing to press out, so that the limit was exceeded for a moment; of all rounds.
    pub(super) relief_count: u64,
    /// The size of zram's contents after compression, as a share.
    pub(super) compressed_share: Option<f64>,
}

/// What was measured of all kinds and shares.
pub(super) struct MeasuredSwap {
    swap: std::sync::Arc<Swap>,
    program: Together,
    words: usize,
    /// Measured in the first round.
    own_bytes: Option<u64>,
    runs: Vec<Measured>,
}

struct Measured {
    kind: Kind,
    share: Share,
    seconds: Vec<f64>,
    last: Option<WorkoutResult>,
    relief_count: u64,
}

/// What the cgroup of a run showed.
struct GroupShown {
    /// The most memory that it had at once.
    peak_bytes: u64,
    relief_count: u64,
}

impl MeasuredSwap {
    pub(super) fn new(
        swap: std::sync::Arc<Swap>,
        program: Together,
        words: usize,
        asked: &Options,
    ) -> Self {
        let shares = |kind: &Kind| {
            let kind = *kind;
            let runs = asked.local.iter();
            runs.map(move |share| Measured {
                kind,
                share: *share,
                seconds: Vec::new(),
                last: None,
                relief_count: 0,
            })
        };
        let runs = swap.kinds.iter().flat_map(shares).collect();
        Self { swap, program, words, own_bytes: None, runs }
    }

    fn bytes(&self) -> u64 {
        self.words as u64 * 4
    }

    /// Runs once for each kind and share; each kind is on only for its own runs.
    pub(super) fn round(&mut self, seed: u64, expected: &Finished) -> anyhow::Result<()> {
        let own_bytes = match self.own_bytes {
            Some(bytes) => bytes,
            None => self.measure_own(seed, expected)?,
        };
        self.own_bytes = Some(own_bytes);
        let mut runs = std::mem::take(&mut self.runs);
        for runs in runs.chunk_by_mut(|one, other| one.kind == other.kind) {
            let Some(kind) = runs.first().map(|run| run.kind) else { continue };
            let area = self.swap.on(kind)?;
            let device = (kind == Kind::Zram).then(|| area.path.clone());
            for run in &mut *runs {
                let limit = self.limit(run.share, own_bytes);
                let (result, shown) = self.run(seed, Some(limit), device.clone(), expected)?;
                run.seconds.push(result.time.as_secs_f64());
                run.last = Some(result);
                run.relief_count += shown.relief_count;
            }
            self.swap.off(&area)?;
        }
        self.runs = runs;
        Ok(())
    }

    fn limit(&self, share: Share, own_bytes: u64) -> u64 {
        share.of_bytes(self.bytes()) + own_bytes
    }

    /// What the process needs besides the program's memory: a run without limit shows it.
    fn measure_own(&self, seed: u64, expected: &Finished) -> anyhow::Result<u64> {
        let (_, shown) = self.run(seed, None, None, expected)?;
        Ok(shown.peak_bytes.saturating_sub(self.bytes()))
    }

    /// A run, and what its cgroup showed.
    fn run(
        &self,
        seed: u64,
        limit: Option<u64>,
        zram: Option<std::path::PathBuf>,
        expected: &Finished,
    ) -> anyhow::Result<(WorkoutResult, GroupShown)> {
        let Together { workout, copies, ref cores } = self.program;
        let cores = cores.clone();
        let job = WorkoutJob { workout, copies, cores, words: self.words, seed, zram };
        let group = self.swap.group()?;
        group.set_limit(limit)?;
        let relief = limit.map(|limit| Relief::start(&group, limit)).transpose()?;
        let mut worker = Worker::start(self.swap.worker(), &group, &Job::Workout(job), DEADLINE)?;
        let result: WorkoutResult = worker.answer()?;
        let relief_count = relief.as_ref().map_or(0, Relief::count);
        let shown = GroupShown { peak_bytes: group.peak()?, relief_count };
        drop((worker, relief));
        self.swap.remove_group(&group)?;
        if result.digests != expected.digests {
            return Err(anyhow!(
                "the result with swap differs from that in plain memory: a defect of the experiment or of the kernel"
            ));
        }
        Ok((result, shown))
    }

    pub(super) fn finish(self, plain_seconds: &[f64]) -> Vec<SwapRun> {
        let own_bytes = self.own_bytes.unwrap_or(0);
        let runs = self.runs.iter().filter_map(|run| {
            let last = run.last.as_ref()?;
            let ratios = run.seconds.iter().zip(plain_seconds).map(|(swap, plain)| swap / plain);
            Some(SwapRun {
                kind: run.kind,
                local_percent: run.share.0,
                limit_bytes: self.limit(run.share, own_bytes),
                own_bytes,
                ratio: median(&ratios.collect::<Vec<_>>()),
                seconds: run.seconds.clone(),
                major_faults: last.major_faults,
                read_bytes: last.pages_in * PAGE_BYTES,
                written_bytes: last.pages_out * PAGE_BYTES,
                relief_count: run.relief_count,
                compressed_share: last.compressed_share,
            })
        });
        runs.collect()
    }
}
