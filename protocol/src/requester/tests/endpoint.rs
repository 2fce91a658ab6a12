//! Servers that accept requests for memory at their endpoint addresses: where requests go, and that only
//! the session's server gives final replies.

use core::{net::Ipv6Addr, time::Duration};

use bluebridge_wire::{Command, EndpointAddress, Flags, NodeId, Pointer, Status};
use proptest::prelude::*;

use super::super::progress::{ASTRAY_TIME, SILENT_TIME};
use super::super::{Counters, Event, Failure, Operation, Output, Server};
use super::bench::{Bench, HOME, OTHER, PIECE, Reply, SESSION, Sent, pattern, pointer};

const OTHER_SERVER: Server = Server { node: OTHER, shard: 0 };

/// How often a request was returned to its server.
fn returned(bench: &Bench) -> u64 {
    bench.count(Event::AstrayReturn)
}

fn at_pointer(sent: &Sent) -> Ipv6Addr {
    let pointer = Pointer::from_ipv6(sent.header.target).expect("a request for memory");
    pointer.destination(sent.command, sent.home).via(sent.node).to_ipv6()
}

fn at_endpoint(sent: &Sent, node: NodeId) -> Ipv6Addr {
    let pointer = Pointer::from_ipv6(sent.header.target).expect("a request for memory");
    EndpointAddress::for_memory(node, pointer).destination(sent.command, true)
}

fn is_first_try(sent: &Sent) {
    assert_eq!((sent.attempt(), sent.node, sent.destination), (0, HOME, at_pointer(sent)));
}

fn refusals() -> impl Iterator<Item = Status> {
    Status::ALL.iter().copied().filter(|status| !status.is_ok())
}

/// One operation of each kind that is about memory, and how often its first try is sent.
fn operations() -> [(Operation, usize); 11] {
    let (pointer, length, epoch) = (pointer(0), 64, 3);
    let long = u32::from(PIECE) + 1;
    [
        (Operation::Abort { pointer, length, epoch }, 1),
        (Operation::Commit { pointer, length, epoch }, 1),
        (Operation::CompareSwap { pointer, expected: 1, new: 2 }, 1),
        (Operation::Delete { pointer, pages: 0 }, 1),
        (Operation::FetchAdd { pointer, addend: 1 }, 1),
        (Operation::Read { pointer, length: 8192 }, 1),
        (Operation::ReadStale { pointer, length }, 1),
        (Operation::Renew { pointer, length, epoch, lease_ms: 0 }, 1),
        (Operation::Update { pointer, length, lease_ms: 100, wait: true }, 1),
        (Operation::Write { pointer, length: long }, 2),
        (Operation::Zero { pointer, length }, 1),
    ]
}

fn start(bench: &mut Bench, operation: Operation, token: u64) {
    let length = operation.range().map_or(8, |(_, length)| length);
    bench.memory.0.insert(token, pattern(length as usize));
    bench.start(operation, token);
}

/// The server executes an operation and replies to one of its datagrams.
fn execute(bench: &mut Bench, operation: Operation, sent: &Sent) {
    execute_by(bench, operation, sent, HOME);
}

fn execute_by(bench: &mut Bench, operation: Operation, sent: &Sent, node: NodeId) {
    let to = |status| Reply::to(sent, status).by_node(node);
    let piece = |start, data: &[u8]| Reply::piece(sent, start, 1, data).by_node(node);
    let lease = |header: &mut bluebridge_wire::Header| {
        (header.node, header.lease_epoch, header.lease_remaining_ms) =
            (super::bench::CLIENT.0, 3, 90);
    };
    match operation {
        Operation::Read { .. } => {
            for start in [0, 1400, 2800, 4096, 5496, 6896] {
                let page_end = if start < 4096 { 4096 } else { 8192 };
                let data = vec![1; (page_end - start).min(usize::from(PIECE))];
                bench.reply(&piece(start, &data));
            }
        }
        Operation::ReadStale { .. } => bench.reply(&piece(0, &[1; 64])),
        Operation::Update { .. } => bench.reply(&piece(0, &[1; 64]).with(lease)),
        Operation::Renew { .. } => bench.reply(&to(Status::Ok).with(lease)),
        Operation::CompareSwap { .. } | Operation::FetchAdd { .. } => {
            bench.reply(&to(Status::Ok).with_data(&[0; 8]));
        }
        _ => bench.reply(&to(Status::Ok)),
    }
    assert!(bench.completed().result.is_ok(), "{operation:?}");
}

pub(super) fn retransmissions_go_to_the_endpoint() -> Counters {
    let mut bench = Bench::open_at_endpoint();
    for (operation, count) in operations() {
        start(&mut bench, operation, 1);
        let first = bench.sent();
        assert_eq!(first.len(), count);
        first.iter().for_each(is_first_try);
        let mut last = None;
        for attempt in 1..4 {
            let again = bench.pass_to_sent().remove(0);
            assert_eq!(again.destination, at_endpoint(&again, HOME), "{operation:?}");
            assert_eq!((again.attempt(), again.header.session), (attempt, SESSION));
            assert_eq!(again.header.sequence, first[0].header.sequence);
            assert_eq!(again.header.target, first[0].header.target, "the pointer");
            last = Some(again);
        }
        execute(&mut bench, operation, &last.expect("it was sent again"));
    }

    // The pieces that fill gaps of a train, too, of which only the last has another attempt.
    bench.write(0, 4096, 2);
    bench.sent().iter().for_each(is_first_try);
    let probe = bench.pass_to_sent().remove(0);
    bench.reply(&Reply::to(&probe, Status::Incomplete).with(|header| header.detail = 1));
    let missing = bench.sent();
    assert_eq!(missing.iter().map(Sent::attempt).collect::<Vec<_>>(), [0, 2]);
    missing.iter().for_each(|sent| assert_eq!(sent.destination, at_endpoint(sent, HOME)));
    bench.reply(&Reply::to(&missing[1], Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));

    // After OVERLOADED the number is the same; after BUSY it is another, so that is a first try.
    bench.read(0, 10, 3);
    let first = bench.sent_one();
    bench.reply(&Reply::to(&first, Status::Overloaded));
    let again = bench.pass_to_sent().remove(0);
    assert_eq!(again.destination, at_endpoint(&again, HOME));
    bench.reply(&Reply::to(&again, Status::Busy));
    let first = bench.pass_to_sent().remove(0);
    is_first_try(&first);
    assert!(first.home);
    bench.reply(&Reply::piece(&first, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn a_moved_range_is_requested_at_the_endpoint() -> Counters {
    let mut bench = Bench::open_at_endpoint();
    bench.open_session(OTHER_SERVER, SESSION + 1);
    bench.write(0, 100, 1);
    let first = bench.sent_one();
    is_first_try(&first);
    bench.reply(&Reply::to(&first, Status::Moved).with(|header| header.node = OTHER.0));
    let via = bench.sent_one();
    assert_eq!((via.attempt(), via.destination), (0, at_endpoint(&via, OTHER)));
    assert_eq!(via.header.target, pointer(0).to_ipv6());
    // It cannot have gone astray: another node's refusal is no reason to send it again.
    for status in refusals() {
        bench.reply(&Reply::to(&via, status).by_node(HOME));
    }
    bench.sent_nothing();
    assert_eq!(returned(&bench), 0);
    let again = bench.pass_to_sent().remove(0);
    assert_eq!((again.attempt(), again.destination), (1, at_endpoint(&again, OTHER)));
    bench.reply(&Reply::to(&again, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));

    // A remembered move is followed in the same way, also by a request of one page without the home bit.
    bench.read(4096, 10, 2);
    let via = bench.sent_one();
    assert_eq!((via.attempt(), via.destination), (0, at_endpoint(&via, OTHER)));
    bench.reply(&Reply::piece(&via, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

/// A bench that knows that a line is at the other server, and does not avoid the pointer.
fn bench_with_moved_line() -> Bench {
    let mut bench = Bench::open_at_endpoint();
    bench.open_session(OTHER_SERVER, SESSION + 1);
    bench.read(0, 64, 1);
    let first = bench.sent_one();
    is_first_try(&first);
    // An entry led it to the other server, and the home says the same.
    bench.reply(&Reply::to(&first, Status::NoSession).by_node(OTHER));
    let again = bench.sent_one();
    assert_eq!(again.destination, at_endpoint(&again, HOME));
    bench.reply(&Reply::to(&again, Status::Moved).with(|header| header.node = OTHER.0));
    let first = bench.sent_one();
    is_first_try_with_other(&first);
    bench.reply(&Reply::piece(&first, 0, 1, &[1; 64]).by_node(OTHER));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench
}

/// To the pointer, in the session with the server that has the line.
fn is_first_try_with_other(sent: &Sent) {
    is_first_try(sent);
    assert_eq!(sent.header.session, SESSION + 1);
}

fn is_at_endpoint_of_other(sent: &Sent, attempt: u8) {
    assert_eq!((sent.attempt(), sent.destination), (attempt, at_endpoint(sent, OTHER)));
    assert_eq!(sent.header.session, SESSION + 1);
}

pub(super) fn moved_pages_are_requested_at_the_pointer_when_it_leads_there() -> Counters {
    let mut bench = bench_with_moved_line();
    for (operation, count) in operations() {
        start(&mut bench, operation, 1);
        let first = bench.sent();
        assert_eq!(first.len(), count);
        if let Operation::Delete { .. } = operation {
            // Only the home frees it, and the pointer leads to the other server.
            assert_eq!(first[0].destination, at_endpoint(&first[0], HOME));
            assert_eq!((first[0].header.session, first[0].attempt()), (SESSION, 0));
            execute_by(&mut bench, operation, &first[0], HOME);
            continue;
        }
        first.iter().for_each(is_first_try_with_other);
        execute_by(&mut bench, operation, first.last().expect("it was sent"), OTHER);
    }
    bench.end()
}

pub(super) fn who_has_the_first_page_frees_what_the_home_has_lost() -> Counters {
    let mut bench = Bench::open_at_endpoint();
    bench.open_session(OTHER_SERVER, SESSION + 1);
    bench.start(Operation::Delete { pointer: pointer(0), pages: 3 }, 1);
    let first = bench.sent_one();
    is_first_try(&first);
    assert!(!first.header.flags.contains(Flags::ORPHAN));
    bench.reply(&Reply::to(&first, Status::Moved).with(|header| header.node = OTHER.0));
    let orphan = bench.sent_one();
    is_at_endpoint_of_other(&orphan, 0);
    assert!(orphan.header.flags.contains(Flags::ORPHAN) && orphan.header.length == 3);
    // It does not have the page any more: the home knows where it is.
    bench.reply(&Reply::to(&orphan, Status::NoAuthority).by_node(OTHER));
    let again = bench.pass_to_sent().remove(0);
    assert_eq!(again.header.session, SESSION);
    bench.reply(&Reply::to(&again, Status::Moved).with(|header| header.node = OTHER.0));
    let orphan = bench.sent_one();
    assert!(orphan.header.flags.contains(Flags::ORPHAN));
    bench.reply(&Reply::to(&orphan, Status::Ok).by_node(OTHER).with(|header| header.length = 3));
    assert_eq!(bench.completed().result, Ok(Output::Freed(3)));
    bench.end()
}

pub(super) fn a_part_is_freed_where_it_is() -> Counters {
    let mut bench = Bench::open_at_endpoint();
    bench.open_session(OTHER_SERVER, SESSION + 1);
    let part = |at| Operation::FreePart { at, pointer: pointer(4096), pages: 2 };
    // Of a server that is known, the answer is final, whatever it is.
    for (status, expected) in [
        (Status::Ok, Ok(Output::Freed(2))),
        (Status::Moved, Err(Failure::Refused { status: Status::Moved, node: OTHER })),
        (Status::NoAuthority, Err(Failure::Refused { status: Status::NoAuthority, node: OTHER })),
    ] {
        bench.start(part(Some(OTHER_SERVER)), 1);
        let sent = bench.sent_one();
        is_at_endpoint_of_other(&sent, 0);
        assert!(sent.header.flags.contains(Flags::PART) && sent.header.length == 2);
        let reply = Reply::to(&sent, status).by_node(OTHER);
        bench.reply(&reply.with(|header| (header.length, header.node) = (2, HOME.0)));
        assert_eq!(bench.completed().result, expected);
    }
    bench.start(part(Some(OTHER_SERVER)), 1);
    let sent = bench.sent_one();
    bench.reply(&Reply::to(&sent, Status::Busy).by_node(OTHER));
    assert!(matches!(bench.completed().result, Err(Failure::Busy { .. })));
    // Otherwise the home leads to it, and says what is lost.
    bench.start(part(None), 1);
    let sent = bench.sent_one();
    is_first_try(&sent);
    bench.reply(&Reply::to(&sent, Status::Moved).with(|header| header.node = OTHER.0));
    let sent = bench.sent_one();
    is_at_endpoint_of_other(&sent, 0);
    assert!(sent.header.flags.contains(Flags::PART) && !sent.header.flags.contains(Flags::ORPHAN));
    bench.reply(&Reply::to(&sent, Status::Ok).by_node(OTHER).with(|header| header.length = 1));
    assert_eq!(bench.completed().result, Ok(Output::Freed(1)));
    bench.start(part(None), 1);
    let sent = bench.sent_one();
    bench.reply(&Reply::to(&sent, Status::StaleGeneration));
    let lost = Failure::Refused { status: Status::StaleGeneration, node: HOME };
    assert_eq!(bench.completed().result, Err(lost));
    bench.end()
}

pub(super) fn a_pointer_that_leads_elsewhere_is_avoided_for_a_time() -> Counters {
    let mut bench = bench_with_moved_line();
    let write = |bench: &mut Bench| {
        bench.write(0, 100, 1);
        bench.sent_one()
    };
    let done = |bench: &mut Bench, sent: &Sent| {
        bench.reply(&Reply::to(sent, Status::Ok).by_node(OTHER));
        assert_eq!(bench.completed().result, Ok(Output::Done));
    };
    // The home, or another one, does not know the session: nothing was executed there.
    for node in [HOME, NodeId(9)] {
        let first = write(&mut bench);
        is_first_try_with_other(&first);
        let before = (bench.now, returned(&bench));
        bench.reply(&Reply::to(&first, Status::NoSession).by_node(node));
        let again = bench.sent_one();
        assert_eq!((bench.now, returned(&bench)), (before.0, before.1 + 1), "at once");
        is_at_endpoint_of_other(&again, 1);
        assert_eq!(again.header.sequence, first.header.sequence, "the same number");
        done(&mut bench, &again);
        // Later ones do not pay for it, until the pointer is tried again.
        for _ in 0..3 {
            let first = write(&mut bench);
            is_at_endpoint_of_other(&first, 0);
            done(&mut bench, &first);
        }
        bench.pass(ASTRAY_TIME);
    }
    // What the home says to a first try shows where its pointer leads.
    bench.read(0x8000, 64, 2);
    let first = bench.sent_one();
    is_first_try(&first);
    bench.reply(&Reply::to(&first, Status::Moved).with(|header| header.node = OTHER.0));
    let via = bench.sent_one();
    is_at_endpoint_of_other(&via, 0);
    bench.reply(&Reply::piece(&via, 0, 1, &[1; 64]).by_node(OTHER));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.pass(ASTRAY_TIME);
    // No response at all: a retransmission, and a longer time.
    let first = write(&mut bench);
    is_first_try_with_other(&first);
    let again = bench.pass_to_sent().remove(0);
    is_at_endpoint_of_other(&again, 1);
    done(&mut bench, &again);
    bench.pass(ASTRAY_TIME);
    let first = write(&mut bench);
    is_at_endpoint_of_other(&first, 0);
    done(&mut bench, &first);
    bench.pass(SILENT_TIME);
    let first = write(&mut bench);
    is_first_try_with_other(&first);
    done(&mut bench, &first);
    bench.end()
}

pub(super) fn a_server_without_the_range_is_asked_at_its_endpoint() -> Counters {
    let mut bench = bench_with_moved_line();
    bench.start(Operation::FetchAdd { pointer: pointer(0), addend: 1 }, 1);
    let first = bench.sent_one();
    is_first_try_with_other(&first);
    // It does not look at the session before it says so, and an earlier copy may have been executed.
    let wrong = Reply::to(&first, Status::WrongNode).by_node(OTHER);
    bench.reply(&wrong);
    let again = bench.sent_one();
    is_at_endpoint_of_other(&again, 1);
    assert_eq!(again.header.sequence, first.header.sequence, "the same number");
    bench.reply(&wrong);
    bench.sent_nothing();
    bench.reply(&Reply::to(&again, Status::Ok).by_node(OTHER).with_data(&[0; 8]));
    assert_eq!(bench.completed().result, Ok(Output::Previous(0)));
    bench.pass(ASTRAY_TIME);
    // Said at the endpoint address, it is the answer: the line may be at home again.
    bench.read(0, 64, 1);
    let first = bench.sent_one();
    is_first_try_with_other(&first);
    bench.reply(&Reply::to(&first, Status::WrongNode).by_node(OTHER));
    let again = bench.sent_one();
    bench.reply(&Reply::to(&again, Status::WrongNode).by_node(OTHER));
    let first = bench.sent_one();
    is_first_try(&first);
    assert_eq!(first.header.session, SESSION);
    bench.reply(&Reply::piece(&first, 0, 1, &[1; 64]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn a_refusal_of_another_node_is_returned_once() -> Counters {
    let mut bench = Bench::open_at_endpoint();
    let mut count = 0;
    for status in refusals() {
        for (operation, _) in operations() {
            start(&mut bench, operation, 1);
            let first = bench.sent().remove(0);
            is_first_try(&first);
            let before = bench.now;
            let astray = Reply::to(&first, status).by_node(OTHER).with(|header| header.node = 9);
            bench.reply(&astray);
            let again = bench.sent_one();
            assert_eq!(bench.now, before, "at once");
            assert_eq!(again.destination, at_endpoint(&again, HOME), "{status} {operation:?}");
            assert_eq!(again.header.sequence, first.header.sequence, "the same number");
            assert_eq!(again.attempt(), 1);
            count += 1;
            assert_eq!(returned(&bench) + bench.count(Event::RedirectReturn), count);
            // Neither a copy of the refusal nor one of the repetition sends it again.
            bench.reply(&astray);
            bench.reply(&Reply::to(&again, status).by_node(OTHER));
            bench.reply(&Reply::to(&again, status).by_node(NodeId(5)));
            bench.sent_nothing();
            bench.completed_nothing();
            execute(&mut bench, operation, &again);
        }
    }
    assert!(bench.count(Event::RedirectReturn) > 0, "an owner may refuse, too");
    assert!(returned(&bench) > bench.count(Event::RedirectReturn));
    assert_eq!(bench.count(Event::Retransmit), 0, "no timer was needed");
    bench.end()
}

pub(super) fn what_another_node_refuses_has_no_effect() -> Counters {
    let mut bench = Bench::open_at_endpoint();
    bench.write(0, 100, 1);
    let first = bench.sent_one();
    // Another node executes nothing: its OK is neither believed nor a sign that something went astray.
    bench.reply(&Reply::to(&first, Status::Ok).by_node(OTHER));
    bench.sent_nothing();
    bench.completed_nothing();
    bench.reply(&Reply::to(&first, Status::NoSession).by_node(OTHER));
    let again = bench.sent_one();
    bench.reply(&Reply::to(&again, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.count(Event::SessionLost), 0, "the session is another server's");

    bench.read(0, 100, 2);
    let first = bench.sent_one();
    assert_eq!(first.header.session, SESSION);
    bench.reply(&Reply::to(&first, Status::Moved).by_node(OTHER).with(|header| header.node = 9));
    let again = bench.sent_one();
    bench.reply(&Reply::piece(&again, 0, 1, &[1; 100]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.count(Event::MovedFollow), 0);
    // The credit of another node is not this session's, and its statuses are not counted.
    bench.read(0, 100, 3);
    let first = bench.sent_one();
    is_first_try(&first);
    bench.reply(
        &Reply::to(&first, Status::NoAuthority).by_node(OTHER).with(|header| header.credit = 1),
    );
    let again = bench.sent_one();
    bench.read(0x8000, 8192, 4);
    let large = bench.sent_one();
    assert_eq!(large.header.length, 8192, "there is credit for it");
    assert_eq!(bench.requester.counters().of_status(Status::NoAuthority), 0);
    // Only the server's own refusal is final.
    bench.reply(&Reply::to(&again, Status::NoAuthority));
    bench.reply(&Reply::to(&large, Status::StaleTag));
    bench.reply(&Reply::to(&large, Status::StaleTag).with(|header| header.offset = 4096));
    assert!(bench.completed().result.is_err() && bench.completed().result.is_err());
    bench.end()
}

pub(super) fn the_target_of_a_redirect_still_serves() -> Counters {
    let mut bench = Bench::open_at_endpoint();
    let stale = |sent: &Sent| {
        Reply::piece(sent, 0, 3, &[7; 64])
            .by_node(OTHER)
            .with(|header| header.flags = header.flags.with(Flags::LAST_COMMITTED))
    };
    bench.memory.0.insert(1, vec![0; 64]);
    bench.start(Operation::ReadStale { pointer: pointer(0), length: 64 }, 1);
    let first = bench.sent_one();
    is_first_try(&first);
    bench.reply(&stale(&first));
    assert_eq!(bench.completed().result, Ok(Output::Read { stale: true }));

    // What was sent to the endpoint was not redirected: an owner's reply to it is none.
    bench.start(Operation::ReadStale { pointer: pointer(0), length: 64 }, 1);
    bench.sent_one();
    let again = bench.pass_to_sent().remove(0);
    bench.reply(&stale(&again));
    bench.completed_nothing();
    bench.reply(&Reply::piece(&again, 0, 1, &[1; 64]));
    assert_eq!(bench.completed().result, Ok(Output::Read { stale: false }));

    // An owner lets a READ wait. That ends with NOT_OWNER, or if the next copy goes astray.
    for (status, event) in
        [(Status::NotOwner, Event::RedirectReturn), (Status::Moved, Event::AstrayReturn)]
    {
        bench.read(0, 64, 2);
        let first = bench.sent_one();
        let waits = Reply::to(&first, Status::Busy).by_node(OTHER).with(|header| {
            header.flags = header.flags.with(Flags::QUEUED);
            (header.node, header.detail) = (OTHER.0, 100);
        });
        bench.reply(&waits);
        bench.sent_nothing();
        bench.pass(Duration::from_millis(30));
        bench.sent_nothing();
        let before = bench.count(event);
        bench.reply(&Reply::to(&first, status).by_node(OTHER));
        assert_eq!(bench.count(event), before + 1);
        let again = bench.sent_one();
        assert_eq!(again.destination, at_endpoint(&again, HOME));
        bench.reply(&Reply::piece(&again, 0, 1, &[1; 64]));
        assert_eq!(bench.completed().result, Ok(Output::Done));
    }
    // No redirect forwards a request with the home bit, so BUSY to it says that it went astray.
    bench.read(0, 8192, 3);
    let first = bench.sent_one();
    assert!(first.home);
    let before = returned(&bench);
    let busy = Reply::to(&first, Status::Busy).by_node(OTHER);
    bench.reply(&busy.with(|header| header.flags = header.flags.with(Flags::QUEUED)));
    assert_eq!(returned(&bench), before + 1);
    let again = bench.sent_one();
    execute(&mut bench, Operation::Read { pointer: pointer(0), length: 8192 }, &again);
    bench.end()
}

pub(super) fn the_shard_is_the_pointers() -> Counters {
    let mut bench = Bench::open_at_endpoint();
    let shard = 0x1c;
    bench.open_session(Server { node: HOME, shard }, SESSION + 2);
    let pointer = pointer(u64::from(shard) << 40);
    bench.start(Operation::FetchAdd { pointer, addend: 1 }, 1);
    let first = bench.sent_one();
    assert_eq!(first.header.session, SESSION + 2);
    is_first_try(&first);
    bench.reply(&Reply::to(&first, Status::Moved).by_node(OTHER));
    let again = bench.sent_one();
    assert_eq!(again.destination.segments()[4..], [0x8000, 0x1c00, 0, 0], "bit 63 and byte 10");
    assert_eq!(again.header.target, pointer.to_ipv6());
    bench.reply(&Reply::to(&again, Status::Ok).with_data(&[0; 8]));
    assert_eq!(bench.completed().result, Ok(Output::Previous(0)));
    bench.end()
}

pub(super) fn a_server_without_the_flag_is_asked_at_the_pointer() -> Counters {
    let mut bench = Bench::open();
    bench.open_session(OTHER_SERVER, SESSION + 1);
    bench.write(0, 100, 1);
    let first = bench.sent_one();
    let refused_by_owner = [Status::Busy, Status::NotOwner];
    for status in refusals().filter(|status| !refused_by_owner.contains(status)) {
        bench.reply(&Reply::to(&first, status).by_node(OTHER));
    }
    bench.sent_nothing();
    let again = bench.pass_to_sent().remove(0);
    assert_eq!((again.attempt(), again.destination), (1, at_pointer(&again)));
    bench.reply(&Reply::to(&again, Status::Moved).with(|header| header.node = OTHER.0));
    let via = bench.sent_one();
    assert_eq!((via.node, via.destination), (OTHER, at_pointer(&via)));
    bench.reply(&Reply::to(&via, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(returned(&bench), 0);
    bench.end()
}

pub(super) fn each_session_has_its_own_flag() -> Counters {
    let mut bench = Bench::open_at_endpoint();
    bench.read(0, 64, 1);
    let first = bench.sent_one();
    // The next process of the server is an older one.
    bench.at_endpoint = false;
    bench.reply(&Reply::to(&first, Status::NoSession));
    let open = bench.pass_to_sent().remove(0);
    assert_eq!((open.command, open.header.session), (Command::Open, 0));
    bench.accept(&open, SESSION + 5);
    is_first_try(&bench.sent_one());
    let again = bench.pass_to_sent().remove(0);
    assert_eq!((again.attempt(), again.destination), (1, at_pointer(&again)));
    bench.reply(&Reply::piece(&again, 0, 1, &[1; 64]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// Another node refuses one of the datagrams that were sent.
    Astray { which: usize, status: Status, flags: u16, node: u16 },
    /// Time passes, in microseconds.
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let statuses: Vec<_> = refusals().collect();
    let astray = (any::<usize>(), prop::sample::select(statuses), 0_u16..128, any::<u16>());
    prop_oneof![
        3 => astray.prop_map(|(which, status, flags, node)| Step::Astray { which, status, flags, node }),
        2 => (0_u64..40_000).prop_map(Step::Pass),
    ]
}

proptest! {
    /// However many refusals of other nodes arrive, an operation ends as its server says; each number
    /// is returned at most once; and only its first try goes to the pointer. Be the server the home or not.
    #[test]
    fn only_the_sessions_server_ends_an_operation(
        kind in 0..operations().len(),
        has_moved in any::<bool>(),
        steps in prop::collection::vec(step(), 1..40),
    ) {
        let mut bench = if has_moved { bench_with_moved_line() } else { Bench::open_at_endpoint() };
        let returned_before = returned(&bench);
        let (operation, count) = operations()[kind];
        // Only the home frees an allocation, whoever has the page.
        let is_at_other = has_moved && !matches!(operation, Operation::Delete { .. });
        let (server, other) = if is_at_other { (OTHER, HOME) } else { (HOME, OTHER) };
        start(&mut bench, operation, 1);
        let mut sent = bench.sent();
        prop_assert_eq!(sent.len(), count);
        if is_at_other == has_moved {
            sent.iter().for_each(is_first_try);
        } else {
            prop_assert_eq!(sent[0].destination, at_endpoint(&sent[0], HOME));
        }
        for step in steps {
            match step {
                Step::Astray { which, status, flags, node } => {
                    let sent = &sent[which % sent.len()];
                    // So does the server itself at the pointer, if it has nothing of the home any more.
                    let is_stale =
                        is_at_other && status == Status::WrongNode && sent.attempt() == 0;
                    let reply = Reply::to(sent, status).by_node(if is_stale { server } else { other });
                    bench.reply(&reply.with(|header| {
                        // The attempt of a trusted reply is right.
                        let flags = if is_stale { 0 } else { flags };
                        header.flags = Flags::from_bits(header.flags.bits() ^ flags);
                        header.node = node;
                    }));
                }
                Step::Pass(micros) => bench.pass(Duration::from_micros(micros)),
            }
            for again in bench.sent() {
                prop_assert_eq!(again.destination, at_endpoint(&again, server));
                prop_assert_eq!(again.header.sequence, sent[0].header.sequence);
                sent.push(again);
            }
            bench.completed_nothing();
        }
        let returned = returned(&bench) - returned_before;
        prop_assert!(returned + bench.count(Event::RedirectReturn) <= 1);
        let last = sent.last().expect("it was sent").clone();
        execute_by(&mut bench, operation, &last, server);
        bench.end();
    }
}
