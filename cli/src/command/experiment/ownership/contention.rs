//! Clients that continuously request the same page.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge::{Client, Placement, Pointer, Region};
use bluebridge_bench::ownership::{Contention, Turns, contend, sum_up};
use bluebridge_bench::placement::now;
use bluebridge_rack::Rack;
use bluebridge_rack::spec::Node;
use bluebridge_transport::udp::UdpTransport;
use bluebridge_wire::address::PAGE_BYTES;
use serde::Serialize;

use super::join;

/// The results for one number of clients.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Contended {
    #[serde(flatten)]
    pub(super) contention: Contention,
    /// The counter in the page; equal to the turns, unless updates were lost.
    pub(super) counted: u64,
}

/// Lets `count` clients contend for one page for `time`; each holds it for `hold`.
pub(super) fn measure(
    rack: &Rack,
    count: u16,
    hold: Duration,
    time: Duration,
) -> anyhow::Result<Contended> {
    let first = Node::Client(1);
    let region = rack.enter(first, || {
        let mut client = join(rack, first)?;
        anyhow::Ok(client.create_at(PAGE_BYTES as u64, Placement::Anywhere)?)
    })??;
    let ready = Barrier::new(count.into());
    let clients: anyhow::Result<Vec<Turns>> = thread::scope(|scope| {
        let running: Vec<_> = (1..=count)
            .map(|number| {
                let (node, ready) = (Node::Client(number), &ready);
                let times = (hold, time);
                let take_turns = move || one(rack, node, region.base(), times, ready);
                scope.spawn(move || rack.enter(node, take_turns))
            })
            .collect();
        let ended = running.into_iter().map(thread::ScopedJoinHandle::join);
        ended.map(|turns| turns.map_err(|_| anyhow!("a client panicked"))??).collect()
    });
    let clients = clients?;
    let counted = rack.enter(first, || take_back(&mut join(rack, first)?, region))??;
    let contention = sum_up(&clients, time).map_err(|words| anyhow!(words))?;
    if counted != contention.turn_count {
        return Err(anyhow!("{} updates left {counted} in the page", contention.turn_count));
    }
    Ok(Contended { contention, counted })
}

fn one(
    rack: &Rack,
    node: Node,
    pointer: Pointer,
    (hold, time): (Duration, Duration),
    ready: &Barrier,
) -> anyhow::Result<Turns> {
    let joined = join(rack, node);
    // All clients start together, but do not wait for one that failed.
    ready.wait();
    let mut client = joined?;
    let mut page = [0; PAGE_BYTES];
    let turns = contend(&mut client, pointer, &mut page, hold, now() + time);
    turns.map_err(|words| anyhow!("{node}: {words}"))
}

/// Reads the counter and frees the page.
fn take_back(client: &mut Client<UdpTransport>, region: Region) -> anyhow::Result<u64> {
    let mut counter = [0; 8];
    client.read(region.base(), &mut counter).context("cannot read the counter")?;
    client.delete(region)?;
    Ok(u64::from_le_bytes(counter))
}
