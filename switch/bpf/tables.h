/* SPDX-License-Identifier: GPL-2.0 OR MIT
 *
 * The tables of the pipeline as maps; `switch/src/ebpf/layout.rs` mirrors every struct.
 *
 * Keys have the bytes of the packet (big endian), values are in the host's byte order.
 * Every entry of a table has its own number, `index`, the position of its counter. A modified
 * entry therefore keeps its counts, and counting is one array access per core.
 */
#pragma once
#include "declaration.h"
#include "kernel.h"

enum {
	IFINDEXES = 65536,	/* interfaces are distinguished by the low 16 bits of their index */
	COUNTERS = 1 + TABLE_ENTRIES,
	/* `drops` counts by reason, and after the reasons the copies that found no room */
	LOST_PACKET_IN = DROP_REASONS,
	DROP_COUNTERS,
};

enum port_flag {
	PORT_PEER = 1,		/* straight into the other end of a veth pair, past this end's queue */
	PORT_XDP = 2,		/* an XDP program forwards what it can before an skb is made */
	PORT_IMPAIRED = 4,
};

/* The action of an entry (an `enum action`): for all tables except anycast and notify. */
struct route {
	u32 index;
	u16 action;
	u16 to;			/* a port or a group */
	u8 mac[6];
	u16 unused;
};

struct guard_key { u32 scope; u16 node; u16 port; };
struct redirect_key { u32 scope; u16 node; u16 unused; u64 page; };
/* 112 bits of location after the prefix length; the map's key is 18 of these 20 bytes. */
struct directory_key { u32 prefix_len; u16 bits[7]; };
struct mac_key { u8 mac[6]; u16 unused; };
/* for `anycast` and `multicast`; the maps' key is `scope` alone */
struct scope_key { u32 scope; u32 unused; };
/* notify: kept only to be read back; packets are matched by notify_match */
struct notify_key { u8 ternaries[6]; u16 unused; s32 priority; };

/*
 * Values of hash maps.
 *
 * The kernel gives the element of a deleted or replaced entry to the next entry that is written,
 * even while a program reads it, and fills it in any order. A value therefore contains its key, and
 * its last word is a seal over all others; `unseal` in pipeline.h treats a value that does not match
 * as missing. Tries free their nodes after the programs that read them have ended, and arrays do not
 * reuse elements: these need no seal.
 */

/* A value of `ingress_guard`, `l2` and `multicast`; keys are padded with zeros. */
struct sealed_route { u8 key[8]; struct route route; u64 seal; };
/* A value of `redirect`; the entry is valid until the time (CLOCK_MONOTONIC, 0: no end). */
struct redirect { struct redirect_key key; struct route route; u64 dead_at_ns; u64 seal; };

/* Fields that are not whole bytes use whole bytes here; a ternary uses two. */
#define HOLDS(type, bits) _Static_assert(8 * sizeof(type) >= (bits), "the key is wider")
HOLDS(struct guard_key, INGRESS_GUARD_KEY_BITS);
HOLDS(struct redirect_key, REDIRECT_KEY_BITS);
HOLDS(((struct directory_key *)NULL)->bits, DIRECTORY_KEY_BITS);
HOLDS(struct mac_key, L2_KEY_BITS);
HOLDS(((struct scope_key *)NULL)->scope, ANYCAST_KEY_BITS);
HOLDS(((struct scope_key *)NULL)->scope, MULTICAST_KEY_BITS);
HOLDS(((struct notify_key *)NULL)->ternaries, 2 * NOTIFY_KEY_BITS);
_Static_assert(PORTS >= PORT_MAC_ENTRIES, "a port has one entry of port_mac");

struct member { u16 port; u8 mac[6]; };
/* A value of `anycast`. The seal of a member is over the scope, `index` and the member. */
struct choice {
	u32 index;
	u32 count;
	u8 slots[ANYCAST_SLOTS];
	struct member members[ANYCAST_SLOTS];
	u64 seals[ANYCAST_SLOTS];
	u16 weights[ANYCAST_SLOTS];
};

/* Which notify entries match a byte of the header; bit 0 is the winning entry. */
struct notify_match { u64 src_command, dst_command, src_status; };

struct counter { u64 packets, bytes, last_hit_ns; };
struct port { u32 ifindex; u32 flags; u32 frame_bytes_max; u32 unused; };
struct port_of { u32 ifindex; u32 port; };
struct port_counter { u64 rx_packets, rx_bytes, tx_packets, tx_bytes; };
/* Bit N of `ports`: a copy goes to port N. */
struct group { u16 number; u16 unused[3]; u64 ports[PORTS / 64]; u64 seal; };
struct impairment {
	u64 state, loss, duplicate, corrupt;		/* shares of 2^32 */
	u64 lost, duplicated, corrupted;
};
struct config {
	u32 layout;		/* version of these structs */
	u32 redirects;		/* entries in `redirect`: none, and the look-up is left out */
	u32 notifies;
	u32 clone_bytes;	/* 0: no clone session */
	u32 flood_group;	/* 0: none */
	u32 has_cookie;
	u64 cookie;
};
struct packet_in { u16 port; u16 bytes; u8 frame[PACKET_IN_BYTES + 2]; };

#define TABLE(name, kind, key, value, entries, flags)	\
	struct {						\
		NUMBER(type, kind);				\
		NUMBER(key_size, key);				\
		NUMBER(value_size, value);			\
		NUMBER(max_entries, entries);			\
		NUMBER(map_flags, flags);			\
		NUMBER(pinning, 1);				\
	} name SEC(".maps")

TABLE(ingress_guard, MAP_HASH, sizeof(struct guard_key), sizeof(struct sealed_route), INGRESS_GUARD_ENTRIES, 0);
TABLE(redirect, MAP_HASH, sizeof(struct redirect_key), sizeof(struct redirect), REDIRECT_ENTRIES, 0);
TABLE(directory, MAP_LPM_TRIE, 4 + DIRECTORY_KEY_BITS / 8, sizeof(struct route), DIRECTORY_ENTRIES, MAP_NO_PREALLOC);
TABLE(anycast, MAP_HASH, 4, sizeof(struct choice), ANYCAST_ENTRIES, MAP_NO_PREALLOC);
TABLE(notify, MAP_HASH, sizeof(struct notify_key), 4, NOTIFY_ENTRIES, 0);
TABLE(l2, MAP_HASH, sizeof(struct mac_key), sizeof(struct sealed_route), L2_ENTRIES, 0);
TABLE(port_mac, MAP_ARRAY, 4, sizeof(struct route), PORTS, 0);
TABLE(multicast, MAP_HASH, 4, sizeof(struct sealed_route), MULTICAST_ENTRIES, 0);

TABLE(notify_match, MAP_ARRAY, 4, sizeof(struct notify_match), 256, 0);
TABLE(notify_index, MAP_ARRAY, 4, 4, NOTIFY_ENTRIES, 0);
TABLE(groups, MAP_HASH, 2, sizeof(struct group), GROUPS, MAP_NO_PREALLOC);
TABLE(counters, MAP_PERCPU_ARRAY, 4, sizeof(struct counter), COUNTERS, 0);
TABLE(drops, MAP_PERCPU_ARRAY, 4, 8, DROP_COUNTERS, 0);
TABLE(ports, MAP_ARRAY, 4, sizeof(struct port), PORTS, 0);
TABLE(port_of, MAP_ARRAY, 4, sizeof(struct port_of), IFINDEXES, 0);
TABLE(port_counters, MAP_PERCPU_ARRAY, 4, sizeof(struct port_counter), PORTS, 0);
TABLE(impairments, MAP_ARRAY, 4, sizeof(struct impairment), PORTS, 0);
TABLE(config, MAP_ARRAY, 4, sizeof(struct config), 1, 0);
TABLE(packet_ins, MAP_RINGBUF, 0, 0, 512 * 1024, 0);

/* For the agent only: the idle timeout and the metadata of entries that have them. */
struct note { u64 idle_timeout_ns; u32 bytes; u8 metadata[METADATA_BYTES]; u32 unused; };
TABLE(notes, MAP_HASH, 20, sizeof(struct note), COUNTERS, MAP_NO_PREALLOC);
