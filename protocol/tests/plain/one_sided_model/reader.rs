//! The reader: what it wants, and what it accepts.

use bluebridge_protocol::one_sided::{Doubt, Marks, PageName, PageRecord, judge};
use bluebridge_wire::Space;

use super::{
    Mutant, Rule, Scenario, Seen,
    fabric::{Fetched, fetch},
    world::{World, crc_of},
};

/// One READ, which must return what the page had meanwhile, or nothing.
pub(crate) fn read(scenario: &Scenario, world: &mut World, seen: &mut Seen) -> Result<(), String> {
    for _ in 0..world.random.below(12) {
        world.step();
    }
    let (place, wanted) = world.choose();
    let changes = world.begin_watch(place, wanted);
    let fetched = fetch(world, place, scenario.order, scenario.has(Mutant::PageFirst));
    seen.reads += 1;
    seen.torn += u64::from(world.changes(place) != changes);
    let accepted = accept(scenario, &wanted, &fetched);
    if scenario.mutant.is_none() && scenario.rule == Rule::Checked {
        let real = judge(&wanted, &fetched.before, &fetched.after, || crc_of(&fetched.page));
        assert_eq!(
            real,
            accepted.map_err(|(doubt, _)| doubt),
            "the protocol's rule and the model's"
        );
    }
    let is_whole = |record| PageRecord::from_bytes(record).is_some();
    seen.torn_records += u64::from(!is_whole(&fetched.before) || !is_whole(&fetched.after));
    match accepted {
        Ok(version) => {
            seen.accepted += 1;
            world
                .must_have_been(&fetched.page, version)
                .map_err(|error| format!("READ {} of {wanted:?}: {error}", seen.reads))
        }
        Err((_, is_by_crc)) => {
            seen.refused_by_crc += u64::from(is_by_crc);
            Ok(())
        }
    }
}

/// The lower half.
pub(super) fn low(word: u64) -> u32 {
    u32::try_from(word & u64::from(u32::MAX)).expect("32 bits")
}

/// The rule, and its mutants; with the reason, and whether it is the CRC alone.
fn accept(scenario: &Scenario, wanted: &PageName, fetched: &Fetched) -> Result<u64, (Doubt, bool)> {
    let refuse = |doubt| Err((doubt, false));
    let is_checked = scenario.rule == Rule::Checked;
    let record = |bytes: &[u8; 32]| {
        let valid = PageRecord::from_bytes(bytes);
        if is_checked && !scenario.has(Mutant::CheckIgnored) {
            return valid;
        }
        valid.or_else(|| unchecked(bytes))
    };
    let Some(before) = record(&fetched.before) else { return refuse(Doubt::Record) };
    if before.sequence % 2 != 0 && !scenario.has(Mutant::OddIgnored) {
        return refuse(Doubt::Changed);
    }
    let is_same = match () {
        () if scenario.has(Mutant::RecordOnce) => true,
        () if scenario.has(Mutant::VersionIgnored) => record(&fetched.after)
            .is_some_and(|after| (after.name, after.marks) == (before.name, before.marks)),
        () => fetched.before == fetched.after,
    };
    if !is_same {
        return refuse(Doubt::Changed);
    }
    let mut name = before.name;
    if scenario.has(Mutant::ColourIgnored) {
        name.colour = wanted.colour;
    }
    if scenario.has(Mutant::SpaceIgnored) {
        name.space = wanted.space;
    }
    if scenario.has(Mutant::PlaceIgnored) {
        (name.home, name.page) = (wanted.home, wanted.page);
    }
    if name != *wanted {
        return refuse(Doubt::Name);
    }
    let mut marks = before.marks;
    for (mutant, without, with) in [
        (Mutant::LeaseIgnored, Marks::LEASED, Marks::default()),
        (Mutant::ElsewhereIgnored, Marks::ELSEWHERE, Marks::default()),
        (Mutant::IncompleteIgnored, Marks::default(), Marks::COMPLETE),
        (Mutant::UnwrittenIgnored, Marks::default(), Marks::WRITTEN),
    ] {
        if scenario.has(mutant) {
            marks = marks.without(without).with(with);
        }
    }
    if marks != Marks::READABLE {
        return refuse(Doubt::Marks);
    }
    if is_checked
        && !scenario.has(Mutant::CrcIgnored)
        && !scenario.has(Mutant::UnwrittenIgnored)
        && before.page_crc != crc_of(&fetched.page)
    {
        return Err((Doubt::Changed, true));
    }
    Ok(before.sequence / 2)
}

/// A record whose check is not looked at.
fn unchecked(bytes: &[u8; 32]) -> Option<PageRecord> {
    let word = |at: usize| u64::from_le_bytes(*bytes[at * 8..].first_chunk().expect("a word"));
    let [sequence, checks, place, rest] = [0, 1, 2, 3].map(word);
    let byte = rest.to_le_bytes()[6];
    let marks = [Marks::WRITTEN, Marks::COMPLETE, Marks::LEASED, Marks::ELSEWHERE];
    let marks = marks.into_iter().enumerate().filter(|(bit, _)| byte >> bit & 1 != 0);
    let marks = marks.fold(Marks::default(), |all, (_, mark)| all.with(mark));
    Some(PageRecord {
        sequence,
        page_crc: low(checks),
        name: PageName {
            space: Space(u16::from_le_bytes([rest.to_le_bytes()[4], rest.to_le_bytes()[5]])),
            home: bluebridge_wire::NodeId(u16::from_le_bytes([
                place.to_le_bytes()[6],
                place.to_le_bytes()[7],
            ])),
            page: place & ((1 << 48) - 1),
            colour: low(rest),
        },
        marks,
    })
}
