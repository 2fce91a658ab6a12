//! Credits for messages: a sender knows how many buffers wait for its messages at its peer.
//!
//! Without them a message that finds no buffer would be repeated by the device, and after some repetitions the queue
//! pair would fail. Each message carries the credits for the buffers that were posted again since the last one. The
//! last credit is kept for a message that carries nothing else, so two peers that have used all of theirs do not wait
//! for each other.

/// The credits of one end of a queue pair.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Credits {
    /// Buffers that wait at the peer.
    available: u16,
    /// Buffers that were posted here since the peer was last told.
    owed: u16,
    total: u16,
}

/// A peer gave more credits than it has buffers: it breaks the protocol.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("the peer gave {given} credits, but only {used} of {total} are used")]
pub struct TooManyCredits {
    /// What it gave.
    pub given: u16,
    /// What had been used.
    pub used: u16,
    /// All.
    pub total: u16,
}

impl Credits {
    /// With fewer, an end could not say that buffers are there again without making its peer say the same.
    pub const MIN: u16 = 3;

    /// Of a queue pair with this many buffers posted at each end; at least [`Self::MIN`].
    #[must_use]
    pub fn new(total: u16) -> Self {
        let total = total.max(Self::MIN);
        Self { available: total, owed: 0, total }
    }

    /// Whether a message may be sent.
    #[must_use]
    pub const fn allow_message(&self) -> bool {
        self.available >= 2
    }

    /// Takes what a message needs, and returns the credits that it must carry; `None` if it must wait for the peer.
    #[must_use]
    pub const fn begin_message(&mut self) -> Option<u16> {
        if self.allow_message() { Some(self.carry()) } else { None }
    }

    /// The credits that a message without contents must carry, if it is time to send one: half of the peer's credits are
    /// here, and no message has carried them. They are more than the one that it takes, so such messages end.
    #[must_use]
    pub const fn begin_update(&mut self) -> Option<u16> {
        let many = self.total.div_ceil(2);
        if self.available < 1 || self.owed < 2 || self.owed < many {
            None
        } else {
            Some(self.carry())
        }
    }

    const fn carry(&mut self) -> u16 {
        self.available -= 1;
        std::mem::replace(&mut self.owed, 0)
    }

    /// Notes a message of the peer, which carried these credits.
    ///
    /// # Errors
    /// If the peer gave more than it can have.
    pub const fn received(&mut self, given: u16) -> Result<(), TooManyCredits> {
        let used = self.total - self.available;
        if given > used {
            return Err(TooManyCredits { given, used, total: self.total });
        }
        self.available += given;
        Ok(())
    }

    /// Notes that a buffer was posted again.
    pub const fn posted(&mut self) {
        if self.owed < self.total {
            self.owed += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Two ends, and the messages on their way.
    struct Pair {
        ends: [Credits; 2],
        /// Messages that arrived in a buffer of an end, with their credits.
        arrived: [VecDeque<u16>; 2],
        /// Buffers that wait at each end.
        waiting: [u16; 2],
        /// Whether an end has room for requests: READs have not taken all of it.
        has_room: [bool; 2],
    }

    impl Pair {
        fn new(total: u16) -> Self {
            let waiting = Credits::new(total).total;
            Self {
                ends: [Credits::new(total); 2],
                arrived: Default::default(),
                waiting: [waiting; 2],
                has_room: [true; 2],
            }
        }

        fn send(&mut self, from: usize, credits: Option<u16>) -> bool {
            let Some(credits) = credits else { return false };
            let to = 1 - from;
            self.waiting[to] = self.waiting[to].checked_sub(1).expect("a message found no buffer");
            self.arrived[to].push_back(credits);
            true
        }

        /// Sends credits alone if it is time, as an end does after each release and each request that ended.
        fn update(&mut self, at: usize) {
            if self.has_room[at] {
                let update = self.ends[at].begin_update();
                self.send(at, update);
            }
        }

        /// The READs of an end end.
        fn end_reads(&mut self, at: usize) {
            self.has_room[at] = true;
            self.update(at);
        }

        /// Takes a message, posts its buffer again, and says so if it is time.
        fn take(&mut self, at: usize) -> bool {
            let Some(credits) = self.arrived[at].pop_front() else { return false };
            self.ends[at].received(credits).expect("no more than were used");
            self.waiting[at] += 1;
            self.ends[at].posted();
            self.update(at);
            true
        }
    }

    impl Pair {
        fn take_all(&mut self) {
            let count = (0..1000).take_while(|_| self.take(0) | self.take(1)).count();
            assert!(count < 1000, "each message makes another one: {:?}", self.ends);
        }
    }

    proptest! {
        #[test]
        fn a_message_always_finds_a_buffer_and_no_end_waits_for_ever(
            total in 3_u16..9, steps in prop::collection::vec((0_usize..2, 0_u8..8), 0..400),
        ) {
            let mut pair = Pair::new(total);
            for (end, step) in steps {
                match step {
                    0 | 1 => {
                        pair.take(end);
                    }
                    2 => pair.has_room[end] = false,
                    3 => pair.end_reads(end),
                    _ if !pair.has_room[end] => {}
                    _ => {
                        let message = pair.ends[end].begin_message();
                        pair.send(end, message);
                    }
                }
            }
            pair.end_reads(0);
            pair.end_reads(1);
            pair.take_all();
            // Both have taken everything: each can send again.
            for end in [0, 1] {
                prop_assert!(pair.ends[end].begin_message().is_some(), "{:?}", pair.ends);
            }
        }

        #[test]
        fn one_end_alone_can_send_for_ever(total in 3_u16..40) {
            let mut pair = Pair::new(total);
            for _ in 0..1000 {
                let message = pair.ends[0].begin_message();
                if !pair.send(0, message) {
                    pair.take_all();
                    let message = pair.ends[0].begin_message();
                    prop_assert!(pair.send(0, message), "{:?}", pair.ends);
                }
            }
        }
    }

    #[test]
    fn an_end_whose_requests_are_all_reads_gives_its_credits_when_they_end() {
        let mut pair = Pair::new(4);
        pair.has_room[1] = false;
        for _ in 0..3 {
            let message = pair.ends[0].begin_message();
            assert!(pair.send(0, message));
        }
        pair.take_all();
        assert_eq!(pair.ends[0].begin_message(), None, "all are used");
        pair.end_reads(1);
        pair.take_all();
        assert!(pair.ends[0].begin_message().is_some(), "{:?}", pair.ends);
    }

    #[test]
    fn a_peer_cannot_give_more_than_was_used() {
        let mut credits = Credits::new(4);
        assert_eq!(credits.received(1).map_err(|error| error.used), Err(0));
        assert_eq!(credits.begin_message(), Some(0));
        assert!(credits.received(1).is_ok());
    }
}
