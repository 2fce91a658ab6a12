//! A client that goes on while its memory server is killed and takes its memory over again.
//!
//! It works on memory of its own and knows what every byte must be. An operation whose response was lost
//! with the server may have been done or not; everything else must be as it was acknowledged.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use bluebridge::{Client, Error, NodeId, Placement, Pointer, Region};
use bluebridge_transport::Transport;
use bluebridge_wire::address::{LINE_BYTES, PAGE_BYTES};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use serde::Serialize;

/// Pages that are written and read alone and together.
const PAGES: usize = 64;

/// The most pages of one operation.
const TOGETHER_MAX: usize = 12;

/// What a client saw.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Tally {
    /// Operations that succeeded.
    pub operations: u64,
    /// Operations of which it is not known whether they were done, because their response was lost.
    pub unknown: u64,
    /// Updates whose lease was lost with the server, so that nothing was committed.
    pub lost_leases: u64,
    /// Operations that failed although they can be repeated, or for another reason.
    pub failures: u64,
    /// Reads with bytes that were not written last.
    pub wrong_reads: u64,
    /// The first failure or wrong read.
    pub first_failure: Option<String>,
}

impl Tally {
    /// Adds what another client saw.
    pub fn add(&mut self, other: Self) {
        self.operations += other.operations;
        self.unknown += other.unknown;
        self.lost_leases += other.lost_leases;
        self.failures += other.failures;
        self.wrong_reads += other.wrong_reads;
        self.first_failure = self.first_failure.take().or(other.first_failure);
    }
}

/// What a page or line holds: the seed of its bytes, 0 for zeros.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    known: u64,
    /// The bytes of a write whose response was lost.
    perhaps: Option<u64>,
}

impl Held {
    fn wrote(&mut self, seed: u64, is_known: bool) {
        if is_known {
            *self = Self { known: seed, perhaps: None };
        } else {
            self.perhaps = Some(seed);
        }
    }

    /// Whether it may hold these bytes; if so, it is known that it does.
    fn found(&mut self, bytes: &[u8]) -> bool {
        let is_of =
            |seed| bytes.chunks(8).zip(0_u64..).all(|(chunk, index)| chunk == word(seed, index));
        let found =
            [Some(self.known), self.perhaps].into_iter().flatten().find(|seed| is_of(*seed));
        if let Some(seed) = found {
            *self = Self { known: seed, perhaps: None };
        }
        found.is_some()
    }
}

/// The words of a seed; 0 for zeros.
fn word(seed: u64, index: u64) -> [u8; 8] {
    if seed == 0 { [0; 8] } else { seed.wrapping_mul(index + 1).to_le_bytes() }
}

fn fill(bytes: &mut [u8], seed: u64) {
    for (chunk, index) in bytes.chunks_mut(8).zip(0..) {
        chunk.copy_from_slice(&word(seed, index));
    }
}

/// A client and its memory.
pub struct Survivor<T: Transport> {
    client: Client<T>,
    server: NodeId,
    random: SmallRng,
    region: Region,
    pages: Vec<Held>,
    /// Updated as a whole.
    line: (Pointer, Held),
    /// Incremented: its least and its greatest possible value.
    counter: (Region, u64, u64),
    buffer: Vec<u8>,
    tally: Tally,
}

impl<T: Transport> Survivor<T> {
    /// Memory on `server`; each call may take `deadline`.
    ///
    /// # Errors
    /// If there is no memory.
    pub fn new(
        mut client: Client<T>,
        server: NodeId,
        seed: u64,
        deadline: Duration,
    ) -> Result<Self, Error> {
        client.set_deadline(deadline);
        let at = Placement::Node(server);
        let region = client.create_at((PAGES * PAGE_BYTES) as u64, at)?;
        // Twice as much, so that there is a whole line in it: an update of parts of two lines may be
        // committed in part.
        let lines = client.create_at(2 * LINE_BYTES as u64, at)?;
        let before = lines.base().location.offset() % LINE_BYTES as u64;
        let line = lines.at((LINE_BYTES as u64 - before) % LINE_BYTES as u64)?;
        let counter = client.create_at(8, at)?;
        Ok(Self {
            client,
            server,
            random: SmallRng::seed_from_u64(seed),
            region,
            pages: vec![Held::default(); PAGES],
            line: (line, Held::default()),
            counter: (counter, 0, 0),
            buffer: vec![0; TOGETHER_MAX.max(LINE_BYTES / PAGE_BYTES) * PAGE_BYTES],
            tally: Tally::default(),
        })
    }

    /// Operates until `stop` is set, then reads everything once more.
    pub fn run(mut self, stop: &AtomicBool) -> Tally {
        while !stop.load(Ordering::Acquire) {
            let outcome = match self.random.random_range(0..100) {
                0..40 => self.write(),
                40..75 => self.read(),
                75..85 => self.increment(),
                85..95 => self.update(),
                _ => self.create_and_delete(),
            };
            self.note(outcome);
        }
        for first in (0..PAGES).step_by(8) {
            let outcome = self.read_pages(first, 8);
            self.note(outcome);
        }
        let outcome = self.read_line().and_then(|()| self.increment());
        self.note(outcome);
        self.tally
    }

    fn note(&mut self, outcome: Result<(), Error>) {
        match outcome {
            Ok(()) => self.tally.operations += 1,
            Err(error) if error.is_outcome_unknown() => self.tally.unknown += 1,
            Err(Error::LeaseLost { .. }) => self.tally.lost_leases += 1,
            Err(error) => {
                self.tally.failures += 1;
                self.tally.first_failure.get_or_insert_with(|| error.to_string());
            }
        }
    }

    fn wrong(&mut self, what: &str) {
        self.tally.wrong_reads += 1;
        self.tally.first_failure.get_or_insert_with(|| format!("{what} has bytes of nobody"));
    }

    /// Some pages in a row.
    fn some(&mut self) -> (usize, usize) {
        let count = if self.random.random_bool(0.6) { 1 } else { TOGETHER_MAX };
        (self.random.random_range(0..=PAGES - count), count)
    }

    fn seed(&mut self) -> u64 {
        self.random.random::<u64>() | 1
    }

    fn write(&mut self) -> Result<(), Error> {
        let (first, count) = self.some();
        let seeds: Vec<u64> = (0..count).map(|_| self.seed()).collect();
        let data = &mut self.buffer[..count * PAGE_BYTES];
        for (page, seed) in data.chunks_mut(PAGE_BYTES).zip(&seeds) {
            fill(page, *seed);
        }
        let done = self.client.write(self.region.at((first * PAGE_BYTES) as u64)?, data);
        let is_known = match &done {
            Ok(()) => true,
            Err(error) if error.is_outcome_unknown() => false,
            // A failure that is reported; nothing is said about the pages.
            Err(_) => return done,
        };
        for (held, seed) in self.pages[first..first + count].iter_mut().zip(seeds) {
            // A write that was not acknowledged may already wait for its look at the page.
            held.wrote(seed, is_known);
        }
        if !is_known {
            // Two writes in a row whose responses are lost would leave three possible contents.
            self.settle(first, count)?;
        }
        done
    }

    /// Reads pages until it is known what they hold.
    fn settle(&mut self, first: usize, count: usize) -> Result<(), Error> {
        for start in (first..first + count).step_by(8) {
            self.read_pages(start, 8.min(first + count - start))?;
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), Error> {
        let (first, count) = self.some();
        self.read_pages(first, count)
    }

    fn read_pages(&mut self, first: usize, count: usize) -> Result<(), Error> {
        let bytes = &mut self.buffer[..count * PAGE_BYTES];
        self.client.read(self.region.at((first * PAGE_BYTES) as u64)?, bytes)?;
        let pages = self.pages[first..first + count].iter_mut().zip(bytes.chunks(PAGE_BYTES));
        // Each page is looked at, so that each that is known is settled.
        let wrong =
            pages.map(|(held, bytes)| !held.found(bytes)).filter(|is_wrong| *is_wrong).count();
        if wrong > 0 {
            self.wrong("a page");
        }
        Ok(())
    }

    fn increment(&mut self) -> Result<(), Error> {
        let (counter, least, greatest) = self.counter;
        match self.client.fetch_add(counter.base(), 1) {
            Ok(before) => {
                if !(least..=greatest).contains(&before) {
                    self.wrong("the counter");
                }
                self.counter = (counter, before + 1, before + 1);
                Ok(())
            }
            Err(error) => {
                self.counter.2 += u64::from(error.is_outcome_unknown());
                Err(error)
            }
        }
    }

    fn update(&mut self) -> Result<(), Error> {
        let seed = self.seed();
        let (line, mut held) = self.line;
        let bytes = &mut self.buffer[..LINE_BYTES];
        let mut update = self.client.update(line, bytes)?;
        let is_good = held.found(&update);
        fill(&mut update, seed);
        let done = update.commit();
        match &done {
            Ok(_) => held.wrote(seed, true),
            Err(error) if error.is_outcome_unknown() => held.wrote(seed, false),
            Err(_) => {}
        }
        self.line.1 = held;
        if !is_good {
            self.wrong("the line");
        }
        done.map(|_| ())
    }

    fn read_line(&mut self) -> Result<(), Error> {
        let (line, mut held) = self.line;
        let bytes = &mut self.buffer[..LINE_BYTES];
        self.client.read(line, bytes)?;
        let is_good = held.found(bytes);
        self.line.1 = held;
        if !is_good {
            self.wrong("the line");
        }
        Ok(())
    }

    fn create_and_delete(&mut self) -> Result<(), Error> {
        let region = self.client.create_at(PAGE_BYTES as u64, Placement::Node(self.server))?;
        let mut bytes = [1; PAGE_BYTES];
        self.client.read(region.base(), &mut bytes)?;
        if bytes.iter().any(|byte| *byte != 0) {
            self.wrong("new memory");
        }
        self.client.delete(region)
    }
}
