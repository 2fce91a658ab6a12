//! Pages that moved: they move on for traffic, and do not go back and forth.

use super::*;

/// Four servers with sixteen lines each, of which the second one has the first four of the first one. These have most of
/// the traffic.
fn hot_elsewhere() -> Rack {
    let mut rack = Rack::new(4, vec![200.0; 64]);
    for line in &mut rack.lines[..4] {
        *line = (2, 3000.0);
    }
    rack
}

#[test]
fn a_range_that_moved_earlier_and_is_hot_moves_on() {
    let mut rack = hot_elsewhere();
    let before = rack.share();
    let moves = rack.run(SPAN * 20);
    assert!(before > 0.6 && rack.share() < 0.3, "{before} {}: {moves:#?}", rack.share());
    for made in &moves {
        assert_eq!((made.home, made.giver), (contents(1), NodeId(2)), "{made:?}");
    }
    assert!(moves[0].reason.starts_with("s2 has 63 % of the traffic of 4 servers, these pages"));
    // They lie apart, and are hot in turn.
    let at: BTreeSet<u16> = rack.lines[..4].iter().map(|(at, _)| *at).collect();
    assert_eq!(at.len(), 4, "{:?}", &rack.lines[..4]);
    assert_eq!(rack.run(SPAN * 40), [], "{:?}", rack.lines);
    assert_eq!(rack.rebalancer.counted().count(), 0);
}

#[test]
fn what_moved_on_goes_back_only_after_a_time() {
    // Two servers: the second one has lines of the first, and only the first could take them.
    let mut rack = Rack::new(2, vec![200.0; 32]);
    rack.lines[..8].fill((2, 3000.0));
    for line in 0..8 {
        let (_, pages) = rack.pages(line);
        let pages = Pages { home: contents(1), pages };
        rack.rebalancer.note_moved(rack.now, pages, Some(NodeId(1)));
    }
    let begin = rack.now;
    let mut problems = BTreeSet::new();
    let first = loop {
        let moves = rack.step();
        if !moves.is_empty() {
            break moves;
        }
        problems.extend(rack.rebalancer.plan().problems.clone());
        assert!(rack.now < begin + SPAN * 20, "{problems:?}");
    };
    assert!(rack.now >= begin + SPAN * STAY_WINDOWS * 2, "{first:?}");
    assert!(first.iter().all(|made| (made.giver, made.taker) == (NodeId(2), NodeId(1))));
    let words = |why: &str| format!("s2 has too much of the traffic: {why}");
    let expected = [
        "pages do not go back to a server from which they moved a short time ago",
        "pages that moved a short time ago, or are moving, stay",
    ];
    assert_eq!(problems, expected.map(words).into());
}

#[test]
fn a_home_that_lost_its_memory_takes_none_of_its_earlier_pages() {
    let mut rack = hot_elsewhere();
    let mut moves = Vec::new();
    for _ in 0..200 {
        rack.now += SECOND;
        let mut reading = rack.reading();
        // It has no traffic at all, so it would be the first to take them.
        let home = &mut reading.servers[0];
        home.contents = Some(ContentsRecord { node: 1, generation: 9 });
        home.rate = LEARNED(0.0);
        let begun = rack.rebalancer.step(&reading, true);
        for made in &begun {
            made.pages().for_each(|pages| rack.rebalancer.note_moved(rack.now, pages, None));
            for line in 0..4 {
                let (_, pages) = rack.pages(line);
                if made.rows.iter().any(|row| row.contains(&pages.start)) {
                    rack.lines[line].0 = made.taker.0;
                }
            }
        }
        moves.extend(begun);
    }
    assert!(!moves.is_empty());
    assert!(moves.iter().all(|made| made.taker != NodeId(1)), "{moves:#?}");
}

#[test]
fn what_has_no_entry_is_no_reason_to_wait_for_ever() {
    let mut rack = hot_elsewhere();
    let own = &mut rack.lines[16..20];
    own.iter_mut().for_each(|(_, rate)| *rate = 3000.0);
    // The switch has no room for entries of what moved: its packets are counted for the home.
    let is_known = |count: &Count| count.block.home == count.at;
    let mut moves = Vec::new();
    for _ in 0..40 {
        rack.now += SECOND;
        let mut reading = rack.reading();
        reading.counts.retain(is_known);
        moves.extend(rack.rebalancer.step(&reading, true));
    }
    assert!(!moves.is_empty() && moves.iter().all(|made| made.home == contents(2)), "{moves:?}");
}

#[test]
fn a_load_that_comes_and_goes_moves_no_line_often() {
    let long = 3000;
    for (period, most) in [(8, 0), (25, 64), (60, 64), (200, 64)] {
        // Half of the lines of each server are hot in turn.
        let mut rack = Rack::new(4, vec![20.0; 64]);
        let mut last: BTreeMap<usize, Vec<(Instant, u16)>> = BTreeMap::new();
        let mut count = 0;
        for second in 0..long {
            let phase = second / period % 4;
            for (line, (_, rate)) in rack.lines.iter_mut().enumerate() {
                *rate = if line / 16 == phase { 500.0 } else { 20.0 };
            }
            let before = rack.lines.clone();
            rack.step();
            for (line, (old, new)) in before.iter().zip(&rack.lines).enumerate() {
                if old.0 == new.0 {
                    continue;
                }
                count += 1;
                let of = last.entry(line).or_default();
                let since = |at: &Instant| rack.now.duration_since(*at);
                if let Some((at, _)) = of.last() {
                    assert!(since(at) >= SPAN * STAY_WINDOWS, "line {line} at {second} s");
                }
                let is_early = |(at, from): &&(Instant, u16)| {
                    *from == new.0 && since(at) < SPAN * STAY_WINDOWS * 2
                };
                assert_eq!(of.iter().find(is_early), None, "line {line} at {second} s goes back");
                of.push((rack.now, old.0));
            }
        }
        println!("every {period} s another quarter: {count} lines moved");
        assert!(count <= most, "every {period} s: {count} lines moved");
    }
}

proptest! {
    #[test]
    fn a_block_is_covered_if_every_place_is(
        lines in prop::collection::btree_set(0..20_u64, 0..12),
        blocks in prop::collection::vec((0..16_u64, 0..3_u32), 0..8),
        block in (0..16_u64, 0..5_u32),
    ) {
        let block_of = |(line, more): (u64, u32)| {
            let order = LINE.ilog2() + more;
            Block { home: NodeId(1), first: (line * LINE) >> order << order, order }
        };
        let rows: Vec<Places> = lines.iter().map(|line| line * LINE..(line + 1) * LINE).collect();
        let (block, blocks) = (block_of(block), blocks.into_iter().map(block_of).collect::<Vec<_>>());
        let is_within = |place: &u64| rows.iter().any(|row| row.contains(place));
        let expected = block.places().filter(is_within).all(|place| blocks.iter().any(|it| it.places().contains(&place)));
        prop_assert_eq!(block.is_covered(&rows, blocks.iter()), expected);
    }
}
