//! Many ranges at once, pipelined over all the servers that they are on.

use bluebridge_protocol::requester::{Answer, Buffers, Operation};
use bluebridge_wire::Pointer;

use crate::{
    drive::Work,
    error::Error,
    transfer::{self, RANGE_BYTES_MAX},
};

/// A range to read.
#[derive(Debug)]
pub struct ReadRequest<'a> {
    /// The first byte.
    pub pointer: Pointer,
    /// Where the bytes go; its length is the range's.
    pub buffer: &'a mut [u8],
    /// How it ended; the call sets it.
    pub result: Result<(), Error>,
}

impl<'a> ReadRequest<'a> {
    /// A request that was not made yet.
    #[must_use]
    pub const fn new(pointer: Pointer, buffer: &'a mut [u8]) -> Self {
        Self { pointer, buffer, result: Ok(()) }
    }
}

/// A range to write.
#[derive(Debug)]
pub struct WriteRequest<'a> {
    /// The first byte.
    pub pointer: Pointer,
    /// The bytes.
    pub data: &'a [u8],
    /// How it ended; the call sets it.
    pub result: Result<(), Error>,
}

impl<'a> WriteRequest<'a> {
    /// A request that was not made yet.
    #[must_use]
    pub const fn new(pointer: Pointer, data: &'a [u8]) -> Self {
        Self { pointer, data, result: Ok(()) }
    }
}

fn lines(pointer: Pointer, length: u64) -> Result<u32, Error> {
    if length == 0 || length > RANGE_BYTES_MAX {
        return Err(Error::Length);
    }
    u32::try_from(transfer::line_count(pointer, length)).map_err(|_| Error::Length)
}

/// The pointer and the length of one line's part of a range.
fn line(pointer: Pointer, length: u64, line: u32) -> Result<(Pointer, u32), Error> {
    let part = transfer::part(pointer, length, line);
    let start = pointer.checked_add(part.start).map_err(|_| Error::Length)?;
    let length = u32::try_from(part.end.saturating_sub(part.start)).map_err(|_| Error::Length)?;
    Ok((start, length))
}

fn bytes(pointer: Pointer, length: usize, line: u32) -> core::ops::Range<usize> {
    let part = transfer::part(pointer, length as u64, line);
    let at = |offset| usize::try_from(offset).unwrap_or(length).min(length);
    at(part.start)..at(part.end)
}

pub(crate) struct Reads<'a, 'b>(pub(crate) &'a mut [ReadRequest<'b>]);

impl Buffers for Reads<'_, '_> {
    fn outgoing(&self, _token: u64) -> &[u8] {
        &[]
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        let (transfer, line) = transfer::untoken(token);
        let Some(request) = self.0.get_mut(transfer) else { return &mut [] };
        let range = bytes(request.pointer, request.buffer.len(), line);
        request.buffer.get_mut(range).unwrap_or_default()
    }
}

impl Work for Reads<'_, '_> {
    fn transfer_count(&self) -> usize {
        self.0.len()
    }

    fn line_count(&self, transfer: usize) -> Result<u32, Error> {
        let request = self.0.get(transfer).ok_or(Error::Length)?;
        lines(request.pointer, request.buffer.len() as u64)
    }

    fn operation(&self, transfer: usize, at: u32) -> Result<(Operation, Option<Pointer>), Error> {
        let request = self.0.get(transfer).ok_or(Error::Length)?;
        let (pointer, length) = line(request.pointer, request.buffer.len() as u64, at)?;
        Ok((Operation::Read { pointer, length }, Some(pointer)))
    }

    fn settle(&mut self, transfer: usize, result: Result<Answer, Error>) {
        if let (Some(request), Err(error)) = (self.0.get_mut(transfer), result)
            && request.result.is_ok()
        {
            request.result = Err(error);
        }
    }

    fn is_failed(&self, transfer: usize) -> bool {
        self.0.get(transfer).is_none_or(|request| request.result.is_err())
    }
}

pub(crate) struct Writes<'a, 'b>(pub(crate) &'a mut [WriteRequest<'b>]);

impl Buffers for Writes<'_, '_> {
    fn outgoing(&self, token: u64) -> &[u8] {
        let (transfer, line) = transfer::untoken(token);
        let Some(request) = self.0.get(transfer) else { return &[] };
        request.data.get(bytes(request.pointer, request.data.len(), line)).unwrap_or_default()
    }

    fn incoming(&mut self, _token: u64) -> &mut [u8] {
        &mut []
    }
}

impl Work for Writes<'_, '_> {
    fn transfer_count(&self) -> usize {
        self.0.len()
    }

    fn line_count(&self, transfer: usize) -> Result<u32, Error> {
        let request = self.0.get(transfer).ok_or(Error::Length)?;
        lines(request.pointer, request.data.len() as u64)
    }

    fn operation(&self, transfer: usize, at: u32) -> Result<(Operation, Option<Pointer>), Error> {
        let request = self.0.get(transfer).ok_or(Error::Length)?;
        let (pointer, length) = line(request.pointer, request.data.len() as u64, at)?;
        Ok((Operation::Write { pointer, length }, Some(pointer)))
    }

    fn settle(&mut self, transfer: usize, result: Result<Answer, Error>) {
        if let (Some(request), Err(error)) = (self.0.get_mut(transfer), result)
            && request.result.is_ok()
        {
            request.result = Err(error);
        }
    }

    fn is_failed(&self, transfer: usize) -> bool {
        self.0.get(transfer).is_none_or(|request| request.result.is_err())
    }
}

/// Zeroes one range.
pub(crate) struct Zeroing {
    pub(crate) pointer: Pointer,
    pub(crate) length: u64,
    pub(crate) result: Result<(), Error>,
}

impl Buffers for Zeroing {
    fn outgoing(&self, _token: u64) -> &[u8] {
        &[]
    }

    fn incoming(&mut self, _token: u64) -> &mut [u8] {
        &mut []
    }
}

impl Work for Zeroing {
    fn transfer_count(&self) -> usize {
        1
    }

    fn line_count(&self, _transfer: usize) -> Result<u32, Error> {
        lines(self.pointer, self.length)
    }

    fn operation(&self, _transfer: usize, at: u32) -> Result<(Operation, Option<Pointer>), Error> {
        let (pointer, length) = line(self.pointer, self.length, at)?;
        Ok((Operation::Zero { pointer, length }, Some(pointer)))
    }

    fn settle(&mut self, _transfer: usize, result: Result<Answer, Error>) {
        if let Err(error) = result
            && self.result.is_ok()
        {
            self.result = Err(error);
        }
    }

    fn is_failed(&self, _transfer: usize) -> bool {
        self.result.is_err()
    }
}

/// One operation without a range, and what it sends.
pub(crate) struct Single<'a> {
    pub(crate) operation: Operation,
    pub(crate) pointer: Option<Pointer>,
    pub(crate) data: &'a [u8],
    pub(crate) result: Option<Result<Answer, Error>>,
}

impl Buffers for Single<'_> {
    fn outgoing(&self, _token: u64) -> &[u8] {
        self.data
    }

    fn incoming(&mut self, _token: u64) -> &mut [u8] {
        &mut []
    }
}

impl Work for Single<'_> {
    fn transfer_count(&self) -> usize {
        1
    }

    fn line_count(&self, _transfer: usize) -> Result<u32, Error> {
        Ok(1)
    }

    fn operation(
        &self,
        _transfer: usize,
        _line: u32,
    ) -> Result<(Operation, Option<Pointer>), Error> {
        Ok((self.operation, self.pointer))
    }

    fn settle(&mut self, _transfer: usize, result: Result<Answer, Error>) {
        self.result = Some(result);
    }

    fn is_failed(&self, _transfer: usize) -> bool {
        self.result.is_some()
    }
}
