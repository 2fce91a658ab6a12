//! A page that only one client uses, one operation at a time: its exact contents.

use bluebridge_wire::address::PAGE_BYTES;

/// Writes with an unknown outcome that a page's model keeps apart at most.
const GHOSTS_MAX: usize = 3;

/// Contents that a page may have, and which of the ghosts are in it.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Candidate {
    bytes: Box<[u8; PAGE_BYTES]>,
    landed: u8,
}

/// A write that was given up: it was done, will still be done, or never will.
#[derive(Clone, Debug)]
struct Ghost {
    start: usize,
    data: Vec<u8>,
}

/// What one page may hold.
#[derive(Clone, Debug)]
pub struct PrivatePage {
    candidates: Vec<Candidate>,
    ghosts: Vec<Ghost>,
}

impl PrivatePage {
    /// A page that holds zeros.
    #[must_use]
    pub fn zeroed() -> Self {
        let bytes = Box::new([0; PAGE_BYTES]);
        Self { candidates: vec![Candidate { bytes, landed: 0 }], ghosts: Vec::new() }
    }

    /// Whether another unknown outcome would be more than the model keeps apart.
    #[must_use]
    pub const fn is_doubtful(&self) -> bool {
        self.ghosts.len() >= GHOSTS_MAX
    }

    /// A later request of the same session was answered: what was given up before is below the
    /// low-water mark, so it cannot be done any more.
    pub fn settle(&mut self) {
        self.ghosts.clear();
        for candidate in &mut self.candidates {
            candidate.landed = 0;
        }
        self.drop_equal();
    }

    /// A write was acknowledged.
    pub fn write(&mut self, start: usize, data: &[u8]) {
        for candidate in &mut self.candidates {
            candidate.bytes[start..start + data.len()].copy_from_slice(data);
        }
        // A ghost may land before or after, as long as it is one.
        self.land_ghosts();
        self.drop_equal();
    }

    /// A write ended with an unknown outcome.
    pub fn write_unknown(&mut self, start: usize, data: &[u8]) {
        self.ghosts.push(Ghost { start, data: data.to_vec() });
        self.land_ghosts();
    }

    /// Some bytes were read: whether the page may hold them. What contradicts them is forgotten.
    pub fn read(&mut self, start: usize, data: &[u8]) -> bool {
        self.candidates.retain(|candidate| candidate.bytes[start..start + data.len()] == *data);
        let possible = !self.candidates.is_empty();
        self.land_ghosts();
        possible
    }

    /// Adds what the page holds if some of the ghosts land now, in any order.
    fn land_ghosts(&mut self) {
        let mut next = 0;
        while next < self.candidates.len() {
            for (index, ghost) in self.ghosts.iter().enumerate() {
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
    fn what_was_acknowledged_is_all_there_is() {
        let mut page = PrivatePage::zeroed();
        page.write(4, b"abcd");
        assert!(page.clone().read(2, b"\0\0abcd\0"));
        assert!(!page.read(4, b"abcx"));
    }

    #[test]
    fn an_unknown_write_is_there_or_not_and_may_come_late() {
        let mut page = PrivatePage::zeroed();
        page.write_unknown(0, b"new");
        assert!(page.read(0, b"\0\0\0"), "not done yet");
        assert!(page.read(0, b"new"), "done late");
        assert!(!page.read(0, b"\0\0\0"), "and not undone");
    }

    #[test]
    fn an_unknown_write_is_done_once() {
        let mut page = PrivatePage::zeroed();
        page.write_unknown(0, b"a");
        assert!(page.read(0, b"a"));
        page.write(0, b"b");
        assert!(!page.read(0, b"a"), "it landed before");
    }

    #[test]
    fn settled_ghosts_stay_where_they_are() {
        let mut page = PrivatePage::zeroed();
        page.write_unknown(0, b"a");
        page.settle();
        assert!(page.clone().read(0, b"a") && page.clone().read(0, b"\0"));
        assert!(page.read(0, b"\0"));
        assert!(!page.read(0, b"a"), "it can no longer land");
    }
}
