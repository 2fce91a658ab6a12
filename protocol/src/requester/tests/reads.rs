use bluebridge_wire::{Command, Flags, Pointer, SESSION_WINDOW, Status};

use super::super::{Counters, Event, Failure, Operation, Output};
use super::bench::{Bench, PIECE, Reply, SERVER, SESSION, Sent, pattern, pointer};

const P: usize = PIECE as usize;

pub(super) fn a_page_is_read_in_one_round_trip() -> Counters {
    let mut bench = Bench::open();
    bench.read(100, 50, 1);
    let request = bench.sent_one();
    assert_eq!(request.command, Command::Read);
    assert_eq!(request.header.target, pointer(100).to_ipv6());
    assert_eq!((request.header.length, request.header.offset), (50, 0));
    assert_eq!((request.header.session, request.header.sequence), (SESSION, 2));
    assert_eq!(request.header.answered_distance, 0);
    assert!(!request.home && request.attempt() == 0);
    bench.reply(&Reply::piece(&request, 0, 9, &pattern(50)));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.memory.0[&1], pattern(50));
    bench.sent_nothing();
    bench.end()
}

pub(super) fn pieces_arrive_in_any_order_and_twice() -> Counters {
    let mut bench = Bench::open();
    // The end of a page, a page, and the start of one.
    bench.read(4000, 96 + 4096 + 10, 1);
    let request = bench.sent_one();
    assert!(request.home, "more than one page bypasses redirects");
    let bytes = pattern(96 + 4096 + 10);
    let pieces = [(4192, 10), (96 + 2 * P, 4096 - 2 * P), (96, P), (0, 96), (96 + P, P)];
    for (start, length) in pieces {
        bench.completed_nothing();
        let reply = Reply::piece(&request, start, 3, &bytes[start..start + length]);
        bench.reply(&reply);
        bench.reply(&reply);
    }
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.memory.0[&1], bytes);
    assert_eq!(bench.count(Event::PieceJoin), 5);
    assert_eq!(bench.count(Event::PieceDuplicate), 4);
    assert_eq!(bench.count(Event::ReplyStale), 1);
    bench.end()
}

pub(super) fn missing_pieces_are_requested_again() -> Counters {
    let mut bench = Bench::open();
    let bytes = pattern(8192);
    bench.read(0, 8192, 1);
    let request = bench.sent_one();
    let starts = [0, P, 2 * P, 4096, 4096 + P, 4096 + 2 * P];
    let piece = |at: usize| {
        let start = starts[at];
        start..(start + P).min(start / 4096 * 4096 + 4096)
    };
    for at in [0, 2, 3, 4, 5] {
        bench.reply(&Reply::piece(&request, starts[at], 1, &bytes[piece(at)]));
    }
    let again = bench.pass_to_sent().remove(0);
    assert_eq!(again.header.sequence, request.header.sequence);
    assert!(again.home && again.attempt() == 1);
    assert!(again.header.flags.contains(Flags::SELECTIVE));
    assert_eq!(again.header.detail, 0b00_0010);
    bench.reply(&Reply::piece(&again, starts[1], 1, &bytes[piece(1)]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.memory.0[&1], bytes);
    assert_eq!(bench.count(Event::Retransmit), 1);
    bench.end()
}

pub(super) fn many_lines_are_asked_for_as_trains() -> Counters {
    let mut bench = Bench::with(|config| config.operation_count = 64);
    bench.open_session(SERVER, SESSION);
    let is_train = |sent: &Sent| sent.header.flags.contains(Flags::SELECTIVE);
    // One line, or many pages, are the kernel's.
    for (count, length) in [(1, 32768), (64, 4096)] {
        let number = |at: u64| 10_000 * u64::from(length) + at;
        for at in 0..count {
            bench.read(at * u64::from(length), length, number(at));
        }
        let requests = bench.sent();
        assert_eq!(requests.len() as u64, count);
        assert!(!requests.iter().any(is_train), "{count} of {length} bytes");
        for request in &requests {
            bench.reply_with_pages(request);
        }
        for _ in 0..count {
            assert_eq!(bench.completed().result, Ok(Output::Done));
        }
    }
    for at in 0..8 {
        bench.read(at * 32768, 32768, at);
    }
    let requests = bench.sent();
    assert_eq!(requests.len(), 8);
    for request in &requests {
        assert!(is_train(request) && request.attempt() == 0, "{request:?}");
        assert_eq!(request.header.detail, (1 << 24) - 1, "all of its pieces");
        bench.reply_with_pages(request);
    }
    for _ in 0..8 {
        assert_eq!(bench.completed().result, Ok(Output::Done));
    }
    bench.end()
}

pub(super) fn a_newer_version_restarts_its_page() -> Counters {
    let mut bench = Bench::open();
    bench.read(0, 4096, 1);
    let request = bench.sent_one();
    let (old, new) = (vec![1; 4096], vec![2; 4096]);
    bench.reply(&Reply::piece(&request, 0, 5, &old[..P]));
    bench.reply(&Reply::piece(&request, P, 5, &old[..P]));
    bench.reply(&Reply::piece(&request, 2 * P, 6, &new[2 * P..]));
    bench.reply(&Reply::piece(&request, P, 5, &old[..P]));
    bench.completed_nothing();
    assert_eq!(bench.count(Event::PageRestart), 1);
    assert_eq!(bench.count(Event::PieceOutdated), 1);
    let again = bench.pass_to_sent().remove(0);
    assert_eq!(again.header.detail, 0b111, "all pieces, so that they are of one version");
    for start in [0, P, 2 * P] {
        bench.reply(&Reply::piece(&again, start, 7, &vec![3; (4096 - start).min(P)]));
    }
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.memory.0[&1], vec![3; 4096]);
    bench.end()
}

pub(super) fn pages_are_refused_one_by_one() -> Counters {
    let mut bench = Bench::open();
    bench.read(0, 8192, 1);
    let request = bench.sent_one();
    bench.reply(&Reply::to(&request, Status::StaleTag).with(|header| header.offset = 4096));
    bench.reply(&Reply::to(&request, Status::StaleTag).with(|header| header.offset = 4096));
    bench.reply(&Reply::piece(&request, 4096, 1, &pattern(P)));
    bench.completed_nothing();
    for start in [0, P, 2 * P] {
        bench.reply(&Reply::piece(&request, start, 1, &pattern((4096 - start).min(P))));
    }
    let Failure::Partial(statuses) = bench.failure() else { panic!("some pages were read") };
    assert_eq!(statuses.as_slice(), [Status::Ok, Status::StaleTag]);

    bench.read(0, 8192, 2);
    let request = bench.sent_one();
    for offset in [0, 4096] {
        let refusal = Reply::to(&request, Status::NotAllocated);
        bench.reply(&refusal.with(|header| header.offset = offset));
    }
    let refused = Failure::Refused { status: Status::NotAllocated, node: SERVER.node };
    assert_eq!(bench.failure(), refused);

    bench.read(0, 8192, 3);
    let request = bench.sent_one();
    bench.reply(&Reply::to(&request, Status::BadLength));
    let refused = Failure::Refused { status: Status::BadLength, node: SERVER.node };
    assert_eq!(bench.failure(), refused, "a refusal of all needs no page");
    bench.end()
}

pub(super) fn credit_and_window_hold_operations_back() -> Counters {
    let mut bench = Bench::with(|config| {
        config.operation_count = 1000;
        config.credit_pages = u16::MAX;
    });
    bench.open_session(SERVER, SESSION);
    for token in 0..10 {
        bench.read(0, 16384, token);
    }
    // 64 pages of credit, four each; the first reply revokes the credit.
    let requests = bench.sent();
    assert_eq!(requests.len(), 10);
    let full = |bench: &mut Bench, request: &Sent, credit: u16| {
        for (start, page) in (0..4).flat_map(|page| [0, P, 2 * P].map(|at| (at, page * 4096))) {
            let length = (4096 - start).min(P);
            let piece = Reply::piece(request, page + start, 1, &pattern(length));
            bench.reply(&piece.with(|header| header.credit = credit));
        }
        assert_eq!(bench.completed().result, Ok(Output::Done));
    };
    full(&mut bench, &requests[0], 1);
    bench.read(0, 100, 100);
    bench.read(0, 16384, 101);
    bench.sent_nothing();
    for request in &requests[1..] {
        full(&mut bench, request, 1);
    }
    let one = bench.sent_one();
    assert_eq!(one.header.length, 100);
    bench.reply(&Reply::piece(&one, 0, 1, &pattern(100)).with(|header| header.credit = 1));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    let alone = bench.sent_one();
    assert_eq!(alone.header.length, 16384, "an operation beyond all credit runs alone");
    full(&mut bench, &alone, u16::MAX);
    assert!(bench.count(Event::Throttle) > 0);

    // The first number stays open, so the window ends after 512 numbers.
    let first: Pointer = pointer(0);
    for token in 0..u64::from(u16::try_from(SESSION_WINDOW).expect("small")) + 5 {
        bench.start(Operation::FetchAdd { pointer: first, addend: 1 }, token);
    }
    let sent = bench.sent();
    assert_eq!(sent.len() as u64, SESSION_WINDOW);
    assert_eq!(u64::from(sent[511].header.answered_distance), SESSION_WINDOW - 1);
    let reply = |request: &Sent| {
        let reply = Reply::to(request, Status::Ok).with_data(&[0; 8]);
        reply.with(|header| header.credit = u16::MAX)
    };
    bench.reply(&reply(&sent[1]));
    bench.sent_nothing();
    bench.reply(&reply(&sent[0]));
    let more = bench.sent();
    assert_eq!(more.len(), 2, "the outcomes of two numbers are known");
    for request in sent[2..].iter().chain(&more) {
        bench.reply(&reply(request));
    }
    for request in bench.sent() {
        bench.reply(&reply(&request));
    }
    while bench.requester.poll_completion().is_some() {}
    bench.end()
}

pub(super) fn the_first_piece_measures_the_round_trip() -> Counters {
    let mut bench = Bench::open();
    let before = bench.requester.round_trip(SERVER).expect("measured by a PING");
    let piece = usize::from(PIECE);
    let bytes = pattern(2 * piece);
    bench.read(0, 2 * u32::from(PIECE), 1);
    let request = bench.sent_one();
    // Less than the timer, which would retransmit.
    let trip = bench.requester.poll_timeout().expect("a timer runs") - bench.now;
    bench.now = bench.now + trip / 4;
    bench.reply(&Reply::piece(&request, 0, 1, &bytes[..piece]));
    let measured = bench.requester.round_trip(SERVER).expect("measured");
    assert!(measured > before, "{measured:?} is not more than {before:?}");
    bench.now = bench.now + trip / 2;
    bench.reply(&Reply::piece(&request, piece, 1, &bytes[piece..]));
    assert_eq!(bench.requester.round_trip(SERVER), Some(measured), "one sample for each READ");
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}
