//! A link that can be closed: what is sent through it is lost, and nothing arrives.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, Polled, ReceiveError, Timestamp, TransmitError,
    Transport, Wait,
};

/// Whether links are closed; shared with the test.
pub(crate) type Closed = Arc<AtomicBool>;

/// A carrier behind a link that can be closed.
pub(crate) struct Gate<T> {
    inner: T,
    closed: Closed,
}

impl<T> Gate<T> {
    pub(crate) fn new(inner: T, closed: &Closed) -> Self {
        Self { inner, closed: Arc::clone(closed) }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }
}

impl<T: Transport> Transport for Gate<T> {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn counters(&self) -> Counters {
        self.inner.counters()
    }

    fn local_port(&self) -> u16 {
        self.inner.local_port()
    }

    fn now(&self) -> Timestamp {
        self.inner.now()
    }

    fn received_at(&self) -> Timestamp {
        self.inner.received_at()
    }

    fn polled(&self) -> Polled {
        self.inner.polled()
    }

    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        if self.is_closed() { Ok(batch.len()) } else { self.inner.transmit(batch) }
    }

    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        let count = self.inner.receive(wait)?;
        Ok(if self.is_closed() { 0 } else { count })
    }

    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.inner.incoming(index)
    }
}
