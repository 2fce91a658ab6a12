//! Frames built by an external library, so that the project's parsers are not tested with the project's own frames.

use std::net::Ipv6Addr;

use etherparse::PacketBuilder;

const HOP_LIMIT: u8 = 64;

/// A UDP datagram in IPv6 in Ethernet, as a host sends it.
#[derive(Clone, Copy, Debug)]
pub struct UdpFrame<'a> {
    /// Ethernet address of the sender.
    pub source_mac: [u8; 6],
    /// Ethernet address of the receiver.
    pub destination_mac: [u8; 6],
    /// Address of the sender.
    pub source: Ipv6Addr,
    /// Address of the receiver.
    pub destination: Ipv6Addr,
    /// Port of the sender.
    pub source_port: u16,
    /// Port of the receiver.
    pub destination_port: u16,
    /// Payload of the datagram.
    pub payload: &'a [u8],
}

impl UdpFrame<'_> {
    /// The frame's bytes, with the right UDP checksum and without a frame check sequence.
    ///
    /// # Panics
    /// If the payload does not fit a UDP datagram.
    pub fn bytes(&self) -> Vec<u8> {
        let packet = PacketBuilder::ethernet2(self.source_mac, self.destination_mac)
            .ipv6(self.source.octets(), self.destination.octets(), HOP_LIMIT)
            .udp(self.source_port, self.destination_port);
        let mut bytes = Vec::with_capacity(packet.size(self.payload.len()));
        packet.write(&mut bytes, self.payload).expect("it fits a UDP datagram");
        bytes
    }
}
