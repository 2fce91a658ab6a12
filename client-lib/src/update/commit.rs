//! The end of an update: its lines one after the other, or none.

use core::time::Duration;

use bluebridge_protocol::requester::{Answer, Buffers, Operation};
use bluebridge_transport::Transport;
use bluebridge_wire::Pointer;

use super::Held;
use crate::{client::Client, drive::Work, error::Error};

impl<T: Transport> Client<T> {
    /// Commits all parts in their order.
    pub(super) fn commit_update<'a>(
        &mut self,
        mut held: Vec<Held>,
        bytes: impl Fn(&Held) -> &'a [u8],
    ) -> Result<(), Error> {
        let mut committed_bytes = 0;
        let mut result = if held.len() > 1 { self.renew_late(&mut held) } else { Ok(()) };
        let mut done = 0;
        while let (Ok(()), Some(part)) = (&result, held.get(done).copied()) {
            done += 1;
            let operation = Operation::Commit {
                pointer: part.pointer,
                length: part.length,
                epoch: part.lease.epoch,
            };
            // Before the home has the new bytes: nobody is served the old ones afterwards.
            self.begin_end(&part);
            let answer = self.turn(operation, part.pointer, bytes(&part), &mut [], self.deadline);
            match &answer {
                Ok(_) | Err(Error::LeaseLost { .. }) => self.release(&part),
                // The lease may run on; nobody shall wait for its end longer than needed.
                Err(_) => self.abandon(&part),
            }
            match answer {
                Ok(_) => committed_bytes += u64::from(part.length),
                Err(cause) if committed_bytes == 0 => result = Err(cause),
                Err(cause) => {
                    result = Err(Error::PartlyCommitted {
                        pointer: part.pointer,
                        committed_bytes,
                        cause: Box::new(cause),
                    });
                }
            }
        }
        held.drain(..done);
        if result.is_err() && !held.is_empty() {
            self.drop_update(held);
        } else {
            self.recycle(held);
        }
        result
    }

    /// Gives all parts free.
    pub(super) fn abort_update(&mut self, mut held: Vec<Held>) -> Result<(), Error> {
        let result = self.abort_held(&mut held, self.deadline);
        self.recycle(held);
        result
    }

    /// Renews all leases if one has less than half of its time left.
    pub(super) fn renew_late(&mut self, held: &mut [Held]) -> Result<(), Error> {
        let now = self.driver.now();
        for part in &mut *held {
            if let Some(renewed) = self.renewed(part) {
                part.lease.expires_at = part.lease.expires_at.max(renewed);
            }
        }
        if !held.iter().any(|part| part.is_late(now)) {
            return Ok(());
        }
        let mut sweep = Sweep { held, kind: Kind::Renew, failed: None, error: None };
        self.driver.run(&mut sweep, self.deadline)?;
        sweep.error.map_or(Ok(()), Err)
    }

    /// Sends the ABORTs; what is not answered is left to the service.
    pub(super) fn abort_held(
        &mut self,
        held: &mut [Held],
        deadline: Duration,
    ) -> Result<(), Error> {
        let mut sweep = Sweep { held, kind: Kind::Abort, failed: None, error: None };
        let ran = self.driver.run(&mut sweep, deadline);
        let error = sweep.error.take();
        for part in &*held {
            if part.is_over {
                self.release(part);
            } else {
                self.abandon(part);
            }
        }
        ran.and(error.map_or(Ok(()), Err))
    }

    /// How long all leases hold.
    pub(super) fn time_left(&self, held: &[Held]) -> Duration {
        let now = self.driver.now();
        let ends = held.iter().map(|part| {
            let renewed = self.renewed(part).unwrap_or(part.lease.expires_at);
            renewed.max(part.lease.expires_at).saturating_since(now)
        });
        ends.min().unwrap_or_default()
    }

    fn renewed(&self, part: &Held) -> Option<bluebridge_protocol::Instant> {
        self.tenant.as_ref()?.renewed(part.slot?)
    }

    fn begin_end(&self, part: &Held) {
        if let (Some(tenant), Some(slot)) = (&self.tenant, part.slot) {
            tenant.begin_end(slot);
        }
    }

    fn release(&mut self, part: &Held) {
        if let (Some(tenant), Some(slot)) = (&mut self.tenant, part.slot) {
            tenant.release(slot);
        }
    }

    fn abandon(&mut self, part: &Held) {
        if let (Some(tenant), Some(slot)) = (&mut self.tenant, part.slot) {
            tenant.abandon(slot);
        }
    }
}

enum Kind {
    Abort,
    Renew,
}

/// The same operation on every part, all at once.
struct Sweep<'a> {
    held: &'a mut [Held],
    kind: Kind,
    /// The part that failed last.
    failed: Option<usize>,
    /// The first error.
    error: Option<Error>,
}

impl Buffers for Sweep<'_> {
    fn outgoing(&self, _token: u64) -> &[u8] {
        &[]
    }

    fn incoming(&mut self, _token: u64) -> &mut [u8] {
        &mut []
    }
}

impl Work for Sweep<'_> {
    fn transfer_count(&self) -> usize {
        self.held.len()
    }

    fn line_count(&self, _transfer: usize) -> Result<u32, Error> {
        Ok(1)
    }

    fn operation(
        &self,
        transfer: usize,
        _line: u32,
    ) -> Result<(Operation, Option<Pointer>), Error> {
        let part = self.held.get(transfer).ok_or(Error::Length)?;
        let (pointer, length, epoch) = (part.pointer, part.length, part.lease.epoch);
        let operation = match self.kind {
            Kind::Abort => Operation::Abort { pointer, length, epoch },
            Kind::Renew => {
                let lease_ms = part.lease.granted_ms;
                Operation::Renew { pointer, length, epoch, lease_ms }
            }
        };
        Ok((operation, Some(pointer)))
    }

    fn settle(&mut self, transfer: usize, _line: u32, result: Result<Answer, Error>) {
        let Some(part) = self.held.get_mut(transfer) else { return };
        match (&self.kind, result) {
            (Kind::Renew, Ok(Answer::Leased(lease))) => part.lease = lease,
            // A lease that is lost needs no ABORT.
            (Kind::Abort, Ok(_) | Err(Error::LeaseLost { .. })) => part.is_over = true,
            (_, result) => {
                let error = result.err().unwrap_or(Error::Violation { node: part.pointer.node });
                self.failed = Some(transfer);
                self.error.get_or_insert(error);
            }
        }
    }

    fn is_failed(&self, transfer: usize) -> bool {
        self.failed == Some(transfer)
    }
}
