//! Reading without waiting for an owner.

use bluebridge_protocol::requester::{Answer, Buffers, Operation};
use bluebridge_transport::Transport;
use bluebridge_wire::Pointer;

use crate::{
    client::Client,
    drive::Work,
    error::Error,
    many::{ReadRequest, Transfers},
};

impl<T: Transport> Client<T> {
    /// Reads `buffer.len()` bytes; of pages that somebody is updating, what was committed last.
    /// Answers whether there were any.
    ///
    /// # Errors
    /// [`Error`]; the buffer's contents are then unspecified.
    pub fn read_stale(&mut self, pointer: Pointer, buffer: &mut [u8]) -> Result<bool, Error> {
        let mut requests = [ReadRequest::new(pointer, buffer)];
        let mut work = StaleReads { reads: Transfers(&mut requests), is_stale: false };
        self.driver.run(&mut work, self.deadline)?;
        let is_stale = work.is_stale;
        let [request] = requests;
        request.result.map(|()| is_stale)
    }
}

/// READs that take the last committed contents.
struct StaleReads<'a, 'b> {
    reads: Transfers<'a, ReadRequest<'b>>,
    is_stale: bool,
}

impl Buffers for StaleReads<'_, '_> {
    fn outgoing(&self, token: u64) -> &[u8] {
        self.reads.outgoing(token)
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        self.reads.incoming(token)
    }
}

impl Work for StaleReads<'_, '_> {
    fn transfer_count(&self) -> usize {
        self.reads.transfer_count()
    }

    fn line_count(&self, transfer: usize) -> Result<u32, Error> {
        self.reads.line_count(transfer)
    }

    fn operation(&self, transfer: usize, line: u32) -> Result<(Operation, Option<Pointer>), Error> {
        let (operation, at) = self.reads.operation(transfer, line)?;
        Ok(match operation {
            Operation::Read { pointer, length } => (Operation::ReadStale { pointer, length }, at),
            other => (other, at),
        })
    }

    fn settle(&mut self, transfer: usize, line: u32, result: Result<Answer, Error>) {
        self.is_stale |= matches!(result, Ok(Answer::Read { stale: true }));
        self.reads.settle(transfer, line, result);
    }

    fn is_failed(&self, transfer: usize) -> bool {
        self.reads.is_failed(transfer)
    }
}
