//! The taker.

use super::{
    Mutant, Scenario,
    giver::Taken,
    lines::{Copy, LEFTOVER, Link, Owner, Page, Slot, Staged},
    messages::{Keep, Kept, Message},
    world::{Forward, Frames, HOME, World, index},
};

impl Scenario {
    /// The migration that is under way, its giver and its taker.
    pub(super) fn active(&self, world: &World) -> (u8, u8, u8) {
        let (giver, taker) = self.migrations[usize::from(world.active)];
        (world.active, giver, taker)
    }

    /// The taker takes a line.
    pub(super) fn take(&self, world: &mut World, line: u8) -> Option<()> {
        let (migration, giver, taker) = self.active(world);
        let is_free = world.slot(taker, line).staged.is_none();
        let is_ordered = world.server(taker).reserved == Some(migration);
        let is_allowed = world.server(giver).allowed == Some(migration);
        if !is_free || !is_ordered || !is_allowed || world.served(taker, line, 1).is_some() {
            return None;
        }
        if self.stays(world, giver, line) {
            return None;
        }
        let incarnation = world.server(taker).incarnation;
        let owner = Owner::Taker { migration, incarnation };
        let waits = world.slot(giver, line).waits;
        match self.grant_line(world, (giver, line), owner) {
            Taken::Granted { epoch, copy } => {
                // The answer has all of a page's state, and not its bytes.
                let blank = |page: Page| Page { value: LEFTOVER, is_written: false, ..page };
                let mut copy = Copy { floor: epoch, pages: copy.pages.map(blank), ..copy };
                if self.has(Mutant::LastTagLost) {
                    let free = copy.pages.iter_mut().filter(|page| page.link == Link::Free);
                    free.for_each(|page| page.tag = 0);
                }
                let giver = world.server(giver);
                let (granted_by, life) = (giver.incarnation, giver.life);
                world.slot_mut(taker, line).staged = Some(Staged {
                    migration,
                    epoch,
                    incarnation,
                    granted_by,
                    life,
                    copy,
                    read: 0,
                    is_asked: false,
                    is_vain: false,
                    session: 1,
                });
                Some(())
            }
            // It has it, or it lost it and is another incarnation than the one that the mark names.
            Taken::YoursAlready if self.has(Mutant::MarkWithoutIncarnation) => {
                let copy = world.slot(giver, line).copy?;
                let blank = |page: Page| Page { value: LEFTOVER, is_written: false, ..page };
                self.adopt(world, taker, line, Copy { pages: copy.pages.map(blank), ..copy });
                Some(())
            }
            Taken::YoursAlready => None,
            Taken::Refused => (world.slot(giver, line).waits != waits).then_some(()),
        }
    }

    /// The answer to TAKE is lost.
    pub(super) fn take_in_vain(&self, world: &mut World, line: u8) -> Option<()> {
        let (_, _, taker) = self.active(world);
        world.faults.losses = world.faults.losses.checked_sub(1)?;
        self.take(world, line)?;
        world.slot_mut(taker, line).staged.take().map(|_| ())
    }

    /// The frames of a line are used again.
    pub(super) fn release_frames(&self, world: &mut World, server: u8, line: u8) {
        if server != HOME && line == 0 {
            let server = world.server_mut(server);
            server.frames = match server.reserved {
                Some(_) => Frames::Reserved,
                None => Frames::Free,
            };
        }
    }

    /// A server allocates pages of its own.
    pub(super) fn allocate(&self, world: &mut World, server: u8) -> Option<()> {
        if world.server(server).frames != Frames::Free {
            return None;
        }
        world.faults.allocations = world.faults.allocations.checked_sub(1)?;
        world.server_mut(server).frames = Frames::Own;
        Some(())
    }

    /// The taker reads the next page of a line.
    pub(super) fn fetch(&self, world: &mut World, line: u8) -> Option<()> {
        let (_, giver, taker) = self.active(world);
        let staged = world.slot(taker, line).staged?;
        if usize::from(staged.read) == self.pages {
            return None;
        }
        let page = self.read_taken(world, giver, (line, staged.read), staged.epoch);
        let slot = &mut world.slot_mut(taker, line).staged;
        match (page, slot) {
            (Some(page), Some(staged)) => {
                let place = &mut staged.copy.pages[usize::from(staged.read)];
                if page.is_written {
                    *place = page;
                } else {
                    place.is_written = self.has(Mutant::FrameBytes);
                }
                staged.read += 1;
            }
            // Nothing was asked yet, so the line is the giver's for sure.
            (_, slot) => *slot = None,
        }
        Some(())
    }

    /// The taker sends KEEP, or sends it again.
    pub(super) fn ask_to_keep(&self, world: &mut World, line: u8) -> Option<()> {
        let (_, _, taker) = self.active(world);
        let staged = world.slot_mut(taker, line).staged.as_mut()?;
        if usize::from(staged.read) < self.pages || staged.is_vain {
            return None;
        }
        staged.is_asked = true;
        let keep = keep_of(line, staged);
        let is_there = world.network.iter().any(|message| match message {
            Message::Keep(other) => *other == keep,
            Message::Kept(kept) => kept.keep == keep,
            Message::Request(_) => false,
        });
        if is_there {
            return None;
        }
        world.send(Message::Keep(keep));
        if self.has(Mutant::ServedUnheard) {
            let copy = world.slot(taker, line).staged?.copy;
            self.adopt(world, taker, line, copy);
        }
        Some(())
    }

    /// The taker's session with the giver ends; it opens another one.
    pub(super) fn reopen(&self, world: &mut World, line: u8) -> Option<()> {
        let (_, _, taker) = self.active(world);
        let staged = world.slot_mut(taker, line).staged.as_mut()?;
        if !staged.is_asked {
            return None;
        }
        staged.session += 1;
        world.faults.sessions = world.faults.sessions.checked_sub(1)?;
        Some(())
    }

    /// Whether the taker would ask this.
    pub(super) fn is_keep_awaited(&self, world: &World, keep: &Keep) -> bool {
        let taker = self.migrations[usize::from(keep.migration)].1;
        let staged = world.slot(taker, keep.line).staged;
        staged.is_some_and(|staged| staged.is_asked && keep_of(keep.line, &staged) == *keep)
    }

    /// Whether an answer could matter to the taker.
    pub(super) fn is_kept_awaited(&self, world: &World, kept: &Kept) -> bool {
        let taker = self.migrations[usize::from(kept.keep.migration)].1;
        let staged = world.slot(taker, kept.keep.line).staged;
        staged.is_some_and(|staged| self.is_answer(&staged, kept))
    }

    /// The taker gets the answer to KEEP.
    pub(super) fn hear_kept(&self, world: &mut World, taker: u8, kept: &Kept) {
        let line = kept.keep.line;
        let Some(staged) = world.slot(taker, line).staged else { return };
        if !self.is_answer(&staged, kept) {
            return;
        }
        if kept.is_ok {
            let has_fences =
                !self.has(Mutant::FencesWithheld) && !self.has(Mutant::FencesAtAllowance);
            for (node, fence) in (0..).zip(kept.fences).filter(|_| has_fences) {
                self.raise_fence(world, taker, node, fence);
            }
            self.adopt(world, taker, line, staged.copy);
            return;
        }
        // Who has the same memory has the same marks.
        let is_known = match self.mutant {
            Some(Mutant::LostOfAnyLease | Mutant::LostOfAnotherLife) => true,
            Some(Mutant::LostOfSameProcess) => kept.incarnation == staged.granted_by,
            _ => kept.life == staged.life,
        };
        match &mut world.slot_mut(taker, line).staged {
            staged if is_known => *staged = None,
            Some(staged) => staged.is_vain = true,
            None => {}
        }
    }

    /// Whether this is an answer to the last KEEP of a line. It may be from another session.
    fn is_answer(&self, staged: &Staged, kept: &Kept) -> bool {
        let Keep { migration, epoch, incarnation, .. } = kept.keep;
        let is_same = (staged.migration, staged.incarnation) == (migration, incarnation);
        let is_any = !kept.is_ok && self.has(Mutant::LostOfAnyLease);
        staged.is_asked && is_same && (staged.epoch == epoch || is_any)
    }

    /// The taker serves a line from now on.
    pub(super) fn adopt(&self, world: &mut World, taker: u8, line: u8, copy: Copy) {
        let mut copy = copy;
        if self.has(Mutant::VersionsRestart) {
            copy.pages.iter_mut().for_each(|page| page.version = 0);
        }
        if taker != HOME && line == 0 {
            world.witness.is_named_twice |= world.server(taker).frames == Frames::Own;
            world.server_mut(taker).frames = Frames::Line;
        }
        self.raise_epochs(world, taker, copy.floor);
        let slot = world.slot_mut(taker, line);
        *slot = Slot { copy: Some(copy), ..Slot::default() };
        if taker == HOME {
            world.forwards[usize::from(line)] = Forward::Own;
        }
        for page in self.page_numbers() {
            let this = copy.pages[usize::from(page)];
            let truth = *world.truth_mut(copy.generation, line, page);
            world.witness.is_different |=
                (this.served(), this.tag, this.link) != (truth.value, truth.tag, truth.link);
            world.note_version(copy.generation, line, page, this);
        }
    }

    /// Whether a taker still has the line on its way for which it took a lease.
    pub(super) fn is_lease_used(&self, world: &World, line: u8, owner: Owner, epoch: u8) -> bool {
        let Owner::Taker { migration, incarnation } = owner else { return false };
        let taker = self.migrations[usize::from(migration)].1;
        let staged = world.slot(taker, line).staged;
        staged.is_some_and(|of| (of.epoch, of.incarnation) == (epoch, incarnation))
    }

    /// The servers that serve a line.
    pub(super) fn holders(&self, world: &World, line: u8) -> impl Iterator<Item = u8> {
        (0..index(world.servers.len()))
            .filter(move |server| world.served(*server, line, 1).is_some())
    }
}

/// The KEEP of a staged line.
fn keep_of(line: u8, staged: &Staged) -> Keep {
    Keep {
        migration: staged.migration,
        line,
        epoch: staged.epoch,
        incarnation: staged.incarnation,
        session: staged.session,
    }
}
