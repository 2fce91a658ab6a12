//! What a host's kernel and its carrier make of a frame before an endpoint gets to see it.

use std::net::Ipv6Addr;

use bluebridge_wire::{UDP_PORT, address::Fields};

use super::forge::{ETHERNET_BYTES, udp_checksum};

/// A datagram that reaches the endpoint.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// The source address.
    pub source: Ipv6Addr,
    /// The UDP source port.
    pub source_port: u16,
    /// The destination address.
    pub destination: Ipv6Addr,
    /// The UDP payload.
    pub payload: &'a [u8],
}

/// Why a frame does not reach the endpoint.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum HostDrop {
    /// The UDP checksum is wrong or missing.
    Checksum,
    /// Not IPv6, or not whole.
    Form,
    /// Not to an address of the fabric, or not to the well-known port.
    Foreign,
    /// Not UDP right behind the IPv6 header.
    Protocol,
}

/// Receives a frame as Linux and the carrier do: extension headers and fragments are refused, sums are checked.
///
/// # Errors
/// [`HostDrop`].
pub fn receive(frame: &[u8]) -> Result<Received<'_>, HostDrop> {
    let ip = frame.get(ETHERNET_BYTES..).ok_or(HostDrop::Form)?;
    let head: &[u8; 40] = ip.first_chunk().ok_or(HostDrop::Form)?;
    if frame[12..14] != [0x86, 0xdd] || head[0] >> 4 != 6 {
        return Err(HostDrop::Form);
    }
    let length = usize::from(u16::from_be_bytes([head[4], head[5]]));
    let rest = ip[40..].get(..length).ok_or(HostDrop::Form)?;
    if head[6] != 17 {
        return Err(HostDrop::Protocol);
    }
    let &[s0, s1, d0, d1, l0, l1, c0, c1, ..] = rest else { return Err(HostDrop::Form) };
    let length = usize::from(u16::from_be_bytes([l0, l1]));
    let udp = rest.get(..length).filter(|udp| udp.len() >= 8).ok_or(HostDrop::Form)?;
    let zeroed = [&udp[..6], &[0, 0], &udp[8..]].concat();
    if [c0, c1] == [0, 0] || udp_checksum(&head[8..40], &zeroed) != u16::from_be_bytes([c0, c1]) {
        return Err(HostDrop::Checksum);
    }
    let destination = address(head, 24);
    if u16::from_be_bytes([d0, d1]) != UDP_PORT || Fields::unpack(destination).is_none() {
        return Err(HostDrop::Foreign);
    }
    let source_port = u16::from_be_bytes([s0, s1]);
    Ok(Received { source: address(head, 8), source_port, destination, payload: &udp[8..] })
}

fn address(head: &[u8; 40], at: usize) -> Ipv6Addr {
    let bytes: Option<&[u8; 16]> = head[at..].first_chunk();
    bytes.map_or(Ipv6Addr::UNSPECIFIED, |bytes| Ipv6Addr::from(*bytes))
}
