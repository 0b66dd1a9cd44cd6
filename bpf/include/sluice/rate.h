/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_RATE_H
#define SLUICE_RATE_H

/*
 * Limits per CPU and second: answers, and ICMP errors that pass. The endpoints of the node share
 * a rate as they share a bound (bound.h): one half is common. Of the other half, each of the n
 * endpoints that used the rate in this second or in the last one is guaranteed 1/n. An endpoint
 * that is new in this second has a guarantee, too, up to twice the rate in total.
 */

#include <sluice/bound.h>
#include <sluice/maps.h>

#define SL_RATE_WINDOW 1000000000 /* ns */

static __always_inline struct sl_rate *rate_at(__u32 at, __u64 now)
{
	struct sl_rate *rate = bpf_map_lookup_elem(&sl_rate, &at);

	if (rate && now - rate->since >= SL_RATE_WINDOW) {
		/* if a whole second was skipped, no endpoint has used the rate in the last one */
		rate->last_takers = now - rate->since < 2ULL * SL_RATE_WINDOW ? rate->takers : 0;
		rate->since = now;
		rate->given = 0;
		rate->common = 0;
		rate->takers = 0;
	}
	return rate;
}

/* Whether the rate allows this CPU another packet in this second, for any receiver. */
static __always_inline bool within_rate(__u32 at, __u32 limit)
{
	struct sl_rate *rate = rate_at(at, bpf_ktime_get_ns());

	if (!rate)
		return false;
	if (rate->given >= limit) {
		rate->refused++;
		return false;
	}
	rate->given++;
	return true;
}

/* The endpoint's count for this second: the upper half of the count holds the second. */
static __always_inline __u32 taken_in(__u32 count, __u32 second)
{
	return count >> 16 == (second & 0xffff) ? count : second << 16;
}

/* Whether the rate allows this CPU another packet for the endpoint in this second. */
static __always_inline bool within_rate_of(__u32 at, __u32 limit, __u32 bound, __u32 slot)
{
	struct sl_held *counts = bpf_map_lookup_elem(&sl_held, &slot);
	__u64 now = bpf_ktime_get_ns();
	struct sl_rate *rate = rate_at(at, now);
	__u32 taken, takers;

	if (!rate || !counts || bound >= SL_BOUNDS)
		return false;
	if (rate->given >= 2 * limit) {
		count_refused(bound, slot);
		return false;
	}
	taken = taken_in(READ_ONCE(counts->n[bound]), (__u32)(now / SL_RATE_WINDOW));
	takers = rate->takers > rate->last_takers ? rate->takers : rate->last_takers;
	if ((taken & 0xffff) >= limit / 2 / (takers ? takers : 1)) {
		if (rate->common >= limit / 2) {
			rate->refused++;
			count_refused(bound, slot);
			return false;
		}
		rate->common++;
	}
	if (!(taken & 0xffff))
		rate->takers++;
	/* two CPUs may both take the last one */
	*(volatile __u32 *)&counts->n[bound] = taken + ((taken & 0xffff) != 0xffff);
	rate->given++;
	return true;
}

#endif
