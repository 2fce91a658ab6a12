//! Pages that are read in the background, before a fault asks for them: `background.rs` of the pager.

use super::{
    Mutant, Scenario,
    model::Choice,
    world::{State, Version, Word, World},
};

/// What the background thread does with its only buffer.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub(super) enum Background {
    #[default]
    Idle,
    /// It has seen the word of a page that is stored.
    Seen { page: usize, word: Word },
    /// It knows where the page is stored.
    Located { page: usize, word: Word, pointer: Option<u8> },
    /// It has read the page without knowing its word: only a mistake gets here.
    Unseen { page: usize, contents: Version },
    /// A fault may take the contents, if the word is still the same.
    Ready { page: usize, word: Word, contents: Version },
}

impl Scenario {
    /// The next step of the background thread; `page` is what it begins to read if it is idle.
    pub(super) fn background(&self, world: &mut World, page: usize, choice: Choice) -> Option<()> {
        world.background = match (world.background, choice) {
            // It may read another page instead of one that no fault took.
            (Background::Idle | Background::Ready { .. }, Choice::Go) => {
                world.background_reads = world.background_reads.checked_sub(1)?;
                let word = world.pages[page].word;
                if word.state != State::Remote {
                    return None;
                }
                Background::Seen { page, word }
            }
            (Background::Seen { page, word }, Choice::Go) => {
                Background::Located { page, word, pointer: world.base }
            }
            (Background::Located { page, word, pointer }, Choice::Go) => {
                let server = world.server.filter(|server| Some(server.id) == pointer);
                match server.map(|server| server.contents[page]) {
                    Some(contents) if self.has(Mutant::BackgroundWordLate) => {
                        Background::Unseen { page, contents }
                    }
                    Some(contents) => Background::Ready { page, word, contents },
                    None => Background::Idle,
                }
            }
            (Background::Unseen { page, contents }, Choice::Go) => {
                Background::Ready { page, word: world.pages[page].word, contents }
            }
            (Background::Located { .. }, Choice::Fail) => {
                world.failures = world.failures.checked_sub(1)?;
                Background::Idle
            }
            _ => return None,
        };
        Some(())
    }

    /// Takes what was read in the background for a page that was claimed when its word was `was`.
    pub(super) fn take_background(
        &self,
        world: &mut World,
        page: usize,
        was: Word,
    ) -> Option<Version> {
        let Background::Ready { page: read, word, contents } = world.background else {
            return None;
        };
        let is_same = match () {
            () if self.has(Mutant::BackgroundUnchecked) => true,
            // The state, and where the page is stored.
            () if self.has(Mutant::BackgroundGeneration) => word.state == was.state,
            () => word == was,
        };
        // What was read may be from the extent's next allocation: that is possible only after the mark.
        let is_forgotten = world.pages[page].word.is_forgotten;
        if read != page || !is_same || is_forgotten && !self.has(Mutant::BackgroundForgotten) {
            return None;
        }
        world.background = Background::Idle;
        Some(contents)
    }
}

impl World {
    /// A page is written with a generation. If it has come round to that which the background thread saw, so much time has
    /// passed that what the thread read is too old for any fault.
    pub(super) fn expire_background(&mut self, page: usize, generation: u8) {
        match self.background {
            Background::Seen { page: read, word }
            | Background::Located { page: read, word, .. }
            | Background::Ready { page: read, word, .. }
                if read == page && word.generation == generation =>
            {
                self.background = Background::Idle;
            }
            _ => {}
        }
    }
}
