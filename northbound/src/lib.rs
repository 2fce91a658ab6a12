//! The API between endpoints and the controller, and an endpoint's side of it.
//!
//! * [`proto`]: the messages and the services `bluebridge.v1.Controller` and
//!   `bluebridge.v1.Operations`.
//! * [`Registration`] and [`Assignment`]: request and result of a join, in the project's types.
//! * [`Membership`]: joins, sends heartbeats in the background, leaves. It outlives restarts of the
//!   controller: a failed heartbeat is retried, and nothing is assigned again (`heartbeat` is its thread).
//! * [`PendingQuery`]: a query of an operator to a memory server, through the controller.
//! * [`migration`]: the controller's orders to memory servers, and their reports.
//! * [`environment`]: the variables that describe an endpoint.
//! * `tls`: reads and checks the files of TLS (feature `tls`).

pub mod environment;
pub mod migration;
pub mod proto;
#[cfg(feature = "tls")]
pub mod tls;

mod attend;
mod error;
mod heartbeat;
mod membership;
mod registration;

pub use attend::{OperatorQuery, OperatorReply, PendingQuery};
pub use error::{ConnectionError, MembershipError, not_previous};
pub use membership::{Caller, Connection, Membership, Options, Roster, ServerReport, Snapshot};
pub use registration::{
    Assignment, Attachment, Carrier, MemoryNodeStatus, Previous, Registration, Role, Token,
};

#[cfg(feature = "tls")]
pub use tonic::transport::{Certificate, ClientTlsConfig, Identity};

/// The default TCP port of a controller.
pub const CONTROLLER_PORT: u16 = 7700;

/// The longest name of an endpoint, in bytes.
pub const NAME_BYTES_MAX: usize = 64;

/// The most rows of pages in a message between a memory server and the controller.
pub const ATTEND_ROWS_MAX: usize = 1 << 18;

/// The largest of these messages, with so many rows.
pub const ATTEND_BYTES_MAX: usize = 8 << 20;

/// Whether an endpoint may have this name: 1 to [`NAME_BYTES_MAX`] ASCII letters, digits, `.`,
/// `_` and `-`.
#[must_use]
pub fn is_name(name: &str) -> bool {
    (1..=NAME_BYTES_MAX).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

#[cfg(test)]
mod tests;
