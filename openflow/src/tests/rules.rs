//! What must not be sent, and what is refused or corrected when it is received.

use crate::port::{Port, PortReason, PortStatus};
use crate::*;

pub(super) fn flow(fields: Vec<Field>, instructions: Vec<Instruction>) -> Body {
    Body::FlowMod(FlowMod {
        cookie: 0,
        cookie_mask: 0,
        table: 0,
        command: FlowCommand::Add,
        idle_timeout: 0,
        hard_timeout: 0,
        priority: 0,
        out_port: port::ANY,
        out_group: GROUP_ANY,
        flags: FlowFlags::default(),
        fields,
        instructions,
    })
}

pub(super) fn encode(body: Body) -> Result<Vec<u8>, EncodeError> {
    let mut out = Vec::new();
    Message { xid: 1, body }.encode(&mut out).map(|()| out)
}

/// The position of the match in a flow mod.
const MATCH: usize = 48;

#[test]
fn bits_outside_a_mask_cannot_be_sent() {
    let mac = |first| [first, 0, 0, 0, 0, 0];
    let fields = [
        Field::Metadata(Masked::under(2, 1)),
        Field::EthDst(Masked::under(mac(3), mac(1))),
        Field::EthSrc(Masked::under(mac(3), mac(1))),
        Field::VlanVid(Masked::under(0x1001, 0x1000)),
        Field::Ipv6Src(Masked::under(1, 0)),
        Field::Ipv6Dst(Masked::under(3, u128::MAX - 1)),
    ];
    for field in fields {
        let sent = encode(flow(vec![field.clone()], vec![]));
        assert_eq!(sent, Err(EncodeError::OutsideMask), "{field:?}");
    }
    let write = Instruction::WriteMetadata(Masked::under(2, 1));
    assert_eq!(encode(flow(vec![], vec![write])), Err(EncodeError::OutsideMask));
}

#[test]
fn a_match_field_with_bits_outside_its_mask_is_refused() {
    let field = Field::VlanVid(Masked::under(0x1000, 0x1000));
    let mut frame = encode(flow(vec![field], vec![])).unwrap();
    let value = MATCH + 8;
    assert_eq!(frame[value..value + 4], [0x10, 0, 0x10, 0]);
    frame[value + 1] = 1;
    assert_eq!(Message::decode(&frame), Err(DecodeError::OutsideMask));
}

#[test]
fn metadata_outside_the_mask_is_not_written() {
    let write = Instruction::WriteMetadata(Masked::under(1, 5));
    let mut frame = encode(flow(vec![], vec![write])).unwrap();
    let value = MATCH + 8 + 8;
    assert_eq!(frame[value..value + 8], 1_u64.to_be_bytes());
    frame[value + 7] = 3;
    let write = Instruction::WriteMetadata(Masked::under(1, 5));
    assert_eq!(Message::decode(&frame).unwrap().body, flow(vec![], vec![write]));
}

/// A change of a port with these bytes in the field for its name.
fn port_named(field: [u8; 16]) -> Message {
    let status = PortStatus { reason: PortReason::Add, port: Port::default() };
    let mut frame = encode(Body::PortStatus(status)).unwrap();
    frame[32..48].copy_from_slice(&field);
    Message::decode(&frame).unwrap()
}

#[test]
fn names_of_a_peer_always_fit_their_field() {
    let names = [
        (*b"eth0\0ignored    ", "eth0"),
        (*b"\0               ", ""),
        (*b"0123456789abcdef", "0123456789abcde"),
        (*b"0123456789abcd\xc3\xa4", "0123456789abcd"),
        (*b"\xff\xfe\xff\xfe\xff\xfe\xff\xfe\xff\xfe\xff\xfe\xff\xfe\xff\xfe", "???????????????"),
    ];
    for (field, name) in names {
        let message = port_named(field);
        let Body::PortStatus(status) = &message.body else { panic!("a change of a port") };
        assert_eq!(status.port.name, name);
        let frame = encode(message.body.clone()).unwrap();
        assert_eq!(Message::decode(&frame).unwrap().body, message.body);
    }
}

#[test]
fn texts_that_do_not_fit_cannot_be_sent() {
    let port = |name: &str| Port { name: name.to_owned(), ..Port::default() };
    for name in ["0123456789abcdef", "a\0b"] {
        let status = PortStatus { reason: PortReason::Add, port: port(name) };
        let refused = Err(EncodeError::Text("the name of a port"));
        assert_eq!(encode(Body::PortStatus(status)), refused, "{name:?}");
    }
    let long = "x".repeat(256);
    let serial = "x".repeat(32);
    let texts = [
        Description { manufacturer: long.clone(), ..Description::default() },
        Description { hardware: long.clone(), ..Description::default() },
        Description { software: long.clone(), ..Description::default() },
        Description { serial, ..Description::default() },
        Description { datapath: long, ..Description::default() },
    ];
    for text in texts {
        let part = MultipartPart::Description(text);
        let reply = Body::MultipartReply(MultipartReply { more: false, part });
        assert_eq!(encode(reply), Err(EncodeError::Text("a description")));
    }
}

#[test]
fn a_hello_speaks_the_versions_of_its_bitmap_or_all_up_to_its_own() {
    let hello = |version, bitmap| Hello { version, bitmap };
    let listed = hello(6, Some(0b101_0010));
    let spoken: Vec<_> = (0..=255).filter(|version| listed.speaks(*version)).collect();
    assert_eq!(spoken, [1, 4, 6]);
    let all = hello(4, None);
    let spoken: Vec<_> = (0..=255).filter(|version| all.speaks(*version)).collect();
    assert_eq!(spoken, [0, 1, 2, 3, 4]);
    assert_eq!(Hello::for_version(VERSION), hello(VERSION, Some(0b1_0000)));
    for version in 0..=255 {
        assert!(Hello::for_version(version).speaks(version));
    }
}

#[test]
fn unaligned_structures_cannot_be_sent() {
    for length in 0..20 {
        let aligned = length % 8 == 4;
        let bytes = vec![0; length];
        let action = Action::Other { kind: 17, bytes: bytes.clone() };
        let sent = encode(flow(vec![], vec![Instruction::ApplyActions(vec![action])]));
        assert_eq!(sent.is_ok(), aligned, "an action with {length} bytes");
        assert!(aligned || sent == Err(EncodeError::Unaligned("an action")));
        let sent = encode(flow(vec![], vec![Instruction::Other { kind: 9, bytes }]));
        assert_eq!(sent.is_ok(), aligned, "an instruction with {length} bytes");
        assert!(aligned || sent == Err(EncodeError::Unaligned("an instruction")));
    }
}

#[test]
fn other_versions_are_refused_except_in_hellos_and_errors() {
    for version in 0..=255 {
        let frame = [version, 0, 0, 8, 0, 0, 0, 1];
        let hello = Body::Hello(Hello { version, bitmap: None });
        assert_eq!(Message::decode(&frame), Ok(Message { xid: 1, body: hello }));
        let frame = [version, 1, 0, 12, 0, 0, 0, 1, 0, 2, 0, 4];
        let error = Body::Error(ErrorMessage { kind: 2, code: 4, data: vec![] });
        assert_eq!(Message::decode(&frame), Ok(Message { xid: 1, body: error }));
    }
    for version in (0..=255).filter(|version| *version != VERSION) {
        for kind in 2..=255 {
            let frame = [version, kind, 0, 8, 0, 0, 0, 1];
            assert_eq!(Message::decode(&frame), Err(DecodeError::Version(version)));
        }
    }
}

/// The byte at this position, if it is another, makes the message one that this codec does not have.
#[track_caller]
fn check_unsupported(body: Body, at: usize, known: &[u8], what: &'static str) {
    let frame = encode(body).unwrap();
    for byte in 0..=255 {
        let mut frame = frame.clone();
        frame[at] = byte;
        let decoded = Message::decode(&frame);
        if known.contains(&byte) {
            assert!(decoded.is_ok(), "{byte}");
        } else {
            assert_eq!(decoded, Err(DecodeError::Unsupported(what)), "{byte}");
        }
    }
}

#[test]
fn numbers_without_a_meaning_are_named() {
    let empty = || flow(vec![], vec![]);
    check_unsupported(empty(), 25, &[0, 1, 2, 3, 4], "the command of a flow change");
    check_unsupported(empty(), 35, &[0xff], "a buffered packet");
    check_unsupported(empty(), 49, &[1], "the type of a match");
    let group =
        GroupMod { command: GroupCommand::Add, kind: GroupKind::All, group: 1, buckets: vec![] };
    let group = || Body::GroupMod(group.clone());
    check_unsupported(group(), 9, &[0, 1, 2], "the command of a group change");
    check_unsupported(group(), 10, &[0, 1, 2, 3], "the type of a group");
    let packet = PacketOut { in_port: 1, actions: vec![], data: vec![] };
    check_unsupported(Body::PacketOut(packet), 8, &[0xff], "a buffered packet");
    let role = RoleRequest { role: Role::Equal, generation_id: 1 };
    check_unsupported(Body::RoleRequest(role), 11, &[0, 1, 2, 3], "a role");
    let config = SwitchConfig { fragments: FragmentHandling::Normal, miss_send_bytes: 1 };
    check_unsupported(Body::SetConfig(config), 9, &[0, 1, 2], "the handling of fragments");
    let status = PortStatus { reason: PortReason::Add, port: Port::default() };
    let what = "the reason of a port's change";
    check_unsupported(Body::PortStatus(status), 8, &[0, 1, 2], what);
    let request = Body::MultipartRequest(MultipartRequest::Description);
    check_unsupported(request, 8, &[0], "the type of a multipart request");
}
