//! A disk has the contents that were written to it.

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::*;

/// A byte of the model: `None` after a TRIM, when it may be anything.
type Model = Vec<Option<u8>>;

#[derive(Clone, Debug)]
struct Step {
    operation: Operation,
    offset: u64,
    length: u32,
    seed: u8,
}

const SIZE: u64 = 5 * MIB + 8192;

fn step() -> impl Strategy<Value = Step> {
    let operation = prop_oneof![
        4 => Just(Operation::Write),
        4 => Just(Operation::Read),
        1 => Just(Operation::Trim),
        1 => any::<bool>().prop_map(|allocates| Operation::Zero { allocates }),
        1 => Just(Operation::Flush),
    ];
    // Parts of pages, pages, whole slabs, and several of them.
    let offset = prop_oneof![
        0..SIZE,
        (0..SIZE / 4096).prop_map(|page| page * 4096),
        (0..6_u64).prop_map(|slab| slab * MIB)
    ];
    let length = prop_oneof![
        1..10_000_u64,
        (1..64_u64).prop_map(|pages| pages * 4096),
        Just(MIB),
        MIB..3 * MIB
    ];
    (operation, offset, length, any::<u8>()).prop_map(|(operation, offset, length, seed)| {
        let length = u32::try_from(length.min(SIZE - offset).max(1)).expect("short");
        Step { operation, offset: offset.min(SIZE - u64::from(length)), length, seed }
    })
}

/// Steps of one batch do not overlap: their order is open.
fn batches(steps: Vec<Step>) -> Vec<Vec<Step>> {
    let mut batches: Vec<Vec<Step>> = Vec::new();
    for step in steps {
        let overlaps = |other: &Step| {
            step.offset < other.offset + u64::from(other.length)
                && other.offset < step.offset + u64::from(step.length)
        };
        match batches.last_mut() {
            Some(batch) if batch.len() < 5 && !batch.iter().any(overlaps) => batch.push(step),
            _ => batches.push(vec![step]),
        }
    }
    batches
}

fn run(disk: &Disk, client: &mut LocalClient, model: &mut Model, batch: &[Step]) {
    let (mut input, mut output_bytes) = (Vec::new(), 0);
    let mut tasks = Vec::new();
    for step in batch {
        let bytes = step.length as usize;
        let data = match step.operation {
            Operation::Write => {
                let begin = input.len();
                input.extend((0..bytes).map(|at| step.seed.wrapping_add(byte(at as u64 / 7))));
                begin..input.len()
            }
            Operation::Read => {
                output_bytes += bytes;
                output_bytes - bytes..output_bytes
            }
            _ => 0..0,
        };
        tasks.push(Task::new(step.operation, step.offset, step.length, data));
    }
    let mut output = vec![0xee; output_bytes];
    disk.execute(client, &mut tasks, &input, &mut output);
    for task in &tasks {
        assert_eq!(task.result, Some(Ok(())), "{task:?}");
        let from = usize::try_from(task.offset).expect("small");
        let range = from..from + task.length as usize;
        match task.operation {
            Operation::Write => {
                let written = input[task.data.clone()].iter().map(|byte| Some(*byte));
                model.splice(range, written).for_each(drop);
            }
            Operation::Trim => model[range].fill(None),
            Operation::Zero { .. } => model[range].fill(Some(0)),
            Operation::Flush => {}
            Operation::Read => {
                let found = &output[task.data.clone()];
                let wrong = found.iter().zip(&model[range]).position(|(byte, expected)| {
                    expected.is_some_and(|expected| expected != *byte)
                });
                assert_eq!(wrong, None, "{task:?}");
                assert!(!task.is_hole || found.iter().all(|byte| *byte == 0));
            }
        }
    }
}

fn check_all(disk: &Disk, client: &mut LocalClient, model: &mut Model) {
    let part = 512 << 10_u64;
    for offset in (0..SIZE).step_by(512 << 10) {
        let length = u32::try_from((SIZE - offset).min(part)).expect("short");
        run(disk, client, model, &[Step { operation: Operation::Read, offset, length, seed: 0 }]);
    }
}

#[test]
fn a_disk_is_its_model_also_after_it_was_attached_again() {
    let world = World::new(3, 32 << 20);
    let mut runner =
        TestRunner::new(Config { cases: 5, failure_persistence: None, ..Config::default() });
    let steps = proptest::collection::vec(step(), 1..60);
    let placements =
        prop_oneof![Just(Placement::Linear), Just(Placement::Striped), Just(Placement::TwoChoices)];
    let ran = runner.run(&(steps, placements), |(steps, placement)| {
        let pointer = world.create(SIZE, placement);
        let mut client = world.client();
        let mut model = vec![Some(0); usize::try_from(SIZE).expect("small")];
        let batches = batches(steps);
        let (before, after) = batches.split_at(batches.len() / 2);
        for batches in [before, after] {
            let (disk, keeper) = world.attach(pointer);
            for batch in batches {
                run(&disk, &mut client, &mut model, batch);
            }
            check_all(&disk, &mut client, &mut model);
            drop(keeper);
        }
        Disk::delete(&mut client, pointer, false).expect("nobody serves it");
        prop_assert_eq!(world.used_pages(), [0; 3]);
        Ok(())
    });
    ran.unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn memory_is_allocated_when_it_is_written_and_freed_when_it_is_not_wanted() {
    let world = World::new(2, 32 << 20);
    let pointer = world.create(8 * MIB, Placement::Striped);
    let map = world.used_pages().iter().sum::<u64>();
    assert_eq!(map, 2, "the properties, and a page of the table");
    let (disk, _keeper) = world.attach(pointer);
    let client = &mut world.client();
    let used = || world.used_pages().iter().sum::<u64>() - map;
    let slab = MIB / 4096;
    let mib = length(usize::try_from(MIB).expect("small"));

    assert_eq!(read(&disk, client, 0, 100), Ok(vec![0; 100]));
    single(&disk, client, Operation::Zero { allocates: false }, 0, 8 * mib).expect("nothing to do");
    single(&disk, client, Operation::Trim, 0, 8 * mib).expect("nothing to do");
    assert_eq!((used(), disk.allocated_slabs()), (0, 0));

    write(&disk, client, MIB - 1, &[1, 2]).expect("there is room");
    assert_eq!((used(), disk.allocated_slabs()), (2 * slab, 2));
    assert_eq!(read(&disk, client, MIB - 2, 4), Ok(vec![0, 1, 2, 0]));
    single(&disk, client, Operation::Zero { allocates: true }, 5 * MIB, 1).expect("there is room");
    assert_eq!((used(), disk.allocated_slabs()), (3 * slab, 3));

    // The first slab is given up in two parts, the second as a whole.
    single(&disk, client, Operation::Trim, 0, mib / 2).expect("a hint");
    assert_eq!(used(), 3 * slab);
    single(&disk, client, Operation::Trim, MIB / 2, mib / 2).expect("a hint");
    assert_eq!((used(), disk.allocated_slabs()), (2 * slab, 2));
    single(&disk, client, Operation::Zero { allocates: false }, MIB, mib).expect("zeroes");
    assert_eq!((used(), disk.allocated_slabs()), (slab, 1));
    assert_eq!(read(&disk, client, MIB - 2, 4), Ok(vec![0; 4]));
    // What was written since is wanted.
    single(&disk, client, Operation::Trim, 5 * MIB, mib / 2).expect("a hint");
    write(&disk, client, 5 * MIB + 5000, &[7]).expect("it is there");
    single(&disk, client, Operation::Trim, 5 * MIB + MIB / 2, mib / 2).expect("a hint");
    assert_eq!((used(), disk.allocated_slabs()), (slab, 1));
    assert_eq!(read(&disk, client, 5 * MIB + 5000, 1), Ok(vec![7]));
}

#[test]
fn placements_use_the_servers_as_they_say() {
    let world = World::new(3, 32 << 20);
    let slab = MIB / 4096;
    for (placement, expected) in [(Placement::Linear, [3, 3, 2]), (Placement::Striped, [3, 3, 2])] {
        let pointer = world.create(8 * MIB, placement);
        let (disk, keeper) = world.attach(pointer);
        let mut client = world.client();
        let mut order = Vec::new();
        let mut before = world.used_pages();
        for number in 0..8 {
            write(&disk, &mut client, number * MIB, &[1]).expect("there is room");
            let now = world.used_pages();
            order.extend((0..3).find(|at| now[*at] == before[*at] + slab));
            before = now;
        }
        let count = |server| order.iter().filter(|it| **it == server).count();
        assert_eq!([count(0), count(1), count(2)], expected);
        let neighbours = order.windows(2).filter(|pair| pair[0] == pair[1]).count();
        assert_eq!(neighbours, if placement == Placement::Linear { 5 } else { 0 }, "{order:?}");
        drop(keeper);
        Disk::delete(&mut client, pointer, false).expect("nobody serves it");
    }
}

#[test]
fn a_full_server_is_passed_over_and_full_servers_are_no_space() {
    let world = World::new(2, 4 << 20);
    let pointer = world.create(64 * MIB, Placement::Linear);
    let (disk, _keeper) = world.attach(pointer);
    let mut client = world.client();
    let mut written = 0;
    let failure = loop {
        match write(&disk, &mut client, written * MIB, &[1, 2, 3]) {
            Ok(()) => written += 1,
            Err(failure) => break failure,
        }
    };
    assert_eq!(failure, Failure::NoSpace);
    assert!(written >= 6, "{written} slabs of 8 MiB");
    for slab in 0..written {
        assert_eq!(read(&disk, &mut client, slab * MIB, 3), Ok(vec![1, 2, 3]));
    }
    let (first, mib) = (0, length(usize::try_from(MIB).expect("small")));
    single(&disk, &mut client, Operation::Trim, first, mib).expect("a hint");
    write(&disk, &mut client, written * MIB, &[4]).expect("there is room again");
}
