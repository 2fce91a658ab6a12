//! The table of held pages against a map.

use std::collections::HashMap;

use proptest::prelude::*;

use super::super::{Policy, table::Page, table::Table};
use super::bench::{Bench, ms, pointer};
use crate::Timestamp;

#[derive(Clone, Debug)]
enum Step {
    Hold { page: u64, epoch: u64, byte: u8 },
    Remove { page: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0_u64..40, 1_u64..4, any::<u8>())
            .prop_map(|(page, epoch, byte)| Step::Hold { page, epoch, byte }),
        2 => (0_u64..40).prop_map(|page| Step::Remove { page }),
    ];
    prop::collection::vec(step, 0..300)
}

const LEASES: u16 = 20;
const CONTENTS: u16 = 7;

proptest! {
    #[test]
    fn the_table_is_a_bounded_map(steps in steps()) {
        let mut table = Table::new(LEASES, CONTENTS);
        let mut model: HashMap<u64, (u64, Option<u8>)> = HashMap::new();
        let page = |number: u64| Page::of(pointer(number * 4096 + number));
        for step in steps {
            match step {
                Step::Hold { page: number, epoch, byte } => {
                    let held = table.hold(page(number), epoch, Timestamp::default(), Policy::Serve);
                    let room = model.contains_key(&number) || model.len() < usize::from(LEASES);
                    prop_assert_eq!(held, room);
                    if held {
                        let entry = model.entry(number).or_insert((epoch, None));
                        if entry.0 != epoch {
                            *entry = (epoch, None);
                        }
                        let known = entry.1;
                        let kept = table.keep(page(number), 5, &[byte; 9]);
                        let count = model.values().filter(|held| held.1.is_some()).count();
                        let room = known.is_some() || count < usize::from(CONTENTS);
                        prop_assert_eq!(kept, room);
                        if kept {
                            model.insert(number, (epoch, Some(byte)));
                        }
                    }
                }
                Step::Remove { page: number } => {
                    table.remove(page(number));
                    model.remove(&number);
                }
            }
            prop_assert_eq!(table.count(), model.len());
            for number in 0..40 {
                let known = model.get(&number);
                let found = table.find(page(number)).map(|held| held.epoch);
                prop_assert_eq!(found, known.map(|held| held.0));
                for epoch in 1..4 {
                    let contents = table.contents(page(number), epoch, 5..14);
                    let expected = known.filter(|held| held.0 == epoch).and_then(|held| held.1);
                    let expected = expected.map(|byte| vec![byte; 9]);
                    prop_assert_eq!(contents, expected.as_deref());
                }
            }
        }
    }

    /// Expired leases are replaced, and no others.
    #[test]
    fn expired_leases_are_swept(ends in prop::collection::btree_map(0_u64..1000, 1_u64..9, 20..21)) {
        let mut bench = Bench::with(|config| config.lease_count = LEASES);
        let begin = bench.now;
        for (number, end) in &ends {
            let held = bench.owner.hold(begin, pointer(number * 4096), 1, begin + ms(*end), None, None);
            prop_assert_eq!(held, Ok(()));
        }
        bench.now = begin + ms(4);
        let left = ends.values().filter(|end| **end > 4).count();
        let one_more = bench.owner.hold(bench.now, pointer(1 << 30), 1, begin + ms(9), None, None);
        prop_assert_eq!(one_more.is_ok(), left < usize::from(LEASES));
        prop_assert_eq!(bench.owner.held_count(), left + usize::from(one_more.is_ok()));
        for (number, end) in &ends {
            let held = bench.owner.release(pointer(number * 4096), 1);
            prop_assert_eq!(held, *end > 4);
        }
    }
}
