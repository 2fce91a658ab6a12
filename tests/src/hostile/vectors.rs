//! The golden vectors as a basis for attacks.

use std::{fs, net::Ipv6Addr, path::Path};

/// A datagram of the golden vectors.
#[derive(Clone, Debug)]
pub struct Vector {
    /// The source address.
    pub source: Ipv6Addr,
    /// The destination address.
    pub destination: Ipv6Addr,
    /// The UDP payload.
    pub payload: Vec<u8>,
}

/// All golden vectors, including those that a parser refuses.
///
/// # Panics
/// If the vectors are missing or not readable.
#[must_use]
pub fn golden_vectors() -> Vec<Vector> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../wire/vectors");
    let mut paths: Vec<_> = fs::read_dir(folder)
        .expect("the vectors are in wire/vectors")
        .map(|entry| entry.expect("a readable folder").path())
        .collect();
    paths.sort();
    let texts = paths.into_iter().map(|path| fs::read_to_string(path).expect("a readable file"));
    texts.flat_map(|text| text.split("\n\n").skip(1).map(vector).collect::<Vec<_>>()).collect()
}

fn vector(record: &str) -> Vector {
    let value = |key: &str| {
        let mut lines = record.lines().filter_map(|line| line.split_once(' '));
        let found = lines.find(|(name, _)| *name == key);
        found.unwrap_or_else(|| panic!("no {key} in\n{record}")).1
    };
    let address = |key| value(key).parse().expect("an IPv6 address");
    let payload = match value("payload") {
        "-" => Vec::new(),
        digits => digits.as_bytes().chunks(2).map(byte).collect(),
    };
    Vector { source: address("source"), destination: address("destination"), payload }
}

fn byte(digits: &[u8]) -> u8 {
    let digits = str::from_utf8(digits).expect("ASCII");
    u8::from_str_radix(digits, 16).expect("two hexadecimal digits")
}
