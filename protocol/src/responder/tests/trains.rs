//! Section 4 of the contract: trains in any order, twice, interleaved, interrupted.

use super::{
    leases::{Client, OTHER, millis},
    *,
};

/// A small generator, so that orders vary and are reproducible.
struct Order(u64);

impl Order {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as usize % bound
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for place in (1..items.len()).rev() {
            items.swap(place, self.below(place + 1));
        }
    }
}

#[test]
pub(super) fn any_order_with_duplicates_writes_once() {
    let mut world = World::with(&config(), 32, 1024);
    let at = world.create(16);
    let mut order = Order(1);
    for round in 0..200_u8 {
        let start = order.below(32768);
        let data = stamp(1 + order.below(32768 - start), round);
        let place = moved_by(at, start as u64);
        let mut train = world.write_train(place, &data);
        let extra: Vec<_> = train.iter().filter(|_| order.below(3) == 0).cloned().collect();
        train.extend(extra);
        order.shuffle(&mut train);
        let replies: Vec<_> = train.iter().flat_map(|request| world.send(request)).collect();
        assert!(!replies.is_empty() && replies.iter().all(|reply| reply.status == Status::Ok));
        assert!(world.read(place, data.len()) == data);
    }
    assert_eq!(world.responder.trains.free_buffer_count(), 1024);
    assert!(world.event(Event::PieceDuplicate) > 100);
}

#[test]
pub(super) fn interleaved_trains_of_two_sessions_stay_apart() {
    let mut world = World::with(&config(), 32, 1024);
    let at = world.create(8);
    let first = world.session;
    world.now = world.now + Duration::from_micros(1);
    let low = world.write_train(at, &stamp(16384, 1));
    world.reopen(1024);
    assert_ne!(world.session, first);
    let high = world.write_train(page_of(at, 4), &stamp(16384, 2));
    let mut order = Order(5);
    let mut both: Vec<_> = low.into_iter().chain(high).collect();
    order.shuffle(&mut both);
    let replies: Vec<_> = both.iter().flat_map(|request| world.send(request)).collect();
    assert_eq!(replies.len(), 2);
    assert_ne!(replies[0].header.session, replies[1].header.session);
    assert!(world.read(at, 16384) == stamp(16384, 1));
    assert!(world.read(page_of(at, 4), 16384) == stamp(16384, 2));
}

#[test]
pub(super) fn a_page_is_written_only_when_all_its_pieces_are_there() {
    let mut world = World::with(&config(), 8, 1024);
    let at = world.create(2);
    let train = world.write_train(at, &[7; 8192]);
    for request in &train[..7] {
        assert_eq!(world.send(request), []);
    }
    assert_eq!((world.store.byte(0, 0), world.store.byte(0, 4095)), (7, 7));
    assert!((0..4096).all(|place| world.store.byte(1, place) == 0));
    assert_eq!(world.status(&train[7]), Status::Ok);
    assert!((0..4096).all(|place| world.store.byte(1, place) == 7));
}

#[test]
pub(super) fn a_late_copy_of_a_piece_does_not_undo_a_newer_write() {
    for piece_bytes in [4096, 2048] {
        let mut world = World::with(&config(), 8, piece_bytes);
        let at = world.create(2);
        let old = world.write_train(at, &[1; 8192]);
        let per_page = 4096 / usize::from(piece_bytes);
        for request in &old[..per_page] {
            assert_eq!(world.send(request), []);
        }
        // The first page of the old train is written; a newer request overwrites it.
        let newer = world.train(Command::Write, at, &[2; 8], world.sequence + 1);
        assert_eq!(world.status(&newer[0]), Status::Ok);
        for request in &old[..per_page] {
            assert_eq!(world.send(request), []);
        }
        assert_eq!(world.store.byte(0, 0), 2);
        let rest: Vec<_> = old[per_page..].iter().flat_map(|request| world.send(request)).collect();
        assert_eq!((rest.len(), rest[0].status), (1, Status::Ok));
        assert_eq!((world.store.byte(0, 0), world.store.byte(0, 8)), (2, 1));
    }
}

#[test]
pub(super) fn incomplete_reports_the_arrived_pieces() {
    let mut world = World::with(&config(), 8, 1024);
    let at = world.create(3);
    let train = world.write_train(at, &[7; 3 * 4096]);
    let reply = world.one(&train[9].clone().attempt(1));
    assert_eq!((reply.status, reply.header.detail), (Status::Incomplete, 1 << 9));
    for number in [0, 1, 2, 3, 5] {
        assert_eq!(world.send(&train[number]), []);
    }
    let reply = world.one(&train[5].clone().attempt(2));
    assert_eq!((reply.status, reply.header.detail), (Status::Incomplete, 0b10_0010_1111));
    assert_eq!(reply.header.flags.attempt(), 2);
    assert_eq!(world.event(Event::PieceDuplicate), 1);
    // Buffers may be reclaimed at any time; the finished page stays recorded.
    world.pass(Duration::from_secs(2));
    assert_eq!(world.event(Event::TrainTimedOut), 1);
    let reply = world.one(&train[4].clone().attempt(3));
    assert_eq!((reply.status, reply.header.detail), (Status::Incomplete, 0b1_1111));
    for number in [5, 6, 7, 8, 9, 10] {
        assert_eq!(world.send(&train[number]), []);
    }
    assert_eq!(world.status(&train[11]), Status::Ok);
    assert_eq!(world.event(Event::PageWrittenJoined), 3);
}

#[test]
pub(super) fn a_page_refused_in_the_middle_makes_it_partial() {
    let mut world = World::with(&config(), 16, 2048);
    let at = world.create(1);
    let middle = world.create(1);
    world.create(1);
    let mut train = world.write_train(at, &[5; 3 * 4096]);
    world.low_water = world.sequence;
    // Both pieces of half of the middle page have arrived when the page is deleted.
    assert_eq!(world.send(&train[2]), []);
    let delete = TestRequest::new(Command::Delete, middle.to_ipv6());
    let delete = world.numbered(delete, world.sequence + 1);
    assert_eq!(world.status(&delete), Status::Ok);
    assert_eq!(world.responder.trains.free_buffer_count(), 1023);
    assert_eq!(world.send(&train[3]), []);
    assert_eq!(world.responder.trains.free_buffer_count(), 1024, "its buffer is free at once");
    train.drain(2..4);
    let replies: Vec<_> = train.iter().flat_map(|request| world.send(request)).collect();
    assert_eq!(replies.len(), 1);
    assert_eq!(replies[0].status, Status::Partial);
    assert_eq!(replies[0].pages, [Status::Ok, Status::NotAllocated, Status::Ok]);
    assert!((0..4096).all(|place| world.store.byte(1, place) == 0));
    assert_eq!((world.store.byte(0, 9), world.store.byte(2, 9)), (5, 5));
    // The record repeats the statuses.
    let again = world.one(&train[0].clone().attempt(1));
    assert_eq!((again.status, &again.pages), (Status::Partial, &replies[0].pages));
    assert_eq!(world.responder.trains.free_buffer_count(), 1024);
}

#[test]
pub(super) fn a_status_common_to_all_pages_is_the_status_of_the_reply() {
    let mut world = World::with(&config(), 16, 4096);
    let stale = pointer(0, 9);
    let train = world.write_train(stale, &[5; 3 * 4096]);
    let replies: Vec<_> = train.iter().flat_map(|request| world.send(request)).collect();
    assert_eq!(replies.len(), 1);
    assert_eq!((replies[0].status, &replies[0].pages[..]), (Status::NotAllocated, &[][..]));
}

#[test]
pub(super) fn a_range_that_moves_during_a_train_is_partial_and_names_the_node() {
    let mut world = World::with(&config(), 16, 4096);
    let at = world.create(2);
    let train = world.write_train(at, &[5; 8192]);
    assert_eq!(world.send(&train[0]), []);
    world.responder.add_moved(0..8, NodeId(44)).unwrap();
    let reply = world.one(&train[1]);
    assert_eq!((reply.status, reply.header.node), (Status::Partial, 44));
    assert_eq!(reply.pages, [Status::Ok, Status::Moved]);
    let train = world.write_train(at, &[5; 8192]);
    let reply = world.one(&train[0]);
    assert_eq!((reply.status, reply.header.node), (Status::Moved, 44));
    assert_eq!(world.status(&train[1]), Status::Moved);
}

#[test]
pub(super) fn contradicting_pieces_do_not_disturb_a_train() {
    let mut world = World::with(&config(), 16, 2048);
    let at = world.create(4);
    let train = world.write_train(at, &[5; 8192]);
    assert_eq!(world.send(&train[0]), []);
    let change = |change: fn(&mut TestRequest)| {
        let mut request = train[1].clone();
        change(&mut request);
        request
    };
    for changed in [
        change(|request| request.header.length -= 4096),
        change(|request| request.header.offset += 1),
        change(|request| request.data.truncate(2047)),
        change(|request| request.header.page_shift = 16),
        change(|request| {
            request.to.location += 8192;
            request.header.target = Fields { command: 0, ..request.to }.to_ipv6();
        }),
        change(|request| {
            request.to.tag ^= 1;
            request.header.target = Fields { command: 0, ..request.to }.to_ipv6();
        }),
    ] {
        assert_eq!(world.status(&changed), Status::Malformed, "{changed:?}");
    }
    assert_eq!(world.send(&train[1]), []);
    assert_eq!(world.send(&train[2]), []);
    assert_eq!(world.status(&train[3]), Status::Ok);
}

#[test]
pub(super) fn an_abandoned_train_frees_its_buffers() {
    let mut world = World::with(&config(), 16, 2048);
    let at = world.create(4);
    let train = world.write_train(at, &[5; 16384]);
    for piece in [0, 2, 4] {
        assert_eq!(world.send(&train[piece]), []);
    }
    assert_eq!(world.responder.trains.free_buffer_count(), 1021);
    let next = world.next(TestRequest::server(Command::Ping));
    assert_eq!(world.status(&next), Status::Ok);
    assert_eq!(world.responder.trains.free_buffer_count(), 1024);
    assert_eq!(world.event(Event::TrainForgotten), 1);
    assert_eq!(world.status(&train[1]), Status::Expired);
}

#[test]
pub(super) fn trains_lose_their_buffers_to_others_only_when_idle() {
    let config = Config { limits: Limits { buffer_pages: 8, ..Limits::default() }, ..config() };
    let mut world = World::with(&config, 32, 1024);
    let at = world.create(16);
    let old = world.write_train(at, &[1; 32768]);
    for page in 0..8 {
        assert_eq!(world.send(&old[page * 4]), []);
    }
    let number = world.sequence + 1;
    let young = world.train(Command::Write, page_of(at, 8), &[2; 4096], number);
    let reply = world.one(&young[0].clone().attempt(1));
    assert_eq!((reply.status, reply.header.detail), (Status::Incomplete, 0));
    assert_eq!(world.event(Event::PieceBeyondShare), 1);
    world.now = world.now + Duration::from_millis(20);
    for request in &young[..3] {
        assert_eq!(world.send(request), []);
    }
    assert_eq!(world.status(&young[3]), Status::Ok);
    assert_eq!(world.event(Event::TrainPressed), 1);
    let reply = world.one(&old[1].clone().attempt(1));
    assert_eq!((reply.status, reply.header.detail), (Status::Incomplete, 0b10));
    let rest: Vec<_> = old.iter().enumerate().filter(|(number, _)| *number != 1).collect();
    let replies: Vec<_> = rest.into_iter().flat_map(|(_, request)| world.send(request)).collect();
    assert_eq!(replies.len(), 1);
    assert_eq!(replies[0].status, Status::Ok);
    assert_eq!(world.responder.trains.free_buffer_count(), 8);
}

fn with_buffers(buffer_pages: u16, node_buffer_pages: u16) -> Config {
    Config { limits: Limits { buffer_pages, node_buffer_pages, ..Limits::default() }, ..config() }
}

#[test]
pub(super) fn a_repeated_piece_does_not_keep_its_train() {
    let mut world = World::with(&config(), 16, 1024);
    let at = world.create(2);
    let train = world.write_train(at, &[5; 8192]);
    for request in &train[..5] {
        assert_eq!(world.send(request), []);
    }
    // A piece of the finished page, and one that waits for the others of its page.
    world.pass(millis(600));
    for piece in [0, 4] {
        assert_eq!(world.send(&train[piece]), []);
    }
    assert_eq!(world.event(Event::PieceDuplicate), 2);
    world.pass(millis(600));
    assert_eq!(world.event(Event::TrainTimedOut), 1);
    assert_eq!(world.responder.trains.free_buffer_count(), 1024);
    assert_eq!(world.send(&train[5]), []);
    world.pass(millis(600));
    assert_eq!(world.send(&train[6]), []);
    world.pass(millis(600));
    assert_eq!(world.event(Event::TrainTimedOut), 1, "a new piece keeps it");
}

#[test]
pub(super) fn repeated_pieces_do_not_keep_buffers_that_others_need() {
    let mut world = World::with(&with_buffers(8, 8), 32, 1024);
    let at = world.create(16);
    let train = world.write_train(at, &[1; 32768]);
    for page in 0..8 {
        assert_eq!(world.send(&train[page * 4]), []);
    }
    let mut other = Client::with(&mut world, OTHER, 1, 1024);
    let request = other.request(Command::Write, page_of(at, 8), 4096);
    let young = pieces(request, 0, &[2; 4096], 1024);
    for _ in 0..4 {
        assert_eq!(world.send(&young[0]), []);
        world.now = world.now + millis(5);
        for page in 0..8 {
            assert_eq!(world.send(&train[page * 4]), []);
        }
    }
    assert_eq!(world.event(Event::PiecePressed), 4);
    for request in &young[..3] {
        assert_eq!(world.send(request), []);
    }
    assert_eq!(world.status(&young[3]), Status::Ok);
    assert_eq!(world.event(Event::TrainPressed), 1);
}

#[test]
pub(super) fn one_node_leaves_train_buffers_to_others() {
    let mut world = World::with(&with_buffers(32, 16), 64, 1024);
    let at = world.create(32);
    // Every page of two trains, and then one more: always new pieces.
    for (number, line) in (0..3).zip([0, 8, 16]) {
        let sequence = world.sequence + 1 + number;
        let train = world.train(Command::Write, page_of(at, line), &[1; 32768], sequence);
        for page in 0..8 {
            assert_eq!(world.send(&train[page * 4]), []);
        }
    }
    assert_eq!(world.responder.trains.free_buffer_count(), 16);
    assert_eq!(world.event(Event::PieceBeyondShare), 8);
    // Other nodes write and commit whole lines.
    let mut other = Client::with(&mut world, OTHER, 1, 1024);
    let there = page_of(at, 24);
    let request = other.request(Command::Write, there, 32768);
    let replies: Vec<_> = pieces(request, 0, &[2; 32768], 1024)
        .iter()
        .flat_map(|request| world.send(request))
        .collect();
    assert_eq!((replies.len(), replies[0].status), (1, Status::Ok));
    let epoch = other.lease(&mut world, there, 32768);
    let commit = other.commit(there, &[3; 32768], epoch);
    let replies: Vec<_> = commit.iter().flat_map(|request| world.send(request)).collect();
    assert_eq!((replies.len(), replies[0].status), (1, Status::Ok));
    assert_eq!((world.store.byte(24, 0), world.store.byte(31, 4095)), (3, 3));
    // A node that used its share continues when one of its own trains was idle.
    world.now = world.now + millis(20);
    let third = world.train(Command::Write, page_of(at, 16), &[1; 32768], world.sequence + 3);
    assert_eq!(world.send(&third[0]), []);
    assert_eq!(world.event(Event::TrainPressed), 1);
    assert_eq!(world.event(Event::PieceBeyondShare), 8);
}

#[test]
pub(super) fn a_space_leaves_train_buffers_to_others() {
    let spaces = vec![SPACE, Space(8)];
    let mut world = World::with(&Config { spaces, ..with_buffers(32, 32) }, 64, 1024);
    let at = world.create(32);
    let first = world.write_train(at, &[1; 32768]);
    let mut other = Client::with(&mut world, OTHER, 1, 1024);
    let request = other.request(Command::Write, page_of(at, 8), 32768);
    let second = pieces(request, 0, &[1; 32768], 1024);
    let mut third = Client::with(&mut world, NodeId(22), 1, 1024);
    let request = third.request(Command::Write, page_of(at, 16), 32768);
    let third = pieces(request, 0, &[1; 32768], 1024);
    for train in [first, second, third] {
        for page in 0..8 {
            assert_eq!(world.send(&train[page * 4]), []);
        }
    }
    assert_eq!(world.responder.trains.free_buffer_count(), 16, "half is the other space's");
    assert_eq!(world.event(Event::PieceBeyondShare), 8);
}

#[test]
pub(super) fn a_queued_read_is_sent_before_its_page_changes() {
    let mut world = World::with(&config(), 32, 4096);
    let at = world.create(8);
    let far = world.create(8);
    world.write(at, &[1; 4096]);
    let read = world.read_request(at, 4096);
    world.offer(&read).unwrap();
    assert!(world.responder.has_page_replies());
    // A change of another line may come first, a change of this one may not.
    let other = world.train(Command::Write, page_of(far, 4), &[9; 8], world.sequence + 1);
    world.offer(&other[0]).unwrap();
    let blocked = [
        world.train(Command::Write, page_of(at, 1), &[2; 8], world.sequence + 2).remove(0),
        world.numbered(TestRequest::new(Command::Delete, far.to_ipv6()), world.sequence + 3),
        open(NodeId(21), 1, 1, 4096),
    ];
    for request in &blocked {
        assert_eq!(world.offer(request), Err(DrainFirst));
    }
    world.now = world.now + Duration::from_secs(100);
    assert_eq!(world.responder.handle_timeout(world.now, &mut world.store), Err(DrainFirst));
    let replies = world.drain();
    assert_eq!(replies.len(), 2);
    assert_eq!(replies[0].data, [1; 4096]);
    for request in &blocked {
        assert_eq!(world.status(request), Status::Ok);
    }
    assert_eq!(world.event(Event::DrainFirst), 3);
}

#[test]
pub(super) fn a_queued_read_of_guessed_pages_is_sent_before_they_are_filled_or_reused() {
    let mut world = World::with(&config(), 32, 1024);
    world.sequence = 1;
    let train = pieces(TestRequest::server(Command::AllocWrite), 0, &stamp(3000, 7), 1024);
    let train: Vec<_> = train.into_iter().map(|request| world.numbered(request, 1)).collect();
    assert_eq!(world.send(&train[0]), []);
    let read = TestRequest::new(Command::Read, pointer(0, 1).to_ipv6())
        .with(|header| header.length = 3000);
    world.offer(&world.numbered(read, 2)).unwrap();
    assert!(world.responder.has_page_replies());
    let create = TestRequest::server(Command::Create).with(|header| header.length = 1);
    assert_eq!(world.offer(&train[1]), Err(DrainFirst));
    assert_eq!(world.offer(&world.numbered(create, 3)), Err(DrainFirst));
    assert_eq!(world.drain().len(), 3);
    world.offer(&train[1]).unwrap();
}

#[test]
pub(super) fn a_queued_read_is_sent_before_its_page_changes_at_another_address() {
    let mut world = World::new();
    let (own, _, foreign) = world.create_adopted();
    let read = world.read_request(foreign, 4096);
    world.offer(&read).unwrap();
    let write = world.train(Command::Write, page_of(own, 8), b"x", world.sequence + 1).remove(0);
    assert_eq!(world.offer(&write), Err(DrainFirst));
    assert_eq!(world.drain()[0].status, Status::Ok);
    world.offer(&write).unwrap();
}

#[test]
pub(super) fn the_queue_of_replies_is_bounded() {
    let config = Config { limits: Limits { reply_count: 64, ..Limits::default() }, ..config() };
    let mut world = World::with(&config, 32, 1024);
    let at = world.create(8);
    let read = world.read_request(at, 32768);
    assert_eq!(world.offer(&read), Ok(()));
    assert_eq!(world.responder.reply_count(), 32);
    assert_eq!(world.offer(&read), Err(DrainFirst));
    assert_eq!(world.responder.transmits(&world.store).count(), 32);
    world.responder.release(10);
    assert_eq!(world.offer(&read), Ok(()));
    world.responder.release(1000);
    assert!(!world.responder.has_page_replies());
    assert_eq!(world.drain(), []);
}

#[test]
fn a_queued_read_is_sent_before_its_page_changes_at_a_foreign_address() {
    let mut world = World::new();
    let (own, _, foreign) = world.create_adopted();
    let read = world.read_request(page_of(own, 8), 4096);
    world.offer(&read).unwrap();
    let write = world.train(Command::Write, foreign, b"x", world.sequence + 1).remove(0);
    assert_eq!(world.offer(&write), Err(DrainFirst));
    assert_eq!(world.drain()[0].data, [0; 4096]);
    assert_eq!(world.status(&write), Status::Ok);
}
