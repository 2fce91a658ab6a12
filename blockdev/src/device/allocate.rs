//! Slabs that are allocated when they are first written, and freed when nothing in them is wanted.

use std::time::Instant;

use bluebridge::{Client, Error, NodeId, Placement as Choice, Pointer, Region, Transport};
use crossbeam_utils::atomic::AtomicCell;

use super::descriptor::{ENTRIES, PAGE_BYTES, Page, TablePage};
use super::health::{Gate, PROBE};
use super::open::{copied, left, place, table_pointer};
use super::slabs::Piece;
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
    failure: Failure,
    /// It may be changed nevertheless.
    perhaps: bool,
}

impl Disk {
    /// The pointer to a slab, which is allocated if it is not. The caller has entered it.
    ///
    /// What is written there can be acknowledged: the table has the slab.
    pub(super) fn allocated<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        until: Instant,
    ) -> Result<Pointer, Failure> {
        // The pointer first: see `fill`.
        match self.slabs.pointer(slab) {
            Some(pointer) if !self.slabs.is_unsettled(slab) => Ok(pointer),
            _ => {
                let (filled, unused) = self.fill(client, slab, until);
                if let Some(region) = unused {
                    self.free_region(client, region, until);
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
        until: Instant,
    ) -> (Result<Pointer, Failure>, Option<Region>) {
        let _turn = lock(&self.turn);
        let known = self.slabs.pointer(slab);
        let (own, created) = match known {
            // Another thread was faster.
            Some(pointer) if !self.slabs.is_unsettled(slab) => return (Ok(pointer), None),
            Some(pointer) => (pointer, None),
            None => match self.create_slab(client, slab, until) {
                Ok(region) => (region.base(), Some(region)),
                Err(failure) => return (Err(failure), None),
            },
        };
        match self.change(client, slab, &Change::Fill(own), until) {
            Ok(there) => {
                let pointer = there.unwrap_or(own);
                if let Some(freeing) = self.freeing.get(place(slab as u64).0) {
                    let _ = freeing.compare_exchange(Some(own), None);
                }
                self.slabs.set_pointer(slab, Some(pointer));
                self.slabs.set_unsettled(slab, false);
                (Ok(pointer), created.filter(|region| region.base() != pointer))
            }
            Err(Unchanged { failure, perhaps: false }) => (Err(failure), created),
            Err(Unchanged { failure, perhaps: true }) => {
                tracing::warn!(slab, pointer = %own, "whether the disk's map has a new slab is unknown");
                // In this order: who sees the pointer also sees that it is not settled. The next WRITE tries again.
                self.slabs.set_unsettled(slab, true);
                self.slabs.set_pointer(slab, Some(own));
                (Err(failure), None)
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
        until: Instant,
    ) -> bool {
        if !self.make_way(client, slab, until) {
            return false;
        }
        let begun = if entered {
            self.slabs.begin_freeing_entered(slab)
        } else {
            self.slabs.begin_freeing(slab)
        };
        if !begun {
            return false;
        }
        let cleared = self.clear(client, slab, until);
        if entered {
            self.slabs.end_freeing_entered(slab, cleared.is_ok());
        } else {
            self.slabs.end_freeing(slab, cleared.is_ok());
        }
        if let Ok(Some(pointer)) = cleared {
            // If that fails, the next slab of the page that is given up tries again, or the next process.
            self.free_given_up(client, slab, pointer, until);
        }
        cleared.is_ok()
    }

    /// Frees what the slab's page of the table names as to be freed: it has room for one. Returns whether there is room.
    fn make_way<T: Transport>(&self, client: &mut Client<T>, slab: usize, until: Instant) -> bool {
        let page = place(slab as u64).0;
        let Some(earlier) = self.freeing.get(page).and_then(AtomicCell::load) else { return true };
        if self.slabs.pointer(slab) == Some(earlier) {
            return true;
        }
        let first = page * ENTRIES;
        let end = (first + ENTRIES).min(self.slabs.len());
        if let Some(other) = (first..end).find(|it| self.slabs.pointer(*it) == Some(earlier)) {
            // Whether the table still has it is unknown.
            if !self.slabs.begin_freeing(other) {
                return false;
            }
            let cleared = self.clear(client, other, until);
            self.slabs.end_freeing(other, cleared.is_ok());
            if cleared.is_err() {
                return false;
            }
        }
        self.free_given_up(client, slab, earlier, until)
    }

    /// Takes a slab out of the table; returns where it was. The caller has begun to free it, so no request changes it.
    fn clear<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        until: Instant,
    ) -> Result<Option<Pointer>, Failure> {
        let _turn = lock(&self.turn);
        let Some(pointer) = self.slabs.pointer(slab) else { return Ok(None) };
        let Some(freeing) = self.freeing.get(place(slab as u64).0) else { return Ok(None) };
        if freeing.load().is_some_and(|earlier| earlier != pointer) {
            // Another thread was faster.
            return Err(Failure::Unanswered);
        }
        match self.change(client, slab, &Change::Clear(pointer), until) {
            Ok(_) => {
                // In this order: what is to be freed, and no slab's pointer, can be freed.
                self.slabs.set_pointer(slab, None);
                self.slabs.set_unsettled(slab, false);
                freeing.store(Some(pointer));
                Ok(Some(pointer))
            }
            Err(Unchanged { failure, perhaps }) => {
                if perhaps {
                    // The next process may free it. So nothing is written there before the table has it again.
                    self.slabs.set_unsettled(slab, true);
                    freeing.store(Some(pointer));
                }
                Err(failure)
            }
        }
    }

    /// Frees memory that was a slab; returns whether it is free. `slab` is in the same page of the table.
    fn free_given_up<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        pointer: Pointer,
        until: Instant,
    ) -> bool {
        let piece = Piece { slab, offset: 0, length: 1 };
        if self.range(client, pointer, piece).is_err() {
            return false;
        }
        let given = left(until);
        if given < self.change_time {
            return false;
        }
        client.set_deadline(given);
        match client.delete_pointer(pointer) {
            Ok(_) => {}
            Err(error) if is_of_missing_memory(&error) => {}
            Err(error) => {
                let is_silent = Failure::of(&error) == Failure::Unanswered;
                tracing::debug!(slab = %pointer, %error, "a slab is not free yet");
                // It had time enough.
                if is_silent
                    && !matches!(error, Error::Refused { .. })
                    && given >= self.deadline / 2
                {
                    self.note_silence(pointer.node);
                }
                return false;
            }
        }
        if let Some(freeing) = self.freeing.get(place(slab as u64).0) {
            let _ = freeing.compare_exchange(Some(pointer), None);
        }
        true
    }

    /// Frees memory that was never used.
    fn free_region<T: Transport>(&self, client: &mut Client<T>, region: Region, until: Instant) {
        client.set_deadline(left(until).max(PROBE));
        match client.delete(region) {
            Ok(()) => {}
            Err(error) if is_of_missing_memory(&error) => {}
            Err(error) => tracing::warn!(slab = %region.base(), %error, "a slab is not free"),
        }
    }

    /// Allocates memory for a slab, on the first server in the order of the placement that has room and responds.
    fn create_slab<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        until: Instant,
    ) -> Result<Region, Failure> {
        // There must be time for the table, too.
        self.permit_change(until)?;
        let bytes = self.slabs.length(slab);
        let mut worst = Failure::NoSpace;
        if self.properties.placement == Placement::TwoChoices {
            client.set_deadline(left(self.ownership.permit(until)?));
            match client.create_at(bytes, Choice::TwoChoices) {
                Ok(region) => return Ok(region),
                Err(error) => worst = self.passed_over(slab, &error)?,
            }
        }
        for turn in 0.. {
            let Some(node) = self.choice(slab, turn) else { break };
            if !self.responds(client, node) {
                worst = Failure::Unanswered;
                continue;
            }
            client.set_deadline(left(self.ownership.permit(until)?));
            match client.create_at(bytes, Choice::Node(node)) {
                Ok(region) => return Ok(region),
                Err(error) => {
                    let failure = self.passed_over(slab, &error)?;
                    if failure == Failure::Unanswered {
                        // A refusal is a response.
                        if !matches!(error, Error::Refused { .. }) {
                            self.note_silence(node);
                        }
                        worst = failure;
                    }
                }
            }
        }
        Err(worst)
    }

    /// Whether a server responds, as far as is known.
    fn responds<T: Transport>(&self, client: &mut Client<T>, node: NodeId) -> bool {
        match self.health.gate(node, Instant::now()) {
            Gate::Open => true,
            Gate::Closed => false,
            Gate::Probe => {
                client.set_deadline(PROBE);
                let responds = client.ping(node).is_ok();
                if responds {
                    self.note_response(node);
                }
                responds
            }
        }
    }

    /// Whether another server may have room after this error.
    fn passed_over(&self, slab: usize, error: &Error) -> Result<Failure, Failure> {
        let failure = Failure::of(error);
        if !is_of_full_server(error) {
            self.reported.failure(slab as u64, error);
        }
        match failure {
            Failure::NoSpace | Failure::Silent | Failure::Unanswered => Ok(failure),
            Failure::Lost | Failure::Stopped => Err(failure),
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

    /// Until when a change of the table may be in flight. None is begun with too little time: its outcome would be
    /// unknown.
    fn permit_change(&self, until: Instant) -> Result<Instant, Failure> {
        let end = self.ownership.permit(until)?;
        if left(end) < self.change_time { Err(Failure::Unanswered) } else { Ok(end) }
    }

    /// Changes the entry of a slab in the table, if this process owns the disk; returns what the entry has then.
    fn change<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        change: &Change,
        until: Instant,
    ) -> Result<Option<Pointer>, Unchanged> {
        let certain = |failure| Unchanged { failure, perhaps: false };
        let failed = |error: &Error| {
            self.reported.failure(slab as u64, error);
            certain(Failure::of(error))
        };
        let (number, entry) = place(slab as u64);
        let pointer = table_pointer(self.pointer, number as u64).map_err(|error| failed(&error))?;
        let end = self.permit_change(until).map_err(certain)?;
        client.set_deadline(left(end));
        let mut page: Page = [0; PAGE_BYTES];
        let mut update = client.update(pointer, &mut page).map_err(|error| failed(&error))?;
        let table = TablePage::decode(copied(&update), self.properties.id, number as u64);
        let mut table = match table {
            Ok(table) if table.owner() == self.properties.owner => table,
            Ok(_) => {
                self.ownership.finish(DiskError::TakenOver);
                return Err(certain(Failure::Stopped));
            }
            Err(error) => {
                self.ownership.finish(error.into());
                return Err(certain(Failure::Stopped));
            }
        };
        match *change {
            Change::Fill(pointer) => {
                let there = table.slab(entry);
                if there.is_some() && table.freeing() != there {
                    // The lease would end by itself.
                    let _ = update.abort();
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
                    let _ = update.abort();
                    return Err(certain(Failure::Lost));
                }
                table.set_freeing(Some(pointer));
                table.set_slab(entry, None);
            }
        }
        let now = table.slab(entry);
        update.copy_from_slice(&table.sealed());
        if left(end) < self.change_time / 2 {
            let _ = update.abort();
            return Err(certain(Failure::Unanswered));
        }
        update.client().set_deadline(left(end));
        update.commit().map_err(|error| {
            let perhaps = error.is_outcome_unknown()
                || matches!(error, Error::Carrier { .. } | Error::Violation { .. });
            Unchanged { perhaps, ..failed(&error) }
        })?;
        Ok(now)
    }
}
