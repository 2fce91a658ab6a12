//! Many operations of one client outstanding: how many in a second, and what they cost.

use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge::Placement;
use bluebridge_bench::flood;
use bluebridge_bench::ours::pipeline;
use bluebridge_bench::peers::Waiting;
use bluebridge_bench::summary::median;
use bluebridge_wire::address::PAGE_BYTES;
use serde::Serialize;

use super::super::SERVER_DAEMON;
use super::super::measure::{
    FLOOD, PIPELINED_PAGES, PIPELINED_ROUNDS, Plan, frames_of_environment, per_second,
};
use super::super::readers::{own_time, processor_time};
use super::{OWN, Setting};

/// Operations outstanding.
const DEPTHS: [u16; 2] = [16, 64];

/// The results of one depth.
#[derive(Debug, Serialize)]
pub(super) struct Depth {
    pub(super) outstanding: u16,
    pub(super) rows: Vec<Row>,
}

/// A contestant: medians over the rounds.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) per_second: f64,
    pub(super) megabytes_per_second: f64,
    /// Processor time of the client's thread for each operation, in microseconds.
    pub(super) client_us: f64,
    /// The same of the server's process; `None` for the bare calls, whose server is a thread of this process.
    pub(super) server_us: Option<f64>,
}

/// One round of a contestant.
pub(super) struct Round {
    per_second: f64,
    pub(super) client_us: f64,
    pub(super) server_us: Option<f64>,
}

impl Setting<'_> {
    pub(super) fn many(&self, plan: Plan) -> anyhow::Result<Vec<Depth>> {
        DEPTHS.iter().map(|outstanding| self.depth(plan, *outstanding)).collect()
    }

    fn depth(&self, plan: Plan, outstanding: u16) -> anyhow::Result<Depth> {
        let count = plan.length.operation_count * 4;
        let warm = (count / 10).max(1);
        let server = self.rack.pid(SERVER_DAEMON).context("the memory server does not run")?;
        let mut client = self.endpoints.waiting_client(
            outstanding,
            frames_of_environment()?,
            Waiting::Spinning,
        )?;
        let bytes = (PIPELINED_PAGES * PAGE_BYTES) as u64;
        let region = client.create_at(bytes, Placement::Node(self.endpoints.server))?;
        // Pages that were never written have no bytes to copy.
        client.write(region.base(), &vec![0x5a; PIPELINED_PAGES * PAGE_BYTES])?;
        let bare = self.endpoints.echo_socket()?;
        let (sizes, to) = (self.endpoints.sizes(plan), self.endpoints.echo_server());
        let mut others = Vec::new();
        for system in self.systems.all() {
            let exchange = system.exchange(plan.operation, plan.bytes);
            others.push((system, self.systems.client(system, Waiting::Spinning, exchange)?));
        }
        let mut rounds: Vec<Vec<Round>> = (0..2 + others.len()).map(|_| Vec::new()).collect();
        for _ in 0..PIPELINED_ROUNDS {
            self.turns.give(OWN);
            let mut ours = |count| {
                pipeline(&mut client, plan.operation, region, plan.bytes, count)
                    .map_err(|error| anyhow!(error))
            };
            ours(warm)?;
            rounds[0].push(timed(count, Some(server), || ours(count))?);
            self.turns.give(FLOOD);
            let calls = |count| flood::run(&bare, to, sizes, outstanding.into(), count);
            calls(warm)?;
            rounds[1].push(timed(count, None, || Ok(calls(count)?))?);
            self.turns.give(OWN);
            for (at, (system, stream)) in others.iter_mut().enumerate() {
                let mut run = |count| {
                    let done = stream.pipeline(count, outstanding.into());
                    done.map_err(|error| anyhow!("{}: {error}", system.words()))
                };
                run(warm)?;
                let pid = self.systems.pid(*system);
                rounds[2 + at].push(timed(count, pid, || run(count))?);
            }
        }
        client.delete(region)?;
        client.close()?;
        let names = ["BlueBridge", "bare sendmmsg and recvmmsg"].into_iter();
        let names = names.chain(others.iter().map(|(system, _)| system.words()));
        let rows = names.zip(rounds).map(|(name, rounds)| row(name, plan.bytes, &rounds)).collect();
        Ok(Depth { outstanding, rows })
    }
}

/// Executes operations, and what they cost.
pub(super) fn timed(
    count: usize,
    server: Option<u32>,
    run: impl FnOnce() -> anyhow::Result<Duration>,
) -> anyhow::Result<Round> {
    let of_server = || server.map(processor_time).transpose();
    let (client, before) = (own_time(), of_server()?);
    let time = run()?;
    let (client_after, after) = (own_time(), of_server()?);
    #[expect(clippy::cast_precision_loss, reason = "operation counts are far below 2^53")]
    let each = |time: Duration| time.as_secs_f64() * 1e6 / count as f64;
    let used = after.zip(before).map(|(after, before)| after.saturating_sub(before));
    Ok(Round {
        per_second: per_second(count, time),
        client_us: each(client_after.saturating_sub(client)),
        server_us: used.map(each),
    })
}

fn row(name: &str, bytes: usize, rounds: &[Round]) -> Row {
    let of = |value: fn(&Round) -> f64| median(&rounds.iter().map(value).collect::<Vec<_>>());
    let per_second = of(|round| round.per_second);
    let servers: Vec<f64> = rounds.iter().filter_map(|round| round.server_us).collect();
    #[expect(clippy::cast_precision_loss, reason = "a page at most")]
    let megabytes_per_second = per_second * bytes as f64 / 1e6;
    Row {
        name: name.to_owned(),
        per_second,
        megabytes_per_second,
        client_us: of(|round| round.client_us),
        server_us: (!servers.is_empty()).then(|| median(&servers)),
    }
}
