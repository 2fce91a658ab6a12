//! When to ask the system to join trains (UDP_GRO).
//!
//! Joined, a train costs one reception instead of eight. But the system then looks at memory of the sender's core for each
//! datagram, which makes short ones that come alone 0.1 us later; so it is asked only while trains come.

/// Receptions without a train after which joining stops.
const TRIAL_COUNT: u32 = 256;
/// Receptions after that before another attempt.
const PAUSE_COUNT: u32 = 1024;

/// Whether trains are received in one piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JoinTrains {
    /// While trains come.
    #[default]
    Adaptive,
    /// Always: for receivers of long operations.
    Always,
    /// Never: the system cuts them up.
    Never,
}

/// What a look at the socket brought.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reception {
    /// Receptions, each a datagram or a train.
    pub(super) count: u32,
    /// One of them was a train.
    pub(super) has_train: bool,
    /// They look like a train that was cut up.
    pub(super) looks_cut: bool,
}

/// The state of adaptive joining.
#[derive(Clone, Copy, Debug)]
pub(super) struct Joining {
    policy: JoinTrains,
    is_on: bool,
    /// Receptions since the last train, or since joining stopped.
    quiet_count: u32,
}

impl Joining {
    pub(super) fn new(policy: JoinTrains) -> Self {
        Self { policy, is_on: policy == JoinTrains::Always, quiet_count: PAUSE_COUNT }
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on
    }

    /// Joining could not end now; it is tried again after [`TRIAL_COUNT`] receptions.
    pub(super) fn resume(&mut self) {
        self.is_on = true;
    }

    /// Takes note of a reception; says whether joining is now to be switched, and to what.
    pub(super) fn observe(&mut self, reception: Reception) -> Option<bool> {
        if self.policy != JoinTrains::Adaptive {
            return None;
        }
        self.quiet_count = self.quiet_count.saturating_add(reception.count);
        if reception.has_train {
            self.quiet_count = 0;
        }
        let switch = if self.is_on {
            self.quiet_count > TRIAL_COUNT
        } else {
            reception.looks_cut && self.quiet_count >= PAUSE_COUNT
        };
        if !switch {
            return None;
        }
        self.is_on = !self.is_on;
        self.quiet_count = 0;
        Some(self.is_on)
    }
}
