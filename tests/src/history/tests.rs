use rand::{Rng, SeedableRng, rngs::SmallRng, seq::SliceRandom};

use super::{Action::*, History, Operation, Refusal};

fn history(operations: &[(u64, u64, super::Action)]) -> History {
    let mut history = History::new(0);
    for &(start, end, action) in operations {
        history.record(start, (end != 0).then_some(end), action);
    }
    history
}

fn is_good(operations: &[(u64, u64, super::Action)]) -> bool {
    match history(operations).check() {
        Ok(()) => true,
        Err(Refusal::Impossible { .. }) => false,
        Err(Refusal::Undecided) => panic!("few operations"),
    }
}

/// The end of an operation whose outcome is unknown.
const UNKNOWN: u64 = 0;

#[test]
fn reads_return_the_last_write_or_a_concurrent_one() {
    assert!(is_good(&[]));
    assert!(is_good(&[(1, 2, Write { value: 7 }), (3, 4, Read { value: 7 })]));
    assert!(is_good(&[(1, 9, Write { value: 7 }), (3, 4, Read { value: 0 })]));
    assert!(is_good(&[(1, 9, Write { value: 7 }), (3, 4, Read { value: 7 })]));
    assert!(!is_good(&[(1, 2, Write { value: 7 }), (3, 4, Read { value: 0 })]), "stale");
    assert!(!is_good(&[(5, 6, Write { value: 7 }), (3, 4, Read { value: 7 })]), "from the future");
    assert!(!is_good(&[(3, 4, Read { value: 8 })]), "never written");
}

#[test]
fn two_readers_agree_about_the_order() {
    let mut seen =
        vec![(1, 9, Write { value: 7 }), (2, 3, Read { value: 7 }), (4, 5, Read { value: 0 })];
    assert!(!is_good(&seen), "the old value after the new one");
    seen[2].2 = Read { value: 7 };
    assert!(is_good(&seen));
    let writes = [(1, 5, Write { value: 1 }), (1, 5, Write { value: 2 })];
    let crossed = [(6, 7, Read { value: 1 }), (8, 9, Read { value: 2 })];
    assert!(!is_good(&[writes[0], writes[1], crossed[0], crossed[1]]));
    assert!(is_good(&[writes[0], writes[1], crossed[0]]));
}

#[test]
fn an_unknown_write_may_come_late_and_once() {
    let unknown = (1, UNKNOWN, Write { value: 7 });
    assert!(is_good(&[unknown, (9, 10, Read { value: 0 })]));
    assert!(is_good(&[unknown, (9, 10, Read { value: 7 })]));
    assert!(is_good(&[unknown, (9, 10, Read { value: 0 }), (11, 12, Read { value: 7 })]));
    assert!(!is_good(&[unknown, (9, 10, Read { value: 7 }), (11, 12, Read { value: 0 })]));
    let over = (3, 4, Write { value: 8 });
    let reads = [(5, 6, Read { value: 7 }), (7, 8, Read { value: 8 })];
    assert!(!is_good(&[unknown, over, reads[0], reads[1]]), "7 over 8, and 8 again");
}

#[test]
fn an_update_reads_the_value_that_it_replaces() {
    let first = (1, 4, Update { before: 0, after: 1 });
    assert!(is_good(&[first, (2, 8, Update { before: 1, after: 2 })]));
    assert!(!is_good(&[first, (2, 8, Update { before: 0, after: 2 })]), "a lost update");
    let late = (2, UNKNOWN, Update { before: 0, after: 2 });
    assert!(is_good(&[first, late, (9, 10, Read { value: 1 })]));
    assert!(!is_good(&[first, late, (9, 10, Read { value: 2 })]), "a late COMMIT was applied");
    let between = (2, 3, Write { value: 9 });
    assert!(is_good(&[first, between]), "the write came before or after");
    assert!(!is_good(&[first, between, (5, 6, Read { value: 0 })]));
}

#[test]
fn additions_are_done_once_each() {
    let add = |previous| Add { addend: 5, previous };
    assert!(is_good(&[(1, 4, add(Some(5))), (1, 4, add(Some(0))), (5, 6, Read { value: 10 })]));
    assert!(!is_good(&[(1, 4, add(Some(0))), (1, 4, add(Some(0)))]), "two returned the same value");
    assert!(!is_good(&[(1, 2, add(Some(5))), (3, 4, add(Some(0)))]), "out of order");
    let unknown = (1, UNKNOWN, add(None));
    assert!(is_good(&[unknown, (5, 6, Read { value: 5 })]));
    assert!(is_good(&[unknown, (5, 6, Read { value: 0 })]));
    assert!(!is_good(&[unknown, (5, 6, Read { value: 10 })]), "twice");
    assert!(!is_good(&[unknown, (5, 6, Read { value: 5 }), (7, 8, Read { value: 0 })]), "undone");
}

#[test]
fn swaps_return_the_value_before() {
    let swap = |expected, new, previous| Swap { expected, new, previous: Some(previous) };
    assert!(is_good(&[(1, 2, swap(0, 7, 0)), (3, 4, swap(0, 8, 7)), (5, 6, Read { value: 7 })]));
    assert!(!is_good(&[(1, 2, swap(0, 7, 0)), (3, 4, swap(0, 8, 0))]), "both found 0");
    let unknown = (1, UNKNOWN, Swap { expected: 0, new: 7, previous: None });
    assert!(is_good(&[unknown, (5, 6, swap(7, 8, 7))]));
    assert!(!is_good(&[(1, 2, Write { value: 1 }), unknown, (5, 6, Read { value: 7 })]));
}

#[test]
fn a_refusal_has_the_longest_order() {
    let refusal = history(&[(1, 2, Write { value: 7 }), (3, 4, Read { value: 0 })]).check();
    let Err(Refusal::Impossible { done, held, stuck }) = refusal else { panic!("{refusal:?}") };
    assert_eq!((done.len(), held, stuck.len()), (1, 7, 1));
    assert_eq!(stuck[0].action, Read { value: 0 });
}

/// Tries all orders of all choices of the unknown ones, without optimization.
fn has_order(held: u64, left: &[Operation]) -> bool {
    if left.iter().all(|operation| operation.end.is_none()) {
        return true;
    }
    (0..left.len()).any(|index| {
        let mut rest = left.to_vec();
        let first = rest.remove(index);
        let is_late = |other: &Operation| other.end.is_some_and(|end| end < first.start);
        let after = first.action.apply(held);
        !rest.iter().any(is_late) && after.is_some_and(|after| has_order(after, &rest))
    })
}

/// A short random history; about half of them have an order.
fn random(rng: &mut SmallRng, sums: bool) -> Vec<Operation> {
    let mut held = 0;
    let mut operations: Vec<_> = (0..rng.random_range(1..7_u64))
        .map(|number| {
            let at = number * 10;
            let start = at.saturating_sub(rng.random_range(0..25));
            let end = rng.random_bool(0.8).then(|| at + rng.random_range(1..25));
            let result = |value| end.map(|_| value);
            let new = number + 1;
            let action = match rng.random_range(0..5) {
                0 if sums => Add { addend: 1 + number % 2, previous: result(held) },
                0 | 1 => Write { value: new },
                2 => Swap { expected: held, new, previous: result(held) },
                3 => Update { before: held, after: new },
                _ => Read { value: held },
            };
            if end.is_some() || rng.random_bool(0.5) {
                held = action.apply(held).expect("the result fits");
            }
            Operation { start, end, action }
        })
        .collect();
    if rng.random_bool(0.6) {
        let index = rng.random_range(0..operations.len());
        operations[index].action = Read { value: rng.random_range(0..6) };
        operations[index].end.get_or_insert(1000);
    }
    operations.shuffle(rng);
    operations
}

#[test]
fn the_search_agrees_with_exhaustive_search() {
    let mut rng = SmallRng::seed_from_u64(1);
    let mut verdicts = [0; 2];
    for round in 0..20_000 {
        let operations = random(&mut rng, round % 2 == 0);
        let history = History { initial: 0, operations: operations.clone() };
        let expected = has_order(0, &operations);
        assert_eq!(history.check().is_ok(), expected, "{operations:?}");
        verdicts[usize::from(expected)] += 1;
    }
    assert!(verdicts.iter().all(|count| *count > 3000), "{verdicts:?}");
}

/// As long as the histories of the racks: 16 threads, thousands of operations.
#[test]
fn long_histories_are_decided() {
    let mut rng = SmallRng::seed_from_u64(2);
    for sums in [false, true] {
        let mut history = History::new(0);
        let mut held = 0;
        for number in 0..2000_u64 {
            let at = number * 10;
            let start = at.saturating_sub(rng.random_range(0..80));
            let end = Some(at + rng.random_range(1..80));
            let action = match rng.random_range(0..3) {
                0 => Read { value: held },
                1 if sums => Add { addend: 1, previous: Some(held) },
                _ if sums => Update { before: held, after: held + 1 },
                1 => Write { value: number + 1 },
                _ => Update { before: held, after: number + 1 },
            };
            held = action.apply(held).expect("the result fits");
            history.record(start, end, action);
        }
        assert_eq!(history.check(), Ok(()), "sums {sums}");
        history.record(30_000, Some(30_001), Read { value: held - 1 });
        assert!(matches!(history.check(), Err(Refusal::Impossible { .. })));
    }
}
