/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_BUDGET_H
#define SLUICE_BUDGET_H

/*
 * How many connections an endpoint may begin: see struct sl_budget. While no collector runs, a
 * program returns part of a budget that has been used up for SL_BUDGET_WAIT seconds. The entry of
 * an ended connection is no longer needed, so as many connections are returned as have ended, at
 * most a quarter of the limit and at least an eighth. Therefore a pod with short connections
 * regains more than a pod with long ones. The part is limited, because each new entry may evict an
 * entry of another endpoint.
 */

#include <sluice/clock.h>
#include <sluice/compiler.h>
#include <sluice/refused.h>

/* The maximum number of attempts to change a budget while other CPUs change it. */
#define SL_BUDGET_TRIES 4

/* Counts n ended connections of an endpoint; -1: an ended connection that continues. */
static __always_inline void count_ended(__u32 slot, __u8 family, __s32 n)
{
	__u32 at = slot << 1 | (family == 6);
	struct sl_budget *budget = bpf_map_lookup_elem(&sl_budget, &at);

	if (budget && (__u32)READ_ONCE(budget->limit))
		__sync_fetch_and_add(&budget->limit, (__u64)n << 32);
}

/* The part of a budget that is returned for ended connections. */
static __always_inline __u32 returned_of(__u32 limit, __s32 ended)
{
	if (ended <= 0)
		return 0;
	return (__u32)ended < limit / 4 ? (__u32)ended : limit / 4;
}

/* The part that is returned after SL_BUDGET_WAIT seconds even if no connection has ended. */
static __always_inline __u32 renewed_of(__u32 limit)
{
	__u32 part = limit / 8;

	if (part < SL_BUDGET_LEAST)
		part = SL_BUDGET_LEAST;
	return part < limit ? part : limit;
}

/* Renews part of a budget that is used up. Returns whether the packet's connection may begin. */
__noinline int renew_budget(__u32 at)
{
	struct sl_budget *budget = bpf_map_lookup_elem(&sl_budget, &at);
	__u32 now = now_seconds(), limit, since, part, returned, stamp;
	__u64 word, begun;
	int i;

	if (!budget)
		return 1;
	for (i = 0; i < SL_BUDGET_TRIES; i++) {
		bool due;

		word = READ_ONCE(budget->limit);
		begun = READ_ONCE(budget->begun);
		limit = (__u32)word;
		if ((__u32)begun < limit) {
			__sync_fetch_and_add(&budget->begun, 1);
			return 1;
		}
		since = begun >> 32;
		due = since && now - since >= SL_BUDGET_WAIT;
		part = returned = since && !due ? 0 : returned_of(limit, (__s32)(word >> 32));
		if (due && part < renewed_of(limit))
			part = renewed_of(limit);
		if (!part) {
			if (!since)
				__sync_val_compare_and_swap(&budget->begun, begun,
							    (__u64)now << 32 | (__u32)begun);
			break;
		}
		/* plus this connection */
		stamp = returned ? now : 0;
		if (__sync_val_compare_and_swap(&budget->begun, begun,
						(__u64)stamp << 32 | (limit - part + 1)) == begun) {
			__sync_fetch_and_add(&budget->limit, -((__u64)returned << 32));
			return 1;
		}
	}
	count_refused(SL_REFUSED_CONNECTION4 + (at & 1), at >> 1);
	return 0;
}

#endif
