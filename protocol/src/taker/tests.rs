//! A taker and a giver without a network in between, so that each answer can be held back.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of these tests are small")]

use bluebridge_wire::{Command, Datagram, address::Fields};

use super::*;
use crate::{
    requester::{self, Server},
    responder::{self, Allowance, Event, tests::store},
    store::Grant,
};

const SPACE: Space = Space(3);
const GIVER: NodeId = NodeId(9);
const TAKER: NodeId = NodeId(30);
const INCARNATION: u32 = 7;
const MIGRATION: Migration =
    Migration { id: 5, range_epoch: 12, giver: Server { node: GIVER, shard: 0 } };
const PAGES: u32 = 128;

fn order(pages: Range<u64>) -> Order {
    Order {
        migration: MIGRATION,
        space: SPACE,
        home: GIVER,
        generation: store::GENERATION,
        pages,
        incarnation: INCARNATION,
    }
}

/// The takers of one requester.
struct Takers<'a>(&'a mut [Taker], &'a mut store::PlainStore);

impl Takers<'_> {
    fn of(&self, token: u64) -> Option<usize> {
        let owners = (0..self.0.len()).filter(|taker| self.0[*taker].owns(token));
        assert!(owners.clone().count() <= 1, "a token has one owner");
        owners.min()
    }
}

impl Buffers for Takers<'_> {
    fn outgoing(&self, _token: u64) -> &[u8] {
        &[]
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        match self.of(token) {
            Some(taker) => self.0[taker].incoming(token, self.1).unwrap_or_default(),
            None => &mut [],
        }
    }

    fn copied(&mut self, token: u64, at: usize, crc: Option<u32>) {
        if let Some(taker) = self.of(token) {
            self.0[taker].copied(token, at, crc);
        }
    }
}

/// The memory of a client.
struct Bytes(Vec<u8>);

impl Buffers for Bytes {
    fn outgoing(&self, _token: u64) -> &[u8] {
        &[]
    }

    fn incoming(&mut self, _token: u64) -> &mut [u8] {
        &mut self.0
    }
}

struct Pair {
    now: Timestamp,
    /// The allocation that the giver has.
    grant: Grant,
    giver: Responder,
    given: store::PlainStore,
    requester: Requester,
    responder: Responder,
    store: store::PlainStore,
    takers: Vec<Taker>,
    /// Replies to these commands are held back.
    held_back: Option<Command>,
    held: Vec<(std::net::Ipv6Addr, std::net::Ipv6Addr, Vec<u8>)>,
    /// When TAKEs of a line were sent.
    takes: Vec<(u64, Timestamp)>,
}

impl Pair {
    fn new() -> Self {
        Self::with(PAGES)
    }

    /// So many pages of the giver are allocated.
    fn with(allocated: u32) -> Self {
        Self::of(allocated, PAGE_BYTES)
    }

    /// READs have pieces of so many bytes.
    fn of(allocated: u32, piece_bytes: usize) -> Self {
        let now = Timestamp::from_nanos(1_000_000_000);
        let mut given = store::PlainStore::new(PAGES);
        let mut giver = Responder::new(&responder::Config::new(SPACE, GIVER, 2, 1)).unwrap();
        giver.begin(now, &mut given);
        let grant = given.create(SPACE, allocated).unwrap();
        given.complete(grant.location);
        for page in 0..u64::from(allocated) {
            given.write(page, 0, &[page as u8 | 1; PAGE_BYTES]);
        }
        let config = responder::Config::new(SPACE, TAKER, INCARNATION, 2);
        Self {
            now,
            grant,
            giver,
            given,
            requester: Requester::new(requester::Config {
                piece_bytes: piece_bytes as u16,
                ..requester::Config::new(SPACE, TAKER, INCARNATION, 3)
            }),
            responder: Responder::new(&config).unwrap(),
            store: store::PlainStore::new(PAGES),
            takers: Vec::new(),
            held_back: None,
            held: Vec::new(),
            takes: Vec::new(),
        }
    }

    fn allow(&mut self) {
        let allowance = Allowance {
            migration: MIGRATION.id,
            range_epoch: MIGRATION.range_epoch,
            pages: 0..u64::from(PAGES),
            space: SPACE,
            taker: TAKER,
            taker_incarnation: INCARNATION,
        };
        self.giver.allow(&allowance, &mut self.given).unwrap();
    }

    /// A client leases a page of the giver.
    fn lease(&mut self, page: u64, lease_ms: u16) {
        let location = Location::new(store::GENERATION, page << PAGE_SHIFT).unwrap();
        let pointer = Pointer { space: SPACE, node: GIVER, tag: self.grant.tag, location };
        let update = Operation::Update { pointer, length: 8, lease_ms, wait: false };
        let mut client = Requester::new(requester::Config::new(SPACE, NodeId(40), 1, 9 + page));
        let mut bytes = Bytes(vec![0; 8]);
        client.start(self.now, update, page).expect("it is idle");
        while client.poll_completion().is_none_or(|completion| {
            assert!(matches!(completion.result, Ok(Output::Leased(_))), "{completion:?}");
            false
        }) {
            let mut sent = Vec::new();
            while let Some(request) = client.poll_transmit(self.now, &bytes) {
                sent.push((request.source, request.destination, request.head().to_vec()));
            }
            assert!(!sent.is_empty(), "it waits");
            for (source, destination, request) in sent {
                let datagram = Datagram::parse(source, destination, &request).unwrap();
                self.giver.handle_datagram(self.now, 8, &datagram, &mut self.given).unwrap();
                while let Some(reply) = self.giver.poll_transmit(&self.given) {
                    let payload = [reply.head, reply.data].concat();
                    let datagram = Datagram::parse(reply.source, reply.destination, &payload);
                    client.handle_datagram(self.now, &datagram.unwrap(), &mut bytes);
                }
            }
        }
    }

    fn take(&mut self, number: u32, pages: Range<u64>) {
        let mut taker = Taker::new(order(pages), TAKER, number, &mut self.store).unwrap();
        taker.begin();
        self.takers.push(taker);
    }

    fn deliver(&mut self, reply: &(std::net::Ipv6Addr, std::net::Ipv6Addr, Vec<u8>)) {
        let (source, destination, bytes) = reply;
        let datagram = Datagram::parse(*source, *destination, bytes).unwrap();
        self.requester.handle_datagram(
            self.now,
            &datagram,
            &mut Takers(&mut self.takers, &mut self.store),
        );
    }

    fn answer(&mut self) {
        while let Some(reply) = self.giver.poll_transmit(&self.given) {
            let bytes = [reply.head, reply.data].concat();
            let held = (reply.source, reply.destination, bytes);
            let command = Fields::unpack(held.0).unwrap().command & 0x3f;
            if self.held_back.is_some_and(|of| of.code() == command) {
                self.held.push(held);
            } else {
                self.deliver(&held);
            }
        }
    }

    fn complete(&mut self) {
        while let Some(completion) = self.requester.poll_completion() {
            let Some(of) = Takers(&mut self.takers, &mut self.store).of(completion.token) else {
                continue;
            };
            let ends = (&mut self.requester, &mut self.responder);
            self.takers[of].heard(self.now, &completion, ends, &mut self.store);
        }
    }

    /// Everything that can happen now.
    fn turn(&mut self) {
        loop {
            let Self { takers, requester, responder, store, now, .. } = self;
            for taker in takers.iter_mut() {
                taker.poll(*now, (&mut *requester, &mut *responder), store);
            }
            let mut sent = Vec::new();
            let buffers = Takers(&mut self.takers, &mut self.store);
            while let Some(request) = self.requester.poll_transmit(self.now, &buffers) {
                let bytes = [request.head(), request.data].concat();
                sent.push((request.source, request.destination, bytes));
            }
            for (source, destination, bytes) in &sent {
                let datagram = Datagram::parse(*source, *destination, bytes).unwrap();
                if datagram.command().command() == Some(Command::Take) {
                    let location = Location::from_bits(datagram.target.location).unwrap();
                    self.takes.push((location.page(), self.now));
                }
                while self.giver.handle_datagram(self.now, 7, &datagram, &mut self.given).is_err() {
                    self.answer();
                }
                self.answer();
            }
            self.complete();
            if sent.is_empty() {
                // What is over is forgotten with the next call.
                let Self { takers, requester, responder, store, now, .. } = self;
                for taker in takers.iter_mut() {
                    taker.poll(*now, (&mut *requester, &mut *responder), store);
                    let due = taker.poll_timeout();
                    assert!(due.is_none_or(|due| due > *now), "it does not do what is due");
                }
                return;
            }
        }
    }

    /// Time passes until all takers are over, or for so long.
    fn run(&mut self, time: Duration) {
        let end = self.now + time;
        self.turn();
        while self.now < end && !self.takers.iter().all(Taker::is_over) {
            self.now = self.now + Duration::from_millis(1);
            while self.giver.handle_timeout(self.now, &mut self.given).is_err() {
                self.answer();
            }
            self.answer();
            self.requester.handle_timeout(self.now);
            self.complete();
            self.turn();
        }
    }

    fn told(&self, what: &str) -> usize {
        self.store.told.iter().filter(|told| **told == what).count()
    }

    fn rows(&self, taker: usize) -> Vec<(u64, u64)> {
        self.takers[taker].rows().map(|row| (row.pages.start, row.pages.end)).collect()
    }
}

const LONG: Duration = Duration::from_secs(60);

#[test]
fn orders_are_whole_lines_of_one_shard() {
    let mut store = store::PlainStore::new(PAGES);
    let end = 1 << 36;
    let backwards = Range { start: 16, end: 8 };
    for pages in [1..9, 0..7, 8..8, backwards, 0..end + 8, end..end + 8, 0..SHARD_PAGES_MAX + 8] {
        let error = Taker::new(order(pages.clone()), TAKER, 1, &mut store).err();
        assert_eq!(error, Some(OrderError::Range), "{pages:?}");
    }
    let last = Taker::new(order(end - 8..end), TAKER, 1, &mut store).expect("it is the last line");
    assert_eq!(last.progress(), Progress { all: 1, ..Progress::default() });
    // There is no place for the first line of the next one.
    assert!(store.reserve(PAGES / 8 - 1).is_some());
    let error = Taker::new(order(0..16), TAKER, 1, &mut store).err();
    assert_eq!(error, Some(OrderError::NoRoom(2)));
    last.finish(&mut store);
    assert!(Taker::new(order(0..16), TAKER, 1, &mut store).is_ok());
}

#[test]
fn free_lines_stay_at_home_and_need_no_memory() {
    let mut pair = Pair::with(20);
    pair.allow();
    // There is memory for three lines only.
    let others = pair.store.reserve(PAGES / 8 - 3).expect("there is room");
    pair.take(1, 0..u64::from(PAGES));
    pair.run(LONG);
    assert_eq!(pair.rows(0), [(0, 24)]);
    let progress = pair.takers[0].progress();
    assert_eq!((progress.all, progress.here, progress.free), (16, 3, 13));
    assert_eq!((progress.stay, progress.is_full, pair.takers[0].is_over()), (0, false, true));
    assert_eq!(pair.giver.counters().event(Event::FreeLineStays), 13);
    assert_eq!(pair.giver.leased_pages(), 0, "they are not leased");
    assert_eq!(others.len(), 13);
}

#[test]
fn a_taker_without_memory_ends_and_keeps_what_it_has() {
    let mut pair = Pair::new();
    pair.allow();
    pair.store.reserve(PAGES / 8 - 2).expect("there is room");
    pair.take(1, 0..u64::from(PAGES));
    pair.run(LONG);
    assert_eq!(pair.rows(0), [(0, 16)]);
    let progress = pair.takers[0].progress();
    assert_eq!((progress.here, progress.stay, progress.on_their_way), (2, 14, 0));
    assert!(progress.is_full && pair.takers[0].is_over());
    // The leases of those for which there was no memory end soon.
    pair.now = pair.now + Duration::from_secs(2);
    pair.giver.withdraw(pair.now, MIGRATION.id, &mut pair.given).expect("it is known");
    assert_eq!(pair.giver.counters().event(Event::LeaseWithdrawn), 0, "they were over");
    pair.giver.handle_timeout(pair.now, &mut pair.given).expect("all was sent");
    assert_eq!(pair.giver.leased_pages(), 0);
    pair.takers.remove(0).finish(&mut pair.store);
    assert_eq!(pair.told("release"), 0, "all its memory is used");
}

#[test]
fn two_takers_share_a_requester() {
    let mut pair = Pair::new();
    pair.allow();
    pair.take(1, 0..48);
    pair.take(2, 64..128);
    pair.run(LONG);
    assert_eq!((pair.rows(0), pair.rows(1)), (vec![(0, 48)], vec![(64, 128)]));
    let progress = pair.takers[1].progress();
    assert_eq!(progress, Progress { all: 8, here: 8, ..Progress::default() });
    assert_eq!(pair.responder.counters().event(Event::LineAdopted), 14);
    for range in pair.responder.adopted() {
        for page in 0..range.page_count {
            let expected = [(range.first_page + page) as u8 | 1; PAGE_BYTES];
            assert!(pair.store.read(range.local_page + page, 0..PAGE_BYTES) == expected);
        }
    }
    let taker = pair.takers.remove(0);
    taker.finish(&mut pair.store);
    assert_eq!(pair.told("release"), 0, "all are here");
}

#[test]
fn a_giver_that_refuses_is_asked_rarely_and_not_for_ever() {
    let mut pair = Pair::new();
    pair.take(1, 0..8);
    pair.run(Duration::from_secs(10));
    let times: Vec<_> = pair.takes.iter().map(|(_, at)| *at).collect();
    let gaps: Vec<_> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert!(times.len() > 20 && times.len() < 40, "{} times", times.len());
    assert!(gaps.windows(2).all(|pair| pair[0] <= pair[1]), "the pauses grow: {gaps:?}");
    let longest = gaps.iter().max().copied();
    assert!(longest <= Some(PAUSE.1 + Duration::from_millis(1)), "{longest:?}");
    let refused = Failure::Refused { status: Status::StaleRangeEpoch, node: GIVER };
    assert_eq!(pair.takers[0].progress().last_failure, Some(refused));
    assert!(!pair.takers[0].is_over());
    assert!(pair.takers[0].poll_timeout() > Some(pair.now));
    pair.takers[0].stop();
    pair.run(Duration::from_secs(2));
    let Progress { stay, here, on_their_way, .. } = pair.takers[0].progress();
    assert_eq!((stay, here, on_their_way, pair.takers[0].is_over()), (1, 0, 0, true));
    pair.takers.remove(0).finish(&mut pair.store);
    assert_eq!(pair.told("release"), 1);
    assert!(pair.store.told.iter().all(|told| *told == "release"));
}

#[test]
fn what_is_heard_after_giving_up_changes_nothing() {
    for command in [Command::Take, Command::Read, Command::Keep] {
        let mut pair = Pair::new();
        pair.allow();
        pair.held_back = Some(command);
        pair.take(1, 0..16);
        pair.turn();
        let in_doubt = if command == Command::Keep { 2 } else { 0 };
        let progress = pair.takers[0].progress();
        assert_eq!((progress.on_their_way, progress.in_doubt), (2, in_doubt), "{command:?}");
        pair.takers[0].give_up(&mut pair.responder, &mut pair.store);
        assert_eq!(pair.told("drop"), in_doubt as usize, "they are lost");
        let held = core::mem::take(&mut pair.held);
        assert!(held.len() >= 2, "{command:?}");
        held.iter().for_each(|reply| pair.deliver(reply));
        pair.complete();
        pair.held_back = None;
        pair.run(Duration::from_secs(1));
        assert!(pair.takers[0].is_over());
        assert_eq!((pair.rows(0), pair.takers[0].progress().stay), (vec![], 2));
        assert_eq!((pair.told("adopt"), pair.told("floor")), (0, 0));
        assert!(pair.responder.adopted().is_empty());
        pair.takers.remove(0).finish(&mut pair.store);
        assert_eq!(pair.told("release"), 2);
    }
}

#[test]
fn a_line_whose_lease_ended_is_taken_again() {
    let mut pair = Pair::new();
    pair.allow();
    pair.held_back = Some(Command::Read);
    pair.take(1, 0..8);
    pair.run(Duration::from_millis(150));
    assert_eq!(pair.takes.len(), 1);
    // The READs end, and what they brought is not used.
    pair.run(Duration::from_millis(300));
    assert_eq!(pair.told("stage"), 0);
    pair.held_back = None;
    pair.run(LONG);
    assert!(pair.takes.len() > 1);
    assert_eq!((pair.rows(0), pair.told("drop")), (vec![(0, 8)], 0));
}

#[test]
fn a_line_that_is_the_givers_is_dropped_and_taken_again() {
    let mut pair = Pair::new();
    pair.allow();
    pair.take(1, 0..8);
    pair.held_back = Some(Command::Read);
    pair.turn();
    // The lease ends between the last READ and the KEEP.
    let held = core::mem::take(&mut pair.held);
    pair.held_back = None;
    pair.now = pair.now + Duration::from_millis(190);
    held.iter().for_each(|reply| pair.deliver(reply));
    pair.complete();
    assert_eq!((pair.told("stage"), pair.takers[0].progress().in_doubt), (1, 1));
    pair.now = pair.now + Duration::from_millis(20);
    pair.turn();
    assert_eq!((pair.told("drop"), pair.takers[0].progress().in_doubt), (1, 0));
    pair.run(LONG);
    assert_eq!((pair.rows(0), pair.told("stage")), (vec![(0, 8)], 2));
    assert!(pair.takers[0].progress().last_failure.is_some());
}

#[test]
fn a_line_in_doubt_stays_reserved_when_the_taker_is_stopped_and_restarts() {
    let mut pair = Pair::new();
    pair.allow();
    pair.held_back = Some(Command::Keep);
    pair.take(1, 0..24);
    pair.turn();
    assert_eq!(pair.takers[0].progress().in_doubt, 3);
    // Whatever time passes.
    pair.takers[0].stop();
    pair.run(LONG);
    assert_eq!((pair.takers[0].progress().in_doubt, pair.takers[0].is_over()), (3, false));
    // The next process knows which lines are in doubt, and asks for them, although it takes no more.
    pair.takers.clear();
    pair.held.clear();
    pair.requester.cancel_all();
    pair.store.restart();
    pair.held_back = None;
    pair.take(1, 0..32);
    pair.takers[0].stop();
    assert_eq!(pair.takers[0].progress().in_doubt, 3);
    pair.run(LONG);
    assert_eq!((pair.rows(0), pair.takers[0].progress().stay), (vec![(0, 24)], 1));
    // One that is stopped drops what is the giver's, and keeps the rest.
    pair.takers.remove(0).finish(&mut pair.store);
    assert_eq!((pair.told("adopt"), pair.told("release")), (3, 1));
}

/// Clients have leased more lines than are taken at once, beside others that want the processor or not.
#[test]
fn lines_that_wait_do_not_stop_the_others() {
    for is_contended in [true, false] {
        let mut pair = Pair::new();
        pair.allow();
        for line in 0..6 {
            pair.lease(line * 16, u16::MAX);
        }
        pair.take(1, 0..u64::from(PAGES));
        pair.takers[0].set_contended(is_contended, 1);
        pair.run(Duration::from_secs(1));
        let Progress { here, on_their_way, .. } = pair.takers[0].progress();
        assert_eq!((here, on_their_way), (10, 6));
        // What they waited says nothing about the giver.
        let lines = pair.takers[0].pace.room(pair.now, 0);
        pair.run(LONG);
        assert_eq!(pair.rows(0), [(0, u64::from(PAGES))]);
        assert_eq!(pair.takers[0].pace.room(pair.now, 0), lines);
    }
}

/// The rest is over then, and no line can be taken: it sleeps until the answers are here.
#[test]
fn lines_that_are_granted_during_a_rest_let_it_sleep() {
    let mut pair = Pair::new();
    pair.allow();
    for line in [2, 3] {
        pair.lease(line * 8, 50);
    }
    pair.take(1, 0..u64::from(PAGES));
    pair.takers[0].set_contended(true, 1);
    pair.held_back = Some(Command::Read);
    pair.run(Duration::from_millis(20));
    for held in core::mem::take(&mut pair.held) {
        pair.deliver(&held);
    }
    pair.complete();
    pair.turn();
    assert_eq!(pair.takers[0].progress().here, 2);
    let rest = pair.takers[0].pace.rest_until().expect("the burst is over");
    // Longer than the rest, and shorter than a READ.
    pair.run(Duration::from_millis(180));
    assert!(rest < pair.now && !pair.held.is_empty());
    let Progress { here, on_their_way, .. } = pair.takers[0].progress();
    assert_eq!((here, on_their_way), (2, 2));
    pair.held_back = None;
    pair.run(LONG);
    assert_eq!(pair.rows(0), [(0, u64::from(PAGES))]);
}

/// Otherwise it would have ever more of its lines under leases, which clients wait for.
#[test]
fn a_giver_that_is_slow_is_asked_for_no_more_lines_at_once() {
    for held_back in [Command::Take, Command::Read] {
        let mut pair = Pair::new();
        pair.allow();
        pair.take(1, 0..u64::from(PAGES));
        pair.takers[0].set_contended(true, 1);
        pair.held_back = Some(held_back);
        pair.run(Duration::from_secs(5));
        assert_eq!(pair.takers[0].progress().on_their_way, 4, "{held_back:?}");
    }
}

/// The store compares each with the page's bytes.
#[test]
fn the_crcs_of_pages_that_come_whole_are_kept() {
    for (piece_bytes, known) in [(PAGE_BYTES, 24), (PAGE_BYTES / 2, 0)] {
        let mut pair = Pair::of(24, piece_bytes);
        pair.allow();
        pair.take(1, 0..32);
        pair.run(LONG);
        assert_eq!(pair.takers[0].progress().here, 3);
        assert_eq!(pair.store.known_crcs, known, "pieces of {piece_bytes} bytes");
    }
}

/// A page that came whole, and then a part of it again, as after a change of its path.
#[test]
fn what_is_copied_in_pieces_has_no_crc() {
    let mut pair = Pair::new();
    pair.allow();
    pair.take(1, 0..8);
    pair.held_back = Some(Command::Read);
    pair.turn();
    let taker = &mut pair.takers[0];
    let read = token(1, 0, READ);
    taker.copied(read, 0, Some(1));
    taker.copied(read, 2 * PAGE_BYTES, Some(2));
    assert_eq!(taker.slots[0].crcs[..4], [Some(1), None, Some(2), None]);
    taker.copied(read, PAGE_BYTES / 2, None);
    assert_eq!(taker.slots[0].crcs[..4], [None, None, Some(2), None]);
    // Of no page of the line, and of a record.
    taker.copied(read, LINE_PAGES * PAGE_BYTES, Some(3));
    taker.copied(token(1, 0, TAKE), 0, Some(3));
    assert_eq!(taker.slots[0].crcs[..4], [None, None, Some(2), None]);
}

#[test]
fn lines_that_are_here_are_rows() {
    let mut pair = Pair::new();
    pair.allow();
    for (number, pages) in [(1, 8..16), (2, 24..40)] {
        pair.take(number, pages);
    }
    pair.run(LONG);
    pair.takers.clear();
    // It goes on with what is here.
    pair.take(3, 0..56);
    assert_eq!(pair.rows(0), [(8, 16), (24, 40)]);
    let Progress { all, here, .. } = pair.takers[0].progress();
    assert_eq!((all, here), (7, 3));
    pair.takers[0].stop();
    pair.run(Duration::from_secs(1));
    assert_eq!((pair.rows(0), pair.takers[0].progress().stay), (vec![(8, 16), (24, 40)], 4));
    pair.takers.remove(0).finish(&mut pair.store);
    assert_eq!(pair.told("release"), 1, "places are reserved as lines come");
}

#[test]
fn all_fences_are_heeded_before_a_line_is_served() {
    let mut pair = Pair::new();
    pair.allow();
    // More than an answer holds.
    let fences = (100..180).map(|node| Fence { node: NodeId(node), incarnation: 6 });
    pair.giver.heed_fences(pair.now, SPACE, fences, &mut pair.given);
    pair.held_back = Some(Command::Keep);
    pair.take(1, 0..8);
    pair.turn();
    for parts in 1..=3 {
        assert_eq!(pair.told("adopt"), 0, "{parts}");
        let held = core::mem::take(&mut pair.held);
        assert_eq!(held.len(), 1, "{parts}");
        pair.deliver(&held[0]);
        pair.complete();
        pair.turn();
    }
    assert_eq!((pair.told("adopt"), pair.held.len()), (1, 0));
    let seen = pair.store.fences.values().filter(|incarnation| **incarnation == 6).count();
    assert_eq!(seen, 80);
}

#[test]
fn a_line_in_doubt_without_a_slot_is_asked_for_at_the_end_of_the_rest() {
    let mut pair = Pair::new();
    pair.take(1, 0..u64::from(PAGES));
    let taker = &mut pair.takers[0];
    for time in [1, 5000].into_iter().cycle().take(100) {
        taker.pace.took(Duration::from_micros(time));
    }
    let began = pair.now;
    taker.pace.room(began, 0);
    let now = began + Duration::from_millis(1);
    assert_eq!(taker.pace.room(now, 0), 0, "it rests after a burst");
    taker.stop();
    assert_eq!(taker.poll_timeout(), None, "nothing is left to be done");
    taker.doubts.push((0, Taken { migration: MIGRATION.id, epoch: 1 }));
    let due = taker.poll_timeout().expect("the line in doubt is to be asked for");
    taker.poll(now, (&mut pair.requester, &mut pair.responder), &mut pair.store);
    assert!(due > now && taker.slots.is_empty(), "not yet");
    taker.poll(due, (&mut pair.requester, &mut pair.responder), &mut pair.store);
    assert_eq!(taker.slots.len(), 1);
}
