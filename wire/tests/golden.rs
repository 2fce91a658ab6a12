//! The golden vectors: parse, emit again byte for byte, and check that none is missing.

use std::{collections::BTreeSet, fs};

use bluebridge_wire::{
    Command, Datagram, Flags, LeaseEnd, Status, WireCommand, header::HEADER_BYTES, seal, tlv,
};

mod vectors;

use vectors::{Expect, Parts, Vector, cases, folder, read, refusal_name, write};

fn committed() -> Vec<Vector> {
    let files = cases::files();
    let names: BTreeSet<_> = files.iter().map(|(name, ..)| (*name).to_owned()).collect();
    let found: BTreeSet<_> = fs::read_dir(folder())
        .expect("the folder of vectors")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    assert_eq!(names, found, "the folder holds exactly the files that are tested");
    names
        .iter()
        .flat_map(|name| read(&fs::read_to_string(folder().join(name)).expect("a file")))
        .collect()
}

fn parts_of(datagram: &Datagram<'_>) -> Parts {
    let carrier = if datagram.is_reply() { datagram.from } else { datagram.to };
    Parts {
        reply: datagram.is_reply(),
        command: datagram.command().bits(),
        tag: carrier.tag,
        header: datagram.header,
        options: datagram
            .tlvs()
            .map(|tlv| tlv.expect("parse checked the options"))
            .map(|tlv| (tlv.kind, tlv.value.to_vec()))
            .collect(),
        data: datagram.data.to_vec(),
        trailer: datagram.trailer.to_vec(),
    }
}

fn emit(vector: &Vector, parts: &Parts) -> Vec<u8> {
    let option_bytes = parts.options.iter().map(|(_, value)| tlv::emitted_bytes(value.len())).sum();
    let mut head = vec![0; HEADER_BYTES];
    parts.header.emit(&mut head, option_bytes);
    for (kind, value) in &parts.options {
        let start = head.len();
        head.extend([*kind, u8::try_from(value.len()).expect("one byte of length")]);
        head.extend(value);
        head.resize(start + tlv::emitted_bytes(value.len()), 0);
    }
    let rest = [&parts.data[..], &parts.trailer].concat();
    seal(vector.source, vector.destination, &mut head, &rest);
    [head, rest].concat()
}

#[test]
fn every_vector_parses_as_it_says_and_is_emitted_byte_for_byte() {
    for vector in committed() {
        let parsed = Datagram::parse(vector.source, vector.destination, &vector.payload);
        match (&vector.expect, parsed) {
            (Expect::Refusal(reason), Err(error)) => {
                assert_eq!(reason, refusal_name(error), "{}", vector.name);
            }
            (Expect::Parts(expected), Ok(datagram)) => {
                assert_eq!(**expected, parts_of(&datagram), "{}", vector.name);
                assert_eq!(vector.payload, emit(&vector, expected), "{}", vector.name);
            }
            (expected, parsed) => panic!("{}: {expected:?}, but {parsed:?}", vector.name),
        }
    }
}

#[test]
fn files_are_what_the_cases_say() {
    for (name, title, vectors) in cases::files() {
        let text = fs::read_to_string(folder().join(name)).expect("a file");
        assert_eq!(read(&text), vectors, "{name}");
        assert_eq!(text, write(title, &vectors), "{name}");
    }
}

#[test]
fn nothing_is_left_out() {
    let vectors = committed();
    let names: BTreeSet<_> = vectors.iter().map(|vector| &vector.name).collect();
    assert_eq!(names.len(), vectors.len(), "names are unique");
    let refusals: BTreeSet<_> = vectors
        .iter()
        .filter_map(|vector| match &vector.expect {
            Expect::Refusal(reason) => Some(reason.as_str()),
            Expect::Parts(_) => None,
        })
        .collect();
    assert_eq!(refusals, BTreeSet::from(vectors::REFUSALS));

    let parts: Vec<_> = vectors
        .iter()
        .filter_map(|vector| match &vector.expect {
            Expect::Parts(parts) => Some(parts),
            Expect::Refusal(_) => None,
        })
        .collect();
    let has = |what: &str, test: &dyn Fn(&Parts) -> bool| {
        assert!(parts.iter().any(|parts| test(parts)), "no vector with {what}");
    };
    for command in Command::ALL {
        let code = command.code();
        has(&format!("a request {command}"), &|p| !p.reply && p.command & 0x3f == code);
        if !command.is_notice() {
            has(&format!("a reply {command}"), &|p| p.reply && p.command == code | 0x80);
        }
    }
    for &status in Status::ALL {
        has(&format!("{status:?}"), &|p| p.reply && p.tag == status.code());
    }
    for flag in [
        Flags::MAY_BE_STALE,
        Flags::PROVISIONAL,
        Flags::ZERO,
        Flags::LAST_COMMITTED,
        Flags::SELECTIVE,
        Flags::QUEUED,
        Flags::AT_ENDPOINT,
    ] {
        has(&format!("{flag:?}"), &|p| p.header.flags.contains(flag));
    }
    has("the contended bit", &|p| p.reply && WireCommand::from_bits(p.command).is_contended());
    for end in LeaseEnd::ALL {
        assert_eq!(LeaseEnd::from_code(end.code()), Some(end));
        let status = Status::LeaseLost.code();
        has(&format!("{end:?}"), &|p| p.reply && p.tag == status && p.header.detail == end.code());
    }
    assert_eq!([0, 8, 257].map(LeaseEnd::from_code), [None; 3]);
    for bytes in [0, 16, 32, 48] {
        has("a trailer", &|p| p.trailer.len() == bytes && p.header.key_id != 0);
    }
}
