//! What must hold in every state, and where nothing is left to do.

use stateright::Property;

use super::{
    ClientSpec, FIRST_TAG, Op, SERVERS, Scenario,
    lines::Owner,
    messages::{Answer, Pointer},
    world::{Forward, HOME, Server, Stage, World, index},
};

/// The properties, by the number of the invariant in `docs/migration.md`.
pub(crate) mod is {
    pub(crate) const COMPLETE: &str = "some run executes every change and moves every line";
    pub(crate) const ONE: &str = "1: at most one server serves a line";
    pub(crate) const HELD: &str =
        "1: in the end one server has each line that was not lost with a server";
    pub(crate) const LINEAR: &str = "2: a page is what the last change made it";
    pub(crate) const ONCE: &str = "2: no change is executed twice";
    pub(crate) const LATE: &str =
        "2: what a client gave up is not executed after what it asked later";
    pub(crate) const FENCED: &str = "2: an old incarnation is not served after a new one";
    pub(crate) const EPOCHS: &str = "3: the lease epochs of a page grow over all holders";
    pub(crate) const LAST_GRANT: &str = "3: COMMIT is applied under the last grant only";
    pub(crate) const VERSIONS: &str = "4: a version of a page has one contents";
    pub(crate) const LOST: &str = "5: what is served was never reported as lost";
    pub(crate) const SAME: &str = "6: a line is the same when the taker serves it";
    pub(crate) const NAMES: &str = "6: a frame has one name";
    pub(crate) const COLOURS: &str = "6: no two allocations have one colour";
    pub(crate) const ALLOCATED: &str = "7: what was allocated is found";
    pub(crate) const WHOLE: &str = "7: DELETE frees all of an allocation or nothing";
    pub(crate) const UNKNOWN: &str = "8: an outcome is unknown only if a server ended";
    pub(crate) const ASTRAY: &str = "9: no retransmission meets the wrong server";
    pub(crate) const FOUND: &str = "9: the home leads to who has the line";
    pub(crate) const NEAR: &str = "9: at rest the home knows who has the line";
    pub(crate) const ENDS: &str = "10: every request and every migration ends";
}

pub(super) fn all() -> Vec<Property<Scenario>> {
    vec![
        Property::always(is::ONE, |scenario: &Scenario, world: &World| {
            scenario.line_numbers().all(|line| scenario.active_holders(world, line) <= 1)
        }),
        Property::sometimes(is::COMPLETE, |scenario: &Scenario, world: &World| {
            world.stage == Stage::Closed && scenario.is_done(world) && scenario.is_complete(world)
        }),
        Property::always(is::LINEAR, |scenario: &Scenario, world: &World| {
            !world.witness.is_stale && scenario.is_true(world)
        }),
        Property::always(is::ONCE, |_, world: &World| !world.witness.is_twice),
        Property::always(is::LATE, |_, world: &World| !world.witness.is_late),
        Property::always(is::FENCED, |_, world: &World| !world.witness.is_unfenced),
        Property::always(is::EPOCHS, |_, world: &World| !world.witness.is_epoch_old),
        Property::always(is::LAST_GRANT, |_, world: &World| !world.witness.is_grant_old),
        Property::always(is::VERSIONS, |_, world: &World| !world.witness.is_version_twice),
        Property::always(is::LOST, |scenario: &Scenario, world: &World| {
            let mut lines = scenario.line_numbers();
            lines.all(|line| {
                let is_served =
                    scenario.holders(world, line).any(|at| scenario.is_needed(world, at, line));
                !world.gone[usize::from(line)] || !is_served
            })
        }),
        Property::always(is::SAME, |_, world: &World| !world.witness.is_different),
        Property::always(is::ALLOCATED, |_, world: &World| !world.witness.is_unallocated),
        Property::always(is::WHOLE, |scenario: &Scenario, world: &World| scenario.is_whole(world)),
        Property::always(is::NAMES, |_, world: &World| !world.witness.is_named_twice),
        Property::always(is::COLOURS, |_, world: &World| !world.witness.is_colour_twice),
        Property::always(is::UNKNOWN, |_, world: &World| !world.witness.is_unknown),
        Property::always(is::ASTRAY, |_, world: &World| !world.witness.is_sent_astray),
        Property::always(is::FOUND, |scenario: &Scenario, world: &World| {
            scenario.line_numbers().all(|line| scenario.hops(world, line).is_some())
        }),
        Property::always(is::HELD, |scenario: &Scenario, world: &World| {
            let mut lines = scenario.line_numbers();
            !scenario.is_at_rest(world)
                || lines.all(|line| {
                    let is_gone =
                        world.is_lost[usize::from(line)] || world.is_discarded[usize::from(line)];
                    is_gone || scenario.holders(world, line).count() == 1
                })
        }),
        Property::always(is::NEAR, |scenario: &Scenario, world: &World| {
            let mut lines = scenario.line_numbers();
            !scenario.is_at_rest(world)
                || lines.all(|line| scenario.hops(world, line).is_none_or(|hops| hops <= 2))
        }),
        Property::always(is::ENDS, |scenario: &Scenario, world: &World| {
            !scenario.is_at_rest(world) || scenario.is_done(world)
        }),
    ]
}

impl Scenario {
    /// Whether every change was executed, and every line moved. Of two DELETEs only one can be.
    fn is_complete(&self, world: &World) -> bool {
        let (_, _, last) = self.active(world);
        let is_applied = |(client, spec): (usize, &ClientSpec)| {
            let was = |op: usize| world.applied & (1 << (client * 8 + op)) != 0;
            let is_freed = (0..spec.ops.len()).any(|op| spec.ops[op] == Op::Delete && was(op));
            let mut ops = spec.ops.iter().enumerate();
            ops.all(|(op, this)| !this.is_change() || was(op) || *this == Op::Delete && is_freed)
        };
        self.clients.iter().enumerate().all(is_applied)
            && self
                .line_numbers()
                .all(|line| world.served(last, line, 1).is_some() || self.stays(world, HOME, line))
    }

    /// Whether READs of what is served would return the truth.
    fn is_true(&self, world: &World) -> bool {
        let is_true = |server: u8, line: u8| {
            let Some(copy) = world.served(server, line, 1) else { return true };
            let truth = &world.truth[0][usize::from(line)];
            let mut pages = copy.pages.iter().zip(truth).take(self.pages);
            pages.all(|(page, truth)| page.served() == truth.value)
        };
        self.line_numbers().all(|line| (0..index(SERVERS)).all(|server| is_true(server, line)))
    }

    /// Servers that serve a line and may execute a change now.
    fn active_holders(&self, world: &World, line: u8) -> usize {
        let is_taken = |server: u8| {
            let mut leases = world.slot(server, line).leases.iter().flatten();
            leases.any(|lease| matches!(lease.owner, Owner::Taker { .. }))
        };
        self.holders(world, line).filter(|server| !is_taken(*server)).count()
    }

    /// How many servers must be asked for a line, from the home on; `None` if they do not lead to it.
    fn hops(&self, world: &World, line: u8) -> Option<u8> {
        let pointer = Pointer { line, page: 0, generation: 1, tag: FIRST_TAG };
        let mut at = HOME;
        for hops in 1..4 {
            match self.refusal(world, at, pointer) {
                Some(Answer::Moved(next)) => at = next,
                // What nobody knows of yet, nobody can lead round.
                Some(Answer::WrongNode) if world.server(at).is_loss_unknown => return Some(hops),
                Some(Answer::WrongNode | Answer::StaleGeneration)
                    if self.holders(world, line).any(|at| self.is_needed(world, at, line)) =>
                {
                    return None;
                }
                _ => return Some(hops),
            }
        }
        None
    }

    /// Whether all clients are done, and all migrations.
    fn is_done(&self, world: &World) -> bool {
        let is_idle = |server: &Server| {
            server.slots.iter().all(|slot| slot.staged.is_none()) && server.freeing.is_none()
        };
        (0..index(world.clients.len())).all(|client| self.is_over(world, client))
            && usize::from(world.active) + 1 == self.migrations.len()
            && world.stage == Stage::Closed
            && world.forwards.iter().all(|forward| *forward != Forward::Pending)
            && world.servers.iter().all(is_idle)
            && self.line_numbers().all(|line| {
                let mut holders = self.holders(world, line);
                world.generation == 1 || holders.all(|at| self.is_needed(world, at, line))
            })
    }
}
