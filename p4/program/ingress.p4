// Checks, directory and copies.

control ingress(inout headers_t hdr, inout state_t state, inout standard_metadata_t meta) {
    @id(0x12000001)
    counter(12, CounterType.packets) drops;

    @id(0x13000001) direct_counter(CounterType.packets_and_bytes) ingress_guard_counter;
    @id(0x13000002) direct_counter(CounterType.packets_and_bytes) redirect_counter;
    @id(0x13000003) direct_counter(CounterType.packets_and_bytes) directory_counter;
    @id(0x13000004) direct_counter(CounterType.packets_and_bytes) anycast_counter;
    @id(0x13000005) direct_counter(CounterType.packets_and_bytes) notify_counter;
    @id(0x13000006) direct_counter(CounterType.packets_and_bytes) l2_counter;
    @id(0x13000008) direct_counter(CounterType.packets_and_bytes) multicast_counter;

    @id(0x01000001)
    action allow() {}

    @id(0x01000002)
    action drop() {
        mark_to_drop(meta);
    }

    @id(0x01000003)
    action forward(@id(1) port_t port, @id(2) mac_t dst_mac) {
        meta.egress_spec = port;
        hdr.ethernet.dst = dst_mac;
    }

    @id(0x01000004)
    action set_multicast_group(@id(1) bit<16> group) {
        meta.mcast_grp = group;
    }

    @id(0x01000005)
    action copy_to_controller() {
        clone_preserving_field_list(CloneType.I2E, NOTIFY_SESSION, NOTIFY_FIELDS);
    }

    // This target has no clock for its entries: the controller deletes them before `lease_ms` is over.
    @id(0x01000007)
    action redirect_until(@id(1) port_t port, @id(2) mac_t dst_mac, @id(3) bit<16> lease_ms) {
        meta.egress_spec = port;
        hdr.ethernet.dst = dst_mac;
    }

    // Not an action of a table.
    @hidden
    action discard(reason_t reason) {
        mark_to_drop(meta);
        drops.count(reason);
    }

    // Which source addresses a port may use.
    @id(0x02000001)
    table ingress_guard {
        key = {
            meta.ingress_port: exact @name("port");
            hdr.ipv6.src_scope: exact @name("src_scope");
            hdr.ipv6.src_node: exact @name("src_node");
        }
        actions = { allow; drop; }
        const default_action = drop();
        size = 4096;
        counters = ingress_guard_counter;
    }

    // Leased pages, whose requests go to the owner.
    @id(0x02000002)
    table redirect {
        key = {
            hdr.ipv6.dst_scope: exact @name("dst_scope");
            hdr.ipv6.dst_node: exact @name("dst_node");
            hdr.ipv6.dst_location[63:12]: exact @name("page");
        }
        actions = { forward; @tableonly redirect_until; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 16384;
        support_timeout = true;
        counters = redirect_counter;
    }

    // Nodes (48 bits) and migrated ranges (longer prefixes).
    @id(0x02000003)
    table directory {
        key = {
            hdr.ipv6.dst_scope ++ hdr.ipv6.dst_node ++ hdr.ipv6.dst_location: lpm @name("prefix");
        }
        actions = { forward; drop; }
        const default_action = drop();
        size = 65536;
        counters = directory_counter;
    }

    @id(0x11000001)
    @max_group_size(256)
    @selector_size_semantics("sum_of_members")
    @max_member_weight(65535)
    action_selector(HashAlgorithm.crc32, 1024, 16) anycast_selector;

    // Memory nodes for requests to any of them, by a hash of the source.
    @id(0x02000004)
    table anycast {
        key = {
            hdr.ipv6.dst_scope: exact @name("dst_scope");
            hdr.ipv6.src_node: selector;
            hdr.ipv6.src_location: selector;
        }
        actions = { forward; @defaultonly NoAction; }
        const default_action = NoAction();
        implementation = anycast_selector;
        size = 1024;
        counters = anycast_counter;
    }

    // Packets that the controller wants copies of.
    @id(0x02000005)
    table notify {
        key = {
            hdr.ipv6.src_command: ternary @name("src_command");
            hdr.ipv6.dst_command: ternary @name("dst_command");
            hdr.ipv6.src_status: ternary @name("src_status");
        }
        actions = { copy_to_controller; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 64;
        counters = notify_counter;
    }

    // Traffic outside the fabric. The controller sets the default action to flood.
    @id(0x02000006)
    table l2 {
        key = { hdr.ethernet.dst: exact @name("dst_mac"); }
        actions = { @tableonly forward; set_multicast_group; @defaultonly drop; }
        default_action = drop();
        size = 4096;
        counters = l2_counter;
    }

    // Notices to every node of a space.
    @id(0x02000008)
    table multicast {
        key = { hdr.ipv6.dst_scope: exact @name("dst_scope"); }
        actions = { set_multicast_group; @defaultonly drop; }
        const default_action = drop();
        size = 1024;
        counters = multicast_counter;
    }

    // For a frame that a table's action dropped already.
    @hidden
    action count_drop(reason_t reason) {
        drops.count(reason);
    }

    apply {
        if (hdr.packet_out.isValid()) {
            meta.egress_spec = hdr.packet_out.egress_port;
            hdr.packet_out.setInvalid();
            exit;
        }
        if (!hdr.ethernet.isValid()
            || (hdr.ethernet.type == TYPE_IPV6
                && (!hdr.ipv6.isValid() || hdr.ipv6.version != 6))) {
            discard(DROP_MALFORMED);
            exit;
        }
        if (hdr.ethernet.type == TYPE_CUSTOMER_TAG || hdr.ethernet.type == TYPE_SERVICE_TAG) {
            // A receiver ignores the tag of VLAN 0, so that it would hide a packet from these checks.
            discard(DROP_TAGGED);
            exit;
        }
        bool from_fabric = hdr.ipv6.isValid() && hdr.ipv6.src_scope[31:16] == FABRIC;
        bool to_fabric = hdr.ipv6.isValid() && hdr.ipv6.dst_scope[31:16] == FABRIC;
        if (!from_fabric && !to_fabric) {
            switch (l2.apply().action_run) {
                drop: { count_drop(DROP_NO_ROUTE); }
                default: {}
            }
            exit;
        }
        if (meta.packet_length < (bit<32>) hdr.ipv6.payload_bytes + 54) {
            discard(DROP_MALFORMED);
            exit;
        }
        if (!to_fabric) {
            discard(DROP_FOREIGN_DESTINATION);
            exit;
        }
        if (hdr.ipv6.next_header != NEXT_UDP && hdr.ipv6.next_header != NEXT_TCP
            && hdr.ipv6.next_header != NEXT_ICMPV6) {
            discard(DROP_NEXT_HEADER);
            exit;
        }
        if (hdr.ipv6.hop_limit <= 1) {
            discard(DROP_HOP_LIMIT);
            exit;
        }
        // A miss and an entry that drops run the same action.
        if (!ingress_guard.apply().hit) {
            count_drop(DROP_GUARD);
            exit;
        } else if (meta.egress_spec == DROP_PORT) {
            count_drop(DROP_ENTRY);
            exit;
        }
        if (hdr.ipv6.src_scope != hdr.ipv6.dst_scope) {
            // Spaces are separate: no source may send into another space.
            discard(DROP_GUARD);
            exit;
        }
        notify.apply();
        hdr.ipv6.hop_limit = hdr.ipv6.hop_limit - 1;

        bool is_reply = (hdr.ipv6.dst_command & REPLY) != 0;
        bit<8> command = hdr.ipv6.dst_command & COMMAND_MASK;
        if (hdr.ipv6.dst_node == ANY_MEMORY_NODE) {
            if (is_reply || (command != CREATE && command != ALLOC_WRITE)) {
                discard(DROP_ANYCAST);
            } else if (!anycast.apply().hit) {
                // BMv2 runs no default action for a table with an action profile.
                discard(DROP_ANYCAST);
            }
            exit;
        }
        if (hdr.ipv6.dst_node == EVERY_NODE) {
            if (is_reply || (command != INVALIDATE && command != NOTICE)) {
                discard(DROP_MULTICAST);
            } else {
                state.is_notice = true;
                switch (multicast.apply().action_run) {
                    set_multicast_group: {}
                    default: { count_drop(DROP_MULTICAST); }
                }
            }
            exit;
        }
        // Replies, requests to the home, and an endpoint's own addresses are never redirected.
        if ((hdr.ipv6.dst_command & (REPLY | HOME)) == 0 && hdr.ipv6.dst_location[63:63] == 0) {
            switch (redirect.apply().action_run) {
                forward: { exit; }
                redirect_until: { exit; }
                default: {}
            }
        }
        if (!directory.apply().hit) {
            count_drop(DROP_NO_ROUTE);
        } else if (meta.egress_spec == DROP_PORT) {
            count_drop(DROP_ENTRY);
        }
    }
}
