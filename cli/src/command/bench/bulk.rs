//! `bluebridge bench bulk`: READ and WRITE of many megabytes beside a bare stream of UDP trains over the same switch.

mod report;

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow};
use bluebridge::{Client, Placement, ReadRequest, Region, WriteRequest};
use bluebridge_bench::bulk::{self, Direction, Shape};
use bluebridge_bench::ours::Operation;
use bluebridge_bench::pin;
use bluebridge_bench::placement::now;
use bluebridge_bench::summary::median;
use bluebridge_bench::turns::Turns;
use bluebridge_rack::spec::DataPlane;
use bluebridge_rack::{Cancel, Rack};
use bluebridge_transport::udp::UdpTransport;
use bluebridge_wire::address::LINE_BYTES;
use bluebridge_wire::header::HEADER_BYTES;
use serde::Serialize;

use super::measure::{Endpoints, frames_of_environment};
use super::readers::{own_time, processor_time};
use super::{CLIENT_CORE, SECOND_DAEMON, SERVER, SERVER_DAEMON, serving};
use crate::command::steps::Steps;
use crate::command::{Global, interrupt};

/// The turn of contestants whose servers are processes; a bare stream has [`BARE`].
const OWN: usize = 0;
const BARE: usize = 1;

/// What a session may have outstanding at most (`docs/protocol.md`, section 5), in bytes. The bare stream has the same.
const WINDOW_BYTES: usize = 2 << 20;

/// Operations of a line that a client may have in flight: more than a session's credit is worth.
const OUTSTANDING: u16 = 512;

/// Bytes of one request if the range is on two servers, so that both are used all the time.
const STRIPE_BYTES: usize = 1 << 20;

/// How the range is moved.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    /// By one call of the client library.
    Whole,
    /// By one call, by the server's process: its kernel answers no READ.
    WholeByServer,
    /// A half on each of two servers.
    TwoServers,
    /// By a call for each line, one after the other.
    Lines,
    /// By a bare stream, a line in each train.
    Bare,
    /// By a bare stream in the longest trains.
    BareLongest,
    /// By a bare stream, a line outstanding.
    BareLines,
}

impl Way {
    const fn is_bare(self) -> bool {
        matches!(self, Self::Bare | Self::BareLongest | Self::BareLines)
    }

    /// What it is compared with.
    const fn beside(self) -> Option<Self> {
        match self {
            Self::Whole | Self::WholeByServer | Self::TwoServers | Self::BareLongest => {
                Some(Self::Bare)
            }
            Self::Lines => Some(Self::BareLines),
            Self::Bare | Self::BareLines => None,
        }
    }

    const fn words(self) -> &'static str {
        match self {
            Self::Whole => "BlueBridge, one call",
            Self::WholeByServer => "BlueBridge, one call, by the server's process",
            Self::TwoServers => "BlueBridge, one call, two servers",
            Self::Lines => "BlueBridge, line by line",
            Self::Bare => "bare trains",
            Self::BareLongest => "bare trains of 64 KiB",
            Self::BareLines => "bare trains, one by one",
        }
    }

    /// Those that take part.
    fn all(operation: Operation) -> Vec<Self> {
        let reads = operation == Operation::Read;
        let ours = [Self::Whole, Self::WholeByServer, Self::TwoServers, Self::Lines];
        let ours = ours.into_iter().filter(|way| reads || *way != Self::WholeByServer);
        ours.chain([Self::Bare, Self::BareLongest, Self::BareLines]).collect()
    }
}

/// A contestant: medians over the rounds.
#[derive(Debug, Serialize)]
struct Row {
    way: Way,
    megabytes_per_second: f64,
    /// The rate divided by that of the bare stream it is compared with: the median over the rounds.
    ratio: Option<f64>,
    /// Processor time of the client's thread for each KiB, in nanoseconds.
    client_ns_per_kib: f64,
    /// The same of the server's process or thread.
    server_ns_per_kib: f64,
}

/// What was measured of one operation.
#[derive(Debug, Serialize)]
struct Report {
    operation: Operation,
    bytes: usize,
    rows: Vec<Row>,
}

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    pub(super) bytes: usize,
    pub(super) round_count: usize,
    pub(super) switch: DataPlane,
}

/// Measures READ and WRITE in a rack with one client.
pub(super) fn run(
    rack: Rack,
    endpoints: Endpoints,
    asked: Asked,
    cancel: &Cancel,
    global: Global,
) -> anyhow::Result<()> {
    let (rack, endpoints) = (Arc::new(rack), Arc::new(endpoints));
    let operations = [Operation::Read, Operation::Write];
    let steps = Steps::new(operations.len(), global);
    let mut reports = Vec::new();
    for operation in operations {
        steps.begin(&format!("{} of {} bytes", operation.name(), asked.bytes));
        let endpoints = Arc::clone(&endpoints);
        let work = move |rack: &Rack| measure(rack, &endpoints, operation, asked);
        reports.push(interrupt::measure(&rack, cancel, work)?);
    }
    steps.end();
    report::print(&reports, asked.switch, global.json)?;
    drop(endpoints);
    interrupt::take_down(rack)
}

/// One operation, with a serving thread for the bare stream at the server's end.
fn measure(
    rack: &Rack,
    endpoints: &Endpoints,
    operation: Operation,
    asked: Asked,
) -> anyhow::Result<Report> {
    let turns = Turns::new();
    let socket = rack
        .enter(SERVER, || endpoints.echo_socket_of_server())?
        .context("cannot open the bare stream's socket")?;
    let shape = Shape {
        header_bytes: HEADER_BYTES,
        piece_bytes: endpoints.piece_bytes(),
        // The first run says how long its trains are.
        train_datagrams: 1,
        window_bytes: WINDOW_BYTES,
    };
    let mut memory = vec![0x5a; asked.bytes];
    let bare_time = AtomicU64::new(0);
    let serve = |turn: usize, stop: &AtomicBool| match turn {
        BARE => {
            let before = own_time();
            let served = bulk::serve(&socket, &mut memory, shape, stop);
            let used = own_time().saturating_sub(before);
            bare_time.store(u64::try_from(used.as_nanos()).unwrap_or(u64::MAX), Ordering::Release);
            served
        }
        _ => {
            turns.sleep(stop);
            Ok(())
        }
    };
    let contest = Contest { rack, endpoints, operation, asked, shape, turns: &turns };
    serving::beside(rack, &turns, serve, || contest.run(&bare_time))
}

/// What a measurement needs.
struct Contest<'a> {
    rack: &'a Rack,
    endpoints: &'a Endpoints,
    operation: Operation,
    asked: Asked,
    shape: Shape,
    turns: &'a Turns,
}

/// Our client, and its memory at the servers.
struct Ours {
    client: Client<UdpTransport>,
    whole: Region,
    halves: [Region; 2],
}

/// One round of a contestant.
#[derive(Clone, Copy)]
struct Round {
    time: Duration,
    client: Duration,
    server: Duration,
}

impl Contest<'_> {
    fn run(&self, bare_time: &AtomicU64) -> anyhow::Result<Report> {
        pin(CLIENT_CORE).context("cannot pin the client")?;
        let mut memory = vec![0x5a; self.asked.bytes];
        let mut ours = self.open(&memory)?;
        let bare = self.endpoints.echo_socket()?;
        bare.connect(self.endpoints.echo_server()).context("cannot connect the bare stream")?;
        let ways = Way::all(self.operation);
        let mut rounds: Vec<Vec<Round>> = ways.iter().map(|_| Vec::new()).collect();
        let mut number = 0;
        // The first round warms up.
        for round in 0..=self.asked.round_count {
            for (way, rounds) in ways.iter().zip(&mut rounds) {
                number += 1;
                let measured = if way.is_bare() {
                    self.bare(*way, &bare, &mut memory, number, bare_time)
                } else {
                    self.ours(*way, &mut ours, &mut memory)
                };
                let measured = measured.with_context(|| way.words())?;
                if round > 0 {
                    rounds.push(measured);
                }
            }
        }
        self.turns.give(OWN);
        let Ours { mut client, whole, halves } = ours;
        for region in [whole].into_iter().chain(halves) {
            client.delete(region)?;
        }
        client.close().context("cannot close the sessions")?;
        let rows = ways.iter().zip(&rounds).map(|(way, own)| {
            let beside = way.beside().and_then(|other| ways.iter().position(|way| *way == other));
            self.row(*way, own, beside.and_then(|at| rounds.get(at)))
        });
        Ok(Report { operation: self.operation, bytes: self.asked.bytes, rows: rows.collect() })
    }

    fn open(&self, memory: &[u8]) -> anyhow::Result<Ours> {
        self.turns.give(OWN);
        let mut client = self.endpoints.client(OUTSTANDING, frames_of_environment()?)?;
        let second = self.endpoints.second.context("the rack has no second memory server")?;
        let first = Placement::Node(self.endpoints.server);
        // A number of whole lines.
        let half = memory.len() as u64 / 2;
        let whole = client.create_at(memory.len() as u64, first)?;
        let halves =
            [client.create_at(half, first)?, client.create_at(half, Placement::Node(second))?];
        // Pages that were never written have no bytes to copy.
        for (region, bytes) in [(whole, memory.len()), (halves[0], memory.len() / 2)] {
            client.write(region.base(), &memory[..bytes])?;
        }
        client.write(halves[1].base(), &memory[..memory.len() / 2])?;
        Ok(Ours { client, whole, halves })
    }

    /// One round of ours.
    fn ours(&self, way: Way, ours: &mut Ours, memory: &mut [u8]) -> anyhow::Result<Round> {
        self.turns.give(OWN);
        let pids = [SERVER_DAEMON, SECOND_DAEMON]
            .map(|daemon| self.rack.pid(daemon).context("a memory server does not run"));
        let pids = pids.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let of_servers = || pids.iter().map(|pid| processor_time(*pid)).sum::<anyhow::Result<_>>();
        let (server, client, begun): (Duration, _, _) = (of_servers()?, own_time(), now());
        let is_read = self.operation == Operation::Read;
        let Ours { client: endpoint, whole, halves } = ours;
        match way {
            Way::Whole if is_read => endpoint.read(whole.base(), memory)?,
            Way::WholeByServer => drop(endpoint.read_stale(whole.base(), memory)?),
            Way::TwoServers if is_read => {
                let (first, second) = memory.split_at_mut(memory.len() / 2);
                let parts = first.chunks_mut(STRIPE_BYTES).zip(second.chunks_mut(STRIPE_BYTES));
                let mut requests = Vec::new();
                for (parts, at) in parts.zip(stripes()) {
                    requests.push(ReadRequest::new(halves[0].at(at)?, parts.0));
                    requests.push(ReadRequest::new(halves[1].at(at)?, parts.1));
                }
                endpoint.read_many(&mut requests)?;
                requests.into_iter().try_for_each(|request| request.result)?;
            }
            Way::TwoServers => {
                let (first, second) = memory.split_at(memory.len() / 2);
                let parts = first.chunks(STRIPE_BYTES).zip(second.chunks(STRIPE_BYTES));
                let mut requests = Vec::new();
                for (parts, at) in parts.zip(stripes()) {
                    requests.push(WriteRequest::new(halves[0].at(at)?, parts.0));
                    requests.push(WriteRequest::new(halves[1].at(at)?, parts.1));
                }
                endpoint.write_many(&mut requests)?;
                requests.into_iter().try_for_each(|request| request.result)?;
            }
            Way::Lines => {
                for (index, line) in memory.chunks_mut(LINE_BYTES).enumerate() {
                    let pointer = whole.at((index * LINE_BYTES) as u64)?;
                    match is_read {
                        true => endpoint.read(pointer, line)?,
                        false => endpoint.write(pointer, line)?,
                    }
                }
            }
            _ => endpoint.write(whole.base(), memory)?,
        }
        let time = now() - begun;
        let client = own_time().saturating_sub(client);
        Ok(Round { time, client, server: of_servers()?.saturating_sub(server) })
    }

    /// One round of a bare stream.
    fn bare(
        &self,
        way: Way,
        socket: &UdpSocket,
        memory: &mut [u8],
        number: u64,
        used: &AtomicU64,
    ) -> anyhow::Result<Round> {
        let line = LINE_BYTES.div_ceil(self.shape.piece_bytes);
        let shape = match way {
            Way::BareLongest => Shape { train_datagrams: self.shape.longest_train(), ..self.shape },
            Way::BareLines => {
                Shape { train_datagrams: line, window_bytes: LINE_BYTES, ..self.shape }
            }
            _ => Shape { train_datagrams: line, ..self.shape },
        };
        let direction = match self.operation {
            Operation::Read => Direction::FromServer,
            _ => Direction::ToServer,
        };
        used.store(0, Ordering::Release);
        self.turns.give(BARE);
        let client = own_time();
        let time = bulk::run(socket, memory, shape, direction, number)?;
        let client = own_time().saturating_sub(client);
        self.turns.give(OWN);
        // The serving thread says what it used when its turn ends.
        let begun = now();
        let server = loop {
            match used.load(Ordering::Acquire) {
                0 if now() - begun > Duration::from_secs(2) => {
                    return Err(anyhow!("the serving thread did not end its turn"));
                }
                0 => std::hint::spin_loop(),
                nanos => break Duration::from_nanos(nanos),
            }
        };
        Ok(Round { time, client, server })
    }

    fn row(&self, way: Way, rounds: &[Round], beside: Option<&Vec<Round>>) -> Row {
        let of =
            |value: &dyn Fn(&Round) -> f64| median(&rounds.iter().map(value).collect::<Vec<_>>());
        #[expect(clippy::cast_precision_loss, reason = "a range has less than 2^53 bytes")]
        let bytes = self.asked.bytes as f64;
        let per_kib = |time: Duration| time.as_secs_f64() * 1e9 * 1024.0 / bytes;
        let ratios = beside.map(|others| {
            let pairs = rounds.iter().zip(others);
            pairs.map(|(own, other)| other.time.as_secs_f64() / own.time.as_secs_f64()).collect()
        });
        Row {
            way,
            megabytes_per_second: of(&|round| bytes / round.time.as_secs_f64() / 1e6),
            ratio: ratios.map(|ratios: Vec<f64>| median(&ratios)),
            client_ns_per_kib: of(&|round| per_kib(round.client)),
            server_ns_per_kib: of(&|round| per_kib(round.server)),
        }
    }
}

/// Where the stripes of each half begin.
fn stripes() -> impl Iterator<Item = u64> {
    (0..).step_by(STRIPE_BYTES)
}
