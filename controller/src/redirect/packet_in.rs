//! Copies of frames, truncated after their first bytes.

use std::net::Ipv6Addr;

use bluebridge_p4::pipeline::SwitchPort;
use bluebridge_wire::{ReplyCopy, UDP_PORT};

const AT_TYPE: usize = 12;
const AT_NEXT_HEADER: usize = 20;
const AT_SOURCE: usize = 22;
const AT_DESTINATION: usize = 38;
const AT_UDP: usize = 54;
const AT_PAYLOAD: usize = AT_UDP + 8;
const TYPE_IPV6: u16 = 0x86dd;
const NEXT_HEADER_UDP: u8 = 17;

/// A copy of a frame: its ingress port and its first bytes as received.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PacketIn {
    /// The port by which the frame entered the switch.
    pub ingress_port: SwitchPort,
    /// The first bytes of the frame.
    pub frame: Vec<u8>,
}

impl PacketIn {
    /// The reply in the frame; `None` if there is none, or it cannot be parsed.
    pub(super) fn reply(&self) -> Option<ReplyCopy> {
        let frame = self.frame.as_slice();
        let is_udp = be16(frame, AT_TYPE)? == TYPE_IPV6
            && *frame.get(AT_NEXT_HEADER)? == NEXT_HEADER_UDP
            && be16(frame, AT_UDP)? == UDP_PORT;
        if !is_udp {
            return None;
        }
        let (source, destination) = (address(frame, AT_SOURCE)?, address(frame, AT_DESTINATION)?);
        ReplyCopy::parse(source, destination, frame.get(AT_PAYLOAD..)?).ok()
    }
}

fn be16(frame: &[u8], at: usize) -> Option<u16> {
    frame.get(at..)?.first_chunk().map(|bytes| u16::from_be_bytes(*bytes))
}

fn address(frame: &[u8], at: usize) -> Option<Ipv6Addr> {
    frame.get(at..)?.first_chunk::<16>().map(|bytes| Ipv6Addr::from(*bytes))
}
