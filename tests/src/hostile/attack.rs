//! The classes of attacks.

use std::net::Ipv6Addr;

use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_wire::{
    Command, DatagramError, Header, HeaderView, NodeId, Space, WireCommand, address::Fields,
};
use rand::{Rng, rngs::SmallRng, seq::IndexedRandom};

use super::{
    damage,
    draw::Draw,
    forge::{self, FRAME_HEAD_BYTES, Forged},
    world::{Attacker, World},
};

mod contest;
mod contradict;
pub(super) mod mutate;
mod spoof;

/// What is wrong with a packet.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Class {
    /// Arbitrary bytes.
    Arbitrary,
    /// Wrong below UDP: Ethernet, IPv6, lengths.
    BelowUdp,
    /// Addresses and header contradict each other, or datagrams of a train do.
    Contradictory,
    /// Mutated golden vectors and recorded traffic with wrong checksums.
    Damaged,
    /// Wrong fields with right checksums, in an open session.
    Sealed,
    /// The source or the space is that of another endpoint.
    Spoofed,
}

impl Class {
    /// Every class.
    pub const ALL: [Self; 6] = [
        Self::Arbitrary,
        Self::BelowUdp,
        Self::Contradictory,
        Self::Damaged,
        Self::Sealed,
        Self::Spoofed,
    ];
}

/// Where a packet is injected.
#[derive(Clone, Copy, Debug)]
pub enum Route {
    /// At a server, behind the switch.
    Direct(usize),
    /// At a port of the switch.
    Switch(SwitchPort),
}

/// A packet to inject.
#[derive(Clone, Debug)]
pub struct Shot {
    /// What is wrong with it; `None` if it is valid.
    pub class: Option<Class>,
    /// Where it is injected.
    pub route: Route,
    /// The frame.
    pub frame: Vec<u8>,
}

impl Shot {
    /// Addresses and payload, before a host processes them.
    pub(super) fn parts(&self) -> (Ipv6Addr, Ipv6Addr, &[u8]) {
        let address = |at: usize| {
            let bytes: Option<&[u8; 16]> =
                self.frame.get(at..).and_then(|bytes| bytes.first_chunk());
            bytes.map_or(Ipv6Addr::UNSPECIFIED, |bytes| Ipv6Addr::from(*bytes))
        };
        (address(22), address(38), self.frame.get(FRAME_HEAD_BYTES..).unwrap_or_default())
    }
}

/// The next packets: one attack, with the packets that it needs.
pub(super) fn shots(world: &mut World, rng: &mut SmallRng) -> Vec<Shot> {
    let attacker = world.attackers.choose(rng).expect("there are attackers").clone();
    let at = rng.random_range(0..world.servers.len());
    let mut recorded = core::mem::take(&mut world.recorded);
    let shots = draw_shots(world, rng, &attacker, at, &mut recorded);
    world.recorded = recorded;
    shots
}

fn draw_shots(
    world: &World,
    rng: &mut SmallRng,
    attacker: &Attacker,
    at: usize,
    recorded: &mut Vec<Vec<u8>>,
) -> Vec<Shot> {
    let server = &world.servers[at];
    let session = attacker.sessions[at];
    let mut draw = Draw { rng, attacker, server, session };
    let port = Route::Switch(attacker.port);
    let shot = |class, route, frame| Shot { class, route, frame };
    match draw.rng.random_range(0..100) {
        0..4 => vec![shot(Some(Class::Arbitrary), port, arbitrary(draw.rng))],
        4..15 => {
            let vector = world.vectors.choose(draw.rng).expect("there are vectors");
            let good = recorded.choose(draw.rng).cloned();
            let whole = forge::frame(vector.source, vector.destination, 4000, &vector.payload);
            let mut frame = good.filter(|_| draw.rng.random_bool(0.7)).unwrap_or(whole);
            damage_payload(draw.rng, &mut frame);
            // Every fifth is injected behind the switch, where no guard drops the vectors' sources.
            let route = if draw.rng.random_bool(0.2) { Route::Direct(at) } else { port };
            vec![shot(Some(Class::Damaged), route, frame)]
        }
        15..57 => {
            let mut train = draw.request();
            if draw.rng.random_bool(0.1) {
                let vector = world.vectors.choose(draw.rng).expect("there are vectors");
                train = vec![rebased(&mut draw, &vector.payload)];
            }
            record(recorded, draw.rng, &train);
            let victim = draw.rng.random_range(0..train.len());
            let whole = train.get(victim).cloned();
            let mut shots = Vec::new();
            for (number, mut datagram) in train.into_iter().enumerate() {
                let is_hostile = number == victim || draw.rng.random_bool(0.5);
                if is_hostile {
                    mutate::fields(&mut draw, &mut datagram);
                }
                shots.push(shot(is_hostile.then_some(Class::Sealed), port, datagram.frame()));
            }
            // Sometimes the complete train follows, so that it may end.
            if let Some(whole) = whole.filter(|_| draw.rng.random_bool(0.4)) {
                shots.push(shot(None, port, whole.frame()));
            }
            shots
        }
        57..82 => {
            let attack = contradict::addresses_and_trains(&mut draw);
            let class = Some(Class::Contradictory);
            let direct = draw.rng.random_bool(0.15);
            let route = if direct { Route::Direct(at) } else { port };
            attack.into_iter().map(|datagram| shot(class, route, datagram.frame())).collect()
        }
        82..92 => {
            let mut frame = draw.request().swap_remove(0).frame();
            damage::below_udp(draw.rng, &mut frame);
            vec![shot(Some(Class::BelowUdp), port, frame)]
        }
        _ => {
            let (is_direct, datagram) = spoof::source_or_space(&mut draw);
            let route = if is_direct { Route::Direct(at) } else { port };
            vec![shot(Some(Class::Spoofed), route, datagram.frame())]
        }
    }
}

/// Records some valid frames.
fn record(recorded: &mut Vec<Vec<u8>>, rng: &mut SmallRng, train: &[Forged]) {
    let Some(datagram) = train.choose(rng) else { return };
    if recorded.len() < 256 {
        recorded.push(datagram.frame());
    } else if rng.random_bool(0.05) {
        let at = rng.random_range(0..recorded.len());
        recorded[at] = datagram.frame();
    }
}

/// Random bytes instead of a datagram's header.
pub(super) fn arbitrary_payload(rng: &mut SmallRng) -> Vec<u8> {
    let mut bytes = vec![0; rng.random_range(0..600)];
    rng.fill(&mut bytes[..]);
    bytes
}

/// Random bytes, at each depth at which a parser may begin.
fn arbitrary(rng: &mut SmallRng) -> Vec<u8> {
    let length = rng.random_range(0..600);
    let mut bytes = vec![0; length];
    rng.fill(&mut bytes[..]);
    match rng.random_range(0..4) {
        0 => {}
        1 if length > 14 => bytes[12..14].copy_from_slice(&[0x86, 0xdd]),
        2 if length > 54 => {
            bytes[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
            bytes[22..26].copy_from_slice(&[0xfd, 0xbb, 0, 1]);
            bytes[38..42].copy_from_slice(&[0xfd, 0xbb, 0, 1]);
        }
        _ => {
            let address = |node| Fields {
                space: Space(1),
                node: NodeId(node),
                command: 0,
                tag: 0,
                location: 1 << 63,
            };
            let (from, mut to) = (address(1001), address(1));
            to.command = rng.random();
            return forge::frame(from.to_ipv6(), to.to_ipv6(), rng.random(), &bytes);
        }
    }
    bytes
}

/// Damages the payload; the CRC stays as it was, and mostly also the UDP checksum.
fn damage_payload(rng: &mut SmallRng, frame: &mut Vec<u8>) {
    for _ in 0..rng.random_range(1..4) {
        let end = frame.len();
        if end <= FRAME_HEAD_BYTES {
            break;
        }
        let at = rng.random_range(FRAME_HEAD_BYTES..end);
        match rng.random_range(0..5) {
            0 => frame[at] ^= 1 << rng.random_range(0..8),
            1 => frame.truncate(at),
            2 => frame.extend(vec![rng.random::<u8>(); rng.random_range(1..32)]),
            3 => frame[at] = *[0, 1, 0x7f, 0x80, 0xff].choose(rng).unwrap_or(&0),
            _ => {
                let field = frame[FRAME_HEAD_BYTES..].iter_mut().skip(rng.random_range(0..84));
                field.take(8).for_each(|byte| *byte = 0xff);
            }
        }
    }
    let length = frame.len().saturating_sub(FRAME_HEAD_BYTES - 8);
    let length = u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes();
    frame[18..20].copy_from_slice(&length);
    frame[58..60].copy_from_slice(&length);
    if rng.random_bool(0.6) {
        forge::fix_udp_checksum(frame);
    }
}

/// A golden vector's header and data in a real session of the attacker.
fn rebased(draw: &mut Draw<'_>, payload: &[u8]) -> Forged {
    let (target, _) = draw.pointer();
    let mut datagram = draw.bare(Command::Read, target, 8);
    if let Ok(view) = HeaderView::new(payload) {
        let Header { session, incarnation, sequence, answered_distance, target, .. } =
            datagram.header;
        datagram.header =
            Header { session, incarnation, sequence, answered_distance, target, ..view.header() };
        datagram.options = view.options().to_vec();
        datagram.data = view.rest().to_vec();
    }
    let code = draw.rng.random_range(0..28);
    readdress(&mut datagram, |to, _| to.command = code);
    datagram
}

/// Changes the fields of destination and target.
fn readdress(datagram: &mut Forged, change: impl FnOnce(&mut Fields, &mut Fields)) {
    let (Some(mut to), Some(mut target)) =
        (Fields::unpack(datagram.destination), Fields::unpack(datagram.header.target))
    else {
        return;
    };
    change(&mut to, &mut target);
    datagram.destination = to.to_ipv6();
    datagram.header.target = target.to_ipv6();
}

/// The same command with other bits.
const fn bits_of(command: Command, bits: u8) -> u8 {
    WireCommand::request(command, false).bits() | bits
}

/// Every error of the parser, by the name in a tally.
#[must_use]
pub fn datagram_errors() -> Vec<String> {
    use bluebridge_wire::HeaderError;
    let headers = [HeaderError::Truncated, HeaderError::Version(2), HeaderError::HeaderLength(1)];
    let others = [
        DatagramError::ForeignSource,
        DatagramError::ForeignDestination,
        DatagramError::Crc,
        DatagramError::Trailer,
        DatagramError::Options,
        DatagramError::Target,
        DatagramError::Direction,
        DatagramError::Endpoint,
    ];
    let headers = headers.into_iter().map(DatagramError::Header);
    headers.chain(others).map(reason).collect()
}

/// The name of an error, without its values.
pub(super) fn reason(error: DatagramError) -> String {
    let text = format!("{error:?}");
    text.split(|letter: char| letter.is_ascii_digit()).next().unwrap_or(&text).to_owned()
}
