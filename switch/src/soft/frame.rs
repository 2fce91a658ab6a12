//! Parses and rewrites frames.

use bluebridge_p4::pipeline::{DropReason, MacAddr};

/// Bytes of an Ethernet header.
pub(super) const ETHERNET_BYTES: usize = 14;
/// Bytes of Ethernet and IPv6 headers.
pub(super) const HEADERS_BYTES: usize = ETHERNET_BYTES + 40;

const ETHERTYPE_IPV6: u16 = 0x86dd;
const ETHERTYPE_TAGGED: [u16; 2] = [0x8100, 0x88a8];
const NEXT_HEADER: usize = ETHERNET_BYTES + 6;
const HOP_LIMIT: usize = ETHERNET_BYTES + 7;
/// TCP, UDP and ICMPv6 (IANA's protocol numbers), which may follow the IPv6 header.
const UPPER_LAYERS: [u8; 3] = [6, 17, 58];
const FABRIC: u16 = bluebridge_wire::address::FABRIC_PREFIX;

/// One address of a fabric packet; outside the fabric the fields have no meaning.
#[derive(Clone, Copy, Debug)]
pub(super) struct Address {
    pub(super) scope: u32,
    pub(super) node: u16,
    pub(super) command: u8,
    pub(super) tag: u8,
    pub(super) location: u64,
}

impl Address {
    const fn parse(bytes: [u8; 16]) -> Self {
        let [s0, s1, s2, s3, n0, n1, command, tag, location @ ..] = bytes;
        Self {
            scope: u32::from_be_bytes([s0, s1, s2, s3]),
            node: u16::from_be_bytes([n0, n1]),
            command,
            tag,
            location: u64::from_be_bytes(location),
        }
    }

    const fn is_fabric(self) -> bool {
        (self.scope >> 16) as u16 == FABRIC
    }

    /// Scope, node and location as the 112-bit key of `directory`.
    pub(super) const fn directory_bits(self) -> u128 {
        ((self.scope as u128) << 80) | ((self.node as u128) << 64) | self.location as u128
    }
}

/// The kind of traffic of a frame.
#[derive(Clone, Copy, Debug)]
pub(super) enum Frame {
    /// Fabric traffic, with a destination in the fabric.
    Fabric { src: Address, dst: Address },
    /// Anything else, switched by its destination MAC address.
    Other { dst_mac: MacAddr },
}

/// Parses a frame in the order that the pipeline prescribes.
pub(super) fn parse(frame: &[u8]) -> Result<Frame, DropReason> {
    let (Some(&dst_mac), Some(ethertype)) = (frame.first_chunk::<6>(), be16(frame, 12)) else {
        return Err(DropReason::Malformed);
    };
    if ETHERTYPE_TAGGED.contains(&ethertype) {
        return Err(DropReason::Tagged);
    }
    if ethertype != ETHERTYPE_IPV6 {
        return Ok(Frame::Other { dst_mac: MacAddr(dst_mac) });
    }
    let Some(headers) = frame.first_chunk::<HEADERS_BYTES>() else {
        return Err(DropReason::Malformed);
    };
    let (Some(src), Some(dst)) = (address(headers, 22), address(headers, 38)) else {
        return Err(DropReason::Malformed);
    };
    if headers[ETHERNET_BYTES] >> 4 != 6 {
        return Err(DropReason::Malformed);
    }
    if !src.is_fabric() && !dst.is_fabric() {
        return Ok(Frame::Other { dst_mac: MacAddr(dst_mac) });
    }
    let payload = usize::from(u16::from_be_bytes([headers[18], headers[19]]));
    if HEADERS_BYTES + payload > frame.len() {
        return Err(DropReason::Malformed);
    }
    if !dst.is_fabric() {
        return Err(DropReason::ForeignDestination);
    }
    if !UPPER_LAYERS.contains(&headers[NEXT_HEADER]) {
        return Err(DropReason::NextHeader);
    }
    if headers[HOP_LIMIT] <= 1 {
        return Err(DropReason::HopLimit);
    }
    Ok(Frame::Fabric { src, dst })
}

/// Decrements the hop limit; a frame without one does not change.
pub(super) fn decrement_hop_limit(frame: &mut [u8]) {
    if let Some(hop_limit) = frame.get_mut(HOP_LIMIT) {
        *hop_limit = hop_limit.saturating_sub(1);
    }
}

/// Replaces the destination MAC address.
pub(super) fn set_dst_mac(frame: &mut [u8], mac: MacAddr) {
    if let Some(dst) = frame.first_chunk_mut::<6>() {
        *dst = mac.0;
    }
}

fn be16(frame: &[u8], at: usize) -> Option<u16> {
    frame.get(at..)?.first_chunk().map(|bytes| u16::from_be_bytes(*bytes))
}

fn address(headers: &[u8; HEADERS_BYTES], at: usize) -> Option<Address> {
    headers.get(at..)?.first_chunk().map(|bytes| Address::parse(*bytes))
}
