use proptest::prelude::*;

use super::*;

const SIZE: u64 = 1 << 30;
const PAYLOAD: u32 = 4 << 20;

fn rules(is_read_only: bool, structured: bool) -> Transmission {
    Transmission::new(SIZE, PAYLOAD, is_read_only, structured)
}

/// A request, as the specification draws it.
fn request(flags: u16, kind: u16, offset: u64, length: u32) -> Vec<u8> {
    let mut bytes = vec![0x25, 0x60, 0x95, 0x13];
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(b"cookie 8");
    bytes.extend(offset.to_be_bytes());
    bytes.extend(length.to_be_bytes());
    assert_eq!(bytes.len(), REQUEST_BYTES);
    bytes
}

const COOKIE: u64 = u64::from_be_bytes(*b"cookie 8");

#[test]
fn requests_are_read() {
    let zeroes = |no_hole| Command::WriteZeroes { no_hole };
    for (flags, kind, command) in [
        (0, 0, Command::Read),
        (1, 0, Command::Read),
        (4, 0, Command::Read),
        (0, 1, Command::Write),
        (1, 1, Command::Write),
        (0, 4, Command::Trim),
        (1, 4, Command::Trim),
        (0, 6, zeroes(false)),
        (2, 6, zeroes(true)),
        (0x13, 6, zeroes(true)),
    ] {
        let parsed = rules(false, true).parse(&request(flags, kind, 4096, 8192));
        let expected = Request { cookie: COOKIE, command, offset: 4096, length: 8192 };
        assert_eq!(parsed, Ok(Parsed::Request(expected)), "{kind} with {flags}");
    }
    let flush = Request { cookie: COOKIE, command: Command::Flush, offset: 0, length: 0 };
    assert_eq!(rules(true, false).parse(&request(0, 3, 0, 0)), Ok(Parsed::Request(flush)));
    assert_eq!(rules(true, false).parse(&request(0, 2, 0, 0)), Ok(Parsed::Disconnect));
    let whole = request(0, 1, 0, 8);
    for length in 0..REQUEST_BYTES {
        assert_eq!(rules(false, true).parse(&whole[..length]), Ok(Parsed::Incomplete));
    }
}

#[test]
fn requests_that_cannot_be_done_get_the_errors_of_the_specification() {
    let refusal =
        |read_only, structured, flags, kind, offset, length| match rules(read_only, structured)
            .parse(&request(flags, kind, offset, length))
        {
            Ok(Parsed::Refused { cookie: COOKIE, errno, payload_bytes }) => {
                assert_eq!(payload_bytes, if kind == 1 { length } else { 0 });
                errno
            }
            other => panic!("{other:?}"),
        };
    // Beyond the end: ENOSPC for writes, EINVAL for the others.
    for (kind, errno) in
        [(0, Errno::Invalid), (1, Errno::NoSpace), (4, Errno::Invalid), (6, Errno::NoSpace)]
    {
        assert_eq!(refusal(false, true, 0, kind, SIZE, 1), errno);
        assert_eq!(refusal(false, true, 0, kind, SIZE - 1, 2), errno);
        assert_eq!(refusal(false, true, 0, kind, u64::MAX, 2), errno);
        // Of no bytes.
        assert_eq!(refusal(false, true, 0, kind, 0, 0), Errno::Invalid);
    }
    for kind in [1, 4, 6] {
        assert_eq!(refusal(true, true, 0, kind, 0, 512), Errno::Perm);
    }
    assert_eq!(refusal(false, true, 0, 0, 0, PAYLOAD + 1), Errno::Overflow);
    assert_eq!(refusal(false, false, 0, 0, 0, PAYLOAD + 1), Errno::Invalid);
    assert_eq!(refusal(false, true, 0, 1, 0, PAYLOAD + 1), Errno::Invalid);
    assert_eq!(refusal(false, true, 0, 3, 1, 0), Errno::Invalid);
    // CACHE, BLOCK_STATUS, RESIZE, and one that does not exist.
    for kind in [5, 7, 8, 99] {
        assert_eq!(refusal(false, true, 0, kind, 0, 512), Errno::Invalid);
    }
    // Flags of other commands, unknown ones, and DF without structured replies.
    for (structured, flags, kind) in
        [(true, 2, 1), (true, 4, 1), (true, 16, 0), (true, 8, 0), (true, 32, 6), (false, 4, 0)]
    {
        assert_eq!(refusal(false, structured, flags, kind, 0, 512), Errno::Invalid);
    }
}

#[test]
fn a_client_that_is_out_of_step_is_left() {
    let mut strange = request(0, 0, 0, 1);
    strange[0] = 0;
    let error = rules(false, false).parse(&strange[..4]).expect_err("not a request");
    assert_eq!(error, Violation::RequestMagic(0x0060_9513));
    let long = request(0, 1, 0, REFUSED_PAYLOAD_MAX + 1);
    let error = rules(false, false).parse(&long).expect_err("too much to read over");
    assert_eq!(error, Violation::PayloadTooLong(REFUSED_PAYLOAD_MAX + 1));
}

#[test]
fn replies_are_those_of_the_specification() {
    let (simple, structured) = (rules(false, false), rules(false, true));
    let plain =
        |errno: u32| [&[0x67, 0x44, 0x66, 0x98][..], &errno.to_be_bytes(), b"cookie 8"].concat();
    assert_eq!(simple.done(COOKIE)[..], plain(0));
    assert_eq!(structured.done(COOKIE)[..], plain(0));
    assert_eq!(simple.data(COOKIE, 512, 1024)[..], plain(0));
    assert_eq!(simple.failed(COOKIE, Errno::NoSpace)[..], plain(28));
    assert_eq!(simple.hole(COOKIE, 512, 1024), None);
    let chunk = |kind: u16, data: &[&[u8]], more: u32| {
        let data = data.concat();
        let length = u32::try_from(data.len()).expect("short") + more;
        let magic = [0x66, 0x8e, 0x33, 0xef, 0, 1];
        let parts = [&magic[..], &kind.to_be_bytes(), b"cookie 8", &length.to_be_bytes(), &data];
        parts.concat()
    };
    let offset = 512_u64.to_be_bytes();
    assert_eq!(structured.data(COOKIE, 512, 1024)[..], chunk(1, &[&offset], 1024));
    let hole = structured.hole(COOKIE, 512, 1024).expect("it is understood");
    assert_eq!(hole[..], chunk(2, &[&offset, &1024_u32.to_be_bytes()], 0));
    let all =
        [Errno::Perm, Errno::Io, Errno::Invalid, Errno::NoSpace, Errno::Overflow, Errno::Shutdown];
    for errno in all {
        let text = errno.message().as_bytes();
        let length = u16::try_from(text.len()).expect("short").to_be_bytes();
        let expected = chunk(0x8001, &[&(errno as u32).to_be_bytes(), &length, text], 0);
        assert_eq!(structured.failed(COOKIE, errno)[..], expected);
        assert_eq!(simple.failed(COOKIE, errno)[..], plain(errno as u32));
    }
}

proptest! {
    /// What is accepted lies within the disk and the limits, whatever arrives.
    #[test]
    fn accepted_requests_are_within_the_limits(
        flags: u16,
        kind in 0_u16..10,
        offset in prop_oneof![0..SIZE + 10, any::<u64>()],
        length in prop_oneof![0..PAYLOAD + 10, any::<u32>()],
        read_only: bool,
        structured: bool,
    ) {
        let parsed = rules(read_only, structured).parse(&request(flags, kind, offset, length));
        match parsed {
            Ok(Parsed::Request(request)) => {
                prop_assert_eq!((request.offset, request.length), (offset, length));
                prop_assert!(offset + u64::from(length) <= SIZE);
                let has_data = matches!(request.command, Command::Read | Command::Write);
                prop_assert!(!has_data || length <= PAYLOAD);
                prop_assert!(!read_only || matches!(request.command, Command::Read | Command::Flush));
            }
            Ok(Parsed::Disconnect) => prop_assert_eq!(kind, 2),
            Ok(Parsed::Refused { payload_bytes, .. }) => {
                prop_assert_eq!(payload_bytes, if kind == 1 { length } else { 0 });
                prop_assert!(payload_bytes <= REFUSED_PAYLOAD_MAX);
            }
            Ok(Parsed::Incomplete) => prop_assert!(false, "it is whole"),
            Err(error) => {
                prop_assert_eq!(error, Violation::PayloadTooLong(length));
            }
        }
    }

    /// A stranger is recognized by its first bytes, and a request is parsed when its head is there.
    #[test]
    fn a_request_is_parsed_when_it_is_there(
        mut bytes in proptest::collection::vec(any::<u8>(), 0..40),
        is_stranger: bool,
    ) {
        if let Some(magic) = bytes.first_chunk_mut().filter(|_| !is_stranger) {
            *magic = REQUEST_MAGIC.to_be_bytes();
        }
        let parsed = rules(false, true).parse(&bytes);
        let magic = bytes.first_chunk().map(|magic| u32::from_be_bytes(*magic));
        match magic {
            Some(magic) if magic != REQUEST_MAGIC => {
                prop_assert_eq!(parsed, Err(Violation::RequestMagic(magic)));
            }
            _ => {
                let is_short = bytes.len() < REQUEST_BYTES;
                prop_assert_eq!(matches!(parsed, Ok(Parsed::Incomplete)), is_short, "{:?}", parsed);
            }
        }
    }
}
