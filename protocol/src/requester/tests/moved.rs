use bluebridge_wire::{Command, NodeId, Status, tlv};

use super::super::{Counters, Event, Failure, Operation, Output, Server};
use super::bench::{Bench, HOME, OTHER, Reply, SESSION, pattern, pointer};

const OTHER_SERVER: Server = Server { node: OTHER, shard: 0 };

fn bench() -> Bench {
    let mut bench = Bench::open();
    bench.open_session(OTHER_SERVER, SESSION + 1);
    bench
}

fn moved(sent: &super::bench::Sent, node: NodeId) -> Reply {
    Reply::to(sent, Status::Moved).with(|header| header.node = node.0)
}

pub(super) fn a_moved_range_is_followed_and_remembered() -> Counters {
    let mut bench = bench();
    bench.write(0, 100, 1);
    let first = bench.sent_one();
    assert_eq!(first.node, HOME);
    bench.reply(&moved(&first, OTHER));
    let second = bench.sent_one();
    assert_eq!(second.node, OTHER, "the address contains the node");
    assert_eq!(second.header.target, pointer(0).to_ipv6(), "the header contains the pointer");
    assert_eq!(second.header.session, SESSION + 1);
    bench.reply(&Reply::to(&second, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.start(Operation::FetchAdd { pointer: pointer(4096), addend: 1 }, 2);
    let third = bench.sent_one();
    assert_eq!(third.node, OTHER, "the line is known to have moved");
    bench.reply(&Reply::to(&third, Status::Ok).with_data(&[0; 8]));
    assert_eq!(bench.completed().result, Ok(Output::Previous(0)));
    bench.end()
}

pub(super) fn a_moved_block_is_remembered_as_a_whole() -> Counters {
    let mut bench = bench();
    bench.read(0, 10, 1);
    let first = bench.sent_one();
    bench.reply(&moved(&first, OTHER).with(|header| header.detail = 16));
    let second = bench.sent_one();
    bench.reply(&Reply::piece(&second, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    for (line, node) in [(1, OTHER), (0, OTHER), (2, HOME)] {
        bench.read(line * 32768, 10, 10 + line);
        let sent = bench.sent_one();
        assert_eq!(sent.node, node, "line {line}");
        bench.reply(&Reply::piece(&sent, 0, 1, &[1; 10]));
        assert_eq!(bench.completed().result, Ok(Output::Done));
    }
    bench.end()
}

pub(super) fn a_wrong_cached_move_leads_to_the_home() -> Counters {
    let mut bench = bench();
    bench.read(0, 10, 1);
    let first = bench.sent_one();
    bench.reply(&moved(&first, OTHER));
    let second = bench.sent_one();
    bench.reply(&Reply::to(&second, Status::WrongNode));
    let third = bench.sent_one();
    assert_eq!(third.node, HOME, "the range may have come back");
    bench.reply(&Reply::piece(&third, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.read(0, 10, 2);
    let fourth = bench.sent_one();
    assert_eq!(fourth.node, HOME);
    bench.reply(&Reply::to(&fourth, Status::WrongNode));
    let refused = Failure::Refused { status: Status::WrongNode, node: HOME };
    assert_eq!(bench.failure(), refused, "the status of the home is final");

    // The move to a node that does not reply is removed from the cache, too.
    bench.pass(core::time::Duration::from_millis(1));
    bench.read(0, 10, 3);
    let fifth = bench.sent_one();
    bench.reply(&moved(&fifth, OTHER));
    assert_eq!(bench.pass_to_end().result, Err(Failure::Unreachable { node: OTHER }));
    bench.read(0, 10, 4);
    let sixth = bench.sent_one();
    assert_eq!(sixth.node, HOME);
    bench.reply(&Reply::piece(&sixth, 0, 1, &[1; 10]));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn a_late_authority_is_waited_for() -> Counters {
    let mut bench = bench();
    bench.write(0, 10, 1);
    let mut pauses = 0;
    for _ in 0..20 {
        let home = bench.pass_to_sent().remove(0);
        assert_eq!(home.node, HOME);
        bench.reply(&moved(&home, OTHER));
        let there = bench.sent_one();
        assert_eq!(there.node, OTHER);
        bench.reply(&Reply::to(&there, Status::NoAuthority));
        bench.sent_nothing();
        bench.completed_nothing();
        pauses += 1;
    }
    assert_eq!(bench.count(Event::MovedForget), pauses);
    let home = bench.pass_to_sent().remove(0);
    bench.reply(&moved(&home, OTHER));
    let there = bench.sent_one();
    bench.reply(&Reply::to(&there, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));

    // The authority never arrives.
    bench.write(0x8000, 10, 2);
    let result = loop {
        for request in bench.sent() {
            let reply = match request.node {
                HOME => moved(&request, OTHER),
                _ => Reply::to(&request, Status::NoAuthority),
            };
            bench.reply(&reply);
        }
        match bench.requester.poll_completion() {
            Some(completion) => break completion.result,
            None if bench.requester.poll_timeout() > Some(bench.now) => bench.pass_to_timer(),
            None => {}
        }
    };
    let refused = Failure::Refused { status: Status::NoAuthority, node: OTHER };
    assert_eq!(result, Err(refused), "and nothing was written");
    bench.end()
}

pub(super) fn pages_that_moved_to_different_nodes_are_requested_one_by_one() -> Counters {
    let mut bench = bench();
    bench.read(0, 3 * 4096, 1);
    let read = bench.sent_one();
    let page = |number: u16| number * 4096;
    let third = NodeId(5);
    bench.open_session(Server { node: third, shard: 0 }, SESSION + 2);
    bench.reply(&moved(&read, third).with(|header| header.offset = page(2)));
    bench.reply(&moved(&read, OTHER).with(|header| header.offset = page(1)));
    for start in [0, 1400, 2800] {
        bench.reply(&Reply::piece(&read, start, 1, &vec![1; (4096 - start).min(1400)]));
    }
    let second = bench.sent_one();
    assert_eq!((second.node, second.header.target), (OTHER, pointer(4096).to_ipv6()));
    assert_eq!(second.header.length, 4096);
    for start in [0, 1400, 2800] {
        bench.reply(&Reply::piece(&second, start, 9, &vec![2; (4096 - start).min(1400)]));
    }
    let again = bench.sent_one();
    assert_eq!((again.node, again.header.target), (HOME, pointer(8192).to_ipv6()));
    bench.reply(&moved(&again, third));
    let last = bench.sent_one();
    assert_eq!(last.node, third);
    for start in [0, 1400, 2800] {
        bench.reply(&Reply::piece(&last, start, 4, &vec![3; (4096 - start).min(1400)]));
    }
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.memory.0[&1], [vec![1; 4096], vec![2; 4096], vec![3; 4096]].concat());

    bench.start(Operation::Zero { pointer: pointer(0x8000), length: 8192 }, 2);
    let zero = bench.sent_one();
    let mut partial = Reply::to(&zero, Status::Partial).with(|header| header.node = OTHER.0);
    partial.options = vec![0; tlv::emitted_bytes(2)];
    tlv::emit_page_statuses(&mut partial.options, &[Status::Moved, Status::Ok]);
    bench.reply(&partial);
    let rest = bench.sent_one();
    assert_eq!((rest.node, rest.command), (OTHER, Command::Delete));
    assert_eq!((rest.header.length, rest.data), (4096, Vec::new()));
    let rest = super::bench::Sent { data: pattern(0), ..rest };
    bench.reply(&Reply::to(&rest, Status::Ok));
    assert_eq!(bench.completed().result, Ok(Output::Done));
    bench.end()
}

pub(super) fn a_range_that_keeps_moving_ends_in_a_failure() -> Counters {
    let mut bench = bench();
    bench.read(0, 10, 1);
    for hop in 0..5 {
        let request = bench.sent_one();
        let (here, there) = if hop % 2 == 0 { (HOME, OTHER) } else { (OTHER, HOME) };
        assert_eq!(request.node, here);
        bench.reply(&moved(&request, there));
    }
    assert_eq!(bench.failure(), Failure::TooManyHops { node: OTHER });
    bench.read(0x8000, 10, 2);
    let request = bench.sent_one();
    bench.reply(&moved(&request, NodeId::ANY));
    assert_eq!(bench.failure(), Failure::Violation { node: HOME });
    assert_eq!(bench.count(Event::MovedFollow), 5);
    bench.end()
}

pub(super) fn the_effect_on_a_changed_page_is_reported() -> Counters {
    let mut bench = bench();
    bench.start(Operation::Zero { pointer: pointer(0), length: 8192 }, 1);
    let zero = bench.sent_one();
    let mut partial = Reply::to(&zero, Status::Partial).with(|header| header.node = OTHER.0);
    partial.options = vec![0; tlv::emitted_bytes(2)];
    tlv::emit_page_statuses(&mut partial.options, &[Status::Moved, Status::Ok]);
    bench.reply(&partial);
    for hop in 1..5 {
        let request = bench.sent_one();
        let there = if hop % 2 == 0 { OTHER } else { HOME };
        bench.reply(&moved(&request, there));
    }
    // The first page was not zeroed, but the second was.
    let failure = bench.failure();
    assert!(matches!(failure, Failure::OutcomeUnknown { .. }), "{failure:?}");
    bench.end()
}

pub(super) fn a_page_is_requested_again_in_a_new_session() -> Counters {
    let mut bench = bench();
    bench.read(0, 8192, 1);
    let lost = bench.sent_one();
    for start in [4096, 5496, 6896] {
        bench.reply(&Reply::piece(&lost, start, 1, &vec![1; (8192 - start).min(1400)]));
    }
    bench.reply(&Reply::to(&lost, Status::NoSession));
    let open = bench.pass_to_sent().remove(0);
    bench.accept(&open, 0x7777);
    let again = bench.sent_one();
    assert_eq!((again.header.length, again.header.detail), (8192, 0));
    for start in [0, 1400, 2800] {
        bench.reply(&Reply::piece(&again, start, 1, &vec![2; (4096 - start).min(1400)]));
    }
    // It was complete in the lost session, but only the new session counts.
    bench.reply(&moved(&again, OTHER).with(|header| header.offset = 4096));
    let rest = bench.sent_one();
    assert_eq!((rest.node, rest.header.length), (OTHER, 4096));
    for start in [0, 1400, 2800] {
        bench.reply(&Reply::piece(&rest, start, 9, &vec![3; (4096 - start).min(1400)]));
    }
    assert_eq!(bench.completed().result, Ok(Output::Done));
    assert_eq!(bench.memory.0[&1], [vec![2; 4096], vec![3; 4096]].concat());
    bench.end()
}
