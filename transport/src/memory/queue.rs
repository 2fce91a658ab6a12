//! A bounded queue of datagrams whose buffers are reused.

use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::collections::VecDeque;
use std::net::Ipv6Addr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::Outgoing;

/// A datagram in transit, in its own buffer.
#[derive(Debug)]
pub(super) struct Datagram {
    pub(super) source: Ipv6Addr,
    pub(super) source_port: u16,
    pub(super) destination: Ipv6Addr,
    pub(super) payload: Vec<u8>,
}

/// Datagrams that wait for one endpoint, at most `limit`.
#[derive(Debug)]
pub(crate) struct Queue {
    limit: usize,
    state: Mutex<State>,
    arrival: Condvar,
    has_datagrams: AtomicBool,
    overflow_count: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Datagram>,
    /// Buffers to reuse; at most as many as ever waited or were held by the receiver.
    spare: Vec<Vec<u8>>,
    /// The receiver's next sleep must end at once.
    is_woken: bool,
    /// The receiver sleeps. Waking costs a system call, so it is done only then.
    is_parked: bool,
}

impl Queue {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            state: Mutex::default(),
            arrival: Condvar::new(),
            has_datagrams: AtomicBool::new(false),
            overflow_count: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a copy of `datagram`, or counts an overflow.
    pub(super) fn push(&self, datagram: &Outgoing<'_>, source_port: u16) {
        let mut state = self.lock();
        if state.waiting.len() >= self.limit {
            self.overflow_count.fetch_add(1, Ordering::Relaxed);
            return;
        }
        let mut payload = state.spare.pop().unwrap_or_default();
        payload.clear();
        payload.extend_from_slice(datagram.header);
        payload.extend_from_slice(datagram.data);
        let Outgoing { source, destination, .. } = *datagram;
        state.waiting.push_back(Datagram { source, source_port, destination, payload });
        self.has_datagrams.store(true, Ordering::Release);
        let is_parked = state.is_parked;
        drop(state);
        if is_parked {
            self.arrival.notify_one();
        }
    }

    /// Takes the buffers in `arrivals` back and puts at most `count` waiting datagrams there.
    pub(super) fn exchange(&self, arrivals: &mut Vec<Datagram>, count: usize) {
        if arrivals.is_empty() && !self.has_datagrams() {
            return;
        }
        let mut state = self.lock();
        state.spare.extend(arrivals.drain(..).map(|datagram| datagram.payload));
        let count = count.min(state.waiting.len());
        arrivals.extend(state.waiting.drain(..count));
        self.has_datagrams.store(!state.waiting.is_empty(), Ordering::Release);
    }

    pub(super) fn has_datagrams(&self) -> bool {
        self.has_datagrams.load(Ordering::Acquire)
    }

    /// Ends the receiver's present sleep, or its next.
    pub(crate) fn wake(&self) {
        let mut state = self.lock();
        state.is_woken = true;
        drop(state);
        self.arrival.notify_one();
    }

    /// Sleeps until a datagram waits, another thread wakes it, or `timeout` has passed; false only after a timeout.
    pub(super) fn park(&self, timeout: Duration) -> bool {
        let mut state = self.lock();
        state.is_parked = true;
        let waited = self.arrival.wait_timeout_while(state, timeout, |state| {
            state.waiting.is_empty() && !state.is_woken
        });
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        state.is_parked = false;
        let is_woken = core::mem::take(&mut state.is_woken);
        is_woken || !state.waiting.is_empty()
    }

    pub(super) fn overflow_count(&self) -> u64 {
        self.overflow_count.load(Ordering::Relaxed)
    }
}
