//! The layout of a rack: computed from the specification alone, so that every command gets the same result.

use std::net::{Ipv6Addr, SocketAddrV6};

use bluebridge_p4::pipeline::MacAddr;
use serde::Serialize;

use crate::spec::{Node, RackName, RackSpec};

/// The endpoint's side of its link.
pub const ENDPOINT_INTERFACE: &str = "eth0";

/// The controller's side of its link, in the switch's namespace.
pub const CONTROLLER_INTERFACE: &str = "ctl0";

/// MTU of the controller's link; it carries only TCP, which uses the smaller size of both ends.
pub const CONTROLLER_MTU: u32 = 1500;

/// Prefix length of the control network.
pub const CONTROL_PREFIX: u8 = 64;

/// The address of the agent's P4Runtime server, in the switch's namespace (IANA, service p4runtime).
pub const P4RUNTIME: SocketAddrV6 = SocketAddrV6::new(Ipv6Addr::LOCALHOST, 9559, 0, 0);

/// The address at which Open vSwitch listens for controllers, in the switch's namespace (IANA, service openflow).
pub const OPENFLOW: SocketAddrV6 = SocketAddrV6::new(Ipv6Addr::LOCALHOST, 6653, 0, 0);

/// The port on which the controller serves endpoints, at its control address.
pub const CONTROLLER_PORT: u16 = 7700;

/// A port of the rack's switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RackPort {
    /// Its number in the switch's tables, from 1.
    pub number: u16,
    /// Its interface in the switch's namespace.
    pub interface: String,
    /// The namespace at the other end; [`Node::Switch`] is the controller's port.
    pub peer: Node,
    /// The other end's interface.
    pub peer_interface: &'static str,
    /// The other end's Ethernet address.
    pub peer_mac: MacAddr,
    /// The switch's end's Ethernet address.
    pub mac: MacAddr,
    /// The other end's address on the control network.
    pub control_address: Ipv6Addr,
    /// Largest IP packet of the link, in bytes.
    pub mtu: u32,
}

/// The layout of one rack.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    number: u16,
    ports: Vec<RackPort>,
}

impl Layout {
    /// Ports 1.. are the endpoints in order, servers first; the last one is the controller's.
    pub fn of(spec: &RackSpec) -> Self {
        let number = rack_number(&spec.name);
        let peers = spec.endpoints().chain([Node::Switch]);
        let ports = (1..).zip(peers).map(|(port, peer)| RackPort::new(spec, number, port, peer));
        Self { number, ports: ports.collect() }
    }

    /// The ports by number.
    pub fn ports(&self) -> &[RackPort] {
        &self.ports
    }

    /// The port of a node.
    pub fn port_of(&self, node: Node) -> Option<&RackPort> {
        self.ports.iter().find(|port| port.peer == node)
    }

    /// The controller's address for endpoints.
    pub fn controller(&self) -> SocketAddrV6 {
        SocketAddrV6::new(control_address(self.number, None), CONTROLLER_PORT, 0, 0)
    }
}

impl RackPort {
    fn new(spec: &RackSpec, rack: u16, number: u16, peer: Node) -> Self {
        let controller = peer == Node::Switch;
        Self {
            number,
            interface: format!("p{number}"),
            peer,
            peer_interface: if controller { CONTROLLER_INTERFACE } else { ENDPOINT_INTERFACE },
            peer_mac: mac(rack, 0, number),
            mac: mac(rack, 1, number),
            control_address: control_address(rack, (!controller).then_some(number)),
            mtu: if controller { CONTROLLER_MTU } else { spec.mtu.of(peer) },
        }
    }
}

/// A number for a name (FNV-1a, folded), never 0, which the gateway's Ethernet address uses.
fn rack_number(name: &RackName) -> u16 {
    let mut hash = 0x811c_9dc5_u32;
    for byte in name.as_str().bytes() {
        hash = (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }
    let [a, b, c, d] = hash.to_be_bytes();
    u16::from_be_bytes([a ^ c, b ^ d]).max(1)
}

/// Locally administered; `side` distinguishes the switch's end (1) from the other (0).
fn mac(rack: u16, side: u8, port: u16) -> MacAddr {
    let [r, s] = rack.to_be_bytes();
    let [_, number] = port.to_be_bytes();
    MacAddr([0x02, 0xbb, r, s, side, number])
}

/// `fd00:bb:RACK::1` for the controller, `fd00:bb:RACK::1:PORT` for an endpoint.
fn control_address(rack: u16, port: Option<u16>) -> Ipv6Addr {
    match port {
        None => Ipv6Addr::new(0xfd00, 0xbb, rack, 0, 0, 0, 0, 1),
        Some(port) => Ipv6Addr::new(0xfd00, 0xbb, rack, 0, 0, 0, 1, port),
    }
}
