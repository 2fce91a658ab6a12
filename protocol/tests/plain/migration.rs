//! Live migration under a model checker; see `migration_model`.
//!
//! `BLUEBRIDGE_MODEL_LARGE=1` adds scenarios of millions of states.

use std::{
    collections::HashSet,
    env,
    hash::{BuildHasher, BuildHasherDefault, DefaultHasher},
    thread,
    time::Instant,
};

use super::migration_model::{Mutant, Op, Op::*, Scenario, World, properties::is};
use stateright::{Checker, HasDiscoveries, Model};

fn scenario(name: &'static str, clients: &[&[Op]], change: fn(&mut Scenario)) -> Scenario {
    Scenario::new(name, clients).with(change)
}

fn scenarios() -> Vec<Scenario> {
    let chain = |s: &mut Scenario| s.migrations = vec![(0, 1), (1, 2)];
    let back = |s: &mut Scenario| s.migrations = vec![(0, 1), (1, 0)];
    vec![
        scenario("a change", &[&[Add(0, 0), Read(0, 0)]], |s| {
            (s.faults.losses, s.faults.ends) = (1, 1);
        }),
        scenario("the answer to KEEP is lost", &[&[Read(0, 0)]], |s| {
            (s.faults.losses, s.faults.sessions, s.faults.copies) = (1, 1, 1);
        }),
        scenario("LEASE_LOST comes twice", &[], |s| {
            (s.faults.copies, s.faults.ends) = (1, 1);
        }),
        scenario("two pages", &[&[Add(0, 0), Add(0, 1)]], |s| {
            (s.pages, s.allocated, s.written) = (2, 2, 2);
            s.faults.ends = 2;
        }),
        scenario("a page that was not written", &[&[Read(0, 1), Add(0, 1)]], |s| {
            (s.pages, s.allocated, s.written) = (2, 2, 1);
        }),
        scenario("leases", &[&[Update(0, 0), Commit(0, 0)], &[Update(0, 0), Commit(0, 0)]], |s| {
            s.faults.ends = 1;
        }),
        scenario(
            "renewed for ever",
            &[&[Update(0, 0), RenewForEver(0, 0)], &[Update(0, 0), Commit(0, 0)]],
            |s| s.ticks = 8,
        ),
        scenario("led astray", &[&[Add(0, 0)]], |s| {
            (s.faults.losses, s.faults.copies, s.faults.lies) = (1, 1, 1);
        }),
        scenario("given up", &[&[Add(0, 0), Read(0, 0), Add(0, 0)]], |s| {
            (s.faults.gives_up, s.faults.repeats, s.faults.copies) = (1, 1, 1);
        }),
        scenario("given up, back", &[&[Add(0, 0), Read(0, 0)]], |s| s.faults.gives_up = 1)
            .with(back),
        scenario("a line is written", &[&[WriteLine(0), Read(0, 1)]], |s| {
            (s.pages, s.allocated, s.written) = (2, 2, 2);
            (s.faults.losses, s.faults.copies, s.faults.ends) = (1, 1, 1);
        }),
        scenario("two incarnations", &[&[Add(0, 0), Add(0, 0)], &[Add(0, 0)]], |s| {
            (s.clients[1].node, s.clients[1].incarnation) = (0, 2);
            s.migrations = vec![(0, 1), (1, 0), (0, 1)];
        }),
        scenario("allocated", &[&[Create, ReadOwn]], |s| s.pages = 2),
        scenario("allocated and written", &[&[AllocWrite, ReadOwn]], |s| s.pages = 2),
        scenario("freed, frames", &[&[Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.faults.allocations = 1;
        }),
        scenario("freed", &[&[Delete], &[Read(1, 0)]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
        }),
        scenario("freed, the home restarts", &[&[Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.incarnations = [1, 2, 1];
            s.faults.crashes[0] = 1;
        }),
        scenario("freed, half of it lost", &[&[Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.faults.wipes[1] = 1;
        }),
        scenario("freed, the home loses its memory", &[&[Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.faults.wipes[0] = 1;
        }),
        scenario("freed again, as the home loses its memory", &[&[Delete, Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.faults.wipes[0] = 1;
        }),
        scenario("freed, in a chain", &[&[Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.faults.losses = 1;
        })
        .with(chain),
        scenario("freed while it is leased", &[&[Delete], &[Update(1, 0), Commit(1, 0)]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
        }),
        scenario("freed without its home, in parts", &[&[Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            (s.faults.cancels, s.faults.wipes[0]) = (1, 1);
        })
        .with(chain),
        scenario("freed without its home, a page is left", &[&[Delete], &[Create]], |s| {
            (s.pages, s.faults.wipes[0]) = (2, 1);
        }),
        scenario("freed without its home, and read", &[&[Delete], &[Read(0, 0)]], |s| {
            s.faults.wipes[0] = 1;
        }),
        scenario(
            "lost elsewhere, freed, and allocated again",
            &[&[Read(0, 0), Delete, Create, ReadOwn]],
            |s| {
                s.faults.wipes[1] = 1;
            },
        ),
        scenario("freed when the home has left", &[&[Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.faults.leaves = 1;
            s.faults.losses = 1;
        })
        .with(chain),
        scenario("cancelled", &[&[Add(0, 0)]], |s| {
            (s.faults.cancels, s.faults.controller_crashes) = (1, 1);
            (s.faults.losses, s.faults.allocations) = (1, 1);
        }),
        scenario("the controller restarts", &[&[Add(0, 0)]], |s| s.faults.controller_crashes = 3)
            .with(chain),
        scenario("the giver restarts", &[&[Add(0, 0), Read(0, 0)]], |s| {
            (s.faults.crashes[0], s.faults.cancels) = (1, 1);
        }),
        scenario("the giver loses its memory", &[&[Add(0, 0), Read(0, 0)]], |s| {
            (s.faults.wipes[0], s.faults.losses) = (1, 1);
        }),
        scenario("allocated after the loss", &[&[Create, ReadOwn]], |s| s.faults.wipes[0] = 1),
        scenario("the taker restarts", &[&[Add(0, 0), Read(0, 0)]], |s| {
            s.faults.crashes[1] = 1;
        }),
        scenario(
            "the taker restarts, leases",
            &[&[Update(0, 0), Commit(0, 0)], &[Update(0, 0), Commit(0, 0)]],
            |s| s.faults.crashes[1] = 1,
        ),
        scenario("the taker loses its memory", &[&[Add(0, 0), Read(0, 0)]], |s| {
            s.faults.wipes[1] = 1;
        }),
        scenario("chain", &[&[Add(0, 0), Read(0, 0)]], |_| {}).with(chain),
        scenario("chain, led astray", &[&[Add(0, 0)]], |s| {
            (s.faults.losses, s.faults.copies) = (1, 1);
        })
        .with(chain),
        scenario("chain, the second loses its memory", &[&[Read(0, 0), Read(0, 0)]], |s| {
            s.faults.wipes[1] = 1;
        })
        .with(chain),
        scenario("chain, two lose their memory", &[&[Read(0, 0)]], |s| {
            s.faults.wipes = [1, 1, 0];
        })
        .with(chain),
        scenario("chain, the home loses its memory", &[&[Read(0, 0), Read(0, 0)]], |s| {
            s.faults.wipes[0] = 1;
        })
        .with(chain),
        scenario("to the third and back, two lose their memory", &[&[Read(0, 0)]], |s| {
            s.migrations = vec![(0, 1), (1, 2), (2, 1)];
            s.faults.wipes = [1, 0, 1];
        }),
        scenario("back", &[&[Add(0, 0), Read(0, 0)]], |s| s.faults.losses = 1).with(back),
        scenario("the home leaves", &[&[Add(0, 0), Read(0, 0)], &[Add(0, 0)]], |s| {
            (s.faults.leaves, s.faults.losses) = (1, 1);
        }),
        scenario("the home leaves, the controller restarts", &[&[Add(0, 0)]], |s| {
            (s.faults.leaves, s.faults.controller_crashes) = (1, 2);
        })
        .with(chain),
        scenario("the home leaves, and its line moves on", &[&[Add(0, 0), Read(0, 0)]], |s| {
            (s.faults.leaves, s.faults.copies) = (1, 1);
        })
        .with(chain),
        scenario("the home leaves, a taker restarts", &[&[Add(0, 0)]], |s| {
            s.faults.leaves = 1;
            s.faults.crashes[1] = 1;
        })
        .with(chain),
        scenario("the home leaves, a taker loses its memory", &[&[Read(0, 0)]], |s| {
            s.faults.leaves = 1;
            s.faults.wipes[1] = 1;
        })
        .with(chain),
        scenario("the home comes back", &[&[Create, ReadOwn]], |s| {
            (s.lines, s.has_free_line) = (2, true);
            (s.faults.leaves, s.faults.returns, s.faults.late_answers) = (1, 1, 3);
            s.faults.crashes[0] = 1;
        }),
        scenario("the home comes back empty", &[&[Add(0, 0), Create, ReadOwn]], |s| {
            (s.lines, s.has_free_line) = (2, true);
            (s.faults.leaves, s.faults.empty_returns) = (1, 1);
        }),
        scenario("the home comes back, and its line", &[&[Add(0, 0), Read(0, 0)]], |s| {
            (s.faults.leaves, s.faults.returns, s.faults.losses) = (1, 1, 1);
        })
        .with(back),
        scenario("the home comes back, its line has moved on", &[&[Add(0, 0), Read(0, 0)]], |s| {
            (s.faults.leaves, s.faults.returns, s.faults.copies) = (1, 1, 1);
        })
        .with(chain),
        scenario("one deputy after another", &[&[Add(0, 0), Read(0, 0)]], |s| {
            (s.faults.leaves, s.faults.successors, s.faults.late_answers) = (1, 1, 2);
        })
        .with(chain),
        scenario("two deputies, and the home comes back", &[&[Create, ReadOwn]], |s| {
            (s.lines, s.has_free_line) = (2, true);
            (s.faults.leaves, s.faults.returns) = (1, 1);
            (s.faults.successors, s.faults.late_answers) = (2, 3);
        }),
        scenario("back, the home loses its memory", &[&[Read(0, 0)]], |s| s.faults.wipes[0] = 1)
            .with(back),
        scenario("away again, one line stayed at first", &[], |s| {
            s.migrations = vec![(0, 1), (1, 0), (0, 1)];
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.incarnations = [1, 2, 1];
            (s.faults.cancels, s.faults.crashes[0]) = (1, 1);
        }),
        scenario("back, freed", &[&[Delete, Create, ReadOwn]], |_| {}).with(back),
    ]
}

/// For nightly runs.
fn large_scenarios() -> Vec<Scenario> {
    let chain = |s: &mut Scenario| s.migrations = vec![(0, 1), (1, 2)];
    let back = |s: &mut Scenario| s.migrations = vec![(0, 1), (1, 0)];
    let leases: &[&[Op]] = &[&[Update(0, 0), Commit(0, 0)], &[Update(0, 0), Commit(0, 0)]];
    vec![
        scenario("everything once", &[&[Add(0, 0), Read(0, 0)]], |s| {
            (s.faults.losses, s.faults.copies, s.faults.ends) = (1, 1, 1);
            (s.faults.cancels, s.faults.sessions) = (1, 1);
            s.faults.crashes = [1, 1, 0];
        }),
        scenario("chain, restarts", &[&[Add(0, 0), Read(0, 0)]], |s| {
            (s.faults.losses, s.faults.ends) = (1, 1);
            s.faults.crashes = [1, 1, 1];
        })
        .with(chain),
        scenario("chain, losses", &[&[Add(0, 0), Read(0, 0)]], |s| {
            s.faults.losses = 1;
            s.faults.wipes = [1, 1, 1];
        })
        .with(chain),
        scenario("back, losses", &[&[Add(0, 0), Read(0, 0)]], |s| {
            (s.faults.losses, s.faults.cancels) = (1, 1);
            s.faults.wipes = [1, 1, 0];
        })
        .with(back),
        scenario("back, leases", leases, |s| {
            s.faults.ends = 1;
            s.faults.crashes = [0, 1, 0];
        })
        .with(back),
        scenario("two lines", &[&[Add(0, 0), Add(1, 0)]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            (s.faults.cancels, s.faults.losses) = (1, 1);
            s.faults.crashes[0] = 1;
        }),
        scenario("chain, restarts and losses", &[&[Add(0, 0), Read(0, 0)]], |s| {
            s.faults.crashes = [1, 0, 1];
            s.faults.wipes = [0, 1, 0];
        })
        .with(chain),
        scenario("round, losses", &[&[Add(0, 0), Read(0, 0)]], |s| {
            s.migrations = vec![(0, 1), (1, 2), (2, 1), (1, 0)];
            s.faults.wipes = [1, 0, 1];
        }),
        scenario("chain, four losses", &[&[Read(0, 0)]], |s| s.faults.wipes = [1, 2, 1])
            .with(chain),
        scenario("chain, cancelled", &[&[Read(1, 0)]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.faults.cancels = 2;
            s.faults.wipes[1] = 1;
        })
        .with(chain),
        scenario("freed, on a round", &[&[Delete]], |s| {
            s.migrations = vec![(0, 1), (1, 2), (2, 0)];
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.faults.wipes[2] = 1;
        }),
        scenario("freed, restarts", &[&[Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.faults.crashes = [1, 1, 0];
        }),
        scenario("freed without its home, who frees it restarts", &[&[Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            (s.faults.cancels, s.faults.wipes[0], s.faults.crashes[1]) = (1, 1, 1);
        })
        .with(chain),
        scenario("freed without its home, who frees it loses its memory", &[&[Delete]], |s| {
            (s.lines, s.allocated, s.written) = (2, 2, 2);
            s.faults.cancels = 1;
            s.faults.wipes = [1, 1, 0];
        })
        .with(chain),
    ]
}

fn named(name: &str) -> Scenario {
    scenarios().into_iter().find(|scenario| scenario.name == name).expect("it is a scenario")
}

fn check(scenario: Scenario, until: HasDiscoveries) -> impl Checker<Scenario> {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    scenario.checker().threads(threads).finish_when(until).spawn_dfs().join()
}

fn check_all(scenarios: impl IntoIterator<Item = Scenario>) {
    let (mut states, begin) = (0, Instant::now());
    for scenario in scenarios {
        let start = Instant::now();
        let checker = check(scenario, HasDiscoveries::AnyFailures);
        let count = checker.unique_state_count();
        states += count;
        println!("| {} | {count} | {:.1?} |", checker.model().name, start.elapsed());
        for (property, path) in checker.discoveries() {
            if property == is::COMPLETE {
                continue;
            }
            println!("{property}: {:?}", path.last_state().witness);
            for step in path.into_actions() {
                println!("  {step:?}");
            }
        }
        checker.assert_properties();
    }
    println!("| all | {states} | {:.1?} |", begin.elapsed());
}

#[test]
fn migration_satisfies_all_properties() {
    check_all(scenarios());
    if env::var_os("BLUEBRIDGE_MODEL_LARGE").is_some() {
        check_all(large_scenarios());
    }
}

/// What must happen in the end is checked where nothing is left to do, so a run must not go on for ever without getting
/// there.
#[test]
fn no_run_goes_in_circles() {
    let hasher = BuildHasherDefault::<DefaultHasher>::new();
    for scenario in scenarios() {
        // States from which all runs end.
        let mut ended = HashSet::new();
        // The way to the state that is looked at, with the next states that are left.
        let mut way: Vec<(u64, Vec<World>)> = Vec::new();
        let mut on_way = HashSet::new();
        let mut next = scenario.init_states();
        loop {
            if let Some(world) = next.pop() {
                let id = hasher.hash_one(&world);
                assert!(!on_way.contains(&id), "{}: {world:?}", scenario.name);
                if !ended.contains(&id) {
                    on_way.insert(id);
                    way.push((id, core::mem::replace(&mut next, scenario.next_states(&world))));
                }
                continue;
            }
            let Some((id, rest)) = way.pop() else { break };
            on_way.remove(&id);
            ended.insert(id);
            next = rest;
        }
        assert!(ended.len() > 1, "{}", scenario.name);
    }
}

/// The scenario in which a mistake is found, and the property that it violates; `None` if it is harmless.
fn where_it_shows(mutant: Mutant) -> Option<(&'static str, &'static str)> {
    Some(match mutant {
        Mutant::RecordInSession => ("the answer to KEEP is lost", is::HELD),
        Mutant::LastPageUnchecked => ("two pages", is::SAME),
        Mutant::TakenIsServed => ("a change", is::SAME),
        Mutant::MovedUnnumbered => ("given up, back", is::LATE),
        Mutant::MovedAsWhole => ("a line is written", is::ONCE),
        Mutant::LateOrderObeyed => ("cancelled", is::NAMES),
        Mutant::MarksBeginAgain => ("the controller restarts", is::ONE),
        Mutant::UnfinishedTaken => ("allocated and written", is::LINEAR),
        Mutant::CreatedInRange => ("allocated", is::ALLOCATED),
        Mutant::MarkWithoutIncarnation => ("the taker loses its memory", is::SAME),
        Mutant::LostTakerKeeps => ("freed, half of it lost", is::ENDS),
        Mutant::LostHomeKeeps => ("back, the home loses its memory", is::FOUND),
        Mutant::RenewedForEver => ("renewed for ever", is::ENDS),
        Mutant::MarksNotKept => ("the giver restarts", is::ONE),
        Mutant::ServedUnheard => ("a change", is::ONE),
        Mutant::DoubtForgotten => ("the taker restarts", is::HELD),
        Mutant::LostOfAnyLease => ("LEASE_LOST comes twice", is::HELD),
        Mutant::LostOfSameProcess => ("the giver restarts", is::ENDS),
        Mutant::DoubtSurvivesReport => ("the giver loses its memory", is::LOST),
        Mutant::OwnEpochs => ("leases", is::EPOCHS),
        Mutant::FloorForgotten | Mutant::FloorNotRaised => {
            ("the taker restarts, leases", is::EPOCHS)
        }
        Mutant::FloorPerLine => ("away again, one line stayed at first", is::EPOCHS),
        Mutant::VersionsRestart => ("a change", is::VERSIONS),
        Mutant::FrameBytes => ("a page that was not written", is::SAME),
        Mutant::LastTagLost => ("back, freed", is::COLOURS),
        Mutant::MarkWithoutGeneration => ("allocated after the loss", is::ENDS),
        Mutant::HomeAnswersEarly => ("the giver loses its memory", is::LOST),
        Mutant::ReportBeforeLoss => ("chain, two lose their memory", is::LOST),
        Mutant::NextTakerUnasked => ("chain, the second loses its memory", is::LOST),
        Mutant::DeleteOfPart => ("freed", is::WHOLE),
        Mutant::DecisionForgotten => ("freed, the home restarts", is::WHOLE),
        Mutant::LeasedPartFreed => ("freed, in a chain", is::SAME),
        Mutant::FirstPartFirst => ("freed, the home loses its memory", is::WHOLE),
        Mutant::LostPartAwaited => ("freed, half of it lost", is::ENDS),
        Mutant::DiscardedInUse => ("freed without its home, a page is left", is::HELD),
        Mutant::DiscardedEarly => ("freed without its home, and read", is::ENDS),
        Mutant::ReclaimedInUse => ("lost elsewhere, freed, and allocated again", is::ALLOCATED),
        Mutant::ReclaimedTags => ("lost elsewhere, freed, and allocated again", is::COLOURS),
        Mutant::DeputyTooEarly => ("the home leaves", is::HELD),
        Mutant::DeputyWithoutMap => ("the home leaves", is::LOST),
        Mutant::DeputyMapOld => ("the home leaves, and its line moves on", is::FOUND),
        Mutant::DeputyExecutes => ("the home leaves", is::LINEAR),
        Mutant::HomeBesideDeputy => ("the home comes back", is::LOST),
        Mutant::SuccessorsIncarnation => ("one deputy after another", is::UNKNOWN),
        Mutant::ControllersYours => ("the giver restarts", is::ONE),
        Mutant::PresumedLost => ("the giver loses its memory", is::LOST),
        Mutant::CancelledAtTaker => ("cancelled", is::HELD),
        Mutant::ClosedInDoubt => ("the answer to KEEP is lost", is::HELD),
        Mutant::OrderedBeforeLoss => ("chain, two lose their memory", is::ENDS),
        Mutant::FramesReleased => ("cancelled", is::NAMES),
        Mutant::HomeNotToldAgain => ("to the third and back, two lose their memory", is::ENDS),
        Mutant::ForgottenEarly => ("chain", is::FOUND),
        Mutant::FencesWithheld | Mutant::FencesAtAllowance => ("two incarnations", is::FENCED),
        Mutant::MovedBelieved => ("led astray", is::ONCE),
        Mutant::NoSessionBelieved => ("led astray", is::UNKNOWN),
        Mutant::EarlierProcessBelieved => ("one deputy after another", is::UNKNOWN),
        Mutant::NextProcessBelieved => ("the giver loses its memory", is::ONCE),
        Mutant::WrongNodeBelieved => ("chain, led astray", is::ONCE),
        Mutant::AgainToPointer => ("led astray", is::ASTRAY),
        Mutant::GenerationBelieved => ("the giver loses its memory", is::LOST),
        Mutant::ReadsUnchecked
        | Mutant::LostOfAnotherLife
        | Mutant::StagedIsBusy
        | Mutant::AllowanceLeft => return None,
    })
}

/// A checker that does not find a mistake proves nothing.
#[test]
fn every_mistake_is_found() {
    for mutant in Mutant::ALL {
        let Some((name, property)) = where_it_shows(mutant) else { continue };
        let scenario = named(name).with(|s| s.mutant = Some(mutant));
        // A mistake can violate other properties too, and which is seen first depends on the threads.
        let checker = check(scenario, HasDiscoveries::AllOf([property].into()));
        let count = checker.unique_state_count();
        let Some(path) = checker.discovery(property) else {
            let others: Vec<_> = checker.discoveries().into_keys().collect();
            panic!("{mutant:?} did not break `{property}` in {count} states, but {others:?}");
        };
        let steps = path.into_actions().len();
        println!("| {mutant:?} | {name} | {property} | {steps} | {count} |");
    }
}

/// Rules that others make unnecessary. Each is tried where it could matter, and changes what happens there.
#[test]
fn some_precautions_are_not_needed() {
    let tried: [(Mutant, &[&str]); 4] = [
        // KEEP finds whether the lease still holds, and so whether the pages were read under it.
        (Mutant::ReadsUnchecked, &["two pages"]),
        // A giver that lost its memory gives nothing, and the line is lost with it either way, unless an OK
        // arrives late.
        (
            Mutant::LostOfAnotherLife,
            &["the giver loses its memory", "chain, the second loses its memory"],
        ),
        // A line is on its way for a short time only, and then its taker answers for it or sends the client home.
        (Mutant::StagedIsBusy, &["the answer to KEEP is lost", "the giver loses its memory"]),
        // Lines come back in other migrations only.
        (Mutant::AllowanceLeft, &["chain", "back", "freed, in a chain"]),
    ];
    let harmless = Mutant::ALL.into_iter().filter(|mutant| where_it_shows(*mutant).is_none());
    assert_eq!(harmless.collect::<Vec<_>>(), tried.map(|(mutant, _)| mutant));
    for (mutant, names) in tried {
        let count = |mutant| {
            let count = |name: &&str| {
                let scenario = named(name).with(|s| s.mutant = mutant);
                let checker = check(scenario, HasDiscoveries::AnyFailures);
                checker.assert_properties();
                checker.unique_state_count()
            };
            names.iter().map(count).collect::<Vec<_>>()
        };
        let (with, without) = (count(Some(mutant)), count(None));
        println!("| {mutant:?} | {names:?} | {with:?} instead of {without:?} states |");
        assert_ne!(with, without, "{mutant:?} changes nothing");
    }
}
