use bluebridge_wire::{Command, Flags, NodeId, Pointer, Space, Status, Tag};

use super::super::{Counters, Event, HoldError, Policy};
use super::bench::{Bench, EPOCH, OWNER, TestRequest, check_reply, ms, pointer};

pub(super) fn a_held_page_is_busy_until_it_is_released() -> Counters {
    let mut bench = Bench::holding(Policy::Reject);
    bench.now = bench.now + ms(300);
    let read = TestRequest::new(Command::Read, 200).with(|header| header.flags = Flags::QUEUED);
    let busy = bench.reply(&read);
    assert_eq!((busy.status, busy.header.node), (Status::Busy, OWNER.0));
    assert_eq!((busy.header.lease_epoch, busy.header.lease_remaining_ms), (EPOCH, 700));
    assert_eq!((busy.header.flags, busy.header.detail), (Flags::default(), 0), "it cannot wait");
    // Another page, another colour, another home: not this lease.
    assert_eq!(bench.reply(&TestRequest::new(Command::Read, 4096)).status, Status::NotOwner);
    let here = pointer(200);
    let others = [Pointer { tag: Tag(1), ..here }, Pointer { node: NodeId(4), ..here }];
    for other in others {
        let request = TestRequest::new(Command::Read, 200)
            .changed(|request| request.to.tag = other.tag.0)
            .with(|header| header.target = other.to_ipv6());
        assert_eq!(bench.reply(&request).status, Status::NotOwner);
    }
    // The address may contain another node than the pointer: the one that the range moved to.
    let via = read.clone().changed(|request| request.to.node = NodeId(4));
    assert_eq!(bench.reply(&via).status, Status::Busy);
    // RENEW extends, a stale call changes nothing.
    let later = bench.now + ms(2000);
    assert_eq!(bench.owner.hold(bench.now, pointer(0), EPOCH, later, None, None), Ok(()));
    let older = bench.owner.hold(bench.now, pointer(0), EPOCH - 1, later, None, None);
    assert_eq!(older, Err(HoldError::Older));
    assert_eq!(bench.reply(&read).header.lease_remaining_ms, 2000);
    assert!(!bench.owner.release(pointer(0), EPOCH - 1));
    assert!(!bench.owner.release(pointer(4096), EPOCH));
    assert_eq!(bench.reply(&read).status, Status::Busy);
    assert!(bench.owner.release(pointer(123), EPOCH), "any byte of the page");
    assert!(!bench.owner.release(pointer(0), EPOCH));
    let gone = bench.reply(&read);
    assert_eq!((gone.status, gone.header.node, gone.header.lease_epoch), (Status::NotOwner, 0, 0));
    // The deadline ends it as well.
    bench.hold(0, EPOCH + 1);
    bench.now = bench.now + ms(1000);
    assert_eq!(bench.reply(&read).status, Status::NotOwner);
    bench.end()
}

pub(super) fn every_redirected_command_is_referred_to_the_home() -> Counters {
    let mut bench = Bench::with(|_| {});
    let end = bench.now + ms(1000);
    for policy in [Policy::Reject, Policy::Serve, Policy::Wait] {
        let held = bench.owner.hold(bench.now, pointer(0), EPOCH, end, Some(policy), None);
        assert_eq!(held, Ok(()));
        for command in [
            Command::CompareSwap,
            Command::Delete,
            Command::FetchAdd,
            Command::Read,
            Command::Update,
            Command::Write,
        ] {
            let request =
                TestRequest::new(command, 8).with(|header| header.flags = Flags::default());
            let busy = bench.reply(&request);
            assert_eq!((busy.status, busy.data.len()), (Status::Busy, 0), "{command}");
            assert!(!busy.header.flags.contains(Flags::QUEUED));
        }
        // The length of a DELETE that frees is a number of pages.
        let free = TestRequest::new(Command::Delete, 0).with(|header| header.length = 1_000_000);
        assert_eq!(bench.reply(&free).status, Status::Busy);
        let write = TestRequest::new(Command::Write, 0).with(|header| header.flags = Flags::QUEUED);
        assert!(!bench.reply(&write).header.flags.contains(Flags::QUEUED), "it never waits");
    }
    assert_eq!(bench.count(Event::Reject), 24);
    bench.end()
}

fn stale_read(offset: u64, length: u32, piece_bytes: u32) -> TestRequest {
    TestRequest::new(Command::Read, offset).with(|header| {
        header.flags = Flags::MAY_BE_STALE;
        (header.length, header.detail) = (length, piece_bytes);
    })
}

pub(super) fn last_committed_contents_are_served() -> Counters {
    let mut bench = Bench::with(|config| config.policy = Policy::Serve);
    let bytes: Vec<u8> = (0..4096).map(|at| u8::try_from(at % 251).expect("small")).collect();
    bench.hold_contents(0, EPOCH, 0, &bytes);
    let request = stale_read(96, 4000, 1400);
    bench.give(&request);
    let pieces = bench.sent();
    let mut end = 0;
    for piece in &pieces {
        check_reply(piece, &request);
        assert_eq!((piece.status, usize::from(piece.header.offset)), (Status::Ok, end));
        assert!(piece.header.flags.contains(Flags::LAST_COMMITTED));
        assert_eq!((piece.header.node, piece.header.lease_epoch), (OWNER.0, EPOCH));
        assert_eq!(piece.header.page_version, EPOCH, "it is of one version");
        assert_eq!(piece.data, bytes[96 + end..96 + end + piece.data.len()]);
        end += piece.data.len();
    }
    assert_eq!((pieces.len(), end), (3, 4000));
    // An extension keeps them; other contents under the same epoch are not possible.
    bench.hold(0, EPOCH);
    assert_eq!(bench.reply(&stale_read(0, 10, 4096)).data, bytes[..10]);
    // The lease ends before they are sent.
    bench.give(&request);
    bench.owner.release(pointer(0), EPOCH);
    bench.hold_contents(0, EPOCH + 1, 0, &[1; 4096]);
    let late = bench.sent();
    assert!(late.iter().all(|reply| reply.status == Status::NotOwner && reply.data.is_empty()));
    assert_eq!((late.len(), bench.count(Event::ServeLate)), (3, 3));
    assert_eq!(bench.reply(&stale_read(0, 2, 4096)).data, [1; 2]);
    bench.end()
}

pub(super) fn contents_that_are_not_kept_are_not_served() -> Counters {
    let mut bench = Bench::with(|config| config.policy = Policy::Serve);
    bench.hold_contents(0, EPOCH, 100, &[5; 50]);
    let statuses = |bench: &mut Bench, requests: &[TestRequest]| {
        requests.iter().map(|request| bench.reply(request).status).collect::<Vec<_>>()
    };
    let (ok, busy) = (Status::Ok, Status::Busy);
    let requests = [
        stale_read(100, 50, 1024),
        stale_read(149, 1, 1024),
        stale_read(99, 2, 1024),
        stale_read(149, 2, 1024),
        stale_read(100, 50, 1023),
        stale_read(100, 50, 4097),
        stale_read(100, 50, u32::MAX),
        stale_read(100, 50, 1024).with(|header| header.flags = header.flags.with(Flags::SELECTIVE)),
        stale_read(100, 50, 1024).with(|header| header.flags = Flags::default()),
        stale_read(100, 50, 1024).changed(|request| request.to.command = Command::Update.code()),
    ];
    let found = statuses(&mut bench, &requests);
    assert_eq!(found, [&[ok; 2][..], &[busy; 8][..]].concat());
    // Another lease on the page: the contents committed before are not the last committed ones now.
    bench.hold(0, EPOCH + 1);
    assert_eq!(statuses(&mut bench, &requests[..1]), [busy]);
    // Contents that cross the end of the page, and contents without room.
    bench.hold_contents(0, EPOCH + 1, 4090, &[1; 7]);
    bench.hold_contents(0, EPOCH + 1, usize::MAX, &[1; 7]);
    bench.hold_contents(4096, EPOCH, 0, &[1; 10]);
    bench.hold_contents(8192, EPOCH, 0, &[2; 10]);
    bench.hold_contents(12288, EPOCH, 0, &[3; 10]);
    assert_eq!(bench.count(Event::ContentsFull), 3);
    let found = statuses(&mut bench, &[stale_read(8192, 10, 1024), stale_read(12288, 10, 1024)]);
    assert_eq!(found, [ok, busy]);
    bench.end()
}

pub(super) fn leases_are_bounded_and_swept() -> Counters {
    let mut bench = Bench::with(|_| {});
    for page in 0..4 {
        bench.hold(page * 4096, EPOCH);
        bench.now = bench.now + ms(10);
    }
    let end = bench.now + ms(1000);
    let full = bench.owner.hold(bench.now, pointer(4 * 4096), EPOCH, end, None, None);
    assert_eq!((full, bench.owner.held_count()), (Err(HoldError::Full), 4));
    bench.hold(0, EPOCH);
    // Two of them expire.
    bench.now = bench.now + ms(985);
    bench.hold(4 * 4096, EPOCH);
    assert_eq!((bench.count(Event::Expire), bench.owner.held_count()), (2, 3));
    for (epoch, space) in [(0, 7), (1 << 48, 7), (1, 8)] {
        let mut page = pointer(0);
        page.space = Space(space);
        let error = bench.owner.hold(bench.now, page, epoch, end, None, None);
        assert_eq!(error, Err(HoldError::Space));
    }
    bench.end()
}

pub(super) fn a_reply_names_the_attempt_of_its_request() -> Counters {
    let mut bench = Bench::holding(Policy::Wait);
    for attempt in 1..4 {
        let flags = Flags::default().with_attempt(attempt);
        let read = TestRequest::new(Command::Read, 0).with(|header| header.flags = flags);
        let waits = read.clone().with(|header| {
            header.flags = flags.with(Flags::QUEUED);
            header.sequence = u64::from(attempt);
        });
        for request in [read, waits] {
            assert_eq!(bench.reply(&request).header.flags.attempt(), attempt);
        }
    }
    bench.owner.release(pointer(0), EPOCH);
    let notified = bench.sent();
    let attempts: Vec<_> = notified.iter().map(|reply| reply.header.flags.attempt()).collect();
    assert_eq!(attempts, [1, 2, 3]);
    bench.end()
}
