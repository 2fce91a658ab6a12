//! When to let the system join trains (UDP_GRO).
//!
//! Joined, a train costs one reception instead of eight. But for each datagram the system then reads memory of the
//! sender's core, which delays short single datagrams by 0.1 us; so joining is on only while trains arrive.

/// Receptions without a train after which joining stops.
const TRIAL_COUNT: u32 = 256;
/// Receptions after that before another attempt.
const PAUSE_COUNT: u32 = 1024;

/// Whether trains are received in one piece.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JoinTrains {
    /// While trains arrive.
    #[default]
    Adaptive,
    /// Always: for receivers of long operations.
    Always,
    /// Never: the system splits them.
    Never,
}

/// The result of one read of the socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reception {
    /// Receptions, each a datagram or a train.
    pub(super) count: u32,
    /// One of them was a train.
    pub(super) has_train: bool,
    /// They look like a train that was split.
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

    /// Joining could not end now; try again after [`TRIAL_COUNT`] receptions.
    pub(super) fn resume(&mut self) {
        self.is_on = true;
    }

    /// Observes a reception; returns whether joining must change, and to what.
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
