//! The program in the kernel. It answers READs of one page, one at a time on each core.

use super::{
    Mutant, Op, Scenario,
    world::{Half, Holds, Request, Role, Word, World},
};

/// A READ that the reader looks at.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Reading {
    request: Request,
    at: At,
    word: Word,
    sequence: u8,
    is_leftover: bool,
    frame: usize,
    halves: [Half; 2],
}

/// What it does next.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum At {
    LoadShard,
    LoadWord,
    Compare,
    Raise,
    LoadSequence,
    Look,
    LookAtName,
    LoadFrame,
    LookAtHead,
    LookAtFlag,
    CopyFirst,
    CopySecond,
    Check,
    Send,
}

impl Reading {
    pub(super) fn new(request: Request, scenario: &Scenario) -> Self {
        let at = match () {
            // Elsewhere it is always open.
            () if scenario.closes > 0 && !scenario.has(Mutant::ShardIgnored) => At::LoadShard,
            () if scenario.has(Mutant::FactsFirst) => At::Compare,
            () => At::LoadWord,
        };
        Self {
            request,
            at,
            word: Word::default(),
            sequence: 0,
            is_leftover: false,
            frame: 0,
            halves: [0; 2],
        }
    }

    pub(super) const fn request(&self) -> Request {
        self.request
    }
}

impl Scenario {
    /// The step after one that lets the READ go on.
    fn after(&self, at: At) -> At {
        let is_late = self.has(Mutant::RaisedAfterCopy) || self.has(Mutant::RaisedAfterCheck);
        match at {
            At::LoadShard => At::LoadWord,
            At::LoadWord if self.has(Mutant::FactsFirst) => At::Raise,
            At::LoadWord => At::Compare,
            At::Compare if self.has(Mutant::FactsFirst) => At::LoadWord,
            At::Compare if is_late => self.first_look(),
            At::Compare => At::Raise,
            At::Raise if self.has(Mutant::RaisedAfterCopy) => At::Check,
            At::Raise if self.has(Mutant::RaisedAfterCheck) => At::Send,
            At::Raise => self.first_look(),
            At::LoadSequence => At::Look,
            // Allocations of which a line gets away from home are complete.
            At::Look if self.has(Mutant::NameFirst) => At::LoadFrame,
            At::Look if self.is_adopted => At::LookAtName,
            At::LookAtName if self.has(Mutant::NameFirst) => At::LoadSequence,
            At::LookAtName if self.has(Mutant::FrameFirst) => At::CopyFirst,
            At::LookAtName => At::LoadFrame,
            At::LoadFrame if self.has(Mutant::FrameFirst) => At::LoadSequence,
            At::LoadFrame => At::CopyFirst,
            At::Look if self.has(Mutant::CompleteBeforeRole) => At::LookAtFlag,
            At::Look => At::LookAtHead,
            At::LookAtHead if self.has(Mutant::CompleteBeforeRole) => At::CopyFirst,
            At::LookAtHead => At::LookAtFlag,
            At::LookAtFlag if self.has(Mutant::CompleteBeforeRole) => At::LookAtHead,
            At::LookAtFlag => At::CopyFirst,
            At::CopyFirst => At::CopySecond,
            At::CopySecond if self.has(Mutant::RaisedAfterCopy) => At::Raise,
            At::CopySecond => At::Check,
            At::Check if self.has(Mutant::RaisedAfterCheck) => At::Raise,
            At::Check | At::Send => At::Send,
        }
    }

    /// What it looks at first of a page.
    fn first_look(&self) -> At {
        match () {
            () if self.has(Mutant::NameFirst) => At::LookAtName,
            () if self.has(Mutant::FrameFirst) => At::LoadFrame,
            () => At::LoadSequence,
        }
    }

    /// One step of the reader.
    pub(super) fn read(&self, world: &mut World, reader: usize) -> Option<()> {
        let mut reading = world.readers[reader]?;
        let request = reading.request;
        let Op::Read(page, tag) = World::op(self, request.client, request.op) else { return None };
        let place = usize::from(self.slot_of(request.session));
        let is_good = match reading.at {
            At::LoadShard => world.is_open,
            At::LoadWord => {
                reading.word = world.slots[place].word;
                (!reading.word.is_executing || self.has(Mutant::ExecutingIgnored))
                    && request.number >= reading.word.low.max(request.low)
                    && !self.has(Mutant::AlwaysPasses)
            }
            At::Compare => {
                let slot = world.slots[place];
                (slot.id, slot.client) == (request.session, self.holder(request.client))
            }
            At::Raise => {
                let word = &mut world.slots[place].word;
                let mut expected = reading.word;
                if self.has(Mutant::UsesIgnored) {
                    expected.uses = word.uses;
                }
                let is_same = *word == expected;
                let is_far = self.has(Mutant::RaisedToNumber);
                let low = if is_far { request.number } else { request.low };
                let must_raise = low > reading.word.low;
                if must_raise && is_same {
                    word.low = low;
                }
                !must_raise || is_same
            }
            At::LoadSequence => {
                reading.sequence = world.pages[page].sequence;
                reading.sequence % 2 == 0 || self.has(Mutant::OddIgnored)
            }
            At::Look => {
                reading.is_leftover = world.pages[page].kind.holds != Holds::Written;
                self.may_answer(world, page, tag)
            }
            At::LookAtName => !world.is_named_other || self.has(Mutant::NameIgnored),
            At::LoadFrame => {
                reading.frame = world.frame;
                true
            }
            At::LookAtHead => world.pages[0].kind.role == Role::Head,
            At::LookAtFlag => {
                world.pages[0].kind.is_complete || self.has(Mutant::IncompleteAnswered)
            }
            At::CopyFirst | At::CopySecond => {
                let half = usize::from(reading.at == At::CopySecond);
                reading.halves[half] = world.pages[page].frames[reading.frame][half];
                true
            }
            At::Check => {
                reading.sequence == world.pages[page].sequence || self.has(Mutant::SequenceOnce)
            }
            At::Send => true,
        };
        if !is_good {
            world.readers[reader] = None;
            world.network.push(Request { is_passed: true, ..request });
            return Some(());
        }
        let is_last = matches!(reading.at, At::Check | At::Send);
        reading.at = self.after(reading.at);
        if !is_last || reading.at == At::Raise {
            world.readers[reader] = Some(reading);
            return Some(());
        }
        world.readers[reader] = None;
        let is_zero = reading.is_leftover && !self.has(Mutant::LeftoverRaw);
        let halves = if is_zero { [0; 2] } else { reading.halves };
        if world.is_awaited(&request) {
            world.learn(self, request.client, (page, tag), halves, true);
            world.clients[usize::from(request.client)].ends_op();
        }
        Some(())
    }

    /// Whether the state of a page allows an answer.
    fn may_answer(&self, world: &World, page: usize, tag: u8) -> bool {
        let this = world.pages[page];
        this.kind.role != Role::Free
            && (this.tag == tag || self.has(Mutant::TagIgnored))
            && (!this.is_leased || self.has(Mutant::MarkIgnored))
            && (!this.is_elsewhere || self.has(Mutant::ElsewhereIgnored))
    }

    /// The slot that an id names.
    pub(super) fn slot_of(&self, session: u8) -> u8 {
        (session - 1) % super::world::index(self.slots)
    }
}
