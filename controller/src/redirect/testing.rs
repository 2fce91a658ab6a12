//! Endpoints and copies for tests.

use bluebridge_p4::pipeline::{Forward, MacAddr, PACKET_IN_BYTES, SwitchPort};
use bluebridge_testkit::UdpFrame;
use bluebridge_wire::address::{ArenaGeneration, Location, Pointer};
use bluebridge_wire::{
    Command, EndpointAddress, Header, NodeId, ReplySource, Space, Status, Tag, UDP_PORT,
    header::HEADER_BYTES,
};

use super::PacketIn;
use crate::core::{Attached, Endpoints, Role};

pub(crate) const SPACE: Space = Space(1);
pub(crate) const SCOPE: u32 = SPACE.scope();
pub(crate) const HOME: NodeId = NodeId(1);
pub(crate) const OWNER: NodeId = NodeId(0xfffe);
pub(crate) const OTHER: NodeId = NodeId(0xfffd);
pub(crate) const STRANGER: NodeId = NodeId(0xfffc);

fn attached(role: Role, space: Space, port: u16) -> Attached {
    let [high, low] = port.to_be_bytes();
    let forward = Forward { port: SwitchPort(port), dst_mac: MacAddr([2, 0, 0, 0, high, low]) };
    Attached { role, space, incarnation: 1, generations: (0, 3), forward, is_local: true }
}

/// Two memory nodes (1 and 2 at ports 1 and 2), two clients of their space (ports 3 and 4), and a
/// client of another space (port 5).
pub(crate) fn endpoints() -> Endpoints {
    Endpoints::from([
        (HOME, attached(Role::Memory, SPACE, 1)),
        (NodeId(2), attached(Role::Memory, SPACE, 2)),
        (OWNER, attached(Role::Client, SPACE, 3)),
        (OTHER, attached(Role::Client, SPACE, 4)),
        (STRANGER, attached(Role::Client, Space(2), 5)),
    ])
}

/// A valid reply about a page of the home.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reply {
    pub(crate) command: Command,
    pub(crate) status: Status,
    pub(crate) from: NodeId,
    pub(crate) port: u16,
    pub(crate) home: NodeId,
    pub(crate) generation: u16,
    pub(crate) page: u64,
    pub(crate) owner: NodeId,
    pub(crate) epoch: u64,
    pub(crate) remaining_ms: u16,
}

impl Reply {
    pub(crate) fn copy(&self) -> PacketIn {
        let generation = ArenaGeneration::new(self.generation).unwrap();
        let location = Location::new(generation, self.page << 12).unwrap();
        let source = ReplySource {
            space: SPACE,
            node: self.from,
            command: self.command,
            status: self.status,
            contended: true,
            location_bits: location.bits(),
        };
        let target = Pointer { space: SPACE, node: self.home, tag: Tag(3), location };
        let header = Header {
            node: self.owner.0,
            target: target.to_ipv6(),
            lease_epoch: self.epoch,
            lease_remaining_ms: self.remaining_ms,
            ..Header::default()
        };
        let mut payload = [0; HEADER_BYTES];
        header.emit(&mut payload, 0);
        let mut frame = UdpFrame {
            source_mac: [2, 0, 0, 0, 0, 1],
            destination_mac: [2, 0, 0, 0, 0, 0xfe],
            source: source.to_ipv6(),
            destination: EndpointAddress::new(SPACE, OTHER, 1).to_ipv6(),
            source_port: UDP_PORT,
            destination_port: 0x8000,
            payload: &payload,
        }
        .bytes();
        frame.truncate(PACKET_IN_BYTES);
        PacketIn { ingress_port: SwitchPort(self.port), frame }
    }
}

/// A BUSY reply to a READ of a page of node 1 that is leased to [`OWNER`].
pub(crate) const fn reply(page: u64, epoch: u64, remaining_ms: u16) -> Reply {
    Reply {
        command: Command::Read,
        status: Status::Busy,
        from: HOME,
        port: 1,
        home: HOME,
        generation: 0,
        page,
        owner: OWNER,
        epoch,
        remaining_ms,
    }
}

/// The copy of [`reply`].
pub(crate) fn busy(page: u64, epoch: u64, remaining_ms: u16) -> PacketIn {
    reply(page, epoch, remaining_ms).copy()
}
