//! The taker of a migration: takes lines from their server, and serves them (`docs/migration.md`).
//!
//! A line goes through TAKE, READs of what was written, staging in the store, and KEEP. Several lines are on their way
//! at once. A line that is staged is *in doubt* until its giver said whose it is, for as long as that takes: neither time,
//! nor the end of this process, nor the controller decide it. Only the loss of the giver's memory does.

mod pace;
#[cfg(test)]
mod tests;

use core::{ops::Range, time::Duration};
use std::collections::BTreeMap;

use bluebridge_wire::{
    ArenaGeneration, Fence, LeaseEnd, Location, NodeId, Pointer, Space, Status, Tag,
    address::{LINE_PAGES, PAGE_BYTES, PAGE_SHIFT},
    line::{LINE_RECORD_BYTES, LineRecord, PageContents, Part, parse_line},
};

use self::pace::{LINES_MAX, Pace};
use crate::{
    Timestamp,
    requester::{
        Buffers, Completion, Failure, Migration, Operation, OperationId, Output, Requester,
    },
    responder::Responder,
    store::{HomeLine, LineStore, PageCrcs, PageStore, Placed, SHARD_PAGES_MAX, StageError, Taken},
};

const LINE: u64 = LINE_PAGES as u64;

/// Pages that locations name.
const LOCATION_PAGES: u64 = 1 << 36;

/// Lines for which memory is reserved at once, so that neighbours have neighbouring places, and a search for memory is
/// rare.
const BATCH: u32 = 64;

/// The lease of a TAKE, in milliseconds. The line is out of reach for at most so long if this process ends.
const LEASE_MS: u16 = 200;

/// Purposes of operations; from [`READ`] on, by the first page that is read.
const TAKE: u16 = 0;
const KEEP: u16 = 1;
const READ: u16 = 2;

/// How long a TAKE waits: longer than a server's longest lease, after which it is next.
const TAKE_PATIENCE: Duration = Duration::from_secs(30);

/// How long a READ may take: the lease is over then.
const READ_PATIENCE: Duration = Duration::from_millis(200);

/// How long a KEEP may take until it is sent anew.
const KEEP_PATIENCE: Duration = Duration::from_secs(2);

/// How long a line waits after a refusal; doubled each time, up to the second value.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(500));

/// The controller's order to take a range.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Order {
    /// The migration, and who gives.
    pub migration: Migration,
    /// The space of the range's allocations.
    pub space: Space,
    /// The home of the range.
    pub home: NodeId,
    /// The first generation of the home's contents.
    pub generation: ArenaGeneration,
    /// Its pages by the home's numbers; whole lines.
    pub pages: Range<u64>,
    /// The incarnation under which lines are taken, also by a later process that has the memory of the first.
    pub incarnation: u32,
}

/// Pages that are served here.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Row {
    /// Neighbouring pages by the home's numbers; whole lines.
    pub pages: Range<u64>,
    /// The first and the last generation in the pointers to them.
    pub generations: (ArenaGeneration, ArenaGeneration),
}

impl Order {
    fn line_count(&self) -> u32 {
        u32::try_from((self.pages.end - self.pages.start) / LINE).unwrap_or(u32::MAX)
    }

    fn home_line(&self, line: u32) -> HomeLine {
        let first_page = self.pages.start + u64::from(line) * LINE;
        HomeLine { node: self.home, generation: self.generation, first_page }
    }

    /// The number of a line in the range.
    fn number(&self, line: HomeLine) -> Option<u32> {
        let is_of = (line.node, line.generation) == (self.home, self.generation)
            && self.pages.contains(&line.first_page);
        let number = line.first_page.checked_sub(self.pages.start)? / LINE;
        u32::try_from(number).ok().filter(|_| is_of)
    }

    fn pointer(&self, page: u64, generation: ArenaGeneration, tag: Tag) -> Option<Pointer> {
        let location = Location::new(generation, page << PAGE_SHIFT)?;
        Some(Pointer { space: self.space, node: self.home, tag, location })
    }
}

/// Why an order cannot be followed; nothing was reserved.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OrderError {
    /// The range does not consist of whole lines, or is no range of a shard.
    #[error("a range consists of one or more whole lines of 8 pages, all of one shard")]
    Range,
    /// There is not enough memory; free some, or migrate less.
    #[error("{0} lines of 32 KiB are to come, and there is no memory for any of them")]
    NoRoom(u32),
}

/// How far a migration is, in lines.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Progress {
    /// Lines of the range.
    pub all: u32,
    /// Lines that are served here.
    pub here: u32,
    /// Lines that were taken, and are not here or given up yet.
    pub on_their_way: u32,
    /// Those of them that are in doubt.
    pub in_doubt: u32,
    /// Lines that are free as a whole, and stay at home.
    pub free: u32,
    /// Lines that stay with the giver for another reason.
    pub stay: u32,
    /// There is no memory for a further line: no more are taken.
    pub is_full: bool,
    /// Why a line could not be taken the last time, if it had to be tried again.
    pub last_failure: Option<Failure>,
}

/// What a line of the range is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum LineState {
    /// It is the giver's.
    Left,
    /// It is on its way.
    OnItsWay,
    /// It is served here.
    Here,
    /// No page of it is allocated, so it stays at home.
    Free,
    /// It stays the giver's for good.
    Stays,
}

/// What is to be done with a line on its way.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Step {
    /// To be taken when it is time.
    Take,
    /// A TAKE is under way, as this operation.
    Taking(OperationId),
    /// So many READs are under way.
    Reading(u8),
    /// All was read, and is to be staged when allocations of the line have been freed here that were freed elsewhere.
    Stage,
    /// It is in doubt, and to be asked for when it is time.
    Keep,
    /// A KEEP is under way.
    Keeping,
}

/// A line on its way.
struct Slot {
    line: u32,
    step: Step,
    /// When the next step may begin.
    at: Timestamp,
    /// When it was asked for, unless an earlier process did, or somebody else had it then.
    asked_at: Option<Timestamp>,
    pause: Duration,
    /// When its lease may be over.
    leased_until: Timestamp,
    taken: Taken,
    pages: LineRecord,
    /// Those of the bytes that were read.
    crcs: PageCrcs,
    has_failed: bool,
    record: [u8; LINE_RECORD_BYTES],
}

/// How many lines are in each state.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    left: u32,
    on_their_way: u32,
    here: u32,
    free: u32,
    stay: u32,
}

impl Counts {
    const fn of(&mut self, state: LineState) -> &mut u32 {
        match state {
            LineState::Left => &mut self.left,
            LineState::OnItsWay => &mut self.on_their_way,
            LineState::Here => &mut self.here,
            LineState::Free => &mut self.free,
            LineState::Stays => &mut self.stay,
        }
    }
}

/// The taker of one migration. The upper half of its operations' tokens is its number.
pub struct Taker {
    order: Order,
    number: u32,
    /// The range is of this server's own pages.
    is_home: bool,
    /// Places in the store: of lines that are in doubt, and those that are reserved for lines to come.
    places: BTreeMap<u32, u64>,
    lines: Vec<LineState>,
    counts: Counts,
    /// No line before this one is left.
    next: u32,
    slots: Vec<Slot>,
    /// Lines in doubt that have no slot yet.
    doubts: Vec<(u32, Taken)>,
    /// The number of the giver's last fence that is known.
    known: u32,
    /// The generations in the pointers to what is here.
    generations: (ArenaGeneration, ArenaGeneration),
    pace: Pace,
    is_begun: bool,
    is_stopped: bool,
    is_full: bool,
    last_failure: Option<Failure>,
}

impl Taker {
    /// A taker of the lines of a range which are not here yet, to be taken after [`Self::begin`]. Places for them are
    /// reserved as they come, for the first ones now. Lines that an earlier process left in doubt are asked for at
    /// once.
    ///
    /// `number` distinguishes this taker's operations from those of others with the same requester.
    ///
    /// # Errors
    /// [`OrderError`]; nothing was reserved.
    pub fn new<S: PageStore + ?Sized>(
        order: Order,
        own_node: NodeId,
        number: u32,
        store: &mut S,
    ) -> Result<Self, OrderError> {
        let mut taker = Self::resume(order, own_node, number, store)?;
        let first = taker.lines.iter().position(|line| *line == LineState::Left);
        let first = first.and_then(|line| u32::try_from(line).ok());
        if first.is_some_and(|line| !taker.reserve(line, store.lines_mut())) {
            return Err(OrderError::NoRoom(taker.counts.left));
        }
        Ok(taker)
    }

    /// As [`Self::new`] for a migration that has ended: it only asks for the lines that are in doubt. It is to be
    /// [stopped](Self::stop).
    ///
    /// # Errors
    /// [`OrderError::Range`].
    pub fn resume<S: PageStore + ?Sized>(
        order: Order,
        own_node: NodeId,
        number: u32,
        store: &S,
    ) -> Result<Self, OrderError> {
        let Range { start, end } = order.pages;
        let is_whole = start.is_multiple_of(LINE) && end.is_multiple_of(LINE);
        if start >= end || !is_whole || end > LOCATION_PAGES || end - start > SHARD_PAGES_MAX {
            return Err(OrderError::Range);
        }
        let is_home = own_node == order.home;
        // An own line that was not given away is here.
        let at_first = if is_home { LineState::Here } else { LineState::Left };
        let mut lines = vec![at_first; order.line_count() as usize];
        let (mut places, mut doubts) = (BTreeMap::new(), Vec::new());
        let mut generations = (order.generation, order.generation);
        let store = store.lines();
        store.placed(&mut |page, placed| {
            let home = match placed {
                Placed::Staged(home, _) | Placed::Adopted(home) => home,
                Placed::Given if is_home => HomeLine { first_page: page, ..order.home_line(0) },
                Placed::Given | Placed::GivenOn(_) => return,
            };
            let Some(line) = order.number(home) else { return };
            lines[line as usize] = match placed {
                Placed::Given | Placed::GivenOn(_) => LineState::Left,
                Placed::Adopted(_) => {
                    let pages = store.line(page).map(|line| line.pages);
                    extend(&mut generations, &pages.unwrap_or_default());
                    LineState::Here
                }
                Placed::Staged(_, taken) => {
                    doubts.push((line, taken));
                    places.insert(line, page);
                    LineState::OnItsWay
                }
            };
        });
        let mut counts = Counts::default();
        lines.iter().for_each(|line| *counts.of(*line) += 1);
        Ok(Self {
            order,
            number,
            is_home,
            places,
            lines,
            counts,
            next: 0,
            slots: Vec::with_capacity(LINES_MAX as usize),
            doubts,
            known: 0,
            generations,
            pace: Pace::new(),
            is_begun: false,
            is_stopped: false,
            is_full: false,
            last_failure: None,
        })
    }

    /// The order.
    #[must_use]
    pub const fn order(&self) -> &Order {
        &self.order
    }

    /// Takes lines from now on: the giver allows it.
    pub const fn begin(&mut self) {
        self.is_begun = true;
    }

    /// Whether others want the processor on which this taker runs: moving memory is less urgent than what they do.
    ///
    /// `takers` is how many take lines on it, with this one: they share what is left to them.
    pub fn set_contended(&mut self, is_contended: bool, takers: u32) {
        self.pace.set_contended(is_contended, takers);
    }

    /// Takes no further line: the giver was told to give none. Lines in doubt are asked for until their end is known.
    pub fn stop(&mut self) {
        self.is_stopped = true;
    }

    /// The giver's memory is lost, for sure, and all servers know it: what is in doubt is lost with it. An answer that
    /// arrives later is too late.
    pub fn give_up<S: PageStore + ?Sized>(&mut self, responder: &mut Responder, store: &mut S) {
        self.is_stopped = true;
        let staged = self.slots.iter().filter(|slot| slot.is_in_doubt()).map(|slot| slot.line);
        let staged: Vec<_> = staged.chain(self.doubts.iter().map(|(line, _)| *line)).collect();
        for line in staged {
            self.drop_staged(line, responder, store);
        }
        self.slots.clear();
        self.doubts.clear();
        for line in 0..self.lines.len() {
            if matches!(self.lines[line], LineState::Left | LineState::OnItsWay) {
                self.set_state(line, LineState::Stays);
            }
        }
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let in_doubt = self.slots.iter().filter(|slot| slot.is_in_doubt()).count();
        let Counts { on_their_way, here, free, stay, .. } = self.counts;
        Progress {
            all: self.order.line_count(),
            here,
            on_their_way,
            in_doubt: u32::try_from(in_doubt + self.doubts.len()).unwrap_or(u32::MAX),
            free,
            stay,
            is_full: self.is_full,
            last_failure: self.last_failure,
        }
    }

    /// Whether it takes lines: not yet, or not any more, if the giver did not allow it or the migration was stopped.
    #[must_use]
    pub const fn is_taking(&self) -> bool {
        self.is_begun && !self.is_stopped && !self.is_over()
    }

    /// Whether the end of each line is known: it is here, or it stays.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        self.counts.left == 0 && self.counts.on_their_way == 0
    }

    /// Whether no line is on its way, and none will be asked for: it [is over](Self::is_over), or it has never begun.
    #[must_use]
    pub const fn may_finish(&self) -> bool {
        self.is_over() || (!self.is_begun && self.counts.on_their_way == 0)
    }

    /// What is served here. All rows have the generations that any of their pages has.
    pub fn rows(&self) -> impl Iterator<Item = Row> {
        let mut next = 0;
        core::iter::from_fn(move || {
            let is_here = |line: &usize| self.lines[*line] == LineState::Here;
            let first = (next..self.lines.len()).find(is_here)?;
            let end = (first..self.lines.len()).find(|line| !is_here(line));
            next = end.unwrap_or(self.lines.len());
            let page = |line: usize| self.order.pages.start + line as u64 * LINE;
            Some(Row { pages: page(first)..page(next), generations: self.generations })
        })
    }

    /// Gives back what is reserved for lines that stay with the giver. Only when it [may](Self::may_finish).
    pub fn finish<S: PageStore + ?Sized>(self, store: &mut S) {
        for place in self.places.into_values() {
            store.lines_mut().release(place..place + LINE);
        }
    }

    /// Where the answers to this taker's operations are stored.
    pub const fn in_store<'a, S: PageStore + ?Sized>(
        &'a mut self,
        store: &'a mut S,
    ) -> InStore<'a, S> {
        InStore { taker: self, store }
    }

    /// Whether a completion is of this taker.
    #[must_use]
    pub const fn owns(&self, token: u64) -> bool {
        token >> 32 == self.number as u64
    }

    /// The next moment at which [`Self::poll`] has something to do; `None` if it waits for completions only.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let is_waiting = |slot: &&Slot| matches!(slot.step, Step::Take | Step::Stage | Step::Keep);
        let waits = self.slots.iter().filter(is_waiting);
        let takes = self.is_begun && !self.is_stopped && self.counts.left > 0;
        // A line in doubt also waits for the end of the rest.
        let rest = self.pace.rest_until().filter(|_| takes || !self.doubts.is_empty());
        waits.map(|slot| slot.at).chain(rest).min()
    }

    /// Starts what can be started.
    pub fn poll<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        (requester, responder): (&mut Requester, &mut Responder),
        store: &mut S,
    ) {
        let Self { slots, lines, .. } = self;
        slots.retain(|slot| lines[slot.line as usize] == LineState::OnItsWay);
        self.fill(now, requester);
        let is_due = |slot: &Slot| slot.at <= now;
        for index in 0..self.slots.len() {
            match self.slots[index].step {
                _ if !is_due(&self.slots[index]) => {}
                Step::Take | Step::Stage if self.is_stopped => self.end(index, LineState::Stays),
                Step::Stage => self.stage(now, index, responder, store),
                Step::Keep => self.keep(now, index, requester),
                Step::Take | Step::Taking(_) | Step::Reading(_) | Step::Keeping => {}
            }
        }
        // One after the other, because requests of one kind travel together.
        for index in 0..self.slots.len() {
            let slot = &self.slots[index];
            if slot.step == Step::Take && is_due(slot) && !self.is_stopped {
                self.take(now, index, requester);
            }
        }
        if self.is_stopped && self.counts.left > 0 {
            for line in 0..self.lines.len() {
                if self.lines[line] == LineState::Left {
                    self.set_state(line, LineState::Stays);
                }
            }
        }
    }

    /// Handles the end of an operation of this taker. Call [`Self::poll`] afterwards.
    pub fn heard<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        completion: &Completion,
        (requester, responder): (&mut Requester, &mut Responder),
        store: &mut S,
    ) {
        let Some((index, what)) = self.operation(completion.token) else { return };
        match (self.slots[index].step, what) {
            (Step::Taking(_), TAKE) => {
                let machines = (requester, responder);
                self.heard_of_take(now, index, completion.result, machines, store);
            }
            (Step::Reading(count), READ..) => {
                let slot = &mut self.slots[index];
                slot.has_failed |= completion.result.is_err();
                slot.step = Step::Reading(count - 1);
                if let Err(failure) = completion.result {
                    self.last_failure = Some(failure);
                    self.pace.lost(now);
                }
                if count == 1 {
                    self.stage(now, index, responder, store);
                }
            }
            (Step::Keeping, KEEP) => {
                self.heard_of_keep(now, index, completion.result, responder, store);
            }
            _ => {}
        }
    }

    /// Gives slots to lines: first to those in doubt.
    fn fill(&mut self, now: Timestamp, requester: &Requester) {
        let all = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        let mut on_their_way = all;
        for slot in &mut self.slots {
            if slot.is_waiting(now, requester) {
                on_their_way -= 1;
                slot.asked_at = None;
            }
        }
        let room = self.pace.room(now, on_their_way);
        for _ in 0..room.min(LINES_MAX.saturating_sub(all)) {
            let (line, step, taken) = match self.doubts.pop() {
                Some((line, taken)) => (line, Step::Keep, taken),
                None => {
                    let Some(line) = self.next_left() else { return };
                    let migration = self.order.migration.id;
                    (line, Step::Take, Taken { migration, epoch: 0 })
                }
            };
            self.set_state(line as usize, LineState::OnItsWay);
            self.slots.push(Slot {
                line,
                step,
                at: now,
                asked_at: None,
                pause: PAUSE.0,
                leased_until: now,
                taken,
                pages: LineRecord::default(),
                crcs: PageCrcs::default(),
                has_failed: false,
                record: [0; LINE_RECORD_BYTES],
            });
        }
    }

    /// A line to take.
    fn next_left(&mut self) -> Option<u32> {
        if self.is_stopped || !self.is_begun {
            return None;
        }
        let lines = self.lines.get(self.next as usize..).unwrap_or_default();
        let skipped = lines.iter().position(|line| *line == LineState::Left);
        let skipped = u32::try_from(skipped.unwrap_or(lines.len())).unwrap_or(u32::MAX);
        let line = self.next + skipped;
        self.next = line;
        ((line as usize) < self.lines.len()).then_some(line)
    }

    fn set_state(&mut self, line: usize, state: LineState) {
        *self.counts.of(self.lines[line]) -= 1;
        self.lines[line] = state;
        *self.counts.of(state) += 1;
    }

    fn take(&mut self, now: Timestamp, index: usize, requester: &mut Requester) {
        let Self { order, slots, .. } = self;
        let slot = &mut slots[index];
        let first_page = order.home_line(slot.line).first_page;
        let Some(pointer) = order.pointer(first_page, order.generation, Tag(0)) else { return };
        let (migration, lease_ms) = (order.migration, LEASE_MS);
        let take = Operation::Take { migration, pointer, lease_ms, wait: true };
        let token = token(self.number, slot.line, TAKE);
        match requester.start_until(now, take, token, now + TAKE_PATIENCE) {
            Ok(id) => (slot.step, slot.asked_at) = (Step::Taking(id), Some(now)),
            Err(_) => slot.wait(now),
        }
    }

    fn keep(&mut self, now: Timestamp, index: usize, requester: &mut Requester) {
        let Self { order, slots, known, .. } = self;
        let slot = &mut slots[index];
        let first_page = order.home_line(slot.line).first_page;
        let Some(pointer) = order.pointer(first_page, order.generation, Tag(0)) else { return };
        let (migration, epoch) = (order.migration, slot.taken.epoch);
        let keep = Operation::Keep { migration, pointer, epoch, known: *known };
        let token = token(self.number, slot.line, KEEP);
        match requester.start_until(now, keep, token, now + KEEP_PATIENCE) {
            Ok(_) => slot.step = Step::Keeping,
            Err(_) => slot.wait(now),
        }
    }

    fn heard_of_take<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        index: usize,
        result: Result<Output, Failure>,
        (requester, responder): (&mut Requester, &mut Responder),
        store: &mut S,
    ) {
        let line = self.slots[index].line;
        let lease = match result {
            Ok(Output::Leased(lease)) => lease,
            Ok(Output::Free) => {
                self.release(line, store.lines_mut());
                return self.end(index, LineState::Free);
            }
            Ok(_) => return self.try_again(now, index, None),
            Err(failure) => {
                let is_over =
                    matches!(failure, Failure::Refused { status: Status::StaleRangeEpoch, .. })
                        && self.is_stopped;
                if is_over {
                    return self.end(index, LineState::Stays);
                }
                self.slots[index].has_failed =
                    !matches!(failure, Failure::Busy { .. } | Failure::Refused { .. });
                return self.try_again(now, index, Some(failure));
            }
        };
        let Ok(pages) = parse_line(&self.slots[index].record) else {
            return self.try_again(now, index, None);
        };
        if !self.reserve(line, store.lines_mut()) {
            // What is on its way arrives still. The lease ends soon.
            (self.is_full, self.is_stopped) = (true, true);
            return self.end(index, LineState::Stays);
        }
        let slot = &mut self.slots[index];
        (slot.taken.epoch, slot.pages, slot.has_failed) = (lease.epoch, pages, false);
        slot.crcs = PageCrcs::default();
        slot.leased_until = now + Duration::from_millis(LEASE_MS.into());
        let mut reads = 0;
        for run in written_runs(&pages) {
            let first_page = self.order.home_line(slot.line).first_page + run.start as u64;
            let colour = pages[run.start].colour;
            let pointer = colour
                .and_then(|(generation, tag)| self.order.pointer(first_page, generation, tag));
            let Some(pointer) = pointer else {
                // What is in the place is of somebody else.
                slot.has_failed = true;
                continue;
            };
            let giver = self.order.migration.giver;
            #[expect(clippy::cast_possible_truncation, reason = "at most a line's bytes, or pages")]
            let (length, what) = ((run.len() * PAGE_BYTES) as u32, READ + run.start as u16);
            let read = Operation::ReadTaken { giver, pointer, length, epoch: lease.epoch };
            let token = token(self.number, slot.line, what);
            match requester.start_until(now, read, token, now + READ_PATIENCE) {
                Ok(_) => reads += 1,
                Err(_) => slot.has_failed = true,
            }
        }
        slot.step = Step::Reading(reads);
        if reads == 0 {
            self.stage(now, index, responder, store);
        }
    }

    /// All pages were read, or not.
    fn stage<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        index: usize,
        responder: &mut Responder,
        store: &mut S,
    ) {
        let line = self.slots[index].line;
        let Some(place) = self.place(line) else { return self.end(index, LineState::Stays) };
        let slot = &self.slots[index];
        if slot.has_failed {
            return self.try_again(now, index, None);
        }
        let name = (self.order.home_line(line), slot.taken);
        let mut staged = store.lines_mut().stage(place, name, &slot.pages, &slot.crcs);
        for _ in 0..LINE_PAGES {
            let Err(StageError::FreedElsewhere(page)) = staged else { break };
            responder.free_rest(now, place + page as u64, store);
            staged = store.lines_mut().stage(place, name, &slot.pages, &slot.crcs);
        }
        let is_to_be_freed =
            matches!(staged, Err(StageError::FreedElsewhere(_) | StageError::BeingFreed(_)));
        let slot = &mut self.slots[index];
        match staged {
            Ok(()) => {
                (slot.step, slot.at, slot.pause) = (Step::Keep, now, PAUSE.0);
                responder.doubt(self.order.home_line(line));
            }
            // As long as the lease holds, the line is what was read.
            Err(_) if is_to_be_freed && now < slot.leased_until => {
                slot.step = Step::Stage;
                slot.wait(now);
            }
            Err(_) => self.try_again(now, index, None),
        }
    }

    fn heard_of_keep<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        index: usize,
        result: Result<Output, Failure>,
        responder: &mut Responder,
        store: &mut S,
    ) {
        let slot = &mut self.slots[index];
        let (line, taken) = (slot.line, slot.taken);
        match result {
            Ok(Output::Kept { bytes, known, is_all }) => {
                let fences = Fence::parse_all(&slot.record[..usize::from(bytes)]);
                responder.heed_fences(now, self.order.space, fences, store);
                self.known = known;
                if !is_all {
                    let slot = &mut self.slots[index];
                    (slot.step, slot.at) = (Step::Keep, now);
                    return;
                }
                if let Some(asked_at) = slot.asked_at {
                    self.pace.took(now.saturating_since(asked_at));
                }
                if let Some(place) = self.place(line) {
                    let pages = store.lines().line(place).map(|line| line.pages);
                    extend(&mut self.generations, &pages.unwrap_or_default());
                    responder.adopt(now, place, self.order.home_line(line), taken, store);
                    self.places.remove(&line);
                }
                self.end(index, LineState::Here);
            }
            // It is about the lease under which the line was staged, so the line is the giver's.
            Err(Failure::LeaseLost { how, .. }) => {
                self.drop_staged(line, responder, store);
                let is_over = self.is_stopped || how == LeaseEnd::Withdrawn;
                if is_over {
                    return self.end(index, LineState::Stays);
                }
                self.try_again(now, index, result.err());
            }
            _ => {
                self.last_failure = result.err();
                let slot = &mut self.slots[index];
                slot.step = Step::Keep;
                slot.wait(now);
            }
        }
    }

    /// A line that was staged is the giver's.
    fn drop_staged<S: PageStore + ?Sized>(
        &self,
        line: u32,
        responder: &mut Responder,
        store: &mut S,
    ) {
        if let Some(place) = self.place(line) {
            store.lines_mut().drop_staged(place);
        }
        responder.end_doubt(&self.order.home_line(line));
    }

    /// A line that is the giver's for sure is taken again later.
    fn try_again(&mut self, now: Timestamp, index: usize, failure: Option<Failure>) {
        self.last_failure = failure.or(self.last_failure);
        let slot = &mut self.slots[index];
        slot.step = Step::Take;
        slot.wait(now);
    }

    /// [`Self::poll`] removes the slot.
    fn end(&mut self, index: usize, state: LineState) {
        let line = self.slots[index].line;
        self.set_state(line as usize, state);
    }

    /// The slot and the purpose of an operation.
    fn operation(&self, token: u64) -> Option<(usize, u16)> {
        let line = token >> 4 & LINE_MASK;
        let is_its = |slot: &Slot| u64::from(slot.line) & LINE_MASK == line;
        let index = self.slots.iter().position(is_its).filter(|_| self.owns(token))?;
        Some((index, (token & 15) as u16))
    }

    /// Where the answer to an operation is stored.
    fn incoming<'a, S: PageStore + ?Sized>(
        &'a mut self,
        token: u64,
        store: &'a mut S,
    ) -> Option<&'a mut [u8]> {
        let (index, what) = self.operation(token)?;
        let slot = &mut self.slots[index];
        let Some(page) = what.checked_sub(READ) else { return Some(&mut slot.record) };
        let place = self.places.get(&slot.line)?;
        store.lines_mut().memory(*place)?.get_mut(usize::from(page) * PAGE_BYTES..)
    }

    /// Notes the CRC of a page that was read.
    fn copied(&mut self, token: u64, at: usize, crc: Option<u32>) {
        let Some((index, what)) = self.operation(token) else { return };
        let Some(first) = what.checked_sub(READ) else { return };
        let page = usize::from(first) + at / PAGE_BYTES;
        if let Some(known) = self.slots[index].crcs.get_mut(page) {
            *known = crc;
        }
    }

    /// Where a line that is not here yet is in the store.
    fn place(&self, line: u32) -> Option<u64> {
        self.places.get(&line).copied()
    }

    /// Reserves a place for a line, and for some that are to come after it if there is memory for as many. Returns
    /// false if there is none for the line.
    fn reserve(&mut self, line: u32, store: &mut dyn LineStore) -> bool {
        if self.places.contains_key(&line) {
            return true;
        }
        let is_to_come = |line: &u32| {
            let state = self.lines.get(*line as usize);
            let is_to_come = matches!(state, Some(LineState::Left | LineState::OnItsWay));
            is_to_come && !self.places.contains_key(line)
        };
        let more = (line..line.saturating_add(BATCH)).take_while(is_to_come).count();
        let mut count = u32::try_from(more).unwrap_or(BATCH).max(1);
        while count > 0 {
            if let Some(places) = self.reserve_lines(line, count, store) {
                self.places.extend((line..).zip(places));
                return true;
            }
            count /= 2;
        }
        false
    }

    /// Places for so many neighbouring lines; `None`, and nothing is reserved, if there is not enough memory.
    fn reserve_lines(&self, line: u32, count: u32, store: &mut dyn LineStore) -> Option<Vec<u64>> {
        let runs = if self.is_home {
            let first = self.order.home_line(line).first_page;
            let own = first..first + u64::from(count) * LINE;
            store.reserve_own(own.clone()).then(|| vec![own])
        } else {
            store.reserve(count)
        };
        let lines = |run: Range<u64>| run.step_by(LINE_PAGES);
        Some(runs?.into_iter().flat_map(lines).collect())
    }

    /// Gives back what is reserved for a line.
    fn release(&mut self, line: u32, store: &mut dyn LineStore) {
        if let Some(place) = self.places.remove(&line) {
            store.release(place..place + LINE);
        }
    }
}

impl Slot {
    const fn is_in_doubt(&self) -> bool {
        matches!(self.step, Step::Keep | Step::Keeping)
    }

    /// Whether it delays no other line: the giver refused it, allocations are freed first, or somebody else has leased the
    /// line. One that got no answer in time counts still, because the giver may be slow or gone.
    fn is_waiting(&self, now: Timestamp, requester: &Requester) -> bool {
        match self.step {
            Step::Take => self.at > now && !self.has_failed,
            Step::Stage => self.at > now,
            Step::Taking(id) => requester.is_queued(id),
            Step::Reading(_) | Step::Keep | Step::Keeping => false,
        }
    }

    /// Waits until it is tried again, the longer the more often.
    fn wait(&mut self, now: Timestamp) {
        self.at = now + self.pause;
        self.pause = (self.pause * 2).min(PAUSE.1);
    }
}

/// A taker with its store: lines are read straight into their places.
pub struct InStore<'a, S: ?Sized> {
    taker: &'a mut Taker,
    store: &'a mut S,
}

impl<S: PageStore + ?Sized> Buffers for InStore<'_, S> {
    fn outgoing(&self, _token: u64) -> &[u8] {
        &[]
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        self.taker.incoming(token, self.store).unwrap_or_default()
    }

    fn copied(&mut self, token: u64, at: usize, crc: Option<u32>) {
        self.taker.copied(token, at, crc);
    }
}

/// The generations in the pointers to lines of the store that were adopted; `first` is that of the contents.
pub fn generations<S: PageStore + ?Sized>(
    first: ArenaGeneration,
    places: Range<u64>,
    store: &S,
) -> (ArenaGeneration, ArenaGeneration) {
    let mut generations = (first, first);
    for place in places.step_by(LINE_PAGES) {
        let pages = store.lines().line(place).map(|line| line.pages);
        extend(&mut generations, &pages.unwrap_or_default());
    }
    generations
}

/// Extends generations to those in the pointers to the pages of a line.
fn extend((first, last): &mut (ArenaGeneration, ArenaGeneration), pages: &LineRecord) {
    let allocated = pages.iter().filter(|page| page.part != Part::Free);
    for (generation, _) in allocated.filter_map(|page| page.colour) {
        *first = generation.min(*first);
        *last = generation.max(*last);
    }
}

/// Bits of a token that tell the line: those on their way at once differ in them.
const LINE_MASK: u64 = (1 << 28) - 1;

const fn token(number: u32, line: u32, what: u16) -> u64 {
    (number as u64) << 32 | (line as u64 & LINE_MASK) << 4 | what as u64
}

/// Runs of neighbouring pages with bytes to read, each in one allocation.
fn written_runs(pages: &LineRecord) -> impl Iterator<Item = Range<usize>> {
    let is_written = |page: usize| {
        pages[page].part != Part::Free && pages[page].contents == PageContents::Written
    };
    let mut next = 0;
    core::iter::from_fn(move || {
        let first = (next..LINE_PAGES).find(|page| is_written(*page))?;
        let is_more =
            |page: &usize| is_written(*page) && matches!(pages[*page].part, Part::Further { .. });
        next = (first + 1..LINE_PAGES).find(|page| !is_more(page)).unwrap_or(LINE_PAGES);
        Some(first..next)
    })
}
