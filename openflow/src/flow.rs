//! Flows (specification, sections 7.3.4.1, 7.3.5.2 and 7.4.2).

use crate::action::Instruction;
use crate::cursor::{Cursor, list, measured, pad};
use crate::oxm::{Field, decode_match, encode_match};
use crate::{DecodeError, EncodeError, NO_BUFFER};

/// What to do with flows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FlowCommand {
    /// Adds one, or replaces the one with the same match and priority, and clears its counters.
    Add,
    /// Changes the instructions of all flows that the match covers.
    Modify,
    /// Changes the instructions of the flow with this match and priority, if there is one.
    ModifyStrict,
    /// Deletes all flows that the match covers.
    Delete,
    /// Deletes the flow with this match and priority, if there is one.
    DeleteStrict,
}

/// Properties of a flow: bits of `ofp_flow_mod_flags`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct FlowFlags(pub u16);

impl FlowFlags {
    /// The switch reports its removal.
    pub const SEND_FLOW_REMOVED: Self = Self(1);
    /// The switch refuses it if it overlaps with another of the same priority.
    pub const CHECK_OVERLAP: Self = Self(2);
    /// Its counters start at 0.
    pub const RESET_COUNTS: Self = Self(4);
    /// It does not count packets.
    pub const NO_PACKET_COUNTS: Self = Self(8);
    /// It does not count bytes.
    pub const NO_BYTE_COUNTS: Self = Self(16);
}

/// A change of flows.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FlowMod {
    /// A number that the switch stores with the flow.
    pub cookie: u64,
    /// The bits of the cookie that a changed or deleted flow must have; 0: any cookie.
    pub cookie_mask: u64,
    /// The table; [`crate::TABLE_ALL`] for deletions from all.
    pub table: u8,
    /// What to do.
    pub command: FlowCommand,
    /// Seconds without a packet until its end; 0: never.
    pub idle_timeout: u16,
    /// Seconds until its end; 0: never.
    pub hard_timeout: u16,
    /// The greater one wins.
    pub priority: u16,
    /// Of deletions: only flows that send to this port, or [`crate::port::ANY`].
    pub out_port: u32,
    /// Of deletions: only flows that use this group, or [`crate::GROUP_ANY`].
    pub out_group: u32,
    /// Its properties.
    pub flags: FlowFlags,
    /// Its match.
    pub fields: Vec<Field>,
    /// What it does.
    pub instructions: Vec<Instruction>,
}

impl FlowMod {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&self.cookie_mask.to_be_bytes());
        let command = match self.command {
            FlowCommand::Add => 0,
            FlowCommand::Modify => 1,
            FlowCommand::ModifyStrict => 2,
            FlowCommand::Delete => 3,
            FlowCommand::DeleteStrict => 4,
        };
        out.extend_from_slice(&[self.table, command]);
        out.extend_from_slice(&self.idle_timeout.to_be_bytes());
        out.extend_from_slice(&self.hard_timeout.to_be_bytes());
        out.extend_from_slice(&self.priority.to_be_bytes());
        out.extend_from_slice(&NO_BUFFER.to_be_bytes());
        out.extend_from_slice(&self.out_port.to_be_bytes());
        out.extend_from_slice(&self.out_group.to_be_bytes());
        out.extend_from_slice(&self.flags.0.to_be_bytes());
        pad(out, 2);
        encode_match(&self.fields, out)?;
        self.instructions.iter().try_for_each(|instruction| instruction.encode(out))
    }

    pub(crate) fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let (cookie, cookie_mask, table) = (cursor.u64()?, cursor.u64()?, cursor.u8()?);
        let command = match cursor.u8()? {
            0 => FlowCommand::Add,
            1 => FlowCommand::Modify,
            2 => FlowCommand::ModifyStrict,
            3 => FlowCommand::Delete,
            4 => FlowCommand::DeleteStrict,
            _ => return Err(DecodeError::Unsupported("the command of a flow change")),
        };
        let (idle_timeout, hard_timeout, priority) = (cursor.u16()?, cursor.u16()?, cursor.u16()?);
        if cursor.u32()? != NO_BUFFER {
            return Err(DecodeError::Unsupported("a buffered packet"));
        }
        let (out_port, out_group, flags) = (cursor.u32()?, cursor.u32()?, FlowFlags(cursor.u16()?));
        cursor.skip(2)?;
        let fields = decode_match(&mut cursor)?;
        let instructions = list(cursor, Instruction::decode)?;
        Ok(Self {
            cookie,
            cookie_mask,
            table,
            command,
            idle_timeout,
            hard_timeout,
            priority,
            out_port,
            out_group,
            flags,
            fields,
            instructions,
        })
    }
}

/// A flow in a switch, with its counts.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct FlowStats {
    /// Its table.
    pub table: u8,
    /// Whole seconds since it was added.
    pub duration_seconds: u32,
    /// Nanoseconds beyond these.
    pub duration_nanoseconds: u32,
    /// Its priority.
    pub priority: u16,
    /// Seconds without a packet until its end; 0: never.
    pub idle_timeout: u16,
    /// Seconds from its addition to its end; 0: never.
    pub hard_timeout: u16,
    /// Its properties.
    pub flags: FlowFlags,
    /// The number that was stored with it.
    pub cookie: u64,
    /// Packets that it matched.
    pub packet_count: u64,
    /// Their bytes.
    pub byte_count: u64,
    /// Its match.
    pub fields: Vec<Field>,
    /// What it does.
    pub instructions: Vec<Instruction>,
}

impl FlowStats {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let start = out.len();
        pad(out, 2);
        out.extend_from_slice(&[self.table, 0]);
        out.extend_from_slice(&self.duration_seconds.to_be_bytes());
        out.extend_from_slice(&self.duration_nanoseconds.to_be_bytes());
        out.extend_from_slice(&self.priority.to_be_bytes());
        out.extend_from_slice(&self.idle_timeout.to_be_bytes());
        out.extend_from_slice(&self.hard_timeout.to_be_bytes());
        out.extend_from_slice(&self.flags.0.to_be_bytes());
        pad(out, 4);
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&self.packet_count.to_be_bytes());
        out.extend_from_slice(&self.byte_count.to_be_bytes());
        encode_match(&self.fields, out)?;
        self.instructions.iter().try_for_each(|instruction| instruction.encode(out))?;
        measured(out, start, start, "a flow")
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self, DecodeError> {
        let length = usize::from(cursor.u16()?);
        let mut part = cursor.part(length, 2, "a flow")?;
        let table = part.u8()?;
        part.skip(1)?;
        let (duration_seconds, duration_nanoseconds) = (part.u32()?, part.u32()?);
        let (priority, idle_timeout, hard_timeout) = (part.u16()?, part.u16()?, part.u16()?);
        let flags = FlowFlags(part.u16()?);
        part.skip(4)?;
        let (cookie, packet_count, byte_count) = (part.u64()?, part.u64()?, part.u64()?);
        let fields = decode_match(&mut part)?;
        Ok(Self {
            table,
            duration_seconds,
            duration_nanoseconds,
            priority,
            idle_timeout,
            hard_timeout,
            flags,
            cookie,
            packet_count,
            byte_count,
            fields,
            instructions: list(part, Instruction::decode)?,
        })
    }
}

/// Why a flow ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum RemovedReason {
    /// No packet for its idle timeout.
    IdleTimeout,
    /// Its hard timeout.
    HardTimeout,
    /// A controller deleted it.
    Delete,
    /// A controller deleted its group.
    GroupDelete,
}

/// The end of a flow.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FlowRemoved {
    /// The number that was stored with it.
    pub cookie: u64,
    /// Its priority.
    pub priority: u16,
    /// Why.
    pub reason: RemovedReason,
    /// Its table.
    pub table: u8,
    /// Whole seconds of its life.
    pub duration_seconds: u32,
    /// Nanoseconds beyond these.
    pub duration_nanoseconds: u32,
    /// Its idle timeout in seconds.
    pub idle_timeout: u16,
    /// Its hard timeout in seconds.
    pub hard_timeout: u16,
    /// Packets that it matched.
    pub packet_count: u64,
    /// Their bytes.
    pub byte_count: u64,
    /// Its match.
    pub fields: Vec<Field>,
}

impl FlowRemoved {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        out.extend_from_slice(&self.cookie.to_be_bytes());
        out.extend_from_slice(&self.priority.to_be_bytes());
        let reason = match self.reason {
            RemovedReason::IdleTimeout => 0,
            RemovedReason::HardTimeout => 1,
            RemovedReason::Delete => 2,
            RemovedReason::GroupDelete => 3,
        };
        out.extend_from_slice(&[reason, self.table]);
        out.extend_from_slice(&self.duration_seconds.to_be_bytes());
        out.extend_from_slice(&self.duration_nanoseconds.to_be_bytes());
        out.extend_from_slice(&self.idle_timeout.to_be_bytes());
        out.extend_from_slice(&self.hard_timeout.to_be_bytes());
        out.extend_from_slice(&self.packet_count.to_be_bytes());
        out.extend_from_slice(&self.byte_count.to_be_bytes());
        encode_match(&self.fields, out)
    }

    pub(crate) fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let (cookie, priority) = (cursor.u64()?, cursor.u16()?);
        let reason = match cursor.u8()? {
            0 => RemovedReason::IdleTimeout,
            1 => RemovedReason::HardTimeout,
            2 => RemovedReason::Delete,
            3 => RemovedReason::GroupDelete,
            _ => return Err(DecodeError::Unsupported("the reason of a flow's end")),
        };
        let table = cursor.u8()?;
        let (duration_seconds, duration_nanoseconds) = (cursor.u32()?, cursor.u32()?);
        let (idle_timeout, hard_timeout) = (cursor.u16()?, cursor.u16()?);
        let (packet_count, byte_count) = (cursor.u64()?, cursor.u64()?);
        let fields = decode_match(&mut cursor)?;
        cursor.finish()?;
        Ok(Self {
            cookie,
            priority,
            reason,
            table,
            duration_seconds,
            duration_nanoseconds,
            idle_timeout,
            hard_timeout,
            packet_count,
            byte_count,
            fields,
        })
    }
}
