//! Changes of endpoints, for the log.

use bluebridge_wire::NodeId;

use super::{NodeRecord, Role};

/// The kind of change of an endpoint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MemberChange {
    /// It is drained and gone, and this server answers for it.
    Deputized(NodeId),
    /// It was silent for too long and counts as having left.
    GivenUp,
    /// It joined; a repeated response to the same join does not count.
    Joined,
    /// It left.
    Left,
    /// It was silent, and another endpoint took its name, port or MAC address.
    Replaced,
    /// It was silent, and its heartbeats arrive again.
    Returned,
    /// Its heartbeats are missing.
    Silent,
}

/// A change of an endpoint, with the data for a log line.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct MemberEvent {
    /// The kind of change.
    pub change: MemberChange,
    /// Its node id.
    pub node: NodeId,
    /// Its name.
    pub name: String,
    /// Its role.
    pub role: Role,
    /// Its space.
    pub space: u16,
    /// The switch's port to which it is connected.
    pub port: u16,
    /// Its incarnation.
    pub incarnation: u32,
}

impl MemberEvent {
    pub(super) fn new(change: MemberChange, record: &NodeRecord) -> Self {
        Self {
            change,
            node: record.id(),
            name: record.name.clone(),
            role: record.role,
            space: record.space,
            port: record.port,
            incarnation: record.incarnation,
        }
    }

    /// Writes it to the log.
    pub(crate) fn log(&self) {
        let Self { node, name, role, space, port, incarnation, .. } = self;
        let role = match role {
            Role::Client => "client",
            Role::Memory => "memory",
        };
        match self.change {
            MemberChange::Deputized(deputy) => {
                let deputy = deputy.0;
                tracing::info!(
                    name,
                    node = node.0,
                    deputy,
                    incarnation,
                    "drained and gone: the deputy answers for it"
                );
            }
            MemberChange::GivenUp => {
                tracing::info!(name, node = node.0, role, "removed after a long silence");
            }
            MemberChange::Joined => {
                tracing::info!(name, node = node.0, role, space, port, incarnation, "joined");
            }
            MemberChange::Left => tracing::info!(name, node = node.0, role, "left"),
            MemberChange::Replaced => {
                tracing::info!(name, node = node.0, role, port, "replaced by another endpoint");
            }
            MemberChange::Returned => {
                tracing::info!(name, node = node.0, role, "heartbeats arrive again")
            }
            MemberChange::Silent => {
                tracing::warn!(name, node = node.0, role, "silent: heartbeats are missing");
            }
        }
    }
}
