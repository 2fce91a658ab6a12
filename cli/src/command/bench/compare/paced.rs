//! A client with 1,000 operations in a second: what the waits of a client and a server cost that have little to do.

use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge_bench::contest::Contestant;
use bluebridge_bench::ours::Ours;
use bluebridge_bench::peers::Waiting;
use bluebridge_bench::pin;
use bluebridge_bench::placement::now;
use bluebridge_bench::summary::{Samples, Summary, median};
use serde::Serialize;

use super::super::measure::{Plan, frames_of_environment};
use super::super::{CLIENT_CORE, SERVER_DAEMON};
use super::Setting;
use super::many::{Round, timed};

/// Time from one operation to the next.
const PERIOD: Duration = Duration::from_millis(1);

/// Operations of each round: a second of them.
const OPERATIONS: u32 = 1000;

/// Operations before the first round, so that all have learned how to wait.
const WARM_UP: u32 = 100;

const ROUNDS: usize = 3;

/// A contestant: all rounds together.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    #[serde(flatten)]
    pub(super) summary: Summary,
    /// The share of a core that the client's thread uses, with its sleeps between the operations: the median of the rounds.
    pub(super) client_cores: f64,
    /// The same of the server's process.
    pub(super) server_cores: f64,
}

struct Entry {
    contestant: Box<dyn Contestant>,
    server: u32,
    samples: Samples,
    rounds: Vec<Round>,
}

impl Entry {
    fn new(contestant: impl Contestant + 'static, server: u32) -> Self {
        let contestant = Box::new(contestant);
        Self { contestant, server, samples: Samples::default(), rounds: Vec::new() }
    }

    fn round(&mut self) -> anyhow::Result<()> {
        let Self { contestant, server, samples, .. } = self;
        let run = || pace(contestant.as_mut(), OPERATIONS, samples);
        self.rounds.push(timed(OPERATIONS as usize, Some(*server), run)?);
        Ok(())
    }

    fn row(self) -> Row {
        let cores = |of: fn(&Round) -> f64| {
            median(&self.rounds.iter().map(of).collect::<Vec<_>>()) * 1e-6 / PERIOD.as_secs_f64()
        };
        Row {
            name: self.contestant.name().to_owned(),
            summary: self.samples.summary(),
            client_cores: cores(|round| round.client_us),
            server_cores: cores(|round| round.server_us.unwrap_or(0.0)),
        }
    }
}

impl Setting<'_> {
    /// BlueBridge's client as it is by default, and those of the others asleep.
    pub(super) fn paced(&self, plan: Plan) -> anyhow::Result<Vec<Row>> {
        pin(CLIENT_CORE).context("cannot pin the client")?;
        let client = self.endpoints.usual_client(frames_of_environment()?)?;
        let ours = Ours::new(client, plan.operation, self.endpoints.server, plan.bytes);
        let ours = ours.map_err(|error| anyhow!(error))?.named("BlueBridge");
        let server = self.rack.pid(SERVER_DAEMON).context("the memory server does not run")?;
        let mut entries = vec![Entry::new(ours, server)];
        for system in self.systems.all() {
            let exchange = system.exchange(plan.operation, plan.bytes);
            let client = self.systems.client(system, Waiting::Sleeping, exchange)?;
            let pid = self.systems.pid(system).context("it does not run")?;
            entries.push(Entry::new(client, pid));
        }
        for entry in &mut entries {
            pace(entry.contestant.as_mut(), WARM_UP, &mut Samples::default())?;
        }
        for _ in 0..ROUNDS {
            entries.iter_mut().try_for_each(Entry::round)?;
        }
        Ok(entries.into_iter().map(Entry::row).collect())
    }
}

/// Executes an operation in each period; one that is late does not delay the others. Returns the time in all.
fn pace(
    contestant: &mut dyn Contestant,
    count: u32,
    samples: &mut Samples,
) -> anyhow::Result<Duration> {
    let begun = now();
    for number in 0..count {
        thread::sleep((begun + PERIOD * number).saturating_sub(now()));
        let start = now();
        contestant.operate().map_err(|error| anyhow!("{}: {error}", contestant.name()))?;
        samples.add(now() - start);
    }
    Ok(now() - begun)
}
