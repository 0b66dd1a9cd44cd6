/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_MAPS_H
#define SLUICE_MAPS_H

/*
 * How each map is written is part of its meaning, because a hash value that is
 * replaced in place can be missed, or read as another key's, by a program that
 * looks it up at that moment:
 *
 *   array        changes in one aligned 64-bit word at a time
 *   hash         values are written once and deleted
 *   LPM trie     values of at most 8 bytes may be replaced
 *   per-CPU      written by the programs only
 */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>
#include <sluice/abi.h>

/* slot -> endpoint */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SL_MAX_SLOTS);
	__type(key, __u32);
	__type(value, struct sl_endpoint);
} sl_ep SEC(".maps");

/* the node-wide counter behind every gen; no program reads it */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} sl_gen SEC(".maps");

/* ifindex -> slot */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_DEVICES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u32);
} sl_if SEC(".maps");

/* local address -> slot */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_ADDRESSES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, __u32);
} sl_ip4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_ADDRESSES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_addr6);
	__type(value, __u32);
} sl_ip6 SEC(".maps");

/* prefix -> who lives there */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, SL_MAX_IPCACHE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_prefix4);
	__type(value, struct sl_ipcache);
} sl_ipc4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, SL_MAX_IPCACHE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_prefix6);
	__type(value, struct sl_ipcache);
} sl_ipc6 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2 * SL_MAX_REASONS);
	__type(key, __u32);
	__type(value, struct sl_counter);
} sl_metrics SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SL_MAX_REASONS);
	__type(key, __u32);
	__type(value, struct sl_limit);
} sl_limits SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, SL_EVENT_BYTES);
	__type(value, struct sl_event);
} sl_events SEC(".maps");

#endif
