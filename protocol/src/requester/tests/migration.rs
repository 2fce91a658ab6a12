//! TAKE, READ and KEEP at the giver of a migration (`docs/migration.md`).

use core::time::Duration;

use bluebridge_wire::{
    Command, EndpointAddress, Flags, LeaseEnd, Status, Tag,
    line::{LINE_RECORD_BYTES, LineRecord, emit_line},
};

use super::super::{Counters, Failure, Lease, Migration, Operation, Output, Server};
use super::bench::{
    Bench, CLIENT, HOME, OTHER, PIECE, Reply, SERVER, SERVER_INCARNATION, SESSION, Sent, pointer,
};

/// The giver is not the home.
const GIVER: Server = Server { node: OTHER, shard: 0 };
const MIGRATION: Migration = Migration { id: 77, range_epoch: 12, giver: GIVER };
const EPOCH: u64 = 0x0001_0000_0002;

fn bench() -> Bench {
    let mut bench = Bench::open();
    bench.open_session(GIVER, SESSION + 1);
    bench
}

fn line() -> bluebridge_wire::Pointer {
    bluebridge_wire::Pointer { tag: Tag(0), ..pointer(0x8000) }
}

fn take(bench: &mut Bench, wait: bool) {
    bench.memory.0.insert(1, vec![0; LINE_RECORD_BYTES]);
    let take = Operation::Take { migration: MIGRATION, pointer: line(), lease_ms: 500, wait };
    bench.start(take, 1);
}

fn keep(bench: &mut Bench, known: u32) {
    bench.memory.0.insert(2, vec![0; LINE_RECORD_BYTES]);
    let keep = Operation::Keep { migration: MIGRATION, pointer: line(), epoch: EPOCH, known };
    bench.start(keep, 2);
}

fn taken(sent: &Sent) -> Reply {
    let reply = Reply::to(sent, Status::Ok).with_data(&emit_line(&LineRecord::default()));
    reply.with(|header| {
        (header.node, header.lease_epoch, header.lease_remaining_ms) = (CLIENT.0, EPOCH, 500);
    })
}

fn kept(sent: &Sent, known: u32, last: u64) -> Reply {
    let reply = Reply::to(sent, Status::Ok).with_data(&[9; 16]);
    reply.with(|header| {
        (header.lease_epoch, header.detail, header.page_version) = (EPOCH, known, last);
    })
}

/// Whether a request went to the giver's endpoint address, and is about this memory.
fn assert_at_giver(sent: &Sent, command: Command, target: bluebridge_wire::Pointer) {
    let address = EndpointAddress::for_memory(GIVER.node, target);
    assert_eq!(sent.destination, address.destination(command, true));
    assert_eq!((sent.command, sent.header.target), (command, target.to_ipv6()));
    assert_eq!(sent.header.session, SESSION + 1);
}

pub(super) fn a_line_is_taken_read_and_kept_at_the_giver() -> Counters {
    let mut bench = bench();
    take(&mut bench, false);
    let sent = bench.sent_one();
    assert_at_giver(&sent, Command::Take, line());
    let header = sent.header;
    assert_eq!((header.page_version, header.range_epoch, header.length), (77, 12, 32768));
    assert_eq!((header.flags, header.lease_remaining_ms), (Flags::default(), 500));
    let now = bench.now;
    bench.reply(&taken(&sent));
    // The owner's clock may be slower: one part in 64, and 1 ms.
    let expires_at = now + (Duration::from_millis(500) / 64 * 63 - Duration::from_millis(1));
    let lease = Lease { epoch: EPOCH, expires_at, granted_ms: 500 };
    assert_eq!(bench.completed().result, Ok(Output::Leased(lease)));
    assert_eq!(bench.memory.0[&1], emit_line(&LineRecord::default()));

    let page = pointer(0x9000);
    bench.memory.0.insert(3, vec![0; 4096]);
    let read = Operation::ReadTaken { giver: GIVER, pointer: page, length: 1000, epoch: EPOCH };
    bench.start(read, 3);
    let sent = bench.sent_one();
    assert_at_giver(&sent, Command::Read, page);
    assert_eq!((sent.header.lease_epoch, sent.header.length), (EPOCH, 1000));
    bench.reply(&Reply::piece(&sent, 0, 5, &[7; 1000]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.memory.0[&3][..1000], [7; 1000]);

    keep(&mut bench, 30);
    let sent = bench.sent_one();
    assert_at_giver(&sent, Command::Keep, line());
    let header = sent.header;
    assert_eq!((header.page_version, header.range_epoch, header.detail), (77, 12, 30));
    assert_eq!((header.lease_epoch, header.length), (EPOCH, 32768));
    bench.reply(&kept(&sent, 32, 40));
    let output = Output::Kept { bytes: 16, known: 32, is_all: false };
    assert_eq!(bench.completed().result, Ok(output));
    assert_eq!(bench.memory.0[&2][..17], [&[9; 16][..], &[0]].concat());
    keep(&mut bench, 32);
    let sent = bench.sent_one();
    bench.reply(&kept(&sent, 40, 40).with_data(&[]));
    let output = Output::Kept { bytes: 0, known: 40, is_all: true };
    assert_eq!(bench.completed().result, Ok(output));
    bench.end()
}

pub(super) fn a_giver_is_asked_again_until_it_answers() -> Counters {
    let mut bench = bench();
    take(&mut bench, false);
    let first = bench.sent_one();
    bench.pass(Duration::from_millis(20));
    let again = bench.sent_one();
    assert_eq!((again.attempt(), again.destination), (1, first.destination));
    assert_eq!(again.header.sequence, first.header.sequence);
    bench.reply(&taken(&again));
    assert!(matches!(bench.completed().result, Ok(Output::Leased(_))));
    // KEEP is answered from the mark, so it is repeated in another session.
    keep(&mut bench, 0);
    let sent = bench.sent_one();
    bench.reply(&Reply::to(&sent, Status::NoSession));
    let open = bench.sent_one();
    assert_eq!((open.command, open.node), (Command::Open, OTHER));
    bench.accept(&open, SESSION + 9);
    let again = bench.sent_one();
    assert_eq!((again.command, again.header.session), (Command::Keep, SESSION + 9));
    bench.reply(&kept(&again, 2, 2));
    assert!(matches!(bench.completed().result, Ok(Output::Kept { is_all: true, .. })));
    // Also by the giver's next process, which has the marks; and a TAKE that was lost with its lease.
    take(&mut bench, false);
    keep(&mut bench, 0);
    let sent = bench.sent();
    let next = SERVER_INCARNATION + 1;
    bench.reply(&Reply::to(&sent[0], Status::NoSession).with(|header| header.incarnation = next));
    let open = bench.sent_one();
    bench.reply(&Reply::to(&open, Status::Ok).with(|header| {
        (header.incarnation, header.session) = (next, SESSION + 10);
        (header.length, header.detail) = (u32::from(PIECE), 3);
        header.flags = header.flags.with(Flags::AT_ENDPOINT);
    }));
    let again = bench.sent();
    assert_eq!(
        again.iter().map(|sent| sent.command).collect::<Vec<_>>(),
        [Command::Take, Command::Keep]
    );
    for reply in [taken(&again[0]), kept(&again[1], 2, 2)] {
        bench.reply(&reply.with(|header| header.incarnation = next));
        assert!(bench.completed().result.is_ok());
    }
    bench.end()
}

pub(super) fn a_take_waits_for_leases() -> Counters {
    let mut bench = bench();
    take(&mut bench, false);
    let sent = bench.sent_one();
    let busy = |sent: &Sent| {
        Reply::to(sent, Status::Busy).with(|header| {
            (header.node, header.lease_epoch, header.lease_remaining_ms) = (9, 5, 300);
        })
    };
    bench.reply(&busy(&sent));
    let failure = Failure::Busy { owner: bluebridge_wire::NodeId(9), epoch: 5, remaining_ms: 300 };
    assert_eq!(bench.failure(), failure, "it is not repeated");
    take(&mut bench, true);
    let sent = bench.sent_one();
    assert!(sent.header.flags.contains(Flags::QUEUED));
    bench.reply(&busy(&sent).with(|header| {
        (header.flags, header.detail) = (header.flags.with(Flags::QUEUED), 200);
    }));
    bench.pass(Duration::from_millis(100));
    let again = bench.sent_one();
    assert_eq!(again.header.sequence, sent.header.sequence);
    assert!(again.header.flags.contains(Flags::QUEUED));
    bench.reply(&taken(&again));
    assert!(matches!(bench.completed().result, Ok(Output::Leased(_))));
    bench.end()
}

pub(super) fn what_the_giver_refuses_is_final() -> Counters {
    let mut bench = bench();
    for status in [
        Status::Moved,
        Status::NoAuthority,
        Status::WrongNode,
        Status::StaleRangeEpoch,
        Status::StaleGeneration,
    ] {
        let refused = Failure::Refused { status, node: OTHER };
        take(&mut bench, true);
        let sent = bench.sent_one();
        bench.reply(&Reply::to(&sent, status).with(|header| header.node = HOME.0));
        assert_eq!(bench.failure(), refused);
        bench.memory.0.insert(3, vec![0; 8192]);
        let pages = pointer(0x9000);
        let read =
            Operation::ReadTaken { giver: GIVER, pointer: pages, length: 8192, epoch: EPOCH };
        bench.start(read, 3);
        let sent = bench.sent_one();
        bench.reply(&Reply::to(&sent, status).with(|header| header.node = HOME.0));
        assert_eq!(bench.failure(), refused);
        keep(&mut bench, 0);
        let sent = bench.sent_one();
        bench.reply(&Reply::to(&sent, status));
        assert_eq!(bench.failure(), refused);
    }
    keep(&mut bench, 0);
    let sent = bench.sent_one();
    let lost = Reply::to(&sent, Status::LeaseLost);
    bench.reply(&lost.with(|header| header.detail = LeaseEnd::Withdrawn.code()));
    let lost = Failure::LeaseLost { node: OTHER, how: LeaseEnd::Withdrawn, owner: None };
    assert_eq!(bench.failure(), lost);
    // Nothing of it is remembered for the line's clients.
    bench.read(0x8000, 10, 4);
    let sent = bench.sent_one();
    assert_eq!((sent.node, SERVER.node), (HOME, HOME));
    bench.reply(&Reply::piece(&sent, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn a_doubt_is_reported_as_one() -> Counters {
    let mut bench = bench();
    bench.pass(Duration::from_millis(1));
    keep(&mut bench, 0);
    bench.sent_one();
    bench.pass(Duration::from_secs(20));
    let unknown = Failure::OutcomeUnknown { node: OTHER, responding: false };
    assert_eq!(bench.failure(), unknown);
    // A TAKE changes nothing for good.
    take(&mut bench, false);
    bench.sent_one();
    bench.pass(Duration::from_secs(20));
    assert_eq!(bench.failure(), Failure::Unreachable { node: OTHER });
    bench.end()
}

pub(super) fn wrong_records_end_in_a_violation() -> Counters {
    let mut bench = bench();
    let changes: [fn(Reply) -> Reply; 3] = [
        |reply| reply.with_data(&[0; LINE_RECORD_BYTES - 1]),
        |reply| reply.with_data(&[0; LINE_RECORD_BYTES + 1]),
        |reply| reply.with(|header| header.node = HOME.0),
    ];
    for change in changes {
        take(&mut bench, false);
        let sent = bench.sent_one();
        bench.reply(&change(taken(&sent)));
        assert_eq!(bench.failure(), Failure::Violation { node: OTHER });
    }
    let changes: [fn(Reply) -> Reply; 2] = [
        |reply| reply.with_data(&[0; LINE_RECORD_BYTES + 1]),
        |reply| reply.with(|header| header.lease_epoch += 1),
    ];
    // There is no lease on a line that is free as a whole.
    take(&mut bench, false);
    let sent = bench.sent_one();
    bench.reply(&taken(&sent).with(|header| (header.lease_epoch, header.node) = (0, 0)));
    assert_eq!(bench.completed().result, Ok(Output::Free));
    for change in changes {
        keep(&mut bench, 0);
        let sent = bench.sent_one();
        bench.reply(&change(kept(&sent, 2, 2)));
        let unknown = Failure::OutcomeUnknown { node: OTHER, responding: true };
        assert_eq!(bench.failure(), unknown, "the mark may be set");
    }
    bench.end()
}
