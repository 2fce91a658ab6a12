//! The end of all sessions.

use bluebridge_protocol::requester::{Operation, Output, Server};
use bluebridge_wire::Pointer;

use super::Work;
use crate::error::Error;

/// CLOSEs of the sessions with these servers.
pub(crate) struct Closing(pub(crate) Vec<Server>);

impl Work for Closing {
    fn task_count(&self) -> usize {
        self.0.len()
    }

    fn operation(&self, task: usize, _number: u32) -> Result<(Operation, Option<Pointer>), Error> {
        let server = *self.0.get(task).ok_or(Error::Length)?;
        Ok((Operation::Close { server }, None))
    }

    /// A server that does not respond ends the session itself, when it expires.
    fn settle(&mut self, _task: usize, _number: u32, _result: Result<Output, Error>) {}
}
