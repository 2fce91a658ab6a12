//! Notices: what was created and deleted, for whoever keeps copies (`docs/protocol.md`,
//! section 10).

use bluebridge_wire::{
    Command, EndpointAddress, Header, NodeId, Space, UDP_PORT, WireCommand, address::Fields,
};

use super::{Event, Responder, admit::Request, replies::Way};
use crate::store::Grant;

impl Responder {
    /// Tells that the pages of a DELETE are gone or zero.
    pub(super) fn tell_invalid(&mut self, request: &Request<'_>, pages: u64) {
        let target = request.datagram.target;
        self.tell(Command::Invalidate, target, pages);
    }

    /// Tells that an operator freed pages of this server's own.
    pub(super) fn tell_purged(&mut self, space: Space, grant: Grant, pages: u64) {
        let location = grant.location.bits();
        let target = Fields { space, node: self.node, command: 0, tag: grant.tag.0, location };
        self.tell(Command::Invalidate, target, pages);
    }

    /// Tells that pages were given.
    pub(super) fn tell_created(&mut self, request: &Request<'_>, grant: Grant, pages: u64) {
        let space = request.datagram.target.space;
        let location = grant.location.bits();
        let target = Fields { space, node: self.node, command: 0, tag: grant.tag.0, location };
        self.tell(Command::Notice, target, pages);
    }

    fn tell(&mut self, command: Command, target: Fields, pages: u64) {
        let space = target.space;
        if !self.notices.contains(&space) {
            return;
        }
        let source = EndpointAddress::of_shard(space, self.node, self.shard, 0).to_ipv6();
        let bits = WireCommand::request(command, false).bits();
        let to = Fields { node: NodeId::ALL, command: bits, ..target };
        let header = Header {
            target: target.to_ipv6(),
            incarnation: self.incarnation,
            length: u32::try_from(pages).unwrap_or(u32::MAX),
            range_epoch: self.authority.map_or(0, |authority| authority.range_epoch),
            ..Header::default()
        };
        let way = Way { source, destination: to.to_ipv6(), port: UDP_PORT };
        self.counters.count(Event::NoticeSent);
        self.replies.push(way, &header, &[], &[]);
    }
}
