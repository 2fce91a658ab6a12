//! CREATE and DELETE of used pages, and the first write to each, which zeroes what an earlier
//! allocation left: `cargo bench -p bluebridge-memserver --bench arena`.

use bluebridge_memserver::{Arena, ArenaConfig, Claim, Reservation};
use bluebridge_protocol::store::{Access, PageStore};
use bluebridge_wire::Space;
use divan::{Bencher, counter::ItemsCount};

const SPACE: Space = Space(7);

/// Pages of an allocation.
const PAGE_COUNTS: [u32; 3] = [16, 512, 16_384];

/// Bytes of a first write: a part of a page, which zeroes the rest, and a whole page.
const SIZES: [usize; 2] = [8, 4096];

fn main() {
    divan::main();
}

/// An arena whose pages were all allocated and written once. Only one exists at a time, because
/// each sample makes its own.
fn used_arena(pages: u32) -> Arena {
    let bytes = u64::from(pages) * 2 * 4096;
    let claim = Claim::Prefault;
    let reservation = Reservation { bytes, shard_count: 1, claim, prefer_huge_pages: true };
    let mut reserved = reservation.reserve().expect("memory");
    let config = ArenaConfig { quarantine_divisor: u32::MAX, ..ArenaConfig::default() };
    let mut arena = Arena::open(&config, reserved.parts.remove(0)).expect("it is new");
    let all = create(&mut arena, pages * 2);
    write_each(&mut arena, all, pages * 2, &[1; 4096]);
    arena.delete(all, pages * 2).expect("its own");
    arena
}

fn create(arena: &mut Arena, pages: u32) -> Access {
    let grant = arena.create(SPACE, pages).expect("room");
    Access { location: grant.location, length_bytes: 1, tag: grant.tag, space: SPACE }
}

fn write_each(arena: &mut Arena, access: Access, pages: u32, data: &[u8]) {
    let first = access.location.page();
    for page in first..first + u64::from(pages) {
        arena.write(page, 0, data);
    }
}

#[divan::bench(args = PAGE_COUNTS, sample_count = 50, sample_size = 1)]
fn create_and_delete(bencher: Bencher<'_, '_>, pages: u32) {
    bencher.counter(ItemsCount::new(pages)).with_inputs(|| used_arena(pages)).bench_local_refs(
        |arena| {
            let access = create(arena, pages);
            arena.delete(access, pages).expect("its own");
        },
    );
}

#[divan::bench(args = PAGE_COUNTS, consts = SIZES, sample_count = 50, sample_size = 1)]
fn first_writes<const BYTES: usize>(bencher: Bencher<'_, '_>, pages: u32) {
    bencher
        .counter(ItemsCount::new(pages))
        .with_inputs(|| {
            let mut arena = used_arena(pages);
            let access = create(&mut arena, pages);
            (arena, access)
        })
        .bench_local_refs(|(arena, access)| {
            write_each(arena, *access, pages, &[1; BYTES]);
        });
}
