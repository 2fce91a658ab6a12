//! The lease protocol under a model checker; see `bluebridge_tests::ownership`.
//!
//! `BLUEBRIDGE_MODEL_LARGE=1` adds scenarios of many millions of states.

use std::{
    env,
    sync::{Arc, Mutex},
    thread,
    time::Instant,
};

use bluebridge_tests::ownership::{
    Bug, Copies, Event, Outcomes, Policy, Scenario,
    Task::{self, Abort, Add, Read, Renew, StaleRead, Update},
};
use stateright::{Checker, HasDiscoveries, Model};

type Threads<'a> = &'a [(u8, &'a [Task])];

fn scenario(name: &'static str, threads: Threads<'_>, change: fn(&mut Scenario)) -> Scenario {
    Scenario::new(name, threads).with(change)
}

/// Short leases and little time make few states.
fn hurry(scenario: &mut Scenario) {
    (scenario.ticks, scenario.lease) = (2, 1);
}

/// Small enough for every test run.
fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("two writers", &[(0, &[Update]), (1, &[Update])], |s| {
            hurry(s);
            s.duplicates = 1;
            s.expected.extend([Event::ResponseRepeated, Event::GrantRepeated, Event::LateCommit]);
        }),
        scenario("two writers, redirected", &[(0, &[Update]), (1, &[Update])], |s| {
            hurry(s);
            s.copies = Copies::Always;
            s.expected.push(Event::Bounced);
        }),
        scenario("two writers that wait", &[(0, &[Update]), (1, &[Update])], |s| {
            hurry(s);
            s.queue = true;
            s.copies = Copies::Contended;
            s.policy = Policy::Wait;
            s.expected.push(Event::WaiterGranted);
        }),
        scenario("three that wait", &[(0, &[Update]), (1, &[Update]), (1, &[Read])], |s| {
            hurry(s);
            s.queue = true;
            s.retries = 0;
            s.expected.push(Event::WaiterGranted);
        }),
        scenario("losses", &[(0, &[Update]), (1, &[Update])], |s| {
            hurry(s);
            s.losses = 2;
            s.expected.extend([Event::ResponseRepeated, Event::GrantRepeated, Event::LateCommit]);
        }),
        scenario("two threads of a client", &[(0, &[Update]), (0, &[Update, Update])], |s| {
            hurry(s);
            s.retries = 0;
            s.duplicates = 1;
        }),
        scenario("a reader", &[(0, &[Update]), (1, &[Read, Read])], |s| {
            hurry(s);
            s.copies = Copies::Always;
            s.freezes = 1;
            s.retries = 0;
            s.expected.push(Event::Bounced);
        }),
        scenario("a reader of what was", &[(0, &[Update]), (1, &[Add, StaleRead])], |s| {
            hurry(s);
            s.copies = Copies::Always;
            s.policy = Policy::Serve;
            s.freezes = 1;
            s.retries = 0;
            s.expected.push(Event::ServedByOwner);
        }),
        scenario("a reader of what is", &[(0, &[Update]), (1, &[Read, StaleRead])], |s| {
            hurry(s);
            s.copies = Copies::Always;
            s.policy = Policy::Serve;
            s.retries = 0;
            s.duplicates = 1;
            s.expected.push(Event::ServedByOwner);
        }),
        scenario("an adder", &[(0, &[Update]), (1, &[Add, Add])], |s| {
            hurry(s);
            s.retries = 0;
            s.duplicates = 1;
            s.copies = Copies::Always;
            s.expected.push(Event::Bounced);
        }),
        scenario("renewed, and given back", &[(0, &[Renew]), (1, &[Abort])], |s| {
            s.copies = Copies::Always;
            s.retries = 0;
        }),
        scenario("clients crash", &[(0, &[Update, Update]), (1, &[Update])], |s| {
            hurry(s);
            s.client_crashes = 2;
            s.retries = 0;
            s.duplicates = 1;
        }),
        scenario("the home restarts", &[(0, &[Update, Add]), (0, &[Update])], |s| {
            hurry(s);
            s.home_crashes = 2;
            s.retries = 0;
        }),
        scenario("everything crashes", &[(0, &[Update]), (1, &[Add])], |s| {
            hurry(s);
            s.home_crashes = 1;
            s.client_crashes = 1;
            s.network_crashes = 1;
            s.copies = Copies::Always;
            s.retries = 0;
        }),
        scenario("controller and switch restart", &[(0, &[Update]), (1, &[Update])], |s| {
            hurry(s);
            s.copies = Copies::Always;
            s.network_crashes = 2;
            s.retries = 0;
            s.expected.push(Event::Bounced);
        }),
        scenario("hints from nowhere", &[(0, &[Update]), (1, &[Read, Add])], |s| {
            hurry(s);
            s.retries = 0;
            s.false_hints = 2;
            s.expected.push(Event::Bounced);
        }),
        scenario("three threads", &[(0, &[Update]), (0, &[Update]), (1, &[Add])], |s| {
            hurry(s);
            s.retries = 0;
        }),
    ]
}

/// For nightly runs.
fn large_scenarios() -> Vec<Scenario> {
    vec![
        scenario("three clients", &[(0, &[Update]), (1, &[Update]), (2, &[Update])], |s| {
            hurry(s);
            s.copies = Copies::Contended;
        }),
        scenario("hints from nowhere", &[(0, &[Update]), (1, &[Read, Add])], |s| {
            s.false_hints = 2;
        }),
        scenario("two writers, everything once", &[(0, &[Update]), (1, &[Update])], |s| {
            hurry(s);
            s.copies = Copies::Always;
            s.duplicates = 1;
            s.freezes = 1;
            s.home_crashes = 1;
            s.client_crashes = 1;
        }),
        scenario("again and again", &[(0, &[Update, Update]), (1, &[Update, Add])], |s| {
            s.copies = Copies::Always;
            s.queue = true;
            s.policy = Policy::Wait;
        }),
        scenario("a frozen owner", &[(0, &[Renew]), (1, &[Update, Read])], |s| {
            s.copies = Copies::Always;
            s.freezes = 1;
        }),
    ]
}

fn check(scenario: Scenario, until: HasDiscoveries) -> impl Checker<Scenario> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    scenario.checker().threads(threads).finish_when(until).spawn_dfs().join()
}

fn check_all(scenarios: Vec<Scenario>) {
    for scenario in scenarios {
        let start = Instant::now();
        let checker = check(scenario, HasDiscoveries::AnyFailures);
        let scenario = checker.model();
        let count = checker.unique_state_count();
        println!("{}: {count} states, {:.1?}", scenario.name, start.elapsed());
        checker.assert_properties();
        let missing: Vec<_> = scenario.missing().collect();
        assert!(missing.is_empty(), "{} does not show {missing:?}", scenario.name);
    }
}

#[test]
fn leases_satisfy_all_properties() {
    check_all(scenarios());
    if env::var_os("BLUEBRIDGE_MODEL_LARGE").is_some() {
        check_all(large_scenarios());
    }
}

/// How tasks can end, over all runs of a scenario.
fn outcomes(scenario: &Scenario) -> Outcomes {
    let outcomes = Arc::new(Mutex::new(Outcomes::new()));
    let scenario = scenario.with(|s| s.outcomes = Some(Arc::clone(&outcomes)));
    let checker = check(scenario, HasDiscoveries::AnyFailures);
    checker.assert_properties();
    drop(checker);
    core::mem::take(&mut *outcomes.lock().expect("the checker has ended"))
}

/// Whatever redirects the switch has, the possible results are the same.
#[test]
fn a_redirect_never_changes_a_result() {
    let threads: [Threads<'_>; 3] = [
        &[(0, &[Update]), (1, &[Read, Add])],
        &[(0, &[Update]), (1, &[Update])],
        &[(0, &[Update]), (0, &[Add]), (1, &[Read])],
    ];
    for threads in threads {
        let plain = scenario("without redirects", threads, |s| {
            hurry(s);
            s.retries = 0;
        });
        let expected = outcomes(&plain);
        assert!(expected.len() > 10, "{} ways to end are too few", expected.len());
        let redirected = plain.with(|s| s.copies = Copies::Always);
        assert_eq!(outcomes(&redirected), expected, "{threads:?} with redirects");
        let misled = plain.with(|s| s.false_hints = 2);
        assert_eq!(outcomes(&misled), expected, "{threads:?} with hints from nowhere");
    }
}

/// The scenario in which a broken rule is found, and the property that it violates.
fn where_it_shows(bug: Bug) -> (Scenario, &'static str) {
    const BASE: &str = "a COMMIT builds on the contents that it replaces";
    const DONE: &str = "acknowledged requests were executed";
    const ONE_TRY: &str = "a redirect costs one try";
    const ONE_OWNER: &str = "one owner at a time, by running clocks";
    const READ: &str = "a READ is not behind what was known before";
    const TWICE: &str = "no request is executed twice";
    let writer_and: fn(&'static [Task]) -> Scenario = |tasks| {
        scenario("a writer, redirected", &[(0, &[Update]), (1, tasks)], |s| {
            s.copies = Copies::Always;
        })
    };
    let threads: Threads<'_> = &[(0, &[Update]), (0, &[Update, Update])];
    match bug {
        Bug::AnyEpoch => (scenario("two threads", threads, |s| s.retries = 0), BASE),
        Bug::BlindController => (writer_and(&[Read]), ONE_TRY),
        Bug::BlindRetry => (scenario("an adder", &[(0, &[Add])], |s| s.home_crashes = 1), TWICE),
        Bug::CountFromArrival => {
            (scenario("two writers", &[(0, &[Update]), (1, &[Update])], |_| {}), ONE_OWNER)
        }
        Bug::ForgetResponses => (scenario("an adder", &[(0, &[Add])], |s| s.duplicates = 1), TWICE),
        Bug::ForgetEpochs => {
            let change: fn(&mut Scenario) = |s| {
                s.home_crashes = 1;
                s.retries = 0;
            };
            (scenario("two threads", &[(0, &[Update]), (0, &[Add, Update])], change), BASE)
        }
        Bug::KeepLease => (scenario("a writer", &[(0, &[Update])], |_| {}), "every lease ends"),
        Bug::LateCommit => (writer_and(&[Add]), BASE),
        Bug::OwnerExecutes => (writer_and(&[Add]), DONE),
        Bug::OwnerReads => {
            (writer_and(&[Add, Read]).with(|s| (s.freezes, s.retries) = (1, 0)), READ)
        }
        Bug::RedirectCommit => (writer_and(&[]), ONE_TRY),
        Bug::ServeReleased => {
            (writer_and(&[Read, StaleRead]).with(|s| s.policy = Policy::Serve), READ)
        }
        Bug::ServeUncommitted => (writer_and(&[Read]), READ),
    }
}

/// A checker that does not find a broken rule proves nothing.
#[test]
fn every_broken_rule_is_found() {
    for bug in Bug::ALL {
        let (scenario, property) = where_it_shows(bug);
        // A bug can break other properties too, and which of them is seen first depends on the threads.
        let until = HasDiscoveries::AllOf([property].into());
        let checker = check(scenario.with_bug(bug), until);
        let count = checker.unique_state_count();
        let Some(path) = checker.discovery(property) else {
            let others: Vec<_> = checker.discoveries().into_keys().collect();
            panic!(
                "{bug:?} did not break `{property}` in {count} states of {}, but {others:?}",
                scenario.name
            );
        };
        let steps = path.into_actions().len();
        println!("{bug:?}: {property}, after {steps} steps, {count} states");
    }
}
