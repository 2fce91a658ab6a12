// A frame is parsed up to its IPv6 header. A shorter one ends with an error, which ingress handles.

parser fabric_parser(
    packet_in frame,
    out headers_t hdr,
    inout state_t state,
    inout standard_metadata_t meta
) {
    state start {
        state.ingress_port = meta.ingress_port;
        state.is_notice = false;
        transition select(meta.ingress_port) {
            CPU_PORT: from_controller;
            default: ethernet;
        }
    }
    state from_controller {
        frame.extract(hdr.packet_out);
        transition ethernet;
    }
    state ethernet {
        frame.extract(hdr.ethernet);
        transition select(hdr.ethernet.type) {
            TYPE_IPV6: ipv6;
            default: accept;
        }
    }
    state ipv6 {
        frame.extract(hdr.ipv6);
        transition accept;
    }
}

control verify_nothing(inout headers_t hdr, inout state_t state) {
    apply {}
}
