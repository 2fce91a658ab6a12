//! Runs the fuzz targets on seeded mutations of the golden vectors, for toolchains without a fuzzer.

#[path = "../../fuzz/src/wire.rs"]
#[allow(unreachable_pub, reason = "part of a library of its own when it is fuzzed")]
mod fuzz;
#[allow(dead_code, reason = "only the cases are used here")]
mod vectors;

use rand::{Rng, SeedableRng, rngs::SmallRng, seq::IndexedRandom};

const ROUNDS: usize = 60_000;

/// Changes, copies, cuts or inserts a few bytes, like fuzzers do.
fn mutate(rng: &mut SmallRng, input: &mut Vec<u8>) {
    for _ in 0..rng.random_range(1..=4) {
        let at = rng.random_range(0..=input.len());
        match rng.random_range(0..7) {
            0 | 1 if at < input.len() => input[at] ^= 1 << rng.random_range(0..8),
            2 if at < input.len() => {
                input[at] = *[0, 1, 0x7f, 0x80, 0xff].choose(rng).expect("some")
            }
            3 if at < input.len() => input[at] = rng.random(),
            4 => input.truncate(at),
            5 => input.insert(at, rng.random()),
            _ => {
                let piece =
                    input[at..].iter().copied().take(rng.random_range(0..20)).collect::<Vec<_>>();
                let to = rng.random_range(0..=input.len());
                input.splice(to..to, piece);
            }
        }
    }
}

fn run(corpus: &[Vec<u8>], seed: u64, target: fn(&[u8])) {
    let mut rng = SmallRng::seed_from_u64(seed);
    for input in corpus {
        target(input);
    }
    for _ in 0..ROUNDS {
        let mut input = corpus.choose(&mut rng).expect("a corpus").clone();
        mutate(&mut rng, &mut input);
        target(&input);
    }
}

fn all() -> impl Iterator<Item = vectors::Vector> {
    vectors::cases::files().into_iter().flat_map(|(.., vectors)| vectors)
}

#[test]
fn datagrams() {
    let corpus: Vec<_> = all()
        .map(|vector| {
            [&vector.source.octets()[..], &vector.destination.octets(), &vector.payload].concat()
        })
        .filter(|input| input.len() < 2000)
        .collect();
    run(&corpus, 1, fuzz::datagram);
}

#[test]
fn options() {
    let corpus: Vec<_> = all()
        .filter(|vector| vector.payload.len() > 84)
        .map(|vector| vector.payload[84..].iter().copied().take(300).collect())
        .collect();
    run(&corpus, 2, fuzz::tlv);
}

#[test]
fn pointer_text() {
    let corpus: Vec<_> = all()
        .flat_map(|vector| [vector.source, vector.destination])
        .map(|address| address.to_string().into_bytes())
        .collect();
    run(&corpus, 3, fuzz::pointer);
}
