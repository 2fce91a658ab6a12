//! READs of one page: answers, and pages that may not be read.

use bluebridge_protocol::store::{Access, Grant, PageStore};
use bluebridge_wire::{Command, Datagram, Location, address::PAGE_BYTES};
use rand::{Rng, RngCore, SeedableRng, rngs::StdRng};

use super::{
    frames::{frame, parts, pseudo_sum_of},
    rig::{PAGES, REDIRECT, Rig, SERVER, SPACE},
};
use crate::direct::{Places, ReadCounts, program::load};

#[test]
fn what_the_kernel_answers_is_what_the_responder_answers() {
    let mut rig = Rig::new("direct-answers");
    let mut random = StdRng::seed_from_u64(1);
    let grants = [1, 3, 8].map(|pages| rig.create(pages));
    for grant in grants {
        let mut data = vec![0; PAGE_BYTES];
        random.fill_bytes(&mut data);
        rig.write(grant, &data);
    }
    for round in 0..500 {
        let grant = grants[random.random_range(0..grants.len())];
        let length = match random.random_range(0..4) {
            0 => 4096,
            1 => 64,
            _ => random.random_range(1..=4096_u32),
        };
        let start = random.random_range(0..=4096 - u64::from(length));
        let (target, header) = rig.read(grant, start, length);
        let frame = frame(Command::Read, target, &header, &[]);
        rig.assert_answered(&frame);
        if round % 7 == 0 {
            let mut data = vec![0; random.random_range(1..=64)];
            random.fill_bytes(&mut data);
            let access =
                Access { location: grant.location, length_bytes: 64, tag: grant.tag, space: SPACE };
            rig.arena.check(access).expect("its own");
            rig.arena.write(grant.location.page(), random.random_range(0..4000), &data);
        }
    }
    assert!(rig.memory.counters.counts().answered >= 500);
}

#[test]
fn a_sum_that_the_device_completes_stays_so() {
    let mut rig = Rig::new("direct-partial");
    let grant = rig.create(1);
    rig.write(grant, &[5; PAGE_BYTES]);
    for length in [4096, 64, 7] {
        let (target, header) = rig.read(grant, 0, length);
        let mut read = frame(Command::Read, target, &header, &[]);
        let sum = pseudo_sum_of(&read);
        read[60..62].copy_from_slice(&sum);
        let (action, answer) = rig.run(&read);
        assert_eq!(action, REDIRECT);
        assert_eq!(answer[60..62], pseudo_sum_of(&answer));
        let (source, destination, payload) = parts(&answer);
        let datagram = Datagram::parse(source, destination, payload).expect("the CRC is right");
        assert!(datagram.data == vec![5; length as usize]);
        let complete = rig.respond(&read).expect("an answer");
        assert!(answer[..60] == complete[..60] && answer[62..] == complete[62..]);
    }
}

#[test]
fn pages_that_may_not_be_read_are_for_the_server() {
    let mut rig = Rig::new("direct-pages");
    let page_reason = |counts: &ReadCounts| counts.passed_page;
    let grant = rig.create(3);
    rig.write(grant, &[5; PAGE_BYTES]);
    let read_of = |rig: &mut Rig, grant: Grant, start| {
        let (target, header) = rig.read(grant, start, 4096);
        frame(Command::Read, target, &header, &[])
    };
    for start in [0, 4096, 8192] {
        let read = read_of(&mut rig, grant, start);
        rig.assert_answered(&read);
    }
    // Another colour, a page of no allocation, a page beyond the arena.
    let stale = Grant { tag: bluebridge_wire::Tag(grant.tag.0 + 1), ..grant };
    let read = read_of(&mut rig, stale, 0);
    rig.assert_passed(&read, page_reason);
    let read = read_of(&mut rig, grant, 3 << 12);
    rig.assert_passed(&read, page_reason);
    let read = read_of(&mut rig, grant, PAGES << 12);
    rig.assert_passed(&read, |counts| counts.passed_form);
    // Also of the first shard, behind whose pages are those of the next.
    let location = Location::new(grant.location.generation(), PAGES << 12).expect("small");
    let read = read_of(&mut rig, Grant { location, ..grant }, 0);
    rig.assert_passed(&read, |counts| counts.passed_form);
    // Leased.
    let page = grant.location.page();
    rig.arena.set_leased(page, true);
    let read = read_of(&mut rig, grant, 0);
    rig.assert_passed(&read, page_reason);
    rig.arena.set_leased(page, false);
    rig.assert_answered(&read);
    // Not confirmed: also a body's READ.
    let unconfirmed = rig.arena.create(SPACE, 2).expect("room");
    rig.arena.write(unconfirmed.location.page() + 1, 0, &[6; PAGE_BYTES]);
    let read = read_of(&mut rig, unconfirmed, 4096);
    rig.assert_passed(&read, page_reason);
    rig.arena.complete(unconfirmed.location);
    rig.assert_answered(&read);
    // Freed, and allocated again: what the earlier allocation left is not shown.
    let access = |grant: Grant| Access {
        location: grant.location,
        length_bytes: 1,
        tag: grant.tag,
        space: SPACE,
    };
    let read = read_of(&mut rig, grant, 0);
    rig.arena.delete(access(grant), 3).expect("its own");
    rig.assert_passed(&read, page_reason);
    let mut again = None;
    for _ in 0..200 {
        let other = rig.create(1);
        if other.location.page() == page {
            again = Some(other);
            break;
        }
    }
    let again = again.expect("the page is allocated again");
    assert_ne!(again.tag, grant.tag);
    rig.assert_passed(&read, page_reason);
    let read = read_of(&mut rig, again, 0);
    rig.assert_passed(&read, page_reason);
    rig.arena.write(page, 10, &[7; 8]);
    rig.assert_answered(&read);
}

#[test]
fn a_page_that_changes_is_for_the_server() {
    let mut rig = Rig::new("direct-changes");
    let grant = rig.create(1);
    rig.write(grant, &[5; PAGE_BYTES]);
    let (target, header) = rig.read(grant, 0, 4096);
    let read = frame(Command::Read, target, &header, &[]);
    rig.arena.stop_in_change(grant.location.page());
    rig.assert_passed(&read, |counts| counts.passed_change);
}

#[test]
fn several_datagrams_are_for_the_server() {
    let mut rig = Rig::new("direct-pieces");
    let grant = rig.create(1);
    rig.write(grant, &[5; PAGE_BYTES]);
    let form = |counts: &ReadCounts| counts.passed_form;
    rig.session = rig.open_as(SPACE, 1024);
    rig.sequence = 0;
    for (length, is_answered) in [(1024, true), (1025, false), (4096, false)] {
        let (target, header) = rig.read(grant, 0, length);
        let read = frame(Command::Read, target, &header, &[]);
        if is_answered { rig.assert_answered(&read) } else { rig.assert_passed(&read, form) }
    }
    // A link that is too short for the answer.
    rig.open();
    rig.sequence = 0;
    let places = Places { node: SERVER.0, incarnation: 3, mtu: 1500, ..rig.memory.places };
    rig.program = load(&places, Some(&rig.memory)).expect("the kernel takes it");
    for (length, is_answered) in [(1500 - 132, true), (1500 - 131, false)] {
        let (target, header) = rig.read(grant, 0, length);
        let read = frame(Command::Read, target, &header, &[]);
        if is_answered { rig.assert_answered(&read) } else { rig.assert_passed(&read, form) }
    }
}
