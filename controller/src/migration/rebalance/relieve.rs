//! Relieves servers that have too much of the traffic.

use std::ops::Range;
use std::time::Duration;

use bluebridge_wire::NodeId;

use super::block::{self, LINE};
use super::plan::{Loads, percent};
use super::{
    Block, Counting, ENTRIES_MAX, GAIN, Held, MOVES_MAX, Move, NO_TAKER, PART_MAX, Pages, Places,
    Plan, Reading, Rebalancer, SETTLE_WINDOWS, SPARE, Server, WARM,
};

/// How long it may take until a new entry counts, besides the time over which rates are learned.
const ENTRY_WAIT: Duration = Duration::from_secs(5);

impl Rebalancer {
    /// The rates of the blocks that are counted of what a server has of a home; `None` if some are not learned yet.
    fn rates(
        reading: &Reading,
        giver: NodeId,
        of: &Held,
        counting: &Counting,
    ) -> Option<Vec<(f64, Block)>> {
        let at_server: Vec<_> = reading.counts.iter().filter(|count| count.at == giver).collect();
        // Without an entry for a block, what entries within it count is all that is known.
        let waited = reading.now.saturating_duration_since(counting.since);
        let is_late = waited >= reading.window * SETTLE_WINDOWS + ENTRY_WAIT;
        let rate = |block: &Block| {
            let within = || at_server.iter().filter(|count| block.contains(&count.block));
            let is_learned = match within().find(|count| count.block == *block) {
                Some(own) => own.rate.is_learned,
                // Pages that moved have entries, which may be shorter than the block that has them all.
                None => {
                    let blocks = within().map(|count| &count.block);
                    within().all(|count| count.rate.is_learned)
                        && (is_late || block.is_covered(&of.rows, blocks))
                }
            };
            let sum = within().map(|count| count.rate.per_second).sum();
            is_learned.then_some((sum, *block))
        };
        counting.blocks.iter().map(rate).collect()
    }

    /// The blocks of a server with their rates, the hottest first. `None` if they are not known yet; then the plan says what
    /// is to be counted.
    fn hottest<'a>(
        &self,
        reading: &Reading,
        giver: &'a Server,
        plan: &mut Plan,
    ) -> Option<Vec<(f64, Block, &'a Held)>> {
        let (mut hottest, mut is_known, mut lacks_room) = (Vec::new(), true, false);
        let mut room = self.room_for_blocks(reading, plan);
        for of in &giver.held {
            let tree = (giver.id, of.home);
            let counting = self.trees.get(&tree).filter(|counting| !counting.blocks.is_empty());
            if let Some(counting) = counting {
                let rates = Self::rates(reading, giver.id, of, counting);
                is_known &= rates.is_some();
                let of_home = rates.into_iter().flatten();
                hottest.extend(of_home.map(|(rate, block)| (rate, block, of)));
                continue;
            }
            let needed = if of.home.id() == giver.id { block::PARTS_MAX } else { 1 };
            if room < needed {
                lacks_room = true;
            } else if let Some(root) = Block::root(of.home.id(), &of.rows) {
                room -= needed;
                plan.splits.push((tree, root));
                is_known = false;
            }
        }
        plan.is_counting |= !is_known;
        if lacks_room && is_known {
            plan.problems.push(no_entries(giver));
        }
        hottest.sort_by(|(one, a, _), (other, b, _)| other.total_cmp(one).then(a.cmp(b)));
        is_known.then_some(hottest)
    }

    /// How many more blocks may be counted.
    fn room_for_blocks(&self, reading: &Reading, plan: &Plan) -> usize {
        let splits = block::PARTS_MAX * plan.splits.len();
        let room = reading.entries_max.min(ENTRIES_MAX);
        room.saturating_sub(self.counted().count() + splits)
    }

    /// Moves hot blocks away from a hot server, or has them split.
    pub(super) fn relieve(&self, giver: &Server, loads: &mut Loads<'_>, plan: &mut Plan) {
        let reading = loads.reading;
        let known = plan.problems.len();
        let Some(hottest) = self.hottest(reading, giver, plan) else { return };
        let mean = loads.mean(giver.space);
        // What blocks that are to be split will relieve it of.
        let (mut expected, mut splits, mut made) = (0.0, Vec::new(), 0);
        // Of the hottest part that does not move.
        let mut why = None;
        for (rate, block, of) in hottest {
            let has_enough = loads.rate(giver.id) - expected <= WARM * mean;
            if has_enough || rate < GAIN * mean || plan.moves.len() >= MOVES_MAX {
                break;
            }
            let rows = block.pages().map(|_| rows_of(&block, of)).unwrap_or_default();
            let of_home = |pages: &Range<u64>| Pages { home: of.home, pages: pages.clone() };
            let is_bound =
                || rows.iter().any(|row| self.is_bound(reading, &plan.moves, &of_home(row)));
            let count: u64 = rows.iter().map(|row| row.end - row.start).sum();
            let can_split = 1 << block.order > LINE;
            let is_movable = (1..=PART_MAX).contains(&count) && reading.is_worth(count, rate);
            let left = |taker: &Server| loads.free(taker.id).saturating_sub(count);
            let takers = || self.takers(reading, giver, of.home);
            let roomy = || takers().filter(|taker| !taker.is_below(left(taker), SPARE));
            let has_left =
                |taker: &Server| rows.iter().any(|row| self.has_left(&of_home(row), taker.id));
            let coolest = roomy()
                .filter(|taker| !has_left(taker))
                .min_by(|one, other| loads.rate(one.id).total_cmp(&loads.rate(other.id)))
                // What can be divided must not make its taker hot: it would have to be counted there first.
                .filter(|taker| match can_split {
                    true => loads.stays_warm(taker, rate),
                    false => loads.stays_cool(giver, taker.id, rate),
                });
            match coolest.filter(|_| is_movable && !is_bound()) {
                Some(taker) => {
                    let total = loads.total(giver.space).max(f64::MIN_POSITIVE);
                    let reason = format!(
                        "{} has {} of the traffic of {} servers, these pages have {}, and {} has {}",
                        giver.name,
                        percent(loads.rate(giver.id) / total),
                        loads.of_space(giver.space).count(),
                        percent(rate / total),
                        taker.name,
                        percent(loads.rate(taker.id) / total)
                    );
                    let (giver, taker) = (giver.id, taker.id);
                    let decided = Move { home: of.home, rows, giver, taker, rate, reason };
                    loads.apply(&decided);
                    plan.moves.push(decided);
                    made += 1;
                }
                None if can_split && (count > PART_MAX || !is_bound()) => {
                    splits.push(((giver.id, of.home), block));
                    expected += rate;
                }
                None => {
                    let of_this = if is_bound() {
                        "pages that moved a short time ago, or are moving, stay"
                    } else if !reading.is_worth(count, rate) {
                        "its pages have too little traffic for this window; use a longer --window"
                    } else if takers().next().is_none() {
                        NO_TAKER
                    } else if roomy().next().is_none() {
                        "no other server has room"
                    } else if roomy().all(has_left) {
                        "pages do not go back to a server from which they moved a short time ago"
                    } else {
                        "single lines of pages are too hot for any other server"
                    };
                    why.get_or_insert(of_this);
                }
            }
        }
        let has_room = self.room_for_blocks(reading, plan) >= block::PARTS_MAX;
        if !splits.is_empty() && has_room {
            // What was decided would change what the parts have.
            let first = plan.moves.len() - made;
            for undone in plan.moves.drain(first..) {
                let Move { giver, taker, .. } = undone;
                let undone = Move { giver: taker, taker: giver, ..undone };
                loads.apply(&undone);
            }
            plan.splits.extend(splits);
            plan.is_counting = true;
        } else if made == 0 && !splits.is_empty() {
            // The entries are where it was hot before.
            plan.recounts.push(giver.id);
            plan.problems.truncate(known);
            plan.problems.push(no_entries(giver));
            plan.is_counting = true;
        } else if made == 0 && plan.problems.len() == known && loads.rate(giver.id) > WARM * mean {
            let why = why.unwrap_or(
                "its traffic is on many pages that have too little each, or on none that are counted",
            );
            plan.problems.push(format!("{} has too much of the traffic: {why}", giver.name));
        }
    }
}

/// The pages of a block that are held.
fn rows_of(block: &Block, held: &Held) -> Vec<Range<u64>> {
    let own = block.places();
    let Some(pages) = block.pages() else { return Vec::new() };
    let of = |row: &Places| {
        let (start, end) = (row.start.max(own.start), row.end.min(own.end));
        (start < end).then(|| pages.start + (start - own.start)..pages.start + (end - own.start))
    };
    held.rows.iter().filter_map(of).collect()
}

/// Why a server's pages are not counted well enough, for people.
fn no_entries(server: &Server) -> String {
    format!(
        "{} has too much of the traffic: the switches have no room for more entries that count its pages",
        server.name
    )
}
