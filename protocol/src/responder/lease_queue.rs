//! Requests that wait for leased pages, in order of arrival.

use core::time::Duration;
use std::net::Ipv6Addr;

use bluebridge_wire::{Command, Datagram, Header, NodeId, Space, address::Fields};

use super::{
    admit::{Execution, Request},
    config::Limits,
    record::Record,
};
use crate::Timestamp;

const NONE: u16 = u16::MAX;

/// A READ, UPDATE or TAKE that waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiter {
    /// Its session's slot.
    pub(super) session: u16,
    pub(super) command: Command,
    pub(super) port: u16,
    /// Pages of reply data that the requester can receive at once.
    pub(super) takes_pages: u16,
    /// The line of its pages in the store.
    pub(super) line: u64,
    /// The pages of the line that it waits for, bit 0 the first.
    pub(super) pages: u8,
    /// It is removed if it is not repeated by then.
    pub(super) repeat_by: Timestamp,
    /// When it began to wait.
    pub(super) since: Timestamp,
    pub(super) source: Ipv6Addr,
    pub(super) from: Fields,
    pub(super) to: Fields,
    pub(super) target: Fields,
    pub(super) header: Header,
}

impl Waiter {
    /// A request of a session that waits for something else than leases.
    pub(super) const fn of(request: &Request<'_>, session: u16, command: Command) -> Self {
        let Datagram { source, from, to, target, header, .. } = *request.datagram;
        Self {
            session,
            command,
            port: request.port,
            takes_pages: request.takes_pages,
            line: 0,
            pages: 0,
            repeat_by: Timestamp::MAX,
            since: request.now,
            source,
            from,
            to,
            target,
            header,
        }
    }

    /// Whether it waits for leases on all its pages at once.
    pub(super) const fn is_for_lease(&self) -> bool {
        matches!(self.command, Command::Update | Command::Take)
    }

    /// The last copy of the request.
    pub(super) const fn datagram(&self) -> Datagram<'static> {
        Datagram::bare(self.source, self.from, self.to, self.target, self.header)
    }

    /// The same with the results of the checks on arrival.
    pub(super) const fn request<'a>(
        &self,
        now: Timestamp,
        datagram: &'a Datagram<'a>,
    ) -> Request<'a> {
        Request { now, port: self.port, datagram, takes_pages: self.takes_pages }
    }

    /// The same in its session; `before` is the record of its number.
    pub(super) const fn execution<'a>(
        &self,
        request: &'a Request<'a>,
        before: &'a Record,
    ) -> Execution<'a> {
        Execution { request, command: self.command, slot: self.session, before }
    }

    /// Whether it was not repeated in time.
    pub(super) fn is_overdue(&self, now: Timestamp) -> bool {
        now >= self.repeat_by
    }

    /// Whether a request with its number is a repetition of it.
    pub(super) fn is_repeated_by(&self, request: &Request<'_>) -> bool {
        let header = request.header();
        (header.session, header.sequence) == (self.header.session, self.header.sequence)
            && (header.target, header.length) == (self.header.target, self.header.length)
    }
}

#[derive(Clone, Copy)]
struct Place {
    /// `None` while the place is vacant.
    waiter: Option<Waiter>,
    before: u16,
    behind: u16,
}

#[derive(Clone, Copy)]
struct Bucket {
    first: u16,
    last: u16,
}

/// A bounded pool of waiters, in lists by the hash of their lines.
pub(super) struct WaitQueue {
    places: Vec<Place>,
    /// The waiters' nodes, in a separate array because each join counts its node's waiters; node 0
    /// is vacant.
    nodes: Vec<(Space, NodeId)>,
    vacant: Vec<u16>,
    buckets: Vec<Bucket>,
    node_limit: usize,
    space_limit: usize,
    /// Lines whose waiters may get a reply.
    ready: Vec<u64>,
}

const VACANT: (Space, NodeId) = (Space(0), NodeId::ANY);

impl WaitQueue {
    pub(super) fn new(limits: &Limits, space_count: usize) -> Self {
        let count = usize::from(limits.wait_count);
        let (space_limit, node_limit) = limits.wait_shares(space_count);
        let bucket = Bucket { first: NONE, last: NONE };
        Self {
            places: vec![Place { waiter: None, before: NONE, behind: NONE }; count],
            nodes: vec![VACANT; count],
            vacant: (0..limits.wait_count).rev().collect(),
            buckets: vec![bucket; count.next_power_of_two()],
            node_limit,
            space_limit,
            ready: Vec::with_capacity(count),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.places.len() - self.vacant.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// Whether a request of this node may still join.
    pub(super) fn has_room(&self, of: (Space, NodeId)) -> bool {
        // A vacant place must not count for space 0.
        let of_space = self.nodes.iter().filter(|node| node.0 == of.0 && node.1 != VACANT.1);
        let (in_space, held) = of_space
            .fold((0, 0), |(in_space, held), &node| (in_space + 1, held + usize::from(node == of)));
        !self.vacant.is_empty() && in_space < self.space_limit && held < self.node_limit
    }

    /// Appends a waiter; room was checked.
    pub(super) fn join(&mut self, waiter: Waiter) -> Option<u16> {
        let number = self.vacant.pop()?;
        let bucket = self.bucket(waiter.line);
        let before = core::mem::replace(&mut self.buckets[bucket].last, number);
        match self.places.get_mut(usize::from(before)) {
            Some(place) => place.behind = number,
            None => self.buckets[bucket].first = number,
        }
        self.nodes[usize::from(number)] = (waiter.from.space, waiter.from.node);
        self.places[usize::from(number)] = Place { waiter: Some(waiter), before, behind: NONE };
        Some(number)
    }

    pub(super) fn at(&mut self, number: u16) -> Option<&mut Waiter> {
        self.places.get_mut(usize::from(number))?.waiter.as_mut()
    }

    /// Removes a waiter; the next one may then be ready.
    pub(super) fn remove(&mut self, number: u16) -> Option<Waiter> {
        let Place { waiter, before, behind } = *self.places.get(usize::from(number))?;
        let waiter = waiter?;
        let bucket = self.bucket(waiter.line);
        match self.places.get_mut(usize::from(before)) {
            Some(place) => place.behind = behind,
            None => self.buckets[bucket].first = behind,
        }
        match self.places.get_mut(usize::from(behind)) {
            Some(place) => place.before = before,
            None => self.buckets[bucket].last = before,
        }
        self.places[usize::from(number)].waiter = None;
        self.nodes[usize::from(number)] = VACANT;
        self.vacant.push(number);
        if self.first(waiter.line).is_some() {
            self.make_ready(waiter.line);
        } else {
            // A line without waiters would stay ready forever.
            self.clear_ready(waiter.line);
        }
        Some(waiter)
    }

    /// The first waiter of a line, with its number.
    pub(super) fn first(&self, line: u64) -> Option<(u16, &Waiter)> {
        self.from(self.buckets[self.bucket(line)].first, line)
    }

    /// The next waiter of a line.
    pub(super) fn behind(&self, number: u16, line: u64) -> Option<(u16, &Waiter)> {
        self.from(self.places[usize::from(number)].behind, line)
    }

    fn from(&self, mut number: u16, line: u64) -> Option<(u16, &Waiter)> {
        while let Some(place) = self.places.get(usize::from(number)) {
            if let Some(waiter) = place.waiter.as_ref().filter(|waiter| waiter.line == line) {
                return Some((number, waiter));
            }
            number = place.behind;
        }
        None
    }

    /// The pages of a line that UPDATEs and TAKEs in front of a waiter, or all of them, wait for;
    /// waiters that were not repeated in time do not count.
    pub(super) fn wanted(&self, now: Timestamp, line: u64, until: Option<u16>) -> u8 {
        let mut wanted = 0;
        let mut next = if self.is_empty() { None } else { self.first(line) };
        while let Some((number, waiter)) = next {
            if Some(number) == until {
                break;
            }
            let is_in_front = waiter.is_for_lease() && !waiter.is_overdue(now);
            wanted |= if is_in_front { waiter.pages } else { 0 };
            next = self.behind(number, line);
        }
        wanted
    }

    /// Whether a TAKE of a line has waited for `time` or longer.
    pub(super) fn has_take_waiting_for(&self, now: Timestamp, line: u64, time: Duration) -> bool {
        let mut next = if self.is_empty() { None } else { self.first(line) };
        while let Some((number, waiter)) = next {
            let is_take = waiter.command == Command::Take && !waiter.is_overdue(now);
            if is_take && now - waiter.since >= time {
                return true;
            }
            next = self.behind(number, line);
        }
        false
    }

    /// Every waiter, in no order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Waiter> {
        self.places.iter().filter_map(|place| place.waiter.as_ref())
    }

    /// A waiter that was not repeated in time.
    pub(super) fn overdue(&self, now: Timestamp) -> Option<u16> {
        let is_overdue = |place: &Place| place.waiter.is_some_and(|waiter| waiter.is_overdue(now));
        let number = self.places.iter().position(is_overdue)?;
        u16::try_from(number).ok()
    }

    /// Records that waiters of a line may get a reply.
    pub(super) fn make_ready(&mut self, line: u64) {
        if !self.is_empty() && self.first(line).is_some() && !self.ready.contains(&line) {
            self.ready.push(line);
        }
    }

    /// A line whose waiters may get a reply.
    pub(super) fn ready(&self) -> Option<u64> {
        self.ready.last().copied()
    }

    /// Records that the waiters of a line were served.
    pub(super) fn clear_ready(&mut self, line: u64) {
        self.ready.retain(|&other| other != line);
    }

    #[allow(clippy::cast_possible_truncation, reason = "the mask is below 65,536")]
    fn bucket(&self, line: u64) -> usize {
        // The hash function of the lease table.
        let mixed = line.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        mixed as usize & (self.buckets.len() - 1)
    }
}
