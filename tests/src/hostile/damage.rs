//! Damage below UDP: Ethernet, IPv6, lengths and checksums.

use rand::{Rng, rngs::SmallRng, seq::IndexedRandom};

use super::forge::ETHERNET_BYTES;

const AT_PAYLOAD: usize = ETHERNET_BYTES + 4;
const AT_NEXT: usize = ETHERNET_BYTES + 6;
const AT_HOP: usize = ETHERNET_BYTES + 7;
const AT_UDP: usize = ETHERNET_BYTES + 40;

/// Damages a frame below UDP.
pub fn below_udp(rng: &mut SmallRng, frame: &mut Vec<u8>) {
    match rng.random_range(0..13) {
        0 => {
            let kind = *[0_u8, 43, 60, 51, 135, 59, 255].choose(rng).unwrap_or(&0);
            extension(rng, frame, kind);
        }
        1 => fragment(rng, frame),
        2 => frame[AT_HOP] = *[0, 1, 2, 255].choose(rng).unwrap_or(&0),
        3 => {
            let length: u16 = *[0, 1, 7, 8, 91, 92, 0xffff].choose(rng).unwrap_or(&0);
            frame[AT_PAYLOAD..AT_PAYLOAD + 2].copy_from_slice(&length.to_be_bytes());
        }
        4 => tag(rng, frame),
        5 => frame[ETHERNET_BYTES] = rng.random(),
        6 => {
            let length = rng.random_range(0..frame.len());
            frame.truncate(length);
        }
        // Often cuts inside of the headers.
        7 => frame.truncate(rng.random_range(0..ETHERNET_BYTES + 40 + 8 + 84)),
        8 => frame.extend(vec![rng.random::<u8>(); rng.random_range(1..64)]),
        9 => {
            let kind: u16 = *[0x0800, 0x0806, 0x86dd, 0x88cc, 0, 0xffff].choose(rng).unwrap_or(&0);
            frame[12..14].copy_from_slice(&kind.to_be_bytes());
        }
        10 => frame[AT_NEXT] = rng.random(),
        11 => {
            let at = AT_UDP + rng.random_range(0..8);
            frame[at] = rng.random();
        }
        _ => {
            let mac = *[[0xff; 6], [0x33; 6], [0; 6]].choose(rng).unwrap_or(&[0; 6]);
            frame[..6].copy_from_slice(&mac);
            frame[12..14].copy_from_slice(&[0x86, 0xdd]);
            let at = rng.random_range(ETHERNET_BYTES..AT_UDP);
            frame[at] ^= 1 << rng.random_range(0..8);
        }
    }
}

/// Puts an extension header in front of UDP, with lengths that fit.
fn extension(rng: &mut SmallRng, frame: &mut Vec<u8>, kind: u8) {
    let next = core::mem::replace(&mut frame[AT_NEXT], kind);
    // PadN fills options. A routing header gets type 1 with 0 segments left, or an invalid one.
    let mut header = [next, 0, 1, 4, 0, 0, 0, 0];
    if kind == 43 {
        header[2] = rng.random_range(0..5);
        header[3] = rng.random_range(0..2);
    }
    if rng.random_bool(0.2) {
        header[1] = rng.random();
    }
    frame.splice(AT_UDP..AT_UDP, header);
    lengthen(frame, 8);
}

fn fragment(rng: &mut SmallRng, frame: &mut Vec<u8>) {
    let next = core::mem::replace(&mut frame[AT_NEXT], 44);
    let offset: u16 = rng.random();
    let [high, low] = offset.to_be_bytes();
    frame.splice(AT_UDP..AT_UDP, [next, 0, high, low, 0, 0, 0, rng.random()]);
    lengthen(frame, 8);
}

fn lengthen(frame: &mut [u8], by: u16) {
    let length = u16::from_be_bytes([frame[AT_PAYLOAD], frame[AT_PAYLOAD + 1]]);
    let length = length.saturating_add(by).to_be_bytes();
    frame[AT_PAYLOAD..AT_PAYLOAD + 2].copy_from_slice(&length);
}

/// Inserts one or two 802.1Q or 802.1ad tags, also priority tags, which many hosts accept.
fn tag(rng: &mut SmallRng, frame: &mut Vec<u8>) {
    for _ in 0..rng.random_range(1..3) {
        let kind: u16 = *[0x8100, 0x88a8, 0x9100].choose(rng).unwrap_or(&0x8100);
        let control: u16 = *[0, 1, 0x0fff, 0xe000].choose(rng).unwrap_or(&0);
        let [a, b] = kind.to_be_bytes();
        let [c, d] = control.to_be_bytes();
        frame.splice(12..12, [a, b, c, d]);
    }
}
