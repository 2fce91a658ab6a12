//! Carriers that misbehave, and a clock that can be stopped.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::sync::Arc;

use bluebridge_transport::memory::MemoryTransport;
use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, ReceiveError, Timestamp, TransmitError, Transport,
    Wait, Wakeable, Waker, monotonic_now,
};

use super::PATIENCE;

/// The methods of [`Transport`] that all carriers of this file pass on to the carrier that they wrap.
macro_rules! forward_to_inner {
    () => {
        fn capabilities(&self) -> &Capabilities {
            self.inner.capabilities()
        }
        fn counters(&self) -> Counters {
            self.inner.counters()
        }
        fn local_port(&self) -> u16 {
            self.inner.local_port()
        }
        fn incoming(&self, index: usize) -> Incoming<'_> {
            self.inner.incoming(index)
        }
    };
}

macro_rules! wake_inner {
    ($($carrier:ty),*) => {$(
        impl Wakeable for $carrier {
            fn waker(&mut self) -> std::io::Result<Waker> {
                self.inner.waker()
            }
        }
    )*};
}

wake_inner!(Mute, Stoppable, Failing);

/// A carrier that sends nothing while it is mute, and receives nothing while it is deaf.
pub(super) struct Mute {
    pub(super) inner: MemoryTransport,
    pub(super) is_mute: Arc<AtomicBool>,
    pub(super) is_deaf: Arc<AtomicBool>,
}

impl Mute {
    pub(super) fn new(inner: MemoryTransport, is_mute: &Arc<AtomicBool>) -> Self {
        Self { inner, is_mute: Arc::clone(is_mute), is_deaf: Arc::default() }
    }
}

impl Transport for Mute {
    forward_to_inner!();
    fn now(&self) -> Timestamp {
        self.inner.now()
    }
    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        match self.is_mute.load(Ordering::Relaxed) {
            true => Ok(batch.len()),
            false => self.inner.transmit(batch),
        }
    }
    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        let received = self.inner.receive(wait)?;
        Ok(if self.is_deaf.load(Ordering::Relaxed) { 0 } else { received })
    }
}

/// A clock that can be stopped: while it is stopped, no timer of its carriers expires.
/// If it is stopped for longer than [`PATIENCE`], it is past every deadline, so that calls end with an error.
#[derive(Clone, Default)]
pub(super) struct StopClock {
    /// In nanoseconds; 0 while the clock runs.
    stopped_at: Arc<AtomicU64>,
}

impl StopClock {
    pub(super) fn stop(&self) {
        self.stopped_at.store(monotonic_now().as_nanos(), Ordering::SeqCst);
    }

    pub(super) fn run(&self) {
        self.stopped_at.store(0, Ordering::SeqCst);
    }

    /// The time that it shows at a moment of real time.
    fn shown(&self, now: Timestamp) -> Timestamp {
        let at = Timestamp::from_nanos(self.stopped_at.load(Ordering::SeqCst));
        match now.saturating_since(at) > PATIENCE {
            _ if at == Timestamp::ZERO => now,
            true => now + PATIENCE,
            false => at,
        }
    }
}

/// A carrier under a [`StopClock`].
pub(super) struct Stoppable {
    pub(super) inner: MemoryTransport,
    pub(super) clock: StopClock,
}

impl Transport for Stoppable {
    forward_to_inner!();
    fn now(&self) -> Timestamp {
        self.clock.shown(self.inner.now())
    }
    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        self.inner.transmit(batch)
    }
    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        let now = self.inner.now();
        // A stopped clock reaches no deadline. Whether it runs again is not checked meanwhile: only a
        // datagram or the waker ends the wait, so that a missing one is detected.
        let wait = match self.clock.shown(now) {
            shown if shown == now || wait.deadline <= shown => wait,
            shown => Wait::until(shown + PATIENCE + Duration::from_millis(1)),
        };
        self.inner.receive(wait)
    }
}

/// A carrier that fails as soon as the test sets its flag.
pub(super) struct Failing {
    pub(super) inner: MemoryTransport,
    pub(super) fails: Arc<AtomicBool>,
    /// Whether it panics instead of returning an error.
    pub(super) panics: bool,
}

impl Transport for Failing {
    forward_to_inner!();
    fn now(&self) -> Timestamp {
        self.inner.now()
    }
    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        self.inner.transmit(batch)
    }
    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        let received = self.inner.receive(wait)?;
        match self.fails.load(Ordering::Relaxed) {
            true if self.panics => panic!("the carrier panics, as the test intends"),
            true => Err(ReceiveError::Socket(std::io::ErrorKind::BrokenPipe.into())),
            false => Ok(received),
        }
    }
}
