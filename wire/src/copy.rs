//! Truncated replies: the copies that the controller receives.

use core::net::Ipv6Addr;

use crate::{
    address::Fields,
    command::{Command, Status, WireCommand},
    header::{CONTROLLER_BYTES, Flags, HEADER_BYTES, HeaderError, VERSION},
};

/// Why a copy cannot be used. Its contents are unverified, because no CRC covers a part of a datagram.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub enum CopyError {
    /// An address is not in the fabric's prefix.
    Foreign,
    /// The header's beginning is not one of version 1.
    Header(HeaderError),
    /// It is not a reply with a known command and a known status to an endpoint's own address.
    NotReply,
    /// The target is not a pointer, or has another space than the reply.
    Target,
}

impl core::fmt::Display for CopyError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Foreign => f.write_str("an address is not in the fabric"),
            Self::Header(error) => error.fmt(f),
            Self::NotReply => f.write_str("not a reply to an endpoint"),
            Self::Target => f.write_str("the target is not a pointer of the reply's space"),
        }
    }
}

impl core::error::Error for CopyError {}

/// The addresses and the first [`CONTROLLER_BYTES`] of a reply's header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ReplyCopy {
    /// The source address: the replier.
    pub from: Fields,
    /// The command of the request.
    pub command: Command,
    /// The result.
    pub status: Status,
    /// Whether the lease is contended.
    pub contended: bool,
    /// Modifiers.
    pub flags: Flags,
    /// The owner of the page (BUSY, and the replies about leases).
    pub node: u16,
    /// The pointer that the reply is about, with command 0.
    pub target: Fields,
    /// The fencing token of the page's lease, 48 bits.
    pub lease_epoch: u64,
    /// Remaining milliseconds of the lease when the reply was made.
    pub lease_remaining_ms: u16,
}

impl ReplyCopy {
    /// Reads a reply's addresses and the beginning of its UDP payload; later bytes are ignored.
    ///
    /// # Errors
    /// [`CopyError`]; it never panics.
    pub fn parse(
        source: Ipv6Addr,
        destination: Ipv6Addr,
        payload: &[u8],
    ) -> Result<Self, CopyError> {
        let from = Fields::unpack(source).ok_or(CopyError::Foreign)?;
        let to = Fields::unpack(destination).ok_or(CopyError::Foreign)?;
        let head: &[u8; CONTROLLER_BYTES] =
            payload.first_chunk().ok_or(CopyError::Header(HeaderError::Truncated))?;
        let [version, words, f0, f1, _, _, n0, n1, rest @ ..] = *head;
        if version != VERSION {
            return Err(CopyError::Header(HeaderError::Version(version)));
        }
        if usize::from(words) * 4 < HEADER_BYTES {
            return Err(CopyError::Header(HeaderError::HeaderLength(words)));
        }
        let wire = WireCommand::from_bits(from.command);
        let (Some(command), Some(status)) = (wire.command(), Status::from_code(from.tag)) else {
            return Err(CopyError::NotReply);
        };
        if !wire.is_reply() || to.command != 0 || to.tag != 0 || to.is_memory() {
            return Err(CopyError::NotReply);
        }
        let mut octets = [0; 16];
        octets.copy_from_slice(&rest[..16]);
        let target = Fields::unpack(Ipv6Addr::from(octets))
            .filter(|target| target.command == 0 && target.is_memory())
            .filter(|target| target.space == from.space && to.space == from.space)
            .ok_or(CopyError::Target)?;
        let mut epoch = [0; 8];
        epoch[2..].copy_from_slice(&rest[16..22]);
        Ok(Self {
            from,
            command,
            status,
            contended: wire.is_contended(),
            flags: Flags::from_bits(u16::from_be_bytes([f0, f1])),
            node: u16::from_be_bytes([n0, n1]),
            target,
            lease_epoch: u64::from_be_bytes(epoch),
            lease_remaining_ms: u16::from_be_bytes([rest[22], rest[23]]),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        EndpointAddress, Header, NodeId, ReplySource, Space,
        address::{ArenaGeneration, Location, Pointer, Tag},
    };

    const SPACE: Space = Space(1);

    fn reply() -> (Ipv6Addr, Ipv6Addr, [u8; HEADER_BYTES]) {
        let location = Location::new(ArenaGeneration::default(), 0x5008).unwrap();
        let pointer = Pointer { space: SPACE, node: NodeId(2), tag: Tag(7), location };
        let source = ReplySource {
            space: SPACE,
            node: NodeId(2),
            command: Command::Read,
            status: Status::Busy,
            contended: true,
            location_bits: location.bits(),
        };
        let header = Header {
            node: 0xfffe,
            target: pointer.to_ipv6(),
            lease_epoch: 0x1234_5678_9abc,
            lease_remaining_ms: 777,
            ..Header::default()
        };
        let mut bytes = [0; HEADER_BYTES];
        header.emit(&mut bytes, 0);
        let to = EndpointAddress::new(SPACE, NodeId(0xfffd), 9).to_ipv6();
        (source.to_ipv6(), to, bytes)
    }

    #[test]
    fn the_first_32_bytes_say_all_that_a_controller_needs() {
        let (from, to, bytes) = reply();
        let copy = ReplyCopy::parse(from, to, &bytes[..CONTROLLER_BYTES]).unwrap();
        assert_eq!(
            (copy.command, copy.status, copy.contended),
            (Command::Read, Status::Busy, true)
        );
        assert_eq!(
            (copy.node, copy.lease_epoch, copy.lease_remaining_ms),
            (0xfffe, 0x1234_5678_9abc, 777)
        );
        assert_eq!(
            (copy.target.node, copy.target.tag, copy.target.location),
            (NodeId(2), 7, 0x5008)
        );
    }

    #[test]
    fn whatever_is_no_reply_about_a_page_is_refused() {
        let (from, to, bytes) = reply();
        let parse = |from, to, bytes: &[u8]| ReplyCopy::parse(from, to, bytes).unwrap_err();
        let truncated = CopyError::Header(HeaderError::Truncated);
        assert_eq!(parse(from, to, &bytes[..CONTROLLER_BYTES - 1]), truncated);
        assert_eq!(parse(from, Ipv6Addr::LOCALHOST, &bytes), CopyError::Foreign);
        assert_eq!(parse(to, to, &bytes), CopyError::NotReply);
        assert_eq!(parse(from, from, &bytes), CopyError::NotReply);
        let mut other = bytes;
        other[0] = 2;
        assert_eq!(parse(from, to, &other), CopyError::Header(HeaderError::Version(2)));
        other = bytes;
        other[1] = 20;
        assert_eq!(parse(from, to, &other), CopyError::Header(HeaderError::HeaderLength(20)));
        // A target of another space, with a command, or an endpoint's own address.
        for (at, value) in [(8 + 3, 9), (8 + 6, 6), (8 + 8, 0x80)] {
            other = bytes;
            other[at] = value;
            assert_eq!(parse(from, to, &other), CopyError::Target);
        }
    }
}
