//! The next hop of all pointers, as the host's tables have it.
//!
//! Nothing here may wait for the lock that all network namespaces of a machine share (RTNL): it is held for tens of
//! milliseconds while others make and remove interfaces. So properties of the interface are read by ioctl, and
//! RTM_GETLINK, which takes it, is not used.

use std::io;
use std::net::Ipv6Addr;

use netlink_packet_core::{
    DecodeError, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteType,
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};
use socket2::{Domain, Type};

use super::{NoFrames, sys};
use crate::interface::Interface;

/// Where frames for a prefix go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NextHop {
    /// The interface's index.
    pub(super) interface: u32,
    /// Its Ethernet address.
    pub(super) own: [u8; 6],
    /// The gateway's Ethernet address.
    pub(super) gateway: [u8; 6],
    /// The largest IP packet, in bytes.
    pub(super) mtu: u32,
}

/// Asks the kernel for next hops, in the network namespace in which it was made.
pub(super) struct Tables {
    netlink: Socket,
    /// For the interface's properties.
    socket: socket2::Socket,
    /// Number of the last request.
    sequence: u32,
}

impl Tables {
    pub(super) fn open() -> io::Result<Self> {
        let mut netlink = Socket::new(NETLINK_ROUTE)?;
        netlink.bind_auto()?;
        netlink.connect(&SocketAddr::new(0, 0))?;
        // The kernel responds within the call that sends the request.
        netlink.set_non_blocking(true)?;
        let socket = socket2::Socket::new(Domain::IPV6, Type::DGRAM, None)?;
        Ok(Self { netlink, socket, sequence: 0 })
    }

    /// The next hop of `destination` by way of an interface.
    pub(super) fn next_hop(
        &mut self,
        interface: &str,
        destination: Ipv6Addr,
    ) -> Result<NextHop, NoFrames> {
        let name = interface;
        let interface =
            rustix::net::netdevice::name_to_index(&self.socket, name).map_err(refused)?;
        if !sys::is_ethernet(&self.socket, name).map_err(NoFrames::Socket)? {
            return Err(NoFrames::NoEthernet);
        }
        let Interface { mac: own, mtu } =
            Interface::of(&self.socket, name).map_err(NoFrames::Socket)?;
        let gateway = self.gateway(interface, destination)?;
        let gateway = self.neighbour(interface, gateway)?;
        Ok(NextHop { interface, own, gateway, mtu })
    }

    /// The gateway by way of which the interface reaches a destination.
    fn gateway(&mut self, interface: u32, destination: Ipv6Addr) -> Result<Ipv6Addr, NoFrames> {
        let mut request = RouteMessage::default();
        request.header.address_family = AddressFamily::Inet6;
        request.header.destination_prefix_length = 128;
        request.attributes.push(RouteAttribute::Destination(RouteAddress::Inet6(destination)));
        request.attributes.push(RouteAttribute::Oif(interface));
        let route = match self.ask(RouteNetlinkMessage::GetRoute(request)) {
            Ok(RouteNetlinkMessage::NewRoute(route)) => route,
            Ok(_) => return Err(unexpected()),
            Err(NoFrames::Socket(error)) if is_missing(&error) => return Err(NoFrames::NoGateway),
            Err(error) => return Err(error),
        };
        let attributes = &route.attributes;
        let is_there = route.header.kind == RouteType::Unicast
            && attributes.contains(&RouteAttribute::Oif(interface));
        let is_special = attributes.iter().any(|attribute| match attribute {
            RouteAttribute::Encap(_) | RouteAttribute::EncapType(_) => true,
            RouteAttribute::Metrics(metrics) => metrics
                .iter()
                .any(|metric| matches!(metric, RouteMetric::Mtu(1..) | RouteMetric::Hoplimit(1..))),
            _ => false,
        });
        if is_special {
            return Err(NoFrames::SpecialRoute);
        }
        let gateway = attributes.iter().find_map(|attribute| match attribute {
            RouteAttribute::Gateway(RouteAddress::Inet6(gateway)) => Some(*gateway),
            _ => None,
        });
        gateway.filter(|_| is_there).ok_or(NoFrames::NoGateway)
    }

    /// The Ethernet address of a neighbour. One that the kernel would have to confirm first is none: only what is sent
    /// by routes makes it do so.
    fn neighbour(&mut self, interface: u32, address: Ipv6Addr) -> Result<[u8; 6], NoFrames> {
        let mut request = NeighbourMessage::default();
        request.header.family = AddressFamily::Inet6;
        request.header.ifindex = interface;
        request.attributes.push(NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)));
        let neighbour = match self.ask(RouteNetlinkMessage::GetNeighbour(request)) {
            Ok(RouteNetlinkMessage::NewNeighbour(neighbour)) => neighbour,
            Ok(_) => return Err(unexpected()),
            Err(NoFrames::Socket(error)) if is_missing(&error) => {
                return Err(NoFrames::NoNeighbour);
            }
            Err(error) => return Err(error),
        };
        let state = neighbour.header.state;
        let is_known = matches!(state, NeighbourState::Permanent | NeighbourState::Reachable);
        let mac = neighbour.attributes.iter().find_map(|attribute| match attribute {
            NeighbourAttribute::LinkLayerAddress(mac) => mac.as_slice().try_into().ok(),
            _ => None,
        });
        mac.filter(|_| is_known).ok_or(NoFrames::NoNeighbour)
    }

    fn ask(&mut self, request: RouteNetlinkMessage) -> Result<RouteNetlinkMessage, NoFrames> {
        let mut message =
            NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::from(request));
        self.sequence = self.sequence.wrapping_add(1);
        message.header.flags = NLM_F_REQUEST;
        message.header.sequence_number = self.sequence;
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.netlink.send(&bytes, 0).map_err(NoFrames::Socket)?;
        loop {
            let (response, _) = self.netlink.recv_from_full().map_err(NoFrames::Socket)?;
            let response = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&response);
            let response = response.map_err(|_: DecodeError| unexpected())?;
            // Not that of an earlier request which failed in between.
            if response.header.sequence_number != self.sequence {
                continue;
            }
            return match response.payload {
                NetlinkPayload::InnerMessage(message) => Ok(message),
                NetlinkPayload::Error(error) => Err(NoFrames::Socket(error.to_io())),
                _ => Err(unexpected()),
            };
        }
    }
}

fn refused(error: rustix::io::Errno) -> NoFrames {
    NoFrames::Socket(error.into())
}

/// What is asked for is not in the table.
fn is_missing(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::ENETUNREACH | libc::EHOSTUNREACH | libc::ENODEV)
    )
}

fn unexpected() -> NoFrames {
    NoFrames::Socket(io::Error::new(
        io::ErrorKind::InvalidData,
        "rtnetlink sent an unexpected response",
    ))
}
