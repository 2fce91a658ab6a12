//! Compares the arena with a model, and tests its limits one by one.

use std::collections::{BTreeMap, HashMap, HashSet};

use bluebridge_protocol::store::{HomeLine, Line, StageError, Taken};
use bluebridge_wire::{
    NodeId, Tag,
    line::{LineRecord, PageContents, Part},
    page_crc,
};
use proptest::prelude::*;

use super::*;
use crate::{kept::stores, survey};

const SPACE: Space = Space(7);

fn arena(pages: u32) -> Arena {
    Arena::on_heap(&ArenaConfig::default(), pages)
}

fn access(grant: Grant, length_bytes: u64) -> Access {
    Access { location: grant.location, length_bytes, tag: grant.tag, space: SPACE }
}

fn all(grant: Grant, pages: u32) -> Access {
    access(grant, u64::from(pages) * PAGE_BYTES as u64)
}

fn at_page(access: Access, page: u64) -> Access {
    let offset = access.location.offset() + page * PAGE_BYTES as u64;
    Access {
        location: Location::new(access.location.generation(), offset).unwrap(),
        length_bytes: PAGE_BYTES as u64,
        ..access
    }
}

impl Arena {
    fn byte_of(&self, page: usize, place: usize) -> u8 {
        self.pages.byte_of(page, place)
    }

    /// Stages a line whose bytes are stored in its memory first, as far as it has some.
    pub(crate) fn stage_with(
        &mut self,
        first_page: u64,
        name: (HomeLine, Taken),
        pages: &LineRecord,
        bytes: &[u8],
    ) -> Result<(), StageError> {
        if let Some(memory) = self.lines_mut().memory(first_page) {
            stores::copy(memory, bytes);
        }
        let crcs = core::array::from_fn(|page| {
            let bytes = bytes.get(page * PAGE_BYTES..)?.first_chunk()?;
            // As if one had come in pieces.
            (page != 3).then(|| page_crc(bytes))
        });
        self.lines_mut().stage(first_page, name, pages, &crcs)
    }
}

#[test]
fn checks_come_in_the_documented_order() {
    let mut arena = arena(8);
    let grant = arena.create(SPACE, 2).unwrap();
    let good = all(grant, 2);
    assert_eq!(arena.check(good), Ok(()));
    let other = ArenaGeneration::new(1).unwrap();
    let location = Location::new(other, 1 << 47).unwrap();
    assert_eq!(arena.check(Access { location, ..good }), Err(Status::StaleGeneration));
    let far = |offset| Location::new(ArenaGeneration::default(), offset).unwrap();
    let beyond = Access { location: far(8 * 4096), ..good };
    assert_eq!(arena.check(beyond), Err(Status::OutOfRange));
    let over_the_end = Access { location: far(7 * 4096), length_bytes: 4097, ..good };
    assert_eq!(arena.check(over_the_end), Err(Status::OutOfRange));
    let last = Access { location: far((1 << 48) - 1), length_bytes: u64::MAX, ..good };
    assert_eq!(arena.check(last), Err(Status::OutOfRange));
    assert_eq!(arena.check(all(grant, 3)), Err(Status::NotAllocated));
    let stale = Access { tag: Tag(grant.tag.0 + 1), space: Space(9), ..good };
    assert_eq!(arena.check(stale), Err(Status::StaleTag));
    assert_eq!(arena.check(Access { space: Space(9), ..good }), Err(Status::WrongSpace));
}

#[test]
fn an_access_beyond_an_end_is_refused() {
    let mut arena = arena(12);
    let grants: Vec<Grant> = (0..6).map(|_| arena.create(SPACE, 2).unwrap()).collect();
    let refuse_runs_over = |arena: &Arena, grants: &[Grant]| {
        for grant in grants {
            assert_eq!(arena.check(all(*grant, 2)), Ok(()));
            let over = arena.check(all(*grant, 3));
            assert!(matches!(over, Err(Status::StaleTag | Status::OutOfRange)), "{over:?}");
            let before = grant.location.offset().checked_sub(PAGE_BYTES as u64);
            let location = before.and_then(|offset| Location::new(arena.generation(), offset));
            let before = location.map(|location| Access { location, ..all(*grant, 1) });
            assert!(before.is_none_or(|access| arena.check(access) == Err(Status::StaleTag)));
        }
    };
    refuse_runs_over(&arena, &grants);
    // An allocation between two neighbours has another colour than both.
    arena.delete(all(grants[2], 2), 2).unwrap();
    let again = arena.create(SPACE, 2).unwrap();
    let mut grants = grants;
    grants[2] = again;
    refuse_runs_over(&arena, &grants);
}

#[test]
fn another_shard_is_out_of_range() {
    let config = ArenaConfig { shard: 3, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 4);
    let grant = arena.create(SPACE, 1).unwrap();
    assert_eq!(grant.location.shard(), 3);
    arena.write(grant.location.page(), 0, b"here");
    assert_eq!(arena.read(grant.location.page(), 0..4), b"here");
    let elsewhere = Location::new(grant.location.generation(), 0).unwrap();
    let access = Access { location: elsewhere, ..access(grant, 1) };
    assert_eq!(arena.check(access), Err(Status::OutOfRange));
}

#[test]
fn delete_refuses_what_is_not_one_allocation() {
    let mut arena = arena(8);
    let grant = arena.create(SPACE, 3).unwrap();
    let whole = access(grant, 1);
    assert_eq!(arena.delete(at_page(whole, 1), 0), Err(Status::Unaligned));
    let offset = grant.location.offset() + 8;
    let location = Location::new(grant.location.generation(), offset).unwrap();
    assert_eq!(arena.delete(Access { location, ..whole }, 0), Err(Status::Unaligned));
    assert_eq!(arena.delete(whole, 2), Err(Status::BadLength));
    assert_eq!(arena.delete(Access { tag: Tag(99), ..whole }, 3), Err(Status::StaleTag));
    assert_eq!(arena.delete(Access { space: Space(1), ..whole }, 3), Err(Status::WrongSpace));
    assert_eq!(arena.check(all(grant, 3)), Ok(()));
    assert_eq!(arena.delete(whole, 3), Ok(3));
    assert_eq!(arena.delete(whole, 3), Err(Status::NotAllocated));
    assert_eq!(arena.check(whole), Err(Status::NotAllocated));
}

#[test]
fn the_ceiling_is_hard_and_a_refusal_changes_nothing() {
    let mut arena = arena(16);
    let grants: Vec<_> = (0..16).map(|_| arena.create(SPACE, 1).unwrap()).collect();
    assert_eq!(arena.create(SPACE, 1), Err(Status::OutOfMemory));
    assert_eq!(arena.create(SPACE, u32::MAX), Err(Status::OutOfMemory));
    assert_eq!(arena.create(SPACE, 0), Err(Status::BadLength));
    assert_eq!(arena.usage(SPACE).used_pages, 16);
    arena.delete(access(grants[5], 1), 1).unwrap();
    arena.delete(access(grants[7], 1), 1).unwrap();
    assert_eq!(arena.create(SPACE, 2), Err(Status::OutOfMemory));
    let again = arena.create(SPACE, 1).unwrap();
    assert_eq!(again.location, grants[5].location);
    assert_ne!(again.tag, grants[5].tag);
    assert_eq!(arena.check(access(grants[5], 1)), Err(Status::StaleTag));
}

#[test]
fn quotas_hold_per_space() {
    let config =
        ArenaConfig { quotas: vec![(SPACE, 3)], default_quota_pages: 1, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 16);
    assert_eq!(arena.create(SPACE, 4), Err(Status::QuotaExceeded));
    let grant = arena.create(SPACE, 3).unwrap();
    assert_eq!(arena.create(SPACE, 1), Err(Status::QuotaExceeded));
    assert_eq!(arena.create(Space(8), 2), Err(Status::QuotaExceeded));
    arena.create(Space(8), 1).unwrap();
    let StoreUsage { quota_pages, used_pages, free_pages, capacity_pages, .. } = arena.usage(SPACE);
    assert_eq!((quota_pages, used_pages, free_pages, capacity_pages), (3, 3, 12, 16));
    arena.delete(access(grant, 1), 0).unwrap();
    assert_eq!(arena.usage(SPACE).used_pages, 0);
    arena.create(SPACE, 1).unwrap();
}

/// How often a page can be allocated alone in one generation of 255 colours: it must have three
/// left.
const OF_PAGE: u64 = 253;

/// An arena in the last possible generation.
fn ending() -> ArenaConfig {
    ArenaConfig {
        generation: ArenaGeneration::MAX,
        last_generation: ArenaGeneration::MAX,
        quarantine_divisor: u32::MAX,
        ..ArenaConfig::default()
    }
}

fn generation(number: u16) -> ArenaGeneration {
    ArenaGeneration::new(number).unwrap()
}

#[test]
fn an_offset_retires_for_good_with_the_last_colours() {
    let mut arena = Arena::on_heap(&ending(), 2);
    let mut colours = HashSet::new();
    for _ in 0..OF_PAGE {
        let grant = arena.create(SPACE, 1).unwrap();
        assert_eq!(grant.location.page(), 0);
        assert!(colours.insert(grant.tag), "a colour came twice");
        arena.delete(access(grant, 1), 1).unwrap();
    }
    assert_eq!(arena.arena_usage().retired_pages, 1);
    let next = arena.create(SPACE, 1).unwrap();
    assert_eq!(next.location.page(), 1);
    assert_eq!(arena.create(SPACE, 1), Err(Status::OutOfMemory));
    for tag in 0..=255 {
        let location = Location::new(ArenaGeneration::MAX, 0).unwrap();
        let stale = Access { location, length_bytes: 1, tag: Tag(tag), space: SPACE };
        assert_eq!(arena.check(stale), Err(Status::NotAllocated));
    }
}

#[test]
fn freed_pages_are_quarantined_in_order_until_others_run_short() {
    let config = ArenaConfig { quarantine_divisor: 4, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 16);
    let first = arena.create(SPACE, 1).unwrap();
    arena.delete(access(first, 1), 1).unwrap();
    assert_eq!(arena.arena_usage().quarantined_pages, 1);
    assert_eq!(arena.arena_usage().free_pages, 16, "it can be allocated");
    let other = arena.create(SPACE, 1).unwrap();
    assert_ne!(other.location, first.location, "a quarantined page was allocated");
    let big = arena.create(SPACE, 14).unwrap();
    let last = arena.create(SPACE, 1).unwrap();
    assert_eq!(last.location, first.location);
    arena.delete(access(big, 1), 0).unwrap();
    assert_eq!(arena.arena_usage().quarantined_pages, 0, "more than the share is not quarantined");
    assert_eq!(arena.arena_usage().free_pages, 14);
}

#[test]
fn the_quarantine_is_not_drained_for_what_cannot_fit_beside_withheld_pages() {
    let config = ArenaConfig { quarantine_divisor: 1, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 32);
    let grants: Vec<_> = (0..4).map(|_| arena.create(SPACE, 8).unwrap()).collect();
    arena.withhold(0..8, true);
    for grant in &grants[..3] {
        arena.delete(all(*grant, 8), 8).unwrap();
    }
    assert_eq!(arena.create(SPACE, 17), Err(Status::OutOfMemory));
    assert_eq!(arena.arena_usage().quarantined_pages, 24);
    // All pages that are not withheld are allocated when they suffice.
    let grant = arena.create(SPACE, 16).unwrap();
    assert_eq!(grant.location.page(), 8);
}

#[test]
fn new_pages_are_zero_and_their_versions_new() {
    let config = ArenaConfig { quarantine_divisor: 2, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 8);
    let mut seen: HashMap<(u64, u64), Vec<u8>> = HashMap::new();
    for round in 0..60_u8 {
        let pages = 1 + u32::from(round % 4);
        let grant = arena.create(SPACE, pages).unwrap();
        for page in grant.location.page()..grant.location.page() + u64::from(pages) {
            assert!(arena.read(page, 0..PAGE_BYTES).iter().all(|&byte| byte == 0));
            for step in 0..3_u8 {
                let bytes = arena.read(page, 0..PAGE_BYTES).to_vec();
                let before = seen.insert((page, arena.version(page)), bytes.clone());
                assert!(before.is_none_or(|before| before == bytes), "a version came twice");
                arena.write(page, usize::from(step) * 100, &[round + 1, step, 3]);
            }
            arena.zero(page, 100..4096);
        }
        arena.delete(all(grant, pages), pages).unwrap();
        if round % 3 == 0 {
            arena.tidy(3);
        }
    }
}

#[test]
fn the_crc_of_a_page_is_known_until_it_changes() {
    let mut arena = arena(8);
    let grant = arena.create(SPACE, 1).expect("there is room");
    let page = grant.location.page();
    assert_eq!(arena.page_crc(page), None, "nothing was written");
    let changes: [&dyn Fn(&mut Arena); 4] = [
        &|arena| arena.write(page, 7, &[1]),
        &|arena| arena.write(page, 0, &[2; PAGE_BYTES]),
        &|arena| arena.zero(page, 0..1),
        &|arena| arena.write_together(&[PageWrite { page, start: 0, data: &[3; 8] }]),
    ];
    for (byte, change) in (4..).zip(changes) {
        let bytes = [byte; PAGE_BYTES];
        arena.write_page(page, &bytes, page_crc(&bytes));
        assert_eq!(arena.page_crc(page), Some(page_crc(&bytes)));
        assert_eq!(arena.read(page, 0..PAGE_BYTES), bytes);
        change(&mut arena);
        assert_eq!(arena.page_crc(page), None);
    }
    let bytes = [9; PAGE_BYTES];
    arena.write_page(page, &bytes, page_crc(&bytes));
    arena.delete(all(grant, 1), 1).expect("it exists");
    let again = (0..8).map(|_| arena.create(SPACE, 1).expect("there is room").location.page());
    let again: Vec<u64> = again.collect();
    assert!(again.contains(&page), "the page is allocated again");
    assert_eq!(arena.page_crc(page), None, "its bytes are an earlier allocation's");
}

#[test]
fn tidying_zeroes_quarantined_pages() {
    let config = ArenaConfig { quarantine_divisor: 1, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 8);
    let grants: Vec<_> = (0..4).map(|_| arena.create(SPACE, 2).unwrap()).collect();
    for grant in &grants {
        arena.write(grant.location.page() + 1, 5, b"left over");
    }
    for grant in &grants {
        arena.delete(all(*grant, 2), 2).unwrap();
    }
    assert_eq!(arena.tidy(3), 3);
    assert_eq!(arena.byte_of(0, 5), 0);
    assert_ne!(arena.byte_of(5, 5), 0);
    assert_eq!(arena.tidy(u32::MAX), 5);
    assert_eq!(arena.tidy(u32::MAX), 0);
    assert!(arena.pages.all_bytes().iter().all(|&byte| byte == 0));
    assert!(arena.create(SPACE, 8).is_ok());
}

#[test]
fn leftover_is_never_read_and_is_zeroed_by_the_first_write() {
    let config = ArenaConfig { quarantine_divisor: u32::MAX, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 1);
    let is_zero =
        |arena: &Arena, range: Range<usize>| arena.read(0, range).iter().all(|&byte| byte == 0);
    let leave = |arena: &mut Arena| {
        let grant = arena.create(SPACE, 1).unwrap();
        arena.write(0, 0, &[9; PAGE_BYTES]);
        arena.delete(access(grant, 1), 1).unwrap();
    };
    leave(&mut arena);
    let grant = arena.create(SPACE, 1).unwrap();
    assert_eq!(arena.byte_of(0, 7), 9, "CREATE does not zero");
    assert!(is_zero(&arena, 0..PAGE_BYTES));
    let version = arena.version(0);
    arena.zero(0, 100..200);
    assert!(is_zero(&arena, 0..PAGE_BYTES) && arena.version(0) > version);
    arena.write(0, 4000, b"end");
    assert!(is_zero(&arena, 0..4000) && is_zero(&arena, 4003..PAGE_BYTES));
    assert_eq!(arena.read(0, 4000..4003), b"end");
    arena.zero(0, 4001..4002);
    assert_eq!(arena.read(0, 4000..4003), b"e\0d");
    arena.delete(access(grant, 1), 1).unwrap();
    // The same if it stayed there during two allocations.
    leave(&mut arena);
    let idle = arena.create(SPACE, 1).unwrap();
    arena.delete(access(idle, 1), 1).unwrap();
    arena.create(SPACE, 1).unwrap();
    assert!(is_zero(&arena, 0..PAGE_BYTES));
}

/// Creates and deletes a page until CREATE is refused; returns how often it succeeded.
fn churn(arena: &mut Arena, space: Space) -> (u64, Status) {
    let mut count = 0;
    loop {
        match arena.create(space, 1) {
            Ok(grant) => arena.delete(Access { space, ..access(grant, 1) }, 1).unwrap(),
            Err(status) => return (count, status),
        };
        count += 1;
    }
}

#[test]
fn no_space_uses_up_the_colours_that_are_reserved_for_another() {
    let (tenant, other, guest) = (Space(1), Space(2), Space(3));
    let config = ArenaConfig { quotas: vec![(tenant, 4), (other, 3)], ..ending() };
    let mut arena = Arena::on_heap(&config, 8);
    // A guest without a quota may use what is reserved for no space.
    assert_eq!(churn(&mut arena, guest), (OF_PAGE, Status::QuotaExceeded));
    let (count, status) = churn(&mut arena, tenant);
    assert_eq!((count, status), (4 * OF_PAGE, Status::QuotaExceeded));
    assert_eq!(arena.usage(tenant).used_pages, 0);
    let (count, _) = churn(&mut arena, other);
    assert_eq!(count, 3 * OF_PAGE, "all that was reserved for it");
    assert_eq!(arena.arena_usage().retired_pages, 8);
}

#[test]
fn any_space_may_use_colours_that_are_reserved_for_none() {
    let tenant = Space(1);
    let config = ArenaConfig { quotas: vec![(tenant, 1), (Space(2), 1)], ..ending() };
    let mut arena = Arena::on_heap(&config, 8);
    let (count, status) = churn(&mut arena, tenant);
    assert_eq!((count, status), (7 * OF_PAGE, Status::QuotaExceeded));
    assert_eq!(churn(&mut arena, Space(2)).0, OF_PAGE);
    // Without quotas a space may use up all colours.
    let mut arena = Arena::on_heap(&ending(), 4);
    assert_eq!(churn(&mut arena, tenant), (4 * OF_PAGE, Status::OutOfMemory));
}

#[test]
fn a_page_continues_with_the_next_reserved_generation() {
    let first = generation(7);
    let config = ArenaConfig {
        generation: first,
        last_generation: first,
        quarantine_divisor: u32::MAX,
        ..ArenaConfig::default()
    };
    let mut arena = Arena::on_heap(&config, 1);
    let old = arena.create(SPACE, 1).unwrap();
    arena.delete(access(old, 1), 1).unwrap();
    assert_eq!(churn(&mut arena, SPACE), (OF_PAGE - 1, Status::Overloaded), "more can be reserved");
    let usage = arena.arena_usage();
    assert_eq!((usage.retired_pages, usage.free_pages, usage.used_pages), (1, 0, 0));
    assert_eq!(arena.usage(SPACE).retired_pages, 1);
    let wanted = usage.wanted_generation;
    assert_eq!((usage.last_generation, wanted), (first, generation(9)));
    arena.reserve(first);
    assert_eq!(arena.create(SPACE, 1), Err(Status::Overloaded), "none were added");
    arena.set_reserving(false);
    assert_eq!(arena.create(SPACE, 1), Err(Status::OutOfMemory), "none are expected");
    assert_eq!(arena.arena_usage().wanted_generation, wanted);
    arena.reserve(wanted);
    let usage = arena.arena_usage();
    assert_eq!((usage.retired_pages, usage.free_pages), (0, 1));
    assert_eq!((usage.last_generation, usage.wanted_generation), (wanted, wanted));
    // It continues: two colours of the first generation are left.
    let grants: Vec<Grant> = (0..3)
        .map(|_| {
            let grant = arena.create(SPACE, 1).unwrap();
            arena.delete(access(grant, 1), 1).unwrap();
            grant
        })
        .collect();
    let colours: Vec<_> =
        grants.iter().map(|grant| (grant.location.generation(), grant.tag.0)).collect();
    assert_eq!(colours, [(first, 254), (first, 255), (generation(8), 1)]);
    let live = arena.create(SPACE, 1).unwrap();
    assert_eq!(arena.check(access(live, 1)), Ok(()));
    // A pointer with a generation of this arena is stale; another generation's contents are lost.
    for grant in grants.iter().chain([&old]) {
        assert_eq!(arena.check(access(*grant, 1)), Err(Status::StaleTag));
    }
    let at = |number| Location::new(generation(number), 0).unwrap();
    for (number, status) in [
        (6, Status::StaleGeneration),
        (7, Status::StaleTag),
        (9, Status::StaleTag),
        (10, Status::StaleGeneration),
    ] {
        let other = Access { location: at(number), ..access(live, 1) };
        assert_eq!(arena.check(other), Err(status), "{number}");
    }
    assert_eq!(churn(&mut arena, SPACE).1, Status::OutOfMemory, "it is allocated");
    arena.delete(access(live, 1), 1).unwrap();
    assert_eq!(churn(&mut arena, SPACE), (3 * 255 - 2 - OF_PAGE - 4, Status::Overloaded));
}

#[test]
fn neighbours_differ_also_when_colours_run_out() {
    let config = ArenaConfig { quarantine_divisor: u32::MAX, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 3);
    // One page after the other is used up and kept allocated, so that the next one has neighbours.
    let mut grants = Vec::new();
    for page in 0..3 {
        let grant = loop {
            let grant = arena.create(SPACE, 1).unwrap();
            assert_eq!(grant.location.page(), page);
            if u64::from(grant.tag.0) >= OF_PAGE {
                break grant;
            }
            arena.delete(access(grant, 1), 1).unwrap();
        };
        grants.push(grant);
    }
    for pair in grants.windows(2) {
        assert_ne!(pair[0].tag, pair[1].tag);
        assert_eq!(arena.check(all(pair[0], 2)), Err(Status::StaleTag));
    }
}

#[test]
fn retired_pages_can_be_allocated_when_generations_are_reserved() {
    let config =
        ArenaConfig { last_tag: 4, quarantine_divisor: u32::MAX, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 32);
    let one = |arena: &mut Arena| {
        let grant = arena.create(SPACE, 1)?;
        arena.delete(access(grant, 1), 1).map(|_| grant.location.page())
    };
    // When a page is used up the next one is used, and no generation is requested.
    let used: Vec<_> = (0..8).map(|_| one(&mut arena).unwrap()).collect();
    assert_eq!(used, [0, 0, 1, 1, 2, 2, 3, 3]);
    let usage = arena.arena_usage();
    assert_eq!((usage.retired_pages, usage.free_pages, usage.used_pages), (4, 28, 0));
    assert_eq!(usage.wanted_generation, usage.last_generation);
    // The retired pages block a large allocation, and then more generations are requested.
    assert_eq!(arena.create(SPACE, 33), Err(Status::OutOfMemory));
    assert_eq!(arena.create(SPACE, 29), Err(Status::Overloaded));
    let wanted = arena.arena_usage().wanted_generation;
    assert!(wanted > arena.arena_usage().last_generation);
    arena.reserve(wanted);
    let usage = arena.arena_usage();
    assert_eq!((usage.retired_pages, usage.free_pages), (0, 32));
    let grant = arena.create(SPACE, 32).unwrap();
    assert_eq!((grant.location.generation(), grant.tag.0), (generation(0), 3));
    arena.delete(all(grant, 32), 32).unwrap();
    // When a quarter is used up, they are requested before an allocation has to wait.
    let mut count = 0;
    while arena.arena_usage().wanted_generation == wanted {
        one(&mut arena).unwrap();
        count += 1;
    }
    assert_eq!(arena.arena_usage().retired_pages, 9, "{count} allocations");
}

#[test]
fn generations_are_requested_in_advance() {
    let config = ArenaConfig { last_tag: 8, quarantine_divisor: 1, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 16);
    // All pages are used equally: half of the last generation is left then.
    for tag in 1..=5 {
        assert_eq!(arena.arena_usage().wanted_generation, generation(0), "{tag}");
        let grant = arena.create(SPACE, 16).unwrap();
        assert_eq!(grant.tag.0, tag);
        arena.delete(all(grant, 16), 16).unwrap();
    }
    assert_eq!(arena.arena_usage().wanted_generation, generation(2));
    // An arena that uses many requests many, up to a limit.
    for (last, wanted) in [(2, 5), (5, 11), (11, 23), (23, 47), (47, 95), (95, 159), (159, 223)] {
        arena.reserve(generation(last));
        while arena.arena_usage().wanted_generation == generation(last) {
            let grant = arena.create(SPACE, 16).unwrap();
            arena.delete(all(grant, 16), 16).unwrap();
        }
        assert_eq!(arena.arena_usage().wanted_generation, generation(wanted));
    }
    arena.reserve(ArenaGeneration::MAX);
    assert_eq!(arena.arena_usage().wanted_generation, ArenaGeneration::MAX);
}

#[test]
fn a_space_that_may_have_all_memory_gets_out_of_memory_and_not_quota_exceeded() {
    let config = ArenaConfig { default_quota_pages: 4, ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 4);
    assert_eq!(arena.usage(SPACE).quota_pages, 4);
    assert_eq!(arena.create(SPACE, 5), Err(Status::OutOfMemory));
    arena.create(SPACE, 4).unwrap();
    assert_eq!(arena.create(SPACE, 1), Err(Status::OutOfMemory));
}

/// An allocation in the model.
#[derive(Clone, Debug)]
struct Allocation {
    grant: Grant,
    pages: u32,
    stamp: u8,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Create(u32),
    Delete(usize),
    Stale(usize),
    Tidy(u32),
    Write(usize, u8),
    /// Some lines from one on are withheld.
    Withhold(u64, u64),
    /// Some lines of those that are withheld are let go.
    LetGo(usize, u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (1_u32..12).prop_map(Step::Create),
        4 => any::<usize>().prop_map(Step::Delete),
        1 => any::<usize>().prop_map(Step::Stale),
        1 => (0_u32..20).prop_map(Step::Tidy),
        3 => (any::<usize>(), 1_u8..).prop_map(|(which, stamp)| Step::Write(which, stamp)),
        1 => (0..16_u64, 1..4_u64).prop_map(|(line, lines)| Step::Withhold(line, lines)),
        1 => (any::<usize>(), 1..4_u64).prop_map(|(which, lines)| Step::LetGo(which, lines)),
    ]
}

fn run(capacity: u32, steps: &[Step]) -> Result<(), TestCaseError> {
    let mut arena = arena(capacity);
    let mut live: Vec<Allocation> = Vec::new();
    let mut deleted: Vec<Allocation> = Vec::new();
    let mut versions: BTreeMap<u64, u64> = BTreeMap::new();
    let mut withheld: Vec<Range<u64>> = Vec::new();
    for &step in steps {
        match step {
            Step::Create(pages) => {
                let may_be_free = |page: &u64| {
                    let is_live = live.iter().any(|other| {
                        let start = other.grant.location.page();
                        (start..start + u64::from(other.pages)).contains(page)
                    });
                    !is_live && !withheld.iter().any(|range| range.contains(page))
                };
                let free = (0..u64::from(capacity)).filter(may_be_free).count();
                let quarantined = arena.arena_usage().quarantined_pages;
                match arena.create(SPACE, pages) {
                    Ok(grant) => {
                        let first = grant.location.page();
                        for page in first..first + u64::from(pages) {
                            let bytes = arena.read(page, 0..PAGE_BYTES);
                            prop_assert!(bytes.iter().all(|&byte| byte == 0));
                            let taken = live.iter().any(|other| {
                                let start = other.grant.location.page();
                                (start..start + u64::from(other.pages)).contains(&page)
                            });
                            prop_assert!(!taken, "page {} was granted twice", page);
                            let is_withheld = withheld.iter().any(|range| range.contains(&page));
                            prop_assert!(!is_withheld, "page {} was withheld", page);
                            let version = arena.version(page);
                            let before = versions.insert(page, version);
                            prop_assert!(before.is_none_or(|before| before < version));
                        }
                        live.push(Allocation { grant, pages, stamp: 0 });
                    }
                    Err(status) => {
                        prop_assert_eq!(status, Status::OutOfMemory);
                        // Only a fragmented arena may refuse a number of pages that is free.
                        prop_assert!(free < pages as usize || pages > 1);
                        // The quarantine is not given up for what cannot fit.
                        let now = arena.arena_usage().quarantined_pages;
                        prop_assert!(free >= pages as usize || now == quarantined);
                    }
                }
            }
            Step::Delete(which) if !live.is_empty() => {
                let allocation = live.swap_remove(which % live.len());
                let Allocation { grant, pages, .. } = allocation;
                prop_assert_eq!(arena.delete(all(grant, pages), pages), Ok(pages));
                deleted.push(allocation);
            }
            Step::Stale(which) if !deleted.is_empty() => {
                let Allocation { grant, pages, .. } = deleted[which % deleted.len()];
                for page in 0..u64::from(pages) {
                    prop_assert!(arena.check(at_page(access(grant, 1), page)).is_err());
                }
                prop_assert!(arena.delete(access(grant, 1), 0).is_err());
            }
            Step::Tidy(budget) => {
                arena.tidy(budget);
            }
            Step::Withhold(line, lines) => {
                let pages = line * 8..(line + lines) * 8;
                let is_apart =
                    |other: &Range<u64>| other.end <= pages.start || pages.end <= other.start;
                if pages.end <= u64::from(capacity) && withheld.iter().all(is_apart) {
                    arena.withhold(pages.clone(), true);
                    withheld.push(pages);
                }
            }
            Step::LetGo(which, lines) if !withheld.is_empty() => {
                let range = withheld.swap_remove(which % withheld.len());
                let end = range.end.min(range.start + lines * 8);
                arena.withhold(range.start..end, false);
                withheld.extend((end < range.end).then_some(end..range.end));
            }
            Step::Write(which, stamp) if !live.is_empty() => {
                let count = live.len();
                let allocation = &mut live[which % count];
                for page in 0..u64::from(allocation.pages) {
                    let page = allocation.grant.location.page() + page;
                    match stamp % 2 {
                        0 => arena.write(page, 0, &[stamp; PAGE_BYTES]),
                        _ => {
                            let bytes = [stamp; PAGE_BYTES];
                            arena.write_page(page, &bytes, page_crc(&bytes));
                        }
                    }
                    versions.insert(page, arena.version(page));
                }
                allocation.stamp = stamp;
            }
            _ => {}
        }
        let used: u64 = live.iter().map(|allocation| u64::from(allocation.pages)).sum();
        let usage = arena.arena_usage();
        prop_assert_eq!((usage.used_pages, arena.usage(SPACE).used_pages), (used, used));
    }
    for pages in withheld {
        arena.withhold(pages, false);
    }
    let used: u64 = live.iter().map(|allocation| u64::from(allocation.pages)).sum();
    prop_assert_eq!(arena.arena_usage().free_pages, u64::from(capacity) - used);
    for Allocation { grant, pages, stamp } in live {
        prop_assert_eq!(arena.check(all(grant, pages)), Ok(()));
        for page in 0..u64::from(pages) {
            let page = grant.location.page() + page;
            let bytes = arena.read(page, 0..PAGE_BYTES);
            prop_assert!(bytes.iter().all(|&byte| byte == stamp));
            let known = (stamp % 2 == 1).then(|| page_crc(&[stamp; PAGE_BYTES]));
            prop_assert_eq!(arena.page_crc(page), known);
        }
    }
    Ok(())
}

#[test]
fn a_line_shows_its_pages() {
    let mut arena = arena(24);
    assert_eq!(arena.line(17), None, "it does not have all of it");
    let grant = arena.create(SPACE, 2).unwrap();
    arena.note_creator(grant.location, Creator { node: NodeId(5), incarnation: 3 });
    assert!(!arena.line(0).unwrap().is_settled);
    arena.complete(grant.location);
    let long = arena.create(SPACE, 9).unwrap();
    // It began in the line before.
    assert!(!arena.line(8).unwrap().is_settled);
    arena.complete(long.location);
    arena.write(1, 7, b"bytes");
    let freed = arena.create(SPACE, 1).unwrap();
    arena.complete(freed.location);
    arena.write(freed.location.page(), 0, b"left");
    arena.delete(all(freed, 1), 1).unwrap();
    let Line { pages, is_settled } = arena.line(0).unwrap();
    assert!(is_settled);
    let parts = pages.map(|page| page.part);
    assert_eq!(
        parts[..3],
        [Part::First { pages: 2 }, Part::Further { distance: 1 }, Part::First { pages: 9 }]
    );
    let contents = [pages[0].contents, pages[1].contents];
    assert_eq!(contents, [PageContents::Zeros, PageContents::Written]);
    let colour = pages[1].colour;
    assert_eq!(colour, Some((grant.location.generation(), grant.tag)));
    assert_eq!((pages[1].space, pages[1].version), (SPACE, arena.version(1)));
    assert_eq!((pages[0].creator, pages[0].creator_incarnation), (NodeId(5), 3));
    assert_eq!((pages[1].creator, pages[1].creator_incarnation), (NodeId(0), 0));
    let Line { pages, is_settled } = arena.line(8).unwrap();
    assert!(is_settled);
    assert_eq!(pages[2].part, Part::Further { distance: 8 });
    let free = pages[3];
    assert_eq!((free.part, free.contents), (Part::Free, PageContents::Written));
    assert_eq!(free.colour, Some((freed.location.generation(), freed.tag)), "its last one");
    assert_eq!(pages[4].colour, None);
    let bytes = bluebridge_wire::line::emit_line(&pages);
    assert_eq!(bluebridge_wire::line::parse_line(&bytes), Ok(pages));
}

/// Lists all allocations, a few pages at a time.
fn surveyed(arena: &Arena, budget: u32) -> Vec<survey::Allocation> {
    let mut found = Vec::new();
    let mut next = Some(0);
    while let Some(from) = next {
        next = arena.survey(from, budget, &[], &mut |allocation| {
            found.push(allocation);
            true
        });
        assert!(next.is_none_or(|next| next > from), "it continues");
    }
    found
}

#[test]
fn every_allocation_is_shown_once_with_its_creator() {
    let mut arena = arena(64);
    let creator = |node| Creator { node: NodeId(node), incarnation: u32::from(node) * 7 };
    let mut expected = Vec::new();
    for (number, pages) in (1..).zip([1, 3, 8, 1, 16, 2]) {
        let grant = arena.create(SPACE, pages).unwrap();
        arena.note_creator(grant.location, creator(number));
        expected.push(survey::Allocation {
            space: SPACE,
            grant,
            home: None,
            first_page: grant.location.page(),
            pages,
            creator: creator(number),
        });
    }
    let freed = expected.remove(2);
    arena.delete(all(freed.grant, 8), 0).unwrap();
    for budget in [1, 2, 7, 1000] {
        assert_eq!(surveyed(&arena, budget), expected, "{budget}");
    }
    // An allocation for which `each` returned false is shown again from where the survey ended.
    let mut count = 0;
    let next = arena.survey(0, 1000, &[], &mut |_| {
        count += 1;
        count <= 2
    });
    assert_eq!(next, Some(expected[2].grant.location.page()));
    // From a page inside an allocation the survey continues with the next one.
    let inside = expected[1].grant.location.page() + 1;
    let mut first = None;
    arena.survey(inside, 1000, &[], &mut |allocation| {
        first.get_or_insert(allocation);
        false
    });
    assert_eq!(first, Some(expected[2]));
    assert_eq!(arena.survey(64, 1000, &[], &mut |_| true), None);
    assert_eq!(arena.survey(u64::MAX, 1000, &[], &mut |_| true), None);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]

    /// 250 histories of 400 steps: 10^5 operations.
    #[test]
    fn agrees_with_a_model(
        capacity in 8_u32..128,
        steps in prop::collection::vec(step(), 400),
    ) {
        run(capacity, &steps)?;
    }
}
