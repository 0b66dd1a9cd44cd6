/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_SERVICE_MAPS_H
#define SLUICE_SERVICE_MAPS_H

/*
 * The maps of services; maps.h describes how they may be written. On a node without services, or
 * without one of the families, the unused maps have one element each.
 */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>
#include <sluice/service_abi.h>

/* requested address -> fronts; a value is never changed */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_FRONTENDS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_fe_key4);
	__type(value, struct sl_fe);
} sl_fe4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_FRONTENDS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_fe_key6);
	__type(value, struct sl_fe);
} sl_fe6 SEC(".maps");

/* number of a front -> its list */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_FRONTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct sl_front);
} sl_front SEC(".maps");

/* base of a list + index -> backend | salt << 32 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_MEMBERS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, sl_member_word);
} sl_member SEC(".maps");

/* number of a backend -> its address */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_BACKENDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, sl_be4_word);
} sl_be4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_BACKENDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct sl_be6);
} sl_be6 SEC(".maps");

/* cookie of a network namespace -> the endpoint that its sockets belong to */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_NAMESPACES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, sl_netns_cookie);
	__type(value, struct sl_ns);
} sl_ns SEC(".maps");

/* socket -> its translations */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct sl_sock);
} sl_sk SEC(".maps");

/* front and client prefix -> the client is allowed */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, SL_MAX_SOURCES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_src_key4);
	__type(value, __u32);
} sl_src4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, SL_MAX_SOURCES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_src_key6);
	__type(value, __u32);
} sl_src6 SEC(".maps");

/* untranslated packet of a pod -> its new destination */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_POD_XL4);
	__type(key, struct sl_xl_key4);
	__type(value, struct sl_xl);
} sl_pod_xl4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_POD_XL6);
	__type(key, struct sl_xl_key6);
	__type(value, struct sl_xl);
} sl_pod_xl6 SEC(".maps");

/* the same for packets from outside, and for answers to the node */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_XL4);
	__type(key, struct sl_xl_key4);
	__type(value, struct sl_xl);
} sl_xl4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_XL6);
	__type(key, struct sl_xl_key6);
	__type(value, struct sl_xl);
} sl_xl6 SEC(".maps");

/* untranslated answer to a pod, or request of a pod -> a copy of its translation, in case of
 * eviction
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_POD_ANSWERS4);
	__type(key, struct sl_xl_key4);
	__type(value, struct sl_xl);
} sl_pod_answers4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_POD_ANSWERS6);
	__type(key, struct sl_xl_key6);
	__type(value, struct sl_xl);
} sl_pod_answers6 SEC(".maps");

/* the same for clients outside and the host */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_ANSWERS4);
	__type(key, struct sl_xl_key4);
	__type(value, struct sl_xl);
} sl_answers4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_ANSWERS6);
	__type(key, struct sl_xl_key6);
	__type(value, struct sl_xl);
} sl_answers6 SEC(".maps");

/* counters of shared bounds; see count.h */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_COUNTS / SL_COUNTERS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct sl_counters);
} sl_count SEC(".maps");

/* backend and sender -> ports of the node that the sender uses there */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_SHARES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_share_key);
	__type(value, struct sl_share);
} sl_share SEC(".maps");

/* addresses of this node, indexed by their hash */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_OWN);
	__type(key, __u32);
	__type(value, struct sl_own);
} sl_own SEC(".maps");

/* pod or host, and group of fronts -> the backend that the client keeps */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_POD_AFFINITY);
	__type(key, struct sl_aff_key4);
	__type(value, sl_affinity_word);
} sl_pod_aff4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_POD_AFFINITY);
	__type(key, struct sl_aff_key6);
	__type(value, sl_affinity_word);
} sl_pod_aff6 SEC(".maps");

/* the same for outside clients */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_AFFINITY);
	__type(key, struct sl_aff_key4);
	__type(value, sl_affinity_word);
} sl_aff4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_AFFINITY);
	__type(key, struct sl_aff_key6);
	__type(value, sl_affinity_word);
} sl_aff6 SEC(".maps");

#endif
