//! WRITE: trains of pieces, assembled page by page (`docs/protocol.md`, section 4).

use bluebridge_wire::{Datagram, Header, Location, Status, address::PAGE_BYTES};

use super::{
    Event, Responder,
    admit::{Execution, Request},
    cut::{PagePart, Piece, Pieces, PlacedPiece},
    execute::{memory, part_access},
    record::{NO_TRAIN, Progress, Record},
    trains::{IdleTrain, NoBuffer, Stored},
};
use crate::store::PageStore;

impl Responder {
    pub(super) fn write<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        store: &mut S,
    ) {
        let request = execution.request;
        let (cut, piece) = match self.piece_of_write(execution) {
            Ok(found) => found,
            Err(status) => return self.conclude_refused(execution, status.into(), store),
        };
        let Some(part) = cut.part(piece.page) else { return };
        let mut record = *execution.before;
        if record.progress == Progress::Fresh {
            record = begin(execution);
        }
        if record.page_is_done(piece.page) {
            self.counters.count(Event::PieceDuplicate);
        } else {
            match self.resolve(request) {
                Ok(local) => {
                    self.take_piece(
                        execution,
                        &mut record,
                        local,
                        PlacedPiece { part, piece },
                        store,
                    );
                }
                // The range moved away before the first page: all of it is refused.
                Err(refusal) if execution.is_fresh() => {
                    return self.conclude_refused(execution, refusal, store);
                }
                Err(refusal) => {
                    record.node = if record.node == 0 { refusal.node } else { record.node };
                    self.refuse_train_page(&mut record, piece.page, part, refusal.status);
                }
            }
        }
        self.go_on(execution, record, cut, store);
    }

    /// The pieces of a WRITE and the piece in a datagram, if it obeys the piece rule and agrees
    /// with earlier pieces.
    pub(super) fn piece_of_write(
        &mut self,
        execution: &Execution<'_>,
    ) -> Result<(Pieces, Piece), Status> {
        let Execution { request, before, .. } = *execution;
        let cut = self.cut(execution)?;
        let piece = piece_of(request, cut)?;
        let location = memory(request)?.bits();
        let stated = (before.location, before.tag, before.length);
        let says = (location, request.datagram.target.tag, request.header().length);
        if before.progress == Progress::Pieces && stated != says {
            return Err(Status::Malformed);
        }
        Ok((cut, piece))
    }

    /// Handles a piece of a page that is not finished.
    fn take_piece<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        record: &mut Record,
        local: Location,
        placed: PlacedPiece,
        store: &mut S,
    ) {
        let request = execution.request;
        let PlacedPiece { part, piece } = placed;
        let access = part_access(request, local, part);
        let page = access.location.page();
        // Pages that cannot be written are refused at their first piece, and need no buffer.
        if let Err(status) = self.check_to_change(request, access, store) {
            return self.refuse_train_page(record, piece.page, part, status);
        }
        if part.is_one_piece() {
            let Datagram { data, page_crc, .. } = *request.datagram;
            match (<&[u8; PAGE_BYTES]>::try_from(data), page_crc) {
                (Ok(data), Some(crc)) => store.write_page(page, data, crc),
                _ => store.write(page, part.start, data),
            }
            self.counters.count(Event::PageWrittenStraight);
            return self.finish_page(record, piece.page, Status::Ok);
        }
        let stored = self.store_piece(execution, record, placed);
        match stored {
            Stored::Complete => {
                let bytes = self.trains.part(record.train, piece.page, part);
                store.write(page, part.start, bytes);
                self.release_train_page(record, piece.page, part);
                self.counters.count(Event::PageWrittenJoined);
                self.finish_page(record, piece.page, Status::Ok);
            }
            Stored::More => {}
            Stored::Duplicate | Stored::No(_) => self.count_not_stored(stored),
        }
    }

    fn refuse_train_page(
        &mut self,
        record: &mut Record,
        page: usize,
        part: PagePart,
        status: Status,
    ) {
        if record.train != NO_TRAIN {
            self.release_train_page(record, page, part);
        }
        self.finish_page(record, page, status);
    }

    fn release_train_page(&mut self, record: &mut Record, page: usize, part: PagePart) {
        if self.trains.release_page(record.train, page, part) {
            record.train = NO_TRAIN;
        }
    }

    fn finish_page(&mut self, record: &mut Record, page: usize, status: Status) {
        if !status.is_ok() {
            self.counters.count(Event::PageRefused);
        }
        record.finish_page(page, status);
    }

    /// Stores a piece in the record's train; reclaims buffers from an idle train if none is
    /// available.
    pub(super) fn store_piece(
        &mut self,
        execution: &Execution<'_>,
        record: &mut Record,
        placed: PlacedPiece,
    ) -> Stored {
        let stored = self.try_store_piece(execution, record, placed);
        let Stored::No(why) = stored else { return stored };
        let (now, idle_time) = (execution.request.now, self.timers.train_pressed);
        let owner = execution.train_owner();
        let Some(idle) = self.trains.oldest_idle(now, idle_time, owner, why) else {
            return stored;
        };
        self.drop_train(idle);
        self.counters.count(Event::TrainPressed);
        self.try_store_piece(execution, record, placed)
    }

    fn try_store_piece(
        &mut self,
        execution: &Execution<'_>,
        record: &mut Record,
        placed: PlacedPiece,
    ) -> Stored {
        let request = execution.request;
        let known = (record.train != NO_TRAIN).then_some(record.train);
        let (now, owner, data) = (request.now, execution.train_owner(), request.datagram.data);
        let (train, stored) = self.trains.store(now, known, owner, placed, data);
        record.train = train.unwrap_or(NO_TRAIN);
        if train != known {
            self.counters.count(Event::TrainBegun);
            self.wake_by(request.now + self.timers.train);
        }
        stored
    }

    /// Counts why a piece was not stored.
    pub(super) const fn count_not_stored(&mut self, stored: Stored) {
        self.counters.count(match stored {
            Stored::Complete | Stored::More => return,
            Stored::Duplicate => Event::PieceDuplicate,
            Stored::No(NoBuffer::Pool) => Event::PiecePressed,
            Stored::No(NoBuffer::Node | NoBuffer::Space) => Event::PieceBeyondShare,
        });
    }

    /// Sends the reply if all pages are finished, else keeps the record.
    fn go_on<S: PageStore + ?Sized>(
        &mut self,
        execution: &Execution<'_>,
        mut record: Record,
        cut: Pieces,
        store: &S,
    ) {
        let is_finished = record.pages_done.count_ones() as usize == cut.page_count();
        if is_finished {
            if record.train != NO_TRAIN {
                self.trains.end(record.train);
                record.train = NO_TRAIN;
            }
            record.conclude_pages();
            return self.conclude(execution, record, store);
        }
        let done = cut.parts().enumerate().filter(|&(page, _)| record.page_is_done(page));
        let buffered = self.trains.arrived(record.train);
        let arrived = done.fold(buffered, |bits, (_, part)| bits | part.bits);
        if arrived != 0 {
            self.keep(execution, record);
        }
        self.incomplete(execution.request, arrived);
    }

    /// Reports which pieces arrived, if the request is a repetition and so requests them.
    pub(super) fn incomplete(&mut self, request: &Request<'_>, arrived: u32) {
        if request.attempt() > 0 {
            let header = Header { detail: arrived, ..self.reply_header(request) };
            self.push(request, Status::Incomplete, &header, &[], &[]);
        }
    }

    /// Ends a train and updates its owner's record.
    pub(super) fn drop_train(&mut self, IdleTrain { train, owner, .. }: IdleTrain) {
        self.trains.end(train);
        let session = self.sessions.at(owner.session);
        let record = session.record(owner.sequence);
        if record.train == train {
            session.keep(owner.sequence, Record { train: NO_TRAIN, ..record });
        }
    }
}

/// The record of a request whose first piece arrived.
pub(super) fn begin(execution: &Execution<'_>) -> Record {
    let Execution { request, command, .. } = *execution;
    let target = request.datagram.target;
    Record {
        location: target.location,
        tag: target.tag,
        length: request.header().length,
        command,
        progress: Progress::Pieces,
        ..Record::FRESH
    }
}

/// The piece that a datagram carries.
pub(super) fn piece_of(request: &Request<'_>, cut: Pieces) -> Result<Piece, Status> {
    let piece = cut.at(request.header().offset).ok_or(Status::Malformed)?;
    let fits = request.datagram.data.len() == piece.bytes;
    if fits { Ok(piece) } else { Err(Status::Malformed) }
}
