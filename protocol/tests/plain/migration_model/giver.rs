//! The giver: what it answers to TAKE, to READs of a taken line, and to KEEP.

use super::{
    LONGEST_LEASE, Mutant, Scenario,
    lines::{Copy, Epoch, Lease, Mark, Owner, Page},
    messages::{Keep, Kept},
    world::World,
};

/// The answer to TAKE.
pub(super) enum Taken {
    Granted { epoch: Epoch, copy: Copy },
    YoursAlready,
    Refused,
}

impl Scenario {
    /// TAKE of a line.
    pub(super) fn grant_line(
        &self,
        world: &mut World,
        (giver, line): (u8, u8),
        owner: Owner,
    ) -> Taken {
        let Owner::Taker { migration, incarnation } = owner else { return Taken::Refused };
        let slot = world.slot(giver, line);
        let Some(copy) = slot.copy.filter(|copy| copy.generation == 1) else {
            return Taken::Refused;
        };
        if let Some(mark) = slot.mark {
            let is_same = mark.incarnation == incarnation;
            let is_ours = is_same || self.has(Mutant::MarkWithoutIncarnation);
            let is_ours = is_ours && mark.migration == migration;
            return if is_ours { Taken::YoursAlready } else { Taken::Refused };
        }
        let is_busy = slot.leases.iter().flatten().any(|lease| lease.owner != owner);
        let is_unfinished = slot.unfinished.is_some() && !self.has(Mutant::UnfinishedTaken);
        let must_wait = is_busy || is_unfinished;
        if must_wait || world.server(giver).freeing.is_some() {
            let now = world.now;
            if self.ticks > 0 {
                world.slot_mut(giver, line).waits.get_or_insert(now);
            }
            return Taken::Refused;
        }
        world.slot_mut(giver, line).waits = None;
        let epoch = self.next_epoch(world, giver, line);
        let lease = Lease { owner, epoch, until: world.now + LONGEST_LEASE };
        for page in self.page_numbers() {
            self.grant(world, giver, (line, page), lease);
        }
        Taken::Granted { epoch, copy }
    }

    /// READ of a page under the lease of a TAKE.
    pub(super) fn read_taken(
        &self,
        world: &World,
        giver: u8,
        (line, page): (u8, u8),
        epoch: Epoch,
    ) -> Option<Page> {
        let slot = world.slot(giver, line);
        let lease = slot.leases[usize::from(page)];
        let is_held = lease.is_some_and(|lease| lease.epoch == epoch);
        if !is_held && !self.has(Mutant::ReadsUnchecked) {
            return None;
        }
        slot.copy.map(|copy| copy.pages[usize::from(page)])
    }

    /// KEEP: the line is the taker's from this moment on.
    pub(super) fn keep(&self, world: &mut World, giver: u8, keep: Keep) -> Kept {
        let Keep { migration, line, incarnation, session, .. } = keep;
        let taker = self.migrations[usize::from(migration)].1;
        let mark = Mark { migration, taker, incarnation, session };
        let known = world.slot(giver, line).mark;
        let mut is_ok = known.is_some_and(|known| {
            let is_same = (known.migration, known.taker, known.incarnation)
                == (migration, taker, incarnation);
            is_same && (known.session == session || !self.has(Mutant::RecordInSession))
        });
        if known.is_none() && self.is_keep_valid(world, &keep) {
            let slot = world.slot_mut(giver, line);
            slot.mark = Some(mark);
            slot.leases = Default::default();
            is_ok = true;
            // It was on its way when the taker lost its memory.
            let is_late = world.server(taker).life > 1 && !self.is_keep_awaited(world, &keep);
            world.is_lost[usize::from(line)] |= is_late;
        }
        let server = world.server(giver);
        let (incarnation, life) = (server.incarnation, server.life);
        Kept { keep, is_ok, incarnation, life, fences: server.fences }
    }

    /// Whether a KEEP finds the lease that it names.
    pub(super) fn is_keep_valid(&self, world: &World, keep: &Keep) -> bool {
        let giver = self.migrations[usize::from(keep.migration)].0;
        let owner = Owner::Taker { migration: keep.migration, incarnation: keep.incarnation };
        let slot = world.slot(giver, keep.line);
        let is_held = |page: u8| {
            let lease = slot.leases[usize::from(page)];
            lease.is_some_and(|lease| (lease.owner, lease.epoch) == (owner, keep.epoch))
        };
        let unchecked = u8::from(self.has(Mutant::LastPageUnchecked) && self.pages > 1);
        let mut pages = self.page_numbers().take(self.pages - usize::from(unchecked));
        world.server(giver).allowed == Some(keep.migration)
            && slot.copy.is_some()
            && slot.mark.is_none()
            && pages.all(is_held)
    }
}
