//! The effects of commands that are not refused.

use bluebridge_wire::Usage;

use super::*;

#[test]
pub(super) fn bytes_come_back_at_any_alignment_and_piece_size() {
    for piece_bytes in [1024, 1144, 1368, 2048, 4096] {
        let mut world = World::with(&config(), 64, piece_bytes);
        let at = world.create(16);
        for (offset, length) in
            [(0, 1), (5, 4096), (4095, 2), (100, 8000), (0, 32768), (4097, 28671), (32768, 32768)]
        {
            let data = stamp(length, (offset % 200) as u8);
            let place = moved_by(at, offset);
            assert_eq!(world.write(place, &data), Status::Ok);
            assert!(world.read(place, length) == data, "{piece_bytes} {offset} {length}");
        }
    }
}

#[test]
pub(super) fn replies_repeat_fields_of_the_request() {
    let mut world = World::new();
    let at = world.create(2);
    let request = world.read_request(moved_by(at, 4000), 200).attempt(3);
    let replies = world.send(&request);
    assert_eq!(replies.len(), 2);
    for reply in &replies {
        assert_eq!((reply.to, reply.port), (endpoint(CLIENT), PORT));
        assert_eq!((reply.from.space, reply.from.node), (SPACE, SERVER));
        assert_eq!(reply.from.location, world.routed(&request).to.location);
        assert_eq!(reply.header.target, request.header.target);
        assert_eq!(reply.header.session, world.session);
        assert_eq!(reply.header.sequence, request.header.sequence);
        assert_eq!(reply.header.flags.attempt(), 3);
        assert_eq!((reply.header.length, reply.header.incarnation), (200, 5));
        assert_eq!((reply.header.page_shift, reply.header.range_epoch), (12, 1));
        assert!(reply.header.credit > 0);
    }
    assert_eq!((replies[0].header.offset, replies[1].header.offset), (0, 96));
}

#[test]
pub(super) fn every_change_increments_the_version() {
    let mut world = World::new();
    let at = world.create(1);
    let mut versions = Vec::new();
    for round in 0..3 {
        world.write(at, &[round; 8]);
        let request = world.read_request(at, 8);
        versions.push(world.one(&request).header.page_version);
    }
    assert!(versions.is_sorted_by(|a, b| a < b), "{versions:?}");
}

#[test]
pub(super) fn selective_reads_return_the_requested_pieces() {
    let mut world = World::with(&config(), 16, 1368);
    let at = world.create(3);
    let data = stamp(3 * 4096, 7);
    world.write(at, &data);
    let wanted = 0b1_0010_0101;
    let request = world.read_request(at, 3 * 4096).with(|header| {
        (header.flags, header.detail) = (header.flags.with(Flags::SELECTIVE), wanted | 1 << 31);
    });
    let cut = Cut::new(0, 3 * 4096, 1368).unwrap();
    let expected: Vec<_> = (0..9)
        .filter(|number| wanted & 1 << number != 0)
        .map(|number| cut.piece(number).unwrap().range)
        .collect();
    let replies = world.send(&request);
    assert_eq!(replies.len(), 4);
    for (reply, range) in replies.iter().zip(expected) {
        assert_eq!(usize::from(reply.header.offset), range.start);
        assert_eq!(reply.data, data[range]);
    }
}

#[test]
pub(super) fn refused_pages_of_a_read_have_one_reply_each() {
    let mut world = World::new();
    let at = world.create(1);
    let other = world.create(1);
    world.create(1);
    assert_eq!(world.delete(other, 1), Status::Ok);
    let at_end = moved_by(at, 4000);
    let request = world.read_request(at_end, 96 + 4096 + 50);
    let replies = world.send(&request);
    let found: Vec<_> =
        replies.iter().map(|reply| (reply.status, reply.header.offset, reply.data.len())).collect();
    let expected =
        [(Status::Ok, 0, 96), (Status::NotAllocated, 96, 0), (Status::Ok, 96 + 4096, 50)];
    assert_eq!(found, expected);
    assert_eq!(replies[1].target.location, page_of(at, 1).location.bits());
}

#[test]
pub(super) fn zeroing_keeps_the_allocation() {
    let mut world = World::new();
    let at = world.create(2);
    world.write(at, &[9; 8192]);
    let request = TestRequest::new(Command::Delete, moved_by(at, 4000).to_ipv6());
    let request = world.next(request.with(|header| header.length = 200).with(zeroing));
    assert_eq!(world.status(&request), Status::Ok);
    let bytes = world.read(at, 8192);
    assert!(bytes[4000..4200].iter().all(|&byte| byte == 0));
    assert_eq!((bytes[3999], bytes[4200]), (9, 9));
    let request = TestRequest::new(Command::Delete, page_of(at, 1).to_ipv6());
    let request = world.next(request.with(|header| header.length = 8192).with(zeroing));
    let reply = world.one(&request);
    assert_eq!(reply.status, Status::Partial);
    assert_eq!(reply.pages, [Status::Ok, Status::NotAllocated]);
}

#[test]
pub(super) fn delete_returns_the_number_of_freed_pages() {
    let mut world = World::new();
    let at = world.create(3);
    let whole = TestRequest::new(Command::Delete, at.to_ipv6());
    let request = world.next(whole.clone().with(|header| header.length = 2));
    assert_eq!(world.status(&request), Status::BadLength);
    let request = world.next(TestRequest::new(Command::Delete, page_of(at, 1).to_ipv6()));
    assert_eq!(world.status(&request), Status::Unaligned);
    let request = world.next(whole.clone());
    let reply = world.one(&request);
    assert_eq!((reply.status, reply.header.length), (Status::Ok, 3));
    let request = world.next(whole);
    assert_eq!(world.status(&request), Status::NotAllocated);
    let again = world.create(1);
    assert_eq!(again.location, at.location);
    assert_eq!(world.delete(at, 0), Status::StaleTag);
}

#[test]
pub(super) fn atomics_are_big_endian_on_the_wire_and_little_endian_in_memory() {
    let mut world = World::new();
    let at = world.create(1);
    world.write(moved_by(at, 8), &0x0102_0304_0506_0708_u64.to_le_bytes());
    let atomic = |command, words: &[u64]| {
        let data: Vec<_> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        let request = TestRequest::new(command, moved_by(at, 8).to_ipv6()).carrying(&data);
        request.with(|header| header.length = 8)
    };
    for (command, words, previous, now) in [
        (Command::CompareSwap, &[1, 2][..], 0x0102_0304_0506_0708, 0x0102_0304_0506_0708),
        (Command::CompareSwap, &[0x0102_0304_0506_0708, u64::MAX], 0x0102_0304_0506_0708, u64::MAX),
        (Command::FetchAdd, &[3], u64::MAX, 2),
    ] {
        let request = world.next(atomic(command, words));
        let reply = world.one(&request);
        assert_eq!((reply.status, reply.data), (Status::Ok, u64::to_be_bytes(previous).to_vec()));
        assert_eq!(world.read(moved_by(at, 8), 8), now.to_le_bytes());
    }
    let mut beyond = atomic(Command::FetchAdd, &[1]);
    beyond.to.location += 4096;
    beyond.header.target = Fields { command: 0, ..beyond.to }.to_ipv6();
    let request = world.next(beyond);
    assert_eq!(world.status(&request), Status::NotAllocated);
}

#[test]
pub(super) fn out_of_memory_and_quota_have_different_statuses() {
    let mut world = World::with(&config(), 8, 4096);
    let create = |pages| TestRequest::server(Command::Create).with(|header| header.length = pages);
    let request = world.next(create(9));
    assert_eq!(world.status(&request), Status::OutOfMemory);
    world.store.quota_pages = 3;
    let request = world.next(create(4));
    assert_eq!(world.status(&request), Status::QuotaExceeded);
    world.create(3);
    let alloc =
        TestRequest::server(Command::AllocWrite).carrying(b"x").with(|header| header.length = 1);
    let request = world.next(alloc);
    assert_eq!(world.status(&request), Status::QuotaExceeded);
    // A store's failure is reported with its status, and the next request is served.
    world.store.refuses = Some(Status::Internal);
    let request = world.next(create(1));
    assert_eq!(world.status(&request), Status::Internal);
    (world.store.refuses, world.store.quota_pages) = (None, 8);
    world.create(1);
}

#[test]
pub(super) fn stat_and_ping_have_replies() {
    let mut world = World::new();
    let at = world.create(2);
    let request = world.next(TestRequest::server(Command::Stat));
    let usage = Usage::parse(&world.one(&request).data).unwrap();
    assert_eq!((usage.capacity_pages, usage.used_pages, usage.free_pages), (64, 2, 62));
    assert_eq!(usage.retired_pages, 3, "as the store says");
    assert_eq!((usage.session_count, usage.shard_count, usage.answered_count), (1, 1, 2));
    let request = world.next(TestRequest::new(Command::Stat, at.to_ipv6()));
    assert_eq!(world.status(&request), Status::Ok);
    world.responder.add_moved(0..8, NodeId(2)).unwrap();
    let request = world.next(TestRequest::new(Command::Stat, at.to_ipv6()));
    assert_eq!(world.status(&request), Status::Moved);
    for data in [&b""[..], b"hello", &[7; 64]] {
        let request = world.next(TestRequest::new(Command::Ping, at.to_ipv6()).carrying(data));
        let reply = world.one(&request);
        assert_eq!((reply.status, &reply.data[..]), (Status::Ok, data));
    }
}

#[test]
pub(super) fn alloc_write_takes_pieces_in_any_order() {
    let mut world = World::with(&config(), 16, 1024);
    let server = EndpointAddress::of_shard(SPACE, SERVER, 0, 0).to_ipv6();
    let data = stamp(9000, 3);
    let train = pieces(TestRequest::new(Command::AllocWrite, server), 0, &data, 1024);
    world.sequence += 1;
    let mut train: Vec<_> =
        train.into_iter().map(|request| world.numbered(request, world.sequence)).collect();
    train.reverse();
    let last = train.pop().unwrap();
    for request in &train {
        assert_eq!(world.send(request), []);
    }
    let reply = world.one(&train[2].clone().attempt(1));
    assert_eq!((reply.status, reply.header.detail), (Status::Incomplete, 0x1fe));
    for piece in [0, 2] {
        let longer = train[piece].clone().with(|header| header.length = 9001);
        assert_eq!(world.status(&longer), Status::Malformed, "{piece}");
    }
    let reply = world.one(&last);
    assert_eq!((reply.status, reply.header.length), (Status::Ok, 9000));
    let at = Pointer::from_ipv6(reply.header.target).unwrap();
    assert_eq!(world.one(&train[0]).header.target, reply.header.target);
    assert_eq!(world.read(at, 9000), data);
    assert!(world.read(moved_by(at, 9000), 3 * 4096 - 9000).iter().all(|&byte| byte == 0));
    assert_eq!(world.store.used_pages(), 3);
}
