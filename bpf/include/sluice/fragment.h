/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_FRAGMENT_H
#define SLUICE_FRAGMENT_H

/*
 * Fragments but the first have no ports, and are never judged without them:
 * the first one leaves them behind. Protocols without ports need none, but
 * what follows the fragment header of IPv6 may be another extension header:
 * such fragments are not followed.
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

/* Remembers the ports of a first fragment, or finds them for a later one. */
__noinline enum sl_reason find_ports(struct sl_packet *p)
{
	struct sl_fragment key = {};
	__u32 *found, ports;
	bool icmp;

	if (!p)
		return SL_DROP_FRAGMENT;
	if (!has_ports(p))
		return SL_CONTINUE;
	icmp = p->proto == SL_ICMP || p->proto == SL_ICMPV6;
	__builtin_memcpy(key.src, p->src, sizeof(key.src));
	__builtin_memcpy(key.dst, p->dst, sizeof(key.dst));
	key.id = p->fragment_id;
	key.proto = p->proto;
	key.family = p->family;
	key.slot = p->hook == SL_EGRESS ? p->src_slot : SL_SLOT_NONE;

	found = bpf_map_lookup_elem(&sl_frag, &key);
	if (p->fragment) {
		if (!found)
			return SL_DROP_FRAGMENT;
		ports = *found;
		p->dport = (__u16)ports;
		if (icmp)
			p->echo = (__u16)(ports >> 16);
		else
			p->sport = (__u16)(ports >> 16);
		return SL_CONTINUE;
	}
	ports = (__u32)(icmp ? p->echo : p->sport) << 16 | p->dport;
	if (found && *found == ports)
		return SL_CONTINUE;
	/* an identification that is used again: values are written once */
	if (found)
		bpf_map_delete_elem(&sl_frag, &key);
	bpf_map_update_elem(&sl_frag, &key, &ports, BPF_NOEXIST);
	return SL_CONTINUE;
}

static __always_inline enum sl_reason follow_fragments(struct sl_packet *p)
{
	if (likely(!p->fragment && !p->more_fragments))
		return SL_CONTINUE;
	return find_ports(p);
}

#endif
