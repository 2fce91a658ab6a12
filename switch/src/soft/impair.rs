//! The impairments of frames that leave through a port, in virtual time.

use std::{cmp::Ordering, collections::BinaryHeap, time::Duration, time::Instant};

use bluebridge_p4::pipeline::{Impairment, SwitchPort};

use super::Offload;
use crate::{
    dataplane::ImpairmentCounters,
    draw::{Draw, threshold},
};

/// The most frames that wait in a pipeline for their delay; further ones are dropped.
pub(super) const HELD_MAX: usize = 16_384;

/// How long a frame is held back at most, beyond the port's delay, so that others overtake it.
const REORDER_HOLD_MAX: Duration = Duration::from_millis(1);

/// The impairments of a port and their generator.
#[derive(Debug)]
pub(super) struct Impairer {
    draw: Draw,
    loss: u64,
    duplicate: u64,
    reorder: u64,
    corrupt: u64,
    delay: Duration,
    pub(super) counters: ImpairmentCounters,
}

/// The effect on one frame: how long each copy waits, and which bit is flipped.
#[derive(Debug, Default)]
pub(super) struct Verdict {
    /// One wait per copy that is sent; none if the frame is lost.
    pub(super) copies: [Option<Duration>; 2],
    /// The bit to flip, counted from the first one after the Ethernet header.
    pub(super) flip: Option<usize>,
}

impl Impairer {
    pub(super) fn new(port: SwitchPort, impairment: &Impairment) -> Self {
        Self {
            draw: Draw::new(impairment.seed, port),
            loss: threshold(impairment.loss),
            duplicate: threshold(impairment.duplicate),
            reorder: threshold(impairment.reorder),
            corrupt: threshold(impairment.corrupt),
            delay: impairment.delay,
            counters: ImpairmentCounters::default(),
        }
    }

    /// Whether it changes anything.
    pub(super) const fn is_on(&self) -> bool {
        self.loss | self.duplicate | self.reorder | self.corrupt != 0 || !self.delay.is_zero()
    }

    /// Draws the effect on a frame whose part after the Ethernet header has `bits` bits.
    ///
    /// The order of the draws (loss, duplicate, corrupt, reorder) is that of the eBPF plane.
    pub(super) fn judge(&mut self, bits: usize) -> Verdict {
        if self.draw.chance(self.loss) {
            self.counters.lost += 1;
            return Verdict::default();
        }
        let duplicate = self.draw.chance(self.duplicate);
        let flip = (self.draw.chance(self.corrupt) && bits > 0)
            .then(|| usize::try_from(self.draw.next() >> 32).unwrap_or(0) % bits);
        self.counters.duplicated += u64::from(duplicate);
        self.counters.corrupted += u64::from(flip.is_some());
        self.counters.delayed += u64::from(!self.delay.is_zero());
        let first = self.delay + self.hold();
        let second = duplicate.then_some(self.delay);
        Verdict { copies: [Some(first), second], flip }
    }

    fn hold(&mut self) -> Duration {
        if !self.draw.chance(self.reorder) {
            return Duration::ZERO;
        }
        self.counters.reordered += 1;
        let share = (self.draw.next() >> 48) + 1;
        REORDER_HOLD_MAX.mul_f64(f64::from(u32::try_from(share).unwrap_or(1)) / 65_536.0)
    }
}

/// A frame that waits to be sent.
#[derive(Debug)]
pub(super) struct HeldFrame {
    pub(super) due: Instant,
    order: u64,
    pub(super) port: SwitchPort,
    pub(super) frame: Vec<u8>,
    pub(super) offload: Offload,
}

impl PartialEq for HeldFrame {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for HeldFrame {}

impl PartialOrd for HeldFrame {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for HeldFrame {
    /// Reversed, so that the frame that is due first is on top of the heap; ties keep their order.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.order).cmp(&(self.due, self.order))
    }
}

/// Frames that wait, by the time they are due.
#[derive(Debug, Default)]
pub(super) struct Held {
    frames: BinaryHeap<HeldFrame>,
    order: u64,
}

impl Held {
    /// Adds a frame; false if it is full.
    pub(super) fn push(
        &mut self,
        due: Instant,
        port: SwitchPort,
        frame: &[u8],
        offload: Offload,
    ) -> bool {
        if self.frames.len() >= HELD_MAX {
            return false;
        }
        let order = self.order;
        self.order += 1;
        self.frames.push(HeldFrame { due, order, port, frame: frame.to_vec(), offload });
        true
    }

    /// When the next frame is due.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.frames.peek().map(|held| held.due)
    }

    /// The next frame that is due.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<HeldFrame> {
        if self.next_due()? > now { None } else { self.frames.pop() }
    }
}
