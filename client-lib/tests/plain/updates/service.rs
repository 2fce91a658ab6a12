//! The service thread: it renews leases, ends those that a guard could not, and fails alone.

use core::sync::atomic::{AtomicBool, Ordering};
use core::time::Duration;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use bluebridge::{
    Client, EndpointConfig, Error, LeaseEnd, NodeId, Service, ServiceState, UpdateOptions,
};

use super::carriers::{Failing, Mute};
use super::{NODES, PATIENCE, client, config, end_of, lasting, read, served, until_counted};
use crate::rack::LocalRack;

/// Milliseconds of leases that must be renewed in time on a busy machine too: at half of it.
const RENEWED: u64 = 600;

#[test]
fn the_service_renews_while_the_application_computes() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut first, service) = served(&rack, 1000);
    let mut second = client(&rack, 1001);
    assert_eq!(first.service_state(), ServiceState::Serving);
    let base = first.alloc_write(&[7; 100]).expect("there is room").base();
    let (mut mine, mut others) = ([0; 100], [0; 100]);
    let mut update = first.update_with(base, &mut mine, lasting(RENEWED)).expect("it is free");
    let until = Instant::now() + PATIENCE;
    while service.counters().renewed_count < 5 && Instant::now() < until {
        core::hint::spin_loop();
    }
    assert!(update.time_left() > Duration::ZERO, "it was renewed");
    assert!(matches!(second.try_update(base, &mut others), Err(Error::Busy { .. })));
    update.fill(1);
    update.commit().expect("the lease was renewed");
    let counters = service.counters();
    assert!(counters.renewed_count >= 5, "{counters:?}");
    assert_eq!(counters.lost_count, 0);
    assert_eq!(read(&mut second, base, 100), [1; 100]);

    // Renewing has its limit.
    let options = UpdateOptions { renew_limit: Duration::from_millis(200), ..lasting(100) };
    let update = first.update_with(base, &mut mine, options).expect("it is free");
    thread::sleep(Duration::from_millis(500));
    assert_eq!(end_of(&update.commit().expect_err("too late")), LeaseEnd::Expired);
}

#[test]
fn updates_need_no_wake_up_each() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut client, service) = served(&rack, 1000);
    let base = client.create(4096).expect("there is room").base();
    let mut buffer = [0; 8];
    for _ in 0..2000 {
        let mut update = client.update(base, &mut buffer).expect("no client has it");
        update[0] = update[0].wrapping_add(1);
        update.commit().expect("no client has it");
    }
    assert_eq!(u64::from_le_bytes(buffer) % 256, 2000 % 256);
    let counters = service.counters();
    assert!(counters.wake_count < 100, "{counters:?}");
    assert_eq!(counters.renewed_count, 0, "none lasted long");
}

#[test]
fn clients_of_one_endpoint_share_its_service() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (carriers, port) = rack.attach_endpoint(NodeId(1000), 3);
    let service = Service::start(&config(1000), port).expect("a thread");
    let base = client(&rack, 1001).create(3 * 4096).expect("there is room");
    thread::scope(|scope| {
        for (at, carrier) in (0..).zip(carriers) {
            let service = service.clone();
            let config = EndpointConfig { service: Some(service.clone()), ..config(1000) };
            scope.spawn(move || {
                let mut client = Client::open(config, carrier);
                let mut buffer = [0; 4096];
                let page = base.at(at * 4096).expect("inside");
                let mut update =
                    client.update_with(page, &mut buffer, lasting(RENEWED)).expect("free");
                until_counted(&service, "all are renewed", |now| now.renewed_count >= 9);
                update.fill(3);
                update.commit().expect("it was renewed");
            });
        }
    });
}

#[test]
fn an_abort_without_a_response_is_left_to_the_service() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 1);
    let is_service_mute = Arc::<AtomicBool>::default();
    let port = Mute::new(port, &is_service_mute);
    let service = Service::start(&config(1000), port).expect("a thread");
    let is_mute = Arc::<AtomicBool>::default();
    let carrier = Mute::new(carriers.pop().expect("one"), &is_mute);
    let settings =
        EndpointConfig { service: Some(service.clone()), lease_count: 1, ..config(1000) };
    let mut first = Client::open(settings, carrier);
    let mut second = client(&rack, 1001);
    let base = second.create(4096).expect("there is room").base();
    let (mut mine, mut others) = ([0; 100], [0; 100]);
    for _ in 0..3 {
        let update = first.update_with(base, &mut mine, lasting(10_000)).expect("it is free");
        is_mute.store(true, Ordering::Relaxed);
        let before = Instant::now();
        drop(update);
        drop(second.update(base, &mut others).expect("the service released it"));
        assert!(before.elapsed() < Duration::from_secs(5), "before the lease ended");
        is_mute.store(false, Ordering::Relaxed);
        // The slot is returned at the service's next check.
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(service.counters().aborted_count, 3);

    // A lease that expired before it was abandoned needs no ABORT, and its slot is returned too.
    for _ in 0..3 {
        let update = first.update_with(base, &mut mine, lasting(100)).expect("it is free");
        is_service_mute.store(true, Ordering::Relaxed);
        is_mute.store(true, Ordering::Relaxed);
        let failed_count = service.counters().renew_failed_count;
        let patience = Instant::now() + Duration::from_secs(10);
        while service.counters().renew_failed_count == failed_count {
            assert!(Instant::now() < patience, "a RENEW that does not arrive ends with the lease");
            thread::sleep(Duration::from_millis(5));
        }
        drop(update);
        is_service_mute.store(false, Ordering::Relaxed);
        is_mute.store(false, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(50));
    }
    first.update(base, &mut mine).expect("there is room").commit().expect("no other client may");
    assert_eq!(service.counters().aborted_count, 3);
}

#[test]
fn the_result_of_a_renewal_is_not_attributed_to_the_next_client() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 2);
    let is_mute = Arc::<AtomicBool>::default();
    let port = Mute::new(port, &is_mute);
    let service = Service::start(&config(1000), port).expect("a thread");
    let settings = EndpointConfig { service: Some(service.clone()), ..config(1000) };
    let region = client(&rack, 1001).create(2 * 4096).expect("there is room");
    let at = |page: u64| region.at(page * 4096).expect("inside");
    let (mut one, mut two) = ([0; 100], [0; 100]);
    let mut first = Client::open(settings.clone(), carriers.pop().expect("two"));
    let update = first.update_with(at(0), &mut one, lasting(1600)).expect("it is free");
    until_counted(&service, "it is renewed", |now| now.renewed_count == 1);
    is_mute.store(true, Ordering::Relaxed);
    thread::sleep(Duration::from_millis(850));
    // Its second RENEW is in flight, and has not arrived.
    update.abort().expect("it is held");
    drop(first);
    thread::sleep(Duration::from_millis(300));
    let mut second = Client::open(settings, carriers.pop().expect("two"));
    let update = second.update_with(at(1), &mut two, lasting(1000)).expect("it is free");
    thread::sleep(Duration::from_millis(20));
    is_mute.store(false, Ordering::Relaxed);
    until_counted(&service, "the second lease is renewed", |now| now.renewed_count >= 4);
    update.commit().expect("it was renewed");
}

#[test]
fn a_service_that_failed_takes_no_leases_with_it() {
    service_fails(false);
}

#[test]
fn a_service_that_panicked_has_failed() {
    service_fails(true);
}

fn service_fails(panics: bool) {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 1);
    let fails = Arc::<AtomicBool>::default();
    let port = Failing { inner: port, fails: Arc::clone(&fails), panics };
    let service = Service::start(&config(1000), port).expect("a thread");
    let is_mute = Arc::<AtomicBool>::default();
    let carrier = Mute::new(carriers.pop().expect("one"), &is_mute);
    let settings =
        EndpointConfig { service: Some(service.clone()), lease_count: 1, ..config(1000) };
    let mut client = Client::open(settings, carrier);
    let base = client.create(4096).expect("there is room").base();
    let mut buffer = [0; 100];
    for round in 0..3 {
        let update = client.update_with(base, &mut buffer, lasting(150)).expect("there is room");
        if round == 1 {
            fails.store(true, Ordering::Relaxed);
        }
        is_mute.store(true, Ordering::Relaxed);
        drop(update);
        is_mute.store(false, Ordering::Relaxed);
        let patience = Instant::now() + Duration::from_secs(10);
        while round == 1 && !matches!(service.state(), ServiceState::Failed { .. }) {
            assert!(Instant::now() < patience, "abandoning the lease woke it");
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_millis(50));
    }
    client.update(base, &mut buffer).expect("there is room").commit().expect("no other client may");
}

#[test]
fn without_the_fabrics_port_the_service_renews() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, _port) = rack.attach_endpoint(NodeId(1000), 2);
    let other = carriers.pop().expect("two");
    let service = Service::start(&config(1000), other).expect("a thread");
    let settings = EndpointConfig { service: Some(service.clone()), ..config(1000) };
    let mut client = Client::open(settings, carriers.pop().expect("two"));
    assert_eq!(client.service_state(), ServiceState::RenewalsOnly);
    let base = client.create(1).expect("there is room").base();
    let mut buffer = [0; 8];
    let update = client.update_with(base, &mut buffer, lasting(RENEWED)).expect("it is free");
    until_counted(&service, "it is renewed", |now| now.renewed_count >= 3);
    update.commit().expect("it was renewed");
}
