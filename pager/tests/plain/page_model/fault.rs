//! How a fault is resolved: `Pager::fault` and what it calls.

use super::{
    Mutant, Scenario,
    evict::Evict,
    model::Choice,
    world::{Answer, Doing, Mapped, State, Word, World},
};

/// A fault that a thread resolves.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(super) struct Fault {
    pub(super) page: usize,
    pub(super) is_write: bool,
    /// The thread for which a handler thread resolves it; the handler goes on if the page is busy.
    pub(super) sleeper: Option<usize>,
    at: At,
    pointer: Option<u8>,
    /// The word before the claim.
    was: Option<Word>,
    answer: Option<Answer>,
}

#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
enum At {
    Start,
    Look,
    Sleep,
    Frame,
    Claim,
    Lane,
    Pointer,
    CheckPointer,
    Read,
    Install,
    Finish { is_dirty: bool },
    Unstore,
    FinishUnstored,
    Tell,
    Restore,
    SecondLook,
    Lose,
    FinishLost,
    Release,
    GiveUp,
    GiveUpLose,
    GiveUpFinish,
    Unprotect,
    FinishDirty,
}

impl Fault {
    pub(super) fn new(page: usize, is_write: bool, sleeper: Option<usize>) -> Self {
        let at = At::Start;
        Self { page, is_write, sleeper, at, pointer: None, was: None, answer: None }
    }
}

impl Scenario {
    fn reads_pointer_first(&self) -> bool {
        self.has(Mutant::PointerFirst) || self.has(Mutant::SecondLook)
    }

    /// The next step of a fault; `None` if there is none now.
    pub(super) fn fault(&self, world: &mut World, actor: usize, choice: Choice) -> Option<()> {
        let mut fault = world.actors[actor].fault?;
        let page = fault.page;
        if choice != Choice::Go && fault.at != At::Read {
            return None;
        }
        match fault.at {
            At::Start if self.reads_pointer_first() => {
                fault.pointer = world.base;
                fault.at = At::Look;
            }
            At::Start | At::Look => return self.look(world, actor, fault),
            At::Sleep => {
                // The system call compares once more.
                let word = world.pages[page].word;
                if word.state == State::Busy && word.has_waiters {
                    world.actors[actor].doing = Doing::Waiting { page };
                }
                fault.at = At::Start;
            }
            At::Frame if world.free > 0 => {
                world.free -= 1;
                world.actors[actor].frames += 1;
                fault.at = At::Claim;
            }
            At::Frame => {
                let has_victim = (0..self.pages.len()).any(|page| world.is_evictable(self, page));
                if world.evictor.is_some() || !has_victim {
                    return None;
                }
                world.evictor = Some(actor);
                world.actors[actor].evict = Some(Evict::new(false));
            }
            At::Claim => {
                let is_same = Some(world.pages[page].word) == fault.was;
                if is_same || self.has(Mutant::FaultClaimsBlind) {
                    world.pages[page].word.state = State::Busy;
                    fault.at = if self.is_narrow { At::Lane } else { self.after_lane(&mut fault) };
                } else {
                    world.release(actor);
                    fault.at = At::Start;
                }
            }
            At::Lane => {
                if world.lane.is_some() {
                    return None;
                }
                world.lane = Some(actor);
                fault.at = self.after_lane(&mut fault);
            }
            At::Pointer => {
                fault.pointer = world.base;
                fault.at = At::CheckPointer;
            }
            At::CheckPointer => {
                fault.at = At::Read;
                // The pointer may be that of the extent's next allocation.
                if world.pages[page].word.is_forgotten && !self.has(Mutant::PointerUnchecked) {
                    fault.answer = Some(Answer::Refused);
                    fault.at = At::Restore;
                }
            }
            At::Read => {
                let answer = match (fault.pointer, world.server, choice) {
                    (_, _, Choice::Take) => {
                        Answer::Contents(self.take_background(world, page, fault.was?)?)
                    }
                    (Some(_), _, Choice::Fail) => {
                        world.failures = world.failures.checked_sub(1)?;
                        Answer::Failed
                    }
                    (_, _, Choice::Fail | Choice::FailLate | Choice::Skip) => return None,
                    (Some(pointer), Some(server), _) if pointer == server.id => {
                        Answer::Contents(server.contents[page])
                    }
                    _ => Answer::Refused,
                };
                fault.answer = Some(answer);
                fault.at = match answer {
                    Answer::Contents(_) => At::Install,
                    Answer::Refused | Answer::Failed => At::Restore,
                };
            }
            At::Install => {
                let is_zero = fault.was.is_some_and(|was| was.state == State::Zero);
                let is_writable = fault.is_write || is_zero || self.is_eager;
                let Some(Answer::Contents(contents)) = fault.answer else { return None };
                let target = &mut world.pages[page];
                target.contents = contents;
                let is_mapped_writable = is_writable || self.has(Mutant::WritableIsClean);
                target.mapped =
                    if is_mapped_writable { Mapped::Writable } else { Mapped::Protected };
                world.actors[actor].frames -= 1;
                world.wake(page);
                fault.at = At::Finish { is_dirty: is_writable };
            }
            At::Finish { is_dirty } => {
                let was = fault.was?;
                if is_dirty {
                    world.finish(self, actor, page, was.with(State::Dirty));
                } else if !world.finish_stored(self, actor, page, was.with(State::Clean)) {
                    fault.at = At::Unstore;
                    world.actors[actor].fault = Some(fault);
                    return Some(());
                }
                return self.installed(world, actor, fault);
            }
            At::Unstore => {
                world.unprotect(page);
                fault.at = At::FinishUnstored;
            }
            At::FinishUnstored => {
                let next = fault.was?.with(State::Dirty).stored(false);
                world.finish(self, actor, page, next);
                return self.installed(world, actor, fault);
            }
            At::Tell => {
                // The queue is full, so this thread empties it.
                if world.evictor.is_some() {
                    return None;
                }
                self.leave_lane(world, actor);
                world.actors[actor].fault = None;
                return Some(());
            }
            At::Restore => {
                let was = fault.was?;
                fault.at = if !world.finish_stored(self, actor, page, was) {
                    At::Lose
                } else if self.has(Mutant::SecondLook) {
                    At::SecondLook
                } else {
                    At::Release
                };
            }
            At::SecondLook => {
                let word = world.pages[page].word;
                fault.at = At::Release;
                if word.state == State::Remote && world.base != fault.pointer {
                    fault.was = Some(world.claim(page));
                    fault.at = At::Lose;
                }
            }
            At::Lose => {
                world.poison(page);
                fault.at = At::FinishLost;
            }
            At::FinishLost => {
                let next = fault.was?.with(State::Lost).stored(false);
                world.finish(self, actor, page, next);
                fault.at = At::Release;
            }
            At::Release => {
                if !self.has(Mutant::FrameKept) {
                    world.release(actor);
                }
                world.actors[actor].frames = 0;
                self.leave_lane(world, actor);
                let is_final = fault.answer == Some(Answer::Refused);
                fault.at = if is_final || self.has(Mutant::FailureIsLoss) {
                    At::GiveUp
                } else {
                    At::Start
                };
            }
            At::GiveUp => {
                if !world.pages[page].word.is_missing() {
                    return self.failed(world, actor, fault);
                }
                fault.was = Some(world.claim(page));
                fault.at = At::GiveUpLose;
            }
            At::GiveUpLose => {
                world.poison(page);
                fault.at = At::GiveUpFinish;
            }
            At::GiveUpFinish => {
                let next = fault.was?.with(State::Lost).stored(false);
                world.finish(self, actor, page, next);
                return self.failed(world, actor, fault);
            }
            At::Unprotect => {
                if self.has(Mutant::DirtyBeforeUnprotect) {
                    world.finish(self, actor, page, fault.was?.with(State::Dirty));
                } else {
                    world.unprotect(page);
                }
                fault.at = At::FinishDirty;
            }
            At::FinishDirty => {
                if self.has(Mutant::DirtyBeforeUnprotect) {
                    world.unprotect(page);
                } else {
                    world.finish(self, actor, page, fault.was?.with(State::Dirty));
                }
                world.actors[actor].fault = None;
                return Some(());
            }
        }
        if fault.at == At::Start {
            // What was known before says nothing about the next try.
            fault = Fault::new(page, fault.is_write, fault.sleeper);
        }
        world.actors[actor].fault = Some(fault);
        Some(())
    }

    fn look(&self, world: &mut World, actor: usize, mut fault: Fault) -> Option<()> {
        let page = fault.page;
        let word = world.pages[page].word;
        match word.state {
            State::Busy => {
                let is_announced = !self.has(Mutant::NotAnnounced);
                world.pages[page].word.has_waiters |= is_announced;
                if fault.sleeper.is_some() {
                    world.actors[actor].fault = None;
                    return Some(());
                }
                fault.at = At::Sleep;
            }
            State::Clean | State::Writing if fault.is_write => {
                fault.was = Some(world.claim(page));
                fault.at = At::Unprotect;
            }
            State::Dirty | State::Clean | State::Writing => {
                world.actors[actor].fault = None;
                if fault.sleeper.is_some() && !self.has(Mutant::NoWakeIfPresent) {
                    world.actors[actor].wake = Some(page);
                }
                return Some(());
            }
            State::Lost => return self.failed(world, actor, fault),
            State::Zero | State::Remote => {
                fault.was = Some(word);
                fault.at = At::Frame;
            }
        }
        world.actors[actor].fault = Some(fault);
        Some(())
    }

    fn after_lane(&self, fault: &mut Fault) -> At {
        let is_remote = fault.was.is_some_and(|was| was.state == State::Remote);
        if !is_remote {
            fault.answer = Some(Answer::Contents(0));
            At::Install
        } else if self.reads_pointer_first() {
            At::Read
        } else {
            At::Pointer
        }
    }

    fn leave_lane(&self, world: &mut World, actor: usize) {
        if world.lane == Some(actor) {
            world.lane = None;
        }
    }

    fn installed(&self, world: &mut World, actor: usize, mut fault: Fault) -> Option<()> {
        if !self.has(Mutant::TellInLane) {
            self.leave_lane(world, actor);
        }
        fault.at = At::Tell;
        world.actors[actor].fault = self.is_narrow.then_some(fault);
        Some(())
    }

    /// Ends a fault that cannot be resolved.
    fn failed(&self, world: &mut World, actor: usize, fault: Fault) -> Option<()> {
        let page = fault.page;
        world.witness.false_loss |= world.losses == self.losses;
        world.actors[actor].fault = None;
        let Some(sleeper) = fault.sleeper else {
            world.actors[actor].next += 1;
            return Some(());
        };
        world.actors[actor].wake = Some(page);
        let target = &mut world.pages[page];
        if target.mapped == Mapped::Absent && self.has(Mutant::PoisonUnclaimed) {
            target.mapped = Mapped::Poisoned;
        }
        // The thread gets a signal.
        let sleeper = &mut world.actors[sleeper];
        if target.mapped != Mapped::Poisoned
            && matches!(sleeper.doing, Doing::Asleep { page: slept, .. } if slept == page)
        {
            sleeper.doing = Doing::Ready;
            sleeper.next += 1;
        }
        Some(())
    }
}
