//! The service thread's loop: check the leases, do what is due, publish when the next check is, sleep.

use core::sync::atomic::{Ordering, fence};
use core::time::Duration;
use std::sync::Arc;

use bluebridge_protocol::{
    Timestamp,
    owner::{Committed, Owner, OwnerConfig},
    requester::{Completion, Failure, Operation, Output, Requester},
};
use bluebridge_transport::{Outgoing, TransmitError, Transport, Wait};
use bluebridge_wire::{Datagram, UDP_PORT};

use super::{END_DEADLINE, IsServer, OwnerPolicy, Shared, count, ledger::Entry, ledger::Ledger};
use crate::{config::EndpointConfig, drive::outgoing, work::NoMemory};

/// Operations that the service can have in flight at once.
const OPERATION_COUNT: u16 = 256;

/// Servers with which the service can have sessions at once.
const SERVER_COUNT: u16 = 64;

/// The longest sleep of the thread.
const SLEEP: Duration = Duration::from_secs(60);

/// When a RENEW that could not be sent, or was refused for now, is tried again.
const RETRY: Duration = Duration::from_millis(5);

/// The most clients of one endpoint: as many as fit in a token.
const LEDGER_COUNT_MAX: usize = 1 << 16;

/// The thread's state.
pub(super) struct Serving<T> {
    transport: T,
    requester: Requester,
    owner: Owner,
    is_server: IsServer,
    shared: Arc<Shared>,
    tenants: Vec<Option<Known>>,
    /// Number of ledgers added since the start.
    ledger_count: u64,
}

/// A client, as the thread knows it.
struct Known {
    ledger: Arc<Ledger>,
    leases: Vec<KnownLease>,
    held_count: u64,
    /// RENEWs and ABORTs in flight, also of leases that ended meanwhile.
    under_way: usize,
}

/// A slot of a client, as the thread saw it last.
#[derive(Clone, Copy, Default)]
struct KnownLease {
    version: u32,
    entry: Option<Entry>,
    /// A RENEW or the ABORT is in flight.
    is_busy: bool,
    /// Nothing remains to be done for it.
    is_over: bool,
    not_before: Timestamp,
    /// Until when the owner's state machine holds it; time zero if it does not.
    held_until: Timestamp,
}

impl Known {
    /// Whether the client has ended, and nothing is left to be done for it.
    fn is_gone(&self) -> bool {
        let is_open = |lease: &KnownLease| {
            lease.entry.is_some_and(|entry| entry.is_abandoned) && !lease.is_over
        };
        self.ledger.is_closed()
            && self.ledger.held_count() == self.held_count
            // The next client in this place would get their results.
            && self.under_way == 0
            && !self.leases.iter().any(is_open)
    }
}

impl KnownLease {
    /// When something is to be done for the lease.
    fn due_at(&self) -> Timestamp {
        match self.entry {
            Some(entry) if !self.is_busy && !self.is_over => {
                let at = if entry.is_abandoned { Timestamp::default() } else { entry.renew_at() };
                if entry.is_abandoned || at <= entry.renew_until {
                    at.max(self.not_before)
                } else {
                    Timestamp::MAX
                }
            }
            _ => Timestamp::MAX,
        }
    }
}

impl KnownLease {
    /// Passes the lease, or its extension, to the owner's state machine.
    fn hold(&mut self, owner: &mut Owner, now: Timestamp, index: u16, ledger: &Ledger) {
        let Some(entry) = self.entry else { return };
        let is_new = self.held_until == Timestamp::default();
        self.held_until = entry.expires_at;
        let mut hold = |committed: &[u8]| {
            for (page, part) in entry.pages() {
                let bytes = committed.get(part).filter(|bytes| !bytes.is_empty());
                let start = if page == entry.pointer.page_start() {
                    entry.pointer.location.in_page()
                } else {
                    0
                };
                let committed = bytes.map(|bytes| Committed { start, bytes });
                let policy = Some(entry.policy);
                // Requests for a page that does not fit are sent to the home.
                let _ = owner.hold(now, page, entry.epoch, entry.expires_at, policy, committed);
            }
        };
        if is_new && entry.policy == OwnerPolicy::Serve {
            ledger.with_contents(index, self.version, hold);
        } else {
            hold(&[]);
        }
    }

    /// Passes the end of the lease to the owner's state machine.
    fn let_go(&mut self, owner: &mut Owner) {
        if self.held_until == Timestamp::default() {
            return;
        }
        self.held_until = Timestamp::default();
        for (page, _) in self.entry.iter().flat_map(Entry::pages) {
            owner.release(page, self.entry.map_or(0, |entry| entry.epoch));
        }
    }
}

impl<T: Transport> Serving<T> {
    pub(super) fn new(
        config: &EndpointConfig,
        transport: T,
        shared: Arc<Shared>,
        is_server: IsServer,
    ) -> Self {
        // Its own source address and nonces, so that its replies are not taken for the clients'.
        let own = EndpointConfig::new(config.space, config.node, config.incarnation);
        let own = EndpointConfig {
            piece_bytes: config.piece_bytes,
            operation_count: OPERATION_COUNT,
            server_count: SERVER_COUNT,
            ..own
        };
        let requester = Requester::new(own.requester(transport.capabilities()));
        let owner = Owner::new(OwnerConfig::new(config.space, config.node, config.incarnation));
        Self {
            transport,
            requester,
            owner,
            is_server,
            shared,
            tenants: Vec::new(),
            ledger_count: 0,
        }
    }

    pub(super) fn run(&mut self) {
        let mut stop_at = None;
        loop {
            let now = self.now();
            if self.shared.stop.load(Ordering::SeqCst) {
                let until = *stop_at.get_or_insert(now + END_DEADLINE);
                if now >= until || !self.is_needed() {
                    return self.close_sessions();
                }
            }
            let look_at = self.look(now);
            self.act(now);
            self.flush(now);
            let until = self.promise(look_at, stop_at);
            if let Err(reason) = self.wait(until) {
                self.shared.fail(reason);
                return;
            }
        }
    }

    fn now(&self) -> Timestamp {
        self.transport.now()
    }

    /// Reads which leases the clients hold; returns when to check again even if nothing is due.
    fn look(&mut self, now: Timestamp) -> Timestamp {
        count(&self.shared.counts.looks);
        self.admit();
        let mut next = Timestamp::MAX;
        for tenant in self.tenants.iter_mut().flatten() {
            let held_count = tenant.ledger.held_count();
            if held_count != tenant.held_count {
                tenant.held_count = held_count;
                // An active client will hold its next lease soon: a thread that checks before half of it is over
                // need not be woken.
                let shortest = tenant.ledger.take_shortest().unwrap_or(1000);
                next = next.min(now + Duration::from_micros(shortest.max(1) * 400));
            }
        }
        self.sync(now);
        next
    }

    /// Adds new clients, and removes those that have ended.
    fn admit(&mut self) {
        let ledger_count = self.shared.ledger_count.load(Ordering::Acquire);
        if ledger_count != self.ledger_count {
            self.ledger_count = ledger_count;
            for ledger in self.shared.ledgers().drain(..) {
                let known = Known { ledger, leases: Vec::new(), held_count: 0, under_way: 0 };
                let free = self.tenants.iter().position(Option::is_none);
                if free.is_none() && self.tenants.len() < LEDGER_COUNT_MAX {
                    self.tenants.push(None);
                }
                let place = free.unwrap_or(self.tenants.len() - 1);
                // The leases of clients that do not fit expire without renewal.
                if let Some(place @ None) = self.tenants.get_mut(place) {
                    *place = Some(known);
                }
            }
        }
        for place in &mut self.tenants {
            let Some(tenant) = place.as_mut().filter(|tenant| tenant.is_gone()) else { continue };
            for lease in &mut tenant.leases {
                lease.let_go(&mut self.owner);
            }
            *place = None;
        }
    }

    /// Compares the known leases with the ledgers.
    fn sync(&mut self, now: Timestamp) {
        let is_serving = self.shared.is_serving;
        for tenant in self.tenants.iter_mut().flatten() {
            let used = tenant.ledger.used();
            if tenant.leases.len() < usize::from(used) {
                tenant.leases.resize(usize::from(used), KnownLease::default());
            }
            for (index, known) in (0..used).zip(&mut tenant.leases) {
                match tenant.ledger.read(index) {
                    None => {
                        known.let_go(&mut self.owner);
                        *known = KnownLease::default();
                    }
                    Some((version, entry)) => {
                        if version != known.version || known.entry.is_none() {
                            known.let_go(&mut self.owner);
                            *known = KnownLease { version, ..KnownLease::default() };
                        }
                        known.entry = Some(entry);
                        known.is_over |= entry.expires_at <= now && !known.is_busy;
                        // It may have expired long before it was abandoned.
                        if known.is_over && entry.is_abandoned {
                            tenant.ledger.give_back(index, version);
                        }
                        if known.is_over || entry.is_ending || entry.is_abandoned {
                            known.let_go(&mut self.owner);
                        } else if is_serving && known.held_until != entry.expires_at {
                            known.hold(&mut self.owner, now, index, &tenant.ledger);
                        }
                    }
                }
            }
        }
    }

    /// Starts the operations that are due.
    fn act(&mut self, now: Timestamp) {
        for (tenant, known) in (0_u64..).zip(&mut self.tenants) {
            let Some(known) = known else { continue };
            for (slot, lease) in (0_u64..).zip(&mut known.leases) {
                let Some(entry) = lease.entry.filter(|_| lease.due_at() <= now) else { continue };
                let Entry { pointer, length, epoch, granted_ms, .. } = entry;
                let operation = if entry.is_abandoned {
                    Operation::Abort { pointer, length, epoch }
                } else {
                    Operation::Renew { pointer, length, epoch, lease_ms: granted_ms }
                };
                let token = tenant << 48 | slot << 32 | u64::from(lease.version);
                match self.requester.start_until(now, operation, token, entry.expires_at) {
                    Ok(_) => {
                        lease.is_busy = true;
                        known.under_way += 1;
                    }
                    Err(_) => lease.not_before = now + RETRY,
                }
            }
        }
    }

    /// Publishes when the thread checks next, and checks once more: a client that saw the previous
    /// value may have relied on it. It may be a new client.
    fn promise(&mut self, look_at: Timestamp, stop_at: Option<Timestamp>) -> Timestamp {
        let mut until = self.due(look_at).min(stop_at.unwrap_or(Timestamp::MAX));
        loop {
            self.shared.next_look.store(until.as_nanos(), Ordering::Relaxed);
            fence(Ordering::SeqCst);
            if self.shared.stop.load(Ordering::SeqCst) != stop_at.is_some() {
                return Timestamp::default();
            }
            let now = self.now();
            self.admit();
            self.sync(now);
            let due = self.due(until);
            if due >= until {
                return until;
            }
            until = due;
        }
    }

    /// The first moment at which something is due, at most `until`.
    fn due(&self, until: Timestamp) -> Timestamp {
        let leases = self.tenants.iter().flatten().flat_map(|tenant| &tenant.leases);
        let first = leases.map(KnownLease::due_at).min().unwrap_or(Timestamp::MAX);
        let timer = self.requester.poll_timeout().unwrap_or(Timestamp::MAX);
        let waiting = self.owner.poll_timeout().unwrap_or(Timestamp::MAX);
        until.min(first).min(timer).min(waiting)
    }

    /// Sleeps until datagrams arrive, the thread is woken, or the deadline; handles what arrived.
    fn wait(&mut self, until: Timestamp) -> Result<(), String> {
        let now = self.now();
        let until = until.min(now + SLEEP).as_nanos().max(1);
        let wait = Wait::until(Timestamp::from_nanos(until));
        let received = self.transport.receive(wait).map_err(|error| error.to_string())?;
        // From here on a client need not wake this thread: it checks before it sleeps.
        self.shared.next_look.store(0, Ordering::Relaxed);
        let now = self.now();
        if received > 0 {
            // A redirected request is about a recent lease, perhaps the first one of its client.
            self.admit();
            self.sync(now);
        }
        for index in 0..received {
            self.take(now, index);
        }
        self.requester.handle_timeout(now);
        self.owner.handle_timeout(now);
        let has_waiters = self.owner.waiting_count() > 0;
        self.shared.release_matters.store(has_waiters, Ordering::Relaxed);
        while let Some(completion) = self.requester.poll_completion() {
            self.settle(now, &completion);
        }
        Ok(())
    }

    /// Handles one datagram.
    fn take(&mut self, now: Timestamp, index: usize) {
        let incoming = self.transport.incoming(index);
        let datagram = Datagram::parse(incoming.source, incoming.destination, incoming.payload);
        let counts = &self.shared.counts;
        match datagram {
            Ok(datagram) if datagram.is_reply() && incoming.source_port == UDP_PORT => {
                self.requester.handle_datagram(now, &datagram, &mut NoMemory);
            }
            Ok(datagram) if !datagram.is_reply() && self.shared.is_serving => {
                count(&counts.requests);
                let port = incoming.source_port;
                let is_server = &self.is_server;
                if let Some(notice) = self.owner.handle_datagram(now, port, &datagram, is_server) {
                    count(&counts.notices);
                    self.shared.subscribers.notify(notice);
                }
            }
            _ => count(&counts.malformed),
        }
    }

    /// Records the end of a RENEW or an ABORT.
    fn settle(&mut self, now: Timestamp, completion: &Completion) {
        let token = completion.token;
        let part = |shift: u32, mask: u64| usize::try_from(token >> shift & mask).unwrap_or(0);
        let counts = &self.shared.counts;
        let Some(Some(tenant)) = self.tenants.get_mut(part(48, 0xffff)) else { return };
        tenant.under_way = tenant.under_way.saturating_sub(1);
        let slot = part(32, 0xffff);
        let Some(lease) = tenant.leases.get_mut(slot) else { return };
        let version = u32::try_from(token & u64::from(u32::MAX)).unwrap_or(0);
        let Some(entry) = lease.entry.as_mut().filter(|_| lease.version == version) else {
            // The guard ended meanwhile, so the result of its RENEW does not matter.
            return;
        };
        lease.is_busy = false;
        let index = u16::try_from(slot).unwrap_or(u16::MAX);
        match &completion.result {
            Ok(Output::Leased(renewed)) if renewed.epoch == entry.epoch => {
                count(&counts.renewed);
                entry.expires_at = renewed.expires_at;
                tenant.ledger.note_renewal(index, version, renewed.expires_at);
            }
            Ok(Output::Done) => count(&counts.aborted),
            Err(Failure::LeaseLost { .. }) => {
                count(&counts.lost);
                lease.is_over = true;
            }
            Ok(_) | Err(_) => {
                count(&counts.renew_failed);
                lease.not_before = now + RETRY;
                lease.is_over = entry.expires_at <= now;
            }
        }
        // The operation that ended may have been a RENEW from before the lease was abandoned.
        let is_settled = lease.is_over || matches!(&completion.result, Ok(Output::Done));
        if entry.is_abandoned && is_settled {
            lease.is_over = true;
            tenant.ledger.give_back(index, version);
        }
    }

    fn flush(&mut self, now: Timestamp) {
        while let Some(transmit) = self.requester.poll_transmit(now, &NoMemory) {
            let origin = transmit.origin;
            match self.transport.transmit(&[outgoing(&transmit)]) {
                // A datagram that a busy carrier did not take is sent again when its timer expires.
                Ok(_) | Err(TransmitError::Socket(_)) => {}
                Err(
                    TransmitError::Refused { .. }
                    | TransmitError::TooLarge { .. }
                    | TransmitError::Unreachable { .. },
                ) => self.requester.transmit_refused(now, origin, 1),
            }
        }
        // Published before the responses are sent, so that a client that has a response finds it counted.
        self.shared.counts.show(self.owner.counters());
        while let Some(reply) = self.owner.poll_transmit() {
            let reply = Outgoing {
                source: reply.source,
                destination: reply.destination,
                destination_port: reply.destination_port,
                header: reply.head,
                data: reply.data,
            };
            // A client without a response retries at the home.
            if matches!(self.transport.transmit(&[reply]), Ok(1..)) {
                count(&self.shared.counts.answered);
            }
        }
    }

    /// Whether an ABORT is still to be sent, or its response is still missing.
    fn is_needed(&self) -> bool {
        let leases = self.tenants.iter().flatten().flat_map(|tenant| &tenant.leases);
        let mut open = leases.filter_map(|lease| lease.entry.filter(|_| !lease.is_over));
        open.any(|entry| entry.is_abandoned)
    }

    /// Closes the sessions, so that the servers need not wait until they expire.
    fn close_sessions(&mut self) {
        let now = self.now();
        self.requester.cancel_all();
        let servers: Vec<_> = self.requester.open_servers().collect();
        for server in servers {
            // No thread waits for the response: a session that is not closed expires.
            let _ = self.requester.start(now, Operation::Close { server }, 0);
        }
        self.flush(now);
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_protocol::owner::Event;
    use bluebridge_transport::{
        Wakeable as _,
        memory::{Hub, MemoryTransport},
    };
    use bluebridge_wire::{
        ArenaGeneration, Command, EndpointAddress, Header, Location, NodeId, Pointer, Space, Tag,
        WireCommand,
        address::{Fields, NODE_PREFIX_LEN},
        header::HEADER_BYTES,
        seal,
    };

    use super::*;
    use crate::service::{Counts, Subscribers, ledger::Writer};

    const SPACE: Space = Space(1);

    fn prefix(node: NodeId) -> ipnet::Ipv6Net {
        let first = Fields { space: SPACE, node, command: 0, tag: 0, location: 0 };
        ipnet::Ipv6Net::new(first.to_ipv6(), NODE_PREFIX_LEN).expect("a prefix")
    }

    /// Sends a READ of the page to its home's address, which the switch may redirect.
    fn ask(carrier: &mut MemoryTransport, page: Pointer, number: u64) {
        let source = EndpointAddress::new(SPACE, NodeId(1001), 5).to_ipv6();
        let destination = Fields {
            space: page.space,
            node: page.node,
            command: WireCommand::request(Command::Read, false).bits(),
            tag: page.tag.0,
            location: page.location.bits(),
        };
        let destination = destination.to_ipv6();
        let header = Header {
            target: page.to_ipv6(),
            session: 7,
            sequence: number,
            length: 100,
            ..Header::default()
        };
        let mut head = [0; HEADER_BYTES];
        header.emit(&mut head, 0);
        seal(source, destination, &mut head, &[]);
        let request =
            Outgoing { source, destination, destination_port: UDP_PORT, header: &head, data: &[] };
        assert_eq!(carrier.transmit(&[request]).expect("it is attached"), 1);
    }

    /// An endpoint's service without its thread, and the switch's side of it.
    fn endpoint(hub: &Hub, owner: NodeId, home: NodeId) -> Serving<MemoryTransport> {
        // The switch forwards requests for the home to the owner.
        let mut carrier = hub.attach(UDP_PORT, &[prefix(owner), prefix(home)]).expect("room");
        let shared = Arc::new(Shared {
            waker: carrier.waker().expect("a queue has one"),
            next_look: 0.into(),
            release_matters: false.into(),
            stop: false.into(),
            is_serving: true,
            failure: std::sync::OnceLock::new(),
            ledgers: std::sync::Mutex::default(),
            ledger_count: 0.into(),
            subscribers: Subscribers::default(),
            counts: Counts::default(),
        });
        Serving::new(&EndpointConfig::new(SPACE, owner, 1), carrier, shared, Box::new(|_| false))
    }

    fn page_of(home: NodeId) -> Pointer {
        let location = Location::new(ArenaGeneration::default(), 4096).expect("small");
        Pointer { space: SPACE, node: home, tag: Tag(3), location }
    }

    /// A client comes and gets a lease of 10 s; it does not wake the thread.
    fn first_lease(serving: &Serving<MemoryTransport>, page: Pointer) -> (Writer, Entry) {
        let ledger = Arc::new(Ledger::new(1));
        serving.shared.add(&ledger);
        let expires_at = serving.now() + Duration::from_secs(10);
        let lease = Entry {
            pointer: page,
            length: 100,
            epoch: 1,
            expires_at,
            granted_ms: 10_000,
            renew_until: expires_at,
            policy: OwnerPolicy::Reject,
            is_ending: false,
            is_abandoned: false,
        };
        let mut writer = Writer::new(ledger);
        assert!(writer.hold(&lease, &[]).is_some(), "there is room");
        (writer, lease)
    }

    #[test]
    fn the_first_lease_of_a_new_client_is_known_when_a_request_about_it_comes() {
        let (home, owner) = (NodeId(1), NodeId(1000));
        let hub = Hub::new(16);
        let mut serving = endpoint(&hub, owner, home);
        let mut rival = hub.attach(4242, &[prefix(NodeId(1001))]).expect("room");
        let page = page_of(home);
        let _ = serving.look(serving.now());
        ask(&mut rival, page, 1);
        serving.wait(Timestamp::default()).expect("the carrier works");
        assert_eq!(serving.owner.counters().of(Event::NotOwner), 1, "nothing is leased");

        // The thread sleeps while the client registers and gets a lease, and a request for its page arrives.
        let _lease = first_lease(&serving, page);
        ask(&mut rival, page, 2);
        serving.wait(Timestamp::default()).expect("the carrier works");
        assert_eq!(serving.owner.counters().of(Event::Reject), 1, "{:?}", serving.owner.counters());
    }

    #[test]
    fn the_first_lease_of_a_client_that_comes_while_the_thread_goes_to_sleep_is_renewed() {
        let home = NodeId(1);
        let mut serving = endpoint(&Hub::new(16), NodeId(1000), home);
        let look_at = serving.look(serving.now());
        assert_eq!(look_at, Timestamp::MAX, "no client has a lease");
        // The client sees that the thread is awake, and relies on it to check once more.
        assert_eq!(serving.shared.next_look.load(Ordering::Relaxed), 0);
        let (_writer, lease) = first_lease(&serving, page_of(home));
        assert_eq!(serving.promise(look_at, None), lease.renew_at(), "it sleeps no longer");
    }

    #[test]
    fn there_is_room_for_as_many_clients_as_16_bits_can_name() {
        let mut serving = endpoint(&Hub::new(16), NodeId(1000), NodeId(1));
        let known = Arc::new(Ledger::new(1));
        let tenant = |ledger| Known { ledger, leases: Vec::new(), held_count: 0, under_way: 0 };
        serving.tenants.resize_with(LEDGER_COUNT_MAX, || Some(tenant(Arc::clone(&known))));
        let [late, next] = [(); 2].map(|()| Arc::new(Ledger::new(1)));
        serving.shared.add(&late);
        let _ = serving.look(serving.now());
        assert_eq!(serving.tenants.len(), 1 << 16, "the last one has no place");
        assert_eq!(Arc::strong_count(&late), 1);
        serving.tenants[5] = None;
        serving.shared.add(&next);
        let _ = serving.look(serving.now());
        let place = serving.tenants[5].as_ref().expect("it is taken");
        assert!(Arc::ptr_eq(&place.ledger, &next));
    }
}
