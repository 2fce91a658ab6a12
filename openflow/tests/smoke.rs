//! Runs the fuzz target on mutations of valid messages, for toolchains without a fuzzer.

#[path = "../../fuzz/src/openflow.rs"]
#[allow(unreachable_pub, reason = "part of a library of its own when it is fuzzed")]
mod fuzz;
mod samples;

use bluebridge_openflow::Message;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};

fn corpus() -> Vec<Vec<u8>> {
    let bodies = samples::from_controller().into_iter().chain(samples::from_switch());
    let encode = |body| {
        let mut out = Vec::new();
        Message { xid: 1, body }.encode(&mut out).expect("a valid message");
        out
    };
    bodies.map(|(_, body)| encode(body)).collect()
}

/// Changes that fuzzers make, too.
#[derive(Clone, Debug)]
enum Change {
    Flip(Index, u8),
    Set(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Copy(Index, Index, usize),
    Truncate(Index),
}

fn change() -> impl Strategy<Value = Change> {
    let at = any::<Index>;
    let byte = prop_oneof![select(vec![0, 1, 7, 8, 16, 0x7f, 0x80, 0xff]), any::<u8>()];
    prop_oneof![
        (at(), 0..8_u8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        (at(), byte).prop_map(|(at, byte)| Change::Set(at, byte)),
        (at(), vec(any::<u8>(), 1..9)).prop_map(|(at, bytes)| Change::Insert(at, bytes)),
        (at(), 1..9_usize).prop_map(|(at, count)| Change::Remove(at, count)),
        (at(), at(), 1..40_usize).prop_map(|(from, to, count)| Change::Copy(from, to, count)),
        at().prop_map(Change::Truncate),
    ]
}

fn apply(change: &Change, input: &mut Vec<u8>) {
    let position = |at: &Index| at.index(input.len() + 1);
    let end = |start: usize, count: usize| input.len().min(start + count);
    match change {
        Change::Flip(at, bit) => {
            let at = position(at);
            input.get_mut(at).into_iter().for_each(|byte| *byte ^= 1 << bit);
        }
        Change::Set(at, value) => {
            let at = position(at);
            input.get_mut(at).into_iter().for_each(|byte| *byte = *value);
        }
        Change::Insert(at, bytes) => {
            let at = position(at);
            input.splice(at..at, bytes.iter().copied());
        }
        Change::Remove(at, count) => {
            let at = position(at);
            input.drain(at..end(at, *count));
        }
        Change::Copy(from, to, count) => {
            let (from, to) = (position(from), position(to));
            let piece = input[from..end(from, *count)].to_vec();
            input.splice(to..to, piece);
        }
        Change::Truncate(at) => input.truncate(position(at)),
    }
}

#[test]
fn valid_messages_hold_alone_and_in_one_stream() {
    let corpus = corpus();
    corpus.iter().for_each(|message| fuzz::stream(message));
    fuzz::stream(&corpus.concat());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn changed_messages_hold(
        mut input in select(corpus()),
        changes in vec(change(), 1..5),
        next in select(corpus()),
    ) {
        changes.iter().for_each(|change| apply(change, &mut input));
        input.extend(next);
        fuzz::stream(&input);
    }

    #[test]
    fn arbitrary_bytes_hold(input in vec(any::<u8>(), 0..100)) {
        fuzz::stream(&input);
    }
}
