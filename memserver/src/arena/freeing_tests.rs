//! Allocations of which lines are elsewhere are freed, one fact after the other. `crash_tests` kills processes meanwhile.

#![allow(clippy::cast_possible_truncation, reason = "the numbers of these tests are small")]

use bluebridge_protocol::store::{HomeLine, LineStore as _, StageError, Taken};
use bluebridge_wire::{
    LinePage, NodeId, Tag,
    address::LINE_BYTES,
    line::{LineRecord, PageContents, Part},
};

use super::*;

const SPACE: Space = Space(7);

#[test]
fn memory_of_a_line_of_which_no_page_is_allocated_is_used_for_others() {
    let mut arena = Arena::on_heap(&ArenaConfig::default(), 16);
    let place = arena.lines_mut().reserve(1).unwrap()[0].start;
    let part = |at: usize| match at {
        0 => Part::First { pages: 5 },
        1..5 => Part::Further { distance: at as u32 },
        _ => Part::Free,
    };
    let generation = ArenaGeneration::new(40).unwrap();
    let colour = Some((generation, Tag(9)));
    let record: LineRecord = core::array::from_fn(|at| LinePage {
        part: part(at),
        colour,
        space: SPACE,
        contents: PageContents::Written,
        ..LinePage::default()
    });
    let home = HomeLine { node: NodeId(30), generation, first_page: 64 };
    let name = (home, Taken { migration: 1, epoch: 2 });
    assert_eq!(arena.stage_with(place, name, &record, &[7; LINE_BYTES]), Ok(()));
    arena.adopt(place);
    assert_eq!(arena.arena_usage().free_pages, 8);
    // It is listed if its home has lost it, after those of this server.
    let own = arena.create(SPACE, 2).unwrap();
    let listed = |arena: &Arena, lost: &[(NodeId, ArenaGeneration)], budget| {
        let (mut all, mut next) = (Vec::new(), Some(0));
        while let Some(from) = next {
            next = arena.survey(from, budget, lost, &mut |of| {
                all.push((of.home, of.grant.location.page(), of.first_page, of.pages));
                true
            });
        }
        all
    };
    let of_own = (None, own.location.page(), own.location.page(), 2);
    for budget in [1, 3, 1000] {
        assert_eq!(listed(&arena, &[], budget), [of_own]);
        let lost = [(NodeId(30), home.generation)];
        assert_eq!(listed(&arena, &lost, budget), [of_own, (Some(NodeId(30)), 64, place, 5)]);
        assert_eq!(listed(&arena, &[(NodeId(31), home.generation)], budget), [of_own]);
    }
    let of_own = Access { location: own.location, length_bytes: 1, tag: own.tag, space: SPACE };
    assert_eq!(arena.delete(of_own, 2), Ok(2));
    // From the end on; the first page is the last one.
    arena.begin_freeing(place);
    let freeing = |arena: &Arena| {
        let mut all = Vec::new();
        arena.freeings(&mut |page, access, pages| all.push((page, access.tag, pages)));
        all
    };
    assert_eq!(freeing(&arena), [(place, Tag(9), 5)]);
    arena.free_part(place + 3..place + 5);
    assert_eq!((arena.arena_usage().free_pages, freeing(&arena).len()), (8, 1));
    arena.free_part(place..place + 3);
    assert_eq!((arena.arena_usage().free_pages, freeing(&arena).len()), (16, 0));
    let location = |page: u64| Location::new(generation, page << PAGE_SHIFT).unwrap();
    let access =
        |page| Access { location: location(page), length_bytes: 1, tag: Tag(9), space: SPACE };
    assert_eq!(arena.check(access(place)), Err(Status::NotAllocated));
    assert_eq!(arena.pages_of_allocation(access(place), 0), Err(Status::NotAllocated));
    // It is this server's still, and goes on as a free one.
    let line = arena.line(place).unwrap();
    assert!(line.pages.iter().all(|page| page.part == Part::Free && page.colour == colour));
    assert!(arena.create(SPACE, 16).is_ok(), "all memory is used");
    arena.give(place);
    assert!(!arena.is_free(place), "it moves on");
    arena.clear_given(place..place + 8);
    let mut placed = 0;
    arena.placed(&mut |_, _| placed += 1);
    assert_eq!(placed, 0);
}

#[test]
fn a_free_line_of_another_server_is_forgotten_and_its_place_is_used_again() {
    let mut arena = Arena::on_heap(&ArenaConfig::default(), 16);
    let places = arena.lines_mut().reserve(2).unwrap();
    let generation = ArenaGeneration::new(40).unwrap();
    let home = |first_page| HomeLine { node: NodeId(30), generation, first_page };
    let taken = Taken { migration: 1, epoch: 2 };
    let first = places[0].start;
    let page = LinePage { part: Part::First { pages: 1 }, space: SPACE, ..LinePage::default() };
    let used = [LinePage { colour: Some((generation, Tag(9))), ..page }; 8];
    assert_eq!(arena.stage_with(first, (home(64), taken), &used, &[7; LINE_BYTES]), Ok(()));
    arena.discard(first);
    assert!(!arena.is_free(first), "it is on its way");
    arena.adopt(first);
    arena.discard(first);
    assert!(
        arena
            .check(Access {
                location: Location::new(generation, first << PAGE_SHIFT).unwrap(),
                length_bytes: 1,
                tag: Tag(9),
                space: SPACE
            })
            .is_ok()
    );
    assert_eq!(arena.arena_usage().adopted_lines, 2, "one is reserved");
    for page in first..first + 8 {
        arena.free_part(page..page + 1);
    }
    assert!(arena.is_free(first) && !arena.is_free(0) && !arena.is_free(first + 8));
    arena.discard(first);
    assert!(!arena.is_free(first));
    assert_eq!(arena.arena_usage().adopted_lines, 1);
    arena.release(first + 8..first + 16);
    let ArenaUsage { adopted_lines, free_pages, .. } = arena.arena_usage();
    assert_eq!((adopted_lines, free_pages), (0, 16));
    assert_eq!(arena.lines_mut().reserve(2), Some(places), "both places are free");
}

#[test]
fn an_own_line_that_nobody_has_is_used_again_with_other_colours() {
    let mut arena = Arena::on_heap(&ArenaConfig::default(), 16);
    let grant = arena.create(SPACE, 16).unwrap();
    arena.complete(grant.location);
    arena.withhold(8..16, true);
    arena.give(8);
    assert!(!arena.is_free(8), "its memory may be in use still");
    arena.clear_given(8..16);
    assert!(!arena.is_free(8), "it is allocated");
    arena.discard(8);
    arena.begin_freeing(0);
    arena.end_freeing(0);
    assert!(arena.is_free(8) && !arena.is_free(0), "the other one is here");
    assert!(arena.reserve_own(8..16));
    assert!(!arena.is_free(8), "it is on its way home");
    arena.release(8..16);
    arena.discard(8);
    assert!(!arena.is_free(8));
    assert_eq!(arena.arena_usage().free_pages, 16);
    let again = [(); 2].map(|()| arena.create(SPACE, 8).unwrap());
    let mut pages = again.map(|of| of.location.page());
    pages.sort_unstable();
    assert_eq!(pages[0], 0, "the line that was here");
    assert!(again.iter().all(|of| *of != grant && of.tag != grant.tag));
}

#[test]
fn an_allocation_is_freed_of_which_a_line_is_elsewhere() {
    let config = ArenaConfig { quotas: vec![(SPACE, 20)], ..ArenaConfig::default() };
    let mut arena = Arena::on_heap(&config, 32);
    let grant = arena.create(SPACE, 20).unwrap();
    arena.complete(grant.location);
    let record = arena.line(8).unwrap().pages;
    arena.withhold(8..16, true);
    arena.give(8);
    arena.clear_given(8..16);
    let access = Access { location: grant.location, length_bytes: 1, tag: grant.tag, space: SPACE };
    for (wrong, pages, status) in [
        (access, 19, Status::BadLength),
        (Access { tag: Tag(grant.tag.0 + 1), ..access }, 0, Status::StaleTag),
        (Access { space: Space(77), ..access }, 0, Status::WrongSpace),
    ] {
        assert_eq!(arena.pages_of_allocation(wrong, pages), Err(status));
    }
    assert_eq!(arena.pages_of_allocation(access, 0), Ok(20));
    arena.begin_freeing(0);
    assert!(!arena.line(0).unwrap().is_settled, "none of it is given away");
    let home = HomeLine { node: NodeId(3), generation: ArenaGeneration::default(), first_page: 8 };
    let name = (home, Taken { migration: 1, epoch: 2 });
    assert!(arena.reserve_own(8..16));
    let staged = arena.stage_with(8, name, &record, &[7; LINE_BYTES]);
    assert_eq!(staged, Err(StageError::BeingFreed(0)), "it may be free at its former server");
    arena.release(8..16);
    arena.end_freeing(0);
    assert_eq!(arena.usage(SPACE).used_pages, 0);
    let again = arena.create(SPACE, 20).expect("other lines have its memory");
    assert_ne!(again, grant);
    assert_eq!(
        arena.delete(Access { location: again.location, tag: again.tag, ..access }, 20),
        Ok(20)
    );
    // The line comes back as the other server left it.
    let free = record.map(|page| LinePage { part: Part::Free, ..page });
    assert!(arena.reserve_own(8..16));
    assert_eq!(arena.stage_with(8, name, &free, &[7; LINE_BYTES]), Ok(()));
    arena.adopt(8);
    let usage = arena.arena_usage();
    assert_eq!((usage.used_pages, usage.free_pages), (0, 32));
}

/// Whoever had the first page freed it while this server was away.
#[test]
fn an_allocation_that_was_freed_elsewhere_is_found_when_a_line_comes_home() {
    let mut arena = Arena::on_heap(&ArenaConfig::default(), 32);
    let grant = arena.create(SPACE, 20).unwrap();
    arena.complete(grant.location);
    let record = arena.line(8).unwrap().pages;
    arena.withhold(0..24, true);
    for line in [0, 8, 16] {
        arena.give(line);
    }
    arena.clear_given(0..24);
    assert!(arena.reserve_own(8..16));
    let home = HomeLine { node: NodeId(3), generation: ArenaGeneration::default(), first_page: 8 };
    let name = (home, Taken { migration: 1, epoch: 2 });
    let free = record.map(|page| LinePage { part: Part::Free, ..page });
    let bytes = [7; LINE_BYTES];
    assert_eq!(arena.stage_with(8, name, &free, &bytes), Err(StageError::FreedElsewhere(0)));
    // A client may have misused DELETE.
    let mut half = record;
    half[3..6].copy_from_slice(&free[3..6]);
    assert_eq!(arena.stage_with(8, name, &half, &bytes), Err(StageError::FreedElsewhere(3)));
    // Another allocation was never there.
    let other = record.map(|page| LinePage { colour: Some((home.generation, Tag(77))), ..page });
    assert_eq!(arena.stage_with(8, name, &other, &bytes), Err(StageError::Contradiction(0)));
    arena.begin_freeing(0);
    assert_eq!(arena.stage_with(8, name, &free, &bytes), Err(StageError::BeingFreed(0)));
    arena.end_freeing(0);
    assert_eq!(arena.stage_with(8, name, &free, &bytes), Ok(()));
    arena.adopt(8);
    assert_eq!(arena.arena_usage().free_pages, 32);
}
