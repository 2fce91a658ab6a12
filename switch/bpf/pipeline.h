/* SPDX-License-Identifier: GPL-2.0 OR MIT
 *
 * The pipeline: decides where a packet goes, for tc and XDP alike. It reads the packet and the
 * tables and changes neither; the caller counts and rewrites once it can forward.
 */
#pragma once
#include "tables.h"

/* Offsets in a frame. */
enum {
	AT_TYPE = 12, AT_VERSION = 14, AT_PAYLOAD = 18, AT_NEXT_HEADER = 20, AT_HOP = 21,
	AT_SRC = 22, AT_DST = 38, ETHERNET_BYTES = 14, HEADERS_BYTES = 54,
};
/* Protocols that may follow the IPv6 header. */
enum { PROTOCOL_TCP = 6, PROTOCOL_UDP = 17, PROTOCOL_ICMPV6 = 58 };
/* Offsets in an address. */
enum { AT_NODE = 4, AT_COMMAND = 6, AT_TAG = 7, AT_LOCATION = 8 };

enum { COMMAND_CODE = 0x3f };

#define U8(at) (*(u8 *)(frame + (at)))
#define U16(at) (*(u16 *)(frame + (at)))
#define U32(at) (*(u32 *)(frame + (at)))
#define U64(at) (*(u64 *)(frame + (at)))

enum verdict_kind { VERDICT_DROP, VERDICT_FORWARD, VERDICT_COPY };

struct verdict {
	u32 kind;
	u32 reason;		/* why it is dropped */
	u32 guard, route;	/* the entries it hit, 0 for none */
	u32 notify;		/* 1 + the number of the notify entry that matched, 0 for none */
	u32 to;			/* a port or a group */
	u8 mac[6];		/* where it is forwarded to */
	u8 is_fabric;		/* the hop limit is to be decremented, copies pass port_mac */
	u8 is_redirect;		/* the time of the hit is kept */
};

/* SplitMix64, as in switch/src/draw.rs. */
enum { MIX_SHIFT_1 = 30, MIX_SHIFT_2 = 27, MIX_SHIFT_3 = 31 };
#define GOLDEN 0x9e3779b97f4a7c15ULL
INLINE u64 mix(u64 z)
{
	z = (z ^ (z >> MIX_SHIFT_1)) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ (z >> MIX_SHIFT_2)) * 0x94d049bb133111ebULL;
	return z ^ (z >> MIX_SHIFT_3);
}

/* The contribution of one word (8 bytes), at its position, to the seal of a value. */
INLINE u64 seal_of(u64 word, u32 place)
{
	u64 power = GOLDEN;

	for (u32 i = 0; i < place; i++)
		power *= GOLDEN;
	return word * power;
}

/*
 * Copies the words of a sealed value: first its key, last its seal.
 * False if the seal or the key does not match: then the kernel has reused the element.
 */
INLINE int unseal(u64 *copy, const void *value, u32 words, const void *key, u32 key_words)
{
	u64 seal = 0, differs = 0;

	/* Volatile: the checked words are the used words; nothing is read twice. */
#pragma clang loop unroll(full)
	for (u32 i = 0; i < words; i++) {
		copy[i] = ((const volatile u64 *)value)[i];
		seal += seal_of(copy[i], i);
		if (i < key_words)
			differs |= copy[i] ^ ((const u64 *)key)[i];
	}
	return !differs && seal == ((const volatile u64 *)value)[words];
}

INLINE void drop_because(struct verdict *v, u32 reason)
{
	v->kind = VERDICT_DROP;
	v->reason = reason;
}

INLINE void copy_mac(u8 *to, const u8 *from)
{
	*(u32 *)to = *(const u32 *)from;
	*(u16 *)(to + 4) = *(const u16 *)(from + 4);
}

INLINE void follow(struct verdict *v, const struct route *route)
{
	v->route = route->index;
	v->to = route->to;
	if (route->action == ACTION_FORWARD) {
		v->kind = VERDICT_FORWARD;
		copy_mac(v->mac, route->mac);
	} else if (route->action == ACTION_SET_MULTICAST_GROUP) {
		v->kind = VERDICT_COPY;
	} else {
		drop_because(v, DROP_ENTRY);
	}
}

/* A value of `ingress_guard`, `l2` or `multicast`, or of `redirect`, without their seals. */
union route_copy { u64 words[3]; struct { u64 key; struct route route; }; };
union redirect_copy {
	u64 words[5];
	struct { struct redirect_key key; struct route route; u64 dead_at_ns; };
};

/* The keys as words. */
union guard_words { struct guard_key key; u64 words[1]; };
union mac_words { struct mac_key key; u64 words[1]; };
union scope_words { struct scope_key key; u64 words[1]; };
union redirect_words { struct redirect_key key; u64 words[2]; };

/* Looks up an entry of `ingress_guard`, `l2` or `multicast`. */
INLINE const struct route *find_route(void *map, const u64 *key, union route_copy *copy)
{
	const void *found = map_lookup(map, key);

	return found && unseal(copy->words, found, 3, key, 1) ? &copy->route : NULL;
}

INLINE void route_l2(void *frame, const struct config *c, struct verdict *v)
{
	union mac_words mac = {};
	union route_copy copy;
	const struct route *route;

	*(u32 *)mac.key.mac = U32(0);
	*(u16 *)(mac.key.mac + 4) = U16(4);
	route = find_route(&l2, mac.words, &copy);
	if (route) {
		follow(v, route);
	} else if (c->flood_group) {
		v->kind = VERDICT_COPY;
		v->to = c->flood_group;
	} else {
		drop_because(v, DROP_NO_ROUTE);
	}
}

INLINE void route_anycast(void *frame, u8 command, struct verdict *v)
{
	union scope_words scope = { .key = { .scope = U32(AT_DST) } };
	u8 code = command & COMMAND_CODE;
	u64 source = be64(U64(AT_SRC + AT_LOCATION)) + be16(U16(AT_SRC + AT_NODE)) * GOLDEN;
	union { u64 word; struct member member; } copy;
	const volatile struct choice *choice;
	u32 index;
	u8 at;

	drop_because(v, DROP_ANYCAST);
	if ((command & COMMAND_REPLY) || (code != COMMAND_CREATE && code != COMMAND_ALLOC_WRITE))
		return;
	choice = map_lookup(&anycast, &scope);
	if (!choice)
		return;
	at = choice->slots[mix(source) & (ANYCAST_SLOTS - 1)];
	index = choice->index;
	copy.word = *(const volatile u64 *)&choice->members[at];
	if (seal_of(scope.words[0], 0) + seal_of(index, 1) + seal_of(copy.word, 2) !=
	    choice->seals[at])
		return;
	v->kind = VERDICT_FORWARD;
	v->route = index;
	v->to = copy.member.port;
	copy_mac(v->mac, copy.member.mac);
}

INLINE void route_multicast(void *frame, u8 command, struct verdict *v)
{
	union scope_words scope = { .key = { .scope = U32(AT_DST) } };
	u8 code = command & COMMAND_CODE;
	union route_copy copy;
	const struct route *route;

	drop_because(v, DROP_MULTICAST);
	if ((command & COMMAND_REPLY) || (code != COMMAND_INVALIDATE && code != COMMAND_NOTICE))
		return;
	route = find_route(&multicast, scope.words, &copy);
	if (route)
		follow(v, route);
}

INLINE void route_unicast(void *frame, u8 command, const struct config *c, struct verdict *v)
{
	struct route *route;

	if (c->redirects && !(command & (COMMAND_REPLY | COMMAND_HOME)) &&
	    !(U8(AT_DST + AT_LOCATION) & 0x80)) {
		union redirect_words page = { .key = {
			.scope = U32(AT_DST), .node = U16(AT_DST + AT_NODE),
			.page = U64(AT_DST + AT_LOCATION) & be64(~0xfffULL),
		} };
		union redirect_copy copy;
		const void *found = map_lookup(&redirect, &page);

		/* The clock is read only here, on a hit of an entry that expires. */
		if (found && unseal(copy.words, found, 5, page.words, 2) &&
		    (!copy.dead_at_ns || ktime_ns() < copy.dead_at_ns)) {
			v->is_redirect = 1;
			return follow(v, &copy.route);
		}
	}
	struct directory_key key;

	key.prefix_len = 112;
	*(u32 *)&key.bits[0] = U32(AT_DST);
	key.bits[2] = U16(AT_DST + AT_NODE);
	key.bits[3] = U16(AT_DST + AT_LOCATION);
	*(u32 *)&key.bits[4] = U32(AT_DST + AT_LOCATION + 2);
	key.bits[6] = U16(AT_DST + AT_LOCATION + 6);
	route = map_lookup(&directory, &key);
	if (route)
		follow(v, route);
	else
		drop_because(v, DROP_NO_ROUTE);
}

INLINE u32 match_notify(void *frame)
{
	u32 src_command = U8(AT_SRC + AT_COMMAND), dst_command = U8(AT_DST + AT_COMMAND);
	u32 src_status = U8(AT_SRC + AT_TAG);
	struct notify_match *a = map_lookup(&notify_match, &src_command);
	struct notify_match *b = map_lookup(&notify_match, &dst_command);
	struct notify_match *c = map_lookup(&notify_match, &src_status);
	u64 both;
	u32 bit = 0;

	if (!a || !b || !c)
		return 0;
	both = a->src_command & b->dst_command & c->src_status;
	if (!both)
		return 0;
	both &= -both;
	bit += !!(both & 0xffffffff00000000ULL) << 5;
	bit += !!(both & 0xffff0000ffff0000ULL) << 4;
	bit += !!(both & 0xff00ff00ff00ff00ULL) << 3;
	bit += !!(both & 0xf0f0f0f0f0f0f0f0ULL) << 2;
	bit += !!(both & 0xccccccccccccccccULL) << 1;
	bit += !!(both & 0xaaaaaaaaaaaaaaaaULL);
	return 1 + bit;
}

INLINE void route_fabric(void *frame, u16 port, const struct config *c, struct verdict *v)
{
	union guard_words source = { .key = {
		.scope = U32(AT_SRC), .node = U16(AT_SRC + AT_NODE), .port = port,
	} };
	union route_copy copy;
	const struct route *guard = find_route(&ingress_guard, source.words, &copy);
	u8 command = U8(AT_DST + AT_COMMAND);
	u16 node = U16(AT_DST + AT_NODE);

	if (!guard)
		return drop_because(v, DROP_GUARD);
	v->guard = guard->index;
	if (guard->action != ACTION_ALLOW)
		return drop_because(v, DROP_ENTRY);
	/* Spaces are separate: no source may send into another space. */
	if (U32(AT_SRC) != U32(AT_DST))
		return drop_because(v, DROP_GUARD);
	if (c->notifies)
		v->notify = match_notify(frame);
	v->is_fabric = 1;
	if (node == 0)
		route_anycast(frame, command, v);
	else if (node == 0xffff)
		route_multicast(frame, command, v);
	else
		route_unicast(frame, command, c, v);
}

/* Decides on a frame of `bytes` bytes whose first bytes are at `frame`. */
INLINE void judge(void *frame, void *end, u32 bytes, u16 port, const struct config *c,
		  struct verdict *v)
{
	u16 type;
	u8 next;

	if (frame + ETHERNET_BYTES > end)
		return drop_because(v, DROP_MALFORMED);
	type = U16(AT_TYPE);
	if (type == be16(0x8100) || type == be16(0x88a8))
		return drop_because(v, DROP_TAGGED);
	if (type != be16(0x86dd))
		return route_l2(frame, c, v);
	if (frame + HEADERS_BYTES > end || (U8(AT_VERSION) >> 4) != 6)
		return drop_because(v, DROP_MALFORMED);
	if (U16(AT_SRC) != be16(FABRIC_PREFIX) && U16(AT_DST) != be16(FABRIC_PREFIX))
		return route_l2(frame, c, v);
	if (HEADERS_BYTES + be16(U16(AT_PAYLOAD)) > bytes)
		return drop_because(v, DROP_MALFORMED);
	if (U16(AT_DST) != be16(FABRIC_PREFIX))
		return drop_because(v, DROP_FOREIGN_DESTINATION);
	next = U8(AT_NEXT_HEADER);
	if (next != PROTOCOL_UDP && next != PROTOCOL_TCP && next != PROTOCOL_ICMPV6)
		return drop_because(v, DROP_NEXT_HEADER);
	if (U8(AT_HOP) <= 1)
		return drop_because(v, DROP_HOP_LIMIT);
	route_fabric(frame, port, c, v);
}

INLINE void count_hit(u32 index, u32 bytes, u64 now)
{
	struct counter *counter;

	if (!index)
		return;
	counter = map_lookup(&counters, &index);
	if (!counter)
		return;
	counter->packets++;
	counter->bytes += bytes;
	if (now)
		counter->last_hit_ns = now;
}

/* Counts the entries that a verdict hit. */
INLINE void count_verdict(const struct verdict *v, u32 bytes)
{
	count_hit(v->guard, bytes, 0);
	count_hit(v->route, bytes, v->is_redirect ? ktime_ns() : 0);
}

INLINE void count_drop(u32 reason)
{
	u64 *drop = map_lookup(&drops, &reason);

	if (drop)
		++*drop;
}

INLINE void count_rx(u32 port, u32 bytes)
{
	struct port_counter *counter = map_lookup(&port_counters, &port);

	if (counter) {
		counter->rx_packets++;
		counter->rx_bytes += bytes;
	}
}

INLINE void count_tx(u32 port, u32 bytes)
{
	struct port_counter *counter = map_lookup(&port_counters, &port);

	if (counter) {
		counter->tx_packets++;
		counter->tx_bytes += bytes;
	}
}

/* The port of an interface; 0 if it is not a port. */
INLINE u16 port_of_interface(u32 ifindex)
{
	u32 slot = ifindex & (IFINDEXES - 1);
	struct port_of *found = map_lookup(&port_of, &slot);

	return found && found->ifindex == ifindex ? found->port : 0;
}

INLINE struct config *current_config(void)
{
	u32 zero = 0;

	return map_lookup(&config, &zero);
}

INLINE struct port *port_at(u32 number)
{
	struct port *port = map_lookup(&ports, &number);

	return port && port->ifindex ? port : NULL;
}
