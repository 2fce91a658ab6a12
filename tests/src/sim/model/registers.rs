//! A page that several clients read and overwrite as a whole: a register.
//!
//! Every value is written once, so linearizability can be decided fast and exactly: Gibbons and
//! Korach, "Testing shared memories" (1997), section 4. All operations on one value form a zone
//! between the first end and the last beginning; forward zones must not overlap, and no backward zone
//! may be inside a forward one.

use bluebridge_protocol::Timestamp;

/// The initial value of a register.
pub const INITIAL: u64 = 0;

/// The operations on one value.
#[derive(Clone, Copy, Debug)]
struct Cluster {
    value: u64,
    written_from: Timestamp,
    first_end: Timestamp,
    last_start: Timestamp,
    seen: bool,
    certain: bool,
}

/// The history of one page.
#[derive(Clone, Debug)]
pub struct Register {
    clusters: Vec<Cluster>,
}

impl Default for Register {
    fn default() -> Self {
        let start = Timestamp::default();
        let initial = Cluster {
            value: INITIAL,
            written_from: start,
            first_end: start,
            last_start: start,
            seen: true,
            certain: true,
        };
        Self { clusters: vec![initial] }
    }
}

impl Register {
    /// Records the beginning of a write.
    pub fn begin(&mut self, value: u64, start: Timestamp) {
        self.clusters.push(Cluster {
            value,
            written_from: start,
            first_end: Timestamp::MAX,
            last_start: start,
            seen: false,
            certain: false,
        });
    }

    /// Records an acknowledged write.
    pub fn acknowledge(&mut self, value: u64, end: Timestamp) {
        if let Some(cluster) = self.cluster(value) {
            cluster.first_end = cluster.first_end.min(end);
            cluster.certain = true;
        }
    }

    /// Records a refused write, whose value must never be read.
    pub fn refuse(&mut self, value: u64) -> Result<(), String> {
        let seen = self.cluster(value).is_some_and(|cluster| cluster.seen);
        self.clusters.retain(|cluster| cluster.value != value);
        if seen { Err(format!("value {value:#x} was read, but its write refused")) } else { Ok(()) }
    }

    /// Records a read.
    ///
    /// # Errors
    /// If no write of the value had begun when the read ended.
    pub fn read(&mut self, value: u64, start: Timestamp, end: Timestamp) -> Result<(), String> {
        let Some(cluster) = self.cluster(value) else {
            return Err(format!("read {value:#x}, which was never written there"));
        };
        if end < cluster.written_from {
            return Err(format!("read {value:#x} before its write began"));
        }
        cluster.seen = true;
        cluster.first_end = cluster.first_end.min(end);
        cluster.last_start = cluster.last_start.max(start);
        Ok(())
    }

    /// Checks that one order of all operations explains their results and fits real time.
    ///
    /// # Errors
    /// Two contradictory values.
    pub fn check(&self) -> Result<(), String> {
        let zones: Vec<_> = self.clusters.iter().filter(|c| c.seen || c.certain).collect();
        let is_forward = |zone: &Cluster| zone.first_end < zone.last_start;
        let mut forward: Vec<_> = zones.iter().filter(|zone| is_forward(zone)).collect();
        forward.sort_by_key(|zone| zone.first_end);
        for pair in forward.windows(2) {
            if pair[1].first_end < pair[0].last_start {
                return Err(format!(
                    "values {:#x} and {:#x} alternate",
                    pair[0].value, pair[1].value
                ));
            }
        }
        for zone in zones.iter().filter(|zone| !is_forward(zone)) {
            let inside = forward.iter().find(|forward| {
                forward.first_end < zone.last_start && zone.first_end < forward.last_start
            });
            if let Some(forward) = inside {
                return Err(format!(
                    "value {:#x} was written while {:#x} stayed",
                    zone.value, forward.value
                ));
            }
        }
        Ok(())
    }

    fn cluster(&mut self, value: u64) -> Option<&mut Cluster> {
        // The newest ones are requested most often.
        self.clusters.iter_mut().rev().find(|cluster| cluster.value == value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(nanos: u64) -> Timestamp {
        Timestamp::from_nanos(nanos)
    }

    fn written(writes: &[(u64, u64, u64)]) -> Register {
        let mut register = Register::default();
        for &(value, start, end) in writes {
            register.begin(value, at(start));
            register.acknowledge(value, at(end));
        }
        register
    }

    #[test]
    fn concurrent_writes_may_be_seen_in_one_order_only() {
        let mut register = written(&[(1, 0, 10), (2, 0, 10)]);
        register.read(1, at(11), at(12)).expect("written");
        assert_eq!(register.check(), Ok(()));
        register.read(2, at(13), at(14)).expect("written");
        assert!(register.check().is_err(), "2 cannot come after 1 was seen after both ended");
    }

    #[test]
    fn a_lost_write_is_found() {
        let mut register = written(&[(1, 1, 2), (2, 3, 4)]);
        register.read(1, at(5), at(6)).expect("written");
        assert!(register.check().is_err());
    }

    #[test]
    fn a_stale_read_is_found() {
        let mut register = written(&[(1, 1, 2)]);
        register.read(INITIAL, at(5), at(6)).expect("the initial value");
        assert!(register.check().is_err());
    }

    #[test]
    fn an_unknown_write_may_come_late_but_does_not_go() {
        let mut register = written(&[(1, 1, 2)]);
        register.begin(2, at(3));
        register.read(1, at(10), at(11)).expect("written");
        register.read(2, at(20), at(21)).expect("begun");
        assert_eq!(register.check(), Ok(()));
        register.read(1, at(30), at(31)).expect("written");
        assert!(register.check().is_err());
    }

    #[test]
    fn values_that_were_never_written_or_are_written_later_are_found() {
        let mut register = Register::default();
        assert!(register.read(7, at(1), at(2)).is_err());
        register.begin(7, at(5));
        assert!(register.read(7, at(1), at(2)).is_err());
        register.read(7, at(6), at(7)).expect("begun");
        assert!(register.refuse(7).is_err());
    }
}
