//! COMMIT: a train that is applied as a whole (`docs/protocol.md`, sections 4 and 10).

use arrayvec::ArrayVec;
use bluebridge_wire::{Command, Location, Status, address::LINE_PAGES};

use super::{
    Event, Refusal, Responder,
    admit::{Execution, Request},
    cut::{Pieces, PlacedPiece},
    execute::part_access,
    lease::pages_of,
    record::{NO_TRAIN, Progress, Record},
    write::begin,
};
use crate::store::{PageStore, PageWrite};

impl Responder {
    pub(super) fn commit<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        store: &mut S,
    ) {
        let Execution { request, before, .. } = *execution;
        let epoch = request.header().lease_epoch;
        let form = self.piece_of_write(execution).and_then(|found| {
            let is_same = before.progress != Progress::Pieces || before.value == epoch;
            if is_same { Ok(found) } else { Err(Status::Malformed) }
        });
        let (cut, piece) = match form {
            Ok(found) => found,
            Err(status) => return self.conclude_refused(execution, status.into(), store),
        };
        let Some(part) = cut.part(piece.page) else { return };
        let mut record = *before;
        if record.progress == Progress::Fresh {
            record = Record { value: epoch, ..begin(execution) };
        }
        // A lost lease cannot be regained, so the remaining pieces do not matter.
        let local = match self.held(request, cut, epoch, store) {
            Ok(local) => local,
            Err(refusal) => return self.refuse_commit(execution, &record, refusal, store),
        };
        if cut.bits() == piece.bit {
            let access = part_access(request, local, part);
            store.write(access.location.page(), part.start, request.datagram.data);
            self.counters.count(Event::PageWrittenStraight);
            return self.conclude_commit(execution, local, cut, store);
        }
        let stored = self.store_piece(execution, &mut record, PlacedPiece { part, piece });
        self.count_not_stored(stored);
        let arrived = self.trains.arrived(record.train);
        if arrived == cut.bits() {
            self.apply(request, local, cut, record.train, store);
            return self.conclude_commit(execution, local, cut, store);
        }
        if arrived != 0 {
            self.keep(execution, record);
        }
        self.incomplete(request, arrived);
    }

    /// Writes all pages of a complete train.
    fn apply<S: PageStore + ?Sized>(
        &mut self,
        request: &Request<'_>,
        local: Location,
        cut: Pieces,
        train: u16,
        store: &mut S,
    ) {
        let mut writes = ArrayVec::<PageWrite<'_>, LINE_PAGES>::new();
        for (number, part) in cut.parts().enumerate() {
            let page = part_access(request, local, part).location.page();
            let data = self.trains.part(train, number, part);
            writes.push(PageWrite { page, start: part.start, data });
            self.counters.count(Event::PageWrittenJoined);
        }
        store.write_together(&writes);
        drop(writes);
        self.trains.end(train);
    }

    fn conclude_commit<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        local: Location,
        cut: Pieces,
        store: &S,
    ) {
        let record = self.release_lease(execution.request, pages_of(local, cut), Command::Commit);
        self.conclude(execution, record, store);
    }

    /// Refuses a COMMIT permanently, also in the middle of its train.
    fn refuse_commit<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        record: &Record,
        refusal: Refusal,
        store: &S,
    ) {
        if record.train != NO_TRAIN {
            self.trains.end(record.train);
        }
        self.conclude_refused(&execution.without_record(), refusal, store);
    }
}
