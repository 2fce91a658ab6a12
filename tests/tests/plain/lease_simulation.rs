//! Simulations of leases with many seeds; see `bluebridge_tests::sim::leases`.
//!
//! `BLUEBRIDGE_SIM_SEEDS`, `BLUEBRIDGE_SIM_FIRST` and `BLUEBRIDGE_SIM_SEED` as for the simulation.

use std::{
    env,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use bluebridge_protocol::{owner, requester};
use bluebridge_tests::sim::{
    Report,
    leases::{Bug, Plan, run},
};

/// Seeds of a test run.
const SEEDS: u64 = 500;

/// Seeds in which a bug must be found.
const BUG_SEEDS: u64 = 200;

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

#[test]
fn leases_are_linearizable() {
    if let Some(seed) = number("BLUEBRIDGE_SIM_SEED") {
        let report = run(&Plan { seed, bug: None });
        println!("{}", report.unwrap_or_else(|error| panic!("seed {seed}: {error}")));
        return;
    }
    let first = number("BLUEBRIDGE_SIM_FIRST").unwrap_or(0);
    let seeds = number("BLUEBRIDGE_SIM_SEEDS").unwrap_or(SEEDS);
    let next = AtomicU64::new(first);
    let failures = Mutex::new(Vec::new());
    let sum = Mutex::new(Report::default());
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + seeds {
                        return;
                    }
                    match run(&Plan { seed, bug: None }) {
                        Ok(report) => sum.lock().expect("no panic while held").add(&report),
                        Err(error) => {
                            failures.lock().expect("no panic while held").push((seed, error));
                        }
                    }
                }
            });
        }
    });
    let sum = sum.into_inner().expect("all workers ended");
    println!("{sum}");
    let failures = failures.into_inner().expect("all workers ended");
    for (seed, error) in failures.iter().take(10) {
        println!("BLUEBRIDGE_SIM_SEED={seed}: {error}");
    }
    assert!(failures.is_empty(), "{} seeds failed; replay with the variable", failures.len());
    if seeds >= SEEDS {
        check_coverage(&sum);
    }
}

/// A run over all seeds that leaves one of these out does not test it.
fn check_coverage(sum: &Report) {
    for task in ["abort", "commit", "fetch_add", "read", "renew", "update", "write"] {
        let done = sum.outcomes.get(&(task, "ok".to_owned())).copied().unwrap_or(0);
        assert!(done > 0, "no {task} ended well");
    }
    for how in ["read stale: ok, stale true", "commit: lease lost: Expired", "update: Busy"] {
        let (task, outcome) = how.split_once(": ").expect("a task and an outcome");
        let seen = sum.outcomes.iter().any(|((of, how), _)| (*of, &**how) == (task, outcome));
        assert!(seen, "never {how}");
    }
    for event in ["client crashed", "client frozen", "server restarted", "switch wiped"] {
        let count = sum.counts.get(&("lease world", event.to_owned())).copied().unwrap_or(0);
        assert!(count > 0, "never {event}");
    }
    for event in
        ["controller restarted", "redirect installed", "redirect removed", "requests led astray"]
    {
        let count = sum.counts.get(&("lease world", event.to_owned())).copied().unwrap_or(0);
        assert!(count > 0, "never {event}");
    }
    for event in [
        requester::Event::Grant,
        requester::Event::LeaseLost,
        requester::Event::OwnerWait,
        requester::Event::Queue,
        requester::Event::QueueRepeat,
        requester::Event::RedirectReturn,
        requester::Event::Renewal,
        requester::Event::Resumed,
        requester::Event::ResumeUnsafe,
        requester::Event::Retransmit,
        requester::Event::StaleJoin,
        requester::Event::TrainRepair,
    ] {
        let count = sum.counts.get(&("requester", event.name().to_owned())).copied().unwrap_or(0);
        assert!(count > 0, "no requester ever {}", event.name());
    }
    for event in [
        owner::Event::Hold,
        owner::Event::NotOwner,
        owner::Event::Reject,
        owner::Event::Release,
        owner::Event::Serve,
        owner::Event::Wait,
        owner::Event::WaitEnd,
        owner::Event::WaitOver,
    ] {
        let count = sum.counts.get(&("owner", event.name().to_owned())).copied().unwrap_or(0);
        assert!(count > 0, "no owner ever {}", event.name());
    }
    let commits = sum.outcomes.get(&("commit", "ok".to_owned())).copied().unwrap_or(0);
    assert!(commits > 1000, "{commits} commits");
}

#[test]
fn every_bug_is_found() {
    for bug in Bug::ALL {
        let found = (0..BUG_SEEDS).find_map(|seed| {
            let plan = Plan { seed, bug: Some(bug) };
            run(&plan).err().map(|error| (seed, error))
        });
        match found {
            Some((seed, error)) => println!("{bug:?}: seed {seed}: {error}"),
            None => panic!("{bug:?} was not found by {BUG_SEEDS} seeds"),
        }
    }
}

/// A seed determines the whole run: otherwise a failure could not be replayed.
#[test]
fn a_seed_replays_exactly() {
    for seed in 0..10 {
        let [first, second] =
            [0, 1].map(|_| run(&Plan { seed, bug: None }).expect("a good run").digest);
        assert_eq!(first, second, "seed {seed}");
    }
}
