//! The sockets of the soft switch's ports.

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
};

use bluebridge_p4::pipeline::{MacAddr, SwitchPort};

use super::{
    Egress, Link, Offload,
    train::{Train, complete_checksum},
};
use crate::{
    dataplane::{PlaneError, PortError},
    interface::Interface,
    packet_socket::{Batch, PacketSocket},
    socket_link::SocketLink,
};

/// The MTU of a port whose link is a pair of sockets.
const SOCKET_MTU: u32 = 9000;

/// The ports' sockets.
#[derive(Default)]
pub(super) struct Wires(Vec<Wire>);

/// A port's socket and what it is connected to.
pub(super) struct Wire {
    pub(super) port: SwitchPort,
    place: Place,
    pub(super) socket: Socket,
}

/// What a port is connected to: two ports at one place are the same link.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// The index of an interface.
    Interface(u32),
    /// The path of the switch's socket.
    Path(PathBuf),
}

/// How a port's frames are received and sent.
pub(super) enum Socket {
    /// Through an interface.
    Packet(PacketSocket),
    /// To the process at the other end.
    Link(SocketLink),
}

impl Socket {
    /// Receives the frames that have arrived, and returns their number.
    pub(super) fn receive(&self, batch: &mut Batch) -> io::Result<usize> {
        match self {
            Self::Packet(socket) => batch.receive(socket),
            Self::Link(link) => batch.receive_plain(link),
        }
    }

    fn send(&self, frame: &[u8], offload: Offload) -> io::Result<()> {
        match self {
            Self::Packet(socket) => socket.send(offload.0, frame),
            Self::Link(link) => send_plain(link, frame, offload),
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Packet(socket) => socket.as_fd(),
            Self::Link(link) => link.as_fd(),
        }
    }
}

/// Sends what a link without offloads can carry: complete frames. A train of UDP is split; one of TCP is refused.
fn send_plain(link: &SocketLink, frame: &[u8], offload: Offload) -> io::Result<()> {
    if offload == Offload::default() {
        return link.send(frame);
    }
    let complete = |mut frame: Vec<u8>, offload| match complete_checksum(&mut frame, offload) {
        true => link.send(&frame),
        false => Err(io::ErrorKind::InvalidData.into()),
    };
    if !offload.is_segmented() {
        return complete(frame.to_vec(), offload);
    }
    let train = Train::parse(frame, offload).ok_or(io::ErrorKind::Unsupported)?;
    train.pieces().try_for_each(|piece| complete(piece, train.piece_offload()))
}

impl Egress for &Wires {
    fn transmit(&mut self, port: SwitchPort, frame: &[u8], offload: Offload) -> bool {
        let wire = self.0.iter().find(|wire| wire.port == port);
        wire.is_some_and(|wire| wire.socket.send(frame, offload).is_ok())
    }
}

impl Wires {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Wire> {
        self.0.iter()
    }

    /// The link to which a name leads: an interface, or `unix:PATH`.
    pub(super) fn look_up(port: SwitchPort, name: &str) -> Result<Found, PortError> {
        if let Some(path) = SocketLink::path_in(name) {
            let link = Link { name: name.to_owned(), mac: mac_of(port), mtu: SOCKET_MTU };
            return Ok(Found { link, place: Place::Path(path.to_owned()) });
        }
        let interface =
            Interface::by_name(name).map_err(|e| failed("look up interface", name, e))?;
        let interface = interface.ok_or_else(|| PortError::NoInterface(name.to_owned()))?;
        let link = Link { name: interface.name, mac: interface.mac, mtu: interface.mtu };
        Ok(Found { link, place: Place::Interface(interface.index) })
    }

    /// Whether the port already has this link; an error if it has another one that is still there.
    pub(super) fn has(&self, port: SwitchPort, found: &Found) -> Result<Option<bool>, PortError> {
        let Some(was) = self.0.iter().find(|wire| wire.port == port) else { return Ok(None) };
        if was.place == found.place {
            return Ok(Some(true));
        }
        let is_there = match was.place {
            Place::Path(_) => true,
            Place::Interface(index) => Interface::by_index(index)
                .map_err(|e| failed("look up the former interface of", &found.link.name, e))?
                .is_some(),
        };
        match is_there {
            true => Err(PortError::Invalid { port, rule: "it is in use" }),
            false => Ok(Some(false)),
        }
    }

    /// Opens the socket of a link.
    pub(super) fn open(found: &Found) -> Result<Socket, PortError> {
        let name = &found.link.name;
        Ok(match &found.place {
            Place::Interface(index) => {
                let socket = PacketSocket::open(*index, true);
                Socket::Packet(socket.map_err(|e| failed("open a packet socket on", name, e))?)
            }
            Place::Path(path) => {
                let link = SocketLink::open(path);
                Socket::Link(link.map_err(|e| failed("open the socket of the port", name, e))?)
            }
        })
    }

    pub(super) fn add(&mut self, port: SwitchPort, found: Found, socket: Socket) {
        self.0.push(Wire { port, place: found.place, socket });
    }

    pub(super) fn remove(&mut self, port: SwitchPort) {
        self.0.retain(|wire| wire.port != port);
    }
}

/// A link that a port can have.
pub(super) struct Found {
    pub(super) link: Link,
    place: Place,
}

fn failed(doing: &str, name: &str, source: io::Error) -> PortError {
    PlaneError::Io { doing: format!("{doing} {name}"), source }.into()
}

/// A locally administered address for a port whose link has none.
const fn mac_of(port: SwitchPort) -> MacAddr {
    let [high, low] = port.0.to_be_bytes();
    MacAddr([0x02, 0xbb, 0x01, 0, high, low])
}
