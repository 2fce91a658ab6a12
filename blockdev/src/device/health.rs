//! Memory servers that do not respond: requests for their slabs fail at once, so that they keep no others waiting.
//!
//! A server is suspected when a request failed at its deadline and the server, while it had enough time of that request,
//! sent no response; a refusal is one. From then on one request a second asks it, for a short time; when it responds, it
//! is used again. It is the server that the error names: of a slab that has moved, that is not the one in its pointer, so
//! other requests for that slab take their time.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use bluebridge::NodeId;

use super::lock;

/// The time between two tries.
const PAUSE: Duration = Duration::from_secs(1);
/// How long a try may take.
pub(super) const PROBE: Duration = Duration::from_millis(250);
/// More servers than a rack has.
const SERVERS: usize = 128;

/// What to do with a request for a server.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Gate {
    /// It fails.
    Closed,
    /// It is executed.
    Open,
    /// Ask the server first; nobody else does for the next second.
    Probe,
}

#[derive(Debug, Default)]
pub(super) struct Health {
    /// How many are suspected, so that nothing is locked while none is.
    count: AtomicUsize,
    suspects: Mutex<ArrayVec<Suspect, SERVERS>>,
}

#[derive(Debug)]
struct Suspect {
    node: NodeId,
    next_try: Instant,
}

impl Health {
    /// What [`Self::gate`] would say; no try is taken.
    pub(super) fn look(&self, node: NodeId, now: Instant) -> Gate {
        if self.count.load(Ordering::Acquire) == 0 {
            return Gate::Open;
        }
        match lock(&self.suspects).iter().find(|suspect| suspect.node == node) {
            None => Gate::Open,
            Some(suspect) if now < suspect.next_try => Gate::Closed,
            Some(_) => Gate::Probe,
        }
    }

    pub(super) fn gate(&self, node: NodeId, now: Instant) -> Gate {
        if self.count.load(Ordering::Acquire) == 0 {
            return Gate::Open;
        }
        let mut suspects = lock(&self.suspects);
        match suspects.iter_mut().find(|suspect| suspect.node == node) {
            None => Gate::Open,
            Some(suspect) if now < suspect.next_try => Gate::Closed,
            Some(suspect) => {
                suspect.next_try = now + PAUSE;
                Gate::Probe
            }
        }
    }

    /// Suspects a server; returns whether it was not suspected before.
    pub(super) fn suspect(&self, node: NodeId, now: Instant) -> bool {
        let mut suspects = lock(&self.suspects);
        let next_try = now + PAUSE;
        if let Some(suspect) = suspects.iter_mut().find(|suspect| suspect.node == node) {
            suspect.next_try = next_try;
            return false;
        }
        let is_new = suspects.try_push(Suspect { node, next_try }).is_ok();
        self.count.store(suspects.len(), Ordering::Release);
        is_new
    }

    /// A server responded; returns whether it was suspected.
    pub(super) fn responded(&self, node: NodeId) -> bool {
        let mut suspects = lock(&self.suspects);
        let before = suspects.len();
        suspects.retain(|suspect| suspect.node != node);
        self.count.store(suspects.len(), Ordering::Release);
        suspects.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suspect_is_tried_once_a_second() {
        let health = Health::default();
        let (one, other) = (NodeId(1), NodeId(2));
        let now = Instant::now();
        assert_eq!(health.gate(one, now), Gate::Open);
        assert!(health.suspect(one, now));
        assert!(!health.suspect(one, now), "it is known");
        assert_eq!(health.gate(one, now), Gate::Closed);
        assert_eq!(health.gate(other, now), Gate::Open);
        let later = now + PAUSE;
        assert_eq!(health.look(one, now), Gate::Closed);
        assert_eq!(health.look(other, later), Gate::Open);
        assert_eq!(health.look(one, later), Gate::Probe, "and it takes none");
        assert_eq!(health.gate(one, later), Gate::Probe);
        assert_eq!(health.look(one, later), Gate::Closed);
        assert_eq!(health.gate(one, later), Gate::Closed, "somebody asks already");
        assert_eq!(health.gate(one, later + PAUSE), Gate::Probe);
        assert!(health.responded(one));
        assert!(!health.responded(one));
        assert_eq!(health.gate(one, later), Gate::Open);
    }
}
