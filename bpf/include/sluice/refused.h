/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_REFUSED_H
#define SLUICE_REFUSED_H

/* Counts refusals for operators: how often each endpoint was over its share of a bound.
 */

#include <sluice/compiler.h>
#include <sluice/maps.h>

/* Counts a refusal of a bound, or of SL_REFUSED_CONNECTION4 or 6; slot may be SL_BUDGET_OUTSIDE. */
static __always_inline void count_refused(__u32 what, __u32 slot)
{
	struct sl_refused *counts = bpf_map_lookup_elem(&sl_refused, &slot);

	if (counts && what < SL_REFUSED)
		__sync_fetch_and_add(&counts->n[what], 1);
}

#endif
