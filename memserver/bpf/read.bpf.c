/* SPDX-License-Identifier: GPL-2.0 OR MIT
 *
 * Answers READs on the server's interface, before the server sees them.
 *
 * The program only answers what the server would answer OK: a part of a page with one datagram, and
 * whole pages of a line with one each. Everything else it passes on unchanged, so no refusal has a
 * second implementation. The checks are those of docs/protocol.md, section 7, in the order that costs
 * least.
 *
 * Own pages are found by their numbers. Lines of other servers that are served here have places, found
 * by a hint that may be wrong: so the name of the place is compared between the two looks at a page's
 * sequence.
 */
#include "shared.h"

char _license[] SEC("license") = "GPL";

enum {
	ETHERTYPE_IPV6 = 0x86dd,
	UDP = 17,
	UDP_PORT = 0xfdbb,
	FABRIC_PREFIX = 0xfdbb,
	HOP_LIMIT = 64,
	READ = 6,
	/* Of requests that no redirect is to catch: several pages, and repetitions. */
	HOME = 0x40,
	REPLY = 0x80,
	FLAG_QUEUED = 1 << 5,
	ETHERNET_BYTES = 14,
	UDP_BYTES = 8,
	HEADER_BYTES = 84,
	/* A READ: nothing follows the header. */
	FRAME_BYTES = ETHERNET_BYTES + 40 + UDP_BYTES + HEADER_BYTES,
	/* Bytes of one call of bpf_csum_diff: more are refused before Linux 6.13. */
	SUM_BYTES = 512,
	ENDPOINT_BIT = 63,
	LOCATION_BITS = 48,
};

/* wire/src/header.rs, in network byte order. */
struct header {
	u8 version, words;
	u16 flags, required, node;
	u64 target[2];
	u64 lease;
	u64 session;
	u32 incarnation, sequence_high, sequence_low;
	u16 answered_distance, credit;
	u32 length;
	u16 offset;
	u8 page_shift, key_id;
	u64 page_version;
	u32 range_epoch, detail, crc;
};

/* A frame two bytes into the struct, so that its words are aligned. */
struct frame {
	u16 unused;
	u8 to[6], from[6];
	u16 ethertype;
	u32 flow;
	u16 payload_bytes;
	u8 next_header, hop_limit;
	u64 source[2], destination[2];
	u16 source_port, destination_port, udp_bytes, udp_sum;
	struct header header;
};

/* The pages that a READ names. */
struct target {
	/* The shard: its number, and the value of its first record. */
	u32 shard, states;
	/* The number of the first page's record. */
	u32 page;
	/* Another server's: its node, and the first page of the line there. */
	u16 is_adopted, node;
	u64 first_page;
};

/* A READ of several pages; in a map and not on the stack, because the verifier knows no values of maps.
 * So it checks the answer of any page once, and not that of each page. */
struct line {
	struct target of;
	u32 count;
	/* Pages that are answered, and what becomes of the request. */
	u32 done, outcome;
	u32 is_partial;
	/* How often a page was tried; for tests. */
	u64 rounds;
};

struct scratch {
	u8 bytes[PAGE_BYTES + 8];
	/* A request of several pages, as it came. */
	struct frame request;
	struct line line;
};

volatile const struct places places;
volatile const struct crc_tables crc_tables;

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, MAP_MMAPABLE);
	NUMBER(max_entries, 1);
	u32 *key;
	struct value *value;
} arena SEC(".maps");

/* The lines of other servers, by the server's node and the line's number there: the number of the line's
 * place in its shard. The server keeps it after the places themselves, and it may be of an earlier time. */
struct {
	NUMBER(type, MAP_HASH);
	NUMBER(map_flags, MAP_NO_PREALLOC);
	NUMBER(max_entries, 1);
	u64 *key;
	u32 *value;
} hints SEC(".maps");

/* Bytes that are answered, while they are checked and summed up; one processor runs one READ. */
struct {
	NUMBER(type, MAP_PERCPU_ARRAY);
	NUMBER(max_entries, 1);
	u32 *key;
	struct scratch *value;
} scratches SEC(".maps");

#define LOAD(x) (*(const volatile typeof(x) *)&(x))
#define STORE(x, to) (*(volatile typeof(x) *)&(x) = (to))
/* The compiler keeps loads on their side; x86 does, too. */
#define BARRIER() asm volatile("" ::: "memory")

INLINE u8 *value_at(u32 index)
{
	struct value *value = map_lookup(&arena, &index);

	return value ? value->bytes : NULL;
}

INLINE int pass(enum counter reason)
{
	u32 own = processor() & (places.processors - 1);
	u8 *value = value_at(places.counters + own / COUNTERS_OF_VALUE);
	struct read_counters *counters;

	if (value) {
		counters = (struct read_counters *)value + own % COUNTERS_OF_VALUE;
		counters->count[reason % COUNTERS]++;
	}
	return TCX_NEXT;
}

INLINE u32 crc_step(u32 crc, u64 word)
{
	u64 x = word ^ crc;

	return crc_tables.slice[7][x & 255] ^ crc_tables.slice[6][x >> 8 & 255] ^
	       crc_tables.slice[5][x >> 16 & 255] ^ crc_tables.slice[4][x >> 24 & 255] ^
	       crc_tables.slice[3][x >> 32 & 255] ^ crc_tables.slice[2][x >> 40 & 255] ^
	       crc_tables.slice[1][x >> 48 & 255] ^ crc_tables.slice[0][x >> 56];
}

/* The state of the CRC32C after the addresses and the header without its CRC. */
INLINE u32 crc_of_header(const struct frame *f)
{
	const u64 *header = (const u64 *)&f->header;
	u32 crc = ~0;

	crc = crc_step(crc, f->source[0]);
	crc = crc_step(crc, f->source[1]);
	crc = crc_step(crc, f->destination[0]);
	crc = crc_step(crc, f->destination[1]);
#pragma unroll
	for (int i = 0; i < 10; i++)
		crc = crc_step(crc, header[i]);
	return crc;
}

struct crc_loop {
	const u8 *bytes;
	u32 crc;
};

static long crc_word(u32 number, struct crc_loop *loop)
{
	loop->crc = crc_step(loop->crc, *(const u64 *)(loop->bytes + (number & 511) * 8));
	return 0;
}

/* Continues a CRC with bytes; `bytes` has room for PAGE_BYTES. */
INLINE u32 crc_of_bytes(u32 crc, const u8 *bytes, u32 length)
{
	struct crc_loop words = { .bytes = bytes, .crc = crc };
	u32 at = length & ~7U;

	loop(length / 8, crc_word, &words, 0);
	crc = words.crc;
	for (int i = 0; i < 7; i++) {
		if (at >= length || at >= PAGE_BYTES)
			break;
		crc = crc >> 8 ^ crc_tables.slice[0][(crc ^ bytes[at]) & 255];
		at++;
	}
	return crc;
}

INLINE u16 fold(u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* The sum of the pseudo-header (RFC 8200, section 8.1). */
INLINE u16 pseudo_sum(const struct frame *f)
{
	u64 sum = (u32)csum_diff(NULL, 0, f->source, 32, 0);

	return fold(sum + f->udp_bytes + be16(UDP));
}

/* The sum of UDP header and header, with `sum` before it. */
INLINE u16 header_sum(const struct frame *f, u16 sum)
{
	return fold((u64)sum + (u32)csum_diff(NULL, 0, &f->source_port, UDP_BYTES + HEADER_BYTES, 0));
}

/* The sum of bytes, behind which are zeros; with `sum` before it. */
INLINE u16 bytes_sum(const u8 *bytes, u32 length, u16 sum)
{
	u64 all = sum;
	u32 rest = (length + 3) & ~3U;

#pragma unroll
	for (int i = 0; i < PAGE_BYTES / SUM_BYTES; i++) {
		u32 part = rest > SUM_BYTES ? SUM_BYTES : rest;

		if (part)
			all += (u32)csum_diff(NULL, 0, bytes + i * SUM_BYTES, part, 0);
		rest -= part;
	}
	return fold(all);
}

/* Whether the pointer in the header is the destination, or one for whose shard the destination is the
 * server's endpoint address. */
INLINE int is_at_target(const struct header *h, const struct frame *f)
{
	u64 to = be64(f->destination[0]), location = be64(f->destination[1]);
	u64 target = be64(h->target[0]), of_target = be64(h->target[1]);

	if (location >> ENDPOINT_BIT)
		return !(to & 0xff) && (target & ~0xffff00ffULL) == (to & ~0xffffffffULL) &&
		       !((location ^ of_target) >> SHARD_SHIFT & 0xff);
	return target == (to & ~0xff00ULL) && of_target == location;
}

/* Whether it is a READ by form that a datagram for each page answers. */
INLINE int is_plain(const struct header *h, const struct frame *f)
{
	u64 to = be64(f->destination[0]);
	u16 flags = be16(h->flags);

	return h->version == 1 && h->words == HEADER_BYTES / 4 && (flags & ~FLAG_QUEUED) == 0 &&
	       h->required == 0 && h->key_id == 0 && h->page_shift == PAGE_SHIFT &&
	       h->offset == 0 && is_at_target(h, f) && (be64(f->source[1]) >> ENDPOINT_BIT) &&
	       !(be64(f->source[0]) & 0xffff) && be64(f->source[0]) >> 32 == to >> 32;
}

/* Whether the READ is of this session; raises its low water. This is `SharedSession::admit_read`. */
INLINE int admit(struct shared_session *s, const struct frame *f, u64 now)
{
	const struct header *h = &f->header;
	u64 sequence = (u64)be32(h->sequence_high) << 32 | be32(h->sequence_low);
	u64 word = LOAD(s->word), known = word & LOW_WATER_MASK, from = be64(f->source[0]);
	u64 distance = be16(h->answered_distance), low;

	if (!h->session || LOAD(s->id) != be64(h->session) || s->space != (u16)(from >> 32) ||
	    s->node != (u16)(from >> 16) || s->incarnation != be32(h->incarnation) ||
	    word & EXECUTING)
		return 0;
	low = sequence > distance ? sequence - distance : 0;
	low = low > known ? low : known;
	/* A number below the low water is far beyond the window, too. */
	if (low > LOW_WATER_MASK || sequence - low >= SESSION_WINDOW)
		return 0;
	if (low > known &&
	    __sync_val_compare_and_swap(&s->word, word, word - known + low) != word)
		return 0;
	if (LOAD(s->last_seen) < now)
		STORE(s->last_seen, now);
	return 1;
}

/* The record of a page of the shard whose first record is in value `states`. */
INLINE struct page_record *record_at(u32 states, u32 page)
{
	u8 *value = value_at(states + page / RECORDS_OF_VALUE);

	return value ? (struct page_record *)value + page % RECORDS_OF_VALUE : NULL;
}

/* Where the line of another server may be; 0 if nowhere. */
INLINE int find_place(struct target *of, u64 location)
{
	u64 page = (location & ((1ULL << LOCATION_BITS) - 1)) >> PAGE_SHIFT;
	u64 key = (u64)of->node << (LOCATION_BITS - PAGE_SHIFT) | page / LINE_PAGES;
	u32 *place = map_lookup(&hints, &key);

	if (!place)
		return 0;
	of->page = *place * LINE_PAGES + page % LINE_PAGES;
	of->first_page = page - page % LINE_PAGES;
	return 1;
}

/* The bytes of the place where another server's page may be; NULL if it is not there. */
INLINE u8 *placed_bytes(const struct target *of, u32 page)
{
	u32 line = page / LINE_PAGES, tables = of->shard * places.stride, frame;
	struct line_entry *entry;
	u8 *value;

	value = value_at(places.lines + tables + line / ENTRIES_OF_VALUE);
	if (!value)
		return NULL;
	entry = (struct line_entry *)value + line % ENTRIES_OF_VALUE;
	if (LOAD(entry->first_page) != of->first_page || LOAD(entry->node) != of->node)
		return NULL;
	value = value_at(places.frames + tables + line / FRAMES_OF_VALUE);
	if (!value)
		return NULL;
	/* 0: none yet. None: the greatest number. */
	frame = LOAD(((u32 *)value)[line % FRAMES_OF_VALUE]) - 1;
	if (frame >= places.shard_pages / LINE_PAGES)
		return NULL;
	return value_at(places.pages + of->shard * places.shard_pages + frame * LINE_PAGES +
			page % LINE_PAGES);
}

/* The bytes of a page that may be read. Its sequence must have been loaded before: the place and the
 * memory of another server's line are those of this sequence. */
INLINE u8 *bytes_of(const struct target *of, u32 page)
{
	if (of->is_adopted)
		return placed_bytes(of, page);
	return value_at(places.pages + of->shard * places.shard_pages + page);
}

/* Whether the page may be read by this pointer and has bytes of its own. */
INLINE int is_readable(const struct page_record *r, const struct target *of, u32 page,
		       const struct frame *f)
{
	u64 to = be64(f->header.target[0]), location = be64(f->header.target[1]);
	u32 colour = (u32)(location >> 48) << 8 | (to & 0xff);

	if (LOAD(r->marks))
		return 0;
	/* What a line on its way here gets is stored before its marks are cleared, without a change of the
	 * sequence. */
	BARRIER();
	if (r->contents == CONTENTS_LEFTOVER || r->colour != colour || r->space != (u16)(to >> 32))
		return 0;
	/* Only lines of complete allocations get away from home, and the head may be elsewhere. */
	if (of->is_adopted)
		return r->part == PART_HEAD || r->part == PART_BODY;
	if (r->part == PART_BODY) {
		r = record_at(of->states, page - r->link);
		if (!r)
			return 0;
	} else if (r->part != PART_HEAD) {
		return 0;
	}
	return LOAD(r->is_complete);
}

/* Makes the request the head of its answer. */
INLINE void turn_around(struct frame *f, u32 length, u64 version, const struct shared_shard *shard,
			u16 takes_pages)
{
	struct header *h = &f->header;
	u64 source = f->destination[0], location = f->destination[1];
	u32 credit = shard->credit_pages;
	u8 mac[6];

	__builtin_memcpy(mac, f->to, 6);
	__builtin_memcpy(f->to, f->from, 6);
	__builtin_memcpy(f->from, mac, 6);
	f->destination[0] = f->source[0];
	f->destination[1] = f->source[1];
	/* From this node, also for a line of another one. The tag is the status, OK. */
	source = be64(source) & ~(0xffff00ffULL | HOME << 8);
	f->source[0] = be64(source | (u32)places.node << 16 | REPLY << 8);
	f->source[1] = location;
	f->flow = be32(6U << 28);
	f->hop_limit = HOP_LIMIT;
	f->udp_bytes = f->payload_bytes = be16(UDP_BYTES + HEADER_BYTES + length);
	f->destination_port = f->source_port;
	f->source_port = be16(UDP_PORT);
	h->flags = h->node = 0;
	h->lease = 0;
	h->incarnation = be32(places.incarnation);
	h->answered_distance = 0;
	h->credit = be16(credit < takes_pages ? credit : takes_pages);
	h->page_version = be64(version);
	h->range_epoch = be32(shard->range_epoch);
	h->detail = 0;
}

/* Undoes the growth: the server gets the request as it was. */
INLINE int give_back(struct __sk_buff *skb, enum counter reason)
{
	if (skb_change_tail(skb, FRAME_BYTES, 0))
		return TCX_DROP;
	return pass(reason);
}

/* Also what an earlier page's answer put in its place. */
INLINE int give_all_back(struct __sk_buff *skb, const struct frame *request, enum counter reason)
{
	if (skb_store_bytes(skb, 0, (const u8 *)request + 2, FRAME_BYTES, 0))
		return TCX_DROP;
	return give_back(skb, reason);
}

/* The CRC of a header, `crc` so far, that a page with this CRC follows: of both it is that of the
 * header, as if zeros followed, and that of the page. */
INLINE u32 with_page(u32 crc, u32 of_page)
{
	crc = ~crc;
	return crc_tables.page[0][crc & 255] ^ crc_tables.page[1][crc >> 8 & 255] ^
	       crc_tables.page[2][crc >> 16 & 255] ^ crc_tables.page[3][crc >> 24] ^ of_page;
}

struct line_context {
	struct __sk_buff *skb;
	/* The head of the answers. */
	struct frame *head;
	struct scratch *scratch;
};

/* A page that changes while it is copied is tried again, so often in one READ. */
enum { LINE_RETRIES = 2 };

INLINE long end_line(struct line *line, enum counter outcome)
{
	line->outcome = outcome;
	return 1;
}

/* Answers the next page of a line; returns 0 if there is more to do. */
static long answer_page(u32 round, struct line_context *context)
{
	struct __sk_buff *skb = context->skb;
	struct frame *f = context->head;
	struct scratch *scratch = context->scratch;
	struct line *line = &scratch->line;
	u32 i = line->done, page = line->of.page + i, crc_of_page;
	struct page_record *record;
	u64 sequence, known;
	u8 *value;
	u16 sum;

	(void)round;
	record = record_at(line->of.states, page);
	if (!record)
		return end_line(line, PASSED_FORM);
	sequence = LOAD(record->sequence);
	BARRIER();
	known = LOAD(record->checksum);
	if (sequence & 1)
		return 0;
	/* Again, for this version. */
	if (!is_readable(record, &line->of, page, &scratch->request))
		return end_line(line, PASSED_PAGE);
	value = bytes_of(&line->of, page);
	if (!value)
		return end_line(line, PASSED_PAGE);
	crc_of_page = known;
	if ((u32)(known >> 32) != (u32)sequence) {
		if (probe_read_kernel(scratch->bytes, PAGE_BYTES, value))
			return end_line(line, PASSED_PAGE);
		value = scratch->bytes;
		crc_of_page = ~crc_of_bytes(~0U, value, PAGE_BYTES);
	}
	if (skb_store_bytes(skb, FRAME_BYTES, value, PAGE_BYTES, 0))
		return end_line(line, PASSED_SEND);
	f->header.offset = be16(i * PAGE_BYTES);
	f->header.page_version = be64(sequence / 2);
	f->header.crc = be32(with_page(crc_of_header(f), crc_of_page));
	f->udp_sum = 0;
	sum = pseudo_sum(f);
	if (!line->is_partial) {
		sum = ~bytes_sum(value, PAGE_BYTES, header_sum(f, sum));
		sum = sum ? sum : 0xffff;
	}
	f->udp_sum = sum;
	BARRIER();
	if (LOAD(record->sequence) != sequence)
		return 0;
	if (value == scratch->bytes)
		STORE(record->checksum, (sequence << 32) | crc_of_page);
	if (skb_store_bytes(skb, 0, (u8 *)f + 2, FRAME_BYTES, 0))
		return end_line(line, PASSED_SEND);
	line->done = ++i;
	if (i == line->count)
		return end_line(line, ANSWERED);
	/* What a queue drops the requester asks for again. */
	return clone_redirect(skb, skb->ifindex, 0) < 0 ? end_line(line, PASSED_SEND) : 0;
}

/*
 * Answers a READ of whole pages with a datagram for each: clones, and at last the packet itself.
 *
 * Each page is of one version, as if each had been read alone: that is all that READ promises. If a
 * page keeps changing when others have been sent, the server answers all of them again, and the
 * requester keeps what it has.
 */
INLINE int answer_line(struct __sk_buff *skb, struct frame *f, struct scratch *scratch,
		       const struct shared_shard *shard, u16 takes_pages)
{
	struct line_context context = { .skb = skb, .head = f, .scratch = scratch };
	struct frame *request = &scratch->request;
	struct line *line = &scratch->line;
	struct page_record *record;

	*request = *f;
	/* Nothing is sent if one of them cannot be read. */
	for (u32 i = 0; i < LINE_PAGES; i++) {
		if (i >= line->count)
			break;
		record = record_at(line->of.states, line->of.page + i);
		if (!record)
			return pass(PASSED_FORM);
		if (LOAD(record->sequence) & 1)
			return pass(PASSED_CHANGE);
		if (!is_readable(record, &line->of, line->of.page + i, request))
			return pass(PASSED_PAGE);
	}
	if (skb_change_tail(skb, FRAME_BYTES + PAGE_BYTES, 0))
		return pass(PASSED_SEND);
	turn_around(f, PAGE_BYTES, 0, shard, takes_pages);
	line->rounds = loop(line->count + LINE_RETRIES, answer_page, &context, 0);
	if (LOAD(line->outcome) != ANSWERED)
		return give_all_back(skb, request, line->outcome);
	pass(ANSWERED);
	return places.to_peer ? redirect_peer(skb->ifindex, 0) : redirect_to(skb->ifindex, 0);
}

SEC("classifier")
int answer_read(struct __sk_buff *skb)
{
	struct frame f = {};
	struct header *h = &f.header;
	struct target *of;
	u32 slot, zero = 0, tables, start, length, piece, crc, expected;
	u32 crc_of_data = 0;
	u64 now, location, sequence, known;
	struct shared_session *session;
	struct shared_shard *shard;
	struct page_record *record;
	struct scratch *scratch;
	const u8 *bytes, *from;
	u16 sum, piece_bytes, takes_pages;
	int is_whole, is_partial, is_line, is_at_endpoint;
	u8 *value;

	/* The cheapest check first: most other frames have another length. */
	if (skb->len != FRAME_BYTES || skb->protocol != be16(ETHERTYPE_IPV6) || skb->vlan_present ||
	    skb->pkt_type != PACKET_HOST || skb->gso_segs > 1)
		return TCX_NEXT;
	if (skb_load_bytes(skb, 0, (u8 *)&f + 2, FRAME_BYTES))
		return TCX_NEXT;
	if (f.next_header != UDP || f.destination_port != be16(UDP_PORT) ||
	    f.payload_bytes != be16(UDP_BYTES + HEADER_BYTES) || f.udp_bytes != f.payload_bytes ||
	    (f.flow & be32(0xf0000000)) != be32(6U << 28) ||
	    be64(f.destination[0]) >> 48 != FABRIC_PREFIX ||
	    (be64(f.destination[0]) >> 8 & ~HOME & 0xff) != READ)
		return TCX_NEXT;
	scratch = map_lookup(&scratches, &zero);
	if (!scratch)
		return TCX_NEXT;
	is_at_endpoint = be64(f.destination[1]) >> ENDPOINT_BIT;
	if (is_at_endpoint && (u16)(be64(f.destination[0]) >> 16) != places.node)
		return TCX_NEXT;
	location = be64(h->target[1]);
	/* There, because it does not fit on the stack. */
	of = &scratch->line.of;
	of->node = be64(is_at_endpoint ? h->target[0] : f.destination[0]) >> 16;
	of->is_adopted = of->node != places.node;
	of->shard = location >> SHARD_SHIFT & 0xff;
	if (of->is_adopted) {
		of->shard %= places.shard_count;
		if (!find_place(of, location))
			return TCX_NEXT;
	}
	/* From here on it is a READ for this server, of an own page or of a line that it has. */
	length = be32(h->length);
	start = location & (PAGE_BYTES - 1);
	if (!is_plain(h, &f) || location >> ENDPOINT_BIT || length == 0)
		return pass(PASSED_FORM);
	/* Requests of several pages have the bit; of those of one page, some that are sent again, and all
	 * at the endpoint address. */
	is_line = is_at_endpoint ? length > PAGE_BYTES : (be64(f.destination[0]) >> 8 & HOME) != 0;
	if (is_line && (start || length % PAGE_BYTES || length <= PAGE_BYTES ||
			(location >> PAGE_SHIFT) % LINE_PAGES + length / PAGE_BYTES > LINE_PAGES))
		return pass(PASSED_FORM);
	if (!is_line && (length > PAGE_BYTES || start + length > PAGE_BYTES))
		return pass(PASSED_FORM);
	piece = is_line ? PAGE_BYTES : length;
	if (!of->is_adopted) {
		of->page = (location & ((1ULL << SHARD_SHIFT) - 1)) >> PAGE_SHIFT;
		if (of->shard >= places.shard_count ||
		    of->page + (is_line ? length / PAGE_BYTES : 1) > places.shard_pages)
			return pass(PASSED_FORM);
	}
	/* Without pages the verifier need not check the rest, which old ones do not understand (`probe`). */
	if (places.shard_pages == 0 || FRAME_BYTES - ETHERNET_BYTES + piece > places.mtu)
		return pass(PASSED_FORM);
	tables = of->shard * places.stride;
	of->states = places.states + tables;

	expected = h->crc;
	sum = pseudo_sum(&f);
	is_partial = f.udp_sum == sum;
	/* A sum that is both, or neither, is for the server. */
	if ((header_sum(&f, sum) == 0xffff) == is_partial ||
	    be32(~crc_of_header(&f)) != expected)
		return pass(PASSED_CHECKSUM);

	value = value_at(places.shared + tables);
	if (!value)
		return pass(PASSED_FORM);
	shard = (struct shared_shard *)value;
	now = ktime_ns();
	if (LOAD(shard->open_until) <= now ||
	    (h->range_epoch && be32(h->range_epoch) != shard->range_epoch))
		return pass(PASSED_CLOSED);

	slot = be64(h->session) & 0xffff;
	if (slot >= places.session_count)
		return pass(PASSED_SESSION);
	/* The shard's record is before the sessions. */
	slot++;
	value = value_at(places.shared + tables + slot / SESSIONS_OF_VALUE);
	if (!value)
		return pass(PASSED_SESSION);
	session = (struct shared_session *)value + slot % SESSIONS_OF_VALUE;
	if (!admit(session, &f, now))
		return pass(PASSED_SESSION);
	piece_bytes = session->piece_bytes;
	takes_pages = session->takes_pages;
	if (piece > piece_bytes)
		return pass(PASSED_FORM);

	if (is_line) {
		scratch->line.count = length / PAGE_BYTES;
		scratch->line.done = 0;
		scratch->line.outcome = PASSED_CHANGE;
		scratch->line.is_partial = is_partial;
		return answer_line(skb, &f, scratch, shard, takes_pages);
	}
	record = record_at(of->states, of->page);
	if (!record)
		return pass(PASSED_FORM);
	sequence = LOAD(record->sequence);
	BARRIER();
	if (sequence & 1)
		return pass(PASSED_CHANGE);
	if (!is_readable(record, of, of->page, &f))
		return pass(PASSED_PAGE);
	value = bytes_of(of, of->page);
	if (!value)
		return pass(PASSED_PAGE);

	/* Verifiers before Linux 6.18 have lost the bounds by now, and the compiler knows them. */
	asm volatile("" : "+r"(length));
	length &= 2 * PAGE_BYTES - 1;
	if (length == 0 || length > PAGE_BYTES)
		return pass(PASSED_FORM);
	/* A whole page goes straight into the packet. */
	is_whole = length == PAGE_BYTES;
	bytes = value;
	known = LOAD(record->checksum);
	if (!is_whole || (u32)(known >> 32) != (u32)sequence) {
		/* The verifier cannot relate `start` and `length`, so no other helper may copy this. */
		from = value + start;
		if (probe_read_kernel(scratch->bytes, length, from))
			return pass(PASSED_PAGE);
		*(u32 *)(scratch->bytes + length) = 0;
		bytes = scratch->bytes;
		if (is_whole)
			crc_of_data = ~crc_of_bytes(~0U, bytes, PAGE_BYTES);
	} else {
		crc_of_data = known;
	}
	if (skb_change_tail(skb, FRAME_BYTES + length, 0))
		return pass(PASSED_SEND);
	if (skb_store_bytes(skb, FRAME_BYTES, bytes, length, 0))
		return give_back(skb, PASSED_SEND);
	turn_around(&f, length, sequence / 2, shard, takes_pages);
	crc = crc_of_header(&f);
	crc = is_whole ? with_page(crc, crc_of_data) : ~crc_of_bytes(crc, bytes, length);
	h->crc = be32(crc);
	f.udp_sum = 0;
	sum = pseudo_sum(&f);
	if (!is_partial) {
		sum = ~bytes_sum(bytes, length, header_sum(&f, sum));
		sum = sum ? sum : 0xffff;
	}
	f.udp_sum = sum;
	/* Only now: what was read is of one version of the page. */
	BARRIER();
	if (LOAD(record->sequence) != sequence)
		return give_back(skb, PASSED_CHANGE);
	if (is_whole && bytes != value)
		STORE(record->checksum, (sequence << 32) | crc_of_data);
	if (skb_store_bytes(skb, 0, (u8 *)&f + 2, FRAME_BYTES, 0))
		return give_back(skb, PASSED_SEND);
	pass(ANSWERED);
	/* To the other end of the veth at once, or through the queue of the interface. */
	return places.to_peer ? redirect_peer(skb->ifindex, 0) : redirect_to(skb->ifindex, 0);
}
