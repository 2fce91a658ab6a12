//! Clients that contend for the same pages: counters, locks, barriers.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::thread;

use bluebridge::{Barrier, Client, EndpointConfig, Lock, LockError, NodeId, Pointer, Service};
use bluebridge_testkit::within;
use bluebridge_transport::Transport;
use bluebridge_transport::impaired::{Impaired, Impairment, Probability};

use super::{NODES, client, config, read, served};
use crate::rack::LocalRack;

/// Increments a counter on a page with UPDATE, another with FETCH_ADD.
fn increment<T: Transport>(client: &mut Client<T>, base: Pointer, count: u64) {
    let atomic = base.checked_add(4096).expect("inside");
    let mut word = [0; 8];
    for _ in 0..count {
        let mut update = client.update(base, &mut word).expect("its turn comes");
        let next = u64::from_le_bytes(update[..].try_into().expect("8 bytes")) + 1;
        update.copy_from_slice(&next.to_le_bytes());
        update.commit().expect("the lease holds");
        client.fetch_add(atomic, 1).expect("it is allocated");
    }
}

fn counted<T: Transport>(client: &mut Client<T>, base: Pointer) -> [u64; 2] {
    [0, 4096].map(|offset| {
        let word = read(client, base.checked_add(offset).expect("inside"), 8);
        u64::from_le_bytes(word.try_into().expect("8 bytes"))
    })
}

#[test]
fn two_clients_that_contend_lose_no_increment() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let mut observer = client(&rack, 1999);
    let base = observer.create(8192).expect("there is room").base();
    thread::scope(|scope| {
        for node in [1000, 1001] {
            let (mut client, _) = served(&rack, node);
            scope.spawn(move || increment(&mut client, base, 300));
        }
    });
    assert_eq!(counted(&mut observer, base), [600, 600]);
}

#[test]
fn sixteen_threads_on_four_endpoints_lose_no_increment_though_datagrams_are_lost() {
    let loss = Impairment { loss: Probability::from_percent(2), ..Impairment::default() };
    let rack = LocalRack::start_behind(&NODES, 1 << 20, |carrier| Impaired::new(carrier, loss, 1));
    let mut observer = client(&rack, 1999);
    let base = observer.create(8192).expect("there is room").base();
    let lost_count = AtomicU64::new(0);
    thread::scope(|scope| {
        for node in 1000..1004 {
            let (carriers, port) = rack.attach_endpoint(NodeId(node), 4);
            let port = Impaired::new(port, loss, node.into());
            let service = Service::start(&config(node), port).expect("a thread");
            for (at, carrier) in (0..).zip(carriers) {
                let carrier = Impaired::new(carrier, loss, u64::from(node) * 10 + at);
                let settings = EndpointConfig { service: Some(service.clone()), ..config(node) };
                let settings = EndpointConfig { deadline: Duration::from_secs(60), ..settings };
                let lost_count = &lost_count;
                scope.spawn(move || {
                    let mut client = Client::open(settings, carrier);
                    increment(&mut client, base, 40);
                    let lost = client.transport().impairment_counters().lost_count;
                    lost_count.fetch_add(lost, Ordering::Relaxed);
                });
            }
        }
    });
    assert!(lost_count.into_inner() > 0, "nothing was lost");
    assert_eq!(counted(&mut observer, base), [640, 640]);
}

#[test]
fn a_lock_has_one_holder_and_a_dead_holder_is_skipped() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let region = client(&rack, 1999).create(4096).expect("there is room");
    let counter = region.at(64).expect("inside");
    let lock = Lock::at(region.base(), Duration::from_secs(60)).expect("it is aligned");
    let wait = Duration::from_secs(60);
    thread::scope(|scope| {
        for node in 1000..1004 {
            let mut client = client(&rack, node);
            scope.spawn(move || {
                for _ in 0..50 {
                    let mut held = lock.lock(&mut client, wait).expect("its turn comes");
                    // Not atomic, so a second holder would be seen.
                    let word = read(held.client(), counter, 8);
                    let next = u64::from_le_bytes(word.try_into().expect("8 bytes")) + 1;
                    held.client().write(counter, &next.to_le_bytes()).expect("it is allocated");
                    held.unlock().expect("no client's patience ended");
                }
            });
        }
    });
    let (mut client, mut other) = (client(&rack, 1004), client(&rack, 1005));
    assert_eq!(read(&mut client, counter, 8), 200_u64.to_le_bytes());

    let soon = Duration::from_millis(50);
    let gone = lock.lock(&mut client, wait).expect("it is free");
    assert!(matches!(lock.lock(&mut other, soon), Err(LockError::TimedOut)));
    let impatient = Lock::at(region.base(), soon).expect("it is aligned");
    let held = impatient.lock(&mut other, wait).expect("its patience ends");
    assert!(matches!(gone.unlock(), Err(LockError::Lost)));
    held.unlock().expect("no client's patience ended");
    // Dropping the guard unlocks too; the next client does not wait for the abandoned ticket.
    drop(lock.lock(&mut client, soon).expect("it is free"));
    let held = lock.lock(&mut other, soon).expect("it was dropped");
    held.unlock().expect("no client's patience ended");
    let unaligned = Lock::at(region.at(8).expect("inside"), soon);
    assert!(matches!(unaligned, Err(LockError::Unaligned(_))));
}

#[test]
fn waiting_for_a_lock_ends_in_time_though_its_tickets_are_far_behind() {
    within("the waiting ends", wait_behind_tickets);
}

fn wait_behind_tickets() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let mut client = client(&rack, 1000);
    let region = client.create(4096).expect("there is room");
    let soon = Duration::from_millis(50);
    let lock = Lock::at(region.base(), Duration::from_secs(60)).expect("it is aligned");
    // The distance is larger than any number of tickets that can be drawn or skipped in the test.
    for (served, patience) in [(1 << 62, Duration::from_secs(60)), (1 << 63, Duration::ZERO)] {
        let serving = region.at(8).expect("inside");
        client.write(serving, &u64::to_le_bytes(served)).expect("it is allocated");
        let lock = Lock::at(region.base(), patience).expect("it is aligned");
        let error = lock.lock(&mut client, soon).map(|_| ()).expect_err("it is never served");
        assert!(matches!(error, LockError::TimedOut), "{error}");
    }
    client.zero(region.base(), 16).expect("it is allocated");
    let held = lock.lock(&mut client, soon).expect("it is a new lock");
    held.unlock().expect("no client's patience ended");
}

#[test]
fn a_barrier_opens_only_when_all_have_arrived() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let region = client(&rack, 1999).create(4096).expect("there is room");
    let (barrier, arrived) =
        (Barrier::at(region.base(), 3).expect("it is aligned"), region.at(64).expect("inside"));
    thread::scope(|scope| {
        for node in 1000..1003 {
            let mut client = client(&rack, node);
            scope.spawn(move || {
                for meeting in 0..20 {
                    client.fetch_add(arrived, 1).expect("it is allocated");
                    let which = barrier.wait(&mut client, Duration::from_secs(60));
                    assert_eq!(which.expect("all come"), meeting);
                    let count = client.fetch_add(arrived, 0).expect("it is allocated");
                    assert!(count >= 3 * (meeting + 1), "{count} in meeting {meeting}");
                }
            });
        }
    });
    let alone = barrier.wait(&mut client(&rack, 1003), Duration::from_millis(30));
    assert!(matches!(alone, Err(LockError::TimedOut)));
}
