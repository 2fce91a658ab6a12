//! Messages of every type as a controller and a switch of BlueBridge send them, with the number of their type.

use bluebridge_openflow::port::{self, Port, PortReason, PortStats, PortStatus};
use bluebridge_openflow::{
    Action, Body, Bucket, Description, ErrorMessage, Features, Field, FlowCommand, FlowFlags,
    FlowMod, FlowRemoved, FlowStats, FlowStatsRequest, FragmentHandling, GROUP_ANY, GroupCommand,
    GroupDescription, GroupKind, GroupMod, Hello, Instruction, Masked, MultipartPart,
    MultipartReply, MultipartRequest, PacketIn, PacketInReason, PacketOut, RemovedReason, Role,
    RoleRequest, SwitchConfig, TABLE_ALL, VERSION,
};

const ADDRESS: u128 = 0xfdbb_0001_0002_0000_0000_0000_0000_0001;

fn fields() -> Vec<Field> {
    vec![
        Field::InPort(1),
        Field::Metadata(Masked::under(0x100, 0xff00)),
        Field::EthDst(Masked::under([1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0])),
        Field::EthSrc(Masked::exact([2, 0, 0, 0, 0, 1])),
        Field::EthType(0x86dd),
        Field::VlanVid(Masked::under(0x1000, 0x1000)),
        Field::IpProto(17),
        Field::Ipv6Src(Masked::exact(ADDRESS)),
        Field::Ipv6Dst(Masked::under(ADDRESS >> 80 << 80, u128::MAX << 80)),
        Field::UdpSrc(1000),
        Field::UdpDst(1001),
    ]
}

/// An Ethernet header of a local experiment.
fn ethernet() -> Vec<u8> {
    [&[2; 6][..], &[4; 6], &[0x88, 0xb5]].concat()
}

fn output(port: u32) -> Action {
    Action::Output { port, max_bytes: 0 }
}

fn actions() -> Vec<Action> {
    let mac = |last| Masked::exact([2, 0, 0, 0, 0, last]);
    vec![
        Action::SetField(Field::EthSrc(mac(1))),
        Action::SetField(Field::EthDst(mac(2))),
        Action::SetField(Field::Ipv6Dst(Masked::exact(ADDRESS))),
        Action::DecrementIpTtl,
        Action::Group(7),
        output(2),
        output(port::CONTROLLER),
    ]
}

fn instructions() -> Vec<Instruction> {
    vec![
        Instruction::Meter(1),
        Instruction::ApplyActions(actions()),
        Instruction::ClearActions,
        Instruction::WriteActions(vec![Action::Group(7)]),
        Instruction::WriteMetadata(Masked::under(0x200, 0xff00)),
        Instruction::GotoTable(3),
    ]
}

fn buckets() -> Vec<Bucket> {
    let bucket =
        |weight, actions| Bucket { weight, watch_port: port::ANY, watch_group: GROUP_ANY, actions };
    vec![bucket(1, vec![output(1)]), bucket(3, vec![Action::DecrementIpTtl, output(2)])]
}

fn flow_mod(command: FlowCommand, fields: Vec<Field>, instructions: Vec<Instruction>) -> Body {
    Body::FlowMod(FlowMod {
        cookie: 0xb1e0_0000_0000_0001,
        cookie_mask: 0xffff_0000_0000_0000,
        table: 2,
        command,
        idle_timeout: 0,
        hard_timeout: 30,
        priority: 100,
        out_port: port::ANY,
        out_group: GROUP_ANY,
        flags: FlowFlags::SEND_FLOW_REMOVED,
        fields,
        instructions,
    })
}

fn group_mod(command: GroupCommand, kind: GroupKind, buckets: Vec<Bucket>) -> Body {
    Body::GroupMod(GroupMod { command, kind, group: 7, buckets })
}

const CONFIG: SwitchConfig =
    SwitchConfig { fragments: FragmentHandling::Drop, miss_send_bytes: 0xffff };

/// What a controller sends.
pub(crate) fn from_controller() -> Vec<(u8, Body)> {
    let request = Body::MultipartRequest;
    let flows = FlowStatsRequest {
        table: TABLE_ALL,
        out_port: port::ANY,
        out_group: GROUP_ANY,
        cookie: 1,
        cookie_mask: 1,
        fields: fields(),
    };
    let role = |role| Body::RoleRequest(RoleRequest { role, generation_id: 9 });
    let packet = PacketOut { in_port: port::CONTROLLER, actions: actions(), data: ethernet() };
    vec![
        (0, Body::Hello(Hello::for_version(VERSION))),
        (2, Body::EchoRequest(Vec::new())),
        (3, Body::EchoReply(b"echo".to_vec())),
        (5, Body::FeaturesRequest),
        (7, Body::GetConfigRequest),
        (9, Body::SetConfig(CONFIG)),
        (13, Body::PacketOut(packet)),
        (14, flow_mod(FlowCommand::Add, fields(), instructions())),
        (14, flow_mod(FlowCommand::Modify, vec![Field::EthType(0x86dd)], vec![])),
        (14, flow_mod(FlowCommand::ModifyStrict, vec![], instructions())),
        (14, flow_mod(FlowCommand::Delete, vec![], vec![])),
        (14, flow_mod(FlowCommand::DeleteStrict, fields(), vec![])),
        (15, group_mod(GroupCommand::Add, GroupKind::Select, buckets())),
        (15, group_mod(GroupCommand::Modify, GroupKind::All, buckets())),
        (15, group_mod(GroupCommand::Delete, GroupKind::Indirect, vec![])),
        (18, request(MultipartRequest::Description)),
        (18, request(MultipartRequest::Flows(flows))),
        (18, request(MultipartRequest::PortStats { port: port::ANY })),
        (18, request(MultipartRequest::Groups)),
        (18, request(MultipartRequest::PortDescription)),
        (20, Body::BarrierRequest),
        (24, role(Role::NoChange)),
        (24, role(Role::Equal)),
        (24, role(Role::Primary)),
        (24, role(Role::Secondary)),
    ]
}

/// What a switch sends.
pub(crate) fn from_switch() -> Vec<(u8, Body)> {
    let reply = |part| Body::MultipartReply(MultipartReply { more: false, part });
    let mut first = Vec::new();
    bluebridge_openflow::Message { xid: 3, body: Body::BarrierRequest }
        .encode(&mut first)
        .expect("it is short");
    let features = Features {
        datapath_id: 0x0102_0304_0506_0708,
        buffer_count: 256,
        table_count: 254,
        auxiliary_id: 1,
        capabilities: 0x4f,
    };
    let packet = PacketIn {
        buffer_id: None,
        total_bytes: 14,
        reason: PacketInReason::Action,
        table: 3,
        cookie: 0x1234,
        fields: vec![Field::InPort(7), Field::Metadata(Masked::exact(5))],
        data: ethernet(),
    };
    let removed = FlowRemoved {
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
        fields: fields(),
    };
    let port = Port {
        number: 2,
        mac: [2, 0, 0, 0, 0, 2],
        name: "eth2".to_owned(),
        config: 1,
        state: 4,
        features: [0x840; 4],
        speed: 10_000_000,
        speed_max: 40_000_000,
    };
    let local = Port { number: port::LOCAL, ..port.clone() };
    let flow = FlowStats {
        table: 3,
        duration_seconds: 5,
        priority: 100,
        cookie: 0x1234,
        fields: fields(),
        instructions: instructions(),
        ..FlowStats::default()
    };
    let flows = vec![flow.clone(), FlowStats::default(), flow];
    let group = |group, kind| GroupDescription { kind, group, buckets: buckets() };
    let counts = |number| PortStats { number, packets: [1, 2], ..PortStats::default() };
    let description = Description {
        manufacturer: "a manufacturer".to_owned(),
        hardware: "hardware".to_owned(),
        software: "software".to_owned(),
        serial: "1".to_owned(),
        datapath: "a switch".to_owned(),
    };
    let status = |reason| Body::PortStatus(PortStatus { reason, port: port.clone() });
    vec![
        (0, Body::Hello(Hello { version: VERSION, bitmap: None })),
        (1, Body::Error(ErrorMessage { kind: 6, code: 3, data: first })),
        (2, Body::EchoRequest(b"echo".to_vec())),
        (3, Body::EchoReply(Vec::new())),
        (6, Body::FeaturesReply(features)),
        (8, Body::GetConfigReply(CONFIG)),
        (10, Body::PacketIn(packet)),
        (11, Body::FlowRemoved(removed)),
        (12, status(PortReason::Add)),
        (12, status(PortReason::Delete)),
        (12, status(PortReason::Modify)),
        (19, reply(MultipartPart::Description(description))),
        (19, reply(MultipartPart::Flows(flows))),
        (19, reply(MultipartPart::PortStats(vec![counts(1), counts(2)]))),
        (
            19,
            reply(MultipartPart::Groups(vec![
                group(1, GroupKind::Select),
                group(2, GroupKind::FastFailover),
            ])),
        ),
        (19, reply(MultipartPart::PortDescription(vec![local, port.clone()]))),
        (21, Body::BarrierReply),
        (25, Body::RoleReply(RoleRequest { role: Role::Primary, generation_id: 9 })),
    ]
}
