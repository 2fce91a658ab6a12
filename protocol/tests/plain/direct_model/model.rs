//! The model for the checker: the possible next steps, and the properties.

use stateright::{Model, Property};

use super::{
    Scenario,
    world::{World, index},
};

/// One step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Step {
    Send { client: u8 },
    Resend { client: u8 },
    GiveUp { client: u8 },
    Arrive { request: usize },
    ArriveAndStay { request: usize },
    Read { reader: usize },
    Serve,
    EndSession { slot: usize },
    Clear { page: usize },
    Close,
    Move,
    WriteMoved,
    Crash,
    Start,
}

/// The properties.
pub(crate) mod is {
    pub(crate) const ANSWERED: &str = "some READ is answered directly";
    pub(crate) const WHOLE: &str = "a READ returns a page as it was at one moment";
    pub(crate) const OWN: &str = "a READ returns no bytes of another allocation";
    pub(crate) const RECENT: &str =
        "a READ returns nothing older than what was known when it began";
    pub(crate) const LATE: &str =
        "a change that was given up before a READ is not executed after it";
    pub(crate) const ONCE: &str = "no change is executed twice";
    pub(crate) const AWAITED: &str = "no request for which a client waits is expired";
    pub(crate) const OPEN: &str = "no READ is answered for a session that ended before it";
    pub(crate) const UNLEASED: &str =
        "no READ of a page is answered during a lease that its owner knows";
    pub(crate) const COMPLETE: &str = "no READ of an incomplete allocation is answered";
    pub(crate) const KEPT: &str = "what a client knows outlives the server";
    pub(crate) const ENDS: &str = "every client ends";
}

impl Model for Scenario {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World::new(self)]
    }

    fn actions(&self, world: &World, steps: &mut Vec<Step>) {
        for client in 0..index(self.clients.len()) {
            steps.extend([Step::Send { client }, Step::Resend { client }]);
            if world.gives_up > 0 {
                steps.push(Step::GiveUp { client });
            }
        }
        for request in 0..world.network.len() {
            steps.push(Step::Arrive { request });
            if world.copies > 0 {
                steps.push(Step::ArriveAndStay { request });
            }
        }
        steps.extend((0..self.readers).map(|reader| Step::Read { reader }));
        steps.extend([Step::Serve, Step::Start]);
        if world.ends > 0 {
            steps.extend((0..self.slots).map(|slot| Step::EndSession { slot }));
        }
        if world.clears > 0 {
            steps.extend((0..self.pages).map(|page| Step::Clear { page }));
        }
        if world.closes > 0 {
            steps.push(Step::Close);
        }
        if world.moves > 0 {
            steps.push(Step::Move);
        }
        if world.writes_moved > 0 {
            steps.push(Step::WriteMoved);
        }
        if world.crashes > 0 {
            steps.push(Step::Crash);
        }
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut world = last.clone();
        match step {
            Step::Send { client } => self.send(&mut world, client)?,
            Step::Resend { client } => self.resend(&mut world, client)?,
            Step::GiveUp { client } => self.give_up(&mut world, client)?,
            Step::Arrive { request } => self.arrive(&mut world, request, false)?,
            Step::ArriveAndStay { request } => self.arrive(&mut world, request, true)?,
            Step::Read { reader } => self.read(&mut world, reader)?,
            Step::Serve => self.serve(&mut world)?,
            Step::EndSession { slot } => self.end_session(&mut world, slot)?,
            Step::Clear { page } => self.clear(&mut world, page)?,
            Step::Close => self.hand_over(&mut world)?,
            Step::Move => self.move_line(&mut world)?,
            Step::WriteMoved => self.write_moved(&mut world)?,
            Step::Crash => self.crash(&mut world)?,
            Step::Start => self.start(&mut world)?,
        }
        world.tidy(self);
        Some(world)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::sometimes(is::ANSWERED, |_, world: &World| world.witness.is_answered),
            Property::always(is::WHOLE, |_, world: &World| !world.witness.is_torn),
            Property::always(is::OWN, |_, world: &World| !world.witness.is_foreign),
            Property::always(is::RECENT, |_, world: &World| !world.witness.is_stale),
            Property::always(is::LATE, |_, world: &World| !world.witness.is_late),
            Property::always(is::ONCE, |_, world: &World| !world.witness.is_twice),
            Property::always(is::AWAITED, |_, world: &World| !world.witness.is_refused),
            Property::always(is::OPEN, |_, world: &World| !world.witness.is_ended),
            Property::always(is::UNLEASED, |_, world: &World| !world.witness.is_leased),
            Property::always(is::COMPLETE, |_, world: &World| !world.witness.is_incomplete),
            Property::always(is::KEPT, |_, world: &World| !world.witness.is_lost),
            Property::eventually(is::ENDS, |scenario: &Self, world| scenario.is_done(world)),
        ]
    }
}
