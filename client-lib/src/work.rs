//! The operations of a call, as the driver sees them.
//!
//! A call is one [`Work`]: some tasks, each of one or more operations of the protocol. The driver
//! (`drive.rs`) begins the operations in order, keeps as many in flight as fit, and
//! returns each result by [`Work::settle`]. Only the driver keeps the position in the work, so no
//! implementation can make a call run without end.
//!
//! * `lines`: how a range of any length is cut into operations of at most a line each.
//! * `transfer`: ranges that are read, written or zeroed; a task is a range, its operations are lines.
//! * `single`: one operation, with what it sends and receives.
//! * `allocation`: many CREATEs, ALLOC_WRITEs or DELETEs.
//! * `close`: the CLOSEs of all sessions.
//! * `sweep`: the RENEWs or ABORTs of all parts of an update.

pub(crate) mod allocation;
pub(crate) mod close;
pub(crate) mod lines;
pub(crate) mod single;
pub(crate) mod sweep;
pub(crate) mod transfer;

use bluebridge_protocol::requester::{Buffers, Operation, Output};
use bluebridge_wire::Pointer;

use crate::error::Error;

/// A call's operations: tasks, each of one or more operations.
///
/// Tasks and the operations of each are numbered from 0. Each operation is begun once, and one that
/// cannot be begun ends its task.
pub(crate) trait Work {
    /// How many tasks there are.
    fn task_count(&self) -> usize;

    /// How many operations a task has; most have one.
    ///
    /// # Errors
    /// If it cannot be begun.
    fn operation_count(&self, _task: usize) -> Result<u32, Error> {
        Ok(1)
    }

    /// One of them, and the memory it is about.
    ///
    /// # Errors
    /// If it cannot be begun.
    fn operation(&self, task: usize, number: u32) -> Result<(Operation, Option<Pointer>), Error>;

    /// The caller's bytes that an operation sends; most send none.
    fn outgoing(&self, _task: usize, _number: u32) -> &[u8] {
        &[]
    }

    /// The caller's bytes that an operation receives; most receive none.
    fn incoming(&mut self, _task: usize, _number: u32) -> &mut [u8] {
        &mut []
    }

    /// An operation ended, or could not be begun.
    fn settle(&mut self, task: usize, number: u32, result: Result<Output, Error>);

    /// Whether the operations of a task that were not begun are useless now, because of the results
    /// so far.
    fn is_failed(&self, _task: usize) -> bool {
        false
    }
}

/// The buffers of a work for the requester, by the token of an operation.
pub(crate) struct Memory<'a, W>(pub(crate) &'a mut W);

impl<W: Work> Buffers for Memory<'_, W> {
    fn outgoing(&self, token: u64) -> &[u8] {
        let (task, number) = untoken(token);
        self.0.outgoing(task, number)
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        let (task, number) = untoken(token);
        self.0.incoming(task, number)
    }
}

/// For operations that neither send nor receive bytes.
pub(crate) struct NoMemory;

impl Buffers for NoMemory {
    fn outgoing(&self, _token: u64) -> &[u8] {
        &[]
    }

    fn incoming(&mut self, _token: u64) -> &mut [u8] {
        &mut []
    }
}

/// A task and an operation of it, encoded in the operation's token.
pub(crate) fn token(task: usize, number: u32) -> u64 {
    ((task as u64) << 32) | u64::from(number)
}

/// The task and operation from which [`token`] was made.
pub(crate) fn untoken(token: u64) -> (usize, u32) {
    let number = u32::try_from(token & u64::from(u32::MAX)).unwrap_or(0);
    (usize::try_from(token >> 32).unwrap_or(usize::MAX), number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_token_leads_back(task in 0..1_usize << 32, number: u32) {
            prop_assert_eq!(untoken(token(task, number)), (task, number));
        }
    }
}
