//! The end of an update: its lines are committed one after the other, or none is.

use core::time::Duration;

use bluebridge_protocol::requester::Operation;
use bluebridge_transport::Transport;

use super::Held;
use crate::{
    client::Client,
    error::Error,
    work::{
        single::Single,
        sweep::{Sweep, SweepKind},
    },
};

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
            // Before the home has the new bytes, so that no client gets the old ones afterwards.
            self.begin_end(&part);
            let commit = Single::new(operation, Some(part.pointer), bytes(&part), &mut []);
            let answer = self.run_single(commit, self.deadline);
            match &answer {
                Ok(_) | Err(Error::LeaseLost { .. }) => self.release(&part),
                // The lease may still be valid; other clients should not wait for its end longer than necessary.
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

    /// Releases the leases of all parts.
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
        let mut sweep = Sweep::new(held, SweepKind::Renew);
        self.driver.run(&mut sweep, self.deadline)?;
        sweep.result()
    }

    /// Sends the ABORTs; those without a response are left to the service.
    pub(super) fn abort_held(
        &mut self,
        held: &mut [Held],
        deadline: Duration,
    ) -> Result<(), Error> {
        let mut sweep = Sweep::new(held, SweepKind::Abort);
        let ran = self.driver.run(&mut sweep, deadline);
        let swept = sweep.result();
        for part in &*held {
            if part.is_over {
                self.release(part);
            } else {
                self.abandon(part);
            }
        }
        ran.and(swept)
    }

    /// How long all leases are valid.
    pub(super) fn time_left(&self, held: &[Held]) -> Duration {
        let now = self.driver.now();
        let ends = held.iter().map(|part| {
            let renewed = self.renewed(part).unwrap_or(part.lease.expires_at);
            renewed.max(part.lease.expires_at).saturating_since(now)
        });
        ends.min().unwrap_or_default()
    }

    fn renewed(&self, part: &Held) -> Option<bluebridge_protocol::Timestamp> {
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
