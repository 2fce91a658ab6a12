//! Free lines of contents that the home has lost: nobody can allocate their pages any more, so nobody needs them.

use super::{
    Mutant, PAGES, SERVERS, Scenario,
    lines::{Copy, LEFTOVER, Link, Page, Slot},
    world::{Forward, HOME, Stage, World, index},
};

impl Scenario {
    /// Whether a server has a line of the home's first contents of which no page is allocated, and the home has lost them.
    fn is_useless(&self, world: &World, server: u8, line: u8) -> bool {
        let is_free = |copy: &Copy| {
            let pages = if self.has(Mutant::DiscardedInUse) { 1 } else { self.pages };
            copy.pages.iter().take(pages).all(|page| page.link == Link::Free)
        };
        world.generation > 1 && world.served(server, line, 1).is_some_and(is_free)
    }

    /// The controller hears of such a line, and records that nobody has it. It is the home's answer from then on.
    pub(super) fn strike(&self, world: &mut World, line: u8) -> Option<()> {
        let Forward::At(server) = world.forwards[usize::from(line)] else { return None };
        let is_open = world.stage != Stage::Closed;
        let is_known = !world.server(server).is_loss_unknown;
        if is_open || !is_known || !self.is_useless(world, server, line) {
            return None;
        }
        world.forwards[usize::from(line)] = Forward::Gone;
        Some(())
    }

    /// The server of such a line forgets it. The home knows before that nobody has it.
    pub(super) fn discard(&self, world: &mut World, line: u8) -> Option<()> {
        let is_early = self.has(Mutant::DiscardedEarly);
        let is_known = world.forwards[usize::from(line)] == Forward::Gone;
        let is_open = world.stage != Stage::Closed;
        if is_open || !is_known && !is_early {
            return None;
        }
        let mut servers = 1..index(SERVERS);
        let server = servers.find(|server| self.is_useless(world, *server, line))?;
        world.is_discarded[usize::from(line)] = !self.is_needed(world, server, line);
        *world.slot_mut(server, line) = Slot::default();
        self.release_frames(world, server, line);
        Some(())
    }

    /// A line of the home was lost with another server's memory, and no page of it is allocated any more: the home, which
    /// knows the last tags, has it again, without contents.
    pub(super) fn reclaim(&self, world: &mut World, line: u8) -> Option<()> {
        let is_lost = world.forwards[usize::from(line)] == Forward::Gone;
        let is_open = world.stage != Stage::Closed;
        let freeing = world.servers.iter().any(|server| server.freeing.is_some());
        if world.generation > 1 || world.is_gone || !is_lost || is_open || freeing {
            return None;
        }
        let truth = world.truth[0][usize::from(line)];
        let is_allocated = truth.iter().take(self.pages).any(|page| page.link != Link::Free);
        if is_allocated && !self.has(Mutant::ReclaimedInUse) {
            return None;
        }
        let mut pages = [Page { value: LEFTOVER, ..Page::default() }; PAGES];
        for (page, of) in self.page_numbers().zip(truth) {
            pages[usize::from(page)].tag = if self.has(Mutant::ReclaimedTags) { 0 } else { of.tag };
            // Versions begin again, with other tags.
            let of = world.truth_mut(1, line, page);
            (of.value, of.versions) = (0, Default::default());
        }
        let copy = Some(Copy { generation: 1, floor: 0, pages });
        *world.slot_mut(HOME, line) = Slot { copy, ..Slot::default() };
        world.forwards[usize::from(line)] = Forward::Own;
        // What was reported as lost has other tags.
        (world.is_lost[usize::from(line)], world.gone[usize::from(line)]) = (false, false);
        Some(())
    }

    /// Whether a server has a line with a page that is allocated, or that may be allocated again.
    pub(super) fn is_needed(&self, world: &World, server: u8, line: u8) -> bool {
        let is_used =
            |copy: &Copy| copy.pages.iter().take(self.pages).any(|page| page.link != Link::Free);
        let copy = world.served(server, line, 1);
        copy.is_some_and(|copy| world.generation == 1 || is_used(copy))
    }
}
