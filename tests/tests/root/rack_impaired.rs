//! Mixed operations of many clients over ports that lose, duplicate and reorder.

use bluebridge_rack::spec::DataPlane;
use bluebridge_tests::rack::mixed;

/// The variable with another number of operations of all runs together.
const COUNT: &str = "BLUEBRIDGE_RACK_OPERATIONS";

/// The variable with another seed of the random choices.
const SEED: &str = "BLUEBRIDGE_RACK_SEED";

/// The default number of operations; each run has a quarter.
const USUAL: u32 = 200_000;

fn run(name: &str, switch: DataPlane, mtu: &'static str) {
    let number = |name, usual| {
        std::env::var(name).map_or(usual, |text| text.parse::<u32>().expect("a number"))
    };
    let (count, seed) = (number(COUNT, USUAL) / 4, number(SEED, 1));
    println!("{name}: {count} operations, {SEED}={seed}");
    let began = std::time::Instant::now();
    let tally = mixed::run(name, switch, mtu, count, seed.into());
    println!("{name}: {} operations in {:?}: {tally:?}", tally.operations(), began.elapsed());
}

#[test]
fn the_soft_switch_at_mtu_9000() {
    run("imp-soft-9000", DataPlane::Soft, "9000");
}

#[test]
fn the_soft_switch_at_mtu_1500() {
    run("imp-soft-1500", DataPlane::Soft, "1500");
}

#[test]
fn the_ebpf_switch_at_mtu_9000() {
    run("imp-ebpf-9000", DataPlane::Ebpf, "9000");
}

#[test]
fn the_ebpf_switch_at_mtu_1500() {
    run("imp-ebpf-1500", DataPlane::Ebpf, "1500");
}
