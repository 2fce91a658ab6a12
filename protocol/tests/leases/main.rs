//! Requesters, owners and a responder on a network that loses, repeats and reorders, with a switch
//! that redirects: nobody's change is lost, no lease is believed by two, nothing is read torn.
//!
//! Time is virtual, and every client's clock runs at a rate of its own.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of these tests are small")]

mod client;
mod store;
mod world;

use bluebridge_protocol::{
    owner::{self, Policy},
    requester::Event,
};
use proptest::prelude::*;
use world::{Plan, Report, World};

fn plans() -> impl Strategy<Value = Plan> {
    let policy = prop::sample::select(&[Policy::Reject, Policy::Serve, Policy::Wait][..]);
    let network = (0_u32..15, 0_u32..10, 1_u64..400);
    let load = (2_usize..6, 1_usize..3, 2_u16..200, prop_oneof![Just(60_000_u64), 5_u64..50]);
    (any::<u64>(), network, load, any::<bool>(), policy).prop_map(
        |(seed, (loss, repeat, delay_us), (clients, pages, lease_ms, idle_ms), always, policy)| {
            Plan {
                seed,
                loss_percent: loss,
                repeat_percent: repeat,
                delay_us,
                clients,
                pages,
                lease_ms,
                always,
                policy,
                idle_ms,
                steps: 30,
                serves_released: false,
            }
        },
    )
}

proptest! {
    /// See [`World::run`] for what is checked.
    #[test]
    fn leases_hold_on_a_bad_network(plan in plans()) {
        World::new(&plan).run();
    }
}

/// The load of the test above means something: all that may happen to leases happens.
#[test]
fn everything_happens_to_leases() {
    let mut all = Report::default();
    for seed in 0..24 {
        let policies = [Policy::Reject, Policy::Serve, Policy::Wait];
        let plan = Plan {
            seed,
            loss_percent: 8,
            repeat_percent: 5,
            delay_us: 150,
            clients: 4,
            pages: 2,
            lease_ms: if seed % 2 == 0 { 12 } else { 80 },
            always: seed % 4 < 2,
            policy: policies[seed as usize % 3],
            idle_ms: if seed % 4 == 0 { 5 } else { 60_000 },
            steps: 60,
            serves_released: false,
        };
        all.add(&World::new(&plan).run());
    }
    for event in [
        Event::Grant,
        Event::LeaseLost,
        Event::OwnerWait,
        Event::Queue,
        Event::QueueRepeat,
        Event::RedirectReturn,
        Event::Renewal,
        Event::Resumed,
        Event::ResumeUnsafe,
        Event::Retransmit,
        Event::StaleJoin,
        Event::TrainRepair,
    ] {
        assert!(all.requester(event) > 0, "{} never happened", event.name());
    }
    for event in [
        owner::Event::Hold,
        owner::Event::NotOwner,
        owner::Event::Reject,
        owner::Event::Release,
        owner::Event::Serve,
        owner::Event::Wait,
        owner::Event::WaitEnd,
        owner::Event::WaitOver,
    ] {
        assert!(all.owner(event) > 0, "{} never happened", event.name());
    }
    assert!(all.commits > 1000, "{} commits", all.commits);
}

/// The bound on the age of last committed contents means something.
#[test]
#[should_panic(expected = "too old")]
fn an_owner_that_serves_on_is_found() {
    for seed in 0..50 {
        let plan = Plan {
            seed,
            loss_percent: 5,
            repeat_percent: 0,
            delay_us: 150,
            clients: 4,
            pages: 1,
            lease_ms: 80,
            always: true,
            policy: Policy::Serve,
            idle_ms: 60_000,
            steps: 60,
            serves_released: true,
        };
        World::new(&plan).run();
    }
}
