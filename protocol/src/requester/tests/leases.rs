use core::time::Duration;

use bluebridge_wire::{Command, Flags, LeaseEnd, NodeId, SESSION_WINDOW, Status};

use super::super::{Counters, Event, Failure, Lease, Operation, Output};
use super::bench::{
    Bench, CLIENT, HOME, OTHER, PIECE, Reply, SERVER, SERVER_INCARNATION, SESSION, Sent, pattern,
    pointer,
};
use crate::Timestamp;

const P: usize = PIECE as usize;
const EPOCH: u64 = 0x15_0000_0007;
const LEASE: u16 = 640;

fn ms(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// When a lease of [`LEASE`] ends that was requested at a moment: less 1 ms and a 64th.
fn expiry(sent: Timestamp) -> Timestamp {
    sent + ms(640 - 10 - 1)
}

fn update(bench: &mut Bench, offset: u64, length: u32, token: u64) {
    bench.memory.0.insert(token, vec![0; length as usize]);
    let pointer = pointer(offset);
    bench.start(Operation::Update { pointer, length, lease_ms: LEASE, wait: true }, token);
}

fn commit(bench: &mut Bench, length: u32, token: u64) {
    bench.memory.0.insert(token, pattern(length as usize));
    bench.start(Operation::Commit { pointer: pointer(0), length, epoch: EPOCH }, token);
}

/// A piece of a grant to this endpoint.
fn grant(sent: &Sent, offset: usize, data: &[u8]) -> Reply {
    Reply::piece(sent, offset, 4, data).with(|header| {
        (header.node, header.lease_epoch, header.lease_remaining_ms) = (CLIENT.0, EPOCH, LEASE);
    })
}

/// BUSY of the home or an owner that lets the request wait.
fn queued(sent: &Sent, detail: u32) -> Reply {
    Reply::to(sent, Status::Busy).with(|header| {
        header.flags = header.flags.with(Flags::QUEUED);
        (header.node, header.lease_epoch, header.lease_remaining_ms) = (99, 12, 700);
        header.detail = detail;
    })
}

fn lost(sent: &Sent, how: LeaseEnd) -> Reply {
    Reply::to(sent, Status::LeaseLost).with(|header| header.detail = how.code())
}

fn leased(expires_at: Timestamp) -> Result<Output, Failure> {
    Ok(Output::Leased(Lease { epoch: EPOCH, expires_at, granted_ms: LEASE }))
}

pub(super) fn an_update_is_joined_and_committed() -> Counters {
    let mut bench = Bench::open();
    let bytes = pattern(4096 + 100);
    update(&mut bench, 0, 4196, 1);
    let sent = bench.now;
    let request = bench.sent_one();
    assert_eq!((request.command, request.header.length), (Command::Update, 4196));
    assert_eq!(request.header.lease_remaining_ms, LEASE);
    assert_eq!(request.header.flags, Flags::QUEUED);
    assert!(request.home, "more than one page");
    for start in [0, 2 * P, 4096] {
        let end = (start + P).min(if start < 4096 { 4096 } else { 4196 });
        bench.reply(&grant(&request, start, &bytes[start..end]));
    }
    bench.completed_nothing();
    let again = bench.pass_to_sent().remove(0);
    let sent_again = bench.now;
    assert!(sent_again > sent);
    assert_eq!((again.header.sequence, again.header.detail), (request.header.sequence, 0b10));
    assert_eq!(again.header.flags, Flags::QUEUED.with(Flags::SELECTIVE).with_attempt(1));
    // The home sends the remaining time: less than at first, but for the later attempt.
    bench
        .reply(&grant(&again, P, &bytes[P..2 * P]).with(|header| header.lease_remaining_ms -= 200));
    assert_eq!(bench.completed().result, leased(expiry(sent)), "the latest end applies");
    assert_eq!(bench.memory.0[&1], bytes);

    commit(&mut bench, 3000, 2);
    let train = bench.sent();
    assert_eq!(train.len(), 3);
    for sent in &train {
        assert_eq!((sent.command, sent.header.lease_epoch), (Command::Commit, EPOCH));
        assert!(sent.home, "it bypasses redirects");
    }
    let probe = bench.pass_to_sent().remove(0);
    bench.reply(&Reply::to(&probe, Status::Incomplete).with(|header| header.detail = 0b101));
    let missing = bench.sent_one();
    assert_eq!(usize::from(missing.header.offset), P);
    bench.reply(&Reply::to(&missing, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));

    // Applied as a whole: it cannot end page by page.
    commit(&mut bench, 5000, 3);
    let request = bench.sent().pop().expect("a train");
    bench.reply(&Reply::to(&request, Status::Partial));
    assert_eq!(bench.failure(), Failure::OutcomeUnknown { node: HOME, responding: true });
    bench.end()
}

pub(super) fn a_lease_counts_from_the_attempt_of_its_reply() -> Counters {
    let mut bench = Bench::open();
    update(&mut bench, 0, 10, 1);
    let first = bench.now;
    let request = bench.sent_one();
    bench.pass_to_sent();
    bench.pass_to_sent();
    bench.reply(&grant(&request, 0, &pattern(10)));
    assert_eq!(bench.completed().result, leased(expiry(first)));

    update(&mut bench, 0, 10, 2);
    bench.sent_one();
    let again = bench.pass_to_sent().remove(0);
    let second = bench.now;
    bench.now = second + Duration::from_micros(500);
    bench.reply(&grant(&again, 0, &pattern(10)));
    assert_eq!(bench.completed().result, leased(expiry(second)));

    // A lease shorter than the margin has expired at once.
    update(&mut bench, 0, 10, 3);
    let request = bench.sent_one();
    bench.reply(&grant(&request, 0, &pattern(10)).with(|header| header.lease_remaining_ms = 1));
    let Ok(Output::Leased(lease)) = bench.completed().result else { panic!("it was granted") };
    assert_eq!(lease.expires_at, bench.now);
    bench.end()
}

pub(super) fn a_grant_to_another_endpoint_is_ignored() -> Counters {
    let mut bench = Bench::open();
    update(&mut bench, 0, 4096, 1);
    let request = bench.sent_one();
    let bytes = pattern(4096);
    let piece = |start: usize| grant(&request, start, &bytes[start..(start + P).min(4096)]);
    bench.reply(&piece(0).with(|header| header.lease_epoch = 0));
    bench.reply(&piece(0).with(|header| header.node = 99));
    bench.reply(&piece(0).with(|header| header.flags = header.flags.with(Flags::LAST_COMMITTED)));
    bench.reply(&piece(0));
    bench.reply(&piece(P).with(|header| header.lease_epoch += 1));
    assert_eq!(bench.count(Event::ReplyViolation), 4);
    // A queued reply after the grant is stale.
    bench.reply(&queued(&request, 50));
    assert_eq!(bench.count(Event::ReplyStale), 1);
    bench.reply(&piece(P));
    bench.reply(&piece(2 * P));
    assert_eq!(bench.completed().result, leased(expiry(bench.now)));
    assert_eq!(bench.memory.0[&1], bytes);
    bench.end()
}

pub(super) fn an_update_waits_at_the_home() -> Counters {
    let mut bench = Bench::open();
    let trip = bench.requester.round_trip(SERVER);
    update(&mut bench, 0, 32768, 1);
    let request = bench.sent_one();
    bench.reply(&queued(&request, 40));
    let sent_at = bench.now;
    assert_eq!(bench.requester.outstanding_pages, 0, "a waiting request holds no credit");
    let repeat = bench.pass_to_sent().remove(0);
    assert_eq!(bench.now - sent_at, ms(20), "early enough to be repeated once more");
    assert_eq!(repeat.header.sequence, request.header.sequence);
    assert!(repeat.home && repeat.attempt() == 1);
    assert_eq!(bench.count(Event::QueueRepeat), 1);
    // It is lost; the next one gets a reply, and the reply to the first one is stale by then.
    let again = bench.pass_to_sent().remove(0);
    assert!(bench.now - sent_at < ms(40));
    bench.reply(&queued(&repeat, 40));
    assert_eq!(bench.count(Event::ReplyStale), 1);
    let repeated_at = bench.now;
    bench.reply(&queued(&again, 40));
    bench.pass(ms(15));
    // The earlier lease ended: pieces arrive for the last attempt that the home received.
    let bytes = pattern(32768);
    for page in 0..8 {
        for start in [page * 4096, page * 4096 + P, page * 4096 + 2 * P] {
            let end = (start + P).min((page + 1) * 4096);
            bench.reply(&grant(&again, start, &bytes[start..end]));
        }
    }
    assert_eq!(bench.completed().result, leased(expiry(repeated_at)));
    assert_eq!(bench.memory.0[&1], bytes);
    assert_eq!(bench.requester.round_trip(SERVER), trip, "waiting is no sample");
    bench.end()
}

pub(super) fn a_long_wait_keeps_its_place_and_its_time() -> Counters {
    let mut bench = Bench::open();
    update(&mut bench, 0, 10, 1);
    let mut request = bench.sent_one();
    let number = request.header.sequence;
    let mut attempts = Vec::new();
    let mut before = bench.now;
    for _ in 0..40 {
        bench.reply(&queued(&request, 100));
        before = bench.now;
        request = bench.pass_to_sent().remove(0);
        assert_eq!((request.header.sequence, bench.now - before), (number, ms(50)));
        attempts.push(request.attempt());
    }
    assert_eq!(attempts[..16], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 1]);
    let old = grant(&request, 0, &pattern(10))
        .with(|header| header.flags = Flags::default().with_attempt(attempts[38]));
    bench.pass(ms(1));
    bench.reply(&old);
    // It was granted after the BUSY reply to the attempt before.
    assert_eq!(bench.completed().result, leased(expiry(before)));
    assert_eq!(bench.count(Event::Queue), 40);
    bench.end()
}

pub(super) fn a_read_waits_for_the_page_that_is_leased() -> Counters {
    let mut bench = Bench::open();
    let bytes = pattern(8192);
    bench.read(0, 8192, 1);
    let request = bench.sent_one();
    assert_eq!(request.header.flags, Flags::QUEUED);
    for start in [0, P, 2 * P] {
        bench.reply(&Reply::piece(&request, start, 1, &bytes[start..(start + P).min(4096)]));
    }
    let about = |sent: &Sent, offset| queued(sent, 30).with(|header| header.offset = offset);
    bench.reply(&about(&request, 0));
    assert_eq!(bench.count(Event::ReplyStale), 1, "that page was read");
    bench.reply(&about(&request, 4096));
    let repeat = bench.pass_to_sent().remove(0);
    assert_eq!(repeat.header.detail, 0b11_1000, "the missing pieces");
    bench.reply(&about(&repeat, 4096));
    for start in [4096, 4096 + P, 4096 + 2 * P] {
        bench.reply(&Reply::piece(&repeat, start, 2, &bytes[start..(start + P).min(8192)]));
    }
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.memory.0[&1], bytes);

    // The place in the queue is lost: a new number, after a pause.
    bench.read(0, 10, 2);
    let request = bench.sent_one();
    bench.reply(&queued(&request, 30));
    let repeat = bench.pass_to_sent().remove(0);
    bench.reply(&Reply::to(&repeat, Status::Busy).with(|header| header.node = 99));
    bench.sent_nothing();
    let anew = bench.pass_to_sent().remove(0);
    assert_eq!(anew.header.sequence, request.header.sequence + 1);
    bench.reply(&queued(&anew, 0));
    let soon = bench.now;
    let repeat = bench.pass_to_sent().remove(0);
    assert_eq!(bench.now - soon, ms(1), "no shorter than a retransmission");
    bench.reply(&queued(&repeat, u32::MAX));
    let soon = bench.now;
    let repeat = bench.pass_to_sent().remove(0);
    assert_eq!(bench.now - soon, ms(250), "a lost reply must be detected");
    bench.reply(&Reply::piece(&repeat, 0, 2, &bytes[..10]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn waiting_ends_at_the_deadline() -> Counters {
    let mut bench = Bench::open();
    let begin = bench.now;
    update(&mut bench, 0, 10, 1);
    let result = loop {
        for request in bench.sent() {
            bench.reply(&queued(&request, 100));
        }
        match bench.requester.poll_completion() {
            Some(completion) => break completion.result,
            None => bench.pass_to_timer(),
        }
    };
    let busy = Failure::Busy { owner: NodeId(99), epoch: 12, remaining_ms: 700 };
    assert_eq!(result, Err(busy));
    assert_eq!(bench.now - begin, Duration::from_secs(5));

    // A request that must not wait fails at once; but not because of an owner, whose state may be
    // old.
    bench.memory.0.insert(2, vec![0; 10]);
    let operation = Operation::Update { pointer: pointer(0), length: 10, lease_ms: 0, wait: false };
    bench.start(operation, 2);
    let request = bench.sent_one();
    assert!(!request.home && !request.header.flags.contains(Flags::QUEUED));
    bench.reply(&queued(&request, 100).by_node(OTHER));
    let home = bench.sent_one();
    assert!(home.home && home.header.sequence == request.header.sequence);
    bench.reply(&queued(&home, 100).with(|header| header.flags = Flags::default().with_attempt(1)));
    assert_eq!(bench.failure(), busy);
    bench.end()
}

pub(super) fn an_update_is_repeated_if_its_grant_expired() -> Counters {
    let mut bench = Bench::open();
    let bytes = pattern(4096);
    update(&mut bench, 0, 4096, 1);
    let request = bench.sent_one();
    bench.reply(&grant(&request, 0, &bytes[..P]));
    let again = bench.pass_to_sent().remove(0);
    bench.reply(&lost(&again, LeaseEnd::Expired));
    assert_eq!(bench.count(Event::GrantLost), 1);
    bench.sent_nothing();
    let anew = bench.pass_to_sent().remove(0);
    assert_eq!((anew.header.sequence, anew.attempt()), (request.header.sequence + 1, 0));
    for start in [0, P, 2 * P] {
        let piece = grant(&anew, start, &bytes[start..(start + P).min(4096)]);
        bench.reply(&piece.with(|header| header.lease_epoch = EPOCH + 1));
    }
    let Ok(Output::Leased(lease)) = bench.completed().result else { panic!("it was granted") };
    assert_eq!(lease.epoch, EPOCH + 1);

    // An UPDATE without a reply had no permanent effect.
    bench.pass(ms(1));
    update(&mut bench, 0, 10, 2);
    assert_eq!(bench.pass_to_end().result, Err(Failure::Unreachable { node: HOME }));
    bench.end()
}

pub(super) fn a_lease_is_extended_and_ended() -> Counters {
    let mut bench = Bench::open();
    let about = (pointer(100), 8000);
    let renew = Operation::Renew { pointer: about.0, length: about.1, epoch: EPOCH, lease_ms: 640 };
    bench.start(renew, 1);
    let sent = bench.now;
    let request = bench.sent_one();
    assert_eq!((request.command, request.header.length), (Command::Renew, 8000));
    assert_eq!((request.header.lease_epoch, request.header.lease_remaining_ms), (EPOCH, LEASE));
    assert!(request.home && request.data.is_empty());
    let again = bench.pass_to_sent().remove(0);
    assert_eq!(again.header.sequence, request.header.sequence);
    assert_ne!(bench.now, sent);
    let renewed = |sent: &Sent| {
        Reply::to(sent, Status::Ok).with(|header| {
            (header.lease_epoch, header.lease_remaining_ms) = (EPOCH, LEASE);
        })
    };
    // The first attempt may have been executed, and the later one got its reply.
    bench.reply(&renewed(&again));
    assert_eq!(bench.completed().result, leased(expiry(sent)));
    bench.start(renew, 2);
    let request = bench.sent_one();
    bench.reply(&renewed(&request).with(|header| header.lease_epoch = 1));
    assert_eq!(bench.failure(), Failure::Violation { node: HOME });

    let abort = Operation::Abort { pointer: about.0, length: about.1, epoch: EPOCH };
    bench.start(abort, 3);
    let request = bench.sent_one();
    assert_eq!((request.command, request.header.lease_epoch), (Command::Abort, EPOCH));
    assert!(request.home);
    bench.reply(&Reply::to(&request, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    // It had no permanent effect.
    bench.pass(ms(1));
    bench.start(abort, 4);
    assert_eq!(bench.pass_to_end().result, Err(Failure::Unreachable { node: HOME }));

    for how in LeaseEnd::ALL {
        bench.memory.0.insert(5, pattern(8000));
        let commit = Operation::Commit { pointer: about.0, length: about.1, epoch: EPOCH };
        for operation in [renew, abort, commit] {
            bench.start(operation, 5);
            let request = bench.sent().pop().expect("a request");
            let reply = lost(&request, how);
            bench.reply(&reply.with(|header| (header.node, header.lease_epoch) = (99, EPOCH + 5)));
            let owner = (how == LeaseEnd::LeasedAgain).then_some((NodeId(99), EPOCH + 5));
            assert_eq!(bench.failure(), Failure::LeaseLost { node: HOME, how, owner });
        }
    }
    bench.start(abort, 6);
    let request = bench.sent_one();
    bench.reply(&Reply::to(&request, Status::LeaseLost).with(|header| header.detail = 4_000_000));
    let (how, owner) = (LeaseEnd::Unknown, None);
    assert_eq!(bench.failure(), Failure::LeaseLost { node: HOME, how, owner }, "a later version");
    bench.end()
}

pub(super) fn leases_outlive_the_session() -> Counters {
    let mut bench = Bench::open();
    let about = (pointer(0), 10);
    update(&mut bench, 0, 10, 1);
    bench.start(Operation::Abort { pointer: about.0, length: about.1, epoch: EPOCH }, 2);
    let renew = Operation::Renew { pointer: about.0, length: 10, epoch: EPOCH, lease_ms: 640 };
    bench.start(renew, 3);
    commit(&mut bench, 10, 4);
    let sent = bench.sent();
    bench.pass(ms(1));
    // The server was restarted: it may have committed before, which nobody can determine.
    bench.reply(&Reply::to(&sent[0], Status::NoSession).with(|header| header.incarnation += 1));
    let open = bench.sent_one();
    let accept = Reply::to(&open, Status::Ok).with(|header| {
        (header.session, header.length, header.detail) = (SESSION + 1, u32::from(PIECE), 2);
        header.incarnation = SERVER_INCARNATION + 1;
    });
    bench.reply(&accept);
    let completion = bench.completed();
    let unknown = Failure::OutcomeUnknown { node: HOME, responding: true };
    assert_eq!((completion.token, completion.result), (4, Err(unknown)));
    let new_incarnation =
        |reply: Reply| reply.with(|header| header.incarnation = SERVER_INCARNATION + 1);
    for request in bench.sent() {
        assert_eq!(request.header.session, SESSION + 1);
        match request.command {
            Command::Update => bench.reply(&new_incarnation(grant(&request, 0, &pattern(10)))),
            // The one in the lost session was received.
            Command::Abort => bench.reply(&new_incarnation(lost(&request, LeaseEnd::Aborted))),
            command => {
                assert_eq!(command, Command::Renew);
                bench.reply(&new_incarnation(lost(&request, LeaseEnd::Unknown)));
            }
        }
    }
    assert_eq!(bench.completed().result, leased(expiry(bench.now)));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    let (how, owner) = (LeaseEnd::Unknown, None);
    assert_eq!(bench.failure(), Failure::LeaseLost { node: HOME, how, owner });
    bench.end()
}

fn read_stale(bench: &mut Bench, length: u32, token: u64) -> Sent {
    bench.memory.0.insert(token, vec![0; length as usize]);
    bench.start(Operation::ReadStale { pointer: pointer(0), length }, token);
    let request = bench.sent_one();
    assert_eq!((request.command, request.header.flags), (Command::Read, Flags::MAY_BE_STALE));
    assert_eq!(request.header.detail, u32::from(PIECE), "for an owner, which has no session");
    request
}

fn committed(sent: &Sent, start: usize, version: u64, byte: u8) -> Reply {
    let bytes = vec![byte; P.min(4096 - start)];
    Reply::piece(sent, start, version, &bytes)
        .with(|header| header.flags = header.flags.with(Flags::LAST_COMMITTED))
}

pub(super) fn last_committed_contents_are_read() -> Counters {
    let mut bench = Bench::open();
    for (stale, token) in [(false, 1), (true, 2)] {
        let request = read_stale(&mut bench, 100, token);
        let reply = Reply::piece(&request, 0, 7, &[9; 100]);
        let flag = if stale { Flags::LAST_COMMITTED } else { Flags::default() };
        bench.reply(&reply.with(|header| header.flags = flag));
        assert_eq!(bench.completed().result, Ok(Output::Read { stale }));
    }
    // The owner replies, and one of its pieces is lost: the home is contacted for the whole page.
    let request = read_stale(&mut bench, 4096, 3);
    assert!(!request.home);
    bench.reply(&committed(&request, 0, EPOCH, 1).by_node(OTHER));
    bench.reply(&committed(&request, P, EPOCH, 1).by_node(OTHER));
    let again = bench.pass_to_sent().remove(0);
    assert!(again.home && again.header.detail == 0b111, "{again:?}");
    bench.reply(&committed(&request, 2 * P, EPOCH, 1).by_node(OTHER));
    for start in [0, P, 2 * P] {
        bench.reply(&committed(&again, start, 3, 2));
    }
    assert_eq!(bench.completed().result, Ok(Output::Read { stale: true }));
    assert_eq!(bench.memory.0[&3], [2; 4096]);
    // A copy of the request reached the home: never half a page of each.
    let request = read_stale(&mut bench, 4096, 4);
    for start in [0, P] {
        bench.reply(&committed(&request, start, EPOCH, 1).by_node(OTHER));
    }
    bench.reply(&committed(&request, 2 * P, 3, 2));
    bench.reply(&committed(&request, 0, EPOCH, 1).by_node(OTHER));
    assert_eq!(bench.count(Event::PieceOutdated), 1);
    bench.completed_nothing();
    bench.reply(&committed(&request, 0, 3, 2));
    bench.reply(&committed(&request, P, 3, 2));
    assert_eq!(bench.completed().result, Ok(Output::Read { stale: true }));
    assert_eq!(bench.memory.0[&4], [2; 4096]);
    // All of the owner's arrive.
    let request = read_stale(&mut bench, 4096, 5);
    for start in [0, P, 2 * P] {
        bench.reply(&committed(&request, start, EPOCH, 1).by_node(OTHER));
    }
    assert_eq!(bench.completed().result, Ok(Output::Read { stale: true }));
    assert_eq!(bench.memory.0[&5], [1; 4096]);
    // Other READs do not accept it, neither from an owner nor from the home.
    bench.read(0, 100, 6);
    let request = bench.sent_one();
    let stale =
        Reply::piece(&request, 0, 7, &[9; 100]).with(|header| header.flags = Flags::LAST_COMMITTED);
    bench.reply(&stale.clone().by_node(OTHER));
    bench.reply(&stale);
    bench.reply(&Reply::piece(&request, 0, 7, &[8; 100]).by_node(OTHER));
    assert_eq!((bench.count(Event::ReplyUntrusted), bench.count(Event::ReplyViolation)), (3, 1));
    bench.reply(&Reply::piece(&request, 0, 7, &[7; 100]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.memory.0[&6], [7; 100]);
    bench.end()
}

pub(super) fn fresh_contents_are_not_reported_as_stale() -> Counters {
    let mut bench = Bench::open();
    // An owner's pieces are dropped; the home replies after the lease ended.
    let request = read_stale(&mut bench, 4096, 1);
    bench.reply(&committed(&request, 0, EPOCH, 1).by_node(OTHER));
    let again = bench.pass_to_sent().remove(0);
    for start in [0, P, 2 * P] {
        bench.reply(&Reply::piece(&again, start, 3, &vec![2; P.min(4096 - start)]));
    }
    assert_eq!(bench.completed().result, Ok(Output::Read { stale: false }));
    assert_eq!(bench.memory.0[&1], [2; 4096]);
    // The same, when a copy of the request reached the home.
    let request = read_stale(&mut bench, 4096, 2);
    bench.reply(&committed(&request, 0, EPOCH, 1).by_node(OTHER));
    for start in [0, P, 2 * P] {
        bench.reply(&Reply::piece(&request, start, 3, &vec![2; P.min(4096 - start)]));
    }
    assert_eq!(bench.completed().result, Ok(Output::Read { stale: false }));
    // A page's newer version replaces the last committed one; that of another page stays.
    let stale_pages = [false, true];
    for stale in stale_pages {
        let request = read_stale(&mut bench, 8192, 3);
        bench.reply(&committed(&request, 0, 3, 1));
        for page in [4096, 0] {
            for start in [0, P, 2 * P] {
                let bytes = vec![2; P.min(4096 - start)];
                let reply = Reply::piece(&request, page + start, 4, &bytes);
                let flag = Flags::LAST_COMMITTED;
                let is_stale = stale && page == 4096;
                let flags = if is_stale { flag } else { Flags::default() };
                bench.reply(&reply.with(|header| header.flags = flags));
            }
        }
        assert_eq!(bench.completed().result, Ok(Output::Read { stale }));
        assert_eq!(bench.memory.0[&3], [2; 8192]);
    }
    bench.end()
}

pub(super) fn an_owner_lets_a_request_wait() -> Counters {
    let mut bench = Bench::open();
    // It reports when the lease ends.
    update(&mut bench, 0, 10, 1);
    let request = bench.sent_one();
    bench.reply(&queued(&request, 300).by_node(OTHER));
    assert_eq!(bench.requester.outstanding_pages, 0);
    bench.pass(ms(299));
    bench.sent_nothing();
    bench.reply(&queued(&request, 300).by_node(OTHER));
    assert_eq!(bench.count(Event::ReplyStale), 1, "it stated its time before");
    bench.reply(&Reply::to(&request, Status::NotOwner).by_node(OTHER));
    let home = bench.sent_one();
    assert!(home.home && home.header.sequence == request.header.sequence);
    bench.reply(&grant(&home, 0, &pattern(10)));
    assert_eq!(bench.completed().result, leased(expiry(bench.now)));
    // The waiting time is over.
    bench.read(0, 10, 2);
    let request = bench.sent_one();
    let begin = bench.now;
    bench.reply(&queued(&request, 300).by_node(OTHER));
    let home = bench.pass_to_sent().remove(0);
    assert!(home.home && home.header.sequence == request.header.sequence);
    assert_eq!(bench.now - begin, ms(300));
    bench.reply(&queued(&home, 50));
    bench.reply(&Reply::to(&request, Status::NotOwner).by_node(OTHER));
    bench.sent_nothing();
    bench.reply(&Reply::piece(&home, 0, 2, &pattern(10)));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.count(Event::RedirectReturn), 2);
    // If the owner does not release the lease, time is left for the home.
    bench.read(0, 10, 3);
    let request = bench.sent_one();
    let begin = bench.now;
    bench.reply(&queued(&request, u32::MAX).by_node(OTHER));
    let home = bench.pass_to_sent().remove(0);
    assert_eq!(bench.now - begin, ms(2500));
    bench.reply(&Reply::piece(&home, 0, 2, &pattern(10)));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    // A request that cannot wait goes to the home at once.
    bench.start(Operation::FetchAdd { pointer: pointer(0), addend: 1 }, 4);
    let request = bench.sent_one();
    bench.reply(&queued(&request, 300).by_node(OTHER));
    let home = bench.sent_one();
    bench.reply(&Reply::to(&home, Status::Ok).with_data(&[0; 8]));
    assert_eq!(bench.completed().result, Ok(Output::Previous(0)));
    bench.end()
}

pub(super) fn waiting_does_not_use_the_window_up() -> Counters {
    let mut bench = Bench::open();
    update(&mut bench, 0, 10, 1);
    let request = bench.sent_one();
    bench.reply(&queued(&request, 10_000));
    let ping = Operation::Ping { server: SERVER, length: 0 };
    for _ in 1..SESSION_WINDOW {
        bench.start(ping, 2);
        let ping = bench.sent_one();
        bench.reply(&Reply::to(&ping, Status::Ok));
        bench.completed();
    }
    assert_eq!(bench.count(Event::QueueLeave), 0);
    bench.start(ping, 3);
    assert_eq!(bench.count(Event::QueueLeave), 1);
    let ping = bench.sent_one();
    assert_eq!(ping.header.answered_distance, 0, "the number of the waiting request is released");
    bench.reply(&Reply::to(&ping, Status::Ok));
    assert_eq!(bench.completed().token, 3);
    bench.reply(&grant(&request, 0, &pattern(10)));
    bench.completed_nothing();
    let anew = bench.pass_to_sent().remove(0);
    assert_eq!(anew.header.sequence, ping.header.sequence + 1);
    bench.reply(&grant(&anew, 0, &pattern(10)));
    assert_eq!(bench.completed().result, leased(expiry(bench.now)));
    bench.end()
}

pub(super) fn the_longest_lease_time_of_all_pieces_counts() -> Counters {
    let mut bench = Bench::open();
    let bytes = pattern(2 * P);
    update(&mut bench, 0, 2 * PIECE as u32, 1);
    let sent = bench.now;
    let request = bench.sent_one();
    let short = grant(&request, 0, &bytes[..P]).with(|header| header.lease_remaining_ms = 320);
    bench.reply(&short);
    bench.reply(&grant(&request, P, &bytes[P..]));
    assert_eq!(bench.completed().result, leased(expiry(sent)));
    bench.end()
}

pub(super) fn requests_without_page_data_cost_one_page_of_credit() -> Counters {
    let mut bench = Bench::with(|config| config.credit_pages = 3);
    bench.open_session(SERVER, SESSION);
    let (pointer, length) = (pointer(0), 8 * 4096);
    bench.start(Operation::Renew { pointer, length, epoch: EPOCH, lease_ms: 640 }, 1);
    bench.start(Operation::Abort { pointer, length, epoch: EPOCH }, 2);
    let requests = bench.sent();
    let commands: Vec<_> = requests.iter().map(|sent| sent.command).collect();
    assert_eq!(commands, [Command::Renew, Command::Abort], "two of three pages");
    bench.reply(&Reply::to(&requests[0], Status::Ok).with(|header| {
        (header.node, header.lease_epoch, header.lease_remaining_ms) = (CLIENT.0, EPOCH, LEASE);
    }));
    bench.reply(&Reply::to(&requests[1], Status::Ok));
    assert!(bench.completed().result.is_ok() && bench.completed().result.is_ok());
    bench.end()
}
