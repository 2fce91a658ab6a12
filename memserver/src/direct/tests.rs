//! The program, and what it shares with the server.

mod root;

use core::mem::offset_of;

use bluebridge_testkit::c_struct;

use super::Places;
use crate::kept::{PageRecord, lines::LineEntry};

const SHARED: &str = include_str!("../../bpf/shared.h");

#[test]
fn both_languages_have_the_same_records() {
    let of_rust = [
        ("sequence", offset_of!(PageRecord, sequence)),
        ("checksum", offset_of!(PageRecord, checksum)),
        ("link", offset_of!(PageRecord, link)),
        ("colour", offset_of!(PageRecord, colour)),
        ("space", offset_of!(PageRecord, space)),
        ("part", offset_of!(PageRecord, part)),
        ("contents", offset_of!(PageRecord, contents)),
        ("is_complete", offset_of!(PageRecord, is_complete)),
        ("marks", offset_of!(PageRecord, marks)),
        ("unused", offset_of!(PageRecord, unused)),
        ("", size_of::<PageRecord>()),
    ];
    assert_eq!(c_struct(SHARED, "page_record"), of_rust);
    let of_rust = [
        ("migration", offset_of!(LineEntry, migration)),
        ("epoch", offset_of!(LineEntry, epoch)),
        ("first_page", offset_of!(LineEntry, first_page)),
        ("node", offset_of!(LineEntry, node)),
        ("generation", offset_of!(LineEntry, generation)),
        ("state", offset_of!(LineEntry, state)),
        ("", size_of::<LineEntry>()),
    ];
    assert_eq!(c_struct(SHARED, "line_entry"), of_rust);
    let of_rust = [
        ("states", offset_of!(Places, states)),
        ("lines", offset_of!(Places, lines)),
        ("frames", offset_of!(Places, frames)),
        ("shared", offset_of!(Places, shared)),
        ("pages", offset_of!(Places, pages)),
        ("counters", offset_of!(Places, counters)),
        ("stride", offset_of!(Places, stride)),
        ("shard_pages", offset_of!(Places, shard_pages)),
        ("shard_count", offset_of!(Places, shard_count)),
        ("session_count", offset_of!(Places, session_count)),
        ("processors", offset_of!(Places, processors)),
        ("incarnation", offset_of!(Places, incarnation)),
        ("node", offset_of!(Places, node)),
        ("to_peer", offset_of!(Places, to_peer)),
        ("mtu", offset_of!(Places, mtu)),
        ("", size_of::<Places>()),
    ];
    assert_eq!(c_struct(SHARED, "places"), of_rust);
}

#[test]
fn both_languages_have_the_same_numbers() {
    let counters = [
        "ANSWERED",
        "PASSED_FORM",
        "PASSED_CLOSED",
        "PASSED_SESSION",
        "PASSED_PAGE",
        "PASSED_CHANGE",
        "PASSED_CHECKSUM",
        "PASSED_SEND",
        "COUNTERS",
    ];
    let (_, names) = SHARED.split_once("enum counter {").expect("they are declared");
    let (names, _) = names.split_once("};").expect("they end");
    let places = counters.map(|name| names.find(&format!("\t{name},")).expect("it is there"));
    assert!(places.is_sorted(), "in the order of `ReadCounts`");
    for number in [
        "LOW_WATER_MASK ((1ULL << 47) - 1)",
        "EXECUTING (1ULL << 47)",
        &format!("SESSION_WINDOW = {}", bluebridge_wire::SESSION_WINDOW),
        &format!("PAGE_SHIFT = {}", bluebridge_wire::address::PAGE_SHIFT),
        &format!("LINE_PAGES = {}", bluebridge_wire::address::LINE_PAGES),
        &format!("SHARD_SHIFT = {}", bluebridge_wire::address::SHARD_SHIFT),
        "CONTENTS_LEFTOVER = 1",
        "PART_NONE = 0, PART_HEAD = 1, PART_BODY = 2",
    ] {
        assert!(SHARED.contains(number), "{number}");
    }
}
