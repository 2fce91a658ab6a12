use bluebridge_wire::{Command, Flags, Status};

use super::super::{Counters, Event, Policy};
use super::bench::{Bench, EPOCH, OWNER, TestRequest, check_reply, ms, pointer};

pub(super) fn a_waiter_is_notified_when_the_lease_ends() -> Counters {
    let mut bench = Bench::holding(Policy::Wait);
    let read = TestRequest::read_waiting(1);
    let busy = bench.reply(&read);
    assert_eq!((busy.status, busy.header.node), (Status::Busy, OWNER.0));
    assert_eq!((busy.header.flags, busy.header.detail), (Flags::QUEUED, 100));
    assert_eq!((busy.header.lease_epoch, busy.header.lease_remaining_ms), (EPOCH, 1000));
    let update = TestRequest::new(Command::Update, 0).with(|header| {
        (header.sequence, header.flags) = (2, Flags::QUEUED.with_attempt(0));
    });
    let update = update.changed(|request| request.port += 1);
    assert!(bench.reply(&update).header.flags.contains(Flags::QUEUED));
    // A copy of the request does not wait twice.
    assert!(bench.reply(&read).header.flags.contains(Flags::QUEUED));
    assert_eq!((bench.count(Event::WaitAgain), bench.owner.waiting_count()), (1, 2));
    bench.owner.release(pointer(0), EPOCH);
    let replies = bench.sent();
    assert_eq!(replies.len(), 2);
    for (end, request) in replies.iter().zip([&read, &update]) {
        check_reply(end, request);
        assert_eq!(end.status, Status::NotOwner);
    }
    assert_eq!(bench.owner.waiting_count(), 0);

    // A new lease under a higher epoch: the old one ended without a report.
    bench.hold(0, EPOCH + 1);
    bench.reply(&read);
    bench.hold(0, EPOCH + 1);
    assert_eq!(bench.sent().len(), 0, "that was an extension");
    bench.hold(0, EPOCH + 2);
    assert_eq!(bench.sent()[0].status, Status::NotOwner);

    // The lease expires before the waiting time is over.
    let soon = bench.now + ms(60);
    bench.owner.hold(bench.now, pointer(0), EPOCH + 3, soon, None, None).expect("held");
    assert_eq!(bench.reply(&read).header.detail, 60);
    assert_eq!(bench.owner.poll_timeout(), Some(soon));
    bench.pass(ms(59));
    assert_eq!((bench.sent().len(), bench.owner.waiting_count()), (0, 1));
    bench.pass(ms(1));
    assert_eq!(bench.sent()[0].status, Status::NotOwner);
    assert_eq!((bench.owner.poll_timeout(), bench.owner.held_count()), (None, 0));

    // An expired lease is replaced, and its waiter is notified.
    for page in 0..4 {
        bench.hold(page * 4096, EPOCH + 4);
    }
    bench.reply(&read);
    bench.now = bench.now + ms(1000);
    bench.hold(4 * 4096, EPOCH);
    assert_eq!(bench.sent()[0].status, Status::NotOwner);
    bench.end()
}

pub(super) fn a_waiter_whose_time_is_over_gets_no_reply() -> Counters {
    let mut bench = Bench::holding(Policy::Wait);
    bench.reply(&TestRequest::read_waiting(1));
    bench.pass(ms(50));
    bench.reply(&TestRequest::read_waiting(2));
    bench.pass(ms(50));
    assert_eq!((bench.count(Event::WaitOver), bench.owner.waiting_count()), (1, 1));
    assert!(bench.sent().is_empty(), "the requester uses its own timer");
    bench.pass(ms(50));
    assert_eq!((bench.count(Event::WaitOver), bench.owner.poll_timeout()), (2, None));
    // The limit of a configured hour is a minute, and a lease with less than 1 ms left is over.
    let mut bench = Bench::with(|config| {
        (config.policy, config.wait) = (Policy::Wait, ms(3_600_000));
    });
    let end = bench.now + ms(7_200_000);
    bench.owner.hold(bench.now, pointer(0), EPOCH, end, None, None).expect("held");
    let busy = bench.reply(&TestRequest::read_waiting(1));
    assert_eq!((busy.header.detail, busy.header.lease_remaining_ms), (60_000, u16::MAX));
    let soon = bench.now + ms(1) / 2;
    bench.owner.hold(bench.now, pointer(0), EPOCH, soon, None, None).expect("held");
    assert!(!bench.reply(&TestRequest::read_waiting(2)).header.flags.contains(Flags::QUEUED));
    let mut bench = Bench::holding(Policy::Wait);
    bench.reply(&TestRequest::read_waiting(1));
    bench.pass(ms(100));
    bench.end()
}

pub(super) fn waiting_is_bounded_and_in_order() -> Counters {
    let mut bench = Bench::holding(Policy::Wait);
    bench.hold(4096, EPOCH);
    for number in [3, 1, 2] {
        assert!(
            bench.reply(&TestRequest::read_waiting(number)).header.flags.contains(Flags::QUEUED)
        );
    }
    let busy = bench.reply(&TestRequest::read_waiting(4));
    assert_eq!((busy.status, busy.header.flags), (Status::Busy, Flags::default()));
    assert_eq!(bench.count(Event::WaitFull), 1);
    bench.owner.release(pointer(4096), EPOCH);
    assert_eq!(bench.owner.waiting_count(), 3, "they wait for another page");
    bench.owner.release(pointer(0), EPOCH);
    let numbers: Vec<_> = bench.sent().iter().map(|reply| reply.header.sequence).collect();
    assert_eq!(numbers, [3, 1, 2], "in order of arrival");
    bench.end()
}

pub(super) fn replies_are_bounded() -> Counters {
    let mut bench = Bench::holding(Policy::Wait);
    // No reply is sent: each waiter keeps room for its final reply.
    for number in 1..20 {
        bench.give(&TestRequest::read_waiting(number));
    }
    assert_eq!(bench.owner.waiting_count(), 3);
    assert_eq!(bench.owner.replies.len(), 5);
    assert_eq!(bench.count(Event::DropFull), 14);
    bench.owner.release(pointer(0), EPOCH);
    assert_eq!(bench.owner.replies.len(), 8);
    assert!(bench.owner.replies.capacity() >= 8, "no memory is allocated later");
    let replies = bench.sent();
    assert!(replies[5..].iter().all(|reply| reply.status == Status::NotOwner));
    bench.give(&TestRequest::read_waiting(30));
    assert_eq!(bench.sent()[0].status, Status::NotOwner);
    bench.end()
}
