//! Colours distinguish the allocations of a page.
//!
//! A colour is an arena generation and a tag, as in a pointer. The colours of a page only increase:
//! through the tags of a generation, then through the next reserved generation. So no pointer ever
//! refers to two allocations, even if the server and the controller restart in between.

use bluebridge_wire::{ArenaGeneration, Tag};

/// Colours that a page must have left to be allocated. The two neighbours have at most two of
/// three, so that an access beyond an allocation's end is refused and never reaches the neighbour's
/// bytes.
pub(super) const CHOICE: u32 = 3;

/// A generation (upper bits) and a tag (lower 8 bits). Later colours are greater; the default is
/// the colour of a page that never had one.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Colour(u32);

impl Colour {
    pub(super) const fn new(generation: ArenaGeneration, tag: Tag) -> Self {
        Self((generation.number() as u32) << 8 | tag.0 as u32)
    }

    /// As it is kept.
    pub(super) const fn bits(self) -> u32 {
        self.0
    }

    pub(super) const fn from_bits(bits: u32) -> Self {
        Self(bits)
    }

    const fn parts(self) -> (u32, u32) {
        (self.0 >> 8, self.0 & 0xff)
    }

    /// The generation and the tag of pointers with this colour; `None` for the default.
    pub(super) fn generation_and_tag(self) -> Option<(ArenaGeneration, Tag)> {
        let (generation, tag) = self.parts();
        let generation = ArenaGeneration::new(u16::try_from(generation).ok()?)?;
        Some((generation, Tag(u8::try_from(tag).ok()?)))
    }
}

/// The colours that an arena may use, numbered from 1 in the order of their use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Palette {
    first: ArenaGeneration,
    last: ArenaGeneration,
    last_tag: u32,
}

impl Palette {
    pub(super) fn new(first: ArenaGeneration, last: ArenaGeneration, last_tag: u8) -> Self {
        Self { first, last: last.max(first), last_tag: u32::from(last_tag).max(CHOICE) }
    }

    /// The first generation: older ones belong to lost contents.
    pub(super) const fn first(&self) -> ArenaGeneration {
        self.first
    }

    /// The last reserved generation.
    pub(super) const fn last(&self) -> ArenaGeneration {
        self.last
    }

    /// Adds the generations up to `last`; a smaller one changes nothing. Returns whether it added
    /// any.
    pub(super) fn extend(&mut self, last: ArenaGeneration) -> bool {
        let is_more = last > self.last;
        self.last = self.last.max(last);
        is_more
    }

    /// Whether pointers of this generation refer to the current contents.
    pub(super) fn holds(&self, generation: ArenaGeneration) -> bool {
        (self.first..=self.last).contains(&generation)
    }

    /// Whether an allocation can have this colour.
    pub(super) fn holds_colour(&self, colour: Colour) -> bool {
        let tag = colour.parts().1;
        (1..=self.last_tag).contains(&tag)
            && colour.generation_and_tag().is_some_and(|(generation, _)| self.holds(generation))
    }

    /// Reserved generations.
    pub(super) const fn generation_count(&self) -> u16 {
        self.last.number() - self.first.number() + 1
    }

    /// Generations that can still be reserved.
    pub(super) const fn generations_left(&self) -> u16 {
        ArenaGeneration::MAX.number() - self.last.number()
    }

    /// The number of a colour; 0 for the default.
    pub(super) const fn number(&self, colour: Colour) -> u32 {
        let (generation, tag) = colour.parts();
        generation.saturating_sub(self.first.number() as u32) * self.last_tag + tag
    }

    /// The colour with a number from 1 to [`Self::count`].
    pub(super) fn colour(&self, number: u32) -> (ArenaGeneration, Tag) {
        let before = number.saturating_sub(1);
        let generation = u16::try_from(before / self.last_tag).unwrap_or(u16::MAX);
        let tag = u8::try_from(before % self.last_tag + 1).unwrap_or(u8::MAX);
        (self.first.saturating_add(generation), Tag(tag))
    }

    /// Colours of a page in the reserved generations.
    pub(super) const fn count(&self) -> u32 {
        self.generation_count() as u32 * self.last_tag
    }

    /// Colours of a page in a generation.
    pub(super) const fn of_generation(&self) -> u32 {
        self.last_tag
    }

    /// How often a page can be allocated alone until all generations of the server are used up.
    pub(super) const fn allocations_of_page(&self) -> u64 {
        let all = self.count() + self.generations_left() as u32 * self.last_tag;
        (all - CHOICE + 1) as u64
    }

    /// Whether a page that had this colour may be allocated again.
    pub(super) const fn is_usable(&self, colour: Colour) -> bool {
        self.count().saturating_sub(self.number(colour)) >= CHOICE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generation(number: u16) -> ArenaGeneration {
        ArenaGeneration::new(number).unwrap()
    }

    #[test]
    fn numbers_and_colours_lead_to_each_other() {
        for (first, last, last_tag) in [(0, 0, 255), (7, 9, 255), (5, 40, 3), (32_766, 32_767, 255)]
        {
            let palette = Palette::new(generation(first), generation(last), last_tag);
            assert_eq!(palette.number(Colour::default()), 0);
            let mut before = Colour::default();
            for number in 1..=palette.count() {
                let (generation, tag) = palette.colour(number);
                let colour = Colour::new(generation, tag);
                assert!(colour > before && palette.holds(generation));
                assert!((1..=last_tag).contains(&tag.0));
                assert_eq!(palette.number(colour), number);
                before = colour;
            }
            assert_eq!(before, Colour::new(generation(last), Tag(last_tag)));
        }
    }

    #[test]
    fn the_last_generation_only_increases() {
        let mut palette = Palette::new(generation(7), generation(3), 255);
        assert_eq!((palette.first(), palette.last()), (generation(7), generation(7)));
        let last = Colour::new(generation(7), Tag(255));
        assert!(!palette.is_usable(last));
        assert!(palette.is_usable(Colour::new(generation(7), Tag(252))));
        assert!(!palette.is_usable(Colour::new(generation(7), Tag(253))));
        assert!(palette.extend(generation(9)) && !palette.extend(generation(8)));
        assert_eq!((palette.last(), palette.generation_count()), (generation(9), 3));
        assert!(palette.is_usable(last));
        assert_eq!(palette.allocations_of_page(), (32_768 - 7) * 255 - 2);
    }
}
