use bluebridge_wire::{Command, Features, Flags, NodeId, Pointer, Space, WireCommand};
use proptest::prelude::*;

use super::super::{Counters, Event, Notice, NoticeKind, Policy};
use super::bench::{Bench, CLIENT, EPOCH, HOME, OWNER, TAKER, TestRequest, fields, pointer};

pub(super) fn requests_that_no_redirect_forwards_are_dropped() -> Counters {
    let mut bench = Bench::holding(Policy::Wait);
    let read = || TestRequest::read_waiting(1);
    let reply = WireCommand::reply(Command::Read).bits();
    let foreign = [
        read().changed(|request| request.from.space = Space(8)),
        read().changed(|request| request.to.space = Space(8)),
        read().with(|header| {
            header.target = Pointer { space: Space(8), ..pointer(0) }.to_ipv6();
        }),
    ];
    let formless = [
        read().with(|header| header.session = 0),
        read().with(|header| header.sequence = 0),
        read().with(|header| header.length = 0),
        read().with(|header| header.length = 4097),
        read().with(|header| header.length = u32::MAX),
        read().with(|header| header.required = Features(1)),
        read().with(|header| header.key_id = 1),
        read().with(|header| header.page_shift = 21),
        read().with(|header| header.target = pointer(8).to_ipv6()),
        read().changed(|request| request.to.tag ^= 1),
        read().changed(|request| request.to.node = NodeId::ALL),
        read().changed(|request| request.to.node = NodeId::ANY),
        read().changed(|request| request.from.node = NodeId::ALL),
        read().changed(|request| {
            (request.to.location, request.to.tag) = (1 << 63, 0);
            request.header.target =
                bluebridge_wire::address::Fields { command: 0, ..request.to }.to_ipv6();
        }),
        TestRequest::new(Command::Delete, 0)
            .with(|header| (header.flags, header.length) = (Flags::ZERO, 5000)),
    ];
    let unfit = [
        read().changed(|request| request.to.command |= WireCommand::HOME),
        read().changed(|request| request.to.command = 33),
        TestRequest::new(Command::Commit, 0),
        TestRequest::new(Command::Abort, 0),
        TestRequest::new(Command::Renew, 0),
        TestRequest::new(Command::Create, 0),
        TestRequest::new(Command::Open, 0),
        TestRequest::new(Command::Ping, 0),
        TestRequest::new(Command::Stat, 0),
    ];
    let replies = [read().changed(|request| {
        (request.from, request.to) = (request.to, request.from);
        request.from.command = reply;
    })];
    let groups = [
        (Event::DropSpace, &foreign[..]),
        (Event::DropForm, &formless),
        (Event::DropCommand, &unfit),
        (Event::DropReply, &replies),
    ];
    for (event, requests) in groups {
        for (at, request) in requests.iter().enumerate() {
            assert_eq!(bench.give(request), None);
            assert_eq!(bench.count(event), at as u64 + 1, "{event:?} {request:?}");
            assert!(bench.sent().is_empty());
        }
    }
    assert_eq!((bench.owner.held_count(), bench.owner.waiting_count()), (1, 0));
    bench.end()
}

fn notice(command: Command, pages: u32) -> TestRequest {
    TestRequest::new(command, 4096).with(|header| header.length = pages).changed(|request| {
        request.to.node = NodeId::ALL;
        request.from = fields(
            bluebridge_wire::EndpointAddress::of_shard(request.to.space, HOME, 0, 0).to_ipv6(),
        );
    })
}

pub(super) fn notices_come_from_memory_servers() -> Counters {
    let mut bench = Bench::holding(Policy::Reject);
    for (command, kind) in
        [(Command::Invalidate, NoticeKind::Invalidate), (Command::Notice, NoticeKind::Create)]
    {
        let taken = bench.give(&notice(command, 3));
        assert_eq!(taken, Some(Notice { kind, pointer: pointer(4096), pages: 3 }));
    }
    let invalidate = || notice(Command::Invalidate, 3);
    let moved = invalidate().changed(|request| request.from.node = TAKER);
    assert!(bench.give(&moved).is_some(), "the memory has moved to another server");
    let changed = [
        invalidate().changed(|request| request.from.node = CLIENT),
        invalidate().changed(|request| request.from.node = OWNER),
        invalidate().changed(|request| request.to.node = OWNER),
        invalidate().changed(|request| request.to.tag ^= 1),
        invalidate().with(|header| header.target = pointer(0).to_ipv6()),
        notice(Command::Notice, 0),
    ];
    for request in &changed {
        assert_eq!(bench.give(request), None, "{request:?}");
    }
    assert_eq!(bench.count(Event::DropNotice), changed.len() as u64);
    assert_eq!(bench.give(&invalidate().changed(|request| request.from.space = Space(8))), None);
    assert_eq!(bench.owner.held_count(), 1, "a notice does not change leases");
    bench.end()
}

proptest! {
    /// With any datagrams, leases stay as reported, replies are bounded, and nothing grows.
    #[test]
    fn nothing_that_is_received_changes_a_lease(
        requests in prop::collection::vec(
            (0_u8..64, 0_u64..40_000, any::<u32>(), any::<u16>(), 0_u64..3, any::<bool>()), 1..100,
        ),
        policy in prop::sample::select(&[Policy::Reject, Policy::Serve, Policy::Wait][..]),
    ) {
        let mut bench = Bench::with(|config| config.policy = policy);
        for page in 0..3 {
            bench.hold_contents(page * 4096, EPOCH, 0, &[7; 4096]);
        }
        for (command, offset, length, flags, number, polls) in requests {
            let length = if number == 0 { length } else { length % 5000 };
            let request = TestRequest::new(Command::Read, offset)
                .changed(|request| request.to.command = command)
                .with(|header| {
                    header.flags = Flags::from_bits(flags & !(0b11 << 8));
                    (header.length, header.detail) = (length, length);
                    header.sequence = number;
                });
            if command == 0 {
                continue;
            }
            bench.give(&request);
            let limit = 5 + 3;
            prop_assert!(bench.owner.replies.len() + bench.owner.waiting_count() <= limit);
            prop_assert!(bench.owner.waiting_count() <= 3);
            if polls {
                let data = bench.sent().into_iter().flat_map(|reply| reply.data);
                prop_assert!(data.into_iter().all(|byte| byte == 7));
            }
            bench.pass(super::bench::ms(1));
        }
        prop_assert_eq!(bench.owner.held_count(), 3);
        bench.sent();
        for page in 0..3 {
            prop_assert!(bench.owner.release(pointer(page * 4096), EPOCH));
        }
        let ends = bench.sent();
        prop_assert!(ends.iter().all(|reply| reply.status == bluebridge_wire::Status::NotOwner));
        prop_assert_eq!((bench.owner.held_count(), bench.owner.waiting_count()), (0, 0));
    }
}
