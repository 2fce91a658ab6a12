//! READs beside a core that writes the same pages all the time.

use std::{
    collections::BTreeSet,
    hint, iter,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use aya::programs::{TestRun as _, TestRunOptions};
use bluebridge_protocol::store::PageStore;
use bluebridge_testkit::namespace::in_thread;
use bluebridge_wire::{Command, Datagram, address::PAGE_BYTES};

use super::{
    frames::{check_piece, frame, parts},
    lines::{Clones, first_of_line, line_read},
    rig::{NEXT, Rig},
};
use crate::direct::program::classifier;

/// Whether to go on: for two seconds, or longer if not everything was seen on a busy machine.
pub(super) fn is_worth_it(began: Instant, is_all_seen: bool) -> bool {
    let limit = Duration::from_secs(if is_all_seen { 2 } else { 30 });
    began.elapsed() < limit
}

/// Ends the writer.
pub(super) struct Stop<'a>(pub(super) &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn pages_that_are_written_all_the_time_are_never_torn() {
    let mut rig = Rig::new("direct-torn");
    let grant = rig.create(1);
    rig.write(grant, &[0; PAGE_BYTES]);
    let (target, header) = rig.read(grant, 0, 4096);
    let read = frame(Command::Read, target, &header, &[]);
    let page = grant.location.page();
    let Rig { mut arena, mut program, memory, .. } = rig;
    let stop = AtomicBool::new(false);
    let is_over = || stop.load(Ordering::Relaxed);
    let (mut answered, mut changed) = (0_u32, BTreeSet::new());
    let written = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut written = 0_u64;
            while !is_over() {
                written += 1;
                arena.write(page, 0, &[written.to_le_bytes()[0]; PAGE_BYTES]);
                // Otherwise the program finds the page unchanged only by chance.
                (0..written % 2000).for_each(|_| hint::spin_loop());
            }
            written
        });
        // Also if an assertion fails: the scope waits for the writer.
        let end = Stop(&stop);
        let began = Instant::now();
        let mut out = vec![0; 10_000];
        let is_seen = |changed: &BTreeSet<u64>| {
            changed.len() > 10 && memory.counters.counts().passed_change > 0
        };
        while is_worth_it(began, is_seen(&changed)) {
            let options = TestRunOptions {
                data_in: Some(&read),
                data_out: Some(&mut out),
                ..TestRunOptions::new()
            };
            let program = classifier(&mut program).expect("it is there");
            let result = program.test_run(options).expect("it runs");
            let after = &out[..result.data_size_out as usize];
            if result.return_value == NEXT {
                assert!(after == read, "it is passed on as it was");
                continue;
            }
            let (source, destination, payload) = parts(after);
            let datagram = Datagram::parse(source, destination, payload).expect("the CRC fits");
            let first = datagram.data[0];
            assert!(datagram.data.iter().all(|byte| *byte == first), "torn");
            answered += 1;
            changed.insert(datagram.header.page_version);
        }
        drop(end);
        writer.join().expect("it writes")
    });
    let counts = memory.counters.counts();
    println!("{written} writes, {answered} answers of {} versions, {counts:?}", changed.len());
    assert!(changed.len() > 10 && counts.passed_change > 0, "the writer was beside the reader");
}

#[test]
fn lines_that_are_written_all_the_time_are_never_torn() {
    in_thread(|| {
        let (mut rig, clones) = (Rig::new("direct-torn-lines"), Clones::new());
        let grant = rig.create(16);
        let start = first_of_line(grant);
        let pages = grant.location.page() + start..grant.location.page() + start + 8;
        pages.clone().for_each(|page| rig.arena.write(page, 0, &[0; PAGE_BYTES]));
        let read = line_read(&mut rig, grant, start, 8);
        let Rig { mut arena, mut program, memory, .. } = rig;
        let stop = AtomicBool::new(false);
        let (mut answered, mut passed) = (0_u32, 0_u32);
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut written = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    written += 1;
                    // Mostly the last page, which is read when others have been sent.
                    let page =
                        pages.start + if written.is_multiple_of(16) { written / 16 % 8 } else { 7 };
                    arena.write(page, 0, &[written.to_le_bytes()[0]; PAGE_BYTES]);
                    // So that it hits every step of the program, and leaves some alone.
                    (0..written % 3000).for_each(|_| hint::spin_loop());
                }
            });
            // Also if an assertion fails: the scope waits for the writer.
            let end = Stop(&stop);
            let began = Instant::now();
            let mut out = vec![0; 10_000];
            while is_worth_it(began, answered > 10 && passed > 10) {
                let options = TestRunOptions {
                    data_in: Some(&read),
                    data_out: Some(&mut out),
                    ..TestRunOptions::new()
                };
                let program = classifier(&mut program).expect("it is there");
                let result = program.test_run(options).expect("it runs");
                let after = &out[..result.data_size_out as usize];
                if result.return_value == NEXT {
                    assert!(after == read, "it is passed on as it was");
                    passed += 1;
                } else {
                    answered += 1;
                    check_piece(after);
                }
                iter::from_fn(|| clones.take()).for_each(|clone| check_piece(&clone));
            }
            drop(end);
            writer.join().expect("it writes");
        });
        println!("{answered} answered, {passed} passed on, {:?}", memory.counters.counts());
        assert!(answered > 10 && passed > 10, "the writer was beside the reader");
    });
}
