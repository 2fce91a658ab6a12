//! Makes room at servers that are nearly full.

use std::collections::BTreeSet;
use std::ops::Range;

use super::block::LINE;
use super::plan::{Loads, percent};
use super::{MOVES_MAX, Move, NO_TAKER, PART_MAX, Pages, Plan, ROOM, Rebalancer, SPARE, Server};

impl Rebalancer {
    /// Moves the coldest pages away from a full server.
    pub(super) fn make_room(&self, giver: &Server, loads: &mut Loads<'_>, plan: &mut Plan) {
        let reading = loads.reading;
        let used = giver.total_pages.saturating_sub(giver.free_pages).max(1) as f64;
        let homes: BTreeSet<_> = giver.allocated.iter().map(|it| it.home).collect();
        // What is counted at it: pages, how many of them are allocated, and their rate.
        let counts: Vec<(Pages, u64, f64)> = reading
            .counts
            .iter()
            .filter(|count| count.at == giver.id)
            .flat_map(|count| {
                let block = count.block.pages().filter(|_| count.rate.is_learned);
                let of_block = homes.iter().filter(|home| home.id() == count.block.home);
                of_block.filter_map(move |home| {
                    let block = Pages { home: *home, pages: block.clone()? };
                    let of = giver.allocated.iter().map(|it| block.common(it)).sum();
                    (of > 0).then_some((block, of, count.rate.per_second))
                })
            })
            .collect();
        // The traffic of a block is that of its allocated pages. Of pages that are not counted, a fair part.
        let rate_of = |pages: &Pages| {
            let (mut covered, mut rate) = (0, 0.0);
            for (block, of, block_rate) in &counts {
                let common = block.common(pages);
                covered += common;
                rate += block_rate * (common as f64 / *of as f64).min(1.0);
            }
            let uncounted = pages.count().saturating_sub(covered) as f64;
            rate + giver.rate.per_second * (uncounted / used).min(1.0)
        };
        if giver.allocated.is_empty() {
            plan.is_counting = true;
            return;
        }
        let mut parts: Vec<(f64, Pages)> = Vec::new();
        for pages in &giver.allocated {
            let Range { start, end } = pages.pages;
            let (mut start, end) = (start / LINE * LINE, end.next_multiple_of(LINE));
            while start < end {
                let next = end.min(start + PART_MAX);
                let part = Pages { home: pages.home, pages: start..next };
                parts.push((rate_of(&part), part));
                start = next;
            }
        }
        parts.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        let mut why = "none of its pages may move now";
        for (_, part) in parts {
            let mut rest = part;
            while let Some(run) = self.movable(reading, &plan.moves, &rest) {
                if !giver.is_below(loads.free(giver.id), SPARE) || plan.moves.len() >= MOVES_MAX {
                    break;
                }
                let most = run.count().min(missing(giver, loads.free(giver.id)));
                // What a taker can get of them, and its free share.
                let offer = |taker: &Server| {
                    let free = loads.free(taker.id);
                    let count = most.min(room(taker, free));
                    let start = run.pages.start;
                    let cut = Pages { home: run.home, pages: start..start + count };
                    let share = free as f64 / taker.total_pages.max(1) as f64;
                    (count > 0).then(|| (share, rate_of(&cut), cut))
                };
                let offers = self
                    .takers(reading, giver, run.home)
                    .filter_map(|taker| Some((taker, offer(taker)?)))
                    .filter(|(taker, (_, rate, _))| loads.stays_cool(giver, taker.id, *rate));
                let best = offers.max_by(|(_, (one, ..)), (_, (other, ..))| one.total_cmp(other));
                let Some((taker, (_, rate, cut))) = best else {
                    why = match self.takers(reading, giver, run.home).next() {
                        None if Self::is_alone(reading, giver) => "there is no other server",
                        None => NO_TAKER,
                        Some(_) => "no other server has room without being too hot",
                    };
                    break;
                };
                let reason = format!(
                    "{} has {} of its memory free, and {} {}",
                    giver.name,
                    percent(loads.free(giver.id) as f64 / giver.total_pages.max(1) as f64),
                    taker.name,
                    percent(loads.free(taker.id) as f64 / taker.total_pages.max(1) as f64)
                );
                rest.pages.start = cut.pages.end;
                let (home, rows) = (cut.home, vec![cut.pages]);
                let made = Move { home, rows, giver: giver.id, taker: taker.id, rate, reason };
                loads.apply(&made);
                plan.moves.push(made);
            }
        }
        if giver.is_below(loads.free(giver.id), SPARE) && plan.moves.len() < MOVES_MAX {
            plan.problems.push(format!("{} is nearly full: {why}", giver.name));
        }
    }
}

/// How many pages a full server lacks until it has enough free ones, in whole lines.
fn missing(giver: &Server, free_pages: u64) -> u64 {
    pages_of(giver, SPARE).saturating_sub(free_pages).div_ceil(LINE).saturating_mul(LINE)
}

/// How many pages a server can take of a full one, in whole lines.
fn room(taker: &Server, free_pages: u64) -> u64 {
    free_pages.saturating_sub(pages_of(taker, ROOM)) / LINE * LINE
}

/// A share of a server's pages, rounded up.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share is not negative, and below 1"
)]
fn pages_of(server: &Server, share: f64) -> u64 {
    (server.total_pages as f64 * share).ceil() as u64
}
