//! The controller. Its record outlives it.

use super::{
    Mutant, Scenario,
    lines::{Lease, Mark, Owner, Slot},
    world::{Forward, Frames, HOME, Stage, World},
};

impl Scenario {
    /// The next order.
    pub(super) fn order(&self, world: &mut World) -> Option<()> {
        let (migration, giver, taker) = self.active(world);
        let is_unknown = |server: u8| world.server(server).is_loss_unknown;
        if (is_unknown(giver) || is_unknown(taker)) && !self.has(Mutant::OrderedBeforeLoss) {
            return None;
        }
        world.stage = match world.stage {
            // There is no room.
            Stage::Recorded if world.server(taker).frames == Frames::Own => Stage::Ending,
            // The home's next generation does not take lines of the last one back.
            Stage::Recorded if taker == HOME && world.generation > 1 => Stage::Ending,
            Stage::Recorded => {
                let server = world.server_mut(taker);
                server.reserved = Some(migration);
                if taker != HOME && server.frames == Frames::Free {
                    server.frames = Frames::Reserved;
                }
                Stage::Reserved
            }
            Stage::Reserved => {
                let server = world.server_mut(giver);
                server.allowed = Some(migration);
                if self.has(Mutant::MarksBeginAgain) {
                    server.slots.iter_mut().for_each(|slot| slot.mark = None);
                }
                let is_handed = !self.has(Mutant::FencesWithheld);
                let fences = world.server(giver).fences;
                for (node, fence) in (0..).zip(fences).filter(|_| is_handed) {
                    self.raise_fence(world, taker, node, fence);
                }
                Stage::Allowed
            }
            Stage::Allowed if self.is_settled(world) => match () {
                () if self.has(Mutant::AllowanceLeft) => self.conclude_migration(world),
                () => Stage::Ending,
            },
            Stage::Ending => {
                self.withdraw(world);
                Stage::Withdrawn
            }
            Stage::Withdrawn if self.is_settled(world) => self.conclude_migration(world),
            Stage::Learned => {
                if self.has(Mutant::ForgottenEarly) {
                    self.tell_home(world);
                } else {
                    self.forget(world);
                }
                Stage::Closed
            }
            Stage::Closed if self.must_wait_for_home(world) => return None,
            Stage::Closed if usize::from(migration) + 1 < self.migrations.len() => {
                world.active += 1;
                Stage::Recorded
            }
            Stage::Allowed | Stage::Withdrawn | Stage::Closed => return None,
        };
        Some(())
    }

    /// First the home learns who serves the lines, and then the giver forgets.
    fn conclude_migration(&self, world: &mut World) -> Stage {
        match () {
            () if self.has(Mutant::ForgottenEarly) => self.forget(world),
            () => self.tell_home(world),
        }
        Stage::Learned
    }

    /// Whether no line is on its way, and none is left if it was not cancelled.
    fn is_settled(&self, world: &World) -> bool {
        let (_, giver, taker) = self.active(world);
        self.line_numbers().all(|line| {
            let is_left = world.served(giver, line, 1).is_some() && !self.stays(world, giver, line);
            let is_staged = world.slot(taker, line).staged.is_some();
            let is_known = !is_staged || self.has(Mutant::ClosedInDoubt);
            is_known && (!is_left || world.stage == Stage::Withdrawn)
        })
    }

    /// The home learns who serves the lines.
    fn tell_home(&self, world: &mut World) {
        let (_, giver, taker) = self.active(world);
        for line in self.line_numbers() {
            if taker == HOME || world.served(taker, line, 1).is_none() {
                continue;
            }
            if world.is_gone && self.has(Mutant::DeputyMapOld) {
                continue;
            }
            world.forwards[usize::from(line)] = Forward::At(taker);
            if giver == HOME && world.slot(HOME, line).mark.is_some() {
                *world.slot_mut(HOME, line) = Slot::default();
            }
        }
    }

    /// The giver forgets.
    fn forget(&self, world: &mut World) {
        let (migration, giver, taker) = self.active(world);
        for line in self.line_numbers() {
            // The home forgets a mark when it learns who serves the line, others when the home has learned it.
            let at = world.forwards[usize::from(line)];
            let is_known = giver != HOME && at != Forward::At(giver);
            let is_blind = self.has(Mutant::ForgottenEarly)
                || self.has(Mutant::ClosedInDoubt)
                || self.has(Mutant::DeputyMapOld);
            let is_its = |mark: Mark| mark.migration == migration;
            if world.slot(giver, line).mark.is_some_and(is_its) && (is_known || is_blind) {
                *world.slot_mut(giver, line) = Slot::default();
                self.release_frames(world, giver, line);
            }
        }
        world.server_mut(giver).allowed = None;
        let server = world.server_mut(taker);
        server.reserved = None;
        if server.frames == Frames::Reserved {
            server.frames = Frames::Free;
        }
    }

    /// The operator cancels.
    pub(super) fn cancel(&self, world: &mut World) -> Option<()> {
        if world.stage != Stage::Allowed {
            return None;
        }
        world.faults.cancels = world.faults.cancels.checked_sub(1)?;
        world.stage = Stage::Ending;
        if self.has(Mutant::CancelledAtTaker) {
            let (_, _, taker) = self.active(world);
            let server = world.server_mut(taker);
            server.reserved = None;
            server.slots.iter_mut().for_each(|slot| slot.staged = None);
        }
        Some(())
    }

    /// The giver allows nothing any more. What is marked stays marked.
    fn withdraw(&self, world: &mut World) {
        let (migration, giver, taker) = self.active(world);
        let frames = &mut world.server_mut(taker).frames;
        if *frames == Frames::Reserved && self.has(Mutant::FramesReleased) {
            *frames = Frames::Free;
        }
        let server = world.server_mut(giver);
        if server.allowed != Some(migration) {
            return;
        }
        server.allowed = None;
        for lease in server.slots.iter_mut().flat_map(|slot| &mut slot.leases) {
            let is_clients = |lease: &Lease| matches!(lease.owner, Owner::Client(_));
            *lease = lease.filter(is_clients);
        }
    }

    /// The controller forgets its last order before it has recorded it, and gives it again.
    pub(super) fn crash_controller(&self, world: &mut World) -> Option<()> {
        world.stage = match world.stage {
            Stage::Reserved => Stage::Recorded,
            Stage::Allowed => Stage::Reserved,
            Stage::Withdrawn => Stage::Ending,
            Stage::Learned => Stage::Withdrawn,
            Stage::Closed => Stage::Learned,
            Stage::Recorded | Stage::Ending => return None,
        };
        world.faults.controller_crashes = world.faults.controller_crashes.checked_sub(1)?;
        Some(())
    }

    /// An order of a controller that has ended arrives late.
    pub(super) fn order_late(&self, world: &mut World) -> Option<()> {
        let (migration, giver, _) = self.active(world);
        if !matches!(world.stage, Stage::Withdrawn | Stage::Learned) {
            return None;
        }
        world.server_mut(giver).allowed = Some(migration);
        Some(())
    }
}
