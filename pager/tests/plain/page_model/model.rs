//! The model for the checker: the possible next steps, and the properties.

use stateright::{Model, Property};

use super::{
    Scenario,
    world::{Mapped, State, World},
};

/// How a step of a thread goes, where it can go in several ways.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Choice {
    Go,
    /// The evictor does not choose this page.
    Skip,
    /// A remote request fails and is not executed.
    Fail,
    /// A remote request is executed, but the response is lost.
    FailLate,
    /// A fault takes what was read in the background.
    Take,
}

/// One step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Step {
    Thread { actor: usize, choice: Choice },
    Take { handler: usize, thread: usize },
    Background { page: usize, choice: Choice },
    LoseMemory,
}

impl Model for Scenario {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        for (actor, this) in world.actors.iter().enumerate() {
            steps.push(Step::Thread { actor, choice: Choice::Go });
            if this.evict.is_some() {
                steps.push(Step::Thread { actor, choice: Choice::Skip });
            }
            if this.fault.is_some() && self.background_reads > 0 {
                steps.push(Step::Thread { actor, choice: Choice::Take });
            }
            if world.failures > 0 && (this.evict.is_some() || this.fault.is_some()) {
                steps.push(Step::Thread { actor, choice: Choice::Fail });
                steps.push(Step::Thread { actor, choice: Choice::FailLate });
            }
        }
        for handler in self.threads.len()..self.threads.len() + self.handlers {
            for thread in 0..self.threads.len() {
                steps.push(Step::Take { handler, thread });
            }
        }
        if self.background_reads > 0 {
            for page in 0..self.pages.len() {
                steps.push(Step::Background { page, choice: Choice::Go });
            }
            if world.failures > 0 {
                steps.push(Step::Background { page: 0, choice: Choice::Fail });
            }
        }
        if world.losses > 0 {
            steps.push(Step::LoseMemory);
        }
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut world = last.clone();
        match step {
            Step::Thread { actor, choice } => self.step(&mut world, actor, choice)?,
            Step::Take { handler, thread } => self.take(&mut world, handler, thread)?,
            Step::Background { page, choice } => self.background(&mut world, page, choice)?,
            Step::LoseMemory => self.lose_memory(&mut world)?,
        }
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("a read returns the latest version", |_, world: &World| {
                !world.witness.wrong_read
            }),
            Property::always("only what the server lost is lost", |_, world: &World| {
                !world.witness.false_loss
            }),
            Property::always("a flush stores what was written before", |_, world: &World| {
                !world.witness.false_flush
            }),
            Property::always("what counts as stored is stored", stored_is_latest),
            Property::always("each local page has a frame", frames_are_counted),
            Property::always("pins are counted, and pinned pages are local", pinned_is_local),
            Property::always("the kernel has what the page table says", words_are_true),
            // It stays true once it holds, in every run: for such properties the checker is exact.
            Property::eventually("every thread ends", |scenario: &Self, world| {
                scenario.is_done(world)
            }),
        ]
    }
}

/// A page that is not stored where its pointer says would be read wrong later.
fn stored_is_latest(scenario: &Scenario, world: &World) -> bool {
    (0..scenario.pages.len()).all(|page| {
        let entry = &world.pages[page];
        let counts = matches!(entry.word.state, State::Remote | State::Clean);
        let stored = world.stored(page);
        !counts || !entry.word.is_stored || stored.is_none_or(|stored| stored == entry.latest)
    })
}

fn frames_are_counted(scenario: &Scenario, world: &World) -> bool {
    let present = world.pages.iter().filter(|page| page.is_present()).count();
    let transit: usize = world.actors.iter().map(|actor| usize::from(actor.frames)).sum();
    world.free <= scenario.limit && present + transit == usize::from(scenario.limit - world.free)
}

fn pinned_is_local(_: &Scenario, world: &World) -> bool {
    world.pages.iter().enumerate().all(|(at, page)| {
        let pins = world.actors.iter().filter(|actor| actor.pinned[at]).count();
        usize::from(page.word.pins) == pins && (pins == 0 || page.is_present())
    })
}

fn words_are_true(_: &Scenario, world: &World) -> bool {
    world.pages.iter().all(|page| match page.word.state {
        State::Zero | State::Remote => page.mapped == Mapped::Absent,
        State::Clean | State::Writing => page.mapped == Mapped::Protected,
        State::Dirty => page.mapped == Mapped::Writable,
        State::Busy => true,
        State::Lost => page.mapped == Mapped::Poisoned,
    })
}
