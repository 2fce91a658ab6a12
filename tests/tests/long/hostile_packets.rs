//! A million hostile packets against switch and servers in one process; see
//! `bluebridge_tests::hostile`.

use std::{env, time::Instant};

use bluebridge_p4::pipeline::DropReason;
use bluebridge_protocol::responder::Event;
use bluebridge_tests::hostile::{Class, World, attack::datagram_errors};
use bluebridge_wire::Status;

/// Hostile packets of a test run; others by `BLUEBRIDGE_HOSTILE_PACKETS`.
const PACKETS: u64 = 1_050_000;
/// Another by `BLUEBRIDGE_HOSTILE_SEED`; directed attacks cause the rare events, so any seed will do.
const SEED: u64 = 1;

/// Statuses that no packet can cause, and why.
const NEVER: [(Status, &str); 3] = [
    (Status::NotOwner, "sent only by a lease's owner; see `hostile_owner`"),
    (Status::UnsupportedVersion, "the parser drops other versions, whose form is not known"),
    (Status::Internal, "stands for a record with a status that no server writes"),
];

/// Events that no packet of an attacker can cause: an operator's command purges, the controller orders migrations, and
/// only their takers take lines.
const IMPOSSIBLE: [Event; 13] = [
    Event::AllocationPurged,
    Event::FreeingEnded,
    Event::FreeingResumed,
    Event::FreeLineStays,
    Event::KeepRepeated,
    Event::LeaseWithdrawn,
    Event::LineAdopted,
    Event::LineDiscarded,
    Event::LineKept,
    Event::LineReclaimed,
    Event::LineTaken,
    Event::MigrationClosed,
    Event::MigrationWithdrawn,
];

fn number(name: &str, usual: u64) -> u64 {
    env::var(name)
        .map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

#[test]
fn a_million_hostile_packets_do_no_harm() {
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
        assert!(tally.malformed.contains_key(&reason), "the parser never reported {reason}");
    }
    for reason in DropReason::ALL {
        assert!(drops.of(reason) > 0, "nothing was dropped as {}", reason.name());
    }
    for event in Event::ALL {
        let is_possible = !IMPOSSIBLE.contains(event);
        assert_eq!(tally.events[event] > 0, is_possible, "{}", event.name());
    }
    for status in Status::ALL {
        let is_never = NEVER.iter().find(|(never, _)| never == status);
        let count = tally.replies[status];
        match is_never {
            Some((_, why)) => assert_eq!(count, 0, "{status:?} should be impossible: {why}"),
            None => assert!(count > 0, "never sent as a status: {status:?}"),
        }
    }
}
