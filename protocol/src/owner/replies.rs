//! Replies that wait to be sent, and requests that wait for a lease to end.

use core::{net::Ipv6Addr, ops::Range};

use bluebridge_wire::{
    Datagram, Flags, Header, NodeId, ReplySource, Status, WireCommand, address::Fields,
    header::HEADER_BYTES, seal,
};

use super::{Event, Owner, SealedReply, table::Page};
use crate::Timestamp;

/// Where a reply goes, and the fields of the request that it repeats.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplyTo {
    to: Fields,
    from: Ipv6Addr,
    port: u16,
    target: Ipv6Addr,
    session: u64,
    sequence: u64,
    length: u32,
    attempt: u8,
}

impl ReplyTo {
    pub(super) fn of(datagram: &Datagram<'_>, port: u16) -> Self {
        let header = &datagram.header;
        Self {
            to: datagram.to,
            from: datagram.source,
            port,
            target: header.target,
            session: header.session,
            sequence: header.sequence,
            length: header.length,
            attempt: header.flags.attempt(),
        }
    }

    /// Whether both are attempts of one request.
    pub(super) fn is_same_request(&self, other: &Self) -> bool {
        (self.from, self.session, self.sequence, self.to)
            == (other.from, other.session, other.sequence, other.to)
    }
}

/// A request that waits for a lease to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiter {
    pub(super) reply_to: ReplyTo,
    pub(super) page: Page,
    pub(super) epoch: u64,
    pub(super) until: Timestamp,
}

/// Contents of a page that are looked up when the reply is sent.
#[derive(Clone, Debug)]
pub(super) struct Excerpt {
    pub(super) page: Page,
    pub(super) epoch: u64,
    pub(super) range: Range<usize>,
}

/// A reply that waits to be sent.
#[derive(Debug)]
pub(super) struct Reply {
    reply_to: ReplyTo,
    status: Status,
    /// The header fields that are not copied from the request.
    fields: Header,
    excerpt: Option<Excerpt>,
}

impl Owner {
    /// The next datagram to be sent from the well-known port; `None` when there is none for now.
    pub fn poll_transmit(&mut self) -> Option<SealedReply<'_>> {
        let Reply { reply_to, mut status, mut fields, excerpt } = self.replies.pop_front()?;
        let mut data: &[u8] = &[];
        if let Some(Excerpt { page, epoch, range }) = excerpt {
            match self.table.contents(page, epoch, range) {
                Some(contents) => data = contents,
                None => {
                    self.counters.count(Event::ServeLate);
                    (status, fields) = (Status::NotOwner, Header::default());
                }
            }
        }
        let source = ReplySource {
            space: self.config.space,
            node: self.config.node,
            command: WireCommand::from_bits(reply_to.to.command).command()?,
            contended: false,
            status,
            location_bits: reply_to.to.location,
        };
        let source = source.to_ipv6();
        let header = Header {
            flags: fields.flags.with_attempt(reply_to.attempt),
            target: reply_to.target,
            session: reply_to.session,
            sequence: reply_to.sequence,
            length: reply_to.length,
            incarnation: self.config.incarnation,
            ..fields
        };
        self.head = [0; HEADER_BYTES];
        header.emit(&mut self.head, 0);
        seal(source, reply_to.from, &mut self.head, data);
        Some(SealedReply {
            source,
            destination: reply_to.from,
            destination_port: reply_to.port,
            head: &self.head,
            data,
        })
    }

    /// Whether there is room for `count` replies to a request, besides one reply for each waiting
    /// request.
    pub(super) fn has_room(&self, count: usize) -> bool {
        let taken = self.replies.len() + self.waiters.len();
        taken + count <= usize::from(self.config.reply_count) + usize::from(self.config.wait_count)
    }

    pub(super) fn reply(&mut self, reply_to: ReplyTo, status: Status, fields: Header) {
        self.replies.push_back(Reply { reply_to, status, fields, excerpt: None });
    }

    pub(super) fn reply_with(&mut self, reply_to: ReplyTo, fields: Header, excerpt: Excerpt) {
        let (status, excerpt) = (Status::Ok, Some(excerpt));
        self.replies.push_back(Reply { reply_to, status, fields, excerpt });
    }

    /// The lease's fields in BUSY and in served contents.
    pub(super) fn terms(&self, now: Timestamp, epoch: u64, expires_at: Timestamp) -> Header {
        let remaining = (expires_at - now).as_millis();
        Header {
            flags: Flags::default(),
            node: self.node().0,
            lease_epoch: epoch,
            lease_remaining_ms: u16::try_from(remaining).unwrap_or(u16::MAX),
            ..Header::default()
        }
    }

    const fn node(&self) -> NodeId {
        self.config.node
    }
}
