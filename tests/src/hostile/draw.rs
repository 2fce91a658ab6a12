//! Valid requests to begin with: from a real session, on existing pages.

use core::ops::Range;
use std::net::Ipv6Addr;

use bluebridge_wire::{
    Command, EndpointAddress, Flags, Header, NodeId, Pointer, WireCommand,
    address::{Fields, LINE_BYTES, LINE_PAGES, PAGE_BYTES},
};
use rand::{Rng, rngs::SmallRng};

use super::{
    forge::Forged,
    shadow::Hold,
    world::{ADOPTED, Attacker, GIVEN, MIGRATION, MIGRATION_EPOCH, Server},
};

/// How far above low water numbers are used; the window has 512.
const AHEAD: u64 = 96;

/// Draws valid requests of one attacker to one server.
pub(super) struct Draw<'a> {
    pub(super) rng: &'a mut SmallRng,
    pub(super) attacker: &'a Attacker,
    pub(super) server: &'a Server,
    pub(super) session: u64,
}

mod leases;

impl Draw<'_> {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.rng.random_range(0..end.max(1))
    }

    /// The datagrams of a valid request, or of one that is refused because of its target.
    pub(super) fn request(&mut self) -> Vec<Forged> {
        match self.below(119) {
            0..18 => self.bytes(Command::Read),
            18..46 => self.bytes(Command::Write),
            46..52 => {
                let pages = self.below(12) + 1;
                vec![self.bare(Command::Create, self.endpoint(), pages)]
            }
            52..62 => self.alloc_write(false),
            62..67 => {
                let mut train = self.bytes(Command::Delete);
                train.iter_mut().for_each(|datagram| datagram.header.flags = Flags::ZERO);
                train
            }
            67..73 => self.delete(),
            73..81 => self.atomic(),
            81..83 => vec![self.bare(Command::Stat, self.endpoint(), 0)],
            83..86 => {
                let mut ping = self.bare(Command::Ping, self.endpoint(), 0);
                ping.data = vec![7; self.rng.random_range(0..=64)];
                vec![ping]
            }
            86..90 => self.confirm(),
            90..93 => vec![self.anywhere(Command::Create)],
            93..96 => self.alloc_write(true),
            96..99 => vec![self.open()],
            99 => vec![self.bare(Command::Close, self.endpoint(), 0)],
            118 => vec![self.of_migration()],
            _ => self.leased(),
        }
    }

    pub(super) fn endpoint(&self) -> Fields {
        let address = EndpointAddress::of_shard(self.attacker.space, self.server.node, 0, 0);
        Fields {
            space: address.space,
            node: address.node,
            command: 0,
            tag: 0,
            location: address.location_bits(),
        }
    }

    /// A datagram of the session without data.
    pub(super) fn bare(&mut self, command: Command, target: Fields, length: u64) -> Forged {
        let low = self.server.shadow.sessions.get(&self.session).map_or(1, |open| open.low);
        let ahead = self.below(AHEAD);
        let distance = if self.rng.random_bool(0.3) { self.below(ahead + 1) } else { ahead };
        let header = Header {
            target: target.to_ipv6(),
            session: self.session,
            incarnation: self.attacker.incarnation,
            sequence: low.saturating_add(ahead),
            answered_distance: u16::try_from(distance).unwrap_or(0),
            length: u32::try_from(length).unwrap_or(u32::MAX),
            ..Header::default()
        };
        let bits = WireCommand::request(command, self.rng.random_bool(0.3)).bits();
        // Requests for memory, as first tries and as retransmissions.
        let pointer = Pointer::from_ipv6(target.to_ipv6()).ok();
        let to = match pointer.filter(|_| self.rng.random_bool(0.2)) {
            Some(pointer) => {
                let address = EndpointAddress::for_memory(self.server.node, pointer);
                Fields { tag: 0, location: address.location_bits(), node: address.node, ..target }
            }
            None => target,
        };
        let destination = Fields { command: bits, ..to }.to_ipv6();
        Forged {
            source: self.source(),
            destination,
            source_port: 4000,
            header,
            options: Vec::new(),
            data: Vec::new(),
            trailer: Vec::new(),
            patches: Vec::new(),
        }
    }

    fn source(&mut self) -> Ipv6Addr {
        let selector = self.below(1 << 20);
        EndpointAddress::new(self.attacker.space, self.attacker.node, selector).to_ipv6()
    }

    /// An allocation, mostly in the attacker's space, and the number of bytes from `target` to its
    /// end.
    fn place(&mut self) -> (Fields, u64) {
        let pages = self.server.pages;
        let mut found = None;
        for _ in 0..6 {
            let from = self.below(pages);
            let mut ranges = self.server.shadow.allocations.range(from..);
            let near = ranges.next().or_else(|| self.server.shadow.allocations.first_key_value());
            if let Some((&first, held)) = near {
                found = Some((first, *held));
                if held.space == self.attacker.space {
                    break;
                }
            }
        }
        let (first, pages, (generation, tag)) = found
            .map_or((0, 1, (self.server.generation, 1)), |(at, held)| {
                (at, held.pages, held.colour())
            });
        let page = first + self.below(u64::from(pages));
        let left = (first + u64::from(pages) - page) * PAGE_BYTES as u64;
        let (node, location) = self.server.named((generation, page), self.rng.random_bool(0.5));
        let space = self.attacker.space;
        (Fields { space, node, command: 0, tag, location }, left)
    }

    /// A pointer into an allocation, sometimes into none.
    pub(super) fn pointer(&mut self) -> (Fields, u64) {
        let (mut target, left) = self.place();
        match self.below(40) {
            0..3 => target.tag = target.tag.wrapping_sub(1),
            3 => target.location ^= 1 << 48,
            4 => target.location += (self.server.pages + 8) * PAGE_BYTES as u64,
            _ => {}
        }
        (target, left)
    }

    /// A request on bytes inside of a line.
    fn bytes(&mut self, command: Command) -> Vec<Forged> {
        let (mut target, left) = self.pointer();
        let skip = match self.below(4) {
            0 => 0,
            1 => self.below(512) * 8,
            _ => self.below(4096),
        };
        target.location += skip;
        let in_line = target.location % LINE_BYTES as u64;
        let room = (LINE_BYTES as u64 - in_line).min(left - skip).max(1);
        let length = match self.below(4) {
            0 => room,
            1 => 8.min(room),
            2 => self.below(1000.min(room)) + 1,
            _ => self.below(room) + 1,
        };
        let datagram = self.bare(command, target, length);
        if command != Command::Write {
            return vec![datagram];
        }
        let piece_bytes = self.piece_bytes();
        self.train(&datagram, small(skip % 4096), small(length), piece_bytes)
    }

    pub(super) fn piece_bytes(&self) -> usize {
        self.server.shadow.sessions.get(&self.session).map_or(1400, |open| open.piece_bytes)
    }

    fn train(
        &mut self,
        datagram: &Forged,
        in_page: usize,
        length: usize,
        piece_bytes: usize,
    ) -> Vec<Forged> {
        let mut train = Vec::new();
        for range in pieces(in_page, length, piece_bytes) {
            let mut piece = datagram.clone();
            piece.header.offset = u16::try_from(range.start).unwrap_or(u16::MAX);
            let filler: u8 = self.rng.random();
            piece.data =
                (0..range.len()).map(|at| filler.wrapping_add(at.to_be_bytes()[7])).collect();
            train.push(piece);
        }
        let spread = train.len();
        for at in 1..spread {
            let other = self.rng.random_range(0..=at);
            train.swap(at, other);
        }
        train
    }

    fn alloc_write(&mut self, is_anywhere: bool) -> Vec<Forged> {
        let length = if self.rng.random_bool(0.7) { self.below(6000) } else { self.below(32768) };
        let length = length + 1;
        let (datagram, piece_bytes) = if is_anywhere {
            let piece_bytes = 1024 + self.below(3073);
            let mut datagram = self.anywhere(Command::AllocWrite);
            datagram.header.length = u32::try_from(length).unwrap_or(1);
            datagram.header.detail = u32::try_from(piece_bytes).unwrap_or(0);
            (datagram, small(piece_bytes))
        } else {
            (self.bare(Command::AllocWrite, self.endpoint(), length), self.piece_bytes())
        };
        let mut train = self.train(&datagram, 0, small(length), piece_bytes);
        // An unfinished one leaves pages that no requester knows.
        if self.rng.random_bool(0.25) {
            train.truncate(1);
        }
        train
    }

    pub(super) fn anywhere(&mut self, command: Command) -> Forged {
        let target = Fields { node: NodeId::ANY, ..self.endpoint() };
        let pages = self.below(3) + 1;
        let mut datagram = self.bare(command, target, pages);
        datagram.header.session = 0;
        datagram.header.answered_distance = 0;
        datagram.header.sequence = self.below(64);
        datagram
    }

    /// A TAKE or KEEP by the terms of a migration of which the attacker is not the taker.
    fn of_migration(&mut self) -> Forged {
        let line = GIVEN.start / LINE_PAGES as u64 + self.below(10);
        let location = location(self.server.generation, line * LINE_PAGES as u64);
        let target = Fields { location, ..self.endpoint() };
        let command = if self.rng.random_bool(0.5) { Command::Take } else { Command::Keep };
        let mut datagram = self.bare(command, target, LINE_BYTES as u64);
        let pointer = Pointer::from_ipv6(target.to_ipv6()).ok();
        if let Some(pointer) = pointer.filter(|_| self.rng.random_bool(0.8)) {
            let address = EndpointAddress::for_memory(self.server.node, pointer);
            datagram.destination = address.destination(command, true);
        }
        datagram.header.page_version = MIGRATION;
        datagram.header.range_epoch = MIGRATION_EPOCH;
        datagram.header.lease_epoch = self.below(1 << 44);
        datagram
    }

    pub(super) fn open(&mut self) -> Forged {
        let mut open = self.bare(Command::Open, self.endpoint(), 1024);
        open.header.length = u32::try_from(1024 + self.below(4000)).unwrap_or(1024);
        open.header.session = 0;
        open.header.answered_distance = 0;
        open.header.sequence = 1 + self.below(200);
        open.header.credit = 16;
        open
    }

    fn delete(&mut self) -> Vec<Forged> {
        let (target, _) = self.pointer();
        let page = target.location % (1 << 48) / PAGE_BYTES as u64;
        let held = (target.node == self.server.node).then(|| self.server.shadow.holding(page));
        let (first, pages) = held.flatten().map_or((page, 0), |(first, held)| (first, held.pages));
        let location = target.location - (page - first) * PAGE_BYTES as u64;
        let pages = if self.rng.random_bool(0.5) { 0 } else { pages };
        vec![self.bare(Command::Delete, Fields { location, ..target }, u64::from(pages))]
    }

    fn atomic(&mut self) -> Vec<Forged> {
        let (mut target, _) = self.pointer();
        target.location += self.below(512) * 8;
        let command =
            if self.rng.random_bool(0.5) { Command::CompareSwap } else { Command::FetchAdd };
        let mut datagram = self.bare(command, target, 8);
        let words = if command == Command::CompareSwap { 16 } else { 8 };
        datagram.data = vec![0; words];
        datagram.data[words - 1] = self.rng.random();
        vec![datagram]
    }

    /// CONFIRM of pages that wait for it, if there are any.
    fn confirm(&mut self) -> Vec<Forged> {
        let waiting =
            self.server.shadow.allocations.iter().find_map(|(&first, held)| match held.hold {
                Hold::Anywhere(requester, _) if requester.node == self.attacker.node => {
                    Some((first, held.pages, held.colour()))
                }
                _ => None,
            });
        let Some((first, pages, (generation, tag))) = waiting else { return self.delete() };
        let location = location(generation, first);
        let target = Fields { tag, location, ..self.endpoint() };
        vec![self.bare(Command::Confirm, target, u64::from(pages))]
    }
}

impl Server {
    /// The name of a page of this server, by its own node or by the one from which it was adopted:
    /// node and location.
    fn named(&self, (generation, page): (u16, u64), may_adopt: bool) -> (NodeId, u64) {
        let adopted = ADOPTED.local_page..ADOPTED.local_page + ADOPTED.page_count;
        let is_adopted = adopted.contains(&page) && generation >= ADOPTED.generation.number();
        if self.adopts && may_adopt && is_adopted {
            let page = ADOPTED.first_page + page - ADOPTED.local_page;
            return (ADOPTED.node, location(generation, page));
        }
        (self.node, location(generation, page))
    }
}

/// The location of a page's first byte.
pub(super) fn location(generation: u16, page: u64) -> u64 {
    (u64::from(generation) << 48) + page * PAGE_BYTES as u64
}

/// The pieces of an operation for this piece size.
pub(super) fn pieces(in_page: usize, length: usize, piece_bytes: usize) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut start = 0;
    while start < length {
        let page_end = ((in_page + start) / PAGE_BYTES + 1) * PAGE_BYTES - in_page;
        let end = (start + piece_bytes.max(1)).min(page_end).min(length);
        ranges.push(start..end);
        start = end;
    }
    ranges
}

/// A number inside of a line.
fn small(number: u64) -> usize {
    usize::try_from(number).unwrap_or(LINE_BYTES)
}
