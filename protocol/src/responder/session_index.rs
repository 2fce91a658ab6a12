//! Indexes of the sessions of a table: by the OPEN that opened them, by node, and by the number of
//! sessions of a node. Each operation takes constant time, except the search for a session to
//! evict, because an OPEN must not cost more than the session that it may evict.

#[cfg(test)]
mod tests;

use std::collections::HashMap;

use super::{sessions::RequesterId, shares::Holder};

const NONE: u16 = u16::MAX;

/// The most sessions that one search for an evictable session examines, so that an unsuccessful
/// search is cheap. The search begins with the nodes that have most sessions, and with the sessions
/// of a node that were last seen longest ago.
const SEARCH_LIMIT: usize = 64;

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
    /// The ends of the list of its sessions, in the order in which they were last seen.
    oldest: u16,
    newest: u16,
    /// Neighbours in the list of nodes with equally many sessions.
    before: u16,
    behind: u16,
}

/// The sessions by key; a session is identified by its slot.
pub(super) struct SessionIndex {
    by_open: HashMap<(RequesterId, u64), u16>,
    by_holder: HashMap<Holder, u16>,
    links: Vec<Link>,
    nodes: Vec<Node>,
    vacant_nodes: Vec<u16>,
    /// The first node of each session count.
    by_count: Vec<u16>,
    /// The largest session count of a node.
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
            // Twice the largest number of entries, so that they never grow.
            by_open: HashMap::with_capacity(2 * capacity),
            by_holder: HashMap::with_capacity(2 * capacity),
            links: vec![Link { node: NONE, older: NONE, newer: NONE }; capacity],
            nodes: vec![node; capacity],
            vacant_nodes: (0..limit).rev().collect(),
            by_count: vec![NONE; capacity + 1],
            most: 0,
        }
    }

    /// The session that an OPEN opened.
    pub(super) fn opened_by(&self, requester: &RequesterId, nonce: u64) -> Option<u16> {
        self.by_open.get(&(*requester, nonce)).copied()
    }

    /// The number of sessions of a node.
    pub(super) fn count_of(&self, holder: Holder) -> usize {
        self.node_of(holder).map_or(0, |node| usize::from(node.count))
    }

    /// The sessions of a node, in the order in which they were last seen.
    pub(super) fn of_node(&self, holder: Holder) -> impl Iterator<Item = u16> {
        self.list(self.node_of(holder).map_or(NONE, |node| node.oldest))
    }

    /// Sessions of the nodes that have more than `count`: nodes with most sessions first, and for
    /// each node in the order in which its sessions were last seen. Some may be left out.
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
            .take(SEARCH_LIMIT)
    }

    /// Adds a session that was opened now.
    pub(super) fn insert(&mut self, slot: u16, requester: RequesterId, nonce: u64) {
        let holder = requester.holder();
        let known = self.by_holder.get(&holder).copied();
        let Some(node) = known.or_else(|| self.vacant_nodes.pop()) else { return };
        if known.is_none() {
            self.by_holder.insert(holder, node);
            let new = &mut self.nodes[usize::from(node)];
            (new.holder, new.count, new.oldest, new.newest) = (holder, 0, NONE, NONE);
        }
        self.by_open.insert((requester, nonce), slot);
        self.links[usize::from(slot)].node = node;
        self.link_newest(slot);
        self.count(node, |count| count + 1);
    }

    /// Removes a session.
    pub(super) fn remove(&mut self, slot: u16, requester: RequesterId, nonce: u64) {
        self.by_open.remove(&(requester, nonce));
        let node = self.links[usize::from(slot)].node;
        self.unlink(slot);
        self.count(node, |count| count - 1);
        if self.nodes[usize::from(node)].count == 0 {
            self.by_holder.remove(&requester.holder());
            self.vacant_nodes.push(node);
        }
    }

    /// Records that a session was seen now.
    pub(super) fn touch(&mut self, slot: u16) {
        let node = self.links[usize::from(slot)].node;
        if self.nodes[usize::from(node)].newest != slot {
            self.unlink(slot);
            self.link_newest(slot);
        }
    }

    /// Records that a session was seen, before those of which `is_later` is true; they are the last ones of its node.
    pub(super) fn touch_before(&mut self, slot: u16, is_later: impl Fn(u16) -> bool) {
        let node = self.links[usize::from(slot)].node;
        self.unlink(slot);
        let mut older = self.nodes[usize::from(node)].newest;
        for _ in 0..SEARCH_LIMIT {
            if older == NONE || !is_later(older) {
                break;
            }
            older = self.links[usize::from(older)].older;
        }
        self.link_behind(slot, older);
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
        let node = self.links[usize::from(slot)].node;
        self.link_behind(slot, self.nodes[usize::from(node)].newest);
    }

    /// Inserts a session that is in no list behind `older`; as the oldest one if that is `NONE`.
    fn link_behind(&mut self, slot: u16, older: u16) {
        let node = &mut self.nodes[usize::from(self.links[usize::from(slot)].node)];
        let newer = match self.links.get_mut(usize::from(older)) {
            Some(before) => core::mem::replace(&mut before.newer, slot),
            None => core::mem::replace(&mut node.oldest, slot),
        };
        match self.links.get_mut(usize::from(newer)) {
            Some(behind) => behind.older = slot,
            None => node.newest = slot,
        }
        let link = &mut self.links[usize::from(slot)];
        (link.older, link.newer) = (older, newer);
    }

    /// Changes the session count of a node by one.
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
