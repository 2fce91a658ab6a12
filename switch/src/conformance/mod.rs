//! One suite of packet vectors (`p4/vectors`) against every data plane.
//!
//! They always run on the pipeline without I/O. The modules `root` run them on the eBPF program with
//! `BPF_PROG_TEST_RUN`, and over veth links through both switches.
//!
//! * `stf`: the format of the vectors; `targets`: the data planes; `world`: links.
//! * `contract`: what a data plane promises; `differential`: random frames; `traffic`: real sockets.

mod contract;
mod differential;
mod stf;
mod targets;
mod traffic;
mod world;

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::PathBuf,
};

use bluebridge_p4::pipeline::{Action, CPU_PORT, Entry, Key, SwitchPort};

use crate::dataplane::{CloneSession, DataPlane, PacketIn};
use stf::{Check, Pattern, Statement};
use targets::{EbpfLinks, EbpfTestRun, SoftLinks, SoftPipeline};

/// The ports of every vector.
const PORTS: core::ops::RangeInclusive<u16> = 1..=4;

/// Frames with their output ports.
type Outputs = Vec<(SwitchPort, Vec<u8>)>;

/// A data plane with ports 1 to 4 and a way to inject frames.
trait Target {
    fn plane(&mut self) -> &mut dyn DataPlane;

    /// Injects a frame at a port and collects the output, which should be `expected` frames.
    fn send(&mut self, port: SwitchPort, frame: &[u8], expected: usize) -> Outputs;

    /// Injects a frame at a port and does not wait for the output.
    fn inject(&mut self, port: SwitchPort, frame: &[u8]) {
        self.send(port, frame, 0);
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
    assert!(vectors.len() >= 30, "only {} vectors in {}", vectors.len(), directory.display());
    vectors
}

/// Runs every vector on a target, and reports every failure.
fn run_all(target: &mut dyn Target) {
    let mut failures = Vec::new();
    let vectors = vectors();
    for (name, statements) in &vectors {
        if let Err(why) = run(target, statements) {
            failures.push(format!("{name}: {why}"));
        }
    }
    assert!(
        failures.is_empty(),
        "{} of {}:\n{}",
        failures.len(),
        vectors.len(),
        failures.join("\n")
    );
}

/// The names that a vector has defined so far.
#[derive(Default)]
struct Names {
    keys: HashMap<String, Key>,
    nodes: Vec<Vec<SwitchPort>>,
}

fn run(target: &mut dyn Target, statements: &[Statement]) -> Result<(), String> {
    target.plane().clear(None).map_err(|e| e.to_string())?;
    let mut names = Names::default();
    let mut rest = statements.iter().peekable();
    while let Some(statement) = rest.next() {
        if let Statement::Packet { port, frame } = statement {
            let mut expected = Vec::new();
            while let Some(Statement::Expect { port, pattern }) = rest.peek() {
                expected.push((*port, pattern));
                rest.next();
            }
            exchange(target, *port, frame, expected)?;
        } else {
            set_up(target.plane(), statement, &mut names)?;
        }
    }
    Ok(())
}

fn set_up(
    plane: &mut dyn DataPlane,
    statement: &Statement,
    names: &mut Names,
) -> Result<(), String> {
    match statement {
        Statement::Add { entry, name } => {
            plane.insert(entry).map_err(|e| e.to_string())?;
            let read = plane.entry(&entry.key).map_err(|e| e.to_string())?;
            if !reads_back(&read.entry, entry) {
                return Err(format!("{entry:?} reads back as {:?}", read.entry));
            }
            names.keys.extend(name.clone().map(|name| (name, entry.key)));
        }
        Statement::Flood { group } => {
            plane.set_flood_group(Some(*group)).map_err(|e| e.to_string())?;
        }
        Statement::Node { ports } => names.nodes.push(ports.clone()),
        Statement::Associate { group, node } => {
            let ports = names.nodes.get(*node).ok_or("no such node")?;
            plane.set_group(*group, ports).map_err(|e| e.to_string())?;
        }
        Statement::Mirror => {
            plane.set_clone_session(Some(CloneSession::default())).map_err(|e| e.to_string())?
        }
        Statement::Wait { pause } => std::thread::sleep(*pause),
        Statement::Count { check, count } => {
            let is = counted(plane, check, names)?;
            if is != *count {
                return Err(format!("{check:?} is {is}, not {count}"));
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
fn timeless(entry: &Entry) -> Entry {
    let mut entry = entry.clone();
    if let Action::RedirectUntil { lease_ms, .. } = &mut entry.action {
        *lease_ms = 0;
    }
    entry
}

fn counted(plane: &mut dyn DataPlane, check: &Check, names: &Names) -> Result<u64, String> {
    let mut counter = |name: &String| {
        let key = names.keys.get(name).ok_or_else(|| format!("no entry ${name}"))?;
        plane.entry(key).map(|read| read.counter).map_err(|e| e.to_string())
    };
    match check {
        Check::Packets(name) => counter(name).map(|counter| counter.packets),
        Check::Bytes(name) => counter(name).map(|counter| counter.bytes),
        Check::Drops(reason) => {
            plane.drops().map(|drops| drops.of(*reason)).map_err(|e| e.to_string())
        }
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
    let mut events: Vec<PacketIn> = Vec::new();
    target.plane().poll(64, &mut events).map_err(|e| e.to_string())?;
    for event in events {
        if event.ingress_port != port {
            return Err(format!("a packet-in names port {}", event.ingress_port.0));
        }
        left.push((CPU_PORT, event.frame));
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

#[test]
fn vectors_hold_for_the_soft_pipeline() {
    run_all(&mut SoftPipeline::new());
}

mod root {
    use bluebridge_testkit::namespace::in_thread;

    use super::*;
    use crate::ebpf::PortMode;

    #[test]
    fn vectors_hold_for_the_ebpf_program() {
        in_thread(|| run_all(&mut EbpfTestRun::new("vectors-run")));
    }

    #[test]
    fn vectors_hold_for_the_ebpf_switch_over_links() {
        in_thread(|| run_all(&mut EbpfLinks::new("vectors-links", None)));
    }

    #[test]
    fn vectors_hold_for_the_xdp_switch_over_links() {
        let mode = PortMode::Xdp;
        in_thread(move || run_all(&mut EbpfLinks::new("vectors-xdp", Some(mode))));
    }

    #[test]
    fn vectors_hold_for_the_soft_switch_over_links() {
        in_thread(|| run_all(&mut SoftLinks::new()));
    }
}
