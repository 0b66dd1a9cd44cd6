/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_BOUND_H
#define SLUICE_BOUND_H

/*
 * Bounds that all endpoints of the node share. One half of a bound is common: any endpoint may use
 * it, first come, first served. The other half is guaranteed: with n endpoints that have entries,
 * each is guaranteed 1/n of that half. When the common half is used up, only endpoints above their
 * guarantee are refused.
 *
 * sl_held counts the entries of each endpoint: the result of the collector's last pass, plus
 * entries that programs have created since. Programs count when they create an entry, never per
 * packet. LRU maps do not report evictions, so only the collector lowers a count. While no
 * collector runs, counts only grow; therefore each guarantee then grows by an eighth every
 * SL_BUDGET_WAIT seconds after the first refusal.
 */

#include <sluice/clock.h>
#include <sluice/compiler.h>
#include <sluice/refused.h>

static __always_inline __u32 held(__u32 bound, __u32 slot)
{
	struct sl_held *counts = bpf_map_lookup_elem(&sl_held, &slot);

	return counts && bound < SL_BOUNDS ? READ_ONCE(counts->n[bound]) : 0;
}

/* Adds n to an endpoint's count of a bound; n may be negative modulo 2^32. */
static __always_inline void hold(__u32 bound, __u32 slot, __u32 n)
{
	struct sl_held *counts = bpf_map_lookup_elem(&sl_held, &slot);

	if (counts && bound < SL_BOUNDS)
		__sync_fetch_and_add(&counts->n[bound], n);
}

/* How many entries of a bound each endpoint may have, regardless of the others. */
static __always_inline __u32 guaranteed(const struct sl_bound *b)
{
	__u32 guarantee = READ_ONCE(b->guarantee), refused = READ_ONCE(b->refused_s);

	if (unlikely(refused))
		guarantee += guarantee / 8 * ((now_seconds() - refused) / SL_BUDGET_WAIT);
	return guarantee;
}

/*
 * Reserves n entries of a bound for an endpoint that is about to create them. Returns 0 if they
 * would exceed its share. A bound that the datapath has not configured limits nothing.
 */
__noinline int take_of_bound(__u32 bound, __u32 slot, __u32 n)
{
	struct sl_bound *b = bpf_map_lookup_elem(&sl_bound, &bound);

	if (!b || !READ_ONCE(b->guarantee))
		return 1;
	if (held(bound, slot) + n > guaranteed(b)) {
		if (READ_ONCE(b->used) + n > READ_ONCE(b->common)) {
			if (!READ_ONCE(b->refused_s))
				__sync_val_compare_and_swap(&b->refused_s, 0, now_seconds());
			count_refused(bound, slot);
			return 0;
		}
		__sync_fetch_and_add(&b->used, n);
	}
	hold(bound, slot, n);
	return 1;
}

/*
 * Like take_of_bound, for one entry that a connection can do without. It may only use half of the
 * endpoint's guarantee and half of the common half; the rest is left to entries that connections
 * need. No packet is dropped without the entry, so its absence does not count as a refusal.
 */
__noinline int take_spare_of_bound(__u32 bound, __u32 slot)
{
	struct sl_bound *b = bpf_map_lookup_elem(&sl_bound, &bound);
	bool common_left;
	__u32 has;

	if (!b || !READ_ONCE(b->guarantee))
		return 1;
	has = held(bound, slot);
	common_left = READ_ONCE(b->used) < READ_ONCE(b->common) / 2;
	if (!common_left && has >= READ_ONCE(b->guarantee) / 2)
		return 0;
	if (has >= READ_ONCE(b->guarantee))
		__sync_fetch_and_add(&b->used, 1);
	hold(bound, slot, 1);
	return 1;
}

/* Whether an endpoint has reached its guarantee of a bound. */
static __always_inline bool has_guarantee(__u32 bound, __u32 slot)
{
	struct sl_bound *b = bpf_map_lookup_elem(&sl_bound, &bound);

	return b && READ_ONCE(b->guarantee) && held(bound, slot) >= READ_ONCE(b->guarantee);
}

/*
 * Subtracts n entries of a bound from an endpoint's count: entries that a program has removed, or
 * has reserved but not created, or that are no longer charged. The collector may already have
 * subtracted them.
 */
static __always_inline void give_back(__u32 bound, __u32 slot, __u32 n)
{
	struct sl_bound *b = bpf_map_lookup_elem(&sl_bound, &bound);
	__u32 has;

	if (!b || !READ_ONCE(b->guarantee))
		return;
	has = held(bound, slot);
	if (n > has)
		n = has;
	if (has > READ_ONCE(b->guarantee) && READ_ONCE(b->used) >= n)
		__sync_fetch_and_add(&b->used, -n);
	hold(bound, slot, -n);
}

#endif
