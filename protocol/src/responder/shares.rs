//! How much of a bounded resource each node and each space holds, so that none of them can exhaust
//! it.

use bluebridge_wire::{NodeId, Space};

/// A node of a space.
pub(super) type Holder = (Space, NodeId);

/// The units of one node; only nodes that hold units have an entry.
#[derive(Clone, Copy, Debug)]
struct NodeShare {
    of: Holder,
    count: usize,
}

/// The units of one resource that each node and each space holds, and the limits.
pub(super) struct Shares {
    /// In the order of spaces and nodes.
    nodes: Vec<NodeShare>,
    node_limit: usize,
    /// Every served space, in order.
    spaces: Vec<(Space, usize)>,
    space_limit: usize,
}

impl Shares {
    /// Shares of at most `capacity` units, all free; the limits are per space and per node.
    pub(super) fn new(
        capacity: usize,
        spaces: &[Space],
        (space_limit, node_limit): (usize, usize),
    ) -> Self {
        let mut spaces: Vec<_> = spaces.iter().map(|&space| (space, 0)).collect();
        spaces.sort_unstable_by_key(|&(space, _)| space);
        // The only space may hold all units.
        let space_limit = if spaces.len() > 1 { space_limit } else { usize::MAX };
        // Each node holds at least one unit, so there are never more nodes than units.
        Self { nodes: Vec::with_capacity(capacity), node_limit, spaces, space_limit }
    }

    /// Units that a node holds.
    pub(super) fn of_node(&self, holder: Holder) -> usize {
        self.node(holder).map_or(0, |at| self.nodes[at].count)
    }

    /// Whether a node may hold `count` units more.
    pub(super) fn node_has_room(&self, holder: Holder, count: usize) -> bool {
        self.of_node(holder) + count <= self.node_limit
    }

    /// Whether a space may hold `count` units more.
    pub(super) fn space_has_room(&self, space: Space, count: usize) -> bool {
        self.space(space).map_or(0, |at| self.spaces[at].1) + count <= self.space_limit
    }

    /// Records that a node holds one more unit.
    pub(super) fn take(&mut self, holder: Holder) {
        if let Some(at) = self.space(holder.0) {
            self.spaces[at].1 += 1;
        }
        match self.node(holder) {
            Ok(at) => self.nodes[at].count += 1,
            Err(at) => self.nodes.insert(at, NodeShare { of: holder, count: 1 }),
        }
    }

    /// Records that a node holds one unit less.
    pub(super) fn give_back(&mut self, holder: Holder) {
        if let Some(at) = self.space(holder.0) {
            self.spaces[at].1 -= 1;
        }
        if let Ok(at) = self.node(holder) {
            self.nodes[at].count -= 1;
            if self.nodes[at].count == 0 {
                self.nodes.remove(at);
            }
        }
    }

    /// The position of a node; `Err`: where it would be inserted.
    fn node(&self, holder: Holder) -> Result<usize, usize> {
        self.nodes.binary_search_by_key(&holder, |share| share.of)
    }

    fn space(&self, space: Space) -> Option<usize> {
        self.spaces.binary_search_by_key(&space, |&(space, _)| space).ok()
    }

    /// The units that all nodes hold, and those that all spaces hold.
    #[cfg(test)]
    pub(super) fn totals(&self) -> (usize, usize) {
        let nodes = self.nodes.iter().map(|share| share.count).sum();
        (nodes, self.spaces.iter().map(|&(_, count)| count).sum())
    }
}
