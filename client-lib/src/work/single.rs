//! One operation.

use bluebridge_protocol::requester::{Operation, Output};
use bluebridge_wire::Pointer;

use super::Work;
use crate::error::Error;

/// One operation, with the bytes that it sends and the buffer for those that it receives.
pub(crate) struct Single<'a> {
    operation: Operation,
    pointer: Option<Pointer>,
    outgoing: &'a [u8],
    incoming: &'a mut [u8],
    result: Option<Result<Output, Error>>,
}

impl<'a> Single<'a> {
    /// `pointer` is the memory that the operation is about, for its errors.
    pub(crate) const fn new(
        operation: Operation,
        pointer: Option<Pointer>,
        outgoing: &'a [u8],
        incoming: &'a mut [u8],
    ) -> Self {
        Self { operation, pointer, outgoing, incoming, result: None }
    }

    /// The result, once the driver has run it.
    pub(crate) fn result(self) -> Result<Output, Error> {
        self.result.unwrap_or(Err(Error::Length))
    }
}

impl Work for Single<'_> {
    fn task_count(&self) -> usize {
        1
    }

    fn operation(&self, _task: usize, _number: u32) -> Result<(Operation, Option<Pointer>), Error> {
        Ok((self.operation, self.pointer))
    }

    fn outgoing(&self, _task: usize, _number: u32) -> &[u8] {
        self.outgoing
    }

    fn incoming(&mut self, _task: usize, _number: u32) -> &mut [u8] {
        self.incoming
    }

    fn settle(&mut self, _task: usize, _number: u32, result: Result<Output, Error>) {
        self.result = Some(result);
    }
}
