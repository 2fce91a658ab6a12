//! Replies that wait to be sent, and requests that wait for a lease to end.

use core::{net::Ipv6Addr, ops::Range};

use bluebridge_wire::{
    Datagram, Flags, Header, NodeId, ReplySource, Status, WireCommand, address::Fields,
    header::HEADER_BYTES, seal,
};

use super::{Event, Owner, SealedReply, table::Page};
use crate::Timestamp;

/// What an answer repeats of its request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    to: Fields,
    from: Ipv6Addr,
    port: u16,
    target: Ipv6Addr,
    session: u64,
    sequence: u64,
    length: u32,
    attempt: u8,
}

impl Asked {
    pub(super) fn by(datagram: &Datagram<'_>, port: u16) -> Self {
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

    /// Whether both are tries of one request.
    pub(super) fn is_same_request(&self, other: &Self) -> bool {
        (self.from, self.session, self.sequence, self.to)
            == (other.from, other.session, other.sequence, other.to)
    }
}

/// A request that waits for a lease to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiter {
    pub(super) asked: Asked,
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
    asked: Asked,
    status: Status,
    /// What the reply says beside what it repeats of the request.
    told: Header,
    excerpt: Option<Excerpt>,
}

impl Owner {
    /// The next datagram to be sent from the well-known port; `None` when there is none for now.
    pub fn poll_transmit(&mut self) -> Option<SealedReply<'_>> {
        let Reply { asked, mut status, mut told, excerpt } = self.replies.pop_front()?;
        let mut data: &[u8] = &[];
        if let Some(Excerpt { page, epoch, range }) = excerpt {
            match self.table.contents(page, epoch, range) {
                Some(contents) => data = contents,
                None => {
                    self.counters.count(Event::ServeLate);
                    (status, told) = (Status::NotOwner, Header::default());
                }
            }
        }
        let source = ReplySource {
            space: self.config.space,
            node: self.config.node,
            command: WireCommand::from_bits(asked.to.command).command()?,
            contended: false,
            status,
            location_bits: asked.to.location,
        };
        let source = source.to_ipv6();
        let header = Header {
            flags: told.flags.with_attempt(asked.attempt),
            target: asked.target,
            session: asked.session,
            sequence: asked.sequence,
            length: asked.length,
            incarnation: self.config.incarnation,
            ..told
        };
        self.head = [0; HEADER_BYTES];
        header.emit(&mut self.head, 0);
        seal(source, asked.from, &mut self.head, data);
        Some(SealedReply {
            source,
            destination: asked.from,
            destination_port: asked.port,
            head: &self.head,
            data,
        })
    }

    /// Whether a request may be answered, by `count` replies, and once more if it waits. Who waits
    /// has room for the end of its waiting.
    pub(super) fn has_room(&self, count: usize) -> bool {
        let taken = self.replies.len() + self.waiters.len();
        taken + count <= usize::from(self.config.reply_count) + usize::from(self.config.wait_count)
    }

    pub(super) fn reply(&mut self, asked: Asked, status: Status, told: Header) {
        self.replies.push_back(Reply { asked, status, told, excerpt: None });
    }

    pub(super) fn reply_with(&mut self, asked: Asked, told: Header, excerpt: Excerpt) {
        let (status, excerpt) = (Status::Ok, Some(excerpt));
        self.replies.push_back(Reply { asked, status, told, excerpt });
    }

    /// What BUSY and served contents tell of the lease.
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
