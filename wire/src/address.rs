//! The address: a pointer is the destination of the packet that uses it.
//!
//! ```text
//! bit 0            32        48      56     64                            128
//!     | scope (32)  | node 16 | cmd 8 | tag 8 |        location (64)        |
//! ```
//!
//! * `scope` is [`FABRIC_PREFIX`] followed by the 16-bit [`Space`].
//! * `location` of memory: bit 63 clear, a 15-bit [`ArenaGeneration`], a 48-bit byte offset.
//! * `location` of an endpoint: bit 63 set; no range of memory can match it.

use core::{fmt, net::Ipv6Addr, str::FromStr};

use crate::command::{Command, Status, WireCommand};

/// The first 16 bits of every fabric address (a unique-local prefix, RFC 4193).
pub const FABRIC_PREFIX: u16 = 0xfdbb;

/// Length of [`FABRIC_PREFIX`] in bits: one route covers the fabric.
pub const FABRIC_PREFIX_LEN: u8 = 16;

/// Length in bits of the prefix that names one endpoint (scope and node).
pub const NODE_PREFIX_LEN: u8 = 48;

/// Bytes in a page, the unit of transfer and coherence.
pub const PAGE_BYTES: usize = 4096;

/// Base-2 logarithm of [`PAGE_BYTES`].
pub const PAGE_SHIFT: u32 = PAGE_BYTES.trailing_zeros();

/// Bytes in a line: no operation (one train) crosses an aligned line.
pub const LINE_BYTES: usize = 32 * 1024;

/// Pages in a line.
pub const LINE_PAGES: usize = LINE_BYTES / PAGE_BYTES;

/// Bits of the byte offset inside an arena.
pub const OFFSET_BITS: u32 = 48;

/// Base-2 logarithm of the bytes of one shard of an arena, the part that one serving core owns.
pub const SHARD_SHIFT: u32 = 40;

/// The byte of the location that holds the shard.
const SHARD_BYTE: u8 = 2;

/// The byte of the whole address that holds the shard, for steering in the kernel.
pub const SHARD_ADDRESS_BYTE: u8 = 8 + SHARD_BYTE;

const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const ENDPOINT_BIT: u64 = 1 << 63;

/// An isolated tenant of the fabric: the low half of the scope.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Space(pub u16);

impl Space {
    /// The 32-bit scope of this space: the fabric prefix and the space.
    #[must_use]
    pub const fn scope(self) -> u32 {
        ((FABRIC_PREFIX as u32) << 16) | self.0 as u32
    }
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An endpoint of the fabric: one process with one interface.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct NodeId(pub u16);

impl NodeId {
    /// Any memory node: valid only for CREATE and ALLOC_WRITE.
    pub const ANY: Self = Self(0);
    /// Every node of the space: valid only for notices.
    pub const ALL: Self = Self(0xffff);

    /// Whether this id names one endpoint (neither [`Self::ANY`] nor [`Self::ALL`]).
    #[must_use]
    pub const fn is_unicast(self) -> bool {
        self.0 != Self::ANY.0 && self.0 != Self::ALL.0
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The colour of an allocation; it changes at DELETE so that a stale pointer is detected.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Tag(pub u8);

/// The upper part of an allocation's colour; 15 bits, never reused.
///
/// A memory server reserves generations with the controller. It begins with those that no earlier
/// contents of its arena had, and a page whose tags are used up continues with the next one.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct ArenaGeneration(u16);

impl ArenaGeneration {
    /// The last generation; a server that used it up needs a new node id.
    pub const MAX: Self = Self(0x7fff);

    /// A generation from its number; `None` above [`Self::MAX`].
    #[must_use]
    pub const fn new(number: u16) -> Option<Self> {
        if number <= Self::MAX.0 { Some(Self(number)) } else { None }
    }

    /// The number of this generation.
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0
    }

    /// The next generation; `None` when they are used up.
    #[must_use]
    pub const fn next(self) -> Option<Self> {
        Self::new(self.0 + 1)
    }

    /// The generation `count` after this one, [`Self::MAX`] at most.
    #[must_use]
    pub const fn saturating_add(self, count: u16) -> Self {
        let number = self.0.saturating_add(count);
        if number > Self::MAX.0 { Self::MAX } else { Self(number) }
    }
}

/// The location of a pointer on its node: an arena generation and a byte offset, 63 bits.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Location(u64);

impl Location {
    /// The location `offset` bytes into an arena; `None` if the offset needs more than 48 bits.
    #[must_use]
    pub const fn new(generation: ArenaGeneration, offset: u64) -> Option<Self> {
        if offset > OFFSET_MASK {
            return None;
        }
        Some(Self(((generation.0 as u64) << OFFSET_BITS) | offset))
    }

    /// The location in its wire form; `None` if bit 63 is set (an endpoint's own address).
    #[must_use]
    pub const fn from_bits(bits: u64) -> Option<Self> {
        if bits & ENDPOINT_BIT == 0 { Some(Self(bits)) } else { None }
    }

    /// The wire form.
    #[must_use]
    pub const fn bits(self) -> u64 {
        self.0
    }

    /// The arena generation.
    #[must_use]
    pub const fn generation(self) -> ArenaGeneration {
        ArenaGeneration((self.0 >> OFFSET_BITS) as u16)
    }

    /// The byte offset inside the arena.
    #[must_use]
    pub const fn offset(self) -> u64 {
        self.0 & OFFSET_MASK
    }

    /// The page number inside the arena.
    #[must_use]
    pub const fn page(self) -> u64 {
        self.offset() >> PAGE_SHIFT
    }

    /// The byte offset inside the page.
    #[must_use]
    pub const fn in_page(self) -> usize {
        let [.., high, low] = self.0.to_be_bytes();
        u16::from_be_bytes([high, low]) as usize & (PAGE_BYTES - 1)
    }

    /// The shard that serves the location: bits 40 to 47 of the offset. A server has one serving
    /// core per shard, each with its own 1 TiB of the offset range.
    #[must_use]
    pub const fn shard(self) -> u8 {
        self.0.to_be_bytes()[SHARD_BYTE as usize]
    }

    /// Whether the location is the first byte of a page.
    #[must_use]
    pub const fn is_page_aligned(self) -> bool {
        self.in_page() == 0
    }
}

/// Why a value is not a pointer, or an arithmetic result would not be one.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum PointerError {
    /// The address is outside the fabric's prefix.
    NotFabric,
    /// The text is not an IPv6 address.
    NotIpv6,
    /// The address carries a command, so it is a destination and not a pointer.
    HasCommand,
    /// The address names an endpoint and not memory (bit 63 of the location is set).
    NotMemory,
    /// The result would leave the arena's 48-bit offset range.
    OffsetOverflow,
    /// The result would leave the region.
    OutOfRegion,
}

impl fmt::Display for PointerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotFabric => "the address is not in the fabric's prefix fdbb::/16",
            Self::NotIpv6 => "not an IPv6 address",
            Self::HasCommand => "the address carries a command; a pointer has command 0",
            Self::NotMemory => "the address names an endpoint, not memory",
            Self::OffsetOverflow => "the offset leaves the arena's 48-bit range",
            Self::OutOfRegion => "the offset leaves the region",
        })
    }
}

impl core::error::Error for PointerError {}

/// A 128-bit location of remote memory: scope, home node, tag, location; no command.
///
/// It is parsed from IPv6 text and printed as such. Arithmetic keeps node, scope, arena generation and the 48-bit
/// offset range, or returns an error; use [`Region`] to stay within an allocation.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Pointer {
    /// The tenant.
    pub space: Space,
    /// The home node; it never changes, even if the page migrates.
    pub node: NodeId,
    /// The colour of the allocation.
    pub tag: Tag,
    /// Generation and offset on the home node.
    pub location: Location,
}

// Not larger than an address.
const _: () = assert!(size_of::<Pointer>() == size_of::<Ipv6Addr>());

impl Pointer {
    /// The pointer as an IPv6 address, which is also its text and its wire form (command 0).
    #[must_use]
    pub const fn to_ipv6(self) -> Ipv6Addr {
        pack(self.space, self.node, 0, self.tag.0, self.location.0)
    }

    /// The pointer that corresponds to an IPv6 address.
    ///
    /// # Errors
    /// If the address is not in the fabric, carries a command, or names an endpoint.
    pub const fn from_ipv6(address: Ipv6Addr) -> Result<Self, PointerError> {
        let Some(fields) = Fields::unpack(address) else { return Err(PointerError::NotFabric) };
        if fields.command != 0 {
            return Err(PointerError::HasCommand);
        }
        let Some(location) = Location::from_bits(fields.location) else {
            return Err(PointerError::NotMemory);
        };
        Ok(Self { space: fields.space, node: fields.node, tag: Tag(fields.tag), location })
    }

    /// The pointer `bytes` after this one.
    ///
    /// # Errors
    /// [`PointerError::OffsetOverflow`] if the result is outside the arena.
    pub const fn checked_add(self, bytes: u64) -> Result<Self, PointerError> {
        match self.location.offset().checked_add(bytes) {
            Some(offset) => self.at_offset(offset),
            None => Err(PointerError::OffsetOverflow),
        }
    }

    /// The pointer `bytes` before this one.
    ///
    /// # Errors
    /// [`PointerError::OffsetOverflow`] if the result is outside the arena.
    pub const fn checked_sub(self, bytes: u64) -> Result<Self, PointerError> {
        match self.location.offset().checked_sub(bytes) {
            Some(offset) => self.at_offset(offset),
            None => Err(PointerError::OffsetOverflow),
        }
    }

    /// The first byte of the page that contains this pointer.
    #[must_use]
    pub const fn page_start(self) -> Self {
        Self { location: Location(self.location.0 & !(PAGE_BYTES as u64 - 1)), ..self }
    }

    /// This pointer with a command, as the destination of a request sent to its home node.
    #[must_use]
    pub const fn destination(self, command: Command, home: bool) -> Destination {
        Destination { pointer: self, command, home }
    }

    const fn at_offset(self, offset: u64) -> Result<Self, PointerError> {
        match Location::new(self.location.generation(), offset) {
            Some(location) => Ok(Self { location, ..self }),
            None => Err(PointerError::OffsetOverflow),
        }
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.to_ipv6().fmt(f)
    }
}

/// The IPv6 text, as [`Display`](fmt::Display) and other tools print it.
impl fmt::Debug for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pointer").field(&format_args!("{self}")).finish()
    }
}

impl FromStr for Pointer {
    type Err = PointerError;

    fn from_str(text: &str) -> Result<Self, PointerError> {
        let address = text.parse::<Ipv6Addr>().map_err(|_| PointerError::NotIpv6)?;
        Self::from_ipv6(address)
    }
}

impl From<Pointer> for Ipv6Addr {
    fn from(pointer: Pointer) -> Self {
        pointer.to_ipv6()
    }
}

impl TryFrom<Ipv6Addr> for Pointer {
    type Error = PointerError;

    fn try_from(address: Ipv6Addr) -> Result<Self, PointerError> {
        Self::from_ipv6(address)
    }
}

/// An allocation: a base pointer and a length in bytes; offsets cannot leave it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Region {
    base: Pointer,
    length_bytes: u64,
}

impl Region {
    /// The region of `length_bytes` at `base`.
    ///
    /// # Errors
    /// [`PointerError::OffsetOverflow`] if its end is outside the arena.
    pub const fn new(base: Pointer, length_bytes: u64) -> Result<Self, PointerError> {
        match base.location.offset().checked_add(length_bytes) {
            Some(end) if end <= OFFSET_MASK + 1 => Ok(Self { base, length_bytes }),
            _ => Err(PointerError::OffsetOverflow),
        }
    }

    /// The pointer to the first byte.
    #[must_use]
    pub const fn base(self) -> Pointer {
        self.base
    }

    /// The length in bytes.
    #[must_use]
    pub const fn length_bytes(self) -> u64 {
        self.length_bytes
    }

    /// The pointer `offset` bytes into the region.
    ///
    /// # Errors
    /// [`PointerError::OutOfRegion`] if `offset` is not below the length.
    pub const fn at(self, offset: u64) -> Result<Pointer, PointerError> {
        if offset >= self.length_bytes {
            return Err(PointerError::OutOfRegion);
        }
        self.base.checked_add(offset)
    }

    /// The part of this region that starts `offset` bytes in and is `length_bytes` long.
    ///
    /// # Errors
    /// [`PointerError::OutOfRegion`] if the part is not inside the region.
    pub const fn slice(self, offset: u64, length_bytes: u64) -> Result<Self, PointerError> {
        match offset.checked_add(length_bytes) {
            Some(end) if end <= self.length_bytes => match self.base.checked_add(offset) {
                Ok(base) => Ok(Self { base, length_bytes }),
                // Only an empty part after the arena's last byte has no pointer.
                Err(_) => Err(PointerError::OutOfRegion),
            },
            _ => Err(PointerError::OutOfRegion),
        }
    }
}

/// The destination address of a request: a pointer with a command.
///
/// A request sent *via* another node has that node in the address; the header then carries the
/// pointer itself.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Destination {
    /// The pointer, with the node that should receive the packet.
    pub pointer: Pointer,
    /// The command.
    pub command: Command,
    /// Bypass the switch's `redirect` table.
    pub home: bool,
}

impl Destination {
    /// The address on the wire.
    #[must_use]
    pub const fn to_ipv6(self) -> Ipv6Addr {
        let command = WireCommand::request(self.command, self.home).bits();
        let Pointer { space, node, tag, location } = self.pointer;
        pack(space, node, command, tag.0, location.0)
    }

    /// This destination with another node in the address (a request sent *via* that node).
    #[must_use]
    pub const fn via(mut self, node: NodeId) -> Self {
        self.pointer.node = node;
        self
    }
}

/// The source address of a reply: the replier, the command and the status.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct ReplySource {
    /// The tenant.
    pub space: Space,
    /// The replier, which may not be the pointer's home node.
    pub node: NodeId,
    /// The command of the request.
    pub command: Command,
    /// Whether the lease that the reply is about is contended.
    pub contended: bool,
    /// The result, carried in the tag byte.
    pub status: Status,
    /// The location of the request's pointer (or of the endpoint, as the request named it).
    pub location_bits: u64,
}

impl ReplySource {
    /// The address on the wire.
    #[must_use]
    pub const fn to_ipv6(self) -> Ipv6Addr {
        let command = WireCommand::reply_of(self.command, self.contended).bits();
        pack(self.space, self.node, command, self.status.code(), self.location_bits)
    }
}

/// An endpoint's own address: a client's source, a server's control address (location bit 63 set).
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct EndpointAddress {
    /// The tenant.
    pub space: Space,
    /// The endpoint.
    pub node: NodeId,
    selector: u64,
}

impl EndpointAddress {
    /// The address of `node`; the endpoint chooses the low 63 bits of `selector` (a core, a
    /// queue, entropy for the anycast choice).
    #[must_use]
    pub const fn new(space: Space, node: NodeId, selector: u64) -> Self {
        Self { space, node, selector: selector & !ENDPOINT_BIT }
    }

    /// An address of `node` that its core for `shard` serves; `entropy` varies the anycast choice.
    #[must_use]
    pub const fn of_shard(space: Space, node: NodeId, shard: u8, entropy: u32) -> Self {
        Self::new(space, node, ((shard as u64) << SHARD_SHIFT) | entropy as u64)
    }

    /// The address of `node` at which it accepts requests for the memory at `pointer`, whatever node
    /// the pointer names: no entry of a switch for memory matches it.
    #[must_use]
    pub const fn for_memory(node: NodeId, pointer: Pointer) -> Self {
        Self::of_shard(pointer.space, node, pointer.location.shard(), 0)
    }

    /// The low 63 bits of the location.
    #[must_use]
    pub const fn selector(self) -> u64 {
        self.selector
    }

    /// The address on the wire, with command and tag 0.
    #[must_use]
    pub const fn to_ipv6(self) -> Ipv6Addr {
        pack(self.space, self.node, 0, 0, ENDPOINT_BIT | self.selector)
    }

    /// This address with a command, as the destination of a request.
    #[must_use]
    pub const fn destination(self, command: Command, home: bool) -> Ipv6Addr {
        let command = WireCommand::request(command, home).bits();
        pack(self.space, self.node, command, 0, ENDPOINT_BIT | self.selector)
    }

    /// The location bits on the wire: bit 63 and the selector.
    #[must_use]
    pub const fn location_bits(self) -> u64 {
        ENDPOINT_BIT | self.selector
    }
}

/// The raw fields of any fabric address, before their meaning is checked.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct Fields {
    /// The tenant.
    pub space: Space,
    /// The node.
    pub node: NodeId,
    /// The command byte with its reply and home bits.
    pub command: u8,
    /// The tag byte: a tag in a pointer, a status in a reply's source.
    pub tag: u8,
    /// The location with bit 63.
    pub location: u64,
}

impl Fields {
    /// The fields of a fabric address; `None` if it is not in the fabric's prefix.
    #[must_use]
    pub const fn unpack(address: Ipv6Addr) -> Option<Self> {
        let [p0, p1, s0, s1, n0, n1, command, tag, location @ ..] = address.octets();
        if u16::from_be_bytes([p0, p1]) != FABRIC_PREFIX {
            return None;
        }
        Some(Self {
            space: Space(u16::from_be_bytes([s0, s1])),
            node: NodeId(u16::from_be_bytes([n0, n1])),
            command,
            tag,
            location: u64::from_be_bytes(location),
        })
    }

    /// The address with these fields.
    #[must_use]
    pub const fn to_ipv6(self) -> Ipv6Addr {
        pack(self.space, self.node, self.command, self.tag, self.location)
    }

    /// The shard of the location, for memory and for an endpoint's own address.
    #[must_use]
    pub const fn shard(self) -> u8 {
        self.location.to_be_bytes()[SHARD_BYTE as usize]
    }

    /// Whether the location is memory (bit 63 clear) rather than an endpoint's own address.
    #[must_use]
    pub const fn is_memory(self) -> bool {
        self.location & ENDPOINT_BIT == 0
    }

    /// Whether this is an endpoint's address to which a request for the memory at `target` may be
    /// sent: without a tag, in the target's space, and of its shard.
    #[must_use]
    pub const fn is_endpoint_for(self, target: Self) -> bool {
        !self.is_memory()
            && target.is_memory()
            && self.tag == 0
            && self.space.0 == target.space.0
            && self.shard() == target.shard()
    }
}

const fn pack(space: Space, node: NodeId, command: u8, tag: u8, location: u64) -> Ipv6Addr {
    Ipv6Addr::from_bits(
        ((space.scope() as u128) << 96)
            | ((node.0 as u128) << 80)
            | ((command as u128) << 72)
            | ((tag as u128) << 64)
            | location as u128,
    )
}
