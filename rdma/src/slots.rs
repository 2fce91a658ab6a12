//! The outstanding requests of one queue, and the buffers that the device has meanwhile.

use crate::memory::Buffer;
use crate::queue_pair::Work;

/// Outstanding requests, at most as many as when it was made: nothing is allocated later.
#[derive(Debug)]
pub(crate) struct Slots<B = Buffer> {
    slots: Box<[Option<Outstanding<B>>]>,
    free: Vec<u32>,
    /// The chain of which the device took only a part. None comes after it, because the queue pair has failed.
    cut: Option<u32>,
}

#[derive(Debug)]
struct Outstanding<B> {
    token: u64,
    work: Work,
    buffer: B,
    has_failed: bool,
}

impl<B> Slots<B> {
    pub(crate) fn new(count: u32) -> Self {
        let slots = (0..count).map(|_| None).collect();
        Self { slots, free: (0..count).rev().collect(), cut: None }
    }

    /// The slot that the next request gets.
    pub(crate) fn next(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Gives the buffer to the request in the slot that [`Self::next`] named, which is posted.
    pub(crate) fn begin(&mut self, token: u64, work: Work, buffer: B) {
        let slot = self.free.pop().and_then(|index| self.slots.get_mut(index as usize));
        if let Some(slot) = slot {
            *slot = Some(Outstanding { token, work, buffer, has_failed: false });
        }
    }

    /// As [`Self::begin`], for a chain whose last requests the device refused. It reports nothing of the others if they
    /// succeed, so [`Self::end_cut`] ends the chain.
    pub(crate) fn begin_cut(&mut self, token: u64, work: Work, buffer: B) {
        self.cut = self.next();
        self.begin(token, work, buffer);
    }

    /// Whether the slot has the chain of [`Self::begin_cut`].
    pub(crate) fn is_cut(&self, index: u32) -> bool {
        self.cut == Some(index)
    }

    /// Ends the chain of [`Self::begin_cut`] if it has not ended, and all others have, so that it ends after them.
    pub(crate) fn end_cut(&mut self) -> Option<(u64, Work)> {
        let index = self.cut?;
        if self.outstanding() > 1 { None } else { self.fail(index) }
    }

    /// Ends a request that succeeded. `None` if there is none: the device reports one twice.
    pub(crate) fn succeed(&mut self, index: u32) -> Option<(u64, Work, B)> {
        if self.is_cut(index) {
            return None;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(count: u32) -> Slots<&'static str> {
        let mut slots = Slots::new(count + 1);
        for index in 0..count {
            assert_eq!(slots.next(), Some(index));
            slots.begin(index.into(), Work::Read, "whole");
        }
        slots
    }

    #[test]
    fn a_buffer_comes_back_once_and_not_from_a_request_that_failed() {
        let mut slots = filled(2);
        assert_eq!(slots.succeed(0), Some((0, Work::Read, "whole")));
        assert_eq!(slots.succeed(0), None);
        assert_eq!(slots.fail(1), Some((1, Work::Read)));
        assert_eq!((slots.fail(1), slots.succeed(1)), (None, None));
        assert_eq!((slots.fail(9), slots.succeed(9)), (None, None));
        assert_eq!(slots.outstanding(), 0);
    }

    #[test]
    fn a_chain_that_was_cut_ends_once_after_all_others() {
        let mut slots = filled(2);
        slots.begin_cut(7, Work::Read, "cut");
        assert!(slots.is_cut(2) && !slots.is_cut(1));
        assert_eq!(slots.end_cut(), None, "two others are outstanding");
        assert!(slots.succeed(0).is_some());
        assert_eq!(slots.end_cut(), None, "one other is outstanding");
        assert!(slots.fail(1).is_some());
        // The device does not know that its last request is missing.
        assert_eq!(slots.succeed(2), None);
        assert_eq!(slots.end_cut(), Some((7, Work::Read)));
        assert_eq!((slots.end_cut(), slots.fail(2)), (None, None));
        assert_eq!(slots.outstanding(), 0);
    }

    #[test]
    fn a_chain_that_was_cut_ends_when_the_device_reports_a_failure_of_it() {
        let mut slots = filled(0);
        slots.begin_cut(7, Work::Read, "cut");
        assert_eq!(slots.fail(0), Some((7, Work::Read)));
        assert_eq!(slots.end_cut(), None);
        assert_eq!(filled(2).end_cut(), None, "no chain was cut");
    }
}
