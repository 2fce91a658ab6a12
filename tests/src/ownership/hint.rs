//! The switch and the controller: hints that lead requests to an owner's endpoint, and what that
//! endpoint answers.

use super::{
    Bug, Event, Policy, Scenario,
    state::{Answer, Ask, Copy, Held, Message, ModelRack, Redirect, Reply, Request},
};

impl ModelRack {
    /// Whose endpoint the switch sends a request to; `None`: the home.
    pub(super) fn route(&self, scenario: &Scenario, request: &Request) -> Option<u8> {
        let owner = self.redirect?.owner;
        let passes_over = request.home_bit
            && !scenario.has(Bug::BlindController)
            && !(scenario.has(Bug::RedirectCommit) && matches!(request.ask, Ask::Commit { .. }));
        (!passes_over).then_some(owner)
    }

    /// Whether a copy still changes what the controller does.
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

    /// An endpoint answers a request that a redirect led to it.
    pub(super) fn owner_receives(&mut self, scenario: &Scenario, end: u8, request: &Request) {
        let held = (0..).zip(&self.threads).find_map(|(thread, state)| {
            let is_here = scenario.end_of(thread) == end;
            state.believed(self.local(end)).filter(|_| is_here).map(|held| (thread, held))
        });
        let answer = match (held, request.ask) {
            (_, Ask::Add) if scenario.has(Bug::OwnerExecutes) => Answer::Done,
            (Some((_, held)), Ask::Read) if scenario.has(Bug::OwnerReads) => {
                Answer::Read { value: held.base, stale: false }
            }
            (None, _) => Answer::NotOwner,
            (Some((_, held)), Ask::StaleRead) if scenario.policy == Policy::Serve => {
                scenario.note(Event::ServedByOwner);
                self.judge_served(end, &held);
                Answer::Read { value: held.base, stale: true }
            }
            (Some(_), _) => Answer::Busy { queued: scenario.policy == Policy::Wait },
        };
        let Request { thread, life, session, sequence, home_bit, .. } = *request;
        let from_home = false;
        let reply = Reply { thread, life, session, sequence, from_home, home_bit, answer };
        self.send(Message::Reply(reply));
    }

    /// What an owner serves is what the home has at that moment, unless the owner's clock stands
    /// still or the home began anew since its grant.
    fn judge_served(&mut self, end: u8, held: &Held) {
        let runs = self.ends[usize::from(end)].frozen.is_none();
        let is_known = held.epoch >> 4 == self.home.life;
        self.witness.stale_read |= runs && is_known && held.base != self.home.value;
    }
}
