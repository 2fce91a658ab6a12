//! Hostile datagrams against the owner of leases; see `bluebridge_tests::hostile::OwnerHarness`.

use bluebridge_protocol::owner::Event;
use bluebridge_tests::hostile::OwnerHarness;

const DATAGRAMS: u64 = 100_000;

#[test]
fn hostile_datagrams_get_nothing_from_an_owner() {
    for seed in 1..=4 {
        let mut siege = OwnerHarness::new(seed);
        let given = siege.fire(DATAGRAMS);
        println!("seed {seed}: {given} of {DATAGRAMS} were well formed");
        assert!(given * 2 > DATAGRAMS, "most get past the parser");
        for event in Event::ALL {
            println!("{:<20} {:>8}", event.name(), siege.count(*event));
        }
        for event in Event::ALL {
            assert!(siege.count(*event) > 0, "seed {seed}: never happened: {}", event.name());
        }
    }
}
