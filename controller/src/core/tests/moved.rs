//! Entries for pages that moved: how many there are.

use std::ops::Range;

use bluebridge_northbound::migration::{Generations, ServedRow};
use ipnet::Ipv6Net;
use proptest::prelude::*;

use super::*;
use crate::core::moved::prefixes;
use crate::migration::testing::finish;
use crate::migration::{GenerationRange, MigrateError, Wanted};

const LINE: u64 = 8;

/// Two memory servers of a rack whose switch has a small table, and the generation of the first.
fn small_rack(line_count: u64) -> (Core, ArenaGeneration) {
    let now = Instant::now();
    let config = CoreConfig { directory_size: 1024, ..CoreConfig::default() };
    let mut core = Core::new(config, Stored::default(), 1, now);
    core.learn_ports(SWITCH, ports(16));
    let mut generation = 0;
    for (name, port) in [("s1", 1), ("s2", 2), ("s3", 3)] {
        let record = join(&mut core, now, &memory(name, port, line_count * LINE));
        core.migrations_mut().connect(record.id(), u64::from(record.node), true);
        generation = record.generation;
    }
    (core, ArenaGeneration::new(generation).unwrap())
}

fn wanted(line: u64, taker: u16) -> Wanted {
    Wanted {
        home: NodeId(1),
        space: SPACE,
        generation: None,
        pages: Some(line * LINE..(line + 1) * LINE),
        taker: NodeId(taker),
    }
}

fn migrate(core: &mut Core, line: u64, taker: u16, generation: ArenaGeneration) {
    let id = core.migrate(&wanted(line, taker)).unwrap()[0];
    let generations = Generations { first: generation, last: generation };
    let pages = line * LINE..(line + 1) * LINE;
    finish(core.migrations_mut(), id, &[ServedRow { pages, generations }]);
}

/// The entries for pages, not for nodes.
fn moved_count(core: &Core) -> usize {
    let tables = core.desired(SWITCH);
    let is_moved = |key: &Key| matches!(key, Key::Directory { prefix_len, .. } if *prefix_len > 48);
    tables.entries.keys().filter(|key| is_moved(key)).count()
}

#[test]
fn ten_thousand_neighbouring_ranges_need_few_entries() {
    const COUNT: u64 = 10_000;
    let (mut core, generation) = small_rack(COUNT);
    for line in 0..COUNT {
        migrate(&mut core, line, 2, generation);
    }
    // 8192 + 1024 + 512 + 256 + 16 lines.
    assert_eq!(moved_count(&core), 5);
    migrate(&mut core, 5000, 3, generation);
    assert!((6..=20).contains(&moved_count(&core)), "{}", moved_count(&core));
    migrate(&mut core, 5000, 1, generation);
    migrate(&mut core, 5000, 2, generation);
    assert_eq!(moved_count(&core), 5);
}

#[test]
fn what_would_need_too_many_entries_is_refused_before_anything_moves() {
    let (mut core, generation) = small_rack(4096);
    // Half of the table is for endpoints.
    for number in 0..512 {
        migrate(&mut core, 2 * number, 2, generation);
    }
    assert_eq!(moved_count(&core), 512);
    let _ = core.take_changes();
    let before = core.desired(SWITCH);
    let refused = core.migrate(&wanted(2 * 512, 2)).unwrap_err();
    let full = MigrateError::TableFull { switch: "1".to_owned(), needed: 513, budget: 512 };
    assert_eq!(refused, full);
    assert_eq!((core.take_changes(), core.desired(SWITCH)), (vec![], before));
    // Where it joins its neighbours, it can move: 0, 2 and 4 are three blocks, 0 to 4 two.
    migrate(&mut core, 1, 2, generation);
    migrate(&mut core, 3, 2, generation);
    assert_eq!(moved_count(&core), 511);
    // What is moving counts as a whole.
    core.migrate(&wanted(2 * 512, 2)).unwrap();
    assert_eq!(moved_count(&core), 511);
    assert_eq!(core.migrate(&wanted(2 * 600, 2)), Err(full));
}

#[test]
fn lines_that_arrive_one_by_one_never_fill_the_table() {
    use crate::migration::testing::progress;
    use bluebridge_northbound::migration::Report;
    let (mut core, generation) = small_rack(4096);
    let all = Wanted { pages: Some(0..4096 * LINE), ..wanted(0, 2) };
    let id = core.migrate(&all).unwrap()[0];
    let hear = |core: &mut Core, from: u16, report| {
        let now = Instant::now();
        core.migrations_mut().handle(now, NodeId(from), u64::from(from), report).unwrap();
    };
    hear(&mut core, 2, Report::Reserved(id));
    hear(&mut core, 1, Report::Allowed { migration: id, fences: Vec::new() });
    let generations = Generations { first: generation, last: generation };
    let rows = |every: usize| -> Vec<_> {
        let lines = (0..4096).step_by(every);
        lines.map(|line| ServedRow { pages: line * LINE..(line + 1) * LINE, generations }).collect()
    };
    hear(&mut core, 2, progress(id, &rows(16), false));
    assert_eq!(moved_count(&core), 256);
    hear(&mut core, 2, progress(id, &rows(2), false));
    assert_eq!(moved_count(&core), 0, "the home leads the way until there is room");
    // It is cancelled like this, and most of what stays in pieces gets no entries.
    core.migrations_mut().cancel(id).unwrap();
    hear(&mut core, 1, Report::Withdrawn(id));
    hear(&mut core, 2, Report::Settled { migration: id, kept: rows(2) });
    assert_eq!(moved_count(&core), 512);
}

fn length(net: &Ipv6Net) -> u128 {
    1 << (112 - u32::from(net.prefix_len()))
}

proptest! {
    #[test]
    fn prefixes_cover_the_pages_and_nothing_else_and_are_the_fewest(
        start in 0..1_u64 << 20, lines in 1..5000_u64, first in 0..0x7ffe_u16, more in 0..2_u16,
    ) {
        let pages = start * LINE..(start + lines) * LINE;
        let generations = GenerationRange { first, last: first + more };
        let found: Vec<_> = prefixes(SPACE, NodeId(7), generations, &pages).collect();
        let mut expected = 0;
        for generation in first..=first + more {
            let base = (SPACE.scope() as u128) << 80 | 7 << 64 | u128::from(generation) << 48;
            let Range { start, end } = pages;
            let (mut next, end) = (base + u128::from(start << 12), base + u128::from(end << 12));
            // The greatest aligned block that fits, again and again.
            while next < end {
                let fits = |bits: &u32| next.trailing_zeros() >= *bits && next + (1 << bits) <= end;
                let bits = (12..64).rev().find(fits).unwrap();
                let net = &found[expected];
                prop_assert_eq!(u128::from(net.network()) >> 16, next);
                prop_assert_eq!(length(net), 1 << bits);
                next += 1 << bits;
                expected += 1;
            }
        }
        prop_assert_eq!(found.len(), expected);
    }
}
