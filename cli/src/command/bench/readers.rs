//! READs per second of two clients, one on each core, beside an echo whose server needs one of the cores.

use std::fs;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use bluebridge::{Client, Placement, Region};
use bluebridge_bench::ours::{Operation, pipeline};
use bluebridge_bench::summary::median;
use bluebridge_bench::turns::Turns;
use bluebridge_bench::{flood, pin};
use bluebridge_rack::Rack;
use bluebridge_transport::udp::UdpTransport;
use bluebridge_wire::address::PAGE_BYTES;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::measure::{
    Endpoints, FLOOD, OURS, PIPELINED_PAGES, PIPELINED_ROUNDS, Plan, frames_of_environment,
    per_second,
};
use super::{CLIENT_CORE, SERVER_CORE};

/// READs that each client has outstanding: the usual one, and as many as a batch of system calls is worth.
const OUTSTANDING: [u16; 2] = [1, 16];

/// The cores of the clients.
const CORES: [usize; 2] = [CLIENT_CORE, SERVER_CORE];

/// READs per second of both clients together.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Readers {
    /// The requests that each client, and the echo's client, keeps outstanding.
    pub(super) outstanding: u16,
    /// READs per second of both clients.
    pub(super) ours_per_second: f64,
    /// Echoes of the same sizes per second, by one client and one server that have a core each.
    pub(super) bare_per_second: f64,
    /// The median over the rounds of the first divided by the second.
    pub(super) ratio: f64,
    /// The share of one core that the memory server's process used meanwhile, without what interrupts took.
    pub(super) server_cores: f64,
}

/// Measures all depths, in the client's namespace.
pub(super) fn run(
    rack: &Rack,
    endpoints: &Endpoints,
    plan: Plan,
    turns: &Turns,
) -> anyhow::Result<Vec<Readers>> {
    let server = rack.pid(super::SERVER_DAEMON).context("the memory server does not run")?;
    OUTSTANDING.iter().map(|depth| measure(endpoints, plan, turns, *depth, server)).collect()
}

fn measure(
    endpoints: &Endpoints,
    plan: Plan,
    turns: &Turns,
    outstanding: u16,
    server: u32,
) -> anyhow::Result<Readers> {
    turns.give(OURS);
    let mut readers = Vec::new();
    for _ in CORES {
        let mut client = endpoints.client(outstanding, frames_of_environment()?)?;
        let bytes = (PIPELINED_PAGES * PAGE_BYTES) as u64;
        let region = client.create_at(bytes, Placement::Node(endpoints.server))?;
        // Pages that were never written have no bytes to copy.
        pipeline(&mut client, Operation::Write, region, plan.bytes, PIPELINED_PAGES)
            .map_err(|error| anyhow!(error))?;
        readers.push((client, region));
    }
    let bare = endpoints.echo_socket()?;
    let (sizes, to) = (endpoints.sizes(plan), endpoints.echo_server());
    let count = plan.length.operation_count * 4;
    let (mut ours, mut echoes, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let (mut used, mut elapsed) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..PIPELINED_ROUNDS {
        turns.give(OURS);
        read_all(&mut readers, plan.bytes, count / 10)?;
        let (before, start) = (processor_time(server)?, Instant::now());
        let time = read_all(&mut readers, plan.bytes, count)?;
        used += processor_time(server)?.saturating_sub(before);
        elapsed += start.elapsed();
        let our_rate = per_second(count * CORES.len(), time);
        turns.give(FLOOD);
        flood::run(&bare, to, sizes, outstanding.into(), count / 10)?;
        let time = flood::run(&bare, to, sizes, outstanding.into(), count)?;
        let bare_rate = per_second(count, time);
        ours.push(our_rate);
        echoes.push(bare_rate);
        ratios.push(our_rate / bare_rate);
    }
    turns.give(OURS);
    for (mut client, region) in readers {
        client.delete(region)?;
        client.close()?;
    }
    Ok(Readers {
        outstanding,
        ours_per_second: median(&ours),
        bare_per_second: median(&echoes),
        ratio: median(&ratios),
        server_cores: used.as_secs_f64() / elapsed.as_secs_f64(),
    })
}

/// Every client reads `count` times, all at once; the time until the last one has ended.
fn read_all(
    readers: &mut [(Client<UdpTransport>, Region)],
    bytes: usize,
    count: usize,
) -> anyhow::Result<Duration> {
    let ready = Barrier::new(readers.len());
    thread::scope(|scope| {
        let running: Vec<_> = readers
            .iter_mut()
            .zip(CORES)
            .map(|((client, region), core)| {
                let ready = &ready;
                scope.spawn(move || {
                    let pinned = pin(core).map_err(|error| error.to_string());
                    ready.wait();
                    pinned?;
                    pipeline(client, Operation::Read, *region, bytes, count)
                })
            })
            .collect();
        let mut longest = Duration::ZERO;
        for reader in running {
            let time = reader.join().map_err(|_| anyhow!("a client panicked"))?;
            longest = longest.max(time.map_err(|error| anyhow!(error))?);
        }
        Ok(longest)
    })
}

/// How long the threads of a process have run. Clock ticks would be too coarse, and count interrupts.
pub(super) fn processor_time(pid: u32) -> anyhow::Result<Duration> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).context("the memory server ended")?;
    let times = tasks.flatten().filter_map(|task| {
        // sched-stats (Documentation/scheduler): the first of three numbers. A thread may have ended meanwhile.
        let line = fs::read_to_string(task.path().join("schedstat")).ok()?;
        line.split(' ').next()?.parse::<u64>().ok()
    });
    Ok(Duration::from_nanos(times.sum()))
}

/// Processor time of this thread.
pub(super) fn own_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    let part = |number: i64| u64::try_from(number).unwrap_or(0);
    Duration::from_secs(part(time.tv_sec)) + Duration::from_nanos(part(time.tv_nsec))
}
