//! The decisions, with readings that are made up, and simulated.

use std::ops::Range;

use proptest::prelude::*;

use super::block::LINE;
use super::simulation::{Settings, run};
use super::*;
use crate::migration::GenerationRange;

mod moved;

const SECOND: Duration = Duration::from_secs(1);
const SPAN: Duration = Duration::from_secs(10);

const fn contents(node: u16) -> ContentsRecord {
    ContentsRecord { node, generation: 3 }
}

const GENERATIONS: GenerationRange = GenerationRange { first: 3, last: 3 };

const LEARNED: fn(f64) -> Rate = |per_second| Rate { per_second, is_learned: true };

/// Servers with lines of known rates, which are all learned.
struct Rack {
    now: Instant,
    /// Its server, and its packets per second.
    lines: Vec<(u16, f64)>,
    /// Lines of each server at first: those of the first one come first.
    each: usize,
    servers: u16,
    total_pages: u64,
    rebalancer: Rebalancer,
}

impl Rack {
    fn new(servers: u16, rates: Vec<f64>) -> Self {
        let now = Instant::now();
        let each = rates.len() / usize::from(servers);
        let lines = rates.into_iter().take(each * usize::from(servers)).enumerate();
        let lines = lines.map(|(index, rate)| (u16::try_from(index / each).unwrap() + 1, rate));
        let total_pages = 16 * each as u64 * LINE;
        let (lines, rebalancer) = (lines.collect(), Rebalancer::default());
        Self { now, lines, each, servers, total_pages, rebalancer }
    }

    fn pages(&self, line: usize) -> (u16, Range<u64>) {
        let first = (line % self.each) as u64 * LINE;
        (u16::try_from(line / self.each).unwrap() + 1, first..first + LINE)
    }

    fn rate(&self, node: u16) -> f64 {
        self.lines.iter().filter(|(at, _)| *at == node).map(|(_, rate)| rate).sum()
    }

    fn share(&self) -> f64 {
        let rates: Vec<f64> = (1..=self.servers).map(|node| self.rate(node)).collect();
        rates.iter().copied().fold(0.0, f64::max) / rates.iter().sum::<f64>().max(1.0)
    }

    fn server(&self, node: u16) -> Server {
        let of_node = || (0..self.lines.len()).filter(|line| self.lines[*line].0 == node);
        let held = (1..=self.servers).map(|home| {
            let of_home = of_node().map(|line| self.pages(line)).filter(|(of, _)| *of == home);
            let rows = of_home.flat_map(|(_, pages)| places(GENERATIONS, &pages));
            Held { home: contents(home), rows: rows.collect() }
        });
        let used = of_node().count() as u64 * LINE;
        Server {
            id: NodeId(node),
            name: format!("s{node}"),
            space: 1,
            free_pages: self.total_pages.saturating_sub(used),
            total_pages: self.total_pages,
            rate: LEARNED(self.rate(node)),
            may_give: true,
            may_take: true,
            contents: Some(contents(node)),
            held: held.filter(|held| !held.rows.is_empty()).collect(),
            allocated: of_node()
                .map(|line| self.pages(line))
                .map(|(home, pages)| Pages { home: contents(home), pages })
                .collect(),
        }
    }

    fn reading(&self) -> Reading {
        // Own blocks that are counted, and every line that moved, have entries.
        let own: Vec<Block> = self
            .rebalancer
            .counted_at()
            .filter(|(server, block)| *server == block.home)
            .map(|(_, block)| block)
            .collect();
        let mut counts: BTreeMap<(Block, u16), f64> =
            own.iter().map(|block| ((*block, block.home.0), 0.0)).collect();
        for (line, (at, rate)) in self.lines.iter().enumerate() {
            let (home, pages) = self.pages(line);
            let first = places(GENERATIONS, &pages).next().unwrap().start;
            let moved = Block { home: NodeId(home), first, order: LINE.ilog2() };
            let of = match *at == home {
                true => own.iter().copied().find(|block| block.contains(&moved)),
                false => Some(moved),
            };
            if let Some(block) = of {
                *counts.entry((block, *at)).or_default() += rate;
            }
        }
        let counts = counts.into_iter();
        Reading {
            now: self.now,
            window: SPAN,
            servers: (1..=self.servers).map(|node| self.server(node)).collect(),
            counts: counts
                .map(|((block, at), rate)| Count { block, at: NodeId(at), rate: LEARNED(rate) })
                .collect(),
            moving: Vec::new(),
            open_count: 0,
            entries_max: ENTRIES_MAX,
        }
    }

    /// Decides, and carries moves out at once.
    fn step(&mut self) -> Vec<Move> {
        self.now += SECOND;
        let reading = self.reading();
        let moves = self.rebalancer.step(&reading, true);
        for made in &moves {
            let giver = Some(made.giver);
            made.pages().for_each(|pages| self.rebalancer.note_moved(self.now, pages, giver));
            for line in 0..self.lines.len() {
                let (home, pages) = self.pages(line);
                let is_part = made.rows.iter().any(|row| row.contains(&pages.start));
                if home == made.home.node && is_part && self.lines[line].0 == made.giver.0 {
                    self.lines[line].0 = made.taker.0;
                }
            }
        }
        moves
    }

    fn run(&mut self, time: Duration) -> Vec<Move> {
        let end = self.now + time;
        let mut moves = Vec::new();
        while self.now < end {
            moves.extend(self.step());
        }
        moves
    }
}

proptest! {
    #[test]
    fn counters_that_begin_anew_give_no_wrong_rates(
        steps in prop::collection::vec((1..5_u64, prop::option::of((0..1000_u64, any::<bool>()))), 2..40),
    ) {
        let mut rates = Rates::default();
        let (mut at, mut count) = (Instant::now(), u64::MAX / 2);
        for (seconds, more) in steps {
            at += Duration::from_secs(seconds);
            // Without a count, the entry was not there.
            let counts = more.map(|(more, is_new)| {
                count = if is_new { more } else { count + more };
                ((), count)
            });
            let added = rates.note(SPAN, at, counts);
            prop_assert!(added.values().all(|added| *added < 1000), "{added:?}");
            // An earlier reading changes nothing.
            prop_assert!(rates.note(SPAN, at, [((), 0)]).is_empty());
            if let Some(rate) = rates.get(SPAN, &()) {
                prop_assert!((0.0..=1000.0).contains(&rate.per_second), "{rate:?}");
            }
        }
    }

    #[test]
    fn parts_have_all_places_once(
        lines in prop::collection::btree_set(0..600_u64, 1..40),
        last in 3..6_u16,
    ) {
        let generations = GenerationRange { first: 3, last };
        let rows: Vec<Places> =
            lines.iter().flat_map(|line| places(generations, &(line * LINE..(line + 1) * LINE))).collect();
        let root = Block::root(NodeId(1), &rows).unwrap();
        let mut blocks = vec![root];
        for _ in 0..3 {
            let parts: Vec<Block> = blocks.iter().flat_map(|block| block.split(&rows)).collect();
            for block in &blocks {
                let own = parts.iter().filter(|part| block.contains(part)).count();
                prop_assert!((1..=16).contains(&own), "{block:?}");
            }
            for row in &rows {
                for place in row.clone().step_by(8) {
                    let of = parts.iter().filter(|part| part.places().contains(&place)).count();
                    prop_assert_eq!(of, 1, "place {}", place);
                }
            }
            prop_assert!(parts.iter().all(|part| part.first % (1 << part.order) == 0));
            blocks = parts;
        }
        let is_one = |block: &Block| 1 << block.order == LINE;
        prop_assert!(lines.len() > 15 || last > 3 || blocks.iter().all(is_one), "{blocks:?}");
    }

    #[test]
    fn readings_of_any_kind_are_survived(
        servers in prop::collection::vec(
            (0..3_u16, 0..100_u64, 0..100_u64, -1.0..1e12_f64, any::<[bool; 3]>()), 0..5),
        rows in prop::collection::vec((0..1_u64 << 40, 0..1_u64 << 40), 0..5),
        may_move in any::<bool>(),
    ) {
        let now = Instant::now();
        let mut rebalancer = Rebalancer::default();
        for step in 0..40 {
            let row = |(start, length): &(u64, u64)| start / LINE * LINE..(start + length).next_multiple_of(LINE);
            let held = Held { home: contents(1), rows: rows.iter().map(row).collect() };
            let server = |(id, (space, free, total, rate, flags)): (u16, &(u16, u64, u64, f64, [bool; 3]))| Server {
                id: NodeId(id),
                name: String::new(),
                space: *space % 2,
                free_pages: *free,
                total_pages: *total,
                rate: Rate { per_second: *rate, is_learned: flags[0] },
                may_give: flags[1],
                may_take: flags[2],
                contents: flags[0].then_some(contents(id)),
                held: vec![held.clone()],
                allocated: rows.iter().map(|row| Pages { home: contents(1), pages: row.0..row.0 + row.1 % 9000 }).collect(),
            };
            let reading = Reading {
                now: now + SECOND * step,
                window: SPAN,
                servers: (1..).zip(&servers).map(server).collect(),
                counts: rebalancer.counted().map(|block| Count { block, at: NodeId(1), rate: LEARNED(7.0) }).collect(),
                moving: Vec::new(),
                open_count: 0,
                entries_max: 100,
            };
            let moves = rebalancer.step(&reading, may_move);
            prop_assert!(may_move || moves.is_empty());
            prop_assert!(rebalancer.counted().count() <= 100);
        }
    }
}

proptest! {
    // Each takes tens of milliseconds.
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn moves_relieve_the_hottest_and_are_limited(
        servers in 2..6_u16,
        rates in prop::collection::vec(0.0..3000.0_f64, 24..80),
        hot in 0..80_usize,
        peak in 0.0..100_000.0_f64,
    ) {
        let mut rack = Rack::new(servers, rates);
        let hot = hot % rack.lines.len();
        rack.lines[hot].1 += peak;
        let mut begun = VecDeque::new();
        let mut visited: BTreeMap<usize, Vec<u16>> = BTreeMap::new();
        for _ in 0..200 {
            let (share, before) = (rack.share(), rack.lines.clone());
            let moves = rack.step();
            prop_assert!(rack.rebalancer.counted().count() <= ENTRIES_MAX);
            // With the moves of a step alone, none that takes becomes the hottest.
            prop_assert!(rack.share() <= share + 1e-9, "{share} {moves:?}");
            let rows: usize = moves.iter().map(|made| made.rows.len()).sum();
            prop_assert!(rows <= OPEN_MAX, "{moves:?}");
            for made in &moves {
                prop_assert!(made.giver != made.taker && !made.reason.is_empty());
                prop_assert!((1..=PART_MAX).contains(&made.page_count()));
                begun.push_back((rack.now, made.page_count()));
            }
            while begun.front().is_some_and(|(at, _)| *at + SPAN < rack.now) {
                begun.pop_front();
            }
            let pages: u64 = begun.iter().map(|(_, pages)| pages).sum();
            prop_assert!(pages as f64 <= PAGES_AT_ONCE + 11.0 * PAGES_PER_SECOND);
            for (line, (old, new)) in before.iter().zip(&rack.lines).enumerate() {
                if old.0 != new.0 {
                    let visited = visited.entry(line).or_default();
                    prop_assert!(!visited.contains(&new.0), "line {line} went back to {}", new.0);
                    visited.push(old.0);
                }
            }
        }
        // With constant rates it comes to an end.
        prop_assert_eq!(rack.run(SPAN * 10), Vec::new());
    }
}

#[test]
fn a_line_that_is_too_hot_for_any_server_stays_and_its_neighbours_move() {
    let mut rates: Vec<f64> = (0..64).map(|line| if line < 16 { 1000.0 } else { 100.0 }).collect();
    rates[5] = 40_000.0;
    let mut rack = Rack::new(4, rates);
    let moves = rack.run(SPAN * 30);
    assert_eq!(rack.lines[5].0, 1, "{moves:#?}");
    assert!(!moves.is_empty() && moves.iter().all(|made| made.giver == NodeId(1)), "{moves:#?}");
    assert!(
        moves[0].reason.starts_with("s1 has 92 % of the traffic of 4 servers, these pages have")
    );
    let problems = &rack.rebalancer.plan().problems;
    assert_eq!(
        problems,
        &["s1 has too much of the traffic: single lines of pages are too hot for any other server"]
    );
}

#[test]
fn counting_begins_after_a_window_and_ends_when_the_load_is_even() {
    let rates: Vec<f64> = (0..64).map(|line| if line < 16 { 500.0 } else { 50.0 }).collect();
    let mut rack = Rack::new(4, rates.clone());
    assert_eq!(rack.run(SPAN), []);
    assert_eq!(rack.rebalancer.counted().count(), 0, "it may be hot for a moment only");
    rack.step();
    rack.step();
    assert_eq!(rack.rebalancer.counted().count(), 16);
    let before = rack.share();
    assert!(!rack.run(SPAN * 20).is_empty());
    assert!(before > 0.65 && rack.share() < 0.3, "{before} {}", rack.share());
    assert_eq!(rack.rebalancer.counted().count(), 0);
    assert_eq!(rack.rebalancer.hot().count(), 0);
    // Too little traffic to matter.
    let mut idle = Rack::new(4, rates.iter().map(|rate| rate / 500.0).collect());
    assert_eq!(idle.run(SPAN * 20), []);
    assert_eq!(idle.rebalancer.counted().count(), 0);
}

#[test]
fn servers_that_take_no_part_do_not_count() {
    // Two servers, of which one has 60 % of the traffic, and six that are drained or silent.
    let mut rates = vec![0.0; 8 * 16];
    rates[..16].fill(60.0);
    rates[16..32].fill(40.0);
    let mut rack = Rack::new(8, rates);
    let run = |rack: &mut Rack| {
        let mut moves = Vec::new();
        for _ in 0..40 {
            rack.now += SECOND;
            let mut reading = rack.reading();
            for server in &mut reading.servers[2..] {
                (server.may_give, server.may_take) = (false, false);
            }
            moves.extend(rack.rebalancer.step(&reading, true));
        }
        moves
    };
    assert_eq!(run(&mut rack), []);
    assert_eq!(rack.rebalancer.hot().count(), 0);
    // The drained ones have nearly all: that makes none of them hot, and the others are not cold for it.
    rack.lines[32..].iter_mut().for_each(|(_, rate)| *rate = 10_000.0);
    assert_eq!(run(&mut rack), []);
    assert_eq!(rack.rebalancer.hot().count(), 0);
    // With 90 % it is hot among these two.
    rack.lines[..16].iter_mut().for_each(|(_, rate)| *rate = 360.0);
    let moves = run(&mut rack);
    assert!(moves.iter().all(|made| (made.giver, made.taker) == (NodeId(1), NodeId(2))));
    let reason = &moves[0].reason;
    assert!(reason.starts_with("s1 has 90 % of the traffic of 2 servers, "), "{reason}");
}

#[test]
fn what_is_asked_for_only_moves_nothing() {
    let rates: Vec<f64> = (0..64).map(|line| if line < 16 { 500.0 } else { 50.0 }).collect();
    let mut rack = Rack::new(4, rates);
    for _ in 0..30 {
        rack.now += SECOND;
        let reading = rack.reading();
        assert_eq!(rack.rebalancer.step(&reading, false), []);
    }
    let plan = rack.rebalancer.plan().clone();
    assert!(!plan.is_counting && !plan.moves.is_empty(), "{plan:?}");
    let [shares] = plan.shares[..] else { panic!("{plan:?}") };
    assert!((shares.before - rack.share()).abs() < 1e-9 && shares.after < 0.4, "{shares:?}");
    rack.rebalancer.rest();
    assert_eq!(rack.rebalancer.counted().count(), 0);
}

#[test]
fn a_full_server_gives_its_coldest_pages_to_one_with_room() {
    let mut rack = Rack::new(3, vec![0.0; 3 * 64]);
    // The first has 64 lines of 68, the second too little room to take any.
    rack.total_pages = 68 * LINE;
    let mut moves = Vec::new();
    for _ in 0..30 {
        rack.now += SECOND;
        let mut reading = rack.reading();
        reading.servers[1].free_pages = 15 * LINE;
        reading.servers[2].free_pages = 60 * LINE - moves.len() as u64 * LINE;
        let begun = rack.rebalancer.step(&reading, true);
        for made in &begun {
            assert_eq!((made.giver, made.taker), (NodeId(1), NodeId(3)), "{made:?}");
            made.pages().for_each(|pages| rack.rebalancer.note_moved(rack.now, pages, None));
            let line = usize::try_from(made.rows[0].start / LINE).unwrap();
            rack.lines[line].0 = 3;
        }
        moves.extend(begun);
    }
    assert_eq!(moves[0].reason, "s1 has 6 % of its memory free, and s3 88 %");
    // A fifth of 68 lines, without the four that were free.
    assert_eq!(moves.len(), 10);
    assert!(rack.rebalancer.plan().problems.is_empty() && rack.rebalancer.full().count() == 0);
}

#[test]
fn a_small_full_server_gives_as_much_of_its_only_allocation_as_both_need() {
    let now = Instant::now();
    let mut reading = Rack::new(3, vec![0.0; 48]).reading();
    // Servers with 16 MiB.
    for server in &mut reading.servers {
        (server.total_pages, server.free_pages) = (4096, 4096);
        server.allocated = Vec::new();
    }
    reading.servers[0].free_pages = 246;
    reading.servers[0].allocated = vec![Pages { home: contents(1), pages: 3..3850 }];
    // This one could take two lines.
    reading.servers[1].free_pages = 1245;
    let begin = |reading: &Reading, moved: Option<Range<u64>>| {
        let mut rebalancer = Rebalancer::default();
        if let Some(pages) = moved {
            rebalancer.note_moved(now, Pages { home: contents(1), pages }, None);
        }
        let moves = rebalancer.step(reading, true);
        let problems = rebalancer.plan().problems.clone();
        let parts = |made: Move| (made.taker.0, made.rows[0].clone());
        (moves.into_iter().map(parts).collect::<Vec<_>>(), problems)
    };
    // A fifth of it is 819.2, so 574 are missing: 72 lines.
    assert_eq!(begin(&reading, None), (vec![(3, 0..576)], Vec::new()));
    // Only lines that may move.
    let (moves, problems) = begin(&reading, Some(16..3600));
    assert_eq!(moves, [(3, 0..16), (3, 3600..3856)]);
    assert_eq!(problems, ["s1 is nearly full: none of its pages may move now"]);
    // The others have less room than it needs.
    reading.servers[2].free_pages = 1240;
    let (moves, problems) = begin(&reading, None);
    assert_eq!(moves, [(2, 0..16), (3, 16..24)]);
    assert_eq!(problems, ["s1 is nearly full: no other server has room without being too hot"]);
}

#[test]
fn parts_of_a_counted_block_have_their_share_of_its_packets() {
    let mut reading = Rack::new(2, vec![0.0; 32]).reading();
    for server in &mut reading.servers {
        (server.total_pages, server.free_pages) = (4096, 4096);
        (server.allocated, server.rate) = (Vec::new(), LEARNED(1000.0));
    }
    reading.servers[0].free_pages = 246;
    reading.servers[0].allocated = vec![Pages { home: contents(1), pages: 0..3850 }];
    // All that it has is counted in one block, of which half is not allocated.
    let first = places(GENERATIONS, &(0..8192)).next().unwrap().start;
    let block = Block { home: NodeId(1), first, order: 13 };
    let counted = Count { block, at: NodeId(1), rate: LEARNED(1000.0) };
    reading.counts = vec![counted];
    let rate = |reading: &Reading| {
        let moves = Rebalancer::default().step(reading, true);
        let [made] = &moves[..] else { panic!("{moves:?}") };
        assert_eq!(made.page_count(), 576);
        made.rate
    };
    assert!((rate(&reading) - 1000.0 * 576.0 / 3850.0).abs() < 1e-6);
    // Only the second half is counted: the first one has the fair part of its pages.
    reading.counts[0].block = Block { first: first + 2048, order: 11, ..block };
    assert!((rate(&reading) - 1000.0 * 576.0 / 3850.0).abs() < 1e-6);
    // It has no packets.
    reading.counts[0] = Count { block, at: NodeId(1), rate: LEARNED(0.0) };
    assert!(rate(&reading).abs() < 1e-6);
}

/// Steps until something moves or there are problems; nothing else happens.
fn problems(rack: &mut Rack, change: impl Fn(&mut Reading)) -> Vec<String> {
    for _ in 0..200 {
        rack.now += SECOND;
        let mut reading = rack.reading();
        change(&mut reading);
        assert_eq!(rack.rebalancer.step(&reading, false), []);
        let plan = rack.rebalancer.plan();
        if !plan.problems.is_empty() {
            return plan.problems.clone();
        }
        assert!(plan.moves.is_empty(), "{plan:?}");
    }
    panic!("nothing is said: {:?}", rack.rebalancer.plan());
}

#[test]
fn a_move_with_many_rows_begins_with_as_many_as_may_be_open() {
    let mut rack = Rack::new(2, vec![0.0; 64]);
    let made = Move {
        home: contents(1),
        rows: [0, 2, 4, 6, 8].map(|line| line * LINE..(line + 1) * LINE).to_vec(),
        giver: NodeId(1),
        taker: NodeId(2),
        rate: 1000.0,
        reason: "it is hot".to_owned(),
    };
    rack.now += SECOND;
    let mut reading = rack.reading();
    rack.rebalancer.waiting.push_back(made.clone());
    let mut begin = |open_count: usize| {
        reading.open_count = open_count;
        let begun = rack.rebalancer.begin(&reading);
        begun.into_iter().map(|it| (it.rows, it.rate)).collect::<Vec<_>>()
    };
    let rows = |range: Range<usize>| made.rows[range].to_vec();
    assert_eq!(begin(0), [(rows(0..2), 400.0)]);
    assert_eq!(begin(2), []);
    assert_eq!(begin(1), [(rows(2..3), 200.0)]);
    assert_eq!(begin(0), [(rows(3..5), 400.0)]);
    assert_eq!(begin(0), []);
}

#[test]
fn problems_say_why_nothing_moves() {
    // Too little traffic of each line for a window of 10 s, though together it is enough to be hot.
    let rates = |rate: f64| (0..64).map(|line| if line < 32 { rate } else { 0.0 }).collect();
    assert_eq!(
        problems(&mut Rack::new(2, rates(3.0)), |_| {}),
        [
            "s1 has too much of the traffic: its pages have too little traffic for this window; use a longer --window"
        ]
    );
    let hot = |why: &str| vec![format!("s1 has too much of the traffic: {why}")];
    let mut rack = Rack::new(2, rates(500.0));
    let stays = hot("pages that moved a short time ago, or are moving, stay");
    let moving = Pages { home: contents(1), pages: 0..32 * LINE };
    assert_eq!(problems(&mut rack, |reading| reading.moving = vec![moving.clone()]), stays);
    let full = |reading: &mut Reading| reading.servers[1].free_pages = 820;
    assert_eq!(problems(&mut Rack::new(2, rates(500.0)), full), hot("no other server has room"));
    // A full one.
    let mut rack = Rack::new(1, vec![0.0; 64]);
    rack.total_pages = 68 * LINE;
    assert_eq!(problems(&mut rack, |_| {}), ["s1 is nearly full: there is no other server"]);
    let mut rack = Rack::new(2, vec![0.0; 128]);
    rack.total_pages = 68 * LINE;
    let away = |reading: &mut Reading| reading.servers[1].may_take = false;
    assert_eq!(
        problems(&mut rack, away)[0],
        "s1 is nearly full: no other server can take pages now"
    );
}

#[test]
fn pages_that_move_again_stay_longer_each_time() {
    let (now, mut rebalancer) = (Instant::now(), Rebalancer::default());
    let mut reading = Rack::new(2, vec![0.0; 16]).reading();
    let pages = |pages: Range<u64>| Pages { home: contents(1), pages };
    let is_bound = |rebalancer: &Rebalancer, reading: &Reading, range| {
        rebalancer.is_bound(reading, &[], &pages(range))
    };
    rebalancer.note_moved(now, pages(0..64), None);
    reading.now = now + SPAN * STAY_WINDOWS - SECOND;
    assert!(is_bound(&rebalancer, &reading, 8..16) && !is_bound(&rebalancer, &reading, 64..72));
    reading.now += SECOND;
    assert!(!is_bound(&rebalancer, &reading, 8..16));
    rebalancer.note_moved(reading.now, pages(8..16), None);
    reading.now += SPAN * STAY_WINDOWS;
    assert!(is_bound(&rebalancer, &reading, 8..16) && !is_bound(&rebalancer, &reading, 0..8));
    assert!(!is_bound(&rebalancer, &reading, 16..64));
    reading.now += SPAN * STAY_WINDOWS;
    assert!(!is_bound(&rebalancer, &reading, 8..16));
    // In the end it is forgotten that they moved.
    reading.now += SPAN * STAY_WINDOWS * 4;
    rebalancer.forget(&reading);
    assert!(rebalancer.stays.is_empty());
}

fn small(seed: u64) -> Settings {
    Settings { lines: 48, time: Duration::from_secs(600), seed, ..Settings::default() }
}

#[test]
fn a_zipf_load_is_spread_over_eight_servers() {
    for seed in [1, 2] {
        let of = run(small(seed));
        let after = of.after.expect("it takes long enough");
        println!(
            "seed {seed}: {:.3} of the packets before, {after:.3} after {} moves of {} pages",
            of.before, of.move_count, of.page_count
        );
        assert!(of.before > 0.65, "{of:?}");
        // The server with the hottest line cannot have less than its share.
        assert!(after < of.hottest_line * 1.25, "{of:?}");
        assert!((1..=16).contains(&of.move_count), "{of:?}");
        assert!(of.return_count == 0 && of.open_most <= OPEN_MAX, "{of:?}");
        assert!(of.entries_most <= ENTRIES_MAX, "{of:?}");
    }
}

#[test]
fn a_short_simulation_has_no_share_afterwards() {
    let of = run(Settings { time: SECOND, ..small(1) });
    assert!(of.before > 0.0 && of.after.is_none(), "{of:?}");
}

#[test]
fn a_load_that_shifts_does_not_make_pages_go_back_and_forth() {
    for (seed, every, most) in [(3, 10, 0), (4, 60, 24)] {
        let settings = Settings { shifts: Some(SECOND * every), ..small(seed) };
        let of = run(settings);
        println!("seed {seed}, a shift each {every} s: {} moves", of.move_count);
        assert!(of.move_count <= most && of.return_count == 0, "{of:?}");
    }
}
