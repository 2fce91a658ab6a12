//! The outstanding requests of one queue, and the buffers that the device has meanwhile.

use crate::memory::Buffer;
use crate::queue_pair::Work;

/// Outstanding requests, at most as many as when it was made: nothing is allocated later.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Box<[Option<Outstanding>]>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Outstanding {
    token: u64,
    work: Work,
    buffer: Buffer,
    has_failed: bool,
}

impl Slots {
    pub(crate) fn new(count: u32) -> Self {
        let slots = (0..count).map(|_| None).collect();
        Self { slots, free: (0..count).rev().collect() }
    }

    /// The slot that the next request gets.
    pub(crate) fn next(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Gives the buffer to the request in the slot that [`Self::next`] named, which is posted.
    pub(crate) fn begin(&mut self, token: u64, work: Work, buffer: Buffer) {
        let slot = self.free.pop().and_then(|index| self.slots.get_mut(index as usize));
        if let Some(slot) = slot {
            *slot = Some(Outstanding { token, work, buffer, has_failed: false });
        }
    }

    /// Ends a request that succeeded. `None` if there is none: the device reports one twice.
    pub(crate) fn succeed(&mut self, index: u32) -> Option<(u64, Work, Buffer)> {
        let slot = self.slots.get_mut(index as usize)?;
        let done = slot.take_if(|outstanding| !outstanding.has_failed)?;
        self.free.push(index);
        Some((done.token, done.work, done.buffer))
    }

    /// Notes a request that failed, and returns `None` if that was noted before: of a chain, the device reports the
    /// request that failed and all later ones.
    ///
    /// The buffer stays here until the queue pair is destroyed, because the device may still execute a part of the chain.
    pub(crate) fn fail(&mut self, index: u32) -> Option<(u64, Work)> {
        let outstanding = self.slots.get_mut(index as usize)?.as_mut()?;
        if std::mem::replace(&mut outstanding.has_failed, true) {
            return None;
        }
        Some((outstanding.token, outstanding.work))
    }

    /// The number of requests that have neither succeeded nor failed.
    pub(crate) fn outstanding(&self) -> usize {
        self.slots.iter().flatten().filter(|outstanding| !outstanding.has_failed).count()
    }
}
