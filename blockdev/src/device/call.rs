//! The time of calls: none is begun when the lease is about to end, and a server that does not respond gets a part of
//! the time only, so that the others get theirs.

use std::sync::{Condvar, Mutex, OnceLock};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use bluebridge::{Client, Error, NodeId, Transport};

use super::execute::is_response;
use super::{Disk, Failure, lock};

/// The least time for a call: one that can hardly be answered is not begun.
const LEAST: Duration = Duration::from_millis(5);
/// Servers that are remembered as silent in a round.
const SILENT: usize = 16;

/// What the calls of a round of requests have in common.
#[derive(Debug)]
pub(super) struct Round<'a> {
    /// Until when the present request may take.
    pub(super) until: Instant,
    /// Until when any request may take, whatever its progress. It may be set during the round.
    stop: &'a OnceLock<Instant>,
    /// The most time of a call.
    pub(super) slice: Duration,
    /// Servers that did not respond to a call of the round. They are asked again in the next one.
    silent: ArrayVec<NodeId, SILENT>,
}

impl<'a> Round<'a> {
    pub(super) fn new(stop: &'a OnceLock<Instant>, slice: Duration) -> Self {
        Self { until: Instant::now() + slice, stop, slice, silent: ArrayVec::new_const() }
    }

    /// Until when the present request may take, also by the order to stop.
    pub(super) fn end(&self) -> Instant {
        self.stop.get().map_or(self.until, |stop| self.until.min(*stop))
    }

    /// The request has made progress: it gets the time of a new one.
    pub(super) fn renew(&mut self, deadline: Duration) {
        self.until = Instant::now() + deadline;
    }

    /// Until when something other than a call may be waited for.
    pub(super) fn wait_end(&self) -> Instant {
        self.end().min(Instant::now() + self.slice)
    }

    pub(super) fn is_silent(&self, node: NodeId) -> bool {
        self.silent.contains(&node)
    }

    fn note_silence(&mut self, node: NodeId) {
        if !self.is_silent(node) {
            // Of more, each call takes its time.
            let _ = self.silent.try_push(node);
        }
    }
}

/// A call that may be sent now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    /// How long it may take.
    pub(super) given: Duration,
    /// Until when the lease of this process allows it.
    lease_end: Instant,
}

impl Call {
    /// Whether an answer counts that is there now. After the lease, the memory may be another owner's.
    pub(super) fn is_in_time(&self) -> bool {
        Instant::now() < self.lease_end
    }
}

/// A request, or a part of one, that failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Failed {
    pub(super) failure: Failure,
    /// A server that did not respond, and for how long.
    pub(super) silent: Option<(NodeId, Duration)>,
    /// A server refused.
    pub(super) is_refused: bool,
}

impl From<Failure> for Failed {
    fn from(failure: Failure) -> Self {
        Self { failure, silent: None, is_refused: false }
    }
}

impl Disk {
    /// Permits a call that ends by `until`, after `most` at the latest, and before the lease ends. Nothing is sent to
    /// memory of the disk without asking this first.
    pub(super) fn call<T: Transport>(
        &self,
        client: &mut Client<T>,
        until: Instant,
        most: Duration,
    ) -> Result<Call, Failure> {
        let now = Instant::now();
        let lease_end = self.ownership.lease_end(now)?;
        let given = until.min(lease_end).saturating_duration_since(now).min(most);
        if given < LEAST {
            return Err(Failure::Unanswered);
        }
        client.set_deadline(given);
        Ok(Call { given, lease_end })
    }

    /// [`Self::call`] for a change of the map. None is begun with too little time: its outcome would be unknown.
    pub(super) fn call_of_change<T: Transport>(
        &self,
        client: &mut Client<T>,
        round: &Round<'_>,
        least: Duration,
    ) -> Result<Call, Failure> {
        let call = self.call(client, round.end(), round.slice)?;
        if call.given < least { Err(Failure::Unanswered) } else { Ok(call) }
    }

    /// Takes the error of a call.
    pub(super) fn failed(round: &mut Round<'_>, call: Call, error: &Error) -> Failed {
        let silent = silent_node(error);
        if let Some(node) = silent {
            round.note_silence(node);
        }
        Failed {
            failure: Failure::of(error),
            silent: silent.map(|node| (node, call.given)),
            is_refused: is_response(error),
        }
    }
}

/// The server that an error says is silent. A refusal is a response, and so is a page that is leased.
pub(super) const fn silent_node(error: &Error) -> Option<NodeId> {
    match error {
        Error::Unreachable { node } | Error::OutcomeUnknown { node, responding: false, .. } => {
            Some(*node)
        }
        _ => None,
    }
}

/// A lock that is not waited for without end.
#[derive(Debug, Default)]
pub(super) struct Turn {
    is_taken: Mutex<bool>,
    free: Condvar,
}

/// The lock is held.
#[derive(Debug)]
pub(super) struct Taken<'a>(&'a Turn);

impl Turn {
    /// Waits for it; `None` if that took too long.
    pub(super) fn take(&self, until: Instant) -> Option<Taken<'_>> {
        let time = until.saturating_duration_since(Instant::now());
        let is_taken = lock(&self.is_taken);
        let waited = self.free.wait_timeout_while(is_taken, time, |is_taken| *is_taken);
        let (mut is_taken, _) = waited.unwrap_or_else(std::sync::PoisonError::into_inner);
        if *is_taken {
            return None;
        }
        *is_taken = true;
        Some(Taken(self))
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *lock(&self.0.is_taken) = false;
        self.0.free.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use bluebridge::Status;

    use super::*;

    #[test]
    fn only_a_server_that_did_not_respond_is_silent() {
        let node = NodeId(7);
        assert_eq!(silent_node(&Error::Unreachable { node }), Some(node));
        let unknown = |responding| Error::OutcomeUnknown { node, pointer: None, responding };
        assert_eq!(silent_node(&unknown(false)), Some(node), "whatever node the pointer names");
        for error in [
            unknown(true),
            Error::TimedOut { node },
            Error::Drained { node },
            Error::Refused { status: Status::Overloaded, node, pointer: None },
            Error::Refused { status: Status::ShuttingDown, node, pointer: None },
        ] {
            assert_eq!(silent_node(&error), None, "{error}");
        }
    }

    #[test]
    fn a_turn_is_waited_for_until_a_deadline() {
        let turn = Turn::default();
        let soon = || Instant::now() + Duration::from_millis(20);
        let taken = turn.take(soon()).expect("it is free");
        assert!(turn.take(soon()).is_none(), "it is taken");
        std::thread::scope(|scope| {
            let later = Instant::now() + Duration::from_secs(60);
            let turn = &turn;
            let waiting = scope.spawn(move || turn.take(later).is_some());
            drop(taken);
            assert!(waiting.join().expect("no panic"));
        });
        assert!(turn.take(soon()).is_some());
    }

    #[test]
    fn a_round_ends_at_its_stop_whatever_the_progress() {
        let (stop, end) = (OnceLock::new(), Instant::now() + Duration::from_secs(2));
        let mut round = Round::new(&stop, Duration::from_secs(1));
        round.renew(Duration::from_secs(60));
        assert!(round.end() > end, "nothing has stopped it");
        stop.set(end).expect("it was not set");
        assert_eq!(round.end(), end, "also if it has begun");
        round.renew(Duration::from_secs(60));
        assert_eq!(round.end(), end);
        round.renew(Duration::ZERO);
        assert!(round.end() < end);
        round.note_silence(NodeId(1));
        round.note_silence(NodeId(1));
        assert!(round.is_silent(NodeId(1)) && !round.is_silent(NodeId(2)));
        assert_eq!(round.silent.len(), 1);
    }
}
