//! Ownership passed from client to client: who had a page when, and how fair that was.

use std::time::Duration;

use bluebridge::{Client, Error, Event, Pointer, Status};
use bluebridge_transport::Transport;
use serde::Serialize;

use crate::{
    placement::now,
    summary::{Samples, Summary},
};

/// One UPDATE and its COMMIT, timed by the machine's monotonic clock.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Turn {
    /// The lease's epoch: grants of one page are ordered by it.
    pub epoch: u64,
    /// When the UPDATE was called.
    pub asked: Duration,
    /// When the client got the lease.
    pub granted: Duration,
    /// When its COMMIT was called.
    pub committing: Duration,
    /// When the COMMIT returned.
    pub committed: Duration,
}

/// The results of one client.
#[derive(Clone, Debug, Default)]
pub struct Turns {
    /// Its turns, in order.
    pub turns: Vec<Turn>,
    /// BUSY responses, from the home or an owner.
    pub busy_count: u64,
    /// Responses of an owner to redirected requests, after which the request went to the home.
    pub redirected_count: u64,
    /// Updates that were not granted in time.
    pub timeout_count: u64,
}

/// Leases the page at `pointer`, adds 1 to its first 8 bytes (little endian), holds it for `hold`
/// and commits, repeatedly until `until` of the monotonic clock.
///
/// # Errors
/// A text: the first call that failed for another reason than a missing grant.
pub fn contend<T: Transport>(
    client: &mut Client<T>,
    pointer: Pointer,
    page: &mut [u8],
    hold: Duration,
    until: Duration,
) -> Result<Turns, String> {
    let before = answers(client);
    let mut turns = Turns::default();
    while now() < until {
        let asked = now();
        let mut update = match client.update(pointer, page) {
            Ok(update) => update,
            Err(Error::Busy { .. }) => {
                turns.timeout_count += 1;
                continue;
            }
            Err(error) => return Err(error.to_string()),
        };
        let granted = now();
        let epoch = update.epoch();
        let counter = update.first_chunk_mut::<8>().ok_or("the page holds no counter")?;
        *counter = (u64::from_le_bytes(*counter) + 1).to_le_bytes();
        if !hold.is_zero() {
            std::thread::sleep(hold);
        }
        let committing = now();
        update.commit().map_err(|error| error.to_string())?;
        turns.turns.push(Turn { epoch, asked, granted, committing, committed: now() });
    }
    let after = answers(client);
    turns.busy_count = after.0 - before.0;
    turns.redirected_count = after.1 - before.1;
    Ok(turns)
}

fn answers<T: Transport>(client: &Client<T>) -> (u64, u64) {
    let counters = client.counters();
    (counters.of_status(Status::Busy), counters.of(Event::RedirectReturn))
}

/// Jain's index of fairness: 1 if all are equal, 1/n if one has everything (Jain, Chiu, Hawe, "A
/// Quantitative Measure of Fairness and Discrimination", DEC-TR-301, 1984). 1 for an empty list.
#[must_use]
#[allow(clippy::cast_precision_loss, reason = "counts of turns fit into 53 bits")]
pub fn fairness(counts: &[u64]) -> f64 {
    let sum: f64 = counts.iter().map(|count| *count as f64).sum();
    let squares: f64 = counts.iter().map(|count| (*count as f64).powi(2)).sum();
    if squares == 0.0 { 1.0 } else { sum * sum / (counts.len() as f64 * squares) }
}

/// The result of contending clients.
#[derive(Clone, Debug, Serialize)]
pub struct Contention {
    /// The number of clients.
    pub client_count: usize,
    /// Turns of all clients, per second.
    pub turns_per_second: f64,
    /// From the call of a COMMIT to the grant of the next client, if it is another one.
    pub hand_over: Summary,
    /// From the call of an UPDATE to its grant.
    pub acquire: Summary,
    /// Jain's index over the turns of the clients.
    pub fairness: f64,
    /// Turns of all clients.
    pub turn_count: u64,
    /// BUSY responses per turn.
    pub busy_per_turn: f64,
    /// Requests to which an owner responded, per turn.
    pub redirected_per_turn: f64,
    /// Updates that were not granted before their deadline.
    pub timeout_count: u64,
}

/// Combines the clients' turns on one page.
///
/// # Errors
/// A text, if two turns have the same epoch or overlap: then the page had two owners.
#[allow(clippy::cast_precision_loss, reason = "counts of turns fit into 53 bits")]
pub fn sum_up(clients: &[Turns], time: Duration) -> Result<Contention, String> {
    let mut all: Vec<(usize, Turn)> = (clients.iter().enumerate())
        .flat_map(|(client, turns)| turns.turns.iter().map(move |turn| (client, *turn)))
        .collect();
    all.sort_by_key(|(_, turn)| turn.epoch);
    let (mut hand_over, mut acquire) = (Samples::default(), Samples::default());
    for (_, turn) in &all {
        acquire.add(turn.granted - turn.asked);
    }
    for pair in all.windows(2) {
        let [(giver, given), (taker, taken)] = pair else { continue };
        if given.epoch == taken.epoch || taken.granted < given.committing {
            return Err(format!("epochs {} and {} overlap", given.epoch, taken.epoch));
        }
        // A client that requested later would measure a time in which no client wanted the page.
        if giver != taker && taken.asked <= given.committing {
            hand_over.add(taken.granted - given.committing);
        }
    }
    let counts: Vec<u64> = clients.iter().map(|turns| turns.turns.len() as u64).collect();
    let turn_count: u64 = counts.iter().sum();
    let per_turn = |count: u64| count as f64 / turn_count.max(1) as f64;
    Ok(Contention {
        client_count: clients.len(),
        turns_per_second: turn_count as f64 / time.as_secs_f64(),
        hand_over: hand_over.summary(),
        acquire: acquire.summary(),
        fairness: fairness(&counts),
        turn_count,
        busy_per_turn: per_turn(clients.iter().map(|turns| turns.busy_count).sum()),
        redirected_per_turn: per_turn(clients.iter().map(|turns| turns.redirected_count).sum()),
        timeout_count: clients.iter().map(|turns| turns.timeout_count).sum(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(epoch: u64, from: u64, to: u64) -> Turn {
        let at = Duration::from_micros;
        let (granted, committing) = (at(from), at(to));
        Turn { epoch, asked: at(from - 5), granted, committing, committed: at(to + 5) }
    }

    #[test]
    fn fairness_is_one_for_equals_and_a_share_for_a_single_winner() {
        assert!((fairness(&[7, 7, 7]) - 1.0).abs() < 1e-9);
        assert!((fairness(&[9, 0, 0]) - 1.0 / 3.0).abs() < 1e-9);
        assert!((fairness(&[]) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_hand_over_lasts_from_the_commit_to_the_next_grant() {
        let first = Turns { turns: vec![turn(1, 10, 20), turn(3, 40, 50)], ..Turns::default() };
        let second = Turns { turns: vec![turn(2, 24, 36)], busy_count: 3, ..Turns::default() };
        let result = sum_up(&[first, second], Duration::from_secs(1)).expect("one owner a time");
        assert_eq!((result.turn_count, result.hand_over.sample_count), (3, 2));
        assert!((result.hand_over.p50_us - 4.0).abs() < 0.1, "{:?}", result.hand_over);
        assert!((result.busy_per_turn - 1.0).abs() < 1e-9);
    }

    #[test]
    fn two_owners_at_a_time_are_found() {
        let first = Turns { turns: vec![turn(1, 10, 20)], ..Turns::default() };
        let second = Turns { turns: vec![turn(2, 15, 36)], ..Turns::default() };
        assert!(sum_up(&[first, second], Duration::from_secs(1)).is_err());
    }
}
