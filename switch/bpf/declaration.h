/* SPDX-License-Identifier: GPL-2.0 OR MIT
 *
 * Generated from p4/src/declaration.rs; do not edit:
 * cargo run -p bluebridge-p4 --example c_header > switch/bpf/declaration.h
 */
#pragma once

/* Capacity of each table, and of all tables. */
enum {
	INGRESS_GUARD_ENTRIES = 4096,
	REDIRECT_ENTRIES = 16384,
	DIRECTORY_ENTRIES = 65536,
	ANYCAST_ENTRIES = 1024,
	NOTIFY_ENTRIES = 64,
	L2_ENTRIES = 4096,
	PORT_MAC_ENTRIES = 512,
	MULTICAST_ENTRIES = 1024,
	TABLE_ENTRIES = 92736,
};

/* Key width of each table. */
enum {
	INGRESS_GUARD_KEY_BITS = 57,
	REDIRECT_KEY_BITS = 100,
	DIRECTORY_KEY_BITS = 112,
	ANYCAST_KEY_BITS = 32,
	NOTIFY_KEY_BITS = 24,
	L2_KEY_BITS = 48,
	PORT_MAC_KEY_BITS = 9,
	MULTICAST_KEY_BITS = 32,
};

/* Actions of entries. */
enum action {
	ACTION_ALLOW = 1,
	ACTION_DROP = 2,
	ACTION_FORWARD = 3,
	ACTION_SET_MULTICAST_GROUP = 4,
	ACTION_COPY_TO_CONTROLLER = 5,
	ACTION_SET_DST_MAC = 6,
	ACTION_REDIRECT_UNTIL = 7,
};

/* Why frames are dropped: the index of the counter. */
enum drop_reason {
	DROP_TAGGED = 0,
	DROP_FOREIGN_DESTINATION = 1,
	DROP_HOP_LIMIT = 2,
	DROP_GUARD = 3,
	DROP_ANYCAST = 4,
	DROP_MULTICAST = 5,
	DROP_NO_ROUTE = 6,
	DROP_ENTRY = 7,
	DROP_MALFORMED = 8,
	DROP_IMPAIRMENT = 9,
	DROP_EGRESS = 10,
	DROP_NEXT_HEADER = 11,
	DROP_REASONS = 12,
};

/* Limits. */
enum {
	PORTS = 512,
	GROUPS = 1024,
	ANYCAST_SLOTS = 256,
	METADATA_BYTES = 32,
	PACKET_IN_BYTES = 94,
};

/* Addresses: the prefix, and the byte with the command. */
enum {
	FABRIC_PREFIX = 64955,
	COMMAND_CREATE = 3,
	COMMAND_ALLOC_WRITE = 4,
	COMMAND_INVALIDATE = 24,
	COMMAND_NOTICE = 25,
	COMMAND_HOME = 64,
	COMMAND_REPLY = 128,
};
