//! The page protocol under a model checker; see `page_model`.
//!
//! `BLUEBRIDGE_MODEL_LARGE=1` adds scenarios of many millions of states.

use std::{env, thread, time::Instant};

use super::page_model::{Mutant, Op, Op::*, Scenario, Start, Start::*};
use stateright::{Checker, HasDiscoveries, Model};

fn scenario(
    name: &'static str,
    pages: &[Start],
    threads: &[&[Op]],
    change: fn(&mut Scenario),
) -> Scenario {
    Scenario::new(name, pages, threads).with(change)
}

/// Small enough for every test run.
fn scenarios() -> Vec<Scenario> {
    vec![
        scenario("two writers", &[Zero], &[&[Write(0), Read(0)], &[Write(0), Read(0)]], |s| {
            s.rounds = 2;
        }),
        scenario("reader and writer", &[Remote], &[&[Read(0), Read(0)], &[Write(0)]], |s| {
            s.rounds = 2;
            s.failures = 1;
        }),
        scenario("zeros", &[Remote], &[&[WriteZero(0), Read(0)], &[Read(0), Write(0)]], |s| {
            s.rounds = 2;
        }),
        scenario("one frame", &[Remote, Dirty], &[&[Read(0), Read(1)], &[Write(1)]], |s| {
            s.limit = 1;
        }),
        scenario("one frame, narrow", &[Zero, Remote], &[&[Read(0)], &[Read(1)]], |s| {
            s.limit = 1;
            s.is_narrow = true;
        }),
        scenario("pins", &[Remote], &[&[Pin(0), Read(0), Unpin(0)], &[Write(0), Flush]], |s| {
            s.rounds = 1;
        }),
        scenario("pins for writing", &[Remote], &[&[PinMut(0), Write(0), Unpin(0)]], |s| {
            s.rounds = 3;
            s.failures = 1;
        }),
        scenario("discarded", &[Dirty], &[&[Discard(0), Read(0), Write(0), Discard(0)]], |s| {
            s.rounds = 2;
            s.failures = 1;
        }),
        scenario("flushed", &[Dirty, Dirty], &[&[Flush], &[Write(0), Read(1)]], |s| {
            s.failures = 1;
        }),
        scenario("flushed, narrow", &[Zero, Remote], &[&[Flush], &[Read(0)], &[Write(1)]], |s| {
            s.is_narrow = true;
            s.rounds = 0;
        }),
        scenario("lost", &[Remote, Dirty], &[&[Read(0)], &[Write(1), Read(1)]], |s| {
            s.losses = 1;
            s.rounds = 2;
        }),
        scenario("lost while flushed", &[Clean, Dirty], &[&[Flush], &[Write(0), Read(0)]], |s| {
            s.losses = 1;
        }),
        scenario("lost twice", &[Dirty], &[&[Write(0), Read(0)]], |s| {
            s.losses = 2;
            s.rounds = 3;
        }),
        scenario("handlers", &[Remote], &[&[Read(0), Write(0)], &[Write(0), Read(0)]], |s| {
            s.handlers = 2;
            s.rounds = 1;
        }),
        scenario("handlers and one frame", &[Remote, Dirty], &[&[Read(0)], &[Write(1)]], |s| {
            s.handlers = 2;
            s.limit = 1;
        }),
        scenario("handlers, lost", &[Remote, Dirty], &[&[Read(0), Write(0)], &[Read(1)]], |s| {
            s.handlers = 2;
            s.losses = 1;
        }),
        scenario(
            "handlers and a flush",
            &[Dirty],
            &[&[Flush, Read(0)], &[Write(0), Write(0)]],
            |s| {
                s.handlers = 2;
                s.failures = 1;
            },
        ),
        scenario("eager", &[Remote], &[&[Read(0), Write(0)], &[Read(0)]], |s| {
            s.is_eager = true;
            s.rounds = 2;
            s.losses = 1;
        }),
        scenario("handlers that read what is lost", &[Remote], &[&[Read(0)], &[Write(0)]], |s| {
            s.handlers = 2;
            s.losses = 1;
            s.limit = 2;
        }),
        scenario("background", &[Remote], &[&[Read(0), Write(0)], &[Write(0), Read(0)]], |s| {
            s.background_reads = 1;
            s.rounds = 3;
        }),
        scenario("background, discarded", &[Remote], &[&[Discard(0), Write(0), Read(0)]], |s| {
            s.background_reads = 2;
            s.rounds = 3;
            s.failures = 1;
        }),
        scenario("background, lost", &[Remote, Remote], &[&[Write(0), Read(1), Read(0)]], |s| {
            s.background_reads = 2;
            s.rounds = 2;
            s.losses = 1;
        }),
        scenario("one handler", &[Zero], &[&[Write(0), Read(0)], &[Write(0)]], |s| {
            s.handlers = 1;
            s.rounds = 2;
            s.failures = 1;
        }),
    ]
}

/// For nightly runs.
fn large_scenarios() -> Vec<Scenario> {
    let threads: &[&[Op]] = &[&[Read(0), Write(1)], &[Write(0), Read(1)]];
    let flush: &[&[Op]] = &[&[Read(0), Write(1)], &[Write(0)], &[Flush]];
    vec![
        scenario("two writers of two pages, lost", &[Remote, Dirty], threads, |s| {
            s.losses = 1;
            s.failures = 1;
        }),
        scenario("one frame, lost", &[Remote, Dirty], threads, |s| {
            s.losses = 1;
            s.limit = 1;
            s.is_narrow = true;
        }),
        scenario("three threads, lost", &[Clean, Dirty], flush, |s| {
            s.losses = 1;
        }),
        scenario("handlers, two pages", &[Remote, Dirty], &[&[Write(1)], &[Read(0)]], |s| {
            s.handlers = 2;
            s.losses = 1;
        }),
        scenario("handlers, flushed", &[Remote, Dirty], flush, |s| {
            s.handlers = 2;
            s.rounds = 0;
        }),
        scenario("many rounds", &[Remote], &[&[Write(0), Read(0)], &[Read(0), Write(0)]], |s| {
            s.rounds = 4;
            s.losses = 2;
            s.failures = 1;
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
        for (property, path) in checker.discoveries() {
            println!("{property}: {:#?}", path.into_actions());
        }
        checker.assert_properties();
    }
}

#[test]
fn the_page_protocol_satisfies_all_properties() {
    check_all(scenarios());
    if env::var_os("BLUEBRIDGE_MODEL_LARGE").is_some() {
        check_all(large_scenarios());
    }
}

/// The scenario in which a mistake is found, and the property that it violates; `None` if it is harmless.
fn where_it_shows(mutant: Mutant) -> Option<(&'static str, &'static str)> {
    const ENDS: &str = "every thread ends";
    const FLUSH: &str = "a flush stores what was written before";
    const FRAMES: &str = "each local page has a frame";
    const KERNEL: &str = "the kernel has what the page table says";
    const LOST: &str = "only what the server lost is lost";
    const PINS: &str = "pins are counted, and pinned pages are local";
    const READ: &str = "a read returns the latest version";
    const STORED: &str = "what counts as stored is stored";
    Some(match mutant {
        Mutant::SecondLook => ("lost while flushed", STORED),
        Mutant::WalkSkipsBusy => ("lost", STORED),
        Mutant::PointerFirst => ("two writers", LOST),
        Mutant::PointerUnchecked => ("lost", READ),
        Mutant::WrittenBeforeLoss => ("lost while flushed", STORED),
        Mutant::PinsOfClaim => ("pins", PINS),
        Mutant::FlushGoesOn => ("lost while flushed", FLUSH),
        Mutant::AllocationForgotten => ("flushed", FLUSH),
        Mutant::TellInLane => ("flushed, narrow", ENDS),
        Mutant::CopyBeforeProtect => ("two writers", READ),
        Mutant::NoProtection => ("reader and writer", READ),
        Mutant::EndBlind => ("two writers", READ),
        Mutant::DiscardUnclaimed => ("two writers", KERNEL),
        Mutant::ClaimBlind => ("two writers", READ),
        Mutant::ZeroIsStored => ("zeros", READ),
        Mutant::PinnedIsTaken | Mutant::PinnedLeaves => ("pins", PINS),
        Mutant::FrameEarly => ("one frame", FRAMES),
        Mutant::FailureIsSuccess => ("reader and writer", READ),
        Mutant::NoWalk | Mutant::WalkSkipsClean => ("lost", READ),
        Mutant::DirtyBeforeUnprotect => ("two writers", READ),
        Mutant::WritableIsClean => ("reader and writer", STORED),
        Mutant::FaultClaimsBlind => ("two writers", READ),
        Mutant::NotAnnounced | Mutant::NoWake | Mutant::NoWakeBeforeWriting => ("handlers", ENDS),
        Mutant::PoisonUnclaimed => ("handlers that read what is lost", KERNEL),
        Mutant::FrameKept => ("reader and writer", FRAMES),
        Mutant::FailureIsLoss => ("reader and writer", LOST),
        Mutant::BackgroundUnchecked | Mutant::BackgroundGeneration => ("background", READ),
        Mutant::BackgroundForgotten => ("background, lost", READ),
        Mutant::BackgroundWordLate => ("background", READ),
        Mutant::NoGeneration | Mutant::NoWakeIfPresent => return None,
    })
}

/// A checker that does not find a mistake proves nothing.
#[test]
fn every_mistake_is_found() {
    for mutant in Mutant::ALL {
        let Some((name, property)) = where_it_shows(mutant) else { continue };
        let scenario = scenarios().into_iter().find(|scenario| scenario.name == name);
        let scenario = scenario.expect("it is a scenario").with(|s| s.mutant = Some(mutant));
        // A mistake can violate other properties too, and which is seen first depends on the threads.
        let checker = check(scenario, HasDiscoveries::AllOf([property].into()));
        let count = checker.unique_state_count();
        let Some(path) = checker.discovery(property) else {
            let others: Vec<_> = checker.discoveries().into_keys().collect();
            panic!("{mutant:?} did not break `{property}` in {count} states, but {others:?}");
        };
        let steps = path.into_actions().len();
        println!("{mutant:?}: {property}, after {steps} steps, {count} states");
    }
}

/// Precautions that the other rules make unnecessary, as the protocol is: only one batch of the evictor is under way at
/// a time, and every change of a mapping wakes who waits for it.
#[test]
fn two_precautions_are_not_needed() {
    let harmless = Mutant::ALL.into_iter().filter(|mutant| where_it_shows(*mutant).is_none());
    for mutant in harmless {
        check_all(scenarios().into_iter().map(|s| s.with(|s| s.mutant = Some(mutant))).collect());
    }
}
