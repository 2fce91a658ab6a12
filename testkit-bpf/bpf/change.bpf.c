/* SPDX-License-Identifier: GPL-2.0 OR MIT
 *
 * For tests: changes a page's record when a packet is sent, and so between two pages of a line that
 * read.bpf.c answers.
 */
#include "../../memserver/bpf/shared.h"

char _license[] SEC("license") = "GPL";

enum { ETHERTYPE_IPV6 = 0x86dd };

/* Which record, by its value and its number there, and what it becomes. */
volatile const u32 record_value, record_number;
volatile const struct page_record record_after;

struct {
	NUMBER(type, MAP_ARRAY);
	NUMBER(map_flags, MAP_MMAPABLE);
	NUMBER(max_entries, 1);
	u32 *key;
	struct value *value;
} arena SEC(".maps");

SEC("classifier")
int change_record(struct __sk_buff *skb)
{
	u32 index = record_value, number = record_number;
	struct value *value = map_lookup(&arena, &index);

	if (value && number < RECORDS_OF_VALUE && skb->protocol == be16(ETHERTYPE_IPV6))
		((struct page_record *)value)[number] = record_after;
	return TCX_NEXT;
}
