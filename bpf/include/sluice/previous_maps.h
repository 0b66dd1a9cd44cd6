/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_PREVIOUS_MAPS_H
#define SLUICE_PREVIOUS_MAPS_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>
#include <sluice/abi.h>

/* connections of the previous version, while there are any; see previous.h */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_CT4);
	__type(key, struct sl_ct_key4);
	__type(value, struct sl_ct_prev);
} sl_prev4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_CT6);
	__type(key, struct sl_ct_key6);
	__type(value, struct sl_ct_prev);
} sl_prev6 SEC(".maps");

#endif
