//! What zeroing freed pages costs: writing zeros, or giving the pages back and touching them anew.
//!
//! ```text
//! cargo run --release -p bluebridge-memserver --example clear_cost
//! ```

use std::time::{Duration, Instant};

use bluebridge_memserver::{Arena, ArenaConfig, Claim, Reservation};
use bluebridge_protocol::store::{Access, PageStore};
use bluebridge_wire::Space;

const SPACE: Space = Space(7);

/// Creates, dirties and deletes `pages` pages some times; the mean times of a CREATE of dirty
/// pages and of writing to each page once after it.
fn measure(claim: Claim, prefer_huge_pages: bool, pages: u32) -> (Duration, Duration) {
    let bytes = u64::from(pages) * 4096;
    let reservation = Reservation { bytes, shard_count: 1, claim, prefer_huge_pages };
    let mut reserved = reservation.reserve().expect("memory");
    let config = ArenaConfig { rest_divisor: u32::MAX, ..ArenaConfig::default() };
    let mut arena = Arena::new(&config, reserved.parts.remove(0));
    let (mut creating, mut touching) = (Duration::ZERO, Duration::ZERO);
    let rounds = 5;
    for round in 0..=rounds {
        let begun = Instant::now();
        let grant = arena.create(SPACE, pages).expect("room");
        let created = begun.elapsed();
        let begun = Instant::now();
        let first = grant.location.page();
        for page in first..first + u64::from(pages) {
            arena.write(page, 0, &[1; 4096]);
        }
        // The first round has clean pages.
        if round > 0 {
            creating += created;
            touching += begun.elapsed();
        }
        let (location, tag) = (grant.location, grant.tag);
        let access = Access { location, length_bytes: 1, tag, space: SPACE };
        arena.delete(access, pages).expect("its own");
    }
    (creating / rounds, touching / rounds)
}

fn main() {
    for pages in [1, 16, 512, 4096, 16384, 65536] {
        for (name, claim) in [("zeros written", Claim::Prefault), ("given back", Claim::OnDemand)] {
            for huge in [false, true] {
                let (creating, touching) = measure(claim, huge, pages);
                println!(
                    "{pages:6} pages, {name:13}, huge {huge:5}: CREATE {:6} ns a page, first \
                     writes {:5} ns a page",
                    creating.as_nanos() / u128::from(pages),
                    touching.as_nanos() / u128::from(pages),
                );
            }
        }
    }
}
