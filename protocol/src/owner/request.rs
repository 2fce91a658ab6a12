//! Redirected requests: which ones get a reply, and which.

use core::time::Duration;

use bluebridge_wire::{
    Command, Datagram, Features, Flags, Header, Pointer, Status,
    address::{PAGE_BYTES, PAGE_SHIFT},
};

use super::{
    Event, Owner, Policy,
    config::WAIT_MAX,
    replies::{Excerpt, ReplyTo, Waiter},
    table::{Held, Page},
};
use crate::{Timestamp, pieces::Cut};

impl Owner {
    /// Replies to a request about a page; no request is executed.
    pub(super) fn request(&mut self, now: Timestamp, port: u16, request: &Datagram<'_>) {
        let Some(pointer) = self.subject(request) else {
            self.counters.count(Event::DropForm);
            return;
        };
        if !self.has_room(1) {
            self.counters.count(Event::DropFull);
            return;
        }
        let page = Page::of(pointer);
        let reply_to = ReplyTo::of(request, port);
        let held = self.table.find(page).copied();
        let Some(held) = held.filter(|held| held.expires_at > now) else {
            self.counters.count(Event::NotOwner);
            self.reply(reply_to, Status::NotOwner, Header::default());
            return;
        };
        let done = match held.policy {
            Policy::Reject => false,
            Policy::Serve => self.serve(now, reply_to, page, &held, pointer, request),
            Policy::Wait => self.wait(now, reply_to, page, &held, request),
        };
        if !done {
            self.counters.count(Event::Reject);
            let fields = self.terms(now, held.epoch, held.expires_at);
            self.reply(reply_to, Status::Busy, fields);
        }
    }

    /// The memory that a request is about, if a redirect may forward it: well formed, and about one
    /// page.
    fn subject(&self, request: &Datagram<'_>) -> Option<Pointer> {
        let header = &request.header;
        let pointer = Pointer::from_ipv6(header.target).ok()?;
        let agrees = request.to.tag == pointer.tag.0
            && request.to.location == pointer.location.bits()
            && request.to.node.is_unicast()
            && pointer.node.is_unicast()
            && request.from.node.is_unicast();
        let numbered = header.session != 0 && header.sequence != 0;
        let plain = header.required == Features::default()
            && header.key_id == 0
            && u32::from(header.page_shift) == PAGE_SHIFT;
        let length = u64::from(header.length);
        let frees = request.command().command() == Some(Command::Delete)
            && !header.flags.contains(Flags::ZERO);
        let in_page = pointer.location.in_page() as u64 + length <= PAGE_BYTES as u64;
        (agrees && numbered && plain && (frees || (length > 0 && in_page))).then_some(pointer)
    }

    /// Lets a request wait if its flags permit that; false if it has to go to the home at once.
    fn wait(
        &mut self,
        now: Timestamp,
        reply_to: ReplyTo,
        page: Page,
        held: &Held,
        request: &Datagram<'_>,
    ) -> bool {
        let reads = matches!(request.command().command(), Some(Command::Read | Command::Update));
        let time = (held.expires_at - now).min(self.config.wait).min(WAIT_MAX);
        let wants = reads && request.header.flags.contains(Flags::QUEUED);
        if !wants || time < Duration::from_millis(1) {
            return false;
        }
        let until = now + time;
        let waiter = Waiter { reply_to, page, epoch: held.epoch, until };
        let known =
            self.waiters.iter_mut().find(|waiter| waiter.reply_to.is_same_request(&reply_to));
        if let Some(known) = known {
            *known = waiter;
            self.counters.count(Event::WaitAgain);
        } else if self.waiters.len() < usize::from(self.config.wait_count) && self.has_room(2) {
            self.waiters.push_back(waiter);
            self.counters.count(Event::Wait);
        } else {
            self.counters.count(Event::WaitFull);
            return false;
        }
        self.arm(until);
        let fields = self.terms(now, held.epoch, held.expires_at);
        let fields = Header {
            flags: fields.flags.with(Flags::QUEUED),
            detail: u32::try_from(time.as_millis()).unwrap_or(u32::MAX),
            ..fields
        };
        self.reply(reply_to, Status::Busy, fields);
        true
    }

    /// Sends last committed contents to a READ that accepts them; false if it has to go to the
    /// home.
    fn serve(
        &mut self,
        now: Timestamp,
        reply_to: ReplyTo,
        page: Page,
        held: &Held,
        pointer: Pointer,
        request: &Datagram<'_>,
    ) -> bool {
        let header = &request.header;
        let takes = request.command().command() == Some(Command::Read)
            && header.flags.contains(Flags::MAY_BE_STALE)
            && !header.flags.contains(Flags::SELECTIVE);
        let in_page = pointer.location.in_page();
        // A request about one page is not longer than a page.
        let length = usize::try_from(header.length).unwrap_or(usize::MAX);
        let piece_bytes = usize::try_from(header.detail).unwrap_or(usize::MAX);
        let Some(cut) = Cut::new(in_page, length, piece_bytes).filter(|_| takes) else {
            return false;
        };
        let known = self.table.contents(page, held.epoch, in_page..in_page + length).is_some();
        let pieces = cut.piece_count();
        if !known || !self.has_room(usize::try_from(pieces).unwrap_or(usize::MAX)) {
            return false;
        }
        self.counters.count(Event::Serve);
        let terms = self.terms(now, held.epoch, held.expires_at);
        for piece in (0..pieces).filter_map(|index| cut.piece(index)) {
            let range = in_page + piece.range.start..in_page + piece.range.end;
            let fields = Header {
                flags: terms.flags.with(Flags::LAST_COMMITTED),
                offset: u16::try_from(piece.range.start).unwrap_or(u16::MAX),
                // Under one epoch the last committed contents do not change.
                page_version: held.epoch,
                ..terms
            };
            self.reply_with(reply_to, fields, Excerpt { page, epoch: held.epoch, range });
        }
        true
    }
}
