//! One suite of packet vectors (`p4/vectors`) against every switch.
//!
//! * [`stf`]: the format of the vectors; [`Hosts`]: links whose ends send and receive frames.
//! * [`Target`]: a switch under test; [`run_all`]: runs every vector; [`report`]: prints a table of the results.
//! * [`driven`]: a switch that is programmed through a driver of the controller.
//! * `tests/switches`: the targets, and tests of embedded data planes beyond the vectors.

pub mod driven;
mod hosts;
mod report;
pub mod stf;

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::PathBuf,
    time::{Duration, Instant},
};

use bluebridge_p4::pipeline::{Action, CPU_PORT, Counter, DropReason, Entry, Key, SwitchPort};
use bluebridge_switch::dataplane::{CloneSession, DataPlane, PacketIn};

pub use hosts::Hosts;
pub use report::{Outcome, Results, report};
use stf::{Check, Pattern, Statement};

/// The ports of every vector.
pub const PORTS: core::ops::RangeInclusive<u16> = 1..=4;

/// How long a frame may take to be counted, also if nothing shows that the switch has processed it.
const COUNT_DEADLINE: Duration = Duration::from_secs(2);

/// The time between two readings of a counter.
const COUNT_PAUSE: Duration = Duration::from_millis(5);

/// Frames with their output ports.
pub type Outputs = Vec<(SwitchPort, Vec<u8>)>;

/// What a vector programs and reads. Errors are texts for the report.
#[expect(clippy::missing_errors_doc, reason = "every error says that the switch refused or failed")]
pub trait Tables {
    /// Removes everything.
    fn clear(&mut self) -> Result<(), String>;

    /// Adds an entry.
    fn insert(&mut self, entry: &Entry) -> Result<(), String>;

    /// An entry with its counter.
    fn entry(&mut self, key: &Key) -> Result<(Entry, Counter), String>;

    /// Sets the group that `l2` floods through.
    fn set_flood_group(&mut self, group: u16) -> Result<(), String>;

    /// Creates a multicast group.
    fn set_group(&mut self, group: u16, ports: &[SwitchPort]) -> Result<(), String>;

    /// Sets the clone session of `notify`.
    fn set_clone_session(&mut self) -> Result<(), String>;

    /// The number of frames dropped for a reason.
    ///
    /// # Errors
    /// The switch fails, or does not count them.
    fn drops(&mut self, reason: DropReason) -> Result<u64, String>;
}

impl<T: DataPlane + ?Sized> Tables for T {
    fn clear(&mut self) -> Result<(), String> {
        DataPlane::clear(self, None).map_err(|error| error.to_string())
    }

    fn insert(&mut self, entry: &Entry) -> Result<(), String> {
        DataPlane::insert(self, entry).map_err(|error| error.to_string())
    }

    fn entry(&mut self, key: &Key) -> Result<(Entry, Counter), String> {
        let read = DataPlane::entry(self, key).map_err(|error| error.to_string())?;
        Ok((read.entry, read.counter))
    }

    fn set_flood_group(&mut self, group: u16) -> Result<(), String> {
        DataPlane::set_flood_group(self, Some(group)).map_err(|error| error.to_string())
    }

    fn set_group(&mut self, group: u16, ports: &[SwitchPort]) -> Result<(), String> {
        DataPlane::set_group(self, group, ports).map_err(|error| error.to_string())
    }

    fn set_clone_session(&mut self) -> Result<(), String> {
        let session = Some(CloneSession::default());
        DataPlane::set_clone_session(self, session).map_err(|error| error.to_string())
    }

    fn drops(&mut self, reason: DropReason) -> Result<u64, String> {
        let drops = DataPlane::drops(self).map_err(|error| error.to_string())?;
        Ok(drops.of(reason))
    }
}

/// The packet-ins that wait in an embedded data plane.
///
/// # Errors
/// The data plane fails.
pub fn poll(plane: &mut dyn DataPlane) -> Result<Outputs, String> {
    let mut events: Vec<PacketIn> = Vec::new();
    plane.poll(64, &mut events).map_err(|error| error.to_string())?;
    Ok(events.into_iter().map(|event| (event.ingress_port, event.frame)).collect())
}

/// A switch with ports 1 to 4 and a way to inject frames.
pub trait Target {
    /// Its tables.
    fn tables(&mut self) -> &mut dyn Tables;

    /// Injects a frame at a port and collects the output, which should be `expected` frames.
    fn send(&mut self, port: SwitchPort, frame: &[u8], expected: usize) -> Outputs;

    /// Injects a frame at a port and does not wait for the output.
    fn inject(&mut self, port: SwitchPort, frame: &[u8]) {
        self.send(port, frame, 0);
    }

    /// The copies for the controller, which should be `expected`, with their ingress ports.
    ///
    /// # Errors
    /// The switch fails.
    fn packet_ins(&mut self, expected: usize) -> Result<Outputs, String>;

    /// Waits until earlier changes apply to every frame, and all frames are counted.
    fn settle(&mut self) {}

    /// Why this kind of switch cannot do what a vector demands; `None` for all that it must do.
    fn limit(&self, _vector: &str) -> Option<Limit> {
        None
    }
}

/// What a kind of switch cannot do.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Limit {
    /// The reason, for people.
    pub why: &'static str,
    /// What may differ: parts of the vector's failure, of which one must be there. Any other failure is one of its
    /// own.
    pub differs: &'static [&'static str],
}

impl Limit {
    /// A limit, and a part of each failure that it can cause.
    #[must_use]
    pub const fn new(why: &'static str, differs: &'static [&'static str]) -> Self {
        Self { why, differs }
    }

    /// A choice among the members of an anycast entry that is not the embedded switch's, in `anycast_weighted`: the
    /// frame goes to another member, rewritten for that one.
    pub const OTHER_CHOICE: Self = Self::new(
        "it has a hash of its own",
        &[
            "port 2 sent an unexpected frame: [02, 00, 00, 00, 00, 02,",
            "port 3 sent an unexpected frame: [02, 00, 00, 00, 00, 03,",
            "port 4 sent an unexpected frame: [02, 00, 00, 00, 00, 04,",
        ],
    );

    /// In `redirect_until`: a redirect whose time is over is still used.
    pub const STILL_REDIRECTED: &'static str =
        "packet 4: port 4 sent an unexpected frame: [02, 00, 00, 00, 00, 04,";

    fn explains(&self, failure: &str) -> bool {
        self.differs.iter().any(|part| failure.contains(part))
    }
}

fn vectors() -> BTreeMap<String, Vec<Statement>> {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../p4/vectors");
    let mut vectors = BTreeMap::new();
    for file in fs::read_dir(&directory).expect("p4/vectors is there") {
        let path = file.expect("p4/vectors can be listed").path();
        if path.extension().is_none_or(|extension| extension != "stf") {
            continue;
        }
        let name = path.file_stem().expect("it has a name").to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).expect("a vector can be read");
        let statements = stf::parse(&text).unwrap_or_else(|why| panic!("{name}: {why}"));
        vectors.insert(name, statements);
    }
    assert!(vectors.len() >= 70, "only {} vectors in {}", vectors.len(), directory.display());
    vectors
}

/// Runs every vector on a target. A vector beyond the limits of the switch must fail in the way that the limit names,
/// so that a limit that is gone, and another failure behind it, are noticed.
///
/// # Panics
/// If a vector cannot be read.
pub fn run_all(name: &'static str, target: &mut dyn Target) -> Results {
    let outcomes = vectors().into_iter().map(|(vector, statements)| {
        let outcome = judge(run(target, &statements), target.limit(&vector));
        (vector, outcome)
    });
    Results { target: name, outcomes: outcomes.collect() }
}

/// What became of a vector, given the limit of the switch.
fn judge(result: Result<(), String>, limit: Option<Limit>) -> Outcome {
    match (result, limit) {
        (Ok(()), None) => Outcome::Holds,
        (Err(why), Some(limit)) if limit.explains(&why) => Outcome::Limit(limit.why),
        (Err(why), Some(Limit { why: limit, differs })) => {
            let words = differs.join("\" or \"");
            Outcome::Failed(format!("{why}; but the limit, {limit}, explains only \"{words}\""))
        }
        (Err(why), None) => Outcome::Failed(why),
        (Ok(()), Some(limit)) => Outcome::Failed(format!("it holds, although {}", limit.why)),
    }
}

/// The names that a vector has defined so far.
#[derive(Default)]
struct Names {
    keys: HashMap<String, Key>,
    nodes: Vec<Vec<SwitchPort>>,
}

fn run(target: &mut dyn Target, statements: &[Statement]) -> Result<(), String> {
    // What the last vector did is counted before it is forgotten.
    target.settle();
    target.tables().clear()?;
    let mut names = Names::default();
    let mut rest = statements.iter().peekable();
    let mut is_changed = true;
    let mut packets = 0;
    while let Some(statement) = rest.next() {
        if let Statement::Packet { port, frame } = statement {
            packets += 1;
            let mut expected = Vec::new();
            while let Some(Statement::Expect { port, pattern }) = rest.peek() {
                expected.push((*port, pattern));
                rest.next();
            }
            if is_changed {
                target.settle();
                is_changed = false;
            }
            exchange(target, *port, frame, expected)
                .map_err(|why| format!("packet {packets}: {why}"))?;
        } else {
            is_changed = true;
            if matches!(statement, Statement::Count { .. }) {
                target.settle();
            }
            set_up(target.tables(), statement, &mut names)?;
        }
    }
    Ok(())
}

fn set_up(tables: &mut dyn Tables, statement: &Statement, names: &mut Names) -> Result<(), String> {
    match statement {
        Statement::Add { entry, name } => {
            tables.insert(entry)?;
            let (read, _) = tables.entry(&entry.key)?;
            if !reads_back(&read, entry) {
                return Err(format!("{entry:?} reads back as {read:?}"));
            }
            names.keys.extend(name.clone().map(|name| (name, entry.key)));
        }
        Statement::Flood { group } => {
            tables.set_flood_group(*group)?;
        }
        Statement::Node { ports } => names.nodes.push(ports.clone()),
        Statement::Associate { group, node } => {
            let ports = names.nodes.get(*node).ok_or("no such node")?;
            tables.set_group(*group, ports)?;
        }
        Statement::Mirror => tables.set_clone_session()?,
        Statement::Wait { pause } => std::thread::sleep(*pause),
        Statement::Count { check, count } => {
            let began = Instant::now();
            loop {
                let is = counted(tables, check, names)?;
                if is == *count {
                    break;
                }
                if began.elapsed() > COUNT_DEADLINE {
                    return Err(format!("{check:?} is {is}, not {count}"));
                }
                std::thread::sleep(COUNT_PAUSE);
            }
        }
        Statement::Packet { .. } | Statement::Expect { .. } => {
            return Err("an expectation without a packet".to_owned());
        }
    }
    Ok(())
}

/// Whether an entry reads back as written; some of its lifetime may have passed.
fn reads_back(read: &Entry, written: &Entry) -> bool {
    let Action::RedirectUntil { lease_ms: left, .. } = read.action else { return read == written };
    let Action::RedirectUntil { lease_ms, .. } = written.action else { return false };
    left <= lease_ms && timeless(read) == timeless(written)
}

/// An entry without its remaining time.
#[must_use]
pub fn timeless(entry: &Entry) -> Entry {
    let mut entry = entry.clone();
    if let Action::RedirectUntil { lease_ms, .. } = &mut entry.action {
        *lease_ms = 0;
    }
    entry
}

fn counted(tables: &mut dyn Tables, check: &Check, names: &Names) -> Result<u64, String> {
    let mut counter = |name: &String| {
        let key = names.keys.get(name).ok_or_else(|| format!("no entry ${name}"))?;
        tables.entry(key).map(|(_, counter)| counter)
    };
    match check {
        Check::Packets(name) => counter(name).map(|counter| counter.packets),
        Check::Bytes(name) => counter(name).map(|counter| counter.bytes),
        Check::Drops(reason) => tables.drops(*reason),
    }
}

/// Injects one frame and compares the output with the expected frames, in any order.
fn exchange(
    target: &mut dyn Target,
    port: SwitchPort,
    frame: &[u8],
    mut expected: Vec<(SwitchPort, &Pattern)>,
) -> Result<(), String> {
    let copies = expected.iter().filter(|(port, _)| *port == CPU_PORT).count();
    let mut left = target.send(port, frame, expected.len() - copies);
    for (ingress_port, frame) in target.packet_ins(copies)? {
        if ingress_port != port {
            return Err(format!("a packet-in names port {}", ingress_port.0));
        }
        left.push((CPU_PORT, frame));
    }
    for (port, frame) in left {
        let found = expected.iter().position(|(p, pattern)| *p == port && pattern.matches(&frame));
        let Some(found) = found else {
            return Err(format!("port {} sent an unexpected frame: {frame:02x?}", port.0));
        };
        expected.swap_remove(found);
    }
    match expected.first() {
        Some((port, _)) => Err(format!("port {} did not send an expected frame", port.0)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_excuses_only_the_failure_that_it_names() {
        let limit = Some(Limit::new("it has no clock", &["packet 2: port 4", "is 0, not 1"]));
        let failed = |why: &str| judge(Err(why.to_owned()), limit);
        assert_eq!(failed("packet 2: port 4 sent it"), Outcome::Limit("it has no clock"));
        assert_eq!(failed("Bytes is 0, not 1"), Outcome::Limit("it has no clock"));
        for other in ["packet 1: port 4 sent it", "the switch refused an entry"] {
            match failed(other) {
                Outcome::Failed(why) => assert!(why.contains(other) && why.contains("no clock")),
                outcome => panic!("{outcome:?}"),
            }
        }
        assert_eq!(judge(Ok(()), None), Outcome::Holds);
        let gone = Outcome::Failed("it holds, although it has no clock".to_owned());
        assert_eq!(judge(Ok(()), limit), gone);
    }
}
