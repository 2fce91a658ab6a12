//! Addresses that contradict the header, and trains whose datagrams contradict each other.

use bluebridge_wire::{Command, Flags, NodeId, Space};
use rand::{Rng, seq::IndexedRandom};

use super::{bits_of, readdress};
use crate::hostile::{
    draw::{Draw, location},
    forge::Forged,
    shadow::Hold,
};

const PAGE: u64 = 4096;

/// The datagrams of one attack.
pub(super) fn addresses_and_trains(draw: &mut Draw<'_>) -> Vec<Forged> {
    match draw.rng.random_range(0..100) {
        0..30 => vec![addresses(draw)],
        30..60 => train(draw),
        60..72 => vec![selective(draw)],
        72..84 => wrong_kind_of_target(draw),
        84..90 => unfinished(draw),
        90..97 => super::contest::leases(draw),
        _ => vec![impostor(draw)],
    }
}

/// A datagram whose destination and target disagree, or whose command bits belong to another
/// command.
fn addresses(draw: &mut Draw<'_>) -> Forged {
    let mut train = draw.request();
    let mut datagram = train.swap_remove(0);
    let kind = draw.rng.random_range(0..13);
    let number: u16 = draw.rng.random();
    let node = *[0, 1, 2, 3, 4, 5, 1010, 1011, 1012, 0xffff, number].choose(draw.rng).unwrap_or(&1);
    let code = draw.rng.random_range(0..64);
    readdress(&mut datagram, |to, target| match kind {
        // Via another node: the destination names it, the header names the pointer's node.
        0 => to.node = NodeId(node),
        1 => target.node = NodeId(node),
        2 => target.location = target.location.wrapping_add(PAGE),
        3 => to.location ^= 1 << 63,
        4 => target.tag ^= 1,
        5 => target.space = Space(number),
        6 => to.space = Space(2),
        7 => (to.node, to.command) = (NodeId(0), code),
        8 => (to.node, to.command) = (NodeId(0xffff), code),
        9 => to.command |= 0x80,
        10 => target.command = code | 1,
        11 => to.command = 0,
        _ => {
            (to.location, target.location) = (to.location | (1 << 40), target.location | (1 << 40))
        }
    });
    datagram
}

/// A train whose datagrams overlap, repeat, and contradict each other.
fn train(draw: &mut Draw<'_>) -> Vec<Forged> {
    let (target, left) = draw.pointer();
    let length = (PAGE + draw.rng.random_range(0..2 * PAGE)).min(left);
    let mut datagram = draw.bare(Command::Write, target, length);
    if draw.rng.random_bool(0.2) {
        datagram = draw.bare(Command::AllocWrite, draw.endpoint(), length);
    }
    let piece_bytes = *[1352_usize, 1024, 1400, 4096].choose(draw.rng).unwrap_or(&1400);
    let mut attack = Vec::new();
    for number in 0..draw.rng.random_range(2..7_usize) {
        let mut piece = datagram.clone();
        let start = (number * piece_bytes) % 8192;
        let end = (start + piece_bytes).min((start / 4096 + 1) * 4096);
        piece.header.offset = u16::try_from(start).unwrap_or(u16::MAX);
        piece.data = vec![draw.rng.random(); end - start];
        piece.header.flags = Flags::default().with_attempt(draw.rng.random_range(0..3));
        match draw.rng.random_range(0..9) {
            0 => piece.header.length ^= 1 << draw.rng.random_range(0..16),
            1 => piece.header.offset = piece.header.offset.wrapping_sub(1),
            2 => readdress(&mut piece, |to, target| {
                to.location = to.location.wrapping_add(PAGE);
                target.location = to.location;
            }),
            3 => readdress(&mut piece, |to, target| (to.tag, target.tag) = (9, 9)),
            4 => readdress(&mut piece, |to, _| to.command = bits_of(Command::AllocWrite, 0)),
            5 => piece.data = vec![0xee; draw.rng.random_range(0..4200)],
            6 => {
                // The same piece, with other contents.
                let mut other = piece.clone();
                other.data.iter_mut().for_each(|byte| *byte = !*byte);
                attack.push(other);
            }
            _ => {}
        }
        attack.push(piece);
    }
    attack
}

/// A READ of selected pieces that the range does not have.
fn selective(draw: &mut Draw<'_>) -> Forged {
    let (target, left) = draw.pointer();
    let length = draw.rng.random_range(1..=left.min(8 * PAGE));
    let mut datagram = draw.bare(Command::Read, target, length);
    datagram.header.flags = Flags::SELECTIVE;
    let bits = [0, 1 << 31, u32::MAX, 0xaaaa_aaaa, 0xffff_0000, draw.rng.random()];
    datagram.header.detail = *bits.choose(draw.rng).unwrap_or(&0);
    datagram
}

/// Memory commands on endpoints, and endpoint commands on memory.
fn wrong_kind_of_target(draw: &mut Draw<'_>) -> Vec<Forged> {
    let on_memory = [Command::Create, Command::AllocWrite, Command::Open];
    let on_endpoints = [
        Command::Read,
        Command::Write,
        Command::Confirm,
        Command::Delete,
        Command::CompareSwap,
        Command::FetchAdd,
    ];
    let length = draw.rng.random_range(1..64);
    let mut datagram = if draw.rng.random_bool(0.5) {
        let (target, _) = draw.pointer();
        let command = *on_memory.choose(draw.rng).unwrap_or(&Command::Create);
        draw.bare(command, target, length)
    } else {
        let mut target = draw.endpoint();
        target.tag = draw.rng.random_range(0..3);
        let command = *on_endpoints.choose(draw.rng).unwrap_or(&Command::Read);
        draw.bare(command, target, length)
    };
    datagram.data = vec![1; draw.rng.random_range(0..20)];
    vec![datagram]
}

/// Requests on pages of an unfinished ALLOC_WRITE: guessed, used, freed, then filled further.
fn unfinished(draw: &mut Draw<'_>) -> Vec<Forged> {
    let found = draw.server.shadow.allocations.iter().find_map(|(&first, held)| match held.hold {
        Hold::Kept => None,
        hold => (held.space == draw.attacker.space).then_some((first, *held, hold)),
    });
    let Some((first, held, hold)) = found else { return train(draw) };
    let location = location(held.generation, first);
    let mut target = draw.endpoint();
    (target.tag, target.location) = (held.tag, location);
    let mut attack = Vec::new();
    let guesses =
        [Command::Read, Command::Delete, Command::Write, Command::FetchAdd, Command::Update];
    for _ in 0..draw.rng.random_range(1..3) {
        let command = *guesses.choose(draw.rng).unwrap_or(&Command::Delete);
        let length = match command {
            Command::Delete => 0,
            Command::Read => 8 * PAGE - location % (8 * PAGE),
            _ => 8,
        };
        let mut guess = draw.bare(command, target, length);
        if matches!(command, Command::Write | Command::FetchAdd) {
            guess.data = vec![3; 8];
        }
        attack.push(guess);
    }
    // Others get the pages, and then the ALLOC_WRITE continues.
    let pages = u64::from(held.pages);
    attack.push(draw.bare(Command::Create, draw.endpoint(), pages));
    if let Hold::Session(session, sequence) = hold
        && session == draw.session
    {
        for number in 0..4_u16 {
            let mut piece = draw.bare(Command::AllocWrite, draw.endpoint(), pages * PAGE);
            let piece_bytes = u16::try_from(draw.piece_bytes()).unwrap_or(1024);
            piece.header.sequence = sequence;
            piece.header.answered_distance = u16::MAX;
            piece.header.offset = number * piece_bytes;
            piece.data = vec![0xdd; usize::from(piece_bytes)];
            attack.push(piece);
        }
    }
    attack
}

/// A datagram that looks like a server's reply, or whose requester is no endpoint.
fn impostor(draw: &mut Draw<'_>) -> Forged {
    let mut train = draw.request();
    let mut datagram = train.swap_remove(0);
    let Some(mut from) = bluebridge_wire::address::Fields::unpack(datagram.source) else {
        return datagram;
    };
    let is_reply = match draw.rng.random_range(0..5) {
        0 => {
            from.command = bits_of(Command::Read, 0x80);
            true
        }
        1 => {
            from.command = bits_of(Command::Read, 0xc0);
            true
        }
        2 => {
            from.command = bits_of(Command::Read, 0);
            false
        }
        3 => {
            from.tag = 5;
            false
        }
        _ => {
            from.location &= !(1 << 63);
            false
        }
    };
    if is_reply {
        let endpoint = draw.endpoint();
        datagram.destination = endpoint.to_ipv6();
    }
    datagram.source = from.to_ipv6();
    datagram
}
