//! The endpoints with entries in the switch.

use std::collections::BTreeMap;

use bluebridge_p4::pipeline::{Forward, SwitchPort};
use bluebridge_wire::{NodeId, Space};

use super::record::{NodeRecord, Role};

/// The properties of an attached endpoint that redirects need.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Attached {
    /// Its role.
    pub role: Role,
    /// Its space.
    pub space: Space,
    /// Its incarnation.
    pub incarnation: u32,
    /// The first and the last generation that are reserved for its arena.
    pub generations: (u16, u16),
    /// How the switch forwards to it.
    pub forward: Forward,
    /// Whether it is connected to this switch, not to another one.
    pub is_local: bool,
}

impl Attached {
    /// An endpoint that the switch reaches through `port`.
    pub(crate) fn new(record: &NodeRecord, port: SwitchPort, is_local: bool) -> Self {
        Self {
            role: record.role,
            space: record.space(),
            incarnation: record.incarnation,
            generations: record.generations().into_inner(),
            forward: Forward { port, dst_mac: record.mac() },
            is_local,
        }
    }
}

/// The endpoints with entries in the switch.
pub type Endpoints = BTreeMap<NodeId, Attached>;
