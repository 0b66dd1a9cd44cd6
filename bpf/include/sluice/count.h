/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_COUNT_H
#define SLUICE_COUNT_H

/*
 * Counters for shared bounds: plain arrays of 32-bit counters in sl_count. Programs add to them
 * atomically when they create an entry, never per packet. The collector overwrites them with
 * recounted values at each pass. The hashes use a random seed, which the datapath writes into the
 * first cells, so that no sender can choose whose counter it shares.
 */

#include <sluice/clock.h>
#include <sluice/maps.h>
#include <sluice/service.h>

static __always_inline void count_connection(enum sl_ct_stat stat)
{
	__u32 at = stat;
	__u64 *n = bpf_map_lookup_elem(&sl_ct_stats, &at);

	if (n)
		(*n)++;
}

static __always_inline __u32 *count_at(__u32 at)
{
	__u32 element = at / SL_COUNTERS;
	struct sl_counters *counters = bpf_map_lookup_elem(&sl_count, &element);

	if (!counters)
		return NULL;
	is_checked(counters);
	return &counters->n[at & (SL_COUNTERS - 1)];
}

static __always_inline __u32 counted(__u32 at)
{
	__u32 *count = count_at(at);

	return count ? READ_ONCE(*count) : 0;
}

static __always_inline void add_to_count(__u32 at, __u32 n)
{
	__u32 *count = count_at(at);

	if (count)
		__sync_fetch_and_add(count, n);
}

/* Whether any record of the kind (SL_COUNT_ANSWERED and so on) may have the port. */
static __always_inline bool may_have_port(__u32 kind, __u16 port)
{
	return counted(kind + port / 32) >> (port % 32) & 1;
}

/* Sets the port's bit before a record of the kind is stored. */
static __always_inline void keep_port(__u32 kind, __u16 port)
{
	__u32 *word = count_at(kind + port / 32), bit = 1U << (port % 32);

	if (word && !(READ_ONCE(*word) & bit))
		__sync_fetch_and_or(word, bit);
}

static __always_inline __u64 count_seed(void)
{
	return (__u64)counted(SL_COUNT_SEED + 1) << 32 | counted(SL_COUNT_SEED);
}

/* Whether the collector has recounted recently. Without it, counts grow too large, because no
 * program sees evictions.
 */
static __always_inline bool is_recounted(void)
{
	return now_seconds() - counted(SL_COUNT_TIME) < SL_COUNT_LIFE;
}

/* The number that identifies an outside sender in shares: a hash of its IPv4 address or its IPv6
 * /64. Never 0. */
static __always_inline __u32 sender_number(const __u8 *addr, __u8 family, __u64 seed)
{
	__u64 a = family == 4 ? *(const __u32 *)addr : *(const __u64 *)addr;

	return (__u32)(scramble(a ^ seed) >> 16) | 1;
}

#endif
