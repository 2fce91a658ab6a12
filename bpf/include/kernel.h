/* SPDX-License-Identifier: GPL-2.0 OR MIT
 *
 * The part of the kernel's stable BPF interface (include/uapi/linux/bpf.h) that the programs use,
 * so that the build needs clang and no header package.
 */
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int s32;
typedef long long s64;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static inline __attribute__((always_inline))
#define NULL ((void *)0)

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define be16(x) __builtin_bswap16(x)
#define be32(x) __builtin_bswap32(x)
#define be64(x) __builtin_bswap64(x)
#else
#define be16(x) (x)
#define be32(x) (x)
#define be64(x) (x)
#endif

enum map_type {
	MAP_HASH = 1,
	MAP_ARRAY = 2,
	MAP_PERCPU_ARRAY = 6,
	MAP_LPM_TRIE = 11,
	MAP_RINGBUF = 27,
};

enum { MAP_NO_PREALLOC = 1, MAP_MMAPABLE = 1024 };

/* BTF description of a map: a number is the length of an array that a member points to. */
#define NUMBER(name, value) int (*name)[value]

/* The start of struct __sk_buff; members after `gso_segs` are not used. */
struct __sk_buff {
	u32 len, pkt_type, mark, queue_mapping, protocol;
	u32 vlan_present, vlan_tci, vlan_proto, priority;
	u32 ingress_ifindex, ifindex, tc_index, cb[5], hash, tc_classid;
	u32 data, data_end, napi_id, family, remote_ip4, local_ip4;
	u32 remote_ip6[4], local_ip6[4], remote_port, local_port, data_meta;
	u64 flow_keys, tstamp;
	u32 wire_len, gso_segs;
	u64 sk;
	u32 gso_size;
};

struct xdp_md {
	u32 data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex;
};

enum { TCX_NEXT = -1, TCX_DROP = 2, XDP_PASS = 2 };
enum { PACKET_HOST = 0, PACKET_OTHERHOST = 3 };

static void *(*map_lookup)(void *map, const void *key) = (void *)1;
static u64 (*ktime_ns)(void) = (void *)5;
static u32 (*processor)(void) = (void *)8;
static s64 (*skb_store_bytes)(struct __sk_buff *, u32 at, const void *from, u32 len, u64 flags) =
	(void *)9;
static s64 (*clone_redirect)(struct __sk_buff *, u32 ifindex, u64 flags) = (void *)13;
static s64 (*redirect_to)(u32 ifindex, u64 flags) = (void *)23;
static s64 (*csum_diff)(const void *from, u32 from_size, const void *to, u32 to_size, u32 seed) =
	(void *)28;
static s64 (*skb_load_bytes)(const void *skb, u32 at, void *to, u32 len) = (void *)26;
static s64 (*skb_change_type)(struct __sk_buff *, u32 type) = (void *)32;
static s64 (*skb_change_tail)(struct __sk_buff *, u32 len, u64 flags) = (void *)38;
static s64 (*skb_pull_data)(struct __sk_buff *, u32 len) = (void *)39;
static s64 (*csum_update)(struct __sk_buff *, u32 sum) = (void *)40;
static s64 (*probe_read_kernel)(void *to, u32 len, const void *from) = (void *)113;
static void *(*ringbuf_reserve)(void *ringbuf, u64 size, u64 flags) = (void *)131;
static void (*ringbuf_submit)(void *record, u64 flags) = (void *)132;
static s64 (*redirect_peer)(u32 ifindex, u64 flags) = (void *)155;
static s64 (*loop)(u32 count, void *each, void *context, u64 flags) = (void *)181;
static u64 (*xdp_frame_bytes)(const struct xdp_md *) = (void *)188;
