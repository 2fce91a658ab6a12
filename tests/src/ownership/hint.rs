//! The switch and the controller: redirects to an owner's endpoint, and the responses of that
//! endpoint.

use super::{
    Bug, Event, Policy, Scenario,
    state::{Copy, Held, Message, ModelRack, Operation, Redirect, Reply, Request, Response},
};

impl ModelRack {
    /// The endpoint to which the switch sends a request; `None`: the home.
    pub(super) fn route(&self, scenario: &Scenario, request: &Request) -> Option<u8> {
        let owner = self.redirect?.owner;
        let passes_over = request.home_bit
            && !scenario.has(Bug::BlindController)
            && !(scenario.has(Bug::RedirectCommit)
                && matches!(request.operation, Operation::Commit { .. }));
        (!passes_over).then_some(owner)
    }

    /// Whether a copy changes the controller's state.
    pub(super) fn is_news(&self, scenario: &Scenario, copy: &Copy) -> bool {
        if scenario.has(Bug::BlindController) {
            return !copy.releases;
        }
        copy.epoch >= self.known_epoch && (copy.releases || self.now < copy.until)
    }

    pub(super) fn controller_receives(&mut self, scenario: &Scenario, copy: Copy) {
        if !self.is_news(scenario, &copy) {
            return;
        }
        self.known_epoch = self.known_epoch.max(copy.epoch);
        let Copy { epoch, owner, until, releases } = copy;
        self.redirect = (!releases).then_some(Redirect { owner, epoch, until });
    }

    /// An endpoint responds to a redirected request.
    pub(super) fn owner_receives(&mut self, scenario: &Scenario, end: u8, request: &Request) {
        let held = (0..).zip(&self.threads).find_map(|(thread, state)| {
            let is_here = scenario.end_of(thread) == end;
            state.believed(self.local(end)).filter(|_| is_here).map(|held| (thread, held))
        });
        let response = match (held, request.operation) {
            (_, Operation::Add) if scenario.has(Bug::OwnerExecutes) => Response::Done,
            (Some((_, held)), Operation::Read) if scenario.has(Bug::OwnerReads) => {
                Response::Read { value: held.base, stale: false }
            }
            (None, _) => Response::NotOwner,
            (Some((_, held)), Operation::StaleRead) if scenario.policy == Policy::Serve => {
                scenario.note(Event::ServedByOwner);
                self.judge_served(end, &held);
                Response::Read { value: held.base, stale: true }
            }
            (Some(_), _) => Response::Busy { queued: scenario.policy == Policy::Wait },
        };
        let Request { thread, life, session, sequence, home_bit, .. } = *request;
        let from_home = false;
        let reply = Reply { thread, life, session, sequence, from_home, home_bit, response };
        self.send(Message::Reply(reply));
    }

    /// The value that an owner serves must be the home's value at that moment, unless the owner's
    /// clock stands still or the home restarted since its grant.
    fn judge_served(&mut self, end: u8, held: &Held) {
        let runs = self.ends[usize::from(end)].frozen.is_none();
        let is_known = held.epoch >> 4 == self.home.life;
        self.witness.stale_read |= runs && is_known && held.base != self.home.value;
    }
}
