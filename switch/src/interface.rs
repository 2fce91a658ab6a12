//! Network interfaces of this namespace, read over rtnetlink.

use std::{io, io::ErrorKind};

use bluebridge_p4::pipeline::MacAddr;
use netlink_packet_core::{
    DecodeError, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage},
};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_ROUTE};

/// The properties of an interface that the switch needs.
#[derive(Clone, Debug, Default)]
pub struct Interface {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its MAC address.
    pub mac: MacAddr,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// One end of a veth pair whose other end is in another network namespace.
    pub has_far_peer: bool,
}

impl Interface {
    /// The interface with a name; `None` if this namespace has none.
    ///
    /// # Errors
    /// If the kernel cannot be queried.
    pub fn by_name(name: &str) -> io::Result<Option<Self>> {
        let mut request = LinkMessage::default();
        request.attributes.push(LinkAttribute::IfName(name.to_owned()));
        query(request)
    }

    /// The interface with an index; `None` if this namespace has none.
    ///
    /// # Errors
    /// If the kernel cannot be queried.
    pub fn by_index(index: u32) -> io::Result<Option<Self>> {
        let mut request = LinkMessage::default();
        request.header.index = index;
        query(request)
    }
}

fn query(request: LinkMessage) -> io::Result<Option<Interface>> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut message = NetlinkMessage::new(
        NetlinkHeader::default(),
        NetlinkPayload::from(RouteNetlinkMessage::GetLink(request)),
    );
    message.header.flags = NLM_F_REQUEST;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let (response, _) = socket.recv_from_full()?;
    let response = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&response)
        .map_err(|error: DecodeError| io::Error::new(ErrorKind::InvalidData, error.to_string()))?;
    match response.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(link)) => Ok(Some(read(&link))),
        NetlinkPayload::Error(error) => match error.to_io() {
            error if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            error => Err(error),
        },
        _ => Err(io::Error::new(ErrorKind::InvalidData, "rtnetlink sent an unexpected response")),
    }
}

fn read(link: &LinkMessage) -> Interface {
    let mut interface = Interface { index: link.header.index, ..Interface::default() };
    let (mut is_veth, mut is_far) = (false, false);
    for attribute in &link.attributes {
        match attribute {
            LinkAttribute::IfName(name) => interface.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => interface.mtu = *mtu,
            LinkAttribute::Address(mac) => {
                interface.mac = MacAddr(mac.first_chunk().copied().unwrap_or_default());
            }
            LinkAttribute::LinkNetNsId(_) => is_far = true,
            LinkAttribute::LinkInfo(infos) => {
                is_veth = infos.iter().any(|i| matches!(i, LinkInfo::Kind(InfoKind::Veth)));
            }
            _ => {}
        }
    }
    interface.has_far_peer = is_veth && is_far;
    interface
}
