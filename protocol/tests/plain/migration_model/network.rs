//! Messages on their way.

use super::{
    Mutant, Scenario,
    messages::{Answer, Message, Request},
    world::World,
};

/// What happens to a message when it arrives.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Fate {
    Plain,
    /// It arrives again later.
    Stays,
    /// It arrives again later, and the answer to this one is lost.
    Lingers,
    /// Its answer is lost.
    Mute,
}

impl Scenario {
    /// A message arrives at a server.
    pub(super) fn arrive(
        &self,
        world: &mut World,
        (at, server): (usize, u8),
        fate: Fate,
    ) -> Option<()> {
        let message = *world.network.get(at)?;
        match fate {
            Fate::Stays => world.faults.copies = world.faults.copies.checked_sub(1)?,
            Fate::Lingers => {
                world.faults.copies = world.faults.copies.checked_sub(1)?;
                world.faults.losses = world.faults.losses.checked_sub(1)?;
            }
            Fate::Mute => {
                world.faults.losses = world.faults.losses.checked_sub(1)?;
                world.network.remove(at);
            }
            Fate::Plain => {
                world.network.remove(at);
            }
        }
        let has_answer = matches!(fate, Fate::Plain | Fate::Stays);
        match message {
            Message::Request(request) => {
                if !request.to_pointer && request.server != server {
                    return None;
                }
                let answer = self.serve(world, server, request);
                if let Some(answer) = answer
                    && has_answer
                {
                    self.hear(world, server, request, answer);
                }
                // A request that must wait stays.
                answer.or_else(|| self.is_given_up(world, &request).then_some(Answer::Done))?;
            }
            Message::Keep(keep) => {
                if server != self.migrations[usize::from(keep.migration)].0 {
                    return None;
                }
                let kept = self.keep(world, server, keep);
                if has_answer {
                    world.send(Message::Kept(kept));
                }
            }
            Message::Kept(kept) => {
                let keep = kept.keep;
                if server != self.migrations[usize::from(keep.migration)].1 {
                    return None;
                }
                if has_answer {
                    self.hear_kept(world, server, &kept);
                }
            }
        }
        Some(())
    }

    /// Somebody answers a first try with MOVED.
    pub(super) fn lie(&self, world: &mut World, at: usize) -> Option<()> {
        let Message::Request(request) = *world.network.get(at)? else { return None };
        if !request.to_pointer || request.server == 1 {
            return None;
        }
        world.faults.lies = world.faults.lies.checked_sub(1)?;
        world.network.remove(at);
        self.hear(world, 2, request, Answer::Moved(1));
        Some(())
    }

    fn is_given_up(&self, world: &World, request: &Request) -> bool {
        request.number < world.client(request.client).number
    }

    /// Removes what could not have an effect any more.
    pub(super) fn tidy(&self, world: &mut World) {
        let mut network = core::mem::take(&mut world.network);
        network.retain(|message| match message {
            Message::Request(request) => {
                let server = world.server(request.server);
                let session = server.sessions[usize::from(request.client)];
                let can_run = session.is_some_and(|session| {
                    session.low < request.number
                        || session.low == request.number && session.answer.is_none()
                });
                self.is_awaited(world, request)
                    || self.is_given_up(world, request)
                        && can_run
                        && request.incarnation == server.incarnation
            }
            Message::Keep(keep) => {
                self.is_keep_awaited(world, keep) || self.is_keep_valid(world, keep)
            }
            Message::Kept(kept) => {
                self.is_kept_awaited(world, kept) || self.has(Mutant::LostOfAnyLease)
            }
        });
        world.network = network;
    }
}
