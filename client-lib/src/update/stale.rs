//! Reading without waiting for an owner.

use bluebridge_protocol::requester::{Operation, Output};
use bluebridge_transport::Transport;
use bluebridge_wire::Pointer;

use crate::{
    client::Client,
    error::Error,
    many::ReadRequest,
    work::transfer::{Transfer, Transfers},
};

impl<T: Transport> Client<T> {
    /// Reads `buffer.len()` bytes; of pages that are being updated, the last committed contents.
    /// Returns whether there were such pages.
    ///
    /// # Errors
    /// [`Error`]; the buffer's contents are then unspecified.
    pub fn read_stale(&mut self, pointer: Pointer, buffer: &mut [u8]) -> Result<bool, Error> {
        let mut reads = [StaleRead { read: ReadRequest::new(pointer, buffer), is_stale: false }];
        self.driver.run(&mut Transfers(&mut reads), self.deadline)?;
        let [StaleRead { read, is_stale }] = reads;
        read.result.map(|()| is_stale)
    }
}

/// A READ that accepts the last committed contents.
struct StaleRead<'a> {
    read: ReadRequest<'a>,
    is_stale: bool,
}

impl Transfer for StaleRead<'_> {
    fn pointer(&self) -> Pointer {
        self.read.pointer()
    }

    fn length(&self) -> u64 {
        self.read.length()
    }

    fn operation(&self, pointer: Pointer, length: u32) -> Operation {
        Operation::ReadStale { pointer, length }
    }

    fn incoming(&mut self) -> &mut [u8] {
        self.read.incoming()
    }

    fn settle(&mut self, line: u32, result: Result<Output, Error>) {
        self.is_stale |= matches!(result, Ok(Output::Read { stale: true }));
        self.read.settle(line, result);
    }

    fn is_failed(&self) -> bool {
        self.read.is_failed()
    }
}
