//! Very many pointers in use, and one neighbour entry.

use bluebridge_rack::spec::DataPlane;
use bluebridge_tests::rack::endpoint::Endpoint;
use bluebridge_tests::rack::{RackOptions, TestRack, million};

/// The variable with another number of pointers; a million takes 4 GiB (`docs/testing.md`).
const COUNT: &str = "BLUEBRIDGE_RACK_POINTERS";

const USUAL: usize = 100_000;

#[test]
fn very_many_pointers_are_in_use_by_way_of_one_neighbour() {
    let count = std::env::var(COUNT).map_or(USUAL, |text| text.parse().expect("a number"));
    let options = RackOptions {
        servers: 3,
        clients: 1,
        memory: "16M",
        ..RackOptions::new(DataPlane::Ebpf, "9000")
    };
    let mut rack = TestRack::up("pointers", &options);
    rack.serve_on_demand("1536M");
    let endpoint = Endpoint::join(&rack, 1);
    let report = million::run(&rack, &endpoint, 4, count);
    let mut distinct = report.addresses.clone();
    distinct.dedup();
    assert!(distinct.len() >= count, "{} of {count} addresses differ", distinct.len());
    assert_eq!(report.neighbours.fabric, 1, "one entry for the fabric, however many pointers");
    assert!(report.neighbours.all < 32, "{:?}", report.neighbours);
    assert!(report.look_count >= 3, "the table was read {} times", report.look_count);
    println!(
        "{count} pointers; creating, writing, reading took {:?}; {} looks at the neighbours: {:?}",
        report.times, report.look_count, report.neighbours
    );
}
