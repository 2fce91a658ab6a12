//! The network, the switch, the home, and what must hold.

use core::{net::Ipv6Addr, time::Duration};
use std::collections::{BTreeMap, HashMap};

use bluebridge_protocol::{
    Instant,
    owner::{self, Policy},
    requester::{self, Event},
    responder::{Config, Responder},
};
use bluebridge_wire::{Command, Datagram, NodeId, Status, address::Fields};

use crate::{
    client::{Client, Done, SPACE},
    store::{Pages, pointer},
};

const HOME: NodeId = NodeId(3);
const MS: u64 = 1_000_000;
const PORT: u16 = 4242;

/// What a run is made of.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) loss_percent: u32,
    pub(crate) repeat_percent: u32,
    pub(crate) delay_us: u64,
    pub(crate) clients: usize,
    pub(crate) pages: usize,
    pub(crate) lease_ms: u16,
    /// The switch redirects at every grant, not only when a lease is fought over.
    pub(crate) always: bool,
    pub(crate) policy: Policy,
    /// After how long a session ends that was idle.
    pub(crate) idle_ms: u64,
    /// What each client does.
    pub(crate) steps: usize,
    /// A mistake: an owner serves on after its client sent COMMIT.
    pub(crate) serves_released: bool,
}

/// What happened, over all clients.
#[derive(Default)]
pub(crate) struct Report {
    requester: HashMap<&'static str, u64>,
    owner: HashMap<&'static str, u64>,
    pub(crate) commits: u64,
}

impl Report {
    pub(crate) fn requester(&self, event: Event) -> u64 {
        self.requester.get(event.name()).copied().unwrap_or(0)
    }

    pub(crate) fn owner(&self, event: owner::Event) -> u64 {
        self.owner.get(event.name()).copied().unwrap_or(0)
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (name, count) in &other.requester {
            *self.requester.entry(name).or_default() += count;
        }
        for (name, count) in &other.owner {
            *self.owner.entry(name).or_default() += count;
        }
        self.commits += other.commits;
    }

    fn count(&mut self, requester: &requester::Counters, owner: &owner::Counters) {
        for (name, count) in requester.iter() {
            *self.requester.entry(name).or_default() += count;
        }
        for (name, count) in owner.iter() {
            *self.owner.entry(name).or_default() += count;
        }
    }
}

/// A datagram on its way.
#[derive(Clone)]
struct Packet {
    source: Ipv6Addr,
    destination: Ipv6Addr,
    payload: Vec<u8>,
}

/// What is known to have happened to a page.
#[derive(Clone, Copy, Default)]
struct Known {
    commits: u64,
    added: u64,
    /// Commits and additions of which nobody can tell.
    maybe: u64,
}

pub(crate) struct World {
    plan: Plan,
    time: u64,
    random: u64,
    packets: BTreeMap<(u64, u64), Packet>,
    packet_count: u64,
    home: Responder,
    pages: Pages,
    clients: Vec<Client>,
    /// When each client begins something, what it knew of the page then, and how much is left.
    next_step: Vec<u64>,
    knew: Vec<Known>,
    left: Vec<usize>,
    busy: Vec<bool>,
    known: Vec<Known>,
    /// The page's location: to whom, until when.
    redirects: HashMap<u64, (NodeId, u64, u64)>,
}

impl World {
    pub(crate) fn new(plan: &Plan) -> Self {
        let count = plan.clients;
        let mut config = Config::new(SPACE, HOME, 11, plan.seed);
        config.timers.session_idle = Duration::from_millis(plan.idle_ms);
        let client = |number| Client::new(number, plan.seed, plan);
        Self {
            plan: plan.clone(),
            time: 0,
            random: plan.seed,
            packets: BTreeMap::new(),
            packet_count: 0,
            home: Responder::new(&config).expect("a good configuration"),
            pages: Pages::new(plan.pages),
            clients: (0..count).map(client).collect(),
            next_step: vec![0; count],
            knew: vec![Known::default(); count],
            left: vec![plan.steps; count],
            busy: vec![false; count],
            known: vec![Known::default(); plan.pages],
            redirects: HashMap::new(),
        }
    }

    /// Runs until all clients did what they had to do. On the way:
    ///
    /// * nobody believes in a lease on a page that another one believes in;
    /// * a READ, a grant and the last committed contents show all commits and additions that ended before they began;
    /// * no page is read half old, half new;
    ///
    /// and at the end every page counts exactly the commits and additions that were answered OK,
    /// and no more of those of which nobody can tell than there are.
    pub(crate) fn run(mut self) -> Report {
        while self.left.iter().any(|left| *left > 0) || self.busy.contains(&true) {
            self.step();
            assert!(self.time < 600_000 * MS, "it does not end");
        }
        let mut report = Report::default();
        for client in &self.clients {
            report.count(client.requester.counters(), client.owner.counters());
        }
        for page in 0..self.plan.pages {
            let bytes = self.page(page);
            let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8"));
            let Known { commits, added, maybe } = self.known[page];
            assert!(word(0) >= commits && word(4088) >= added, "page {page} lost something");
            let more = word(0) + word(4088) - commits - added;
            assert!(more <= maybe, "page {page} counts {more} too much, of {maybe}");
            assert!(maybe == 0 || self.plan.idle_ms < 60_000, "no session was lost");
            report.commits += commits;
        }
        report
    }

    fn page(&self, page: usize) -> &[u8] {
        use bluebridge_protocol::store::PageStore;
        self.pages.read(pointer(SPACE, HOME, page).location.page(), 0..4096)
    }

    /// Goes to the next moment at which anything happens.
    fn step(&mut self) {
        let packet = self.packets.first_key_value().map(|((time, _), _)| *time);
        let home = self.home.poll_timeout().map(|when| when.as_nanos());
        let clients = (0..self.clients.len()).flat_map(|number| {
            let client = &self.clients[number];
            let begins = !self.busy[number] && self.left[number] > 0;
            let timers = [client.requester.poll_timeout(), client.owner.poll_timeout()];
            let timers = timers.into_iter().flatten().map(|when| client.time(when));
            timers.chain(begins.then_some(self.next_step[number]))
        });
        let next = clients.chain(packet).chain(home).min().expect("something goes on");
        self.time = self.time.max(next);
        let due = self.packets.first_entry().filter(|entry| entry.key().0 <= self.time);
        if let Some(packet) = due.map(|entry| entry.remove()) {
            self.deliver(&packet);
        }
        if self.home.poll_timeout().is_some_and(|when| when.as_nanos() <= self.time) {
            let ended = self.home.handle_timeout(Instant::from_nanos(self.time), &mut self.pages);
            ended.expect("nothing waits to be sent");
            self.send_from_home();
        }
        for number in 0..self.clients.len() {
            self.drive(number);
        }
    }

    /// Lets a client go on with what it does.
    fn drive(&mut self, number: usize) {
        let now = self.clients[number].clock(self.time);
        self.clients[number].requester.handle_timeout(now);
        self.clients[number].owner.handle_timeout(now);
        let page = self.clients[number].page;
        if let Some(done) = self.clients[number].end(now, pointer(SPACE, HOME, page)) {
            self.busy[number] = false;
            self.judge(number, page, done);
            // Most think for a short time; some for longer than their lease.
            let lease = u64::from(self.plan.lease_ms) * MS;
            let most = if self.dice(8) == 0 { lease * 2 } else { lease / 8 };
            self.next_step[number] = self.time + self.dice(most);
        }
        if !self.busy[number] && self.left[number] > 0 && self.next_step[number] <= self.time {
            self.begin(number, now);
        }
        let mut sent = Vec::new();
        let client = &mut self.clients[number];
        while let Some(transmit) = client.requester.poll_transmit(now, &client.memory) {
            let payload = [transmit.head(), transmit.data].concat();
            let (source, destination) = (transmit.source, transmit.destination);
            sent.push(Packet { source, destination, payload });
        }
        while let Some(transmit) = client.owner.poll_transmit() {
            assert_eq!(transmit.destination_port, PORT);
            let payload = [transmit.head, transmit.data].concat();
            let (source, destination) = (transmit.source, transmit.destination);
            sent.push(Packet { source, destination, payload });
        }
        sent.into_iter().for_each(|packet| self.send(packet));
    }

    fn begin(&mut self, number: usize, now: Instant) {
        let page = match self.clients[number].holding {
            Some(held) => held.page,
            None => self.dice(self.plan.pages as u64) as usize,
        };
        self.left[number] -= 1;
        self.busy[number] = true;
        self.knew[number] = self.known[page];
        let dice = self.dice(u64::MAX);
        self.clients[number].begin(now, page, pointer(SPACE, HOME, page), dice);
    }

    fn judge(&mut self, number: usize, page: usize, done: Done) {
        let (knew, known) = (self.knew[number], &mut self.known[page]);
        match done {
            Done::Nothing => {}
            Done::Committed => known.commits += 1,
            Done::Added => known.added += 1,
            Done::Maybe => known.maybe += 1,
            Done::Read(counted) => {
                assert!(counted.commits >= knew.commits && counted.added >= knew.added, "stale");
            }
            Done::ReadStale(counted) => {
                let begun = self.clients.len() as u64 + known.maybe;
                assert!(counted.commits <= known.commits + begun, "from the future");
                // Its owner lets go before it sends COMMIT, so nobody has heard of a later one.
                assert!(counted.commits >= knew.commits && counted.added >= knew.added, "too old");
            }
            Done::Granted(counted) => {
                assert!(counted.commits >= knew.commits && counted.added >= knew.added, "stale");
                for (other, client) in self.clients.iter().enumerate() {
                    let believes = client.holding.is_some_and(|held| {
                        held.page == page && client.clock(self.time) < held.lease.expires_at
                    });
                    assert!(!believes || other == number, "{other} and {number} hold {page}");
                }
            }
        }
    }

    /// Sends a datagram on its way, perhaps twice, perhaps not at all.
    fn send(&mut self, packet: Packet) {
        if self.dice(100) < u64::from(self.plan.loss_percent) {
            return;
        }
        let copies = 1 + u64::from(self.dice(100) < u64::from(self.plan.repeat_percent));
        for _ in 0..copies {
            let arrives = self.time + 2000 + self.dice(self.plan.delay_us * 1000);
            self.packet_count += 1;
            self.packets.insert((arrives, self.packet_count), packet.clone());
        }
    }

    /// What the switch does, and then the node behind it.
    fn deliver(&mut self, packet: &Packet) {
        let Packet { source, destination, payload } = packet;
        let datagram = Datagram::parse(*source, *destination, payload).expect("nothing is damaged");
        let command = datagram.command();
        if datagram.is_reply() {
            if datagram.from.node == HOME {
                self.learn(&datagram);
            }
            let time = self.time;
            let client = self.client(datagram.to.node);
            let now = client.clock(time);
            let Client { requester, memory, .. } = client;
            requester.handle_datagram(now, &datagram, memory);
            return;
        }
        let redirect = self.redirects.get(&(datagram.to.location / 4096)).copied();
        let redirect = redirect.filter(|(_, _, until)| *until > self.time && !command.is_home());
        match redirect {
            Some((owner, ..)) => {
                let time = self.time;
                let client = self.client(owner);
                let now = client.clock(time);
                assert_eq!(client.owner.handle_datagram(now, PORT, &datagram), None);
            }
            None => {
                let now = Instant::from_nanos(self.time);
                let taken = self.home.handle_datagram(now, PORT, &datagram, &mut self.pages);
                taken.expect("nothing waits to be sent");
                self.send_from_home();
            }
        }
    }

    /// What the controller makes of a copy of a reply, at once.
    fn learn(&mut self, reply: &Datagram<'_>) {
        let told = Fields::unpack(reply.header.target).expect("a fabric address");
        let (byte, status) = (reply.from.command, Status::from_code(reply.from.tag));
        let Some(command) = reply.command().command() else { return };
        let contended = byte & 0xc0 == 0xc0;
        let leases =
            matches!(command, Command::Abort | Command::Commit | Command::Renew | Command::Update);
        if !(contended || (self.plan.always && leases && status == Some(Status::Ok))) {
            return;
        }
        let header = &reply.header;
        let known = self.redirects.get(&(told.location / 4096)).map_or(0, |known| known.1);
        if header.lease_epoch < known {
            return;
        }
        let ends = matches!(command, Command::Abort | Command::Commit);
        let time = if ends { 0 } else { u64::from(header.lease_remaining_ms) * MS };
        let entry = (NodeId(header.node), header.lease_epoch, self.time + time);
        self.redirects.insert(told.location / 4096, entry);
    }

    fn send_from_home(&mut self) {
        let mut sent = Vec::new();
        while let Some(transmit) = self.home.poll_transmit(&self.pages) {
            let payload = [transmit.head, transmit.data].concat();
            let (source, destination) = (transmit.source, transmit.destination);
            sent.push(Packet { source, destination, payload });
        }
        sent.into_iter().for_each(|packet| self.send(packet));
    }

    fn client(&mut self, node: NodeId) -> &mut Client {
        let found = self.clients.iter_mut().find(|client| client.node == node);
        found.expect("only clients are answered")
    }

    /// A number below `end`.
    fn dice(&mut self, end: u64) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.random;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (word ^ (word >> 31)) % end.max(1)
    }
}
