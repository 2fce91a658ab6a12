//! A line of pages that is served by another server than the one in its pointers.

use core::ops::Range;

use bluebridge_protocol::{
    Timestamp,
    responder::Adopted,
    store::{HomeLine, PageCrcs, PageStore, Taken},
};
use bluebridge_wire::{
    address::{LINE_PAGES, PAGE_BYTES},
    line::LineRecord,
};

use super::{server::Server, server_node};

/// The simulation moves lines itself, at one moment; the requests for it are tested elsewhere.
const TAKEN: Taken = Taken { migration: 0, epoch: 0 };

/// A moved line.
pub(super) struct Move {
    pub(super) from: usize,
    to: usize,
    /// The pages, numbered as at their home.
    pub(super) pages: Range<u64>,
    home: HomeLine,
    /// Where it is now.
    place: u64,
}

impl Move {
    /// Moves the line; `None` if there is no room, or an allocation in it is incomplete.
    pub(super) fn begin(
        now: Timestamp,
        servers: &mut [Server],
        (from, to): (usize, usize),
        pages: Range<u64>,
    ) -> Option<Self> {
        let line = servers[from].store.lines().line(pages.start).filter(|line| line.is_settled)?;
        let bytes = bytes_of(&servers[from], pages.start);
        let generation = servers[from].store.generation();
        let home = HomeLine { node: server_node(from), generation, first_page: pages.start };
        let store = &mut servers[to].store;
        let place = store.lines_mut().reserve(1)?.first()?.start;
        stage(store, place, home, &line.pages, &bytes);
        let Server { store: of_home, responder: home_responder, .. } = &mut servers[from];
        home_responder.add_moved(pages.clone(), server_node(to)).expect("it is here");
        home_responder.publish(of_home);
        of_home.lines_mut().withhold(pages.clone(), true);
        of_home.lines_mut().give(pages.start);
        of_home.lines_mut().clear_given(pages.clone());
        let Server { store, responder, .. } = &mut servers[to];
        responder.adopt(now, place, home, TAKEN, store);
        Some(Self { from, to, pages, home, place })
    }

    /// Moves the line back; returns false if there is no room any more.
    pub(super) fn end(&self, now: Timestamp, servers: &mut [Server]) -> bool {
        let Self { from, to, ref pages, home, place } = *self;
        if !servers[from].store.lines_mut().reserve_own(pages.clone()) {
            return false;
        }
        let Server { store, responder, .. } = &mut servers[to];
        let HomeLine { node, generation, first_page } = home;
        let page_count = LINE_PAGES as u64;
        let adopted = Adopted { node, generation, first_page, page_count, local_page: place };
        assert!(responder.remove_adopted(&adopted), "it was adopted");
        let line = store.lines().line(place).expect("it is here").pages;
        let bytes = bytes_of(&servers[to], place);
        let store = servers[to].store.lines_mut();
        store.give(place);
        store.clear_given(place..place + page_count);
        let Server { store, responder, .. } = &mut servers[from];
        stage(store, pages.start, home, &line, &bytes);
        responder.adopt(now, pages.start, home, TAKEN, store);
        true
    }
}

fn stage<S: PageStore>(
    store: &mut S,
    place: u64,
    home: HomeLine,
    pages: &LineRecord,
    bytes: &[u8],
) {
    let lines = store.lines_mut();
    lines.memory(place).expect("it is reserved").copy_from_slice(bytes);
    lines.stage(place, (home, TAKEN), pages, &PageCrcs::default()).expect("it is reserved");
}

fn bytes_of(server: &Server, first_page: u64) -> Vec<u8> {
    let pages = first_page..first_page + LINE_PAGES as u64;
    pages.flat_map(|page| server.store.read(page, 0..PAGE_BYTES).to_vec()).collect()
}
