//! Queued replies: sealed heads, and data that stays in the store's pages.

use core::ops::Range;
use std::{collections::VecDeque, net::Ipv6Addr};

use bluebridge_wire::{
    Header, Location, Status,
    address::{LINE_BYTES, LINE_PAGES, PAGE_BYTES},
    header::HEADER_BYTES,
    line::LINE_RECORD_BYTES,
    seal, seal_page, tlv,
};

use crate::store::PageStore;

/// Space for a header with the statuses of a line's pages.
const HEAD_BYTES: usize = HEADER_BYTES + tlv::emitted_bytes(LINE_PAGES);

/// The most data of a reply that is not stored in pages.
pub(super) const INLINE_BYTES: usize = 64;

/// Replies with the record of a line, or with fences, that may be queued at once.
const RECORD_REPLIES: usize = 8;

/// One datagram to be sent from the server's port, whole and sealed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SealedReply<'a> {
    /// Source address.
    pub source: Ipv6Addr,
    /// Destination address.
    pub destination: Ipv6Addr,
    /// UDP destination port.
    pub destination_port: u16,
    /// Header and options.
    pub head: &'a [u8],
    /// The data that follows, in the store's page or in the reply itself.
    pub data: &'a [u8],
}

#[derive(Clone, Copy)]
enum Body {
    Inline { bytes: u8 },
    Page { page: u64, start: u16, bytes: u16 },
    Record { slot: u8, bytes: u16 },
}

/// A queued reply.
pub(super) struct Reply {
    source: Ipv6Addr,
    destination: Ipv6Addr,
    port: u16,
    head_bytes: usize,
    body: Body,
    bytes: [u8; HEAD_BYTES + INLINE_BYTES],
}

const _: () = assert!(size_of::<Reply>() <= 232);

impl Reply {
    fn transmit<'a, S: PageStore + ?Sized>(
        &'a self,
        store: &'a S,
        records: &'a Records,
    ) -> SealedReply<'a> {
        let (head, rest) = self.bytes.split_at(self.head_bytes);
        let data = match self.body {
            Body::Inline { bytes } => &rest[..usize::from(bytes)],
            Body::Page { page, start, bytes } => {
                let start = usize::from(start);
                store.read(page, start..start + usize::from(bytes))
            }
            Body::Record { slot, bytes } => &records.slots[usize::from(slot)][..usize::from(bytes)],
        };
        SealedReply {
            source: self.source,
            destination: self.destination,
            destination_port: self.port,
            head,
            data,
        }
    }
}

/// The data of queued replies that is longer than [`INLINE_BYTES`]. Replies leave in the order in which they
/// came, so the slots are used in turn.
struct Records {
    slots: Box<[[u8; LINE_RECORD_BYTES]; RECORD_REPLIES]>,
    next: usize,
    queued: usize,
}

/// The addresses of a reply.
#[derive(Clone, Copy)]
pub(super) struct ReplyPath {
    pub(super) source: Ipv6Addr,
    pub(super) destination: Ipv6Addr,
    pub(super) port: u16,
}

/// A bounded queue of sealed replies.
pub(super) struct ReplyQueue {
    replies: VecDeque<Reply>,
    limit: usize,
    /// The reply that was last returned.
    taken: Option<Reply>,
    page_replies: usize,
    /// One bit per line (modulo 64) whose data a queued reply refers to.
    lines: u64,
    records: Records,
}

impl ReplyQueue {
    pub(super) fn new(limit: usize) -> Self {
        let replies = VecDeque::with_capacity(limit);
        let slots = Box::new([[0; LINE_RECORD_BYTES]; RECORD_REPLIES]);
        let records = Records { slots, next: 0, queued: 0 };
        Self { replies, limit, taken: None, page_replies: 0, lines: 0, records }
    }

    pub(super) fn room(&self) -> usize {
        self.limit - self.replies.len()
    }

    /// Whether a reply with the record of a line may be queued.
    pub(super) const fn has_record_room(&self) -> bool {
        self.records.queued < RECORD_REPLIES
    }

    pub(super) fn len(&self) -> usize {
        self.replies.len()
    }

    pub(super) const fn has_page_replies(&self) -> bool {
        self.page_replies > 0
    }

    /// Whether a queued reply may refer to data of the line at `location_bits`.
    pub(super) const fn may_hold_line(&self, location_bits: u64) -> bool {
        self.page_replies > 0 && self.lines & line_bit(location_bits) != 0
    }

    pub(super) fn push(
        &mut self,
        reply_path: ReplyPath,
        header: &Header,
        statuses: &[Status],
        data: &[u8],
    ) {
        let inline = u8::try_from(data.len()).unwrap_or(u8::MAX);
        let reply = self.append(reply_path, Body::Inline { bytes: inline });
        let options = match statuses {
            [] => 0,
            _ => tlv::emit_page_statuses(&mut reply.bytes[HEADER_BYTES..], statuses),
        };
        let head_bytes = HEADER_BYTES + options;
        header.emit(&mut reply.bytes, options);
        let (head, rest) = reply.bytes.split_at_mut(head_bytes);
        rest[..data.len()].copy_from_slice(data);
        seal(reply_path.source, reply_path.destination, head, data);
        reply.head_bytes = head_bytes;
    }

    /// Queues a piece whose data stays in the store until it is sent; the piece is a range of the
    /// page at `location`.
    pub(super) fn push_page<S: PageStore + ?Sized>(
        &mut self,
        reply_path: ReplyPath,
        header: &Header,
        location: Location,
        range: Range<u16>,
        store: &S,
    ) {
        let page = location.page();
        self.page_replies += 1;
        self.lines |= line_bit(location.bits());
        let bytes = range.end - range.start;
        let reply = self.append(reply_path, Body::Page { page, start: range.start, bytes });
        header.emit(&mut reply.bytes, 0);
        let ReplyPath { source, destination, .. } = reply_path;
        let Some(head) = reply.bytes.first_chunk_mut::<HEADER_BYTES>() else { return };
        let is_whole = usize::from(bytes) == PAGE_BYTES;
        match store.page_crc(page).filter(|_| is_whole) {
            Some(crc) => seal_page(source, destination, head, crc),
            None => {
                let data = store.read(page, usize::from(range.start)..usize::from(range.end));
                seal(source, destination, head, data);
            }
        }
    }

    /// Queues a reply with the record of a line, or with as many bytes at most; there is room.
    pub(super) fn push_record(&mut self, reply_path: ReplyPath, header: &Header, data: &[u8]) {
        debug_assert!(self.has_record_room(), "room was checked before the request");
        let Records { slots, next, queued } = &mut self.records;
        let slot = *next;
        slots[slot][..data.len()].copy_from_slice(data);
        (*next, *queued) = ((slot + 1) % RECORD_REPLIES, *queued + 1);
        let slot = u8::try_from(slot).unwrap_or(u8::MAX);
        let bytes = u16::try_from(data.len()).unwrap_or(u16::MAX);
        let reply = self.append(reply_path, Body::Record { slot, bytes });
        header.emit(&mut reply.bytes, 0);
        seal(reply_path.source, reply_path.destination, &mut reply.bytes[..HEADER_BYTES], data);
    }

    fn append(&mut self, reply_path: ReplyPath, body: Body) -> &mut Reply {
        debug_assert!(self.replies.len() < self.limit, "room was checked before the request");
        let ReplyPath { source, destination, port } = reply_path;
        let bytes = [0; HEAD_BYTES + INLINE_BYTES];
        self.replies.push_back(Reply {
            source,
            destination,
            port,
            head_bytes: HEADER_BYTES,
            body,
            bytes,
        });
        let last = self.replies.len() - 1;
        &mut self.replies[last]
    }

    pub(super) fn iter<'a, S: PageStore + ?Sized>(
        &'a self,
        store: &'a S,
    ) -> impl Iterator<Item = SealedReply<'a>> {
        self.replies.iter().map(|reply| reply.transmit(store, &self.records))
    }

    /// Removes the first reply.
    pub(super) fn pop<'a, S: PageStore + ?Sized>(
        &'a mut self,
        store: &'a S,
    ) -> Option<SealedReply<'a>> {
        let reply = self.replies.pop_front()?;
        self.release_body(reply.body);
        Some(self.taken.insert(reply).transmit(store, &self.records))
    }

    pub(super) fn release(&mut self, count: usize) {
        for _ in 0..count {
            let Some(reply) = self.replies.pop_front() else { break };
            self.release_body(reply.body);
        }
    }

    const fn release_body(&mut self, body: Body) {
        self.page_replies -= matches!(body, Body::Page { .. }) as usize;
        self.records.queued -= matches!(body, Body::Record { .. }) as usize;
        if self.page_replies == 0 {
            self.lines = 0;
        }
    }
}

const fn line_bit(location_bits: u64) -> u64 {
    1 << (location_bits / LINE_BYTES as u64 % 64)
}
