//! The server is killed, and the next process takes its memory over.

use super::{
    Mutant, PAGES, Scenario,
    server::{Store, freeing},
    world::{Change, Holds, Kind, Part, Role, Server, World},
};

impl Scenario {
    /// The server's process ends. It loses none of its stores.
    pub(super) fn crash(&self, world: &mut World) -> Option<()> {
        world.crashes = world.crashes.checked_sub(1)?;
        world.server.take()?;
        world.record.lease = 0;
        Some(())
    }

    /// The next process begins.
    pub(super) fn start(&self, world: &mut World) -> Option<()> {
        if world.server.is_some() {
            return None;
        }
        let mut todo = vec![
            Store::Detach,
            Store::AllOdd,
            Store::Repeat,
            Store::AllEven,
            Store::End,
            Store::FreeIncomplete,
            Store::Forget,
            Store::Join,
            Store::Attach,
        ];
        todo.retain(|store| match store {
            Store::Detach => {
                !self.has(Mutant::AttachedEarly) && !self.has(Mutant::AttachedEarlySequenced)
            }
            Store::AllOdd => {
                self.has(Mutant::DetachedBlindSequenced) || self.has(Mutant::AttachedEarlySequenced)
            }
            Store::AllEven => !self.has(Mutant::SequenceLeftOdd),
            Store::Join => !self.has(Mutant::NotJoined),
            _ => true,
        });
        world.server = Some(Server { todo, ..Server::default() });
        Some(())
    }

    /// A step of the takeover.
    pub(super) fn recover(&self, world: &mut World, store: Store) -> Option<()> {
        match store {
            Store::Detach => {
                // It waits until no reader runs.
                let is_blind =
                    self.has(Mutant::DetachedBlind) || self.has(Mutant::DetachedBlindSequenced);
                if !is_blind && world.readers.iter().any(Option::is_some) {
                    return None;
                }
                world.is_attached = false;
            }
            Store::Repeat => {
                let stores = match world.redo {
                    None => Vec::new(),
                    Some(Change::Pages(parts)) => self.repeated(world, &parts),
                    Some(Change::Create(tag)) => unsequenced(self.create(world, tag)),
                    Some(Change::Delete) => unsequenced(self.delete()),
                };
                world.server.as_mut()?.todo.splice(0..0, stores);
            }
            Store::AllOdd => {
                for page in &mut world.pages {
                    page.sequence += 1 - page.sequence % 2;
                }
            }
            Store::AllEven => {
                for page in &mut world.pages {
                    page.sequence += page.sequence % 2;
                }
            }
            Store::FreeIncomplete => {
                let Kind { role, is_complete, .. } = world.pages[0].kind;
                if role == Role::Head && !is_complete {
                    let tag = world.pages[0].tag;
                    for page in 0..self.pages {
                        let moments = &world.record.moments[page];
                        let known = moments[usize::from(world.record.floor[page])].tag;
                        world.witness.is_lost |= known == tag;
                    }
                    let mut stores = vec![freeing()];
                    stores.extend(self.delete());
                    stores.push(Store::End);
                    world.server.as_mut()?.todo.splice(0..0, stores);
                }
            }
            Store::Forget => {
                let mut stores = Vec::new();
                for page in 0..self.pages {
                    if !self.has(Mutant::MovesForgotten) {
                        stores.push(Store::MarkElsewhere { page });
                    }
                    if !self.has(Mutant::MarksKept) {
                        stores.push(Store::Mark { page, is_leased: false });
                    }
                    // The process may have been killed while it zeroed the page.
                    if world.pages[page].kind.role == Role::Free {
                        stores.push(Store::Holds { page, holds: Holds::Written });
                    }
                }
                for (slot, this) in world.slots.iter().enumerate().filter(|(_, of)| of.id != 0) {
                    if !self.has(Mutant::SessionsKept) {
                        stores.push(Store::Hide { slot });
                    }
                    stores.push(Store::Ended { id: this.id });
                }
                world.server.as_mut()?.todo.splice(0..0, stores);
            }
            Store::Join => world.incarnation += 1,
            Store::Attach => {
                world.is_attached = true;
                self.look(world);
            }
            _ => unreachable!("it is no step of a takeover"),
        }
        Some(())
    }

    /// Whether the memory has what clients know of.
    fn look(&self, world: &mut World) {
        // Another server has what clients know.
        if world.is_given {
            return;
        }
        for page in 0..self.pages {
            let this = world.pages[page];
            let tag = if this.kind.role == Role::Free { 0 } else { this.tag };
            let floor = world.record.floor[page];
            world.witness.is_lost |=
                world.moment(page, floor, tag, this.served(world.frame)).is_none();
        }
    }

    /// The stores that write pages again.
    fn repeated(&self, world: &World, parts: &[Option<Part>; PAGES]) -> Vec<Store> {
        let mut stores = Vec::new();
        for part in parts.iter().flatten() {
            let mut part = *part;
            let this = world.pages[part.page];
            let takes_kind =
                self.has(Mutant::RedoTakesKind) || self.has(Mutant::StateFirstRedoTakesKind);
            if takes_kind {
                part.before = this.kind.holds;
            }
            if self.has(Mutant::RedoAdds) {
                part.new = [Some(this.served(world.frame)[0] + 1), None];
            }
            stores.extend(self.contents(&part));
        }
        stores
    }
}

/// A takeover makes all sequences even at the end, and needs none before.
fn unsequenced(mut stores: Vec<Store>) -> Vec<Store> {
    stores.retain(|store| !matches!(store, Store::Odd(_) | Store::Even(_)));
    stores
}
