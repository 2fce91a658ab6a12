//! Servers that are killed or lose their memory, and what the home tells of lines that it does not have.

use super::{
    LINES, Mutant, SERVERS, Scenario,
    lines::{Copy, Epoch, LEFTOVER, Lease, Owner, Page, Slot},
    world::{Forward, Frames, HOME, Stage, World, index},
};

impl Scenario {
    /// A server's process is killed, and the next one begins.
    pub(super) fn restart(&self, world: &mut World, server: u8, is_kept: bool) -> Option<()> {
        let at = usize::from(server);
        if server == HOME && world.is_gone {
            return None;
        }
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
            let is_stored = !self.has(Mutant::DoubtForgotten);
            slot.staged = slot.staged.filter(|staged| staged.is_asked && is_stored);
        }
        if is_kept {
            self.go_on(world, server);
            if server == HOME {
                self.ask_again(world);
            }
        } else {
            self.begin_empty(world, server);
        }
        Some(())
    }

    /// The next process has the memory of the last one.
    pub(super) fn go_on(&self, world: &mut World, server: u8) {
        let this = world.server_mut(server);
        if self.has(Mutant::DecisionForgotten) {
            this.freeing = None;
        }
        if let Some(freeing) = &mut this.freeing {
            freeing.freed = 0;
        }
        for slot in &mut this.slots {
            if self.has(Mutant::MarksNotKept) {
                slot.mark = None;
            }
            if let Some(copy) = &mut slot.copy
                && copy.floor > 0
            {
                copy.floor = above(copy.floor);
            }
        }
        // The last process may have granted leases above the floor, for any of its lines.
        let own = this.epochs;
        this.epochs = match this.floor {
            0 => own,
            _ if self.has(Mutant::FloorForgotten) || self.has(Mutant::FloorPerLine) => own,
            floor if self.has(Mutant::FloorNotRaised) => own.max(floor),
            floor => own.max(above(floor)),
        };
        if this.floor > 0 {
            this.floor = this.epochs;
        }
    }

    /// The next process has nothing.
    pub(super) fn begin_empty(&self, world: &mut World, server: u8) {
        world.is_decision_lost |= world.server(server).freeing.is_some();
        let this = world.server_mut(server);
        this.life += 1;
        this.fences = [0; 2];
        this.floor = 0;
        (this.allowed, this.reserved, this.freeing) = (None, None, None);
        this.frames = Frames::Free;
        self.note_losses(world, server);
        world.server_mut(server).slots = [Slot::default(); LINES];
        if server == HOME {
            self.begin_generation(world);
            self.end_migration_of(world, server);
            // What the home has learned is lost with its memory.
            if world.stage == Stage::Learned && !self.has(Mutant::HomeNotToldAgain) {
                world.stage = Stage::Withdrawn;
            }
        } else {
            world.server_mut(server).is_loss_unknown = true;
        }
    }

    /// The lines that are lost with a server's memory: those that it serves, and those of which nobody else knows
    /// whose they are.
    fn note_losses(&self, world: &mut World, server: u8) {
        for line in self.line_numbers() {
            let is_marked = |giver: u8| world.slot(giver, line).mark.is_some();
            let is_in_doubt = is_marked(server) && self.holders(world, line).next().is_none();
            let is_staged = world.slot(server, line).staged.is_some();
            let is_given = is_staged && (0..index(SERVERS)).any(is_marked);
            let is_served = world.served(server, line, 1).is_some();
            world.is_lost[usize::from(line)] |= is_served || is_in_doubt || is_given;
        }
    }

    /// A giver gives nothing more, and the rest of a range goes to the taker's next incarnation.
    fn end_migration_of(&self, world: &mut World, server: u8) {
        let (_, giver, taker) = self.active(world);
        if !matches!(world.stage, Stage::Recorded | Stage::Reserved | Stage::Allowed) {
            return;
        }
        if server == giver {
            world.stage = Stage::Ending;
        } else if server == taker {
            world.stage = Stage::Recorded;
        }
    }

    /// The controller tells all of the loss of a server's memory. From now on nothing of the lost incarnation counts.
    pub(super) fn learn_loss(&self, world: &mut World, server: u8) -> Option<()> {
        if !core::mem::take(&mut world.server_mut(server).is_loss_unknown) {
            return None;
        }
        for line in self.line_numbers() {
            self.lose_line(world, server, line);
        }
        self.end_migration_of(world, server);
        self.ask_again(world);
        Some(())
    }

    fn lose_line(&self, world: &mut World, server: u8, line: u8) {
        let mut is_asked = world.forwards[usize::from(line)] == Forward::At(server);
        for giver in 0..index(SERVERS) {
            self.end_doubt(world, giver, line);
            if !self.has(Mutant::LostTakerKeeps) {
                for lease in &mut world.slot_mut(giver, line).leases {
                    *lease = lease.filter(|lease| self.taker_of(lease) != Some(server));
                }
            }
            let is_given = world.slot(giver, line).mark.is_some_and(|mark| mark.taker == server);
            if is_given && !self.has(Mutant::MarkWithoutIncarnation) {
                *world.slot_mut(giver, line) = Slot::default();
                let at = world.forwards[usize::from(line)];
                is_asked |= giver == HOME || at == Forward::At(giver);
            }
        }
        if is_asked {
            // A later taker may have it.
            world.forwards[usize::from(line)] = match () {
                () if self.has(Mutant::NextTakerUnasked) => Forward::Gone,
                () => Forward::Pending,
            };
        }
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
        self.ask_again(world);
    }

    /// All reports are of one time: the home asks everybody again.
    pub(super) fn ask_again(&self, world: &mut World) {
        world.reported = [false; SERVERS];
        world.claims = [None; LINES];
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
        // Its loss must be known first: then all report again, because a line may have moved from it meanwhile.
        if world.server(server).is_loss_unknown && !self.has(Mutant::ReportBeforeLoss) {
            return None;
        }
        for line in self.line_numbers() {
            if world.generation > 1 && !self.has(Mutant::LostHomeKeeps) {
                self.end_gifts_to_home(world, server, line);
            }
            if !self.report_line(world, server, line) {
                return None;
            }
        }
        world.reported[usize::from(server)] = true;
        Some(())
    }

    /// The home asks, and has another generation: what was on its way to it is lost, and it keeps nothing more.
    fn end_gifts_to_home(&self, world: &mut World, server: u8, line: u8) {
        let slot = world.slot_mut(server, line);
        if slot.mark.is_some_and(|mark| mark.taker == HOME) {
            *slot = Slot::default();
        }
        for lease in &mut slot.leases {
            *lease = lease.filter(|lease| self.taker_of(lease) != Some(HOME));
        }
    }

    /// The server that has leased a line in order to keep it.
    fn taker_of(&self, lease: &Lease) -> Option<u8> {
        match lease.owner {
            Owner::Client(_) => None,
            Owner::Taker { migration, .. } => Some(self.migrations[usize::from(migration)].1),
        }
    }

    /// Whether a server can say whether it has a line.
    fn report_line(&self, world: &mut World, server: u8, line: u8) -> bool {
        self.end_doubt(world, server, line);
        let is_in_doubt = world.slot(server, line).staged.is_some();
        if is_in_doubt && !self.has(Mutant::DoubtSurvivesReport) {
            // The giver knows whose it is.
            return false;
        }
        let is_served = world.served(server, line, 1).is_some();
        let is_given = world.slot(server, line).mark.is_some_and(|mark| {
            let taker = world.slot(mark.taker, line);
            taker.copy.is_some_and(|copy| copy.generation == 1) || taker.staged.is_some()
        });
        let claim = &mut world.claims[usize::from(line)];
        if is_served || is_given && claim.is_none() {
            *claim = Some(server);
        }
        true
    }

    /// A taker learns that its giver has lost its memory. Nobody knows any more whose the line is, and this is final:
    /// an answer that comes later is too late.
    fn end_doubt(&self, world: &mut World, taker: u8, line: u8) {
        let Some(staged) = world.slot(taker, line).staged else { return };
        let giver = self.migrations[usize::from(staged.migration)].0;
        if world.server(giver).life != staged.life && !self.has(Mutant::DoubtSurvivesReport) {
            world.slot_mut(taker, line).staged = None;
        }
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

/// The first lease epoch of a process whose predecessor had this floor.
const fn above(floor: Epoch) -> Epoch {
    ((floor >> 4) + 1) << 4
}
