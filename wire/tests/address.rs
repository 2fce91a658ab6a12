//! Pointers, regions and the other addresses: text, fields, arithmetic.

use std::net::Ipv6Addr;

use bluebridge_wire::{
    ArenaGeneration, Command, EndpointAddress, Location, NodeId, Pointer, PointerError, Region,
    ReplySource, Space, Status, Tag, WireCommand,
    address::{Fields, OFFSET_BITS, PAGE_BYTES, SHARD_ADDRESS_BYTE, SHARD_SHIFT},
    piece_bytes,
};
use proptest::prelude::*;

fn pointers() -> impl Strategy<Value = Pointer> {
    let edges = prop_oneof![0..=2_u64, (1_u64 << OFFSET_BITS) - 3..=(1_u64 << OFFSET_BITS) - 1];
    let offset = prop_oneof![edges, 0..1_u64 << OFFSET_BITS];
    (any::<u16>(), any::<u16>(), any::<u8>(), 0..=0x7fff_u16, offset).prop_map(
        |(space, node, tag, generation, offset)| {
            let generation = ArenaGeneration::new(generation).expect("15 bits");
            Pointer {
                space: Space(space),
                node: NodeId(node),
                tag: Tag(tag),
                location: Location::new(generation, offset).expect("48 bits"),
            }
        },
    )
}

fn distances() -> impl Strategy<Value = u64> {
    prop_oneof![0..5_u64, 0..1_u64 << OFFSET_BITS, u64::MAX - 5..=u64::MAX, any::<u64>()]
}

/// All fields of a pointer except its offset.
fn surroundings(pointer: Pointer) -> (Space, NodeId, Tag, ArenaGeneration) {
    (pointer.space, pointer.node, pointer.tag, pointer.location.generation())
}

proptest! {
    #[test]
    fn a_pointer_survives_text_and_address(pointer in pointers()) {
        prop_assert_eq!(pointer.to_string().parse(), Ok(pointer));
        prop_assert_eq!(format!("{pointer:?}"), format!("Pointer({pointer})"));
        prop_assert_eq!(Pointer::try_from(Ipv6Addr::from(pointer)), Ok(pointer));
        prop_assert_eq!(Location::from_bits(pointer.location.bits()), Some(pointer.location));
    }

    #[test]
    fn any_address_is_a_pointer_or_says_why_not(bits in any::<u128>(), fabric in any::<bool>()) {
        let bits = if fabric { bits >> 16 | 0xfdbb << 112 } else { bits };
        let address = Ipv6Addr::from_bits(bits);
        let expected = if bits >> 112 != 0xfdbb {
            Err(PointerError::NotFabric)
        } else if bits >> 72 & 0xff != 0 {
            Err(PointerError::HasCommand)
        } else if bits >> 63 & 1 != 0 {
            Err(PointerError::NotMemory)
        } else {
            Ok(address)
        };
        prop_assert_eq!(Pointer::from_ipv6(address).map(Pointer::to_ipv6), expected);
        let fields = Fields::unpack(address);
        prop_assert_eq!(fields.map(Fields::to_ipv6), (bits >> 112 == 0xfdbb).then_some(address));
    }

    #[test]
    fn arithmetic_moves_the_offset_and_nothing_else(pointer in pointers(), by in distances()) {
        let offset = u128::from(pointer.location.offset());
        match pointer.checked_add(by) {
            Ok(moved) => {
                prop_assert_eq!(u128::from(moved.location.offset()), offset + u128::from(by));
                prop_assert_eq!(surroundings(moved), surroundings(pointer));
                prop_assert_eq!(moved.checked_sub(by), Ok(pointer));
            }
            Err(error) => {
                prop_assert_eq!(error, PointerError::OffsetOverflow);
                prop_assert!(offset + u128::from(by) >= 1 << OFFSET_BITS);
            }
        }
        match pointer.checked_sub(by) {
            Ok(moved) => {
                prop_assert_eq!(u128::from(moved.location.offset()), offset - u128::from(by));
                prop_assert_eq!(surroundings(moved), surroundings(pointer));
            }
            Err(error) => {
                prop_assert_eq!(error, PointerError::OffsetOverflow);
                prop_assert!(offset < u128::from(by));
            }
        }
    }

    #[test]
    fn a_region_is_not_left(base in pointers(), length in distances(), at in distances(), part in distances()) {
        let start = u128::from(base.location.offset());
        let fits = start + u128::from(length) <= 1 << OFFSET_BITS;
        let region = Region::new(base, length);
        prop_assert_eq!(region.is_ok(), fits);
        let Ok(region) = region else { return Ok(()) };
        match region.at(at) {
            Ok(pointer) => {
                prop_assert!(at < length);
                prop_assert_eq!(base.checked_add(at), Ok(pointer));
                prop_assert_eq!(surroundings(pointer), surroundings(base));
            }
            Err(error) => {
                prop_assert_eq!(error, PointerError::OutOfRegion);
                prop_assert!(at >= length);
            }
        }
        match region.slice(at, part) {
            Ok(slice) => {
                prop_assert!(u128::from(at) + u128::from(part) <= u128::from(length));
                prop_assert_eq!(slice.length_bytes(), part);
                prop_assert_eq!(base.checked_add(at), Ok(slice.base()));
            }
            Err(error) => {
                prop_assert_eq!(error, PointerError::OutOfRegion);
                let behind_arena = start + u128::from(at) == 1 << OFFSET_BITS;
                prop_assert!(u128::from(at) + u128::from(part) > u128::from(length) || behind_arena);
            }
        }
    }

    #[test]
    fn a_location_has_a_page_and_a_shard(pointer in pointers()) {
        let Pointer { location, .. } = pointer;
        let page_bytes = PAGE_BYTES as u64;
        prop_assert_eq!(location.page() * page_bytes + location.in_page() as u64, location.offset());
        prop_assert_eq!(u64::from(location.shard()), location.offset() >> SHARD_SHIFT);
        let start = pointer.page_start();
        prop_assert!(start.location.is_page_aligned());
        prop_assert_eq!(start.location.page(), location.page());
        prop_assert_eq!(surroundings(start), surroundings(pointer));
        let fields = Fields::unpack(pointer.to_ipv6()).expect("in the fabric");
        prop_assert_eq!(fields.shard(), location.shard());
        prop_assert!(fields.is_memory());
    }

    #[test]
    fn a_destination_is_the_pointer_and_its_command(pointer in pointers(), home in any::<bool>(), command in 0..Command::ALL.len(), via in any::<u16>()) {
        let command = Command::ALL[command];
        let destination = pointer.destination(command, home);
        let fields = Fields::unpack(destination.to_ipv6()).expect("in the fabric");
        let byte = WireCommand::from_bits(fields.command);
        prop_assert_eq!((byte.command(), byte.is_home(), byte.is_reply()), (Some(command), home, false));
        prop_assert_eq!(Fields { command: 0, ..fields }.to_ipv6(), pointer.to_ipv6());
        prop_assert_eq!(Pointer::from_ipv6(destination.to_ipv6()), Err(PointerError::HasCommand));
        let elsewhere = Fields::unpack(destination.via(NodeId(via)).to_ipv6()).expect("in the fabric");
        prop_assert_eq!(elsewhere, Fields { node: NodeId(via), ..fields });
    }

    #[test]
    fn an_endpoint_is_never_memory(space in any::<u16>(), node in any::<u16>(), selector in any::<u64>(), shard in any::<u8>()) {
        let endpoint = EndpointAddress::new(Space(space), NodeId(node), selector);
        prop_assert_eq!(Pointer::from_ipv6(endpoint.to_ipv6()), Err(PointerError::NotMemory));
        prop_assert_eq!(endpoint.selector(), selector & !(1 << 63));
        let of_shard = EndpointAddress::of_shard(Space(space), NodeId(node), shard, 5);
        let fields = Fields::unpack(of_shard.to_ipv6()).expect("in the fabric");
        prop_assert_eq!((fields.shard(), fields.is_memory()), (shard, false));
        prop_assert_eq!(fields.location, of_shard.location_bits());
    }

    #[test]
    fn memory_is_requested_at_the_endpoint_of_its_space_and_shard(pointer in pointers(), node in any::<u16>(), home in any::<bool>(), command in 0..Command::ALL.len()) {
        let command = Command::ALL[command];
        let endpoint = EndpointAddress::for_memory(NodeId(node), pointer);
        let to = Fields::unpack(endpoint.destination(command, home)).expect("in the fabric");
        let byte = WireCommand::from_bits(to.command);
        prop_assert_eq!((byte.command(), byte.is_home(), byte.is_reply()), (Some(command), home, false));
        let octets = endpoint.to_ipv6().octets();
        prop_assert_eq!(octets[usize::from(SHARD_ADDRESS_BYTE)], pointer.location.shard());
        prop_assert_eq!((to.node, to.tag, to.is_memory()), (NodeId(node), 0, false));
        prop_assert_eq!(Fields { command: 0, ..to }.to_ipv6(), endpoint.to_ipv6());

        let target = Fields::unpack(pointer.to_ipv6()).expect("in the fabric");
        prop_assert!(to.is_endpoint_for(target));
        prop_assert!(!target.is_endpoint_for(target), "the pointer itself is no endpoint's address");
        prop_assert!(!to.is_endpoint_for(to), "an endpoint's address is no memory");
        // Another tag, another space, another shard.
        let others = [
            Fields { tag: 1, ..to },
            Fields { space: Space(to.space.0 ^ 1), ..to },
            Fields { location: to.location ^ (1 << SHARD_SHIFT), ..to },
        ];
        prop_assert!(others.iter().all(|other| !other.is_endpoint_for(target)));
        let entropy = Fields { location: to.location | 0xffff_ffff, ..to };
        prop_assert!(entropy.is_endpoint_for(target), "the other bits do not count");
    }
}

#[test]
fn text_that_is_no_pointer_is_refused_with_the_reason() {
    for (text, error) in [
        ("", PointerError::NotIpv6),
        ("fdbb:1:7", PointerError::NotIpv6),
        ("192.0.2.1", PointerError::NotIpv6),
        ("fdbb:1:7:2a::5000%eth0", PointerError::NotIpv6),
        ("::1", PointerError::NotFabric),
        ("fdba:1:7:2a::5000", PointerError::NotFabric),
        ("fdbb:1:7:62a::5000", PointerError::HasCommand),
        ("fdbb:1:7:2a:8000::", PointerError::NotMemory),
    ] {
        assert_eq!(text.parse::<Pointer>(), Err(error), "{text}");
    }
}

#[test]
fn generations_end() {
    assert_eq!(ArenaGeneration::MAX.next(), None);
    assert_eq!(ArenaGeneration::new(0x8000), None);
    assert_eq!(ArenaGeneration::default().next(), ArenaGeneration::new(1));
    let near = ArenaGeneration::new(0x7ffe).expect("15 bits");
    assert_eq!(near.saturating_add(1), ArenaGeneration::MAX);
    assert_eq!(near.saturating_add(u16::MAX), ArenaGeneration::MAX);
    assert_eq!(ArenaGeneration::default().saturating_add(3), ArenaGeneration::new(3).expect("3"));
    assert_eq!(Location::new(ArenaGeneration::MAX, 1 << OFFSET_BITS), None);
    assert_eq!(Location::from_bits(1 << 63), None);
}

#[test]
fn node_ids_with_a_meaning_of_their_own() {
    assert!(!NodeId::ANY.is_unicast() && !NodeId::ALL.is_unicast() && NodeId(1).is_unicast());
}

#[test]
fn codes_are_known_exactly_once() {
    for code in 0..=u8::MAX {
        let command = Command::from_code(code);
        assert_eq!(command, Command::ALL.into_iter().find(|known| known.code() == code));
        assert!(command.is_none() || code < 64, "6 bits");
        let status = Status::from_code(code);
        assert_eq!(status, Status::ALL.iter().copied().find(|known| known.code() == code));
    }
    assert!(Command::from_code(0).is_none(), "command 0 is a stored pointer");
    let (known, free): (Vec<_>, Vec<_>) =
        (0..64).partition(|code| Command::from_code(*code).is_some());
    assert_eq!((known.len(), free.len()), (20, 44));
}

#[test]
fn a_reply_names_the_replier_and_the_outcome() {
    let source = ReplySource {
        space: Space(1),
        node: NodeId(9),
        command: Command::Read,
        contended: false,
        status: Status::StaleTag,
        location_bits: 0x0003_0000_0000_5000,
    };
    assert_eq!(source.to_ipv6(), "fdbb:1:9:8611:3::5000".parse::<Ipv6Addr>().expect("an address"));
    let contended = ReplySource { contended: true, ..source };
    assert_eq!(
        contended.to_ipv6(),
        "fdbb:1:9:c611:3::5000".parse::<Ipv6Addr>().expect("an address")
    );
    let byte = WireCommand::from_bits(0xc6);
    assert!(byte.is_reply() && byte.is_contended() && !byte.is_home());
    assert!(!WireCommand::from_bits(0x46).is_contended(), "bit 6 of a request is the home bit");
}

#[test]
fn pieces_fit_into_every_link() {
    assert_eq!(piece_bytes(1279), None);
    for (mtu, bytes) in [
        (1280, 1024),
        (1500, 1024),
        (2179, 1024),
        (2180, 2048),
        (4227, 2048),
        (4228, 4096),
        (9000, 4096),
    ] {
        assert_eq!(piece_bytes(mtu), Some(bytes));
    }
    for mtu in 1280..=9000 {
        let bytes = piece_bytes(mtu).expect("a piece size");
        assert!([1024, 2048, 4096].contains(&bytes));
        assert!(bytes + 40 + 8 + 84 <= mtu, "no fragmentation");
    }
}
