//! The P4 program of the pipeline (`bluebridge.p4` and `program/`), compiled for BMv2.
//!
//! The reference compiler is in no package registry, so its output is committed, with a hash of the sources
//! that it was made from. `docs/switches.md` says how to compile it again.

/// The sources: names below `p4/`, and contents.
const SOURCES: [(&str, &str); 6] = [
    ("bluebridge.p4", include_str!("../bluebridge.p4")),
    ("program/deparser.p4", include_str!("../program/deparser.p4")),
    ("program/egress.p4", include_str!("../program/egress.p4")),
    ("program/headers.p4", include_str!("../program/headers.p4")),
    ("program/ingress.p4", include_str!("../program/ingress.p4")),
    ("program/parser.p4", include_str!("../program/parser.p4")),
];

/// The device configuration for BMv2's `simple_switch_grpc`.
pub const BMV2_CONFIG: &[u8] = include_bytes!("../bmv2/bluebridge.json");

/// P4Info of the program as text, as the compiler wrote it.
pub const COMPILED_P4INFO_TEXT: &str = include_str!("../bmv2/bluebridge.p4info.txtpb");

/// The hash of the sources when they were compiled.
pub const COMPILED_FROM: &str = include_str!("../bmv2/source-hash.txt");

/// The hash of the present sources (FNV-1a, 64 bits), as text.
#[must_use]
pub fn source_hash() -> String {
    let bytes = SOURCES
        .iter()
        .flat_map(|(name, text)| name.bytes().chain([0]).chain(text.bytes()).chain([0]));
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use bluebridge_wire::{Command, WireCommand};
    use prost::Message as _;
    use prost_reflect::{DescriptorPool, DynamicMessage};

    use super::*;
    use crate::p4info::differences;
    use crate::pipeline::{CPU_PORT, DropReason, NOTIFY_SESSION};
    use crate::proto::{FILE_DESCRIPTOR_SET, p4::config::v1::P4Info};

    fn compiled() -> P4Info {
        let pool = DescriptorPool::decode(FILE_DESCRIPTOR_SET).unwrap();
        let descriptor = pool.get_message_by_name("p4.config.v1.P4Info").unwrap();
        let text = DynamicMessage::parse_text_format(descriptor, COMPILED_P4INFO_TEXT).unwrap();
        P4Info::decode(text.encode_to_vec().as_slice()).unwrap()
    }

    #[test]
    fn the_compiled_form_belongs_to_the_sources() {
        assert_eq!(
            COMPILED_FROM.trim(),
            source_hash(),
            "the program changed: compile it again (docs/switches.md) and update p4/bmv2/source-hash.txt"
        );
        let config = std::str::from_utf8(BMV2_CONFIG).unwrap();
        assert!(!config.contains("\"/"), "it has no absolute path");
    }

    #[test]
    fn the_compiler_finds_the_declared_tables_and_actions() {
        assert_eq!(differences(&compiled()), Vec::<String>::new());
    }

    /// The constants in `program/headers.p4`.
    fn constants() -> BTreeMap<&'static str, u32> {
        let (_, headers) = SOURCES[3];
        let mut found = BTreeMap::new();
        for line in headers.lines().map(str::trim) {
            let Some(line) = line.strip_suffix(';') else { continue };
            let Some((left, right)) = line.split_once(" = ") else { continue };
            let name = left.split_whitespace().last().unwrap();
            let number = match right.strip_prefix("0x") {
                Some(hex) => u32::from_str_radix(hex, 16),
                None => right.parse(),
            };
            found.extend(number.ok().map(|number| (name, number)));
        }
        found
    }

    #[test]
    fn its_constants_are_those_of_the_wire_format_and_the_pipeline() {
        let constants = constants();
        for (name, command) in [
            ("CREATE", Command::Create),
            ("ALLOC_WRITE", Command::AllocWrite),
            ("INVALIDATE", Command::Invalidate),
            ("NOTICE", Command::Notice),
        ] {
            assert_eq!(constants[name], u32::from(command.code()), "{name}");
        }
        let (anycast, notices): (Vec<_>, Vec<_>) = Command::ALL
            .into_iter()
            .filter(|command| command.is_anycast() || command.is_notice())
            .partition(|command| command.is_anycast());
        assert_eq!((anycast.len(), notices.len()), (2, 2), "the program names each of them");
        assert_eq!(constants["REPLY"], u32::from(WireCommand::REPLY));
        assert_eq!(constants["HOME"], u32::from(WireCommand::HOME));
        assert_eq!(constants["CPU_PORT"], u32::from(CPU_PORT.0));
        assert_eq!(constants["NOTIFY_SESSION"], NOTIFY_SESSION);
        for reason in DropReason::ALL {
            let name = format!("DROP_{}", reason.name().to_uppercase());
            assert_eq!(constants[name.as_str()], reason as u32, "{name}");
        }
    }
}
