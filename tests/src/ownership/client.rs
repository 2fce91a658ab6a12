//! The threads of client endpoints: their tasks, their requests, and what answers mean to them.

use super::{
    Bug, Event, Scenario, Task,
    state::{
        Answer, Ask, Call, Doing, Held, Message, ModelRack, Outcome, Reply, Request, Thread, Value,
    },
};

impl Thread {
    /// The lease that the thread believes to have, by its clock.
    pub(super) fn believed(&self, local: u8) -> Option<Held> {
        let held = match self.doing {
            Doing::Holding(held) => Some(held),
            Doing::Waiting(call) => call.held,
            Doing::Nothing => None,
        };
        held.filter(|held| local < held.expires)
    }
}

impl ModelRack {
    pub(super) fn task(&self, scenario: &Scenario, thread: u8) -> Option<Task> {
        let at = self.threads[usize::from(thread)].outcomes.len();
        scenario.threads[usize::from(thread)].1.get(at).copied()
    }

    /// What a thread's task leaves in the page.
    pub(super) fn value_of(thread: u8, task: usize) -> Value {
        (thread + 1) << 4 | u8::try_from(task).expect("few tasks")
    }

    /// A thread takes its next step: it begins a task, or goes on with what it holds.
    pub(super) fn proceed(&mut self, scenario: &Scenario, thread: u8) {
        let Some(task) = self.task(scenario, thread) else { return };
        let (ask, held) = match (self.threads[usize::from(thread)].doing, task) {
            (Doing::Waiting(_), _) => return,
            (Doing::Nothing, Task::Add) => (Ask::Add, None),
            (Doing::Nothing, Task::Read) => (Ask::Read, None),
            (Doing::Nothing, Task::StaleRead) => (Ask::StaleRead, None),
            (Doing::Nothing, Task::Abort | Task::Renew | Task::Update) => (Ask::Update, None),
            (Doing::Holding(held), Task::Abort) => (Ask::Abort { epoch: held.epoch }, None),
            (Doing::Holding(held), Task::Renew) if !held.renewed => {
                (Ask::Renew { epoch: held.epoch }, Some(held))
            }
            // No look at the clock: the home judges.
            (Doing::Holding(held), _) => {
                let kept = scenario.has(Bug::ServeReleased).then_some(held);
                (Ask::Commit { epoch: held.epoch, base: held.base }, kept)
            }
        };
        if self.threads[usize::from(thread)].session.is_none() {
            self.open(scenario, thread);
        }
        let home_bit = ask.is_mutating() && ask != Ask::Add;
        let floor = self.witness.floor;
        let call =
            Call { ask, home_bit, tries: 0, sent: 0, held, floor, bounces: 0, home_bounces: 0 };
        self.call(scenario, thread, call);
    }

    /// Sends a request under a new number.
    fn call(&mut self, scenario: &Scenario, thread: u8, call: Call) {
        let sent = self.local(scenario.end_of(thread));
        let state = &mut self.threads[usize::from(thread)];
        state.sequence += 1;
        state.doing = Doing::Waiting(Call { sent, ..call });
        if let Some(request) = self.request_of(scenario, thread) {
            self.send(Message::Request(request));
        }
    }

    /// The request that a thread waits for, as it would be sent now.
    pub(super) fn request_of(&self, scenario: &Scenario, thread: u8) -> Option<Request> {
        let state = &self.threads[usize::from(thread)];
        let Doing::Waiting(Call { ask, home_bit, .. }) = state.doing else { return None };
        let life = self.ends[usize::from(scenario.end_of(thread))].life;
        let session = state.session?;
        let value = Self::value_of(thread, state.outcomes.len());
        Some(Request { thread, life, session, sequence: state.sequence, home_bit, value, ask })
    }

    /// A thread's timer: the same request once more, past all redirects.
    pub(super) fn resend(&mut self, scenario: &Scenario, thread: u8) {
        if let Doing::Waiting(call) = &mut self.threads[usize::from(thread)].doing {
            call.tries += 1;
            call.home_bit = true;
        }
        if let Some(request) = self.request_of(scenario, thread) {
            self.send(Message::Request(request));
        }
    }

    /// A thread's deadline.
    pub(super) fn give_up(&mut self, thread: u8) {
        let Doing::Waiting(call) = self.threads[usize::from(thread)].doing else { return };
        match (call.ask, call.held) {
            (Ask::Renew { .. }, Some(held)) => {
                let held = Held { renewed: true, ..held };
                self.threads[usize::from(thread)].doing = Doing::Holding(held);
            }
            (ask, _) if ask.is_mutating() => self.finish(thread, Outcome::Unknown),
            _ => self.finish(thread, Outcome::NoAnswer),
        }
    }

    pub(super) fn finish(&mut self, thread: u8, outcome: Outcome) {
        let state = &mut self.threads[usize::from(thread)];
        state.outcomes.push(outcome);
        state.doing = Doing::Nothing;
    }

    /// Whether anybody waits for a reply.
    pub(super) fn is_awaited(&self, scenario: &Scenario, reply: &Reply) -> bool {
        let state = &self.threads[usize::from(reply.thread)];
        let life = self.ends[usize::from(scenario.end_of(reply.thread))].life;
        let waits = matches!(state.doing, Doing::Waiting(_));
        waits
            && (reply.life, Some(reply.session), reply.sequence)
                == (life, state.session, state.sequence)
    }

    /// A thread takes a reply.
    pub(super) fn client_receives(&mut self, scenario: &Scenario, reply: &Reply) {
        if !self.is_awaited(scenario, reply) {
            return;
        }
        let thread = reply.thread;
        let Doing::Waiting(call) = self.threads[usize::from(thread)].doing else { return };
        if !reply.from_home && !self.is_taken_from_owner(scenario, reply) {
            let is_no = matches!(reply.answer, Answer::NotOwner | Answer::Busy { queued: false });
            if is_no {
                self.bounce(scenario, thread, reply.home_bit);
            }
            return;
        }
        match reply.answer {
            Answer::Busy { queued: true } | Answer::NotOwner => {}
            Answer::Busy { queued: false } if call.tries < scenario.retries => {
                let call = Call { tries: call.tries + 1, home_bit: true, ..call };
                self.call(scenario, thread, call);
            }
            Answer::Busy { queued: false } => self.finish(thread, Outcome::Busy),
            Answer::Done if matches!(call.ask, Ask::Abort { .. }) => {
                self.finish(thread, Outcome::Aborted);
            }
            Answer::Done => {
                let task = self.threads[usize::from(thread)].outcomes.len();
                let place = self.place(Self::value_of(thread, task)).unwrap_or(0);
                self.witness.floor = self.witness.floor.max(place);
                self.finish(thread, Outcome::Done);
            }
            Answer::Granted { epoch, value, remaining } => {
                self.judge_read(call.floor, value);
                let from = if scenario.has(Bug::CountFromArrival) {
                    self.local(scenario.end_of(thread))
                } else {
                    call.sent
                };
                let held = Held { epoch, base: value, expires: from + remaining, renewed: false };
                self.threads[usize::from(thread)].doing = Doing::Holding(held);
            }
            Answer::LeaseLost(_) if call.ask == Ask::Update => {
                self.finish(thread, Outcome::NoAnswer);
            }
            Answer::LeaseLost(_) => self.finish(thread, Outcome::LeaseLost),
            Answer::NoSession => self.session_is_gone(scenario, thread, call),
            Answer::Read { value, stale: false } => {
                self.judge_read(call.floor, value);
                self.finish(thread, Outcome::Read(value));
            }
            Answer::Read { value, stale: true } => {
                // What an owner serves whose clock runs, or the home, nobody has replaced yet.
                if reply.from_home || self.is_untroubled(scenario) {
                    self.judge_read(call.floor, value);
                }
                self.witness.stale_read |= self.place(value).is_none();
                self.finish(thread, Outcome::Read(value));
            }
            Answer::Renewed { remaining } => {
                let Some(held) = call.held else { return };
                let expires = held.expires.max(call.sent + remaining);
                let held = Held { expires, renewed: true, ..held };
                self.threads[usize::from(thread)].doing = Doing::Holding(held);
            }
        }
    }

    /// What another node than the home may say: the last committed contents to who asked for them,
    /// and whatever a mistake makes it say.
    fn is_taken_from_owner(&self, scenario: &Scenario, reply: &Reply) -> bool {
        match reply.answer {
            Answer::Read { stale, .. } => stale || scenario.has(Bug::OwnerReads),
            Answer::Done => scenario.has(Bug::OwnerExecutes),
            _ => false,
        }
    }

    /// A redirect led astray: the home at once, under the same number, unless it was asked since.
    fn bounce(&mut self, scenario: &Scenario, thread: u8, home_bit: bool) {
        scenario.note(Event::Bounced);
        let Doing::Waiting(call) = &mut self.threads[usize::from(thread)].doing else { return };
        if call.home_bit && !home_bit {
            return;
        }
        call.bounces = (call.bounces + 1).min(3);
        call.home_bounces = (call.home_bounces + u8::from(home_bit)).min(2);
        call.home_bit = true;
        if let Some(request) = self.request_of(scenario, thread) {
            self.send(Message::Request(request));
        }
    }

    /// Whether no owner has believed in a lease that its home did not keep: no clock stood still,
    /// and no home forgot its leases.
    fn is_untroubled(&self, scenario: &Scenario) -> bool {
        let budget = self.budget;
        (budget.freezes, budget.home_crashes) == (scenario.freezes, scenario.home_crashes)
    }

    fn session_is_gone(&mut self, scenario: &Scenario, thread: u8, call: Call) {
        self.threads[usize::from(thread)].session = None;
        if call.ask.is_mutating() && !scenario.has(Bug::BlindRetry) {
            return self.finish(thread, Outcome::Unknown);
        }
        self.open(scenario, thread);
        self.call(scenario, thread, call);
    }

    /// What an answer that is not called stale must not be: older than what was known before, or
    /// never there.
    fn judge_read(&mut self, floor: u8, value: Value) {
        let place = self.place(value);
        self.witness.stale_read |= place.is_none_or(|place| place < floor);
        self.witness.floor = self.witness.floor.max(place.unwrap_or(0));
    }

    /// The processes of an endpoint die and start again.
    pub(super) fn client_crashes(&mut self, scenario: &Scenario, end: u8) {
        self.ends[usize::from(end)].life += 1;
        for thread in 0..u8::try_from(self.threads.len()).expect("few threads") {
            if scenario.end_of(thread) != end {
                continue;
            }
            self.threads[usize::from(thread)].session = None;
            if self.threads[usize::from(thread)].doing != Doing::Nothing {
                self.finish(thread, Outcome::Crashed);
            }
        }
    }
}
