//! Packets to and from the controller (specification, sections 7.3.6 and 7.4.1).

use crate::action::Action;
use crate::cursor::{Cursor, list, pad};
use crate::oxm::{Field, decode_match, encode_match};
use crate::{DecodeError, EncodeError, NO_BUFFER};

/// Why the controller gets a packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PacketInReason {
    /// No flow matched.
    NoMatch,
    /// An action.
    Action,
    /// Its TTL or hop limit was used up.
    InvalidTtl,
    /// A number that this codec does not know.
    Other(u8),
}

/// A packet for the controller.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PacketIn {
    /// The switch's buffer with the whole packet; `None` if it has none.
    pub buffer_id: Option<u32>,
    /// The length of the whole packet.
    pub total_bytes: u16,
    /// Why it was sent.
    pub reason: PacketInReason,
    /// The table that sent it.
    pub table: u8,
    /// The cookie of the flow that sent it.
    pub cookie: u64,
    /// The ingress port and other metadata.
    pub fields: Vec<Field>,
    /// The packet, or its first bytes.
    pub data: Vec<u8>,
}

impl PacketIn {
    /// The ingress port.
    #[must_use]
    pub fn in_port(&self) -> Option<u32> {
        self.fields.iter().find_map(|field| match field {
            Field::InPort(port) => Some(*port),
            _ => None,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        out.extend_from_slice(&self.buffer_id.unwrap_or(NO_BUFFER).to_be_bytes());
        out.extend_from_slice(&self.total_bytes.to_be_bytes());
        let reason = match self.reason {
            PacketInReason::NoMatch => 0,
            PacketInReason::Action => 1,
            PacketInReason::InvalidTtl => 2,
            PacketInReason::Other(code) => code,
        };
        out.extend_from_slice(&[reason, self.table]);
        out.extend_from_slice(&self.cookie.to_be_bytes());
        encode_match(&self.fields, out)?;
        pad(out, 2);
        out.extend_from_slice(&self.data);
        Ok(())
    }

    pub(crate) fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let buffer_id = Some(cursor.u32()?).filter(|buffer| *buffer != NO_BUFFER);
        let total_bytes = cursor.u16()?;
        let reason = match cursor.u8()? {
            0 => PacketInReason::NoMatch,
            1 => PacketInReason::Action,
            2 => PacketInReason::InvalidTtl,
            code => PacketInReason::Other(code),
        };
        let (table, cookie) = (cursor.u8()?, cursor.u64()?);
        let fields = decode_match(&mut cursor)?;
        cursor.skip(2)?;
        let data = cursor.rest().to_vec();
        Ok(Self { buffer_id, total_bytes, reason, table, cookie, fields, data })
    }
}

/// A packet from the controller.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PacketOut {
    /// The port by which it seems to have entered, or [`crate::port::CONTROLLER`].
    pub in_port: u32,
    /// What is done with it.
    pub actions: Vec<Action>,
    /// The packet.
    pub data: Vec<u8>,
}

impl PacketOut {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        out.extend_from_slice(&NO_BUFFER.to_be_bytes());
        out.extend_from_slice(&self.in_port.to_be_bytes());
        let mut actions = Vec::new();
        self.actions.iter().try_for_each(|action| action.encode(&mut actions))?;
        let length =
            u16::try_from(actions.len()).map_err(|_| EncodeError::TooLong("the actions"))?;
        out.extend_from_slice(&length.to_be_bytes());
        pad(out, 6);
        out.extend_from_slice(&actions);
        out.extend_from_slice(&self.data);
        Ok(())
    }

    pub(crate) fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        if cursor.u32()? != NO_BUFFER {
            return Err(DecodeError::Unsupported("a buffered packet"));
        }
        let (in_port, length) = (cursor.u32()?, usize::from(cursor.u16()?));
        cursor.skip(6)?;
        let actions = list(cursor.part(length, 0, "the actions")?, Action::decode)?;
        Ok(Self { in_port, actions, data: cursor.rest().to_vec() })
    }
}
