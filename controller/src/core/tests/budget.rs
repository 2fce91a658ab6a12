//! Many ranges that moved and a small table: entries never lead to a wrong server, and never are more than there is room
//! for.

use std::ops::Range;

use bluebridge_northbound::migration::{Generations, Order, Report, ServedRow};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use super::*;
use crate::core::MovedUse;
use crate::migration::testing::{finish, progress, record_of};
use crate::migration::{MigrateError, Stage, Wanted};
use crate::plan::Plan;

const LINE: u64 = 8;
const TABLE: usize = 1024;
/// Half of the table is for endpoints.
const BUDGET: usize = 512;
const HOME: u16 = 1;
const SERVERS: u16 = 3;

/// An open migration, and the lines of it that its taker reported.
struct Open {
    id: u64,
    lines: Range<usize>,
    taker: u16,
    kept: Vec<usize>,
}

/// A rack of three memory servers, and what is known of the first one's lines.
struct Bench {
    core: Core,
    generation: ArenaGeneration,
    /// The server of each line.
    at: Vec<u16>,
    open: Vec<Open>,
    installed: Tables,
    most: usize,
    /// Orders so far; how many entries one of several needs is counted here, too.
    asked: usize,
    counted_every: usize,
}

impl Bench {
    fn new(line_count: u64, client_count: u16, counted_every: usize) -> Self {
        let now = Instant::now();
        let config = CoreConfig { directory_size: TABLE, ..CoreConfig::default() };
        let mut core = Core::new(config, Stored::default(), 1, now);
        core.learn_ports(SWITCH, ports(SERVERS + client_count));
        let mut generation = 0;
        for node in 1..=SERVERS {
            let record =
                join(&mut core, now, &memory(&format!("s{node}"), node, line_count * LINE));
            assert_eq!(record.node, node);
            core.migrations_mut().connect(record.id(), u64::from(node), true);
            if node == HOME {
                generation = record.generation;
            }
        }
        for number in 1..=client_count {
            let client = client(&format!("c{number}"), SERVERS + number);
            // A space has at most 128 endpoints at a switch.
            let space = Space(2 + number / 100);
            join(&mut core, now, &Join { space, ..client });
        }
        let _ = core.take_changes();
        let at = (0..line_count).map(|_| HOME).collect();
        let generation = ArenaGeneration::new(generation).unwrap();
        let installed = core.desired(SWITCH);
        let (open, most, asked) = (Vec::new(), 0, 0);
        Self { core, generation, at, open, installed, most, asked, counted_every }
    }

    fn wanted(lines: Range<usize>, taker: u16) -> Wanted {
        let page = |line: usize| u64::try_from(line).unwrap() * LINE;
        Wanted {
            home: NodeId(HOME),
            space: SPACE,
            generation: None,
            pages: Some(page(lines.start)..page(lines.end)),
            taker: NodeId(taker),
        }
    }

    fn rows(&self, lines: &[usize]) -> Vec<ServedRow> {
        let generations = Generations { first: self.generation, last: self.generation };
        let row = |line: &usize| {
            let pages = Self::wanted(*line..*line + 1, 1).pages.unwrap();
            ServedRow { pages, generations }
        };
        lines.iter().map(row).collect()
    }

    fn stage(&self, id: u64) -> Stage {
        record_of(self.core.migrations(), id).stage
    }

    fn hear(&mut self, from: u16, report: Report) {
        let migrations = self.core.migrations_mut();
        migrations.handle(Instant::now(), NodeId(from), u64::from(from), report).unwrap();
    }

    /// The servers when all that is moving, and these lines, have moved.
    fn planned(&self, lines: &Range<usize>, taker: u16) -> Vec<u16> {
        let mut at = self.at.clone();
        let open = self.open.iter().filter(|of| self.stage(of.id) < Stage::Settled);
        open.for_each(|of| at[of.lines.clone()].fill(of.taker));
        at[lines.clone()].fill(taker);
        at
    }

    /// Asks for a move; a refusal must be one for want of room, or because of what moves already.
    fn ask(&mut self, lines: Range<usize>, taker: u16) -> Result<Vec<u64>, MigrateError> {
        self.asked += 1;
        let is_counted = self.asked.is_multiple_of(self.counted_every);
        let needed = is_counted.then(|| blocks(&self.planned(&lines, taker)));
        let _ = self.core.take_changes();
        let asked = self.core.migrate(&Self::wanted(lines.clone(), taker));
        match &asked {
            Ok(ids) => {
                assert!(needed.is_none_or(|it| it <= BUDGET), "{lines:?} to {taker}: {needed:?}");
                for id in ids {
                    let pages = record_of(self.core.migrations(), *id).pages.clone();
                    let line = |page: u64| usize::try_from(page / LINE).unwrap();
                    let lines = line(pages.start)..line(pages.end);
                    self.open.push(Open { id: *id, lines, taker, kept: Vec::new() });
                }
            }
            Err(error) => {
                assert_eq!(self.core.take_changes(), [], "{error}");
                if let MigrateError::TableFull { needed: said, budget, .. } = error {
                    assert!(needed.is_none_or(|it| it == *said), "{needed:?}, not {said}");
                    assert!(*said > BUDGET && *budget == BUDGET);
                }
            }
        }
        asked
    }

    /// Asks for a move, and completes it.
    fn move_at_once(&mut self, lines: Range<usize>, taker: u16) -> Result<(), MigrateError> {
        for id in self.ask(lines, taker)?.into_iter().rev() {
            let of = self.open.pop().unwrap();
            assert_eq!(of.id, id);
            let rows = self.rows(&of.lines.clone().collect::<Vec<_>>());
            finish(self.core.migrations_mut(), id, &rows);
            self.at[of.lines].fill(of.taker);
        }
        Ok(())
    }

    /// Moves everything home, in pieces; some may have to wait until others have moved.
    fn move_home(&mut self) {
        const PIECE: usize = 64;
        let mut left = usize::MAX;
        loop {
            let away: Vec<usize> = (0..self.at.len())
                .step_by(PIECE)
                .filter(|line| self.at[*line..*line + PIECE].iter().any(|at| *at != HOME))
                .collect();
            if away.is_empty() {
                return;
            }
            assert!(away.len() < left, "nothing can move home");
            left = away.len();
            for line in away {
                match self.move_at_once(line..line + PIECE, HOME) {
                    Ok(()) | Err(MigrateError::TableFull { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }

    /// Carries an open migration a step further: some of its lines arrive, it is cancelled, or its next order is obeyed.
    fn advance(&mut self, index: usize, rng: &mut SmallRng) {
        let Open { id, lines, taker, kept } = &self.open[index];
        let (id, lines, taker, mut kept) = (*id, lines.clone(), *taker, kept.clone());
        let stage = self.stage(id);
        let giver = record_of(self.core.migrations(), id).giver.node;
        match stage {
            Stage::Recorded => self.hear(taker, Report::Reserved(id)),
            Stage::Reserved => {
                self.hear(giver, Report::Allowed { migration: id, fences: Vec::new() });
            }
            Stage::Allowed => {
                kept.extend(lines.clone().filter(|_| rng.random_ratio(1, 3)));
                kept.sort_unstable();
                kept.dedup();
                let is_done = kept.len() == lines.len();
                kept.iter().for_each(|line| self.at[*line] = taker);
                self.hear(taker, progress(id, &self.rows(&kept), is_done));
                self.open[index].kept = kept;
                if !is_done && rng.random_ratio(1, 40) {
                    self.core.migrations_mut().cancel(id).unwrap();
                }
            }
            Stage::Ending => self.hear(giver, Report::Withdrawn(id)),
            Stage::Withdrawn => {
                self.hear(taker, Report::Settled { migration: id, kept: self.rows(&kept) });
            }
            Stage::Settled => {
                let orders = self.core.migrations().orders(NodeId(HOME));
                let learn = orders.into_iter().find_map(|order| match order {
                    Order::Learn(elsewhere) => Some(elsewhere),
                    _ => None,
                });
                let learn = learn.unwrap();
                self.hear(HOME, Report::Learned { home: learn.home, version: learn.version });
            }
            Stage::Learned => self.hear(giver, Report::Forgotten(id)),
            Stage::Forgotten => self.hear(taker, Report::Released(id)),
            Stage::Closed => drop(self.open.swap_remove(index)),
        }
    }

    /// Installs the desired tables update by update, and checks where all lines of a step are led.
    fn check(&mut self, step: usize) -> MovedUse {
        let (desired, of) = self.core.desired_with_use(SWITCH);
        let plan = Plan::within(&desired, &self.installed, TABLE);
        for update in plan.stages().iter().flatten() {
            update.apply_to(&mut self.installed);
            let count = directory_count(&self.installed);
            assert!(count <= TABLE, "{count} entries after: {update}");
            self.most = self.most.max(count);
        }
        assert_eq!(self.installed, desired);
        assert_eq!((of.budget, moved_count(&desired)), (BUDGET, of.there));
        assert!(of.there <= BUDGET);
        for line in (0..self.at.len()).step_by(step) {
            let (at, led) = (self.at[line], self.leads(line, self.generation));
            assert!(led == at || led == HOME, "line {line} is at {at}, and led to {led}");
            assert!(led == at || !of.is_complete(), "line {line} at {at} has no entry: {of:?}");
        }
        // Contents of another time are not elsewhere.
        let other = ArenaGeneration::new(self.generation.number() + 1).unwrap();
        let line = step / 2 % self.at.len();
        assert_eq!(self.leads(line, other), HOME);
        of
    }

    /// The server to which the switch leads requests for a line.
    fn leads(&self, line: usize, generation: ArenaGeneration) -> u16 {
        let line = (u128::try_from(line).unwrap() * u128::from(LINE)) << 12;
        let node = u128::from(SPACE.scope()) << 80 | u128::from(HOME) << 64;
        let address = node | u128::from(generation.number()) << 48 | line;
        let found = (48..=112_u32).rev().find_map(|prefix_len| {
            let mask = u128::MAX.checked_shl(112 - prefix_len).unwrap_or(0);
            let prefix_len = u8::try_from(prefix_len).unwrap();
            let key = Key::Directory { prefix: address & mask, prefix_len };
            self.installed.entries.get(&key)
        });
        let Some(Action::Forward(forward)) = &found.unwrap().action else { panic!("{found:?}") };
        // Servers are at the ports of their numbers.
        forward.port.0
    }
}

/// The fewest aligned blocks of lines at the same server that is not the home.
fn blocks(at: &[u16]) -> usize {
    let size = at.len().next_power_of_two();
    let of = |range: Range<usize>| at.get(range.start..range.end.min(at.len())).unwrap_or_default();
    let mut count = 0;
    let mut left: Vec<_> = std::iter::once(0..size).collect();
    while let Some(range) = left.pop() {
        let lines = of(range.clone());
        let first = lines.first().copied().unwrap_or(HOME);
        let is_whole = lines.len() == range.len() || first == HOME;
        if is_whole && lines.iter().all(|it| *it == first) {
            count += usize::from(first != HOME);
        } else {
            let middle = range.start.midpoint(range.end);
            left.extend([range.start..middle, middle..range.end]);
        }
    }
    count
}

fn directory_count(tables: &Tables) -> usize {
    tables.entries.keys().filter(|key| matches!(key, Key::Directory { .. })).count()
}

fn moved_count(tables: &Tables) -> usize {
    let is_moved = |key: &Key| matches!(key, Key::Directory { prefix_len, .. } if *prefix_len > 48);
    tables.entries.keys().filter(|key| is_moved(key)).count()
}

/// The worst case: no two lines are neighbours, and the rack has as many endpoints as a switch has ports.
#[test]
fn ten_thousand_ranges_that_cannot_be_aggregated_are_refused_when_the_table_is_full() {
    const COUNT: usize = 10_000;
    let mut bench = Bench::new(2 * COUNT as u64, 505, 64);
    let mut refused = 0;
    for number in 0..COUNT {
        let line = 2 * number;
        match bench.move_at_once(line..line + 1, 2) {
            Ok(()) => assert!(number < BUDGET, "range {number}"),
            Err(MigrateError::TableFull { needed, .. }) => {
                assert_eq!(needed, BUDGET + 1);
                refused += 1;
            }
            Err(error) => panic!("{error}"),
        }
        if number % 64 == 0 {
            bench.check(61);
        }
    }
    assert_eq!(refused, COUNT - BUDGET);
    let complete = MovedUse { needed: BUDGET, there: BUDGET, budget: BUDGET };
    assert_eq!(bench.check(1), complete);
    assert!(bench.most > 1000, "{}", bench.most);
    // The order for all of them at once is refused as well, and the one for everything is not.
    bench.move_at_once(0..2 * COUNT, 3).unwrap_err();
    for line in 0..BUDGET {
        bench.move_at_once(2 * line + 1..2 * line + 2, 2).unwrap();
    }
    assert_eq!(bench.check(1).needed, 1, "1,024 lines are one block");
    bench.move_at_once(1024..2 * COUNT, 2).unwrap();
    assert!(bench.check(1).needed < 20);
}

/// Ranges of random length move among three servers, some are cancelled half done, and several are on their way.
#[test]
fn ten_thousand_random_ranges_lead_to_their_servers_or_their_home() {
    const COUNT: usize = 10_000;
    const LINES: usize = 4096;
    let mut rng = SmallRng::seed_from_u64(7);
    let mut bench = Bench::new(LINES as u64, 0, 4);
    let (mut asked, mut granted, mut full, mut incomplete) = (0, 0, 0, 0);
    while asked < COUNT {
        if bench.open.len() < 12 {
            asked += 1;
            let is_away = asked % 1000 < 750;
            let length = 1 << rng.random_range(0..if is_away { 4 } else { 7 });
            let first = rng.random_range(0..LINES / length) * length;
            // Seldom not aligned, which needs the most entries.
            let first = if rng.random_ratio(1, 4) { first + length / 3 } else { first };
            // Away until there is no room, and then home for a while.
            let taker = if is_away { rng.random_range(1..=SERVERS) } else { HOME };
            match bench.ask(first..(first + length).min(LINES), taker) {
                Ok(_) => granted += 1,
                Err(MigrateError::TableFull { .. }) => full += 1,
                Err(MigrateError::Already { .. } | MigrateError::Overlap { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        for _ in 0..4 {
            if !bench.open.is_empty() {
                let index = rng.random_range(0..bench.open.len());
                bench.advance(index, &mut rng);
            }
        }
        if asked % 16 == 0 {
            incomplete += u32::from(!bench.check(31).is_complete());
        }
    }
    assert!(granted > 3000 && full > 300 && incomplete > 50, "{granted} {full} {incomplete}");
    while !bench.open.is_empty() {
        bench.advance(0, &mut rng);
    }
    bench.check(1);
    // What is refused now can move when there is room.
    bench.move_home();
    assert_eq!(bench.check(1), MovedUse { needed: 0, there: 0, budget: BUDGET });
    bench.move_at_once(1..2, 2).unwrap();
}
