//! Remote memory as plain memory, over racks of the real daemons.

use std::time::Duration;

use bluebridge_pager::{
    Error, FaultMode, OnFailure, PageError, RegionOptions, RemoteMemory, RemoteRegion,
};
use bluebridge_rack::spec::DataPlane;
use bluebridge_tests::rack::endpoint::{Endpoint, await_used};
use bluebridge_tests::rack::switch::trouble;
use bluebridge_tests::rack::{RackOptions, TestRack};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const PAGE: usize = 4096;
const MODES: [FaultMode; 2] = [FaultMode::InThread, FaultMode::Threads { count: 2 }];

/// A region of an endpoint; `seed` distinguishes the clients of several regions.
fn region(
    rack: &TestRack,
    endpoint: &Endpoint,
    options: &RegionOptions,
    mut seed: u64,
) -> RemoteRegion {
    let opened = RemoteRegion::with_remotes(options, || {
        seed += 1;
        let mut config = endpoint.config(seed);
        config.deadline = Duration::from_secs(2);
        Ok::<_, Error>(Box::new(endpoint.open(rack, config)) as Box<dyn RemoteMemory>)
    });
    opened.unwrap_or_else(|error| panic!("{error}"))
}

/// Reads and writes bytes anywhere, and compares each with what was written.
fn use_randomly(region: &mut RemoteRegion, expected: &mut [u8], count: u32, seed: u64) {
    let mut random = SmallRng::seed_from_u64(seed);
    let memory = region.as_mut_slice();
    for _ in 0..count {
        let at = random.random_range(0..memory.len());
        assert_eq!(memory[at], expected[at], "byte {at}");
        expected[at] = random.random();
        memory[at] = expected[at];
    }
}

/// Faults are resolved while frames are lost and repeated, and the controller is away.
fn impaired(name: &str, switch: DataPlane, mtu: &'static str) {
    let mut rack = TestRack::up(name, &RackOptions::new(switch, mtu));
    let endpoint = Endpoint::join(&rack, 1);
    for (number, mode) in (0..).zip(MODES) {
        rack.impair_all(&trouble(switch, 7));
        let options = RegionOptions::new(4 << 20, 256 << 10).mode(mode);
        let mut region = region(&rack, &endpoint, &options, number * 100);
        let mut expected = vec![0; region.len()];
        use_randomly(&mut region, &mut expected, 2000, 1);
        rack.kill("controller");
        use_randomly(&mut region, &mut expected, 2000, 2);
        assert!(region.as_slice() == expected, "the whole region, in order");
        rack.start("controller");
        use_randomly(&mut region, &mut expected, 500, 3);
        let statistics = region.statistics();
        assert!(statistics.local_pages_max <= 64, "{statistics:?}");
        assert!(statistics.remote_faults > 1000, "{statistics:?}");
        println!("{mode:?}: {statistics:?}");
        rack.impair_all(&Default::default());
        drop(region);
    }
    // The regions freed their memory.
    await_used(&mut endpoint.client(&rack, 999), &endpoint.memory_nodes(), 0);
}

#[test]
fn faults_are_resolved_behind_an_impaired_ebpf_switch() {
    impaired("pg-ebpf", DataPlane::Ebpf, "9000");
}

#[test]
fn faults_are_resolved_behind_an_impaired_soft_switch() {
    impaired("pg-soft", DataPlane::Soft, "1500");
}

/// A server restarts empty: missing pages of it are lost and say so, local ones are stored again elsewhere.
#[test]
fn a_page_of_a_server_that_restarted_empty_is_an_error_and_never_a_wrong_byte() {
    let mut rack = TestRack::up("pg-empty", &RackOptions::new(DataPlane::Ebpf, "9000"));
    let endpoint = Endpoint::join(&rack, 1);
    for (number, mode) in (0..).zip(MODES) {
        let options = RegionOptions::new(16 << 20, 1 << 20).mode(mode).prefetch_pages(0);
        let mut region = region(&rack, &endpoint, &options, number * 100);
        for (page, bytes) in region.as_mut_slice().chunks_mut(PAGE).enumerate() {
            bytes.fill(stamp(page));
        }
        rack.kill("memserver-s1");
        rack.start("memserver-s1");
        let (mut lost, mut kept) = (0, 0);
        for page in 0..region.len() / PAGE {
            let pinned = region.pin(page * PAGE..(page + 1) * PAGE);
            match pinned {
                Ok(bytes) => {
                    kept += 1;
                    assert!(bytes.iter().all(|byte| *byte == stamp(page)), "page {page}");
                }
                Err(Error::Page(PageError::Lost { .. } | PageError::Unusable { .. })) => lost += 1,
                Err(error) => panic!("page {page}: {error}"),
            }
        }
        println!("{mode:?}: {lost} pages lost, {kept} kept");
        // Placement chooses one of two servers for each of the 8 extents; all 8 on one is 1 in 128.
        assert!(lost + kept == 4096 && kept >= 192, "{lost} lost, {kept} kept");
        let lost_pages = region.statistics().lost_pages;
        assert!(lost_pages >= lost, "{:?}", region.statistics());
    }
}

/// A server that is away delays a program that waits for it, and nothing else.
#[test]
fn a_program_that_waits_goes_on_when_the_switch_is_back() {
    let mut rack = TestRack::up("pg-wait", &RackOptions::new(DataPlane::Soft, "9000"));
    let endpoint = Endpoint::join(&rack, 1);
    let options = RegionOptions::new(4 << 20, 256 << 10)
        .deadline(Duration::from_secs(1))
        .on_failure(OnFailure::Wait);
    let mut region = region(&rack, &endpoint, &options, 0);
    let mut expected = vec![0; region.len()];
    use_randomly(&mut region, &mut expected, 2000, 1);
    rack.kill("switch");
    std::thread::scope(|scope| {
        let working = scope.spawn(|| use_randomly(&mut region, &mut expected, 2000, 2));
        std::thread::sleep(Duration::from_secs(3));
        assert!(!working.is_finished(), "it needs pages that nobody can deliver");
        rack.start("switch");
        working.join().expect("it goes on");
    });
}

fn stamp(page: usize) -> u8 {
    u8::try_from(page % 250 + 1).unwrap_or_default()
}
