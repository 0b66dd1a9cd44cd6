/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_FRAGMENT_H
#define SLUICE_FRAGMENT_H

/*
 * Fragments but the first have no ports, and are never evaluated without them:
 * the first one leaves them behind. Protocols without ports need none, but
 * what follows the fragment header of IPv6 may be another extension header:
 * such fragments are not followed. Ports that one local pod, or one node, leaves
 * behind serve its own fragments only.
 */

#include <sluice/ipv6.h>
#include <sluice/maps.h>
#include <sluice/transport.h>

static __always_inline bool has_ports(const struct sl_packet *p)
{
	switch (p->proto) {
	case SL_TCP:
	case SL_UDP:
	case SL_SCTP:
	case SL_ICMP:
	case SL_ICMPV6:
		return true;
	}
	return is_ext_header(p->proto);
}

static __always_inline void fragment_key(const struct sl_packet *p, struct sl_fragment *key)
{
	__builtin_memset(key, 0, sizeof(*key));
	__builtin_memcpy(key->src, p->readdressed ? p->asked : p->src, sizeof(key->src));
	__builtin_memcpy(key->dst, p->translated ? p->asked : p->dst, sizeof(key->dst));
	key->id = p->fragment_id;
	key->proto = p->proto;
	key->family = p->family;
	if (p->hook == SL_EGRESS)
		key->slot = p->src_slot;
	else if (SL_PROGRAM == SL_PROGRAM_FROM_OVERLAY)
		key->slot = SL_SLOT_NONE - p->node;
	else
		key->slot = SL_SLOT_NONE;
}

/* Finds the ports of a later fragment. */
__noinline enum sl_reason find_ports(struct sl_packet *p)
{
	struct sl_fragment key;
	__u32 *found, ports;

	if (!p)
		return SL_DROP_FRAGMENT;
	if (!has_ports(p))
		return SL_CONTINUE;
	fragment_key(p, &key);
	found = bpf_map_lookup_elem(&sl_frag, &key);
	if (!found)
		return SL_DROP_FRAGMENT;
	ports = *found;
	p->dport = (__u16)ports;
	if (p->proto == SL_ICMP || p->proto == SL_ICMPV6)
		p->echo = (__u16)(ports >> 16);
	else
		p->sport = (__u16)(ports >> 16);
	return SL_CONTINUE;
}

/*
 * Remembers the ports of a first fragment that passes. One that is denied takes
 * no room from those of others, and leaves its later ones none.
 */
__noinline int lead_fragments(struct sl_packet *p, __u32 denied)
{
	struct sl_fragment key;
	__u32 *found, ports;
	bool icmp;

	if (!p || !has_ports(p))
		return 0;
	icmp = p->proto == SL_ICMP || p->proto == SL_ICMPV6;
	fragment_key(p, &key);
	ports = (__u32)(icmp ? p->echo : p->sport) << 16 |
		(p->translated ? p->asked_port : p->dport);
	found = bpf_map_lookup_elem(&sl_frag, &key);
	if (found && *found == ports && !denied)
		return 0;
	/* an identification that is used again: values are written once */
	if (found)
		bpf_map_delete_elem(&sl_frag, &key);
	if (!denied)
		bpf_map_update_elem(&sl_frag, &key, &ports, BPF_NOEXIST);
	return 0;
}

static __always_inline enum sl_reason follow_fragments(struct sl_packet *p)
{
	if (likely(!p->fragment))
		return SL_CONTINUE;
	return find_ports(p);
}

static __always_inline bool leads_fragments(const struct sl_packet *p)
{
	return unlikely(p->more_fragments && !p->fragment);
}

#endif
