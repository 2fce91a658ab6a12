//! The kernel inside a compressed image.
//!
//! qemu loads an ELF file as it is. A compressed image decompresses itself, which takes an emulated processor 1 s with
//! zstd and 4 s with xz, at every start.

/// How a kernel is compressed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Packing {
    /// Debian's Linux 6.1.
    Xz,
    /// Debian's Linux 6.12.
    Zstd,
}

/// Where the header of the boot protocol has what it says (Documentation/arch/x86/boot.rst of Linux).
const SETUP_SECTORS: usize = 0x1f1;
const HEADER: usize = 0x202;
const VERSION: usize = 0x206;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// The first version that says where the payload is.
const VERSION_MIN: u16 = 0x0208;
const SECTOR: usize = 512;
/// The length of what is in the payload comes after it.
const LENGTH_BYTES: usize = 4;

/// The first bytes of an ELF file.
pub(crate) const ELF: [u8; 4] = *b"\x7fELF";

/// The compressed kernel in an image, and how it is compressed; `None` if the image is of another kind.
pub(crate) fn packed(image: &[u8]) -> Option<(Packing, &[u8])> {
    let number = |at: usize| {
        let bytes = image.get(at..at.checked_add(4)?)?;
        usize::try_from(u32::from_le_bytes(bytes.try_into().ok()?)).ok()
    };
    let version = image.get(VERSION..VERSION + 2)?;
    let version = u16::from_le_bytes(version.try_into().ok()?);
    if image.get(HEADER..HEADER + 4)? != b"HdrS" || version < VERSION_MIN {
        return None;
    }
    let sectors = usize::from(*image.get(SETUP_SECTORS)?) + 1;
    let start = (sectors * SECTOR).checked_add(number(PAYLOAD_OFFSET)?)?;
    let length = number(PAYLOAD_LENGTH)?.checked_sub(LENGTH_BYTES)?;
    let payload = image.get(start..start.checked_add(length)?)?;
    let packing = match payload {
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Packing::Xz,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Packing::Zstd,
        _ => return None,
    };
    Some((packing, payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image whose setup has three sectors, with a payload 16 bytes after it.
    fn image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 4 * SECTOR + 16];
        image[SETUP_SECTORS] = 3;
        image[HEADER..HEADER + 4].copy_from_slice(b"HdrS");
        image[VERSION..VERSION + 2].copy_from_slice(&0x020f_u16.to_le_bytes());
        image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&16_u32.to_le_bytes());
        let length = u32::try_from(payload.len() + LENGTH_BYTES).expect("it is short");
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        image.extend_from_slice(payload);
        image.extend_from_slice(&[1, 2, 3, 4]);
        image
    }

    #[test]
    fn the_payload_is_found_without_its_length() {
        let (xz, zstd) = (b"\xfd7zXZ\0rest", b"\x28\xb5\x2f\xfdrest");
        assert_eq!(packed(&image(xz)), Some((Packing::Xz, &xz[..])));
        assert_eq!(packed(&image(zstd)), Some((Packing::Zstd, &zstd[..])));
        assert_eq!(packed(&image(b"\x1f\x8bof gzip")), None);
    }

    #[test]
    fn what_is_no_image_has_no_payload() {
        let whole = image(b"\x28\xb5\x2f\xfdrest");
        assert_eq!(packed(&[]), None);
        // Without its last byte the payload's length leads out of the image.
        assert_eq!(packed(&whole[..whole.len() - LENGTH_BYTES - 1]), None);
        let mut old = whole.clone();
        old[VERSION] = 7;
        assert_eq!(packed(&old), None, "a version without the fields");
        let mut empty = whole.clone();
        empty[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].fill(0);
        assert_eq!(packed(&empty), None);
        let mut far = whole;
        far[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].fill(0xff);
        assert_eq!(packed(&far), None);
    }
}
