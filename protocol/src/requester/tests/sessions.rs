use core::time::Duration;

use bluebridge_wire::{Command, Flags, Header, Status, address::PAGE_BYTES};

use super::super::{Counters, Event, Failure, Operation, Output, Server, StartError};
use super::bench::{
    Bench, HOME, OTHER, PIECE, Reply, SERVER, SESSION, Sent, generation, pattern, pointer,
};

const NEW_SESSION: u64 = 0x2222;

pub(super) fn a_session_is_opened_first_and_once() -> Counters {
    let mut bench = Bench::new();
    bench.read(0, 10, 1);
    bench.read(20, 10, 2);
    let open = bench.sent_one();
    assert_eq!(open.command, Command::Open);
    assert_eq!((open.header.session, open.header.length), (0, u32::from(PIECE)));
    assert_eq!(open.header.credit, 64);
    assert_ne!(open.header.sequence, 0);
    // Invalid replies to OPEN are ignored.
    let changes: [fn(&mut Reply); 4] = [
        |reply| reply.header.session = 0,
        |reply| reply.header.length = 9000,
        |reply| reply.header.length = 1000,
        |reply| reply.header.detail = 0x8000,
    ];
    for change in changes {
        let mut reply = Reply::to(&open, Status::Ok)
            .with(|header| (header.session, header.length) = (1, u32::from(PIECE)));
        change(&mut reply);
        bench.reply(&reply);
        bench.sent_nothing();
    }
    assert_eq!(bench.count(Event::ReplyViolation), 4);
    bench.accept(&open, SESSION);
    let requests = bench.sent();
    let numbers: Vec<_> = requests.iter().map(|sent| sent.header.sequence).collect();
    assert_eq!(numbers, [1, 2]);
    bench.accept(&open, SESSION + 1);
    assert_eq!(bench.count(Event::ReplyStale), 1, "one reply to OPEN is enough");
    for request in &requests {
        bench.reply(&Reply::piece(request, 0, 1, &[1; 10]));
        assert_eq!(bench.completed().result, Ok(Output::Done));
    }
    assert_eq!(bench.count(Event::SessionOpen), 1);
    bench.end()
}

pub(super) fn open_is_repeated_and_backs_off() -> Counters {
    let mut bench = Bench::new();
    bench.read(0, 10, 1);
    let open = bench.sent_one();
    let again = bench.pass_to_sent().remove(0);
    assert_eq!(again.header.sequence, open.header.sequence, "one nonce, one session");
    assert_eq!(again.attempt(), 1);
    assert_eq!((open.home, again.home), (false, true), "a repetition bypasses redirects");
    bench.reply(&Reply::to(&again, Status::Overloaded));
    bench.sent_nothing();
    let later = bench.pass_to_sent().remove(0);
    assert_eq!(later.header.sequence, open.header.sequence);
    assert!(later.home);
    bench.reply(&Reply::to(&later, Status::Overloaded));
    let refused = Failure::Refused { status: Status::Overloaded, node: HOME };
    assert_eq!(bench.pass_to_end().result, Err(refused));
    bench.end()
}

pub(super) fn a_lost_session_is_opened_again() -> Counters {
    let mut bench = Bench::open();
    bench.read(0, 10, 1);
    bench.start(Operation::FetchAdd { pointer: pointer(0), addend: 1 }, 2);
    let lost = bench.sent();
    bench.read(16, 10, 3);
    let third = bench.sent_one();
    bench.reply(&Reply::to(&lost[0], Status::NoSession));
    let open = bench.pass_to_sent().remove(0);
    assert_eq!(open.command, Command::Open);
    bench.reply(&Reply::to(&lost[1], Status::NoSession));
    assert_eq!(bench.count(Event::ReplyStale), 1, "it is known already");
    // A reply that was in flight still counts.
    bench.reply(&Reply::piece(&third, 0, 1, &[3; 10]));
    assert_eq!(bench.completed().token, 3);
    bench.accept(&open, NEW_SESSION);
    let again = bench.sent();
    let commands: Vec<_> = again.iter().map(|sent| sent.command).collect();
    assert_eq!(commands, [Command::Read, Command::FetchAdd], "the same server, so nothing ran");
    assert_eq!(again[1].header.session, NEW_SESSION);
    assert_eq!((again[0].header.sequence, again[1].header.sequence), (1, 2));
    assert!(again.iter().all(|sent| sent.home));
    bench.reply(&Reply::to(&lost[1], Status::Ok).with_data(&[0; 8]));
    bench.completed_nothing();
    bench.reply(&Reply::piece(&again[0], 0, 1, &[1; 10]));
    bench.reply(&Reply::to(&again[1], Status::Ok).with_data(&[0; 8]));
    assert_eq!(bench.completed().token, 1);
    assert_eq!(bench.completed().result, Ok(Output::Previous(0)));
    assert_eq!(bench.count(Event::Resumed), 2);
    bench.end()
}

fn restart(bench: &mut Bench, sent: &Sent, generation: u32) -> Vec<Sent> {
    restart_served(bench, sent, generation, Duration::ZERO)
}

/// The server's next process has served for `served`.
fn restart_served(bench: &mut Bench, sent: &Sent, generation: u32, served: Duration) -> Vec<Sent> {
    let restarted = |reply: Reply| reply.with(|header| header.incarnation = 22);
    bench.reply(&restarted(Reply::to(sent, Status::NoSession)));
    let open = bench.pass_to_sent().remove(0);
    bench.reply(&restarted(Reply::to(&open, Status::Ok)).with(|header| {
        header.session = NEW_SESSION;
        header.length = 2048.min(u32::from(PIECE));
        header.detail = generation;
        header.page_version = u64::try_from(served.as_micros()).expect("short");
    }));
    bench.sent()
}

pub(super) fn a_request_that_no_earlier_process_can_have_is_repeated() -> Counters {
    let generation = u32::from(generation().number());
    let millis = Duration::from_millis;
    let mut bench = Bench::open();
    bench.pass(millis(500));
    bench.write(0, 100, 1);
    let sent = bench.sent_one();
    let again = restart_served(&mut bench, &sent, generation, millis(100));
    assert_eq!(again[0].command, Command::Write, "the server had been restarted before");
    bench.reply(&Reply::to(&again[0], Status::Ok).with(|header| header.incarnation = 22));
    assert_eq!(bench.completed().token, 1);
    let opened = |open: &Sent, incarnation: u32, served: Duration| {
        Reply::to(open, Status::Ok).with(|header| {
            header.incarnation = incarnation;
            header.session = NEW_SESSION + u64::from(incarnation);
            header.length = u32::from(PIECE);
            header.detail = generation;
            header.page_version = u64::try_from(served.as_micros()).expect("short");
        })
    };
    // Again; the reply is delayed, so that it does not show which was first.
    bench.write(0, 100, 2);
    let sent = bench.sent_one();
    bench.reply(&Reply::to(&sent, Status::NoSession).with(|header| header.incarnation = 23));
    let open = bench.pass_to_sent().remove(0);
    bench.pass(millis(2));
    bench.reply(&opened(&open, 23, millis(1)));
    let open = bench.sent_one();
    assert_eq!((open.command, bench.count(Event::OpenInDoubt)), (Command::Open, 1));
    bench.reply(&opened(&open, 23, millis(4)));
    let again = bench.sent_one();
    assert_eq!(again.command, Command::Write, "the second reply shows it");
    bench.reply(&Reply::to(&again, Status::Ok).with(|header| header.incarnation = 23));
    assert_eq!(bench.completed().token, 2);
    // Again, and it may have been executed before the restart.
    bench.write(0, 100, 3);
    let sent = bench.sent_one();
    // A process that was replaced before the session was opened knows nothing of it.
    let untrusted = bench.count(Event::ReplyUntrusted);
    bench.reply(&Reply::to(&sent, Status::NoSession).with(|header| header.incarnation = 22));
    bench.sent_nothing();
    assert_eq!(bench.count(Event::ReplyUntrusted), untrusted + 1);
    bench.pass(millis(100));
    bench.sent();
    bench.reply(&Reply::to(&sent, Status::NoSession).with(|header| header.incarnation = 24));
    let open = bench.pass_to_sent().remove(0);
    bench.reply(&opened(&open, 24, millis(99)));
    bench.sent_nothing();
    assert_eq!(bench.failure(), Failure::OutcomeUnknown { node: HOME, responding: true });
    bench.end()
}

pub(super) fn a_restarted_server_leaves_writes_unknown() -> Counters {
    let mut bench = Bench::open();
    bench.write(0, 100, 1);
    bench.start(Operation::Create { server: Some(SERVER), pages: 4 }, 2);
    let sent = bench.sent();
    let again = restart(&mut bench, &sent[0], 2);
    let unknown = Failure::OutcomeUnknown { node: HOME, responding: true };
    assert_eq!(bench.failure(), unknown);
    assert_eq!(again[0].command, Command::Create);
    // The first CREATE may have left pages behind, regardless of the second one.
    let result = bench.pass_to_end().result;
    assert!(matches!(result, Err(Failure::OutcomeUnknown { .. })), "{result:?}");

    // The contents begin with an earlier generation than the page's, so they may be the same.
    let mut bench = Bench::open();
    bench.write(0, 100, 1);
    let sent = bench.sent();
    restart(&mut bench, &sent[0], 1);
    assert_eq!(bench.failure(), unknown);

    // They begin with a later one: the home is asked whether the line moved before. It does not execute what it is
    // asked, nor what was never sent before.
    let mut bench = Bench::open();
    bench.write(0, 100, 1);
    let sent = bench.sent();
    bench.write(0, 100, 2);
    let again = restart(&mut bench, &sent[0], 3);
    assert_eq!(again.len(), 2);
    let refused = Failure::Refused { status: Status::StaleGeneration, node: HOME };
    let of_next = |reply: Reply| reply.with(|header| header.incarnation = 22);
    for request in &again {
        assert_eq!(request.command, Command::Write);
        bench.reply(&of_next(Reply::to(request, Status::StaleGeneration)));
        assert_eq!(bench.failure(), refused, "it is lost in any case");
    }
    assert_eq!(bench.count(Event::ResumeUnsafe), 1);
    bench.end()
}

pub(super) fn a_home_that_lost_its_memory_is_asked_for_a_line() -> Counters {
    let of_next = |reply: Reply| reply.with(|header| header.incarnation = 22);
    let moved = |request: &Sent| {
        of_next(Reply::to(request, Status::Moved)).with(|header| header.node = OTHER.0)
    };
    let unknown = Failure::OutcomeUnknown { node: HOME, responding: true };
    let operations = [
        Operation::Write { pointer: pointer(0), length: 100 },
        Operation::Write { pointer: pointer(0), length: 8192 },
        Operation::Zero { pointer: pointer(0), length: 100 },
        Operation::FetchAdd { pointer: pointer(0), addend: 1 },
        Operation::CompareSwap { pointer: pointer(0), expected: 1, new: 2 },
    ];
    for operation in operations {
        let mut bench = Bench::open();
        for token in [1, 2] {
            bench.memory.0.insert(token, pattern(2 * PAGE_BYTES));
        }
        bench.start(operation, 1);
        let sent = bench.sent();
        let again = restart(&mut bench, &sent[0], 3);
        assert_eq!(again.len(), sent.len());
        assert!(again.iter().all(|request| request.home), "it bypasses redirects");
        // The home does not know yet.
        bench.reply(&of_next(Reply::to(&again[0], Status::Busy)));
        let again = bench.pass_to_sent();
        bench.reply(&moved(&again[0]));
        assert_eq!(bench.failure(), unknown, "{operation:?}");
        bench.sent_nothing();
        // What the earlier process cannot have executed follows the line.
        bench.start(operation, 2);
        let sent = bench.sent();
        bench.reply(&moved(&sent[0]));
        let open = bench.sent_one();
        assert_eq!(open.command, Command::Open, "{operation:?}");
    }
    // A READ has no effect, and follows, too.
    let mut bench = Bench::open();
    bench.read(0, 10, 1);
    let sent = bench.sent();
    let again = restart(&mut bench, &sent[0], 3);
    bench.reply(&moved(&again[0]));
    assert_eq!(bench.sent_one().command, Command::Open);
    assert_eq!(bench.count(Event::MovedFollow), 1);
    bench.pass_to_end();
    bench.end()
}

pub(super) fn an_old_operation_is_not_repeated() -> Counters {
    let mut bench = Bench::with(|config| config.timing.deadline = Duration::from_secs(200));
    bench.open_session(SERVER, SESSION);
    bench.write(0, 100, 1);
    let sent = bench.sent_one();
    bench.pass(Duration::from_secs(46));
    bench.sent();
    bench.reply(&Reply::to(&sent, Status::NoSession));
    let open = bench.pass_to_sent().remove(0);
    bench.accept(&open, NEW_SESSION);
    bench.sent_nothing();
    assert_eq!(bench.failure(), Failure::OutcomeUnknown { node: HOME, responding: true });
    bench.end()
}

pub(super) fn an_open_that_is_refused_fails_all() -> Counters {
    let mut bench = Bench::new();
    bench.read(0, 10, 1);
    bench.write(0, 10, 2);
    let open = bench.sent_one();
    bench.reply(&Reply::to(&open, Status::StaleIncarnation));
    let refused = Failure::Refused { status: Status::StaleIncarnation, node: HOME };
    assert_eq!((bench.failure(), bench.failure()), (refused, refused));
    bench.end()
}

pub(super) fn a_servers_slot_is_reused() -> Counters {
    let mut bench = Bench::new();
    let server = |node| Server { node: bluebridge_wire::NodeId(node), shard: 1 };
    for node in 10..20_u16 {
        bench.start(Operation::Ping { server: server(node), length: 0 }, 0);
        let mut sent = bench.sent();
        if let Some(gone) = node.checked_sub(14) {
            // The session whose slot is reused is closed, so that it need not idle out.
            let close = sent.pop().expect("after OPEN");
            assert_eq!((close.command, close.node.0), (Command::Close, 10 + gone));
            let Header { session, sequence, .. } = close.header;
            assert_eq!(
                (session, sequence, close.header.low_water()),
                (u64::from(close.node.0), 2, 2)
            );
            bench.reply(&Reply::to(&close, Status::Ok));
        }
        bench.accept(&sent[0], u64::from(node));
        let ping = bench.sent_one();
        bench.reply(&Reply::to(&ping, Status::Ok));
        bench.completed();
        bench.now = bench.now + Duration::from_millis(1);
    }
    assert_eq!((bench.count(Event::ServerEvict), bench.count(Event::SessionLeave)), (6, 6));
    let ping = |node| Operation::Ping { server: server(node), length: 0 };
    for node in 16..20 {
        bench.start(ping(node), 1);
    }
    assert_eq!(bench.try_start(ping(20), 1), Err(StartError::Servers));
    for request in bench.sent() {
        assert_eq!(request.command, Command::Ping, "the last four are still known");
        bench.reply(&Reply::to(&request, Status::Ok));
        bench.completed();
    }
    assert!(bench.requester.round_trip(server(19)).is_some());
    assert_eq!(bench.requester.round_trip(server(10)), None);
    bench.end()
}

pub(super) fn leaving_closes_every_session_once() -> Counters {
    let mut bench = Bench::open();
    let other = Server { node: OTHER, shard: 2 };
    bench.open_session(other, NEW_SESSION);
    // Operations in progress are abandoned, and no OPEN is completed.
    bench.write(0, 100, 1);
    let write = bench.sent_one();
    bench.start(Operation::Ping { server: Server { node: OTHER, shard: 3 }, length: 0 }, 2);
    bench.requester.leave();
    let closes = bench.sent();
    let what = |sent: &Sent| (sent.command, sent.node, sent.header.session);
    let said: Vec<_> = closes.iter().map(what).collect();
    let (close, home) = (Command::Close, SERVER.node);
    assert_eq!(said, [(close, home, SESSION), (close, OTHER, NEW_SESSION)]);
    assert_eq!(closes[0].header.low_water(), write.header.sequence + 1, "copies are too late");
    // Replies are ignored, and a refusal of the carrier has no effect.
    bench.reply(&Reply::to(&closes[0], Status::Ok));
    bench.requester.transmit_refused(bench.now, closes[1].origin, 1);
    bench.requester.leave();
    bench.sent_nothing();
    // It may start again.
    bench.read(0, 10, 3);
    let open = bench.sent_one();
    assert_eq!(open.command, Command::Open);
    bench.accept(&open, SESSION + 1);
    let read = bench.sent_one();
    assert_eq!(read.header.sequence, 1);
    bench.reply(&Reply::piece(&read, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn a_smaller_piece_size_applies_to_an_open_in_progress() -> Counters {
    let mut bench = Bench::new();
    bench.read(0, 10, 1);
    let open = bench.sent_one();
    bench.requester.set_piece_bytes(1100);
    bench.accept(&open, SESSION);
    assert_eq!(bench.count(Event::ReplyViolation), 0, "the server did nothing wrong");
    bench.sent_nothing();
    let smaller = bench.pass_to_sent().remove(0);
    assert_eq!((smaller.command, smaller.header.length), (Command::Open, 1100));
    assert_ne!(smaller.header.sequence, open.header.sequence, "another session");
    let reply = Reply::to(&smaller, Status::Ok).with(|header| {
        (header.session, header.detail) = (NEW_SESSION, 2);
    });
    bench.reply(&reply);
    let read = bench.sent_one();
    assert_eq!(read.header.session, NEW_SESSION);
    bench.reply(&Reply::piece(&read, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn a_misrouted_open_is_reported() -> Counters {
    let mut bench = Bench::new();
    bench.read(0, 10, 1);
    let open = bench.sent_one();
    bench.reply(&Reply::to(&open, Status::WrongNode).by_node(OTHER));
    bench.completed_nothing();
    let refused = Failure::Refused { status: Status::WrongNode, node: OTHER };
    assert_eq!(bench.pass_to_end().result, Err(refused));
    assert!(bench.count(Event::OpenRetransmit) > 3);
    // The nonce stays valid, so a late reply opens the session of the next operation.
    bench.memory.0.insert(2, pattern(10));
    bench.start(Operation::Write { pointer: pointer(0), length: 10 }, 2);
    let again = bench.pass_to_sent().remove(0);
    assert_eq!(again.header.sequence, open.header.sequence);
    assert!(again.header.flags.contains(Flags::default()));
    bench.accept(&again, SESSION);
    let write = bench.sent_one();
    bench.reply(&Reply::to(&write, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn servers_may_issue_the_same_session() -> Counters {
    let other = Server { node: OTHER, shard: 0 };
    let mut bench = Bench::open();
    bench.open_session(other, SESSION);
    for server in [SERVER, other] {
        bench.start(Operation::Ping { server, length: 0 }, u64::from(server.node.0));
    }
    let pings = bench.sent();
    assert_eq!(pings[0].header.session, pings[1].header.session);
    assert_eq!(pings[0].source, pings[1].source, "one address for all requests");
    for ping in pings.iter().rev() {
        bench.reply(&Reply::to(ping, Status::Ok));
        assert_eq!(bench.completed().token, u64::from(ping.node.0));
    }
    bench.end()
}

pub(super) fn many_sessions_one_after_another_are_found() -> Counters {
    let mut bench = Bench::open();
    // More than the table of sessions holds at once, so that it is rebuilt.
    for session in 0..100 {
        bench.start(Operation::Close { server: SERVER }, 1);
        let close = bench.sent_one();
        bench.reply(&Reply::to(&close, Status::Ok));
        assert_eq!(bench.completed().result, Ok(Output::Done));
        bench.open_session(SERVER, 0x1_0000 * (session + 1));
        // A reply of the earlier session is ignored.
        let mut late = Reply::to(&close, Status::Ok);
        late.header.sequence = 2;
        bench.reply(&late);
    }
    assert_eq!(bench.count(Event::ReplyStale), 100);
    bench.end()
}
