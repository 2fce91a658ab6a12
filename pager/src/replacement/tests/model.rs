//! Any order of calls against a plain set.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::{Arrival, Replacement};

#[derive(Clone, Copy, Debug)]
enum Call {
    Insert(u64, Arrival),
    Touch(u64),
    Remove(u64),
    Victim,
    /// A victim that is put back.
    Kept,
    /// Put back without having been a victim.
    Keep(u64),
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let page = || prop_oneof![9 => 0..200_u64, 1 => any::<u64>()];
    let call = prop_oneof![
        8 => page().prop_map(|page| Call::Insert(page, Arrival::Demand)),
        4 => page().prop_map(|page| Call::Insert(page, Arrival::Prefetch)),
        4 => page().prop_map(Call::Touch),
        1 => page().prop_map(Call::Remove),
        9 => Just(Call::Victim),
        2 => Just(Call::Kept),
        1 => page().prop_map(Call::Keep),
    ];
    prop::collection::vec(call, 0..2000)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Victims are members, every member leaves once, and none is lost; also far over capacity.
    #[test]
    fn the_set_holds_what_was_inserted_and_did_not_leave(
        capacity in 0_usize..150,
        calls in calls(),
    ) {
        let mut replacement = Replacement::new(capacity);
        let mut model = BTreeSet::new();
        for call in calls {
            match call {
                Call::Insert(page, arrival) => {
                    replacement.insert(page, arrival);
                    model.insert(page);
                }
                Call::Touch(page) => replacement.touch(page),
                Call::Remove(page) => {
                    replacement.remove(page);
                    model.remove(&page);
                }
                Call::Victim => match replacement.victim() {
                    Some(page) => prop_assert!(model.remove(&page)),
                    None => prop_assert!(model.is_empty()),
                },
                Call::Kept => {
                    if let Some(page) = replacement.victim() {
                        prop_assert!(model.contains(&page));
                        replacement.keep(page);
                    }
                }
                Call::Keep(page) => {
                    replacement.keep(page);
                    model.insert(page);
                }
            }
            prop_assert_eq!(replacement.len(), model.len());
        }
        while let Some(page) = replacement.victim() {
            prop_assert!(model.remove(&page));
        }
        prop_assert!(model.is_empty());
    }
}
