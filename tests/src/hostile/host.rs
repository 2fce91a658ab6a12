//! What a host's kernel and its carrier do with a frame before an endpoint receives it.

use std::net::Ipv6Addr;

use bluebridge_wire::{UDP_PORT, address::Fields};
use etherparse::{EtherType, Ethernet2Header, IpNumber, Ipv6Header, UdpHeader};

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
    /// Not IPv6, or incomplete.
    Form,
    /// Not to an address of the fabric, or not to the well-known port.
    Foreign,
    /// The IPv6 header is not followed by UDP.
    Protocol,
}

/// Receives a frame like Linux and the carrier: extension headers and fragments are refused,
/// checksums are verified.
///
/// # Errors
/// [`HostDrop`].
pub fn receive(frame: &[u8]) -> Result<Received<'_>, HostDrop> {
    let (ethernet, packet) = Ethernet2Header::from_slice(frame).map_err(|_| HostDrop::Form)?;
    if ethernet.ether_type != EtherType::IPV6 {
        return Err(HostDrop::Form);
    }
    let (ip, rest) = Ipv6Header::from_slice(packet).map_err(|_| HostDrop::Form)?;
    let rest = rest.get(..ip.payload_length.into()).ok_or(HostDrop::Form)?;
    if ip.next_header != IpNumber::UDP {
        return Err(HostDrop::Protocol);
    }
    let (udp, _) = UdpHeader::from_slice(rest).map_err(|_| HostDrop::Form)?;
    let payload = rest.get(UdpHeader::LEN..udp.length.into()).ok_or(HostDrop::Form)?;
    if udp.checksum == 0 || udp.calc_checksum_ipv6(&ip, payload) != Ok(udp.checksum) {
        return Err(HostDrop::Checksum);
    }
    let (source, destination) = (ip.source_addr(), ip.destination_addr());
    if udp.destination_port != UDP_PORT || Fields::unpack(destination).is_none() {
        return Err(HostDrop::Foreign);
    }
    Ok(Received { source, source_port: udp.source_port, destination, payload })
}
