//! The tables with which the program computes CRC32C.

use bluebridge_wire::address::PAGE_BYTES;

/// The polynomial of CRC32C (Castagnoli, RFC 3720 appendix B.4), its bits reversed.
const POLYNOMIAL: u32 = 0x82f6_3b78;

const BYTES: usize = 256;

/// `struct crc_tables` of `bpf/shared.h`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CrcTables {
    /// Of a byte that is followed by n bytes (slicing by 8).
    slice: [[u32; BYTES]; 8],
    /// Of a byte of a CRC that is followed by a page.
    page: [[u32; BYTES]; 4],
}

/// A CRC followed by a zero byte.
const fn after_zero(crc: u32, first: &[u32; BYTES]) -> u32 {
    crc >> 8 ^ first[(crc & 0xff) as usize]
}

impl CrcTables {
    pub(super) fn new() -> Box<Self> {
        let mut tables = Box::new(Self { slice: [[0; BYTES]; 8], page: [[0; BYTES]; 4] });
        let Self { slice, page } = &mut *tables;
        let [first, further @ ..] = slice;
        for (byte, crc) in (0_u32..).zip(first.iter_mut()) {
            *crc = (0..8).fold(byte, |crc, _| {
                let carry = if crc & 1 == 1 { POLYNOMIAL } else { 0 };
                crc >> 1 ^ carry
            });
        }
        let mut last = *first;
        for table in further {
            for (crc, before) in table.iter_mut().zip(last) {
                *crc = after_zero(before, first);
            }
            last = *table;
        }
        // A CRC is linear: of a value it is the sum of those of its bits.
        let of_bit: [u32; u32::BITS as usize] = core::array::from_fn(|bit| {
            (0..PAGE_BYTES).fold(1 << bit, |crc, _| after_zero(crc, first))
        });
        for (table, bits) in page.iter_mut().zip(of_bit.chunks_exact(8)) {
            for (byte, crc) in table.iter_mut().enumerate() {
                let set = bits.iter().enumerate().filter(|(bit, _)| byte >> bit & 1 == 1);
                *crc = set.fold(0, |sum, (_, of_bit)| sum ^ of_bit);
            }
        }
        tables
    }
}
