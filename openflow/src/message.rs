//! Messages: header, contents, and where one ends in a stream (specification, section 7.1).

use crate::cursor::{Cursor, measured, pad};
use crate::fault::ErrorMessage;
use crate::flow::{FlowMod, FlowRemoved};
use crate::group::GroupMod;
use crate::multipart::{MultipartReply, MultipartRequest};
use crate::packet::{PacketIn, PacketOut};
use crate::port::PortStatus;
use crate::{DecodeError, EncodeError, VERSION};

/// The bytes of a header.
const HEADER_BYTES: usize = 8;

/// The longest message.
pub const MESSAGE_BYTES_MAX: usize = 65_535;

mod kind {
    pub(super) const HELLO: u8 = 0;
    pub(super) const ERROR: u8 = 1;
    pub(super) const ECHO_REQUEST: u8 = 2;
    pub(super) const ECHO_REPLY: u8 = 3;
    pub(super) const EXPERIMENTER: u8 = 4;
    pub(super) const FEATURES_REQUEST: u8 = 5;
    pub(super) const FEATURES_REPLY: u8 = 6;
    pub(super) const GET_CONFIG_REQUEST: u8 = 7;
    pub(super) const GET_CONFIG_REPLY: u8 = 8;
    pub(super) const SET_CONFIG: u8 = 9;
    pub(super) const PACKET_IN: u8 = 10;
    pub(super) const FLOW_REMOVED: u8 = 11;
    pub(super) const PORT_STATUS: u8 = 12;
    pub(super) const PACKET_OUT: u8 = 13;
    pub(super) const FLOW_MOD: u8 = 14;
    pub(super) const GROUP_MOD: u8 = 15;
    pub(super) const MULTIPART_REQUEST: u8 = 18;
    pub(super) const MULTIPART_REPLY: u8 = 19;
    pub(super) const BARRIER_REQUEST: u8 = 20;
    pub(super) const BARRIER_REPLY: u8 = 21;
    pub(super) const ROLE_REQUEST: u8 = 24;
    pub(super) const ROLE_REPLY: u8 = 25;
}

/// A message.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Message {
    /// The transaction id; a response has that of its request.
    pub xid: u32,
    /// The contents.
    pub body: Body,
}

/// The contents of a message.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Body {
    /// The first message of either side.
    Hello(Hello),
    /// A request failed.
    Error(ErrorMessage),
    /// Asks for an echo.
    EchoRequest(Vec<u8>),
    /// The echo.
    EchoReply(Vec<u8>),
    /// A message of somebody's own.
    Experimenter {
        /// Whose.
        experimenter: u32,
        /// Its type.
        kind: u32,
        /// The rest.
        data: Vec<u8>,
    },
    /// Asks what the switch can do.
    FeaturesRequest,
    /// What it can do.
    FeaturesReply(Features),
    /// Asks for the configuration.
    GetConfigRequest,
    /// The configuration.
    GetConfigReply(SwitchConfig),
    /// Sets the configuration.
    SetConfig(SwitchConfig),
    /// A packet for the controller.
    PacketIn(PacketIn),
    /// A flow ended.
    FlowRemoved(FlowRemoved),
    /// A port changed.
    PortStatus(PortStatus),
    /// A packet from the controller.
    PacketOut(PacketOut),
    /// Changes flows.
    FlowMod(FlowMod),
    /// Changes a group.
    GroupMod(GroupMod),
    /// A question with a long response.
    MultipartRequest(MultipartRequest),
    /// A part of the response.
    MultipartReply(MultipartReply),
    /// Asks for a response when everything before it is executed.
    BarrierRequest,
    /// Everything before it is executed.
    BarrierReply,
    /// Asks for a role.
    RoleRequest(RoleRequest),
    /// The role.
    RoleReply(RoleRequest),
    /// A message that this codec does not know.
    Other {
        /// Its type.
        kind: u8,
        /// Its contents.
        data: Vec<u8>,
    },
}

impl Body {
    /// The specification's name of the message's type (section 7.1.1), for people.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "OFPT_HELLO",
            Self::Error(_) => "OFPT_ERROR",
            Self::EchoRequest(_) => "OFPT_ECHO_REQUEST",
            Self::EchoReply(_) => "OFPT_ECHO_REPLY",
            Self::Experimenter { .. } => "OFPT_EXPERIMENTER",
            Self::FeaturesRequest => "OFPT_FEATURES_REQUEST",
            Self::FeaturesReply(_) => "OFPT_FEATURES_REPLY",
            Self::GetConfigRequest => "OFPT_GET_CONFIG_REQUEST",
            Self::GetConfigReply(_) => "OFPT_GET_CONFIG_REPLY",
            Self::SetConfig(_) => "OFPT_SET_CONFIG",
            Self::PacketIn(_) => "OFPT_PACKET_IN",
            Self::FlowRemoved(_) => "OFPT_FLOW_REMOVED",
            Self::PortStatus(_) => "OFPT_PORT_STATUS",
            Self::PacketOut(_) => "OFPT_PACKET_OUT",
            Self::FlowMod(_) => "OFPT_FLOW_MOD",
            Self::GroupMod(_) => "OFPT_GROUP_MOD",
            Self::MultipartRequest(_) => "OFPT_MULTIPART_REQUEST",
            Self::MultipartReply(_) => "OFPT_MULTIPART_REPLY",
            Self::BarrierRequest => "OFPT_BARRIER_REQUEST",
            Self::BarrierReply => "OFPT_BARRIER_REPLY",
            Self::RoleRequest(_) => "OFPT_ROLE_REQUEST",
            Self::RoleReply(_) => "OFPT_ROLE_REPLY",
            Self::Other { .. } => "a message of another type",
        }
    }
}

/// The versions that a side speaks (section 7.5.1).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Hello {
    /// The greatest, from the header.
    pub version: u8,
    /// All of them, if stated: bit n is version n.
    pub bitmap: Option<u32>,
}

/// The element of a hello with the versions.
const VERSION_BITMAP: u16 = 1;

impl Hello {
    /// A side that speaks one version.
    #[must_use]
    pub const fn for_version(version: u8) -> Self {
        // The first word of the bitmap ends at version 31; the version in the header is enough for later ones.
        Self { version, bitmap: 1_u32.checked_shl(version as u32) }
    }

    /// Whether a side that speaks only `ours` and the sender of this hello have a version in common.
    #[must_use]
    pub const fn speaks(&self, ours: u8) -> bool {
        match self.bitmap {
            // Later words of the bitmap are not kept.
            Some(bitmap) => ours < 32 && bitmap >> ours & 1 != 0,
            None => self.version >= ours,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) {
        if let Some(bitmap) = self.bitmap {
            out.extend_from_slice(&VERSION_BITMAP.to_be_bytes());
            out.extend_from_slice(&8u16.to_be_bytes());
            out.extend_from_slice(&bitmap.to_be_bytes());
        }
    }

    fn decode(version: u8, mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let mut bitmap = None;
        while !cursor.is_empty() {
            let (kind, length) = (cursor.u16()?, usize::from(cursor.u16()?));
            let mut part = cursor.part(length, 4, "an element of a hello")?;
            if kind == VERSION_BITMAP && bitmap.is_none() {
                // Later words are about versions from 32 on.
                bitmap = Some(part.u32()?);
            }
            let padding = crate::oxm::padding(length);
            cursor.skip(padding)?;
        }
        Ok(Self { version, bitmap })
    }
}

/// What a switch can do (section 7.3.1).
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Features {
    /// Its identity.
    pub datapath_id: u64,
    /// How many packets it can keep for the controller.
    pub buffer_count: u32,
    /// How many tables it has.
    pub table_count: u8,
    /// Which connection this is; 0 is the main one.
    pub auxiliary_id: u8,
    /// Bits of `ofp_capabilities`.
    pub capabilities: u32,
}

/// What a switch does with IP fragments (section 7.3.2).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum FragmentHandling {
    /// They are packets like others.
    Normal,
    /// They are dropped.
    Drop,
    /// They are reassembled.
    Reassemble,
}

/// The configuration of a switch (section 7.3.2).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct SwitchConfig {
    /// What it does with IP fragments.
    pub fragments: FragmentHandling,
    /// How many bytes of a packet without a flow the controller gets.
    pub miss_send_bytes: u16,
}

/// What a controller may do (section 7.3.9).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Role {
    /// As before.
    NoChange,
    /// Everything, beside others.
    Equal,
    /// Everything ("master"); all others become secondary.
    Primary,
    /// Only reading ("slave").
    Secondary,
}

/// A request for a role, and its response.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct RoleRequest {
    /// The role.
    pub role: Role,
    /// The number of the election, compared as a signed difference.
    pub generation_id: u64,
}

/// The length of the first message in a stream; `None` if more bytes are needed to know it or to complete the
/// message.
///
/// # Errors
/// [`DecodeError::Length`] if no message can have this length: the stream is unusable.
pub fn frame_length(stream: &[u8]) -> Result<Option<usize>, DecodeError> {
    let Some([_, _, high, low]) = stream.first_chunk() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes([*high, *low]));
    if length < HEADER_BYTES {
        return Err(DecodeError::Length("a message"));
    }
    Ok((stream.len() >= length).then_some(length))
}

impl Message {
    /// Appends the message.
    ///
    /// # Errors
    /// [`EncodeError`]; then `out` is unchanged.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let start = out.len();
        let encoded = self.append(out);
        if encoded.is_err() {
            out.truncate(start);
        }
        encoded
    }

    fn append(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        let start = out.len();
        let version = match &self.body {
            Body::Hello(hello) => hello.version,
            _ => VERSION,
        };
        out.extend_from_slice(&[version, self.body.kind()]);
        pad(out, 2);
        out.extend_from_slice(&self.xid.to_be_bytes());
        self.body.append(out)?;
        measured(out, start, start + 2, "a message")
    }

    /// Reads exactly one message.
    ///
    /// # Errors
    /// [`DecodeError`]: the sender's fault, or a feature that this codec does not have.
    pub fn decode(frame: &[u8]) -> Result<Self, DecodeError> {
        let mut cursor = Cursor::new(frame, "a message");
        let (version, kind, length, xid) =
            (cursor.u8()?, cursor.u8()?, cursor.u16()?, cursor.u32()?);
        if usize::from(length) != frame.len() {
            return Err(DecodeError::Length("a message"));
        }
        // Hellos of other versions have the same form, and errors may answer one.
        if version != VERSION && kind != kind::HELLO && kind != kind::ERROR {
            return Err(DecodeError::Version(version));
        }
        Ok(Self { xid, body: Body::decode(version, kind, cursor)? })
    }
}

impl Body {
    const fn kind(&self) -> u8 {
        match self {
            Self::Hello(_) => kind::HELLO,
            Self::Error(_) => kind::ERROR,
            Self::EchoRequest(_) => kind::ECHO_REQUEST,
            Self::EchoReply(_) => kind::ECHO_REPLY,
            Self::Experimenter { .. } => kind::EXPERIMENTER,
            Self::FeaturesRequest => kind::FEATURES_REQUEST,
            Self::FeaturesReply(_) => kind::FEATURES_REPLY,
            Self::GetConfigRequest => kind::GET_CONFIG_REQUEST,
            Self::GetConfigReply(_) => kind::GET_CONFIG_REPLY,
            Self::SetConfig(_) => kind::SET_CONFIG,
            Self::PacketIn(_) => kind::PACKET_IN,
            Self::FlowRemoved(_) => kind::FLOW_REMOVED,
            Self::PortStatus(_) => kind::PORT_STATUS,
            Self::PacketOut(_) => kind::PACKET_OUT,
            Self::FlowMod(_) => kind::FLOW_MOD,
            Self::GroupMod(_) => kind::GROUP_MOD,
            Self::MultipartRequest(_) => kind::MULTIPART_REQUEST,
            Self::MultipartReply(_) => kind::MULTIPART_REPLY,
            Self::BarrierRequest => kind::BARRIER_REQUEST,
            Self::BarrierReply => kind::BARRIER_REPLY,
            Self::RoleRequest(_) => kind::ROLE_REQUEST,
            Self::RoleReply(_) => kind::ROLE_REPLY,
            Self::Other { kind, .. } => *kind,
        }
    }

    fn append(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        match self {
            Self::Hello(hello) => hello.encode(out),
            Self::Error(error) => {
                out.extend_from_slice(&error.kind.to_be_bytes());
                out.extend_from_slice(&error.code.to_be_bytes());
                out.extend_from_slice(&error.data);
            }
            Self::EchoRequest(data) | Self::EchoReply(data) | Self::Other { data, .. } => {
                out.extend_from_slice(data);
            }
            Self::Experimenter { experimenter, kind, data } => {
                out.extend_from_slice(&experimenter.to_be_bytes());
                out.extend_from_slice(&kind.to_be_bytes());
                out.extend_from_slice(data);
            }
            Self::FeaturesRequest
            | Self::GetConfigRequest
            | Self::BarrierRequest
            | Self::BarrierReply => {}
            Self::FeaturesReply(features) => features.encode(out),
            Self::GetConfigReply(config) | Self::SetConfig(config) => config.encode(out),
            Self::PacketIn(packet) => packet.encode(out)?,
            Self::FlowRemoved(flow) => flow.encode(out)?,
            Self::PortStatus(port) => port.encode(out)?,
            Self::PacketOut(packet) => packet.encode(out)?,
            Self::FlowMod(change) => change.encode(out)?,
            Self::GroupMod(change) => change.encode(out)?,
            Self::MultipartRequest(request) => request.encode(out)?,
            Self::MultipartReply(reply) => reply.encode(out)?,
            Self::RoleRequest(role) | Self::RoleReply(role) => role.encode(out),
        }
        Ok(())
    }

    fn decode(version: u8, kind: u8, mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let empty = |cursor: Cursor<'_>, body| cursor.finish().map(|()| body);
        match kind {
            kind::HELLO => Hello::decode(version, cursor).map(Self::Hello),
            kind::ERROR => {
                let (kind, code) = (cursor.u16()?, cursor.u16()?);
                Ok(Self::Error(ErrorMessage { kind, code, data: cursor.rest().to_vec() }))
            }
            kind::ECHO_REQUEST => Ok(Self::EchoRequest(cursor.rest().to_vec())),
            kind::ECHO_REPLY => Ok(Self::EchoReply(cursor.rest().to_vec())),
            kind::EXPERIMENTER => {
                let (experimenter, kind) = (cursor.u32()?, cursor.u32()?);
                Ok(Self::Experimenter { experimenter, kind, data: cursor.rest().to_vec() })
            }
            kind::FEATURES_REQUEST => empty(cursor, Self::FeaturesRequest),
            kind::FEATURES_REPLY => Features::decode(cursor).map(Self::FeaturesReply),
            kind::GET_CONFIG_REQUEST => empty(cursor, Self::GetConfigRequest),
            kind::GET_CONFIG_REPLY => SwitchConfig::decode(cursor).map(Self::GetConfigReply),
            kind::SET_CONFIG => SwitchConfig::decode(cursor).map(Self::SetConfig),
            kind::PACKET_IN => PacketIn::decode(cursor).map(Self::PacketIn),
            kind::FLOW_REMOVED => FlowRemoved::decode(cursor).map(Self::FlowRemoved),
            kind::PORT_STATUS => PortStatus::decode(cursor).map(Self::PortStatus),
            kind::PACKET_OUT => PacketOut::decode(cursor).map(Self::PacketOut),
            kind::FLOW_MOD => FlowMod::decode(cursor).map(Self::FlowMod),
            kind::GROUP_MOD => GroupMod::decode(cursor).map(Self::GroupMod),
            kind::MULTIPART_REQUEST => MultipartRequest::decode(cursor).map(Self::MultipartRequest),
            kind::MULTIPART_REPLY => MultipartReply::decode(cursor).map(Self::MultipartReply),
            kind::BARRIER_REQUEST => empty(cursor, Self::BarrierRequest),
            kind::BARRIER_REPLY => empty(cursor, Self::BarrierReply),
            kind::ROLE_REQUEST => RoleRequest::decode(cursor).map(Self::RoleRequest),
            kind::ROLE_REPLY => RoleRequest::decode(cursor).map(Self::RoleReply),
            kind => Ok(Self::Other { kind, data: cursor.rest().to_vec() }),
        }
    }
}

impl Features {
    fn encode(self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.datapath_id.to_be_bytes());
        out.extend_from_slice(&self.buffer_count.to_be_bytes());
        out.extend_from_slice(&[self.table_count, self.auxiliary_id, 0, 0]);
        out.extend_from_slice(&self.capabilities.to_be_bytes());
        pad(out, 4);
    }

    fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let (datapath_id, buffer_count) = (cursor.u64()?, cursor.u32()?);
        let (table_count, auxiliary_id) = (cursor.u8()?, cursor.u8()?);
        cursor.skip(2)?;
        let capabilities = cursor.u32()?;
        cursor.skip(4)?;
        cursor.finish()?;
        Ok(Self { datapath_id, buffer_count, table_count, auxiliary_id, capabilities })
    }
}

impl SwitchConfig {
    fn encode(self, out: &mut Vec<u8>) {
        let flags: u16 = match self.fragments {
            FragmentHandling::Normal => 0,
            FragmentHandling::Drop => 1,
            FragmentHandling::Reassemble => 2,
        };
        out.extend_from_slice(&flags.to_be_bytes());
        out.extend_from_slice(&self.miss_send_bytes.to_be_bytes());
    }

    fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let fragments = match cursor.u16()? {
            0 => FragmentHandling::Normal,
            1 => FragmentHandling::Drop,
            2 => FragmentHandling::Reassemble,
            _ => return Err(DecodeError::Unsupported("the handling of fragments")),
        };
        let miss_send_bytes = cursor.u16()?;
        cursor.finish()?;
        Ok(Self { fragments, miss_send_bytes })
    }
}

impl RoleRequest {
    fn encode(self, out: &mut Vec<u8>) {
        let role: u32 = match self.role {
            Role::NoChange => 0,
            Role::Equal => 1,
            Role::Primary => 2,
            Role::Secondary => 3,
        };
        out.extend_from_slice(&role.to_be_bytes());
        pad(out, 4);
        out.extend_from_slice(&self.generation_id.to_be_bytes());
    }

    fn decode(mut cursor: Cursor<'_>) -> Result<Self, DecodeError> {
        let role = match cursor.u32()? {
            0 => Role::NoChange,
            1 => Role::Equal,
            2 => Role::Primary,
            3 => Role::Secondary,
            _ => return Err(DecodeError::Unsupported("a role")),
        };
        cursor.skip(4)?;
        let generation_id = cursor.u64()?;
        cursor.finish()?;
        Ok(Self { role, generation_id })
    }
}
