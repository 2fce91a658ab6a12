//! Datagrams with arbitrary values in every field, and their frames.

use std::net::Ipv6Addr;

use bluebridge_p4::pipeline::MacAddr;
use bluebridge_testkit::UdpFrame;
use bluebridge_wire::{Header, UDP_PORT, header::HEADER_BYTES, seal};
use etherparse::UdpHeader;

/// Bytes of an Ethernet header.
pub const ETHERNET_BYTES: usize = 14;
/// Bytes ahead of the UDP payload: Ethernet, IPv6, UDP.
pub const FRAME_HEAD_BYTES: usize = ETHERNET_BYTES + 40 + 8;

/// The destination MAC address of fabric frames; the switch rewrites it.
const GATEWAY: MacAddr = MacAddr([2, 0xbb, 0, 0, 0, 0]);

/// The source MAC address, which no part of the fabric reads.
const HOST: MacAddr = MacAddr([2, 0xbb, 0, 0, 0, 9]);

/// A datagram in parts. When it is sealed its CRC is right, even if everything else is wrong.
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
    /// Bytes after the data.
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
    UdpFrame {
        source_mac: HOST.0,
        destination_mac: GATEWAY.0,
        source,
        destination,
        source_port,
        destination_port: UDP_PORT,
        payload,
    }
    .bytes()
}

/// Recomputes the UDP checksum of a frame without extension headers; one too short for UDP is not
/// changed.
pub fn fix_udp_checksum(frame: &mut [u8]) {
    let Some((_, ip)) = frame.split_at_mut_checked(ETHERNET_BYTES) else { return };
    let Some((ip, udp)) = ip.split_first_chunk_mut::<40>() else { return };
    let Ok((header, payload)) = UdpHeader::from_slice(udp) else { return };
    let (mut source, mut destination) = ([0; 16], [0; 16]);
    source.copy_from_slice(&ip[8..24]);
    destination.copy_from_slice(&ip[24..]);
    let sum = header.calc_checksum_ipv6_raw(source, destination, payload);
    udp[6..8].copy_from_slice(&sum.expect("it fits a UDP datagram").to_be_bytes());
}
