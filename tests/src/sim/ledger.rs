//! What all clients were told so far, and whether it can be true.

use core::time::Duration;
use std::collections::BTreeMap;

use bluebridge_protocol::{
    Instant,
    requester::{Answer, Failure},
};
use bluebridge_wire::{ArenaGeneration, NodeId, Pointer, Status, address::PAGE_BYTES};

use super::{
    model::subset_sums,
    region::{Contents, Part, Purpose, Region, State, parts, read_stamp},
    task::{Slot, Task},
};

/// A server as the controller knows it.
#[derive(Clone, Debug)]
pub(super) struct ServerFacts {
    pub(super) node: NodeId,
    pub(super) generation: ArenaGeneration,
    pub(super) arena_pages: u64,
    /// Allocations that may be there though no client knows them, in pages: a CREATE with an
    /// unknown outcome, or one that a lost session made anew.
    pub(super) orphans: Vec<u64>,
    /// The same of processes that live on: also after the server lost its contents.
    pub(super) zombies: Vec<u64>,
    /// When the server last restarted, lost its authority, or was about to end.
    pub(super) troubled_until: Instant,
}

/// Everything that the clients were told.
pub(super) struct Ledger {
    pub(super) regions: Vec<Region>,
    pub(super) servers: Vec<ServerFacts>,
    /// How often each kind of task ended how.
    pub(super) outcomes: BTreeMap<(&'static str, String), u64>,
    /// Whether an old session may live on behind a new one, so that late requests are possible.
    sessions_linger: bool,
    /// A CREATE that took longer may have been made anew in another session.
    session_idle: Duration,
}

/// How long an answer travels at most, a standstill of its receiver included.
const LINGER: Duration = Duration::from_millis(500);

/// How an operation ended, in what matters for memory.
enum Outcome {
    Done,
    /// It was done once, or not at all, or will be.
    Unknown,
    NotDone,
}

impl Ledger {
    pub(super) fn new(
        servers: Vec<ServerFacts>,
        sessions_linger: bool,
        session_idle: Duration,
    ) -> Self {
        let (regions, outcomes) = (Vec::new(), BTreeMap::new());
        Self { regions, servers, outcomes, sessions_linger, session_idle }
    }

    /// Takes the beginning of a task.
    pub(super) fn begin(&mut self, now: Instant, task: &Task) {
        if let Some(region) = task.holds() {
            self.regions[region].busy = true;
        }
        match *task {
            Task::Delete { region, .. } => {
                let region = &mut self.regions[region];
                region.state = State::Doubtful;
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

    /// The CREATEs under way may leave pages behind on a server that forgot its sessions.
    pub(super) fn orphan_creates<'a>(&mut self, at: usize, slots: impl Iterator<Item = &'a Slot>) {
        for slot in slots {
            if let Task::Create { server, pages, .. } = slot.task
                && server.is_none_or(|server| server == at)
            {
                self.servers[at].orphans.push(pages.into());
            }
        }
    }

    /// Takes the end of a task.
    ///
    /// # Errors
    /// What cannot be, if the servers keep their promises.
    pub(super) fn complete(
        &mut self,
        now: Instant,
        client: usize,
        slot: &Slot,
        result: Result<Answer, Failure>,
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
        now: Instant,
        client: usize,
        slot: &Slot,
        result: Result<Answer, Failure>,
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

    /// A refusal of what is right is only good while the server has troubles of its own.
    fn must_not_refuse(
        &self,
        start: Instant,
        server: usize,
        result: &Result<Answer, Failure>,
    ) -> Result<(), String> {
        let refuser = match result {
            Err(Failure::Refused { node, .. }) => self.servers.iter().position(|s| s.node == *node),
            _ => None,
        };
        // A refusal can be under way, or wait at a client that stands still, for a while.
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
            Err(Failure::Buffer | Failure::Busy { .. }) => {
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
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        match result {
            Err(Failure::Refused { status, .. }) if refusals.contains(&status) => Ok(()),
            // It may have lost its contents meanwhile.
            Err(Failure::Refused { status: Status::StaleGeneration, .. })
                if self.servers[server].troubled_until >= slot.start =>
            {
                Ok(())
            }
            Ok(answer) => Err(format!("not refused: {answer:?}")),
            other => self.must_not_refuse(slot.start, server, &other),
        }
    }

    /// Whether an operation on a region ended as it may: done, perhaps done, or not done.
    fn outcome(
        &self,
        slot: &Slot,
        region: usize,
        result: &Result<Answer, Failure>,
    ) -> Result<Outcome, String> {
        let facts = &self.regions[region];
        let gone_at = facts.deleted_at.or(facts.lost_at);
        match result {
            Ok(_) if gone_at.is_some_and(|gone_at| gone_at < slot.start) => {
                Err("done on pages that were deleted or lost before".to_owned())
            }
            Ok(_) => Ok(Outcome::Done),
            Err(Failure::OutcomeUnknown { .. }) => Ok(Outcome::Unknown),
            // It may have been done before the contents were lost: that makes no difference to
            // the requester, but others may have seen it.
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

    fn created(
        &mut self,
        now: Instant,
        client: usize,
        (purpose, server, pages): (Purpose, Option<usize>, u32),
        slot: &Slot,
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        if let Some(server) = server {
            // As often as a session can have ended meanwhile, by its server's clock.
            let times = (now - slot.start).as_nanos() / self.session_idle.mul_f64(0.9).as_nanos();
            let orphans = (0..times.min(50)).map(|_| u64::from(pages));
            self.servers[server].orphans.extend(orphans);
        }
        let pointer = match result {
            Ok(Answer::Pointer(pointer)) => pointer,
            Ok(other) => return Err(format!("a CREATE answered {other:?}")),
            Err(Failure::OutcomeUnknown { node, .. }) => {
                let at = server.or_else(|| self.servers.iter().position(|s| s.node == node));
                let at = at.ok_or("the outcome at no server is unknown")?;
                self.servers[at].orphans.push(pages.into());
                return Ok(());
            }
            Err(Failure::Refused {
                status: Status::OutOfMemory | Status::QuotaExceeded, ..
            }) => {
                return Ok(());
            }
            other => return self.must_not_refuse(slot.start, server.unwrap_or(0), &other),
        };
        let at = self.servers.iter().position(|facts| facts.node == pointer.node);
        let at = at.ok_or_else(|| format!("{pointer} is on no memory node"))?;
        if server.is_some_and(|server| server != at) {
            return Err(format!("{pointer} is on another server than the one asked"));
        }
        let mut region = Region::new(purpose, (pointer, pages), at, client);
        self.check_grant(&region)?;
        if pointer.location.generation() != self.servers[at].generation {
            region.lost_at = Some(now);
        }
        if !slot.outgoing.is_empty()
            && let Contents::Private(contents) = &mut region.contents
        {
            for Part { page, start, data } in parts(0, slot.outgoing.len()) {
                contents[page].write(start, &slot.outgoing[data]);
            }
        }
        self.regions.push(region);
        Ok(())
    }

    /// No page is granted twice.
    fn check_grant(&mut self, new: &Region) -> Result<(), String> {
        let pages = new.page_range();
        let facts = &self.servers[new.server];
        if !new.pointer.location.is_page_aligned() || pages.end > facts.arena_pages {
            return Err(format!("{} is no place for pages", new.pointer));
        }
        let generation = new.pointer.location.generation();
        for old in &mut self.regions {
            let other = old.page_range();
            if old.server != new.server
                || old.pointer.location.generation() != generation
                || old.state == State::Deleted
                || other.end <= pages.start
                || pages.end <= other.start
            {
                continue;
            }
            if old.state == State::Live {
                return Err(format!("{} was granted over {}", new.pointer, old.pointer));
            }
            // The DELETE with the unknown outcome was done.
            old.state = State::Deleted;
        }
        Ok(())
    }

    fn deleted(
        &mut self,
        now: Instant,
        slot: &Slot,
        index: usize,
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        let before = self.regions[index].deleted_at.is_some();
        let outcome = self.outcome(slot, index, &result)?;
        let region = &mut self.regions[index];
        let first_try = region.deleting_from == Some(slot.start);
        match (outcome, result) {
            (Outcome::Done, Ok(Answer::Freed(pages))) if pages == region.pages && !before => {
                region.state = State::Deleted;
                region.deleted_at = Some(now);
                Ok(())
            }
            (Outcome::Done, result) => {
                Err(format!("a DELETE of {} pages: {result:?}", region.pages))
            }
            (Outcome::Unknown, _) => Ok(()),
            (
                Outcome::NotDone,
                Err(Failure::Refused { status: Status::StaleTag | Status::NotAllocated, .. }),
            ) => {
                if first_try && region.state == State::Doubtful {
                    return Err("the first DELETE found nothing to free".to_owned());
                }
                region.state = State::Deleted;
                region.deleted_at = Some(now);
                Ok(())
            }
            (Outcome::NotDone, _) => {
                if first_try && region.state == State::Doubtful {
                    region.state = State::Live;
                    region.deleting_from = None;
                }
                Ok(())
            }
        }
    }

    /// An answer in the same session, asked for with a low-water mark above all that was given up
    /// before: that cannot be done any more. The mark stays below what is still under way.
    fn settle(&mut self, slot: &Slot, region: usize) {
        let region = &mut self.regions[region];
        let is_passed = region.unknown_at.is_none_or(|unknown_at| slot.oldest >= unknown_at);
        if is_passed && !self.sessions_linger {
            region.settle();
        }
    }

    fn read(
        &mut self,
        slot: &Slot,
        (index, offset, length): (usize, u64, usize),
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        let Outcome::Done = self.outcome(slot, index, &result)? else { return Ok(()) };
        self.settle(slot, index);
        let pointer = self.regions[index].pointer;
        let Contents::Private(pages) = &mut self.regions[index].contents else {
            return Err("not a private region".to_owned());
        };
        for Part { page, start, data } in parts(offset, length) {
            let bytes = &slot.incoming[data];
            if !pages[page].read(start, bytes) {
                let shown = &bytes[..bytes.len().min(16)];
                return Err(format!(
                    "wrong bytes at {pointer} page {page} from {start}: {shown:02x?}.."
                ));
            }
        }
        Ok(())
    }

    fn written(
        &mut self,
        now: Instant,
        slot: &Slot,
        (index, offset, length): (usize, u64, usize),
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        let partial = match &result {
            Err(Failure::Partial(statuses)) => Some(*statuses),
            _ => None,
        };
        let outcome = self.outcome(slot, index, &result)?;
        if matches!(outcome, Outcome::Done) || partial.is_some() {
            self.settle(slot, index);
        }
        let Contents::Private(pages) = &mut self.regions[index].contents else {
            return Err("not a private region".to_owned());
        };
        for (number, Part { page, start, data }) in parts(offset, length).enumerate() {
            let bytes = &slot.outgoing[data];
            let status = partial.as_ref().and_then(|p| p.as_slice().get(number).copied());
            match (&outcome, status) {
                (Outcome::Done, _) | (_, Some(Status::Ok)) => pages[page].write(start, bytes),
                (Outcome::Unknown, _) => pages[page].write_unknown(start, bytes),
                (Outcome::NotDone, _) => {}
            }
        }
        let doubtful = pages.iter().any(super::model::PrivatePage::is_doubtful);
        if matches!(outcome, Outcome::Unknown) {
            self.regions[index].unknown_at = Some(now);
        }
        self.regions[index].retired |= doubtful;
        Ok(())
    }

    fn shared_read(
        &mut self,
        now: Instant,
        slot: &Slot,
        (index, offset, length): (usize, u64, usize),
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        let partial = match &result {
            Err(Failure::Partial(statuses)) => Some(*statuses),
            _ => None,
        };
        let outcome = self.outcome(slot, index, &result)?;
        let Contents::Shared(registers) = &mut self.regions[index].contents else {
            return Err("not a shared region".to_owned());
        };
        for (number, Part { page, start, data }) in parts(offset, length).enumerate() {
            let status = partial.as_ref().and_then(|p| p.as_slice().get(number).copied());
            if !matches!((&outcome, status), (Outcome::Done, _) | (_, Some(Status::Ok))) {
                continue;
            }
            if let Some(value) = read_stamp(start, &slot.incoming[data])? {
                registers[page].read(value, slot.start, now)?;
            }
        }
        Ok(())
    }

    fn shared_written(
        &mut self,
        now: Instant,
        slot: &Slot,
        (index, pages, value): (usize, core::ops::Range<usize>, u64),
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        let partial = match &result {
            Err(Failure::Partial(statuses)) => Some(*statuses),
            _ => None,
        };
        let outcome = self.outcome(slot, index, &result)?;
        let Contents::Shared(registers) = &mut self.regions[index].contents else {
            return Err("not a shared region".to_owned());
        };
        for (number, page) in pages.enumerate() {
            let status = partial.as_ref().and_then(|p| p.as_slice().get(number).copied());
            match (&outcome, status) {
                (Outcome::Done, _) | (_, Some(Status::Ok)) => {
                    registers[page].acknowledge(value | page as u64, now);
                }
                (Outcome::Unknown, _) => {}
                (Outcome::NotDone, _) => registers[page].refuse(value | page as u64)?,
            }
        }
        Ok(())
    }

    fn added(
        &mut self,
        now: Instant,
        slot: &Slot,
        (index, cell, addend): (usize, usize, u64),
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        let outcome = self.outcome(slot, index, &result)?;
        let Contents::Cells { adds, .. } = &mut self.regions[index].contents else {
            return Err("not a region of cells".to_owned());
        };
        match (outcome, result) {
            (Outcome::Done, Ok(Answer::Previous(previous))) => {
                adds[cell].add(previous, addend, slot.start, now);
                Ok(())
            }
            (Outcome::Done, result) => Err(format!("a FETCH_ADD answered {result:?}")),
            (Outcome::Unknown, _) => {
                adds[cell].add_unknown(addend);
                Ok(())
            }
            (Outcome::NotDone, _) => Ok(()),
        }
    }

    fn swapped(
        &mut self,
        now: Instant,
        slot: &Slot,
        (index, cell, expected, new): (usize, usize, u64, u64),
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        let outcome = self.outcome(slot, index, &result)?;
        let Contents::Cells { swaps, seen, .. } = &mut self.regions[index].contents else {
            return Err("not a region of cells".to_owned());
        };
        match (outcome, result) {
            (Outcome::Done, Ok(Answer::Previous(previous))) => {
                seen[cell] = if previous == expected { new } else { previous };
                swaps[cell].swap((expected, new), previous, slot.start, now)
            }
            (Outcome::Done, result) => Err(format!("a CAS answered {result:?}")),
            (Outcome::Unknown, _) => {
                swaps[cell].swap_unknown(expected, new, slot.start);
                Ok(())
            }
            (Outcome::NotDone, _) => Ok(()),
        }
    }

    fn cell_read(
        &self,
        slot: &Slot,
        (index, cell): (usize, usize),
        result: Result<Answer, Failure>,
    ) -> Result<(), String> {
        let Outcome::Done = self.outcome(slot, index, &result)? else { return Ok(()) };
        let Contents::Cells { adds, swaps, .. } = &self.regions[index].contents else {
            return Err("not a region of cells".to_owned());
        };
        let bytes = slot.incoming.first_chunk::<8>().ok_or("a short read")?;
        let last = u64::from_le_bytes(*bytes);
        match cell.checked_sub(adds.len()) {
            None => adds[cell].check(Some(last)),
            Some(cell) => swaps[cell].check(Some(last)),
        }
        .map_err(|error| format!("cell {cell} of {}: {error}", self.regions[index].pointer))
    }

    /// The server lost what it held.
    pub(super) fn lose(&mut self, now: Instant, server: usize) {
        for region in self.regions.iter_mut().filter(|region| region.server == server) {
            region.lost_at.get_or_insert(now);
        }
        self.servers[server].orphans.clear();
    }

    /// The client that was told nothing more takes an operation under way as unknown.
    pub(super) fn forget(
        &mut self,
        now: Instant,
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
            _ => Err(Failure::OutcomeUnknown { node: NodeId(0), answering: false }),
        };
        self.complete(now, client, slot, result)
    }

    /// Whether every register and cell has an explanation.
    pub(super) fn check_histories(&self) -> Result<(), String> {
        for region in &self.regions {
            let at = |error: String| format!("{}: {error}", region.pointer);
            match &region.contents {
                Contents::Private(_) => {}
                Contents::Shared(registers) => {
                    for (page, register) in registers.iter().enumerate() {
                        let at = |error| at(format!("page {page}: {error}"));
                        register.check().map_err(at)?;
                    }
                }
                Contents::Cells { adds, swaps, .. } => {
                    adds.iter().try_for_each(|cell| cell.check(None).map_err(at))?;
                    swaps.iter().try_for_each(|cell| cell.check(None).map_err(at))?;
                }
            }
        }
        Ok(())
    }

    /// Whether a server has the pages that the clients know of, and no others.
    pub(super) fn check_usage(&self, server: usize, used_pages: u64) -> Result<(), String> {
        let facts = &self.servers[server];
        let here = |region: &&Region| {
            region.server == server && region.pointer.location.generation() == facts.generation
        };
        let pages_of = |state: State| {
            let regions = self.regions.iter().filter(here);
            regions
                .filter(move |region| region.state == state)
                .map(|region| u64::from(region.pages))
        };
        let live = pages_of(State::Live).sum();
        let mut doubtful: Vec<_> = pages_of(State::Doubtful).collect();
        doubtful.extend(facts.orphans.iter().chain(&facts.zombies));
        if subset_sums(live, &doubtful).contains(&used_pages) {
            return Ok(());
        }
        Err(format!(
            "node {} uses {used_pages} pages; {live} are known, and perhaps some of {doubtful:?}",
            facts.node
        ))
    }

    /// Pages of the largest line-bound operation.
    pub(super) const LINE: u64 = 8 * PAGE_BYTES as u64;

    /// The pointer of a region.
    pub(super) fn pointer(&self, region: usize) -> Pointer {
        self.regions[region].pointer
    }
}
