//! The header after UDP: fixed offsets, big endian, version 1.
//!
//! ```text
//!      0               1               2               3
//!   0 | version = 1   | words         | flags                         |
//!   4 | required features             | node (owner, or new node)     |
//!   8 | target: the pointer that the datagram is about, 16 bytes      |
//!  24 | lease epoch, 48 bits                                          |
//!     |                               | lease remaining, ms           |
//!  32 | session, 64 bits (the controller's copy ends before this)     |
//!  40 | incarnation                                                   |
//!  44 | sequence, 64 bits                                             |
//!  52 | answered distance             | credit                        |
//!  56 | length                                                        |
//!  60 | offset                        | page shift    | key id        |
//!  64 | page version, 64 bits                                         |
//!  72 | range epoch                                                   |
//!  76 | detail                                                        |
//!  80 | CRC32C                                                        |
//!  84 | options, up to `words` * 4; then data; then the trailer       |
//! ```

use core::{fmt, net::Ipv6Addr, ops::Range};

/// The version that this module reads and writes.
pub const VERSION: u8 = 1;

/// Bytes of the header without options.
pub const HEADER_BYTES: usize = 84;

/// Bytes of the header with as many options as it can hold.
pub const HEADER_BYTES_MAX: usize = 255 * 4;

/// Bytes at the start of the header that a truncated copy at the controller holds.
pub const CONTROLLER_BYTES: usize = 32;

/// The largest lease epoch: 48 bits.
pub const LEASE_EPOCH_MAX: u64 = (1 << 48) - 1;

mod field {
    use super::Range;

    pub(super) const VERSION: usize = 0;
    pub(super) const WORDS: usize = 1;
    pub(super) const FLAGS: Range<usize> = 2..4;
    pub(super) const REQUIRED: Range<usize> = 4..6;
    pub(super) const NODE: Range<usize> = 6..8;
    pub(super) const TARGET: Range<usize> = 8..24;
    pub(super) const LEASE_EPOCH: Range<usize> = 24..30;
    pub(super) const LEASE_REMAINING: Range<usize> = 30..32;
    pub(super) const SESSION: Range<usize> = 32..40;
    pub(super) const INCARNATION: Range<usize> = 40..44;
    pub(super) const SEQUENCE: Range<usize> = 44..52;
    pub(super) const ANSWERED: Range<usize> = 52..54;
    pub(super) const CREDIT: Range<usize> = 54..56;
    pub(super) const LENGTH: Range<usize> = 56..60;
    pub(super) const OFFSET: Range<usize> = 60..62;
    pub(super) const PAGE_SHIFT: usize = 62;
    pub(super) const KEY_ID: usize = 63;
    pub(super) const PAGE_VERSION: Range<usize> = 64..72;
    pub(super) const RANGE_EPOCH: Range<usize> = 72..76;
    pub(super) const DETAIL: Range<usize> = 76..80;
    pub(super) const CRC: Range<usize> = 80..84;
}

/// Position of the CRC, which covers everything except these bytes.
pub(crate) const CRC_FIELD: Range<usize> = field::CRC;

/// The flags of a datagram; unknown bits are ignored by a reader and written as 0.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Flags(u16);

impl Flags {
    /// READ: the last committed version is acceptable if the page is leased.
    pub const MAY_BE_STALE: Self = Self(1 << 0);
    /// Reply to an anywhere-CREATE: the pages are freed unless confirmed in `detail` milliseconds.
    pub const PROVISIONAL: Self = Self(1 << 1);
    /// DELETE: zero the byte range in place and keep the allocation.
    pub const ZERO: Self = Self(1 << 2);
    /// Reply to a READ: the data is the last committed version of a leased page.
    pub const LAST_COMMITTED: Self = Self(1 << 3);
    /// READ: `detail` is the bitmap of the wanted pieces.
    pub const SELECTIVE: Self = Self(1 << 4);
    /// READ and UPDATE: the request may wait for the page. BUSY: it waits and must be repeated within
    /// `detail` milliseconds.
    pub const QUEUED: Self = Self(1 << 5);
    /// Reply to OPEN: the server also accepts requests for memory at its endpoint address.
    pub const AT_ENDPOINT: Self = Self(1 << 6);
    /// DELETE: the home said that it has lost the allocation, so the server of the first page frees it.
    pub const ORPHAN: Self = Self(1 << 7);
    /// DELETE of the server that frees an allocation: frees the part of it that is here and ends with the target's page;
    /// `length` is the number of pages from the first one to that one.
    pub const PART: Self = Self(1 << 10);

    const TRAILER_SHIFT: u32 = 8;
    const TRAILER_MASK: u16 = 0b11 << Self::TRAILER_SHIFT;
    const ATTEMPT_SHIFT: u32 = 12;

    /// The flags as received.
    #[must_use]
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits)
    }

    /// The flags on the wire.
    #[must_use]
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// Whether all flags of `other` are set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These flags and those of `other`.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// The number of the try, 0 for the first; a reply repeats it. Stays at 15.
    #[must_use]
    pub const fn attempt(self) -> u8 {
        (self.0 >> Self::ATTEMPT_SHIFT) as u8
    }

    /// These flags with the number of the try, 15 at most.
    #[must_use]
    pub const fn with_attempt(self, attempt: u8) -> Self {
        let attempt = if attempt > 15 { 15 } else { attempt as u16 };
        Self((self.0 & !(0xf << Self::ATTEMPT_SHIFT)) | (attempt << Self::ATTEMPT_SHIFT))
    }

    /// Bytes of the trailer after the data: 0, 16, 32 or 48.
    #[must_use]
    pub const fn trailer_bytes(self) -> usize {
        ((self.0 & Self::TRAILER_MASK) >> Self::TRAILER_SHIFT) as usize * 16
    }

    /// These flags with a trailer of `units` times 16 bytes, 3 at most.
    #[must_use]
    pub const fn with_trailer_units(self, units: u8) -> Self {
        let units = if units > 3 { 3 } else { units as u16 };
        Self((self.0 & !Self::TRAILER_MASK) | (units << Self::TRAILER_SHIFT))
    }
}

/// Features that a receiver must have to understand a datagram; it refuses if it lacks one.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Features(pub u16);

impl Features {
    /// The features of this implementation: none beyond version 1.
    pub const SUPPORTED: Self = Self(0);

    /// The required features that `supported` lacks.
    #[must_use]
    pub const fn missing_from(self, supported: Self) -> Self {
        Self(self.0 & !supported.0)
    }
}

/// Why bytes are not a header of version 1.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum HeaderError {
    /// Fewer bytes than the fixed header.
    Truncated,
    /// Another version than 1.
    Version(u8),
    /// The stated header length is below the fixed header or beyond the datagram.
    HeaderLength(u8),
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("shorter than the fixed header"),
            Self::Version(version) => write!(f, "version {version}, not {VERSION}"),
            Self::HeaderLength(words) => write!(f, "impossible header length of {words} words"),
        }
    }
}

impl core::error::Error for HeaderError {}

/// A header inside a datagram's bytes; after [`HeaderView::new`] its accessors never fail.
#[derive(Clone, Copy, Debug)]
pub struct HeaderView<'a> {
    fixed: &'a [u8; HEADER_BYTES],
    options: &'a [u8],
    rest: &'a [u8],
}

impl<'a> HeaderView<'a> {
    /// Checks version and lengths.
    ///
    /// # Errors
    /// If the bytes do not begin with a header of version 1.
    pub fn new(bytes: &'a [u8]) -> Result<Self, HeaderError> {
        let Some((fixed, behind)) = bytes.split_first_chunk() else {
            return Err(HeaderError::Truncated);
        };
        let fixed: &[u8; HEADER_BYTES] = fixed;
        if fixed[field::VERSION] != VERSION {
            return Err(HeaderError::Version(fixed[field::VERSION]));
        }
        let words = fixed[field::WORDS];
        let split = (usize::from(words) * 4)
            .checked_sub(HEADER_BYTES)
            .and_then(|option_bytes| behind.split_at_checked(option_bytes));
        match split {
            Some((options, rest)) => Ok(Self { fixed, options, rest }),
            None => Err(HeaderError::HeaderLength(words)),
        }
    }

    /// The bytes of the options.
    #[must_use]
    pub const fn options(&self) -> &'a [u8] {
        self.options
    }

    /// The bytes after the header: data and trailer.
    #[must_use]
    pub const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// The fixed header's bytes.
    #[must_use]
    pub const fn fixed(&self) -> &'a [u8; HEADER_BYTES] {
        self.fixed
    }

    /// The pointer that the datagram is about.
    #[must_use]
    pub fn target(&self) -> Ipv6Addr {
        Ipv6Addr::from(self.array(field::TARGET))
    }

    /// The received CRC32C.
    #[must_use]
    pub fn crc(&self) -> u32 {
        self.u32(field::CRC)
    }

    /// All fields as a [`Header`].
    #[must_use]
    pub fn header(&self) -> Header {
        let mut epoch = [0; 8];
        epoch[2..].copy_from_slice(&self.fixed[field::LEASE_EPOCH]);
        Header {
            flags: Flags(self.u16(field::FLAGS)),
            required: Features(self.u16(field::REQUIRED)),
            node: self.u16(field::NODE),
            target: self.target(),
            lease_epoch: u64::from_be_bytes(epoch),
            lease_remaining_ms: self.u16(field::LEASE_REMAINING),
            session: self.u64(field::SESSION),
            incarnation: self.u32(field::INCARNATION),
            sequence: self.u64(field::SEQUENCE),
            answered_distance: self.u16(field::ANSWERED),
            credit: self.u16(field::CREDIT),
            length: self.u32(field::LENGTH),
            offset: self.u16(field::OFFSET),
            page_shift: self.fixed[field::PAGE_SHIFT],
            key_id: self.fixed[field::KEY_ID],
            page_version: self.u64(field::PAGE_VERSION),
            range_epoch: self.u32(field::RANGE_EPOCH),
            detail: self.u32(field::DETAIL),
        }
    }

    fn array<const N: usize>(&self, range: Range<usize>) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.fixed[range]);
        bytes
    }

    fn u16(&self, range: Range<usize>) -> u16 {
        u16::from_be_bytes(self.array(range))
    }

    fn u32(&self, range: Range<usize>) -> u32 {
        u32::from_be_bytes(self.array(range))
    }

    fn u64(&self, range: Range<usize>) -> u64 {
        u64::from_be_bytes(self.array(range))
    }
}

/// The header's fields; version, header length and CRC are added when it is written.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Header {
    /// Modifiers, trailer length, and the number of the try.
    pub flags: Flags,
    /// Features that the receiver must understand.
    pub required: Features,
    /// The owner (BUSY, and the grant of a lease) or the new node (MOVED); otherwise 0.
    pub node: u16,
    /// The pointer (or endpoint address) that the datagram is about; its command byte is 0.
    pub target: Ipv6Addr,
    /// The fencing token of the page's lease, 48 bits; 0 without a lease.
    pub lease_epoch: u64,
    /// Milliseconds until the lease ends by the sender's clock; 0 without a lease.
    pub lease_remaining_ms: u16,
    /// The session that the server issued; 0 before one is open.
    pub session: u64,
    /// The sender's incarnation, as the controller issued it.
    pub incarnation: u32,
    /// The request's number in its session; for an OPEN, the requester's nonce.
    pub sequence: u64,
    /// `sequence` minus the lowest number that has no reply yet.
    pub answered_distance: u16,
    /// Reply: pages that may be outstanding in the session. OPEN: pages that the requester can receive.
    pub credit: u16,
    /// Length of the whole operation: bytes, or pages for CREATE, CONFIRM and a freeing DELETE.
    pub length: u32,
    /// Where this piece's data begins in the operation, in bytes.
    pub offset: u16,
    /// Base-2 logarithm of the page's bytes: 12.
    pub page_shift: u8,
    /// The key that made the trailer; 0 without one.
    pub key_id: u8,
    /// Counts the changes of the page that the data is from.
    pub page_version: u64,
    /// The epoch under which the server has authority over the range.
    pub range_epoch: u32,
    /// Depends on the command or the status: a bitmap of pieces, feature bits, milliseconds, or
    /// the piece size of a train outside a session.
    pub detail: u32,
}

const _: () = assert!(size_of::<Header>() <= 96);

impl Default for Header {
    fn default() -> Self {
        Self {
            flags: Flags(0),
            required: Features(0),
            node: 0,
            target: Ipv6Addr::UNSPECIFIED,
            lease_epoch: 0,
            lease_remaining_ms: 0,
            session: 0,
            incarnation: 0,
            sequence: 0,
            answered_distance: 0,
            credit: 0,
            length: 0,
            offset: 0,
            page_shift: 12,
            key_id: 0,
            page_version: 0,
            range_epoch: 0,
            detail: 0,
        }
    }
}

impl Header {
    /// The lowest sequence number that has no reply yet (the low-water mark).
    #[must_use]
    pub const fn low_water(&self) -> u64 {
        self.sequence.saturating_sub(self.answered_distance as u64)
    }

    /// Writes the fixed header in front of `option_bytes` bytes of options; the CRC stays 0 until
    /// the datagram is sealed. A lease epoch above [`LEASE_EPOCH_MAX`] loses its upper bits.
    ///
    /// # Panics
    /// If `buffer` is shorter than [`HEADER_BYTES`], or `option_bytes` is not a multiple of 4 or more
    /// than the header can hold.
    pub fn emit(&self, buffer: &mut [u8], option_bytes: usize) {
        assert!(option_bytes.is_multiple_of(4), "options fill words");
        let words = u8::try_from((HEADER_BYTES + option_bytes) / 4).expect("options fit");
        let out: &mut [u8; HEADER_BYTES] =
            buffer.first_chunk_mut().expect("the buffer holds the fixed header");
        out[field::VERSION] = VERSION;
        out[field::WORDS] = words;
        out[field::FLAGS].copy_from_slice(&self.flags.0.to_be_bytes());
        out[field::REQUIRED].copy_from_slice(&self.required.0.to_be_bytes());
        out[field::NODE].copy_from_slice(&self.node.to_be_bytes());
        out[field::TARGET].copy_from_slice(&self.target.octets());
        out[field::LEASE_EPOCH].copy_from_slice(&self.lease_epoch.to_be_bytes()[2..]);
        out[field::LEASE_REMAINING].copy_from_slice(&self.lease_remaining_ms.to_be_bytes());
        out[field::SESSION].copy_from_slice(&self.session.to_be_bytes());
        out[field::INCARNATION].copy_from_slice(&self.incarnation.to_be_bytes());
        out[field::SEQUENCE].copy_from_slice(&self.sequence.to_be_bytes());
        out[field::ANSWERED].copy_from_slice(&self.answered_distance.to_be_bytes());
        out[field::CREDIT].copy_from_slice(&self.credit.to_be_bytes());
        out[field::LENGTH].copy_from_slice(&self.length.to_be_bytes());
        out[field::OFFSET].copy_from_slice(&self.offset.to_be_bytes());
        out[field::PAGE_SHIFT] = self.page_shift;
        out[field::KEY_ID] = self.key_id;
        out[field::PAGE_VERSION].copy_from_slice(&self.page_version.to_be_bytes());
        out[field::RANGE_EPOCH].copy_from_slice(&self.range_epoch.to_be_bytes());
        out[field::DETAIL].copy_from_slice(&self.detail.to_be_bytes());
        out[field::CRC].fill(0);
    }
}
