//! Pages that are created, written, read, updated and deleted, one operation at a time, with and without
//! a directory service.

use std::time::Duration;

use bluebridge::{Client, NodeId, Pointer, Region};
use bluebridge_transport::Transport;
use rand::{RngCore, SeedableRng, rngs::SmallRng};
use serde::Serialize;

use crate::{
    directory::{DirectoryClient, DirectoryError},
    placement::now,
    summary::{Samples, Summary},
};

/// After so many failed runs in a row the rest is left out: the rack is broken, and each would wait for
/// its deadline.
const FAILED_RUNS_MAX: u32 = 10;

/// How often each operation is executed, and on what.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Timed runs of each way.
    pub run_count: usize,
    /// Runs before them.
    pub warm_up_count: usize,
    /// The length of the memory, at least 1.
    pub bytes: usize,
}

/// How the node of a page is found.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// The pointer is enough.
    Direct,
    /// A directory service is asked before each access, and told of new pages.
    Directory,
}

/// A timed operation.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Operation {
    /// CREATE; with a directory also the page's registration.
    Create,
    /// WRITE of all bytes.
    Write,
    /// READ of all bytes.
    Read,
    /// UPDATE of all bytes, and its COMMIT.
    Update,
    /// DELETE; with a directory also the page's removal.
    Delete,
    /// The round trip to the directory alone, as a part of the others.
    #[serde(rename = "DIRECTORY")]
    LookUp,
}

/// The result of an operation.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// How the node was found.
    pub way: Way,
    /// The operation.
    pub operation: Operation,
    /// Times of those that succeeded.
    #[serde(flatten)]
    pub summary: Summary,
    /// Those that failed, or returned wrong bytes, warm-up included.
    pub failure_count: u64,
}

/// The result of all runs.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// A row for each operation and way.
    pub rows: Vec<Row>,
    /// The sum of all failures.
    pub failure_count: u64,
    /// Runs that were left out, because too many before them failed.
    pub skipped_run_count: usize,
    /// The first failure.
    pub first_failure: Option<String>,
}

/// Why an operation counts as failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Directory(#[from] DirectoryError),
    #[error(transparent)]
    Operation(#[from] bluebridge::Error),
    #[error("{0} holds other bytes than were written")]
    WrongBytes(Pointer),
    #[error("the directory says that {pointer} is on node {node}")]
    WrongNode { pointer: Pointer, node: NodeId },
}

const DIRECT: [Operation; 5] =
    [Operation::Create, Operation::Write, Operation::Read, Operation::Update, Operation::Delete];

struct Tally {
    way: Way,
    operation: Operation,
    samples: Samples,
    failure_count: u64,
}

struct Worker<'a, T: Transport> {
    client: &'a mut Client<T>,
    directory: Option<DirectoryClient>,
    /// The bytes that the page should hold, and those that were read.
    expected: Vec<u8>,
    buffer: Vec<u8>,
    tallies: Vec<Tally>,
    first_failure: Option<String>,
    /// Every write has other bytes.
    random: SmallRng,
    is_timed: bool,
}

/// Executes the plan. With a directory, runs with and without it take turns.
pub fn run<T: Transport>(
    client: &mut Client<T>,
    directory: Option<DirectoryClient>,
    plan: Plan,
) -> Report {
    let mut worker = Worker::new(client, directory, plan.bytes);
    let skipped_run_count = worker.run(plan);
    let row = |tally: Tally| Row {
        way: tally.way,
        operation: tally.operation,
        summary: tally.samples.summary(),
        failure_count: tally.failure_count,
    };
    let first_failure = worker.first_failure;
    let rows: Vec<_> = worker.tallies.into_iter().map(row).collect();
    let failure_count = rows.iter().map(|row| row.failure_count).sum();
    Report { rows, failure_count, skipped_run_count, first_failure }
}

impl<'a, T: Transport> Worker<'a, T> {
    fn new(client: &'a mut Client<T>, directory: Option<DirectoryClient>, bytes: usize) -> Self {
        let tally = |way, operation| Tally {
            way,
            operation,
            samples: Samples::default(),
            failure_count: 0,
        };
        let mut tallies: Vec<_> = DIRECT.map(|operation| tally(Way::Direct, operation)).into();
        if directory.is_some() {
            tallies.extend(DIRECT.map(|operation| tally(Way::Directory, operation)));
            tallies.push(tally(Way::Directory, Operation::LookUp));
        }
        Self {
            client,
            directory,
            expected: vec![0; bytes],
            buffer: vec![0; bytes],
            tallies,
            first_failure: None,
            random: SmallRng::seed_from_u64(0),
            is_timed: false,
        }
    }

    /// Returns how many runs were left out.
    fn run(&mut self, plan: Plan) -> usize {
        let ways = [Some(Way::Direct), self.directory.as_ref().map(|_| Way::Directory)];
        let total = plan.warm_up_count + plan.run_count;
        let mut failed_in_a_row = [0; 2];
        for run in 0..total {
            self.is_timed = run >= plan.warm_up_count;
            for (way, failed_in_a_row) in ways.into_iter().zip(&mut failed_in_a_row) {
                let Some(way) = way else { continue };
                match self.run_once(way) {
                    Some(()) => *failed_in_a_row = 0,
                    None => *failed_in_a_row += 1,
                }
                if *failed_in_a_row >= FAILED_RUNS_MAX {
                    return total - run - 1;
                }
            }
        }
        0
    }

    /// One page from its creation to its end; `None` if an operation failed.
    fn run_once(&mut self, way: Way) -> Option<()> {
        let region = self.timed(way, Operation::Create, |it| it.create(way))?;
        let used = self.use_page(way, region);
        if used.is_none() {
            // The failure is counted; the page would only be in the way.
            let _ = self.client.delete(region);
            return None;
        }
        self.timed(way, Operation::Delete, |it| it.delete(way, region))
    }

    fn use_page(&mut self, way: Way, region: Region) -> Option<()> {
        let page = region.base();
        self.expected.fill(0);
        self.checked(way, Operation::Create, page)?;
        self.random.fill_bytes(&mut self.expected);
        self.timed(way, Operation::Write, |it| {
            it.find(way, page)?;
            Ok(it.client.write(page, &it.expected)?)
        })?;
        self.timed(way, Operation::Read, |it| {
            it.find(way, page)?;
            Ok(it.client.read(page, &mut it.buffer)?)
        })?;
        self.compared(way, Operation::Read, page)?;
        self.timed(way, Operation::Update, |it| {
            it.find(way, page)?;
            let mut update = it.client.update(page, &mut it.buffer)?;
            if update[..] != it.expected[..] {
                return Err(Failure::WrongBytes(page));
            }
            it.random.fill_bytes(&mut it.expected);
            update.copy_from_slice(&it.expected);
            Ok(update.commit()?)
        })?;
        self.checked(way, Operation::Update, page)
    }

    /// Reads, without timing, what an operation should have done.
    fn checked(&mut self, way: Way, operation: Operation, page: Pointer) -> Option<()> {
        let read = self.client.read(page, &mut self.buffer);
        if let Err(error) = read {
            return self.failed(way, operation, &error.into());
        }
        self.compared(way, operation, page)
    }

    fn compared(&mut self, way: Way, operation: Operation, page: Pointer) -> Option<()> {
        if self.buffer == self.expected {
            return Some(());
        }
        self.failed(way, operation, &Failure::WrongBytes(page))
    }

    fn create(&mut self, way: Way) -> Result<Region, Failure> {
        let region = self.client.create(self.buffer.len() as u64)?;
        let registered = self.at_directory(way, |directory| directory.register(region.base()));
        if let Err(error) = registered {
            let _ = self.client.delete(region);
            return Err(error);
        }
        Ok(region)
    }

    fn find(&mut self, way: Way, page: Pointer) -> Result<(), Failure> {
        let node = self.at_directory(way, |directory| directory.find(page).map(Some))?;
        right_node(page, node.flatten())
    }

    fn delete(&mut self, way: Way, region: Region) -> Result<(), Failure> {
        let page = region.base();
        let node = self.at_directory(way, |directory| directory.remove(page))?;
        right_node(page, node.flatten())?;
        Ok(self.client.delete(region)?)
    }

    /// Asks the directory, if it is used, and times that.
    fn at_directory<R>(
        &mut self,
        way: Way,
        ask: impl FnOnce(&mut DirectoryClient) -> Result<R, DirectoryError>,
    ) -> Result<Option<R>, Failure> {
        let directory = match way {
            Way::Direct => None,
            Way::Directory => self.directory.as_mut(),
        };
        let Some(directory) = directory else { return Ok(None) };
        let start = now();
        let done = ask(directory)?;
        self.add(way, Operation::LookUp, now() - start);
        Ok(Some(done))
    }

    /// Executes and times an operation; its failure is counted.
    fn timed<R>(
        &mut self,
        way: Way,
        operation: Operation,
        work: impl FnOnce(&mut Self) -> Result<R, Failure>,
    ) -> Option<R> {
        let start = now();
        let done = work(self);
        let time = now() - start;
        match done {
            Ok(done) => {
                self.add(way, operation, time);
                Some(done)
            }
            Err(failure) => self.failed(way, operation, &failure),
        }
    }

    fn add(&mut self, way: Way, operation: Operation, time: Duration) {
        if self.is_timed
            && let Some(tally) = self.tally(way, operation)
        {
            tally.samples.add(time);
        }
    }

    fn failed<R>(&mut self, way: Way, operation: Operation, failure: &Failure) -> Option<R> {
        if let Some(tally) = self.tally(way, operation) {
            tally.failure_count += 1;
        }
        self.first_failure.get_or_insert_with(|| failure.to_string());
        None
    }

    fn tally(&mut self, way: Way, operation: Operation) -> Option<&mut Tally> {
        self.tallies.iter_mut().find(|tally| tally.way == way && tally.operation == operation)
    }
}

/// The directory's entry must be the node that the pointer names; nothing moves in this workload.
fn right_node(pointer: Pointer, node: Option<NodeId>) -> Result<(), Failure> {
    match node {
        Some(node) if node != pointer.node => Err(Failure::WrongNode { pointer, node }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use bluebridge::{EndpointConfig, MemoryNode, Space};
    use bluebridge_transport::memory::{Hub, MemoryTransport};

    use super::*;

    /// A client whose memory node does not exist.
    fn client() -> Client<MemoryTransport> {
        let mut config = EndpointConfig::new(Space(1), NodeId(9), 1);
        config.memory_nodes = vec![MemoryNode { node: NodeId(1), shard_count: 1 }];
        config.deadline = Duration::from_millis(1);
        let transport = Hub::new(16).attach(9000, &[]).expect("the port is free");
        Client::open(config, transport)
    }

    #[test]
    fn failures_are_counted_and_a_broken_rack_does_not_hold_up() {
        let plan = Plan { run_count: 1000, warm_up_count: 2, bytes: 4096 };
        let report = run(&mut client(), None, plan);
        let creates = &report.rows[0];
        assert_eq!((creates.operation, creates.summary.sample_count), (Operation::Create, 0));
        assert_eq!((creates.failure_count, report.failure_count), (10, 10));
        assert_eq!(report.skipped_run_count, 992);
        assert!(report.first_failure.is_some_and(|words| words.contains("node 1")));
    }

    #[test]
    fn other_bytes_and_another_node_are_failures() {
        let mut client = client();
        let mut worker = Worker::new(&mut client, None, 16);
        let page = Pointer::from_ipv6("fdbb:1:1:1::".parse().expect("written so")).expect("a page");
        assert_eq!(worker.compared(Way::Direct, Operation::Read, page), Some(()));
        worker.buffer[15] = 1;
        assert_eq!(worker.compared(Way::Direct, Operation::Read, page), None);
        let read = worker.tally(Way::Direct, Operation::Read).expect("it is counted");
        assert_eq!((read.failure_count, read.samples.summary().sample_count), (1, 0));
        assert!(worker.first_failure.is_some_and(|words| words.contains("other bytes")));
        assert!(right_node(page, None).is_ok() && right_node(page, Some(NodeId(1))).is_ok());
        assert!(right_node(page, Some(NodeId(2))).is_err());
    }
}
