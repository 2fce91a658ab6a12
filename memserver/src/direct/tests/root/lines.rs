//! READs of whole pages of a line.

use std::{
    num::NonZeroU32,
    time::{Duration, Instant},
};

use bluebridge_protocol::store::{Access, Grant, PageStore};
use bluebridge_testkit::{ip, namespace::in_thread};
use bluebridge_wire::{
    Command,
    address::{LINE_PAGES, PAGE_BYTES},
};
use rand::{Rng, RngCore, SeedableRng, rngs::StdRng};
use rustix::{
    fd::OwnedFd,
    net::{AddressFamily, Protocol, RecvFlags, SocketFlags, SocketType, recv, socket_with},
};

use super::{
    frames::{HOME, frame_to, head, pseudo_sum_of},
    rig::{OTHER, REDIRECT, Rig, SERVER, SPACE},
};
use crate::{
    direct::{Places, ReadCounts, program::load},
    kept::PageRecord,
};

/// What arrives at the loopback interface, where programs that run without an interface send.
pub(super) struct Clones(OwnedFd);

impl Clones {
    /// In a network namespace of its own.
    pub(super) fn new() -> Self {
        ip("link set lo mtu 9000 up");
        let every_ipv6 = NonZeroU32::new(u32::from(0x86dd_u16.to_be())).map(Protocol::from_raw);
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, flags, every_ipv6);
        Self(socket.expect("the namespace is ours"))
    }

    pub(super) fn take(&self) -> Option<Vec<u8>> {
        let mut frame = vec![0; 10_000];
        let (bytes, _) = recv(&self.0, &mut frame[..], RecvFlags::empty()).ok()?;
        frame.truncate(bytes);
        Some(frame)
    }

    /// The next `count`; fewer if no more arrive.
    pub(super) fn collect(&self, count: usize) -> Vec<Vec<u8>> {
        let until = Instant::now() + Duration::from_secs(2);
        let mut frames = Vec::new();
        while frames.len() < count && Instant::now() < until {
            frames.extend(self.take());
        }
        frames
    }
}

/// The first page of an allocation of several lines that begins a line.
pub(super) fn first_of_line(grant: Grant) -> u64 {
    let pages = LINE_PAGES as u64;
    grant.location.page().next_multiple_of(pages) - grant.location.page()
}

/// A READ of pages, counted from the allocation's first.
pub(super) fn line_read(rig: &mut Rig, grant: Grant, first: u64, pages: u32) -> Vec<u8> {
    let (target, header) = rig.read(grant, first * PAGE_BYTES as u64, pages << 12);
    frame_to(Command::Read.code() | HOME, target, target, &header, &[])
}

#[test]
fn whole_pages_of_a_line_are_answered_as_the_responder_answers() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-lines"), Clones::new());
        let grant = rig.create(24);
        let start = first_of_line(grant);
        let mut random = StdRng::seed_from_u64(5);
        // One is not written: zeros.
        for page in (0..16).filter(|page| *page != 3) {
            let mut data = vec![0; PAGE_BYTES];
            random.fill_bytes(&mut data);
            rig.arena.write(grant.location.page() + page, 0, &data);
        }
        for round in 0..100 {
            let pages = random.random_range(2..=8_u32);
            let first = start + random.random_range(0..=8 - u64::from(pages));
            let read = line_read(&mut rig, grant, first, pages);
            let (action, last) = rig.run(&read);
            assert_eq!(action, REDIRECT, "{pages} pages: {:?}", rig.memory.counters.counts());
            let mut answers = clones.collect(pages as usize - 1);
            answers.push(last);
            let wanted = rig.respond_all(&read);
            assert_eq!(answers.len(), wanted.len(), "{pages} pages");
            for (number, (answer, wanted)) in answers.iter().zip(&wanted).enumerate() {
                assert!(
                    answer == wanted,
                    "page {number} of {pages} in round {round}, program:\n{:02x?}\nresponder:\n{:02x?}",
                    head(answer),
                    head(wanted)
                );
            }
            if round % 3 == 0 {
                let page = grant.location.page() + first;
                rig.arena.write(page, random.random_range(0..4000), &[1, 2, 3]);
            }
        }
        assert_eq!(rig.memory.counters.counts().answered, 100);
        assert_eq!(clones.take(), None, "nothing else was sent");
    });
}

#[test]
fn lines_that_may_not_be_read_as_a_whole_are_for_the_server() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-part-lines"), Clones::new());
        let form = |counts: &ReadCounts| counts.passed_form;
        let grant = rig.create(24);
        let start = first_of_line(grant);
        for page in 0..24 {
            rig.arena.write(grant.location.page() + page, 0, &[7; PAGE_BYTES]);
        }
        // Over the line's end, parts of pages, and one page with the home bit.
        let beyond = line_read(&mut rig, grant, start + 5, 4);
        rig.assert_passed(&beyond, form);
        let page_bytes = PAGE_BYTES as u64;
        for (from, length) in [(0, 8191), (1, 8192), (0, 8193), (64, 4096), (0, 4096), (0, 64)] {
            let (target, header) = rig.read(grant, start * page_bytes + from, length);
            let code = Command::Read.code() | HOME;
            let read = frame_to(code, target, target, &header, &[]);
            rig.assert_passed(&read, form);
        }
        for number in 0..4 {
            let page = grant.location.page() + start + number;
            rig.arena.set_leased(page, true);
            let read = line_read(&mut rig, grant, start, 4);
            rig.assert_passed(&read, |counts| counts.passed_page);
            rig.arena.set_leased(page, false);
            let before = rig.arena.record(page);
            for (what, record, reason) in unreadable(before) {
                println!("page {number}: {what}");
                rig.arena.set_record(page, record);
                rig.assert_passed(&read, reason);
            }
            rig.arena.set_record(page, before);
        }
        // The allocation is not confirmed.
        let head = grant.location.page();
        let before = rig.arena.record(head);
        rig.arena.set_record(head, PageRecord { is_complete: 0, ..before });
        let read = line_read(&mut rig, grant, start, 4);
        rig.assert_passed(&read, |counts| counts.passed_page);
        rig.arena.set_record(head, before);
        assert_eq!(clones.take(), None, "nothing was sent");
        assert_eq!(rig.run(&read).0, REDIRECT, "nothing is wrong any more");
        assert_eq!(clones.collect(3).len(), 3);
        // The whole allocation is freed.
        let access =
            Access { location: grant.location, length_bytes: 1, tag: grant.tag, space: SPACE };
        rig.arena.delete(access, 24).expect("its own");
        let read = line_read(&mut rig, grant, start, 4);
        rig.assert_passed(&read, |counts| counts.passed_page);
        assert_eq!(clones.take(), None, "nothing was sent");
    });
}

/// A record whose page may be read, changed so that it may not, and why readers pass it on.
pub(super) fn unreadable(before: PageRecord) -> [(&'static str, PageRecord, Reason); 6] {
    let page: Reason = |counts| counts.passed_page;
    let next = PageRecord { sequence: before.sequence + 2, ..before };
    [
        ("changes", PageRecord { sequence: before.sequence + 1, ..before }, |it| it.passed_change),
        ("leased", PageRecord { marks: PageRecord::LEASED, ..before }, page),
        ("freed", PageRecord { part: PART_NONE, ..next }, page),
        ("another space's", PageRecord { space: OTHER.0, ..next }, page),
        ("of another colour", PageRecord { colour: before.colour + 1, ..next }, page),
        ("not written", PageRecord { contents: CONTENTS_LEFTOVER, ..next }, page),
    ]
}

type Reason = fn(&ReadCounts) -> u64;

/// Of `shared.h`.
const PART_NONE: u8 = 0;
const CONTENTS_LEFTOVER: u8 = 1;

#[test]
fn the_sums_of_a_line_that_the_device_completes_stay_so() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-partial-line"), Clones::new());
        let grant = rig.create(24);
        let start = first_of_line(grant);
        for page in 0..24 {
            let value = u8::try_from(page).expect("it is small");
            rig.arena.write(grant.location.page() + page, 0, &[value; PAGE_BYTES]);
        }
        for pages in [2, 3, 8] {
            let mut read = line_read(&mut rig, grant, start, pages);
            let sum = pseudo_sum_of(&read);
            read[60..62].copy_from_slice(&sum);
            let (action, last) = rig.run(&read);
            assert_eq!(action, REDIRECT);
            let mut answers = clones.collect(pages as usize - 1);
            answers.push(last);
            let complete = rig.respond_all(&read);
            assert_eq!(answers.len(), complete.len());
            for (answer, complete) in answers.iter().zip(&complete) {
                assert_eq!(answer[60..62], pseudo_sum_of(answer));
                assert!(answer[..60] == complete[..60] && answer[62..] == complete[62..]);
            }
        }
    });
}

#[test]
fn lines_beyond_a_piece_a_link_or_a_session_are_for_the_server() {
    in_thread(|| {
        let mut rig = Rig::new("direct-other-lines");
        let grant = rig.create(24);
        let start = first_of_line(grant);
        for page in 0..24 {
            rig.arena.write(grant.location.page() + page, 0, &[7; PAGE_BYTES]);
        }
        // The interface is down, so its queue drops the clones: that is what queues do.
        let read = line_read(&mut rig, grant, start, 8);
        assert_eq!(rig.run(&read).0, REDIRECT);
        let form = |counts: &ReadCounts| counts.passed_form;
        // Pages in several pieces; a link that is too short for a page; no session.
        rig.session = rig.open_as(SPACE, 2048);
        rig.sequence = 0;
        let read = line_read(&mut rig, grant, start, 2);
        rig.assert_passed(&read, form);
        rig.open();
        rig.sequence = 0;
        let session = std::mem::replace(&mut rig.session, 0xdead_0001);
        let read = line_read(&mut rig, grant, start, 2);
        rig.assert_passed(&read, |counts| counts.passed_session);
        rig.session = session;
        let mtu = 4096 + 131;
        let places = Places { node: SERVER.0, incarnation: 3, mtu, ..rig.memory.places };
        rig.program = load(&places, Some(&rig.memory)).expect("the kernel takes it");
        let read = line_read(&mut rig, grant, start, 2);
        rig.assert_passed(&read, form);
    });
}
