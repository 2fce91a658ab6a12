//! Reassembling a READ from its pieces: each page from one version, directly into the caller's
//! memory.

use bluebridge_wire::{Datagram, Flags, Status};

use super::{Buffers, Event, Failure, Operation, Requester, op::Op};
use crate::Timestamp;

impl Requester {
    /// Handles a piece, or the refusal of a page (protocol, section 4).
    pub(super) fn handle_piece(
        &mut self,
        now: Timestamp,
        index: u16,
        reply: &Datagram<'_>,
        buffers: &mut impl Buffers,
    ) {
        let op = &mut self.ops[index];
        let offset = usize::from(reply.header.offset);
        let piece = op.run.cut.index_at(offset).and_then(|at| Some((at, op.run.cut.piece(at)?)));
        let Some((at, piece)) = piece.filter(|(_, piece)| piece.range.len() == reply.data.len())
        else {
            self.counters.count(Event::ReplyViolation);
            return;
        };
        let from_owner =
            Some(reply.from.node) != self.peers.at(op.route.peer).map(|peer| peer.server.node);
        let stale = reply.header.flags.contains(Flags::LAST_COMMITTED);
        let good = match op.operation {
            Operation::ReadStale { .. } => true,
            Operation::Update { .. } => !stale && op.note_grant(self.config.node, reply),
            _ => !stale,
        };
        if !good {
            self.counters.count(Event::ReplyViolation);
            return;
        }
        if op.arrived.done != 0 && op.arrived.from_owner != from_owner {
            // The home's versions and an owner's epochs cannot be compared.
            if from_owner {
                self.counters.count(Event::PieceOutdated);
                return;
            }
            op.arrived.done = 0;
            self.counters.count(Event::PageRestart);
        }
        op.arrived.from_owner = from_owner;
        let (bit, page_bit) = (1_u32 << at, 1_u8 << piece.page);
        let pieces = op.run.cut.page_pieces(piece.page);
        let have = op.arrived.done & pieces;
        let version = reply.header.page_version;
        let Some(known) = op.arrived.versions.get_mut(piece.page) else { return };
        if op.arrived.settled & page_bit != 0 || (have & bit != 0 && version == *known) {
            self.counters.count(Event::PieceDuplicate);
            return;
        }
        if have != 0 && version < *known {
            self.counters.count(Event::PieceOutdated);
            return;
        }
        if have != 0 && version > *known {
            // Newer pieces overwrite the older ones when they arrive.
            op.arrived.done &= !pieces;
            op.arrived.restarted |= page_bit;
            self.counters.count(Event::PageRestart);
        }
        *known = version;
        let start = usize::from(op.run.start) + piece.range.start;
        let target = buffers.incoming(op.token).get_mut(start..start + reply.data.len());
        let Some(target) = target else {
            self.fail(index, Failure::Buffer);
            return;
        };
        target.copy_from_slice(reply.data);
        buffers.copied(op.token, start, reply.page_crc);
        let page_stale = op.stale_bit(piece.page);
        if op.arrived.done & pieces == 0 {
            // No piece of the earlier contents of the page is left.
            op.pages.stale &= !page_stale;
        }
        if stale {
            op.pages.stale |= page_stale;
        }
        op.arrived.done |= bit;
        op.request.expired = 0;
        let complete = op.arrived.done & pieces == pieces;
        self.counters.count(if stale { Event::StaleJoin } else { Event::PieceJoin });
        if complete {
            self.settle_page(index, piece.page, Status::Ok);
        }
        self.progress(now, index);
    }

    /// The reply refuses one page of a READ.
    pub(super) fn handle_page_refusal(
        &mut self,
        now: Timestamp,
        index: u16,
        status: Status,
        reply: &Datagram<'_>,
    ) {
        let op = &mut self.ops[index];
        let offset = usize::from(reply.header.offset);
        let piece = op.run.cut.index_at(offset).and_then(|at| op.run.cut.piece(at));
        let Some(piece) = piece.filter(|piece| op.run.cut.page_range(piece.page).start == offset)
        else {
            self.counters.count(Event::ReplyViolation);
            return;
        };
        if op.arrived.settled & (1 << piece.page) != 0 {
            self.counters.count(Event::PieceDuplicate);
            return;
        }
        op.arrived.done &= !op.run.cut.page_pieces(piece.page);
        op.request.expired = 0;
        self.note_refusal(index, piece.page, status, reply);
        self.settle_page(index, piece.page, status);
        self.progress(now, index);
    }

    /// After the reply for a page or a piece: ends the run, or restarts the timer for the rest.
    fn progress(&mut self, now: Timestamp, index: u16) {
        let op = &self.ops[index];
        if op.arrived.settled == super::page_bits(op.run.cut.page_count()) {
            self.end_run(now, index);
        } else if op.link.place == super::Place::Flight {
            self.restart_timer(now, index);
        }
    }
}

impl Op {
    /// The bit in `stale` of a page of the run.
    fn stale_bit(&self, page: usize) -> u8 {
        u8::try_from(page)
            .ok()
            .and_then(|page| 1_u8.checked_shl(u32::from(self.run.first_page + page)))
            .unwrap_or(0)
    }
}
