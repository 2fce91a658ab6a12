//! Comparison of contestants in alternating turns.

use std::time::Duration;

use serde::Serialize;

use crate::{
    placement::{Probe, now},
    summary::{Samples, Summary, median},
    turns::Turns,
};

/// One operation of a contestant, timed from outside.
pub trait Contestant {
    /// Its name in the report.
    fn name(&self) -> &str;

    /// Work that an operation needs but that is not measured; called before each operation.
    ///
    /// # Errors
    /// A text; it ends the contest.
    fn prepare(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Executes the operation once and waits for its end.
    ///
    /// # Errors
    /// A text; it ends the contest.
    fn operate(&mut self) -> Result<(), String>;

    /// Checks what the turn did; not measured.
    ///
    /// # Errors
    /// A text; it ends the contest.
    fn end_turn(&mut self) -> Result<(), String> {
        Ok(())
    }

    /// Executes a turn, whose times are the samples. Only a contestant that works in another process has its own way.
    ///
    /// # Errors
    /// A text; it ends the contest.
    fn turn(&mut self, length: Length) -> Result<Samples, String> {
        for _ in 0..length.warm_up_count {
            self.prepare().and_then(|()| self.operate()).map_err(|error| self.failed(&error))?;
        }
        let mut samples = Samples::default();
        for _ in 0..length.operation_count {
            self.prepare().map_err(|error| self.failed(&error))?;
            let start = now();
            let done = self.operate();
            samples.add(now() - start);
            done.map_err(|error| self.failed(&error))?;
        }
        self.end_turn().map_err(|error| self.failed(&error))?;
        Ok(samples)
    }

    /// An error with the contestant's name.
    fn failed(&self, error: &str) -> String {
        format!("{}: {error}", self.name())
    }
}

/// The length of a contest.
#[derive(Clone, Copy, Debug)]
pub struct Length {
    /// Rounds; every contestant has one turn in each.
    pub round_count: usize,
    /// Operations before the timed ones of each turn.
    pub warm_up_count: usize,
    /// Timed operations of each turn.
    pub operation_count: usize,
}

/// The result of one contestant.
#[derive(Clone, Debug, Serialize)]
pub struct Score {
    /// The contestant.
    pub name: String,
    /// Percentiles over all rounds.
    #[serde(flatten)]
    pub summary: Summary,
    /// The medians of the rounds, in their order, in microseconds.
    pub round_p50_us: Vec<f64>,
    /// The same of the times that 99 of 100 are below.
    pub round_p99_us: Vec<f64>,
}

/// The result of a contest.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// In the contestants' order.
    pub scores: Vec<Score>,
    /// The time to pass a cache line between the cores before each round, in microseconds.
    pub placement_us: Vec<f64>,
}

impl Outcome {
    /// The median over the rounds of the ratio of two contestants' medians. It does not change if
    /// both are slowed down alike.
    #[must_use]
    pub fn ratio(&self, contestant: usize, to: usize) -> f64 {
        self.ratio_of(contestant, to, |score| &score.round_p50_us)
    }

    /// The same of the times that 99 of 100 are below. The median of the rounds, because one interruption by other
    /// programs is the p99 of its round, and with few rounds also that of all samples.
    #[must_use]
    pub fn ratio_p99(&self, contestant: usize, to: usize) -> f64 {
        self.ratio_of(contestant, to, |score| &score.round_p99_us)
    }

    fn ratio_of(&self, contestant: usize, to: usize, of: fn(&Score) -> &[f64]) -> f64 {
        let (Some(ours), Some(theirs)) = (self.scores.get(contestant), self.scores.get(to)) else {
            return f64::NAN;
        };
        let rounds = of(ours).iter().zip(of(theirs));
        median(&rounds.map(|(ours, theirs)| ours / theirs).collect::<Vec<_>>())
    }
}

/// The turn for the placement probe; contestants' turns are numbered from 0.
pub const PROBE_TURN: usize = 1000;

const PROBE_DEADLINE: Duration = Duration::from_secs(2);

/// Lets the contestants operate in turns; the order rotates from round to round.
///
/// The serving thread must serve contestant `i` in turn `i`, and `probe` in [`PROBE_TURN`].
///
/// # Errors
/// The first operation that failed, or a serving thread that does not respond.
pub fn run(
    contestants: &mut [&mut dyn Contestant],
    length: Length,
    turns: &Turns,
    probe: &Probe,
) -> Result<Outcome, String> {
    let mut all: Vec<Samples> = contestants.iter().map(|_| Samples::default()).collect();
    let mut rounds: Vec<Vec<Summary>> = contestants.iter().map(|_| Vec::new()).collect();
    let mut placement_us = Vec::with_capacity(length.round_count);
    for round in 0..length.round_count {
        turns.give(PROBE_TURN);
        placement_us
            .push(probe.measure(PROBE_DEADLINE).ok_or("the serving thread does not respond")?);
        for place in 0..contestants.len() {
            let index = (place + round) % contestants.len();
            turns.give(index);
            let samples = contestants[index].turn(length)?;
            rounds[index].push(samples.summary());
            all[index].merge(&samples);
        }
    }
    let scores = contestants.iter().zip(all).zip(rounds);
    Ok(Outcome {
        scores: scores
            .map(|((contestant, samples), rounds)| Score {
                name: contestant.name().to_owned(),
                summary: samples.summary(),
                round_p50_us: rounds.iter().map(|round| round.p50_us).collect(),
                round_p99_us: rounds.iter().map(|round| round.p99_us).collect(),
            })
            .collect(),
        placement_us,
    })
}
