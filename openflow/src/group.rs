//! Groups (specification, sections 7.3.4.3, 7.3.5.9 and 7.3.5.10).

use crate::action::Action;
use crate::cursor::{Cursor, list, measured, pad};
use crate::{DecodeError, EncodeError};

/// What to do with a group.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GroupCommand {
    /// Adds a new one.
    Add,
    /// Replaces an existing one.
    Modify,
    /// Deletes it, and the flows that use it; no error if it does not exist.
    Delete,
}

/// How a group uses its buckets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum GroupKind {
    /// All buckets, each with a copy.
    All,
    /// One bucket, chosen by the switch according to the weights.
    Select,
    /// The only bucket.
    Indirect,
    /// The first live bucket.
    FastFailover,
}

impl GroupKind {
    const fn code(self) -> u8 {
        match self {
            Self::All => 0,
            Self::Select => 1,
            Self::Indirect => 2,
            Self::FastFailover => 3,
        }
    }

    fn decode(code: u8) -> Result<Self, DecodeError> {
        Ok(match code {
            0 => Self::All,
            1 => Self::Select,
            2 => Self::Indirect,
            3 => Self::FastFailover,
            _ => return Err(DecodeError::Unsupported("the type of a group")),
        })
    }
}

/// The actions of a group.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Bucket {
    /// Its share in a group that selects; otherwise 0.
    pub weight: u16,
    /// The port that must be live, or [`crate::port::ANY`].
    pub watch_port: u32,
    /// The group that must be live, or [`crate::GROUP_ANY`].
    pub watch_group: u32,
    /// The actions.
    pub actions: Vec<Action>,
}

impl Bucket {
    fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let start = out.len();
        pad(out, 2);
        out.extend_from_slice(&self.weight.to_be_bytes());
        out.extend_from_slice(&self.watch_port.to_be_bytes());
        out.extend_from_slice(&self.watch_group.to_be_bytes());
        pad(out, 4);
        self.actions.iter().try_for_each(|action| action.encode(out))?;
        measured(out, start, start, "a bucket")
    }

    fn decode(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
        let length = usize::from(cursor.u16()?);
        let mut part = cursor.part(length, 2, "a bucket")?;
        let (weight, watch_port, watch_group) = (part.u16()?, part.u32()?, part.u32()?);
        part.skip(4)?;
        Ok(Self { weight, watch_port, watch_group, actions: list(part, Action::decode)? })
    }
}

/// A change of a group.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GroupMod {
    /// What to do.
    pub command: GroupCommand,
    /// How it uses its buckets.
    pub kind: GroupKind,
    /// Its number.
    pub group: u32,
    /// Its buckets.
    pub buckets: Vec<Bucket>,
}

impl GroupMod {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let command: u16 = match self.command {
            GroupCommand::Add => 0,
            GroupCommand::Modify => 1,
            GroupCommand::Delete => 2,
        };
        out.extend_from_slice(&command.to_be_bytes());
        out.extend_from_slice(&[self.kind.code(), 0]);
        out.extend_from_slice(&self.group.to_be_bytes());
        self.buckets.iter().try_for_each(|bucket| bucket.encode(out))
    }

    pub(crate) fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let command = match cursor.u16()? {
            0 => GroupCommand::Add,
            1 => GroupCommand::Modify,
            2 => GroupCommand::Delete,
            _ => return Err(DecodeError::Unsupported("the command of a group change")),
        };
        let kind = GroupKind::decode(cursor.u8()?)?;
        cursor.skip(1)?;
        let group = cursor.u32()?;
        Ok(Self { command, kind, group, buckets: list(cursor, Bucket::decode)? })
    }
}

/// A group in a switch.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct GroupDescription {
    /// How it uses its buckets.
    pub kind: GroupKind,
    /// Its number.
    pub group: u32,
    /// Its buckets.
    pub buckets: Vec<Bucket>,
}

impl GroupDescription {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let start = out.len();
        pad(out, 2);
        out.extend_from_slice(&[self.kind.code(), 0]);
        out.extend_from_slice(&self.group.to_be_bytes());
        self.buckets.iter().try_for_each(|bucket| bucket.encode(out))?;
        measured(out, start, start, "a group")
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
        let length = usize::from(cursor.u16()?);
        let mut part = cursor.part(length, 2, "a group")?;
        let kind = GroupKind::decode(part.u8()?)?;
        part.skip(1)?;
        let group = part.u32()?;
        Ok(Self { kind, group, buckets: list(part, Bucket::decode)? })
    }
}
