//! What servers serve, as places.

use std::ops::Range;

use bluebridge_wire::NodeId;
use bluebridge_wire::address::{LINE_PAGES, PAGE_SHIFT, SHARD_SHIFT};

use super::{Held, Pages, Places, places};
use crate::migration::{ContentsRecord, GenerationRange, Migrations, PageMap};

const LINE: u64 = LINE_PAGES as u64;
const SHARD: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// The most generations of a server, or of a row of pages, whose pointers are told apart, the latest ones: a rack that frees much has more.
const GENERATIONS_MAX: u16 = 16;

impl Migrations {
    /// Whether a server can take part in migrations now.
    pub(crate) fn can_migrate(&self, node: NodeId) -> bool {
        self.servers.get(&node).is_some_and(|server| {
            server.contents.is_some() && server.link.as_ref().is_some_and(|link| link.migrates)
        })
    }

    /// The contents of a server, if it has any.
    pub(crate) fn contents(&self, node: NodeId) -> Option<ContentsRecord> {
        self.servers.get(&node).and_then(|server| server.contents)
    }

    /// The places that a server serves: of its own, in pointers of the latest of these generations, and of other homes that
    /// can learn now where their pages are.
    pub(crate) fn held(&self, node: NodeId, generations: GenerationRange) -> Vec<Held> {
        let Some(contents) = self.contents(node) else { return Vec::new() };
        let of_others = self.elsewhere.iter().filter(|(home, of)| {
            **home != contents && !of.record.is_pending && self.can_learn(home.id())
        });
        let of_others = of_others.map(|(home, of)| {
            let placed = of.record.rows.iter().filter(|(_, placed)| placed.at == contents);
            let rows = placed.flat_map(|(pages, placed)| places(latest(placed.generations), pages));
            Held { home: *home, rows: rows.collect() }
        });
        let own = Held { home: contents, rows: self.own_places(contents, latest(generations)) };
        std::iter::once(own).chain(of_others).filter(|held| !held.rows.is_empty()).collect()
    }

    /// The places of its own that a server serves.
    fn own_places(&self, home: ContentsRecord, generations: GenerationRange) -> Vec<Places> {
        let Some(server) = self.servers.get(&home.id()) else { return Vec::new() };
        // A shard has addresses for twice its memory.
        let of_memory = server.capacity_pages / u64::from(server.shard_count.max(1)) / LINE * LINE;
        let addresses = (2 * of_memory).min(SHARD);
        let mut own: PageMap<()> = (0..u64::from(server.shard_count))
            .map(|shard| (shard * SHARD..shard * SHARD + addresses, ()))
            .collect();
        if let Some(of) = self.elsewhere.get(&home) {
            let rows = of.record.rows.iter().map(|(pages, _)| pages);
            let lost = of.record.lost.iter().map(|(pages, ())| pages);
            rows.chain(lost).for_each(|pages| own.remove(pages));
        }
        own.iter().flat_map(|(pages, ())| places(generations, pages)).collect()
    }

    /// Pages in open migrations.
    pub(crate) fn moving(&self) -> Vec<Pages> {
        let of = |pages: &Range<u64>, home| Pages { home, pages: pages.clone() };
        self.open().map(|it| of(&it.record.pages, it.record.home)).collect()
    }
}

/// The latest generations of these.
fn latest(generations: GenerationRange) -> GenerationRange {
    let first = generations.first.max(generations.last.saturating_sub(GENERATIONS_MAX - 1));
    GenerationRange { first, ..generations }
}
