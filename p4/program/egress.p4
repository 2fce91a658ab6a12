// Copies: to the controller with their ingress port, and to the ports of a group.

control egress(inout headers_t hdr, inout state_t state, inout standard_metadata_t meta) {
    @id(0x13000007) direct_counter(CounterType.packets_and_bytes) port_mac_counter;

    @id(0x01000006)
    action set_dst_mac(@id(1) mac_t dst_mac) {
        hdr.ethernet.dst = dst_mac;
    }

    // A host drops a frame that has another host's address.
    @id(0x02000007)
    table port_mac {
        key = { meta.egress_port: exact @name("port"); }
        actions = { set_dst_mac; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 512;
        counters = port_mac_counter;
    }

    apply {
        if (meta.egress_port == CPU_PORT) {
            hdr.packet_in.setValid();
            hdr.packet_in.ingress_port = state.ingress_port;
            hdr.packet_in.pad = 0;
            truncate(PACKET_IN_HEADER_BYTES + PACKET_IN_BYTES);
        } else if (meta.mcast_grp != 0) {
            if (meta.egress_port == state.ingress_port) {
                mark_to_drop(meta);
            } else if (state.is_notice) {
                port_mac.apply();
            }
        }
    }
}
