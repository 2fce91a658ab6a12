//! The operations in progress: a fixed slab, and linked lists in it.

use super::{
    op::{Link, Op, Place},
    operation::OperationId,
};

/// No operation, no peer.
pub(super) const NONE: u16 = u16::MAX;

/// A list of operations in a [`Slab`], linked through them.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    pub(super) head: u16,
    tail: u16,
}

impl List {
    pub(super) const EMPTY: Self = Self { head: NONE, tail: NONE };

    pub(super) const fn is_empty(&self) -> bool {
        self.head == NONE
    }
}

/// All operations; memory is allocated once.
#[derive(Debug)]
pub(super) struct Slab {
    ops: Vec<Op>,
    limit: usize,
    free: u16,
    live: usize,
}

impl Slab {
    pub(super) fn new(limit: u16) -> Self {
        let limit = usize::from(limit.clamp(1, NONE - 1));
        Self { ops: Vec::with_capacity(limit), limit, free: NONE, live: 0 }
    }

    /// Operations in progress.
    pub(super) const fn live(&self) -> usize {
        self.live
    }

    /// Operations that may be in progress at once.
    pub(super) const fn limit(&self) -> usize {
        self.limit
    }

    /// Slots that were ever used; all indices are below.
    pub(super) fn slots(&self) -> u16 {
        u16::try_from(self.ops.len()).unwrap_or(NONE)
    }

    /// Puts a new operation into a free slot; `None` if there is none.
    pub(super) fn insert(&mut self, mut op: Op) -> Option<u16> {
        let index = self.free;
        if index != NONE {
            let slot = self.ops.get_mut(usize::from(index))?;
            self.free = slot.link.next;
            op.link.generation = slot.link.generation;
            *slot = op;
            self.live += 1;
            return Some(index);
        }
        if self.ops.len() >= self.limit {
            return None;
        }
        let index = self.slots();
        self.ops.push(op);
        self.live += 1;
        Some(index)
    }

    /// Frees a slot that is in no list.
    pub(super) fn remove(&mut self, index: u16) {
        let free = self.free;
        let op = &mut self[index];
        op.link.place = Place::Free;
        op.link.generation = op.link.generation.wrapping_add(1);
        op.link.next = free;
        self.free = index;
        self.live -= 1;
    }

    pub(super) fn id(&self, index: u16) -> OperationId {
        OperationId { index, generation: self[index].link.generation }
    }

    /// The slot of an operation that is still in progress.
    pub(super) fn find(&self, id: OperationId) -> Option<u16> {
        let op = self.at(id.index)?;
        (op.link.generation == id.generation).then_some(id.index)
    }

    /// The operation in a slot whose index comes from input.
    pub(super) fn at(&self, index: u16) -> Option<&Op> {
        self.ops.get(usize::from(index)).filter(|op| op.link.place != Place::Free)
    }

    pub(super) fn push_back(&mut self, list: &mut List, index: u16) {
        let tail = list.tail;
        let op = &mut self[index];
        op.link.prev = tail;
        op.link.next = NONE;
        if tail == NONE {
            list.head = index;
        } else {
            self[tail].link.next = index;
        }
        list.tail = index;
    }

    pub(super) fn push_front(&mut self, list: &mut List, index: u16) {
        let head = list.head;
        let op = &mut self[index];
        op.link.prev = NONE;
        op.link.next = head;
        if head == NONE {
            list.tail = index;
        } else {
            self[head].link.prev = index;
        }
        list.head = index;
    }

    pub(super) fn unlink(&mut self, list: &mut List, index: u16) {
        let Link { prev, next, .. } = self[index].link;
        if prev == NONE {
            list.head = next;
        } else {
            self[prev].link.next = next;
        }
        if next == NONE {
            list.tail = prev;
        } else {
            self[next].link.prev = prev;
        }
    }
}

/// Indices come from lists, rings and [`Slab::find`] alone, never from input.
impl core::ops::Index<u16> for Slab {
    type Output = Op;

    fn index(&self, index: u16) -> &Op {
        &self.ops[usize::from(index)]
    }
}

impl core::ops::IndexMut<u16> for Slab {
    fn index_mut(&mut self, index: u16) -> &mut Op {
        &mut self.ops[usize::from(index)]
    }
}
