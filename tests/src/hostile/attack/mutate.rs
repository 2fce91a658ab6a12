//! Wrong fields with right checksums.

use bluebridge_wire::{
    Features, Flags, Header, Status,
    address::Fields,
    tlv::{emit_page_statuses, emitted_bytes},
};
use rand::{Rng, rngs::SmallRng, seq::IndexedRandom};

use super::readdress;
use crate::hostile::{draw::Draw, forge::Forged};

fn wide(rng: &mut SmallRng) -> u64 {
    let edges = [
        0,
        1,
        2,
        7,
        8,
        9,
        255,
        256,
        511,
        512,
        1023,
        4095,
        4096,
        4097,
        32_767,
        32_768,
        32_769,
        0xffff,
        0x1_0000,
        0x7fff_ffff,
        0x8000_0000,
        0xffff_ffff,
        (1 << 47) - 1,
        (1 << 48) - 1,
        1 << 62,
        u64::MAX - 1,
        u64::MAX,
    ];
    if rng.random_bool(0.2) { rng.random() } else { *edges.choose(rng).unwrap_or(&0) }
}

#[allow(clippy::cast_possible_truncation, reason = "edges of the narrower field")]
fn half(rng: &mut SmallRng) -> u32 {
    wide(rng) as u32
}

#[allow(clippy::cast_possible_truncation, reason = "edges of the narrower field")]
fn quarter(rng: &mut SmallRng) -> u16 {
    wide(rng) as u16
}

/// Changes one to three fields of a good datagram.
pub(super) fn fields(draw: &mut Draw<'_>, datagram: &mut Forged) {
    for _ in 0..*[1, 1, 1, 2, 3].choose(draw.rng).unwrap_or(&1) {
        match draw.rng.random_range(0..26) {
            0..12 => header(draw.rng, &mut datagram.header),
            12..17 => data(draw.rng, datagram),
            17..20 => address(draw.rng, datagram),
            20..22 => options(draw.rng, datagram),
            22 => trailer(draw.rng, datagram),
            23 => {
                let patch = (draw.rng.random_range(0..2), draw.rng.random());
                datagram.patches.push(patch);
            }
            24 => {
                let code = draw.rng.random_range(0..64);
                readdress(datagram, |to, _| to.command = (to.command & 0xc0) | code);
            }
            _ => session(draw, &mut datagram.header),
        }
    }
}

pub(in crate::hostile) fn header(rng: &mut SmallRng, header: &mut Header) {
    match rng.random_range(0..16) {
        0 => header.flags = Flags::from_bits(rng.random()),
        1 => {
            let flags = [
                Flags::MAY_BE_STALE,
                Flags::PROVISIONAL,
                Flags::ZERO,
                Flags::SELECTIVE,
                Flags::QUEUED,
                Flags::LAST_COMMITTED,
                Flags::AT_ENDPOINT,
            ];
            let flag = *flags.choose(rng).unwrap_or(&Flags::ZERO);
            header.flags = header.flags.with(flag);
        }
        2 => header.required = Features(quarter(rng)),
        3 => header.node = quarter(rng),
        4 if rng.random_bool(0.5) => header.lease_epoch = wide(rng),
        4 => header.lease_epoch ^= 1,
        5 => header.lease_remaining_ms = quarter(rng),
        6 => header.credit = quarter(rng),
        7 | 8 => header.length = half(rng),
        9 | 10 => header.offset = quarter(rng),
        11 => header.page_shift = rng.random(),
        12 => header.key_id = rng.random(),
        13 => header.page_version = wide(rng),
        14 => header.range_epoch = *[0, 1, 6, 7, 8, u32::MAX].choose(rng).unwrap_or(&0),
        _ => {
            header.detail = half(rng);
            header.flags = header.flags.with_attempt(rng.random_range(0..16));
        }
    }
}

pub(in crate::hostile) fn data(rng: &mut SmallRng, datagram: &mut Forged) {
    match rng.random_range(0..5) {
        0 => datagram.data.truncate(rng.random_range(0..=datagram.data.len())),
        1 => datagram.data.extend(vec![rng.random::<u8>(); rng.random_range(1..1200)]),
        2 => datagram.data.clear(),
        3 => datagram.data.truncate(datagram.data.len().saturating_sub(1)),
        _ => {
            let at = rng.random_range(0..=datagram.data.len());
            if let Some(byte) = datagram.data.get_mut(at) {
                *byte = rng.random();
            } else {
                datagram.data.push(rng.random());
            }
        }
    }
}

/// Changes destination and target in the same way.
pub(in crate::hostile) fn address(rng: &mut SmallRng, datagram: &mut Forged) {
    let kind = rng.random_range(0..5);
    let (tag, bit, edge) = (rng.random(), rng.random_range(0..64), wide(rng));
    readdress(datagram, |to, target| {
        for fields in [to, target] {
            let Fields { tag: colour, location, .. } = fields;
            match kind {
                0 => *colour = tag,
                1 => *location ^= 1 << bit,
                2 => *location = (*location & (0xffff << 48)) | (edge & ((1 << 48) - 1)),
                3 => *location = location.wrapping_add(edge & 0xfff),
                _ => *colour = colour.wrapping_add(1),
            }
        }
    });
}

pub(in crate::hostile) fn options(rng: &mut SmallRng, datagram: &mut Forged) {
    datagram.options = match rng.random_range(0..5) {
        0 => vec![9, 2, 1, 2],
        1 => vec![1, 200, 0, 0],
        2 => vec![7, 1, 0, 9],
        3 => vec![0; 4 * rng.random_range(1..200)],
        _ => {
            let statuses = [Status::Ok; 8];
            let mut bytes = vec![0; emitted_bytes(statuses.len())];
            emit_page_statuses(&mut bytes, &statuses);
            bytes
        }
    };
}

pub(in crate::hostile) fn trailer(rng: &mut SmallRng, datagram: &mut Forged) {
    let units: u8 = rng.random_range(1..4);
    let flags = datagram.header.flags;
    datagram.header.flags = flags.with_trailer_units(units);
    // Without those bytes, the trailer contains data, or is longer than the datagram.
    if rng.random_bool(0.5) {
        datagram.trailer = vec![0xa5; usize::from(units) * 16];
    }
}

fn session(draw: &mut Draw<'_>, header: &mut Header) {
    let low = draw.server.shadow.sessions.get(&draw.session).map_or(1, |open| open.low);
    match draw.rng.random_range(0..8) {
        0 => header.session = wide(draw.rng),
        1 => header.session ^= 1 << draw.rng.random_range(0..64),
        2 => header.incarnation = header.incarnation.wrapping_sub(1),
        3 if header.session != 0 => header.incarnation = half(draw.rng),
        4 => {
            header.sequence = low.saturating_add(512 + u64::from(quarter(draw.rng)));
            header.answered_distance = u16::MAX;
        }
        5 => {
            header.sequence = low.saturating_sub(1 + u64::from(quarter(draw.rng)));
            header.answered_distance = 0;
        }
        6 => header.answered_distance = quarter(draw.rng),
        _ => header.sequence = header.sequence.saturating_add(draw.rng.random_range(0..600)),
    }
}
