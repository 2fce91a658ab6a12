//! The checks at the end of a run.

use super::Ledger;
use crate::sim::{
    model::subset_sums,
    region::{Contents, Region, State},
};

impl Ledger {
    /// Checks the history of every register and cell.
    pub(in crate::sim) fn check_histories(&self) -> Result<(), String> {
        for region in &self.regions {
            let at = |error: String| format!("{}: {error}", region.pointer);
            match &region.contents {
                Contents::Private(_) => {}
                Contents::Shared(registers) => {
                    for (page, register) in registers.iter().enumerate() {
                        let at = |error| at(format!("page {page}: {error}"));
                        register.check().map_err(at)?;
                    }
                }
                Contents::Cells { adds, swaps, .. } => {
                    adds.iter().try_for_each(|cell| cell.check(None).map_err(at))?;
                    swaps.iter().try_for_each(|cell| cell.check(None).map_err(at))?;
                }
            }
        }
        Ok(())
    }

    /// Checks that a server has exactly the pages that the clients know.
    pub(in crate::sim) fn check_usage(&self, server: usize, used_pages: u64) -> Result<(), String> {
        let facts = &self.servers[server];
        let here = |region: &&Region| region.server == server && facts.is_of_now(region.pointer);
        let pages_of = |state: State| {
            let regions = self.regions.iter().filter(here);
            regions
                .filter(move |region| region.state == state)
                .map(|region| u64::from(region.pages))
        };
        let live = pages_of(State::Live).sum();
        let mut doubtful: Vec<_> = pages_of(State::Doubtful).collect();
        doubtful.extend(facts.orphans.iter().chain(&facts.zombies));
        if subset_sums(live, &doubtful).contains(&used_pages) {
            return Ok(());
        }
        Err(format!(
            "node {} uses {used_pages} pages; {live} are known, and perhaps some of {doubtful:?}",
            facts.node
        ))
    }
}
