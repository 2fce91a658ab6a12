//! How an owner responds while its application computes.

use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread;

use bluebridge::{
    Client, EndpointConfig, Error, Event, NodeId, OwnerPolicy, Service, UpdateOptions,
};
use bluebridge_transport::Transport;
use bluebridge_wire::Command;

use super::carriers::{Mute, StopClock, Stoppable};
use super::{NODES, config, lasting, pattern, read, until_counted};
use crate::rack::LocalRack;

/// What an owner did with the requests that were redirected to it.
#[derive(Debug, Default, Eq, PartialEq)]
struct OwnerWork {
    served: u64,
    waited: u64,
    wait_ended: u64,
    rejected: u64,
    not_owner: u64,
}

impl OwnerWork {
    /// Requests received and responses sent; a READ served here has one piece.
    fn totals(&self) -> [u64; 2] {
        let requests = self.served + self.waited + self.rejected + self.not_owner;
        [requests, requests + self.wait_ended]
    }
}

/// What an owner has done so far, once its carrier has taken `answered_count` responses.
fn owner_work(service: &Service, answered_count: u64) -> OwnerWork {
    let what = format!("the carrier takes {answered_count} responses of the owner");
    until_counted(service, &what, |counters| counters.answered_count >= answered_count);
    let counters = service.counters();
    assert_eq!(counters.answered_count, answered_count, "{counters:?}");
    assert_eq!(counters.wait_over_count, 0, "{counters:?}");
    OwnerWork {
        served: counters.served_count,
        waited: counters.waited_count,
        wait_ended: counters.wait_ended_count,
        rejected: counters.rejected_count,
        not_owner: counters.not_owner_count,
    }
}

/// How often an owner's response sent a client's request home, was a page's last committed contents,
/// or made it wait; and how often the client retransmitted a request after a timeout.
fn taken<T: Transport>(client: &Client<T>) -> [u64; 4] {
    [Event::RedirectReturn, Event::StaleJoin, Event::OwnerWait, Event::Retransmit]
        .map(|event| client.counters().of(event))
}

#[test]
fn the_owner_responds_while_the_application_computes() {
    for policy in [OwnerPolicy::Reject, OwnerPolicy::Wait, OwnerPolicy::Serve] {
        let (serves, waits) = (policy == OwnerPolicy::Serve, policy == OwnerPolicy::Wait);
        let rack = LocalRack::start(&NODES, 1 << 20);
        let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 1);
        let to_owner = [port.id()];
        let clock = StopClock::default();
        let port = Stoppable { inner: port, clock: clock.clone() };
        let service = Service::start(&config(1000), port).expect("a thread");
        let settings = EndpointConfig { service: Some(service.clone()), ..config(1000) };
        let inner = carriers.pop().expect("one");
        let mut first = Client::open(settings, Stoppable { inner, clock: clock.clone() });
        let carrier = Stoppable { inner: rack.attach(NodeId(1001)), clock: clock.clone() };
        let mut second = Client::open(config(1001), carrier);
        let base = first.alloc_write(&pattern(4096, 1)).expect("there is room").base();
        assert!(read(&mut second, base, 4096) == pattern(4096, 1));
        for command in [Command::Read, Command::Update, Command::Write] {
            rack.redirect(base, command, &to_owner);
        }
        let mut mine = vec![0; 4096];
        let options = UpdateOptions { owner_policy: policy, ..lasting(10_000) };
        // From here on nothing is retransmitted after a timeout: without the owner's response no call
        // ends.
        clock.stop();
        let mut update = first
            .update_with(base, &mut mine, options)
            .expect("the redirect sent the request to its sender");
        update.fill(9);
        let mut expected = OwnerWork { not_owner: 1, ..OwnerWork::default() };
        assert_eq!(owner_work(&service, 1), expected, "{policy:?}: it had no lease yet");

        let before = taken(&second);
        let mut bytes = [0; 100];
        let stale = second.read_stale(base, &mut bytes).expect("the owner responds");
        assert!(stale && bytes == *pattern(100, 1), "{policy:?}");
        let error = second.try_update(base, &mut [0; 100]).map(|_| ()).expect_err("it is leased");
        assert!(matches!(error, Error::Busy { owner: NodeId(1000), .. }), "{error}");
        (expected.served, expected.rejected) = if serves { (1, 1) } else { (0, 2) };
        assert_eq!(owner_work(&service, expected.totals()[1]), expected, "{policy:?}");
        let [returned, stale, waited, again] = before;
        let before = [returned + expected.rejected, stale + 1, waited, again];
        assert_eq!(taken(&second), before, "{policy:?}");

        if !waits {
            // The request then waits at the home, to which it must be repeated from time to time.
            clock.run();
        }
        thread::scope(|scope| {
            let waiting = scope.spawn(|| read(&mut second, base, 100));
            if waits {
                expected.waited = 1;
            } else {
                expected.rejected += 1;
            }
            assert_eq!(owner_work(&service, expected.totals()[1]), expected, "{policy:?}");
            assert!(!waiting.is_finished(), "{policy:?}");
            update.commit().expect("the lease holds");
            assert_eq!(waiting.join().expect("it got the bytes"), [9; 100]);
        });
        expected.wait_ended = expected.waited;
        assert_eq!(owner_work(&service, expected.totals()[1]), expected, "{policy:?}");
        if waits {
            let [returned, stale, waited, again] = before;
            assert_eq!(taken(&second), [returned + 1, stale, waited + 1, again]);
        }
        // The redirect remains in the switch: that costs one more attempt, and nothing else.
        second.write(base, &[1]).expect("it is free");
        assert_eq!(read(&mut second, base, 2), [1, 9]);
        expected.not_owner += 2;
        assert_eq!(owner_work(&service, expected.totals()[1]), expected, "{policy:?}");
        assert_eq!(service.counters().request_count, expected.totals()[0], "{policy:?}");
    }
}

#[test]
fn an_owner_serves_nothing_old_once_the_commit_is_sent() {
    let rack = LocalRack::start(&NODES, 1 << 20);
    let (mut carriers, port) = rack.attach_endpoint(NodeId(1000), 1);
    let to_owner = [port.id()];
    let service = Service::start(&config(1000), port).expect("a thread");
    let settings = EndpointConfig { service: Some(service.clone()), ..config(1000) };
    let is_deaf = Arc::<AtomicBool>::default();
    let carrier = carriers.pop().expect("one");
    let carrier = Mute { inner: carrier, is_mute: Arc::default(), is_deaf: Arc::clone(&is_deaf) };
    let mut first = Client::open(settings, carrier);
    let clock = StopClock::default();
    let carrier = Stoppable { inner: rack.attach(NodeId(1001)), clock: clock.clone() };
    let mut second = Client::open(config(1001), carrier);
    let base = first.alloc_write(&[0; 4096]).expect("there is room").base();
    let mut mine = vec![0; 4096];
    let options = UpdateOptions { owner_policy: OwnerPolicy::Serve, ..lasting(10_000) };
    // An earlier lease, whose bytes must never be served again.
    let mut update = first.update_with(base, &mut mine, options).expect("it is free");
    update.fill(1);
    update.commit().expect("the lease holds");
    assert_eq!(read(&mut second, base, 100), [1; 100]);
    rack.redirect(base, Command::Read, &to_owner);
    let mut update = first.update_with(base, &mut mine, options).expect("it is free");
    let mut bytes = [0; 100];
    // The home gets no request: the redirect bypasses it, and nothing is retransmitted.
    clock.stop();
    assert!(second.read_stale(base, &mut bytes).expect("the owner responds") && bytes == [1; 100]);
    clock.run();
    assert_eq!(owner_work(&service, 1), OwnerWork { served: 1, ..OwnerWork::default() });
    update.fill(9);
    is_deaf.store(true, Ordering::Relaxed);
    thread::scope(|scope| {
        let committing = scope.spawn(|| update.commit());
        assert_eq!(read(&mut second, base, 100), [9; 100]);
        clock.stop();
        let stale = second.read_stale(base, &mut bytes).expect("the owner responds, then the home");
        assert!(!stale && bytes == [9; 100], "contents that another client has seen replaced");
        clock.run();
        // The READ arrived before the COMMIT, or after it.
        let seen = owner_work(&service, 3);
        assert!(seen.served == 1 && seen.totals() == [3, 3] && seen.not_owner >= 1, "{seen:?}");
        assert!(!committing.is_finished(), "the client has no response to its COMMIT");
        is_deaf.store(false, Ordering::Relaxed);
        committing.join().expect("no panic").expect("the lease holds");
    });
}
