//! The deputy of a home that is drained and gone: when it begins, the next one, and its end when the home comes back.

use super::{
    LINES, Mutant, Op, Scenario,
    lines::{Copy, Link, Slot},
    messages::{Answer, Message, Request},
    world::{Doing, Forward, HOME, Late, Stage, World},
};

impl Scenario {
    /// Whether all pages of a copy are free.
    fn is_free(&self, copy: &Copy) -> bool {
        copy.pages.iter().take(self.pages).all(|page| page.link == Link::Free)
    }

    /// Whether a line stays at a giver, because it is the home's own and free as a whole.
    pub(super) fn stays(&self, world: &World, giver: u8, line: u8) -> bool {
        let copy = world.served(giver, line, 1);
        self.has_free_line && giver == HOME && copy.is_some_and(|copy| self.is_free(copy))
    }

    /// Whether the active migration, or the next one, needs the home, which is gone.
    pub(super) fn must_wait_for_home(&self, world: &World) -> bool {
        let next = self.migrations.get(usize::from(world.active) + 1);
        world.is_gone && next.is_some_and(|(giver, taker)| [*giver, *taker].contains(&HOME))
    }

    /// The home is taken away, and a deputy answers for it. It has the home's next incarnation, and no memory; the
    /// controller tells it where the lines are before it answers anything.
    pub(super) fn leave(&self, world: &mut World) -> Option<()> {
        let is_idle = |slot: &Slot| (slot.staged, slot.mark) == (None, None);
        let (_, giver, taker) = self.active(world);
        let is_open = world.stage != Stage::Closed && (giver == HOME || taker == HOME);
        let home = world.server(HOME);
        let is_left = |slot: &Slot| {
            let is_free = |copy: &Copy| self.has_free_line && self.is_free(copy);
            slot.copy.as_ref().is_some_and(|copy| !is_free(copy))
        };
        let is_drained = !is_open && home.slots.iter().all(|slot| is_idle(slot) && !is_left(slot));
        if world.is_gone
            || !is_drained && !self.has(Mutant::DeputyTooEarly)
            || home.freeing.is_some()
        {
            return None;
        }
        world.faults.leaves = world.faults.leaves.checked_sub(1)?;
        let home = world.server_mut(HOME);
        home.incarnation += 1;
        (home.sessions, home.fences, home.allowed) = ([None; 3], [0; 2], None);
        let kept = core::mem::replace(&mut home.slots, [Slot::default(); LINES]);
        world.kept = self.has_free_line.then_some(kept);
        world.is_gone = true;
        if self.has(Mutant::DeputyWithoutMap) {
            world.forwards = [Forward::Gone; LINES];
        }
        Some(())
    }

    /// What the present deputy knows and will go on to answer if nobody stops it.
    fn late(&self, world: &World) -> Option<Late> {
        let incarnation = world.server(HOME).incarnation;
        let late = Late { incarnation, forwards: world.forwards };
        (world.faults.late_answers > 0).then_some(late)
    }

    /// The deputy hangs, or is cut off from the controller: another one answers, with the next incarnation. The first one may
    /// go on until it is told to stop.
    pub(super) fn succeed(&self, world: &mut World) -> Option<()> {
        if !world.is_gone || world.late.is_some() {
            return None;
        }
        world.faults.successors = world.faults.successors.checked_sub(1)?;
        world.late = self.late(world);
        let deputy = world.server_mut(HOME);
        if !self.has(Mutant::SuccessorsIncarnation) {
            deputy.incarnation += 1;
        }
        (deputy.sessions, deputy.fences) = ([None; 3], [0; 2]);
        Some(())
    }

    /// A deputy that was replaced is told to stop, and says that it did.
    pub(super) fn dismiss(&self, world: &mut World) -> Option<()> {
        world.late.take().map(drop)
    }

    /// The home comes back, with its memory or without. It answers when no deputy does any more.
    pub(super) fn come_back(&self, world: &mut World, is_kept: bool) -> Option<()> {
        if !world.is_gone {
            return None;
        }
        let faults = &mut world.faults;
        let budget = if is_kept { &mut faults.returns } else { &mut faults.empty_returns };
        *budget = budget.checked_sub(1)?;
        if self.has(Mutant::HomeBesideDeputy) {
            world.late = self.late(world);
        } else if world.late.is_some() {
            return None;
        }
        world.is_gone = false;
        let kept = world.kept.take();
        let home = world.server_mut(HOME);
        home.incarnation += 1;
        home.epochs = home.incarnation << 4;
        (home.sessions, home.fences) = ([None; 3], [0; 2]);
        if is_kept {
            home.slots = kept.unwrap_or_default();
            self.go_on(world, HOME);
            self.ask_again(world);
            return Some(());
        }
        for (line, slot) in kept.iter().flatten().enumerate() {
            world.is_lost[line] |= slot.copy.is_some();
        }
        self.begin_empty(world, HOME);
        Some(())
    }

    /// A client opens a session with a deputy that should not answer any more.
    pub(super) fn open_late(&self, world: &mut World, client: u8) -> Option<()> {
        let late = world.late?;
        let this = world.client(client);
        if this.doing != Doing::Nothing || this.sessions[usize::from(HOME)] != 0 {
            return None;
        }
        self.op_of(world, client)?;
        world.faults.late_answers = world.faults.late_answers.checked_sub(1)?;
        world.client_mut(client).sessions[usize::from(HOME)] = late.incarnation;
        Some(())
    }

    /// A request arrives at a deputy that should not answer any more.
    pub(super) fn arrive_late(&self, world: &mut World, at: usize) -> Option<()> {
        let late = world.late?;
        let Message::Request(request) = *world.network.get(at)? else { return None };
        if !request.to_pointer && request.server != HOME {
            return None;
        }
        world.faults.late_answers = world.faults.late_answers.checked_sub(1)?;
        world.network.remove(at);
        let answer = self.answer_late(world, &late, request)?;
        // A client does not believe it about a session that began after it was replaced.
        let is_ignored = answer == Answer::NoSession
            && late.incarnation < request.incarnation
            && !self.has(Mutant::EarlierProcessBelieved);
        if !is_ignored {
            self.hear(world, HOME, request, answer);
        }
        Some(())
    }

    /// What it says: it has the sessions that were opened with it, and the map of the moment at which it was replaced.
    fn answer_late(&self, world: &World, late: &Late, request: Request) -> Option<Answer> {
        let is_with_us = request.server == HOME && request.incarnation == late.incarnation;
        if request.server == HOME && !is_with_us {
            return Some(Answer::NoSession);
        }
        let op = self.clients[usize::from(request.client)].ops[usize::from(request.op)];
        let Some(pointer) = self.pointer(world, request.client, op) else {
            return matches!(op, Op::Create).then_some(Answer::OutOfMemory);
        };
        if pointer.generation > 1 {
            return Some(Answer::NoAuthority);
        }
        Some(match late.forwards[usize::from(pointer.line)] {
            Forward::At(holder) => Answer::Moved(holder),
            Forward::Pending => Answer::Busy,
            Forward::Own | Forward::Gone => Answer::StaleGeneration,
        })
    }
}
