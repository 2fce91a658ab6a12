//! Getting and freeing many allocations at once.

use bluebridge_protocol::requester::{Operation, Output};
use bluebridge_wire::Pointer;

use super::Work;
use crate::{
    allocate_many::{CreateRequest, DeleteRequest},
    error::Error,
};

/// CREATEs and ALLOC_WRITEs, those whose place was chosen.
pub(crate) struct Creations<'a, 'b>(pub(crate) &'a mut [CreateRequest<'b>]);

impl Work for Creations<'_, '_> {
    fn task_count(&self) -> usize {
        self.0.len()
    }

    fn operation_count(&self, task: usize) -> Result<u32, Error> {
        let request = self.0.get(task).ok_or(Error::Length)?;
        Ok(u32::from(request.operation().is_some()))
    }

    fn operation(&self, task: usize, _number: u32) -> Result<(Operation, Option<Pointer>), Error> {
        let operation = self.0.get(task).and_then(CreateRequest::operation);
        Ok((operation.ok_or(Error::Length)?, None))
    }

    fn outgoing(&self, task: usize, _number: u32) -> &[u8] {
        self.0.get(task).map_or(&[], CreateRequest::data)
    }

    fn settle(&mut self, task: usize, _number: u32, result: Result<Output, Error>) {
        if let Some(request) = self.0.get_mut(task) {
            request.settle(result);
        }
    }
}

/// DELETEs of whole allocations.
pub(crate) struct Deletions<'a>(pub(crate) &'a mut [DeleteRequest]);

impl Work for Deletions<'_> {
    fn task_count(&self) -> usize {
        self.0.len()
    }

    fn operation(&self, task: usize, _number: u32) -> Result<(Operation, Option<Pointer>), Error> {
        let region = self.0.get(task).ok_or(Error::Length)?.region;
        let (pointer, pages) = (region.base(), crate::allocate::pages(region.length_bytes())?);
        Ok((Operation::Delete { pointer, pages }, Some(pointer)))
    }

    fn settle(&mut self, task: usize, _number: u32, result: Result<Output, Error>) {
        if let Some(request) = self.0.get_mut(task) {
            request.result = result.map(|_| ());
        }
    }
}
