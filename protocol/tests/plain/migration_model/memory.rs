//! Pages are allocated and freed.

use super::{
    Mutant, SERVERS, Scenario,
    lines::{Copy, LEFTOVER, Link, Mark, Page, Slot},
    messages::{Answer, Message, Pointer, Request},
    world::{Forward, HOME, World, index},
};

/// The mark of a line that goes back to the home without contents.
const BACK: u8 = u8::MAX;

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

    /// Why a server that serves the first page does not free the allocation.
    pub(super) fn judge_delete(&self, world: &World, server: u8) -> Option<Answer> {
        let is_leased = |line: u8| {
            let mut leases = world.slot(server, line).leases.iter();
            leases.any(Option::is_some)
        };
        let is_here = |line| world.served(server, line, 1).is_some();
        if self.allocation().any(is_leased) {
            return Some(Answer::Busy);
        }
        (server != HOME && !self.allocation().all(is_here)).then_some(Answer::AskHome)
    }

    /// DELETE of the allocation.
    pub(super) fn delete(&self, world: &mut World, server: u8, request: Request) -> Option<Answer> {
        let is_here = |line| world.served(server, line, 1).is_some();
        if self.allocation().all(is_here) || self.has(Mutant::DeleteOfPart) {
            self.free_allocation(world, server, request.client * 8 + request.op);
            return Some(Answer::Done);
        }
        // The decision comes first, and outlives the process: lines come back without contents.
        world.server_mut(server).dying = Some(request.client * 8 + request.op);
        Some(Answer::Nothing)
    }

    fn free_allocation(&self, world: &mut World, server: u8, key: u8) {
        world.witness.is_twice |= world.applied & (1 << key) != 0;
        world.applied |= 1 << key;
        for line in self.allocation() {
            for page in self.page_numbers() {
                let Some(copy) = world.served(server, line, 1) else {
                    if world.forwards[usize::from(line)] == Forward::Gone {
                        world.truth_mut(1, line, page).link = Link::Free;
                    }
                    continue;
                };
                let this = copy.pages[usize::from(page)];
                if this.link != Link::Free && this.tag == super::FIRST_TAG {
                    self.free(world, server, (line, page), this);
                }
            }
        }
    }

    /// A server gives a line of an allocation that is freed back to the home.
    pub(super) fn give_back(&self, world: &mut World, line: u8) -> Option<()> {
        world.server(HOME).dying?;
        let holder = self.holders(world, line).find(|server| *server != HOME)?;
        let slot = world.slot_mut(holder, line);
        if slot.leases.iter().any(Option::is_some) {
            return None;
        }
        slot.mark = Some(Mark { migration: BACK, taker: HOME, incarnation: 0, session: 0 });
        Some(())
    }

    /// The home hears that a line is its own again.
    pub(super) fn hear_back(&self, world: &mut World, line: u8) -> Option<()> {
        world.server(HOME).dying?;
        let holder = (1..index(SERVERS)).find(|server| is_back(world, *server, line))?;
        let copy = world.slot(holder, line).copy?;
        let floor = world.server(holder).epochs.max(copy.floor);
        *world.slot_mut(holder, line) = Slot::default();
        self.release_frames(world, holder, line);
        let blank = |page: Page| Page { value: LEFTOVER, is_written: false, ..page };
        let copy = Copy { floor, pages: copy.pages.map(blank), ..copy };
        self.raise_epochs(world, HOME, floor);
        *world.slot_mut(HOME, line) = Slot { copy: Some(copy), ..Slot::default() };
        world.forwards[usize::from(line)] = Forward::Own;
        Some(())
    }

    /// Whether a line was given back, and the home has not heard it.
    pub(super) fn is_going_back(&self, world: &World, line: u8) -> bool {
        (1..index(SERVERS)).any(|server| is_back(world, server, line))
    }

    /// All lines are back: the allocation is freed at one moment.
    pub(super) fn free_all(&self, world: &mut World) -> Option<()> {
        let key = world.server(HOME).dying?;
        let is_back = |line: u8| {
            world.served(HOME, line, 1).is_some()
                || world.forwards[usize::from(line)] == Forward::Gone
        };
        if !self.allocation().all(is_back) {
            return None;
        }
        world.server_mut(HOME).dying = None;
        self.free_allocation(world, HOME, key);
        let client = usize::from(key / 8);
        if let Some(session) = &mut world.server_mut(HOME).sessions[client] {
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

    /// Whether all of the allocation at the start is allocated, or nothing.
    pub(super) fn is_whole(&self, world: &World) -> bool {
        let lines = world.truth[0].iter().flat_map(|line| line.iter().take(self.pages));
        let mut pages = lines
            .take(self.allocated)
            .map(|truth| truth.tag == super::FIRST_TAG && truth.link != Link::Free);
        let first = pages.next();
        pages.all(|page| Some(page) == first)
    }
}

fn is_back(world: &World, server: u8, line: u8) -> bool {
    world.slot(server, line).mark.is_some_and(|mark| mark.migration == BACK)
}
