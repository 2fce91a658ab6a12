//! Messages of every kind, in the form in which they are decoded.

use core::fmt::Debug;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Select, select};

use crate::port::{Port, PortReason, PortStats, PortStatus};
use crate::*;

/// Any message; each is short enough to be encoded.
pub(super) fn message() -> impl Strategy<Value = Message> {
    (any::<u32>(), body()).prop_map(|(xid, body)| Message { xid, body })
}

fn body() -> BoxedStrategy<Body> {
    let role =
        (one_of([Role::NoChange, Role::Equal, Role::Primary, Role::Secondary]), any::<u64>());
    let role = role.prop_map(|(role, generation_id)| RoleRequest { role, generation_id });
    // Types without contents of their own: meters, queues, asynchronous messages.
    let other = (one_of([16, 17, 22, 23, 26, 27, 28, 29, 30, 255]), bytes(40));
    let small = prop_oneof![
        any::<(u8, Option<u32>)>()
            .prop_map(|(version, bitmap)| Body::Hello(Hello { version, bitmap })),
        (any::<u16>(), any::<u16>(), bytes(80))
            .prop_map(|(kind, code, data)| Body::Error(ErrorMessage { kind, code, data })),
        bytes(80).prop_map(Body::EchoRequest),
        bytes(80).prop_map(Body::EchoReply),
        (any::<u32>(), any::<u32>(), bytes(80)).prop_map(|(experimenter, kind, data)| {
            Body::Experimenter { experimenter, kind, data }
        }),
        Just(Body::FeaturesRequest),
        features().prop_map(Body::FeaturesReply),
        Just(Body::GetConfigRequest),
        config().prop_map(Body::GetConfigReply),
        config().prop_map(Body::SetConfig),
        Just(Body::BarrierRequest),
        Just(Body::BarrierReply),
        role.clone().prop_map(Body::RoleRequest),
        role.prop_map(Body::RoleReply),
        other.prop_map(|(kind, data)| Body::Other { kind, data }),
    ];
    let large = prop_oneof![
        packet_in().prop_map(Body::PacketIn),
        flow_removed().prop_map(Body::FlowRemoved),
        (one_of([PortReason::Add, PortReason::Delete, PortReason::Modify]), port())
            .prop_map(|(reason, port)| Body::PortStatus(PortStatus { reason, port })),
        (any::<u32>(), actions(), bytes(80)).prop_map(|(in_port, actions, data)| {
            Body::PacketOut(PacketOut { in_port, actions, data })
        }),
        flow_mod().prop_map(Body::FlowMod),
        group_mod().prop_map(Body::GroupMod),
        multipart_request().prop_map(Body::MultipartRequest),
        (any::<bool>(), multipart_part())
            .prop_map(|(more, part)| { Body::MultipartReply(MultipartReply { more, part }) }),
    ];
    prop_oneof![small, large].boxed()
}

fn one_of<T: Clone + Debug + 'static, const N: usize>(values: [T; N]) -> Select<T> {
    select(values.to_vec())
}

fn bytes(max: usize) -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..=max)
}

fn features() -> impl Strategy<Value = Features> {
    any::<(u64, u32, u8, u8, u32)>().prop_map(
        |(datapath_id, buffer_count, table_count, auxiliary_id, capabilities)| Features {
            datapath_id,
            buffer_count,
            table_count,
            auxiliary_id,
            capabilities,
        },
    )
}

fn config() -> impl Strategy<Value = SwitchConfig> {
    let all = [FragmentHandling::Normal, FragmentHandling::Drop, FragmentHandling::Reassemble];
    (one_of(all), any::<u16>())
        .prop_map(|(fragments, miss_send_bytes)| SwitchConfig { fragments, miss_send_bytes })
}

macro_rules! masked {
    ($number:ty) => {
        any::<($number, Option<$number>)>().prop_map(|(value, mask)| Masked {
            value: mask.map_or(value, |mask| value & mask),
            mask,
        })
    };
}

fn masked_mac() -> impl Strategy<Value = Masked<[u8; 6]>> {
    any::<([u8; 6], Option<[u8; 6]>)>().prop_map(|(value, mask)| Masked {
        value: core::array::from_fn(|at| value[at] & mask.map_or(0xff, |mask| mask[at])),
        mask,
    })
}

/// A field that has no type: of another class, or of a number that is not known.
fn other_field() -> impl Strategy<Value = OtherField> {
    let id = prop_oneof![
        (one_of([0x0000, 0x0001, 0x7fff, 0x8001, 0xffff]), 0..0x80_u8),
        (Just(0x8000), one_of([1, 7, 9, 11, 14, 17, 25, 28, 30, 39, 0x7f])),
    ];
    (id, any::<bool>(), bytes(255)).prop_map(|((class, field), has_mask, bytes)| OtherField {
        class,
        field,
        has_mask,
        bytes,
    })
}

fn field() -> impl Strategy<Value = Field> {
    prop_oneof![
        any::<u32>().prop_map(Field::InPort),
        masked!(u64).prop_map(Field::Metadata),
        masked_mac().prop_map(Field::EthDst),
        masked_mac().prop_map(Field::EthSrc),
        any::<u16>().prop_map(Field::EthType),
        masked!(u16).prop_map(Field::VlanVid),
        any::<u8>().prop_map(Field::IpProto),
        any::<u16>().prop_map(Field::UdpSrc),
        any::<u16>().prop_map(Field::UdpDst),
        masked!(u128).prop_map(Field::Ipv6Src),
        masked!(u128).prop_map(Field::Ipv6Dst),
        any::<u8>().prop_map(Field::Icmpv6Type),
        masked!(u8).prop_map(Field::ip_fragment),
        any::<u8>().prop_map(Field::ip_ttl),
        other_field().prop_map(Field::Other),
    ]
}

fn fields() -> impl Strategy<Value = Vec<Field>> {
    vec(field(), 0..6)
}

/// The rest of an unknown structure: with the four bytes before it, a multiple of 8.
fn rest() -> impl Strategy<Value = Vec<u8>> {
    (0..4_usize).prop_flat_map(|words| vec(any::<u8>(), 4 + 8 * words))
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        any::<(u32, u16)>().prop_map(|(port, max_bytes)| Action::Output { port, max_bytes }),
        any::<u32>().prop_map(Action::Group),
        Just(Action::DecrementIpTtl),
        field().prop_map(Action::SetField),
        (one_of([1, 17, 21, 23, 26, 0xffff]), rest())
            .prop_map(|(kind, bytes)| Action::Other { kind, bytes }),
    ]
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    vec(action(), 0..4)
}

fn instruction() -> impl Strategy<Value = Instruction> {
    // A full mask is decoded as none.
    let metadata = masked!(u64).prop_map(|metadata| Masked {
        mask: metadata.mask.filter(|mask| *mask != u64::MAX),
        ..metadata
    });
    prop_oneof![
        any::<u8>().prop_map(Instruction::GotoTable),
        metadata.prop_map(Instruction::WriteMetadata),
        actions().prop_map(Instruction::WriteActions),
        actions().prop_map(Instruction::ApplyActions),
        Just(Instruction::ClearActions),
        any::<u32>().prop_map(Instruction::Meter),
        (one_of([0, 7, 0x7fff, 0xffff]), rest())
            .prop_map(|(kind, bytes)| Instruction::Other { kind, bytes }),
    ]
}

fn instructions() -> impl Strategy<Value = Vec<Instruction>> {
    vec(instruction(), 0..4)
}

fn packet_in() -> impl Strategy<Value = PacketIn> {
    let reason = prop_oneof![
        Just(PacketInReason::NoMatch),
        Just(PacketInReason::Action),
        Just(PacketInReason::InvalidTtl),
        (3..=u8::MAX).prop_map(PacketInReason::Other),
    ];
    // The greatest number says that there is no buffer.
    let buffer = proptest::option::of(0..u32::MAX);
    (buffer, any::<u16>(), reason, any::<u8>(), any::<u64>(), fields(), bytes(80)).prop_map(
        |(buffer_id, total_bytes, reason, table, cookie, fields, data)| PacketIn {
            buffer_id,
            total_bytes,
            reason,
            table,
            cookie,
            fields,
            data,
        },
    )
}

fn flow_removed() -> impl Strategy<Value = FlowRemoved> {
    let all = [
        RemovedReason::IdleTimeout,
        RemovedReason::HardTimeout,
        RemovedReason::Delete,
        RemovedReason::GroupDelete,
    ];
    (any::<(u64, u16, u8, [u32; 2], [u16; 2], [u64; 2])>(), one_of(all), fields()).prop_map(
        |((cookie, priority, table, duration, timeouts, counts), reason, fields)| FlowRemoved {
            cookie,
            priority,
            reason,
            table,
            duration_seconds: duration[0],
            duration_nanoseconds: duration[1],
            idle_timeout: timeouts[0],
            hard_timeout: timeouts[1],
            packet_count: counts[0],
            byte_count: counts[1],
            fields,
        },
    )
}

/// A text of at most this many bytes.
fn text(max: usize) -> impl Strategy<Value = String> {
    vec(any::<char>(), 0..=max).prop_map(move |letters| {
        let mut text = String::new();
        for letter in letters {
            if letter != '\0' && text.len() + letter.len_utf8() <= max {
                text.push(letter);
            }
        }
        text
    })
}

fn port() -> impl Strategy<Value = Port> {
    (any::<(u32, [u8; 6], [u32; 2], [u32; 4], [u32; 2])>(), text(15)).prop_map(
        |((number, mac, bits, features, speeds), name)| Port {
            number,
            mac,
            name,
            config: bits[0],
            state: bits[1],
            features,
            speed: speeds[0],
            speed_max: speeds[1],
        },
    )
}

fn port_stats() -> impl Strategy<Value = PortStats> {
    any::<(u32, [[u64; 2]; 4], [u64; 4], [u32; 2])>().prop_map(
        |(number, [packets, bytes, dropped, errors], details, duration)| PortStats {
            number,
            packets,
            bytes,
            dropped,
            errors,
            details,
            duration,
        },
    )
}

fn flow_mod() -> impl Strategy<Value = FlowMod> {
    let all = [
        FlowCommand::Add,
        FlowCommand::Modify,
        FlowCommand::ModifyStrict,
        FlowCommand::Delete,
        FlowCommand::DeleteStrict,
    ];
    let numbers = any::<([u64; 2], u8, [u16; 4], [u32; 2])>();
    (numbers, one_of(all), fields(), instructions()).prop_map(
        |((cookies, table, numbers, outs), command, fields, instructions)| FlowMod {
            cookie: cookies[0],
            cookie_mask: cookies[1],
            table,
            command,
            idle_timeout: numbers[0],
            hard_timeout: numbers[1],
            priority: numbers[2],
            out_port: outs[0],
            out_group: outs[1],
            flags: FlowFlags(numbers[3]),
            fields,
            instructions,
        },
    )
}

fn flow_stats() -> impl Strategy<Value = FlowStats> {
    (any::<(u8, [u32; 2], [u16; 4], [u64; 3])>(), fields(), instructions()).prop_map(
        |((table, duration, numbers, counts), fields, instructions)| FlowStats {
            table,
            duration_seconds: duration[0],
            duration_nanoseconds: duration[1],
            priority: numbers[0],
            idle_timeout: numbers[1],
            hard_timeout: numbers[2],
            flags: FlowFlags(numbers[3]),
            cookie: counts[0],
            packet_count: counts[1],
            byte_count: counts[2],
            fields,
            instructions,
        },
    )
}

fn group_kind() -> impl Strategy<Value = GroupKind> {
    let all = [GroupKind::All, GroupKind::Select, GroupKind::Indirect, GroupKind::FastFailover];
    one_of(all)
}

fn buckets() -> impl Strategy<Value = Vec<Bucket>> {
    let bucket = (any::<(u16, u32, u32)>(), actions()).prop_map(
        |((weight, watch_port, watch_group), actions)| Bucket {
            weight,
            watch_port,
            watch_group,
            actions,
        },
    );
    vec(bucket, 0..4)
}

fn group_mod() -> impl Strategy<Value = GroupMod> {
    let all = [GroupCommand::Add, GroupCommand::Modify, GroupCommand::Delete];
    (one_of(all), group_kind(), any::<u32>(), buckets())
        .prop_map(|(command, kind, group, buckets)| GroupMod { command, kind, group, buckets })
}

fn multipart_request() -> impl Strategy<Value = MultipartRequest> {
    let flows = (any::<(u8, [u32; 2], [u64; 2])>(), fields()).prop_map(
        |((table, outs, cookies), fields)| FlowStatsRequest {
            table,
            out_port: outs[0],
            out_group: outs[1],
            cookie: cookies[0],
            cookie_mask: cookies[1],
            fields,
        },
    );
    prop_oneof![
        Just(MultipartRequest::Description),
        flows.prop_map(MultipartRequest::Flows),
        any::<u32>().prop_map(|port| MultipartRequest::PortStats { port }),
        Just(MultipartRequest::Groups),
        Just(MultipartRequest::PortDescription),
    ]
}

fn multipart_part() -> impl Strategy<Value = MultipartPart> {
    let description = (text(255), text(255), text(255), text(31), text(255)).prop_map(
        |(manufacturer, hardware, software, serial, datapath)| Description {
            manufacturer,
            hardware,
            software,
            serial,
            datapath,
        },
    );
    let group = (group_kind(), any::<u32>(), buckets())
        .prop_map(|(kind, group, buckets)| GroupDescription { kind, group, buckets });
    prop_oneof![
        description.prop_map(MultipartPart::Description),
        vec(flow_stats(), 0..4).prop_map(MultipartPart::Flows),
        vec(port_stats(), 0..4).prop_map(MultipartPart::PortStats),
        vec(group, 0..4).prop_map(MultipartPart::Groups),
        vec(port(), 0..4).prop_map(MultipartPart::PortDescription),
        (one_of([2, 3, 5, 6, 8, 9, 10, 11, 12, 0xffff]), bytes(80))
            .prop_map(|(kind, bytes)| MultipartPart::Other { kind, bytes }),
    ]
}
