use proptest::prelude::*;

use super::*;

fn export() -> Export {
    Export {
        name: "disk".into(),
        description: "a disk".into(),
        size_bytes: 0x0102_0304_0506,
        is_read_only: false,
        payload_bytes_max: 4 << 20,
    }
}

/// An option of a client, as the specification draws it.
fn option(number: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = b"IHAVEOPT".to_vec();
    bytes.extend(number.to_be_bytes());
    bytes.extend(u32::try_from(data.len()).expect("short").to_be_bytes());
    bytes.extend(data);
    bytes
}

/// The data of INFO and GO.
fn asking(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = u32::try_from(name.len()).expect("short").to_be_bytes().to_vec();
    data.extend(name.bytes());
    data.extend(u16::try_from(wanted.len()).expect("few").to_be_bytes());
    data.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
    data
}

/// A reply to an option, as the specification draws it.
fn replied(number: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0x00, 0x03, 0xe8, 0x89, 0x04, 0x55, 0x65, 0xa9];
    bytes.extend(number.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(u32::try_from(data.len()).expect("short").to_be_bytes());
    bytes.extend(data);
    bytes
}

/// What became of a client's bytes.
#[derive(Debug)]
enum End {
    Ended,
    Transmission(Transmission, usize),
    Waiting,
}

/// Gives a server the bytes in pieces of a size; returns what it sent after the greeting.
fn talk(export: &Export, input: &[u8], piece: usize) -> Result<(Vec<u8>, End), Violation> {
    let mut output = Vec::new();
    let mut negotiation = Negotiation::begin(export, &mut output);
    assert_eq!(output, b"NBDMAGICIHAVEOPT\x00\x03");
    output.clear();
    let (mut from, mut until) = (0, 0);
    loop {
        match negotiation.advance(&input[from..until], &mut output)? {
            Progress::Ended => return Ok((output, End::Ended)),
            Progress::NeedsMore if until == input.len() => return Ok((output, End::Waiting)),
            Progress::NeedsMore => until = (until + piece).min(input.len()),
            Progress::Processed(count) => {
                assert!(count > 0, "it would not end");
                from += count;
            }
            Progress::Transmission(count, rules) => {
                return Ok((output, End::Transmission(rules, from + count)));
            }
        }
    }
}

const FLAGS: [u8; 4] = [0, 0, 0, 3];
/// HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM, SEND_WRITE_ZEROES, CAN_MULTI_CONN, SEND_FAST_ZERO.
const WRITABLE: [u8; 2] = [0x09, 0x6d];

#[test]
fn a_client_of_the_first_kind_names_its_export() {
    for (flags, padding) in [([0, 0, 0, 1], 124), (FLAGS, 0)] {
        for name in ["disk", ""] {
            let input = [&flags[..], &option(1, name.as_bytes())].concat();
            let (output, end) = talk(&export(), &input, 1).expect("well formed");
            let size = [0, 0, 1, 2, 3, 4, 5, 6];
            assert_eq!(output, [&size[..], &WRITABLE, &vec![0; padding]].concat());
            let End::Transmission(rules, at) = end else { panic!("{end:?}") };
            assert_eq!(at, input.len());
            assert_eq!(rules.hole(0, 0, 1), None, "structured replies were not negotiated");
        }
    }
    let input = [&FLAGS[..], &option(1, b"other")].concat();
    let error = talk(&export(), &input, 7).expect_err("there is no reply for that");
    assert_eq!(error, Violation::UnknownExport);
}

#[test]
fn go_tells_what_was_asked_for() {
    let input = [&FLAGS[..], &option(8, &[]), &option(7, &asking("", &[3, 1, 2, 77]))].concat();
    let (output, end) = talk(&export(), &input, usize::MAX).expect("well formed");
    let expected = [
        replied(8, 1, &[]),
        // Structured replies were negotiated, so SEND_DF is set.
        replied(7, 3, &[0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 0x09, 0xed]),
        replied(7, 3, b"\x00\x01disk"),
        replied(7, 3, b"\x00\x02a disk"),
        replied(7, 3, &[0, 3, 0, 0, 0, 1, 0, 0, 0x10, 0, 0, 0x40, 0, 0]),
        replied(7, 1, &[]),
    ];
    assert_eq!(output, expected.concat());
    let End::Transmission(rules, at) = end else { panic!("{end:?}") };
    assert_eq!(at, input.len());
    assert!(rules.hole(0, 0, 1).is_some(), "structured replies were negotiated");
}

#[test]
fn info_and_list_do_not_end_the_negotiation() {
    let read_only = Export { is_read_only: true, ..export() };
    let input = [
        &FLAGS[..],
        &option(3, &[]),
        &option(6, &asking("disk", &[])),
        &option(6, &asking("other", &[])),
        &option(2, b"data of an ABORT is ignored"),
    ]
    .concat();
    let (output, end) = talk(&read_only, &input, 3).expect("well formed");
    let expected = [
        replied(3, 2, b"\x00\x00\x00\x04disk"),
        replied(3, 1, &[]),
        // HAS_FLAGS, READ_ONLY, SEND_FLUSH, SEND_FUA, CAN_MULTI_CONN.
        replied(6, 3, &[0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 0x01, 0x0f]),
        replied(6, 1, &[]),
        replied(6, 0x8000_0006, b"there is no export of this name"),
        replied(2, 1, &[]),
    ];
    assert_eq!(output, expected.concat());
    assert!(matches!(end, End::Ended));
}

/// The numbers of the error replies to options, in order.
fn errors(input: &[Vec<u8>]) -> Vec<u32> {
    let input = [&FLAGS[..], &input.concat()].concat();
    let (output, end) = talk(&export(), &input, 1000).expect("well formed");
    assert!(matches!(end, End::Waiting), "{end:?}");
    let mut kinds = Vec::new();
    let mut rest = &output[..];
    while !rest.is_empty() {
        let number = |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().expect("four"));
        kinds.push(number(12));
        rest = &rest[20 + number(16) as usize..];
    }
    kinds
}

#[test]
fn options_that_cannot_be_met_get_an_error_and_the_next_one_is_understood() {
    const UNSUPPORTED: u32 = 0x8000_0001;
    const INVALID: u32 = 0x8000_0003;
    const TOO_BIG: u32 = 0x8000_0009;
    // PEEK_EXPORT, STARTTLS, LIST_META_CONTEXT, SET_META_CONTEXT, EXTENDED_HEADERS, and one that does not exist.
    let unknown: Vec<_> = [4, 5, 9, 10, 11, 12345].map(|number| option(number, b"x")).into();
    assert_eq!(errors(&unknown), [UNSUPPORTED; 6]);
    let wrong = [
        option(3, b"x"),
        option(8, b"x"),
        option(7, &[0, 0, 0]),
        option(7, &[0, 0, 0, 200, 0, 0]),
        option(7, &[0xff, 0xff, 0xff, 0xff, 0, 0]),
        // One kind is announced, none follows.
        option(7, &[0, 0, 0, 0, 0, 1]),
        // Something follows.
        option(6, &[&asking("disk", &[3])[..], &[0]].concat()),
    ];
    assert_eq!(errors(&wrong), [INVALID; 7]);
    let long = [option(7, &vec![0; 20_000]), option(12, &vec![0; 100_000]), option(4, &[])];
    assert_eq!(errors(&long), [TOO_BIG, TOO_BIG, UNSUPPORTED]);
}

#[test]
fn a_client_that_is_out_of_step_is_left() {
    let of = |input: &[&[u8]]| talk(&export(), &input.concat(), 64).map(|_| ()).expect_err("wrong");
    assert_eq!(of(&[&[0, 0, 0, 4]]), Violation::ClientFlags(4));
    assert_eq!(of(&[&FLAGS, b"GET / HTTP/1.1\r\n"]), Violation::OptionMagic(0x4745_5420_2f20_4854));
    let mut endless = option(12, &[]);
    endless.splice(12..16, u32::MAX.to_be_bytes());
    let expected = Violation::OptionTooLong { option: 12, length: u32::MAX };
    assert_eq!(of(&[&FLAGS, &endless]), expected);
    let many = option(3, &[]).repeat(OPTIONS_MAX as usize + 1);
    assert_eq!(of(&[&FLAGS, &many]), Violation::TooManyOptions);
    assert_eq!(of(&[&FLAGS, &option(1, &vec![0; 20_000])]), Violation::UnknownExport);
}

proptest! {
    /// Whatever arrives, in whatever pieces: it ends, it replies the same, and it replies little.
    #[test]
    fn any_bytes_are_handled_alike_in_any_pieces(
        input in hostile(),
        piece in 1_usize..40,
    ) {
        let whole = talk(&export(), &input, usize::MAX);
        let parts = talk(&export(), &input, piece);
        match (whole, parts) {
            (Ok((whole, _)), Ok((parts, _))) => {
                prop_assert_eq!(&whole, &parts);
                prop_assert!(whole.len() < 300 * (OPTIONS_MAX as usize + 1));
            }
            (Err(whole), Err(parts)) => prop_assert_eq!(whole, parts),
            (whole, parts) => prop_assert!(false, "{:?} or {:?}", whole, parts),
        }
    }
}

/// Options, some of them damaged.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    let data = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..40),
        ("[a-z]{0,5}", proptest::collection::vec(0_u16..5, 0..5))
            .prop_map(|(name, wanted)| asking(&name, &wanted)),
        Just(asking("disk", &[3])),
    ];
    let one = (0_u32..14, data).prop_map(|(number, data)| option(number, &data));
    let all = proptest::collection::vec(one, 0..12).prop_map(|all| all.concat());
    let flip = proptest::option::weighted(0.5, (any::<proptest::sample::Index>(), any::<u8>()));
    (all, flip).prop_map(|(options, flip)| {
        let mut bytes = [&FLAGS[..], &options].concat();
        if let Some((at, value)) = flip {
            let at = at.index(bytes.len());
            bytes[at] ^= value;
        }
        bytes
    })
}
