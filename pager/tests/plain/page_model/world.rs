//! The state of the model, and what several kinds of threads do with it.

use super::{Mutant, Scenario, Start, background::Background, evict::Evict, fault::Fault};

/// Most pages of a scenario.
pub(super) const PAGES: usize = 2;

/// Contents: 0 is a page of zeros, each write makes another number.
pub(super) type Version = u8;

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum State {
    Zero,
    Remote,
    Clean,
    Dirty,
    Busy,
    Writing,
    Lost,
}

/// The entry of a page in the page table.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Word {
    pub(super) state: State,
    pub(super) is_stored: bool,
    pub(super) has_waiters: bool,
    /// The page's extent was lost during the claim.
    pub(super) is_forgotten: bool,
    pub(super) pins: u8,
    pub(super) generation: u8,
}

impl Word {
    pub(super) fn with(self, state: State) -> Self {
        Self { state, ..self }
    }

    pub(super) fn stored(self, is_stored: bool) -> Self {
        Self { is_stored, ..self }
    }

    pub(super) fn is_local(self) -> bool {
        matches!(self.state, State::Clean | State::Dirty | State::Writing)
    }

    pub(super) fn is_missing(self) -> bool {
        matches!(self.state, State::Zero | State::Remote)
    }
}

/// What the kernel has at a page's address.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Mapped {
    Absent,
    Poisoned,
    Protected,
    Writable,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Page {
    pub(super) word: Word,
    pub(super) mapped: Mapped,
    pub(super) contents: Version,
    /// What the program wrote last.
    pub(super) latest: Version,
    /// What `latest` was when the flush began.
    pub(super) flushed: Version,
    /// What the server acknowledged last and is not known to have lost.
    pub(super) acknowledged: Version,
}

impl Page {
    pub(super) fn is_present(&self) -> bool {
        matches!(self.mapped, Mapped::Protected | Mapped::Writable)
    }
}

/// The allocation that the server has.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Allocation {
    pub(super) id: u8,
    pub(super) contents: [Version; PAGES],
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Answer {
    Contents(Version),
    /// The memory does not exist any more.
    Refused,
    Failed,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Doing {
    Ready,
    /// The kernel has reported the thread's fault; a handler thread may have `taken` the report.
    Asleep {
        page: usize,
        is_taken: bool,
        is_write: bool,
    },
    /// The thread waits on the word of a page.
    Waiting {
        page: usize,
    },
    /// The thread makes a claimed page zero.
    Discarding {
        was: Word,
        at: Discarding,
    },
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) enum Discarding {
    Unmap,
    Finish,
    Release,
}

/// A thread.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Actor {
    /// The number of its next operation, or of batches.
    pub(super) next: u8,
    pub(super) doing: Doing,
    pub(super) fault: Option<Fault>,
    pub(super) evict: Option<Evict>,
    /// Frames of pages that are not present yet, or not any more.
    pub(super) frames: u8,
    /// Waiting threads of this page must be woken in the kernel next.
    pub(super) wake: Option<usize>,
    /// Pages that it keeps local.
    pub(super) pinned: [bool; PAGES],
}

impl Actor {
    pub(super) const NEW: Self = Self {
        next: 0,
        doing: Doing::Ready,
        fault: None,
        evict: None,
        frames: 0,
        wake: None,
        pinned: [false; PAGES],
    };
}

/// What was seen to be wrong.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Witness {
    pub(super) wrong_read: bool,
    pub(super) false_loss: bool,
    pub(super) false_flush: bool,
}

#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub(crate) struct World {
    pub(super) pages: [Page; PAGES],
    pub(super) free: u8,
    /// Where the extent is stored, as the client knows it.
    pub(super) base: Option<u8>,
    pub(super) server: Option<Allocation>,
    pub(super) allocations: u8,
    /// Who holds the evictor.
    pub(super) evictor: Option<usize>,
    /// Who holds the only lane.
    pub(super) lane: Option<usize>,
    pub(super) actors: Vec<Actor>,
    pub(super) background: Background,
    pub(super) background_reads: u8,
    pub(super) losses: u8,
    pub(super) failures: u8,
    pub(super) versions: u8,
    pub(super) witness: Witness,
}

impl World {
    pub(super) fn new(scenario: &Scenario) -> Self {
        let is_evictor = usize::from(scenario.rounds > 0);
        let actors = scenario.threads.len() + scenario.handlers + is_evictor;
        let mut contents = [0; PAGES];
        let mut local = 0;
        let mut versions = 0;
        let mut pages = [Self::page(Start::Zero, 0); PAGES];
        for (at, start) in scenario.pages.iter().enumerate() {
            if *start != Start::Zero {
                versions += 1;
            }
            pages[at] = Self::page(*start, versions);
            if matches!(start, Start::Remote | Start::Clean) {
                contents[at] = versions;
            }
            local += u8::from(pages[at].is_present());
        }
        let is_allocated = contents != [0; PAGES];
        Self {
            pages,
            free: scenario.limit - local,
            base: is_allocated.then_some(1),
            server: is_allocated.then_some(Allocation { id: 1, contents }),
            allocations: u8::from(is_allocated),
            evictor: None,
            lane: None,
            actors: vec![Actor::NEW; actors],
            background: Background::Idle,
            background_reads: scenario.background_reads,
            losses: scenario.losses,
            failures: scenario.failures,
            versions,
            witness: Witness::default(),
        }
    }

    fn page(start: Start, version: Version) -> Page {
        let (state, is_stored, mapped) = match start {
            Start::Zero => (State::Zero, false, Mapped::Absent),
            Start::Remote => (State::Remote, true, Mapped::Absent),
            Start::Clean => (State::Clean, true, Mapped::Protected),
            Start::Dirty => (State::Dirty, false, Mapped::Writable),
        };
        let latest = if start == Start::Zero { 0 } else { version };
        let word = Word {
            state,
            is_stored,
            has_waiters: false,
            is_forgotten: false,
            pins: 0,
            generation: 0,
        };
        Page {
            word,
            mapped,
            contents: if mapped == Mapped::Absent { 0 } else { latest },
            latest,
            flushed: 0,
            acknowledged: if is_stored { latest } else { 0 },
        }
    }

    /// Makes a page busy; its word before.
    pub(super) fn claim(&mut self, page: usize) -> Word {
        let word = &mut self.pages[page].word;
        let was = *word;
        word.state = State::Busy;
        was
    }

    /// Ends a claim. Who waits on the word is woken at once, who waits in the kernel with the thread's next step.
    pub(super) fn finish(&mut self, scenario: &Scenario, actor: usize, page: usize, next: Word) {
        let before = self.pages[page].word;
        let pins = if scenario.has(Mutant::PinsOfClaim) { next.pins } else { before.pins };
        self.pages[page].word = Word { has_waiters: false, is_forgotten: false, pins, ..next };
        if !before.has_waiters {
            return;
        }
        for other in &mut self.actors {
            if other.doing == (Doing::Waiting { page }) {
                other.doing = Doing::Ready;
            }
        }
        if scenario.handlers > 0 && !scenario.has(Mutant::NoWake) {
            self.actors[actor].wake = Some(page);
        }
    }

    /// As [`Self::finish`], unless the page's extent was lost during the claim.
    pub(super) fn finish_stored(
        &mut self,
        scenario: &Scenario,
        actor: usize,
        page: usize,
        next: Word,
    ) -> bool {
        let is_missed = scenario.has(Mutant::SecondLook) || scenario.has(Mutant::WalkSkipsBusy);
        if self.pages[page].word.is_forgotten && next.is_stored && !is_missed {
            return false;
        }
        self.finish(scenario, actor, page, next);
        true
    }

    /// Lets threads that sleep in the kernel try again.
    pub(super) fn wake(&mut self, page: usize) {
        for actor in &mut self.actors {
            if matches!(actor.doing, Doing::Asleep { page: slept, .. } if slept == page) {
                actor.doing = Doing::Ready;
            }
        }
    }

    /// Lets writes to a page pass.
    pub(super) fn unprotect(&mut self, page: usize) {
        self.pages[page].mapped = Mapped::Writable;
        self.wake(page);
    }

    /// Makes a page missing; its frame is in transit.
    pub(super) fn unmap(&mut self, actor: usize, page: usize) {
        if self.pages[page].is_present() {
            self.actors[actor].frames += 1;
        }
        self.pages[page].mapped = Mapped::Absent;
        self.pages[page].contents = 0;
    }

    /// Gives back the frames that a thread has in transit.
    pub(super) fn release(&mut self, actor: usize) {
        self.free += std::mem::take(&mut self.actors[actor].frames);
    }

    pub(super) fn poison(&mut self, page: usize) {
        // What the program could still get must not be given up.
        let latest = self.pages[page].latest;
        let stored = self.stored(page);
        self.witness.false_loss |= latest != 0 && stored == Some(latest);
        self.pages[page].mapped = Mapped::Poisoned;
        self.wake(page);
    }

    /// What a read of a page returns; `None` if the memory that the client knows does not exist.
    pub(super) fn stored(&self, page: usize) -> Option<Version> {
        let allocation = self.server.filter(|server| Some(server.id) == self.base)?;
        Some(allocation.contents[page])
    }

    /// Whether the evictor could choose a page.
    pub(super) fn is_evictable(&self, scenario: &Scenario, page: usize) -> bool {
        let word = self.pages[page].word;
        matches!(word.state, State::Clean | State::Dirty)
            && (word.pins == 0 || scenario.has(Mutant::PinnedIsTaken))
    }
}
