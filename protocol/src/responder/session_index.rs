//! How the sessions of a table are found: by the OPEN that made them, by their node, and by how many
//! their node has. Every step but the search for one that may give way takes the same time whatever
//! the number of sessions, because an OPEN must not cost more than what it could be replaced by.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use super::{sessions::Asker, shares::Holder};

const NONE: u16 = u16::MAX;

/// Sessions that are looked at in one search for one that may give way, so that the search costs
/// little when none may. Those of the nodes with most sessions that were silent longest come first.
const LOOK_LIMIT: usize = 64;

/// The place of a session in its node's list.
#[derive(Clone, Copy)]
struct Link {
    node: u16,
    older: u16,
    newer: u16,
}

/// A node that has sessions.
#[derive(Clone, Copy)]
struct Node {
    holder: Holder,
    count: u16,
    /// The ends of the list of its sessions, in the order in which they were heard last.
    oldest: u16,
    newest: u16,
    /// Neighbours among the nodes with as many sessions.
    before: u16,
    behind: u16,
}

/// Which sessions there are; a session is named by its slot.
pub(super) struct SessionIndex {
    by_open: HashMap<(Asker, u64), u16>,
    by_holder: HashMap<Holder, u16>,
    links: Vec<Link>,
    nodes: Vec<Node>,
    vacant_nodes: Vec<u16>,
    /// The first node with so many sessions.
    by_count: Vec<u16>,
    /// No node has more sessions.
    most: usize,
}

impl SessionIndex {
    pub(super) fn new(limit: u16) -> Self {
        let capacity = usize::from(limit);
        let node = Node {
            holder: Holder::default(),
            count: 0,
            oldest: NONE,
            newest: NONE,
            before: NONE,
            behind: NONE,
        };
        Self {
            // Twice of what is ever in them, so that they never grow.
            by_open: HashMap::with_capacity(2 * capacity),
            by_holder: HashMap::with_capacity(2 * capacity),
            links: vec![Link { node: NONE, older: NONE, newer: NONE }; capacity],
            nodes: vec![node; capacity],
            vacant_nodes: (0..limit).rev().collect(),
            by_count: vec![NONE; capacity + 1],
            most: 0,
        }
    }

    /// The session that an OPEN made.
    pub(super) fn opened_by(&self, asker: &Asker, nonce: u64) -> Option<u16> {
        self.by_open.get(&(*asker, nonce)).copied()
    }

    /// Sessions of a node.
    pub(super) fn count_of(&self, holder: Holder) -> usize {
        self.node_of(holder).map_or(0, |node| usize::from(node.count))
    }

    /// The sessions of a node, those heard longest ago first.
    pub(super) fn of_node(&self, holder: Holder) -> impl Iterator<Item = u16> {
        self.list(self.node_of(holder).map_or(NONE, |node| node.oldest))
    }

    /// The sessions of the nodes that have more than `count`, those of the nodes with most first, and
    /// of one node those heard longest ago. There may be more than are named.
    pub(super) fn of_nodes_with_more(&self, count: usize) -> impl Iterator<Item = u16> {
        let counts = (count + 1..=self.most).rev();
        let nodes = counts.flat_map(|count| {
            let first = self.by_count.get(count).copied();
            core::iter::successors(first, |&node| {
                self.nodes.get(usize::from(node)).map(|n| n.behind)
            })
        });
        nodes
            .filter_map(|node| self.nodes.get(usize::from(node)))
            .flat_map(|node| self.list(node.oldest))
            .take(LOOK_LIMIT)
    }

    /// Adds a session that was opened now.
    pub(super) fn insert(&mut self, slot: u16, asker: Asker, nonce: u64) {
        let holder = asker.holder();
        let known = self.by_holder.get(&holder).copied();
        let Some(node) = known.or_else(|| self.vacant_nodes.pop()) else { return };
        if known.is_none() {
            self.by_holder.insert(holder, node);
            let new = &mut self.nodes[usize::from(node)];
            (new.holder, new.count, new.oldest, new.newest) = (holder, 0, NONE, NONE);
        }
        self.by_open.insert((asker, nonce), slot);
        self.links[usize::from(slot)].node = node;
        self.link_newest(slot);
        self.count(node, |count| count + 1);
    }

    /// Takes a session out.
    pub(super) fn remove(&mut self, slot: u16, asker: Asker, nonce: u64) {
        self.by_open.remove(&(asker, nonce));
        let node = self.links[usize::from(slot)].node;
        self.unlink(slot);
        self.count(node, |count| count - 1);
        if self.nodes[usize::from(node)].count == 0 {
            self.by_holder.remove(&asker.holder());
            self.vacant_nodes.push(node);
        }
    }

    /// Notes that a session was heard now.
    pub(super) fn hear(&mut self, slot: u16) {
        let node = self.links[usize::from(slot)].node;
        if self.nodes[usize::from(node)].newest != slot {
            self.unlink(slot);
            self.link_newest(slot);
        }
    }

    fn node_of(&self, holder: Holder) -> Option<&Node> {
        self.by_holder.get(&holder).and_then(|&node| self.nodes.get(usize::from(node)))
    }

    fn list(&self, first: u16) -> impl Iterator<Item = u16> {
        let first = (first != NONE).then_some(first);
        core::iter::successors(first, |&slot| {
            let newer = self.links[usize::from(slot)].newer;
            (newer != NONE).then_some(newer)
        })
    }

    fn unlink(&mut self, slot: u16) {
        let Link { node, older, newer } = self.links[usize::from(slot)];
        match self.links.get_mut(usize::from(older)) {
            Some(before) => before.newer = newer,
            None => self.nodes[usize::from(node)].oldest = newer,
        }
        match self.links.get_mut(usize::from(newer)) {
            Some(behind) => behind.older = older,
            None => self.nodes[usize::from(node)].newest = older,
        }
    }

    fn link_newest(&mut self, slot: u16) {
        let link = &mut self.links[usize::from(slot)];
        let node = &mut self.nodes[usize::from(link.node)];
        let before = core::mem::replace(&mut node.newest, slot);
        (link.older, link.newer) = (before, NONE);
        match self.links.get_mut(usize::from(before)) {
            Some(before) => before.newer = slot,
            None => node.oldest = slot,
        }
    }

    /// Changes how many sessions a node has, by one.
    fn count(&mut self, number: u16, change: impl FnOnce(u16) -> u16) {
        let Node { count, before, behind, .. } = self.nodes[usize::from(number)];
        if count > 0 {
            match self.nodes.get_mut(usize::from(before)) {
                Some(node) => node.behind = behind,
                None => self.by_count[usize::from(count)] = behind,
            }
            if let Some(node) = self.nodes.get_mut(usize::from(behind)) {
                node.before = before;
            }
        }
        let count = change(count);
        self.nodes[usize::from(number)].count = count;
        if count > 0 {
            let first = core::mem::replace(&mut self.by_count[usize::from(count)], number);
            if let Some(node) = self.nodes.get_mut(usize::from(first)) {
                node.before = number;
            }
            let node = &mut self.nodes[usize::from(number)];
            (node.before, node.behind) = (NONE, first);
        }
        self.most = self.most.max(usize::from(count));
        while self.most > 0 && self.by_count[self.most] == NONE {
            self.most -= 1;
        }
    }
}
