//! Contents that identify their writer, so that bytes of another page or another write are
//! detected.

use bluebridge_wire::address::PAGE_BYTES;

/// Fills `bytes` with the numbers that follow from `seed`.
pub fn fill(bytes: &mut [u8], seed: u64) {
    for (index, chunk) in (0..).zip(bytes.chunks_mut(8)) {
        let word = word(seed, index).to_le_bytes();
        for (byte, value) in chunk.iter_mut().zip(word) {
            *byte = value;
        }
    }
}

/// A whole page that identifies its writer and the number of the write.
pub fn page(writer: u32, write: u32) -> [u8; PAGE_BYTES] {
    let mut page = [0; PAGE_BYTES];
    let seed = u64::from(writer) << 32 | u64::from(write);
    fill(&mut page, seed);
    let (name, _) = page.split_at_mut(8);
    name.copy_from_slice(&seed.to_le_bytes());
    page
}

/// The writer and the number of the write of a page that [`page`] made; `None` if it is not from a
/// single write. A page that was never written is all zero and counts as (0, 0).
pub fn writer(found: &[u8]) -> Option<(u32, u32)> {
    if found.iter().all(|byte| *byte == 0) {
        return Some((0, 0));
    }
    let seed = u64::from_le_bytes(found.get(..8)?.try_into().ok()?);
    let [writer, write] = [seed >> 32, seed & 0xffff_ffff].map(|half| u32::try_from(half).ok());
    let (writer, write) = (writer?, write?);
    (found == page(writer, write)).then_some((writer, write))
}

/// Any word of the sequence of a seed (the finalizer of splitmix64).
const fn word(seed: u64, index: u64) -> u64 {
    let mut z = (seed ^ 0x5851_f42d_4c95_7f2d)
        .wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_page_has_no_writer() {
        let (one, two) = (page(1, 7), page(2, 7));
        assert_eq!(writer(&one), Some((1, 7)));
        assert_eq!(writer(&[0; PAGE_BYTES]), Some((0, 0)));
        let mut torn = one;
        let (_, tail) = torn.split_at_mut(4000);
        tail.copy_from_slice(two.get(4000..).expect("a page"));
        assert_eq!(writer(&torn), None);
    }
}
