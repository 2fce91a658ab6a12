//! Numbers as P4Runtime byte strings (specification, section 8.4).

/// Why a byte string is not a number of the field's width.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum ByteStringError {
    /// The sender omitted the value.
    #[error("the byte string is empty")]
    Empty,
    /// The sender's value does not fit the field.
    #[error("the value is wider than {0} bits")]
    TooWide(u32),
}

/// The shortest form of a number: big-endian, no leading zero bytes, one byte for 0.
#[must_use]
pub fn encode(value: u128) -> Vec<u8> {
    let bytes = value.to_be_bytes();
    let first = bytes.iter().position(|byte| *byte != 0).unwrap_or(bytes.len() - 1);
    bytes.iter().skip(first).copied().collect()
}

/// The number that a byte string encodes; with leading zeros it may be longer than the field.
///
/// # Errors
/// [`ByteStringError`] if the string is empty or its value has more than `bitwidth` (at most 128)
/// bits.
pub fn decode(bytes: &[u8], bitwidth: u32) -> Result<u128, ByteStringError> {
    if bytes.is_empty() {
        return Err(ByteStringError::Empty);
    }
    let mut value = 0_u128;
    for byte in bytes {
        if value >> 120 != 0 {
            return Err(ByteStringError::TooWide(bitwidth));
        }
        value = value << 8 | u128::from(*byte);
    }
    if bitwidth < 128 && value >> bitwidth != 0 {
        return Err(ByteStringError::TooWide(bitwidth));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shortest_form_is_written() {
        assert_eq!(encode(0), [0]);
        assert_eq!(encode(0x63), [0x63]);
        assert_eq!(encode(0x3064), [0x30, 0x64]);
        assert_eq!(encode(u128::MAX), [0xff; 16]);
    }

    #[test]
    fn padded_values_within_range_are_read() {
        assert_eq!(decode(&[0, 0x63], 16), Ok(0x63));
        assert_eq!(decode(&[0, 0, 0x63], 12), Ok(0x63));
        assert_eq!(decode(&[0; 40], 9), Ok(0));
        assert_eq!(decode(&[0xff; 16], 128), Ok(u128::MAX));
    }

    #[test]
    fn empty_and_wide_values_are_refused() {
        assert_eq!(decode(&[], 8), Err(ByteStringError::Empty));
        assert_eq!(decode(&[1, 0x63], 8), Err(ByteStringError::TooWide(8)));
        assert_eq!(decode(&[0x10, 0x63], 12), Err(ByteStringError::TooWide(12)));
        assert_eq!(decode(&[1; 17], 128), Err(ByteStringError::TooWide(128)));
    }
}
