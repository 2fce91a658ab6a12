//! Misuse of leases: each has its own error, and changes nothing.
//!
//! A guard is used up by its COMMIT, so two COMMITs of one lease, or another's, come from raw
//! datagrams here.

use std::thread;

use bluebridge::{LeaseEnd, UpdateOptions, UpdateRequest};
use bluebridge_wire::{Command, Flags, WireCommand};

use super::*;

const FORGET: &str = "forget the pointer";
const CORRECT: &str = "correct the pointer or the length";

/// A session without a library around it.
struct Raw {
    carrier: MemoryTransport,
    node: u16,
    session: u64,
    sequence: u64,
}

impl Raw {
    fn open(rack: &HubRack, node: u16) -> Self {
        let carrier = rack.attach(SPACE, node);
        let mut raw = Self { carrier, node, session: 0, sequence: 99 };
        let open = Header { length: 4096, credit: 16, ..Header::default() };
        let (status, header) = raw.ask(Command::Open, super::raw(NODE, 0), open, &[]);
        assert_eq!(status, Status::Ok);
        (raw.session, raw.sequence) = (header.session, 0);
        raw
    }

    /// Sends one datagram with the next number; the status of its response, and the header.
    fn ask(
        &mut self,
        command: Command,
        target: Fields,
        header: Header,
        data: &[u8],
    ) -> (Status, Header) {
        self.sequence += 1;
        let source = EndpointAddress::new(SPACE, NodeId(self.node), 7).to_ipv6();
        let header = Header {
            target: target.to_ipv6(),
            session: self.session,
            incarnation: 1,
            sequence: self.sequence,
            ..header
        };
        let mut head = [0; HEADER_BYTES];
        header.emit(&mut head, 0);
        let byte = WireCommand::request(command, true).bits();
        let destination = Fields { command: byte, ..target }.to_ipv6();
        seal(source, destination, &mut head, data);
        let outgoing =
            Outgoing { source, destination, destination_port: UDP_PORT, header: &head, data };
        assert_eq!(self.carrier.transmit(&[outgoing]).expect("the carrier works"), 1);
        let deadline = self.carrier.now() + Duration::from_secs(5);
        while self.carrier.now() < deadline {
            if self.carrier.receive(Wait::until(deadline)).expect("the carrier works") > 0 {
                let incoming = self.carrier.incoming(0);
                let parsed =
                    Datagram::parse(incoming.source, incoming.destination, incoming.payload);
                let reply = parsed.expect("a reply is well formed");
                return (Status::from_code(reply.from.tag).expect("known"), reply.header);
            }
        }
        panic!("{command} got no response");
    }

    /// Sends a request about 8 bytes of a lease; the error says how it was lost if it was.
    fn about(&mut self, command: Command, at: Pointer, epoch: u64) -> Result<u64, LeaseEnd> {
        let target = Fields::unpack(at.to_ipv6()).expect("a pointer");
        let header = Header { length: 8, lease_epoch: epoch, ..Header::default() };
        let data: &[u8] = if command == Command::Commit { &[0xbd; 8] } else { &[] };
        match self.ask(command, target, header, data) {
            (Status::Ok, header) => Ok(header.lease_epoch),
            (Status::LeaseLost, header) => {
                Err(LeaseEnd::from_code(header.detail).expect("a known end"))
            }
            (status, _) => panic!("{command}: {status:?}"),
        }
    }
}

fn lasting(millis: u64) -> UpdateOptions {
    UpdateOptions { lease: Some(Duration::from_millis(millis)), ..UpdateOptions::default() }
}

#[track_caller]
fn assert_lost(result: Result<(), Error>, expected: LeaseEnd) {
    let error = result.expect_err("the lease is over");
    assert!(matches!(error, Error::LeaseLost { how, .. } if how == expected), "{error:?}");
    assert_advice(&error, Fault::You, "update again with the present contents");
}

/// Calls again if the deadline fell into the last attempt, whose response is then not known.
#[track_caller]
fn assert_busy<T: core::fmt::Debug>(mut call: impl FnMut() -> Result<T, Error>, expected: NodeId) {
    let is_in_flight =
        |error: &Error| error.is_outcome_unknown() || matches!(error, Error::TimedOut { .. });
    let mut errors = (0..50).map(|_| call().expect_err("it is leased"));
    let error = errors.find(|error| !is_in_flight(error)).expect("an attempt gets its response");
    assert!(matches!(error, Error::Busy { owner, .. } if owner == expected), "{error:?}");
    assert_advice(&error, Fault::You, "try again later");
}

/// The error of an update that must not be granted.
#[track_caller]
fn refused<T: Transport>(client: &mut Client<T>, at: Pointer, length: usize) -> Error {
    let mut buffer = vec![0; length];
    match client.try_update(at, &mut buffer) {
        Ok(_) => panic!("an update of {at} was granted"),
        Err(error) => error,
    }
}

#[test]
fn a_lease_is_ended_once() {
    let mut bench = Bench::new();
    let (base, bytes) = (bench.base(), bench.bytes.clone());
    let mut raw = Raw::open(&bench.rack, 1010);
    for ends in [Command::Commit, Command::Abort] {
        let end = if ends == Command::Commit { LeaseEnd::Committed } else { LeaseEnd::Aborted };
        let epoch = raw.about(Command::Update, base, 0).expect("no client has it");
        assert_eq!(raw.about(ends, base, epoch), Ok(epoch));
        // The present contents must not change, also if the first COMMIT wrote them.
        bench.client.write(base, &bytes).expect("it is free");
        for again in [Command::Commit, Command::Abort, Command::Renew] {
            assert_eq!(raw.about(again, base, epoch), Err(end), "{again} after {ends}");
        }
        bench.assert_nothing_changed();
    }
}

#[test]
fn only_the_owner_ends_or_renews_a_lease() {
    let mut bench = Bench::new();
    let base = bench.base();
    let mut owner = Raw::open(&bench.rack, 1011);
    let mut other = Raw::open(&bench.rack, 1012);
    let epoch = owner.about(Command::Update, base, 0).expect("no client has it");
    for command in [Command::Commit, Command::Abort, Command::Renew] {
        assert_eq!(other.about(command, base, epoch), Err(LeaseEnd::Unknown), "{command}");
        for wrong in [0, epoch + 1, u64::MAX >> 16] {
            assert_eq!(owner.about(command, base, wrong), Err(LeaseEnd::Unknown), "{command}");
        }
        let elsewhere = base.checked_add(PAGE as u64).expect("inside");
        assert_eq!(owner.about(command, elsewhere, epoch), Err(LeaseEnd::Unknown), "{command}");
    }
    assert_eq!(owner.about(Command::Renew, base, epoch), Ok(epoch), "it is still held");
    assert_eq!(owner.about(Command::Abort, base, epoch), Ok(epoch));
    bench.assert_nothing_changed();
}

#[test]
fn an_expired_lease_is_lost_however_it_is_used() {
    let mut bench = Bench::new();
    let base = bench.base();
    let mut raw = Raw::open(&bench.rack, 1013);
    for command in [Command::Commit, Command::Abort, Command::Renew] {
        let target = Fields::unpack(base.to_ipv6()).expect("a pointer");
        let header = Header { length: 8, lease_remaining_ms: 1, ..Header::default() };
        let (status, granted) = raw.ask(Command::Update, target, header, &[]);
        assert_eq!(status, Status::Ok);
        thread::sleep(Duration::from_millis(5));
        let epoch = granted.lease_epoch;
        assert_eq!(raw.about(command, base, epoch), Err(LeaseEnd::Expired), "{command}");
    }
    // By the library, without a service that renews: since then no client has it, or another one has.
    let mut buffer = [0; 8];
    let mut update = bench.client.update_with(base, &mut buffer, lasting(1)).expect("it is free");
    update.fill(0xbd);
    thread::sleep(Duration::from_millis(5));
    assert_lost(update.commit(), LeaseEnd::Expired);
    let mut update = bench.client.update_with(base, &mut buffer, lasting(1)).expect("it is free");
    update.fill(0xbd);
    thread::sleep(Duration::from_millis(5));
    let epoch = raw.about(Command::Update, base, 0).expect("it ran out");
    assert_lost(update.commit(), LeaseEnd::LeasedAgain);
    assert_eq!(raw.about(Command::Abort, base, epoch), Ok(epoch));
    bench.assert_nothing_changed();
}

#[test]
fn no_other_request_reaches_leased_memory() {
    let mut bench = Bench::new();
    let (base, region) = (bench.base(), bench.region);
    let mut other = bench.rack.client(SPACE, 1014);
    other.set_deadline(Duration::from_millis(60));
    let mut buffer = [0; 8];
    let options = lasting(10_000);
    let mut update = bench.client.update_with(base, &mut buffer, options).expect("it is free");
    let owner = NodeId(1000);
    assert_busy(|| other.read(base, &mut [0; 8]), owner);
    assert_busy(|| other.write(base, &[1; 8]), owner);
    assert_busy(|| other.zero(base, 8), owner);
    assert_busy(|| other.fetch_add(base, 1), owner);
    assert_busy(|| other.compare_swap(base, 0, 1), owner);
    assert_busy(|| other.delete(region), owner);
    assert_busy::<()>(|| Err(refused(&mut other, base, 8)), owner);
    // Its own other calls are no exception: they cannot bypass the guard.
    update.client().set_deadline(Duration::from_millis(60));
    assert_busy(|| update.client().write(base, &[1; 8]), owner);
    assert_busy(|| update.client().delete(region), owner);
    assert_busy::<()>(|| Err(refused(update.client(), base, 8)), owner);
    update.abort().expect("it is still held");
    bench.client.set_deadline(Duration::from_secs(5));
    bench.assert_nothing_changed();
}

#[test]
fn updates_of_freed_and_foreign_memory_are_refused() {
    let mut bench = Bench::new();
    let gone = bench.client.create(PAGE as u64).expect("there is room");
    bench.client.delete(gone).expect("it is ours");
    let base = bench.base();
    let far = base.checked_add(1 << 30).expect("inside of 48 bits");
    let stale = Pointer { tag: bluebridge_wire::Tag(base.tag.0.wrapping_sub(1)), ..base };
    let end = bench.region.at(2 * PAGE as u64 - 1).expect("the last byte");
    let client = &mut bench.client;
    for (at, length, status, advice) in [
        (gone.base(), 8, Status::NotAllocated, FORGET),
        (far, 8, Status::OutOfRange, CORRECT),
        (stale, 8, Status::StaleTag, FORGET),
        // One byte beyond the allocation: all or none.
        (end, 2, Status::NotAllocated, FORGET),
        (base, 3 * PAGE, Status::NotAllocated, FORGET),
    ] {
        println!("{length} bytes at {at}");
        assert_refused::<()>(Err(refused(client, at, length)), status, Fault::You, advice);
    }
    let foreign = Pointer { space: OTHER_SPACE, ..base };
    let error = refused(client, foreign, 8);
    assert!(matches!(error, Error::WrongSpace), "{error:?}");
    assert_advice(&error, Fault::You, "belongs to another space");
    let mut other = bench.rack.client(OTHER_SPACE, 1015);
    let guessed = refused(&mut other, foreign, 8);
    assert_refused::<()>(Err(guessed), Status::WrongSpace, Fault::You, "another space");
    // Nothing of what was refused is leased.
    let mut buffer = vec![0; 2 * PAGE];
    bench
        .client
        .try_update(base, &mut buffer)
        .expect("no client has it")
        .abort()
        .expect("it is held");
    bench.assert_nothing_changed();
}

#[test]
fn updates_of_no_length_beyond_all_bounds_or_twice_are_refused() {
    let mut bench = Bench::new();
    let base = bench.base();
    let error = refused(&mut bench.client, base, 0);
    assert!(matches!(error, Error::Length), "{error:?}");
    assert_advice(&error, Fault::You, "length is zero, or larger");
    let (mut low, mut high) = ([0; 8], [0; 8]);
    let inside = base.checked_add(100).expect("inside");
    let mut ranges = [UpdateRequest::new(base, &mut low), UpdateRequest::new(inside, &mut high)];
    let error = match bench.client.update_many(&mut ranges, UpdateOptions::default()) {
        Ok(_) => panic!("one page was leased twice"),
        Err(error) => error,
    };
    assert!(matches!(error, Error::SharedPage { pointer } if pointer == base), "{error:?}");
    assert_advice(&error, Fault::You, "make them one range");
    // What the library never sends: no length, more than a line, across one, with data.
    let mut raw = Raw::open(&bench.rack, 1016);
    let target = Fields::unpack(base.to_ipv6()).expect("a pointer");
    let commands = [Command::Update, Command::Commit, Command::Abort, Command::Renew];
    for command in commands {
        for length in [0, 32_769, u32::MAX] {
            let header = Header { length, ..Header::default() };
            let (status, _) = raw.ask(command, target, header, &[]);
            assert_eq!(status, Status::BadLength, "{command} of {length}");
        }
        let in_line = target.location % 32_768;
        let across = Fields { location: target.location + 32_768 - in_line - 4, ..target };
        let (status, _) = raw.ask(command, across, Header { length: 8, ..Header::default() }, &[]);
        assert_eq!(status, Status::BadLength, "{command} across lines");
        let header = Header { length: 8, ..Header::default() };
        let wrong: &[u8] = &[1; 9];
        let (status, _) = raw.ask(command, target, header, wrong);
        assert_eq!(status, Status::Malformed, "{command} with 9 bytes");
    }
    let none = Header { length: 8, flags: Flags::SELECTIVE, ..Header::default() };
    assert_eq!(raw.ask(Command::Update, target, none, &[]).0, Status::Malformed);
    bench.assert_nothing_changed();
}

#[test]
fn an_update_needs_no_alignment_and_changes_its_bytes_alone() {
    let mut bench = Bench::new();
    let odd = bench.base().checked_add(4093).expect("inside");
    let mut buffer = [0; 7];
    let mut update = bench.client.update(odd, &mut buffer).expect("no client has it");
    update.fill(0xee);
    update.commit().expect("it is held");
    bench.bytes[4093..4100].fill(0xee);
    bench.assert_nothing_changed();
}
