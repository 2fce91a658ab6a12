//! Actions and instructions (specification, sections 7.2.4 and 7.2.5).

use crate::cursor::{Cursor, list, measured, pad};
use crate::oxm::{Field, Masked, padding};
use crate::{DecodeError, EncodeError};

mod kind {
    pub(super) const OUTPUT: u16 = 0;
    pub(super) const GROUP: u16 = 22;
    pub(super) const DEC_NW_TTL: u16 = 24;
    pub(super) const SET_FIELD: u16 = 25;

    pub(super) const GOTO_TABLE: u16 = 1;
    pub(super) const WRITE_METADATA: u16 = 2;
    pub(super) const WRITE_ACTIONS: u16 = 3;
    pub(super) const APPLY_ACTIONS: u16 = 4;
    pub(super) const CLEAR_ACTIONS: u16 = 5;
    pub(super) const METER: u16 = 6;
}

/// What is done with a packet (section 7.2.5).
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Action {
    /// Sends it to a port.
    Output {
        /// The port, see [`crate::port`].
        port: u32,
        /// How many bytes the controller gets, if it is the port.
        max_bytes: u16,
    },
    /// Gives it to a group.
    Group(u32),
    /// Decrements the TTL or hop limit; a packet whose limit is used up is not processed further.
    DecrementIpTtl,
    /// Writes a field, without a mask.
    SetField(Field),
    /// An action that this codec does not know, without its first four bytes.
    Other {
        /// Its type.
        kind: u16,
        /// The rest of it.
        bytes: Vec<u8>,
    },
}

impl Action {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let start = out.len();
        let kind = match self {
            Self::Output { .. } => kind::OUTPUT,
            Self::Group(_) => kind::GROUP,
            Self::DecrementIpTtl => kind::DEC_NW_TTL,
            Self::SetField(_) => kind::SET_FIELD,
            Self::Other { kind, .. } => *kind,
        };
        out.extend_from_slice(&kind.to_be_bytes());
        pad(out, 2);
        match self {
            Self::Output { port, max_bytes } => {
                out.extend_from_slice(&port.to_be_bytes());
                out.extend_from_slice(&max_bytes.to_be_bytes());
                pad(out, 6);
            }
            Self::Group(group) => out.extend_from_slice(&group.to_be_bytes()),
            Self::DecrementIpTtl => pad(out, 4),
            Self::SetField(field) => {
                field.encode(out)?;
                pad(out, padding(out.len() - start));
            }
            Self::Other { bytes, .. } => out.extend_from_slice(bytes),
        }
        if !(out.len() - start).is_multiple_of(8) {
            return Err(EncodeError::Unaligned("an action"));
        }
        measured(out, start, start + 2, "an action")
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
        let (kind, length) = (cursor.u16()?, usize::from(cursor.u16()?));
        if !length.is_multiple_of(8) {
            return Err(DecodeError::Length("an action"));
        }
        let mut part = cursor.part(length, 4, "an action")?;
        let action = match kind {
            kind::OUTPUT => {
                let action = Self::Output { port: part.u32()?, max_bytes: part.u16()? };
                part.skip(6)?;
                action
            }
            kind::GROUP => Self::Group(part.u32()?),
            kind::DEC_NW_TTL => {
                part.skip(4)?;
                Self::DecrementIpTtl
            }
            kind::SET_FIELD => {
                let field = Field::decode(&mut part)?;
                // Only padding follows; its contents do not matter.
                if part.rest().len() >= 8 {
                    return Err(DecodeError::Length("a set-field action"));
                }
                Self::SetField(field)
            }
            kind => Self::Other { kind, bytes: part.rest().to_vec() },
        };
        part.finish()?;
        Ok(action)
    }
}

/// What a flow does with a packet (section 7.2.4).
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Instruction {
    /// Continues in a later table.
    GotoTable(u8),
    /// Writes the metadata that later tables match.
    WriteMetadata(Masked<u64>),
    /// Adds to the actions that are executed at the end.
    WriteActions(Vec<Action>),
    /// Executes actions at once.
    ApplyActions(Vec<Action>),
    /// Removes the actions that are executed at the end.
    ClearActions,
    /// Applies a meter.
    Meter(u32),
    /// An instruction that this codec does not know, without its first four bytes.
    Other {
        /// Its type.
        kind: u16,
        /// The rest of it.
        bytes: Vec<u8>,
    },
}

impl Instruction {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let start = out.len();
        let kind = match self {
            Self::GotoTable(_) => kind::GOTO_TABLE,
            Self::WriteMetadata(_) => kind::WRITE_METADATA,
            Self::WriteActions(_) => kind::WRITE_ACTIONS,
            Self::ApplyActions(_) => kind::APPLY_ACTIONS,
            Self::ClearActions => kind::CLEAR_ACTIONS,
            Self::Meter(_) => kind::METER,
            Self::Other { kind, .. } => *kind,
        };
        out.extend_from_slice(&kind.to_be_bytes());
        pad(out, 2);
        match self {
            Self::GotoTable(table) => {
                out.push(*table);
                pad(out, 3);
            }
            Self::WriteMetadata(metadata) => {
                let mask = metadata.mask.unwrap_or(u64::MAX);
                if metadata.value & !mask != 0 {
                    return Err(EncodeError::OutsideMask);
                }
                pad(out, 4);
                out.extend_from_slice(&metadata.value.to_be_bytes());
                out.extend_from_slice(&mask.to_be_bytes());
            }
            Self::WriteActions(actions) | Self::ApplyActions(actions) => {
                pad(out, 4);
                actions.iter().try_for_each(|action| action.encode(out))?;
            }
            Self::ClearActions => pad(out, 4),
            Self::Meter(meter) => out.extend_from_slice(&meter.to_be_bytes()),
            Self::Other { bytes, .. } => out.extend_from_slice(bytes),
        }
        if !(out.len() - start).is_multiple_of(8) {
            return Err(EncodeError::Unaligned("an instruction"));
        }
        measured(out, start, start + 2, "an instruction")
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
        let (kind, length) = (cursor.u16()?, usize::from(cursor.u16()?));
        if !length.is_multiple_of(8) {
            return Err(DecodeError::Length("an instruction"));
        }
        let mut part = cursor.part(length, 4, "an instruction")?;
        let instruction = match kind {
            kind::GOTO_TABLE => {
                let table = part.u8()?;
                part.skip(3)?;
                Self::GotoTable(table)
            }
            kind::WRITE_METADATA => {
                part.skip(4)?;
                let (value, mask) = (part.u64()?, part.u64()?);
                // Bits outside the mask are not written; the specification allows them.
                let value = value & mask;
                Self::WriteMetadata(Masked { value, mask: Some(mask).filter(|it| *it != u64::MAX) })
            }
            kind::WRITE_ACTIONS => {
                part.skip(4)?;
                return list(part, Action::decode).map(Self::WriteActions);
            }
            kind::APPLY_ACTIONS => {
                part.skip(4)?;
                return list(part, Action::decode).map(Self::ApplyActions);
            }
            kind::CLEAR_ACTIONS => {
                part.skip(4)?;
                Self::ClearActions
            }
            kind::METER => Self::Meter(part.u32()?),
            kind => Self::Other { kind, bytes: part.rest().to_vec() },
        };
        part.finish()?;
        Ok(instruction)
    }
}
