//! Notices: what memory nodes tell everybody in a space.

use bluebridge_wire::{Command, Datagram, NodeId, Pointer};

use super::{Event, Owner};

/// What a notice is about.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum NoticeKind {
    /// Pages were allocated.
    Create,
    /// Pages were freed or zeroed: copies of them are worth nothing any more.
    Invalidate,
}

/// What a memory node told everybody. It may be late, repeated, or missing: nothing may depend on
/// it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Notice {
    /// What happened.
    pub kind: NoticeKind,
    /// The first of the pages.
    pub pointer: Pointer,
    /// How many.
    pub pages: u32,
}

impl Owner {
    /// Takes a notice about memory whose node sends it; anybody else's is dropped.
    pub(super) fn notice(&mut self, datagram: &Datagram<'_>) -> Option<Notice> {
        let pointer = Pointer::from_ipv6(datagram.header.target).ok().filter(|pointer| {
            let (from, to) = (&datagram.from, &datagram.to);
            to.node == NodeId::ALL
                && from.node == pointer.node
                && pointer.node.is_unicast()
                && to.tag == pointer.tag.0
                && to.location == pointer.location.bits()
                && datagram.header.length > 0
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
