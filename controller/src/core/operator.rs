//! Resolves the clients and memory servers in operators' requests.

use std::ops::RangeInclusive;

use bluebridge_wire::{NodeId, Space};

use super::{Core, Node, NodeRecord, Role};

/// A range of incarnations of a client's node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Incarnations {
    /// The node.
    pub node: NodeId,
    /// The first and the last incarnation.
    pub incarnations: RangeInclusive<u32>,
}

/// The client that an operator names.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Named<'a> {
    /// By its name: all its incarnations.
    Name(&'a str),
    /// One incarnation of a node, whose name may be unknown.
    One(NodeId, u32),
}

/// Why an operator's request cannot be executed; the operator can correct it.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum OperatorError {
    /// The memory server is drained and gone, and only because it is drained another one answers for it.
    #[error(
        "{0} is drained and gone, and another memory server answers for it; start it first, then it can get allocations again"
    )]
    Gone(String),
    /// No memory server has the node id.
    #[error("node {0} is not a memory server of this rack")]
    NoServer(u16),
    /// The memory server belongs to another space.
    #[error("{server} serves space {theirs}, not space {requested}")]
    OtherSpace {
        /// The server's name.
        server: String,
        /// Its space.
        theirs: u16,
        /// The requested space.
        requested: u16,
    },
    /// No client of the space has, or had, the name.
    #[error(
        "no client {name} is known in space {space}; `bluebridge list` shows the clients of allocations"
    )]
    NoClient {
        /// The name.
        name: String,
        /// The space.
        space: u16,
    },
    /// The client is live in its first incarnation.
    #[error("{0} is a live member, so there is nothing to free; end it first")]
    StillThere(String),
}

impl Core {
    /// A memory server, attached or not, that serves a space.
    ///
    /// # Errors
    /// [`OperatorError`].
    pub fn memory_server(&self, id: NodeId, space: Space) -> Result<&Node, OperatorError> {
        let node = self.node(id).filter(|node| node.record.role == Role::Memory);
        let node = node.ok_or(OperatorError::NoServer(id.0))?;
        let record = &node.record;
        if record.space() != space {
            let server = record.name.clone();
            return Err(OperatorError::OtherSpace {
                server,
                theirs: record.space,
                requested: space.0,
            });
        }
        Ok(node)
    }

    /// The incarnations that an operator names. A client that joined in another space meanwhile has several nodes.
    ///
    /// # Errors
    /// [`OperatorError::NoClient`].
    pub fn incarnations(
        &self,
        space: Space,
        named: Named<'_>,
    ) -> Result<Vec<Incarnations>, OperatorError> {
        let name = match named {
            Named::One(node, incarnation) => {
                return Ok(vec![Incarnations { node, incarnations: incarnation..=incarnation }]);
            }
            Named::Name(name) => name,
        };
        let clients = self.nodes().map(|node| &node.record).filter(|record| {
            record.role == Role::Client && record.space() == space && record.name == name
        });
        let found: Vec<_> = clients
            .map(|record| Incarnations {
                node: record.id(),
                incarnations: record.first_incarnation..=record.incarnation,
            })
            .collect();
        if found.is_empty() {
            return Err(OperatorError::NoClient { name: name.to_owned(), space: space.0 });
        }
        Ok(found)
    }

    /// The ended incarnations of them: a live one is excluded.
    ///
    /// # Errors
    /// [`OperatorError`].
    pub fn ended_incarnations(
        &self,
        space: Space,
        named: Named<'_>,
    ) -> Result<Vec<Incarnations>, OperatorError> {
        let mut found = self.incarnations(space, named)?;
        let mut live = None;
        found.retain_mut(|Incarnations { node, incarnations }| {
            let (first, mut last) = (*incarnations.start(), *incarnations.end());
            if self.is_live(*node, last) {
                live = Some(*node);
                last = last.saturating_sub(1);
            }
            *incarnations = first..=last;
            first <= last
        });
        match live.filter(|_| found.is_empty()) {
            Some(node) => {
                let name = self.node(node).map(|node| node.record.name.clone());
                Err(OperatorError::StillThere(name.unwrap_or_default()))
            }
            None => Ok(found),
        }
    }

    /// Whether an incarnation is a member whose heartbeats arrive.
    #[must_use]
    pub fn is_live(&self, id: NodeId, incarnation: u32) -> bool {
        self.node(id).is_some_and(|node| {
            node.record.attached && node.live && node.record.incarnation == incarnation
        })
    }

    /// The name of the client with this incarnation of a node, if recorded: ids of clients are
    /// reused.
    #[must_use]
    pub fn client(&self, id: NodeId, incarnation: u32) -> Option<&NodeRecord> {
        let record = &self.node(id)?.record;
        let range = record.first_incarnation..=record.incarnation;
        (record.role == Role::Client && range.contains(&incarnation)).then_some(record)
    }
}
