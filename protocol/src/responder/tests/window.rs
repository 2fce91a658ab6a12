//! Section 3 of the contract: numbers, and exactly-once.

use super::*;

fn add(at: Pointer) -> TestRequest {
    TestRequest::new(Command::FetchAdd, at.to_ipv6())
        .carrying(&1_u64.to_be_bytes())
        .with(|header| header.length = 8)
}

fn value(world: &mut World, at: Pointer) -> u64 {
    u64::from_le_bytes(world.read(at, 8).try_into().unwrap())
}

#[test]
pub(super) fn every_mutating_command_is_repeated_from_its_record() {
    let mut world = World::new();
    let at = world.create(4);
    let other = world.create(2);
    world.low_water = world.sequence + 1;
    let server = TestRequest::server;
    let requests = [
        add(at),
        TestRequest::new(Command::CompareSwap, at.to_ipv6())
            .carrying(&[0; 16])
            .with(|header| header.length = 8),
        server(Command::Create).with(|header| header.length = 2),
        server(Command::AllocWrite).carrying(b"new").with(|header| header.length = 3),
        TestRequest::new(Command::Write, at.to_ipv6())
            .carrying(b"12345678")
            .with(|header| header.length = 8),
        TestRequest::new(Command::Confirm, at.to_ipv6()).with(|header| header.length = 4),
        TestRequest::new(Command::Delete, at.to_ipv6())
            .with(|header| header.length = 99)
            .with(zeroing),
        TestRequest::new(Command::Delete, other.to_ipv6()).with(|header| header.length = 2),
        // Refusals are recorded as well.
        server(Command::Create).with(|header| header.length = 1000),
        TestRequest::new(Command::Delete, other.to_ipv6()),
    ];
    let mut first = Vec::new();
    for (number, request) in (world.low_water..).zip(&requests) {
        let request = world.numbered(request.clone(), number);
        let reply = world.one(&request);
        first.push((request, reply));
    }
    let used = world.store.used_pages();
    for _ in 0..2 {
        for (request, reply) in &first {
            let again = world.one(&request.clone().attempt(1));
            let flags = reply.header.flags.with_attempt(1);
            let mut expected = reply.clone();
            (expected.header.flags, expected.header.credit) = (flags, again.header.credit);
            assert_eq!(again, expected);
        }
    }
    assert_eq!(world.store.used_pages(), used);
    assert_eq!(world.event(Event::ReplyRepeated), 20);
}

#[test]
pub(super) fn a_duplicate_has_no_second_effect_until_its_number_expires() {
    let mut world = World::new();
    let at = world.create(1);
    let request = world.next(add(at));
    for _ in 0..5 {
        assert_eq!(world.one(&request).data, 0_u64.to_be_bytes());
    }
    assert_eq!(value(&mut world, at), 1);
    assert_eq!(world.status(&request), Status::Expired);
    assert_eq!(value(&mut world, at), 1);
}

#[test]
pub(super) fn reads_execute_again() {
    let mut world = World::new();
    let at = world.create(1);
    let request = world.read_request(at, 4);
    world.low_water = request.header.sequence;
    assert_eq!(world.one(&request).data, [0; 4]);
    let write = TestRequest::new(Command::Write, at.to_ipv6()).carrying(b"new!");
    let write = world.numbered(write.with(|h| h.length = 4), world.sequence + 1);
    assert_eq!(world.status(&write), Status::Ok);
    assert_eq!(world.one(&request).data, *b"new!");
}

#[test]
pub(super) fn the_window_is_512_numbers_from_the_highest_low_water() {
    let mut world = World::new();
    let at = world.create(1);
    world.low_water = 10;
    let at_number = |world: &World, number, distance| {
        let mut request = world.numbered(add(at), number);
        request.header.answered_distance = distance;
        request
    };
    let request = at_number(&world, 521, 511);
    assert_eq!(world.status(&request), Status::Ok);
    let request = at_number(&world, 522, 512);
    assert_eq!(world.status(&request), Status::BeyondWindow);
    // A late request with a lower low water does not lower the window.
    let request = at_number(&world, 12, 11);
    assert_eq!(world.status(&request), Status::Ok);
    let request = at_number(&world, 9, 8);
    assert_eq!(world.status(&request), Status::Expired);
    // A distance larger than the number is equivalent to low water 0.
    let request = at_number(&world, 11, 60000);
    assert_eq!(world.status(&request), Status::Ok);
    // A jump discards everything below.
    let request = at_number(&world, u64::MAX, 0);
    assert_eq!(world.status(&request), Status::Ok);
    let request = at_number(&world, 521, 0);
    assert_eq!(world.status(&request), Status::Expired);
}

#[test]
pub(super) fn numbers_may_come_in_any_order() {
    let mut world = World::new();
    let at = world.create(1);
    let base = world.sequence;
    world.low_water = base + 1;
    // 7 and 512 have no common divisor, so every number comes once.
    for step in 0..512 {
        let number = base + 1 + step * 7 % 512;
        let request = world.numbered(add(at), number);
        assert_eq!(world.status(&request), Status::Ok);
        assert_eq!(world.status(&request.attempt(1)), Status::Ok);
    }
    world.sequence = base + 512;
    assert_eq!(value(&mut world, at), 512);
}

#[test]
pub(super) fn a_number_identifies_one_command() {
    let mut world = World::new();
    let at = world.create(1);
    let request = world.next(add(at));
    assert_eq!(world.status(&request), Status::Ok);
    let read = TestRequest::new(Command::Read, at.to_ipv6()).with(|header| header.length = 8);
    let read = world.numbered(read, world.sequence);
    assert_eq!(world.status(&read), Status::Malformed);
    assert_eq!(world.status(&request), Status::Ok);
}

#[test]
pub(super) fn overload_and_shutdown_are_not_recorded() {
    let mut world = World::new();
    let at = world.create(1);
    let create = TestRequest::server(Command::Create).with(|header| header.length = 1);
    let request = world.next(create);
    world.store.refuses = Some(Status::Overloaded);
    assert_eq!(world.status(&request), Status::Overloaded);
    world.store.refuses = None;
    assert_eq!(world.status(&request), Status::Ok);

    let train = world.write_train(at, b"before the end");
    assert_eq!(world.status(&train[0]), Status::Ok);
    world.responder.begin_shutdown();
    let late = world.numbered(add(at), world.sequence + 1);
    assert_eq!(world.status(&late), Status::ShuttingDown);
    assert_eq!(world.status(&train[0]), Status::Ok, "a recorded reply is sent again");
    assert_eq!(world.status(&open(CLIENT, 1, 99, 4096)), Status::ShuttingDown);
    assert_eq!(world.status(&TestRequest::anywhere(Command::Create, 4, 1)), Status::ShuttingDown);
    let close = world.next(TestRequest::server(Command::Close));
    assert_eq!(world.status(&close), Status::Ok);
}
