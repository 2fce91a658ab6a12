//! Clients in their own processes, so that they can be killed. They record each operation in a file
//! before and after it, so that the records of a killed client are complete.

mod record;
mod work;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bluebridge::Pointer;
use bluebridge_rack::spec::Node;

pub use record::{OperationKind, Outcome, Record, now};
pub use work::work;

use super::TestRack;

/// The environment variable that makes a process a client, with its instructions.
pub const VARIABLE: &str = "BLUEBRIDGE_WITNESS";

/// How long a client may take to complete operations, or to end. Each operation has its own
/// deadline, but several are waited for, some of them to a dead server, on shared cores.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The most operations of one process, so that its history can be decided.
const OPERATIONS_MAX: usize = 1500;

/// The most kills that may be needed to hit the requested moment.
const KILLS_MAX: u32 = 20;

/// The objects that the clients change.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Object {
    /// A word, changed by FETCH_ADD, CAS and UPDATE.
    Counter(Pointer),
    /// A whole page, changed by WRITE and UPDATE.
    Page(Pointer),
}

impl Object {
    /// Its pointer.
    pub const fn pointer(self) -> Pointer {
        let (Self::Counter(pointer) | Self::Page(pointer)) = self;
        pointer
    }
}

/// The moment at which a client is killed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum KillMoment {
    /// While it waits for a reply.
    Waiting,
    /// While it holds a lease and has no outstanding request.
    Holding,
}

impl KillMoment {
    /// Whether a client's record ends at such a moment.
    fn is_in(self, notes: &Path) -> bool {
        let text = fs::read_to_string(notes).unwrap_or_default();
        let records = record::parse(&text).unwrap_or_default();
        records.last().is_some_and(|last| match self {
            Self::Waiting => last.end.is_none(),
            Self::Holding => last.kind == OperationKind::Lease && last.is_done(),
        })
    }
}

/// The instructions of one process.
#[derive(Debug)]
struct Instructions {
    /// The file for its records.
    notes: PathBuf,
    /// The process ends when this file exists.
    end: PathBuf,
    controller: String,
    node: u16,
    port: u16,
    /// A unique number of the process.
    life: u32,
    objects: Vec<Object>,
}

impl Instructions {
    fn to_text(&self) -> String {
        let objects = self.objects.iter().map(|object| match object {
            Object::Counter(pointer) => format!("counter={pointer}"),
            Object::Page(pointer) => format!("page={pointer}"),
        });
        let (notes, end) = (self.notes.display(), self.end.display());
        let words = [notes.to_string(), end.to_string(), self.controller.clone()];
        let numbers = [self.node.to_string(), self.port.to_string(), self.life.to_string()];
        words.into_iter().chain(numbers).chain(objects).collect::<Vec<_>>().join("\n")
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        Some(Self {
            notes: lines.next()?.into(),
            end: lines.next()?.into(),
            controller: lines.next()?.to_owned(),
            node: lines.next()?.parse().ok()?,
            port: lines.next()?.parse().ok()?,
            life: lines.next()?.parse().ok()?,
            objects: lines
                .map(|line| match line.split_once('=')? {
                    ("counter", pointer) => Some(Object::Counter(pointer.parse().ok()?)),
                    ("page", pointer) => Some(Object::Page(pointer.parse().ok()?)),
                    _ => None,
                })
                .collect::<Option<_>>()?,
        })
    }
}

/// A client process.
#[derive(Debug)]
struct Life {
    child: Child,
    notes: PathBuf,
}

impl Life {
    fn await_moment(&mut self, moment: KillMoment) {
        let until = Instant::now() + TIMEOUT;
        while !moment.is_in(&self.notes) {
            let ended = self.child.try_wait().expect("it is a child");
            assert!(ended.is_none(), "a client ended: {ended:?}: {}", tail(&self.notes));
            assert!(Instant::now() < until, "never {moment:?}: {}", tail(&self.notes));
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Working clients, one per client node of the rack.
#[derive(Debug)]
pub struct Witnesses {
    directory: PathBuf,
    /// The test of this program that becomes a client when [`VARIABLE`] is set.
    entry: &'static str,
    objects: Vec<Object>,
    living: Vec<Life>,
    /// Records of processes that ended.
    past: Vec<PathBuf>,
    life_count: u32,
}

impl Witnesses {
    /// Starts the clients 1 to `count`.
    ///
    /// # Panics
    /// If a process cannot be started.
    pub fn start(
        rack: &TestRack,
        directory: &Path,
        entry: &'static str,
        count: u16,
        objects: &[Object],
    ) -> Self {
        let mut this = Self {
            directory: directory.to_owned(),
            entry,
            objects: objects.to_owned(),
            living: Vec::new(),
            past: Vec::new(),
            life_count: 0,
        };
        for number in 1..=count {
            let life = this.begin(rack, number);
            this.living.push(life);
        }
        this
    }

    /// Kills a client at such a moment, and starts it again. If the kill came too late, the next
    /// process is killed.
    ///
    /// # Panics
    /// If the client ended before, cannot be started, or cannot be killed at such a moment.
    pub fn kill_and_start(&mut self, rack: &TestRack, number: u16, moment: KillMoment) {
        for _ in 0..KILLS_MAX {
            let life = &mut self.living[usize::from(number) - 1];
            life.await_moment(moment);
            life.child.kill().expect("it may be killed");
            life.child.wait().expect("it is a child");
            let was_in_time = moment.is_in(&life.notes);
            let next = self.begin(rack, number);
            let before = std::mem::replace(&mut self.living[usize::from(number) - 1], next);
            self.past.push(before.notes.clone());
            if was_in_time {
                return;
            }
        }
        panic!("client {number} was never killed {moment:?}");
    }

    /// Waits until every client has completed `count` more operations.
    ///
    /// # Panics
    /// If one ends, or does not complete them in time.
    pub fn await_more(&mut self, count: usize) {
        let goal = |life: &Life| (done(&life.notes) + count).min(OPERATIONS_MAX);
        let goals: Vec<_> = self.living.iter().map(goal).collect();
        let until = Instant::now() + TIMEOUT;
        for (life, goal) in self.living.iter_mut().zip(goals) {
            while done(&life.notes) < goal {
                let ended = life.child.try_wait().expect("it is a child");
                assert!(ended.is_none(), "a client ended: {ended:?}: {}", tail(&life.notes));
                assert!(
                    Instant::now() < until,
                    "a client makes no progress: {}",
                    tail(&life.notes)
                );
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }

    /// Stops all clients and returns all records, process by process.
    ///
    /// # Panics
    /// If a client failed, or its records cannot be parsed.
    pub fn end(mut self) -> Vec<Vec<Record>> {
        fs::write(self.directory.join("end"), "").expect("a file");
        let until = Instant::now() + TIMEOUT;
        for life in &mut self.living {
            let ended = loop {
                if let Some(ended) = life.child.try_wait().expect("it is a child") {
                    break ended;
                }
                assert!(Instant::now() < until, "a client does not end: {}", tail(&life.notes));
                std::thread::sleep(Duration::from_millis(2));
            };
            assert!(ended.success(), "a client failed: {}", tail(&life.notes));
        }
        let living = self.living.iter().map(|life| &life.notes);
        let notes = self.past.iter().chain(living).map(|notes| {
            let text = fs::read_to_string(notes).expect("it began to write");
            record::parse(&text).unwrap_or_else(|line| panic!("invalid record: {line}"))
        });
        notes.collect()
    }

    fn begin(&mut self, rack: &TestRack, number: u16) -> Life {
        self.life_count += 1;
        let node = Node::Client(number);
        let notes = self.directory.join(format!("notes.{}", self.life_count));
        let instructions = Instructions {
            notes: notes.clone(),
            end: self.directory.join("end"),
            controller: format!("http://{}", rack.rack().layout().controller()),
            node: number,
            port: rack.port(node),
            life: self.life_count,
            objects: self.objects.clone(),
        };
        let said = fs::File::create(notes.with_extension(format!("said.{}", self.life_count)));
        let said = said.expect("a file");
        let mut command = Command::new(std::env::current_exe().expect("a test knows its file"));
        command.args(["--exact", self.entry, "--nocapture"]).env(VARIABLE, instructions.to_text());
        command.stdin(Stdio::null()).stdout(said.try_clone().expect("a file")).stderr(said);
        let child = rack.enter(node, || command.spawn()).expect("it starts");
        Life { child, notes }
    }
}

/// The number of operations that a client has completed.
fn done(notes: &Path) -> usize {
    let text = fs::read_to_string(notes).unwrap_or_default();
    text.lines().filter(|line| line.starts_with(record::END)).count()
}

/// The end of a client's records and output.
fn tail(notes: &Path) -> String {
    let mut tail = String::new();
    let number = notes.extension().and_then(|number| number.to_str()).unwrap_or_default();
    for path in [notes.to_owned(), notes.with_extension(format!("said.{number}"))] {
        let text = fs::read_to_string(path).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        let last = lines.len().saturating_sub(12);
        tail.extend(lines.iter().skip(last).flat_map(|line| ["\n", *line]));
    }
    tail
}
