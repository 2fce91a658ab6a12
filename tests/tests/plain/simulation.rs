//! Simulations with many seeds; see `bluebridge_tests::sim`.

use std::{
    collections::BTreeSet,
    env,
    ops::Range,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use bluebridge_tests::sim::{Bug, Plan, Report, run};

/// Seeds of a test run; more by `BLUEBRIDGE_SIM_SEEDS`, others from `BLUEBRIDGE_SIM_FIRST` on.
const SEEDS: u64 = 1000;

/// Seeds in which a bug must be found. The rarest one shows in 19 of 600.
const BUG_SEEDS: u64 = 200;

/// Failures after which a run stops looking for more.
const FAILURES_MAX: usize = 10;

fn number(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

/// Runs the plans that `plan` gives for the seeds, on all cores; the first failures by seed.
fn run_all(seeds: Range<u64>, plan: impl Fn(u64) -> Plan + Sync) -> (Report, Vec<(u64, String)>) {
    let next = AtomicU64::new(seeds.start);
    let failures = Mutex::new(Vec::new());
    let work = || {
        let mut sum = Report::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let failed = failures.lock().expect("no panic while it is held").len();
            if seed >= seeds.end || failed >= FAILURES_MAX {
                return sum;
            }
            match run(plan(seed), false) {
                Ok(report) => sum.add(&report),
                Err(error) => failures.lock().expect("as above").push((seed, error)),
            }
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let mut all = Report::default();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            match worker.join() {
                Ok(sum) => all.add(&sum),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    (all, failures.into_inner().expect("all workers ended"))
}

/// Counters that no run increments, each with the reason.
const OUT_OF_REACH: [(&str, &str, &str); 25] = [
    ("answered", "Forbidden", "nobody confirms what another one allocated"),
    ("answered", "Busy", "no client leases anything in this simulation"),
    ("answered", "Internal", "the store does not fail"),
    ("answered", "LeaseLost", "no client leases anything in this simulation"),
    ("answered", "NotOwner", "no client leases anything in this simulation"),
    ("answered", "UnsupportedVersion", "other versions are dropped by the parser"),
    ("received", "BeyondWindow", "a requester stays in its window"),
    ("received", "Busy", "no client leases anything in this simulation"),
    ("received", "Expired", "a requester has forgotten what is below its low water"),
    ("received", "Forbidden", "nobody confirms what another one allocated"),
    ("received", "Internal", "the store does not fail"),
    ("received", "LeaseLost", "no client leases anything in this simulation"),
    ("received", "Malformed", "a requester sends nothing malformed"),
    ("received", "NotOwner", "no client leases anything in this simulation"),
    ("received", "StaleRangeEpoch", "a requester names no range epoch"),
    ("received", "Unauthenticated", "a requester has no key"),
    ("received", "UnknownCommand", "a requester sends known commands"),
    ("received", "UnsupportedFeature", "a requester requires none"),
    ("received", "UnsupportedVersion", "other versions are dropped by the parser"),
    ("received", "WrongSpace", "a requester refuses pointers of other spaces itself"),
    ("requester", "busy_retried", "no client leases anything in this simulation"),
    ("requester", "redirect_returned", "no client leases anything in this simulation"),
    ("requester", "reply_violation", "no server here breaks the protocol"),
    ("responder", "incarnation_forgotten", "no incarnation here goes down again"),
    ("responder", "drop_wrong_shard", "the servers here have one shard"),
];

/// Counters of leases, which no client requests in this simulation.
const OF_LEASES: [(&str, &str); 30] = [
    ("responder", "last_committed_read"),
    ("responder", "lease_aborted"),
    ("responder", "lease_beyond_share"),
    ("responder", "lease_committed"),
    ("responder", "lease_contended"),
    ("responder", "lease_expired"),
    ("responder", "lease_forgotten"),
    ("responder", "lease_granted"),
    ("responder", "lease_not_held"),
    ("responder", "lease_renewed"),
    ("responder", "lease_repeated"),
    ("responder", "lease_superseded"),
    ("responder", "lease_table_full"),
    ("responder", "notice_sent"),
    ("responder", "waiter_answered"),
    ("responder", "waiter_forgotten"),
    ("responder", "waiter_gone"),
    ("responder", "waiter_joined"),
    ("responder", "waiter_left"),
    ("responder", "waiter_refused"),
    ("responder", "waiter_repeated"),
    ("requester", "grant_lost"),
    ("requester", "granted"),
    ("requester", "lease_lost"),
    ("requester", "owner_waited"),
    ("requester", "queue_left"),
    ("requester", "queue_repeated"),
    ("requester", "queued"),
    ("requester", "renewed"),
    ("requester", "stale_piece_joined"),
];

/// Counters of migrations, which this simulation does not have.
const OF_MIGRATIONS: [(&str, &str); 15] = [
    ("responder", "freeing_begun"),
    ("responder", "freeing_ended"),
    ("responder", "freeing_repeated"),
    ("responder", "freeing_resumed"),
    ("responder", "part_freed"),
    ("responder", "free_line_stays"),
    ("responder", "keep_repeated"),
    ("responder", "lease_withdrawn"),
    ("responder", "line_discarded"),
    ("responder", "line_kept"),
    ("responder", "line_reclaimed"),
    ("responder", "line_taken"),
    ("responder", "migration_allowed"),
    ("responder", "migration_closed"),
    ("responder", "migration_withdrawn"),
];

/// Counters that only a server or a switch with another configuration would increment.
const OUT_OF_SETTING: [(&str, &str, &str); 5] = [
    ("responder", "allocation_purged", "no operator frees memory here"),
    ("responder", "free_refused", "the store frees what it granted"),
    ("responder", "provisional_kept", "a requester confirms before it requests anything else"),
    ("switch drop", "egress", "no frame here is longer than its link's MTU"),
    ("switch drop", "entry", "the controller here installs no entry that drops"),
];

/// Tasks that must succeed in some run.
const TASKS: [&str; 16] = [
    "alloc_write",
    "alloc_write anywhere",
    "cas",
    "cell read",
    "close",
    "create",
    "create anywhere",
    "delete",
    "fetch_add",
    "ping",
    "read",
    "shared read",
    "shared write",
    "stat",
    "write",
    "zero",
];

/// A run over all seeds that leaves something out does not test it.
fn check_coverage(report: &Report) {
    let excused: BTreeSet<_> = OUT_OF_REACH
        .iter()
        .chain(&OUT_OF_SETTING)
        .map(|(group, name, _)| (*group, *name))
        .chain(OF_LEASES)
        .chain(OF_MIGRATIONS)
        .collect();
    let counted = report.counts.iter().map(|((group, name), count)| ((*group, &**name), *count));
    let missing: BTreeSet<_> =
        counted.filter(|(_, count)| *count == 0).map(|(name, _)| name).collect();
    assert_eq!(
        missing, excused,
        "counters without an event, and those that are known to have none"
    );
    let kinds = |group: &str| report.counts.keys().filter(|(of, _)| *of == group).count();
    assert_eq!(kinds("fault"), 15, "every kind of fault occurred");
    assert_eq!(kinds("move"), 2, "lines moved, and back");
    for task in TASKS {
        let done = report.outcomes.get(&(task, "ok".to_owned())).copied().unwrap_or(0);
        assert!(done > 0, "no {task} ended well");
    }
}

/// A simulation that does not find bugs proves nothing: each planted bug must be found soon.
#[test]
fn every_bug_is_found() {
    for bug in Bug::ALL {
        let found = (0..BUG_SEEDS).find_map(|seed| {
            let plan = Plan { bug: Some(bug), ..Plan::new(seed) };
            run(plan, false).err().map(|error| (seed, error))
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
    for seed in 0..20 {
        let [first, second] = [0, 1].map(|_| run(Plan::new(seed), false).expect("a good run"));
        assert_eq!(first.digest, second.digest, "seed {seed}");
        assert_eq!(first.counts, second.counts, "seed {seed}");
    }
}

#[test]
fn racks_violate_no_rule() {
    if let Some(seed) = number("BLUEBRIDGE_SIM_SEED") {
        let trace = env::var_os("BLUEBRIDGE_SIM_TRACE").is_some();
        match run(Plan::new(seed), trace) {
            Ok(report) => println!("{report}"),
            Err(error) => panic!("seed {seed}: {error}"),
        }
        return;
    }
    let seeds = number("BLUEBRIDGE_SIM_SEEDS").unwrap_or(SEEDS);
    let first = number("BLUEBRIDGE_SIM_FIRST").unwrap_or(0);
    let (report, failures) = run_all(first..first + seeds, Plan::new);
    println!("{report}");
    for (seed, error) in &failures {
        println!("BLUEBRIDGE_SIM_SEED={seed}: {error}");
    }
    assert!(
        failures.is_empty(),
        "replay with the printed variable, and BLUEBRIDGE_SIM_TRACE=1 for all that happens"
    );
    if seeds >= SEEDS {
        check_coverage(&report);
    }
}
