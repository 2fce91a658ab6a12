//! The home: sessions, recorded answers, the lease and who waits for it.

use super::{
    Bug, Copies, Event, Scenario,
    state::{
        Answer, Ask, Copy, End, Epoch, Lease, Message, ModelRack, Record, Reply, Request, Session,
        Waiter,
    },
};

/// Ticks for which a waiting request need not be repeated.
const PATIENCE: u8 = 1;

impl ModelRack {
    /// A thread opens a session; the home learns of its endpoint's incarnation.
    pub(super) fn open(&mut self, scenario: &Scenario, thread: u8) {
        let end = usize::from(scenario.end_of(thread));
        let life = self.ends[end].life;
        let session = Session { life, low: 0, record: None };
        self.home.sessions[usize::from(thread)] = Some(session);
        self.home.lives[end] = life;
        let thread = &mut self.threads[usize::from(thread)];
        (thread.session, thread.sequence) = (Some(self.home.life), 0);
        let is_older = |lease: &Lease| usize::from(lease.owner) == end && lease.life < life;
        if self.home.lease.as_ref().is_some_and(is_older) {
            self.release(scenario, End::Superseded);
        }
    }

    /// Whether a request can have no effect at the home any more.
    pub(super) fn is_below_low_water(&self, request: &Request) -> bool {
        self.session_of(request).is_some_and(|session| request.sequence < session.low)
    }

    pub(super) fn session_of(&self, request: &Request) -> Option<Session> {
        let session = self.home.sessions[usize::from(request.thread)]?;
        let is_its = request.session == self.home.life && session.life == request.life;
        is_its.then_some(session)
    }

    /// The home takes a request.
    pub(super) fn home_receives(&mut self, scenario: &Scenario, request: &Request) {
        let end = usize::from(scenario.end_of(request.thread));
        if request.life < self.home.lives[end] {
            return;
        }
        let Some(session) = self.session_of(request) else {
            return self.reply(request, Answer::NoSession);
        };
        if request.sequence < session.low {
            return;
        }
        if request.sequence > session.low {
            let session = Session { low: request.sequence, record: None, ..session };
            self.home.sessions[usize::from(request.thread)] = Some(session);
            self.home.queue.retain(|waiter| waiter.request.thread != request.thread);
        } else if let Some(record) = session.record
            && !scenario.has(Bug::ForgetAnswers)
        {
            let answer = self.repeated(scenario, record);
            return self.answer(scenario, request, answer);
        }
        let answer = self.execute(scenario, request);
        if request.ask.is_mutating() {
            self.record(request, Record::Answer(answer));
        }
        self.answer(scenario, request, answer);
    }

    fn repeated(&self, scenario: &Scenario, record: Record) -> Answer {
        match record {
            Record::Answer(answer) => {
                scenario.note(Event::AnswerRepeated);
                answer
            }
            Record::Grant(epoch) => match self.home.lease {
                Some(lease) if lease.epoch == epoch => {
                    scenario.note(Event::GrantRepeated);
                    let remaining = lease.deadline.saturating_sub(self.now);
                    Answer::Granted { epoch, value: self.home.value, remaining }
                }
                _ => Answer::LeaseLost(self.how_ended(epoch)),
            },
        }
    }

    fn how_ended(&self, epoch: Epoch) -> End {
        match self.home.last {
            Some((lease, how)) if lease.epoch == epoch => how,
            _ => End::Unknown,
        }
    }

    fn execute(&mut self, scenario: &Scenario, request: &Request) -> Answer {
        let end = scenario.end_of(request.thread);
        let holds = |epoch: Epoch, lease: &Lease| {
            lease.owner == end && lease.life == request.life && lease.epoch == epoch
        };
        match request.ask {
            Ask::Abort { epoch } | Ask::Commit { epoch, .. } | Ask::Renew { epoch } => {
                let lease = self.home.lease;
                let is_held = lease.is_some_and(|lease| holds(epoch, &lease))
                    || self.is_held_by_mistake(scenario, request, epoch);
                if !is_held {
                    let how = self.how_ended(epoch);
                    if matches!(request.ask, Ask::Commit { .. }) && how == End::RanOut {
                        scenario.note(Event::LateCommit);
                    }
                    return Answer::LeaseLost(how);
                }
                match request.ask {
                    Ask::Commit { base, .. } => {
                        self.witness.lost_update |= self.home.value != base;
                        self.change(request);
                        self.release(scenario, End::Committed);
                        Answer::Done
                    }
                    Ask::Renew { .. } => {
                        let deadline = self.now + scenario.lease;
                        if let Some(lease) = &mut self.home.lease {
                            lease.deadline = deadline;
                        }
                        Answer::Renewed { remaining: scenario.lease }
                    }
                    _ => {
                        self.release(scenario, End::Aborted);
                        Answer::Done
                    }
                }
            }
            Ask::StaleRead => Answer::Read { value: self.home.value, stale: true },
            Ask::Read if scenario.has(Bug::ServeUncommitted) => {
                let ahead = self.home.lease.map(|lease| 0xf0 | lease.epoch);
                Answer::Read { value: ahead.unwrap_or(self.home.value), stale: false }
            }
            Ask::Add | Ask::Read | Ask::Update if self.home.lease.is_some() => {
                let queued = scenario.queue && request.ask != Ask::Add;
                if queued {
                    let until = self.now + PATIENCE;
                    let place = |waiter: &Waiter| waiter.request.thread == request.thread;
                    match self.home.queue.iter().position(place) {
                        Some(place) => self.home.queue[place].until = until,
                        None => self.home.queue.push(Waiter { request: *request, until }),
                    }
                }
                Answer::Busy { queued }
            }
            Ask::Add => {
                self.change(request);
                Answer::Done
            }
            Ask::Read => Answer::Read { value: self.home.value, stale: false },
            Ask::Update => self.grant(scenario, request),
        }
    }

    fn is_held_by_mistake(&self, scenario: &Scenario, request: &Request, epoch: Epoch) -> bool {
        if !matches!(request.ask, Ask::Commit { .. }) {
            return false;
        }
        let is_owners = |lease: &Lease| {
            lease.owner == scenario.end_of(request.thread) && lease.life == request.life
        };
        match (scenario.bug, self.home.lease, self.home.last) {
            (Some(Bug::AnyEpoch), Some(lease), _) => is_owners(&lease),
            (Some(Bug::LateCommit), None, Some((lease, End::RanOut))) => {
                is_owners(&lease) && lease.epoch == epoch
            }
            _ => false,
        }
    }

    fn change(&mut self, request: &Request) {
        self.home.value = request.value;
        self.witness.changes.push(request.value);
    }

    fn grant(&mut self, scenario: &Scenario, request: &Request) -> Answer {
        self.home.grants += 1;
        let life = if scenario.has(Bug::ForgetEpochs) { 0 } else { self.home.life };
        let epoch = life << 4 | self.home.grants;
        self.witness.repeated_epoch |= epoch <= self.witness.last_epoch;
        self.witness.last_epoch = epoch;
        self.home.lease = Some(Lease {
            owner: scenario.end_of(request.thread),
            life: request.life,
            epoch,
            deadline: self.now + scenario.lease,
            contended: false,
        });
        self.record(request, Record::Grant(epoch));
        Answer::Granted { epoch, value: self.home.value, remaining: scenario.lease }
    }

    fn record(&mut self, request: &Request, record: Record) {
        if let Some(session) = &mut self.home.sessions[usize::from(request.thread)] {
            session.record = Some(record);
        }
    }

    /// Ends the lease and answers who waited for that.
    pub(super) fn release(&mut self, scenario: &Scenario, how: End) {
        if let Some(lease) = self.home.lease.take() {
            self.home.last = Some((Lease { deadline: 0, ..lease }, how));
        }
        self.serve_queue(scenario);
    }

    fn serve_queue(&mut self, scenario: &Scenario) {
        while self.home.lease.is_none() && !self.home.queue.is_empty() {
            let Waiter { request, .. } = self.home.queue.remove(0);
            let session = self.session_of(&request);
            if session.is_none_or(|session| session.low != request.sequence) {
                continue;
            }
            let answer = self.execute(scenario, &request);
            if matches!(answer, Answer::Granted { .. }) {
                scenario.note(Event::WaiterGranted);
            }
            self.answer(scenario, &request, answer);
        }
    }

    /// What the home's clock brings.
    pub(super) fn home_tick(&mut self, scenario: &Scenario) {
        let now = self.now;
        self.home.queue.retain(|waiter| now <= waiter.until);
        let is_over = |lease: Lease| lease.deadline <= now && !scenario.has(Bug::KeepLease);
        if self.home.lease.is_some_and(is_over) {
            self.release(scenario, End::RanOut);
        }
    }

    /// The home's process dies and starts again with the page's contents.
    pub(super) fn home_crashes(&mut self, scenario: &Scenario) {
        let home = &mut self.home;
        home.life += 1;
        (home.lease, home.last, home.grants) = (None, None, 0);
        home.sessions.fill(None);
        home.lives.fill(0);
        home.queue.clear();
        if !scenario.has(Bug::ForgetEpochs) {
            return;
        }
        // Its epochs repeat, which is the mistake; what follows from that is to be found.
        self.witness.last_epoch = 0;
    }

    fn answer(&mut self, scenario: &Scenario, request: &Request, answer: Answer) {
        self.copy(scenario, request, answer);
        self.reply(request, answer);
    }

    fn reply(&mut self, request: &Request, answer: Answer) {
        let Request { thread, life, session, sequence, home_bit, .. } = *request;
        let from_home = true;
        let reply = Reply { thread, life, session, sequence, from_home, home_bit, answer };
        self.send(Message::Reply(reply));
    }

    /// What the switch copies to the controller of a reply.
    fn copy(&mut self, scenario: &Scenario, request: &Request, answer: Answer) {
        let always = scenario.copies == Copies::Always;
        let lease = match answer {
            Answer::Busy { .. } if scenario.copies == Copies::Contended => {
                let lease = self.home.lease.as_mut();
                lease.map(|lease| {
                    lease.contended = true;
                    (*lease, false)
                })
            }
            Answer::Busy { .. } | Answer::Granted { .. } | Answer::Renewed { .. } if always => {
                self.home.lease.map(|lease| (lease, false))
            }
            Answer::Done if request.ask != Ask::Add => {
                let last = self.home.last.map(|(lease, _)| (lease, true));
                last.filter(|(lease, _)| always || lease.contended)
            }
            _ => None,
        };
        if let Some((Lease { epoch, owner, deadline, .. }, releases)) = lease {
            self.send(Message::Copy(Copy { epoch, owner, until: deadline, releases }));
        }
    }
}
