//! Slabs that are allocated when they are first written, and freed when nothing in them is wanted.

use std::time::Instant;

use bluebridge::{Client, Error, NodeId, Placement as Choice, Pointer, Region, Transport};

use super::descriptor::{PAGE_BYTES, Page, TablePage};
use super::open::{copied, left, place, table_pointer};
use super::{Disk, DiskError, Failure, Placement, is_of_full_server, is_of_missing_memory, lock};

/// A change of an entry of the table.
enum Change {
    /// To this slab, unless the entry has one already.
    Fill(Pointer),
    /// To none.
    Clear,
}

/// The table was not changed.
struct Unchanged {
    failure: Failure,
    /// It may be changed nevertheless.
    perhaps: bool,
}

impl Disk {
    /// The pointer to a slab, which is allocated if it is not. The caller has entered it.
    pub(super) fn allocated<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        until: Instant,
    ) -> Result<Pointer, Failure> {
        if let Some(pointer) = self.slabs.pointer(slab) {
            return Ok(pointer);
        }
        let _turn = lock(&self.turn);
        // Another thread may have been faster.
        if let Some(pointer) = self.slabs.pointer(slab) {
            return Ok(pointer);
        }
        let region = self.create_slab(client, slab, until)?;
        let own = region.base();
        match self.change(client, slab, &Change::Fill(own), until) {
            Ok(pointer) => {
                let pointer = pointer.unwrap_or(own);
                if pointer != own {
                    // An earlier change whose outcome was unknown was made.
                    self.free_region(client, region);
                }
                self.slabs.set_pointer(slab, Some(pointer));
                Ok(pointer)
            }
            Err(Unchanged { failure, perhaps: false }) => {
                self.free_region(client, region);
                Err(failure)
            }
            Err(Unchanged { failure, perhaps: true }) => {
                // If the table has it, the next write of the slab finds it there.
                tracing::warn!(slab, pointer = %own, "whether the disk's map has a new slab is unknown");
                Err(failure)
            }
        }
    }

    /// Frees a slab. The caller has begun that, so no request changes it.
    pub(super) fn free_slab<T: Transport>(
        &self,
        client: &mut Client<T>,
        slab: usize,
        until: Instant,
    ) -> Result<(), Failure> {
        let _turn = lock(&self.turn);
        let Some(pointer) = self.slabs.pointer(slab) else { return Ok(()) };
        match self.change(client, slab, &Change::Clear, until) {
            Ok(_) => {}
            Err(unchanged) => return Err(unchanged.failure),
        }
        self.slabs.set_pointer(slab, None);
        if let Ok(region) = Region::new(pointer, self.slabs.length(slab)) {
            self.free_region(client, region);
        }
        Ok(())
    }

    fn free_region<T: Transport>(&self, client: &mut Client<T>, region: Region) {
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
            if self.health.is_suspect(node) {
                worst = Failure::Unanswered;
                continue;
            }
            client.set_deadline(left(self.ownership.permit(until)?));
            match client.create_at(bytes, Choice::Node(node)) {
                Ok(region) => return Ok(region),
                Err(error) => {
                    let failure = self.passed_over(slab, &error)?;
                    if failure == Failure::Unanswered {
                        self.note_silence(node);
                        worst = failure;
                    }
                }
            }
        }
        Err(worst)
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
            Unchanged { failure: Failure::of(error), perhaps: error.is_outcome_unknown() }
        };
        let (number, entry) = place(slab as u64);
        let pointer = table_pointer(self.pointer, number as u64).map_err(|error| failed(&error))?;
        client.set_deadline(left(self.ownership.permit(until).map_err(certain)?));
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
                if let Some(there) = table.slab(entry) {
                    // The lease would end by itself.
                    let _ = update.abort();
                    return Ok(Some(there));
                }
                table.set_slab(entry, Some(pointer));
            }
            Change::Clear => {
                table.set_freeing(table.slab(entry));
                table.set_slab(entry, None);
            }
        }
        let now = table.slab(entry);
        update.copy_from_slice(&table.sealed());
        update.commit().map_err(|error| failed(&error))?;
        Ok(now)
    }
}
