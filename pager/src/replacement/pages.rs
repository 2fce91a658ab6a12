//! The local pages: a table of nodes that are linked in queues, and an index from page to node.
//!
//! All memory is reserved in [`Pages::new`]. It grows only if more pages are inserted than that.

/// No node.
const NONE: u32 = u32::MAX;

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection whose bits all depend on the
/// whole page number.
pub(super) const fn hash(page: u64) -> u64 {
    let mut word = page.wrapping_add(0x9e37_79b9_7f4a_7c15);
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// What is known about a local page; with page number and links 24 bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct State {
    /// The number of pages that had arrived when this one did; wraps.
    pub(super) arrived: u32,
    /// The group that the page belongs to.
    pub(super) group: u8,
    /// Whether the page is in its group's main queue.
    pub(super) is_main: bool,
    /// How often in a row the page came back soon after it had left, up to a limit.
    pub(super) returns: u8,
    /// How often the page may still pass the end of the main queue without leaving.
    pub(super) chances: u8,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    page: u64,
    previous: u32,
    next: u32,
    state: State,
}

/// A first-in-first-out queue of nodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    head: u32,
    tail: u32,
    len: usize,
}

impl Queue {
    pub(super) const EMPTY: Self = Self { head: NONE, tail: NONE, len: 0 };

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// The node that was queued first.
    pub(super) const fn head(&self) -> Option<u32> {
        if self.head == NONE { None } else { Some(self.head) }
    }
}

/// The nodes and their index.
#[derive(Debug)]
pub(super) struct Pages {
    nodes: Vec<Node>,
    /// The first free node; the others follow through `next`.
    free: u32,
    len: usize,
    /// Open addressing with linear probing: the node of a page is at its hash or soon after it.
    /// The length is a power of two, and at most half of the places are used.
    index: Vec<u32>,
}

impl Pages {
    /// Room for `page_count` pages.
    pub(super) fn new(page_count: usize) -> Self {
        let index_len = page_count.saturating_mul(2).next_power_of_two().max(16);
        Self {
            nodes: Vec::with_capacity(page_count),
            free: NONE,
            len: 0,
            index: vec![NONE; index_len],
        }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// The node of a page.
    pub(super) fn find(&self, page: u64) -> Option<u32> {
        let place = self.place_of(page)?;
        self.index.get(place).copied().filter(|&node| node != NONE)
    }

    pub(super) fn page(&self, node: u32) -> Option<u64> {
        self.node(node).map(|node| node.page)
    }

    pub(super) fn state(&self, node: u32) -> Option<&State> {
        self.node(node).map(|node| &node.state)
    }

    pub(super) fn state_mut(&mut self, node: u32) -> Option<&mut State> {
        self.node_mut(node).map(|node| &mut node.state)
    }

    /// Adds a page that has no node, at the end of a queue. `None` if 2^32 - 1 pages are local.
    pub(super) fn insert(&mut self, page: u64, state: State, queue: &mut Queue) -> Option<()> {
        if (self.len + 1) * 2 > self.index.len() {
            self.grow_index();
        }
        let new = Node { page, previous: NONE, next: NONE, state };
        let place = self.place_of(page)?;
        let node = match self.node_mut(self.free) {
            Some(node) => {
                let next_free = node.next;
                *node = new;
                core::mem::replace(&mut self.free, next_free)
            }
            None => {
                let node = u32::try_from(self.nodes.len()).ok().filter(|&node| node != NONE)?;
                self.nodes.push(new);
                node
            }
        };
        *self.index.get_mut(place)? = node;
        self.len += 1;
        self.link(node, queue);
        Some(())
    }

    /// Removes a node from its queue and from the index.
    pub(super) fn remove(&mut self, node: u32, queue: &mut Queue) -> Option<(u64, State)> {
        let Node { page, state, .. } = *self.node(node)?;
        self.remove_from_index(page);
        self.unlink(node, queue);
        let free = core::mem::replace(&mut self.free, node);
        self.node_mut(node)?.next = free;
        self.len -= 1;
        Some((page, state))
    }

    /// Adds a node that is in no queue at the end of one.
    pub(super) fn link(&mut self, node: u32, queue: &mut Queue) {
        let tail = queue.tail;
        let Some(added) = self.node_mut(node) else { return };
        added.previous = tail;
        added.next = NONE;
        match self.node_mut(tail) {
            Some(last) => last.next = node,
            None => queue.head = node,
        }
        queue.tail = node;
        queue.len += 1;
    }

    /// Takes a node out of its queue.
    pub(super) fn unlink(&mut self, node: u32, queue: &mut Queue) {
        let Some(&Node { previous, next, .. }) = self.node(node) else { return };
        match self.node_mut(previous) {
            Some(previous) => previous.next = next,
            None => queue.head = next,
        }
        match self.node_mut(next) {
            Some(next) => next.previous = previous,
            None => queue.tail = previous,
        }
        queue.len = queue.len.saturating_sub(1);
    }

    fn node(&self, node: u32) -> Option<&Node> {
        self.nodes.get(usize::try_from(node).ok()?)
    }

    fn node_mut(&mut self, node: u32) -> Option<&mut Node> {
        self.nodes.get_mut(usize::try_from(node).ok()?)
    }

    /// The place in the index where the search for a page begins.
    fn home(&self, page: u64) -> usize {
        let mask = self.index.len() - 1;
        usize::try_from(hash(page) & mask as u64).unwrap_or(0)
    }

    /// The place in the index that holds the page, or else the free place where it belongs.
    fn place_of(&self, page: u64) -> Option<usize> {
        let mask = self.index.len() - 1;
        let mut place = self.home(page);
        loop {
            match *self.index.get(place)? {
                NONE => return Some(place),
                node if self.page(node) == Some(page) => return Some(place),
                _ => place = (place + 1) & mask,
            }
        }
    }

    /// Frees the page's place and moves the nodes after it back, so that no search stops too early.
    fn remove_from_index(&mut self, page: u64) {
        let mask = self.index.len() - 1;
        let Some(mut hole) = self.place_of(page) else { return };
        let mut place = hole;
        loop {
            place = (place + 1) & mask;
            let Some(&node) = self.index.get(place) else { break };
            let Some(page) = self.page(node) else { break };
            let displacement = place.wrapping_sub(self.home(page)) & mask;
            if displacement >= place.wrapping_sub(hole) & mask {
                if let Some(free) = self.index.get_mut(hole) {
                    *free = node;
                }
                hole = place;
            }
        }
        if let Some(free) = self.index.get_mut(hole) {
            *free = NONE;
        }
    }

    /// Doubles the index; only after more pages were inserted than `new` made room for.
    fn grow_index(&mut self) {
        let larger = vec![NONE; self.index.len() * 2];
        let old = core::mem::replace(&mut self.index, larger);
        for node in old.into_iter().filter(|&node| node != NONE) {
            let Some(page) = self.page(node) else { continue };
            let Some(place) = self.place_of(page) else { continue };
            if let Some(free) = self.index.get_mut(place) {
                *free = node;
            }
        }
    }
}
