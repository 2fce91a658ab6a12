//! Lines of which no page is allocated any more.
#![allow(clippy::single_range_in_vec_init, reason = "a list of one range is meant")]

use std::ops::Range;
use std::time::Duration;

use bluebridge_northbound::migration::{Contents, Order, Report};

use super::drain::{Rack, S1, S2};
use super::*;
use crate::migration::Wanted;

/// Pages 0 to 63 of the first server are at the second one.
fn moved() -> (Rack, Contents) {
    let mut rack = Rack::new(&[900, 400, 100]);
    let wanted = Wanted { home: S1, space: SPACE, generation: None, pages: Some(0..64), taker: S2 };
    rack.core.migrate(&wanted).unwrap();
    settle(&mut rack);
    assert_eq!(rack.at(S1, 0), S2);
    let home = rack.core.migrations().elsewhere().next().unwrap().home.contents();
    (rack, home)
}

/// Servers do what they are ordered until nothing is left to do.
fn settle(rack: &mut Rack) {
    for _ in 0..10 {
        for id in rack.members.iter().map(NodeRecord::id).collect::<Vec<_>>() {
            rack.obey(id);
        }
    }
}

/// The second server reports what is free; returns the pages that begin to go home.
fn report(rack: &mut Rack, home: Contents, pages: &[Range<u64>]) -> Vec<Range<u64>> {
    let before = rack.core.migrations().iter().last().map_or(0, |of| of.record.id);
    rack.hear(S2, Report::Free { home, pages: pages.to_vec() });
    let began = rack.core.return_free_lines(rack.now, S2);
    rack.store();
    let open = rack.core.migrations().iter().filter(|of| of.record.id > before);
    let rows: Vec<_> = open.map(|of| of.record.pages.clone()).collect();
    assert_eq!(rows.len(), began.len());
    rows
}

#[test]
fn free_lines_go_home_once_and_others_stay() {
    let (mut rack, home) = moved();
    assert_eq!(report(&mut rack, home, &[0..8, 16..48]), [16..48, 0..8], "the longest first");
    assert_eq!(report(&mut rack, home, &[0..8, 16..48]), [], "they are on their way");
    settle(&mut rack);
    assert_eq!([0, 8, 40, 56].map(|page| rack.at(S1, page)), [S1, S2, S1, S2]);
    // A late report is about lines that are at home, where pages may be allocated.
    assert_eq!(report(&mut rack, home, &[0..8, 16..48]), []);
    assert_eq!(rack.at(S1, 0), S1);
    rack.core.drain(S1);
    assert_eq!(report(&mut rack, home, &[8..16]), [], "the home is drained");
}

#[test]
fn a_home_that_ended_one_early_gets_no_other_for_some_time() {
    let (mut rack, home) = moved();
    assert_eq!(report(&mut rack, home, &[0..8]), [0..8]);
    let id = rack.core.migrations().iter().last().unwrap().record.id;
    rack.core.migrations_mut().cancel(id).unwrap();
    settle(&mut rack);
    assert_eq!(report(&mut rack, home, &[0..8]), []);
    rack.now += Duration::from_secs(31);
    assert_eq!(report(&mut rack, home, &[0..8]), [0..8]);
}

#[test]
fn lines_of_lost_contents_are_forgotten_after_the_home_knows_it() {
    let (mut rack, home) = moved();
    rack.lose(S1);
    assert_eq!(rack.at(S1, 0), S2, "their server still has them");
    let discards = |rack: &Rack| -> Vec<Range<u64>> {
        let orders = rack.core.migrations().orders(S2).into_iter();
        let rows = orders.filter_map(|order| match order {
            Order::Discard { home: of, pages, .. } if of == home => Some(pages),
            _ => None,
        });
        rows.flatten().collect()
    };
    assert_eq!(report(&mut rack, home, &[0..16, 32..64]), [], "they cannot go home");
    let rows: Vec<_> = rack
        .core
        .migrations()
        .elsewhere()
        .flat_map(|of| of.rows.iter())
        .map(|row| row.0.clone())
        .collect();
    assert_eq!(rows, [16..32]);
    assert_eq!(discards(&rack), Vec::<Range<u64>>::new(), "the home leads there still");
    rack.obey(S1);
    assert_eq!(discards(&rack), [0..16, 32..64]);
    rack.restart();
    assert_eq!(discards(&rack), Vec::<Range<u64>>::new(), "they are reported again");
    rack.obey(S1);
    report(&mut rack, home, &[0..16, 32..64]);
    assert_eq!(discards(&rack), [0..16, 32..64]);
    report(&mut rack, home, &[]);
    assert_eq!(discards(&rack), Vec::<Range<u64>>::new());
}

#[test]
fn rows_that_are_no_lines_are_refused() {
    let (mut rack, home) = moved();
    for pages in [vec![0..4], vec![8..16, 0..8], vec![8..8]] {
        let report = Report::Free { home, pages };
        let link = u64::from(S2.0);
        rack.core.migrations_mut().handle(rack.now, S2, link, report).unwrap_err();
    }
    assert_eq!(rack.core.return_free_lines(rack.now, S2), Vec::<String>::new());
}
