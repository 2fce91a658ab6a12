//! The clients' operations on the pages, and their records in the histories.

use core::time::Duration;

use bluebridge_protocol::{
    Timestamp,
    owner::Committed,
    requester::{Failure, Lease, Operation, Output},
};
use rand::{Rng, seq::IndexedRandom};

use super::{Event, JOBS, World};
use crate::{
    history::Action,
    sim::{
        leases::{
            Bug,
            job::{Holding, Job, Kind, Place, Stage},
        },
        region,
    },
};

/// No lease lasts longer than this after its grant or its last RENEW.
const LEASE_MAX: Duration = Duration::from_millis(41);

/// The lease time that a client requests in a RENEW.
const RENEWAL_MS: u16 = 20;

/// How long the client may use it, counted from the request, with any clock rates.
const RENEWAL_SAFE: Duration = Duration::from_millis(18);

/// By how much a client overestimates a lease, for [`Bug::Overstay`].
const OVERSTAY: Duration = Duration::from_millis(20);

impl World {
    /// A client begins jobs until it has enough.
    pub(super) fn think(&mut self, client: usize) -> Result<(), String> {
        if client >= self.clients.len() || self.frozen[client].is_some() {
            return Ok(());
        }
        while !self.is_final
            && self.started < JOBS
            && self.clients[client].jobs.count() < self.depth
        {
            self.started += 1;
            let (place, kind) = Job::draw(&mut self.rng, &mut self.next_value);
            let patience = Duration::from_micros(self.rng.random_range(5_000..300_000));
            self.begin(client, place, kind, patience)?;
        }
        self.after(client)
    }

    pub(super) fn begin(
        &mut self,
        client: usize,
        place: Place,
        kind: Kind,
        patience: Duration,
    ) -> Result<(), String> {
        let outgoing = match kind {
            Kind::Write { value } => region::stamp(value).collect(),
            _ => Vec::new(),
        };
        let incoming = vec![0xee; place.bytes()];
        let (stage, start) = (Stage::Asking, self.now);
        let job = Job { place, kind, stage, start, outgoing, incoming };
        let token = self.clients[client].jobs.insert(job);
        let operation = Job::operation(place, kind, self.pages[place as usize]);
        self.ask(client, token, operation, patience)
    }

    fn ask(
        &mut self,
        client: usize,
        token: u64,
        operation: Operation,
        patience: Duration,
    ) -> Result<(), String> {
        let now = self.local(client);
        let requester = &mut self.clients[client].requester;
        let began = requester.start_until(now, operation, token, now + patience);
        began.map(|_| ()).map_err(|error| format!("{operation:?} was not begun: {error}"))
    }

    /// A client continues under its lease: mostly COMMIT, seldom RENEW or ABORT.
    pub(super) fn act(&mut self, client: usize, life: u32, token: u64) -> Result<(), String> {
        if self.lives[client] != life {
            return Ok(());
        }
        if self.frozen[client].is_some() {
            let later = self.now + Duration::from_millis(1);
            self.push(later, Event::Act { client, life, token });
            return Ok(());
        }
        let (now, local) = (self.now, self.local(client));
        let drawn = self.rng.random_range(0..10);
        self.next_value += 1;
        let new = self.next_value;
        let Some(job) = self.clients[client].jobs.get(token) else { return Ok(()) };
        let Stage::Holding(holding) = job.stage else { return Ok(()) };
        let place = job.place;
        job.start = now;
        let pointer = self.pages[place as usize];
        let length = u32::try_from(place.bytes()).expect("a page");
        let epoch = holding.epoch;
        let operation = match drawn {
            0 => {
                job.stage = Stage::Aborting;
                Operation::Abort { pointer, length, epoch }
            }
            1 => {
                // The RENEW may shorten the lease, and the home may execute it although its reply
                // is lost.
                let expires_at = holding.expires_at.min(local + RENEWAL_SAFE);
                job.stage = Stage::Renewing(Holding { expires_at, ..holding });
                Operation::Renew { pointer, length, epoch, lease_ms: RENEWAL_MS }
            }
            _ => {
                let after = match place {
                    Place::Register => new,
                    Place::Counter => holding.before.wrapping_add(1),
                };
                job.outgoing = match place {
                    Place::Register => region::stamp(after).collect(),
                    Place::Counter => after.to_le_bytes().to_vec(),
                };
                job.stage = Stage::Committing { holding, after };
                Operation::Commit { pointer, length, epoch }
            }
        };
        if !matches!(operation, Operation::Renew { .. }) {
            self.release(client, place, epoch);
        }
        let patience = Duration::from_micros(self.rng.random_range(5_000..200_000));
        self.ask(client, token, operation, patience)?;
        self.after(client)
    }

    /// The client's owner is notified that a lease ends before the home can execute the COMMIT, so
    /// that no contents are served that another client has seen replaced.
    fn release(&mut self, client: usize, place: Place, epoch: u64) {
        if self.plan.bug != Some(Bug::ServeReleased) {
            self.clients[client].owner.release(self.pages[place as usize], epoch);
        }
    }

    pub(super) fn end(
        &mut self,
        client: usize,
        token: u64,
        result: Result<Output, Failure>,
    ) -> Result<(), String> {
        let Some(mut job) = self.clients[client].jobs.take(token) else { return Ok(()) };
        self.report.operations += 1;
        let outcome = match &result {
            Ok(Output::Read { stale }) => format!("ok, stale {stale}"),
            Ok(_) => "ok".to_owned(),
            Err(Failure::LeaseLost { how, .. }) => format!("lease lost: {how:?}"),
            Err(failure) => {
                let text = format!("{failure:?}");
                text.split([' ', '(']).next().unwrap_or_default().to_owned()
            }
        };
        *self.outcomes.entry((job.name(), outcome)).or_default() += 1;
        if self.is_final
            && matches!(result, Err(Failure::OutcomeUnknown { .. }))
            && let Some(left) = self.final_retries.checked_sub(1)
        {
            // The server restarted just before: the outcome in the old session is unknown.
            self.final_retries = left;
            self.forget(&job);
            self.next_value += 1;
            let kind = match job.kind {
                Kind::Write { .. } => Kind::Write { value: self.next_value },
                kind => kind,
            };
            return self.begin(client, job.place, kind, Duration::from_secs(15));
        }
        if self.is_final && result.is_err() {
            return Err(format!("{job:?} ended with {result:?} though all faults are over"));
        }
        match (job.stage, job.kind, result) {
            (_, _, Err(Failure::OutcomeUnknown { .. })) => self.forget(&job),
            (_, _, Err(Failure::Buffer | Failure::Violation { .. } | Failure::Partial(_))) => {
                return Err(format!("{job:?} ended with {result:?}"));
            }
            (Stage::Asking, Kind::Read, Ok(_))
            | (Stage::Asking, Kind::ReadStale, Ok(Output::Read { stale: false })) => {
                let value = seen(&job)?;
                self.record(&job, Action::Read { value }, true);
            }
            (Stage::Asking, Kind::ReadStale, Ok(_)) => {
                let value = seen(&job)?;
                let was_current = Job { start: self.stale_since(job.start), ..job.clone() };
                self.record(&was_current, Action::Read { value }, true);
            }
            (Stage::Asking, Kind::Write { value }, Ok(_)) => {
                self.record(&job, Action::Write { value }, true);
            }
            (Stage::Asking, Kind::Add { addend }, Ok(Output::Previous(previous))) => {
                self.record(&job, Action::Add { addend, previous: Some(previous) }, true);
            }
            (Stage::Asking, Kind::Update { .. }, Ok(Output::Leased(lease))) => {
                let before = seen(&job)?;
                self.record(&job, Action::Read { value: before }, true);
                let expires_at = self.believed(lease);
                // A client that was paused may receive a grant that has expired.
                if self.local(client) < lease.expires_at {
                    self.check_sole_holder(client, job.place)?;
                }
                let holding = Holding { epoch: lease.epoch, before, expires_at };
                return self.hold(client, job, holding);
            }
            (Stage::Renewing(holding), _, Ok(Output::Leased(lease))) => {
                let holding = Holding { expires_at: self.believed(lease), ..holding };
                return self.hold(client, job, holding);
            }
            (Stage::Committing { holding, after }, _, Ok(_)) => {
                self.record(&job, Action::Update { before: holding.before, after }, true);
            }
            _ => {}
        }
        if let Stage::Renewing(holding) = job.stage {
            self.release(client, job.place, holding.epoch);
        }
        job.incoming.clear();
        let pause = Duration::from_micros(self.rng.random_range(0..2_000));
        self.push(self.now + pause, Event::Think { client });
        Ok(())
    }

    /// The end of a lease in the client's view, by its own clock.
    fn believed(&self, lease: Lease) -> Timestamp {
        let overstay = if self.plan.bug == Some(Bug::Overstay) { OVERSTAY } else { Duration::ZERO };
        lease.expires_at + overstay
    }

    /// When a client gets a page, no other client may still hold a lease on it, by its own clock.
    ///
    /// A restarted home has lost the leases that their owners still use.
    fn check_sole_holder(&self, client: usize, place: Place) -> Result<(), String> {
        if self.restarts.iter().any(|(_, back)| *back + LEASE_MAX > self.now) {
            return Ok(());
        }
        for (other, holder) in self.clients.iter().enumerate() {
            let now = self.local(other);
            for job in holder.jobs.iter().filter(|job| job.place == place) {
                if let Stage::Holding(held) | Stage::Renewing(held) = job.stage
                    && now < held.expires_at
                {
                    return Err(format!(
                        "client {client} got the {place:?} while client {other} believes that it \
                         has it under epoch {}",
                        held.epoch
                    ));
                }
            }
        }
        Ok(())
    }

    /// The client has the lease, notifies its owner, and continues after a while, sometimes too
    /// late.
    fn hold(&mut self, client: usize, mut job: Job, holding: Holding) -> Result<(), String> {
        let now = self.local(client);
        let pointer = self.pages[job.place as usize];
        let committed = Some(Committed { start: 0, bytes: &job.incoming });
        let owner = &mut self.clients[client].owner;
        let held = owner.hold(now, pointer, holding.epoch, holding.expires_at, None, committed);
        // A grant that arrives after a later one of the same client has ended.
        if held.is_err() {
            self.report.count("lease world", "grant was overtaken", 1);
        }
        let left = holding.expires_at.saturating_since(now);
        let wait = left.mul_f64(*[0.0, 0.2, 0.6, 1.5].choose(&mut self.rng).expect("some"));
        job.stage = Stage::Holding(holding);
        let token = self.clients[client].jobs.insert(job);
        let life = self.lives[client];
        let wait = wait + Duration::from_micros(self.rng.random_range(0..500));
        self.push(self.now + wait, Event::Act { client, life, token });
        Ok(())
    }

    /// The earliest time at which the contents may have been replaced that a stale READ returns
    /// which begins at `start`. Normally that is `start`, because an owner stops serving before its
    /// COMMIT; but a restarted home has lost the leases that their owners still use.
    fn stale_since(&self, start: Timestamp) -> Timestamp {
        let believed = self.restarts.iter().filter(|(_, back)| *back + LEASE_MAX > start);
        believed.map(|(stopped, _)| *stopped).fold(start, Timestamp::min)
    }

    fn record(&mut self, job: &Job, action: Action, is_known: bool) {
        let end = is_known.then(|| self.now.as_nanos());
        self.histories[job.place as usize].record(job.start.as_nanos(), end, action);
    }

    /// A job with an unknown outcome.
    pub(super) fn forget(&mut self, job: &Job) {
        let action = match (job.stage, job.kind) {
            (Stage::Asking, Kind::Write { value }) => Action::Write { value },
            (Stage::Asking, Kind::Add { addend }) => Action::Add { addend, previous: None },
            (Stage::Committing { holding, after }, _) => {
                Action::Update { before: holding.before, after }
            }
            _ => return,
        };
        self.record(job, action, false);
    }
}

/// The value that a job read.
fn seen(job: &Job) -> Result<u64, String> {
    match job.place {
        Place::Register => region::read_stamp(0, &job.incoming)?.ok_or("a short read".to_owned()),
        Place::Counter => {
            let word = job.incoming.first_chunk::<8>().ok_or("a short read")?;
            Ok(u64::from_le_bytes(*word))
        }
    }
}
