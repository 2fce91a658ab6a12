//! What it costs that pages were used before: CREATE and DELETE of many, and the first writes,
//! which zero what an earlier allocation left.
//!
//! ```text
//! cargo run --release -p bluebridge-memserver --example clear_cost
//! ```

use std::time::{Duration, Instant};

use bluebridge_memserver::{Arena, ArenaConfig, Claim, Reservation};
use bluebridge_protocol::store::{Access, PageStore};
use bluebridge_wire::Space;

const SPACE: Space = Space(7);

/// Rounds after the first, in which the pages are clean.
const ROUNDS: u32 = 5;

/// Mean times of CREATE, of writing `data` to each page once, and of DELETE.
fn measure(pages: u32, data: &[u8]) -> [Duration; 3] {
    let bytes = u64::from(pages) * 4096;
    let claim = Claim::Prefault;
    let reservation = Reservation { bytes, shard_count: 1, claim, prefer_huge_pages: true };
    let mut reserved = reservation.reserve().expect("memory");
    let config = ArenaConfig { rest_divisor: u32::MAX, ..ArenaConfig::default() };
    let mut arena = Arena::new(&config, reserved.parts.remove(0));
    let mut times = [Duration::ZERO; 3];
    for round in 0..=ROUNDS {
        let begun = Instant::now();
        let grant = arena.create(SPACE, pages).expect("room");
        let created = begun.elapsed();
        let begun = Instant::now();
        let first = grant.location.page();
        for page in first..first + u64::from(pages) {
            arena.write(page, 0, data);
        }
        let written = begun.elapsed();
        let (location, tag) = (grant.location, grant.tag);
        let access = Access { location, length_bytes: 1, tag, space: SPACE };
        let begun = Instant::now();
        arena.delete(access, pages).expect("its own");
        if round > 0 {
            let now = [created, written, begun.elapsed()];
            times.iter_mut().zip(now).for_each(|(sum, time)| *sum += time);
        }
    }
    times.map(|sum| sum / ROUNDS)
}

fn main() {
    for pages in [1, 16, 512, 16_384, 262_144] {
        for data in [&[1_u8; 8][..], &[1; 4096]] {
            let [create, write, delete] = measure(pages, data);
            println!(
                "{pages:6} pages: CREATE {:9.2} us, DELETE {:9.2} us; first writes of {:4} bytes \
                 {:4} ns a page",
                create.as_secs_f64() * 1e6,
                delete.as_secs_f64() * 1e6,
                data.len(),
                write.as_nanos() / u128::from(pages),
            );
        }
    }
}
