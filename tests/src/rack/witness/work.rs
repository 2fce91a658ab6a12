//! The client process: one operation after the other, each recorded before it is sent.

use std::fs::File;
use std::io::Write as _;
use std::thread;
use std::time::Duration;

use bluebridge::{Client, Error, JoinOptions, OwnerPolicy, Status, UpdateOptions};
use bluebridge_rack::layout::ENDPOINT_INTERFACE;
use bluebridge_rack::spec::Node;
use bluebridge_wire::address::PAGE_BYTES;
use rand::{Rng, SeedableRng, rngs::SmallRng};

use super::record::{self, OperationKind, Outcome};
use super::{Instructions, OPERATIONS_MAX, Object, VARIABLE};
use crate::rack::endpoint::{SPACE, UdpClient};
use crate::rack::stamp;

/// The deadline of an operation: short, so that requests to a dead server end soon.
const DEADLINE: Duration = Duration::from_millis(1500);

/// Short, so that leases of a killed client expire soon.
const LEASE: Duration = Duration::from_millis(300);

/// Works as instructed by [`VARIABLE`]; returns whether it is set.
///
/// # Panics
/// If the instructions are invalid or the rack cannot be joined.
pub fn work() -> bool {
    let Ok(instructions) = std::env::var(VARIABLE) else { return false };
    let instructions = Instructions::parse(&instructions).expect("valid instructions");
    let mut worker = Worker::join(&instructions);
    let mut left = OPERATIONS_MAX;
    while left > 0 && !instructions.end.exists() {
        let object = worker.dice.random_range(0..instructions.objects.len());
        worker.turn(object, instructions.objects[object]);
        left -= 1;
        thread::sleep(Duration::from_millis(worker.dice.random_range(2..12)));
    }
    while !instructions.end.exists() {
        thread::sleep(Duration::from_millis(5));
    }
    true
}

struct Worker {
    client: UdpClient,
    notes: File,
    dice: SmallRng,
    life: u32,
    value_count: u32,
}

impl Worker {
    fn join(instructions: &Instructions) -> Self {
        let name = Node::Client(instructions.node).to_string();
        let mut options = JoinOptions::named(name)
            .space(SPACE)
            .interface(ENDPOINT_INTERFACE)
            .switch_port(instructions.port);
        options.behaviour.deadline = DEADLINE;
        // Five of these processes share two cores with the rack's daemons.
        options.behaviour.spin = Some(Duration::ZERO);
        let client = Client::join(&instructions.controller, options);
        let client = client.unwrap_or_else(|error| panic!("{error}"));
        let notes = File::create(&instructions.notes).expect("a file");
        let dice = SmallRng::seed_from_u64(u64::from(instructions.life));
        Self { client, notes, dice, life: instructions.life, value_count: 0 }
    }

    fn turn(&mut self, object: usize, at: Object) {
        let kind = self.dice.random_range(0..10);
        match (at, kind) {
            (_, 0..3) => {
                self.read(object, at);
            }
            (_, 3..6) => self.update(object, at),
            (Object::Page(page), _) => {
                let value = self.next_value();
                self.note(object, OperationKind::Write { value }, |client| {
                    client.write(page, &page_of(value)).map(|()| 0)
                });
            }
            (Object::Counter(word), 6..8) => {
                let addend = self.next_value();
                self.note(object, OperationKind::Add { addend }, |client| {
                    client.fetch_add(word, addend)
                });
            }
            (Object::Counter(word), _) => {
                let Some(expected) = self.read(object, at) else { return };
                let new = self.next_value();
                let kind = OperationKind::Swap { expected, new };
                self.note(object, kind, |client| client.compare_swap(word, expected, new));
            }
        }
    }

    fn read(&mut self, object: usize, at: Object) -> Option<u64> {
        let mut bytes = vec![0; length(at)];
        self.begin(object, OperationKind::Read);
        let read = self.client.read(at.pointer(), &mut bytes);
        self.end(seen(at, read, &bytes))
    }

    /// UPDATE, some time with the lease, then COMMIT, ABORT or nothing.
    fn update(&mut self, object: usize, at: Object) {
        let policies = [OwnerPolicy::Reject, OwnerPolicy::Serve, OwnerPolicy::Wait];
        let options = UpdateOptions {
            lease: Some(LEASE),
            owner_policy: policies[self.dice.random_range(0..policies.len())],
            wait: self.dice.random_bool(0.8),
            ..UpdateOptions::default()
        };
        let pause = if self.dice.random_bool(0.1) { 100 } else { self.dice.random_range(0..6) };
        let is_committed = self.dice.random_bool(0.85);
        let value = self.next_value();
        let mut bytes = vec![0; length(at)];
        self.begin(object, OperationKind::Lease);
        let update = self.client.update_with(at.pointer(), &mut bytes, options);
        let mut update = match update {
            Ok(update) => update,
            Err(error) => {
                write(&mut self.notes, &record::end(record::now(), &failed(&error)));
                return;
            }
        };
        let outcome = seen(at, Ok(()), &update);
        write(&mut self.notes, &record::end(record::now(), &outcome));
        thread::sleep(Duration::from_millis(pause));
        let Outcome::Done(before) = outcome else { return };
        if !is_committed {
            // The result of the ABORT does not matter: the lease expires.
            let _ = update.abort();
            return;
        }
        match at {
            Object::Counter(_) => update.copy_from_slice(&value.to_le_bytes()),
            Object::Page(_) => update.copy_from_slice(&page_of(value)),
        }
        let kind = OperationKind::Update { before, after: value };
        write(&mut self.notes, &record::begin(record::now(), object, kind));
        let outcome = update.commit().map_or_else(|error| failed(&error), |()| Outcome::Done(0));
        write(&mut self.notes, &record::end(record::now(), &outcome));
    }

    fn note(
        &mut self,
        object: usize,
        kind: OperationKind,
        operation: impl FnOnce(&mut UdpClient) -> Result<u64, Error>,
    ) {
        self.begin(object, kind);
        let result = operation(&mut self.client);
        self.end(result.map_or_else(|error| failed(&error), Outcome::Done));
    }

    fn begin(&mut self, object: usize, kind: OperationKind) {
        write(&mut self.notes, &record::begin(record::now(), object, kind));
    }

    fn end(&mut self, outcome: Outcome) -> Option<u64> {
        write(&mut self.notes, &record::end(record::now(), &outcome));
        if let Outcome::Done(value) = outcome { Some(value) } else { None }
    }

    /// A number that no other process writes.
    fn next_value(&mut self) -> u64 {
        self.value_count += 1;
        u64::from(self.life) << 32 | u64::from(self.value_count)
    }
}

/// Writes a line in one call: a kill cannot leave a part of it.
fn write(notes: &mut File, line: &str) {
    notes.write_all(line.as_bytes()).expect("room for notes");
}

const fn length(at: Object) -> usize {
    match at {
        Object::Counter(_) => 8,
        Object::Page(_) => PAGE_BYTES,
    }
}

fn page_of(value: u64) -> [u8; PAGE_BYTES] {
    let halves = [value >> 32, value & 0xffff_ffff].map(|half| u32::try_from(half).unwrap_or(0));
    stamp::page(halves[0], halves[1])
}

fn seen(at: Object, read: Result<(), Error>, bytes: &[u8]) -> Outcome {
    if let Err(error) = read {
        return failed(&error);
    }
    let value = match at {
        Object::Counter(_) => bytes.try_into().ok().map(u64::from_le_bytes),
        Object::Page(_) => {
            let writer = stamp::writer(bytes);
            writer.map(|(life, count)| u64::from(life) << 32 | u64::from(count))
        }
    };
    value.map_or_else(|| Outcome::Wrong("no single write's bytes".to_owned()), Outcome::Done)
}

fn failed(error: &Error) -> Outcome {
    let why = format!("{error:?}").replace('\n', " ");
    match error {
        Error::Busy { .. }
        | Error::LeaseLost { .. }
        | Error::TimedOut { .. }
        | Error::Unreachable { .. } => Outcome::Nothing(why),
        // An operation that was executed before the contents were lost may have been observed.
        Error::OutcomeUnknown { .. } | Error::Refused { status: Status::StaleGeneration, .. } => {
            Outcome::Unknown(why)
        }
        _ => Outcome::Wrong(why),
    }
}
