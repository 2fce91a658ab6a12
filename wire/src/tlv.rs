//! Type-length-value options between the fixed header and the data.
//!
//! Each is a type byte, a length byte (of the value alone), the value, and zeros up to a multiple
//! of 4. A reader skips unknown types; an option that must not be skipped has a required-feature
//! bit.

use crate::command::Status;

/// The option's type.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u8)]
pub enum TlvType {
    /// One status byte per page of the request, in address order (replies with
    /// [`Status::Partial`]).
    PageStatus = 1,
}

/// One option.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Tlv<'a> {
    /// The type byte, known or not.
    pub kind: u8,
    /// The value, without padding.
    pub value: &'a [u8],
}

/// An option extends past the end of the header, or its padding is not zero.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TlvError;

impl core::fmt::Display for TlvError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("an option does not fit into the header, or its padding is not zero")
    }
}

impl core::error::Error for TlvError {}

/// The options of a header, in order; iteration ends after the first error.
#[derive(Clone, Debug)]
pub struct Tlvs<'a> {
    rest: &'a [u8],
}

impl<'a> Tlvs<'a> {
    /// Reads the bytes between the fixed header and the data.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }
}

impl<'a> Iterator for Tlvs<'a> {
    type Item = Result<Tlv<'a>, TlvError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let parsed = split(self.rest);
        self.rest = parsed.map_or(&[], |(_, rest)| rest);
        Some(parsed.map(|(tlv, _)| tlv).ok_or(TlvError))
    }
}

fn split(bytes: &[u8]) -> Option<(Tlv<'_>, &[u8])> {
    let (&[kind, length], rest) = bytes.split_first_chunk()?;
    let (value, rest) = rest.split_at_checked(usize::from(length))?;
    let (padding, rest) = rest.split_at_checked(padding(usize::from(length)))?;
    padding.iter().all(|&byte| byte == 0).then_some((Tlv { kind, value }, rest))
}

const fn padding(value_bytes: usize) -> usize {
    (2 + value_bytes).next_multiple_of(4) - 2 - value_bytes
}

/// Bytes of an option with a value of this length.
#[must_use]
pub const fn emitted_bytes(value_bytes: usize) -> usize {
    2 + value_bytes + padding(value_bytes)
}

/// Writes the [`TlvType::PageStatus`] option and returns its length.
///
/// # Panics
/// If `buffer` is shorter than [`emitted_bytes`] of the number of pages, or there are more than
/// 255 pages.
pub fn emit_page_statuses(buffer: &mut [u8], statuses: &[Status]) -> usize {
    let emitted = emitted_bytes(statuses.len());
    let buffer = &mut buffer[..emitted];
    buffer.fill(0);
    buffer[0] = TlvType::PageStatus as u8;
    buffer[1] = u8::try_from(statuses.len()).expect("an option holds at most 255 pages");
    for (byte, status) in buffer[2..].iter_mut().zip(statuses) {
        *byte = status.code();
    }
    emitted
}
