//! Servers that are killed or lose their memory, and what the home tells of lines that it does not have.

use super::{
    LINES, Mutant, SERVERS, Scenario,
    world::{Copy, Forward, HOME, LEFTOVER, Page, Slot, Stage, World, index},
};

impl Scenario {
    /// A server's process is killed, and the next one begins.
    pub(super) fn restart(&self, world: &mut World, server: u8, is_kept: bool) -> Option<()> {
        let at = usize::from(server);
        let faults = &mut world.faults;
        let budget = if is_kept { &mut faults.crashes[at] } else { &mut faults.wipes[at] };
        *budget = budget.checked_sub(1)?;
        self.free_unfinished(world, server);
        let this = world.server_mut(server);
        this.incarnation += 1;
        this.sessions = [None; 3];
        this.epochs = this.incarnation << 4;
        for slot in &mut this.slots {
            slot.leases = Default::default();
            slot.waits = None;
            // It has stored what it asked for before it asked.
            let is_kept = !self.has(Mutant::DoubtForgotten);
            slot.staged = slot.staged.filter(|staged| staged.is_asked && is_kept);
        }
        if is_kept {
            self.go_on(world, server);
        } else {
            self.begin_empty(world, server);
        }
        Some(())
    }

    /// The next process has the memory of the last one.
    fn go_on(&self, world: &mut World, server: u8) {
        let this = world.server_mut(server);
        if self.has(Mutant::DecisionForgotten) {
            this.dying = None;
        }
        for slot in &mut this.slots {
            if self.has(Mutant::MarksNotKept) {
                slot.mark = None;
            }
            let Some(copy) = &mut slot.copy else { continue };
            // The last process may have granted leases above the floor.
            copy.floor = match copy.floor {
                0 => 0,
                _ if self.has(Mutant::FloorForgotten) => 0,
                floor if self.has(Mutant::FloorNotRaised) => floor,
                floor => ((floor >> 4) + 1) << 4,
            };
        }
    }

    /// The next process has nothing.
    fn begin_empty(&self, world: &mut World, server: u8) {
        let (_, giver, taker) = self.active(world);
        let this = world.server_mut(server);
        this.life += 1;
        this.fences = [0; 2];
        this.slots = [Slot::default(); LINES];
        (this.allowed, this.reserved, this.dying) = (None, None, None);
        let is_open = matches!(world.stage, Stage::Recorded | Stage::Reserved | Stage::Allowed);
        if server == HOME {
            self.begin_generation(world);
        } else {
            self.lose_holder(world, server);
        }
        if is_open && server == giver {
            world.stage = Stage::Ending;
        } else if is_open && server == taker {
            // The rest of the range goes to its next incarnation.
            world.stage = Stage::Recorded;
        }
        world.reported = [false; SERVERS];
        world.claims = [None; LINES];
    }

    /// The home's pages have the next generation in their pointers.
    fn begin_generation(&self, world: &mut World) {
        world.generation += 1;
        let frame = Page { value: LEFTOVER, ..Page::default() };
        let is_none_recorded = world.active == 0 && world.stage == Stage::Recorded;
        for line in self.line_numbers() {
            let copy = Copy { generation: world.generation, floor: 0, pages: [frame; 2] };
            world.slot_mut(HOME, line).copy = Some(copy);
            let forward = if is_none_recorded { Forward::Gone } else { Forward::Pending };
            world.forwards[usize::from(line)] = forward;
        }
    }

    /// The home learns that a server has lost its memory.
    fn lose_holder(&self, world: &mut World, server: u8) {
        for line in self.line_numbers() {
            let is_marked = world.slot(HOME, line).mark.is_some_and(|mark| mark.taker == server);
            let forward = &mut world.forwards[usize::from(line)];
            let is_there = *forward == Forward::At(server);
            if is_there || is_marked && !self.has(Mutant::MarkWithoutIncarnation) {
                // A later taker may have it.
                *forward = match () {
                    () if self.has(Mutant::NextTakerUnasked) => Forward::Gone,
                    () => Forward::Pending,
                };
                if is_marked {
                    *world.slot_mut(HOME, line) = Slot::default();
                }
            }
        }
    }

    /// The takers of the migrations that the controller has recorded.
    fn takers(&self, world: &World) -> impl Iterator<Item = u8> {
        let recorded = self.migrations.iter().take(usize::from(world.active) + 1);
        recorded.map(|(_, taker)| *taker).filter(|taker| *taker != HOME)
    }

    /// A server reports which lines of the home it has.
    pub(super) fn report(&self, world: &mut World, server: u8) -> Option<()> {
        let is_asked = world.forwards.contains(&Forward::Pending);
        let is_taker = self.takers(world).any(|taker| taker == server);
        if !is_asked || !is_taker || world.reported[usize::from(server)] {
            return None;
        }
        for line in self.line_numbers() {
            if !self.report_line(world, server, line) {
                return None;
            }
        }
        world.reported[usize::from(server)] = true;
        Some(())
    }

    /// Whether a server can say whether it has a line.
    fn report_line(&self, world: &mut World, server: u8, line: u8) -> bool {
        if let Some(staged) = world.slot(server, line).staged {
            let giver = self.migrations[usize::from(staged.migration)].0;
            if world.server(giver).life == staged.life {
                // The giver knows.
                return false;
            }
            // Nobody knows. It is final: an answer that comes later is too late.
            if !self.has(Mutant::DoubtSurvivesReport) {
                world.slot_mut(server, line).staged = None;
            }
        }
        let is_served = world.served(server, line, 1).is_some();
        let is_given = world.slot(server, line).mark.is_some_and(|mark| {
            let taker = world.slot(mark.taker, line);
            taker.copy.is_some() || taker.staged.is_some()
        });
        let claim = &mut world.claims[usize::from(line)];
        if is_served || is_given && claim.is_none() {
            *claim = Some(server);
        }
        true
    }

    /// The home has all reports.
    pub(super) fn conclude(&self, world: &mut World) -> Option<()> {
        let is_pending = world.forwards.contains(&Forward::Pending);
        let is_known = self.takers(world).all(|taker| world.reported[usize::from(taker)]);
        if !is_pending || !is_known {
            return None;
        }
        for (forward, claim) in world.forwards.iter_mut().zip(world.claims) {
            if *forward == Forward::Pending {
                *forward = claim.map_or(Forward::Gone, Forward::At);
            }
        }
        Some(())
    }

    /// The controller counts the lines of a server that is silent as lost.
    pub(super) fn presume_lost(&self, world: &mut World) -> Option<()> {
        let is_there = |forward: &&mut Forward| matches!(forward, Forward::At(_));
        let forward = world.forwards.iter_mut().find(is_there)?;
        *forward = Forward::Gone;
        Some(())
    }

    /// The controller tells a taker whose giver was restarted that a line is its own.
    pub(super) fn tell_taker(&self, world: &mut World, line: u8) -> Option<()> {
        let (_, giver, taker) = self.active(world);
        let staged = world.slot(taker, line).staged.filter(|staged| staged.is_asked)?;
        if staged.granted_by == world.server(giver).incarnation {
            return None;
        }
        self.adopt(world, taker, line, staged.copy);
        Some(())
    }

    /// The clock ticks. What can be done at once was done before.
    pub(super) fn tick(&self, world: &mut World) -> Option<()> {
        if world.now == self.ticks || !self.is_quiet(world) {
            return None;
        }
        world.now += 1;
        let now = world.now;
        for server in 0..index(SERVERS) {
            for line in self.line_numbers() {
                for lease in &mut world.slot_mut(server, line).leases {
                    *lease = lease.filter(|lease| now < lease.until);
                }
            }
        }
        Some(())
    }
}
