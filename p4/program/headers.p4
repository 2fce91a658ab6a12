// Headers and the state of a packet on its way through the pipeline.

typedef bit<9> port_t;
typedef bit<48> mac_t;

// The port of packet-in and packet-out.
const port_t CPU_PORT = 510;

// The port to which mark_to_drop sends.
const port_t DROP_PORT = 511;

// The clone session for copies to the controller.
const bit<32> NOTIFY_SESSION = 99;

// What a clone keeps of the packet's state.
const bit<8> NOTIFY_FIELDS = 1;

// Bytes of a frame in a packet-in: Ethernet, IPv6, UDP and 32 bytes of the fabric's header.
const bit<32> PACKET_IN_BYTES = 14 + 40 + 8 + 32;

// Bytes of the header packet_in, which the target counts when it truncates.
const bit<32> PACKET_IN_HEADER_BYTES = 2;

const bit<16> TYPE_IPV6 = 0x86dd;
const bit<16> TYPE_CUSTOMER_TAG = 0x8100;
const bit<16> TYPE_SERVICE_TAG = 0x88a8;

// Every fabric address begins with fdbb::/16.
const bit<16> FABRIC = 0xfdbb;

// Next headers that the fabric uses.
const bit<8> NEXT_TCP = 6;
const bit<8> NEXT_UDP = 17;
const bit<8> NEXT_ICMPV6 = 58;

// Destination nodes that are no endpoint.
const bit<16> ANY_MEMORY_NODE = 0;
const bit<16> EVERY_NODE = 0xffff;

// The command byte (docs/wire.md): two flags and a command.
const bit<8> COMMAND_MASK = 0x3f;
const bit<8> REPLY = 0x80;
const bit<8> HOME = 0x40;
const bit<8> CREATE = 0x03;
const bit<8> ALLOC_WRITE = 0x04;
const bit<8> INVALIDATE = 0x18;
const bit<8> NOTICE = 0x19;

// Why a frame is dropped: the index of `drops`, as in DropReason.
typedef bit<32> reason_t;
const reason_t DROP_TAGGED = 0;
const reason_t DROP_FOREIGN_DESTINATION = 1;
const reason_t DROP_HOP_LIMIT = 2;
const reason_t DROP_GUARD = 3;
const reason_t DROP_ANYCAST = 4;
const reason_t DROP_MULTICAST = 5;
const reason_t DROP_NO_ROUTE = 6;
const reason_t DROP_ENTRY = 7;
const reason_t DROP_MALFORMED = 8;
const reason_t DROP_IMPAIRMENT = 9;
const reason_t DROP_EGRESS = 10;
const reason_t DROP_NEXT_HEADER = 11;

header ethernet_t {
    mac_t dst;
    mac_t src;
    bit<16> type;
}

// An address: scope, node, command byte, tag (in replies: the status), location.
header ipv6_t {
    bit<4> version;
    bit<8> traffic_class;
    bit<20> flow_label;
    bit<16> payload_bytes;
    bit<8> next_header;
    bit<8> hop_limit;
    bit<32> src_scope;
    bit<16> src_node;
    bit<8> src_command;
    bit<8> src_status;
    bit<64> src_location;
    bit<32> dst_scope;
    bit<16> dst_node;
    bit<8> dst_command;
    bit<8> dst_tag;
    bit<64> dst_location;
}

@controller_header("packet_in")
header packet_in_t {
    port_t ingress_port;
    bit<7> pad;
}

@controller_header("packet_out")
header packet_out_t {
    port_t egress_port;
    bit<7> pad;
}

struct headers_t {
    packet_in_t packet_in;
    packet_out_t packet_out;
    ethernet_t ethernet;
    ipv6_t ipv6;
}

struct state_t {
    // Where a copy came from; a clone keeps it.
    @field_list(NOTIFY_FIELDS)
    port_t ingress_port;
    // Whether copies get the MAC address of their port.
    bool is_notice;
}
