/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ENDPOINT_H
#define SLUICE_ENDPOINT_H

/* From devices and addresses to slots and identities. */

#include <sluice/config.h>
#include <sluice/maps.h>
#include <sluice/packet.h>

static __always_inline struct sl_endpoint *endpoint_at(__u32 slot)
{
	return bpf_map_lookup_elem(&sl_ep, &slot);
}

static __always_inline struct sl_endpoint *endpoint_of_device(__u32 ifindex, __u16 *slot)
{
	__u32 *at = bpf_map_lookup_elem(&sl_if, &ifindex);

	if (!at)
		return NULL;
	*slot = (__u16)*at;
	return endpoint_at(*at);
}

static __always_inline __u32 slot_of_destination4(struct sl_packet *p)
{
	__be32 addr = *(__be32 *)p->dst;
	__u32 *slot = bpf_map_lookup_elem(&sl_ip4, &addr);

	return slot ? *slot : SL_SLOT_NONE;
}

static __always_inline __u32 slot_of_destination6(struct sl_packet *p)
{
	__u32 *slot = bpf_map_lookup_elem(&sl_ip6, p->dst);

	return slot ? *slot : SL_SLOT_NONE;
}

/* Never fails: an address that is not in the ipcache is the world's. */
static __always_inline struct sl_ipcache ipcache4(const __u8 *addr)
{
	struct sl_ipcache world = { .identity = cfg_world4 };
	struct sl_prefix4 key = { .bits = 32 };
	struct sl_ipcache *found;

	__builtin_memcpy(key.addr, addr, sizeof(key.addr));
	found = bpf_map_lookup_elem(&sl_ipc4, &key);
	return found ? *found : world;
}

static __always_inline struct sl_ipcache ipcache6(const __u8 *addr)
{
	struct sl_ipcache world = { .identity = cfg_world6 };
	struct sl_prefix6 key = { .bits = 128 };
	struct sl_ipcache *found;

	__builtin_memcpy(key.addr, addr, sizeof(key.addr));
	found = bpf_map_lookup_elem(&sl_ipc6, &key);
	return found ? *found : world;
}

#endif
