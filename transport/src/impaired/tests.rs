use core::time::Duration;
use std::net::Ipv6Addr;

use super::{Impaired, Impairment, ImpairmentCounters, Probability};
use crate::memory::{Hub, MemoryTransport};
use crate::{ManualClock, Outgoing, Timestamp, Transport, Wait};

const PORT: u16 = 1000;
const HERE: Ipv6Addr = Ipv6Addr::new(0xfdbb, 1, 1, 0, 0, 0, 0, 0);
const THERE: Ipv6Addr = Ipv6Addr::new(0xfdbb, 1, 2, 0, 0, 0, 0, 0);

struct World {
    clock: ManualClock,
    sender: Impaired<MemoryTransport>,
    receiver: MemoryTransport,
}

fn world(impairment: Impairment, seed: u64) -> World {
    let clock = ManualClock::default();
    let hub = Hub::in_virtual_time(clock.clone(), 100_000);
    let prefix = |text: &str| text.parse().expect("a prefix");
    let sender = hub.attach(PORT, &[prefix("fdbb:1:1::/48")]).expect("free");
    let receiver = hub.attach(PORT, &[prefix("fdbb:1:2::/48")]).expect("free");
    World { clock, sender: Impaired::new(sender, impairment, seed), receiver }
}

impl World {
    /// Sends the numbers in batches of `batch_count`, moves the clock past every delay, and returns what arrived.
    fn exchange(&mut self, count: u32, batch_count: usize) -> Vec<Vec<u8>> {
        let payloads: Vec<[u8; 4]> = (0..count).map(u32::to_be_bytes).collect();
        for numbers in payloads.chunks(batch_count) {
            let batch: Vec<_> = numbers.iter().map(|number| datagram(number)).collect();
            assert_eq!(self.sender.transmit(&batch).expect("sent"), batch.len());
        }
        while let Some(due) = self.sender.next_due() {
            self.clock.advance_to(due);
            self.sender.receive(Wait::NONE).expect("released");
        }
        self.arrivals()
    }

    fn arrivals(&mut self) -> Vec<Vec<u8>> {
        let mut arrived = Vec::new();
        loop {
            let count = self.receiver.receive(Wait::NONE).expect("received");
            if count == 0 {
                return arrived;
            }
            arrived.extend((0..count).map(|index| self.receiver.incoming(index).payload.to_vec()));
        }
    }
}

fn datagram(header: &[u8]) -> Outgoing<'_> {
    Outgoing { source: HERE, destination: THERE, destination_port: PORT, header, data: b"" }
}

fn everything() -> Impairment {
    Impairment {
        loss: Probability::from_percent(5),
        duplicate: Probability::from_percent(5),
        corrupt: Probability::from_percent(5),
        reorder: Probability::from_percent(10),
        reorder_distance: 4,
        reorder_hold: Duration::from_millis(1),
        delay: Duration::ZERO,
        jitter: Duration::ZERO,
    }
}

#[test]
fn equal_seeds_give_equal_fates_and_batching_does_not_matter() {
    let arrivals = world(everything(), 7).exchange(5_000, 50);
    assert_eq!(arrivals, world(everything(), 7).exchange(5_000, 50));
    assert_eq!(arrivals, world(everything(), 7).exchange(5_000, 1));
    assert_ne!(arrivals, world(everything(), 8).exchange(5_000, 50));
}

#[test]
fn every_impairment_happens_about_as_often_as_asked_and_is_counted() {
    let mut world = world(everything(), 1);
    let arrivals = world.exchange(20_000, 64);
    let counters = world.sender.impairment_counters();
    let near = |count: u64, expected: u64| count.abs_diff(expected) < expected / 5;
    assert!(near(counters.lost_count, 1_000), "{counters:?}");
    assert!(near(counters.duplicated_count, 950), "{counters:?}");
    assert!(near(counters.corrupted_count, 950), "{counters:?}");
    assert!(near(counters.reordered_count, 1_900), "{counters:?}");
    let expected = 20_000 - counters.lost_count + counters.duplicated_count;
    assert_eq!(arrivals.len() as u64, expected);
    let out_of_order = arrivals.windows(2).filter(|pair| pair[0] > pair[1]).count();
    assert!(out_of_order > 1_000, "{out_of_order}");
}

#[test]
fn nothing_is_touched_without_an_impairment() {
    let mut world = world(Impairment::default(), 1);
    let arrivals = world.exchange(1_000, 10);
    let sent: Vec<_> = (0..1_000_u32).map(|number| number.to_be_bytes().to_vec()).collect();
    assert_eq!(arrivals, sent);
    let counters = ImpairmentCounters { intact_count: 1_000, ..ImpairmentCounters::default() };
    assert_eq!(world.sender.impairment_counters(), counters);
}

#[test]
fn corruption_flips_one_bit() {
    let corrupt = Probability::ONE;
    let mut world = world(Impairment { corrupt, ..Impairment::default() }, 1);
    let arrivals = world.exchange(500, 10);
    for (number, payload) in arrivals.iter().enumerate() {
        let payload = u32::from_be_bytes(payload.as_slice().try_into().expect("4 bytes"));
        assert_eq!((payload ^ u32::try_from(number).expect("small")).count_ones(), 1);
    }
    assert_eq!(arrivals.len(), 500);
    world.sender.transmit(&[datagram(b"")]).expect("an empty one passes");
    assert_eq!(world.arrivals(), [Vec::<u8>::new()]);
}

#[test]
fn a_reordered_datagram_is_passed_by_the_distance_at_most() {
    let impairment = Impairment {
        reorder: Probability::from_percent(20),
        reorder_distance: 3,
        reorder_hold: Duration::from_secs(1),
        ..Impairment::default()
    };
    for (position, payload) in world(impairment, 3).exchange(2_000, 100).iter().enumerate() {
        let number = u32::from_be_bytes(payload.as_slice().try_into().expect("4 bytes"));
        // Several may be held at a time, each passed by 3 others; none is late by much more.
        assert!((number as usize).abs_diff(position) <= 6, "{number} at {position}");
    }
}

#[test]
fn a_delayed_datagram_comes_when_it_is_due() {
    let delay = Duration::from_millis(2);
    let mut world = world(Impairment { delay, ..Impairment::default() }, 1);
    world.sender.transmit(&[datagram(b"x")]).expect("sent");
    let due = Timestamp::ZERO + delay;
    assert_eq!(world.sender.next_due(), Some(due));
    world.clock.advance_to(Timestamp::from_nanos(due.as_nanos() - 1));
    world.sender.receive(Wait::NONE).expect("received");
    assert!(world.arrivals().is_empty());
    world.clock.advance_to(due);
    world.sender.receive(Wait::NONE).expect("received");
    assert_eq!(world.arrivals(), [b"x".to_vec()]);
}

#[test]
fn receiving_in_real_time_releases_what_is_held_while_it_waits() {
    let hub = Hub::new(8);
    let prefix = "fdbb:1:2::/48".parse().expect("a prefix");
    let inner = hub.attach(PORT, &[prefix]).expect("free");
    let delay = Duration::from_millis(5);
    // It sends to itself: the datagram that it waits for is the one that it holds back.
    let mut node = Impaired::new(inner, Impairment { delay, ..Impairment::default() }, 1);
    node.transmit(&[datagram(b"x")]).expect("sent");
    let start = node.now();
    assert_eq!(node.receive(Wait::until(start + Duration::from_secs(20))).expect("received"), 1);
    let took = node.now().saturating_since(start);
    assert!(took >= Duration::from_millis(4) && took < Duration::from_secs(10), "{took:?}");
}

/// Whether it was woken just then cannot be known, so it returns, and what is due is sent.
#[test]
fn one_that_can_be_woken_returns_when_a_held_datagram_is_due() {
    let hub = Hub::new(8);
    let attach = |prefix: &str| hub.attach(PORT, &[prefix.parse().expect("a prefix")]);
    let inner = attach("fdbb:1:1::/48").expect("free");
    let mut other = attach("fdbb:1:2::/48").expect("free");
    let delay = Duration::from_millis(5);
    let mut node = Impaired::new(inner, Impairment { delay, ..Impairment::default() }, 1);
    crate::Wakeable::waker(&mut node).expect("a queue has one");
    node.transmit(&[datagram(b"x")]).expect("sent");
    let start = node.now();
    assert_eq!(node.receive(Wait::until(start + Duration::from_secs(20))).expect("received"), 0);
    assert!(node.now().saturating_since(start) < Duration::from_secs(10));
    assert_eq!(other.receive(Wait::NONE).expect("received"), 1);
}

#[test]
fn what_does_not_fit_is_dropped_and_counted() {
    let delay = Duration::from_secs(1);
    let mut world = world(Impairment { delay, ..Impairment::default() }, 1);
    let arrivals = world.exchange(5_000, 100);
    assert_eq!(arrivals.len(), super::HELD_LIMIT);
    let dropped = world.sender.impairment_counters().overflow_drop_count;
    assert_eq!(dropped, 5_000 - super::HELD_LIMIT as u64);
}
