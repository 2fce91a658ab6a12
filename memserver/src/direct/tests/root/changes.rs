//! Lines of which a page changes when an earlier one has been sent. A second program on the interface changes
//! its record whenever something is sent, so it happens at the same moment each time.

#![allow(unsafe_code, reason = "values of a map must be declared as plain data")]

use aya::{
    Ebpf, EbpfLoader,
    maps::PerCpuArray,
    programs::{LinkOrder, SchedClassifier, TcAttachType, tc::TcAttachOptions},
};
use bluebridge_protocol::store::PageStore;
use bluebridge_testkit::namespace::in_thread;
use bluebridge_testkit_bpf::CHANGE;
use bluebridge_wire::address::{PAGE_BYTES, PAGE_SHIFT, SHARD_SHIFT};
use zerocopy::IntoBytes;

use super::{
    lines::{Clones, first_of_line, line_read, unreadable},
    rig::{REDIRECT, Rig, SHARD},
};
use crate::{direct::map::Lent, kept::PageRecord};

/// From now on a page's record becomes `after` whenever something is sent; until the result is dropped.
fn change_when_sent(rig: &Rig, page: u64, after: PageRecord) -> Ebpf {
    let narrow = |number: u64| u32::try_from(number).expect("it is small");
    let records_of_value = (PAGE_BYTES / size_of::<PageRecord>()) as u64;
    let number = page & ((1 << (SHARD_SHIFT - PAGE_SHIFT)) - 1);
    let places = &rig.memory.places;
    let first = places.states + u32::from(SHARD) * places.stride;
    let value = first + narrow(number / records_of_value);
    let number = narrow(number % records_of_value);
    let after = <[u8; size_of::<PageRecord>()]>::try_from(after.as_bytes()).expect("its size");
    let lent = Lent::new(&rig.memory).expect("it can be pinned");
    let mut program = EbpfLoader::new()
        .override_global("record_value", &value, true)
        .override_global("record_number", &number, true)
        .override_global("record_after", &after, true)
        .map_pin_path("arena", lent.arena())
        .load(CHANGE.expect("clang was there when this was built"))
        .expect("the kernel takes its maps");
    let change = program.program_mut("change_record").expect("it is there");
    let change: &mut SchedClassifier = change.try_into().expect("its type");
    change.load().expect("the kernel takes it");
    let options = TcAttachOptions::TcxOrder(LinkOrder::first());
    change.attach_with_options("lo", TcAttachType::Egress, options).expect("the namespace is ours");
    program
}

#[test]
fn a_line_whose_page_becomes_unreadable_between_others_is_for_the_server() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-between"), Clones::new());
        let grant = rig.create(24);
        let start = first_of_line(grant);
        let page = grant.location.page() + start + 2;
        (0..24).for_each(|page| rig.arena.write(grant.location.page() + page, 0, &[7; PAGE_BYTES]));
        let before = rig.arena.record(page);
        for (what, after, reason) in unreadable(before) {
            let program = change_when_sent(&rig, page, after);
            let read = line_read(&mut rig, grant, start, 4);
            println!("{what}");
            rig.assert_passed(&read, reason);
            drop(program);
            let sent = clones.collect(2);
            assert_eq!(clones.take(), None, "those behind it were not sent");
            rig.arena.set_record(page, before);
            assert!(sent == rig.respond_all(&read)[..2], "those before it were sent");
        }
    });
}

#[test]
fn a_page_that_became_another_version_between_others_is_read_as_that() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-version"), Clones::new());
        let grant = rig.create(24);
        let start = first_of_line(grant);
        let page = grant.location.page() + start + 2;
        (0..24).for_each(|page| rig.arena.write(grant.location.page() + page, 0, &[7; PAGE_BYTES]));
        let before = rig.arena.record(page);
        let after = PageRecord { sequence: before.sequence + 2, ..before };
        let program = change_when_sent(&rig, page, after);
        let read = line_read(&mut rig, grant, start, 4);
        let (action, last) = rig.run(&read);
        drop(program);
        assert_eq!(action, REDIRECT);
        assert_eq!(rig.arena.version(page), before.version() + 1);
        let mut answers = clones.collect(3);
        answers.push(last);
        assert!(answers == rig.respond_all(&read));
    });
}

/// A page that keeps changing is tried again twice: it costs time in the client's or in the interrupt's, and the
/// server answers as well.
#[test]
fn a_page_that_keeps_changing_is_tried_again_twice() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-retries"), Clones::new());
        let grant = rig.create(24);
        let start = first_of_line(grant);
        (0..24).for_each(|page| rig.arena.write(grant.location.page() + page, 0, &[7; PAGE_BYTES]));
        for pages in [2, 4, 8] {
            // All pages but the last are sent, and then that one changes and does not stop.
            let page = grant.location.page() + start + u64::from(pages) - 1;
            let before = rig.arena.record(page);
            let read = line_read(&mut rig, grant, start, pages);
            assert_eq!(rig.run(&read).0, REDIRECT);
            assert_eq!(rounds(&rig), pages, "each page is tried once");
            clones.collect(pages as usize - 1);
            let after = PageRecord { sequence: before.sequence + 1, ..before };
            let program = change_when_sent(&rig, page, after);
            let read = line_read(&mut rig, grant, start, pages);
            rig.assert_passed(&read, |counts| counts.passed_change);
            drop(program);
            assert_eq!(rounds(&rig), pages + RETRIES);
            clones.collect(pages as usize - 1);
            rig.arena.set_record(page, before);
        }
    });
}

/// `LINE_RETRIES` of the program.
const RETRIES: u32 = 2;

/// `struct scratch` of the program; `rounds` is its last member.
const SCRATCH_BYTES: usize = 4304;

#[derive(Clone, Copy)]
struct Scratch([u8; SCRATCH_BYTES]);

// SAFETY: it is an array of bytes.
unsafe impl aya::Pod for Scratch {}

/// How often the program tried a page in its last READ of several pages.
fn rounds(rig: &Rig) -> u32 {
    let map = rig.program.map("scratches").expect("it is there");
    let scratches = PerCpuArray::<_, Scratch>::try_from(map).expect("of this size");
    let of_all = scratches.get(&0, 0).expect("it has one value");
    let rounds = of_all
        .iter()
        .map(|Scratch(bytes)| bytes.last_chunk().map_or(0, |it| u64::from_ne_bytes(*it)));
    let most = rounds.max().expect("there is a processor");
    u32::try_from(most).expect("it is small")
}
