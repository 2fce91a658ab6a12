//! The latency of one operation on one page, beside the paper's Table 1.

use std::time::{Duration, Instant};

use anyhow::Context;
use bluebridge::{Client, Error, NodeId, Placement};
use bluebridge_rack::Cancel;
use bluebridge_transport::Transport;
use bluebridge_wire::address::PAGE_BYTES;
use serde::Serialize;

use super::screen::Screen;

/// Operations of each kind, if the time limit allows.
const ROUNDS: usize = 1000;

/// Rounds that are not counted: sessions are opened, caches are filled.
const WARM_UP: usize = 50;

/// Time limit of all measurements.
const TIME_LIMIT: Duration = Duration::from_secs(6);

/// One row of the table.
#[derive(Debug, Serialize)]
pub(super) struct Latency {
    operation: &'static str,
    p50_us: f64,
    /// The most similar operation of the paper's Table 1, and its time.
    paper_operation: &'static str,
    paper_us: f64,
}

/// The paper's Table 1; its UPDATE reads, changes and writes back under a lock, our WRITE does not read.
const PAPER: [(&str, &str, f64); 4] = [
    ("CREATE", "CREATE", 34.9),
    ("READ", "READ", 33.7),
    ("WRITE", "UPDATE", 34.2),
    ("DELETE", "DELETE", 33.0),
];

/// Measures, one operation at a time, and shows the medians.
pub(super) fn measure<T: Transport>(
    client: &mut Client<T>,
    node: NodeId,
    how: &str,
    screen: &Screen,
    cancel: &Cancel,
) -> anyhow::Result<Vec<Latency>> {
    let mut samples: [Vec<Duration>; 4] = Default::default();
    let data = [0xa5; PAGE_BYTES];
    let mut buffer = [0; PAGE_BYTES];
    let began = Instant::now();
    for round in 0..WARM_UP + ROUNDS {
        cancel.check()?;
        let times = once(client, node, &data, &mut buffer).context("while measuring")?;
        anyhow::ensure!(buffer == data, "a page was read back with other bytes");
        if round >= WARM_UP {
            samples.iter_mut().zip(times).for_each(|(samples, time)| samples.push(time));
        }
        if round > WARM_UP && began.elapsed() > TIME_LIMIT {
            break;
        }
    }
    let rounds = samples[0].len();
    let rows =
        PAPER.iter().zip(&mut samples).map(|((operation, paper_operation, paper_us), all)| {
            Latency {
                operation,
                p50_us: median(all).as_nanos() as f64 / 1000.0,
                paper_operation,
                paper_us: *paper_us,
            }
        });
    let rows: Vec<_> = rows.collect();
    screen.say(&format!(
        "   Median of {rounds} operations on one page of 4096 bytes, one at a time; {how}:"
    ))?;
    let cells = rows.iter().map(|row| {
        vec![
            row.operation.to_owned(),
            format!("{:.1} us", row.p50_us),
            format!("{} {:.1} us", row.paper_operation, row.paper_us),
        ]
    });
    screen.table(&["operation", "here", "paper, Table 1"], cells.collect())?;
    screen.say(
        "   The paper used other machines and links; here client, switch and server share one \
         machine. Our WRITE does not read; `bluebridge bench update` measures UPDATE and COMMIT.",
    )?;
    Ok(rows)
}

fn once<T: Transport>(
    client: &mut Client<T>,
    node: NodeId,
    data: &[u8],
    buffer: &mut [u8],
) -> Result<[Duration; 4], Error> {
    let start = Instant::now();
    let region = client.create_at(data.len() as u64, Placement::Node(node))?;
    let created = Instant::now();
    client.write(region.base(), data)?;
    let written = Instant::now();
    client.read(region.base(), buffer)?;
    let read = Instant::now();
    client.delete(region)?;
    let deleted = Instant::now();
    Ok([created - start, read - written, written - created, deleted - read])
}

fn median(samples: &mut [Duration]) -> Duration {
    samples.sort_unstable();
    samples.get(samples.len() / 2).copied().unwrap_or_default()
}
