//! Notices: multicast messages of memory nodes to all endpoints in a space.

use bluebridge_wire::{Command, Datagram, NodeId, Pointer};

use super::{Event, Owner};

/// The subject of a notice.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum NoticeKind {
    /// Pages were allocated.
    Create,
    /// Pages were freed or zeroed: copies of them are invalid.
    Invalidate,
}

/// A multicast message of a memory node. It may be late, repeated, or lost: correctness must not
/// depend on it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Notice {
    /// What happened.
    pub kind: NoticeKind,
    /// The first of the pages.
    pub pointer: Pointer,
    /// The number of pages.
    pub pages: u32,
}

impl Owner {
    /// Handles a notice from the node of its memory, or from another memory server, to which the memory may have moved;
    /// notices from other nodes are dropped.
    pub(super) fn notice(
        &mut self,
        datagram: &Datagram<'_>,
        is_server: impl FnOnce(NodeId) -> bool,
    ) -> Option<Notice> {
        let pointer = Pointer::from_ipv6(datagram.header.target).ok().filter(|pointer| {
            let (from, to) = (&datagram.from, &datagram.to);
            to.node == NodeId::ALL
                && pointer.node.is_unicast()
                && to.tag == pointer.tag.0
                && to.location == pointer.location.bits()
                && datagram.header.length > 0
                && (from.node == pointer.node || is_server(from.node))
        });
        let Some(pointer) = pointer else {
            self.counters.count(Event::DropNotice);
            return None;
        };
        let kind = match datagram.command().command() {
            Some(Command::Notice) => NoticeKind::Create,
            _ => NoticeKind::Invalidate,
        };
        self.counters.count(Event::Notice);
        Some(Notice { kind, pointer, pages: datagram.header.length })
    }
}
