//! A whole datagram: parsing a received one, sealing one to be sent.

use core::{fmt, net::Ipv6Addr};

use crc_fast::{CrcAlgorithm, Digest, crc32_iscsi};

use crate::{
    address::{Fields, PAGE_BYTES},
    command::WireCommand,
    header::{CRC_FIELD, HEADER_BYTES, Header, HeaderError, HeaderView},
    tlv::Tlvs,
};

/// Why a received datagram is dropped. Nothing in it can be trusted, so there is no reply.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum DatagramError {
    /// The source address is not in the fabric.
    ForeignSource,
    /// The destination address is not in the fabric.
    ForeignDestination,
    /// The header is not one of version 1.
    Header(HeaderError),
    /// The CRC32C does not match: the datagram was damaged in transit.
    Crc,
    /// The trailer that the flags announce is longer than what follows the header.
    Trailer,
    /// An option does not fit into the header.
    Options,
    /// The target is not a fabric address, or carries a command.
    Target,
    /// Both addresses carry a command, or neither does; or bit 7 is not 1 in a reply, or not 0
    /// in a request.
    Direction,
    /// The address without a command is not an endpoint's own (bit 63 clear, or a tag); a reply
    /// to it would be routed like a request for memory.
    Endpoint,
}

impl fmt::Display for DatagramError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ForeignSource => f.write_str("the source is not in the fabric"),
            Self::ForeignDestination => f.write_str("the destination is not in the fabric"),
            Self::Header(error) => write!(f, "not a header: {error}"),
            Self::Crc => f.write_str("the CRC32C does not match"),
            Self::Trailer => f.write_str("the trailer is longer than the datagram"),
            Self::Options => f.write_str("an option does not fit into the header"),
            Self::Target => {
                f.write_str("the target is neither a pointer nor an endpoint of the fabric")
            }
            Self::Direction => f.write_str("neither a request nor a reply"),
            Self::Endpoint => f.write_str("the requester's address is not an endpoint's own"),
        }
    }
}

impl core::error::Error for DatagramError {}

impl From<HeaderError> for DatagramError {
    fn from(error: HeaderError) -> Self {
        Self::Header(error)
    }
}

/// A received datagram whose form and CRC are valid; the request may still be refused.
#[derive(Clone, Copy, Debug)]
pub struct Datagram<'a> {
    /// The source address.
    pub source: Ipv6Addr,
    /// The source address in fields.
    pub from: Fields,
    /// The destination address in fields.
    pub to: Fields,
    /// The header.
    pub header: Header,
    /// The target of the header in fields.
    pub target: Fields,
    /// Data, without the trailer.
    pub data: &'a [u8],
    /// The trailer; empty without one.
    pub trailer: &'a [u8],
    /// The CRC32C of the data, if they are as long as a page and nothing else follows the fixed header.
    pub page_crc: Option<u32>,
    options: &'a [u8],
}

// It is made for every packet and passed by reference, so growth must be intended.
const _: () = assert!(size_of::<Datagram<'_>>() <= 256);

impl<'a> Datagram<'a> {
    /// Checks a received UDP payload.
    ///
    /// # Errors
    /// If it is not a well-formed, undamaged datagram of version 1. Cheap checks are first.
    pub fn parse(
        source: Ipv6Addr,
        destination: Ipv6Addr,
        payload: &'a [u8],
    ) -> Result<Self, DatagramError> {
        let from = Fields::unpack(source).ok_or(DatagramError::ForeignSource)?;
        let to = Fields::unpack(destination).ok_or(DatagramError::ForeignDestination)?;
        let view = HeaderView::new(payload)?;
        let page_crc = page_in(view.options(), view.rest()).map(page_crc);
        let crc = match page_crc {
            Some(page_crc) => with_page(front_crc(source, destination, view.fixed()), page_crc),
            None => crc(source, destination, view.fixed(), view.options(), view.rest()),
        };
        if crc != view.crc() {
            return Err(DatagramError::Crc);
        }
        let header = view.header();
        let rest = view.rest();
        let (data, trailer) = rest
            .len()
            .checked_sub(header.flags.trailer_bytes())
            .and_then(|data_bytes| rest.split_at_checked(data_bytes))
            .ok_or(DatagramError::Trailer)?;
        let page_crc = page_crc.filter(|_| trailer.is_empty());
        let target = Fields::unpack(header.target)
            .filter(|target| target.command == 0)
            .ok_or(DatagramError::Target)?;
        if Tlvs::new(view.options()).any(|tlv| tlv.is_err()) {
            return Err(DatagramError::Options);
        }
        let datagram = Self {
            source,
            from,
            to,
            header,
            target,
            data,
            trailer,
            page_crc,
            options: view.options(),
        };
        // The command is in the source of a reply and in the destination of a request; the other address
        // is an endpoint's own and carries no command.
        let (is_request, is_reply) = (to.command != 0, from.command != 0);
        if is_request == is_reply || datagram.reply_bit_misplaced() {
            return Err(DatagramError::Direction);
        }
        let requester = if is_reply { to } else { from };
        if requester.is_memory() || requester.tag != 0 {
            return Err(DatagramError::Endpoint);
        }
        Ok(datagram)
    }

    /// A datagram of parts that were parsed before, without data, options and trailer; for a request
    /// that waited.
    #[must_use]
    pub const fn bare(
        source: Ipv6Addr,
        from: Fields,
        to: Fields,
        target: Fields,
        header: Header,
    ) -> Self {
        Self {
            source,
            from,
            to,
            header,
            target,
            data: &[],
            trailer: &[],
            page_crc: None,
            options: &[],
        }
    }

    /// Whether it is a reply (otherwise a request or a notice).
    #[must_use]
    pub const fn is_reply(&self) -> bool {
        self.from.command != 0
    }

    /// The command byte of the address that carries it.
    #[must_use]
    pub const fn command(&self) -> WireCommand {
        WireCommand::from_bits(if self.is_reply() { self.from.command } else { self.to.command })
    }

    /// The options.
    #[must_use]
    pub const fn tlvs(&self) -> Tlvs<'a> {
        Tlvs::new(self.options)
    }

    const fn reply_bit_misplaced(&self) -> bool {
        WireCommand::from_bits(self.to.command).is_reply()
            || (self.from.command != 0 && !WireCommand::from_bits(self.from.command).is_reply())
    }
}

/// Writes the CRC32C into a datagram that is otherwise complete. `head` is the fixed header with its
/// options, `data` everything after it, including the trailer.
///
/// # Panics
/// If `head` is shorter than [`HEADER_BYTES`].
pub fn seal(source: Ipv6Addr, destination: Ipv6Addr, head: &mut [u8], data: &[u8]) {
    let (fixed, options) =
        head.split_first_chunk_mut::<HEADER_BYTES>().expect("the fixed header is there");
    let crc = match page_in(options, data) {
        Some(page) => with_page(front_crc(source, destination, fixed), page_crc(page)),
        None => crc(source, destination, fixed, options, data),
    };
    fixed[CRC_FIELD].copy_from_slice(&crc.to_be_bytes());
}

/// As [`seal`], if the data are a page with this CRC32C, which is not read again.
pub fn seal_page(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    head: &mut [u8; HEADER_BYTES],
    page_crc: u32,
) {
    let crc = with_page(front_crc(source, destination, head), page_crc);
    head[CRC_FIELD].copy_from_slice(&crc.to_be_bytes());
}

/// The CRC32C of a page.
#[must_use]
pub fn page_crc(page: &[u8; PAGE_BYTES]) -> u32 {
    crc32_iscsi(page)
}

/// The data of a datagram, if they are as long as a page and follow the fixed header.
fn page_in<'a>(options: &[u8], rest: &'a [u8]) -> Option<&'a [u8; PAGE_BYTES]> {
    rest.try_into().ok().filter(|_| options.is_empty())
}

const ADDRESSES: usize = 32;

const FRONT: usize = ADDRESSES + CRC_FIELD.start;

/// What is checked before options and data: both addresses, and the header without its CRC field.
fn write_front(
    front: &mut [u8; FRONT],
    source: Ipv6Addr,
    destination: Ipv6Addr,
    fixed: &[u8; HEADER_BYTES],
) {
    front[..16].copy_from_slice(&source.octets());
    front[16..ADDRESSES].copy_from_slice(&destination.octets());
    front[ADDRESSES..].copy_from_slice(&fixed[..CRC_FIELD.start]);
}

fn front_crc(source: Ipv6Addr, destination: Ipv6Addr, fixed: &[u8; HEADER_BYTES]) -> u32 {
    let mut front = [0; FRONT];
    write_front(&mut front, source, destination, fixed);
    crc32_iscsi(&front)
}

/// The CRC32C of bytes with this CRC32C that are followed by a page with that one. A CRC is linear, so it is the sum of that
/// of the bytes, as if zeros followed, and that of the page.
fn with_page(crc: u32, page_crc: u32) -> u32 {
    crc.to_le_bytes()
        .into_iter()
        .zip(&FOLLOWED_BY_PAGE)
        .fold(page_crc, |sum, (byte, table)| sum ^ table[usize::from(byte)])
}

/// For each byte of a CRC32C, what it is after as many zeros as a page has bytes.
static FOLLOWED_BY_PAGE: [[u32; 256]; 4] = followed_by_page();

const fn followed_by_page() -> [[u32; 256]; 4] {
    // The polynomial of CRC32C (RFC 3720, appendix B.4), its bits reversed.
    const POLYNOMIAL: u32 = 0x82f6_3b78;
    // What each bit of a CRC is after one zero bit; then, by doubling, after as many as a page has.
    let mut bits = [0; 32];
    bits[0] = POLYNOMIAL;
    let mut bit = 1;
    while bit < 32 {
        bits[bit] = 1 << (bit - 1);
        bit += 1;
    }
    let mut zeros = 1;
    while zeros < 8 * PAGE_BYTES {
        let mut doubled = [0; 32];
        let mut bit = 0;
        while bit < 32 {
            doubled[bit] = sum_of(&bits, bits[bit]);
            bit += 1;
        }
        bits = doubled;
        zeros *= 2;
    }
    let mut tables = [[0; 256]; 4];
    let mut at = 0;
    while at < 4 {
        let mut byte: u32 = 0;
        while byte < 256 {
            tables[at][byte as usize] = sum_of(&bits, byte << (8 * at));
            byte += 1;
        }
        at += 1;
    }
    tables
}

/// The sum of what the bits of a CRC become.
const fn sum_of(bits: &[u32; 32], crc: u32) -> u32 {
    let mut sum = 0;
    let mut bit = 0;
    while bit < 32 {
        if crc >> bit & 1 == 1 {
            sum ^= bits[bit];
        }
        bit += 1;
    }
    sum
}

const _: () = assert!(PAGE_BYTES.is_power_of_two(), "the zeros are doubled");

/// CRC32C (Castagnoli, RFC 3720 appendix B.4) over both addresses, the header without its CRC
/// field, options, data and trailer.
fn crc(
    source: Ipv6Addr,
    destination: Ipv6Addr,
    fixed: &[u8; HEADER_BYTES],
    options: &[u8],
    rest: &[u8],
) -> u32 {
    /// Longer data is not copied.
    const SHORT: usize = 128;
    let mut bytes = [0; FRONT + SHORT];
    let (front, behind) = bytes.split_first_chunk_mut::<FRONT>().expect("it is longer");
    write_front(front, source, destination, fixed);
    // The digest has 300 bytes of parameters; a single call avoids it.
    if options.is_empty()
        && let Some(behind) = behind.get_mut(..rest.len())
    {
        behind.copy_from_slice(rest);
        return crc32_iscsi(&bytes[..FRONT + rest.len()]);
    }
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    digest.update(front);
    if !options.is_empty() {
        digest.update(options);
    }
    if !rest.is_empty() {
        digest.update(rest);
    }
    // A 32-bit CRC in a wider integer: the cast loses nothing.
    #[allow(clippy::cast_possible_truncation, reason = "the algorithm is 32 bits wide")]
    let crc = digest.finalize() as u32;
    crc
}
