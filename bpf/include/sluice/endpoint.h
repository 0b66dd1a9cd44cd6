/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ENDPOINT_H
#define SLUICE_ENDPOINT_H

/* Lookups from devices and addresses to slots and identities. */

#include <sluice/compiler.h>
#include <sluice/config.h>
#include <sluice/maps.h>

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

static __always_inline __u64 policy_of(const struct sl_endpoint *e)
{
	return READ_ONCE(e->pol);
}

/* The endpoint's identity under this policy entry. */
static __always_inline __u32 identity_under(const struct sl_endpoint *e, __u64 pol)
{
	if (unlikely(pol & SL_POL_SECOND))
		return READ_ONCE(*(const __u32 *)e->second);
	return READ_ONCE(e->identity);
}

static __always_inline __u32 identity_of(const struct sl_endpoint *e)
{
	return identity_under(e, policy_of(e));
}

/* The slot of the local endpoint with this address; SL_SLOT_HOST for an address of the host. */
static __always_inline __u16 slot_of_address(const __u8 *addr, __u8 family)
{
	struct sl_addr6 addr6;
	__be32 addr4;
	__u32 *slot;

	if (family == 4) {
		__builtin_memcpy(&addr4, addr, sizeof(addr4));
		slot = bpf_map_lookup_elem(&sl_ip4, &addr4);
	} else {
		__builtin_memcpy(&addr6, addr, sizeof(addr6));
		slot = bpf_map_lookup_elem(&sl_ip6, &addr6);
	}
	return slot ? (__u16)*slot : SL_SLOT_NONE;
}

/* Looks up an address. It never fails: an address that is not in the ipcache belongs to the
 * world.
 */
static __always_inline struct sl_ipcache ipcache_of(const __u8 *addr, __u8 family)
{
	struct sl_ipcache world = { .identity = family == 4 ? cfg_world4 : cfg_world6 };
	struct sl_prefix4 key4 = { .bits = 32 };
	struct sl_prefix6 key6 = { .bits = 128 };
	struct sl_ipcache *found;

	if (family == 4) {
		__builtin_memcpy(key4.addr, addr, sizeof(key4.addr));
		found = bpf_map_lookup_elem(&sl_ipc4, &key4);
	} else {
		__builtin_memcpy(key6.addr, addr, sizeof(key6.addr));
		found = bpf_map_lookup_elem(&sl_ipc6, &key6);
	}
	return found ? *found : world;
}

#endif
