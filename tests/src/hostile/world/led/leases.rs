//! Causes each event of leases, waiting requests and notices once.

use core::time::Duration;

use bluebridge_wire::{
    Command, Flags, LeaseEnd, Status,
    address::{Fields, LINE_BYTES, PAGE_BYTES},
};

use super::{Attacker, LEASE_WAIT, NONCE, Seen, World, limits, number, shot};
use crate::hostile::{attack::Class, draw::location};

/// A session of the directed attacks, and its next number; all lower ones have a reply.
struct Led {
    attacker: Attacker,
    session: u64,
    low: u64,
}

/// The lease fields of a request, and how far above low water its number is.
#[derive(Clone, Copy, Default)]
struct LeaseFields {
    epoch: u64,
    millis: u16,
    flags: Flags,
    ahead: u16,
}

const MALFORMED: Status = Status::Malformed;
const QUEUED: LeaseFields = LeaseFields { flags: Flags::QUEUED, ..PLAIN };
const PLAIN: LeaseFields =
    LeaseFields { epoch: 0, millis: 60, flags: Flags::from_bits(0), ahead: 0 };

fn under(epoch: u64) -> LeaseFields {
    LeaseFields { epoch, ..PLAIN }
}

fn page(first: Fields, number: u64) -> Fields {
    Fields { location: first.location + number * PAGE_BYTES as u64, ..first }
}

fn only(replies: &[Seen], status: Status) -> &Seen {
    let [reply] = replies else { panic!("one reply with {status:?}, not {replies:?}") };
    assert_eq!(reply.status, status, "{reply:?}");
    reply
}

impl World {
    /// Causes all events, at the first server.
    pub(super) fn contend_for_leases(&mut self, first: &Attacker, second: &Attacker) {
        let mut a = self.led(first, NONCE + 10);
        let mut b = self.led(second, NONCE + 10);
        let pages = self.whole_lines(&mut a);
        self.lease_and_contend(&mut a, &mut b, pages);
        self.wait_in_every_way(&mut a, &mut b, pages);
        self.lose_in_every_way(&mut a, &mut b, pages);
        self.lease_too_much(&mut a, pages);
        self.free_under_a_lease(&mut a);
        self.supersede(a, pages);
    }

    fn led(&mut self, attacker: &Attacker, nonce: u64) -> Led {
        let session = self.open_led(attacker, nonce).expect("there is room").header.session;
        Led { attacker: attacker.clone(), session, low: 1 }
    }

    fn wait_for(&mut self, time: Duration) {
        self.now = self.now + time;
    }

    /// One request for a page, or for `length`.
    fn ask_led(
        &mut self,
        who: &mut Led,
        command: Command,
        (target, length): (Fields, u64),
        fields: LeaseFields,
    ) -> Vec<Seen> {
        let (session, low) = (who.session, who.low);
        let attacker = who.attacker.clone();
        let datagram = self.draw_led(&attacker, session, |draw| {
            let mut datagram = draw.bare(command, target, length);
            number(&mut datagram, low, fields.ahead);
            datagram.header.lease_epoch = fields.epoch;
            datagram.header.lease_remaining_ms = fields.millis;
            datagram.header.flags = fields.flags;
            datagram.data = match command {
                Command::Commit | Command::Write => {
                    vec![0x77; usize::try_from(length).unwrap_or(8)]
                }
                Command::CompareSwap => vec![0; 16],
                Command::FetchAdd => vec![1; 8],
                _ => Vec::new(),
            };
            datagram
        });
        if fields.ahead == 0 {
            who.low += 1;
        }
        self.shoot(&shot(Some(Class::Sealed), &datagram))
    }

    /// Leases a page and returns the epoch.
    fn update_led(&mut self, who: &mut Led, target: Fields, fields: LeaseFields) -> u64 {
        let replies = self.ask_led(who, Command::Update, (target, 8), fields);
        only(&replies, Status::Ok).header.lease_epoch
    }

    fn lost(
        &mut self,
        who: &mut Led,
        command: Command,
        (target, epoch): (Fields, u64),
        how: LeaseEnd,
    ) {
        let replies = self.ask_led(who, command, (target, 8), under(epoch));
        assert_eq!(only(&replies, Status::LeaseLost).header.detail, how.code(), "{command}");
    }

    /// Pages from the beginning of a line, enough for the attacks below.
    fn whole_lines(&mut self, who: &mut Led) -> Fields {
        let attacker = who.attacker.clone();
        let endpoint = self.draw_led(&attacker, 0, |draw| {
            let endpoint = draw.endpoint();
            draw.bare(Command::Stat, endpoint, 0)
        });
        let endpoint = Fields::unpack(endpoint.header.target).expect("an endpoint");
        let count = 8 * 12;
        let replies = self.ask_led(who, Command::Create, (endpoint, count), PLAIN);
        let first = Fields::unpack(only(&replies, Status::Ok).header.target).expect("a pointer");
        let location = first.location.next_multiple_of(LINE_BYTES as u64);
        Fields { location, ..first }
    }

    /// Granted, repeated, renewed, in conflict with all other requests, committed.
    fn lease_and_contend(&mut self, a: &mut Led, b: &mut Led, pages: Fields) {
        let low = a.low;
        let epoch = self.update_led(a, pages, PLAIN);
        a.low = low;
        assert_eq!(self.update_led(a, pages, PLAIN), epoch, "the same grant");
        only(&self.ask_led(a, Command::Renew, (pages, 8), under(epoch)), Status::Ok);
        // A young lease does not cause a redirect.
        self.wait_for(Duration::from_millis(3));
        for (command, flags, length) in [
            (Command::Update, Flags::default(), 8),
            (Command::Read, Flags::default(), 8),
            (Command::Write, Flags::default(), 8),
            (Command::FetchAdd, Flags::default(), 8),
            (Command::CompareSwap, Flags::default(), 8),
            (Command::Delete, Flags::ZERO, 8),
        ] {
            let fields = LeaseFields { flags, ..PLAIN };
            let reply =
                only(&self.ask_led(b, command, (pages, length), fields), Status::Busy).clone();
            let holder = (reply.header.node, reply.header.lease_epoch);
            assert_eq!(holder, (a.attacker.node.0, epoch), "{command}");
        }
        let stale = LeaseFields { flags: Flags::MAY_BE_STALE, ..PLAIN };
        let replies = self.ask_led(b, Command::Read, (pages, 8), stale);
        let flags = only(&replies, Status::Ok).header.flags;
        assert!(flags.contains(Flags::LAST_COMMITTED));
        for command in [Command::Commit, Command::Abort, Command::Renew] {
            self.lost(b, command, (pages, epoch), LeaseEnd::Unknown);
        }
        only(&self.ask_led(a, Command::Commit, (pages, 8), under(epoch)), Status::Ok);
    }

    fn wait_in_every_way(&mut self, a: &mut Led, b: &mut Led, pages: Fields) {
        // Waits, repeats, stops waiting.
        let epoch = self.update_led(a, pages, PLAIN);
        for fields in [QUEUED, QUEUED, PLAIN] {
            let low = b.low;
            let replies = self.ask_led(b, Command::Update, (pages, 8), fields);
            let flags = only(&replies, Status::Busy).header.flags;
            assert_eq!(flags.contains(Flags::QUEUED), fields.flags.contains(Flags::QUEUED));
            b.low = low;
        }
        b.low += 1;
        // Waits, and gets the contents after the COMMIT.
        only(&self.ask_led(b, Command::Update, (pages, 8), QUEUED), Status::Busy);
        b.low -= 1;
        only(&self.ask_led(a, Command::Commit, (pages, 8), under(epoch)), Status::Ok);
        let granted = self.update_led(b, pages, QUEUED);
        assert!(granted > epoch);
        self.lost(a, Command::Commit, (pages, epoch), LeaseEnd::LeasedAgain);
        only(&self.ask_led(b, Command::Abort, (pages, 8), under(granted)), Status::Ok);
        // Waits, and is then below low water.
        let epoch = self.update_led(a, pages, PLAIN);
        only(&self.ask_led(b, Command::Update, (pages, 8), QUEUED), Status::Busy);
        only(&self.ask_led(b, Command::Ping, (self.endpoint_of(b), 0), PLAIN), Status::Ok);
        // Waits, and is not repeated.
        only(
            &self.ask_led(b, Command::Read, (pages, 8), LeaseFields { ahead: 1, ..QUEUED }),
            Status::Busy,
        );
        self.wait_for(2 * LEASE_WAIT);
        only(&self.ask_led(a, Command::Abort, (pages, 8), under(epoch)), Status::Ok);
        // More than may wait; then one number names other pages, and is removed with its session.
        let epoch = self.update_led(a, pages, PLAIN);
        let share = limits(1).node_wait_count;
        b.low += 2;
        for ahead in 1..=share + 1 {
            let replies =
                self.ask_led(b, Command::Read, (pages, 8), LeaseFields { ahead, ..QUEUED });
            let waits = only(&replies, Status::Busy).header.flags.contains(Flags::QUEUED);
            assert_eq!(waits, ahead <= share, "the share of one node");
        }
        b.low += u64::from(share) + 2;
        only(&self.ask_led(b, Command::Ping, (self.endpoint_of(b), 0), PLAIN), Status::Ok);
        assert_eq!(self.servers[0].responder.waiting_count(), 0, "all are below low water");
        let other = self.update_led(a, page(pages, 8), PLAIN);
        let places = [pages, page(pages, 8), page(pages, 1)];
        for (target, status) in places.into_iter().zip([Status::Busy, MALFORMED, MALFORMED]) {
            let fields = LeaseFields { ahead: 1, ..QUEUED };
            only(&self.ask_led(b, Command::Update, (target, 8), fields), status);
        }
        assert_eq!(self.servers[0].responder.waiting_count(), 1, "one number waits once");
        b.low += 2;
        only(&self.ask_led(b, Command::Ping, (self.endpoint_of(b), 0), PLAIN), Status::Ok);
        assert_eq!(self.servers[0].responder.waiting_count(), 0, "its session continued");
        for (target, epoch) in [(pages, epoch), (page(pages, 8), other)] {
            only(&self.ask_led(a, Command::Abort, (target, 8), under(epoch)), Status::Ok);
        }
    }

    fn endpoint_of(&self, who: &Led) -> Fields {
        let server = self.servers[0].node;
        let address = bluebridge_wire::EndpointAddress::of_shard(who.attacker.space, server, 0, 0);
        Fields::unpack(address.to_ipv6()).expect("an endpoint")
    }

    /// Every end of a lease, as reported to its owner.
    fn lose_in_every_way(&mut self, a: &mut Led, b: &mut Led, pages: Fields) {
        for command in [Command::Commit, Command::Abort, Command::Renew] {
            let epoch = self.update_led(a, pages, LeaseFields { millis: 1, ..PLAIN });
            self.wait_for(Duration::from_millis(2));
            self.lost(a, command, (pages, epoch), LeaseEnd::Expired);
            for (ends, how) in
                [(Command::Commit, LeaseEnd::Committed), (Command::Abort, LeaseEnd::Aborted)]
            {
                let epoch = self.update_led(a, pages, PLAIN);
                only(&self.ask_led(a, ends, (pages, 8), under(epoch)), Status::Ok);
                self.lost(a, command, (pages, epoch), how);
            }
            let mine = self.update_led(a, pages, LeaseFields { millis: 1, ..PLAIN });
            self.wait_for(Duration::from_millis(2));
            let theirs = self.update_led(b, pages, PLAIN);
            self.lost(a, command, (pages, mine), LeaseEnd::LeasedAgain);
            self.lost(a, command, (pages, theirs), LeaseEnd::Unknown);
            self.lost(a, command, (pages, theirs + 1), LeaseEnd::Unknown);
            self.lost(a, command, (page(pages, 40), theirs), LeaseEnd::Unknown);
            only(&self.ask_led(b, Command::Abort, (pages, 8), under(theirs)), Status::Ok);
        }
        // A part of the range of a COMMIT is not leased: nothing is written.
        let epoch = self.update_led(a, pages, PLAIN);
        let both = (page(pages, 0), PAGE_BYTES as u64 + 8);
        let low = a.low;
        let piece = self.draw_led(&a.attacker.clone(), a.session, |draw| {
            let mut piece = draw.bare(Command::Commit, both.0, both.1);
            number(&mut piece, low, 0);
            piece.header.lease_epoch = epoch;
            piece.data = vec![0x55; 1024];
            piece
        });
        a.low += 1;
        only(&self.shoot(&shot(Some(Class::Sealed), &piece)), Status::LeaseLost);
        only(&self.ask_led(a, Command::Abort, (pages, 8), under(epoch)), Status::Ok);
    }

    /// More leases than one node may have, and more than the server has room for.
    fn lease_too_much(&mut self, a: &mut Led, pages: Fields) {
        let line = LINE_BYTES as u64;
        assert_eq!((limits(1).node_lease_count, limits(1).lease_count), (8, 16), "two lines");
        let owners = [self.attackers[2].clone(), self.victim.clone()];
        let [mut c, mut victim] = owners.map(|owner| self.led(&owner, NONCE + 10));
        let endpoint = self.endpoint_of(&c);
        let replies = self.ask_led(&mut c, Command::Create, (endpoint, 15), PLAIN);
        let own = Fields::unpack(only(&replies, Status::Ok).header.target).expect("a pointer");
        let theirs = Fields { location: own.location.next_multiple_of(line), ..own };
        let endpoint = self.endpoint_of(&victim);
        let replies = self.ask_led(&mut victim, Command::Create, (endpoint, 1), PLAIN);
        let single = Fields::unpack(only(&replies, Status::Ok).header.target).expect("a pointer");

        let mut epochs = Vec::new();
        for (who, target) in [(&mut *a, pages), (&mut c, theirs)] {
            let replies = self.ask_led(who, Command::Update, (target, line), PLAIN);
            assert!(replies.iter().all(|reply| reply.status.is_ok()), "{replies:?}");
            epochs.push(replies[0].header.lease_epoch);
            let beyond = self.ask_led(who, Command::Update, (page(target, 8), 8), PLAIN);
            assert!(!beyond[0].status.is_ok(), "the share of one node");
        }
        let full = self.ask_led(&mut victim, Command::Update, (single, 8), PLAIN);
        only(&full, Status::Overloaded);
        for (who, target, epoch) in [(&mut *a, pages, epochs[0]), (&mut c, theirs, epochs[1])] {
            only(&self.ask_led(who, Command::Abort, (target, line), under(epoch)), Status::Ok);
        }
        only(&self.ask_led(&mut victim, Command::Delete, (single, 1), PLAIN), Status::Ok);
        only(&self.ask_led(&mut c, Command::Delete, (own, 15), PLAIN), Status::Ok);
    }

    /// Pages of an unfinished ALLOC_WRITE that were guessed and leased are freed anyway, and an
    /// expired lease does not block a DELETE.
    fn free_under_a_lease(&mut self, a: &mut Led) {
        let endpoint = self.endpoint_of(a);
        let replies = self.ask_led(a, Command::Create, (endpoint, 1), PLAIN);
        let own = Fields::unpack(only(&replies, Status::Ok).header.target).expect("a pointer");
        self.update_led(a, own, LeaseFields { millis: 1, ..PLAIN });
        only(&self.ask_led(a, Command::Delete, (own, 1), PLAIN), Status::Busy);
        self.wait_for(Duration::from_millis(2));
        only(&self.ask_led(a, Command::Delete, (own, 1), PLAIN), Status::Ok);

        let low = a.low;
        let piece = self.draw_led(&a.attacker.clone(), a.session, |draw| {
            let mut piece = draw.bare(Command::AllocWrite, endpoint, 2 * PAGE_BYTES as u64);
            number(&mut piece, low, 0);
            piece.data = vec![0x66; 1024];
            piece
        });
        assert!(self.shoot(&shot(None, &piece)).is_empty(), "it is not whole");
        let shadow = &self.servers[0].shadow;
        let is_its = |hold| hold == crate::hostile::shadow::Hold::Session(a.session, low);
        let guessed = shadow.allocations.iter().find(|(_, held)| is_its(held.hold));
        let (&first, held) = guessed.expect("it has its pages");
        let location = location(held.generation, first);
        let guess = Fields { node: self.servers[0].node, tag: held.tag, location, ..own };
        let fields = LeaseFields { ahead: 1, ..PLAIN };
        only(&self.ask_led(a, Command::Update, (guess, 8), fields), Status::Ok);
        a.low += 2;
        only(&self.ask_led(a, Command::Ping, (endpoint, 0), PLAIN), Status::Ok);
        let replies = self.ask_led(a, Command::Read, (guess, 8), PLAIN);
        only(&replies, Status::NotAllocated);
    }

    /// A new incarnation ends the leases and requests of the old one.
    fn supersede(&mut self, mut old: Led, pages: Fields) {
        let epoch = self.update_led(&mut old, pages, PLAIN);
        let renewed = self.update_led(&mut old, page(pages, 8), PLAIN);
        let name = (old.attacker.space, old.attacker.node);
        for attacker in &mut self.attackers {
            attacker.incarnation += u32::from((attacker.space, attacker.node) == name);
        }
        let newer = Attacker { incarnation: old.attacker.incarnation + 1, ..old.attacker.clone() };
        let mut new = self.led(&newer, NONCE + 11);
        for command in [Command::Commit, Command::Abort, Command::Renew] {
            self.lost(&mut new, command, (pages, epoch), LeaseEnd::Superseded);
            self.lost(&mut new, command, (page(pages, 8), renewed), LeaseEnd::Superseded);
        }
        only(
            &self.ask_led(&mut old, Command::Commit, (pages, 8), under(epoch)),
            Status::StaleIncarnation,
        );
    }
}
