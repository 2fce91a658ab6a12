//! `bluebridge workload pages`: very many pointers, and the host's neighbour table.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use bluebridge_bench::pages::{self, Report};
use bluebridge_rack::network::host::{HostFabric, NeighbourCounts};
use bluebridge_rack::network::{Netlink, NetworkError};
use clap::Args;
use serde::Serialize;

use crate::command::Global;
use crate::command::member::Member;
use crate::exit::Exit;
use crate::output;

/// How often the neighbour table is read.
const LOOK: Duration = Duration::from_millis(20);

/// Create many pages, each with a pointer of its own, write and read each, and count the neighbours that the kernel
/// needed for them.
#[derive(Debug, Args)]
pub(in crate::command) struct Pages {
    /// Number of pages; each takes 4 KiB at a memory server
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    count: u32,
    #[command(flatten)]
    member: Member,
}

#[derive(Serialize)]
struct Document {
    #[serde(flatten)]
    report: Report,
    neighbours: NeighbourCounts,
    neighbour_look_count: u32,
}

pub(super) fn run(asked: Pages, global: Global) -> anyhow::Result<Exit> {
    let mut session = asked.member.join_as_owner(None)?;
    let fabric = HostFabric::new(&session.interface);
    let ended = AtomicBool::new(false);
    let (used, watched) = thread::scope(|scope| {
        let watching = scope.spawn(|| watch(&fabric, &ended));
        let used = pages::run(&mut session.client, asked.count as usize);
        ended.store(true, Ordering::Relaxed);
        (used, watching.join())
    });
    session.leave();
    let report = used?;
    let (neighbours, neighbour_look_count) =
        watched.map_err(|_| anyhow!("the thread that reads the neighbour table panicked"))??;
    if global.json {
        output::json(&Document { report, neighbours, neighbour_look_count })?;
    } else {
        output::prose(&format!(
            "{} pointers: created in {:.1} s, written in {:.1} s, read in {:.1} s, freed in {:.1} s\n\
             at most {} for the fabric, {} in all, seen in {} readings of the neighbour table",
            report.pointer_count,
            report.create_s,
            report.write_s,
            report.read_s,
            report.delete_s,
            output::counted(neighbours.fabric as u64, "neighbour"),
            neighbours.all,
            neighbour_look_count,
        ))?;
    }
    Ok(Exit::Ok)
}

/// Reads the neighbour table until the work ends; returns the largest counts, and the number of readings.
fn watch(fabric: &HostFabric, ended: &AtomicBool) -> Result<(NeighbourCounts, u32), NetworkError> {
    let netlink = Netlink::open()?;
    let (mut largest, mut look_count) = (NeighbourCounts::default(), 0);
    loop {
        // The last reading is after the work.
        let is_last = ended.load(Ordering::Relaxed);
        largest = largest.max(fabric.count_neighbours(&netlink)?);
        look_count += 1;
        if is_last {
            return Ok((largest, look_count));
        }
        thread::sleep(LOOK);
    }
}
