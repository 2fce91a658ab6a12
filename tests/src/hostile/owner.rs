//! Hostile datagrams to an endpoint's owner of leases, to which the switch redirects other clients.

use core::time::Duration;
use std::{
    collections::{BTreeMap, HashMap},
    net::Ipv6Addr,
};

use bluebridge_protocol::{
    Timestamp,
    owner::{Committed, Event, HoldError, Owner, OwnerConfig, Policy},
};
use bluebridge_wire::{
    ArenaGeneration, Command, Datagram, EndpointAddress, Flags, Header, Location, NodeId, Pointer,
    Space, Status, Tag, WireCommand,
    address::{Fields, PAGE_BYTES},
};
use rand::{Rng, SeedableRng, rngs::SmallRng, seq::IndexedRandom};

use super::{
    attack::{arbitrary_payload, mutate},
    draw::pieces,
    forge::Forged,
    vectors::{Vector, golden_vectors},
};

const SPACE: Space = Space(1);
const OWNER: NodeId = NodeId(1000);
/// A memory server to which pages may have moved.
const TAKER: NodeId = NodeId(2);
const INCARNATION: u32 = 5;
const PAGES: u64 = 12;
const RECENT: usize = 8;
const PORTS: [u16; 2] = [4000, 4001];

/// Events that end the handling of a datagram: exactly one for each datagram.
const OUTCOMES: [Event; 12] = [
    Event::DropCommand,
    Event::DropForm,
    Event::DropFull,
    Event::DropNotice,
    Event::DropReply,
    Event::DropSpace,
    Event::NotOwner,
    Event::Notice,
    Event::Reject,
    Event::Serve,
    Event::Wait,
    Event::WaitAgain,
];

#[derive(Clone, Debug)]
struct Held {
    epoch: u64,
    until: Timestamp,
    policy: Policy,
    contents: Option<Vec<u8>>,
}

/// A waiting request.
#[derive(Clone, Debug)]
struct Waiting {
    page: u64,
    epoch: u64,
    until: Timestamp,
    destination: Fields,
    /// The reply at the end of the lease.
    end: Expected,
}

/// An expected reply: destination, port, session, number, target, status, and whether the requester
/// waits.
type Expected = (Ipv6Addr, u16, u64, u64, Ipv6Addr, Status, bool);

/// An owner under attack, and the replies that it must send.
#[derive(Debug)]
pub struct OwnerHarness {
    seed: u64,
    rng: SmallRng,
    now: Timestamp,
    owner: Owner,
    vectors: Vec<Vector>,
    /// Recently sent datagrams, to be repeated.
    recent: Vec<(Ipv6Addr, Ipv6Addr, Vec<u8>)>,
    epoch: u64,
    held: BTreeMap<u64, Held>,
    waiting: Vec<Waiting>,
    expected: HashMap<Expected, u64>,
    given: u64,
    fired: u64,
    malformed: u64,
}

impl OwnerHarness {
    /// An owner without leases.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut config = OwnerConfig::new(SPACE, OWNER, INCARNATION);
        (config.lease_count, config.contents_count) = (6, 3);
        (config.wait_count, config.reply_count) = (3, 10);
        config.wait = Duration::from_millis(8);
        Self {
            seed,
            rng: SmallRng::seed_from_u64(seed),
            now: Timestamp::from_nanos(1_000_000),
            owner: Owner::new(config),
            vectors: golden_vectors(),
            recent: Vec::new(),
            epoch: 0,
            held: BTreeMap::new(),
            waiting: Vec::new(),
            expected: HashMap::new(),
            given: 0,
            fired: 0,
            malformed: 0,
        }
    }

    /// Injects `count` datagrams; returns how many the parser accepted.
    ///
    /// # Panics
    /// If the owner violates a rule; the message names the seed.
    pub fn fire(&mut self, count: u64) -> u64 {
        while self.fired < count {
            match self.rng.random_range(0..40) {
                0..3 => self.hold(),
                3 => self.release(),
                4 | 5 => self.pass(),
                6..12 => self.drain(),
                _ => {
                    self.fired += 1;
                    let (source, destination, payload) = self.datagram();
                    let port = *PORTS.choose(&mut self.rng).unwrap_or(&4000);
                    match Datagram::parse(source, destination, &payload) {
                        Ok(datagram) => self.give(port, &datagram),
                        Err(_) => self.malformed += 1,
                    }
                }
            }
        }
        self.drain();
        assert!(self.expected.values().all(|count| *count == 0), "{}: missed", self.seed);
        let counted: u64 = OUTCOMES.iter().map(|event| self.owner.counters().of(*event)).sum();
        assert_eq!(counted, self.given, "seed {}: every datagram is counted once", self.seed);
        assert_eq!(self.given + self.malformed, self.fired);
        self.given
    }

    /// How often an event happened.
    #[must_use]
    pub fn count(&self, event: Event) -> u64 {
        self.owner.counters().of(event)
    }

    fn pointer(page: u64) -> Pointer {
        let node = NodeId(1 + u16::from(page.is_multiple_of(3)));
        let generation = ArenaGeneration::new(3).expect("a small number");
        let location = Location::new(generation, page * PAGE_BYTES as u64).expect("48 bits");
        Pointer { space: SPACE, node, tag: Tag(7), location }
    }

    /// The index of a page, if it is one of this test's pages.
    fn page_of(target: Ipv6Addr) -> Option<u64> {
        let pointer = Pointer::from_ipv6(target).ok()?.page_start();
        (0..PAGES).find(|page| Self::pointer(*page) == pointer)
    }

    fn hold(&mut self) {
        let page = self.rng.random_range(0..PAGES);
        let is_older = self.rng.random_bool(0.1);
        if !is_older {
            self.epoch += 1;
        }
        let epoch = if is_older { 1 } else { self.epoch };
        let until = self.now + Duration::from_millis(self.rng.random_range(0..40));
        let policies = [Policy::Reject, Policy::Serve, Policy::Wait];
        let policy = *policies.choose(&mut self.rng).unwrap_or(&Policy::Reject);
        let bytes = vec![self.rng.random(); PAGE_BYTES];
        let committed = self.rng.random_bool(0.8).then_some(Committed { start: 0, bytes: &bytes });
        let before = self.owner.counters().clone();
        let pointer = Self::pointer(page);
        let held = self.owner.hold(self.now, pointer, epoch, until, Some(policy), committed);
        // An ended lease may have been removed to make room.
        let now = self.now;
        let known = self.held.get(&page);
        let is_running = known.is_some_and(|held| held.until > now);
        let is_known = known.map(|held| held.epoch);
        match held {
            Ok(()) => {
                let is_newest = is_known.is_none_or(|known| known <= epoch);
                assert!(is_newest || !is_running, "an older lease was taken");
                let kept =
                    self.owner.counters().of(Event::ContentsFull) == before.of(Event::ContentsFull);
                let is_kept = policy == Policy::Serve && committed.is_some() && kept;
                // Notifying the owner again about the same lease keeps its contents.
                let same = self.held.get(&page).filter(|held| held.epoch == epoch);
                let known = same.and_then(|held| held.contents.clone());
                let contents = if is_kept { Some(bytes) } else { known };
                self.held.insert(page, Held { epoch, until, policy, contents });
            }
            Err(HoldError::Older) => assert!(is_known.is_some_and(|known| known > epoch)),
            Err(HoldError::Full) => assert!(!is_running, "its own page needs no room"),
            Err(error) => panic!("seed {}: {error:?}", self.seed),
        }
        let notified = self.owner.counters().of(Event::WaitEnd) - before.of(Event::WaitEnd);
        // Ended leases are removed to make room, and a new epoch ends those before it.
        let (now, held) = (self.now, self.held.clone());
        let is_over = |page: &u64, epoch: u64| {
            held.get(page).is_none_or(|held| held.until <= now || held.epoch > epoch)
        };
        let over: Vec<_> =
            self.waiting.iter().filter(|waiting| is_over(&waiting.page, waiting.epoch)).collect();
        assert!(notified <= over.len() as u64, "seed {}: {notified} of {over:?}", self.seed);
        self.settle_waiting();
    }

    fn release(&mut self) {
        let Some((&page, held)) = self.held.iter().next() else { return };
        let is_known = self.rng.random_bool(0.8);
        let epoch = if is_known { held.epoch } else { held.epoch + 1 };
        // It may have been removed after its end.
        let is_over = held.until <= self.now;
        let released = self.owner.release(Self::pointer(page), epoch);
        assert!(released == is_known || is_over, "seed {}: {released}", self.seed);
        if is_known {
            self.held.remove(&page);
        }
        self.settle_waiting();
    }

    fn pass(&mut self) {
        self.now = self.now + Duration::from_micros(self.rng.random_range(0..4000));
        self.owner.handle_timeout(self.now);
        assert!(self.owner.poll_timeout().is_none_or(|due| due > self.now));
        self.settle_waiting();
    }

    /// Requests that no longer wait may have received one reply about that.
    fn settle_waiting(&mut self) {
        // Replies are checked before other requests wait under the same number.
        self.drain();
        // After their waiting time the requesters ask the home themselves.
        self.waiting.retain(|waiting| waiting.until > self.now);
        assert!(self.owner.waiting_count() <= usize::from(self.owner.config().wait_count));
        assert!(self.owner.held_count() <= usize::from(self.owner.config().lease_count));
    }

    fn drain(&mut self) {
        let late_before = self.count(Event::ServeLate);
        let mut late = 0;
        let mut replies = Vec::new();
        while let Some(transmit) = self.owner.poll_transmit() {
            let payload = [transmit.head, transmit.data].concat();
            replies.push((
                transmit.source,
                transmit.destination,
                transmit.destination_port,
                payload,
            ));
        }
        for (source, destination, port, payload) in replies {
            let reply = Datagram::parse(source, destination, &payload).expect("well formed");
            let from = reply.from;
            assert!(reply.is_reply() && (from.space, from.node) == (SPACE, OWNER), "{reply:?}");
            assert_eq!(reply.header.incarnation, INCARNATION);
            let status = Status::from_code(from.tag).expect("a known status");
            late += self.judge_reply(port, destination, status, &reply);
        }
        assert_eq!(self.count(Event::ServeLate) - late_before, late, "seed {}", self.seed);
    }

    /// Removes a reply from the expected ones. Returns 1 if it should have had contents and came
    /// too late.
    fn judge_reply(
        &mut self,
        port: u16,
        destination: Ipv6Addr,
        status: Status,
        reply: &Datagram<'_>,
    ) -> u64 {
        let Header { session, sequence, target, flags, .. } = reply.header;
        let queued = flags.contains(Flags::QUEUED);
        let key = (destination, port, session, sequence, target, status, queued);
        if status.is_ok() {
            let page = Self::page_of(target).expect("a page that was held");
            let held = self.held.get(&page).expect("it is held");
            let contents = held.contents.as_ref().expect("the contents are known");
            let start = Pointer::from_ipv6(target).expect("memory").location.in_page()
                + usize::from(reply.header.offset);
            assert!(flags.contains(Flags::LAST_COMMITTED));
            assert_eq!((reply.header.node, reply.header.lease_epoch), (OWNER.0, held.epoch));
            assert!(contents[start..start + reply.data.len()] == *reply.data, "others' bytes");
        } else {
            assert!(reply.data.is_empty(), "{reply:?}");
            assert!(matches!(status, Status::Busy | Status::NotOwner), "{reply:?}");
        }
        if let Some(count) = self.expected.get_mut(&key).filter(|count| **count > 0) {
            *count -= 1;
            return 0;
        }
        assert_eq!(status, Status::NotOwner, "seed {}: unexpected {reply:?}", self.seed);
        // The end of a waiting request.
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.end == key) {
            self.waiting.remove(at);
            return 0;
        }
        let served = (destination, port, session, sequence, target, Status::Ok, false);
        let count = self.expected.get_mut(&served).filter(|count| **count > 0);
        *count.unwrap_or_else(|| panic!("seed {}: unexpected {reply:?}", self.seed)) -= 1;
        1
    }

    fn give(&mut self, port: u16, datagram: &Datagram<'_>) {
        self.given += 1;
        let before = self.owner.counters().clone();
        let (held_count, waiting_count) = (self.owner.held_count(), self.owner.waiting_count());
        let notice = self.owner.handle_datagram(self.now, port, datagram, |node| node == TAKER);
        let rose: Vec<Event> = OUTCOMES
            .into_iter()
            .filter(|event| self.owner.counters().of(*event) > before.of(*event))
            .collect();
        let [outcome] = rose[..] else {
            panic!("seed {}: {rose:?} for {datagram:?}", self.seed);
        };
        assert_eq!(self.owner.held_count(), held_count, "a datagram changed what is held");
        let joined = usize::from(outcome == Event::Wait);
        assert_eq!(self.owner.waiting_count(), waiting_count + joined);
        assert_eq!(notice.is_some(), outcome == Event::Notice);
        if let Some(notice) = notice {
            let Fields { node, space, .. } = datagram.from;
            assert_eq!((notice.pointer.space, space), (SPACE, SPACE));
            assert!(node == notice.pointer.node || node == TAKER, "{datagram:?}");
        }
        let (status, queued, count) = match outcome {
            Event::Reject => (Status::Busy, false, 1),
            Event::NotOwner => (Status::NotOwner, false, 1),
            Event::Wait | Event::WaitAgain => (Status::Busy, true, 1),
            Event::Serve => {
                let Header { length, detail, .. } = datagram.header;
                let in_page = Pointer::from_ipv6(datagram.header.target).expect("memory");
                let in_page = in_page.location.in_page();
                (Status::Ok, false, pieces(in_page, length as usize, detail as usize).len() as u64)
            }
            _ => return,
        };
        self.judge_request(outcome, datagram);
        let Header { session, sequence, target, .. } = datagram.header;
        let key =
            |status, queued| (datagram.source, port, session, sequence, target, status, queued);
        *self.expected.entry(key(status, queued)).or_default() += count;
        if queued {
            let page = Self::page_of(target).expect("a page that is held");
            let is_same = |waiting: &Waiting| {
                (waiting.end.0, waiting.end.2, waiting.end.3, waiting.destination)
                    == (datagram.source, session, sequence, datagram.to)
            };
            // The last repetition determines where the end is sent.
            let known = self.waiting.len();
            self.waiting.retain(|waiting| !is_same(waiting));
            assert_eq!(known > self.waiting.len(), outcome == Event::WaitAgain);
            let held = self.held.get(&page).expect("it was held a moment ago");
            let until = held.until.min(self.now + self.owner.config().wait);
            let (epoch, destination) = (held.epoch, datagram.to);
            let end = key(Status::NotOwner, false);
            self.waiting.push(Waiting { page, epoch, until, destination, end });
        }
    }

    /// Checks that a request that got a reply is valid for one page, and that the reply fits the
    /// lease.
    fn judge_request(&self, outcome: Event, request: &Datagram<'_>) {
        let Header { session, sequence, length, flags, .. } = request.header;
        let command = request.command().command();
        let at = format!("seed {}: {outcome:?} for {request:?}", self.seed);
        assert!(!request.is_reply() && !request.command().is_home(), "{at}");
        assert_eq!([request.from.space, request.to.space, request.target.space], [SPACE; 3]);
        assert!(session != 0 && sequence != 0, "{at}");
        let in_page = request.target.location % PAGE_BYTES as u64;
        let frees = command == Some(Command::Delete) && !flags.contains(Flags::ZERO);
        assert!(frees || in_page + u64::from(length) <= PAGE_BYTES as u64, "{at}");
        let page = Self::page_of(request.header.target);
        let held = page.and_then(|page| self.held.get(&page));
        let running = held.filter(|held| held.until > self.now);
        assert_eq!(running.is_none(), outcome == Event::NotOwner, "{at}");
        let Some(held) = running else { return };
        let is_wait = matches!(outcome, Event::Wait | Event::WaitAgain);
        let waits = matches!(command, Some(Command::Read | Command::Update))
            && flags.contains(Flags::QUEUED);
        assert!(!is_wait || (waits && held.policy == Policy::Wait), "{at}");
        let takes = command == Some(Command::Read) && flags.contains(Flags::MAY_BE_STALE);
        let serves = held.policy == Policy::Serve && held.contents.is_some();
        assert!(outcome != Event::Serve || (takes && serves), "{at}");
    }

    fn datagram(&mut self) -> (Ipv6Addr, Ipv6Addr, Vec<u8>) {
        if self.rng.random_bool(0.15)
            && let Some(again) = self.recent.choose(&mut self.rng)
        {
            return again.clone();
        }
        let kind = self.rng.random_range(0..100);
        if kind < 4 {
            let request = self.request();
            let payload = arbitrary_payload(&mut self.rng);
            return (request.source, request.destination, payload);
        }
        let mut datagram = if kind < 12 { self.notice() } else { self.request() };
        if kind < 20 {
            // A golden vector's bytes, unchanged or changed.
            let vector = self.vectors.choose(&mut self.rng).expect("there are vectors").clone();
            let mut payload = vector.payload;
            if !payload.is_empty() && self.rng.random_bool(0.3) {
                let at = self.rng.random_range(0..payload.len());
                payload[at] ^= 1 << self.rng.random_range(0..8);
            }
            if self.rng.random_bool(0.5) {
                return (vector.source, vector.destination, payload);
            }
        }
        if self.rng.random_bool(0.45) {
            let rng = &mut self.rng;
            for _ in 0..rng.random_range(1..4) {
                match rng.random_range(0..9) {
                    0..4 => mutate::header(rng, &mut datagram.header),
                    4 => mutate::data(rng, &mut datagram),
                    5 => mutate::address(rng, &mut datagram),
                    6 => mutate::options(rng, &mut datagram),
                    7 => mutate::trailer(rng, &mut datagram),
                    _ => ends(rng, &mut datagram),
                }
            }
        }
        let sent = (datagram.source, datagram.destination, datagram.payload());
        if self.recent.len() < RECENT {
            self.recent.push(sent.clone());
        } else {
            let at = self.rng.random_range(0..RECENT);
            self.recent[at] = sent.clone();
        }
        sent
    }

    fn endpoint(&mut self) -> Ipv6Addr {
        let node = NodeId(self.rng.random_range(1001..1004));
        EndpointAddress::new(SPACE, node, 5).to_ipv6()
    }

    fn forged(&mut self, source: Ipv6Addr, to: Fields, header: Header) -> Forged {
        Forged {
            source,
            destination: to.to_ipv6(),
            source_port: 4000,
            header,
            options: Vec::new(),
            data: vec![9; if self.rng.random_bool(0.2) { 8 } else { 0 }],
            trailer: Vec::new(),
            patches: Vec::new(),
        }
    }

    /// A request that a redirect might send here.
    fn request(&mut self) -> Forged {
        let commands = [
            Command::Read,
            Command::Read,
            Command::Read,
            Command::Update,
            Command::Update,
            Command::Write,
            Command::CompareSwap,
            Command::FetchAdd,
            Command::Delete,
            Command::Commit,
        ];
        let command = *commands.choose(&mut self.rng).unwrap_or(&Command::Read);
        let skip = if self.rng.random_bool(0.3) { self.rng.random_range(0..4096) } else { 0 };
        let pointer = Self::pointer(self.rng.random_range(0..PAGES));
        let pointer = pointer.checked_add(skip).expect("inside of a page");
        let length = self.rng.random_range(1..=4096 - skip);
        let flags = [Flags::default(), Flags::QUEUED, Flags::MAY_BE_STALE, Flags::ZERO];
        let details = [1024, 1352, 4096, 0, 17];
        let header = Header {
            target: pointer.to_ipv6(),
            session: self.rng.random_range(1..4),
            sequence: self.rng.random_range(1..30),
            length: u32::try_from(length).unwrap_or(1),
            flags: *flags.choose(&mut self.rng).unwrap_or(&Flags::QUEUED),
            detail: *details.choose(&mut self.rng).unwrap_or(&4096),
            ..Header::default()
        };
        let bits = WireCommand::request(command, self.rng.random_bool(0.05)).bits();
        let to = Fields::unpack(pointer.to_ipv6()).expect("a fabric address");
        let source = self.endpoint();
        self.forged(source, Fields { command: bits, ..to }, header)
    }

    /// A notice, sometimes from a node that does not serve the page.
    fn notice(&mut self) -> Forged {
        let is_new = self.rng.random_bool(0.5);
        let command = if is_new { Command::Notice } else { Command::Invalidate };
        let pointer = Self::pointer(self.rng.random_range(0..PAGES));
        let header = Header {
            target: pointer.to_ipv6(),
            length: self.rng.random_range(0..5),
            ..Header::default()
        };
        let bits = WireCommand::request(command, false).bits();
        let to = Fields::unpack(pointer.to_ipv6()).expect("a fabric address");
        let to = Fields { command: bits, node: NodeId::ALL, ..to };
        let from = NodeId(self.rng.random_range(1..3));
        let source = EndpointAddress::of_shard(SPACE, from, 0, 0).to_ipv6();
        self.forged(source, to, header)
    }
}

/// Changes the addresses: another space, another command, a reply, or an invalid endpoint.
fn ends(rng: &mut SmallRng, datagram: &mut Forged) {
    let (Some(mut from), Some(mut to)) =
        (Fields::unpack(datagram.source), Fields::unpack(datagram.destination))
    else {
        return;
    };
    match rng.random_range(0..7) {
        0 => from.space = Space(2),
        1 => to.space = Space(2),
        2 => to.command = rng.random(),
        3 => to.node = NodeId::ALL,
        4 => from.node = NodeId(rng.random_range(0..4)),
        5 => {
            // Like a server's reply to this endpoint.
            (from.command, to.command) = (WireCommand::reply(Command::Read).bits(), 0);
            (to.node, to.tag, to.location) = (OWNER, 0, 1 << 63);
        }
        _ => to.tag ^= 1,
    }
    (datagram.source, datagram.destination) = (from.to_ipv6(), to.to_ipv6());
}
