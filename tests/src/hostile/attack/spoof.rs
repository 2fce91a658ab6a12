//! Sources and spaces of other endpoints.

use std::net::Ipv6Addr;

use bluebridge_wire::{Command, NodeId, Space, address::Fields};
use rand::{Rng, seq::IndexedRandom};

use super::readdress;
use crate::hostile::{draw::Draw, forge::Forged, world::VICTIM};

/// A packet that the switch must drop or, injected behind it (`true`), the server must refuse.
///
/// OPEN and anywhere-CREATE are not injected behind the switch: without a session only the guard
/// knows their sender.
pub(super) fn source_or_space(draw: &mut Draw<'_>) -> (bool, Forged) {
    let mut datagram = draw.request().swap_remove(0);
    let is_direct = datagram.header.session != 0 && draw.rng.random_bool(0.5);
    let Some(mut from) = Fields::unpack(datagram.source) else { return (is_direct, datagram) };
    let own = (from.space, from.node);
    match draw.rng.random_range(0..7) {
        0 => (from.space, from.node) = VICTIM,
        1 => from.node = *[NodeId(1), NodeId(2), NodeId(3)].choose(draw.rng).unwrap_or(&NodeId(1)),
        2 => from.node = *[NodeId::ANY, NodeId::ALL].choose(draw.rng).unwrap_or(&NodeId::ANY),
        3 => from.node = NodeId(draw.rng.random()),
        4 => from.space = Space(draw.rng.random()),
        5 if is_direct => {
            // A space of the server, but not of the source: for example the victim's.
            readdress(&mut datagram, |to, target| {
                (to.space, target.space) = (VICTIM.0, VICTIM.0);
            });
        }
        _ => {
            datagram.source = foreign(draw);
            // In the opposite direction it leaves the fabric.
            if draw.rng.random_bool(0.3) {
                let here = from.to_ipv6();
                (datagram.source, datagram.destination) = (here, datagram.source);
            }
            return (is_direct, datagram);
        }
    }
    let is_own = (from.space, from.node) == own;
    let is_foreign_space = Fields::unpack(datagram.destination).is_some_and(|to| to.space != own.0);
    if is_own && !is_foreign_space {
        from.node = NodeId(own.1.0 ^ 0x4000);
    }
    datagram.source = from.to_ipv6();
    if draw.rng.random_bool(0.1) && !is_direct {
        readdress(&mut datagram, |to, _| to.command = Command::Notice.code());
    }
    (is_direct, datagram)
}

/// An address outside of the fabric.
fn foreign(draw: &mut Draw<'_>) -> Ipv6Addr {
    let low: u16 = draw.rng.random();
    let addresses = [
        Ipv6Addr::new(0xfdbc, 1, 1001, 0, 0x8000, 0, 0, low),
        Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, low),
        Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, low),
        Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
        Ipv6Addr::LOCALHOST,
        Ipv6Addr::UNSPECIFIED,
    ];
    *addresses.choose(draw.rng).unwrap_or(&Ipv6Addr::LOCALHOST)
}
