//! Reads, writes and atomics: the possible contents of pages.

use bluebridge_protocol::{
    Timestamp,
    requester::{Failure, Output, PageStatuses},
};
use bluebridge_wire::Status;

use super::{Ledger, Outcome};
use crate::sim::{
    model::PrivatePage,
    region::{Contents, Part, parts, read_stamp},
    task::Slot,
};

impl Ledger {
    /// A reply in the same session, requested with a low-water mark above all requests with an
    /// unknown outcome: these can no longer be executed. The mark stays below outstanding requests.
    pub(super) fn settle(&mut self, slot: &Slot, region: usize) {
        let region = &mut self.regions[region];
        let is_passed = region.unknown_at.is_none_or(|unknown_at| slot.oldest >= unknown_at);
        if is_passed && !self.sessions_linger {
            region.settle();
        }
    }

    pub(super) fn read(
        &mut self,
        slot: &Slot,
        (index, offset, length): (usize, u64, usize),
        result: Result<Output, Failure>,
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

    pub(super) fn written(
        &mut self,
        now: Timestamp,
        slot: &Slot,
        (index, offset, length): (usize, u64, usize),
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        let partial = partial_of(&result);
        let outcome = self.outcome(slot, index, &result)?;
        if matches!(outcome, Outcome::Done) || partial.is_some() {
            self.settle(slot, index);
        }
        let Contents::Private(pages) = &mut self.regions[index].contents else {
            return Err("not a private region".to_owned());
        };
        for (number, Part { page, start, data }) in parts(offset, length).enumerate() {
            let bytes = &slot.outgoing[data];
            let status = status_of(partial, number);
            match (&outcome, status) {
                (Outcome::Done, _) | (_, Some(Status::Ok)) => pages[page].write(start, bytes),
                (Outcome::Unknown, _) => pages[page].write_unknown(start, bytes),
                (Outcome::NotDone, _) => {}
            }
        }
        let doubtful = pages.iter().any(PrivatePage::is_doubtful);
        if matches!(outcome, Outcome::Unknown) {
            self.regions[index].unknown_at = Some(now);
        }
        self.regions[index].retired |= doubtful;
        Ok(())
    }

    pub(super) fn shared_read(
        &mut self,
        now: Timestamp,
        slot: &Slot,
        (index, offset, length): (usize, u64, usize),
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        let partial = partial_of(&result);
        let outcome = self.outcome(slot, index, &result)?;
        let Contents::Shared(registers) = &mut self.regions[index].contents else {
            return Err("not a shared region".to_owned());
        };
        for (number, Part { page, start, data }) in parts(offset, length).enumerate() {
            let status = status_of(partial, number);
            if !matches!((&outcome, status), (Outcome::Done, _) | (_, Some(Status::Ok))) {
                continue;
            }
            if let Some(value) = read_stamp(start, &slot.incoming[data])? {
                registers[page].read(value, slot.start, now)?;
            }
        }
        Ok(())
    }

    pub(super) fn shared_written(
        &mut self,
        now: Timestamp,
        slot: &Slot,
        (index, pages, value): (usize, core::ops::Range<usize>, u64),
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        let partial = partial_of(&result);
        let outcome = self.outcome(slot, index, &result)?;
        let Contents::Shared(registers) = &mut self.regions[index].contents else {
            return Err("not a shared region".to_owned());
        };
        for (number, page) in pages.enumerate() {
            let status = status_of(partial, number);
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

    pub(super) fn added(
        &mut self,
        now: Timestamp,
        slot: &Slot,
        (index, cell, addend): (usize, usize, u64),
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        let outcome = self.outcome(slot, index, &result)?;
        let Contents::Cells { adds, .. } = &mut self.regions[index].contents else {
            return Err("not a region of cells".to_owned());
        };
        match (outcome, result) {
            (Outcome::Done, Ok(Output::Previous(previous))) => {
                adds[cell].add(previous, addend, slot.start, now);
                Ok(())
            }
            (Outcome::Done, result) => Err(format!("a FETCH_ADD returned {result:?}")),
            (Outcome::Unknown, _) => {
                adds[cell].add_unknown(addend);
                Ok(())
            }
            (Outcome::NotDone, _) => Ok(()),
        }
    }

    pub(super) fn swapped(
        &mut self,
        now: Timestamp,
        slot: &Slot,
        (index, cell, expected, new): (usize, usize, u64, u64),
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        let outcome = self.outcome(slot, index, &result)?;
        let Contents::Cells { swaps, seen, .. } = &mut self.regions[index].contents else {
            return Err("not a region of cells".to_owned());
        };
        match (outcome, result) {
            (Outcome::Done, Ok(Output::Previous(previous))) => {
                seen[cell] = if previous == expected { new } else { previous };
                swaps[cell].swap((expected, new), previous, slot.start, now)
            }
            (Outcome::Done, result) => Err(format!("a CAS returned {result:?}")),
            (Outcome::Unknown, _) => {
                swaps[cell].swap_unknown(expected, new, slot.start);
                Ok(())
            }
            (Outcome::NotDone, _) => Ok(()),
        }
    }

    pub(super) fn cell_read(
        &self,
        slot: &Slot,
        (index, cell): (usize, usize),
        result: Result<Output, Failure>,
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
}

/// The statuses of an operation whose pages ended differently.
const fn partial_of(result: &Result<Output, Failure>) -> Option<PageStatuses> {
    match result {
        Err(Failure::Partial(statuses)) => Some(*statuses),
        _ => None,
    }
}

fn status_of(partial: Option<PageStatuses>, page: usize) -> Option<Status> {
    partial.and_then(|statuses| statuses.as_slice().get(page).copied())
}
