//! What servers serve, as places.

use std::ops::Range;

use bluebridge_wire::NodeId;
use bluebridge_wire::address::{LINE_PAGES, PAGE_SHIFT, SHARD_SHIFT};

use super::{Held, Pages, places};
use crate::migration::{GenerationRange, Migrations, PageMap};

const LINE: u64 = LINE_PAGES as u64;
const SHARD: u64 = 1 << (SHARD_SHIFT - PAGE_SHIFT);

/// The most generations of a server whose pointers are told apart, the latest ones: a rack that frees much has more.
const GENERATIONS_MAX: u16 = 64;

impl Migrations {
    /// Whether a server can take part in migrations now.
    pub(crate) fn can_migrate(&self, node: NodeId) -> bool {
        self.servers.get(&node).is_some_and(|server| {
            server.contents.is_some() && server.link.as_ref().is_some_and(|link| link.migrates)
        })
    }

    /// The places that a server serves, by home. `generations` are those of its own pages.
    pub(crate) fn held(&self, node: NodeId, generations: GenerationRange) -> Vec<Held> {
        let Some((server, contents)) =
            self.servers.get(&node).and_then(|server| Some((server, server.contents?)))
        else {
            return Vec::new();
        };
        let recent = |of: GenerationRange| GenerationRange {
            first: of.first.max(of.last.saturating_sub(GENERATIONS_MAX - 1)),
            last: of.last,
        };
        let mut all = Vec::new();
        // A shard has addresses for twice its memory.
        let of_memory = server.capacity_pages / u64::from(server.shard_count.max(1)) / LINE * LINE;
        let addresses = (2 * of_memory).min(SHARD);
        let mut own: PageMap<()> = (0..u64::from(server.shard_count))
            .map(|shard| (shard * SHARD..shard * SHARD + addresses, ()))
            .collect();
        if let Some(of) = self.elsewhere.get(&contents) {
            let rows = of.record.rows.iter().map(|(pages, _)| pages);
            rows.chain(of.record.lost.iter().map(|(pages, ())| pages))
                .for_each(|it| own.remove(it));
        }
        let own_rows = own.iter().flat_map(|(pages, ())| places(recent(generations), pages));
        all.push(Held { home: contents, rows: own_rows.collect() });
        for (home, of) in &self.elsewhere {
            let here = of.record.rows.iter().filter(|(_, placed)| placed.at == contents);
            let rows: Vec<_> = here
                .flat_map(|(pages, placed)| places(recent(placed.generations), pages))
                .collect();
            if !rows.is_empty() && *home != contents {
                all.push(Held { home: *home, rows });
            }
        }
        all.retain(|held| !held.rows.is_empty());
        all
    }

    /// Pages in open migrations.
    pub(crate) fn moving(&self) -> Vec<Pages> {
        let of = |pages: &Range<u64>, home| Pages { home, pages: pages.clone() };
        self.open().map(|it| of(&it.record.pages, it.record.home)).collect()
    }
}
