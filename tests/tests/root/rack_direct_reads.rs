//! READs that the kernel of the server's machine answers, with real packets.

use std::fs;
use std::time::{Duration, Instant};

use bluebridge::{Error, Placement, Region, Status};
use bluebridge_northbound::proto::DirectReads;
use bluebridge_protocol::requester::Event;
use bluebridge_rack::spec::DataPlane;
use bluebridge_testkit::until;
use bluebridge_tests::rack::daemon::freeze;
use bluebridge_tests::rack::endpoint::{Endpoint, UdpClient};
use bluebridge_tests::rack::{RackOptions, TestRack, stamp};
use bluebridge_wire::address::PAGE_BYTES;
use rustix::process::{Pid, Signal, kill_process};

const SERVER: &str = "memserver-s1";
const READS: u64 = 20_000;

fn options(switch: DataPlane) -> RackOptions {
    RackOptions { servers: 1, clients: 1, ..RackOptions::new(switch, "9000") }
}

/// What the server reported with its last heartbeat.
fn report(rack: &TestRack) -> DirectReads {
    let nodes = rack.controller_status().nodes;
    nodes.into_iter().find_map(|node| node.direct_reads).unwrap_or_default()
}

/// The time that the threads of a process ran, to the nanosecond: clock ticks are counted for whoever runs when one
/// passes, and a thread that wakes up by a timer often does.
fn processor_time(pid: u32) -> Duration {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let times = tasks.flatten().filter_map(|task| {
        // sched-stats (Documentation/scheduler): the first of three numbers. A thread may have ended meanwhile.
        let line = fs::read_to_string(task.path().join("schedstat")).ok()?;
        line.split(' ').next()?.parse::<u64>().ok()
    });
    Duration::from_nanos(times.sum())
}

fn create(client: &mut UdpClient, endpoint: &Endpoint, pages: u64) -> Region {
    let bytes = pages * PAGE_BYTES as u64;
    let region = client.create_at(bytes, Placement::Node(endpoint.server(1))).expect("room");
    for page in 0..pages {
        let place = region.at(page * PAGE_BYTES as u64).expect("inside");
        client.write(place, &stamp::page(1, page_number(page))).expect("it is written");
    }
    region
}

fn page_number(page: u64) -> u32 {
    u32::try_from(page).expect("few pages")
}

fn read_all(client: &mut UdpClient, region: Region, writer: u32, count: u64) {
    let pages = region.length_bytes() / PAGE_BYTES as u64;
    let mut page = [0; PAGE_BYTES];
    for number in (0..pages).cycle().take(usize::try_from(count).expect("few")) {
        let place = region.at(number * PAGE_BYTES as u64).expect("inside");
        client.read(place, &mut page).expect("it is read");
        assert_eq!(stamp::writer(&page), Some((writer, page_number(number))));
    }
}

/// Reads all of it at once, so that each READ is of whole pages of a line.
fn read_lines(client: &mut UdpClient, region: Region, count: u64) {
    let mut bytes = vec![0; usize::try_from(region.length_bytes()).expect("few")];
    for _ in 0..count {
        client.read(region.base(), &mut bytes).expect("it is read");
        for (number, page) in (0..).zip(bytes.chunks(PAGE_BYTES)) {
            assert_eq!(stamp::writer(page), Some((1, number)));
        }
    }
}

/// The kernel answers, behind each kind of switch, and the server's process does nothing.
fn reads_cost_the_server_nothing(name: &str, switch: DataPlane) {
    let rack = TestRack::up(name, &options(switch));
    let endpoint = Endpoint::join(&rack, 1);
    let mut client = endpoint.client(&rack, 1);
    let region = create(&mut client, &endpoint, 16);
    read_all(&mut client, region, 1, 1000);
    // It spins for a while after the last request that reached it.
    std::thread::sleep(Duration::from_millis(50));
    let pid = rack.process(SERVER).pid;
    let (before, began) = (processor_time(pid), Instant::now());
    read_all(&mut client, region, 1, READS);
    read_lines(&mut client, region, 1000);
    let (spent, took) = (processor_time(pid) - before, began.elapsed());
    // The server answers what is sent again because the host was slow, and polls for up to 50 us then.
    let again = client.counters().of(Event::Retransmit);
    println!("{READS} READs in {took:?}: {spent:?} of the server; {again} were sent again");
    // It wakes up 50 times a second to look for orders. Its process would take 200 ms or more to answer all.
    let repeats = u32::try_from(again).expect("few") * Duration::from_micros(100);
    let idle = Duration::from_millis(40) + took / 50 + repeats;
    assert!(spent <= idle, "{spent:?} in {took:?}");
    // Two lines and more, each read with one READ.
    until("the server reports them", || report(&rack).answered_count >= READS + 2000);
    let DirectReads { refusal, passed_count, .. } = report(&rack);
    assert_eq!(refusal, "");
    println!("{passed_count} READs were passed on");
    assert!(passed_count < 100 + again, "{passed_count} READs were passed on, {again} sent again");
}

#[test]
fn reads_cost_the_server_nothing_behind_the_ebpf_switch() {
    reads_cost_the_server_nothing("dr-ebpf", DataPlane::Ebpf);
}

#[test]
fn reads_cost_the_server_nothing_behind_the_soft_switch() {
    reads_cost_the_server_nothing("dr-soft", DataPlane::Soft);
}

#[test]
fn reads_cost_the_server_nothing_behind_open_vswitch() {
    reads_cost_the_server_nothing("dr-ovs", DataPlane::Ovs);
}

#[test]
fn a_server_that_stands_still_is_read_and_one_that_is_killed_comes_back_with_its_memory() {
    let mut rack = TestRack::up("dr-ends", &options(DataPlane::Ebpf));
    let endpoint = Endpoint::join(&rack, 1);
    let mut client = endpoint.client(&rack, 1);
    let region = create(&mut client, &endpoint, 16);
    read_all(&mut client, region, 1, 100);
    let pid = rack.process(SERVER).pid;
    freeze(pid);
    read_all(&mut client, region, 1, 100);
    let mut config = endpoint.config(2);
    config.deadline = Duration::from_secs(1);
    let mut other = endpoint.open(&rack, config);
    let unanswered = other.write(region.base(), &[1; 8]).expect_err("its process stands still");
    assert!(matches!(unanswered, Error::Unreachable { .. }), "{unanswered:?}");
    let target = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("a pid");
    kill_process(target, Signal::CONT).expect("may go on");
    client.write(region.base(), &stamp::page(2, 0)).expect("it goes on");
    rack.kill(SERVER);
    rack.start_with_memory(SERVER);
    let mut page = [0; PAGE_BYTES];
    client.read(region.base(), &mut page).expect("it is read");
    assert_eq!(stamp::writer(&page), Some((2, 0)), "what was acknowledged is there");
    client.write(region.base(), &stamp::page(1, 0)).expect("it is written");
    read_all(&mut client, region, 1, 1000);
    until("the new process reports READs", || report(&rack).answered_count >= 900);
    assert_eq!(report(&rack).refusal, "");
}

#[test]
fn updates_frees_and_old_pointers_are_the_same_as_without() {
    let rack = TestRack::up("dr-changes", &options(DataPlane::Ebpf));
    let endpoint = Endpoint::join(&rack, 1);
    let (mut client, mut other) = (endpoint.client(&rack, 1), endpoint.client(&rack, 2));
    let region = create(&mut client, &endpoint, 2);
    read_all(&mut other, region, 1, 10);
    for round in 2..50 {
        client.write(region.base(), &stamp::page(round, 0)).expect("it is written");
        let mut page = [0; PAGE_BYTES];
        other.read(region.base(), &mut page).expect("it is read");
        assert_eq!(stamp::writer(&page), Some((round, 0)), "at once");
        let part = 100 + usize::try_from(round).expect("small");
        let place = region.at(part as u64).expect("inside");
        other.read(place, &mut page[..7]).expect("it is read");
        assert_eq!(page[..7], stamp::page(round, 0)[part..part + 7]);
    }
    let word = region.at(8).expect("inside");
    let sum = client.fetch_add(word, 5).expect("it is added").wrapping_add(5);
    let mut bytes = [0; 8];
    other.read(word, &mut bytes).expect("it is read");
    assert_eq!(u64::from_le_bytes(bytes), sum);
    client.delete(region).expect("it is freed");
    let refused = other.read(region.base(), &mut bytes).expect_err("it is freed");
    assert!(
        matches!(refused, Error::Refused { status: Status::NotAllocated | Status::StaleTag, .. }),
        "{refused:?}"
    );
}

#[test]
fn a_rack_without_direct_reads_says_so() {
    let mut options = options(DataPlane::Ebpf);
    options.direct_reads = false;
    let rack = TestRack::up("dr-off", &options);
    let endpoint = Endpoint::join(&rack, 1);
    let mut client = endpoint.client(&rack, 1);
    let region = create(&mut client, &endpoint, 4);
    read_all(&mut client, region, 1, 100);
    until("the server says why", || report(&rack).refusal.contains("turned off"));
    assert_eq!(report(&rack).answered_count, 0);
}
