//! The threads of client endpoints: their tasks, their requests, and how they handle responses.

use super::{
    Bug, Event, Scenario, Task,
    state::{
        Call, Doing, Held, Message, ModelRack, Operation, Outcome, Reply, Request, Response,
        Thread, Value,
    },
};

impl Thread {
    /// The unexpired lease of the thread, by its clock.
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

    /// The value that a thread's task writes to the page.
    pub(super) fn value_of(thread: u8, task: usize) -> Value {
        (thread + 1) << 4 | u8::try_from(task).expect("few tasks")
    }

    /// The next step of a thread: it begins a task, or continues under its lease.
    pub(super) fn proceed(&mut self, scenario: &Scenario, thread: u8) {
        let Some(task) = self.task(scenario, thread) else { return };
        let (operation, held) = match (self.threads[usize::from(thread)].doing, task) {
            (Doing::Waiting(_), _) => return,
            (Doing::Nothing, Task::Add) => (Operation::Add, None),
            (Doing::Nothing, Task::Read) => (Operation::Read, None),
            (Doing::Nothing, Task::StaleRead) => (Operation::StaleRead, None),
            (Doing::Nothing, Task::Abort | Task::Renew | Task::Update) => (Operation::Update, None),
            (Doing::Holding(held), Task::Abort) => (Operation::Abort { epoch: held.epoch }, None),
            (Doing::Holding(held), Task::Renew) if !held.renewed => {
                (Operation::Renew { epoch: held.epoch }, Some(held))
            }
            // The client does not check its clock: the home decides.
            (Doing::Holding(held), _) => {
                let kept = scenario.has(Bug::ServeReleased).then_some(held);
                (Operation::Commit { epoch: held.epoch, base: held.base }, kept)
            }
        };
        if self.threads[usize::from(thread)].session.is_none() {
            self.open(scenario, thread);
        }
        let home_bit = operation.is_mutating() && operation != Operation::Add;
        let floor = self.witness.floor;
        let call = Call {
            operation,
            home_bit,
            tries: 0,
            sent: 0,
            held,
            floor,
            bounces: 0,
            home_bounces: 0,
        };
        self.call(scenario, thread, call);
    }

    /// Sends a request with a new number.
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
        let Doing::Waiting(Call { operation, home_bit, .. }) = state.doing else { return None };
        let life = self.ends[usize::from(scenario.end_of(thread))].life;
        let session = state.session?;
        let value = Self::value_of(thread, state.outcomes.len());
        Some(Request {
            thread,
            life,
            session,
            sequence: state.sequence,
            home_bit,
            value,
            operation,
        })
    }

    /// The timer of a thread: the same request again, with the home bit.
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
    pub(super) fn time_out(&mut self, thread: u8) {
        let Doing::Waiting(call) = self.threads[usize::from(thread)].doing else { return };
        match (call.operation, call.held) {
            (Operation::Renew { .. }, Some(held)) => {
                let held = Held { renewed: true, ..held };
                self.threads[usize::from(thread)].doing = Doing::Holding(held);
            }
            (operation, _) if operation.is_mutating() => self.finish(thread, Outcome::Unknown),
            _ => self.finish(thread, Outcome::NoResponse),
        }
    }

    pub(super) fn finish(&mut self, thread: u8, outcome: Outcome) {
        let state = &mut self.threads[usize::from(thread)];
        state.outcomes.push(outcome);
        state.doing = Doing::Nothing;
    }

    /// Whether a thread waits for the reply.
    pub(super) fn is_awaited(&self, scenario: &Scenario, reply: &Reply) -> bool {
        let state = &self.threads[usize::from(reply.thread)];
        let life = self.ends[usize::from(scenario.end_of(reply.thread))].life;
        let waits = matches!(state.doing, Doing::Waiting(_));
        waits
            && (reply.life, Some(reply.session), reply.sequence)
                == (life, state.session, state.sequence)
    }

    /// A thread receives a reply.
    pub(super) fn client_receives(&mut self, scenario: &Scenario, reply: &Reply) {
        if !self.is_awaited(scenario, reply) {
            return;
        }
        let thread = reply.thread;
        let Doing::Waiting(call) = self.threads[usize::from(thread)].doing else { return };
        if !reply.from_home && !self.is_taken_from_owner(scenario, reply) {
            let is_no =
                matches!(reply.response, Response::NotOwner | Response::Busy { queued: false });
            if is_no {
                self.bounce(scenario, thread, reply.home_bit);
            }
            return;
        }
        match reply.response {
            Response::Busy { queued: true } | Response::NotOwner => {}
            Response::Busy { queued: false } if call.tries < scenario.retries => {
                let call = Call { tries: call.tries + 1, home_bit: true, ..call };
                self.call(scenario, thread, call);
            }
            Response::Busy { queued: false } => self.finish(thread, Outcome::Busy),
            Response::Done if matches!(call.operation, Operation::Abort { .. }) => {
                self.finish(thread, Outcome::Aborted);
            }
            Response::Done => {
                let task = self.threads[usize::from(thread)].outcomes.len();
                let place = self.place(Self::value_of(thread, task)).unwrap_or(0);
                self.witness.floor = self.witness.floor.max(place);
                self.finish(thread, Outcome::Done);
            }
            Response::Granted { epoch, value, remaining } => {
                self.judge_read(call.floor, value);
                let from = if scenario.has(Bug::CountFromArrival) {
                    self.local(scenario.end_of(thread))
                } else {
                    call.sent
                };
                let held = Held { epoch, base: value, expires: from + remaining, renewed: false };
                self.threads[usize::from(thread)].doing = Doing::Holding(held);
            }
            Response::LeaseLost(_) if call.operation == Operation::Update => {
                self.finish(thread, Outcome::NoResponse);
            }
            Response::LeaseLost(_) => self.finish(thread, Outcome::LeaseLost),
            Response::NoSession => self.session_is_gone(scenario, thread, call),
            Response::Read { value, stale: false } => {
                self.judge_read(call.floor, value);
                self.finish(thread, Outcome::Read(value));
            }
            Response::Read { value, stale: true } => {
                // Stale contents from the home, or from an owner whose clock runs, have not been
                // replaced yet.
                if reply.from_home || self.is_untroubled(scenario) {
                    self.judge_read(call.floor, value);
                }
                self.witness.stale_read |= self.place(value).is_none();
                self.finish(thread, Outcome::Read(value));
            }
            Response::Renewed { remaining } => {
                let Some(held) = call.held else { return };
                let expires = held.expires.max(call.sent + remaining);
                let held = Held { expires, renewed: true, ..held };
                self.threads[usize::from(thread)].doing = Doing::Holding(held);
            }
        }
    }

    /// Whether a reply of another node than the home is accepted: last committed contents that were
    /// requested, and what a bug allows.
    fn is_taken_from_owner(&self, scenario: &Scenario, reply: &Reply) -> bool {
        match reply.response {
            Response::Read { stale, .. } => stale || scenario.has(Bug::OwnerReads),
            Response::Done => scenario.has(Bug::OwnerExecutes),
            _ => false,
        }
    }

    /// The redirect was wrong: send to the home at once, under the same number, unless that was
    /// done since.
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

    /// Whether no owner can have used a lease that its home had ended: no clock stood still, and
    /// the home was not restarted.
    fn is_untroubled(&self, scenario: &Scenario) -> bool {
        let budget = self.budget;
        (budget.freezes, budget.home_crashes) == (scenario.freezes, scenario.home_crashes)
    }

    fn session_is_gone(&mut self, scenario: &Scenario, thread: u8, call: Call) {
        self.threads[usize::from(thread)].session = None;
        if call.operation.is_mutating() && !scenario.has(Bug::BlindRetry) {
            return self.finish(thread, Outcome::Unknown);
        }
        self.open(scenario, thread);
        self.call(scenario, thread, call);
    }

    /// A value that is not marked stale must not be older than a value that was known before, and
    /// must have been in the page.
    fn judge_read(&mut self, floor: u8, value: Value) {
        let place = self.place(value);
        self.witness.stale_read |= place.is_none_or(|place| place < floor);
        self.witness.floor = self.witness.floor.max(place.unwrap_or(0));
    }

    /// The processes of an endpoint crash and start again.
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
