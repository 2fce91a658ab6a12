//! A carrier that says when it sends.

use bluebridge_transport::{
    Capabilities, Counters, Incoming, Outgoing, Polled, ReceiveError, Timestamp, TransmitError,
    Wait,
};

use super::*;

/// A carrier, and what is done each time before it sends.
pub(super) struct Before<F>(pub(super) MemoryTransport, pub(super) F);

impl<F: FnMut() + Send> Transport for Before<F> {
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }

    fn counters(&self) -> Counters {
        self.0.counters()
    }

    fn local_port(&self) -> u16 {
        self.0.local_port()
    }

    fn now(&self) -> Timestamp {
        self.0.now()
    }

    fn received_at(&self) -> Timestamp {
        self.0.received_at()
    }

    fn polled(&self) -> Polled {
        self.0.polled()
    }

    fn transmit(&mut self, batch: &[Outgoing<'_>]) -> Result<usize, TransmitError> {
        (self.1)();
        self.0.transmit(batch)
    }

    fn receive(&mut self, wait: Wait) -> Result<usize, ReceiveError> {
        self.0.receive(wait)
    }

    fn incoming(&self, index: usize) -> Incoming<'_> {
        self.0.incoming(index)
    }
}
