//! Pages are allocated and freed.

use super::{
    Mutant, PAGES, SERVERS, Scenario,
    lines::{Link, Page},
    messages::{Answer, Message, Pointer, Request},
    world::{Forward, Freeing, HOME, Truth, World, index},
};

impl Scenario {
    /// Allocates a page.
    pub(super) fn create(&self, world: &mut World, server: u8, request: Request) -> Answer {
        let is_allowed = world.server(server).allowed.is_some();
        if is_allowed && !self.has(Mutant::CreatedInRange) {
            return Answer::OutOfMemory;
        }
        let generation = world.generation;
        for line in self.line_numbers() {
            let Some(copy) = world.served(server, line, generation).copied() else { continue };
            let mut pages = self.page_numbers();
            let is_free = |page: &u8| copy.pages[usize::from(*page)].link == Link::Free;
            let Some(page) = pages.find(is_free) else { continue };
            let last = copy.pages[usize::from(page)];
            let new = Page {
                tag: last.tag + 1,
                link: Link::Head,
                is_written: false,
                version: last.version + 1,
                ..last
            };
            self.note_service(world, request, line);
            let truth = world.truth_mut(generation, line, page);
            let is_used = truth.tag >= new.tag;
            (truth.value, truth.tag, truth.link) = (0, new.tag, Link::Head);
            world.witness.is_colour_twice |= is_used;
            self.store(world, server, (line, page), new);
            return Answer::Created(Pointer { line, page, generation, tag: new.tag });
        }
        Answer::OutOfMemory
    }

    /// Stores a page's state, which has a new version.
    fn store(&self, world: &mut World, server: u8, (line, page): (u8, u8), new: Page) {
        let Some(copy) = &mut world.slot_mut(server, line).copy else { return };
        copy.pages[usize::from(page)] = new;
        let generation = copy.generation;
        world.note_version(generation, line, page, new);
    }

    /// The first piece of an ALLOC_WRITE allocates the page, the other ones write it.
    pub(super) fn alloc_write(&self, world: &mut World, server: u8, request: Request) -> Answer {
        let at = usize::from(request.client);
        let provided = world.server(server).sessions[at].and_then(|session| session.provided);
        match provided {
            None if request.piece > 0 => Answer::Nothing,
            None => {
                let answer = self.create(world, server, request);
                let Answer::Created(pointer) = answer else { return answer };
                if let Some(session) = &mut world.server_mut(server).sessions[at] {
                    session.provided = Some(pointer);
                }
                world.slot_mut(server, pointer.line).unfinished = Some(pointer.page);
                world.send(Message::Request(Request { piece: 1, ..request }));
                Answer::Nothing
            }
            Some(_) if request.piece == 0 => {
                world.send(Message::Request(Request { piece: 1, ..request }));
                Answer::Nothing
            }
            Some(pointer) => {
                self.change(world, server, request, pointer);
                world.slot_mut(server, pointer.line).unfinished = None;
                Answer::Created(pointer)
            }
        }
    }

    /// Pages of an ALLOC_WRITE that was not finished are freed.
    pub(super) fn free_unfinished(&self, world: &mut World, server: u8) {
        for line in self.line_numbers() {
            let slot = world.slot_mut(server, line);
            let (Some(page), Some(copy)) = (slot.unfinished.take(), slot.copy) else { continue };
            let this = copy.pages[usize::from(page)];
            self.free(world, server, (line, page), this);
        }
    }

    fn free(&self, world: &mut World, server: u8, (line, page): (u8, u8), this: Page) {
        let version = this.version + 1;
        let new = Page { link: Link::Free, is_written: false, version, ..this };
        let generation = world.slot(server, line).copy.map_or(1, |copy| copy.generation);
        let truth = world.truth_mut(generation, line, page);
        (truth.value, truth.link) = (0, Link::Free);
        self.store(world, server, (line, page), new);
    }

    /// The lines of the allocation at the start.
    fn allocation(&self) -> impl Iterator<Item = u8> + use<> {
        0..index(self.allocated.div_ceil(self.pages))
    }

    fn is_leased(world: &World, server: u8, line: u8) -> bool {
        world.slot(server, line).leases.iter().any(Option::is_some)
    }

    /// Why a server does not free the allocation: the home, or the server of the first page if the home has lost it.
    pub(super) fn judge_delete(&self, world: &World, server: u8) -> Option<Answer> {
        let is_leased = |line| Self::is_leased(world, server, line);
        let is_busy = world.server(server).freeing.is_some() || self.allocation().any(is_leased);
        let is_freed = server == HOME && world.is_freed;
        match () {
            () if is_freed => Some(Answer::NotAllocated),
            () => is_busy.then_some(Answer::Busy),
        }
    }

    /// DELETE of the allocation.
    pub(super) fn delete(&self, world: &mut World, server: u8, request: Request) -> Option<Answer> {
        let key = request.client * 8 + request.op;
        let is_here = |line| world.served(server, line, 1).is_some();
        if self.allocation().all(is_here) || self.has(Mutant::DeleteOfPart) {
            self.free_allocation(world, server, key);
            return Some(Answer::Done);
        }
        // The decision comes first, and outlives the process.
        world.server_mut(server).freeing = Some(Freeing { key, freed: 0 });
        Some(Answer::Nothing)
    }

    /// The server that frees an allocation of which parts are elsewhere.
    fn who_frees(&self, world: &World) -> Option<u8> {
        (0..index(SERVERS)).find(|server| world.server(*server).freeing.is_some())
    }

    /// The server of a line frees its part for the one that has decided it, which may not hear of it.
    pub(super) fn free_part(&self, world: &mut World, line: u8, is_heard: bool) -> Option<()> {
        let decided = self.who_frees(world)?;
        // From the end on: whoever has the first page can go on.
        let is_behind = |other: &u8| *other > line;
        let is_done = |other: u8| self.needs_no_freeing(world, decided, other);
        let is_next = self.allocation().filter(is_behind).all(is_done);
        if !is_next && !self.has(Mutant::FirstPartFirst) {
            return None;
        }
        let holder = self.holders(world, line).find(|holder| *holder != decided)?;
        if Self::is_leased(world, holder, line) && !self.has(Mutant::LeasedPartFreed) {
            return None;
        }
        let bit = 1 << line;
        let is_known = world.server(decided).freeing?.freed & bit != 0;
        let is_free = !self.free_line(world, holder, line);
        // Asking again changes nothing.
        if is_known || is_free && !is_heard {
            return None;
        }
        if is_heard {
            world.server_mut(decided).freeing.as_mut()?.freed |= bit;
        } else {
            world.faults.losses = world.faults.losses.checked_sub(1)?;
        }
        Some(())
    }

    /// Whether who has decided it need not have a line's part freed.
    fn needs_no_freeing(&self, world: &World, decided: u8, line: u8) -> bool {
        let is_lost = world.forwards[usize::from(line)] == Forward::Gone;
        let is_freed = world.server(decided).freeing.is_some_and(|of| of.freed & (1 << line) != 0);
        let is_here = world.served(decided, line, 1).is_some();
        is_here || is_freed || is_lost && !self.has(Mutant::LostPartAwaited)
    }

    /// Frees the pages of the allocation that are in a line here; returns whether there were any.
    fn free_line(&self, world: &mut World, server: u8, line: u8) -> bool {
        let mut is_any = false;
        for page in self.page_numbers() {
            let Some(copy) = world.served(server, line, 1) else { continue };
            let this = copy.pages[usize::from(page)];
            let is_part = usize::from(line) * self.pages + usize::from(page) < self.allocated;
            if is_part && this.link != Link::Free && this.tag == super::FIRST_TAG {
                self.free(world, server, (line, page), this);
                is_any = true;
            }
        }
        is_any
    }

    fn free_allocation(&self, world: &mut World, server: u8, key: u8) {
        world.witness.is_twice |= world.applied & (1 << key) != 0;
        world.applied |= 1 << key;
        for line in self.allocation() {
            self.free_line(world, server, line);
            if world.forwards[usize::from(line)] == Forward::Gone {
                for page in self.page_numbers() {
                    world.truth_mut(1, line, page).link = Link::Free;
                }
            }
        }
        world.is_freed |= server == HOME;
    }

    /// All other parts are free: who has decided it frees its own.
    pub(super) fn free_all(&self, world: &mut World) -> Option<()> {
        let decided = self.who_frees(world)?;
        let Freeing { key, .. } = world.server(decided).freeing?;
        let is_done = |line: u8| self.needs_no_freeing(world, decided, line);
        let is_own_leased = |line: u8| Self::is_leased(world, decided, line);
        if !self.allocation().all(is_done) || self.allocation().any(is_own_leased) {
            return None;
        }
        world.server_mut(decided).freeing = None;
        self.free_allocation(world, decided, key);
        let client = usize::from(key / 8);
        if let Some(session) = &mut world.server_mut(decided).sessions[client] {
            session.answer = Some(Answer::Done);
        }
        Some(())
    }

    /// Whether a page is allocated, as its client knows.
    pub(super) fn is_allocated(&self, world: &mut World, pointer: Option<Pointer>) -> bool {
        let Some(Pointer { line, page, generation, tag }) = pointer else { return false };
        let truth = world.truth_mut(generation, line, page);
        truth.tag == tag && truth.link != Link::Free
    }

    /// Whether all of the allocation at the start is allocated, or nothing, except while it is being freed. What was lost
    /// with a server does not count. If that server was freeing it, some first pages may be left.
    pub(super) fn is_whole(&self, world: &World) -> bool {
        if self.who_frees(world).is_some() {
            return true;
        }
        let kept = world.truth[0].iter().zip(world.is_lost).filter(|(_, is_lost)| !is_lost);
        let of_line = |(line, _)| -> &[Truth; PAGES] { line };
        let lines = kept.map(of_line).flat_map(|line| line.iter().take(self.pages));
        let mut pages = lines
            .take(self.allocated)
            .map(|truth| truth.tag == super::FIRST_TAG && truth.link != Link::Free);
        // Who freed it has lost that it did. The first pages are there, so it can be freed again.
        let is_left = world.is_decision_lost && pages.clone().is_sorted_by(|a, b| a >= b);
        let first = pages.next();
        is_left || pages.all(|page| Some(page) == first)
    }
}
