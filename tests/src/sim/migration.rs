//! A line of pages that is served by another server than the one in its pointers.

use core::ops::Range;

use bluebridge_protocol::{
    responder::Adopted,
    store::{Access, PageStore},
};
use bluebridge_wire::{Pointer, address::PAGE_BYTES};

use super::{SPACE, server::Server, server_node};

/// A moved line.
pub(super) struct Move {
    pub(super) from: usize,
    to: usize,
    /// The pages, numbered as at their home.
    pub(super) pages: Range<u64>,
    adopted: Adopted,
    /// Pages that were allocated for it.
    pub(super) granted_pages: u64,
}

impl Move {
    /// Copies the line and notifies both servers at the same time; `None` if there is no room.
    pub(super) fn begin(
        servers: &mut [Server],
        (from, to): (usize, usize),
        pointer: Pointer,
        pages: Range<u64>,
    ) -> Option<Self> {
        // Fifteen pages contain a whole line at any alignment.
        let granted_pages = 15;
        let store = &mut servers[to].store;
        let grant = store.create(SPACE, granted_pages).ok()?;
        let local_page = grant.location.page().next_multiple_of(8);
        let adopted = Adopted {
            node: server_node(from),
            generation: pointer.location.generation(),
            first_page: pages.start,
            page_count: 8,
            local_page,
        };
        // The store cannot take over a colour, so only a line of the same colour is moved.
        if grant.tag != pointer.tag {
            let (location, tag) = (grant.location, grant.tag);
            let length_bytes = PAGE_BYTES as u64;
            let access = Access { location, length_bytes, tag, space: SPACE };
            store.delete(access, granted_pages).expect("granted a moment ago");
            return None;
        }
        let moved = Self { from, to, pages, adopted, granted_pages: granted_pages.into() };
        moved.copy(servers, (from, moved.pages.start), (to, local_page));
        servers[to].responder.add_adopted(moved.adopted).ok()?;
        servers[from].responder.add_moved(moved.pages.clone(), server_node(to)).ok()?;
        Some(moved)
    }

    /// Copies the line back and notifies both servers.
    pub(super) fn end(self, servers: &mut [Server]) {
        let Self { from, to, ref pages, adopted, .. } = self;
        self.copy(servers, (to, adopted.local_page), (from, pages.start));
        assert!(servers[from].responder.remove_moved(pages), "it was noted");
        assert!(servers[to].responder.remove_adopted(&adopted), "it was noted");
    }

    fn copy(&self, servers: &mut [Server], from: (usize, u64), to: (usize, u64)) {
        for page in 0..self.adopted.page_count {
            let bytes = servers[from.0].store.read(from.1 + page, 0..PAGE_BYTES).to_vec();
            servers[to.0].store.write(to.1 + page, 0, &bytes);
        }
    }
}
