//! A batch of the evictor: `Evictor::evict` and `Evictor::write_all`.

use super::{
    Mutant, Scenario,
    model::Choice,
    world::{Allocation, Answer, Mapped, PAGES, State, Version, Word, World},
};

/// A batch. Who works on it holds the evictor.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Evict {
    /// Whether it is a flush, after which the pages stay.
    pub(super) keeps: bool,
    /// The place in [`ORDER`].
    at: usize,
    /// The next page at that place.
    page: usize,
    slots: [Slot; PAGES],
    /// The first page of the next batch of a flush.
    resume: usize,
    /// A claim during the walk over the pages of a lost extent.
    walk: Option<(Word, Walk)>,
    is_failed: bool,
    is_lost: bool,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Walk {
    Lose,
    FinishLost,
    Unprotect,
    FinishDirty,
}

/// What a batch does with one page.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum Slot {
    Out,
    Leaving { was: Word },
    Gone { was: Word },
    Dirty { was: Word },
    Protected { was: Word, copy: Version },
    Copied { was: Word, copy: Version },
    Zero { was: Word },
    Writing { word: Word, copy: Version },
    Sent { word: Word, answer: Answer },
    GivenBack { was: Word },
    Writable { was: Word },
}

/// What happens to all pages of a batch before the next begins.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    Select,
    Discard,
    Finish,
    Release,
    Protect,
    Copy,
    Begin,
    KeepZero,
    Send,
    Forget,
    Walk,
    End,
    Unprotect,
    GiveBack,
    Done,
}

const ORDER: [Phase; 21] = [
    Phase::Select,
    Phase::Discard,
    Phase::Finish,
    Phase::Release,
    Phase::Protect,
    Phase::Copy,
    Phase::Begin,
    Phase::KeepZero,
    Phase::Discard,
    Phase::Finish,
    Phase::Release,
    Phase::Send,
    Phase::Forget,
    Phase::Walk,
    Phase::End,
    Phase::Unprotect,
    Phase::GiveBack,
    Phase::Discard,
    Phase::Finish,
    Phase::Release,
    Phase::Done,
];

impl Evict {
    pub(super) fn new(keeps: bool) -> Self {
        Self {
            keeps,
            at: 0,
            page: 0,
            slots: [Slot::Out; PAGES],
            resume: PAGES,
            walk: None,
            is_failed: false,
            is_lost: false,
        }
    }

    fn phase(&self) -> Phase {
        ORDER[self.at]
    }

    /// Whether the phase has something to do for the page.
    fn has_work(&self, frames: u8) -> bool {
        let slot = self.slots[self.page];
        match self.phase() {
            Phase::Select => self.page < self.resume,
            Phase::Discard => matches!(slot, Slot::Leaving { .. }),
            Phase::Finish => matches!(slot, Slot::Gone { .. }),
            Phase::Release => self.page == 0 && frames > 0,
            Phase::Protect => matches!(slot, Slot::Dirty { .. }),
            Phase::Copy => matches!(slot, Slot::Protected { .. }),
            Phase::Begin => matches!(slot, Slot::Copied { .. }),
            Phase::KeepZero => matches!(slot, Slot::Zero { .. }),
            Phase::Send => matches!(slot, Slot::Writing { .. }),
            Phase::Forget => self.page == 0 && self.is_lost,
            Phase::Walk => self.is_lost,
            Phase::End => matches!(slot, Slot::Sent { .. }),
            Phase::Unprotect => matches!(slot, Slot::GivenBack { .. }),
            Phase::GiveBack => matches!(slot, Slot::Writable { .. }),
            Phase::Done => true,
        }
    }
}

/// Generations of a page; in the pager 4096.
const GENERATIONS: u8 = 4;

impl Scenario {
    /// The next step of a batch; `None` if there is none now.
    pub(super) fn evict(&self, world: &mut World, actor: usize, choice: Choice) -> Option<()> {
        let mut evict = world.actors[actor].evict?;
        let phase = evict.phase();
        let page = evict.page;
        let may_choose = match phase {
            Phase::Select => choice == Choice::Skip,
            Phase::Begin => choice == Choice::Fail && world.base.is_none(),
            Phase::Send => matches!(choice, Choice::Fail | Choice::FailLate),
            _ => false,
        };
        if choice != Choice::Go && !may_choose {
            return None;
        }
        let mut stays = false;
        match (phase, evict.slots[page]) {
            (Phase::Select, _) => self.select(world, &mut evict, choice)?,
            (Phase::Discard, Slot::Leaving { was }) => {
                if self.has(Mutant::FrameEarly) {
                    world.free += 1;
                } else {
                    if self.has(Mutant::ClaimBlind) {
                        world.pages[page].word.state = State::Busy;
                    }
                    world.unmap(actor, page);
                }
                evict.slots[page] = Slot::Gone { was };
            }
            (Phase::Finish, Slot::Gone { was }) => {
                if self.has(Mutant::FrameEarly) {
                    world.pages[page].mapped = Mapped::Absent;
                }
                let state = if was.is_stored { State::Remote } else { State::Zero };
                world.finish(self, actor, page, was.with(state));
                evict.slots[page] = Slot::Out;
            }
            (Phase::Release, _) => world.release(actor),
            (Phase::Protect, Slot::Dirty { was }) => {
                if !self.has(Mutant::CopyBeforeProtect) && !self.has(Mutant::NoProtection) {
                    world.pages[page].mapped = Mapped::Protected;
                }
                let copy = world.pages[page].contents;
                evict.slots[page] = Slot::Protected { was, copy };
            }
            (Phase::Copy, Slot::Protected { was, copy }) => {
                let copy = if self.has(Mutant::CopyBeforeProtect) {
                    world.pages[page].mapped = Mapped::Protected;
                    copy
                } else {
                    world.pages[page].contents
                };
                evict.slots[page] = match copy {
                    0 if self.has(Mutant::ZeroIsStored) => Slot::Zero { was },
                    0 => Slot::Zero { was: was.stored(false) },
                    copy => Slot::Copied { was, copy },
                };
                if let Slot::Zero { was } = evict.slots[page]
                    && !evict.keeps
                {
                    evict.slots[page] = Slot::Leaving { was };
                }
            }
            (Phase::Begin, Slot::Copied { was, .. }) if choice == Choice::Fail => {
                // No server has room.
                world.failures = world.failures.checked_sub(1)?;
                evict.is_failed |= !self.has(Mutant::AllocationForgotten);
                evict.slots[page] = Slot::GivenBack { was };
            }
            (Phase::Begin, Slot::Copied { was, copy }) => {
                if world.base.is_none() {
                    world.allocations += 1;
                    let id = world.allocations;
                    world.base = Some(id);
                    world.server = Some(Allocation { id, contents: [0; PAGES] });
                    stays = true;
                } else {
                    let generation = (was.generation + 1) % GENERATIONS;
                    let word = Word { generation, ..was.with(State::Writing) };
                    world.expire_background(page, generation);
                    world.finish(self, actor, page, word);
                    if self.has(Mutant::NoWakeBeforeWriting) {
                        world.actors[actor].wake = None;
                    }
                    evict.slots[page] = Slot::Writing { word, copy };
                }
            }
            (Phase::KeepZero, Slot::Zero { was }) => {
                world.finish(self, actor, page, was.with(State::Clean));
                evict.slots[page] = Slot::Out;
            }
            (Phase::Send, Slot::Writing { word, copy }) => {
                let answer = self.send(world, page, copy, choice)?;
                evict.is_lost |= answer == Answer::Refused;
                evict.is_failed |= answer == Answer::Failed;
                evict.slots[page] = Slot::Sent { word, answer };
            }
            (Phase::Forget, _) => {
                world.base = None;
                for (slot, page) in evict.slots.iter_mut().zip(&mut world.pages) {
                    page.acknowledged = 0;
                    if let Slot::Sent { answer, .. } = slot
                        && !self.has(Mutant::WrittenBeforeLoss)
                    {
                        *answer = Answer::Refused;
                    }
                }
            }
            (Phase::Walk, _) => stays = self.walk(world, actor, &mut evict),
            (Phase::End, Slot::Sent { word, answer }) => {
                evict.slots[page] = self.end(world, actor, &evict, word, answer);
            }
            (Phase::Unprotect, Slot::GivenBack { was }) => {
                world.unprotect(page);
                evict.slots[page] = Slot::Writable { was };
            }
            (Phase::GiveBack, Slot::Writable { was }) => {
                let next = was.with(State::Dirty).stored(false);
                world.finish(self, actor, page, next);
                evict.slots[page] = Slot::Out;
            }
            (Phase::Done, _) => {
                self.done(world, actor, evict);
                return Some(());
            }
            _ => return None,
        }
        if !stays {
            evict.page += 1;
        }
        // Phases without work take no time.
        let frames = world.actors[actor].frames;
        while evict.page >= self.pages.len() || !evict.has_work(frames) {
            evict.page += 1;
            if evict.page >= self.pages.len() {
                (evict.at, evict.page) = (evict.at + 1, 0);
            }
        }
        world.actors[actor].evict = Some(evict);
        Some(())
    }

    fn select(&self, world: &mut World, evict: &mut Evict, choice: Choice) -> Option<()> {
        let page = evict.page;
        let word = world.pages[page].word;
        if evict.keeps {
            let has_claims = evict.slots.iter().any(|slot| *slot != Slot::Out);
            match word.state {
                _ if choice == Choice::Skip => return None,
                State::Dirty => evict.slots[page] = Slot::Dirty { was: world.claim(page) },
                State::Busy if has_claims => evict.resume = page,
                State::Busy => return None,
                _ => {}
            }
            return Some(());
        }
        let is_evictable = world.is_evictable(self, page);
        if choice == Choice::Skip {
            return is_evictable.then_some(());
        }
        if is_evictable {
            let is_blind = self.has(Mutant::DiscardUnclaimed) || self.has(Mutant::ClaimBlind);
            let is_clean = word.state == State::Clean;
            let was = if is_blind && is_clean { word } else { world.claim(page) };
            evict.slots[page] = if is_clean { Slot::Leaving { was } } else { Slot::Dirty { was } };
        }
        Some(())
    }

    fn send(
        &self,
        world: &mut World,
        page: usize,
        copy: Version,
        choice: Choice,
    ) -> Option<Answer> {
        if choice != Choice::Go {
            world.failures = world.failures.checked_sub(1)?;
        }
        let is_there = world.server.is_some_and(|server| Some(server.id) == world.base);
        if let Some(server) = world.server.as_mut().filter(|_| is_there && choice != Choice::Fail) {
            server.contents[page] = copy;
        }
        let is_success = choice == Choice::Go || self.has(Mutant::FailureIsSuccess);
        Some(match is_there {
            _ if !is_success => Answer::Failed,
            false => Answer::Refused,
            true => {
                world.pages[page].acknowledged = copy;
                Answer::Contents(copy)
            }
        })
    }

    /// The walk over the pages of a lost extent; returns whether the page is not finished.
    fn walk(&self, world: &mut World, actor: usize, evict: &mut Evict) -> bool {
        let page = evict.page;
        if let Some((was, step)) = evict.walk {
            let unstored = was.stored(false);
            let next = match step {
                Walk::Lose => {
                    world.poison(page);
                    Some(Walk::FinishLost)
                }
                Walk::FinishLost => {
                    world.finish(self, actor, page, unstored.with(State::Lost));
                    None
                }
                Walk::Unprotect => {
                    world.unprotect(page);
                    Some(Walk::FinishDirty)
                }
                Walk::FinishDirty => {
                    world.finish(self, actor, page, unstored.with(State::Dirty));
                    None
                }
            };
            evict.walk = next.map(|step| (was, step));
            return next.is_some();
        }
        let word = world.pages[page].word;
        let step = match word.state {
            _ if self.has(Mutant::NoWalk) => return false,
            State::Busy => {
                world.pages[page].word.is_forgotten = true;
                return false;
            }
            State::Remote if word.is_stored => Walk::Lose,
            State::Clean if word.is_stored && !self.has(Mutant::WalkSkipsClean) => Walk::Unprotect,
            _ => return false,
        };
        evict.walk = Some((world.claim(page), step));
        true
    }

    /// Ends the writing of a page.
    fn end(
        &self,
        world: &mut World,
        actor: usize,
        evict: &Evict,
        word: Word,
        answer: Answer,
    ) -> Slot {
        let page = evict.page;
        let seen = world.pages[page].word;
        let is_same = match self.mutant {
            Some(Mutant::EndBlind) => seen.is_local(),
            Some(Mutant::NoGeneration) => seen.state == State::Writing,
            _ => seen.state == State::Writing && seen.generation == word.generation,
        };
        if !is_same {
            return Slot::Out;
        }
        let was = world.claim(page);
        if !matches!(answer, Answer::Contents(_)) {
            return Slot::GivenBack { was };
        }
        if evict.keeps || (was.pins > 0 && !self.has(Mutant::PinnedLeaves)) {
            world.finish(self, actor, page, was.with(State::Clean).stored(true));
            return Slot::Out;
        }
        Slot::Leaving { was: was.stored(true) }
    }

    fn done(&self, world: &mut World, actor: usize, mut evict: Evict) {
        if evict.keeps && !evict.is_failed {
            if evict.is_lost && !self.has(Mutant::FlushGoesOn) {
                world.actors[actor].evict = Some(Evict::new(true));
                return;
            }
            if evict.resume < self.pages.len() {
                evict = Evict { page: evict.resume, ..Evict::new(true) };
                world.actors[actor].evict = Some(evict);
                return;
            }
        }
        world.evictor = None;
        world.actors[actor].evict = None;
        if evict.keeps {
            world.actors[actor].next += 1;
            for page in &world.pages {
                let is_unchanged = page.latest == page.flushed && page.latest != 0;
                let is_lost = page.word.state == State::Lost;
                world.witness.false_flush |= !evict.is_failed
                    && is_unchanged
                    && !is_lost
                    && page.acknowledged != page.latest;
            }
        }
    }
}
