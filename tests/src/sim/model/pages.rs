//! A page that only one client uses, one operation at a time: its exact contents.

use bluebridge_wire::address::PAGE_BYTES;

/// The most writes with an unknown outcome that the model of a page distinguishes.
const PENDING_MAX: usize = 3;

/// Possible contents of a page, and the pending writes that they include.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Candidate {
    bytes: Box<[u8; PAGE_BYTES]>,
    landed: u8,
}

/// A write with an unknown outcome: it was executed, will be executed, or never will be.
#[derive(Clone, Debug)]
struct PendingWrite {
    start: usize,
    data: Vec<u8>,
}

/// The possible contents of one page.
#[derive(Clone, Debug)]
pub struct PrivatePage {
    candidates: Vec<Candidate>,
    pending_writes: Vec<PendingWrite>,
}

impl PrivatePage {
    /// A page of zeros.
    #[must_use]
    pub fn zeroed() -> Self {
        let bytes = Box::new([0; PAGE_BYTES]);
        Self { candidates: vec![Candidate { bytes, landed: 0 }], pending_writes: Vec::new() }
    }

    /// Whether the model cannot distinguish another unknown outcome.
    #[must_use]
    pub const fn is_doubtful(&self) -> bool {
        self.pending_writes.len() >= PENDING_MAX
    }

    /// A later request of the same session got a reply: earlier requests with an unknown outcome
    /// are below the low-water mark and can no longer be executed.
    pub fn settle(&mut self) {
        self.pending_writes.clear();
        for candidate in &mut self.candidates {
            candidate.landed = 0;
        }
        self.drop_equal();
    }

    /// Records an acknowledged write.
    pub fn write(&mut self, start: usize, data: &[u8]) {
        for candidate in &mut self.candidates {
            candidate.bytes[start..start + data.len()].copy_from_slice(data);
        }
        // A pending write may be executed before or after this one.
        self.apply_pending_writes();
        self.drop_equal();
    }

    /// Records a write with an unknown outcome.
    pub fn write_unknown(&mut self, start: usize, data: &[u8]) {
        self.pending_writes.push(PendingWrite { start, data: data.to_vec() });
        self.apply_pending_writes();
    }

    /// Whether the page may contain the bytes that were read. Candidates that contradict them are
    /// removed.
    pub fn read(&mut self, start: usize, data: &[u8]) -> bool {
        self.candidates.retain(|candidate| candidate.bytes[start..start + data.len()] == *data);
        let possible = !self.candidates.is_empty();
        self.apply_pending_writes();
        possible
    }

    /// Adds the contents that are possible if some pending writes are executed now, in any order.
    fn apply_pending_writes(&mut self) {
        let mut next = 0;
        while next < self.candidates.len() {
            for (index, ghost) in self.pending_writes.iter().enumerate() {
                let mut candidate = self.candidates[next].clone();
                if candidate.landed & 1 << index != 0 {
                    continue;
                }
                let range = ghost.start..ghost.start + ghost.data.len();
                candidate.bytes[range].copy_from_slice(&ghost.data);
                candidate.landed |= 1 << index;
                if !self.candidates.contains(&candidate) {
                    self.candidates.push(candidate);
                }
            }
            next += 1;
        }
    }

    fn drop_equal(&mut self) {
        let mut kept: Vec<Candidate> = Vec::with_capacity(self.candidates.len());
        for candidate in self.candidates.drain(..) {
            if !kept.contains(&candidate) {
                kept.push(candidate);
            }
        }
        self.candidates = kept;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledged_writes_determine_the_contents() {
        let mut page = PrivatePage::zeroed();
        page.write(4, b"abcd");
        assert!(page.clone().read(2, b"\0\0abcd\0"));
        assert!(!page.read(4, b"abcx"));
    }

    #[test]
    fn an_unknown_write_may_be_executed_late_or_never() {
        let mut page = PrivatePage::zeroed();
        page.write_unknown(0, b"new");
        assert!(page.read(0, b"\0\0\0"), "not done yet");
        assert!(page.read(0, b"new"), "done late");
        assert!(!page.read(0, b"\0\0\0"), "and not undone");
    }

    #[test]
    fn an_unknown_write_is_executed_once() {
        let mut page = PrivatePage::zeroed();
        page.write_unknown(0, b"a");
        assert!(page.read(0, b"a"));
        page.write(0, b"b");
        assert!(!page.read(0, b"a"), "it was executed before");
    }

    #[test]
    fn settled_writes_do_not_change_any_more() {
        let mut page = PrivatePage::zeroed();
        page.write_unknown(0, b"a");
        page.settle();
        assert!(page.clone().read(0, b"a") && page.clone().read(0, b"\0"));
        assert!(page.read(0, b"\0"));
        assert!(!page.read(0, b"a"), "it can no longer be executed");
    }
}
