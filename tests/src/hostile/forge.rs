//! Datagrams that may lie in every field, and the frames that carry them.

use std::net::Ipv6Addr;

use bluebridge_p4::pipeline::MacAddr;
use bluebridge_wire::{Header, UDP_PORT, header::HEADER_BYTES, seal};

/// Bytes of an Ethernet header.
pub const ETHERNET_BYTES: usize = 14;
/// Bytes ahead of the UDP payload: Ethernet, IPv6, UDP.
pub const FRAME_HEAD_BYTES: usize = ETHERNET_BYTES + 40 + 8;

/// The destination MAC address of fabric frames; the switch rewrites it.
const GATEWAY: MacAddr = MacAddr([2, 0xbb, 0, 0, 0, 0]);

/// A datagram in parts; sealed, its CRC is right whatever else is wrong.
#[derive(Clone, Debug)]
pub struct Forged {
    /// The source address.
    pub source: Ipv6Addr,
    /// The destination address.
    pub destination: Ipv6Addr,
    /// The UDP source port.
    pub source_port: u16,
    /// The header.
    pub header: Header,
    /// Options; a multiple of 4 bytes, 936 at most.
    pub options: Vec<u8>,
    /// Data.
    pub data: Vec<u8>,
    /// What follows the data.
    pub trailer: Vec<u8>,
    /// Bytes of the payload that are overwritten before it is sealed.
    pub patches: Vec<(usize, u8)>,
}

impl Forged {
    /// The UDP payload with the right CRC.
    ///
    /// # Panics
    /// If the options are no multiple of 4 bytes.
    #[must_use]
    pub fn payload(&self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        self.header.emit(&mut bytes, self.options.len());
        bytes.extend(&self.options);
        bytes.extend(&self.data);
        bytes.extend(&self.trailer);
        for &(at, value) in &self.patches {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        // The CRC covers the payload as a whole, so where options end does not matter here.
        seal(self.source, self.destination, &mut bytes, &[]);
        bytes
    }

    /// The frame that carries it, with the right UDP checksum.
    #[must_use]
    pub fn frame(&self) -> Vec<u8> {
        frame(self.source, self.destination, self.source_port, &self.payload())
    }
}

/// A frame with a UDP datagram to the well-known port.
///
/// # Panics
/// If the payload does not fit a UDP datagram.
#[must_use]
pub fn frame(source: Ipv6Addr, destination: Ipv6Addr, source_port: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(8 + payload.len()).expect("a UDP datagram");
    let mut frame = GATEWAY.0.to_vec();
    frame.extend([2, 0xbb, 0, 0, 0, 9, 0x86, 0xdd, 0x60, 0, 0, 0]);
    frame.extend(length.to_be_bytes());
    frame.extend([17, 64]);
    frame.extend(source.octets());
    frame.extend(destination.octets());
    frame.extend(source_port.to_be_bytes());
    frame.extend(UDP_PORT.to_be_bytes());
    frame.extend(length.to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(payload);
    fix_udp_checksum(&mut frame);
    frame
}

/// Computes the UDP checksum anew in a frame without extension headers.
pub fn fix_udp_checksum(frame: &mut [u8]) {
    let Some(udp) = frame.get(ETHERNET_BYTES + 40..) else { return };
    if udp.len() < 8 {
        return;
    }
    let zeroed = [&udp[..6], &[0, 0], &udp[8..]].concat();
    let sum = udp_checksum(&frame[22..54], &zeroed);
    frame[ETHERNET_BYTES + 46..ETHERNET_BYTES + 48].copy_from_slice(&sum.to_be_bytes());
}

/// The checksum of a UDP datagram whose checksum field is zero (RFC 8200, section 8.1).
///
/// # Panics
/// If the datagram is longer than UDP allows.
#[must_use]
pub fn udp_checksum(addresses: &[u8], udp: &[u8]) -> u16 {
    let length = u32::try_from(udp.len()).expect("a UDP datagram");
    let words = |bytes: &[u8]| -> u64 {
        let (pairs, rest) = bytes.as_chunks::<2>();
        let sum: u64 = pairs.iter().map(|pair| u64::from(u16::from_be_bytes(*pair))).sum();
        sum + rest.first().map_or(0, |byte| u64::from(*byte) << 8)
    };
    let mut sum = words(addresses) + words(udp) + u64::from(length) + 17;
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    match !u16::try_from(sum).unwrap_or(0) {
        0 => 0xffff,
        sum => sum,
    }
}
