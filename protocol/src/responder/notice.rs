//! Notices: multicast messages about allocations and deletions, for endpoints that keep copies
//! (`docs/protocol.md`, section 10).

use bluebridge_wire::{
    Command, EndpointAddress, Header, NodeId, Space, UDP_PORT, WireCommand, address::Fields,
};

use super::{Event, Responder, admit::Request, replies::ReplyPath};
use crate::store::Grant;

impl Responder {
    /// Sends a notice that the pages of a DELETE are freed or zero.
    pub(super) fn notify_invalid(&mut self, request: &Request<'_>, pages: u64) {
        let target = request.datagram.target;
        self.send_notice(Command::Invalidate, target, pages);
    }

    /// Sends a notice that an operator freed pages of this server's own.
    pub(super) fn notify_purged(&mut self, space: Space, grant: Grant, pages: u64) {
        let location = grant.location.bits();
        let target = Fields { space, node: self.node, command: 0, tag: grant.tag.0, location };
        self.send_notice(Command::Invalidate, target, pages);
    }

    /// Sends a notice that pages were allocated.
    pub(super) fn notify_created(&mut self, request: &Request<'_>, grant: Grant, pages: u64) {
        let space = request.datagram.target.space;
        let location = grant.location.bits();
        let target = Fields { space, node: self.node, command: 0, tag: grant.tag.0, location };
        self.send_notice(Command::Notice, target, pages);
    }

    pub(super) fn send_notice(&mut self, command: Command, target: Fields, pages: u64) {
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
        let reply_path = ReplyPath { source, destination: to.to_ipv6(), port: UDP_PORT };
        self.counters.count(Event::NoticeSent);
        self.replies.push(reply_path, &header, &[], &[]);
    }
}
