use bluebridge_wire::{Command, Features, Flags, NodeId, Pointer, Space, WireCommand};
use proptest::prelude::*;

use super::super::{Counters, Event, Notice, NoticeKind, Policy};
use super::bench::{Ask, Bench, CLIENT, EPOCH, HOME, OWNER, fields, pointer};

pub(super) fn what_was_not_led_here_is_dropped() -> Counters {
    let mut bench = Bench::holding(Policy::Wait);
    let read = || Ask::read_waiting(1);
    let reply = WireCommand::reply(Command::Read).bits();
    let foreign = [
        read().bent(|ask| ask.from.space = Space(8)),
        read().bent(|ask| ask.to.space = Space(8)),
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
        read().bent(|ask| ask.to.tag ^= 1),
        read().bent(|ask| ask.to.node = NodeId::ALL),
        read().bent(|ask| ask.to.node = NodeId::ANY),
        read().bent(|ask| ask.from.node = NodeId::ALL),
        read().bent(|ask| {
            (ask.to.location, ask.to.tag) = (1 << 63, 0);
            ask.header.target = bluebridge_wire::address::Fields { command: 0, ..ask.to }.to_ipv6();
        }),
        Ask::new(Command::Delete, 0)
            .with(|header| (header.flags, header.length) = (Flags::ZERO, 5000)),
    ];
    let unfit = [
        read().bent(|ask| ask.to.command |= WireCommand::HOME),
        read().bent(|ask| ask.to.command = 33),
        Ask::new(Command::Commit, 0),
        Ask::new(Command::Abort, 0),
        Ask::new(Command::Renew, 0),
        Ask::new(Command::Create, 0),
        Ask::new(Command::Open, 0),
        Ask::new(Command::Ping, 0),
        Ask::new(Command::Stat, 0),
    ];
    let replies = [read().bent(|ask| {
        (ask.from, ask.to) = (ask.to, ask.from);
        ask.from.command = reply;
    })];
    let groups = [
        (Event::DropSpace, &foreign[..]),
        (Event::DropForm, &formless),
        (Event::DropCommand, &unfit),
        (Event::DropReply, &replies),
    ];
    for (event, asks) in groups {
        for (at, ask) in asks.iter().enumerate() {
            assert_eq!(bench.give(ask), None);
            assert_eq!(bench.count(event), at as u64 + 1, "{event:?} {ask:?}");
            assert!(bench.sent().is_empty());
        }
    }
    assert_eq!((bench.owner.held_count(), bench.owner.waiting_count()), (1, 0));
    bench.end()
}

fn notice(command: Command, pages: u32) -> Ask {
    Ask::new(command, 4096).with(|header| header.length = pages).bent(|ask| {
        ask.to.node = NodeId::ALL;
        ask.from =
            fields(bluebridge_wire::EndpointAddress::of_shard(ask.to.space, HOME, 0, 0).to_ipv6());
    })
}

pub(super) fn notices_come_from_their_memorys_node() -> Counters {
    let mut bench = Bench::holding(Policy::Reject);
    for (command, kind) in
        [(Command::Invalidate, NoticeKind::Invalidate), (Command::Notice, NoticeKind::Create)]
    {
        let taken = bench.give(&notice(command, 3));
        assert_eq!(taken, Some(Notice { kind, pointer: pointer(4096), pages: 3 }));
    }
    let invalidate = || notice(Command::Invalidate, 3);
    let bent = [
        invalidate().bent(|ask| ask.from.node = CLIENT),
        invalidate().bent(|ask| ask.from.node = OWNER),
        invalidate().bent(|ask| ask.to.node = OWNER),
        invalidate().bent(|ask| ask.to.tag ^= 1),
        invalidate().with(|header| header.target = pointer(0).to_ipv6()),
        notice(Command::Notice, 0),
    ];
    for ask in &bent {
        assert_eq!(bench.give(ask), None, "{ask:?}");
    }
    assert_eq!(bench.count(Event::DropNotice), bent.len() as u64);
    assert_eq!(bench.give(&invalidate().bent(|ask| ask.from.space = Space(8))), None);
    assert_eq!(bench.owner.held_count(), 1, "a notice changes nothing here");
    bench.end()
}

proptest! {
    /// Whatever comes, leases stay as they were told, answers are few, and nothing grows.
    #[test]
    fn nothing_that_is_received_changes_a_lease(
        asks in prop::collection::vec(
            (0_u8..64, 0_u64..40_000, any::<u32>(), any::<u16>(), 0_u64..3, any::<bool>()), 1..100,
        ),
        policy in prop::sample::select(&[Policy::Reject, Policy::Serve, Policy::Wait][..]),
    ) {
        let mut bench = Bench::with(|config| config.policy = policy);
        for page in 0..3 {
            bench.hold_contents(page * 4096, EPOCH, 0, &[7; 4096]);
        }
        for (command, offset, length, flags, number, polls) in asks {
            let length = if number == 0 { length } else { length % 5000 };
            let ask = Ask::new(Command::Read, offset)
                .bent(|ask| ask.to.command = command)
                .with(|header| {
                    header.flags = Flags::from_bits(flags & !(0b11 << 8));
                    (header.length, header.detail) = (length, length);
                    header.sequence = number;
                });
            if command == 0 {
                continue;
            }
            bench.give(&ask);
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
