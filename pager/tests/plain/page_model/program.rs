//! The program's threads, and which thread does what.

use super::{
    Op, Scenario,
    evict::Evict,
    fault::Fault,
    model::Choice,
    world::{Discarding, Doing, Mapped, State, World},
};

impl Scenario {
    /// The next step of a thread; `None` if there is none now.
    pub(super) fn step(&self, world: &mut World, actor: usize, choice: Choice) -> Option<()> {
        let this = world.actors[actor];
        if let Some(page) = this.wake {
            world.actors[actor].wake = None;
            world.wake(page);
            return (choice == Choice::Go).then_some(());
        }
        if matches!(this.doing, Doing::Waiting { .. } | Doing::Asleep { .. }) {
            return None;
        }
        if this.evict.is_some() {
            return self.evict(world, actor, choice);
        }
        if this.fault.is_some() {
            return self.fault(world, actor, choice);
        }
        if choice != Choice::Go {
            return None;
        }
        if actor < self.threads.len() {
            return self.program(world, actor);
        }
        // A handler thread without a fault waits for a report.
        if actor < self.threads.len() + self.handlers {
            return None;
        }
        let has_victim = (0..self.pages.len()).any(|page| world.is_evictable(self, page));
        if this.next == self.rounds || world.evictor.is_some() || !has_victim {
            return None;
        }
        world.actors[actor].next += 1;
        world.evictor = Some(actor);
        world.actors[actor].evict = Some(Evict::new(false));
        Some(())
    }

    fn op(&self, world: &World, actor: usize) -> Option<Op> {
        let next = usize::from(world.actors[actor].next);
        self.threads.get(actor)?.get(next).copied()
    }

    /// Whether all threads of the program have ended.
    pub(super) fn is_done(&self, world: &World) -> bool {
        (0..self.threads.len()).all(|actor| self.op(world, actor).is_none())
    }

    fn program(&self, world: &mut World, actor: usize) -> Option<()> {
        let op = self.op(world, actor)?;
        if let Doing::Discarding { was, at } = world.actors[actor].doing {
            let Op::Discard(page) = op else { return None };
            let next = match at {
                Discarding::Unmap => {
                    world.unmap(actor, page);
                    Some(Discarding::Finish)
                }
                Discarding::Finish => {
                    world.finish(self, actor, page, was.with(State::Zero).stored(false));
                    (world.actors[actor].frames > 0).then_some(Discarding::Release)
                }
                Discarding::Release => {
                    world.release(actor);
                    None
                }
            };
            let this = &mut world.actors[actor];
            match next {
                Some(at) => this.doing = Doing::Discarding { was, at },
                None => (this.doing, this.next) = (Doing::Ready, this.next + 1),
            }
            return Some(());
        }
        match op {
            Op::Read(page) => self.access(world, actor, page, None),
            Op::Write(page) => {
                let version = world.versions + 1;
                self.access(world, actor, page, Some(version))
            }
            Op::WriteZero(page) => self.access(world, actor, page, Some(0)),
            Op::Pin(page) => self.pin(world, actor, page, false),
            Op::PinMut(page) => self.pin(world, actor, page, true),
            Op::Unpin(page) => {
                let is_pinned = std::mem::take(&mut world.actors[actor].pinned[page]);
                world.pages[page].word.pins -= u8::from(is_pinned);
                world.actors[actor].next += 1;
                Some(())
            }
            Op::Discard(page) => {
                let word = world.pages[page].word;
                match word.state {
                    State::Zero | State::Lost => world.actors[actor].next += 1,
                    State::Busy => {
                        world.pages[page].word.has_waiters = true;
                        world.actors[actor].doing = Doing::Waiting { page };
                    }
                    _ => {
                        let was = world.claim(page);
                        world.pages[page].latest = 0;
                        let at =
                            if was.is_local() { Discarding::Unmap } else { Discarding::Finish };
                        world.actors[actor].doing = Doing::Discarding { was, at };
                    }
                }
                Some(())
            }
            Op::Flush => {
                if world.evictor.is_some() {
                    return None;
                }
                world.evictor = Some(actor);
                world.actors[actor].evict = Some(Evict::new(true));
                for page in &mut world.pages {
                    page.flushed = page.latest;
                }
                Some(())
            }
        }
    }

    /// An instruction of the program; `write` is what it writes.
    fn access(
        &self,
        world: &mut World,
        actor: usize,
        page: usize,
        write: Option<u8>,
    ) -> Option<()> {
        let target = &mut world.pages[page];
        let this = &mut world.actors[actor];
        match (target.mapped, write) {
            (Mapped::Protected | Mapped::Writable, None) => {
                world.witness.wrong_read |= target.contents != target.latest;
                this.next += 1;
            }
            (Mapped::Writable, Some(version)) => {
                target.contents = version;
                target.latest = version;
                world.versions = world.versions.max(version);
                this.next += 1;
            }
            (Mapped::Poisoned, _) => {
                world.witness.false_loss |= world.losses == self.losses;
                this.next += 1;
            }
            (Mapped::Absent, _) | (Mapped::Protected, Some(_)) => {
                let is_write = write.is_some();
                if self.handlers > 0 {
                    this.doing = Doing::Asleep { page, is_taken: false, is_write };
                } else {
                    this.fault = Some(Fault::new(page, is_write, None));
                }
            }
        }
        Some(())
    }

    fn pin(&self, world: &mut World, actor: usize, page: usize, is_write: bool) -> Option<()> {
        let word = &mut world.pages[page].word;
        let is_ready = if is_write { word.state == State::Dirty } else { word.is_local() };
        let this = &mut world.actors[actor];
        if is_ready {
            word.pins += 1;
            this.pinned[page] = true;
            this.next += 1;
        } else {
            this.fault = Some(Fault::new(page, is_write, None));
        }
        Some(())
    }

    /// A handler thread takes the report of a fault.
    pub(super) fn take(&self, world: &mut World, handler: usize, thread: usize) -> Option<()> {
        let this = world.actors[handler];
        let is_free = this.fault.is_none() && this.wake.is_none();
        let Doing::Asleep { page, is_taken: false, is_write } = world.actors[thread].doing else {
            return None;
        };
        if !is_free {
            return None;
        }
        world.actors[thread].doing = Doing::Asleep { page, is_taken: true, is_write };
        world.actors[handler].fault = Some(Fault::new(page, is_write, Some(thread)));
        Some(())
    }

    /// The server loses what it has.
    pub(super) fn lose_memory(&self, world: &mut World) -> Option<()> {
        world.losses = world.losses.checked_sub(1)?;
        world.server.take().map(|_| ())
    }
}
