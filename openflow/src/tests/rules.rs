//! What must not be sent, and what is refused or corrected when it is received.

use crate::port::{Port, PortReason, PortStatus};
use crate::*;

fn flow(fields: Vec<Field>, instructions: Vec<Instruction>) -> Body {
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

fn encode(body: Body) -> Result<Vec<u8>, EncodeError> {
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
