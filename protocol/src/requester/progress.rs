//! Pages that have to be requested again, elsewhere or later, and the end of an operation.

use core::time::Duration;

use bluebridge_wire::{Datagram, NodeId, Status, address::LINE_PAGES};

use super::{
    Completion, Event, Failure, NONE, Operation, Output, PageStatuses, Place, Requester, Server,
    Stage,
    op::{Holder, NO_PAGE, Op, Route},
};
use crate::Timestamp;

/// The most moves of a range that one operation follows.
pub(super) const HOPS_MAX: u8 = 4;

/// How long requests for moved memory do not go to a pointer that led to another node than their server. Then one finds
/// out whether a switch has an entry by now.
pub(super) const ASTRAY_TIME: Duration = Duration::from_secs(1);

/// The same of a pointer from which no response came: to find that out costs more.
pub(super) const SILENT_TIME: Duration = Duration::from_secs(10);

impl Requester {
    /// Records the details of a refusal besides its status.
    pub(super) fn note_refusal(
        &mut self,
        index: u16,
        page: usize,
        status: Status,
        reply: &Datagram<'_>,
    ) {
        let op = &mut self.ops[index];
        match status {
            Status::Busy => {
                op.route.holder = Holder::from_reply(reply);
            }
            Status::Moved => {
                let page = op.run.first_page + u8::try_from(page).unwrap_or(0);
                // Pages that moved to different nodes are requested one by one.
                op.pages.one_by_one |=
                    op.route.moved_page != NO_PAGE && op.route.moved_node != reply.header.node;
                if page < op.route.moved_page {
                    op.route.moved_node = reply.header.node;
                    op.route.moved_page = page;
                    op.route.moved_block_pages = reply.header.detail;
                }
            }
            _ => {}
        }
    }

    /// Sets the status of a page of the run.
    pub(super) fn settle_page(&mut self, index: u16, page: usize, status: Status) {
        let via = self.is_via(index);
        let op = &mut self.ops[index];
        op.arrived.settled |= 1 << page;
        let whole = usize::from(op.run.first_page) + page;
        if let Some(entry) = op.pages.statuses.get_mut(whole) {
            *entry = status;
        }
        // Whatever the status of the other pages, this one was changed.
        op.may_be_applied |= status.is_ok() && op.operation.changes_memory();
        let retries = is_temporary(status, via) || op.is_lost_grant(status);
        if !(op.may_retry() && retries) {
            op.pages.pending &= !(1_u8.checked_shl(u32::try_from(whole).unwrap_or(8)).unwrap_or(0));
        }
    }

    /// All pages of the run have the same status.
    pub(super) fn settle_run(
        &mut self,
        now: Timestamp,
        index: u16,
        status: Status,
        reply: &Datagram<'_>,
    ) {
        self.note_refusal(index, 0, status, reply);
        for page in 0..self.ops[index].run_page_count() {
            self.settle_page(index, page, status);
        }
        self.end_run(now, index);
    }

    /// All pages of the run have a status: ends the operation, or requests the pending pages again.
    pub(super) fn end_run(&mut self, now: Timestamp, index: u16) {
        self.detach(index);
        self.retire_number(index);
        let op = &mut self.ops[index];
        op.link.place = Place::Flight;
        if op.is_question && op.has_moved() {
            // The line lives, and the process that may have executed the request does not.
            let node = NodeId(op.route.moved_node);
            self.fail(index, Failure::Refused { status: Status::Moved, node });
            return;
        }
        if op.pages.pending == 0 {
            self.conclude(index);
            return;
        }
        let first = op.pages.pending.trailing_zeros() as usize;
        let run_page = usize::from(op.run.first_page);
        let run = run_page..run_page + op.run_page_count();
        let status = op.pages.statuses.get(first).copied().unwrap_or(Status::Internal);
        let uniform = run.clone().all(|page| op.pages.statuses.get(page) == Some(&status));
        op.pages.one_by_one |= !uniform;
        op.route.home = true;
        if !run.contains(&first) {
            // This page was last requested in an earlier run; its counts start again.
            op.route.hops = 0;
            op.route.pauses = 0;
            self.continue_at_home(now, index);
            return;
        }
        match status {
            Status::Busy | Status::NotOwner => {
                self.counters.count(Event::BusyRetry);
                self.set_run(index);
                self.sleep(now, index);
            }
            // Only an UPDATE gets here: its grant ended before the requester received it.
            Status::LeaseLost => {
                self.counters.count(Event::GrantLost);
                self.set_run(index);
                self.sleep(now, index);
            }
            Status::Moved if usize::from(op.route.moved_page) == first => self.follow(now, index),
            Status::NoAuthority => {
                // The node's authority is on its way, or the range moved on: no hop, but a pause.
                self.discard_move(index);
                self.ops[index].route.hops = 0;
                self.pause_for_home(now, index);
            }
            _ => {
                self.discard_move(index);
                self.hop(now, index, None);
            }
        }
    }

    /// Another node serves the range.
    fn follow(&mut self, now: Timestamp, index: u16) {
        let Route { moved_node, moved_block_pages, .. } = self.ops[index].route;
        let node = NodeId(moved_node);
        let Some(pointer) = self.ops[index].pointer().filter(|_| node.is_unicast()) else {
            self.counters.count(Event::ReplyViolation);
            let node = self.contacted_node(index);
            self.fail(index, Failure::Violation { node });
            return;
        };
        self.counters.count(Event::MovedFollow);
        // The answer to a first try: the pointer leads to who sent it, and not yet to the node.
        let op = &self.ops[index];
        let leads_elsewhere = op.request.attempt == 0 && !self.is_at_endpoint(op);
        let avoids_until = if leads_elsewhere { now + ASTRAY_TIME } else { now };
        self.moved.remember(pointer, moved_block_pages, node, avoids_until);
        // A home that leads a DELETE elsewhere has lost the allocation; otherwise it would free it itself.
        let is_of_home = self.contacted_node(index) == pointer.node;
        self.ops[index].route.is_orphan |= is_of_home;
        self.hop(now, index, Some(node));
    }

    /// Continues at another node, or at the home if `None`, unless that happened too often.
    fn hop(&mut self, now: Timestamp, index: u16, node: Option<NodeId>) {
        let op = &mut self.ops[index];
        op.route.hops += 1;
        if op.route.hops > HOPS_MAX {
            let node = node.unwrap_or(NodeId(op.route.moved_node));
            self.fail(index, Failure::TooManyHops { node });
            return;
        }
        match node {
            Some(node) => self.continue_at(now, index, node),
            None => self.continue_at_home(now, index),
        }
    }

    fn continue_at_home(&mut self, now: Timestamp, index: u16) {
        let home = self.ops[index].pointer().map(|pointer| pointer.node);
        self.continue_at(now, index, home.unwrap_or(NodeId::ANY));
    }

    /// Contacts the home again after a pause.
    fn pause_for_home(&mut self, now: Timestamp, index: u16) {
        let home = self.ops[index].pointer().map(|pointer| pointer.node);
        if self.route_to(index, home.unwrap_or(NodeId::ANY)) {
            self.sleep(now, index);
        }
    }

    fn continue_at(&mut self, now: Timestamp, index: u16, node: NodeId) {
        if self.route_to(index, node) {
            self.enqueue(now, index);
        }
    }

    /// Makes a node the next one to contact; false if no server slot is free and the operation
    /// ended.
    fn route_to(&mut self, index: u16, node: NodeId) -> bool {
        let shard = self.ops[index].pointer().map_or(0, |pointer| pointer.location.shard());
        self.leave_peer(index);
        let Some(peer) = self.peer(Server { node, shard }) else {
            self.fail(index, Failure::TooManyServers { node });
            return false;
        };
        self.peers[peer].op_count += 1;
        self.ops[index].route.peer = peer;
        self.set_run(index);
        true
    }

    fn discard_move(&mut self, index: u16) {
        self.counters.count(Event::MovedForget);
        if let Some(pointer) = self.ops[index].pointer() {
            self.moved.forget(pointer);
        }
    }

    /// Lets an operation wait for a while before its next attempt.
    pub(super) fn sleep(&mut self, now: Timestamp, index: u16) {
        let pause = self.pause(self.ops[index].route.pauses);
        let op = &mut self.ops[index];
        op.route.pauses = op.route.pauses.saturating_add(1);
        op.link.place = Place::Pause;
        op.timer = now + pause;
        let timer = op.timer;
        self.arm(timer);
    }

    /// The server is overloaded: the same number is sent again after a pause.
    pub(super) fn back_off(&mut self, now: Timestamp, index: u16) {
        if matches!(self.ops[index].link.place, Place::Held | Place::Pause) {
            return;
        }
        self.detach(index);
        self.ops[index].request.overloaded = true;
        self.ops[index].request.to_send = 0;
        self.sleep(now, index);
    }

    /// A pause after `count` earlier pauses: doubled each time, and randomised over its upper half.
    pub(super) fn pause(&mut self, count: u8) -> Duration {
        let timing = &self.config.timing;
        let longest = timing.back_off_min.saturating_mul(1 << count.min(16));
        let half = longest.min(timing.back_off_max) / 2;
        let spread = u64::try_from(half.as_nanos()).unwrap_or(u64::MAX).max(1);
        half + Duration::from_nanos(self.random.next() % spread)
    }

    /// All pages have their final status.
    pub(super) fn conclude(&mut self, index: u16) {
        let node = self.contacted_node(index);
        let op = &self.ops[index];
        let count = op.page_count();
        let statuses = op.pages.statuses.get(..count).unwrap_or(&op.pages.statuses);
        let first = statuses.first().copied().unwrap_or(Status::Internal);
        let result = if statuses.iter().any(|status| *status != first) {
            let count = u8::try_from(count).unwrap_or(0);
            Err(Failure::Partial(PageStatuses { count, statuses: op.pages.statuses }))
        } else if first.is_ok() {
            Ok(self.output(index))
        } else {
            Err(Failure::Refused { status: first, node })
        };
        self.finish(index, result);
    }

    /// The result of an operation whose pages all succeeded.
    fn output(&mut self, index: u16) -> Output {
        let op = &self.ops[index];
        match op.operation {
            Operation::ReadStale { .. } => Output::Read { stale: op.pages.stale != 0 },
            Operation::Update { .. } => {
                self.counters.count(Event::Grant);
                Output::Leased(op.grant.lease)
            }
            _ => Output::Done,
        }
    }

    /// Ends an operation with a failure; the failure says that nothing was done only if that is
    /// known.
    pub(super) fn fail(&mut self, index: u16, failure: Failure) {
        let op = &self.ops[index];
        let failure = if op.may_have_changed() {
            let responding = self.is_responding(index);
            Failure::OutcomeUnknown { node: self.contacted_node(index), responding }
        } else {
            failure
        };
        self.finish(index, Err(failure));
    }

    /// Ends an operation and queues its completion.
    pub(super) fn finish(&mut self, index: u16, result: Result<Output, Failure>) {
        let token = self.ops[index].token;
        self.counters.count(if result.is_ok() { Event::Success } else { Event::Failure });
        self.release(index);
        self.completions.push_back(Completion { token, result });
    }

    /// Frees an operation's slot, number and credit.
    pub(super) fn release(&mut self, index: u16) {
        self.detach(index);
        let closes = matches!(self.ops[index].operation, Operation::Close { .. });
        if closes && self.ops[index].request.sequence != 0 {
            let peer = self.ops[index].route.peer;
            self.peers[peer].closing = false;
            self.mark_backpressured(peer);
        }
        self.retire_number(index);
        self.leave_peer(index);
        self.ops.remove(index);
        if self.ops.live() == 0 {
            self.next_timeout = Timestamp::MAX;
        }
    }

    /// Records that the outcome of the operation's current number is known.
    pub(super) fn retire_number(&mut self, index: u16) {
        let op = &mut self.ops[index];
        let sequence = core::mem::take(&mut op.request.sequence);
        op.request.sent_count = 0;
        self.freed = true;
        if sequence == 0 || op.route.peer == NONE {
            return;
        }
        let cost = u32::from(op.request.cost);
        let peer = &mut self.peers[op.route.peer];
        peer.retire(sequence);
        peer.outstanding_pages = peer.outstanding_pages.saturating_sub(cost);
        self.outstanding_pages = self.outstanding_pages.saturating_sub(cost);
    }

    /// Detaches an operation without a number from its peer.
    pub(super) fn leave_peer(&mut self, index: u16) {
        let peer = core::mem::replace(&mut self.ops[index].route.peer, NONE);
        if peer != NONE {
            self.peers[peer].op_count -= 1;
        }
    }

    pub(super) fn contacted_node(&self, index: u16) -> NodeId {
        self.peers.at(self.ops[index].route.peer).map_or(NodeId::ANY, |peer| peer.server.node)
    }

    /// Whether the contacted node replied since the operation started.
    pub(super) fn is_responding(&self, index: u16) -> bool {
        let op = &self.ops[index];
        let last_seen = self.peers.at(op.route.peer).and_then(|peer| peer.last_seen);
        last_seen.is_some_and(|last_seen| last_seen >= op.started)
    }

    /// Whether the contacted node is not the pointer's home.
    fn is_via(&self, index: u16) -> bool {
        let home = self.ops[index].pointer().map(|pointer| pointer.node);
        home.is_some_and(|home| home != self.contacted_node(index))
    }
}

impl Op {
    /// Pages of the whole operation.
    fn page_count(&self) -> usize {
        let Some((pointer, length)) = self.range() else { return 1 };
        let end = pointer.location.in_page() + length as usize;
        end.div_ceil(bluebridge_wire::address::PAGE_BYTES).min(LINE_PAGES)
    }

    /// Whether the last reply said that a page of the run moved.
    const fn has_moved(&self) -> bool {
        self.route.moved_page != NO_PAGE
    }

    /// Whether an UPDATE was granted, and the grant ended before the requester received it.
    const fn is_lost_grant(&self, status: Status) -> bool {
        matches!((status, self.operation), (Status::LeaseLost, Operation::Update { .. }))
    }

    /// Whether a request that was refused temporarily may be repeated.
    fn may_retry(&self) -> bool {
        matches!(self.stage, Stage::Direct) && self.pointer().is_some()
    }
}

/// Whether a page's status is temporary: elsewhere or later, the page may be served.
const fn is_temporary(status: Status, via: bool) -> bool {
    match status {
        Status::Busy | Status::Moved | Status::NotOwner => true,
        Status::NoAuthority | Status::WrongNode => via,
        _ => false,
    }
}
