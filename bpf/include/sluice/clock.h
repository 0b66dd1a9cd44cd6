/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_CLOCK_H
#define SLUICE_CLOCK_H

#include <linux/types.h>

#include <bpf/bpf_helpers.h>

/* CLOCK_MONOTONIC in seconds, as stored in maps. */
static __always_inline __u32 now_seconds(void)
{
	return (__u32)(bpf_ktime_get_coarse_ns() / 1000000000);
}

#endif
