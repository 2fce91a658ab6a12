//! All results that the clients received, and whether they are possible.

use core::time::Duration;
use std::collections::BTreeMap;

use bluebridge_protocol::{
    Timestamp,
    requester::{Failure, Output},
};
use bluebridge_wire::{ArenaGeneration, NodeId, Pointer, Status, address::PAGE_BYTES};

use super::{
    region::{Contents, Region, State},
    server::GENERATION_COUNT,
    task::{Slot, Task},
};

/// A server in the controller's view.
#[derive(Clone, Debug)]
pub(super) struct ServerFacts {
    pub(super) node: NodeId,
    /// The first generation of its contents.
    pub(super) generation: ArenaGeneration,
    pub(super) arena_pages: u64,
    /// Allocations that may exist although no client knows them, in pages: a CREATE with an unknown
    /// outcome, or one that was repeated because its session was lost.
    pub(super) orphans: Vec<u64>,
    /// The same for old processes that still run: also after the server lost its contents.
    pub(super) zombies: Vec<u64>,
    /// When the server last restarted, lost its authority, or was stopping.
    pub(super) troubled_until: Timestamp,
}

impl ServerFacts {
    /// Pages that its addresses have at most: as many again as its memory, for when others have the first ones.
    pub(super) const fn address_pages(&self) -> u64 {
        2 * self.arena_pages.next_multiple_of(8)
    }
}

impl ServerFacts {
    /// Whether a pointer refers to the server's current contents, and not to lost ones.
    pub(super) fn is_of_now(&self, pointer: Pointer) -> bool {
        life_of(pointer.location.generation()) == life_of(self.generation)
    }
}

/// How often the contents were lost before a generation was reserved.
pub(super) const fn life_of(generation: ArenaGeneration) -> u16 {
    generation.number() / GENERATION_COUNT
}

/// All results of the clients.
pub(super) struct Ledger {
    pub(super) regions: Vec<Region>,
    pub(super) servers: Vec<ServerFacts>,
    /// How often each kind of task had each outcome.
    pub(super) outcomes: BTreeMap<(&'static str, String), u64>,
    /// Whether an old session may exist besides a new one, so that late requests are possible.
    sessions_linger: bool,
    /// A CREATE that took longer may have been repeated in another session.
    session_idle: Duration,
}

/// The longest travel time of a reply, including a pause of its receiver.
const LINGER: Duration = Duration::from_millis(500);

/// The outcome of an operation on memory.
enum Outcome {
    Done,
    /// It was executed once, or not at all, or will be.
    Unknown,
    NotDone,
}

mod checks;
mod contents;
mod grants;

impl Ledger {
    pub(super) fn new(
        servers: Vec<ServerFacts>,
        sessions_linger: bool,
        session_idle: Duration,
    ) -> Self {
        let (regions, outcomes) = (Vec::new(), BTreeMap::new());
        Self { regions, servers, outcomes, sessions_linger, session_idle }
    }

    /// Records the beginning of a task.
    pub(super) fn begin(&mut self, now: Timestamp, task: &Task) {
        if let Some(region) = task.holds() {
            self.regions[region].busy = true;
        }
        match *task {
            Task::Delete { region, .. } => {
                let region = &mut self.regions[region];
                region.state = State::Doubtful;
                region.delete_count += 1;
                region.deleting_from.get_or_insert(now);
            }
            Task::SharedWrite { region, first_page, pages, value } => {
                if let Contents::Shared(registers) = &mut self.regions[region].contents {
                    let written = registers.iter_mut().enumerate().skip(first_page).take(pages);
                    for (page, register) in written {
                        register.begin(value | page as u64, now);
                    }
                }
            }
            _ => {}
        }
    }

    /// Outstanding CREATEs may leave pages behind on a server that lost its sessions.
    pub(super) fn orphan_creates<'a>(&mut self, at: usize, slots: impl Iterator<Item = &'a Slot>) {
        for slot in slots {
            if let Task::Create { server, pages, .. } = slot.task
                && server.is_none_or(|server| server == at)
            {
                self.servers[at].orphans.push(pages.into());
            }
        }
    }

    /// Records the end of a task.
    ///
    /// # Errors
    /// A description of a result that is impossible with correct servers.
    pub(super) fn complete(
        &mut self,
        now: Timestamp,
        client: usize,
        slot: &Slot,
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        let outcome = match &result {
            Ok(_) => "ok".to_owned(),
            Err(Failure::Refused { status, .. }) => format!("refused {status:?}"),
            Err(Failure::OutcomeUnknown { .. }) => "outcome unknown".to_owned(),
            Err(Failure::Partial(_)) => "partial".to_owned(),
            Err(failure) => {
                let text = format!("{failure:?}");
                text.split([' ', '{', '(']).next().unwrap_or_default().to_owned()
            }
        };
        *self.outcomes.entry((slot.task.name(), outcome)).or_default() += 1;
        if let Some(region) = slot.task.holds() {
            self.regions[region].busy = false;
        }
        self.judge(now, client, slot, result)
    }

    fn judge(
        &mut self,
        now: Timestamp,
        client: usize,
        slot: &Slot,
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        match slot.task {
            Task::Create { purpose, server, pages, .. } => {
                self.created(now, client, (purpose, server, pages), slot, result)
            }
            Task::Delete { region, .. } => self.deleted(now, slot, region, result),
            Task::Read { region, offset, length } => {
                self.read(slot, (region, offset, length), result)
            }
            Task::Write { region, offset, length } | Task::Zero { region, offset, length } => {
                self.written(now, slot, (region, offset, length), result)
            }
            Task::SharedRead { region, offset, length } => {
                self.shared_read(now, slot, (region, offset, length), result)
            }
            Task::SharedWrite { region, first_page, pages, value } => self.shared_written(
                now,
                slot,
                (region, first_page..first_page + pages, value),
                result,
            ),
            Task::Add { region, cell, addend } => {
                self.added(now, slot, (region, cell, addend), result)
            }
            Task::Swap { region, cell, expected, new } => {
                self.swapped(now, slot, (region, cell, expected, new), result)
            }
            Task::CellRead { region, cell } => self.cell_read(slot, (region, cell), result),
            Task::Ping { server, .. } | Task::Stat { server } | Task::Close { server } => {
                self.must_not_refuse(slot.start, server, &result)
            }
            Task::Wrong { refusals, server, .. } => self.refused(slot, server, refusals, result),
        }
    }

    /// A valid request may only be refused while the server has a fault.
    fn must_not_refuse(
        &self,
        start: Timestamp,
        server: usize,
        result: &Result<Output, Failure>,
    ) -> Result<(), String> {
        let refuser = match result {
            Err(Failure::Refused { node, .. }) => self.servers.iter().position(|s| s.node == *node),
            _ => None,
        };
        // A refusal may be in flight for a while, or wait at a paused client.
        let troubled = self.servers[refuser.unwrap_or(server)].troubled_until + LINGER >= start;
        match result {
            Err(Failure::Refused { status: Status::Overloaded, .. }) => Ok(()),
            Err(Failure::Refused {
                status: Status::NoAuthority | Status::ShuttingDown, ..
            }) if troubled => Ok(()),
            Err(Failure::Refused { status, node }) => {
                Err(format!("node {node} refused: {status:?}"))
            }
            Err(Failure::Violation { node }) => Err(format!("node {node} broke the protocol")),
            Err(Failure::Buffer | Failure::Busy { .. } | Failure::Drained { .. }) => {
                Err(format!("{result:?} cannot happen here"))
            }
            _ => Ok(()),
        }
    }

    fn refused(
        &self,
        slot: &Slot,
        server: usize,
        refusals: &[Status],
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        match result {
            Err(Failure::Refused { status, .. }) if refusals.contains(&status) => Ok(()),
            // The server may have lost its contents meanwhile.
            Err(Failure::Refused { status: Status::StaleGeneration, .. })
                if self.servers[server].troubled_until >= slot.start =>
            {
                Ok(())
            }
            Ok(answer) => Err(format!("not refused: {answer:?}")),
            other => self.must_not_refuse(slot.start, server, &other),
        }
    }

    /// Whether an operation on a region ended in a possible way: executed, perhaps executed, or not
    /// executed.
    fn outcome(
        &self,
        slot: &Slot,
        region: usize,
        result: &Result<Output, Failure>,
    ) -> Result<Outcome, String> {
        let facts = &self.regions[region];
        let gone_at = facts.deleted_at.or(facts.lost_at);
        match result {
            Ok(_) if gone_at.is_some_and(|gone_at| gone_at < slot.start) => {
                Err("done on pages that were deleted or lost before".to_owned())
            }
            Ok(_) => Ok(Outcome::Done),
            Err(Failure::OutcomeUnknown { .. }) => Ok(Outcome::Unknown),
            // It may have been executed before the contents were lost. The requester sees no
            // difference, but others may have observed the effect.
            Err(Failure::Refused { status: Status::StaleGeneration, .. })
                if facts.lost_at.is_some_and(|lost_at| lost_at >= slot.start) =>
            {
                Ok(Outcome::Unknown)
            }
            Err(Failure::Refused { status, .. }) if self.may_refuse(facts, *status) => {
                Ok(Outcome::NotDone)
            }
            other => {
                self.must_not_refuse(slot.start, facts.server, other).map(|()| Outcome::NotDone)
            }
        }
    }

    fn may_refuse(&self, region: &Region, status: Status) -> bool {
        match status {
            Status::StaleTag | Status::NotAllocated => region.deleting_from.is_some(),
            Status::StaleGeneration => region.lost_at.is_some(),
            _ => false,
        }
    }

    /// The server lost its contents.
    pub(super) fn lose(&mut self, now: Timestamp, server: usize) {
        for region in self.regions.iter_mut().filter(|region| region.server == server) {
            region.lost_at.get_or_insert(now);
        }
        self.servers[server].orphans.clear();
    }

    /// A client that receives no more results treats an outstanding operation as unknown.
    pub(super) fn forget(
        &mut self,
        now: Timestamp,
        client: usize,
        (slot, lives_on): (&Slot, bool),
    ) -> Result<(), String> {
        let result = match slot.task {
            // It may have been confirmed, on any server.
            Task::Create { server, pages, .. } => {
                for (index, facts) in self.servers.iter_mut().enumerate() {
                    if server.is_none_or(|server| server == index) {
                        let orphans =
                            if lives_on { &mut facts.zombies } else { &mut facts.orphans };
                        orphans.push(pages.into());
                    }
                }
                if let Some(region) = slot.task.holds() {
                    self.regions[region].busy = false;
                }
                return Ok(());
            }
            _ => Err(Failure::OutcomeUnknown { node: NodeId(0), responding: false }),
        };
        self.complete(now, client, slot, result)
    }

    /// Pages of the largest line-bound operation.
    pub(super) const LINE: u64 = 8 * PAGE_BYTES as u64;

    /// The pointer of a region.
    pub(super) fn pointer(&self, region: usize) -> Pointer {
        self.regions[region].pointer
    }
}
