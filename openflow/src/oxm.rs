//! Match fields: OXM (specification, section 7.2.3).

use crate::cursor::{Cursor, list, measured, pad};
use crate::{DecodeError, EncodeError};

/// The class of the fields that the specification defines.
const OPENFLOW_BASIC: u16 = 0x8000;

/// The class of fields of Nicira, which Open vSwitch uses.
const NICIRA: u16 = 0x0001;

/// Nicira's field for fragments: bit 0 is set in every fragment, bit 1 in those after the first.
const NICIRA_IP_FRAGMENT: u8 = 26;

/// Nicira's field for the time to live or hop limit.
const NICIRA_IP_TTL: u8 = 29;

/// The type of a match that consists of OXM fields (section 7.2.2.1).
const MATCH_OXM: u16 = 1;

/// A value and the bits of it that count; no mask: all.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Masked<T> {
    /// The value; bits that do not count must be 0.
    pub value: T,
    /// The bits that count.
    pub mask: Option<T>,
}

impl<T> Masked<T> {
    /// All bits count.
    pub const fn exact(value: T) -> Self {
        Self { value, mask: None }
    }

    /// Some bits count.
    pub const fn under(value: T, mask: T) -> Self {
        Self { value, mask: Some(mask) }
    }
}

/// A match field, and what a set-field action writes (section 7.2.3.8, table 12).
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub enum Field {
    /// The ingress port.
    InPort(u32),
    /// What earlier tables wrote.
    Metadata(Masked<u64>),
    /// The destination MAC address.
    EthDst(Masked<[u8; 6]>),
    /// The source MAC address.
    EthSrc(Masked<[u8; 6]>),
    /// The Ethernet type after VLAN tags.
    EthType(u16),
    /// The VLAN id, with bit 0x1000 for "has a tag".
    VlanVid(Masked<u16>),
    /// The IP protocol or next header.
    IpProto(u8),
    /// The UDP source port.
    UdpSrc(u16),
    /// The UDP destination port.
    UdpDst(u16),
    /// The IPv6 source address.
    Ipv6Src(Masked<u128>),
    /// The IPv6 destination address.
    Ipv6Dst(Masked<u128>),
    /// The `ICMPv6` type.
    Icmpv6Type(u8),
    /// A field that this codec does not know.
    Other(OtherField),
}

/// A field that this codec does not know, as on the wire.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct OtherField {
    /// The class.
    pub class: u16,
    /// The field's number in its class (7 bits).
    pub field: u8,
    /// Whether a mask follows the value.
    pub has_mask: bool,
    /// Value and mask (255 bytes at most).
    pub bytes: Vec<u8>,
}

/// A value with a fixed size on the wire.
trait Fixed: Copy + Eq {
    const BYTES: usize;
    fn read(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError>;
    fn write(self, out: &mut Vec<u8>);
    fn is_within(self, mask: Self) -> bool;
}

macro_rules! fixed {
    ($($number:ty),*) => {$(
        impl Fixed for $number {
            const BYTES: usize = size_of::<$number>();
            fn read(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
                cursor.array().map(Self::from_be_bytes)
            }
            fn write(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_be_bytes());
            }
            fn is_within(self, mask: Self) -> bool {
                self & !mask == 0
            }
        }
    )*};
}

fixed!(u8, u16, u32, u64, u128);

impl Fixed for [u8; 6] {
    const BYTES: usize = 6;
    fn read(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
        cursor.array()
    }
    fn write(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self);
    }
    fn is_within(self, mask: Self) -> bool {
        self.iter().zip(mask).all(|(value, mask)| value & !mask == 0)
    }
}

/// Numbers of fields in the basic class.
mod number {
    pub(super) const IN_PORT: u8 = 0;
    pub(super) const METADATA: u8 = 2;
    pub(super) const ETH_DST: u8 = 3;
    pub(super) const ETH_SRC: u8 = 4;
    pub(super) const ETH_TYPE: u8 = 5;
    pub(super) const VLAN_VID: u8 = 6;
    pub(super) const IP_PROTO: u8 = 10;
    pub(super) const UDP_SRC: u8 = 15;
    pub(super) const UDP_DST: u8 = 16;
    pub(super) const IPV6_SRC: u8 = 26;
    pub(super) const IPV6_DST: u8 = 27;
    pub(super) const ICMPV6_TYPE: u8 = 29;
}

impl Field {
    /// Open vSwitch's own field for fragments: bit 0 is set in every fragment, bit 1 in those after the first.
    #[must_use]
    pub fn ip_fragment(flags: Masked<u8>) -> Self {
        let mut bytes = vec![flags.value];
        bytes.extend(flags.mask);
        let has_mask = flags.mask.is_some();
        Self::Other(OtherField { class: NICIRA, field: NICIRA_IP_FRAGMENT, has_mask, bytes })
    }

    /// Open vSwitch's own field for the time to live or hop limit.
    #[must_use]
    pub fn ip_ttl(value: u8) -> Self {
        let bytes = vec![value];
        Self::Other(OtherField { class: NICIRA, field: NICIRA_IP_TTL, has_mask: false, bytes })
    }

    /// The value of [`Self::ip_ttl`]; `None` if it is another field.
    #[must_use]
    pub fn as_ip_ttl(&self) -> Option<u8> {
        let Self::Other(OtherField { bytes, .. }) = self else { return None };
        let value = *bytes.first()?;
        (*self == Self::ip_ttl(value)).then_some(value)
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        match self {
            Self::InPort(port) => plain(out, number::IN_PORT, *port),
            Self::Metadata(metadata) => return masked(out, number::METADATA, *metadata),
            Self::EthDst(mac) => return masked(out, number::ETH_DST, *mac),
            Self::EthSrc(mac) => return masked(out, number::ETH_SRC, *mac),
            Self::EthType(kind) => plain(out, number::ETH_TYPE, *kind),
            Self::VlanVid(vid) => return masked(out, number::VLAN_VID, *vid),
            Self::IpProto(proto) => plain(out, number::IP_PROTO, *proto),
            Self::UdpSrc(port) => plain(out, number::UDP_SRC, *port),
            Self::UdpDst(port) => plain(out, number::UDP_DST, *port),
            Self::Ipv6Src(address) => return masked(out, number::IPV6_SRC, *address),
            Self::Ipv6Dst(address) => return masked(out, number::IPV6_DST, *address),
            Self::Icmpv6Type(kind) => plain(out, number::ICMPV6_TYPE, *kind),
            Self::Other(other) => return other.encode(out),
        }
        Ok(())
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
        let (class, bits, length) = (cursor.u16()?, cursor.u8()?, cursor.u8()?);
        let (field, has_mask) = (bits >> 1, bits & 1 != 0);
        let mut value = cursor.part(length.into(), 0, "a match field")?;
        let known = if class == OPENFLOW_BASIC {
            known(field, has_mask, &mut value.clone())?
        } else {
            None
        };
        let bytes = value.rest().to_vec();
        Ok(known.unwrap_or(Self::Other(OtherField { class, field, has_mask, bytes })))
    }
}

/// Fields without a mask.
fn known(field: u8, has_mask: bool, value: &mut Cursor<'_>) -> Result<Option<Field>, DecodeError> {
    Ok(Some(match (field, has_mask) {
        (number::IN_PORT, false) => Field::InPort(single(value)?),
        (number::METADATA, _) => Field::Metadata(pair(value, has_mask)?),
        (number::ETH_DST, _) => Field::EthDst(pair(value, has_mask)?),
        (number::ETH_SRC, _) => Field::EthSrc(pair(value, has_mask)?),
        (number::ETH_TYPE, false) => Field::EthType(single(value)?),
        (number::VLAN_VID, _) => Field::VlanVid(pair(value, has_mask)?),
        (number::IP_PROTO, false) => Field::IpProto(single(value)?),
        (number::UDP_SRC, false) => Field::UdpSrc(single(value)?),
        (number::UDP_DST, false) => Field::UdpDst(single(value)?),
        (number::IPV6_SRC, _) => Field::Ipv6Src(pair(value, has_mask)?),
        (number::IPV6_DST, _) => Field::Ipv6Dst(pair(value, has_mask)?),
        (number::ICMPV6_TYPE, false) => Field::Icmpv6Type(single(value)?),
        _ => return Ok(None),
    }))
}

fn single<T: Fixed>(value: &mut Cursor<'_>) -> Result<T, DecodeError> {
    let read = T::read(value)?;
    value.clone().finish()?;
    Ok(read)
}

fn pair<T: Fixed>(value: &mut Cursor<'_>, has_mask: bool) -> Result<Masked<T>, DecodeError> {
    let read = T::read(value)?;
    let mask = if has_mask { Some(T::read(value)?) } else { None };
    value.clone().finish()?;
    // Section 7.2.3.5, table 10: such a field is an error, not one that matches nothing.
    if mask.is_some_and(|mask| !read.is_within(mask)) {
        return Err(DecodeError::OutsideMask);
    }
    Ok(Masked { value: read, mask })
}

fn header(out: &mut Vec<u8>, field: u8, has_mask: bool, bytes: usize) {
    out.extend_from_slice(&OPENFLOW_BASIC.to_be_bytes());
    out.push(field << 1 | u8::from(has_mask));
    // The largest field has 32 bytes.
    out.push(u8::try_from(bytes).unwrap_or(u8::MAX));
}

fn plain<T: Fixed>(out: &mut Vec<u8>, field: u8, value: T) {
    header(out, field, false, T::BYTES);
    value.write(out);
}

fn masked<T: Fixed>(out: &mut Vec<u8>, field: u8, value: Masked<T>) -> Result<(), EncodeError> {
    let Some(mask) = value.mask else {
        plain(out, field, value.value);
        return Ok(());
    };
    if !value.value.is_within(mask) {
        return Err(EncodeError::OutsideMask);
    }
    header(out, field, true, 2 * T::BYTES);
    value.value.write(out);
    mask.write(out);
    Ok(())
}

impl OtherField {
    fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let length =
            u8::try_from(self.bytes.len()).map_err(|_| EncodeError::TooLong("a match field"))?;
        if self.field > 0x7f {
            return Err(EncodeError::TooLong("the number of a match field"));
        }
        out.extend_from_slice(&self.class.to_be_bytes());
        out.push(self.field << 1 | u8::from(self.has_mask));
        out.push(length);
        out.extend_from_slice(&self.bytes);
        Ok(())
    }
}

/// The bytes that follow a structure of this length up to a multiple of 8.
pub(crate) const fn padding(length: usize) -> usize {
    (8 - length % 8) % 8
}

/// Appends a match (section 7.2.2).
pub(crate) fn encode_match(fields: &[Field], out: &mut Vec<u8>) -> Result<(), EncodeError> {
    let start = out.len();
    out.extend_from_slice(&MATCH_OXM.to_be_bytes());
    pad(out, 2);
    for field in fields {
        field.encode(out)?;
    }
    // The length does not include the padding.
    measured(out, start, start + 2, "a match")?;
    pad(out, padding(out.len() - start));
    Ok(())
}

/// Reads a match.
pub(crate) fn decode_match(cursor: &mut Cursor<'_>) -> Result<Vec<Field>, DecodeError> {
    let (kind, length) = (cursor.u16()?, usize::from(cursor.u16()?));
    if kind != MATCH_OXM {
        return Err(DecodeError::Unsupported("the type of a match"));
    }
    let fields = list(cursor.part(length, 4, "a match")?, Field::decode)?;
    cursor.skip(padding(length))?;
    Ok(fields)
}
