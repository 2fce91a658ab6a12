//! What a device may do with a chain of READs.

use super::world::World;

/// Which promises it keeps.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Order {
    /// A READ begins when the one before has been executed, and words of eight bytes are whole.
    Words,
    /// A READ begins when the one before has been executed; its bytes come in any order.
    Reads,
    /// None: the bytes of all READs come in any order.
    None,
}

/// The bytes of a place: the record and the page.
pub(crate) const BYTES: usize = 64;
/// Of these, the record.
pub(crate) const RECORD: usize = 32;

/// What a chain fetched.
#[derive(Clone, Copy)]
pub(crate) struct Fetched {
    pub(crate) before: [u8; RECORD],
    pub(crate) page: [u8; BYTES - RECORD],
    pub(crate) after: [u8; RECORD],
}

/// A piece: where it is read in the place, and where it goes.
#[derive(Clone, Copy, Default)]
struct Piece {
    from: u8,
    into: u8,
    bytes: u8,
}

/// Pieces of one byte of two records and a page.
const PIECES_MAX: usize = RECORD * 2 + BYTES - RECORD;

/// Executes a chain on a place; the server goes on meanwhile.
pub(crate) fn fetch(world: &mut World, place: usize, order: Order, page_first: bool) -> Fetched {
    let mut pieces = [Piece::default(); PIECES_MAX];
    let mut count = 0;
    // (from, into): the records and the page in the order of the chain.
    let mut reads = [(0, 0), (RECORD, RECORD), (0, BYTES)];
    if page_first {
        reads.swap(0, 1);
    }
    let smallest = if order == Order::Words { 3 } else { 0 };
    for (from, into) in reads {
        // 1 to 32 bytes.
        let bytes = 1 << (smallest + world.random.below(6 - smallest));
        let first = count;
        for at in (0..RECORD).step_by(bytes) {
            let byte = |at: usize| u8::try_from(at).expect("small");
            pieces[count] =
                Piece { from: byte(from + at), into: byte(into + at), bytes: byte(bytes) };
            count += 1;
        }
        if order != Order::None {
            world.random.shuffle(&mut pieces[first..count]);
        }
    }
    if order == Order::None {
        world.random.shuffle(&mut pieces[..count]);
    }
    let pieces = &pieces[..count];
    let pace = world.random.below(4);
    let burst_at = world.random.below(count as u64);
    let mut all = [0; BYTES + RECORD];
    for (piece, number) in pieces.iter().zip(0..) {
        let Piece { from, into, bytes } = *piece;
        let (from, into, bytes) = (usize::from(from), usize::from(into), usize::from(bytes));
        all[into..into + bytes].copy_from_slice(&world.memory(place)[from..from + bytes]);
        let steps = match pace {
            0 => 0,
            1 => u64::from(world.random.one_of(8)),
            2 => world.random.below(3),
            _ if number == burst_at => 40,
            _ => 0,
        };
        for _ in 0..steps {
            world.step();
        }
    }
    let (before, rest) = all.split_first_chunk().expect("long enough");
    let (page, after) = rest.split_first_chunk().expect("long enough");
    Fetched { before: *before, page: *page, after: after.try_into().expect("a record") }
}
