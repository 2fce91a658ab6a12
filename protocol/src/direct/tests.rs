//! What responder and readers write, in every order.

use proptest::prelude::*;

use super::*;

const ID: u64 = 0x1234_5678_0000;

fn facts(id: u64) -> SessionFacts {
    SessionFacts {
        id,
        space: Space(3),
        node: NodeId(20),
        incarnation: 7,
        piece_bytes: 1024,
        takes_pages: 9,
    }
}

fn read(sequence: u64, low_water: u64) -> DirectRead {
    DirectRead {
        session: ID,
        space: Space(3),
        node: NodeId(20),
        incarnation: 7,
        sequence,
        low_water,
        now: Timestamp::from_nanos(50),
    }
}

fn published() -> SharedSession {
    let session = SharedSession::default();
    session.publish(&facts(ID));
    session
}

#[test]
fn only_reads_of_the_session_are_admitted() {
    let session = SharedSession::default();
    assert_eq!(session.admit_read(&DirectRead { session: 0, ..read(1, 1) }), None);
    let nobody = DirectRead {
        session: 0,
        space: Space(0),
        node: NodeId(0),
        incarnation: 0,
        sequence: 1,
        low_water: 1,
        now: Timestamp::ZERO,
    };
    assert_eq!(session.admit_read(&nobody), None, "a vacant slot has no session");
    session.publish(&facts(ID));
    for other in [
        DirectRead { session: ID + 0x1_0000, ..read(1, 1) },
        DirectRead { space: Space(4), ..read(1, 1) },
        DirectRead { node: NodeId(21), ..read(1, 1) },
        DirectRead { incarnation: 8, ..read(1, 1) },
    ] {
        assert_eq!(session.admit_read(&other), None, "{other:?}");
    }
    assert_eq!(session.last_seen(), Timestamp::ZERO, "refused READs leave no trace");
    assert_eq!(session.admit_read(&read(1, 1)), Some(facts(ID)));
    assert_eq!(session.last_seen(), Timestamp::from_nanos(50));
    // Another core's clock may have been read earlier.
    let earlier = DirectRead { now: Timestamp::from_nanos(40), ..read(2, 1) };
    assert!(session.admit_read(&earlier).is_some());
    assert_eq!(session.last_seen(), Timestamp::from_nanos(50));
}

#[test]
fn low_water_only_rises_and_the_window_follows_it() {
    let session = published();
    assert_eq!(session.low_water(), 1);
    for (sequence, low_water, is_admitted, after) in [
        (0, 0, false, 1),
        (512, 1, true, 1),
        (513, 1, false, 1),
        (513, 2, true, 2),
        // Both below low water.
        (1, 1, false, 2),
        // A late copy with the low water of its time.
        (2, 1, true, 2),
        (1000, 1000, true, 1000),
        (999, 900, false, 1000),
        (1511, 3, true, 1000),
        (1512, 3, false, 1000),
        // Its low water is above its number.
        (1005, 1006, false, 1000),
        (u64::MAX, u64::MAX, false, 1000),
        (1000, u64::MAX, false, 1000),
        (LOW_WATER_MASK + 400, LOW_WATER_MASK, true, LOW_WATER_MASK),
        (LOW_WATER_MASK + 400, LOW_WATER_MASK + 1, false, LOW_WATER_MASK),
    ] {
        let admitted = session.admit_read(&read(sequence, low_water));
        assert_eq!(admitted.is_some(), is_admitted, "{sequence} {low_water}");
        assert_eq!(session.low_water(), after, "{sequence} {low_water}");
    }
}

#[test]
fn a_request_is_executed_without_readers() {
    let session = published();
    assert!(session.admit_read(&read(5, 5)).is_some());
    assert_eq!(session.enter(), 5);
    for low_water in [4, 5, 6] {
        assert_eq!(session.admit_read(&read(8, low_water)), None);
    }
    assert_eq!(session.low_water(), 5);
    session.leave(7);
    assert_eq!(session.low_water(), 7);
    assert!(session.admit_read(&read(8, 5)).is_some());
}

#[test]
fn a_session_whose_low_water_does_not_fit_is_hidden() {
    let session = published();
    assert_eq!(session.enter(), 1);
    session.leave(LOW_WATER_MASK);
    assert!(session.admit_read(&read(LOW_WATER_MASK + 1, 1)).is_some());
    assert_eq!(session.enter(), LOW_WATER_MASK);
    session.leave(LOW_WATER_MASK + 1);
    assert_eq!(session.admit_read(&read(LOW_WATER_MASK + 2, 1)), None);
    assert_eq!(session.admit_read(&read(LOW_WATER_MASK + 2, LOW_WATER_MASK + 2)), None);
    // The responder goes on with it, and the next session in the slot is shown.
    assert!(session.enter() <= LOW_WATER_MASK + 1);
    session.leave(u64::MAX);
    assert_eq!(session.admit_read(&read(1, 1)), None);
    session.publish(&facts(ID));
    assert_eq!(session.low_water(), 1);
    assert!(session.admit_read(&read(1, 1)).is_some());
}

/// Also if it was withdrawn while a request was executed, such as CLOSE.
#[test]
fn a_reused_slot_starts_afresh() {
    let session = published();
    assert!(session.admit_read(&read(9, 9)).is_some());
    for is_executing in [false, true] {
        if is_executing {
            session.enter();
        }
        session.withdraw();
        assert_eq!(session.admit_read(&read(9, 9)), None);
        let next = ID + 0x1_0000;
        session.publish(&facts(next));
        assert_eq!((session.low_water(), session.last_seen()), (1, Timestamp::ZERO));
        assert_eq!(session.admit_read(&read(9, 9)), None);
        let of_next = DirectRead { session: next, ..read(9, 1) };
        assert_eq!(session.admit_read(&of_next), Some(facts(next)));
        session.publish(&facts(ID));
    }
}

/// A reader that read the word of an earlier session does not raise the low water of a later one, and not while a
/// request is executed.
#[test]
fn every_use_of_a_slot_has_another_word() {
    let session = published();
    let word = session.word.load(Ordering::Relaxed);
    session.withdraw();
    assert_eq!(session.word.load(Ordering::Relaxed), word, "hiding it does not change the word");
    session.publish(&facts(ID));
    let next = session.word.load(Ordering::Relaxed);
    assert_ne!(next, word);
    assert_eq!(next & (LOW_WATER_MASK | EXECUTING), 1);
    session.enter();
    assert_ne!(session.word.load(Ordering::Relaxed), next);
    session.leave(1);
    assert_eq!(session.word.load(Ordering::Relaxed), next);
    // Raising low water keeps the count of uses, which wraps.
    assert!(session.admit_read(&read(77, 70)).is_some());
    assert_eq!(session.word.load(Ordering::Relaxed), next + 69);
    for _ in 2..1 << 16 {
        session.publish(&facts(ID));
    }
    assert_eq!(session.word.load(Ordering::Relaxed) >> USE_SHIFT, 0);
    session.enter();
    session.leave(LOW_WATER_MASK);
    assert_eq!(session.word.load(Ordering::Relaxed), LOW_WATER_MASK);
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Publish(u64),
    Withdraw,
    Enter,
    Leave(u64),
    Read { id: u64, ahead: u64, raise: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        1 => (1..3_u64).prop_map(Step::Publish),
        1 => Just(Step::Withdraw),
        3 => Just(Step::Enter),
        3 => prop_oneof![0..3_u64, Just(1 << 45), Just(1 << 46), Just(1 << 60)].prop_map(Step::Leave),
        8 => (1..3_u64, 0..600_u64, 0..300_u64)
            .prop_map(|(id, ahead, raise)| Step::Read { id, ahead, raise }),
    ]
}

proptest! {
    #[test]
    fn a_session_agrees_with_its_description(steps in prop::collection::vec(step(), 60)) {
        let session = SharedSession::default();
        // The id in the slot, the low water, and whether a request is executed.
        let (mut id, mut low_water, mut is_executing) = (0, 0, false);
        for step in steps {
            match step {
                Step::Publish(new) => {
                    session.publish(&facts(new));
                    (id, low_water, is_executing) = (new, 1, false);
                }
                Step::Withdraw => {
                    session.withdraw();
                    id = 0;
                }
                Step::Enter => {
                    prop_assert_eq!(session.enter(), low_water);
                    is_executing = true;
                }
                Step::Leave(more) if is_executing => {
                    let to = low_water + more;
                    session.leave(to);
                    if to < 1 << 47 {
                        (low_water, is_executing) = (to, false);
                    } else {
                        id = 0;
                    }
                }
                Step::Leave(_) => {}
                Step::Read { id: named, ahead, raise } => {
                    let (to, sequence) = (low_water + raise, low_water + ahead);
                    let read = DirectRead { session: named, ..read(sequence, to) };
                    let fits = ahead >= raise && ahead - raise < 512 && to < 1 << 47;
                    let is_admitted = id == named && !is_executing && fits;
                    prop_assert_eq!(session.admit_read(&read), is_admitted.then(|| facts(named)));
                    low_water = if is_admitted { to } else { low_water };
                }
            }
            prop_assert_eq!(session.low_water(), low_water);
        }
    }
}

/// Every order of three steps of a reader and three of the responder, as one bit per step: whose it is.
fn orders() -> impl Iterator<Item = [bool; 6]> {
    let orders = (0..64_u32).filter(|bits| bits.count_ones() == 3);
    orders.map(|bits| core::array::from_fn(|step| bits & (1 << step) != 0))
}

/// A client gives up WRITE 5 and then reads. If a late copy is executed after all, a reader does not answer a READ that
/// does not see it.
#[test]
fn a_late_copy_is_not_executed_after_a_read_that_does_not_see_it() {
    let mut outcomes = Vec::new();
    for order in orders() {
        let session = published();
        let (mut compared, mut is_admitted, mut seen) = (None, false, false);
        let (mut low_water, mut is_written) = (0, false);
        let (mut reader_step, mut responder_step) = (0, 0);
        for is_reader in order {
            let step = if is_reader { &mut reader_step } else { &mut responder_step };
            *step += 1;
            match (is_reader, *step) {
                (true, 1) => compared = session.compare(&read(6, 6)),
                (true, 2) => is_admitted = compared.is_some_and(|it| session.raise(it).is_some()),
                (true, _) => seen = is_written,
                (false, 1) => low_water = session.enter(),
                (false, 2) => is_written = low_water <= 5,
                (false, _) => session.leave(low_water),
            }
        }
        assert!(!is_admitted || !is_written || seen, "{order:?}");
        assert_eq!(session.low_water(), if is_admitted { 6 } else { 1 }, "{order:?}");
        outcomes.push((is_admitted, is_written));
    }
    outcomes.sort_unstable();
    outcomes.dedup();
    assert_eq!(outcomes, [(false, true), (true, false), (true, true)], "one of them always wins");
}

/// A reader that compared a READ with an earlier session of the slot does not raise the low water of the next.
#[test]
fn a_slow_reader_does_not_touch_the_next_session() {
    for order in orders() {
        let session = published();
        let (mut compared, mut reader_step, mut responder_step) = (None, 0, 0);
        for is_reader in order {
            let step = if is_reader { &mut reader_step } else { &mut responder_step };
            *step += 1;
            match (is_reader, *step) {
                (true, 1) => compared = session.compare(&read(6, 6)),
                (true, 2) => _ = compared.and_then(|it| session.raise(it)),
                (false, 1) => session.withdraw(),
                (false, 2) => session.publish(&facts(ID + 0x1_0000)),
                _ => {}
            }
        }
        assert_eq!(session.low_water(), 1, "{order:?}");
    }
}

#[test]
fn a_shard_is_closed_at_first_and_shows_what_was_published() {
    let shard = SharedShard::default();
    assert_eq!(shard.facts(), ShardFacts::default());
    let facts =
        ShardFacts { open_until: Timestamp::from_nanos(900), range_epoch: 4, credit_pages: 512 };
    shard.publish(&facts);
    assert_eq!(shard.facts(), facts);
    let forever = ShardFacts { open_until: Timestamp::MAX, range_epoch: 5, credit_pages: u16::MAX };
    shard.publish(&forever);
    assert_eq!(shard.facts(), forever);
    shard.close();
    assert_eq!(shard.facts(), ShardFacts { open_until: Timestamp::ZERO, ..forever });
}

/// The program in the kernel declares the same records.
#[test]
fn both_languages_have_the_same_records() {
    use core::mem::offset_of;

    const SHARED: &str = include_str!("../../../memserver/bpf/shared.h");
    let of_rust = [
        ("id", offset_of!(SharedSession, id)),
        ("word", offset_of!(SharedSession, word)),
        ("last_seen", offset_of!(SharedSession, last_seen)),
        ("incarnation", offset_of!(SharedSession, incarnation)),
        ("space", offset_of!(SharedSession, space)),
        ("node", offset_of!(SharedSession, node)),
        ("piece_bytes", offset_of!(SharedSession, piece_bytes)),
        ("takes_pages", offset_of!(SharedSession, takes_pages)),
        ("unused", offset_of!(SharedSession, unused)),
        ("", size_of::<SharedSession>()),
    ];
    assert_eq!(bluebridge_testkit::c_struct(SHARED, "shared_session"), of_rust);
    let of_rust = [
        ("open_until", offset_of!(SharedShard, open_until)),
        ("range_epoch", offset_of!(SharedShard, range_epoch)),
        ("credit_pages", offset_of!(SharedShard, credit_pages)),
        ("unused", offset_of!(SharedShard, unused)),
        ("", size_of::<SharedShard>()),
    ];
    assert_eq!(bluebridge_testkit::c_struct(SHARED, "shared_shard"), of_rust);
}
