//! Many ranges at once, pipelined over all the servers that they are on.

use bluebridge_protocol::requester::{Answer, Buffers, Operation, Server};
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
    start: RangeStart,
}

impl<'a> ReadRequest<'a> {
    /// A request that was not made yet.
    #[must_use]
    pub const fn new(pointer: Pointer, buffer: &'a mut [u8]) -> Self {
        Self { pointer, buffer, result: Ok(()), start: RangeStart { is_there: false } }
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
    start: RangeStart,
}

impl<'a> WriteRequest<'a> {
    /// A request that was not made yet.
    #[must_use]
    pub const fn new(pointer: Pointer, data: &'a [u8]) -> Self {
        Self { pointer, data, result: Ok(()), start: RangeStart { is_there: false } }
    }
}

/// How many lines a range touches.
pub(crate) fn lines(pointer: Pointer, length: u64) -> Result<u32, Error> {
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

/// Where one line's part of a range is in the caller's memory.
fn bytes(pointer: Pointer, length: u64, line: u32) -> core::ops::Range<usize> {
    let part = transfer::part(pointer, length, line);
    let at = |offset: u64| usize::try_from(offset.min(length)).unwrap_or(usize::MAX);
    at(part.start)..at(part.end)
}

/// A range of bytes that goes to the caller's memory, from there, or is zeroed.
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
    fn settle(&mut self, line: u32, result: Result<(), Error>);

    /// Whether the rest of it is of no use any more.
    fn is_failed(&self) -> bool;
}

/// What is known of the first page of a range.
///
/// An allocation is freed as a whole. So if the first page is there and a later one is not, the range
/// goes past the end of its allocation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RangeStart {
    is_there: bool,
}

impl RangeStart {
    /// Takes in how a line of a range ended; keeps the first error, and of memory that is not there the
    /// lowest address.
    pub(crate) fn settle(
        &mut self,
        first: &mut Result<(), Error>,
        range: Pointer,
        line: u32,
        result: Result<(), Error>,
    ) {
        self.is_there |= line == 0 && matches!(result, Ok(()) | Err(Error::PastEnd { .. }));
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

    fn settle(&mut self, line: u32, result: Result<(), Error>) {
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

    fn settle(&mut self, line: u32, result: Result<(), Error>) {
        self.start.settle(&mut self.result, self.pointer, line, result);
    }

    fn is_failed(&self) -> bool {
        self.result.is_err()
    }
}

/// A range to be zeroed.
pub(crate) struct ZeroRequest {
    pub(crate) pointer: Pointer,
    pub(crate) length: u64,
    pub(crate) result: Result<(), Error>,
    pub(crate) start: RangeStart,
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

    fn settle(&mut self, line: u32, result: Result<(), Error>) {
        self.start.settle(&mut self.result, self.pointer, line, result);
    }

    fn is_failed(&self) -> bool {
        self.result.is_err()
    }
}

/// Ranges as one piece of work, line by line.
pub(crate) struct Transfers<'a, R>(pub(crate) &'a mut [R]);

impl<R: Transfer> Buffers for Transfers<'_, R> {
    fn outgoing(&self, token: u64) -> &[u8] {
        let (transfer, line) = transfer::untoken(token);
        let Some(request) = self.0.get(transfer) else { return &[] };
        let range = bytes(request.pointer(), request.length(), line);
        request.outgoing().get(range).unwrap_or_default()
    }

    fn incoming(&mut self, token: u64) -> &mut [u8] {
        let (transfer, line) = transfer::untoken(token);
        let Some(request) = self.0.get_mut(transfer) else { return &mut [] };
        let range = bytes(request.pointer(), request.length(), line);
        request.incoming().get_mut(range).unwrap_or_default()
    }
}

impl<R: Transfer> Work for Transfers<'_, R> {
    fn transfer_count(&self) -> usize {
        self.0.len()
    }

    fn line_count(&self, transfer: usize) -> Result<u32, Error> {
        let request = self.0.get(transfer).ok_or(Error::Length)?;
        lines(request.pointer(), request.length())
    }

    fn operation(&self, transfer: usize, at: u32) -> Result<(Operation, Option<Pointer>), Error> {
        let request = self.0.get(transfer).ok_or(Error::Length)?;
        let (pointer, length) = line(request.pointer(), request.length(), at)?;
        Ok((request.operation(pointer, length), Some(pointer)))
    }

    fn settle(&mut self, transfer: usize, line: u32, result: Result<Answer, Error>) {
        if let Some(request) = self.0.get_mut(transfer) {
            request.settle(line, result.map(|_| ()));
        }
    }

    fn is_failed(&self, transfer: usize) -> bool {
        self.0.get(transfer).is_none_or(R::is_failed)
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

    fn settle(&mut self, _transfer: usize, _line: u32, result: Result<Answer, Error>) {
        self.result = Some(result);
    }

    fn is_failed(&self, _transfer: usize) -> bool {
        self.result.is_some()
    }
}

/// CLOSEs of many sessions.
pub(crate) struct Closing(pub(crate) Vec<Server>);

impl Buffers for Closing {
    fn outgoing(&self, _token: u64) -> &[u8] {
        &[]
    }

    fn incoming(&mut self, _token: u64) -> &mut [u8] {
        &mut []
    }
}

impl Work for Closing {
    fn transfer_count(&self) -> usize {
        self.0.len()
    }

    fn line_count(&self, _transfer: usize) -> Result<u32, Error> {
        Ok(1)
    }

    fn operation(
        &self,
        transfer: usize,
        _line: u32,
    ) -> Result<(Operation, Option<Pointer>), Error> {
        let server = *self.0.get(transfer).ok_or(Error::Length)?;
        Ok((Operation::Close { server }, None))
    }

    /// A server that does not answer ends the session by itself.
    fn settle(&mut self, _transfer: usize, _line: u32, _result: Result<Answer, Error>) {}

    fn is_failed(&self, _transfer: usize) -> bool {
        false
    }
}
