//! A client's side of the service.

use core::sync::atomic::{Ordering, fence};
use std::sync::Arc;

use bluebridge_protocol::Timestamp;

use super::{
    Service,
    ledger::{Entry, Ledger, SlotId, Writer},
};

/// A client's side of the service; only the client's thread uses it.
#[derive(Debug)]
pub(crate) struct Tenant {
    writer: Writer,
    service: Service,
}

impl Tenant {
    pub(super) fn new(service: Service, lease_count: u16) -> Self {
        let ledger = Arc::new(Ledger::new(lease_count.max(1)));
        service.handle.shared.add(&ledger);
        Self { writer: Writer::new(ledger), service }
    }

    pub(crate) const fn service(&self) -> &Service {
        &self.service
    }

    /// Records a lease; `None` if no slot is free.
    pub(crate) fn hold(&mut self, entry: &Entry, committed: &[u8]) -> Option<SlotId> {
        let id = match self.writer.hold(entry, committed) {
            None if self.reclaim() => self.writer.hold(entry, committed)?,
            id => id?,
        };
        let shared = &self.service.handle.shared;
        // The service thread publishes when it checks next, then checks the slots once more; either it sees
        // the slot, or this thread sees the published time.
        fence(Ordering::SeqCst);
        if entry.renew_at().as_nanos() < shared.next_look.load(Ordering::Relaxed) {
            shared.wake();
        }
        Some(id)
    }

    /// Records that a lease's COMMIT is about to be sent: the lease is still renewed, but no request is
    /// made to wait for it any more, nor served the old contents.
    pub(crate) fn begin_end(&self, id: SlotId) {
        self.writer.begin_end(id);
        self.wake_for_waiters();
    }

    /// Records that a lease is over.
    pub(crate) fn release(&mut self, id: SlotId) {
        self.writer.release(id);
        self.wake_for_waiters();
    }

    /// Wakes the thread if a request waits there for a lease to end.
    fn wake_for_waiters(&self) {
        fence(Ordering::SeqCst);
        let shared = &self.service.handle.shared;
        if shared.release_matters.load(Ordering::Relaxed) {
            shared.wake();
        }
    }

    /// Leaves the ABORT of a lease to the service.
    pub(crate) fn abandon(&self, id: SlotId) {
        self.writer.abandon(id);
        self.service.handle.shared.wake();
    }

    /// Until when the service renewed a lease, if it did.
    pub(crate) fn renewed(&self, id: SlotId) -> Option<Timestamp> {
        self.writer.renewed(id)
    }

    /// How many more leases fit.
    pub(crate) fn room(&mut self) -> usize {
        self.reclaim();
        self.writer.room()
    }

    /// Reclaims what was left to a service thread that has ended; false if it still runs.
    fn reclaim(&mut self) -> bool {
        let has_ended = self.service.handle.shared.failure.get().is_some();
        if has_ended {
            self.writer.reclaim();
        }
        has_ended
    }
}

#[cfg(test)]
mod tests {
    use bluebridge_transport::memory::Hub;
    use bluebridge_wire::{NodeId, Space, UDP_PORT};

    use super::*;
    use crate::EndpointConfig;

    #[test]
    fn nothing_is_kept_for_a_thread_that_has_ended() {
        let hub = Hub::new(16);
        let carrier = hub.attach(UDP_PORT, &[]).expect("there is room");
        let config = EndpointConfig::new(Space(1), NodeId(1000), 1);
        let service = Service::start(&config, carrier).expect("a thread");
        let shared = Arc::clone(&service.handle.shared);
        shared.fail("the test needs it".to_owned());
        for _ in 0..10 {
            let tenant = Tenant::new(service.clone(), 1);
            assert_eq!(Arc::strong_count(&tenant.writer.ledger), 1, "it has no other user");
        }
        assert!(shared.ledgers().is_empty());
    }
}
