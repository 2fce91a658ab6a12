//! Slabs that are allocated when they are first written, and freed when nothing in them is wanted.

use std::sync::atomic::Ordering;
use std::time::Instant;

use bluebridge::{Client, Error, NodeId, Placement as Choice, Pointer, Region, Transport};

use super::call::{Call, Failed, Round, silent_node};
use super::descriptor::{ENTRIES, PAGE_BYTES, Page, TablePage};
use super::execute::is_response;
use super::health::{Gate, PROBE};
use super::open::{copied, place, table_pointer};
use super::{Disk, DiskError, Failure, Placement, is_of_full_server, is_of_missing_memory, lock};

/// A change of an entry of the table.
enum Change {
    /// To this slab, unless the entry has one already. It is not to be freed any more.
    Fill(Pointer),
    /// From this slab to none. It is to be freed.
    Clear(Pointer),
}

/// The table was not changed.
struct Unchanged {
    failed: Failed,
    /// It may be changed nevertheless.
    perhaps: bool,
}

impl<F: Into<Failed>> From<F> for Unchanged {
    fn from(failed: F) -> Self {
        Self { failed: failed.into(), perhaps: false }
    }
}

/// Calls of CREATE by two choices: two ask for free memory, and two may allocate.
const CALLS: u32 = 4;

impl Disk {
    /// The pointer to a slab, which is allocated if it is not. The caller has entered it.
    ///
    /// What is written there can be acknowledged: the table has the slab.
    pub(super) fn allocated<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        round: &mut Round<'_>,
    ) -> Result<Pointer, Failed> {
        // The pointer first: see `fill`.
        match self.slabs.pointer(slab) {
            Some(pointer) if !self.slabs.is_unsettled(slab) => Ok(pointer),
            _ => {
                let (filled, unused) = self.fill(client, slab, round);
                if let Some(region) = unused {
                    Self::free_region(client, region);
                }
                filled
            }
        }
    }

    /// Makes the table have the slab; also returns memory that was allocated for that and is not used.
    fn fill<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        round: &mut Round<'_>,
    ) -> (Result<Pointer, Failed>, Option<Region>) {
        let Some(_turn) = self.turn.take(round.wait_end()) else {
            return (Err(Failure::Unanswered.into()), None);
        };
        let known = self.slabs.pointer(slab);
        let (own, created) = match known {
            // Another thread was faster.
            Some(pointer) if !self.slabs.is_unsettled(slab) => return (Ok(pointer), None),
            Some(pointer) => (pointer, None),
            None => match self.create_slab(client, slab, round) {
                Ok(region) => (region.base(), Some(region)),
                Err(failed) => return (Err(failed), None),
            },
        };
        match self.change(client, slab, &Change::Fill(own), round) {
            Ok(there) => {
                let pointer = there.unwrap_or(own);
                if let Some(freeing) = self.freeing.get(place(slab as u64).0) {
                    let _ = freeing.slab.compare_exchange(Some(own), None);
                }
                self.slabs.set_pointer(slab, Some(pointer));
                self.slabs.set_unsettled(slab, false);
                (Ok(pointer), created.filter(|region| region.base() != pointer))
            }
            Err(Unchanged { failed, perhaps: false }) => (Err(failed), created),
            Err(Unchanged { failed, perhaps: true }) => {
                tracing::warn!(slab, pointer = %own, "whether the disk's map has a new slab is unknown");
                // In this order: who sees the pointer also sees that it is not settled. The next WRITE tries again.
                self.slabs.set_unsettled(slab, true);
                self.slabs.set_pointer(slab, Some(own));
                (Err(failed), None)
            }
        }
    }

    /// Gives the memory of a slab up in which nothing is wanted; returns whether the disk has none there now. With
    /// `entered`, the caller is in the slab, and stays there.
    pub(super) fn give_up<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        entered: bool,
        round: &mut Round<'_>,
    ) -> bool {
        let Some(page) = self.freeing.get(place(slab as u64).0) else { return false };
        // The page has room for one. Others of the page wait until that is free.
        let Some(_turn) = page.turn.take(round.wait_end()) else {
            self.owe(slab);
            return false;
        };
        let is_own = page.slab.load().is_some_and(|own| self.slabs.pointer(slab) == Some(own));
        if !is_own && !self.make_way(client, slab, round) {
            self.owe(slab);
            return false;
        }
        let begun = if entered {
            self.slabs.begin_freeing_entered(slab)
        } else {
            self.slabs.begin_freeing(slab)
        };
        if !begun {
            // Who leaves it last sees whether something in it is wanted.
            return false;
        }
        let cleared = self.clear(client, slab, round);
        if entered {
            self.slabs.end_freeing_entered(slab, cleared.is_ok());
        } else {
            self.slabs.end_freeing(slab, cleared.is_ok());
        }
        let is_free = match cleared {
            Ok(Some(pointer)) => self.free_given_up(client, slab, pointer, round),
            Ok(None) => true,
            Err(_) => false,
        };
        if !is_free {
            self.owe(slab);
        }
        cleared.is_ok()
    }

    /// Lets the keeper free what is unwanted in the slab's page of the table.
    pub(super) fn owe(&self, slab: usize) {
        if let Some(page) = self.freeing.get(place(slab as u64).0) {
            page.is_owed.store(true, Ordering::Release);
        }
    }

    /// Frees slabs that were unwanted before and could not be freed then, or whose owner ended before it freed them; no
    /// page of the table is begun after `end`.
    pub(super) fn free_what_is_owed<T: Transport>(
        &self,
        client: &mut Client<T>,
        round: &mut Round<'_>,
        end: Instant,
    ) {
        for (number, page) in self.freeing.iter().enumerate() {
            if !page.is_owed.load(Ordering::Acquire) {
                continue;
            }
            if Instant::now() >= end {
                return;
            }
            page.is_owed.store(false, Ordering::Release);
            let first = number * ENTRIES;
            {
                let Some(_turn) = page.turn.take(round.wait_end()) else {
                    self.owe(first);
                    continue;
                };
                if !self.make_way(client, first, round) {
                    self.owe(first);
                    continue;
                }
            }
            for slab in first..(first + ENTRIES).min(self.slabs.len()) {
                if self.slabs.is_unwanted(slab)
                    && !self.give_up(client, slab, false, round)
                    && page.is_owed.load(Ordering::Acquire)
                {
                    break;
                }
            }
        }
    }

    /// Frees what the slab's page of the table names as to be freed: it has room for one. Returns whether there is room.
    /// The caller has the page's turn.
    fn make_way<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        round: &mut Round<'_>,
    ) -> bool {
        let page = place(slab as u64).0;
        let Some(earlier) = self.freeing.get(page).and_then(|page| page.slab.load()) else {
            return true;
        };
        let first = page * ENTRIES;
        let end = (first + ENTRIES).min(self.slabs.len());
        if let Some(other) = (first..end).find(|it| self.slabs.pointer(*it) == Some(earlier)) {
            // Whether the table still has it is unknown.
            if !self.slabs.begin_freeing(other) {
                return self.settle_again(client, other, earlier, round);
            }
            let cleared = self.clear(client, other, round);
            self.slabs.end_freeing(other, cleared.is_ok());
            if cleared.is_err() {
                return false;
            }
        }
        self.free_given_up(client, slab, earlier, round)
    }

    /// Puts a slab into the table again that is used, so that it is not to be freed any more.
    fn settle_again<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        pointer: Pointer,
        round: &mut Round<'_>,
    ) -> bool {
        if !self.slabs.enter(slab, round.wait_end()) {
            return false;
        }
        let is_settled = self.slabs.pointer(slab) != Some(pointer)
            || self.allocated(client, slab, round).is_ok();
        if self.slabs.leave(slab) {
            self.owe(slab);
        }
        let page = self.freeing.get(place(slab as u64).0);
        is_settled && page.is_some_and(|page| page.slab.load().is_none())
    }

    /// Takes a slab out of the table; returns where it was. The caller has begun to free it, so no request changes it, and
    /// has the turn of its page.
    fn clear<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        round: &mut Round<'_>,
    ) -> Result<Option<Pointer>, Failed> {
        let Some(_turn) = self.turn.take(round.wait_end()) else {
            return Err(Failure::Unanswered.into());
        };
        let Some(pointer) = self.slabs.pointer(slab) else { return Ok(None) };
        let Some(freeing) = self.freeing.get(place(slab as u64).0) else { return Ok(None) };
        if freeing.slab.load().is_some_and(|earlier| earlier != pointer) {
            // There is no room, so it would be lost.
            return Err(Failure::Unanswered.into());
        }
        match self.change(client, slab, &Change::Clear(pointer), round) {
            Ok(_) => {
                // In this order: what is to be freed, and no slab's pointer, can be freed.
                self.slabs.set_pointer(slab, None);
                self.slabs.set_unsettled(slab, false);
                freeing.slab.store(Some(pointer));
                Ok(Some(pointer))
            }
            Err(Unchanged { failed, perhaps }) => {
                if perhaps {
                    // The next process may free it. So nothing is written there before the table has it again.
                    self.slabs.set_unsettled(slab, true);
                    freeing.slab.store(Some(pointer));
                }
                Err(failed)
            }
        }
    }

    /// Frees memory that was a slab; returns whether it is free. `slab` is in the same page of the table, whose turn the
    /// caller has.
    fn free_given_up<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        pointer: Pointer,
        round: &mut Round<'_>,
    ) -> bool {
        if !self.is_asked(client, pointer.node, round) {
            return false;
        }
        let Ok(call) = self.call_of_change(client, round, self.change_time) else { return false };
        match client.delete_pointer(pointer) {
            Ok(_) => {}
            Err(error) if is_of_missing_memory(&error) => {}
            Err(error) => {
                tracing::debug!(slab = %pointer, %error, "a slab is not free yet");
                Self::failed(round, call, &error);
                self.pass_over(call, &error);
                return false;
            }
        }
        if let Some(freeing) = self.freeing.get(place(slab as u64).0) {
            let _ = freeing.slab.compare_exchange(Some(pointer), None);
        }
        true
    }

    /// Frees memory that was never used.
    fn free_region<T: Transport>(client: &mut Client<T>, region: Region) {
        let base = region.base();
        // Also without the lease: nobody else knows this memory.
        client.set_deadline(PROBE);
        match client.delete(region) {
            Ok(()) => {}
            Err(error) if is_of_missing_memory(&error) => {}
            Err(error) => tracing::warn!(slab = %base, %error, "a slab is not free"),
        }
    }

    /// Allocates memory for a slab, on the first server in the order of the placement that has room and responds. Each is
    /// given a part of the time.
    fn create_slab<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        round: &mut Round<'_>,
    ) -> Result<Region, Failed> {
        let bytes = self.slabs.length(slab);
        let mut worst = Failed::from(Failure::NoSpace);
        if self.properties.placement == Placement::TwoChoices {
            let call = self.call_of_create(client, round)?;
            // Each of its calls has that time.
            client.set_deadline(call.given / CALLS);
            match client.create_at(bytes, Choice::TwoChoices) {
                Ok(region) => return Ok(self.created(region)),
                Err(error) => {
                    worst = self.not_created(slab, &error)?.into();
                }
            }
        }
        for turn in 0.. {
            let Some(node) = self.choice(slab, turn) else { break };
            if !self.is_asked(client, node, round) {
                worst = Failure::Unanswered.into();
                continue;
            }
            let call = self.call_of_create(client, round)?;
            match client.create_at(bytes, Choice::Node(node)) {
                Ok(region) => return Ok(self.created(region)),
                Err(error) => {
                    if self.not_created(slab, &error)? == Failure::Unanswered {
                        self.pass_over(call, &error);
                        worst = Self::failed(round, call, &error);
                    }
                }
            }
        }
        Err(worst)
    }

    /// There must be time for the table, too.
    fn call_of_create<T: Transport>(
        &self,
        client: &mut Client<T>,
        round: &Round<'_>,
    ) -> Result<Call, Failure> {
        let call = self.call(client, round.end(), self.patience)?;
        if call.given < self.change_time { Err(Failure::Unanswered) } else { Ok(call) }
    }

    /// A server has allocated a slab.
    fn created(&self, region: Region) -> Region {
        self.note_response(region.base().node);
        region
    }

    /// Whether a server is asked for a new slab, or to free one: it responds, as far as is known.
    fn is_asked<T: Transport>(
        &self,
        client: &mut Client<T>,
        node: NodeId,
        round: &Round<'_>,
    ) -> bool {
        if round.is_silent(node) {
            return false;
        }
        let now = Instant::now();
        let lists = [&self.health, &self.passed_over];
        // Looked at first: a try that is taken from one list while the other is closed would be lost.
        let gates = lists.map(|list| list.look(node, now));
        if gates == [Gate::Open; 2] {
            return true;
        }
        if gates.contains(&Gate::Closed) {
            return false;
        }
        // Another thread may have been faster.
        if lists.map(|list| list.gate(node, now)).contains(&Gate::Closed) {
            return false;
        }
        let Ok(call) = self.call(client, round.end(), PROBE) else { return false };
        // It asks twice.
        client.set_deadline(call.given / 2);
        let responds = client.ping(node).map_or_else(|error| is_response(&error), |_| true);
        if responds {
            self.note_response(node);
        }
        responds
    }

    /// Asks a server for no slab for a while that did not respond though it was given enough time. Requests for its slabs
    /// have more time, so they do not fail.
    fn pass_over(&self, call: Call, error: &Error) {
        if let Some(node) = silent_node(error)
            && call.given >= self.pass_time
            && self.passed_over.suspect(node, Instant::now())
        {
            tracing::info!(%node, "a memory server is passed over, because it does not respond");
        }
    }

    /// Whether another server may have room after this error.
    fn not_created(&self, slab: usize, error: &Error) -> Result<Failure, Failure> {
        let failure = Failure::of(error);
        if !is_of_full_server(error) {
            self.reported.failure(slab as u64, error);
        }
        match failure {
            Failure::NoSpace | Failure::Unanswered => Ok(failure),
            Failure::Lost | Failure::Silent | Failure::Stopped => Err(failure),
        }
    }

    /// The server to try for a slab; `turn` counts the tries.
    fn choice(&self, slab: usize, turn: usize) -> Option<NodeId> {
        let nodes = lock(&self.nodes);
        let count = nodes.len();
        if turn >= count {
            return None;
        }
        let first = match self.properties.placement {
            // Widths of whole slabs, so that the last server may have fewer.
            Placement::Linear => slab / self.slabs.len().div_ceil(count),
            Placement::Striped | Placement::TwoChoices => slab % count,
        };
        nodes.get((first + turn) % count).copied()
    }

    /// Changes the entry of a slab in the table, if this process owns the disk; returns what the entry has then.
    fn change<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        change: &Change,
        round: &mut Round<'_>,
    ) -> Result<Option<Pointer>, Unchanged> {
        let (number, entry) = place(slab as u64);
        let pointer = table_pointer(self.pointer, number as u64).map_err(|_| Failure::Lost)?;
        let call = self.call_of_change(client, round, self.change_time)?;
        let mut page: Page = [0; PAGE_BYTES];
        let updating = client.update(pointer, &mut page);
        let mut update = updating.map_err(|error| self.unchanged(slab, round, call, &error))?;
        let table = TablePage::decode(copied(&update), self.properties.id, number as u64);
        let mut table = match table {
            Ok(table) if table.owner() == self.properties.owner => table,
            Ok(_) => {
                self.ownership.finish(DiskError::TakenOver);
                return Err(Failure::Stopped.into());
            }
            Err(error) => {
                self.ownership.finish(error.into());
                return Err(Failure::Stopped.into());
            }
        };
        // Where it returns early, dropping the update ends its lease.
        match *change {
            Change::Fill(pointer) => {
                let there = table.slab(entry);
                if there.is_some() && table.freeing() != there {
                    return Ok(there);
                }
                if table.freeing() == Some(pointer) {
                    table.set_freeing(None);
                }
                table.set_slab(entry, Some(there.unwrap_or(pointer)));
            }
            Change::Clear(pointer) => {
                if table.slab(entry).is_some_and(|there| there != pointer) {
                    // Nobody else changes it, so this is another disk's table.
                    return Err(Failure::Lost.into());
                }
                table.set_freeing(Some(pointer));
                table.set_slab(entry, None);
            }
        }
        let now = table.slab(entry);
        update.copy_from_slice(&table.sealed());
        let call = self.call_of_change(update.client(), round, self.change_time / 2)?;
        update.commit().map_err(|error| {
            let perhaps = error.is_outcome_unknown()
                || matches!(error, Error::Carrier { .. } | Error::Violation { .. });
            Unchanged { perhaps, ..self.unchanged(slab, round, call, &error) }
        })?;
        Ok(now)
    }

    fn unchanged(
        &self,
        slab: usize,
        round: &mut Round<'_>,
        call: Call,
        error: &Error,
    ) -> Unchanged {
        self.reported.failure(slab as u64, error);
        if matches!(error, Error::Busy { .. } | Error::TimedOut { .. }) {
            self.ownership.note_delay();
        }
        // If the map's server is silent, the lease ends, and everything waits; its slabs need not be suspected.
        Failed { silent: None, ..Self::failed(round, call, error) }.into()
    }
}
