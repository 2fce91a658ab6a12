//! READs that a program in the kernel answers, under a model checker; see `direct_model`.
//!
//! `BLUEBRIDGE_MODEL_LARGE=1` adds scenarios of millions of states.

use std::{env, thread, time::Instant};

use super::direct_model::{
    FIRST_TAG as A, Mutant, Op, Op::*, SECOND_TAG as B, Scenario, Start, model::is,
};
use stateright::{Checker, HasDiscoveries, Model};

fn scenario(
    name: &'static str,
    pages: usize,
    clients: &[&[Op]],
    change: fn(&mut Scenario),
) -> Scenario {
    Scenario::new(name, pages, clients).with(change)
}

fn scenarios() -> Vec<Scenario> {
    let created_again = |s: &mut Scenario| s.clears = 1;
    vec![
        scenario("given up", 1, &[&[Write(0, A), Read(0, A)]], |s| {
            (s.gives_up, s.copies) = (1, 2);
        }),
        scenario(
            "given up, two clients",
            1,
            &[&[Write(0, A), Read(0, A)], &[Read(0, A), Read(0, A)]],
            |s| (s.gives_up, s.copies) = (1, 1),
        ),
        scenario("threads", 1, &[&[Write(0, A), Read(0, A)], &[Write(0, A)]], |s| {
            s.clients[1].thread_of = Some(0);
            s.slots = 1;
            (s.gives_up, s.copies) = (1, 1);
        }),
        scenario("closed", 1, &[&[Write(0, A), Read(0, A)], &[Read(0, A), Read(0, A)]], |s| {
            (s.closes, s.gives_up) = (1, 1);
        }),
        scenario("moved", 1, &[&[Write(0, A), Read(0, A)], &[Read(0, A), Read(0, A)]], |s| {
            s.moves = 2;
        }),
        scenario("moved and back", 1, &[&[Write(0, A)], &[Read(0, A), Read(0, A)]], |s| {
            s.moves = 3;
        }),
        scenario("crash of a move", 1, &[&[Write(0, A)], &[Read(0, A), Read(0, A)]], |s| {
            (s.moves, s.crashes) = (3, 1);
        }),
        scenario("another's line", 1, &[&[Write(0, A)], &[Read(0, A), Read(0, A)]], |s| {
            (s.is_adopted, s.moves) = (true, 3);
        }),
        scenario("crash with another's line", 1, &[&[Write(0, A)], &[Read(0, A)]], |s| {
            (s.is_adopted, s.moves, s.crashes) = (true, 3, 1);
        }),
        scenario("line", 2, &[&[Update, Commit], &[Read(0, A), Read(1, A)]], |_| {}),
        scenario("line, downwards", 2, &[&[Update, Commit], &[Read(1, A), Read(0, A)]], |_| {}),
        scenario(
            "two incarnations",
            1,
            &[&[Read(0, A), Read(0, A)], &[Write(0, A), Read(0, A)]],
            |s| {
                let second = &mut s.clients[1];
                (second.node, second.incarnation, second.is_open) = (0, 2, false);
                s.gives_up = 1;
            },
        ),
        scenario("slot reused", 1, &[&[Read(0, A), Read(0, A)], &[Write(0, A), Read(0, A)]], |s| {
            s.clients[1].is_open = false;
            (s.slots, s.ends) = (1, 1);
        }),
        scenario("idle", 1, &[&[Write(0, A), Read(0, A)]], |s| (s.ends, s.gives_up) = (1, 1)),
        scenario(
            "created again",
            2,
            &[&[Delete(A), Create, WritePart(1, B)], &[Read(1, A), Read(1, B)]],
            created_again,
        ),
        scenario(
            "created again, head",
            2,
            &[&[Delete(A), Create, WritePart(0, B)], &[Read(0, A), Read(0, B)]],
            created_again,
        ),
        scenario("incomplete", 2, &[&[Provide, Confirm(B)], &[Read(1, B), Read(0, B)]], |s| {
            s.start = Start::Freed;
        }),
        scenario(
            "crash of a write",
            1,
            &[&[Write(0, A), Write(0, A)], &[Read(0, A), Read(0, A)]],
            |s| s.crashes = 2,
        ),
        scenario("crash of a commit", 2, &[&[Update, Commit], &[Read(0, A), Read(1, A)]], |s| {
            s.crashes = 2;
        }),
        scenario("crash of an addition", 1, &[&[Add(0, A), Add(0, A)], &[Read(0, A)]], |s| {
            s.crashes = 2;
        }),
        scenario(
            "crash of a deletion",
            2,
            &[&[Delete(A), Create], &[Read(1, A), Read(0, A)]],
            |s| {
                s.crashes = 1;
            },
        ),
        scenario(
            "crash of a creation",
            2,
            &[&[Create, WritePart(0, B)], &[Read(0, B), Read(1, B)]],
            |s| (s.start, s.crashes) = (Start::Freed, 1),
        ),
        scenario(
            "crash of an incomplete one",
            2,
            &[&[Provide, Confirm(B)], &[Read(0, B), Read(1, B)]],
            |s| (s.start, s.crashes) = (Start::Freed, 1),
        ),
        scenario(
            "crash of what was given up",
            1,
            &[&[Write(0, A), Read(0, A)], &[Read(0, A)]],
            |s| (s.crashes, s.gives_up, s.copies) = (1, 1, 1),
        ),
        scenario(
            "crash between incarnations",
            1,
            &[&[Read(0, A), Read(0, A)], &[Write(0, A), Read(0, A)]],
            |s| {
                let second = &mut s.clients[1];
                (second.node, second.incarnation, second.is_open) = (0, 2, false);
                (s.gives_up, s.crashes) = (1, 1);
            },
        ),
    ]
}

/// For nightly runs.
fn large_scenarios() -> Vec<Scenario> {
    let crashed_twice =
        ["crash of a deletion", "crash of a creation", "crash of an incomplete one"];
    let mut large: Vec<_> =
        crashed_twice.iter().map(|name| named(name).with(|s| s.crashes = 2)).collect();
    large.extend([
        scenario(
            "line and a writer",
            2,
            &[&[Update, Commit], &[Read(0, A), Read(1, A)], &[Write(1, A), Read(0, A)]],
            |s| s.gives_up = 1,
        ),
        scenario(
            "crash of a commit, given up",
            2,
            &[&[Update, Commit, Read(1, A)], &[Read(0, A), Read(1, A)]],
            |s| (s.crashes, s.gives_up) = (1, 1),
        ),
        scenario(
            "many threads",
            1,
            &[&[Write(0, A), Read(0, A)], &[Write(0, A), Read(0, A)]],
            |s| {
                s.clients[1].thread_of = Some(0);
                s.slots = 1;
                (s.gives_up, s.copies) = (1, 1);
            },
        ),
        scenario(
            "crash, created again",
            2,
            &[&[Delete(A), Create, WritePart(1, B)], &[Read(1, A), Read(1, B)]],
            |s| (s.crashes, s.clears) = (1, 1),
        ),
    ]);
    large
}

fn named(name: &str) -> Scenario {
    scenarios().into_iter().find(|scenario| scenario.name == name).expect("it is a scenario")
}

fn check(scenario: Scenario, until: HasDiscoveries) -> impl Checker<Scenario> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    scenario.checker().threads(threads).finish_when(until).spawn_dfs().join()
}

fn check_all(scenarios: impl IntoIterator<Item = Scenario>) {
    let mut states = 0;
    for scenario in scenarios {
        let start = Instant::now();
        let checker = check(scenario, HasDiscoveries::AnyFailures);
        let scenario = checker.model();
        let count = checker.unique_state_count();
        states += count;
        println!("{}: {count} states, {:.1?}", scenario.name, start.elapsed());
        for (property, path) in checker.discoveries() {
            if property != is::ANSWERED {
                println!("{property}: {:#?}", path.into_actions());
            }
        }
        checker.assert_properties();
    }
    println!("{states} states in all");
}

#[test]
fn direct_reads_satisfy_all_properties() {
    check_all(scenarios());
    if env::var_os("BLUEBRIDGE_MODEL_LARGE").is_some() {
        check_all(large_scenarios());
    }
}

/// The scenario in which a mistake is found, and the property that it violates; `None` if it is harmless.
fn where_it_shows(mutant: Mutant) -> Option<(&'static str, &'static str)> {
    Some(match mutant {
        Mutant::ShardIgnored | Mutant::ClosedLate => ("closed", is::RECENT),
        Mutant::ElsewhereIgnored | Mutant::GivenUnmarked => ("moved", is::RECENT),
        Mutant::ReusedUnsequenced => ("moved", is::WHOLE),
        Mutant::HereEarly => ("moved and back", is::WHOLE),
        Mutant::NameIgnored | Mutant::NameFirst | Mutant::FrameFirst | Mutant::NamedLate => {
            ("another's line", is::WHOLE)
        }
        Mutant::MovesForgotten => ("crash of a move", is::RECENT),
        Mutant::RaisedAfterCheck | Mutant::ExecutingIgnored => ("given up", is::LATE),
        Mutant::UsesIgnored | Mutant::UseNotCounted | Mutant::FactsFirst => {
            ("slot reused", is::AWAITED)
        }
        Mutant::RaisedToNumber => ("threads", is::AWAITED),
        Mutant::MarkIgnored | Mutant::MarkClearedEarly => ("line", is::RECENT),
        Mutant::SequenceOnce => ("line", is::WHOLE),
        Mutant::OddIgnored | Mutant::EvenEarly => ("given up, two clients", is::WHOLE),
        Mutant::TagIgnored | Mutant::LeftoverRaw => ("created again", is::OWN),
        Mutant::IncompleteAnswered => ("crash of an incomplete one", is::KEPT),
        Mutant::CompleteBeforeRole | Mutant::CompleteApart => ("incomplete", is::COMPLETE),
        Mutant::AlwaysPasses => ("line", is::ANSWERED),
        Mutant::LowWaterUnmerged | Mutant::LeaveForgets => ("given up", is::LATE),
        Mutant::CheckThenEnter | Mutant::EnterInTwo => ("given up", is::LATE),
        Mutant::OldIncarnationKept | Mutant::HiddenAfterAnswer => ("two incarnations", is::OPEN),
        Mutant::EndedKept => ("idle", is::OPEN),
        Mutant::MarkSetLate => ("line", is::UNLEASED),
        Mutant::WriteUnsequenced | Mutant::OddLate => ("line", is::WHOLE),
        Mutant::CreateUnsequenced | Mutant::DeleteUnsequenced => ("created again", is::WHOLE),
        Mutant::StateBeforeSequence => ("created again", is::OWN),
        Mutant::StateFirstRedoTakesKind => ("crash of a creation", is::OWN),
        Mutant::HeadLastWithoutRedo => ("crash of a deletion", is::RECENT),
        Mutant::SequenceLeftOdd => ("crash of a write", is::WHOLE),
        Mutant::RedoAdds => ("crash of an addition", is::KEPT),
        Mutant::CommitWithoutRedo => ("crash of a commit", is::RECENT),
        Mutant::NotJoined => ("crash of an addition", is::ONCE),
        Mutant::AttachedEarly | Mutant::DetachedBlind => ("crash of a write", is::WHOLE),
        Mutant::SessionsKept => ("crash of a write", is::OPEN),
        Mutant::RaisedAfterCopy
        | Mutant::IdFirst
        | Mutant::CompleteApartHeadFirst
        | Mutant::StateFirst
        | Mutant::RedoTakesKind
        | Mutant::HeadLast
        | Mutant::AttachedEarlySequenced
        | Mutant::DetachedBlindSequenced
        | Mutant::MarksKept => return None,
    })
}

/// A checker that does not find a mistake proves nothing.
#[test]
fn every_mistake_is_found() {
    for mutant in Mutant::ALL {
        let Some((name, property)) = where_it_shows(mutant) else { continue };
        let scenario = named(name).with(|s| s.mutant = Some(mutant));
        if property == is::ANSWERED {
            let checker = check(scenario, HasDiscoveries::AnyFailures);
            let found: Vec<_> = checker.discoveries().into_keys().collect();
            assert!(found.is_empty(), "{mutant:?}: {found:?}");
            continue;
        }
        // A mistake can violate other properties too, and which is seen first depends on the threads.
        let checker = check(scenario, HasDiscoveries::AllOf([property].into()));
        let count = checker.unique_state_count();
        let Some(path) = checker.discovery(property) else {
            let others: Vec<_> = checker.discoveries().into_keys().collect();
            panic!("{mutant:?} did not break `{property}` in {count} states, but {others:?}");
        };
        let steps = path.into_actions().len();
        println!("{mutant:?}: {name}: {property}, after {steps} steps, {count} states");
    }
}

/// Rules that others make unnecessary. Each is tried where it could matter.
#[test]
fn some_precautions_are_not_needed() {
    let tried: [(Mutant, &[&str]); 9] = [
        // The second look at the sequence sees a change that was complete before, and the mark one that is not.
        (Mutant::RaisedAfterCopy, &["given up", "threads"]),
        // The id is known to nobody before the reply to its OPEN.
        (Mutant::IdFirst, &["two incarnations", "slot reused", "idle"]),
        // A body is new only when its head is: what the head's flag was before can no longer be seen.
        (
            Mutant::CompleteApartHeadFirst,
            &["created again", "created again, head", "incomplete", "crash of an incomplete one"],
        ),
        // The sequence hides the order from readers, and the redo record repeats all of it after a crash. One of the two
        // must hold: `StateFirstRedoTakesKind` is found.
        (Mutant::StateFirst, &["created again", "created again, head", "crash of a creation"]),
        (Mutant::RedoTakesKind, &["crash of a creation"]),
        // Nobody else sees a DELETE before it is complete: who finds a page freed asks the server, which is busy.
        (Mutant::HeadLast, &["created again", "created again, head", "crash of a deletion"]),
        // A reader sees that the sequence changed, and the sessions of the last process are hidden before the next ones
        // are shown.
        (
            Mutant::AttachedEarlySequenced,
            &["crash of a write", "crash of a commit", "crash of a creation"],
        ),
        // As above.
        (Mutant::DetachedBlindSequenced, &["crash of a write", "crash of a commit"]),
        // Readers pass on what they could answer.
        (Mutant::MarksKept, &["crash of a commit"]),
    ];
    let harmless = Mutant::ALL.into_iter().filter(|mutant| where_it_shows(*mutant).is_none());
    assert_eq!(harmless.collect::<Vec<_>>(), tried.map(|(mutant, _)| mutant));
    for (mutant, names) in tried {
        println!("{mutant:?}");
        let one_crash = |s: &mut Scenario| (s.mutant, s.crashes) = (Some(mutant), s.crashes.min(1));
        check_all(names.iter().map(|name| named(name).with(one_crash)));
    }
}

/// A store and a load would be enough if each store were seen at once; with a store buffer they are not:
/// `Mutant::EnterInTwo` is found.
#[test]
fn only_the_store_buffer_demands_that_one_instruction_marks_and_loads() {
    check_all(["given up", "threads"].map(|name| {
        named(name).with(|s| (s.mutant, s.has_buffer) = (Some(Mutant::EnterInTwo), false))
    }));
}
