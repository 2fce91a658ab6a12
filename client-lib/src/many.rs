//! Ranges as they are read, written and zeroed, pipelined over all the servers that they are on.

use bluebridge_protocol::requester::{Operation, Output};
use bluebridge_wire::Pointer;

use crate::{
    error::Error,
    work::transfer::{RangeStart, Transfer},
};

/// A range to read.
#[derive(Debug)]
pub struct ReadRequest<'a> {
    /// The first byte.
    pub pointer: Pointer,
    /// Where the bytes go; its length is the range's.
    pub buffer: &'a mut [u8],
    /// The result; the call sets it.
    pub result: Result<(), Error>,
    start: RangeStart,
}

impl<'a> ReadRequest<'a> {
    /// A request that was not sent yet.
    #[must_use]
    pub const fn new(pointer: Pointer, buffer: &'a mut [u8]) -> Self {
        Self { pointer, buffer, result: Ok(()), start: RangeStart::UNKNOWN }
    }
}

/// A range to write.
#[derive(Debug)]
pub struct WriteRequest<'a> {
    /// The first byte.
    pub pointer: Pointer,
    /// The bytes.
    pub data: &'a [u8],
    /// The result; the call sets it.
    pub result: Result<(), Error>,
    start: RangeStart,
}

impl<'a> WriteRequest<'a> {
    /// A request that was not sent yet.
    #[must_use]
    pub const fn new(pointer: Pointer, data: &'a [u8]) -> Self {
        Self { pointer, data, result: Ok(()), start: RangeStart::UNKNOWN }
    }
}

impl Transfer for ReadRequest<'_> {
    fn pointer(&self) -> Pointer {
        self.pointer
    }

    fn length(&self) -> u64 {
        self.buffer.len() as u64
    }

    fn operation(&self, pointer: Pointer, length: u32) -> Operation {
        Operation::Read { pointer, length }
    }

    fn incoming(&mut self) -> &mut [u8] {
        self.buffer
    }

    fn settle(&mut self, line: u32, result: Result<Output, Error>) {
        self.start.settle(&mut self.result, self.pointer, line, result);
    }

    fn is_failed(&self) -> bool {
        self.result.is_err()
    }
}

impl Transfer for WriteRequest<'_> {
    fn pointer(&self) -> Pointer {
        self.pointer
    }

    fn length(&self) -> u64 {
        self.data.len() as u64
    }

    fn operation(&self, pointer: Pointer, length: u32) -> Operation {
        Operation::Write { pointer, length }
    }

    fn outgoing(&self) -> &[u8] {
        self.data
    }

    fn settle(&mut self, line: u32, result: Result<Output, Error>) {
        self.start.settle(&mut self.result, self.pointer, line, result);
    }

    fn is_failed(&self) -> bool {
        self.result.is_err()
    }
}

/// A range to be zeroed.
pub(crate) struct ZeroRequest {
    pointer: Pointer,
    length: u64,
    pub(crate) result: Result<(), Error>,
    start: RangeStart,
}

impl ZeroRequest {
    pub(crate) const fn new(pointer: Pointer, length: u64) -> Self {
        Self { pointer, length, result: Ok(()), start: RangeStart::UNKNOWN }
    }
}

impl Transfer for ZeroRequest {
    fn pointer(&self) -> Pointer {
        self.pointer
    }

    fn length(&self) -> u64 {
        self.length
    }

    fn operation(&self, pointer: Pointer, length: u32) -> Operation {
        Operation::Zero { pointer, length }
    }

    fn settle(&mut self, line: u32, result: Result<Output, Error>) {
        self.start.settle(&mut self.result, self.pointer, line, result);
    }

    fn is_failed(&self) -> bool {
        self.result.is_err()
    }
}
