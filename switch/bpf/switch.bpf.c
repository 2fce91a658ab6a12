/* SPDX-License-Identifier: GPL-2.0 OR MIT
 *
 * The switch as two programs. `switch_tc` is the complete switch, on the ingress of every port.
 * `switch_xdp` runs before it on XDP ports, forwards frames that need only a rewrite, and passes
 * all others on to `switch_tc`.
 */
#include "pipeline.h"

char _license[] SEC("license") = "GPL";

enum {
	AT_IPV4_PROTOCOL = 23,
	GROUP_WORDS = 1 + PORTS / 64,
	IPV4_BYTES = 20, IPV6_BYTES = 40, UDP_BYTES = 8, TCP_BYTES = 20,
};

/* Copies the frame to the controller as received. */
INLINE void copy_to_controller(struct __sk_buff *skb, u16 port, u32 number, struct config *c)
{
	u32 slot = number - 1, bytes = c->clone_bytes;
	u32 *index = map_lookup(&notify_index, &slot);
	struct packet_in *event;

	if (index)
		count_hit(*index, skb->len, 0);
	if (bytes > skb->len)
		bytes = skb->len;
	if (bytes > PACKET_IN_BYTES)
		bytes = PACKET_IN_BYTES;
	if (bytes < 1)
		return;
	event = ringbuf_reserve(&packet_ins, sizeof(*event), 0);
	if (!event)
		return count_drop(LOST_PACKET_IN);
	event->port = port;
	event->bytes = bytes;
	if (skb_load_bytes(skb, 0, event->frame, bytes))
		event->bytes = 0;
	ringbuf_submit(event, 0);
}

INLINE u64 draw(struct impairment *i)
{
	return mix(__sync_fetch_and_add(&i->state, GOLDEN) + GOLDEN);
}

INLINE int chance(struct impairment *i, u64 threshold)
{
	return threshold && (draw(i) >> 32) < threshold;
}

/* Flips a bit after the Ethernet header; a second call restores the frame. */
INLINE void flip(struct __sk_buff *skb, u32 bit)
{
	u32 at = ETHERNET_BYTES + bit / 8;
	u8 byte;

	if (skb_load_bytes(skb, at, &byte, 1))
		return;
	byte ^= 1 << (bit % 8);
	skb_store_bytes(skb, at, &byte, 1, 0);
}

/* The effect of a port's impairments on a frame. */
struct fate { u32 lost, twice, flipped, bit; };

static __attribute__((noinline)) int draw_fate(u32 number, u32 bytes, struct fate *fate)
{
	struct impairment *i = map_lookup(&impairments, &number);

	if (!fate)
		return 0;
	if (!i)
		return 0;
	if (chance(i, i->loss)) {
		__sync_fetch_and_add(&i->lost, 1);
		fate->lost = 1;
		return 0;
	}
	fate->twice = chance(i, i->duplicate);
	if (fate->twice)
		__sync_fetch_and_add(&i->duplicated, 1);
	if (chance(i, i->corrupt) && bytes > ETHERNET_BYTES) {
		__sync_fetch_and_add(&i->corrupted, 1);
		fate->flipped = 1;
		fate->bit = (draw(i) >> 32) % (8 * (bytes - ETHERNET_BYTES));
	}
	return 0;
}

INLINE int drop_frame(u32 reason)
{
	count_drop(reason);
	return TCX_DROP;
}

/*
 * Bytes of headers before each segment of a train: Ethernet, IPv4 or IPv6, UDP or TCP. Options are
 * not counted; TCP leaves room for its own.
 */
INLINE u32 train_header_bytes(struct __sk_buff *skb)
{
	u32 is_ipv6 = skb->protocol == be16(0x86dd);
	u8 protocol = 0;

	skb_load_bytes(skb, is_ipv6 ? AT_NEXT_HEADER : AT_IPV4_PROTOCOL, &protocol, 1);
	return ETHERNET_BYTES + (is_ipv6 ? IPV6_BYTES : IPV4_BYTES) +
	       (protocol == PROTOCOL_UDP ? UDP_BYTES : TCP_BYTES);
}

/* Whether a port's link cannot take a frame; for a train, whether it cannot take every segment. */
INLINE int too_long(struct __sk_buff *skb, const struct port *port)
{
	u32 limit = port->frame_bytes_max;

	if (skb->len <= limit)
		return 0;
	return !skb->gso_size || skb->gso_size + train_header_bytes(skb) > limit;
}

/* Sends the frame itself to a port. */
INLINE int forward(struct __sk_buff *skb, u32 number)
{
	struct port *port = port_at(number);
	u32 ifindex, flags;

	if (!port || too_long(skb, port))
		return drop_frame(DROP_EGRESS);
	ifindex = port->ifindex;
	flags = port->flags;
	if (flags & PORT_IMPAIRED) {
		struct fate fate = {};

		draw_fate(number, skb->len, &fate);
		if (fate.lost)
			return drop_frame(DROP_IMPAIRMENT);
		if (fate.flipped)
			flip(skb, fate.bit);
		if (fate.twice) {
			count_tx(number, skb->len);
			clone_redirect(skb, ifindex, 0);
		}
	}
	count_tx(number, skb->len);
	if (!(flags & PORT_PEER))
		return redirect_to(ifindex, 0);
	/* The peer's stack uses the packet type that this end's MAC address gave the frame. */
	if (skb->pkt_type == PACKET_OTHERHOST)
		skb_change_type(skb, PACKET_HOST);
	return redirect_peer(ifindex, 0);
}

/* Sends one copy of a frame with several destination ports. */
static __attribute__((noinline)) int send_copy(struct __sk_buff *skb, u32 number)
{
	struct port *port = port_at(number);
	struct fate fate = {};
	u32 ifindex;

	if (!port || too_long(skb, port))
		return drop_frame(DROP_EGRESS);
	ifindex = port->ifindex;
	if (port->flags & PORT_IMPAIRED)
		draw_fate(number, skb->len, &fate);
	if (fate.lost)
		return drop_frame(DROP_IMPAIRMENT);
	if (fate.flipped)
		flip(skb, fate.bit);
	if (fate.twice) {
		count_tx(number, skb->len);
		clone_redirect(skb, ifindex, 0);
	}
	count_tx(number, skb->len);
	if (clone_redirect(skb, ifindex, 0))
		count_drop(DROP_EGRESS);
	if (fate.flipped)
		flip(skb, fate.bit);
	return TCX_DROP;
}

/* What `copy_to_port` needs to know. */
struct copies {
	union { u64 words[GROUP_WORDS]; struct { u16 number, unused[3]; u64 ports[PORTS / 64]; }; } group;
	struct __sk_buff *skb;
	u32 ingress;
	u16 rewrite;
	u8 arrived[6];
};

/* Called for each port by `loop`, because the verifier checks the passes of an ordinary loop one by one. */
static s64 copy_to_port(u32 port, struct copies *copies)
{
	struct __sk_buff *skb = copies->skb;
	struct route *mac;

	port %= PORTS;
	if (!(copies->group.ports[port / 64] >> port % 64 & 1) || port == copies->ingress)
		return 0;
	mac = copies->rewrite ? map_lookup(&port_mac, &port) : NULL;
	if (mac && mac->index) {
		count_hit(mac->index, skb->len, 0);
		skb_store_bytes(skb, 0, mac->mac, 6, 0);
	} else if (copies->rewrite) {
		skb_store_bytes(skb, 0, copies->arrived, 6, 0);
	}
	send_copy(skb, port);
	return 0;
}

INLINE int copy_to_group(struct __sk_buff *skb, u16 ingress, u16 number, int rewrite)
{
	struct copies copies = { .skb = skb, .ingress = ingress, .rewrite = !!rewrite };
	const void *found = map_lookup(&groups, &number);

	if (!found || !unseal(copies.group.words, found, GROUP_WORDS, NULL, 0) ||
	    copies.group.number != number ||
	    skb_load_bytes(skb, 0, copies.arrived, sizeof(copies.arrived)))
		return drop_frame(DROP_MULTICAST);
	loop(PORTS, copy_to_port, &copies, 0);
	/* The copies are sent; the original is dropped. */
	return TCX_DROP;
}

SEC("classifier")
int switch_tc(struct __sk_buff *skb)
{
	struct config *c = current_config();
	struct verdict v = {};
	u16 port = port_of_interface(skb->ifindex);
	void *frame = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (!c || !port)
		return drop_frame(DROP_EGRESS);
	count_rx(port, skb->len);
	if (skb->vlan_present)
		return drop_frame(DROP_TAGGED);
	/* Only the linear part can be read; a frame from a packet socket has 14 bytes of it. */
	if (frame + HEADERS_BYTES > end) {
		skb_pull_data(skb, skb->len < HEADERS_BYTES ? skb->len : HEADERS_BYTES);
		frame = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	judge(frame, end, skb->len, port, c, &v);
	count_verdict(&v, skb->len);
	if (v.notify) {
		copy_to_controller(skb, port, v.notify, c);
		frame = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	if (v.kind == VERDICT_DROP)
		return drop_frame(v.reason);
	if (v.is_fabric) {
		if (frame + HEADERS_BYTES > end)
			return drop_frame(DROP_MALFORMED);
		U8(AT_HOP)--;
		/* The hop limit is the low byte of a 16-bit word; a complete checksum loses 1. */
		csum_update(skb, (u16)~be16(1));
		frame = (void *)(long)skb->data;
		end = (void *)(long)skb->data_end;
	}
	if (v.kind == VERDICT_COPY)
		return copy_to_group(skb, port, v.to, v.is_fabric);
	if (frame + ETHERNET_BYTES > end)
		return drop_frame(DROP_MALFORMED);
	*(u32 *)frame = *(u32 *)v.mac;
	*(u16 *)(frame + 4) = *(u16 *)(v.mac + 4);
	return forward(skb, v.to);
}

SEC("xdp.frags")
int switch_xdp(struct xdp_md *ctx)
{
	struct config *c = current_config();
	struct verdict v = {};
	void *frame = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	u16 ingress = port_of_interface(ctx->ingress_ifindex);
	u32 bytes = xdp_frame_bytes(ctx);
	struct port *port;

	if (!c || !ingress)
		return XDP_PASS;
	judge(frame, end, bytes, ingress, c, &v);
	if (v.kind != VERDICT_FORWARD || v.notify || frame + HEADERS_BYTES > end)
		return XDP_PASS;
	port = port_at(v.to);
	if (!port || (port->flags & (PORT_XDP | PORT_IMPAIRED)) != PORT_XDP ||
	    bytes > port->frame_bytes_max)
		return XDP_PASS;
	count_rx(ingress, bytes);
	count_verdict(&v, bytes);
	count_tx(v.to, bytes);
	if (v.is_fabric)
		U8(AT_HOP)--;
	*(u32 *)frame = *(u32 *)v.mac;
	*(u16 *)(frame + 4) = *(u16 *)(v.mac + 4);
	return redirect_to(port->ifindex, 0);
}
