/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_MAPS_H
#define SLUICE_MAPS_H

/*
 * How each type of map may be written. If a hash value is replaced in place, a program that looks
 * it up at that moment may miss it, or may read the value of another key. Therefore:
 *
 *   array        one aligned 64-bit word is changed at a time
 *   hash         values are written once, and deleted
 *   LPM trie     values of at most 8 bytes may be replaced
 *   per-CPU      only programs write
 */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>
#include <sluice/abi.h>

/* slot -> endpoint */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SL_MAX_SLOTS);
	__type(key, sl_endpoint_id);
	__type(value, struct sl_endpoint);
} sl_ep SEC(".maps");

/* the node-wide counter from which all epochs are taken; no program reads it */
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
	__type(key, sl_ifindex);
	__type(value, sl_endpoint_id);
} sl_if SEC(".maps");

/* local address -> slot */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_ADDRESSES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __be32);
	__type(value, sl_endpoint_id);
} sl_ip4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_ADDRESSES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_addr6);
	__type(value, sl_endpoint_id);
} sl_ip6 SEC(".maps");

/* prefix -> identity and node */
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

/* node ID -> how the node is reached */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SL_MAX_NODES);
	__type(key, sl_node_id);
	__type(value, struct sl_node);
} sl_node SEC(".maps");

/* node ID -> path of tunnel packets that bypass the tunnel device */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, SL_MAX_NODES);
	__type(key, sl_node_id);
	__type(value, struct sl_direct);
} sl_direct SEC(".maps");

/* address of another node -> node ID */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_NODE_ADDRESSES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_node_addr);
	__type(value, sl_node_id);
} sl_node_addr SEC(".maps");

/* table number -> one direction of a policy */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_TABLES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct sl_table);
} sl_table SEC(".maps");

/* identity -> class, kind and scope, one word; see SL_ID_KNOWN */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_IDENTITIES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, sl_identity_index);
	__type(value, sl_identity_word);
} sl_id SEC(".maps");

/* peer set and identity class -> peer class */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_PEERS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_peer_key);
	__type(value, sl_class_nr);
} sl_peer SEC(".maps");

/* address set and address -> address classes */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, SL_MAX_BLOCKS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_cidr_key4);
	__type(value, struct sl_cidr);
} sl_cidr4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, SL_MAX_BLOCKS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct sl_cidr_key6);
	__type(value, struct sl_cidr);
} sl_cidr6 SEC(".maps");

/* class_base + peer class -> root in sl_ports */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_CLASSES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, sl_root_nr);
} sl_class SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_PORT_NODES);
	__type(key, __u32);
	__type(value, struct sl_port_node);
} sl_ports SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_RULES);
	__type(key, __u32);
	__type(value, struct sl_rule);
} sl_rule SEC(".maps");

/* kind of proxy -> its device, and whether it runs */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_PROXIES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, sl_proxy_kind);
	__type(value, struct sl_proxy);
} sl_proxy SEC(".maps");

/* kind of proxy -> its heartbeat, CLOCK_MONOTONIC in ns. The proxy itself writes it, and therefore
 * must not be able to write anything else in this map.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_PROXIES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, sl_proxy_kind);
	__type(value, __u64);
} sl_proxy_beat SEC(".maps");

/* 0 -> heartbeat of the HTTP proxy. A map of its own: this proxy reads what strangers send, and
 * must not be able to write the heartbeats of others.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} sl_http_beat SEC(".maps");

/* slot -> packets of the endpoint in the queue to the DNS proxy */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_SLOTS);
	__type(key, sl_share_index);
	__type(value, struct sl_proxy_taken);
} sl_proxy_taken SEC(".maps");

/* slot -> new connections of the endpoint that wait for the HTTP proxy */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_SLOTS);
	__type(key, sl_share_index);
	__type(value, struct sl_proxy_taken);
} sl_http_taken SEC(".maps");

/* number -> key of an identity class, hash of a table; no program reads them */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_NODE_CLASSES);
	__type(key, __u32);
	__type(value, struct sl_class_key);
} sl_class_key SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_TABLES);
	__type(key, __u32);
	__type(value, struct sl_table_key);
} sl_table_key SEC(".maps");

/* connections; an element may be recycled while a program holds a pointer to it */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_CT4);
	__type(key, struct sl_ct_key4);
	__type(value, struct sl_ct);
} sl_ct4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_CT6);
	__type(key, struct sl_ct_key6);
	__type(value, struct sl_ct);
} sl_ct6 SEC(".maps");

/* terminated TCP connections; elements are never evicted */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_REVOKED);
	__type(key, struct sl_ct_key4);
	__type(value, struct sl_revoked);
} sl_revoked4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SL_MAX_REVOKED);
	__type(key, struct sl_ct_key6);
	__type(value, struct sl_revoked);
} sl_revoked6 SEC(".maps");

/* ring position -> the outside connection at it */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * SL_RING4);
	__type(key, __u32);
	__type(value, struct sl_ring4);
} sl_ring4 SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2 * SL_RING6);
	__type(key, __u32);
	__type(value, struct sl_ring6);
} sl_ring6 SEC(".maps");

/* slot and family -> connections begun, and their limit */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_BUDGETS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, sl_budget_index);
	__type(value, struct sl_budget);
} sl_budget SEC(".maps");

/* bound -> how the endpoints share it */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_BOUNDS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, sl_bound_index);
	__type(value, struct sl_bound);
} sl_bound SEC(".maps");

/* slot -> number of entries of each bound */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_SLOTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, sl_share_index);
	__type(value, struct sl_held);
} sl_held SEC(".maps");

/* slot or outside -> refusals because the share was exceeded */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_SLOTS + 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, sl_share_index);
	__type(value, struct sl_refused);
} sl_refused SEC(".maps");

/* hash of an address -> epoch, bumped whenever an address with this hash gets another identity */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_ADDRESS_EPOCHS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, __u64);
} sl_pgen SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SL_CT_STATS);
	__type(key, sl_stat_index);
	__type(value, __u64);
} sl_ct_stats SEC(".maps");

/* first fragment from a local pod -> ports of its datagram */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_POD_FRAGMENTS);
	__type(key, struct sl_fragment);
	__type(value, sl_ports_word);
} sl_pod_frag SEC(".maps");

/* the same for fragments from the stack, other nodes or outside */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, SL_MAX_FRAGMENTS);
	__type(key, struct sl_fragment);
	__type(value, sl_ports_word);
} sl_frag SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2 * SL_MAX_REASONS);
	__type(key, sl_cell_index);
	__type(value, struct sl_counter);
} sl_metrics SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SL_MAX_REASONS);
	__type(key, sl_reason_index);
	__type(value, struct sl_limit);
} sl_limits SEC(".maps");

/* rate -> how much of it this CPU has used in this second */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SL_MAX_RATES);
	__type(key, sl_rate_index);
	__type(value, struct sl_rate);
} sl_rate SEC(".maps");

/* slot -> events of the endpoint */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SL_MAX_SLOTS);
	__type(key, sl_endpoint_id);
	__type(value, struct sl_ep_limit);
} sl_ep_limits SEC(".maps");

/* program -> state of the packet of its run; see packet.h */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SL_MAX_PROGRAMS);
	__type(key, __u32);
	__type(value, struct sl_run_cell);
} sl_run SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, SL_EVENT_BYTES);
	__type(value, struct sl_event);
} sl_events SEC(".maps");

#endif
