//! The endpoints that the switch has entries for.

use std::collections::BTreeMap;

use bluebridge_p4::pipeline::Forward;
use bluebridge_wire::{NodeId, Space};

use super::record::{NodeRecord, Role};

/// What redirects need to know of an attached endpoint.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Attached {
    /// What it is there for.
    pub role: Role,
    /// Its space.
    pub space: Space,
    /// Which of its lives this is.
    pub incarnation: u32,
    /// The first and the last generation that are reserved for its arena.
    pub generations: (u16, u16),
    /// The way to it.
    pub forward: Forward,
}

impl Attached {
    pub(crate) fn new(record: &NodeRecord) -> Self {
        Self {
            role: record.role,
            space: record.space(),
            incarnation: record.incarnation,
            generations: record.generations().into_inner(),
            forward: Forward { port: record.port(), dst_mac: record.mac() },
        }
    }
}

/// The endpoints that have entries in the switch.
pub type Endpoints = BTreeMap<NodeId, Attached>;
