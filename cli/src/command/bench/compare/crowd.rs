//! Many clients at once, each with one operation outstanding, on the same two cores as the server.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge_bench::contest::Contestant;
use bluebridge_bench::ours::Ours;
use bluebridge_bench::peers::Waiting;
use bluebridge_bench::placement::now;
use bluebridge_bench::summary::{Samples, Summary};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde::Serialize;

use super::super::measure::{Plan, frames_of_environment, per_second};
use super::super::{CLIENT_CORE, SERVER_CORE};
use super::Setting;

/// How many clients.
const CLIENTS: [usize; 2] = [4, 16];

/// Runs of each contestant, one after the other.
const ROUNDS: usize = 3;

/// The results with so many clients.
#[derive(Debug, Serialize)]
pub(super) struct Crowd {
    pub(super) clients: usize,
    pub(super) rows: Vec<Row>,
}

/// A contestant: all rounds together.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    /// Operations per second of all clients.
    pub(super) per_second: f64,
    #[serde(flatten)]
    pub(super) summary: Summary,
    /// The fewest operations of a client while the fastest one did all of its own, as a share of them.
    pub(super) least_share: f64,
}

/// Some clients of one contestant.
struct Group {
    name: String,
    clients: Vec<Box<dyn Contestant + Send>>,
    samples: Samples,
    time: Duration,
    least_share: f64,
}

impl Setting<'_> {
    pub(super) fn crowds(&self, plan: Plan) -> anyhow::Result<Vec<Crowd>> {
        CLIENTS.iter().map(|clients| self.crowd(plan, *clients)).collect()
    }

    fn crowd(&self, plan: Plan, clients: usize) -> anyhow::Result<Crowd> {
        let count = (plan.length.operation_count * 4 / clients).max(10);
        let mut groups = vec![self.ours_of_crowd(plan, clients)?];
        for system in self.systems.all() {
            let exchange = system.exchange(plan.operation, plan.bytes);
            let one = || -> anyhow::Result<Box<dyn Contestant + Send>> {
                Ok(Box::new(self.systems.client(system, Waiting::Sleeping, exchange.clone())?))
            };
            let clients = (0..clients).map(|_| one()).collect::<Result<_, _>>()?;
            groups.push(Group::new(system.words(), clients));
        }
        for _ in 0..ROUNDS {
            for group in &mut groups {
                group.run(count)?;
            }
        }
        let rows = groups.into_iter().map(|group| group.row(count * ROUNDS * clients));
        Ok(Crowd { clients, rows: rows.collect() })
    }

    /// Clients as they are by default: each spins for as long as it has learned, and then sleeps.
    fn ours_of_crowd(&self, plan: Plan, clients: usize) -> anyhow::Result<Group> {
        let frames = frames_of_environment()?;
        let one = || -> anyhow::Result<Box<dyn Contestant + Send>> {
            let client = self.endpoints.usual_client(frames)?;
            let ours = Ours::new(client, plan.operation, self.endpoints.server, plan.bytes);
            Ok(Box::new(ours.map_err(|error| anyhow!(error))?))
        };
        let clients = (0..clients).map(|_| one()).collect::<Result<_, _>>()?;
        Ok(Group::new("BlueBridge", clients))
    }
}

impl Group {
    fn new(name: &str, clients: Vec<Box<dyn Contestant + Send>>) -> Self {
        let (samples, time) = (Samples::default(), Duration::ZERO);
        Self { name: name.to_owned(), clients, samples, time, least_share: 1.0 }
    }

    /// Every client executes `count` operations, all at once.
    fn run(&mut self, count: usize) -> anyhow::Result<()> {
        let ready = Barrier::new(self.clients.len());
        let name = &self.name;
        let (samples, times): (Vec<_>, Vec<_>) = thread::scope(|scope| {
            let running: Vec<_> = self
                .clients
                .iter_mut()
                .map(|client| {
                    let ready = &ready;
                    scope.spawn(move || one(client.as_mut(), count, ready))
                })
                .collect();
            let ended = running.into_iter().map(|one| {
                let result = one.join().map_err(|_| anyhow!("a client of {name} panicked"))?;
                result.map_err(|error| anyhow!("{name}: {error}"))
            });
            ended.collect::<anyhow::Result<Vec<_>>>()
        })?
        .into_iter()
        .unzip();
        samples.iter().for_each(|of| self.samples.merge(of));
        let longest = times.iter().max().context("there are no clients")?;
        let shortest = times.iter().min().context("there are no clients")?;
        self.time += *longest;
        self.least_share = self.least_share.min(shortest.as_secs_f64() / longest.as_secs_f64());
        Ok(())
    }

    fn row(self, count: usize) -> Row {
        Row {
            name: self.name,
            per_second: per_second(count, self.time),
            summary: self.samples.summary(),
            least_share: self.least_share,
        }
    }
}

/// One client's operations and its time, after all are ready.
fn one(
    client: &mut dyn Contestant,
    count: usize,
    ready: &Barrier,
) -> Result<(Samples, Duration), String> {
    // The thread that made this one is pinned.
    let mut set = CpuSet::new();
    set.set(CLIENT_CORE);
    set.set(SERVER_CORE);
    let freed = sched_setaffinity(None, &set).map_err(|error| error.to_string());
    ready.wait();
    freed?;
    let mut samples = Samples::default();
    let begun = now();
    for _ in 0..count {
        let start = now();
        client.operate()?;
        samples.add(now() - start);
    }
    Ok((samples, now() - begun))
}
