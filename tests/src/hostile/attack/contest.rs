//! Contradictory requests about leases.

use bluebridge_wire::{Command, Flags};
use rand::Rng;

use super::readdress;
use crate::hostile::{draw::Draw, forge::Forged};

const PAGE: u64 = 4096;
const LINE: u64 = 8 * PAGE;

/// The datagrams of one attack.
pub(super) fn leases(draw: &mut Draw<'_>) -> Vec<Forged> {
    match draw.rng.random_range(0..5) {
        0 => two_epochs(draw),
        1 => twice(draw),
        2 => waits_elsewhere(draw),
        3 => two_commands(draw),
        _ => waits_and_leaves(draw),
    }
}

/// A COMMIT with one piece that names another epoch, followed by the correct one.
fn two_epochs(draw: &mut Draw<'_>) -> Vec<Forged> {
    let mut train = draw.end_or_renew(Command::Commit);
    let victim = draw.rng.random_range(0..train.len());
    let good = train[victim].clone();
    let epoch = &mut train[victim].header.lease_epoch;
    *epoch = if draw.rng.random_bool(0.5) { *epoch + 1 } else { 0 };
    if draw.rng.random_bool(0.7) {
        train.push(good);
    }
    train
}

/// The same lease is ended two or three times, under different numbers.
fn twice(draw: &mut Draw<'_>) -> Vec<Forged> {
    let mut attack = draw.end_or_renew(Command::Commit);
    let Some(first) = attack.first().cloned() else { return attack };
    for command in [Command::Commit, Command::Abort, Command::Renew] {
        let Some(target) = bluebridge_wire::address::Fields::unpack(first.header.target) else {
            break;
        };
        let mut again = draw.bare(command, target, u64::from(first.header.length));
        again.header.lease_epoch = first.header.lease_epoch;
        if command == Command::Commit {
            again.data.clone_from(&first.data);
        }
        attack.push(again);
    }
    attack
}

/// One number waits for pages of several lines, or with different lengths.
fn waits_elsewhere(draw: &mut Draw<'_>) -> Vec<Forged> {
    let Some((target, _, _)) = draw.lease() else { return draw.end_or_renew(Command::Abort) };
    let command = if draw.rng.random_bool(0.6) { Command::Update } else { Command::Read };
    let mut first = draw.bare(command, target, PAGE);
    draw.lease_options(&mut first);
    first.header.flags = first.header.flags.with(Flags::QUEUED);
    let mut attack = vec![first.clone()];
    for _ in 0..draw.rng.random_range(1..4) {
        let mut other = first.clone();
        let elsewhere = match draw.rng.random_range(0..4) {
            0 => target.location.wrapping_add(LINE),
            1 => target.location.wrapping_sub(LINE),
            2 => target.location.wrapping_add(PAGE),
            _ => draw.lease().map_or(target.location, |(target, _, _)| target.location),
        };
        readdress(&mut other, |to, target| {
            (to.location, target.location) = (elsewhere, elsewhere);
        });
        other.header.length = draw.rng.random_range(1..9000);
        draw.lease_options(&mut other);
        attack.push(other);
    }
    attack
}

/// One number is used for a READ, an UPDATE, and a request that ends a lease.
fn two_commands(draw: &mut Draw<'_>) -> Vec<Forged> {
    let mut attack = draw.end_or_renew(Command::Renew);
    let Some(first) = attack.first().cloned() else { return attack };
    for command in [Command::Update, Command::Abort, Command::Read, Command::Commit] {
        let mut other = first.clone();
        readdress(&mut other, |to, _| to.command = super::bits_of(command, 0));
        draw.lease_options(&mut other);
        attack.push(other);
    }
    attack
}

/// The session of a waiting request continues without it, or ends, and others take its place.
fn waits_and_leaves(draw: &mut Draw<'_>) -> Vec<Forged> {
    let mut attack = waits_elsewhere(draw);
    let command = if draw.rng.random_bool(0.3) { Command::Close } else { Command::Ping };
    let mut leaves = draw.bare(command, draw.endpoint(), 0);
    leaves.header.answered_distance = 0;
    leaves.header.sequence += 96;
    attack.push(leaves);
    attack
}
