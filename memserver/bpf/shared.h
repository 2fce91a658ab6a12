/* SPDX-License-Identifier: GPL-2.0 OR MIT
 *
 * What the memory server shares with the program: one array of values of a page's size, which the
 * server maps. The server's layout (src/kept/layout.rs) decides which values are what.
 *
 * The Rust types of the same names are in src/kept.rs (page_record), src/kept/lines.rs (line_entry),
 * src/direct/ (places, counters, tables) and protocol/src/direct.rs (sessions, shard); tests compare
 * them with this file.
 */
#pragma once
#include "kernel.h"

enum {
	PAGE_BYTES = 4096,
	PAGE_SHIFT = 12,
	SHARD_SHIFT = 40,
	LINE_PAGES = 8,
};

/* What the memory of a page contains, and its role; as in src/arena/pages.rs. */
enum { CONTENTS_LEFTOVER = 1 };
enum { PART_NONE = 0, PART_HEAD = 1, PART_BODY = 2 };

struct page_record {
	u64 sequence;
	u64 checksum;
	u32 link;
	u32 colour;
	u16 space;
	u8 part;
	u8 contents;
	u8 is_complete;
	u8 marks;
	u8 unused[2];
};

/* What a line of the shard is. Only the names of other servers' lines are read. */
struct line_entry {
	u64 migration;
	u64 epoch;
	u64 first_page;
	u16 node;
	u16 generation;
	u32 state;
};

/* Low water in the session's word, and the mark that the server executes a request. */
#define LOW_WATER_MASK ((1ULL << 47) - 1)
#define EXECUTING (1ULL << 47)
enum { SESSION_WINDOW = 512 };

struct shared_session {
	u64 id;
	u64 word;
	u64 last_seen;
	u32 incarnation;
	u16 space;
	u16 node;
	u16 piece_bytes;
	u16 takes_pages;
	u64 unused[3];
};

struct shared_shard {
	u64 open_until;
	u32 range_epoch;
	u32 credit_pages;
	u64 unused[6];
};

/* READs of a processor: answered, and passed on by reason. */
enum counter {
	ANSWERED,
	PASSED_FORM,	/* several pieces of a page, options, a repetition, ... */
	PASSED_CLOSED,	/* the server does not serve, or under another epoch */
	PASSED_SESSION, /* unknown, or it executes a request */
	PASSED_PAGE,	/* leased, not written, not confirmed, or not to be read by this pointer */
	PASSED_CHANGE,	/* the page changed meanwhile */
	PASSED_CHECKSUM, /* the request is damaged */
	PASSED_SEND,	/* the kernel had no memory for the answer */
	COUNTERS,
};

struct read_counters {
	u64 count[COUNTERS];
};

enum {
	RECORDS_OF_VALUE = PAGE_BYTES / sizeof(struct page_record),
	SESSIONS_OF_VALUE = PAGE_BYTES / sizeof(struct shared_session),
	COUNTERS_OF_VALUE = PAGE_BYTES / sizeof(struct read_counters),
	ENTRIES_OF_VALUE = PAGE_BYTES / sizeof(struct line_entry),
	FRAMES_OF_VALUE = PAGE_BYTES / sizeof(u32),
};

struct value {
	u8 bytes[PAGE_BYTES];
};

/* Where things are, as numbers of values. Those of shard n come n * `stride` later. */
struct places {
	u32 states;
	/* The entries of lines, and the number of each line's frame and 1. */
	u32 lines;
	u32 frames;
	u32 shared;
	u32 pages;
	u32 counters;
	u32 stride;
	/* Pages of one shard, which is also the stride of `pages`. */
	u32 shard_pages;
	u32 shard_count;
	u32 session_count;
	/* Processors with counters of their own: a power of two. */
	u32 processors;
	/* The server. */
	u32 incarnation;
	u16 node;
	/* Whether the interface is a veth whose other end is in another namespace. */
	u16 to_peer;
	/* The longest IP packet of the interface. */
	u32 mtu;
};

/* Tables for CRC32C. */
struct crc_tables {
	/* Of a byte that is followed by n bytes. */
	u32 slice[8][256];
	/* Of a byte of a CRC that is followed by a page. */
	u32 page[4][256];
};
