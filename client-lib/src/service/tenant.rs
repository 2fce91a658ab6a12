//! A client's side of the service.

use core::sync::atomic::{Ordering, fence};
use std::sync::Arc;

use bluebridge_protocol::Instant;

use super::{
    Service,
    ledger::{Entry, Ledger, SlotId, Writer},
};

/// A client's side of the service; told by the client's thread alone.
#[derive(Debug)]
pub(crate) struct Tenant {
    writer: Writer,
    service: Service,
}

impl Tenant {
    pub(super) fn new(service: Service, lease_count: u16) -> Self {
        let ledger = Arc::new(Ledger::new(lease_count.max(1)));
        let shared = &service.handle.shared;
        shared.ledgers().push(Arc::clone(&ledger));
        shared.ledger_count.fetch_add(1, Ordering::Release);
        Self { writer: Writer::new(ledger), service }
    }

    pub(crate) const fn service(&self) -> &Service {
        &self.service
    }

    /// Tells of a lease; `None` if there is no room.
    pub(crate) fn hold(&mut self, entry: &Entry, committed: &[u8]) -> Option<SlotId> {
        let id = self.writer.hold(entry, committed)?;
        let shared = &self.service.handle.shared;
        // The thread says when it looks next, then looks at the slots once more; either it sees
        // the slot, or this thread sees what it said.
        fence(Ordering::SeqCst);
        if entry.renew_at().as_nanos() < shared.next_look.load(Ordering::Relaxed) {
            shared.wake();
        }
        Some(id)
    }

    /// Tells that a lease is over.
    pub(crate) fn release(&mut self, id: SlotId) {
        self.writer.release(id);
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
    pub(crate) fn renewed(&self, id: SlotId) -> Option<Instant> {
        self.writer.renewed(id)
    }

    /// How many more leases there is room for.
    pub(crate) fn room(&mut self) -> usize {
        self.writer.room()
    }
}
