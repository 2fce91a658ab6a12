//! Questions with long answers: multipart messages (specification, section 7.3.5).

use crate::cursor::{Cursor, list, pad, text};
use crate::flow::FlowStats;
use crate::group::GroupDescription;
use crate::oxm::{Field, decode_match, encode_match};
use crate::port::{Port, PortStats};
use crate::{DecodeError, EncodeError};

mod kind {
    pub(super) const DESCRIPTION: u16 = 0;
    pub(super) const FLOWS: u16 = 1;
    pub(super) const PORT_STATS: u16 = 4;
    pub(super) const GROUPS: u16 = 7;
    pub(super) const PORT_DESCRIPTION: u16 = 13;
}

/// The flag of a response that others follow.
const MORE: u16 = 1;

/// The bytes of a long and of the short text of a description.
const TEXT_BYTES: usize = 256;
const SERIAL_BYTES: usize = 32;

/// Which flows are requested (section 7.3.5.2).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct FlowStatsRequest {
    /// The table, or [`crate::TABLE_ALL`].
    pub table: u8,
    /// Only flows that send to this port, or [`crate::port::ANY`].
    pub out_port: u32,
    /// Only flows that use this group, or [`crate::GROUP_ANY`].
    pub out_group: u32,
    /// The cookie of the flows.
    pub cookie: u64,
    /// The bits of it that count.
    pub cookie_mask: u64,
    /// Only flows that this match covers.
    pub fields: Vec<Field>,
}

/// A request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum MultipartRequest {
    /// What the switch is.
    Description,
    /// Its flows.
    Flows(FlowStatsRequest),
    /// The counts of a port, or of all ([`crate::port::ANY`]).
    PortStats {
        /// The port.
        port: u32,
    },
    /// Its groups.
    Groups,
    /// Its ports.
    PortDescription,
}

impl MultipartRequest {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let kind = match self {
            Self::Description => kind::DESCRIPTION,
            Self::Flows(_) => kind::FLOWS,
            Self::PortStats { .. } => kind::PORT_STATS,
            Self::Groups => kind::GROUPS,
            Self::PortDescription => kind::PORT_DESCRIPTION,
        };
        out.extend_from_slice(&kind.to_be_bytes());
        pad(out, 6);
        match self {
            Self::Description | Self::Groups | Self::PortDescription => {}
            Self::Flows(flows) => {
                out.push(flows.table);
                pad(out, 3);
                out.extend_from_slice(&flows.out_port.to_be_bytes());
                out.extend_from_slice(&flows.out_group.to_be_bytes());
                pad(out, 4);
                out.extend_from_slice(&flows.cookie.to_be_bytes());
                out.extend_from_slice(&flows.cookie_mask.to_be_bytes());
                encode_match(&flows.fields, out)?;
            }
            Self::PortStats { port } => {
                out.extend_from_slice(&port.to_be_bytes());
                pad(out, 4);
            }
        }
        Ok(())
    }

    pub(crate) fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let kind = cursor.u16()?;
        cursor.skip(6)?;
        let request = match kind {
            kind::DESCRIPTION => Self::Description,
            kind::FLOWS => {
                let table = cursor.u8()?;
                cursor.skip(3)?;
                let (out_port, out_group) = (cursor.u32()?, cursor.u32()?);
                cursor.skip(4)?;
                let (cookie, cookie_mask) = (cursor.u64()?, cursor.u64()?);
                let fields = decode_match(&mut cursor)?;
                let flows =
                    FlowStatsRequest { table, out_port, out_group, cookie, cookie_mask, fields };
                Self::Flows(flows)
            }
            kind::PORT_STATS => {
                let port = cursor.u32()?;
                cursor.skip(4)?;
                Self::PortStats { port }
            }
            kind::GROUPS => Self::Groups,
            kind::PORT_DESCRIPTION => Self::PortDescription,
            _ => return Err(DecodeError::Unsupported("the type of a multipart request")),
        };
        cursor.finish()?;
        Ok(request)
    }
}

/// What a switch is (section 7.3.5.1). The texts have 255 bytes at most, the serial number 31.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Description {
    /// Who made it.
    pub manufacturer: String,
    /// Its hardware.
    pub hardware: String,
    /// Its software.
    pub software: String,
    /// Its serial number.
    pub serial: String,
    /// A text for people.
    pub datapath: String,
}

/// A part of a response.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum MultipartPart {
    /// What the switch is.
    Description(Description),
    /// Flows.
    Flows(Vec<FlowStats>),
    /// Counts of ports.
    PortStats(Vec<PortStats>),
    /// Groups.
    Groups(Vec<GroupDescription>),
    /// Ports.
    PortDescription(Vec<Port>),
    /// A response of a type that this codec does not know.
    Other {
        /// Its type.
        kind: u16,
        /// Its contents.
        bytes: Vec<u8>,
    },
}

/// A response, or a part of a long one.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MultipartReply {
    /// Whether other parts follow.
    pub more: bool,
    /// This part.
    pub part: MultipartPart,
}

impl MultipartReply {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let kind = match &self.part {
            MultipartPart::Description(_) => kind::DESCRIPTION,
            MultipartPart::Flows(_) => kind::FLOWS,
            MultipartPart::PortStats(_) => kind::PORT_STATS,
            MultipartPart::Groups(_) => kind::GROUPS,
            MultipartPart::PortDescription(_) => kind::PORT_DESCRIPTION,
            MultipartPart::Other { kind, .. } => *kind,
        };
        out.extend_from_slice(&kind.to_be_bytes());
        out.extend_from_slice(&(if self.more { MORE } else { 0 }).to_be_bytes());
        pad(out, 4);
        match &self.part {
            MultipartPart::Description(it) => {
                let what = "a description";
                text(out, &it.manufacturer, TEXT_BYTES, what)?;
                text(out, &it.hardware, TEXT_BYTES, what)?;
                text(out, &it.software, TEXT_BYTES, what)?;
                text(out, &it.serial, SERIAL_BYTES, what)?;
                text(out, &it.datapath, TEXT_BYTES, what)?;
            }
            MultipartPart::Flows(flows) => flows.iter().try_for_each(|flow| flow.encode(out))?,
            MultipartPart::PortStats(ports) => ports.iter().for_each(|port| port.encode(out)),
            MultipartPart::Groups(groups) => {
                groups.iter().try_for_each(|group| group.encode(out))?;
            }
            MultipartPart::PortDescription(ports) => {
                ports.iter().try_for_each(|port| port.encode(out))?;
            }
            MultipartPart::Other { bytes, .. } => out.extend_from_slice(bytes),
        }
        Ok(())
    }

    pub(crate) fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let (kind, flags) = (cursor.u16()?, cursor.u16()?);
        cursor.skip(4)?;
        let part = match kind {
            kind::DESCRIPTION => {
                let description = Description {
                    manufacturer: cursor.text(TEXT_BYTES)?,
                    hardware: cursor.text(TEXT_BYTES)?,
                    software: cursor.text(TEXT_BYTES)?,
                    serial: cursor.text(SERIAL_BYTES)?,
                    datapath: cursor.text(TEXT_BYTES)?,
                };
                cursor.finish()?;
                MultipartPart::Description(description)
            }
            kind::FLOWS => MultipartPart::Flows(list(cursor, FlowStats::decode)?),
            kind::PORT_STATS => MultipartPart::PortStats(list(cursor, PortStats::decode)?),
            kind::GROUPS => MultipartPart::Groups(list(cursor, GroupDescription::decode)?),
            kind::PORT_DESCRIPTION => MultipartPart::PortDescription(list(cursor, Port::decode)?),
            kind => MultipartPart::Other { kind, bytes: cursor.rest().to_vec() },
        };
        Ok(Self { more: flags & MORE != 0, part })
    }
}
