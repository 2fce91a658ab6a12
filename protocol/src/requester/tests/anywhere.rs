use bluebridge_wire::{Command, Flags, NoMemory, NodeId, Status};

use super::super::{Counters, Event, Failure, Operation, Output};
use super::bench::{Bench, CLIENT, HOME, OTHER, PIECE, Reply, Sent, pattern, pointer};

fn grant(sent: &Sent, offset: u64) -> Reply {
    let target = pointer(offset).to_ipv6();
    Reply::to(sent, Status::Ok).by_node(HOME).with(|header| {
        header.target = target;
        header.flags = header.flags.with(Flags::PROVISIONAL);
        header.detail = 2000;
    })
}

pub(super) fn a_create_is_sent_anywhere_and_confirmed() -> Counters {
    let mut bench = Bench::open();
    bench.start(Operation::Create { server: None, pages: 3 }, 1);
    let create = bench.sent_one();
    assert_eq!((create.command, create.node), (Command::Create, NodeId::ANY));
    assert_eq!((create.header.session, create.header.length), (0, 3));
    bench.reply(&grant(&create, 0));
    // A second reply, of another server that received a copy, is ignored.
    bench.reply(&grant(&create, 0x4000));
    assert_eq!(bench.count(Event::ReplyStale), 1);
    let confirm = bench.sent_one();
    assert_eq!((confirm.command, confirm.node), (Command::Confirm, HOME));
    assert_eq!(confirm.header.target, pointer(0).to_ipv6());
    assert_eq!(confirm.header.length, 3);
    bench.completed_nothing();
    bench.reply(&Reply::to(&confirm, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Pointer(pointer(0))));

    bench.start(Operation::Create { server: None, pages: 3 }, 2);
    assert_eq!(bench.pass_to_end().result, Err(Failure::Unreachable { node: NodeId::ANY }));
    bench.start(Operation::Create { server: None, pages: 3 }, 3);
    let create = bench.sent_one();
    bench.reply(&grant(&create, 0));
    assert_eq!(bench.sent_one().command, Command::Confirm);
    let result = bench.pass_to_end().result;
    assert!(matches!(result, Err(Failure::OutcomeUnknown { node: HOME, .. })), "{result:?}");
    bench.start(Operation::Create { server: None, pages: 3 }, 4);
    let create = bench.sent_one();
    bench.reply(&grant(&create, 0).by_node(OTHER));
    assert_eq!(bench.failure(), Failure::Violation { node: OTHER }, "not its own memory");
    bench.end()
}

pub(super) fn a_create_is_repeated_if_its_pages_were_freed_early() -> Counters {
    let mut bench = Bench::open();
    bench.start(Operation::Create { server: None, pages: 1 }, 1);
    let create = bench.sent_one();
    bench.reply(&grant(&create, 0));
    let confirm = bench.sent_one();
    bench.reply(&Reply::to(&confirm, Status::NotAllocated));
    let anew = bench.sent_one();
    assert_eq!(anew.command, Command::Create);
    assert_ne!(anew.header.sequence, create.header.sequence);
    bench.reply(&grant(&create, 0));
    bench.sent_nothing();
    bench.reply(&grant(&anew, 0x1000));
    let confirm = bench.sent_one();
    bench.reply(&Reply::to(&confirm, Status::QuotaExceeded));
    let refused = Failure::Refused { status: Status::QuotaExceeded, node: HOME };
    assert_eq!(bench.failure(), refused);
    bench.end()
}

pub(super) fn a_full_node_leads_to_another() -> Counters {
    let mut bench = Bench::open();
    bench.start(Operation::Create { server: None, pages: 1 }, 1);
    let mut destinations = Vec::new();
    for _ in 0..4 {
        let create = bench.sent_one();
        destinations.push(create.destination);
        bench.reply(&Reply::to(&create, Status::OutOfMemory).by_node(HOME));
    }
    let refused = Failure::Refused { status: Status::OutOfMemory, node: HOME };
    assert_eq!(bench.failure(), refused);
    destinations.dedup();
    assert_eq!(destinations.len(), 4, "each attempt may reach another node");

    // A server that is drained says so, and so does the failure.
    let drained = |create: &Sent| {
        let refusal = Reply::to(create, Status::OutOfMemory).by_node(OTHER);
        refusal.with(|header| header.detail = NoMemory::Drained.code())
    };
    bench.start(Operation::Create { server: None, pages: 1 }, 1);
    for _ in 0..4 {
        let create = bench.sent_one();
        bench.reply(&drained(&create));
    }
    assert_eq!(bench.failure(), Failure::Drained { node: OTHER });

    bench.start(Operation::Create { server: None, pages: 1 }, 2);
    let create = bench.sent_one();
    bench.reply(&Reply::to(&create, Status::Overloaded).by_node(HOME));
    let again = bench.pass_to_sent().remove(0);
    assert_eq!(again.header.sequence, create.header.sequence);
    assert_ne!(again.destination, create.destination);
    bench.reply(&Reply::to(&again, Status::Ok).by_node(NodeId::ANY));
    assert_eq!(bench.count(Event::ReplyUntrusted), 1);
    bench.reply(&Reply::to(&again, Status::QuotaExceeded).by_node(OTHER));
    let refused = Failure::Refused { status: Status::QuotaExceeded, node: OTHER };
    assert_eq!(bench.failure(), refused);
    bench.end()
}

pub(super) fn an_anywhere_train_is_repaired_and_varies_its_choice() -> Counters {
    let mut bench = Bench::open();
    bench.memory.0.insert(1, pattern(5000));
    bench.start(Operation::AllocWrite { server: None, length: 5000 }, 1);
    let train = bench.sent();
    assert_eq!(train.len(), 4);
    assert!(train.iter().all(|piece| piece.destination == train[0].destination));
    assert!(train.iter().all(|piece| piece.header.detail == u32::from(PIECE)));
    assert_eq!(train[0].header.length, 5000);
    let probe = bench.pass_to_sent();
    assert_eq!((probe.len(), probe[0].attempt()), (1, 1));
    let there = |mask: u32| move |header: &mut bluebridge_wire::Header| header.detail = mask;
    bench.reply(&Reply::to(&probe[0], Status::Incomplete).by_node(HOME).with(there(0b0111)));
    let rest = bench.sent_one();
    assert_eq!(usize::from(rest.header.offset), 4096);
    assert_eq!(rest.source, train[0].source);
    let mut last = rest;
    for _ in 0..3 {
        last = bench.pass_to_sent().remove(0);
    }
    assert_ne!(last.destination, train[0].destination, "another node may be chosen");
    assert_eq!(last.header.offset, 0, "and that one has no pieces");
    bench.reply(&Reply::to(&last, Status::Incomplete).by_node(HOME).with(there(0b0001)));
    assert_eq!(bench.sent().len(), 3);
    bench.reply(&grant(&last, 0));
    let confirm = bench.sent_one();
    assert_eq!((confirm.command, confirm.header.length), (Command::Confirm, 2));
    assert_eq!(confirm.header.target, pointer(0).to_ipv6());
    assert_eq!(
        bluebridge_wire::address::Fields::unpack(confirm.source).map(|f| f.node),
        Some(CLIENT)
    );
    bench.reply(&Reply::to(&confirm, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Pointer(pointer(0))));
    bench.end()
}

pub(super) fn a_smaller_piece_size_applies_from_the_next_train_on() -> Counters {
    let mut bench = Bench::open();
    for (piece_bytes, taken) in [(1100, 1100), (100, 1024), (9000, 4096)] {
        bench.requester.set_piece_bytes(piece_bytes);
        assert_eq!(bench.requester.config().piece_bytes, taken);
        bench.memory.0.insert(1, pattern(4096));
        bench.start(Operation::AllocWrite { server: None, length: 4096 }, 1);
        let train = bench.sent();
        assert_eq!(train.len(), 4096_usize.div_ceil(taken.into()));
        assert!(train.iter().all(|piece| piece.header.detail == u32::from(taken)));
        assert!(train.iter().all(|piece| piece.data.len() <= usize::from(taken)));
        bench.reply(&grant(&train[0], 0));
        let confirm = bench.sent_one();
        bench.reply(&Reply::to(&confirm, Status::Ok));
        assert_eq!(bench.completed().result, Ok(Output::Pointer(pointer(0))));
    }
    bench.end()
}

pub(super) fn a_train_states_its_own_piece_size() -> Counters {
    let mut bench = Bench::open();
    bench.memory.0.insert(1, pattern(4096));
    bench.start(Operation::AllocWrite { server: None, length: 4096 }, 1);
    let mut train = bench.sent();
    // The piece size changes while the train is in flight, in both directions.
    for piece_bytes in [1100, 4096] {
        bench.requester.set_piece_bytes(piece_bytes);
        let probe = bench.pass_to_sent();
        let incomplete = Reply::to(&probe[0], Status::Incomplete).by_node(HOME);
        bench.reply(&incomplete.with(|header| header.detail = 0b001));
        train.extend(probe);
        train.extend(bench.sent());
    }
    assert_eq!(train.len(), 3 + 2 * 3, "{train:?}");
    for piece in &train {
        assert_eq!(piece.header.detail, u32::from(PIECE), "one train has one piece size");
        assert!(piece.header.offset.is_multiple_of(PIECE), "{piece:?}");
    }
    bench.reply(&grant(&train[8], 0));
    let confirm = bench.sent_one();
    bench.reply(&Reply::to(&confirm, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Pointer(pointer(0))));
    bench.end()
}
