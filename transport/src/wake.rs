//! Ending another thread's sleep in a carrier.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::Transport;
use crate::memory::Queue;

/// A carrier whose sleep another thread can end.
pub trait Wakeable: Transport {
    /// The waker of this carrier's sleep; every call returns the same one.
    ///
    /// # Errors
    ///
    /// If the system provides no descriptor for it.
    fn waker(&mut self) -> io::Result<Waker>;
}

impl<T: Wakeable + ?Sized> Wakeable for Box<T> {
    fn waker(&mut self) -> io::Result<Waker> {
        (**self).waker()
    }
}

/// Ends the sleep of one carrier; clones are the same waker.
#[derive(Clone, Debug)]
pub struct Waker(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Event(Event),
    Queue(Arc<Queue>),
}

impl Waker {
    pub(crate) const fn of_event(event: Event) -> Self {
        Self(Kind::Event(event))
    }

    pub(crate) const fn of_queue(queue: Arc<Queue>) -> Self {
        Self(Kind::Queue(queue))
    }

    /// Makes the carrier's [`receive`](Transport::receive) return: the one that sleeps now, or the next that
    /// would sleep; any number of calls before that count as one. Costs at most one system call.
    pub fn wake(&self) {
        match &self.0 {
            Kind::Event(event) => event.set(),
            Kind::Queue(queue) => queue.wake(),
        }
    }
}

/// A descriptor that is readable from the time it was set until it is taken.
#[derive(Clone, Debug)]
pub(crate) struct Event(Arc<OwnedFd>);

impl Event {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    fn set(&self) {
        // It can only fail because the counter is full, and then the descriptor is already readable.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Clears the event.
    pub(crate) fn take(&self) {
        // If there is nothing to read, it was not set.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use core::time::Duration;
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::memory::Hub;
    use crate::udp::{UdpConfig, UdpTransport};
    use crate::{Wait, monotonic_now};

    const LONG: Duration = Duration::from_secs(20);

    fn sleep(carrier: &mut impl Transport) -> Duration {
        let before = Instant::now();
        let until = carrier.now() + LONG;
        assert_eq!(carrier.receive(Wait::until(until)).expect("it works"), 0);
        before.elapsed()
    }

    fn is_woken(mut carrier: impl Wakeable + Send) {
        let waker = carrier.waker().expect("a descriptor");
        waker.wake();
        waker.wake();
        assert!(sleep(&mut carrier) < LONG / 2, "also when it was woken before it slept");
        sleeps_on(&mut carrier, "both calls before counted as one");
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                carrier_waker(&waker);
            });
            assert!(sleep(&mut carrier) < LONG / 2);
        });
        sleeps_on(&mut carrier, "no further wake-up");
    }

    fn sleeps_on(carrier: &mut impl Transport, why: &str) {
        let until = monotonic_now() + Duration::from_millis(5);
        assert_eq!(carrier.receive(Wait::until(until)).expect("it works"), 0);
        assert!(monotonic_now() >= until, "{why}");
    }

    fn carrier_waker(waker: &Waker) {
        waker.clone().wake();
    }

    #[test]
    fn a_socket_is_woken() {
        is_woken(UdpTransport::open(&UdpConfig::default()).expect("a socket"));
    }

    #[test]
    fn a_queue_is_woken() {
        let hub = Hub::new(4);
        is_woken(hub.attach(1, &["fdbb:1:1::/48".parse().expect("a prefix")]).expect("it is new"));
    }
}
