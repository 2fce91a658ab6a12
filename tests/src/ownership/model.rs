//! The model for the checker: initial states, and the possible next steps.

use stateright::{Model, Property};

use super::{
    Outcome, Scenario, properties,
    state::{Budget, Doing, Endpoint, Home, Message, ModelRack, Redirect, Thread, Witness},
};

/// Ticks within which remaining leases and redirects must end.
const TAIL: u8 = 12;

/// One step.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[expect(missing_docs, reason = "the names explain it")]
pub enum Step {
    ClientCrashes { end: u8 },
    ControllerCrashes,
    Deliver { message: usize },
    DeliverAndKeep { message: usize },
    EndRedirect,
    FalseHint { end: u8 },
    Freeze { end: u8 },
    TimeOut { thread: u8 },
    HomeCrashes,
    Lose { message: usize },
    Proceed { thread: u8 },
    Reopen { thread: u8 },
    Resend { thread: u8 },
    SwitchCrashes,
    Thaw { end: u8 },
    Tick,
}

impl Model for Scenario {
    type State = ModelRack;
    type Action = Step;

    fn init_states(&self) -> Vec<ModelRack> {
        let ends = usize::from(self.end_count());
        let thread =
            Thread { session: None, sequence: 0, doing: Doing::Nothing, outcomes: Vec::new() };
        vec![ModelRack {
            now: 0,
            home: Home {
                life: 1,
                value: 0,
                lease: None,
                grants: 0,
                last: None,
                sessions: vec![None; self.threads.len()],
                queue: Vec::new(),
                lives: vec![0; ends],
            },
            ends: vec![Endpoint { life: 1, frozen: None }; ends],
            threads: vec![thread; self.threads.len()],
            redirect: None,
            known_epoch: 0,
            messages: Vec::new(),
            budget: Budget {
                duplicates: self.duplicates,
                losses: self.losses,
                client_crashes: self.client_crashes,
                home_crashes: self.home_crashes,
                network_crashes: self.network_crashes,
                freezes: self.freezes,
                false_hints: self.false_hints,
            },
            witness: Witness::default(),
        }]
    }

    fn actions(&self, rack: &ModelRack, steps: &mut Vec<Step>) {
        for message in 0..rack.messages.len() {
            steps.push(Step::Deliver { message });
            if rack.budget.duplicates > 0 {
                steps.push(Step::DeliverAndKeep { message });
            }
            if rack.budget.losses > 0 {
                steps.push(Step::Lose { message });
            }
        }
        for (thread, state) in (0..).zip(&rack.threads) {
            match state.doing {
                Doing::Waiting(call) if call.tries < self.retries => {
                    let again = rack.request_of(self, thread).map(|request| {
                        Message::Request(super::state::Request { home_bit: true, ..request })
                    });
                    if again.is_some_and(|again| !rack.is_in_flight(&again)) {
                        steps.push(Step::Resend { thread });
                    }
                }
                Doing::Waiting(_) => steps.push(Step::TimeOut { thread }),
                _ if rack.task(self, thread).is_some() => steps.push(Step::Proceed { thread }),
                _ => {}
            }
        }
        for (thread, state) in (0..).zip(&rack.threads) {
            // Another request of the same session may find that the session is lost.
            let holds = matches!(state.doing, Doing::Holding(_));
            if holds && state.session != Some(rack.home.life) {
                steps.push(Step::Reopen { thread });
            }
        }
        let must_tick = rack.home.lease.is_some() || !rack.home.queue.is_empty();
        let waits = rack.redirect.is_some_and(|redirect| rack.now < redirect.until);
        // A few more leases may expire after the last fault, but not infinitely many.
        let can_tick = rack.now < self.ticks + TAIL && (must_tick || waits);
        if rack.now < self.ticks || can_tick {
            steps.push(Step::Tick);
        }
        if rack.redirect.is_some() && !waits {
            steps.push(Step::EndRedirect);
        }
        self.failures(rack, steps);
    }

    fn next_state(&self, last: &ModelRack, step: Step) -> Option<ModelRack> {
        let mut rack = last.clone();
        match step {
            Step::ClientCrashes { end } => {
                rack.budget.client_crashes -= 1;
                rack.client_crashes(self, end);
            }
            Step::ControllerCrashes => {
                rack.budget.network_crashes -= 1;
                rack.known_epoch = 0;
            }
            Step::Deliver { message } => {
                let message = rack.messages.remove(message);
                self.deliver(&mut rack, message);
            }
            Step::DeliverAndKeep { message } => {
                rack.budget.duplicates -= 1;
                let message = rack.messages[message];
                self.deliver(&mut rack, message);
            }
            Step::EndRedirect => rack.redirect = None,
            Step::FalseHint { end } => {
                rack.budget.false_hints -= 1;
                rack.redirect = Some(Redirect { owner: end, epoch: 0, until: rack.now + 1 });
            }
            Step::Freeze { end } => {
                rack.budget.freezes -= 1;
                rack.ends[usize::from(end)].frozen = Some(rack.now);
            }
            Step::TimeOut { thread } => rack.time_out(thread),
            Step::HomeCrashes => {
                rack.budget.home_crashes -= 1;
                rack.home_crashes(self);
            }
            Step::Lose { message } => {
                rack.budget.losses -= 1;
                rack.messages.remove(message);
            }
            Step::Proceed { thread } => rack.proceed(self, thread),
            Step::Reopen { thread } => rack.open(self, thread),
            Step::Resend { thread } => rack.resend(self, thread),
            Step::SwitchCrashes => {
                rack.budget.network_crashes -= 1;
                rack.redirect = None;
            }
            Step::Thaw { end } => rack.ends[usize::from(end)].frozen = None,
            Step::Tick => {
                rack.now += 1;
                rack.home_tick(self);
            }
        }
        self.remove_ignored_messages(&mut rack);
        Some(rack)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::all()
    }
}

impl Scenario {
    fn failures(&self, rack: &ModelRack, steps: &mut Vec<Step>) {
        let busy = |end: u8| {
            (0..)
                .zip(&rack.threads)
                .any(|(thread, state)| self.end_of(thread) == end && state.doing != Doing::Nothing)
        };
        for end in 0..self.end_count() {
            let is_frozen = rack.ends[usize::from(end)].frozen.is_some();
            // The crash of an idle process changes nothing.
            if rack.budget.client_crashes > 0 && busy(end) {
                steps.push(Step::ClientCrashes { end });
            }
            if rack.budget.freezes > 0 && busy(end) && !is_frozen {
                steps.push(Step::Freeze { end });
            }
            if is_frozen {
                steps.push(Step::Thaw { end });
            }
            if rack.budget.false_hints > 0 && rack.redirect.is_none() {
                steps.push(Step::FalseHint { end });
            }
        }
        if rack.budget.home_crashes > 0 && rack.home.sessions.iter().any(Option::is_some) {
            steps.push(Step::HomeCrashes);
        }
        if rack.budget.network_crashes > 0 {
            if rack.known_epoch > 0 {
                steps.push(Step::ControllerCrashes);
            }
            if rack.redirect.is_some() {
                steps.push(Step::SwitchCrashes);
            }
        }
    }

    fn deliver(&self, rack: &mut ModelRack, message: Message) {
        match message {
            Message::Copy(copy) => rack.controller_receives(self, copy),
            Message::Reply(reply) => rack.client_receives(self, &reply),
            Message::Request(request) => match rack.route(self, &request) {
                Some(end) => rack.owner_receives(self, end, &request),
                None => rack.home_receives(self, &request),
            },
        }
    }

    /// Removes messages that would be ignored at any time. This reduces the number of states
    /// without hiding a violation.
    fn remove_ignored_messages(&self, rack: &mut ModelRack) {
        let mut messages = core::mem::take(&mut rack.messages);
        messages.retain(|message| match message {
            Message::Copy(copy) => rack.is_news(self, copy),
            Message::Reply(reply) => rack.is_awaited(self, reply),
            Message::Request(request) => {
                let end = usize::from(self.end_of(request.thread));
                let is_old = request.life < rack.home.lives[end];
                let is_waited_for = rack.request_of(self, request.thread).is_some_and(|waited| {
                    (waited.life, waited.session, waited.sequence)
                        == (request.life, request.session, request.sequence)
                });
                let can_run =
                    rack.session_of(request).is_some() && !rack.is_below_low_water(request);
                !is_old && (can_run || is_waited_for)
            }
        });
        rack.messages = messages;
    }

    /// Whether every thread completed its tasks.
    pub(super) fn is_done(&self, rack: &ModelRack) -> bool {
        let ends = |(state, (_, tasks)): (&Thread, &(u8, Vec<_>))| {
            state.doing == Doing::Nothing && state.outcomes.len() == tasks.len()
        };
        rack.threads.iter().zip(&self.threads).all(ends)
    }

    /// Records how the tasks of a run ended.
    pub(super) fn keep_outcomes(&self, rack: &ModelRack) {
        if let Some(outcomes) = &self.outcomes {
            let ended: Vec<Vec<Outcome>> =
                rack.threads.iter().map(|thread| thread.outcomes.clone()).collect();
            outcomes.lock().expect("no panic while it is held").insert(ended);
        }
    }
}
