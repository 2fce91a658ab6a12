//! Records of lines and fences: what is emitted can be parsed, and what no server emits is refused.

use bluebridge_wire::{
    ArenaGeneration, Fence, LinePage, NodeId, Space, Tag,
    address::LINE_PAGES,
    line::{
        FENCES_MAX, LINE_RECORD_BYTES, LineError, LineRecord, PAGE_RECORD_BYTES, PageContents,
        Part, emit_line, parse_line,
    },
};
use proptest::{collection::vec, prelude::*};

/// Allocations, free pages among them, from which a line is cut.
#[derive(Clone, Debug)]
struct Stretch {
    pages: u32,
    is_allocated: bool,
    colour: Option<(ArenaGeneration, Tag)>,
    space: Space,
    creator: (NodeId, u32),
    each: Vec<(u64, PageContents)>,
}

fn stretches() -> impl Strategy<Value = Vec<Stretch>> {
    let contents = prop_oneof![
        Just(PageContents::Zeros),
        Just(PageContents::Leftover),
        Just(PageContents::Written)
    ];
    let colour = (0..=ArenaGeneration::MAX.number(), 1_u8..).prop_map(|(number, tag)| {
        (ArenaGeneration::new(number).expect("it is in the range"), Tag(tag))
    });
    let head = (1..20_u32, any::<bool>(), proptest::option::of(colour));
    let rest =
        (any::<u16>(), any::<u16>(), any::<u32>(), vec((any::<u64>(), contents), LINE_PAGES));
    let stretch = (head, rest).prop_map(|((pages, is_wanted, colour), (space, node, by, each))| {
        let is_allocated = is_wanted && colour.is_some();
        let (space, creator) = (Space(space), (NodeId(node), by));
        Stretch { pages, is_allocated, colour, space, creator, each }
    });
    vec(stretch, 30)
}

/// The line that begins `skipped` pages behind the start of the first stretch.
fn line_of(stretches: &[Stretch], skipped: usize) -> LineRecord {
    let pages: Vec<LinePage> = stretches
        .iter()
        .flat_map(|stretch| {
            (0..stretch.pages).map(move |number| {
                let part = match number {
                    _ if !stretch.is_allocated => Part::Free,
                    0 => Part::First { pages: stretch.pages },
                    distance => Part::Further { distance },
                };
                let is_first = matches!(part, Part::First { .. });
                let (creator, creator_incarnation) =
                    if is_first { stretch.creator } else { Default::default() };
                let (version, contents) = stretch.each[number as usize % LINE_PAGES];
                let (colour, space) = (stretch.colour, stretch.space);
                LinePage { version, part, colour, space, contents, creator, creator_incarnation }
            })
        })
        .collect();
    *pages[skipped..].first_chunk().expect("30 stretches are longer")
}

proptest! {
    #[test]
    fn a_line_is_parsed_as_it_was_emitted(stretches in stretches(), skipped in 0..20_usize) {
        let line = line_of(&stretches, skipped);
        prop_assert_eq!(parse_line(&emit_line(&line)), Ok(line));
    }

    #[test]
    fn what_is_parsed_is_emitted_again(bytes in vec(any::<u8>(), LINE_RECORD_BYTES)) {
        // Small codes, so that some of the lines are lines.
        let mut bytes = bytes;
        for page in bytes.chunks_mut(PAGE_RECORD_BYTES) {
            let link = page[11] % 3;
            page[8..12].copy_from_slice(&[0, 0, 0, link]);
            (page[17], page[18]) = (page[17] % 3, page[18] % 3);
        }
        if let Ok(line) = parse_line(&bytes) {
            prop_assert_eq!(parse_line(&emit_line(&line)), Ok(line));
        }
    }

    #[test]
    fn any_bytes_are_parsed_or_refused(bytes in vec(any::<u8>(), 0..600)) {
        let is_line = parse_line(&bytes).is_ok();
        prop_assert!(!is_line || bytes.len() == LINE_RECORD_BYTES);
        prop_assert_eq!(Fence::parse_all(&bytes).count(), bytes.len() / 8);
    }

    #[test]
    fn fences_are_parsed_as_they_were_emitted(fences in vec((any::<u16>(), any::<u32>()), 0..=FENCES_MAX)) {
        let fences: Vec<_> = fences
            .into_iter()
            .map(|(node, incarnation)| Fence { node: NodeId(node), incarnation })
            .collect();
        let bytes: Vec<u8> = fences.iter().flat_map(|fence| fence.emit()).collect();
        prop_assert!(bytes.len() <= LINE_RECORD_BYTES);
        prop_assert_eq!(Fence::parse_all(&bytes).collect::<Vec<_>>(), fences);
    }
}

fn allocated(part: Part) -> LinePage {
    let colour = ArenaGeneration::new(1).map(|generation| (generation, Tag(1)));
    LinePage { part, colour, ..LinePage::default() }
}

const FIRST_OF_2: Part = Part::First { pages: 2 };
const FIRST_OF_3: Part = Part::First { pages: 3 };

fn further(distance: u32) -> LinePage {
    allocated(Part::Further { distance })
}

/// A line that begins with these pages; the others are free.
fn beginning(pages: &[LinePage]) -> LineRecord {
    let mut line = LineRecord::default();
    line[..pages.len()].copy_from_slice(pages);
    line
}

#[test]
fn allocations_that_contradict_each_other_are_refused() {
    let free = LinePage::default();
    let other_colour = LinePage {
        colour: ArenaGeneration::new(1).map(|generation| (generation, Tag(2))),
        ..further(1)
    };
    let other_space = LinePage { space: Space(1), ..further(1) };
    let single = allocated(Part::First { pages: 1 });
    let cases = [
        (vec![allocated(FIRST_OF_2), free], 1),
        (vec![allocated(FIRST_OF_3), further(1), free], 2),
        (vec![allocated(FIRST_OF_3), further(2)], 1),
        (vec![allocated(FIRST_OF_2), further(1), further(2)], 2),
        (vec![allocated(FIRST_OF_2), allocated(FIRST_OF_2)], 1),
        (vec![single, further(1)], 1),
        (vec![further(4), further(4)], 1),
        (vec![further(4), further(6)], 1),
        (vec![further(u32::MAX), further(1)], 1),
        (vec![free, further(1)], 1),
        (vec![allocated(FIRST_OF_2), other_colour], 1),
        (vec![allocated(FIRST_OF_2), other_space], 1),
    ];
    for (pages, page) in cases {
        let parsed = parse_line(&emit_line(&beginning(&pages)));
        assert_eq!(parsed, Err(LineError::Contradiction(page)), "{pages:?}");
    }
    let sound = beginning(&[further(4), further(5), single, allocated(FIRST_OF_2), further(1)]);
    assert_eq!(parse_line(&emit_line(&sound)), Ok(sound));
}

#[test]
fn undefined_codes_are_refused() {
    let line = beginning(&[further(4), allocated(FIRST_OF_2), further(1)]);
    let bytes = emit_line(&line);
    let damaged = |at: usize, value: u8| {
        let mut bytes = bytes;
        bytes[at] = value;
        parse_line(&bytes)
    };
    let second = PAGE_RECORD_BYTES;
    // The part, the contents, the pages of the allocation, a generation of 16 bits, no tag.
    for (at, value) in [(17, 3), (18, 3), (11, 0), (12, 0x80), (16, 0)] {
        assert_eq!(damaged(second + at, value), Err(LineError::Page(1)), "byte {at}");
    }
    // Bytes without a meaning may get one.
    for at in [19, 22, 23, 28, 29, 30, 31] {
        assert_eq!(damaged(second + at, 0xff), Ok(line), "byte {at}");
    }
    assert_eq!(parse_line(&bytes[1..]), Err(LineError::Length(LINE_RECORD_BYTES - 1)));
}
