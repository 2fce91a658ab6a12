//! Has parts of allocations freed that are at other servers (`docs/migration.md`, "DELETE").
//!
//! The responder decides that an allocation is freed, and frees what is here at last; this asks the other servers. It starts
//! with the last page and ends with the first one, because the server of the first page is who goes on if the home loses
//! its memory. Each request can be repeated, so nothing of this outlives the process.

use core::time::Duration;

use bluebridge_wire::{
    Location, NodeId, Pointer, Space, Status,
    address::{LINE_PAGES, PAGE_SHIFT},
};

use crate::{
    Timestamp,
    requester::{Buffers, Completion, Failure, Operation, Output, Requester, Server},
    responder::{Freeing, PartPlace, Responder},
    store::{Grant, PageStore},
};

/// How long a part may take until it is asked for anew.
const PATIENCE: Duration = Duration::from_secs(2);

/// How long an allocation waits after a refusal; doubled each time, up to the second value.
const PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(500));

/// The most lines of one allocation that are looked at in one call.
const LINES_AT_ONCE: u32 = 1024;

/// One allocation.
struct Task {
    freeing: Freeing,
    /// Pages from its first one on that may not be free yet.
    left: u32,
    /// When it goes on.
    at: Timestamp,
    pause: Duration,
    /// A request is under way, about the last page that is left.
    is_asking: bool,
    /// The request went to the home, which knows what is lost.
    is_asking_home: bool,
    /// The home is back with the allocation: it frees all of it.
    is_homes: bool,
}

/// What is to be done for an allocation.
enum Step {
    Ask(Option<NodeId>),
    /// The home has freed it.
    HandOver,
    Finish,
    GoOn,
    Wait,
}

/// Tells where a page of a node is that has lost it, by its location there, if this server is the node's deputy.
pub type Known<'a> = &'a dyn Fn(NodeId, Location) -> Option<PartPlace>;

/// Frees the allocations of one space that the responder of a shard has decided to free.
pub struct Freer {
    space: Space,
    tasks: Vec<Task>,
}

impl Freer {
    /// One that has nothing to do.
    #[must_use]
    pub const fn new(space: Space) -> Self {
        Self { space, tasks: Vec::new() }
    }

    /// The space of its allocations, and of the requester that it needs.
    #[must_use]
    pub const fn space(&self) -> Space {
        self.space
    }

    /// Whether it has nothing to do.
    #[must_use]
    pub const fn is_idle(&self) -> bool {
        self.tasks.is_empty()
    }

    /// The next moment at which [`Self::poll`] has something to do; `None` if it waits for completions only.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.tasks.iter().filter(|task| !task.is_asking).map(|task| task.at).min()
    }

    /// Starts what can be started, and lets the responder free what no other server has any more. Replies of the responder
    /// must have been sent; it may have others afterwards. `known` spares questions to the home.
    pub fn poll<S: PageStore + ?Sized>(
        &mut self,
        now: Timestamp,
        (requester, responder): (&mut Requester, &mut Responder),
        known: Known<'_>,
        store: &mut S,
    ) {
        for freeing in responder.freeings().filter(|of| of.space == self.space) {
            if !self.tasks.iter().any(|task| task.freeing.id == freeing.id) {
                self.tasks.push(Task::new(now, freeing));
            }
        }
        self.tasks.retain_mut(|task| {
            if task.is_asking || now < task.at {
                return true;
            }
            match task.next(responder, known) {
                Step::Ask(at) => task.ask(now, at, requester),
                Step::HandOver => {
                    responder.hand_over(now, task.freeing.id, store);
                    return false;
                }
                Step::GoOn => task.at = now,
                Step::Wait => task.wait(now),
                Step::Finish => match responder.finish_freeing(now, task.freeing.id, store) {
                    Ok(true) => return false,
                    Ok(false) => task.wait(now),
                    Err(_) => task.at = now,
                },
            }
            true
        });
    }

    /// Handles the end of a request. Call [`Self::poll`] afterwards.
    pub fn heard(&mut self, now: Timestamp, completion: &Completion) {
        let is_its = |task: &&mut Task| u64::from(task.freeing.id) == completion.token;
        let Some(task) = self.tasks.iter_mut().find(is_its) else { return };
        task.is_asking = false;
        let refusal = match completion.result {
            Err(Failure::Refused { status, .. }) => Some(status),
            _ => None,
        };
        if task.is_homes {
            let is_free = matches!(refusal, Some(Status::NotAllocated | Status::StaleTag));
            if completion.result.is_ok() || is_free {
                (task.left, task.at) = (0, now);
                return;
            }
            // It may have lost the allocation by now: then it leads to who has the parts.
            task.is_homes = false;
            return task.wait(now);
        }
        // Only a home that has the allocation says so.
        if task.is_asking_home && refusal == Some(Status::Forbidden) {
            (task.is_homes, task.at) = (true, now);
            return;
        }
        let is_lost = task.is_asking_home && refusal == Some(Status::StaleGeneration);
        let freed = match completion.result {
            Ok(Output::Freed(pages)) => pages,
            _ if is_lost => task.pages_of_last_line(),
            _ => 0,
        };
        if freed == 0 || freed > task.left {
            return task.wait(now);
        }
        (task.left, task.at, task.pause) = (task.left - freed, now, PAUSE.0);
    }
}

impl Task {
    const fn new(now: Timestamp, freeing: Freeing) -> Self {
        Self {
            freeing,
            left: freeing.pages,
            at: now,
            pause: PAUSE.0,
            is_asking: false,
            is_asking_home: false,
            is_homes: false,
        }
    }

    /// Passes over what is here or lost.
    fn next(&mut self, responder: &Responder, known: Known<'_>) -> Step {
        if self.is_homes {
            return if self.left == 0 { Step::HandOver } else { Step::Ask(None) };
        }
        for _ in 0..LINES_AT_ONCE {
            if self.left == 0 {
                return Step::Finish;
            }
            let place = match responder.place_of_part(self.freeing.id, self.left) {
                Some(PartPlace::AskHome) => {
                    let last = self.last().map(|last| known(last.node, last.location));
                    Some(last.flatten().unwrap_or(PartPlace::AskHome))
                }
                place => place,
            };
            match place {
                Some(PartPlace::Here(pages) | PartPlace::Lost(pages)) => {
                    self.left = self.left.saturating_sub(pages.max(1));
                }
                Some(PartPlace::At(node)) => return Step::Ask(Some(node)),
                Some(PartPlace::AskHome) => return Step::Ask(None),
                Some(PartPlace::Unknown) => return Step::Wait,
                // It is not being freed any more.
                None => return Step::Finish,
            }
        }
        Step::GoOn
    }

    fn ask(&mut self, now: Timestamp, at: Option<NodeId>, requester: &mut Requester) {
        let Some(pointer) = self.last() else { return self.wait(now) };
        let shard = pointer.location.shard();
        let at = at.map(|node| Server { node, shard });
        let part = match self.is_homes {
            false => Operation::FreePart { at, pointer, pages: self.left },
            true => {
                let Freeing { home: node, grant, space, pages, .. } = self.freeing;
                let Grant { location, tag } = grant;
                Operation::Delete { pointer: Pointer { space, node, tag, location }, pages }
            }
        };
        let token = u64::from(self.freeing.id);
        match requester.start_until(now, part, token, now + PATIENCE) {
            Ok(_) => (self.is_asking, self.is_asking_home) = (true, at.is_none()),
            Err(_) => self.wait(now),
        }
    }

    /// The pointer to the last page that is left.
    fn last(&self) -> Option<Pointer> {
        let Freeing { home: node, grant: Grant { location, tag }, space, .. } = self.freeing;
        let page = location.page() + u64::from(self.left.checked_sub(1)?);
        let location = Location::new(location.generation(), page << PAGE_SHIFT)?;
        Some(Pointer { space, node, tag, location })
    }

    /// The pages that are left in the line of the last one.
    fn pages_of_last_line(&self) -> u32 {
        let in_line = self.last().map_or(1, |last| last.location.page() % LINE_PAGES as u64 + 1);
        u32::try_from(in_line).unwrap_or(1).min(self.left)
    }

    fn wait(&mut self, now: Timestamp) {
        self.at = now + self.pause;
        self.pause = (self.pause * 2).min(PAUSE.1);
    }
}

/// Its requests carry no data.
impl Buffers for Freer {
    fn outgoing(&self, _token: u64) -> &[u8] {
        &[]
    }

    fn incoming(&mut self, _token: u64) -> &mut [u8] {
        &mut []
    }
}
