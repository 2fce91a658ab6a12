//! OpenFlow 1.3 messages (OpenFlow Switch Specification 1.3.5): bytes to types and back.
//!
//! There is no I/O, and nothing of BlueBridge: the controller's driver gives the messages their meaning.
//! Only what a controller of tables, groups and roles needs has a type; the rest is kept as bytes.
//!
//! * `message`: header, contents, small messages; `multipart`: requests with long responses.
//! * `flow`, `group`, [`port`], `packet`: what they are about; `oxm`: match fields; `action`: actions and
//!   instructions.
//! * `fault`: errors of a switch.
//! * `cursor`: reading within bounds.
//!
//! ```
//! use bluebridge_openflow::{Body, Message, frame_length};
//!
//! let mut stream = Vec::new();
//! Message { xid: 7, body: Body::BarrierRequest }.encode(&mut stream)?;
//! assert_eq!(stream, [4, 20, 0, 8, 0, 0, 0, 7]);
//! let length = frame_length(&stream)?.expect("a whole message");
//! assert_eq!(Message::decode(&stream[..length])?.body, Body::BarrierRequest);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod action;
mod cursor;
mod fault;
mod flow;
mod group;
mod message;
mod multipart;
mod oxm;
mod packet;
pub mod port;
#[cfg(test)]
mod tests;

pub use action::{Action, Instruction};
pub use fault::ErrorMessage;
pub use flow::{FlowCommand, FlowFlags, FlowMod, FlowRemoved, FlowStats, RemovedReason};
pub use group::{Bucket, GroupCommand, GroupDescription, GroupKind, GroupMod};
pub use message::{
    Body, Features, FragmentHandling, Hello, MESSAGE_BYTES_MAX, Message, Role, RoleRequest,
    SwitchConfig, frame_length,
};
pub use multipart::{
    Description, FlowStatsRequest, MultipartPart, MultipartReply, MultipartRequest,
};
pub use oxm::{Field, Masked, OtherField};
pub use packet::{PacketIn, PacketInReason, PacketOut};
pub use port::{Port, PortReason, PortStats, PortStatus};

/// The version on the wire: OpenFlow 1.3.
pub const VERSION: u8 = 4;

/// Every table, in requests and deletions.
pub const TABLE_ALL: u8 = 0xff;

/// Every group, in deletions.
pub const GROUP_ALL: u32 = 0xffff_fffc;

/// Any group, or none.
pub const GROUP_ANY: u32 = 0xffff_ffff;

/// No buffered packet.
pub(crate) const NO_BUFFER: u32 = 0xffff_ffff;

/// Why a message cannot be sent; a fault of the caller.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// Its length does not fit the field for it.
    #[error("{0} is too long for OpenFlow")]
    TooLong(&'static str),
    /// A value has bits outside its mask.
    #[error("a value has bits outside its mask")]
    OutsideMask,
    /// A structure is not a multiple of 8 bytes long.
    #[error("{0} is not a multiple of 8 bytes long")]
    Unaligned(&'static str),
    /// A text is too long or contains a zero byte.
    #[error("{0} does not fit its field")]
    Text(&'static str),
}

/// Why bytes are not a message; a fault of their sender, unless it uses a feature that this codec lacks.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// It ends too early.
    #[error("{0} ends too early")]
    Truncated(&'static str),
    /// The stated length cannot be right.
    #[error("{0} states a wrong length")]
    Length(&'static str),
    /// It has another version.
    #[error("it has version {0}, not {VERSION}")]
    Version(u8),
    /// The value of a match field has bits outside its mask.
    #[error("a match field has bits outside its mask")]
    OutsideMask,
    /// This codec does not have this feature.
    #[error("{0} is not supported")]
    Unsupported(&'static str),
}
