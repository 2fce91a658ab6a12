//! The server: it takes one request at a time, decides, and then does one store after the other.

use std::iter;

use super::{
    Mutant, Op, PAGES, Scenario,
    world::{
        Change, Client, Half, Holds, Kind, NOBODY, Part, Request, Role, Session, Slot, Waits, Word,
        World, index,
    },
};

/// What the memory of another line holds.
const OTHERS: Half = 99;

/// One step of the server: a store to shared memory, a reply, or a part of the takeover.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Store {
    /// The redo record is complete: from now on the change happens.
    Begin {
        change: Change,
        by: u8,
        is_kept: bool,
    },
    End,
    Odd(usize),
    Even(usize),
    Half {
        page: usize,
        half: usize,
        value: Half,
    },
    Holds {
        page: usize,
        holds: Holds,
    },
    Kind {
        page: usize,
        kind: Kind,
    },
    Tag {
        page: usize,
        tag: u8,
    },
    Free {
        page: usize,
    },
    Close,
    /// A client writes to the first page, which another server serves now.
    WrittenElsewhere,
    Complete {
        tag: u8,
    },
    Mark {
        page: usize,
        is_leased: bool,
    },
    /// The line is another server's, or this one's again: the record.
    Given {
        is_given: bool,
    },
    /// The mark follows the record.
    MarkElsewhere {
        page: usize,
    },
    /// The line has other memory.
    Reused {
        page: usize,
    },
    /// The place has another line: its name, and the record that it is served here.
    Name {
        is_other: bool,
    },
    OtherHere {
        is_here: bool,
    },
    /// The place has another frame.
    Frame(usize),

    Hide {
        slot: usize,
    },
    Word {
        slot: usize,
    },
    Facts {
        slot: usize,
        client: u8,
    },
    Id {
        slot: usize,
        id: u8,
    },
    /// The session's end is known.
    Ended {
        id: u8,
    },
    Executing {
        slot: usize,
    },
    /// The low water is loaded apart from the mark, and the request judged.
    Judge {
        request: Request,
    },
    Leave {
        slot: usize,
        low: u8,
    },
    Reply {
        request: Request,
        answer: Answer,
    },
    Opened {
        client: u8,
        id: u8,
    },
    OpenRefused {
        client: u8,
    },

    // The takeover.
    Detach,
    AllOdd,
    Repeat,
    AllEven,
    FreeIncomplete,
    Forget,
    Join,
    Attach,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Answer {
    Done,
    Contents([Half; 2]),
    /// It changed nothing.
    Refused,
    Expired,
    NoSession,
    /// The page does not have the pointer's tag.
    Gone,
}

impl Scenario {
    /// The server begins to execute a request.
    pub(super) fn take(&self, world: &mut World, request: Request) -> Option<()> {
        let server = world.server.as_ref().filter(|server| server.todo.is_empty())?;
        let found = server
            .sessions
            .iter()
            .find(|s| (s.id, s.client) == (request.session, self.holder(request.client)));
        let Some(&Session { slot, .. }) = found else {
            let reply = Store::Reply { request, answer: Answer::NoSession };
            world.server.as_mut()?.todo.push(reply);
            return Some(());
        };
        let low = world.slots[slot].word.low;
        let mark = Store::Executing { slot };
        match () {
            () if self.has(Mutant::CheckThenEnter)
                || self.has(Mutant::EnterInTwo) && self.has_buffer =>
            {
                world.server.as_mut()?.todo.push(mark);
                self.judge(world, request, low)
            }
            () if self.has(Mutant::EnterInTwo) => {
                world.server.as_mut()?.todo.extend([mark, Store::Judge { request }]);
                Some(())
            }
            () => {
                world.slots[slot].word.is_executing = true;
                self.judge(world, request, low)
            }
        }
    }

    /// Decides what to do with a request of a session; `low` is the low water to which readers raised the session's.
    fn judge(&self, world: &mut World, request: Request, low: u8) -> Option<()> {
        let op = World::op(self, request.client, request.op);
        let server = world.server.as_mut()?;
        let session = server.sessions.iter_mut().find(|s| s.id == request.session)?;
        let own = session.low;
        session.low = own.max(request.low);
        if !self.has(Mutant::LowWaterUnmerged) && !self.has(Mutant::LeaveForgets) {
            session.low = session.low.max(low);
        }
        let is_expired =
            request.number < session.low || self.has(Mutant::LeaveForgets) && request.number < low;
        let bit = 1 << request.number;
        let is_done = session.done & bit != 0;
        if !is_expired {
            session.done |= bit;
        }
        let leave = Store::Leave { slot: session.slot, low: session.low };
        let answer = match () {
            () if is_expired => Answer::Expired,
            // Replies arrive or their server is killed, so nobody waits for a recorded one.
            () if is_done => Answer::Done,
            () if !world.is_open || world.is_given => Answer::Refused,
            () => self.execute(world, request, op),
        };
        let server = world.server.as_mut()?;
        let mut last = vec![leave];
        if !is_done || is_expired {
            last.push(Store::Reply { request, answer });
        }
        if self.has(Mutant::MarkSetLate) && op == Op::Update {
            let marks = server.todo.iter().position(|store| matches!(store, Store::Mark { .. }));
            let late = server.todo.split_off(marks.unwrap_or(server.todo.len()));
            last.extend(late);
        }
        server.todo.extend(last);
        Some(())
    }

    /// The stores of a request that is executed for the first time.
    fn execute(&self, world: &mut World, request: Request, op: Op) -> Answer {
        let by = World::key(request.client, request.op);
        let is_leased = world.server.as_ref().is_some_and(|server| server.lease.is_some());
        let is_owner = world.server.as_ref().is_some_and(|s| s.lease == Some(request.client));
        let head = world.pages[0];
        let has = |page: usize, tag: u8| {
            let page = world.pages[page];
            page.kind.role != Role::Free && page.tag == tag
        };
        // Different for each request.
        let value = 100 + request.client * 40 + request.op * 4;
        let part = |page: usize, new: [Option<Half>; 2]| {
            let before = world.pages[page].kind.holds;
            Some(Part { page, new, before })
        };
        let mut parts = [None; PAGES];
        match op {
            Op::Read(page, tag) => {
                if !has(page, tag) {
                    return Answer::Gone;
                }
                // Only who allocates it can complete it, and may lose it: what others see does not count.
                if is_leased || !head.kind.is_complete {
                    return Answer::Refused;
                }
                return Answer::Contents(world.pages[page].served(world.frame));
            }
            Op::Write(page, tag) | Op::WritePart(page, tag) | Op::Add(page, tag) => {
                if !has(page, tag) || is_leased {
                    return Answer::Refused;
                }
                parts[page] = match op {
                    Op::Add(..) => {
                        part(page, [Some(world.pages[page].served(world.frame)[0] + 1), None])
                    }
                    Op::WritePart(..) => part(page, [Some(value), None]),
                    _ => part(page, [Some(value); 2]),
                };
            }
            Op::Commit => {
                if !is_owner {
                    return Answer::Refused;
                }
                for (page, entry) in parts.iter_mut().enumerate().take(self.pages) {
                    *entry = part(page, [Some(value); 2]);
                }
            }
            Op::Update => {
                if is_leased || head.kind.role == Role::Free {
                    return Answer::Refused;
                }
                let marks = (0..self.pages).map(|page| Store::Mark { page, is_leased: true });
                if let Some(server) = &mut world.server {
                    server.lease = Some(request.client);
                    server.todo.extend(marks);
                }
                return Answer::Done;
            }
            Op::Create | Op::Provide => {
                if head.kind.role != Role::Free {
                    return Answer::Refused;
                }
                world.tags += 1;
                let tag = world.tags;
                let mut stores =
                    vec![Store::Begin { change: Change::Create(tag), by, is_kept: true }];
                stores.extend(self.create(world, tag));
                stores.push(Store::End);
                if op == Op::Create {
                    stores.push(Store::Complete { tag });
                }
                if let Some(server) = &mut world.server {
                    server.todo.extend(stores);
                }
                return Answer::Done;
            }
            Op::Confirm(tag) => {
                if !has(0, tag) {
                    return Answer::Refused;
                }
                if let Some(server) = &mut world.server {
                    server.todo.push(Store::Complete { tag });
                }
                return Answer::Done;
            }
            Op::Delete(tag) => {
                if !has(0, tag) || is_leased {
                    return Answer::Refused;
                }
                let is_kept = !self.has(Mutant::HeadLastWithoutRedo);
                let mut stores = vec![Store::Begin { change: Change::Delete, by, is_kept }];
                stores.extend(self.delete());
                stores.push(Store::End);
                if let Some(server) = &mut world.server {
                    server.todo.extend(stores);
                }
                return Answer::Done;
            }
        }
        let is_kept = op != Op::Commit || !self.has(Mutant::CommitWithoutRedo);
        let mut stores = vec![Store::Begin { change: Change::Pages(parts), by, is_kept }];
        for part in parts.iter().flatten() {
            stores.extend(self.write(part));
        }
        stores.push(Store::End);
        if op == Op::Commit {
            let mut marks: Vec<_> =
                (0..self.pages).map(|page| Store::Mark { page, is_leased: false }).collect();
            if self.has(Mutant::MarkClearedEarly) {
                let last = stores.iter().rposition(|store| matches!(store, Store::Odd(_)));
                let rest = stores.split_off(last.unwrap_or(0));
                stores.append(&mut marks);
                stores.extend(rest);
            }
            stores.extend(marks);
        }
        if let Some(server) = &mut world.server {
            if op == Op::Commit {
                server.lease = None;
            }
            server.todo.extend(stores);
        }
        Answer::Done
    }

    /// The stores that change the contents of a page.
    fn write(&self, part: &Part) -> Vec<Store> {
        let page = part.page;
        let written = Store::Holds { page, holds: Holds::Written };
        let mut stores = self.contents(part);
        if self.has(Mutant::StateBeforeSequence) {
            stores.retain(|store| *store != written);
        }
        stores.insert(0, Store::Odd(page));
        stores.push(Store::Even(page));
        if self.has(Mutant::OddLate) {
            stores.swap(0, 1);
        }
        if self.has(Mutant::EvenEarly) {
            let last = stores.iter().rposition(|store| matches!(store, Store::Half { .. }));
            stores[last.unwrap_or(0)..].rotate_right(1);
        }
        if self.has(Mutant::WriteUnsequenced) {
            stores.retain(|store| !matches!(store, Store::Odd(_) | Store::Even(_)));
        }
        if self.has(Mutant::StateBeforeSequence) {
            stores.insert(0, written);
        }
        stores
    }

    /// The same, without the page's sequence: also what a takeover repeats.
    pub(super) fn contents(&self, part: &Part) -> Vec<Store> {
        let page = part.page;
        let written = Store::Holds { page, holds: Holds::Written };
        let bytes = [0, 1].into_iter().filter_map(|half| {
            let cleared = (part.before == Holds::Leftover).then_some(0);
            let value = part.new[half].or(cleared)?;
            Some(Store::Half { page, half, value })
        });
        let is_first = self.has(Mutant::StateFirst) || self.has(Mutant::StateFirstRedoTakesKind);
        let mut stores: Vec<_> = bytes.collect();
        stores.insert(if is_first { 0 } else { stores.len() }, written);
        stores
    }

    /// The stores that allocate all pages: the head last.
    pub(super) fn create(&self, world: &World, tag: u8) -> Vec<Store> {
        let mut stores = Vec::new();
        for at in 0..self.pages {
            let is_head_first = self.has(Mutant::CompleteApartHeadFirst);
            let page = if is_head_first { at } else { self.pages - 1 - at };
            let before = world.pages[page].kind;
            let holds = match before.holds {
                Holds::Zeros => Holds::Zeros,
                Holds::Leftover | Holds::Written => Holds::Leftover,
            };
            let role = if page == 0 { Role::Head } else { Role::Body };
            let kind = Kind { role, holds, is_complete: false };
            let is_apart = self.has(Mutant::CompleteApart) || is_head_first;
            let is_sequenced = !self.has(Mutant::CreateUnsequenced);
            stores.extend(is_sequenced.then_some(Store::Odd(page)));
            if is_apart {
                let is_complete = before.is_complete;
                stores.push(Store::Kind { page, kind: Kind { is_complete, ..kind } });
            } else {
                stores.push(Store::Kind { page, kind });
            }
            stores.push(Store::Tag { page, tag });
            if is_apart {
                stores.push(Store::Kind { page, kind });
            }
            stores.extend(is_sequenced.then_some(Store::Even(page)));
        }
        stores
    }

    /// The stores that free all pages: the head first.
    pub(super) fn delete(&self) -> Vec<Store> {
        let is_head_last = self.has(Mutant::HeadLast) || self.has(Mutant::HeadLastWithoutRedo);
        let mut stores = Vec::new();
        for at in 0..self.pages {
            let page = if is_head_last { self.pages - 1 - at } else { at };
            stores.extend([Store::Odd(page), Store::Free { page }, Store::Even(page)]);
        }
        if self.has(Mutant::DeleteUnsequenced) {
            stores.retain(|store| matches!(store, Store::Free { .. }));
        }
        stores
    }

    /// The server opens a session.
    pub(super) fn open(&self, world: &mut World, client: u8) -> Option<()> {
        let spec = &self.clients[usize::from(client)];
        let others_end = world.ends > 0;
        let is_over = |client: u8| self.is_over(&world.clients, client);
        let over: Vec<_> = (0..index(world.clients.len())).map(is_over).collect();
        let server = world.server.as_mut().filter(|server| server.todo.is_empty())?;
        let fence = &mut world.fences[usize::from(spec.node)];
        if spec.incarnation < *fence {
            server.todo.push(Store::OpenRefused { client });
            return Some(());
        }
        *fence = spec.incarnation;
        let is_older = |session: &Session| {
            let other = &self.clients[usize::from(session.client)];
            other.node == spec.node && other.incarnation < spec.incarnation
        };
        let (older, others) = server.sessions.iter().copied().partition::<Vec<_>, _>(is_older);
        server.sessions = others;
        let mut ended = older.clone();
        let taken = |sessions: &[Session], slot| sessions.iter().any(|s| s.slot == slot);
        let free = (0..self.slots).rev().find(|slot| !taken(&server.sessions, *slot));
        // Sessions that nobody uses any more are replaced first.
        let unused = server.sessions.iter().find(|s| over[usize::from(s.client)]).map(|s| s.slot);
        let slot = free.or(unused).unwrap_or(0);
        if free.is_none() {
            if unused.is_none() && !others_end {
                return None;
            }
            world.ends -= u8::from(unused.is_none());
            let (replaced, kept) =
                server.sessions.iter().copied().partition::<Vec<_>, _>(|s| s.slot == slot);
            server.sessions = kept;
            ended.extend(replaced);
        }
        let (slots, slot_number) = (index(self.slots), index(slot));
        while world.ids % slots != slot_number {
            world.ids += 1;
        }
        world.ids += 1;
        let id = world.ids;
        server.sessions.push(Session { id, client, slot, low: 1, done: 0 });
        let hide: Vec<_> = older.iter().map(|session| Store::Hide { slot: session.slot }).collect();
        let todo = &mut server.todo;
        if !self.has(Mutant::OldIncarnationKept) && !self.has(Mutant::HiddenAfterAnswer) {
            todo.extend(&hide);
        }
        let mut shown = [
            Store::Hide { slot },
            Store::Word { slot },
            Store::Facts { slot, client },
            Store::Id { slot, id },
        ];
        if self.has(Mutant::IdFirst) {
            shown[1..].rotate_right(1);
        }
        todo.extend(shown);
        todo.extend(ended.iter().map(|session| Store::Ended { id: session.id }));
        todo.push(Store::Opened { client, id });
        if self.has(Mutant::HiddenAfterAnswer) {
            todo.extend(hide.iter().filter(|store| **store != Store::Hide { slot }));
        }
        Some(())
    }

    /// A session of the server ends because it is idle.
    pub(super) fn end_session(&self, world: &mut World, slot: usize) -> Option<()> {
        let server = world.server.as_mut().filter(|server| server.todo.is_empty())?;
        let at = server.sessions.iter().position(|session| session.slot == slot)?;
        world.ends = world.ends.checked_sub(1)?;
        let session = server.sessions.remove(at);
        if !self.has(Mutant::EndedKept) {
            server.todo.push(Store::Hide { slot });
        }
        server.todo.push(Store::Ended { id: session.id });
        Some(())
    }

    /// The server zeroes a free page while it has nothing else to do.
    pub(super) fn clear(&self, world: &mut World, page: usize) -> Option<()> {
        let server = world.server.as_mut().filter(|server| server.todo.is_empty())?;
        let kind = world.pages[page].kind;
        if kind.role != Role::Free || kind.holds == Holds::Zeros {
            return None;
        }
        world.clears = world.clears.checked_sub(1)?;
        server.todo.extend([
            Store::Half { page, half: 0, value: 0 },
            Store::Half { page, half: 1, value: 0 },
            Store::Holds { page, holds: Holds::Zeros },
        ]);
        Some(())
    }

    /// The server loses the authority over the shard to another one.
    pub(super) fn hand_over(&self, world: &mut World) -> Option<()> {
        let server = world.server.as_mut().filter(|server| server.todo.is_empty())?;
        world.closes = world.closes.checked_sub(1)?;
        let mut stores = [Store::Close, Store::WrittenElsewhere];
        if self.has(Mutant::ClosedLate) {
            stores.reverse();
        }
        server.todo.extend(stores);
        Some(())
    }

    /// The line moves; then its memory is used for another line; then it comes back with what the other server has.
    pub(super) fn move_line(&self, world: &mut World) -> Option<()> {
        let server = world.server.as_mut().filter(|server| server.todo.is_empty())?;
        if server.lease.is_some() {
            return None;
        }
        world.moves = world.moves.checked_sub(1)?;
        let pages = 0..self.pages;
        let marks = |page| Store::MarkElsewhere { page };
        let stores: Vec<Store> = match (world.is_given, world.is_reused) {
            (false, _) => {
                let lease =
                    |is_leased| pages.clone().map(move |page| Store::Mark { page, is_leased });
                let marks = pages.clone().map(marks).filter(|_| !self.has(Mutant::GivenUnmarked));
                let given = iter::once(Store::Given { is_given: true });
                lease(true).chain(given).chain(marks).chain(lease(false)).collect()
            }
            (true, false) if self.is_adopted => {
                world.is_reused = true;
                let here = Store::OtherHere { is_here: true };
                self.placed([OTHERS; 2], 0, (true, here))
            }
            (true, true) if self.is_adopted => {
                world.is_reused = false;
                let last = world.record.moments[0].last().map_or([0; 2], |moment| moment.halves);
                let mut stores = vec![Store::OtherHere { is_here: false }, marks(0)];
                stores.extend(self.placed(last, 1, (false, Store::Given { is_given: false })));
                stores
            }
            (true, false) => {
                world.is_reused = true;
                let other = |page| [0, 1].map(|half| Store::Half { page, half, value: OTHERS });
                let reused = pages.clone().map(|page| Store::Reused { page });
                let reused = reused.filter(|_| !self.has(Mutant::ReusedUnsequenced));
                reused.chain(pages.flat_map(other)).collect()
            }
            (true, true) => {
                world.is_reused = false;
                let moments = &world.record.moments;
                let stage = |page: usize| {
                    let last = moments[page].last().map_or([0; 2], |moment| moment.halves);
                    let [first, second] =
                        [0, 1].map(|half| Store::Half { page, half, value: last[half] });
                    [first, second, Store::Holds { page, holds: Holds::Written }]
                };
                let here = iter::once(Store::Given { is_given: false });
                let here = here.chain(pages.clone().map(marks));
                let staged = pages.flat_map(stage);
                if self.has(Mutant::HereEarly) {
                    here.chain(staged).collect()
                } else {
                    staged.chain(here).collect()
                }
            }
        };
        server.todo.extend(stores);
        Some(())
    }

    /// The stores with which a place gets a line, its page and its memory.
    fn placed(
        &self,
        bytes: [Half; 2],
        frame: usize,
        (is_other, here): (bool, Store),
    ) -> Vec<Store> {
        let page = 0;
        let mut stores = vec![Store::Reused { page }, Store::Frame(frame)];
        stores.extend([0, 1].map(|half| Store::Half { page, half, value: bytes[half] }));
        stores.push(Store::Holds { page, holds: Holds::Written });
        let mut last = [Store::Name { is_other }, here, Store::MarkElsewhere { page }];
        if self.has(Mutant::NamedLate) {
            last.rotate_left(1);
        }
        stores.extend(last);
        stores
    }

    /// A client writes to the first page of the line that moved; the server has answered that it is the other one's.
    pub(super) fn write_moved(&self, world: &mut World) -> Option<()> {
        let is_answered = world.server.as_ref().is_some_and(|server| server.todo.is_empty());
        if !is_answered || !world.is_given {
            return None;
        }
        world.writes_moved = world.writes_moved.checked_sub(1)?;
        self.write_elsewhere(world);
        Some(())
    }

    fn write_elsewhere(&self, world: &mut World) {
        let part = Part { page: 0, new: [Some(20); 2], before: Holds::Written };
        world.happens(self, &Change::Pages([Some(part), None]), NOBODY);
        world.know(0, index(world.record.moments[0].len() - 1));
    }

    /// The server's next step.
    pub(super) fn serve(&self, world: &mut World) -> Option<()> {
        let server = world.server.as_mut()?;
        if server.todo.is_empty() {
            return None;
        }
        let store = server.todo.remove(0);
        match store {
            Store::Begin { change, by, is_kept } => {
                if is_kept {
                    world.redo = Some(change);
                }
                world.happens(self, &change, by);
            }
            Store::End => world.redo = None,
            Store::Odd(page) | Store::Even(page) => world.pages[page].sequence += 1,
            Store::Half { page, half, value } => {
                world.pages[page].frames[world.frame][half] = value;
            }
            Store::Holds { page, holds } => world.pages[page].kind.holds = holds,
            Store::Kind { page, kind } => world.pages[page].kind = kind,
            Store::Tag { page, tag } => world.pages[page].tag = tag,
            Store::Free { page } => world.pages[page].kind.role = Role::Free,
            Store::Close => world.is_open = false,
            Store::WrittenElsewhere => self.write_elsewhere(world),
            Store::Complete { tag } => {
                world.pages[0].kind.is_complete = true;
                world.record.complete |= 1 << tag;
            }
            Store::Mark { page, is_leased } => world.pages[page].is_leased = is_leased,
            Store::Given { is_given } => world.is_given = is_given,
            Store::MarkElsewhere { page } => {
                world.pages[page].is_elsewhere = world.is_given && !world.is_other_here;
            }
            Store::Name { is_other } => world.is_named_other = is_other,
            Store::OtherHere { is_here } => world.is_other_here = is_here,
            Store::Frame(frame) => world.frame = frame,
            Store::Reused { page } => {
                world.pages[page].sequence += 2;
                world.pages[page].kind.holds = Holds::Leftover;
            }
            Store::Hide { slot } => world.slots[slot].id = 0,
            Store::Word { slot } => {
                let word = &mut world.slots[slot].word;
                let uses = word.uses + u8::from(!self.has(Mutant::UseNotCounted));
                *word = Word { uses, is_executing: false, low: 1 };
            }
            Store::Facts { slot, client } => world.slots[slot].client = client,
            Store::Id { slot, id } => world.slots[slot].id = id,
            Store::Ended { id } => world.record.ended |= 1 << id,
            Store::Executing { slot } => world.slots[slot].word.is_executing = true,
            Store::Judge { request } => {
                let low = world.slots[usize::from(self.slot_of(request.session))].word.low;
                self.judge(world, request, low)?;
            }
            Store::Leave { slot, low } => {
                let Slot { word, .. } = &mut world.slots[slot];
                *word = Word { is_executing: false, low, ..*word };
            }
            Store::Reply { request, answer } => self.receive(world, request, answer),
            Store::Opened { client, id } => {
                let incarnation = world.incarnation;
                let this = &mut world.clients[usize::from(client)];
                if this.waits == Waits::Open {
                    // The server that knew the last session executed what it was asked for, or it did not.
                    let is_unknown = this.is_repeated && this.incarnation != incarnation;
                    *this = Client {
                        waits: Waits::Nothing,
                        session: id,
                        number: 0,
                        last_number: 0,
                        incarnation,
                        ..this.clone()
                    };
                    // The last session ended, and with it whatever was given up in it.
                    this.given_up.iter_mut().for_each(|(_, number)| *number = 0);
                    let op = self.clients[usize::from(client)].ops.get(usize::from(this.next));
                    if is_unknown && !matches!(op, None | Some(Op::Read(..))) {
                        this.gives_up();
                    }
                }
            }
            Store::OpenRefused { client } => {
                world.clients[usize::from(client)].waits = Waits::Over;
            }
            takeover => self.recover(world, takeover)?,
        }
        Some(())
    }

    /// A client gets a reply.
    fn receive(&self, world: &mut World, request: Request, answer: Answer) {
        if !world.is_awaited(&request) {
            return;
        }
        let Request { client, op, .. } = request;
        let key = World::key(client, op);
        match (World::op(self, client, op), answer) {
            (_, Answer::NoSession) => {
                let this = &mut world.clients[usize::from(client)];
                (this.session, this.waits, this.is_repeated) = (0, Waits::Nothing, true);
                return;
            }
            (_, Answer::Expired) => world.witness.is_refused = true,
            (Op::Read(page, tag), Answer::Contents(halves)) => {
                world.learn(self, client, (page, tag), halves, false);
            }
            (Op::Read(page, tag), Answer::Gone) => world.learn_gone(client, (page, tag)),
            (Op::Update, Answer::Done) => {
                world.record.leases += 1;
                world.record.lease = world.record.leases;
            }
            // Who allocated it knows that it may disappear.
            (Op::Provide, _) | (_, Answer::Refused) => {}
            (Op::Confirm(tag), _) => {
                for page in 0..self.pages {
                    let moment = world.record.moments[page].iter().position(|m| m.tag == tag);
                    world.know(page, index(moment.unwrap_or(0)));
                }
            }
            _ => {
                for page in 0..self.pages {
                    let moment = world.record.moments[page].iter().position(|m| m.by == key);
                    if let Some(moment) = moment {
                        world.know(page, index(moment));
                    }
                }
            }
        }
        world.clients[usize::from(client)].ends_op();
    }
}

/// The stores of a takeover that free an allocation.
pub(super) const fn freeing() -> Store {
    Store::Begin { change: Change::Delete, by: NOBODY, is_kept: true }
}
