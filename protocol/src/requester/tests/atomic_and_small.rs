use bluebridge_wire::{Command, Status, Usage};

use super::super::{Counters, Event, Operation, Output};
use super::bench::{Bench, PIECE, Reply, SERVER, SESSION, pattern, pointer};

pub(super) fn atomics_return_the_previous_value() -> Counters {
    let mut bench = Bench::open();
    bench.start(
        Operation::CompareSwap { pointer: pointer(64), expected: 0x0102, new: 0xa1b2_c3d4 },
        1,
    );
    bench.start(Operation::FetchAdd { pointer: pointer(72), addend: u64::MAX }, 2);
    let sent = bench.sent();
    assert_eq!((sent[0].command, sent[1].command), (Command::CompareSwap, Command::FetchAdd));
    assert_eq!(sent[0].data, [0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0xa1, 0xb2, 0xc3, 0xd4]);
    assert_eq!((sent[0].header.length, sent[1].header.length), (8, 8));
    assert_eq!(sent[1].data, [0xff; 8]);
    bench.reply(&Reply::to(&sent[1], Status::Ok).with_data(&7_u64.to_be_bytes()));
    bench.reply(&Reply::to(&sent[0], Status::Ok).with_data(&9_u64.to_be_bytes()));
    assert_eq!(bench.completed().result, Ok(Output::Previous(7)));
    assert_eq!(bench.completed().result, Ok(Output::Previous(9)));
    bench.end()
}

pub(super) fn small_requests_and_their_replies() -> Counters {
    let mut bench = Bench::open();
    bench.start(Operation::Stat { server: SERVER }, 1);
    let stat = bench.sent_one();
    let usage = Usage { capacity_pages: 10, free_pages: 4, shard_count: 2, ..Usage::default() };
    bench.reply(&Reply::to(&stat, Status::Ok).with_data(&usage.emit()));
    assert_eq!(bench.completed().result, Ok(Output::Usage(usage)));

    bench.memory.0.insert(2, pattern(30));
    bench.start(Operation::Ping { server: SERVER, length: 30 }, 2);
    let ping = bench.sent_one();
    assert_eq!(ping.data, pattern(30));
    bench.reply(&Reply::to(&ping, Status::Ok).with_data(&ping.data));
    assert_eq!(bench.completed().result, Ok(Output::Done));

    bench.start(Operation::Create { server: Some(SERVER), pages: 5 }, 3);
    let create = bench.sent_one();
    assert_eq!((create.command, create.header.length), (Command::Create, 5));
    assert_eq!(create.header.session, SESSION);
    let target = pointer(0).to_ipv6();
    bench.reply(&Reply::to(&create, Status::Ok).with(|header| header.target = target));
    assert_eq!(bench.completed().result, Ok(Output::Pointer(pointer(0))));

    bench.memory.0.insert(4, pattern(5000));
    bench.start(Operation::AllocWrite { server: Some(SERVER), length: 5000 }, 4);
    let train = bench.sent();
    assert_eq!(train.len(), 4);
    assert_eq!(train[1].data.len(), usize::from(PIECE));
    assert!(train.iter().all(|piece| piece.header.detail == 0));
    bench.reply(&Reply::to(&train[3], Status::Ok).with(|header| header.target = target));
    assert_eq!(bench.completed().result, Ok(Output::Pointer(pointer(0))));

    bench.start(Operation::Delete { pointer: pointer(0), pages: 0 }, 5);
    let delete = bench.sent_one();
    bench.reply(&Reply::to(&delete, Status::Ok).with(|header| header.length = 2));
    assert_eq!(bench.completed().result, Ok(Output::Freed(2)));
    bench.end()
}

pub(super) fn a_close_waits_for_what_was_started_before() -> Counters {
    let mut bench = Bench::open();
    let close = Operation::Close { server: SERVER };
    bench.read(0, 10, 1);
    bench.start(close, 2);
    bench.read(0, 10, 3);
    let read = bench.sent_one();
    bench.reply(&Reply::piece(&read, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().token, 1);
    let request = bench.sent_one();
    assert_eq!(request.command, Command::Close);
    bench.reply(&Reply::to(&request, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    let open = bench.sent_one();
    assert_eq!(open.command, Command::Open, "what was started after it needs a new session");
    bench.accept(&open, SESSION + 1);
    let read = bench.sent_one();
    assert_eq!((read.header.session, read.header.sequence), (SESSION + 1, 1));
    bench.reply(&Reply::piece(&read, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().token, 3);

    bench.start(close, 4);
    let request = bench.sent_one();
    bench.reply(&Reply::to(&request, Status::NoSession));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.start(close, 5);
    assert_eq!(bench.completed().result, Ok(Output::Done), "there is no session");
    bench.sent_nothing();
    assert_eq!(bench.count(Event::SessionClose), 2);

    // A CLOSE without a reply does not block other operations forever.
    bench.open_session(SERVER, SESSION + 2);
    bench.start(close, 6);
    bench.sent_one();
    bench.pass(core::time::Duration::from_secs(1));
    bench.read(0, 10, 7);
    assert_eq!(bench.pass_to_end().token, 6);
    let read = bench.pass_to_sent().remove(0);
    bench.reply(&Reply::piece(&read, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().token, 7);
    bench.end()
}
