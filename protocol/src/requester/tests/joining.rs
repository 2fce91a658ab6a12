//! Reassembly with a random network: a completed page is always from one version.

use bluebridge_wire::Status;
use proptest::prelude::*;

use super::super::Output;
use super::bench::{Bench, Reply, SERVER, SESSION};
use crate::pieces::Cut;

/// The byte of a page in a version.
fn stamp(page: usize, version: u64) -> u8 {
    u8::try_from(page * 31 % 97).expect("small") ^ u8::try_from(version).expect("small")
}

proptest! {
    #[test]
    fn every_page_is_of_one_version(
        in_page in 0_u32..4096,
        length in 1_u32..=32768,
        piece_bytes in 1024_u16..=4096,
        // Which pieces of a reply arrive, in which order, and how many writes happen in between.
        rounds in prop::collection::vec((any::<u32>(), any::<u64>(), 0_u64..3), 1..40),
    ) {
        let length = length.min(32768 - in_page);
        let mut bench = Bench::with(|config| config.piece_bytes = piece_bytes);
        bench.start(super::super::Operation::Ping { server: SERVER, length: 0 }, u64::MAX);
        let open = bench.sent_one();
        bench.reply(&Reply::to(&open, Status::Ok).with(|header| {
            header.session = SESSION;
            header.length = u32::from(piece_bytes);
        }));
        let ping = bench.sent_one();
        bench.reply(&Reply::to(&ping, Status::Ok));
        bench.completed();

        bench.read(u64::from(in_page), length, 1);
        let cut = Cut::new(in_page as usize, length as usize, usize::from(piece_bytes)).expect("a cut");
        let mut version = 1;
        let mut request = bench.sent_one();
        let mut under_way = Vec::new();
        let mut rounds = rounds.into_iter();
        let done = loop {
            let (arrive, order, writes) = rounds.next().unwrap_or((u32::MAX, 0, 0));
            let wanted = if request.attempt() == 0 { cut.all() } else { request.header.detail };
            for index in 0..cut.piece_count() {
                if wanted & (1 << index) != 0 {
                    let piece = cut.piece(index).expect("counted");
                    let data = vec![stamp(piece.page, version); piece.range.len()];
                    under_way.push((index, Reply::piece(&request, piece.range.start, version, &data)));
                }
            }
            version = (version + writes).min(100);
            let count = under_way.len();
            under_way.rotate_left(usize::try_from(order % 64).expect("small") % count);
            let mut late = Vec::new();
            for (index, reply) in under_way.drain(..) {
                if arrive & (1 << index) != 0 {
                    bench.reply(&reply);
                } else if order & (1 << index) != 0 {
                    late.push((index, reply));
                }
            }
            under_way = late;
            if let Some(completion) = bench.requester.poll_completion() {
                break completion;
            }
            request = bench.pass_to_sent().remove(0);
        };
        prop_assert_eq!(done.result, Ok(Output::Done));
        let memory = &bench.memory.0[&1];
        for page in 0..cut.page_count() {
            let bytes = &memory[cut.page_range(page)];
            prop_assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {} is torn", page);
            prop_assert!((1..=version).any(|version| stamp(page, version) == bytes[0]));
        }
    }
}
