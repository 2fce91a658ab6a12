//! Reading within bounds, and writing lengths that are known only afterwards.

use crate::{DecodeError, EncodeError};

/// The rest of a message or of a part of it. `what` is named in errors.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    what: &'static str,
}

impl<'a> Cursor<'a> {
    pub(crate) const fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { bytes, what }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], DecodeError> {
        let Some((taken, rest)) = self.bytes.split_at_checked(count) else {
            return Err(DecodeError::Truncated(self.what));
        };
        self.bytes = rest;
        Ok(taken)
    }

    pub(crate) const fn rest(&mut self) -> &'a [u8] {
        let rest = self.bytes;
        self.bytes = &[];
        rest
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let taken = self.take(N)?;
        taken.try_into().map_err(|_| DecodeError::Truncated(self.what))
    }

    pub(crate) fn u8(&mut self) -> Result<u8, DecodeError> {
        self.array().map(u8::from_be_bytes)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_be_bytes)
    }

    pub(crate) fn skip(&mut self, count: usize) -> Result<(), DecodeError> {
        self.take(count).map(drop)
    }

    /// A text that ends at the first zero byte of a fixed field.
    ///
    /// It always fits the field, with a zero byte after it: what is not UTF-8 becomes question marks, which are not
    /// longer than it, and the last letter of a text without an end is left out.
    pub(crate) fn text(&mut self, bytes: usize) -> Result<String, DecodeError> {
        let field = self.take(bytes)?;
        let field = field.split(|byte| *byte == 0).next().unwrap_or_default();
        let mut text = String::with_capacity(bytes);
        for chunk in field.utf8_chunks() {
            text.push_str(chunk.valid());
            if !chunk.invalid().is_empty() {
                text.push('?');
            }
        }
        if text.len() >= bytes {
            text.pop();
        }
        Ok(text)
    }

    /// A part whose total length, with the `read` bytes of it that were read, is `length`.
    pub(crate) fn part(
        &mut self,
        length: usize,
        read: usize,
        what: &'static str,
    ) -> Result<Self, DecodeError> {
        let Some(left) = length.checked_sub(read) else { return Err(DecodeError::Length(what)) };
        if left > self.bytes.len() {
            return Err(DecodeError::Length(what));
        }
        Ok(Self { bytes: self.take(left)?, what })
    }

    /// Nothing may be left.
    pub(crate) const fn finish(self) -> Result<(), DecodeError> {
        if self.bytes.is_empty() { Ok(()) } else { Err(DecodeError::Length(self.what)) }
    }
}

/// Reads items until nothing is left.
pub(crate) fn list<T>(
    mut cursor: Cursor<'_>,
    mut item: impl FnMut(&mut Cursor<'_>) -> Result<T, DecodeError>,
) -> Result<Vec<T>, DecodeError> {
    let mut items = Vec::new();
    while !cursor.is_empty() {
        items.push(item(&mut cursor)?);
    }
    Ok(items)
}

/// Appends zero bytes.
pub(crate) fn pad(out: &mut Vec<u8>, count: usize) {
    out.resize(out.len() + count, 0);
}

/// Appends what `write` writes and stores its length, in bytes from `start`, as 16 bits at `at`.
pub(crate) fn measured(
    out: &mut [u8],
    start: usize,
    at: usize,
    what: &'static str,
) -> Result<(), EncodeError> {
    let length = u16::try_from(out.len() - start).map_err(|_| EncodeError::TooLong(what))?;
    if let Some(field) = out.get_mut(at..at + 2) {
        field.copy_from_slice(&length.to_be_bytes());
    }
    Ok(())
}

/// Appends a text in a fixed field; at least one zero byte ends it.
pub(crate) fn text(
    out: &mut Vec<u8>,
    text: &str,
    bytes: usize,
    what: &'static str,
) -> Result<(), EncodeError> {
    if text.len() >= bytes || text.contains('\0') {
        return Err(EncodeError::Text(what));
    }
    out.extend_from_slice(text.as_bytes());
    pad(out, bytes - text.len());
    Ok(())
}
