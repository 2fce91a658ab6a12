//! Relieves servers that have too much of the traffic.

use std::ops::Range;

use super::block::{self, LINE};
use super::plan::{Loads, Tree, percent};
use super::{
    Block, ENTRIES_MAX, GAIN, Held, MOVES_MAX, Move, NO_TAKER, PART_MAX, Pages, Places, Plan,
    Reading, Rebalancer, SPARE, Server, WARM,
};

impl Rebalancer {
    /// The rates of the blocks of a tree, the hottest first; `None` if some are not learned yet.
    fn hottest(
        reading: &Reading,
        (server, _): &Tree,
        blocks: &[Block],
    ) -> Option<Vec<(f64, Block)>> {
        let of_server = || reading.counts.iter().filter(|count| count.at == *server);
        let rate = |block: &Block| {
            let within = || of_server().filter(|count| block.contains(&count.block));
            let own = within().find(|count| count.block == *block)?;
            let sum = within().map(|count| count.rate.per_second).sum();
            own.rate.is_learned.then_some((sum, *block))
        };
        let mut rates: Vec<(f64, Block)> = blocks.iter().map(rate).collect::<Option<_>>()?;
        rates.sort_by(|(one, a), (other, b)| other.total_cmp(one).then(a.cmp(b)));
        Some(rates)
    }

    /// Moves hot blocks away from a hot server, or has them split.
    pub(super) fn relieve(&self, giver: &Server, loads: &mut Loads<'_>, plan: &mut Plan) {
        let reading = loads.reading;
        let mut hottest = Vec::new();
        if let Some(of) = &giver.held {
            let tree = (giver.id, of.home);
            let Some(blocks) = self.trees.get(&tree).filter(|blocks| !blocks.is_empty()) else {
                if reading.entries_max < block::PARTS_MAX {
                    plan.problems.push(no_entries(giver));
                    return;
                }
                if let Some(root) = Block::root(of.home.id(), &of.rows) {
                    plan.splits.push((tree, root));
                }
                plan.is_counting = true;
                return;
            };
            let Some(rates) = Self::hottest(reading, &tree, blocks) else {
                plan.is_counting = true;
                return;
            };
            hottest.extend(rates.into_iter().map(|(rate, block)| (rate, block, of)));
        }
        hottest.sort_by(|(one, ..), (other, ..)| other.total_cmp(one));
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
            let roomy =
                || self.takers(reading, giver).filter(|taker| !taker.is_below(left(taker), SPARE));
            let coolest = roomy()
                .min_by(|one, other| loads.rate(one.id).total_cmp(&loads.rate(other.id)))
                // What moved is counted for its server only, so it cannot be divided there.
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
                    } else if self.takers(reading, giver).next().is_none() {
                        NO_TAKER
                    } else if roomy().next().is_none() {
                        "no other server has room"
                    } else {
                        "single lines of pages are too hot for any other server"
                    };
                    why.get_or_insert(of_this);
                }
            }
        }
        let room = reading.entries_max.min(ENTRIES_MAX);
        let counted: usize = self.trees.values().map(Vec::len).sum();
        let has_room = counted + block::PARTS_MAX * (plan.splits.len() + 1) <= room;
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
            plan.problems.push(no_entries(giver));
            plan.is_counting = true;
        } else if made == 0 && loads.rate(giver.id) > WARM * mean {
            let why = why.unwrap_or(
                "its traffic is on pages that moved there, or on many that have too little each",
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
