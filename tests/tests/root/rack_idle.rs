//! The daemons of a rack that nobody uses sleep: they wake up for heartbeats, and for little else.

use std::collections::BTreeMap;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use bluebridge_rack::spec::DataPlane;
use bluebridge_tests::rack::{RackOptions, TestRack};

/// Wake-ups of one daemon in a second; measured are 2 to 8.
const MOST: f64 = 15.0;

/// After the joins, the controller reads the switch once more.
const SETTLING: Duration = Duration::from_millis(1200);
const IDLE: Duration = Duration::from_millis(2500);

/// How often the threads of a process went to sleep so far.
fn sleeps(pid: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("the daemon runs");
    let of_thread = |thread: fs::DirEntry| {
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        let line = status.lines().find_map(|it| it.strip_prefix("voluntary_ctxt_switches:"))?;
        line.trim().parse::<u64>().ok()
    };
    threads.flatten().filter_map(of_thread).sum()
}

fn daemons<'a>(racks: &'a [TestRack]) -> impl Iterator<Item = (String, u32)> + 'a {
    racks.iter().flat_map(|rack| {
        let state = rack.rack().state();
        let names = state.daemons.iter().map(|daemon| daemon.name.clone());
        names.map(|name| (format!("{name} of {}", state.spec.name), rack.process(&name).pid))
    })
}

#[test]
fn daemons_without_work_sleep() {
    let options =
        |switch| RackOptions { servers: 1, clients: 1, ..RackOptions::new(switch, "9000") };
    let kernel = TestRack::up("idle-ebpf", &options(DataPlane::Ebpf));
    let soft = TestRack::beside("idle-soft", &options(DataPlane::Soft));
    let racks = [kernel, soft];
    thread::sleep(SETTLING);
    let count =
        || daemons(&racks).map(|(name, pid)| (name, sleeps(pid))).collect::<BTreeMap<_, _>>();
    let (began, before) = (Instant::now(), count());
    thread::sleep(IDLE);
    let (after, seconds) = (count(), began.elapsed().as_secs_f64());
    assert_eq!(after.len(), 8, "a switch, a controller, a server and the hosts, twice");
    for (name, count) in after {
        #[expect(clippy::cast_precision_loss, reason = "few")]
        let rate = (count - before[&name]) as f64 / seconds;
        println!("{name}: {rate:.1} wake-ups per second");
        assert!(rate < MOST, "{name}: {rate:.1} wake-ups per second");
    }
}
