//! What servers serve, as places.

use std::ops::Range;

use bluebridge_wire::NodeId;
use bluebridge_wire::address::{LINE_PAGES, PAGE_SHIFT, SHARD_SHIFT};

use super::{Held, Pages, places};
use crate::migration::{GenerationRange, Migrations, PageMap};

const LINE: u64 = LINE_PAGES as u64;
const SHARD: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// The most generations of a server whose pointers are told apart, the latest ones: a rack that frees much has more.
const GENERATIONS_MAX: u16 = 16;

impl Migrations {
    /// Whether a server can take part in migrations now.
    pub(crate) fn can_migrate(&self, node: NodeId) -> bool {
        self.servers.get(&node).is_some_and(|server| {
            server.contents.is_some() && server.link.as_ref().is_some_and(|link| link.migrates)
        })
    }

    /// The places that a server serves of its own, in pointers of the latest of these generations.
    pub(crate) fn held(&self, node: NodeId, generations: GenerationRange) -> Option<Held> {
        let server = self.servers.get(&node)?;
        let home = server.contents?;
        let first = generations.first.max(generations.last.saturating_sub(GENERATIONS_MAX - 1));
        let recent = GenerationRange { first, ..generations };
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
        let rows: Vec<_> = own.iter().flat_map(|(pages, ())| places(recent, pages)).collect();
        (!rows.is_empty()).then_some(Held { home, rows })
    }

    /// Pages in open migrations.
    pub(crate) fn moving(&self) -> Vec<Pages> {
        let of = |pages: &Range<u64>, home| Pages { home, pages: pages.clone() };
        self.open().map(|it| of(&it.record.pages, it.record.home)).collect()
    }
}
