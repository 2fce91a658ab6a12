//! Clients that work continuously while the rack is changed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bluebridge::{Error, NodeId, Placement};
use bluebridge_wire::address::PAGE_BYTES;

use super::TestRack;
use super::endpoint::{Endpoint, UdpClient};
use super::stamp;

/// Pause between two rounds, so that the other processes get the cores as well.
const PAUSE: Duration = Duration::from_micros(200);

/// How long some operations may take to complete.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Working clients; [`Traffic::end`] stops them.
#[derive(Debug)]
pub struct Traffic {
    ended: Arc<AtomicBool>,
    operations: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Result<Duration, String>>>,
}

impl Traffic {
    /// Starts one client for each endpoint and node, which creates, writes, reads, adds and deletes
    /// there.
    pub fn start(rack: &TestRack, endpoints: &[&Endpoint], nodes: &[NodeId]) -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let operations = Arc::new(AtomicU64::new(0));
        let mut threads = Vec::new();
        for endpoint in endpoints {
            for node in nodes {
                let number = 100 + u64::from(node.0);
                let client = endpoint.client(rack, number);
                let worker = Worker {
                    client,
                    node: *node,
                    operations: Arc::clone(&operations),
                    longest: Duration::ZERO,
                };
                let ended = Arc::clone(&ended);
                threads.push(thread::spawn(move || worker.run(&ended)));
            }
        }
        Self { ended, operations, threads }
    }

    /// Waits until `count` more operations completed.
    ///
    /// # Panics
    /// If they do not complete in time.
    pub fn await_more(&self, count: u64) {
        let until = Instant::now() + TIMEOUT;
        let goal = self.operations.load(Ordering::Relaxed) + count;
        while self.operations.load(Ordering::Relaxed) < goal {
            let failed = self.threads.iter().any(JoinHandle::is_finished);
            assert!(!failed, "a client ended: see its error below");
            assert!(Instant::now() < until, "no operation completed");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops the clients; returns the number of operations, and the longest duration.
    ///
    /// # Panics
    /// If an operation failed, or a byte was wrong.
    pub fn end(mut self) -> (u64, Duration) {
        self.ended.store(true, Ordering::Relaxed);
        let mut longest = Duration::ZERO;
        for worker in self.threads.drain(..) {
            let ended = worker.join().expect("a client does not panic");
            longest = longest.max(ended.unwrap_or_else(|error| panic!("{error}")));
        }
        (self.operations.load(Ordering::Relaxed), longest)
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        for worker in self.threads.drain(..) {
            if let Ok(Err(error)) = worker.join() {
                eprintln!("{error}");
            }
        }
    }
}

struct Worker {
    client: UdpClient,
    node: NodeId,
    operations: Arc<AtomicU64>,
    longest: Duration,
}

impl Worker {
    fn run(mut self, ended: &AtomicBool) -> Result<Duration, String> {
        let mut round = 0;
        let place = Placement::Node(self.node);
        let counter = self.timed(|client| client.create_at(8, place))?;
        while !ended.load(Ordering::Relaxed) {
            let page = self.timed(|client| client.create_at(PAGE_BYTES as u64, place))?;
            let written = stamp::page(1, round + 1);
            self.timed(|client| client.write(page.base(), &written))?;
            let mut found = [0; PAGE_BYTES];
            self.timed(|client| client.read(page.base(), &mut found))?;
            if found != written {
                return Err(format!("round {round}: {} holds other bytes", page.base()));
            }
            let before = self.timed(|client| client.fetch_add(counter.base(), 1))?;
            if before != u64::from(round) {
                return Err(format!("round {round}: the counter was {before}"));
            }
            self.timed(|client| client.delete(page))?;
            round += 1;
            thread::sleep(PAUSE);
        }
        self.timed(|client| client.delete(counter))?;
        Ok(self.longest)
    }

    fn timed<T>(
        &mut self,
        operation: impl FnOnce(&mut UdpClient) -> Result<T, Error>,
    ) -> Result<T, String> {
        let began = Instant::now();
        let result = operation(&mut self.client);
        let taken = began.elapsed();
        self.longest = self.longest.max(taken);
        self.operations.fetch_add(1, Ordering::Relaxed);
        result.map_err(|error| format!("on node {} after {taken:?}: {error}", self.node))
    }
}
