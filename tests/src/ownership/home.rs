//! The home: sessions, recorded responses, the lease and the waiting requests.

use super::{
    Bug, Copies, Event, Scenario,
    state::{
        Copy, End, Epoch, Lease, Message, ModelRack, Operation, Record, Reply, Request, Response,
        Session, Waiter,
    },
};

/// Ticks for which a waiting request need not be repeated.
const TIMEOUT: u8 = 1;

impl ModelRack {
    /// A thread opens a session; the home learns its endpoint's incarnation.
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

    /// Whether a request can no longer have an effect at the home.
    pub(super) fn is_below_low_water(&self, request: &Request) -> bool {
        self.session_of(request).is_some_and(|session| request.sequence < session.low)
    }

    pub(super) fn session_of(&self, request: &Request) -> Option<Session> {
        let session = self.home.sessions[usize::from(request.thread)]?;
        let is_its = request.session == self.home.life && session.life == request.life;
        is_its.then_some(session)
    }

    /// The home receives a request.
    pub(super) fn home_receives(&mut self, scenario: &Scenario, request: &Request) {
        let end = usize::from(scenario.end_of(request.thread));
        if request.life < self.home.lives[end] {
            return;
        }
        let Some(session) = self.session_of(request) else {
            return self.reply(request, Response::NoSession);
        };
        if request.sequence < session.low {
            return;
        }
        if request.sequence > session.low {
            let session = Session { low: request.sequence, record: None, ..session };
            self.home.sessions[usize::from(request.thread)] = Some(session);
            self.home.queue.retain(|waiter| waiter.request.thread != request.thread);
        } else if let Some(record) = session.record
            && !scenario.has(Bug::ForgetResponses)
        {
            let response = self.repeated(scenario, record);
            return self.response(scenario, request, response);
        }
        let response = self.execute(scenario, request);
        if request.operation.is_mutating() {
            self.record(request, Record::Response(response));
        }
        self.response(scenario, request, response);
    }

    fn repeated(&self, scenario: &Scenario, record: Record) -> Response {
        match record {
            Record::Response(response) => {
                scenario.note(Event::ResponseRepeated);
                response
            }
            Record::Grant(epoch) => match self.home.lease {
                Some(lease) if lease.epoch == epoch => {
                    scenario.note(Event::GrantRepeated);
                    let remaining = lease.deadline.saturating_sub(self.now);
                    Response::Granted { epoch, value: self.home.value, remaining }
                }
                _ => Response::LeaseLost(self.how_ended(epoch)),
            },
        }
    }

    fn how_ended(&self, epoch: Epoch) -> End {
        match self.home.last {
            Some((lease, how)) if lease.epoch == epoch => how,
            _ => End::Unknown,
        }
    }

    fn execute(&mut self, scenario: &Scenario, request: &Request) -> Response {
        let end = scenario.end_of(request.thread);
        let holds = |epoch: Epoch, lease: &Lease| {
            lease.owner == end && lease.life == request.life && lease.epoch == epoch
        };
        match request.operation {
            Operation::Abort { epoch }
            | Operation::Commit { epoch, .. }
            | Operation::Renew { epoch } => {
                let lease = self.home.lease;
                let is_held = lease.is_some_and(|lease| holds(epoch, &lease))
                    || self.is_held_by_mistake(scenario, request, epoch);
                if !is_held {
                    let how = self.how_ended(epoch);
                    if matches!(request.operation, Operation::Commit { .. }) && how == End::RanOut {
                        scenario.note(Event::LateCommit);
                    }
                    return Response::LeaseLost(how);
                }
                match request.operation {
                    Operation::Commit { base, .. } => {
                        self.witness.lost_update |= self.home.value != base;
                        self.change(request);
                        self.release(scenario, End::Committed);
                        Response::Done
                    }
                    Operation::Renew { .. } => {
                        let deadline = self.now + scenario.lease;
                        if let Some(lease) = &mut self.home.lease {
                            lease.deadline = deadline;
                        }
                        Response::Renewed { remaining: scenario.lease }
                    }
                    _ => {
                        self.release(scenario, End::Aborted);
                        Response::Done
                    }
                }
            }
            Operation::StaleRead => Response::Read { value: self.home.value, stale: true },
            Operation::Read if scenario.has(Bug::ServeUncommitted) => {
                let ahead = self.home.lease.map(|lease| 0xf0 | lease.epoch);
                Response::Read { value: ahead.unwrap_or(self.home.value), stale: false }
            }
            Operation::Add | Operation::Read | Operation::Update if self.home.lease.is_some() => {
                let queued = scenario.queue && request.operation != Operation::Add;
                if queued {
                    let until = self.now + TIMEOUT;
                    let place = |waiter: &Waiter| waiter.request.thread == request.thread;
                    match self.home.queue.iter().position(place) {
                        Some(place) => self.home.queue[place].until = until,
                        None => self.home.queue.push(Waiter { request: *request, until }),
                    }
                }
                Response::Busy { queued }
            }
            Operation::Add => {
                self.change(request);
                Response::Done
            }
            Operation::Read => Response::Read { value: self.home.value, stale: false },
            Operation::Update => self.grant(scenario, request),
        }
    }

    fn is_held_by_mistake(&self, scenario: &Scenario, request: &Request, epoch: Epoch) -> bool {
        if !matches!(request.operation, Operation::Commit { .. }) {
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

    fn grant(&mut self, scenario: &Scenario, request: &Request) -> Response {
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
        Response::Granted { epoch, value: self.home.value, remaining: scenario.lease }
    }

    fn record(&mut self, request: &Request, record: Record) {
        if let Some(session) = &mut self.home.sessions[usize::from(request.thread)] {
            session.record = Some(record);
        }
    }

    /// Ends the lease and executes the waiting requests.
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
            let response = self.execute(scenario, &request);
            if matches!(response, Response::Granted { .. }) {
                scenario.note(Event::WaiterGranted);
            }
            self.response(scenario, &request, response);
        }
    }

    /// Timers of the home.
    pub(super) fn home_tick(&mut self, scenario: &Scenario) {
        let now = self.now;
        self.home.queue.retain(|waiter| now <= waiter.until);
        let is_over = |lease: Lease| lease.deadline <= now && !scenario.has(Bug::KeepLease);
        if self.home.lease.is_some_and(is_over) {
            self.release(scenario, End::RanOut);
        }
    }

    /// The home's process crashes and restarts with the page's contents.
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
        // Its epochs repeat, which is the bug; the checker must find the consequences.
        self.witness.last_epoch = 0;
    }

    fn response(&mut self, scenario: &Scenario, request: &Request, response: Response) {
        self.copy(scenario, request, response);
        self.reply(request, response);
    }

    fn reply(&mut self, request: &Request, response: Response) {
        let Request { thread, life, session, sequence, home_bit, .. } = *request;
        let from_home = true;
        let reply = Reply { thread, life, session, sequence, from_home, home_bit, response };
        self.send(Message::Reply(reply));
    }

    /// The part of a reply that the switch copies to the controller.
    fn copy(&mut self, scenario: &Scenario, request: &Request, response: Response) {
        let always = scenario.copies == Copies::Always;
        let lease = match response {
            Response::Busy { .. } if scenario.copies == Copies::Contended => {
                let lease = self.home.lease.as_mut();
                lease.map(|lease| {
                    lease.contended = true;
                    (*lease, false)
                })
            }
            Response::Busy { .. } | Response::Granted { .. } | Response::Renewed { .. }
                if always =>
            {
                self.home.lease.map(|lease| (lease, false))
            }
            Response::Done if request.operation != Operation::Add => {
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
