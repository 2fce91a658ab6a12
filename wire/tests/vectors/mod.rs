//! The golden vectors' text format, and the cases from which they are written.
//!
//! The format is described in `docs/wire.md`, section 8.

use std::{collections::BTreeMap, fmt::Write as _, net::Ipv6Addr, path::PathBuf};

use bluebridge_wire::{DatagramError, Features, Flags, Header, HeaderError};

pub(crate) mod cases;

/// The expected result of parsing a vector.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Expect {
    /// It is parsed into these parts.
    Parts(Box<Parts>),
    /// It is refused, for this reason (see [`refusal_name`]).
    Refusal(String),
}

/// The parts of a datagram that parses.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Parts {
    /// Whether the source carries the command.
    pub(crate) reply: bool,
    /// The command byte on the wire.
    pub(crate) command: u8,
    /// The status byte of a reply, the tag of a request.
    pub(crate) tag: u8,
    /// The header's fields.
    pub(crate) header: Header,
    /// The options' types and values, in order.
    pub(crate) options: Vec<(u8, Vec<u8>)>,
    /// The data.
    pub(crate) data: Vec<u8>,
    /// The trailer.
    pub(crate) trailer: Vec<u8>,
}

/// One datagram and its expected result.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Vector {
    /// Unique in all files.
    pub(crate) name: String,
    /// The IPv6 source address.
    pub(crate) source: Ipv6Addr,
    /// The IPv6 destination address.
    pub(crate) destination: Ipv6Addr,
    /// The bytes after the UDP header.
    pub(crate) payload: Vec<u8>,
    /// The expected result.
    pub(crate) expect: Expect,
}

/// The folder of the files.
pub(crate) fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../wire/vectors")
}

/// The name of a refusal in the files.
pub(crate) fn refusal_name(error: DatagramError) -> &'static str {
    match error {
        DatagramError::ForeignSource => "foreign_source",
        DatagramError::ForeignDestination => "foreign_destination",
        DatagramError::Header(HeaderError::Truncated) => "header_truncated",
        DatagramError::Header(HeaderError::Version(_)) => "header_version",
        DatagramError::Header(HeaderError::HeaderLength(_)) => "header_length",
        DatagramError::Crc => "crc",
        DatagramError::Trailer => "trailer",
        DatagramError::Options => "options",
        DatagramError::Target => "target",
        DatagramError::Direction => "direction",
        DatagramError::Endpoint => "endpoint",
        other => panic!("a refusal without a name in the vectors: {other:?}"),
    }
}

/// The refusals that the vectors must contain.
pub(crate) const REFUSALS: [&str; 11] = [
    "foreign_source",
    "foreign_destination",
    "header_truncated",
    "header_version",
    "header_length",
    "crc",
    "trailer",
    "options",
    "target",
    "direction",
    "endpoint",
];

/// The text of a file with these vectors.
pub(crate) fn write(title: &str, vectors: &[Vector]) -> String {
    let mut text = format!("# {title}\n# Format: docs/wire.md, section 8.\n");
    for vector in vectors {
        write_vector(&mut text, vector);
    }
    text
}

fn write_vector(text: &mut String, vector: &Vector) {
    let mut line = |key: &str, value: String| {
        writeln!(text, "{key} {value}").expect("a string takes text");
    };
    line("\nvector", vector.name.clone());
    line("source", vector.source.to_string());
    line("destination", vector.destination.to_string());
    line("payload", hex(&vector.payload));
    let parts = match &vector.expect {
        Expect::Refusal(reason) => return line("refusal", reason.clone()),
        Expect::Parts(parts) => parts,
    };
    line("direction", if parts.reply { "reply" } else { "request" }.into());
    line("command", parts.command.to_string());
    line(if parts.reply { "status" } else { "tag" }, parts.tag.to_string());
    for (name, value) in numbers(&parts.header) {
        line(name, value.to_string());
    }
    line("target", parts.header.target.to_string());
    for (kind, value) in &parts.options {
        line("option", format!("{kind} {}", hex(value)));
    }
    line("data", hex(&parts.data));
    line("trailer", hex(&parts.trailer));
}

fn numbers(header: &Header) -> [(&'static str, u64); 17] {
    [
        ("flags", header.flags.bits().into()),
        ("required", header.required.0.into()),
        ("node", header.node.into()),
        ("lease_epoch", header.lease_epoch),
        ("lease_remaining_ms", header.lease_remaining_ms.into()),
        ("session", header.session),
        ("incarnation", header.incarnation.into()),
        ("sequence", header.sequence),
        ("answered_distance", header.answered_distance.into()),
        ("credit", header.credit.into()),
        ("length", header.length.into()),
        ("offset", header.offset.into()),
        ("page_shift", header.page_shift.into()),
        ("key_id", header.key_id.into()),
        ("page_version", header.page_version),
        ("range_epoch", header.range_epoch.into()),
        ("detail", header.detail.into()),
    ]
}

/// The vectors in a file's text.
pub(crate) fn read(text: &str) -> Vec<Vector> {
    text.split("\n\n").skip(1).map(read_vector).collect()
}

fn read_vector(record: &str) -> Vector {
    let mut values = BTreeMap::new();
    let mut options = Vec::new();
    for line in record.lines() {
        let (key, value) = line.split_once(' ').expect("a key, a space, a value");
        if key == "option" {
            let (kind, value) = value.split_once(' ').expect("a type and a value");
            options.push((kind.parse().expect("a type"), unhex(value)));
        } else {
            assert!(values.insert(key, value).is_none(), "{key} twice in\n{record}");
        }
    }
    let mut take = |key: &str| {
        values.remove(key).unwrap_or_else(|| panic!("no {key} in\n{record}")).to_owned()
    };
    let name = take("vector");
    let source = take("source").parse().expect("an address");
    let destination = take("destination").parse().expect("an address");
    let payload = unhex(&take("payload"));
    let expect = if record.contains("\nrefusal ") {
        Expect::Refusal(take("refusal"))
    } else {
        Expect::Parts(Box::new(read_parts(&mut take, options)))
    };
    assert!(values.is_empty(), "unknown keys in {name}: {values:?}");
    Vector { name, source, destination, payload, expect }
}

fn read_parts(take: &mut impl FnMut(&str) -> String, options: Vec<(u8, Vec<u8>)>) -> Parts {
    let reply = take("direction") == "reply";
    let mut number = |key: &str| take(key).parse::<u64>().expect("a number");
    fn fit<T: TryFrom<u64, Error: std::fmt::Debug>>(number: u64) -> T {
        T::try_from(number).expect("the field holds it")
    }
    let command = fit(number("command"));
    let tag = fit(number(if reply { "status" } else { "tag" }));
    let mut header = Header {
        flags: Flags::from_bits(fit(number("flags"))),
        required: Features(fit(number("required"))),
        node: fit(number("node")),
        target: Ipv6Addr::UNSPECIFIED,
        lease_epoch: number("lease_epoch"),
        lease_remaining_ms: fit(number("lease_remaining_ms")),
        session: number("session"),
        incarnation: fit(number("incarnation")),
        sequence: number("sequence"),
        answered_distance: fit(number("answered_distance")),
        credit: fit(number("credit")),
        length: fit(number("length")),
        offset: fit(number("offset")),
        page_shift: fit(number("page_shift")),
        key_id: fit(number("key_id")),
        page_version: number("page_version"),
        range_epoch: fit(number("range_epoch")),
        detail: fit(number("detail")),
    };
    header.target = take("target").parse().expect("an address");
    let data = unhex(&take("data"));
    let trailer = unhex(&take("trailer"));
    Parts { reply, command, tag, header, options, data, trailer }
}

fn hex(bytes: &[u8]) -> String {
    if bytes.is_empty() {
        return "-".into();
    }
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a string takes text");
        text
    })
}

fn unhex(text: &str) -> Vec<u8> {
    if text == "-" {
        return Vec::new();
    }
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    assert!(rest.is_empty(), "half a byte");
    pairs
        .iter()
        .map(|pair| {
            let pair = std::str::from_utf8(pair).expect("ASCII");
            u8::from_str_radix(pair, 16).expect("two hexadecimal digits")
        })
        .collect()
}
