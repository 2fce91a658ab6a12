//! Header and datagram: emitted bytes can be parsed, damaged bytes are refused.

use std::net::Ipv6Addr;

use bluebridge_wire::{
    Datagram, DatagramError, Features, Flags, Header, HeaderError, HeaderView, Status, Usage,
    address::PAGE_BYTES,
    header::{HEADER_BYTES, LEASE_EPOCH_MAX},
    page_crc, seal, seal_page, tlv,
    usage::USAGE_BYTES,
};
use proptest::{collection::vec, prelude::*};

const SOURCE: Ipv6Addr = Ipv6Addr::new(0xfdbb, 1, 0x101, 0, 0x8000, 0, 0, 0);
const DESTINATION: Ipv6Addr = Ipv6Addr::new(0xfdbb, 1, 7, 0x062a, 3, 0, 0, 0x5000);
const TARGET: Ipv6Addr = Ipv6Addr::new(0xfdbb, 1, 7, 0x2a, 3, 0, 0, 0x5000);

fn headers() -> impl Strategy<Value = Header> {
    let front = (any::<u16>(), any::<u16>(), any::<u16>(), 0..=LEASE_EPOCH_MAX, any::<u16>());
    let session = (any::<u64>(), any::<u32>(), any::<u64>(), any::<u16>(), any::<u16>());
    let rest =
        (any::<u32>(), any::<u16>(), any::<[u8; 2]>(), any::<u64>(), any::<u32>(), any::<u32>());
    (front, session, rest).prop_map(|(front, session, rest)| Header {
        flags: Flags::from_bits(front.0).with_trailer_units(0),
        required: Features(front.1),
        node: front.2,
        target: TARGET,
        lease_epoch: front.3,
        lease_remaining_ms: front.4,
        session: session.0,
        incarnation: session.1,
        sequence: session.2,
        answered_distance: session.3,
        credit: session.4,
        length: rest.0,
        offset: rest.1,
        page_shift: rest.2[0],
        key_id: rest.2[1],
        page_version: rest.3,
        range_epoch: rest.4,
        detail: rest.5,
    })
}

fn datagram(header: &Header, options: &[u8], rest: &[u8]) -> Vec<u8> {
    let mut head = vec![0; HEADER_BYTES];
    header.emit(&mut head, options.len());
    head.extend(options);
    seal(SOURCE, DESTINATION, &mut head, rest);
    [&head[..], rest].concat()
}

/// Where a header has its CRC.
const CRC: core::ops::Range<usize> = HEADER_BYTES - 4..HEADER_BYTES;

/// CRC32C, bit by bit (RFC 3720, appendix B.4).
fn crc32c<'a>(bytes: impl IntoIterator<Item = &'a u8>) -> u32 {
    !bytes.into_iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc: u32, _| {
            crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
        })
    })
}

fn options(values: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (kind, value) in values {
        let end = bytes.len() + tlv::emitted_bytes(value.len());
        bytes.extend([*kind, u8::try_from(value.len()).expect("short")]);
        bytes.extend(value);
        bytes.resize(end, 0);
    }
    bytes
}

proptest! {
    #[test]
    fn what_is_emitted_is_parsed(
        header in headers(),
        values in vec((any::<u8>(), vec(any::<u8>(), 0..40)), 0..6),
        data in vec(any::<u8>(), 0..200),
        units in 0..=3_u8,
    ) {
        let header = Header { flags: header.flags.with_trailer_units(units), ..header };
        let trailer = vec![7; usize::from(units) * 16];
        let rest = [&data[..], &trailer].concat();
        let bytes = datagram(&header, &options(&values), &rest);
        let parsed = Datagram::parse(SOURCE, DESTINATION, &bytes).expect("well formed");
        prop_assert_eq!(parsed.header, header);
        prop_assert_eq!((parsed.data, parsed.trailer), (&data[..], &trailer[..]));
        let read: Vec<_> = parsed.tlvs()
            .map(|tlv| tlv.expect("checked"))
            .map(|tlv| (tlv.kind, tlv.value.to_vec()))
            .collect();
        prop_assert_eq!(read, values);
        prop_assert_eq!(parsed.header.low_water(), header.sequence.saturating_sub(header.answered_distance.into()));
    }

    #[test]
    fn a_page_has_a_crc_of_its_own(
        header in headers(),
        seed in any::<u32>(),
        length in prop_oneof![3 => Just(PAGE_BYTES), 1 => PAGE_BYTES - 1..=PAGE_BYTES + 1],
        values in vec((any::<u8>(), vec(any::<u8>(), 0..40)), 0..2),
    ) {
        let words = (1_u32..).map(|at| seed.wrapping_mul(at).rotate_left(at));
        let data: Vec<u8> = words.flat_map(u32::to_le_bytes).take(length).collect();
        let bytes = datagram(&header, &options(&values), &data);
        let addresses = [SOURCE.octets(), DESTINATION.octets()].concat();
        let checked = addresses.iter().chain(&bytes[..CRC.start]).chain(&bytes[HEADER_BYTES..]);
        prop_assert_eq!(&bytes[CRC], &crc32c(checked).to_be_bytes()[..]);
        let parsed = Datagram::parse(SOURCE, DESTINATION, &bytes).expect("well formed");
        let page = data.first_chunk().filter(|_| length == PAGE_BYTES && values.is_empty());
        prop_assert_eq!(parsed.page_crc, page.map(|_| crc32c(&data)));
        if let Some(page) = page {
            let mut head = [0; HEADER_BYTES];
            header.emit(&mut head, 0);
            seal_page(SOURCE, DESTINATION, &mut head, page_crc(page));
            prop_assert_eq!(&head[..], &bytes[..HEADER_BYTES]);
        }
    }

    #[test]
    fn a_page_with_a_trailer_is_no_page(units in 1..=3_u8) {
        let trailer = usize::from(units) * 16;
        let flags = Flags::default().with_trailer_units(units);
        let bytes = datagram(&Header { flags, target: TARGET, ..Header::default() }, &[], &[5; PAGE_BYTES]);
        let parsed = Datagram::parse(SOURCE, DESTINATION, &bytes).expect("well formed");
        prop_assert_eq!((parsed.data.len(), parsed.page_crc), (PAGE_BYTES - trailer, None));
    }

    #[test]
    fn flags_keep_their_parts_apart(bits in any::<u16>(), attempt in any::<u8>(), units in any::<u8>()) {
        let flags = Flags::from_bits(bits).with_attempt(attempt).with_trailer_units(units);
        prop_assert_eq!(flags.attempt(), attempt.min(15));
        prop_assert_eq!(flags.trailer_bytes(), usize::from(units.min(3)) * 16);
        prop_assert_eq!(flags.bits() & 0x0cff, bits & 0x0cff);
        prop_assert!(flags.with(Flags::ZERO).contains(Flags::ZERO));
    }

    #[test]
    fn any_bytes_are_parsed_or_refused(bytes in vec(any::<u8>(), 0..300)) {
        // Almost certainly refused, and it must not panic.
        prop_assert!(Datagram::parse(SOURCE, DESTINATION, &bytes).is_err());
        if let Ok(view) = HeaderView::new(&bytes) {
            let length = view.fixed().len() + view.options().len() + view.rest().len();
            prop_assert_eq!(length, bytes.len());
        }
        for option in tlv::Tlvs::new(&bytes).flatten() {
            prop_assert!(option.value.len() <= bytes.len());
        }
    }

    #[test]
    fn usage_survives(words in any::<[u64; 9]>(), more in vec(any::<u8>(), 0..9)) {
        let mut bytes: Vec<_> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        let usage = Usage::parse(&bytes).expect("whole");
        prop_assert_eq!(&usage.emit()[..], &bytes[..]);
        bytes.extend(more);
        prop_assert_eq!(Usage::parse(&bytes), Some(usage));
        // An earlier server does not report retired pages.
        let older = Some(Usage { retired_pages: 0, ..usage });
        prop_assert_eq!(Usage::parse(&bytes[..USAGE_BYTES - 8]), older);
        prop_assert_eq!(Usage::parse(&bytes[..USAGE_BYTES - 1]), older);
        prop_assert_eq!(Usage::parse(&bytes[..USAGE_BYTES - 9]), None);
    }

    #[test]
    fn page_statuses_survive(codes in vec(0..Status::ALL.len(), 0..=8)) {
        let statuses: Vec<_> = codes.iter().map(|&index| Status::ALL[index]).collect();
        let mut buffer = [0xff; 16];
        let emitted = tlv::emit_page_statuses(&mut buffer, &statuses);
        prop_assert_eq!(emitted, tlv::emitted_bytes(statuses.len()));
        let read: Vec<_> = tlv::Tlvs::new(&buffer[..emitted]).collect();
        let value: Vec<_> = statuses.iter().map(|status| status.code()).collect();
        prop_assert_eq!(read, [Ok(tlv::Tlv { kind: tlv::TlvType::PageStatus as u8, value: &value })]);
    }
}

/// A request with options, a quarter of a page of data and a trailer.
fn full_datagram() -> Vec<u8> {
    let header = Header {
        target: TARGET,
        sequence: 9,
        key_id: 1,
        flags: Flags::default().with_trailer_units(1),
        ..Header::default()
    };
    let rest: Vec<_> = (0..1040_u32).map(|index| (index % 253) as u8).collect();
    datagram(&header, &options(&[(9, b"five!".to_vec())]), &rest)
}

#[test]
fn every_flipped_bit_is_caught() {
    let good = full_datagram();
    assert!(Datagram::parse(SOURCE, DESTINATION, &good).is_ok());
    for bit in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let error = Datagram::parse(SOURCE, DESTINATION, &bytes).expect_err("damaged");
        match bit / 8 {
            0 => assert!(matches!(error, DatagramError::Header(HeaderError::Version(_)))),
            1 => assert!(matches!(
                error,
                DatagramError::Header(HeaderError::HeaderLength(_)) | DatagramError::Crc
            )),
            _ => assert_eq!(error, DatagramError::Crc, "bit {bit}"),
        }
    }
    for bit in 0..128 {
        let flip = |address: Ipv6Addr| Ipv6Addr::from_bits(address.to_bits() ^ 1 << bit);
        let foreign = bit >= 112;
        let source = Datagram::parse(flip(SOURCE), DESTINATION, &good).expect_err("damaged");
        let destination = Datagram::parse(SOURCE, flip(DESTINATION), &good).expect_err("damaged");
        let expected = |error| if foreign { error } else { DatagramError::Crc };
        assert_eq!(source, expected(DatagramError::ForeignSource));
        assert_eq!(destination, expected(DatagramError::ForeignDestination));
    }
}

#[test]
fn addresses_cannot_be_swapped() {
    let good = full_datagram();
    assert_eq!(
        Datagram::parse(DESTINATION, SOURCE, &good).expect_err("swapped"),
        DatagramError::Crc
    );
}

#[test]
fn every_truncation_is_caught() {
    let good = full_datagram();
    for length in 0..good.len() {
        let error = Datagram::parse(SOURCE, DESTINATION, &good[..length]).expect_err("cut");
        let header_bytes = HEADER_BYTES + tlv::emitted_bytes(5);
        match length {
            0..HEADER_BYTES => assert_eq!(error, DatagramError::Header(HeaderError::Truncated)),
            _ if length < header_bytes => {
                assert!(matches!(error, DatagramError::Header(HeaderError::HeaderLength(_))));
            }
            _ => assert_eq!(error, DatagramError::Crc),
        }
    }
}

#[test]
fn errors_and_statuses_say_what_happened() {
    let errors = [
        DatagramError::ForeignSource,
        DatagramError::ForeignDestination,
        DatagramError::Header(HeaderError::Truncated),
        DatagramError::Header(HeaderError::Version(2)),
        DatagramError::Header(HeaderError::HeaderLength(3)),
        DatagramError::Crc,
        DatagramError::Trailer,
        DatagramError::Options,
        DatagramError::Target,
        DatagramError::Direction,
        DatagramError::Endpoint,
    ];
    let mut texts: Vec<_> = errors.iter().map(ToString::to_string).collect();
    texts.extend(Status::ALL.iter().map(ToString::to_string));
    let count = texts.len();
    texts.sort();
    texts.dedup();
    assert_eq!(texts.len(), count, "every text is of one error");
}
