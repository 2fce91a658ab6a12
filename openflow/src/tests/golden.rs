//! Messages whose bytes were written by hand from the structures of the specification.

use crate::port::{self, Port, PortReason, PortStats, PortStatus};
use crate::*;

/// The bytes of a hexadecimal text; a semicolon begins a comment.
fn bytes(text: &str) -> Vec<u8> {
    let hex: String = text.lines().filter_map(|line| line.split(';').next()).collect();
    let digits: Vec<_> = hex.chars().filter_map(|digit| digit.to_digit(16)).collect();
    digits.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).unwrap()).collect()
}

/// The message has these bytes, and these bytes are the message. All have the transaction id 0x2a.
#[track_caller]
fn check(body: Body, text: &str) {
    let message = Message { xid: 0x2a, body };
    let mut out = Vec::new();
    message.encode(&mut out).unwrap();
    assert_eq!(out, bytes(text), "encoded");
    assert_eq!(Message::decode(&bytes(text)), Ok(message), "decoded");
}

fn output(port: u32) -> Action {
    Action::Output { port, max_bytes: 0 }
}

#[test]
fn a_hello_states_its_versions_in_a_bitmap() {
    check(
        Body::Hello(Hello { version: 4, bitmap: Some(0b1_0010) }),
        "04 00 0010 0000002a
         0001 0008 00000012         ; OFPHET_VERSIONBITMAP, length, versions 1 and 4",
    );
    check(Body::Hello(Hello { version: 1, bitmap: None }), "01 00 0008 0000002a");
}

#[test]
fn an_error_has_a_type_a_code_and_the_beginning_of_its_cause() {
    check(
        Body::Error(ErrorMessage { kind: 4, code: 9, data: vec![4, 14, 0, 56, 0, 0, 0, 42] }),
        "04 01 0014 0000002a
         0004 0009                  ; OFPET_BAD_MATCH, OFPBMC_BAD_PREREQ
         04 0e 0038 0000002a        ; the header of a flow mod",
    );
}

#[test]
fn echoes_carry_any_data() {
    check(Body::EchoRequest(vec![]), "04 02 0008 0000002a");
    check(Body::EchoReply(b"abc".to_vec()), "04 03 000b 0000002a 616263");
}

#[test]
fn experimenter_messages_have_an_owner_and_a_type() {
    check(
        Body::Experimenter { experimenter: 0x2320, kind: 7, data: vec![1] },
        "04 04 0011 0000002a 00002320 00000007 01",
    );
}

#[test]
fn features_are_requested_and_reported() {
    check(Body::FeaturesRequest, "04 05 0008 0000002a");
    check(
        Body::FeaturesReply(Features {
            datapath_id: 0x0102_0304_0506_0708,
            buffer_count: 256,
            table_count: 254,
            auxiliary_id: 1,
            capabilities: 0x4f,
        }),
        "04 06 0020 0000002a
         0102030405060708           ; datapath id
         00000100 fe 01 0000        ; buffers, tables, auxiliary id, padding
         0000004f 00000000          ; capabilities, reserved",
    );
}

#[test]
fn the_configuration_is_requested_reported_and_set() {
    let config = SwitchConfig { fragments: FragmentHandling::Drop, miss_send_bytes: 128 };
    check(Body::GetConfigRequest, "04 07 0008 0000002a");
    check(Body::GetConfigReply(config), "04 08 000c 0000002a 0001 0080");
    let config = SwitchConfig { fragments: FragmentHandling::Reassemble, miss_send_bytes: 0xffff };
    check(Body::SetConfig(config), "04 09 000c 0000002a 0002 ffff");
}

#[test]
fn a_packet_in_has_its_port_in_the_match_and_two_bytes_before_its_data() {
    check(
        Body::PacketIn(PacketIn {
            buffer_id: None,
            total_bytes: 60,
            reason: PacketInReason::Action,
            table: 3,
            cookie: 0x1234,
            fields: vec![Field::InPort(7)],
            data: b"data".to_vec(),
        }),
        "04 0a 002e 0000002a
         ffffffff 003c 01 03        ; OFP_NO_BUFFER, length, OFPR_ACTION, table
         0000000000001234           ; cookie
         0001 000c                  ; OFPMT_OXM, length without padding
         8000 00 04 00000007        ; OFPXMT_OFB_IN_PORT
         00000000                   ; padding of the match
         0000 64617461              ; padding, data",
    );
}

#[test]
fn the_end_of_a_flow_is_reported_with_its_counts() {
    check(
        Body::FlowRemoved(FlowRemoved {
            cookie: 0x1234,
            priority: 100,
            reason: RemovedReason::HardTimeout,
            table: 3,
            duration_seconds: 5,
            duration_nanoseconds: 6,
            idle_timeout: 7,
            hard_timeout: 8,
            packet_count: 9,
            byte_count: 10,
            fields: vec![],
        }),
        "04 0b 0038 0000002a
         0000000000001234           ; cookie
         0064 01 03                 ; priority, OFPRR_HARD_TIMEOUT, table
         00000005 00000006          ; duration
         0007 0008                  ; timeouts
         0000000000000009 000000000000000a
         0001 0004 00000000         ; a match of nothing, padding",
    );
}

fn port_2() -> Port {
    Port {
        number: 2,
        mac: [2, 0, 0, 0, 0, 2],
        name: "eth2".to_owned(),
        config: 1,
        state: 4,
        features: [0x840, 0x41, 0x42, 0x43],
        speed: 10_000_000,
        speed_max: 40_000_000,
    }
}

const PORT_2: &str = "
    00000002 00000000               ; number, padding
    020000000002 0000               ; MAC address, padding
    65746832 00000000 00000000 00000000
    00000001 00000004               ; OFPPC_PORT_DOWN, OFPPS_LIVE
    00000840 00000041 00000042 00000043
    00989680 02625a00               ; speeds";

#[test]
fn a_change_of_a_port_is_reported_with_the_port() {
    check(
        Body::PortStatus(PortStatus { reason: PortReason::Modify, port: port_2() }),
        &format!("04 0c 0050 0000002a 02 00000000000000 ; OFPPR_MODIFY\n{PORT_2}"),
    );
}

#[test]
fn a_packet_out_states_the_length_of_its_actions() {
    check(
        Body::PacketOut(PacketOut {
            in_port: port::CONTROLLER,
            actions: vec![output(2)],
            data: b"data".to_vec(),
        }),
        "04 0d 002c 0000002a
         ffffffff fffffffd          ; OFP_NO_BUFFER, OFPP_CONTROLLER
         0010 000000000000          ; length of the actions, padding
         0000 0010 00000002 0000 000000000000
         64617461",
    );
}

#[test]
fn a_flow_mod_has_a_padded_match_and_instructions() {
    let (address, prefix) = ((0xfdbb_u128) << 112 | 0x0102 << 96, u128::MAX << 64);
    check(
        Body::FlowMod(FlowMod {
            cookie: 0x1234,
            cookie_mask: 0,
            table: 3,
            command: FlowCommand::Add,
            idle_timeout: 10,
            hard_timeout: 20,
            priority: 100,
            out_port: port::ANY,
            out_group: GROUP_ANY,
            flags: FlowFlags::SEND_FLOW_REMOVED,
            fields: vec![Field::EthType(0x86dd), Field::Ipv6Dst(Masked::under(address, prefix))],
            instructions: vec![
                Instruction::ApplyActions(vec![
                    Action::SetField(Field::EthDst(Masked::exact([2, 0, 0, 0, 0, 9]))),
                    output(2),
                ]),
                Instruction::WriteMetadata(Masked::under(0x500, 0xff00)),
                Instruction::GotoTable(4),
            ],
        }),
        "04 0e 00a8 0000002a
         0000000000001234 0000000000000000
         03 00 000a 0014 0064       ; table, OFPFC_ADD, timeouts, priority
         ffffffff ffffffff          ; OFP_NO_BUFFER, OFPP_ANY
         ffffffff 0001 0000         ; OFPG_ANY, OFPFF_SEND_FLOW_REM, padding
         0001 002e                  ; OFPMT_OXM, length without padding
         8000 0a 02 86dd            ; OFPXMT_OFB_ETH_TYPE
         8000 37 20                 ; OFPXMT_OFB_IPV6_DST with a mask
         fdbb0102000000000000000000000000 ffffffffffffffff0000000000000000
         0000                       ; padding of the match
         0004 0028 00000000         ; OFPIT_APPLY_ACTIONS
         0019 0010 8000 06 06 020000000009 0000
         0000 0010 00000002 0000 000000000000
         0002 0018 00000000         ; OFPIT_WRITE_METADATA
         0000000000000500 000000000000ff00
         0001 0008 04 000000        ; OFPIT_GOTO_TABLE",
    );
}

#[test]
fn other_instructions_and_actions_have_their_structures() {
    let change = FlowMod {
        cookie: 0,
        cookie_mask: u64::MAX,
        table: TABLE_ALL,
        command: FlowCommand::DeleteStrict,
        idle_timeout: 0,
        hard_timeout: 0,
        priority: 0,
        out_port: 1,
        out_group: 2,
        flags: FlowFlags(0),
        fields: vec![],
        instructions: vec![
            Instruction::Meter(9),
            Instruction::WriteActions(vec![Action::DecrementIpTtl, Action::Group(5)]),
            Instruction::ClearActions,
        ],
    };
    check(
        Body::FlowMod(change),
        "04 0e 0060 0000002a
         0000000000000000 ffffffffffffffff
         ff 04 0000 0000 0000 ffffffff 00000001 00000002 0000 0000
         0001 0004 00000000
         0006 0008 00000009         ; OFPIT_METER
         0003 0018 00000000         ; OFPIT_WRITE_ACTIONS
         0018 0008 00000000         ; OFPAT_DEC_NW_TTL
         0016 0008 00000005         ; OFPAT_GROUP
         0005 0008 00000000         ; OFPIT_CLEAR_ACTIONS",
    );
}

#[test]
fn match_fields_have_their_numbers_and_lengths() {
    let fields = vec![
        Field::Metadata(Masked::under(1, 3)),
        Field::EthDst(Masked::under([1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0])),
        Field::EthSrc(Masked::exact([2, 0, 0, 0, 0, 1])),
        Field::VlanVid(Masked::under(0x1000, 0x1000)),
        Field::IpProto(58),
        Field::UdpSrc(1),
        Field::UdpDst(2),
        Field::Ipv6Src(Masked::exact(1)),
        Field::Icmpv6Type(135),
        Field::ip_fragment(Masked::under(2, 2)),
        Field::ip_ttl(1),
    ];
    let flows =
        FlowStatsRequest { table: 1, out_port: 2, out_group: 3, cookie: 4, cookie_mask: 5, fields };
    check(
        Body::MultipartRequest(MultipartRequest::Flows(flows)),
        "04 12 00a0 0000002a 0001 0000 00000000
         01 000000 00000002 00000003 00000000 0000000000000004 0000000000000005
         0001 006f
         8000 05 10 0000000000000001 0000000000000003
         8000 07 0c 010000000000 010000000000
         8000 08 06 020000000001
         8000 0d 04 1000 1000
         8000 14 01 3a
         8000 1e 02 0001
         8000 20 02 0002
         8000 34 10 00000000000000000000000000000001
         8000 3a 01 87
         0001 35 02 02 02           ; NXM_NX_IP_FRAG
         0001 3a 01 01              ; NXM_NX_IP_TTL
         00                             ; padding",
    );
}

#[test]
fn a_group_mod_has_buckets_with_weights() {
    let bucket =
        |weight, actions| Bucket { weight, watch_port: port::ANY, watch_group: GROUP_ANY, actions };
    let mac = Action::SetField(Field::EthSrc(Masked::exact([2, 0, 0, 0, 0, 9])));
    check(
        Body::GroupMod(GroupMod {
            command: GroupCommand::Modify,
            kind: GroupKind::Select,
            group: 0x77,
            buckets: vec![bucket(3, vec![output(1)]), bucket(1, vec![mac, output(2)])],
        }),
        "04 0f 0060 0000002a
         0001 01 00 00000077        ; OFPGC_MODIFY, OFPGT_SELECT, padding, group
         0020 0003 ffffffff ffffffff 00000000
         0000 0010 00000001 0000 000000000000
         0030 0001 ffffffff ffffffff 00000000
         0019 0010 8000 08 06 020000000009 0000
         0000 0010 00000002 0000 000000000000",
    );
}

#[test]
fn a_flow_request_can_cover_every_flow() {
    check(
        Body::MultipartRequest(MultipartRequest::Flows(FlowStatsRequest {
            table: TABLE_ALL,
            out_port: port::ANY,
            out_group: GROUP_ANY,
            cookie: 0x1234,
            cookie_mask: 0xff00,
            fields: vec![],
        })),
        "04 12 0038 0000002a
         0001 0000 00000000         ; OFPMP_FLOW, no flags, padding
         ff 000000 ffffffff         ; OFPTT_ALL, padding, OFPP_ANY
         ffffffff 00000000          ; OFPG_ANY, padding
         0000000000001234 000000000000ff00
         0001 0004 00000000         ; a match of everything, padding",
    );
}

#[test]
fn a_flow_reply_has_flows_of_different_lengths() {
    let first = FlowStats {
        table: 3,
        duration_seconds: 5,
        duration_nanoseconds: 6,
        priority: 100,
        idle_timeout: 7,
        hard_timeout: 8,
        flags: FlowFlags(1),
        cookie: 0x1234,
        packet_count: 9,
        byte_count: 10,
        fields: vec![Field::InPort(1)],
        instructions: vec![Instruction::GotoTable(4)],
    };
    check(
        Body::MultipartReply(MultipartReply {
            more: true,
            part: MultipartPart::Flows(vec![first, FlowStats::default()]),
        }),
        "04 13 0090 0000002a
         0001 0001 00000000         ; OFPMP_FLOW, OFPMPF_REPLY_MORE, padding
         0048 03 00 00000005 00000006
         0064 0007 0008 0001 00000000
         0000000000001234 0000000000000009 000000000000000a
         0001 000c 8000 00 04 00000001 00000000
         0001 0008 04 000000
         0038 00 00 00000000 00000000
         0000 0000 0000 0000 00000000
         0000000000000000 0000000000000000 0000000000000000
         0001 0004 00000000",
    );
}

#[test]
fn a_port_description_has_64_bytes_for_a_port() {
    check(
        Body::MultipartReply(MultipartReply {
            more: false,
            part: MultipartPart::PortDescription(vec![port_2()]),
        }),
        &format!("04 13 0050 0000002a 000d 0000 00000000 {PORT_2}"),
    );
}

#[test]
fn counts_of_ports_are_requested_and_reported() {
    check(
        Body::MultipartRequest(MultipartRequest::PortStats { port: port::ANY }),
        "04 12 0018 0000002a 0004 0000 00000000 ffffffff 00000000",
    );
    let counts = PortStats {
        number: 2,
        packets: [1, 2],
        bytes: [3, 4],
        dropped: [5, 6],
        errors: [7, 8],
        details: [9, 10, 11, 12],
        duration: [13, 14],
    };
    check(
        Body::MultipartReply(MultipartReply {
            more: false,
            part: MultipartPart::PortStats(vec![counts]),
        }),
        "04 13 0080 0000002a 0004 0000 00000000
         00000002 00000000
         0000000000000001 0000000000000002 0000000000000003 0000000000000004
         0000000000000005 0000000000000006 0000000000000007 0000000000000008
         0000000000000009 000000000000000a 000000000000000b 000000000000000c
         0000000d 0000000e",
    );
}

#[test]
fn groups_are_requested_and_described() {
    check(
        Body::MultipartRequest(MultipartRequest::Groups),
        "04 12 0010 0000002a 0007 0000 00000000",
    );
    let bucket = Bucket { weight: 0, watch_port: 1, watch_group: 2, actions: vec![] };
    let group = GroupDescription { kind: GroupKind::FastFailover, group: 7, buckets: vec![bucket] };
    check(
        Body::MultipartReply(MultipartReply {
            more: false,
            part: MultipartPart::Groups(vec![group]),
        }),
        "04 13 0028 0000002a 0007 0000 00000000
         0018 03 00 00000007        ; length, OFPGT_FF, padding, group
         0010 0000 00000001 00000002 00000000",
    );
}

#[test]
fn a_description_has_fixed_texts() {
    check(
        Body::MultipartRequest(MultipartRequest::Description),
        "04 12 0010 0000002a 0000 0000 00000000",
    );
    check(
        Body::MultipartRequest(MultipartRequest::PortDescription),
        "04 12 0010 0000002a 000d 0000 00000000",
    );
    let zeros = |count| "00".repeat(count);
    check(
        Body::MultipartReply(MultipartReply {
            more: false,
            part: MultipartPart::Description(Description {
                manufacturer: "m".to_owned(),
                hardware: "h".to_owned(),
                software: "s".to_owned(),
                serial: "n".to_owned(),
                datapath: "d".to_owned(),
            }),
        }),
        &format!(
            "04 13 0430 0000002a 0000 0000 00000000 6d {long} 68 {long} 73 {long} 6e {} 64 {long}",
            zeros(31),
            long = zeros(255),
        ),
    );
}

#[test]
fn a_barrier_has_no_contents() {
    check(Body::BarrierRequest, "04 14 0008 0000002a");
    check(Body::BarrierReply, "04 15 0008 0000002a");
}

#[test]
fn a_role_is_requested_with_a_generation() {
    let role = |role| RoleRequest { role, generation_id: 0x8000_0000_0000_0001 };
    check(
        Body::RoleRequest(role(Role::Primary)),
        "04 18 0018 0000002a 00000002 00000000 8000000000000001",
    );
    check(
        Body::RoleReply(role(Role::Secondary)),
        "04 19 0018 0000002a 00000003 00000000 8000000000000001",
    );
}

#[test]
fn other_messages_are_kept_as_bytes() {
    check(Body::Other { kind: 28, data: vec![1, 2] }, "04 1c 000a 0000002a 0102");
}
