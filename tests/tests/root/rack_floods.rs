//! One endpoint sends as fast as it can; another continues its work.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "quantiles of few numbers"
)]

use std::env;
use std::time::{Duration, Instant};

use bluebridge::{EndpointConfig, Placement, Region};
use bluebridge_rack::spec::DataPlane;
use bluebridge_tests::rack::endpoint::{Endpoint, UdpClient};
use bluebridge_tests::rack::flood::{Flood, Kind};
use bluebridge_tests::rack::{RackOptions, TestRack, stamp};
use bluebridge_wire::address::PAGE_BYTES;

/// Pairs of operations of the honest client under each flood; others by `BLUEBRIDGE_FLOOD_OPERATIONS`.
const OPERATIONS: usize = 1000;

/// No operation may take longer. Without shares of the serving core the median is a fifth of a
/// second and many operations end by their deadline; with them it is a fraction of a millisecond,
/// and longer times are caused by the machine.
const SLOWEST: Duration = Duration::from_secs(1);

/// A quarter of the operations may take longer than this, on a busy machine with two cores.
const USUAL: Duration = Duration::from_millis(20);

/// Datagrams that a flood has sent before the honest client's operations are measured: more than the
/// server's socket holds, so that its buffer is full.
const FLOOD_AHEAD: u64 = 100_000;

fn survive(name: &str, kind: Kind) {
    let operations = env::var("BLUEBRIDGE_FLOOD_OPERATIONS")
        .map_or(OPERATIONS, |text| text.parse().expect("a number of operations"));
    let options = RackOptions { servers: 1, ..RackOptions::new(DataPlane::Ebpf, "9000") };
    let rack = TestRack::up(name, &options);
    let honest = Endpoint::join(&rack, 1);
    let hostile = Endpoint::join(&rack, 2);
    let server = honest.server(1);
    // A client that spins would keep the core from the flood.
    let config = EndpointConfig { spin: Some(Duration::ZERO), ..honest.config(1) };
    let mut client = honest.open(&rack, config);
    let region = client.create_at(PAGE_BYTES as u64, Placement::Node(server)).expect("created");
    let mut other = hostile.client(&rack, 2);
    let target = other.create_at(PAGE_BYTES as u64, Placement::Node(server)).expect("created");
    let mut work = Work { client, region, number: 0, times: Vec::with_capacity(2 * operations) };
    work.go_on(operations, "nothing");
    println!("{kind:?}, before: {}", work.quantiles());
    work.times.clear();
    let flood = Flood::start(&rack, (&hostile, 2), server, target.base(), kind);
    let began = Instant::now();
    while flood.sent() < FLOOD_AHEAD {
        work.go_on(1, name);
    }
    work.times.clear();
    work.go_on(operations, name);
    let rate = flood.sent() as f64 / began.elapsed().as_secs_f64();
    drop(flood);
    println!("{kind:?}, with {rate:.0} datagrams/s: {}", work.quantiles());
    let (usual, slowest) = (work.at(0.75), work.at(1.0));
    assert!(usual < USUAL, "{kind:?}: a quarter took longer than {usual:?}");
    assert!(slowest < SLOWEST, "{kind:?}: one took {slowest:?}");
}

/// The work of the honest client: it writes a stamp and reads it back, one after the other.
struct Work {
    client: UdpClient,
    region: Region,
    number: u64,
    times: Vec<Duration>,
}

impl Work {
    fn go_on(&mut self, pairs: usize, what: &str) {
        for _ in 0..pairs {
            self.number += 1;
            let (mut data, mut found) = ([0; 64], [0; 64]);
            stamp::fill(&mut data, self.number);
            let begun = Instant::now();
            let written = self.client.write(self.region.base(), &data);
            let middle = Instant::now();
            let read = self.client.read(self.region.base(), &mut found);
            self.times.extend([middle - begun, middle.elapsed()]);
            let number = self.number;
            written.and(read).unwrap_or_else(|error| panic!("{what}, pair {number}: {error}"));
            assert_eq!(found, data, "{what}, pair {number}");
        }
        self.times.sort_unstable();
    }

    fn at(&self, part: f64) -> Duration {
        self.times[((self.times.len() - 1) as f64 * part) as usize]
    }

    fn quantiles(&self) -> String {
        let [half, most, nearly, last] = [0.5, 0.9, 0.99, 1.0].map(|part| self.at(part));
        format!("p50 {half:?}, p90 {most:?}, p99 {nearly:?}, longest {last:?}")
    }
}

#[test]
fn a_flood_of_bad_checksums_starves_no_client() {
    survive("flood-crc", Kind::BadCrc);
}

#[test]
fn a_flood_of_bad_sessions_starves_no_client() {
    survive("flood-session", Kind::BadSession);
}

#[test]
fn a_flood_of_opens_starves_no_client() {
    survive("flood-open", Kind::Open);
}

#[test]
fn a_flood_of_pings_starves_no_client() {
    survive("flood-ping", Kind::Ping);
}

#[test]
fn a_flood_of_writes_starves_no_client() {
    survive("flood-write", Kind::Write);
}
