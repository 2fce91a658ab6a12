//! Sessions, their numbers, and shards that do not serve.

use bluebridge_protocol::{Timestamp, store::PageStore};
use bluebridge_testkit::namespace::in_thread;
use bluebridge_wire::{
    Command, Header, NodeId, Pointer, Status,
    address::{Fields, PAGE_BYTES},
    header::HEADER_BYTES,
    seal,
};

use super::{
    frames::{HOME, frame, frame_of, frame_to, parts, udp_frame},
    lines::{Clones, first_of_line},
    rig::{CLIENT, OTHER, REDIRECT, Rig, SERVER, SPACE, now},
};
use crate::direct::ReadCounts;

#[test]
fn sessions_and_numbers_that_the_responder_refuses_are_for_the_server() {
    let mut rig = Rig::new("direct-sessions");
    let in_session = |counts: &ReadCounts| counts.passed_session;
    let grant = rig.create(1);
    rig.write(grant, &[5; PAGE_BYTES]);
    let (target, header) = rig.read(grant, 0, 64);
    let read_with = |header: Header| frame(Command::Read, target, &header, &[]);
    rig.assert_answered(&read_with(header));
    let seen = rig.shared().last_seen();
    assert!(seen > Timestamp::ZERO && seen <= now(), "{seen:?}");

    // Numbers: the program raises the low water, and nothing below it is answered any more.
    let numbered = |sequence, answered_distance| Header { sequence, answered_distance, ..header };
    let (action, _) = rig.run(&read_with(numbered(100, 5)));
    // Before the responder sees anything of it.
    assert_eq!((action, rig.shared().low_water()), (REDIRECT, 95));
    rig.assert_passed(&read_with(numbered(94, 5)), in_session);
    rig.assert_answered(&read_with(numbered(95, 5)));
    assert_eq!(rig.shared().low_water(), 95, "it is never lowered");
    rig.assert_passed(&read_with(numbered(95 + 512, 512)), in_session);
    rig.assert_answered(&read_with(numbered(95 + 511, 511)));
    rig.assert_passed(&read_with(numbered(1 << 47, 0)), in_session);
    rig.assert_passed(&read_with(numbered(u64::MAX, 0)), in_session);
    let mut given_up = numbered(94, 0);
    given_up.length = 8;
    let late = frame(Command::Write, target, &given_up, &[6; 8]);
    let refused = rig.respond(&late).expect("a refusal");
    let (source, _, _) = parts(&refused);
    assert_eq!(Fields::unpack(source).expect("of the fabric").tag, Status::Expired.code());
    rig.assert_answered(&read_with(numbered(101, 0)));

    // While the responder executes a request of the session.
    let low_water = rig.shared().enter();
    rig.assert_passed(&read_with(numbered(102, 0)), in_session);
    rig.shared().leave(low_water);
    rig.assert_answered(&read_with(numbered(102, 0)));

    // Other sessions, incarnations and nodes.
    for session in [0, rig.session ^ 1 << 40, rig.session + 1, rig.session | 0xffff] {
        rig.assert_passed(&read_with(Header { session, ..numbered(102, 0) }), in_session);
    }
    let other = Header { incarnation: 2, ..numbered(102, 0) };
    let mut bytes = vec![0; HEADER_BYTES];
    Header { target, ..other }.emit(&mut bytes, 0);
    let plain = read_with(numbered(102, 0));
    let (source, destination, _) = parts(&plain);
    seal(source, destination, &mut bytes, &[]);
    rig.assert_passed(&udp_frame(source, destination, &bytes), in_session);
    let of_node = |node| {
        let places = (target, target);
        frame_of(SPACE, node, Command::Read.code(), places, &numbered(102, 0), &[])
    };
    rig.assert_passed(&of_node(NodeId(21)), in_session);
    rig.assert_answered(&of_node(CLIENT));

    // A space's session reads no page of another space.
    let foreign = Pointer { space: OTHER, node: SERVER, tag: grant.tag, location: grant.location };
    let to = foreign.to_ipv6();
    let session = rig.open_as(OTHER, 4096);
    let stranger = Header { session, ..numbered(1, 0) };
    let read = frame_of(OTHER, CLIENT, Command::Read.code(), (to, to), &stranger, &[]);
    rig.assert_passed(&read, |counts| counts.passed_page);

    // Closed sessions, and shards without authority.
    let close = Header { sequence: 400, length: 0, ..header };
    let mut reads = (0..3).map(|number| read_with(numbered(300 + number, 0)));
    let [under_epoch, of_other_epoch] =
        [1, 2].map(|range_epoch| read_with(Header { range_epoch, ..numbered(299, 0) }));
    rig.assert_answered(&under_epoch);
    rig.assert_passed(&of_other_epoch, |counts| counts.passed_closed);
    rig.arena.shared().shard.expect("it is shared").close();
    rig.assert_passed(&reads.next().expect("three"), |counts| counts.passed_closed);
    rig.responder.publish(&rig.arena);
    rig.assert_answered(&reads.next().expect("three"));
    let closed = rig.respond(&frame(Command::Close, target, &close, &[]));
    let closed = closed.expect("an answer");
    let (source, _, _) = parts(&closed);
    assert_eq!(Fields::unpack(source).expect("of the fabric").tag, Status::Ok.code());
    rig.assert_passed(&reads.next().expect("three"), in_session);
}

#[test]
fn lines_of_sessions_and_numbers_that_the_responder_refuses_are_for_the_server() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-line-sessions"), Clones::new());
        let in_session = |counts: &ReadCounts| counts.passed_session;
        let closed = |counts: &ReadCounts| counts.passed_closed;
        let grant = rig.create(24);
        let start = first_of_line(grant);
        (0..24).for_each(|page| rig.arena.write(grant.location.page() + page, 0, &[5; PAGE_BYTES]));
        let (target, header) = rig.read(grant, start * PAGE_BYTES as u64, 4 << 12);
        let code = Command::Read.code() | HOME;
        let read_with = |header: Header| frame_to(code, target, target, &header, &[]);
        let numbered =
            |sequence, answered_distance| Header { sequence, answered_distance, ..header };
        let assert_answered = |rig: &mut Rig, read: &[u8]| {
            assert_eq!(rig.run(read).0, REDIRECT);
            assert_eq!(clones.collect(3).len(), 3);
        };
        // The low water is raised, and nothing below it is answered any more.
        assert_answered(&mut rig, &read_with(numbered(100, 5)));
        assert_eq!(rig.shared().low_water(), 95);
        for number in [numbered(94, 5), numbered(95 + 512, 512), numbered(1 << 47, 0)] {
            rig.assert_passed(&read_with(number), in_session);
        }
        assert_eq!(rig.shared().low_water(), 95);
        // While the responder executes a request of the session.
        let low_water = rig.shared().enter();
        rig.assert_passed(&read_with(numbered(102, 0)), in_session);
        rig.shared().leave(low_water);
        // Other sessions and nodes, another epoch, and a shard that is closed.
        let session = rig.session ^ 1 << 40;
        rig.assert_passed(&read_with(Header { session, ..numbered(102, 0) }), in_session);
        let places = (target, target);
        let other = frame_of(SPACE, NodeId(21), code, places, &numbered(102, 0), &[]);
        rig.assert_passed(&other, in_session);
        rig.assert_passed(&read_with(Header { range_epoch: 2, ..numbered(102, 0) }), closed);
        rig.arena.shared().shard.expect("it is shared").close();
        rig.assert_passed(&read_with(numbered(102, 0)), closed);
        assert_eq!((clones.take(), rig.shared().low_water()), (None, 95), "nothing was done");
        rig.responder.publish(&rig.arena);
        assert_answered(&mut rig, &read_with(numbered(102, 0)));
    });
}
