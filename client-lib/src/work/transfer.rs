//! Ranges that are read into the caller's memory, written from it, or zeroed.

use bluebridge_protocol::requester::{Operation, Output};
use bluebridge_wire::Pointer;

use super::{Work, lines};
use crate::error::Error;

/// A range of bytes that is read into the caller's memory, written from it, or zeroed.
pub(crate) trait Transfer {
    fn pointer(&self) -> Pointer;

    /// Bytes.
    fn length(&self) -> u64;

    /// The operation on one line's part of it.
    fn operation(&self, pointer: Pointer, length: u32) -> Operation;

    /// The caller's bytes that are sent; empty if none are.
    fn outgoing(&self) -> &[u8] {
        &[]
    }

    /// The caller's bytes that are received; empty if none are.
    fn incoming(&mut self) -> &mut [u8] {
        &mut []
    }

    /// A line's operation ended.
    fn settle(&mut self, line: u32, result: Result<Output, Error>);

    /// Whether its other lines are useless now.
    fn is_failed(&self) -> bool;
}

/// Ranges as one piece of work, line by line.
pub(crate) struct Transfers<'a, R>(pub(crate) &'a mut [R]);

impl<R: Transfer> Work for Transfers<'_, R> {
    fn task_count(&self) -> usize {
        self.0.len()
    }

    fn operation_count(&self, task: usize) -> Result<u32, Error> {
        let range = self.0.get(task).ok_or(Error::Length)?;
        lines::count(range.pointer(), range.length())
    }

    fn operation(&self, task: usize, line: u32) -> Result<(Operation, Option<Pointer>), Error> {
        let range = self.0.get(task).ok_or(Error::Length)?;
        let (pointer, length) = lines::piece(range.pointer(), range.length(), line)?;
        Ok((range.operation(pointer, length), Some(pointer)))
    }

    fn outgoing(&self, task: usize, line: u32) -> &[u8] {
        let Some(range) = self.0.get(task) else { return &[] };
        let bytes = lines::bytes(range.pointer(), range.length(), line);
        range.outgoing().get(bytes).unwrap_or_default()
    }

    fn incoming(&mut self, task: usize, line: u32) -> &mut [u8] {
        let Some(range) = self.0.get_mut(task) else { return &mut [] };
        let bytes = lines::bytes(range.pointer(), range.length(), line);
        range.incoming().get_mut(bytes).unwrap_or_default()
    }

    fn settle(&mut self, task: usize, line: u32, result: Result<Output, Error>) {
        if let Some(range) = self.0.get_mut(task) {
            range.settle(line, result);
        }
    }

    fn is_failed(&self, task: usize) -> bool {
        self.0.get(task).is_none_or(R::is_failed)
    }
}

/// What is known about the first page of a range.
///
/// An allocation is freed as a whole. So if the first page exists and a later one does not, the range
/// goes past the end of its allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RangeStart {
    is_there: bool,
}

impl RangeStart {
    /// Nothing is known yet.
    pub(crate) const UNKNOWN: Self = Self { is_there: false };

    /// Takes the result of a line of a range; keeps the first error, and for missing memory the
    /// lowest address.
    pub(crate) fn settle(
        &mut self,
        first: &mut Result<(), Error>,
        range: Pointer,
        line: u32,
        result: Result<Output, Error>,
    ) {
        self.is_there |= line == 0 && matches!(result, Ok(_) | Err(Error::PastEnd { .. }));
        if let Err(error) = result {
            let is_kept = match first.as_ref().err() {
                None => false,
                Some(kept) => match (kept.missing_memory(), error.missing_memory()) {
                    (Some(kept), Some(lower)) => kept <= lower,
                    _ => true,
                },
            };
            if !is_kept {
                *first = Err(error);
            }
        }
        if let Err(Error::Refused { .. }) = first
            && self.is_there
            && let Some(missing) = first.as_ref().err().and_then(Error::missing_memory)
            && missing.page_start() != range.page_start()
        {
            *first = Err(Error::PastEnd { pointer: missing });
        }
    }
}
