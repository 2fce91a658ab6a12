//! READs by RDMA, simulated; see `one_sided_model`.
//!
//! `BLUEBRIDGE_ONE_SIDED_READS=n` sets the number of READs of the long run, `BLUEBRIDGE_ONE_SIDED_SEED=n` its seed.

use super::one_sided_model::{
    Mutant::{self, *},
    Rule, Scenario, Seen,
    fabric::Order,
    run,
};

const READS: u64 = 200_000;

/// The longest of the mistakes that are found needs 20,000.
const READS_OF_MISTAKES: u64 = 200_000;

fn scenario(rule: Rule, order: Order, mutant: Option<Mutant>) -> Scenario {
    Scenario { rule, order, mutant, seed: 7 }
}

fn holds(scenario: Scenario, reads: u64) -> Seen {
    let seen = run(scenario, reads).unwrap_or_else(|error| panic!("{scenario:?}: {error}"));
    println!("{scenario:?}: {seen:?}");
    assert!(seen.accepted > reads / 20, "hardly a READ is accepted: {seen:?}");
    assert!(seen.torn > reads / 10, "hardly a page changes while it is read: {seen:?}");
    assert!(seen.torn_records > reads / 10, "hardly a record does: {seen:?}");
    seen
}

#[test]
fn what_is_accepted_was_there_whatever_the_order_of_bytes() {
    let seen = holds(scenario(Rule::Checked, Order::None, None), READS);
    assert!(seen.refused_by_crc > 0, "no page was torn between two equal records: {seen:?}");
    for order in [Order::Reads, Order::Words] {
        let seen = holds(scenario(Rule::Checked, order, None), READS);
        assert_eq!(seen.refused_by_crc, 0, "in order, the records alone say it: {order:?}");
    }
}

#[test]
fn the_records_alone_are_enough_only_in_the_order_of_reads() {
    for order in [Order::Reads, Order::Words] {
        holds(scenario(Rule::SequenceLock, order, None), READS);
    }
    run(scenario(Rule::SequenceLock, Order::None, None), READS).expect_err("torn pages pass");
}

/// What check and CRC make superfluous: it is there for devices whose order is better than promised.
const PRECAUTIONS: [Mutant; 7] = [
    RecordOnce,
    VersionIgnored,
    PageFirst,
    OddIgnored,
    EvenBeforeBytes,
    ReusedWithoutSequence,
    ClearedBeforeStored,
];

#[test]
fn each_mistake_is_found() {
    let must_be_found = |scenario: Scenario| {
        run(scenario, READS_OF_MISTAKES).expect_err(&format!("{scenario:?}"));
    };
    for mutant in Mutant::ALL {
        let checked = scenario(Rule::Checked, Order::None, Some(mutant));
        if PRECAUTIONS.contains(&mutant) {
            holds(checked, READS / 4);
        } else {
            must_be_found(checked);
        }
        // Which the rule without check and CRC cannot lack.
        if !matches!(mutant, CheckIgnored | CrcIgnored) {
            must_be_found(scenario(Rule::SequenceLock, Order::Reads, Some(mutant)));
        }
    }
}

mod long {
    use super::*;

    fn number(name: &str, usual: u64) -> u64 {
        std::env::var(name).map_or(usual, |text| text.parse().expect("a number"))
    }

    #[test]
    fn what_is_accepted_was_there_in_very_many_reads() {
        let reads = number("BLUEBRIDGE_ONE_SIDED_READS", 1_000_000);
        let seed = number("BLUEBRIDGE_ONE_SIDED_SEED", 1);
        let scenario = Scenario { seed, ..scenario(Rule::Checked, Order::None, None) };
        holds(scenario, reads);
    }
}
