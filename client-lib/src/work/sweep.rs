//! The same operation on every part of an update, all at once.

use bluebridge_protocol::requester::{Operation, Output};
use bluebridge_wire::Pointer;

use super::Work;
use crate::{error::Error, update::Held};

/// What is done with the leases.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SweepKind {
    /// They are released.
    Abort,
    /// They are extended by as long as they were granted for.
    Renew,
}

/// A RENEW or an ABORT of each part.
pub(crate) struct Sweep<'a> {
    held: &'a mut [Held],
    kind: SweepKind,
    error: Option<Error>,
}

impl<'a> Sweep<'a> {
    pub(crate) const fn new(held: &'a mut [Held], kind: SweepKind) -> Self {
        Self { held, kind, error: None }
    }

    /// The first error, once the driver has run it.
    pub(crate) fn result(self) -> Result<(), Error> {
        self.error.map_or(Ok(()), Err)
    }
}

impl Work for Sweep<'_> {
    fn task_count(&self) -> usize {
        self.held.len()
    }

    fn operation(&self, task: usize, _number: u32) -> Result<(Operation, Option<Pointer>), Error> {
        let part = self.held.get(task).ok_or(Error::Length)?;
        let Held { pointer, length, lease, .. } = *part;
        let epoch = lease.epoch;
        let operation = match self.kind {
            SweepKind::Abort => Operation::Abort { pointer, length, epoch },
            SweepKind::Renew => {
                Operation::Renew { pointer, length, epoch, lease_ms: lease.granted_ms }
            }
        };
        Ok((operation, Some(pointer)))
    }

    fn settle(&mut self, task: usize, _number: u32, result: Result<Output, Error>) {
        let Some(part) = self.held.get_mut(task) else { return };
        match (self.kind, result) {
            (SweepKind::Renew, Ok(Output::Leased(lease))) => part.lease = lease,
            // A lease that is lost needs no ABORT.
            (SweepKind::Abort, Ok(_) | Err(Error::LeaseLost { .. })) => part.is_over = true,
            (_, result) => {
                let error = result.err().unwrap_or(Error::Violation { node: part.pointer.node });
                self.error.get_or_insert(error);
            }
        }
    }
}
