//! The server's memory, what it does with its pages, and what each page has at every moment.

use std::collections::VecDeque;

use bluebridge_protocol::one_sided::{Marks, PageName, PageRecord};
use bluebridge_wire::{NodeId, Space};

use super::{Mutant, Random, Scenario, fabric::BYTES, mix};

/// The words of a page.
type Content = [u64; 4];

const PLACES: usize = 2;
const OWN_SPACE: Space = Space(3);
const OTHER_SPACE: Space = Space(4);
/// Versions whose contents are remembered.
const VERSIONS: usize = 256;

/// The words of a place: the record's, then the page's.
const SEQUENCE: usize = 0;
const CHECKS: usize = 1;
const NAME: usize = 2;
const REST: usize = 3;
const PAGE: usize = 4;

/// What a place is used for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Use {
    Free,
    /// Its allocation is not complete.
    Incomplete,
    Served,
    /// A client changes it, and the server learns of that with the next commit.
    Leased,
    /// Another server serves it.
    Away,
    /// Another server serves it, and another home's page has the memory.
    Reused,
}

/// One step of the server, its clients, or another server.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    place: usize,
    /// A store: the word's number and value.
    store: Option<(usize, u64)>,
    /// What a page has from now on; nothing if there is no such page.
    truth: Option<(PageName, Option<Content>)>,
    /// What this version of the place contains.
    version: Option<Version>,
}

/// What a version of a page contains.
type Version = (u64, PageName, Content);

/// A place as it is after all steps that are planned.
#[derive(Clone, Copy, Debug)]
struct Place {
    used: Use,
    record: PageRecord,
    /// What the memory contains.
    home: Content,
    /// The page that the server's own allocations have here, and the one that another home's line has.
    own: PageName,
    other: PageName,
}

pub(crate) struct World {
    pub(super) random: Random,
    scenario: Scenario,
    memory: [[u8; BYTES]; PLACES],
    places: [Place; PLACES],
    plan: VecDeque<Step>,
    /// What each name has now; names that are not there have nothing.
    truths: Vec<(PageName, Content)>,
    versions: Vec<[Option<Version>; VERSIONS]>,
    changes: [u64; PLACES],
    colours: u32,
    words: u64,
    /// What the reader wants, and what that had since it began.
    watched: (usize, PageName),
    had: Vec<Content>,
}

impl World {
    pub(crate) fn new(scenario: Scenario) -> Self {
        let name = |home, page| PageName { space: OWN_SPACE, home: NodeId(home), page, colour: 0 };
        let places = [0, 1].map(|page| {
            let (own, other) = (name(1, page), name(2, page + 7));
            let record =
                PageRecord { sequence: 0, page_crc: 0, name: own, marks: Marks::default() };
            Place { used: Use::Free, record, home: [0; 4], own, other }
        });
        Self {
            random: Random::new(scenario.seed),
            scenario,
            memory: [[0; BYTES]; PLACES],
            places,
            plan: VecDeque::new(),
            truths: Vec::new(),
            versions: vec![[None; VERSIONS]; PLACES],
            changes: [0; PLACES],
            colours: 0,
            words: 0,
            watched: (0, name(1, 0)),
            had: Vec::new(),
        }
    }

    pub(super) fn memory(&self, place: usize) -> &[u8; BYTES] {
        &self.memory[place]
    }

    /// How often a word of the place's page was stored.
    pub(super) fn changes(&self, place: usize) -> u64 {
        self.changes[place]
    }

    /// A page that a reader may want, and where it looks for it.
    pub(super) fn choose(&mut self) -> (usize, PageName) {
        let place = usize::from(self.random.one_of(2));
        let Place { own, other, .. } = self.places[place];
        let mut wanted = match self.random.below(20) {
            0..15 => own,
            _ => other,
        };
        match self.random.below(30) {
            0 => wanted.colour = wanted.colour.saturating_sub(1),
            1 => wanted.space = OTHER_SPACE,
            _ => {}
        }
        (place, wanted)
    }

    /// Notes from now on what the page has. Returns [`Self::changes`].
    pub(super) fn begin_watch(&mut self, place: usize, wanted: PageName) -> u64 {
        self.watched = (place, wanted);
        self.had.clear();
        let now = self.truths.iter().find(|(name, _)| *name == wanted);
        self.had.extend(now.map(|(_, content)| *content));
        self.changes[place]
    }

    /// Checks what a reader accepted.
    pub(super) fn must_have_been(&self, page: &[u8; 32], version: u64) -> Result<(), String> {
        let (words, _) = page.as_chunks();
        let content: Content = std::array::from_fn(|word| u64::from_le_bytes(words[word]));
        if !self.had.contains(&content) {
            return Err(format!("it had {:x?}, and {content:x?} was accepted", self.had));
        }
        let slot = slot(version);
        let (place, name) = self.watched;
        match self.versions[place][slot] {
            // Of a page that was there before.
            Some((_, of, _)) if of != name => Ok(()),
            Some(known) if known == (version, name, content) => Ok(()),
            known => Err(format!("version {version} has {known:x?}, not {content:x?}")),
        }
    }

    /// One step of the server or of others, after which a piece of a READ may be fetched.
    pub(super) fn step(&mut self) {
        while self.plan.is_empty() {
            self.begin();
        }
        let Some(Step { place, store, truth, version }) = self.plan.pop_front() else { return };
        if let Some((word, value)) = store {
            self.memory[place][word * 8..][..8].copy_from_slice(&value.to_le_bytes());
            self.changes[place] += u64::from(word >= PAGE);
        }
        if let Some(version) = version {
            self.versions[place][slot(version.0)] = Some(version);
        }
        if let Some((name, content)) = truth {
            self.truths.retain(|(known, _)| *known != name);
            self.truths.extend(content.map(|content| (name, content)));
            if self.watched.1 == name {
                self.had.extend(content);
            }
        }
    }

    fn push(&mut self, step: Step) {
        self.plan.push_back(step);
    }

    /// Stores of words of the record as it will be.
    fn store_record(&mut self, place: usize, words: &[usize]) {
        let values = self.places[place].record.words();
        for word in words {
            self.push(Step {
                place,
                store: Some((*word, u64::from_le(values[*word]))),
                ..Step::default()
            });
        }
    }

    /// Adds something to the last planned step.
    fn with_last(&mut self, change: impl FnOnce(&mut Step)) {
        change(self.plan.back_mut().expect("a step is planned"));
    }

    fn says(&mut self, name: PageName, content: Option<Content>) {
        self.with_last(|step| step.truth = Some((name, content)));
    }

    /// A change of the page under its sequence: name, marks, and bytes. The page has `truth` with its end.
    fn change(
        &mut self,
        place: usize,
        (name, marks): (PageName, Marks),
        content: Option<Content>,
        truth: Option<(PageName, Option<Content>)>,
    ) {
        let old = self.places[place];
        let home = content.unwrap_or(old.home);
        let crc = if marks.has(Marks::WRITTEN) { crc_of_content(&home) } else { 0 };
        let sequence = old.record.sequence + 2;
        self.places[place].record = PageRecord { sequence, page_crc: crc, name, marks };
        self.places[place].home = home;
        let is_reuse = name == old.other && old.record.name != name;
        if is_reuse && self.scenario.has(Mutant::ReusedWithoutSequence) {
            self.places[place].record.sequence -= 2;
            self.store_page(place, &old.home, &home);
            self.store_record(place, &[NAME, REST, CHECKS]);
        } else {
            let odd = Some((SEQUENCE, old.record.sequence + 1));
            self.push(Step { place, store: odd, ..Step::default() });
            let is_early = self.scenario.has(Mutant::EvenBeforeBytes);
            if is_early {
                self.store_record(place, &[NAME, REST, CHECKS, SEQUENCE]);
            }
            let first = self.plan.len();
            self.store_page(place, &old.home, &home);
            if !is_early {
                self.store_record(place, &[NAME, REST]);
                self.random.shuffle(&mut self.plan.make_contiguous()[first..]);
                self.store_record(place, &[CHECKS, SEQUENCE]);
            }
        }
        let version = (self.places[place].record.sequence / 2, name, home);
        self.with_last(|step| {
            step.version = Some(version);
            step.truth = truth;
        });
    }

    /// Stores of the words of the page that differ.
    fn store_page(&mut self, place: usize, old: &Content, new: &Content) {
        let first = self.plan.len();
        for ((word, value), old) in (PAGE..).zip(new).zip(old) {
            if value != old {
                self.push(Step { place, store: Some((word, *value)), ..Step::default() });
            }
        }
        self.random.shuffle(&mut self.plan.make_contiguous()[first..]);
    }

    /// A change of the marks alone.
    fn mark(&mut self, place: usize, marks: Marks) {
        self.places[place].record.marks = marks;
        self.store_record(place, &[REST, CHECKS]);
    }

    /// Other contents: a part of the page, or all of it.
    fn new_content(&mut self, of: &Content) -> Content {
        let mut new = *of;
        let part = self.random.below(5);
        for (at, word) in (0..).zip(&mut new) {
            if part == 4 || part == at {
                self.words += 1;
                *word = mix(self.words);
            }
        }
        new
    }

    fn truth(&self, name: &PageName) -> Option<Content> {
        self.truths.iter().find(|(known, _)| known == name).map(|(_, content)| *content)
    }

    /// Plans what comes next.
    fn begin(&mut self) {
        let place = usize::from(self.random.one_of(2));
        let Place { used, record, own, home, .. } = self.places[place];
        let marks = record.marks;
        let choice = self.random.below(8);
        self.places[place].used = match (used, choice) {
            (Use::Free, _) => self.create(place),
            (Use::Incomplete, _) => {
                self.mark(place, marks.with(Marks::COMPLETE));
                let content = if marks.has(Marks::WRITTEN) { home } else { [0; 4] };
                self.with_first_of_last(2, |step| step.truth = Some((own, Some(content))));
                Use::Served
            }
            (Use::Served, 0) => {
                let colour = if self.random.one_of(2) { 0 } else { own.colour };
                let name = PageName { colour, ..own };
                self.change(place, (name, Marks::default()), None, Some((own, None)));
                Use::Free
            }
            (Use::Served, 1 | 2) => {
                self.hand_over(place, Marks::LEASED, Mutant::MarkAfterGrant, Use::Leased)
            }
            (Use::Served, 3) if marks.has(Marks::WRITTEN) => {
                self.hand_over(place, Marks::ELSEWHERE, Mutant::MarkAfterGive, Use::Away)
            }
            (Use::Served, _) => {
                let was = if marks.has(Marks::WRITTEN) { home } else { [0; 4] };
                let content = self.new_content(&was);
                let marks = marks.with(Marks::WRITTEN);
                self.change(place, (own, marks), Some(content), Some((own, Some(content))));
                Use::Served
            }
            // The owner, or the other server, changes the page.
            (Use::Leased | Use::Away, 0..4) => {
                self.change_elsewhere(place);
                used
            }
            (Use::Leased, _) => self.commit_or_release(place),
            (Use::Away, 4 | 5) => self.reuse(place),
            (Use::Away, _) => self.come_back(place),
            (Use::Reused, 0 | 1) => {
                let other = record.name;
                let marks = Marks::READABLE.with(Marks::ELSEWHERE);
                self.change(place, (own, marks), None, Some((other, None)));
                Use::Away
            }
            (Use::Reused, 2) => {
                self.change_elsewhere_of(place, own);
                used
            }
            (Use::Reused, _) => {
                let (name, content) = (record.name, self.new_content(&home));
                self.change(place, (name, marks), Some(content), Some((name, Some(content))));
                used
            }
        };
    }

    fn with_first_of_last(&mut self, count: usize, change: impl FnOnce(&mut Step)) {
        let at = self.plan.len() - count;
        change(&mut self.plan[at]);
    }

    /// A new allocation with contents, or one that reads as zeros; its creator does not know it yet.
    fn create(&mut self, place: usize) -> Use {
        self.colours += 1;
        self.places[place].own.colour = self.colours;
        let own = self.places[place].own;
        let content = self.random.one_of(2).then(|| self.new_content(&[0; 4]));
        let marks = if content.is_some() { Marks::WRITTEN } else { Marks::default() };
        self.change(place, (own, marks), content, None);
        Use::Incomplete
    }

    /// Marks the page, and lets another change it.
    fn hand_over(&mut self, place: usize, mark: Marks, late: Mutant, used: Use) -> Use {
        if self.scenario.has(late) {
            self.change_elsewhere(place);
        }
        let marks = self.places[place].record.marks.with(mark);
        self.mark(place, marks);
        used
    }

    fn change_elsewhere(&mut self, place: usize) {
        self.change_elsewhere_of(place, self.places[place].own);
    }

    fn change_elsewhere_of(&mut self, place: usize, own: PageName) {
        let was = self.truth(&own).unwrap_or([0; 4]);
        let content = self.new_content(&was);
        self.push(Step { place, ..Step::default() });
        self.says(own, Some(content));
    }

    /// The server gets what the owner has; and the lease ends when it has all.
    fn commit_or_release(&mut self, place: usize) -> Use {
        let Place { record, own, home, .. } = self.places[place];
        let content = self.truth(&own).unwrap_or([0; 4]);
        let is_written = record.marks.has(Marks::WRITTEN);
        let is_all = if is_written { home == content } else { content == [0; 4] };
        if !is_all {
            let marks = record.marks.with(Marks::WRITTEN);
            self.change(place, (own, marks), Some(content), None);
            return Use::Leased;
        }
        self.mark(place, record.marks.without(Marks::LEASED));
        Use::Served
    }

    /// The memory of a page that is elsewhere is used for another home's page, which may have the same colour.
    fn reuse(&mut self, place: usize) -> Use {
        let own = self.places[place].own;
        self.colours += 1;
        let colour = if self.random.one_of(2) { own.colour } else { self.colours };
        self.places[place].other.colour = colour;
        let other = self.places[place].other;
        let content = self.new_content(&[0; 4]);
        self.change(place, (other, Marks::READABLE), Some(content), Some((other, Some(content))));
        Use::Reused
    }

    /// The page comes back with what it has: stored under the mark, without a change of the sequence before it.
    fn come_back(&mut self, place: usize) -> Use {
        let Place { record, own, home, .. } = self.places[place];
        let content = self.truth(&own).unwrap_or([0; 4]);
        let marks = Marks::READABLE.with(Marks::ELSEWHERE);
        let sequence = record.sequence + 2;
        let page_crc = crc_of_content(&content);
        self.places[place].home = content;
        self.places[place].record = PageRecord { sequence, page_crc, name: own, marks };
        let version = Some((sequence / 2, own, content));
        if self.scenario.has(Mutant::ClearedBeforeStored) {
            self.store_record(place, &[NAME, SEQUENCE]);
            self.mark(place, Marks::READABLE);
            self.store_page(place, &home, &content);
            self.with_last(|step| step.version = version);
            return Use::Served;
        }
        self.store_record(place, &[NAME, REST]);
        self.store_page(place, &home, &content);
        self.store_record(place, &[SEQUENCE, CHECKS]);
        self.with_last(|step| step.version = version);
        self.mark(place, Marks::READABLE);
        Use::Served
    }
}

/// Where a version is remembered.
fn slot(version: u64) -> usize {
    usize::try_from(version % VERSIONS as u64).expect("small")
}

/// Stands for the CRC of a page, over fewer bytes.
pub(super) fn crc_of(page: &[u8; 32]) -> u32 {
    let (words, _) = page.as_chunks();
    let sum = words.iter().fold(1, |sum, word| mix(sum ^ u64::from_le_bytes(*word)));
    super::reader::low(sum)
}

fn crc_of_content(content: &Content) -> u32 {
    super::reader::low(content.iter().fold(1, |sum, word| mix(sum ^ word)))
}
