//! Lengths: of messages, and of each structure inside of them.

use super::rules::{encode, flow};
use crate::port::{Port, PortReason, PortStatus};
use crate::*;

/// Only the length that the structure has at this position is right.
#[track_caller]
fn check(what: &str, body: Body, at: usize, right: u16) {
    let frame = encode(body).unwrap();
    assert_eq!(frame[at..at + 2], right.to_be_bytes(), "{what} begins elsewhere");
    assert!(Message::decode(&frame).is_ok(), "{what}");
    let possible = 0..=u16::try_from(frame.len()).unwrap() + 8;
    for wrong in possible.chain([0x7fff, 0xfff8, 0xffff]).filter(|length| *length != right) {
        let mut frame = frame.clone();
        frame[at..at + 2].copy_from_slice(&wrong.to_be_bytes());
        assert!(Message::decode(&frame).is_err(), "{what} of {wrong} bytes");
    }
}

fn output() -> Action {
    Action::Output { port: 1, max_bytes: 2 }
}

fn set_field() -> Action {
    Action::SetField(Field::EthDst(Masked::exact([1; 6])))
}

fn bucket() -> Bucket {
    Bucket { weight: 1, watch_port: port::ANY, watch_group: GROUP_ANY, actions: vec![output()] }
}

fn reply(part: MultipartPart) -> Body {
    Body::MultipartReply(MultipartReply { more: false, part })
}

#[test]
fn elements_of_a_hello_have_their_length() {
    check("an element", Body::Hello(Hello::for_version(4)), 10, 8);
}

#[test]
fn matches_have_their_length() {
    // With less than four bytes of padding: four zeros are a field of no bytes.
    let fields = || vec![Field::EthSrc(Masked::exact([1; 6]))];
    check("a match", flow(fields(), vec![]), 50, 14);
    let request = FlowStatsRequest {
        table: TABLE_ALL,
        out_port: port::ANY,
        out_group: GROUP_ANY,
        cookie: 0,
        cookie_mask: 0,
        fields: fields(),
    };
    check("a match in a request", Body::MultipartRequest(MultipartRequest::Flows(request)), 50, 14);
}

#[test]
fn match_fields_have_their_length() {
    let address = Masked::exact(u128::MAX / 3);
    let fields = [
        (Field::InPort(1), 4_u8),
        (Field::Metadata(Masked::exact(1)), 8),
        (Field::Metadata(Masked::under(1, 1)), 16),
        (Field::EthDst(Masked::exact([1; 6])), 6),
        (Field::EthSrc(Masked::under([1; 6], [1; 6])), 12),
        (Field::EthType(1), 2),
        (Field::VlanVid(Masked::exact(1)), 2),
        (Field::IpProto(1), 1),
        (Field::UdpSrc(1), 2),
        (Field::UdpDst(1), 2),
        (Field::Ipv6Src(address), 16),
        (Field::Ipv6Dst(Masked::under(1, 1)), 32),
        (Field::Icmpv6Type(1), 1),
    ];
    for (field, right) in fields {
        let frame = encode(flow(vec![field.clone()], vec![])).unwrap();
        assert_eq!(frame[55], right, "{field:?}");
        for wrong in (0..=255).filter(|length| *length != right) {
            let mut frame = frame.clone();
            frame[55] = wrong;
            assert!(Message::decode(&frame).is_err(), "{field:?} of {wrong} bytes");
        }
    }
}

#[test]
fn actions_have_their_length() {
    let packet = |action| {
        Body::PacketOut(PacketOut { in_port: 1, actions: vec![action], data: vec![0xff; 3] })
    };
    check("an output", packet(output()), 26, 16);
    check("a group", packet(Action::Group(1)), 26, 8);
    check("a decrement", packet(Action::DecrementIpTtl), 26, 8);
    check("a set-field", packet(set_field()), 26, 16);
    check("another", packet(Action::Other { kind: 17, bytes: vec![1; 12] }), 26, 16);

    // Without actions, all is data.
    let frame = encode(packet(output())).unwrap();
    for length in 0..=255 {
        let mut frame = frame.clone();
        frame[17] = length;
        assert_eq!(Message::decode(&frame).is_ok(), matches!(length, 0 | 16), "{length}");
    }
}

#[test]
fn a_set_field_action_has_less_than_eight_bytes_of_padding() {
    // As an unknown action, with the bytes of an output to a port after the field.
    let field = [0x80, 0, 6, 6, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let action = Action::Other { kind: 25, bytes: field.to_vec() };
    let packet = Body::PacketOut(PacketOut { in_port: 1, actions: vec![action], data: vec![] });
    let frame = encode(packet).unwrap();
    assert_eq!(Message::decode(&frame), Err(DecodeError::Length("a set-field action")));
}

#[test]
fn instructions_have_their_length() {
    let one = |instruction| flow(vec![], vec![instruction]);
    check("a goto", one(Instruction::GotoTable(1)), 58, 8);
    check("a write of metadata", one(Instruction::WriteMetadata(Masked::exact(1))), 58, 24);
    check("a meter", one(Instruction::Meter(1)), 58, 8);
    check("a removal of actions", one(Instruction::ClearActions), 58, 8);
    check("no actions", one(Instruction::ApplyActions(vec![])), 58, 8);
    check("another", one(Instruction::Other { kind: 9, bytes: vec![1; 4] }), 58, 8);
    check("its action", one(Instruction::ApplyActions(vec![set_field()])), 66, 16);
}

#[test]
fn buckets_and_groups_have_their_length() {
    let group = GroupMod {
        command: GroupCommand::Add,
        kind: GroupKind::Select,
        group: 7,
        buckets: vec![bucket(), bucket()],
    };
    check("a bucket", Body::GroupMod(group.clone()), 16, 32);
    check("a second bucket", Body::GroupMod(group.clone()), 48, 32);
    check("the action of a bucket", Body::GroupMod(group), 34, 16);
    let group = GroupDescription { kind: GroupKind::All, group: 7, buckets: vec![bucket()] };
    check("a group", reply(MultipartPart::Groups(vec![group.clone(), group.clone()])), 16, 40);
    check("a bucket of a group", reply(MultipartPart::Groups(vec![group])), 24, 32);
}

#[test]
fn flows_in_a_reply_have_their_length() {
    let flow = FlowStats {
        fields: vec![Field::EthSrc(Masked::exact([1; 6]))],
        instructions: vec![Instruction::Meter(1)],
        ..FlowStats::default()
    };
    check("a flow", reply(MultipartPart::Flows(vec![flow.clone(), flow.clone()])), 16, 72);
    let alone = FlowStats { instructions: vec![], ..flow.clone() };
    check("a match of a flow", reply(MultipartPart::Flows(vec![alone])), 66, 14);
    check("an instruction of a flow", reply(MultipartPart::Flows(vec![flow])), 82, 8);
}

/// The message with this many bytes, which it also states.
fn resized(frame: &[u8], length: usize) -> Vec<u8> {
    let mut frame = frame.to_vec();
    frame.resize(length, 0);
    frame[2..4].copy_from_slice(&u16::try_from(length).unwrap().to_be_bytes());
    frame
}

#[test]
fn messages_of_a_fixed_length_have_it() {
    let config = SwitchConfig { fragments: FragmentHandling::Normal, miss_send_bytes: 1 };
    let role = RoleRequest { role: Role::Equal, generation_id: 1 };
    let removed = FlowRemoved {
        cookie: 0,
        priority: 0,
        reason: RemovedReason::Delete,
        table: 0,
        duration_seconds: 0,
        duration_nanoseconds: 0,
        idle_timeout: 0,
        hard_timeout: 0,
        packet_count: 0,
        byte_count: 0,
        fields: vec![],
    };
    let flows = FlowStatsRequest {
        table: TABLE_ALL,
        out_port: port::ANY,
        out_group: GROUP_ANY,
        cookie: 0,
        cookie_mask: 0,
        fields: vec![],
    };
    let fixed = [
        Body::FeaturesRequest,
        Body::FeaturesReply(Features::default()),
        Body::GetConfigRequest,
        Body::GetConfigReply(config),
        Body::SetConfig(config),
        Body::FlowRemoved(removed),
        Body::PortStatus(PortStatus { reason: PortReason::Add, port: Port::default() }),
        Body::MultipartRequest(MultipartRequest::Description),
        Body::MultipartRequest(MultipartRequest::Flows(flows)),
        Body::MultipartRequest(MultipartRequest::PortStats { port: 1 }),
        Body::MultipartRequest(MultipartRequest::Groups),
        Body::MultipartRequest(MultipartRequest::PortDescription),
        reply(MultipartPart::Description(Description::default())),
        Body::BarrierRequest,
        Body::BarrierReply,
        Body::RoleRequest(role),
        Body::RoleReply(role),
    ];
    for body in fixed {
        let frame = encode(body.clone()).unwrap();
        for length in (8..frame.len() + 20).filter(|length| *length != frame.len()) {
            let wrong = resized(&frame, length);
            assert!(Message::decode(&wrong).is_err(), "{body:?} of {length} bytes");
        }
    }
}

#[test]
fn lists_of_ports_have_whole_ports() {
    for part in [
        MultipartPart::PortDescription(vec![Port::default(); 2]),
        MultipartPart::PortStats(vec![PortStats::default(); 2]),
    ] {
        let frame = encode(reply(part)).unwrap();
        let one = (frame.len() - 16) / 2;
        for length in 16..frame.len() {
            let whole = (length - 16) % one == 0;
            assert_eq!(Message::decode(&resized(&frame, length)).is_ok(), whole, "{length}");
        }
    }
}

#[test]
fn a_message_has_the_length_that_it_states() {
    let mut frame = encode(Body::EchoRequest(vec![1, 2])).unwrap();
    frame[3] -= 1;
    assert_eq!(Message::decode(&frame), Err(DecodeError::Length("a message")));
    frame[3] += 2;
    assert_eq!(Message::decode(&frame), Err(DecodeError::Length("a message")));
    assert_eq!(Message::decode(&frame[..7]), Err(DecodeError::Truncated("a message")));
    assert_eq!(Message::decode(&[]), Err(DecodeError::Truncated("a message")));
}

#[test]
fn a_stream_is_unusable_after_a_length_that_no_message_has() {
    for length in 0..8 {
        let stream = [4, 2, 0, length, 0, 0, 0, 0];
        assert_eq!(frame_length(&stream), Err(DecodeError::Length("a message")));
    }
    for bytes in 0..4 {
        assert_eq!(frame_length(&[4, 2, 0, 0][..bytes]), Ok(None), "not known yet");
    }
    assert_eq!(frame_length(&[4, 2, 0, 8]), Ok(None), "not complete yet");
    assert_eq!(frame_length(&[4, 2, 0, 8, 0, 0, 0, 0, 4, 2]), Ok(Some(8)));
}

#[test]
fn the_longest_message_can_be_sent_and_no_longer_one() {
    let echo = |bytes| encode(Body::EchoRequest(vec![0; bytes]));
    let frame = echo(MESSAGE_BYTES_MAX - 8).unwrap();
    assert_eq!(frame_length(&frame), Ok(Some(MESSAGE_BYTES_MAX)));
    assert_eq!(echo(MESSAGE_BYTES_MAX - 7), Err(EncodeError::TooLong("a message")));
}

#[test]
fn structures_that_are_too_long_cannot_be_sent() {
    let too_long = |what| Err(EncodeError::TooLong(what));
    let other = |field, length| {
        Field::Other(OtherField { class: 0, field, has_mask: false, bytes: vec![0; length] })
    };
    assert!(encode(flow(vec![other(0x7f, 255)], vec![])).is_ok());
    assert_eq!(encode(flow(vec![other(0, 256)], vec![])), too_long("a match field"));
    let number = too_long("the number of a match field");
    assert_eq!(encode(flow(vec![other(0x80, 1)], vec![])), number);
    assert_eq!(encode(flow(vec![other(0, 255); 254], vec![])), too_long("a match"));

    let outputs = vec![output(); 4096];
    let instruction = Instruction::ApplyActions(outputs.clone());
    assert_eq!(encode(flow(vec![], vec![instruction])), too_long("an instruction"));
    let packet = PacketOut { in_port: 1, actions: outputs.clone(), data: vec![] };
    assert_eq!(encode(Body::PacketOut(packet)), too_long("the actions"));
    let action = Action::Other { kind: 17, bytes: vec![0; 65_532] };
    let packet = PacketOut { in_port: 1, actions: vec![action], data: vec![] };
    assert_eq!(encode(Body::PacketOut(packet)), too_long("an action"));

    let bucket = Bucket { actions: outputs, ..bucket() };
    let group = GroupDescription { kind: GroupKind::All, group: 7, buckets: vec![bucket] };
    assert_eq!(encode(reply(MultipartPart::Groups(vec![group.clone()]))), too_long("a bucket"));
    let buckets = vec![Bucket { actions: vec![], ..group.buckets[0].clone() }; 4096];
    let group = GroupDescription { buckets, ..group };
    assert_eq!(encode(reply(MultipartPart::Groups(vec![group]))), too_long("a group"));
    let flow =
        FlowStats { instructions: vec![Instruction::ClearActions; 8192], ..FlowStats::default() };
    assert_eq!(encode(reply(MultipartPart::Flows(vec![flow]))), too_long("a flow"));
}
