//! Servers that do not respond, lose datagrams, or lose memory.
//!
//! A program whose memory is lost gets SIGBUS. So those tests run a child process: this program again, with the name of
//! the ending in a variable.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bluebridge::{Error as RemoteError, ReadRequest, Region, WriteRequest};
use bluebridge_pager::OnFailure;
use bluebridge_transport::impaired::{Impaired, Impairment, Probability};

use super::gate::{Closed, Gate};
use super::*;

/// What the child does; unset in all other processes.
const ENDING: &str = "BLUEBRIDGE_PAGER_ENDING";

/// How the child's memory ends.
#[derive(Clone, Copy, Debug)]
enum Ending {
    /// The servers do not respond.
    Silent,
    /// The region's memory was freed by somebody else.
    Freed,
    /// The servers do not respond, and the program waits for them.
    Patient,
}

/// Remote memory that notes what was allocated.
struct Noting {
    inner: Box<dyn RemoteMemory>,
    created: mpsc::Sender<Region>,
}

impl RemoteMemory for Noting {
    fn create(&mut self, length_bytes: u64) -> Result<Region, RemoteError> {
        let region = self.inner.create(length_bytes)?;
        self.created.send(region).expect("the test listens");
        Ok(region)
    }

    fn delete(&mut self, region: Region) -> Result<(), RemoteError> {
        self.inner.delete(region)
    }

    fn read_many(&mut self, requests: &mut [ReadRequest<'_>]) -> Result<(), RemoteError> {
        self.inner.read_many(requests)
    }

    fn write_many(&mut self, requests: &mut [WriteRequest<'_>]) -> Result<(), RemoteError> {
        self.inner.write_many(requests)
    }
}

/// A client of its own endpoint, behind a link that can be closed.
fn client(rack: &(LocalRack, Vec<MemoryNode>), closed: &Closed) -> Box<dyn RemoteMemory> {
    let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
    let mut config = EndpointConfig::new(SPACE, node, 1);
    config.memory_nodes.clone_from(&rack.1);
    config.deadline = Duration::from_millis(300);
    Box::new(Client::open(config, Gate::new(rack.0.attach(node), closed)))
}

/// A region whose links can be closed, filled with 5, of which 64 KiB are local; its first page has left.
fn filled(
    rack: &(LocalRack, Vec<MemoryNode>),
    options: RegionOptions,
    closed: &Closed,
) -> RemoteRegion {
    let open = || Ok::<_, Error>(client(rack, closed));
    let mut region = RemoteRegion::with_remotes(&options, open).expect("a region");
    region.as_mut_slice().fill(5);
    region
}

fn options(mode: FaultMode) -> RegionOptions {
    RegionOptions::new(1 << 20, 64 << 10).mode(mode).deadline(Duration::from_secs(1))
}

/// The child: its last access must not return.
#[test]
#[ignore = "the other tests of this file run it in a process of its own"]
fn child() {
    let ending = std::env::var(ENDING).expect("a test chose the ending");
    // It ends also if its test does not end it.
    std::thread::spawn(|| {
        std::thread::sleep(Duration::from_secs(60));
        std::process::exit(1);
    });
    let (mode, ending) = ending.split_once(' ').expect("mode and ending");
    let mode = if mode == "in-thread" { MODES[0] } else { MODES[1] };
    let rack = servers(1);
    let closed = Closed::default();
    let (created, list) = mpsc::channel();
    let mut options = options(mode);
    if ending == "Patient" {
        options = options.on_failure(OnFailure::Wait);
    }
    let mut region = RemoteRegion::with_remotes(&options, || {
        let noting = Noting { inner: client(&rack, &closed), created: created.clone() };
        Ok::<_, Error>(Box::new(noting) as Box<dyn RemoteMemory>)
    })
    .expect("a region");
    region.as_mut_slice().fill(5);
    // Dirty pages would need room elsewhere first.
    region.flush().expect("the server responds");
    if ending != "Freed" {
        closed.store(true, Ordering::Relaxed);
    } else {
        let mut other = client(&rack, &AtomicBool::new(false).into());
        for region in list.try_iter() {
            other.delete(region).expect("it is allocated");
        }
    }
    println!("the servers are silent");
    let byte = region.as_slice()[0];
    // Not a wrong byte, at least.
    println!("read {byte}");
}

fn start_child(mode: &str, ending: Ending) -> Child {
    Command::new(std::env::current_exe().expect("a test knows its file"))
        .args(["failures::child", "--exact", "--ignored", "--nocapture"])
        .env(ENDING, format!("{mode} {ending:?}"))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the child starts")
}

#[test]
fn a_program_that_waits_for_a_page_can_be_ended() {
    for mode in ["in-thread", "threads"] {
        let mut child = start_child(mode, Ending::Patient);
        let printed = child.stdout.take().expect("piped");
        let mut lines = BufReader::new(printed).lines().map_while(Result::ok);
        assert!(lines.any(|line| line.contains("the servers are silent")), "{mode}");
        // After the deadline of a fault.
        std::thread::sleep(Duration::from_secs(2));
        assert!(child.try_wait().expect("it is a child").is_none(), "{mode}: it does not wait");
        let id = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(id, rustix::process::Signal::TERM).expect("it runs");
        let begun = Instant::now();
        let status = child.wait().expect("the child ends");
        assert_eq!(status.signal(), Some(libc::SIGTERM), "{mode}");
        assert!(begun.elapsed() < Duration::from_secs(10), "{mode}");
    }
}

#[test]
fn a_page_that_cannot_be_read_ends_the_program_with_a_message() {
    for mode in ["in-thread", "threads"] {
        for (ending, text) in [
            (Ending::Silent, "page 0 could not be read in time"),
            (Ending::Freed, "the contents of page 0 are lost"),
        ] {
            let begun = Instant::now();
            let output = start_child(mode, ending).wait_with_output().expect("the child ends");
            let error = String::from_utf8_lossy(&output.stderr);
            let printed = String::from_utf8_lossy(&output.stdout);
            assert_eq!(
                output.status.signal(),
                Some(libc::SIGBUS),
                "{mode} {ending:?}: {printed}{error}"
            );
            assert!(error.contains(text), "{mode} {ending:?}: {error}");
            assert!(begun.elapsed() < Duration::from_secs(20), "{mode} {ending:?}");
        }
    }
}

#[test]
fn nothing_is_lost_while_servers_do_not_respond() {
    let rack = servers(1);
    for mode in MODES {
        let closed = Closed::default();
        let options = options(mode).on_failure(OnFailure::Wait);
        let mut region = filled(&rack, options, &closed);
        closed.store(true, Ordering::Relaxed);
        let begun = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(2));
                closed.store(false, Ordering::Relaxed);
            });
            // Reads wait, and dirty pages find no room, until the link is open again.
            for (number, page) in region.as_mut_slice().chunks_mut(PAGE).enumerate() {
                assert_eq!(page[1], 5, "page {number}");
                page[0] = 6;
            }
            assert!(begun.elapsed() > Duration::from_secs(1), "the link was closed");
        });
        for (number, page) in region.as_slice().chunks(PAGE).enumerate() {
            assert_eq!((page[0], page[1]), (6, 5), "page {number}");
        }
    }
}

#[test]
fn flush_says_that_servers_do_not_respond() {
    let rack = servers(1);
    for mode in MODES {
        let closed = Closed::default();
        let mut region = filled(&rack, options(mode), &closed);
        region.flush().expect("the server responds");
        closed.store(true, Ordering::Relaxed);
        // The last page is local.
        *region.as_mut_slice().last_mut().expect("it has bytes") = 7;
        let error = region.flush().expect_err("nobody responds");
        assert!(error.to_string().contains("could be written back"), "{error}");
        closed.store(false, Ordering::Relaxed);
        region.flush().expect("the server responds again");
        assert_eq!(region.as_slice().last(), Some(&7));
    }
}

#[test]
fn loss_duplication_and_reordering_change_no_byte() {
    let rack = servers(1);
    for mode in MODES {
        let options = RegionOptions::new(2 << 20, 128 << 10).mode(mode);
        let mut region = RemoteRegion::with_remotes(&options, || {
            let node = NodeId(NEXT_CLIENT.fetch_add(1, Ordering::Relaxed));
            let mut config = EndpointConfig::new(SPACE, node, 1);
            config.memory_nodes.clone_from(&rack.1);
            let carrier = Impaired::new(rack.0.attach(node), impairment(), node.0.into());
            Ok::<_, Error>(Box::new(Client::open(config, carrier)) as Box<dyn RemoteMemory>)
        })
        .expect("a region");
        for round in 0..3_u8 {
            for (number, page) in region.as_mut_slice().chunks_mut(PAGE).enumerate() {
                let expected = if round == 0 { 0 } else { value(number, round - 1) };
                assert!(page.iter().all(|byte| *byte == expected), "page {number} {mode:?}");
                page.fill(value(number, round));
            }
        }
        assert!(region.statistics().remote_faults > 10, "{:?}", region.statistics());
    }
}

fn value(page: usize, round: u8) -> u8 {
    u8::try_from(page % 200).unwrap_or_default() + round
}

fn impairment() -> Impairment {
    Impairment {
        loss: Probability::from_percent(2),
        duplicate: Probability::from_percent(5),
        reorder: Probability::from_percent(5),
        reorder_hold: Duration::from_micros(200),
        ..Impairment::default()
    }
}
