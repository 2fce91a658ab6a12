use core::time::Duration;

use bluebridge_wire::{Command, Status, Tag};

use super::super::{Counters, Event, Failure, Operation, Output, StartError};
use super::bench::{Bench, HOME, OTHER, PIECE, Reply, SERVER, pointer};

pub(super) fn busy_is_retried_at_the_home() -> Counters {
    let mut bench = Bench::open();
    bench.start(Operation::FetchAdd { pointer: pointer(8), addend: 3 }, 1);
    let mut request = bench.sent_one();
    let mut pauses = Vec::new();
    for _ in 0..10 {
        bench.reply(&Reply::to(&request, Status::Busy).with(|header| header.node = 99));
        bench.sent_nothing();
        let before = bench.now;
        let again = bench.pass_to_sent().remove(0);
        pauses.push(bench.now - before);
        assert_eq!(
            again.header.sequence,
            request.header.sequence + 1,
            "each attempt has its own number"
        );
        assert!(again.home && again.attempt() == 0);
        request = again;
    }
    assert!(pauses[0] <= Duration::from_millis(1), "{pauses:?}");
    assert!(pauses[9] >= Duration::from_millis(50), "{pauses:?}");
    assert!(pauses[9] <= Duration::from_millis(100), "{pauses:?}");
    bench.reply(&Reply::to(&request, Status::Ok).with_data(&5_u64.to_be_bytes()));
    assert_eq!(bench.completed().result, Ok(Output::Previous(5)));
    bench.end()
}

pub(super) fn a_lease_that_lasts_ends_in_busy() -> Counters {
    let mut bench = Bench::open();
    bench.write(0, 10, 1);
    let result = loop {
        for request in bench.sent() {
            bench.reply(&Reply::to(&request, Status::Busy).with(|header| {
                (header.node, header.lease_epoch, header.lease_remaining_ms) = (99, 12, 700);
            }));
        }
        match bench.requester.poll_completion() {
            Some(completion) => break completion.result,
            None => bench.pass_to_timer(),
        }
    };
    let owner = bluebridge_wire::NodeId(99);
    assert_eq!(result, Err(Failure::Busy { owner, epoch: 12, remaining_ms: 700 }));
    bench.end()
}

pub(super) fn overload_is_waited_out() -> Counters {
    let mut bench = Bench::open();
    bench.write(0, 2000, 1);
    let train = bench.sent();
    bench.reply(&Reply::to(&train[1], Status::Overloaded));
    bench.sent_nothing();
    let again = bench.pass_to_sent();
    assert_eq!(again.len(), 2, "the whole train");
    assert_eq!(again[0].header.sequence, train[0].header.sequence, "the same number");
    bench.reply(&Reply::to(&train[1], Status::Overloaded));
    assert_eq!(bench.count(Event::OverloadedRetry), 1, "an old reply changes nothing");
    bench.reply(&Reply::to(&again[1], Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));

    bench.read(0, 10, 2);
    let read = bench.sent_one();
    bench.reply(&Reply::to(&read, Status::Overloaded));
    let refused = Failure::Refused { status: Status::Overloaded, node: HOME };
    assert_eq!(bench.pass_to_end().result, Err(refused));
    bench.end()
}

pub(super) fn a_refusal_is_reported() -> Counters {
    let mut bench = Bench::open();
    for status in Status::ALL.iter().copied() {
        let ends = !matches!(
            status,
            Status::Ok
                | Status::Busy
                | Status::Moved
                | Status::NotOwner
                | Status::NoSession
                | Status::Overloaded
                | Status::Partial
                | Status::Incomplete
                | Status::Expired
                | Status::BeyondWindow
        );
        if !ends {
            continue;
        }
        bench.start(Operation::Delete { pointer: pointer(0), pages: 0 }, 1);
        let request = bench.sent_one();
        bench.reply(&Reply::to(&request, status));
        assert_eq!(bench.failure(), Failure::Refused { status, node: HOME });
        assert_eq!(bench.requester.counters().of_status(status), 1);
    }
    // A status that a server sends before it looks up a recorded reply does not tell the effect of
    // a copy.
    bench.start(Operation::Delete { pointer: pointer(0), pages: 0 }, 1);
    bench.sent();
    let again = bench.pass_to_sent().remove(0);
    bench.reply(&Reply::to(&again, Status::ShuttingDown));
    assert_eq!(bench.failure(), Failure::OutcomeUnknown { node: HOME, responding: true });

    let pointer = pointer(0);
    let foreign = bluebridge_wire::Pointer { space: bluebridge_wire::Space(1), ..pointer };
    let nowhere = bluebridge_wire::Pointer { node: bluebridge_wire::NodeId::ANY, ..pointer };
    let mut start = |operation| bench.try_start(operation, 1).err();
    let read = |pointer, length| Operation::Read { pointer, length };
    assert_eq!(start(read(foreign, 1)), Some(StartError::Space));
    assert_eq!(start(read(nowhere, 1)), Some(StartError::Node(bluebridge_wire::NodeId::ANY)));
    assert_eq!(start(read(pointer, 0)), Some(StartError::Length));
    assert_eq!(start(read(super::bench::pointer(1), 32768)), Some(StartError::Length));
    assert_eq!(start(Operation::Create { server: None, pages: 0 }), Some(StartError::Length));
    assert_eq!(
        start(Operation::AllocWrite { server: None, length: 32769 }),
        Some(StartError::Length)
    );
    assert_eq!(start(Operation::Ping { server: SERVER, length: 65 }), Some(StartError::Length));
    for token in 0..32 {
        bench.read(0, 1, token);
    }
    let other_tag = bluebridge_wire::Pointer { tag: Tag(1), ..pointer };
    assert_eq!(bench.try_start(read(other_tag, 1), 1), Err(StartError::Full));
    for request in bench.sent() {
        bench.reply(&Reply::piece(&request, 0, 1, &[1]));
    }
    assert_eq!(bench.try_start(read(other_tag, 1), 1), Err(StartError::Full), "not yet polled");
    while bench.requester.poll_completion().is_some() {}
    bench.end()
}

pub(super) fn a_redirect_is_referred_back_to_the_home() -> Counters {
    let mut bench = Bench::open();
    bench.start(Operation::FetchAdd { pointer: pointer(0), addend: 1 }, 1);
    let request = bench.sent_one();
    assert!(!request.home);
    bench.reply(&Reply::to(&request, Status::NotOwner).by_node(OTHER));
    let again = bench.sent_one();
    assert_eq!(again.header.sequence, request.header.sequence, "a copy may have reached the home");
    assert!(again.home && again.attempt() == 1);
    bench.reply(&Reply::to(&again, Status::Busy).by_node(OTHER));
    assert_eq!(bench.count(Event::ReplyUntrusted), 1, "no redirect applies");
    bench.reply(&Reply::to(&again, Status::Ok).with_data(&[0; 8]));
    assert_eq!(bench.completed().result, Ok(Output::Previous(0)));
    bench.end()
}

pub(super) fn a_failure_at_the_deadline_reports_what_is_known() -> Counters {
    let mut bench = Bench::new();
    bench.write(0, 10, 1);
    let unreachable = Failure::Unreachable { node: HOME };
    assert_eq!(bench.pass_to_end().result, Err(unreachable), "it was never sent");

    let mut bench = Bench::open();
    bench.pass(Duration::from_secs(1));
    bench.read(0, 10, 1);
    assert_eq!(bench.pass_to_end().result, Err(unreachable));
    bench.write(0, 10, 2);
    let unknown = |responding| Failure::OutcomeUnknown { node: HOME, responding };
    assert_eq!(bench.pass_to_end().result, Err(unknown(false)));
    bench.read(0, 4096, 3);
    bench.write(0, 10, 4);
    let read = bench.sent().remove(0);
    bench.reply(&Reply::piece(&read, 0, 1, &vec![1; usize::from(PIECE)]));
    assert_eq!(bench.pass_to_end().result, Err(Failure::TimedOut { node: HOME }));
    assert_eq!(bench.pass_to_end().result, Err(unknown(true)));
    // The same is known when the deadline is moved forward.
    bench.write(0, 10, 2);
    bench.sent();
    bench.write(0, 10, 3);
    bench.read(0, 10, 4);
    bench.requester.expire_all();
    let ends = (2..=4).map(|_| bench.completed()).map(|end| (end.token, end.result));
    let ends: std::collections::BTreeMap<_, _> = ends.collect();
    assert_eq!(ends[&2], Err(unknown(false)));
    assert_eq!((ends[&3], ends[&4]), (Err(unreachable), Err(unreachable)), "they were not sent");
    assert!(bench.count(Event::Retransmit) > 20, "it was retransmitted");
    // Four times for up to 5 s, every 25 ms.
    assert!(bench.count(Event::Retransmit) < 4 * 200 + 40, "but not too often");
    // Low water passes the numbers of failed operations.
    bench.read(0, 10, 5);
    let last = bench.sent_one();
    assert_eq!(last.header.answered_distance, 0);
    bench.reply(&Reply::piece(&last, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn only_the_oldest_request_is_repeated_often() -> Counters {
    let mut bench = Bench::open();
    let tokens = 1..=3;
    for token in tokens.clone() {
        bench.read(0, 10, token);
    }
    let first = bench.sent();
    assert_eq!(first.len(), 3);
    let repeated = |bench: &mut Bench, time: Duration| {
        let (mut counts, end) = ([0; 3], bench.now + time);
        while bench.now < end {
            for sent in bench.pass_to_sent() {
                let which = first.iter().position(|it| it.header.sequence == sent.header.sequence);
                counts[which.expect("no other request")] += 1;
            }
        }
        counts
    };
    repeated(&mut bench, Duration::from_millis(500));
    let [oldest, second, third] = repeated(&mut bench, Duration::from_secs(1));
    assert!((39..=41).contains(&oldest), "{oldest}");
    assert!((4..=5).contains(&second) && (4..=5).contains(&third), "{second} {third}");
    // When it has its response, the next one is the oldest. A response to the first attempt would say that the network
    // is slow.
    let again = loop {
        let sent = bench.pass_to_sent().remove(0);
        if sent.header.sequence == first[0].header.sequence {
            break sent;
        }
    };
    bench.reply(&Reply::piece(&again, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().token, 1);
    repeated(&mut bench, Duration::from_millis(500));
    let [oldest, second, third] = repeated(&mut bench, Duration::from_secs(1));
    assert!(oldest == 0 && (39..=41).contains(&second), "{oldest} {second}");
    assert!((4..=5).contains(&third), "{third}");
    for (token, sent) in (2..).zip(&first[1..]) {
        // Of these, no attempt but the last one has this number.
        let mut reply = Reply::piece(sent, 0, 1, &[1; 10]);
        reply.header.flags = reply.header.flags.with_attempt(15);
        bench.reply(&reply);
        assert_eq!(bench.completed().token, token);
    }
    // So is an OPEN to a server that lost the session.
    bench.read(0, 10, 4);
    let request = bench.sent_one();
    bench.reply(&Reply::to(&request, Status::NoSession));
    let opens = |bench: &mut Bench| {
        let (mut count, end) = (0, bench.now + Duration::from_secs(1));
        while bench.now < end {
            let sent = bench.pass_to_sent();
            count += sent.iter().filter(|it| it.command == Command::Open).count();
        }
        count
    };
    opens(&mut bench);
    let often = opens(&mut bench);
    assert!((39..=41).contains(&often), "{often}");
    // Of a server that has never responded, nobody knows how far it is.
    let mut bench = Bench::new();
    bench.read(0, 10, 1);
    opens(&mut bench);
    let rarely = opens(&mut bench);
    assert!((4..=5).contains(&rarely), "{rarely}");
    bench.pass_to_end();
    bench.end()
}

pub(super) fn a_slow_network_is_measured_by_the_responses_to_first_attempts() -> Counters {
    let mut bench = Bench::open();
    let slow = Duration::from_millis(100);
    let mut repeats = Vec::new();
    for token in 1..=8 {
        bench.read(0, 10, token);
        let first = bench.sent_one();
        let (mut count, arrival) = (0, bench.now + slow);
        while bench.requester.poll_timeout().is_some_and(|timer| timer < arrival) {
            count += bench.pass_to_sent().len();
        }
        bench.now = arrival;
        bench.reply(&Reply::piece(&first, 0, 1, &[1; 10]));
        assert_eq!(bench.completed().token, token);
        repeats.push(count);
    }
    assert!(repeats[0] > 4, "{repeats:?}");
    assert_eq!(repeats[7], 0, "{repeats:?}");
    bench.end()
}

pub(super) fn a_cancelled_operation_leaves_nothing_behind() -> Counters {
    let mut bench = Bench::open();
    let waiting = bench.read(0, 10, 1);
    assert!(bench.requester.cancel(bench.now, waiting));
    bench.sent_nothing();
    let in_flight = bench.read(0, 10, 2);
    let request = bench.sent_one();
    assert!(bench.requester.cancel(bench.now, in_flight));
    assert!(!bench.requester.cancel(bench.now, in_flight));
    bench.read(0, 10, 3);
    let next = bench.sent_one();
    assert_eq!(next.header.answered_distance, 0, "low water passed the cancelled one");
    bench.reply(&Reply::piece(&request, 0, 1, &[9; 10]));
    assert_eq!(bench.memory.0[&2], [0; 10], "its memory is no longer written");
    assert!(!bench.requester.cancel(bench.now, in_flight), "the slot has another operation");
    let servers: Vec<_> = bench.requester.open_servers().collect();
    assert_eq!(servers, [SERVER]);
    bench.reply(&Reply::piece(&next, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().token, 3);
    bench.read(0, 10, 4);
    let request = bench.sent_one();
    bench.read(0, 10, 5);
    bench.requester.cancel_all();
    bench.sent_nothing();
    bench.reply(&Reply::piece(&request, 0, 1, &[9; 10]));
    bench.end()
}

pub(super) fn the_carrier_refuses() -> Counters {
    let mut bench = Bench::new();
    bench.write(0, 10, 1);
    let open = bench.sent_one();
    bench.requester.transmit_refused(bench.now, open.origin, 1);
    let not_sent = Failure::NotSent { node: HOME };
    assert_eq!(bench.failure(), not_sent);
    let mut bench = Bench::open();
    bench.write(0, 10, 1);
    let write = bench.sent_one();
    bench.requester.transmit_refused(bench.now, write.origin, 1);
    assert_eq!(bench.failure(), not_sent, "nothing was sent");
    bench.requester.transmit_refused(bench.now, write.origin, 1);
    bench.write(0, 10, 2);
    bench.sent_one();
    let again = bench.pass_to_sent().remove(0);
    bench.requester.transmit_refused(bench.now, again.origin, 1);
    assert_eq!(bench.failure(), Failure::OutcomeUnknown { node: HOME, responding: true });
    assert_eq!(bench.count(Event::TransmitRefused), 3);
    bench.end()
}

pub(super) fn invalid_replies_end_in_a_violation() -> Counters {
    let mut bench = Bench::open();
    bench.start(Operation::Stat { server: SERVER }, 1);
    let stat = bench.sent_one();
    bench.reply(&Reply::to(&stat, Status::Ok).with_data(&[0; 63]));
    assert_eq!(bench.failure(), Failure::Violation { node: HOME });
    for status in [Status::Expired, Status::BeyondWindow, Status::Partial, Status::Incomplete] {
        bench.read(0, 10, 1);
        let read = bench.sent_one();
        bench.reply(&Reply::to(&read, status));
        assert_eq!(bench.failure(), Failure::Violation { node: HOME });
    }
    bench.start(Operation::FetchAdd { pointer: pointer(0), addend: 1 }, 1);
    let add = bench.sent_one();
    bench.reply(&Reply::to(&add, Status::Ok));
    assert_eq!(bench.failure(), Failure::OutcomeUnknown { node: HOME, responding: true });
    bench.start(Operation::Create { server: Some(SERVER), pages: 1 }, 1);
    let create = bench.sent_one();
    let unaligned = pointer(1).to_ipv6();
    bench.reply(&Reply::to(&create, Status::Ok).with(|header| header.target = unaligned));
    assert!(matches!(bench.failure(), Failure::OutcomeUnknown { .. }));
    // Pieces outside of the range are not written.
    bench.read(0, 2000, 2);
    let read = bench.sent_one();
    let piece = usize::from(PIECE);
    for (offset, length) in [(1, 10), (0, piece - 1), (0, piece + 1), (piece, piece), (4096, 4)] {
        bench.reply(&Reply::piece(&read, offset, 1, &vec![7; length]));
    }
    bench.reply(&Reply::to(&read, Status::StaleTag).with(|header| header.offset = PIECE));
    assert_eq!(bench.memory.0[&2], vec![0; 2000]);
    assert_eq!(bench.count(Event::ReplyViolation), 5 + 1 + 1 + 6);
    bench.reply(&Reply::piece(&read, 0, 1, &vec![7; piece]));
    bench.reply(&Reply::piece(&read, piece, 1, &vec![7; 2000 - piece]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn a_short_buffer_is_the_callers_fault() -> Counters {
    let mut bench = Bench::open();
    bench.memory.0.insert(1, vec![0; 9]);
    bench.start(Operation::Read { pointer: pointer(0), length: 10 }, 1);
    bench.start(Operation::Write { pointer: pointer(0), length: 10 }, 1);
    let read = bench.sent_one();
    assert_eq!(bench.failure(), Failure::Buffer, "the WRITE was not sent");
    bench.reply(&Reply::piece(&read, 0, 1, &[1; 10]));
    assert_eq!(bench.failure(), Failure::Buffer);
    assert_eq!(bench.memory.0[&1], [0; 9]);
    bench.end()
}
