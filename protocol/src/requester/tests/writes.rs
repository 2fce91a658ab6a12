use bluebridge_wire::{Command, Flags, NoMemory, Status, tlv};

use super::super::{Counters, Event, Failure, Operation, Output};
use super::bench::{Bench, HOME, PIECE, Reply, SERVER, SESSION, Sent, pattern, pointer};

const P: usize = PIECE as usize;

fn partial(sent: &Sent, statuses: &[Status]) -> Reply {
    let mut reply = Reply::to(sent, Status::Partial);
    reply.options = vec![0; tlv::emitted_bytes(statuses.len())];
    tlv::emit_page_statuses(&mut reply.options, statuses);
    reply
}

pub(super) fn a_train_is_sent_once_and_has_one_reply() -> Counters {
    let mut bench = Bench::open();
    bench.write(4090, 4102, 1);
    let train = bench.sent();
    assert_eq!(train.len(), 4);
    let mut joined = Vec::new();
    for piece in &train {
        assert_eq!(piece.command, Command::Write);
        assert_eq!(piece.destination, train[0].destination);
        assert_eq!(piece.header.sequence, train[0].header.sequence);
        assert_eq!((piece.header.length, piece.attempt()), (4102, 0));
        assert_eq!(usize::from(piece.header.offset), joined.len());
        joined.extend_from_slice(&piece.data);
    }
    assert_eq!(joined, pattern(4102));
    bench.reply(&Reply::to(&train[3], Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));

    bench.start(Operation::Zero { pointer: pointer(8), length: 100 }, 2);
    let zero = bench.sent_one();
    assert_eq!(zero.command, Command::Delete);
    assert!(zero.header.flags.contains(Flags::ZERO) && zero.data.is_empty());
    bench.reply(&Reply::to(&zero, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn an_incomplete_train_is_repaired() -> Counters {
    let mut bench = Bench::open();
    bench.write(0, 8192, 1);
    let train = bench.sent();
    assert_eq!(train.len(), 6);
    let probe = bench.pass_to_sent();
    assert_eq!(probe.len(), 1, "one piece requests the state of the train");
    assert_eq!((probe[0].header.offset, probe[0].attempt()), (0, 1));
    assert!(probe[0].home);
    let incomplete = Reply::to(&probe[0], Status::Incomplete).with(|h| h.detail = 0b1_0101);
    bench.reply(&incomplete);
    let rest = bench.sent();
    let offsets: Vec<_> = rest.iter().map(|piece| usize::from(piece.header.offset)).collect();
    assert_eq!(offsets, [P, 4096 + P - P, 4096 + 2 * P].map(|at| at), "{offsets:?}");
    let attempts: Vec<_> = rest.iter().map(Sent::attempt).collect();
    assert_eq!(attempts, [0, 0, 2], "only the last requests a reply");
    bench.reply(&incomplete);
    bench.sent_nothing();
    assert_eq!(bench.count(Event::TrainRepair), 1);
    // The server dropped pieces that had arrived: their bits are cleared.
    bench.reply(&Reply::to(&rest[2], Status::Incomplete).with(|h| h.detail = 0b10_0000));
    assert_eq!(bench.sent().len(), 5);
    bench.reply(&Reply::to(&train[0], Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn pages_end_differently() -> Counters {
    let mut bench = Bench::open();
    bench.write(0, 3 * 4096, 1);
    let train = bench.sent();
    bench.reply(&partial(&train[0], &[Status::Ok, Status::StaleTag, Status::Ok]));
    let Failure::Partial(statuses) = bench.failure() else { panic!("the pages differ") };
    assert_eq!(statuses.as_slice(), [Status::Ok, Status::StaleTag, Status::Ok]);
    bench.write(0, 2 * 4096, 2);
    let train = bench.sent();
    bench.reply(&Reply::to(&train[0], Status::OutOfRange));
    let refused = Failure::Refused { status: Status::OutOfRange, node: HOME };
    assert_eq!(bench.failure(), refused);
    bench.write(0, 2 * 4096, 3);
    let train = bench.sent();
    bench.reply(&partial(&train[0], &[Status::Ok]));
    let unknown = Failure::OutcomeUnknown { node: HOME, responding: true };
    assert_eq!(bench.failure(), unknown, "two pages need two statuses");
    assert_eq!(bench.count(Event::ReplyViolation), 1);
    bench.end()
}

pub(super) fn a_busy_page_is_written_later() -> Counters {
    let mut bench = Bench::open();
    bench.write(100, 3 * 4096, 1);
    let train = bench.sent();
    let reply = partial(&train[0], &[Status::Ok, Status::Busy, Status::Ok, Status::Ok]);
    bench.reply(&reply.with(|header| header.node = 55));
    bench.completed_nothing();
    let again = bench.pass_to_sent();
    assert_eq!(again.len(), 3, "one page");
    assert_eq!(again[0].header.target, pointer(4096).to_ipv6());
    assert_eq!((again[0].header.length, again[0].header.offset), (4096, 0));
    assert!(again[0].home && again[0].header.sequence > train[0].header.sequence);
    let data: Vec<u8> = again.iter().flat_map(|piece| piece.data.clone()).collect();
    assert_eq!(data, pattern(3 * 4096)[3996..3996 + 4096]);
    bench.reply(&Reply::to(&again[0], Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn written_pages_are_reported_when_the_rest_is_refused() -> Counters {
    let mut bench = Bench::open();
    // These mean that this request did nothing, not that an earlier one did nothing.
    for status in [Status::QuotaExceeded, Status::BadLength, Status::ShuttingDown] {
        bench.write(0, 3 * 4096, 1);
        let train = bench.sent();
        let first = partial(&train[0], &[Status::Ok, Status::Busy, Status::Busy]);
        bench.reply(&first.with(|header| header.node = 55));
        let again = bench.pass_to_sent();
        assert_eq!(again[0].header.target, pointer(4096).to_ipv6());
        bench.reply(&Reply::to(&again[0], status));
        let Failure::Partial(statuses) = bench.failure() else { panic!("one page is written") };
        assert_eq!(statuses.as_slice(), [Status::Ok, status, status]);
    }
    // A copy of the second request may have been executed before the server began to refuse.
    bench.write(0, 2 * 4096, 2);
    let train = bench.sent();
    let first = partial(&train[0], &[Status::Ok, Status::Busy]);
    bench.reply(&first.with(|header| header.node = 55));
    bench.pass_to_sent();
    let copy = bench.pass_to_sent().remove(0);
    bench.reply(&Reply::to(&copy, Status::ShuttingDown));
    assert_eq!(bench.failure(), Failure::OutcomeUnknown { node: HOME, responding: true });
    // The same holds for a CREATE that was sent twice in a lost session.
    let create = Operation::Create { server: Some(SERVER), pages: 1 };
    for (session, copies) in [(SESSION + 1, 1), (SESSION + 2, 2)] {
        bench.start(create, 3);
        let mut copy = bench.sent_one();
        for _ in 1..copies {
            copy = bench.pass_to_sent().remove(0);
        }
        bench.reply(&Reply::to(&copy, Status::NoSession));
        let open = bench.sent_one();
        bench.accept(&open, session);
        let again = bench.sent_one();
        bench.reply(&Reply::to(&again, Status::OutOfMemory));
        let expected = if copies == 1 {
            Failure::Refused { status: Status::OutOfMemory, node: HOME }
        } else {
            Failure::OutcomeUnknown { node: HOME, responding: true }
        };
        assert_eq!(bench.failure(), expected, "{copies} copies");
    }
    // Of a server that is drained, the reason is known.
    bench.start(create, 3);
    let sent = bench.sent_one();
    let refusal = Reply::to(&sent, Status::OutOfMemory);
    bench.reply(&refusal.with(|header| header.detail = NoMemory::Drained.code()));
    assert_eq!(bench.failure(), Failure::Drained { node: HOME });
    bench.end()
}
