//! Copies of a workout that run at the same time.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use super::{Damaged, Workout};
use crate::pin;
use crate::placement::now;

/// Copies of a workout. Each has a thread, and an equal part of one memory: they compete for what is local of it.
#[derive(Clone, Debug)]
pub struct Together {
    /// What each copy does.
    pub workout: Workout,
    /// How many there are.
    pub copies: usize,
    /// The cores of the copies, in turn; without any, the system chooses.
    pub cores: Vec<usize>,
}

/// What a run showed.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Finished {
    /// From the start of the first copy to the end of the last one.
    pub time: Duration,
    /// A digest of the memory of each copy: equal if the memories are equal.
    pub digests: Vec<u64>,
}

/// Why a run failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The memory does not hold what was written to it.
    #[error("copy {copy}: {damaged}")]
    Damaged {
        /// The number of the copy, from 0.
        copy: usize,
        /// What is wrong.
        damaged: Damaged,
    },
    /// The threads could not be started.
    #[error("cannot start copy {copy}: {error}")]
    Start {
        /// The number of the copy, from 0.
        copy: usize,
        /// The system's error.
        error: io::Error,
    },
    /// A copy panicked.
    #[error("copy {copy} panicked")]
    Panicked {
        /// The number of the copy, from 0.
        copy: usize,
    },
}

/// A copy, as seen by the thread that starts it. A copy that ends early drops its ends of the channels, and so does
/// the thread that starts it: then the others do not wait any more.
struct Copy<'scope> {
    thread: ScopedJoinHandle<'scope, Result<Option<Ended>, CopyError>>,
    go_on: Sender<()>,
    is_ready: Receiver<()>,
}

struct Ended {
    begin: Duration,
    end: Duration,
    digest: u64,
}

enum CopyError {
    Damaged(Damaged),
    Pin(io::Error),
}

impl Together {
    /// Runs once, in this memory. The memory is filled before, and checked afterwards; `edge` is called at the begin
    /// and at the end of what is timed.
    ///
    /// # Errors
    /// [`RunError`] of the first copy that failed.
    pub fn run(
        &self,
        memory: &mut [u32],
        seed: u64,
        mut edge: impl FnMut(),
    ) -> Result<Finished, RunError> {
        let words = memory.len() / self.copies.max(1);
        let parts = memory.chunks_exact_mut(words.max(1)).take(self.copies);
        thread::scope(|scope| {
            let mut copies = Vec::new();
            for (copy, part) in parts.enumerate() {
                let (go_on, begin) = channel();
                let (ready, is_ready) = channel();
                let core = self.cores.get(copy % self.cores.len().max(1)).copied();
                let seed = seed ^ (copy as u64) << 32;
                let workout = self.workout;
                let run = move || one(workout, part, seed, core, &ready, &begin);
                let spawned = thread::Builder::new().name(format!("copy{copy}"));
                let thread = spawned
                    .spawn_scoped(scope, run)
                    .map_err(|error| RunError::Start { copy, error })?;
                copies.push(Copy { thread, go_on, is_ready });
            }
            // Filled; then done. A copy that failed is not ready, and its result says why.
            for _ in 0..2 {
                let are_ready = copies.iter().all(|copy| copy.is_ready.recv().is_ok());
                edge();
                if !are_ready {
                    break;
                }
                for copy in &copies {
                    // One that ended is noticed in the next turn.
                    let _ = copy.go_on.send(());
                }
            }
            finish(copies)
        })
    }
}

/// One copy, in its thread; nothing if another copy failed.
fn one(
    workout: Workout,
    memory: &mut [u32],
    seed: u64,
    core: Option<usize>,
    ready: &Sender<()>,
    go_on: &Receiver<()>,
) -> Result<Option<Ended>, CopyError> {
    if let Some(core) = core {
        pin(core).map_err(CopyError::Pin)?;
    }
    let meet = || ready.send(()).is_ok() && go_on.recv().is_ok();
    let sum = workout.prepare(memory, seed);
    if !meet() {
        return Ok(None);
    }
    let begin = now();
    workout.work(memory);
    let end = now();
    if !meet() {
        return Ok(None);
    }
    let digest = workout.check(memory, sum).map_err(CopyError::Damaged)?;
    Ok(Some(Ended { begin, end, digest }))
}

fn finish(copies: Vec<Copy<'_>>) -> Result<Finished, RunError> {
    // All threads are joined, also behind one that failed; closed channels let those that wait go on.
    let threads: Vec<_> = copies.into_iter().map(|copy| copy.thread).collect();
    let results: Vec<_> = threads.into_iter().map(ScopedJoinHandle::join).collect();
    let mut ended = Vec::new();
    for (copy, result) in results.into_iter().enumerate() {
        match result {
            Ok(Ok(Some(one))) => ended.push(one),
            Ok(Ok(None)) => {}
            Ok(Err(CopyError::Damaged(damaged))) => {
                return Err(RunError::Damaged { copy, damaged });
            }
            Ok(Err(CopyError::Pin(error))) => return Err(RunError::Start { copy, error }),
            Err(_) => return Err(RunError::Panicked { copy }),
        }
    }
    let begin = ended.iter().map(|one| one.begin).min().unwrap_or_default();
    let end = ended.iter().map(|one| one.end).max().unwrap_or_default();
    Ok(Finished {
        time: end.saturating_sub(begin),
        digests: ended.iter().map(|one| one.digest).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn together(copies: usize) -> Together {
        Together { workout: Workout::Quicksort, copies, cores: Vec::new() }
    }

    #[test]
    fn each_copy_has_its_part_and_its_integers() {
        for copies in [1, 2, 3] {
            let mut memory = vec![0; 9000];
            let mut edges = 0;
            let finished = together(copies).run(&mut memory, 1, || edges += 1).expect("it runs");
            assert_eq!((finished.digests.len(), edges), (copies, 2));
            let parts: Vec<_> = memory.chunks(9000 / copies).collect();
            assert!(parts.iter().all(|part| part.is_sorted()));
            assert!(parts.windows(2).all(|pair| pair[0] != pair[1]));
            let again = together(copies).run(&mut memory, 1, || ()).expect("it runs");
            assert_eq!(again.digests, finished.digests);
            let other = together(copies).run(&mut memory, 2, || ()).expect("it runs");
            assert!(other.digests.iter().zip(&finished.digests).all(|(one, two)| one != two));
        }
    }

    #[test]
    fn a_copy_that_cannot_start_ends_all() {
        let mut run = together(2);
        run.cores = vec![0, 1000];
        let failed = run.run(&mut vec![0; 1000], 1, || ()).expect_err("there is no such core");
        assert!(matches!(failed, RunError::Start { copy: 1, .. }), "{failed}");
    }
}
