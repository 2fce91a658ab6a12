//! A million hostile packets against switch and servers in one process; see
//! `bluebridge_tests::hostile`.

use std::{env, time::Instant};

use bluebridge_p4::pipeline::DropReason;
use bluebridge_protocol::responder::Event;
use bluebridge_tests::hostile::{Class, World, attack::datagram_errors};
use bluebridge_wire::Status;

/// Hostile packets of a test run; others by `BLUEBRIDGE_HOSTILE_PACKETS`.
const PACKETS: u64 = 1_050_000;
/// Another by `BLUEBRIDGE_HOSTILE_SEED`; what chance makes too seldom is led to, so any will do.
const SEED: u64 = 1;

/// Statuses that no packet can cause, and why.
const NEVER: [(Status, &str); 3] = [
    (Status::NotOwner, "only a lease's owner says so; see `hostile_owner`"),
    (Status::UnsupportedVersion, "the parser drops other versions, whose form is not known"),
    (Status::Internal, "stands for a record with a status that nobody writes"),
];

fn number(name: &str, usual: u64) -> u64 {
    env::var(name)
        .map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

#[test]
fn a_million_hostile_packets_harm_nobody() {
    let packets = number("BLUEBRIDGE_HOSTILE_PACKETS", PACKETS);
    let seed = number("BLUEBRIDGE_HOSTILE_SEED", SEED);
    let started = Instant::now();
    let mut world = World::new(seed);
    world.fire(packets);
    world.serve_the_victim();
    let tally = world.tally();
    println!("seed {seed}: {packets} hostile packets in {:?}", started.elapsed());
    println!("{tally:#?}");
    let drops = world.drops();
    for reason in DropReason::ALL {
        println!("drop {:<20} {:>9}", reason.name(), drops.of(reason));
    }
    if packets < PACKETS {
        return;
    }
    for class in Class::ALL {
        assert!(tally.fired[&class] > 10_000, "{class:?}");
    }
    assert!(tally.valid * 2 >= tally.total(), "{} of {} are valid", tally.valid, tally.total());
    assert!(tally.refused > 100_000 && tally.done > 50_000, "both ways are gone");
    for reason in datagram_errors() {
        assert!(tally.malformed.contains_key(&reason), "the parser never said {reason}");
    }
    for reason in DropReason::ALL {
        assert!(drops.of(reason) > 0, "nothing was dropped as {}", reason.name());
    }
    for event in Event::ALL {
        // Only an operator's order purges; no packet can.
        let is_possible = *event != Event::AllocationPurged;
        assert_eq!(tally.events[event] > 0, is_possible, "{}", event.name());
    }
    for status in Status::ALL {
        let is_never = NEVER.iter().find(|(never, _)| never == status);
        let count = tally.answers[status];
        match is_never {
            Some((_, why)) => assert_eq!(count, 0, "{status:?} was thought impossible: {why}"),
            None => assert!(count > 0, "never answered: {status:?}"),
        }
    }
}
