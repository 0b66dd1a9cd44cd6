/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_FRAGMENT_H
#define SLUICE_FRAGMENT_H

/*
 * Later fragments have no ports, and are never evaluated without ports: the first fragment records
 * them. Protocols without ports need no record. After an IPv6 fragment header, however, another
 * extension header may follow; such fragments are not tracked. Ports recorded for the fragments of
 * one local pod or node never apply to another's.
 *
 * Later fragments take the path of the first fragment. A stack that tracks connections waits for
 * all fragments of a datagram, and would wait in vain for a fragment that a program has delivered
 * itself. A later fragment that arrives before the first one has no ports and is dropped on either
 * path.
 *
 * The pods of the node share the map of tracked datagrams; see bound.h. A datagram of a pod above
 * its guarantee is removed with its last fragment, so that a pod that sends fragments in order is
 * never refused.
 */

#include <sluice/bound.h>
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
	else if (SL_FROM_TUNNEL)
		key->slot = SL_SLOT_NONE - p->sending_node;
	else if (SL_PROGRAM == SL_PROGRAM_FROM_TAP)
		key->slot = SL_SLOT_HOST;
	else
		key->slot = SL_SLOT_NONE;
}

/*
 * Datagrams of local pods have a map of their own, which packets from the stack, other nodes or
 * outside cannot fill.
 */
static __always_inline __u32 *find_fragment(const struct sl_fragment *key)
{
	if (SL_PROGRAM == SL_PROGRAM_FROM_POD)
		return bpf_map_lookup_elem(&sl_pod_frag, key);
	return bpf_map_lookup_elem(&sl_frag, key);
}

static __always_inline long delete_fragment(const struct sl_fragment *key)
{
	if (SL_PROGRAM == SL_PROGRAM_FROM_POD)
		return bpf_map_delete_elem(&sl_pod_frag, key);
	return bpf_map_delete_elem(&sl_frag, key);
}

static __always_inline void insert_fragment(const struct sl_fragment *key, const __u32 *ports)
{
	if (SL_PROGRAM == SL_PROGRAM_FROM_POD)
		bpf_map_update_elem(&sl_pod_frag, key, ports, BPF_NOEXIST);
	else
		bpf_map_update_elem(&sl_frag, key, ports, BPF_NOEXIST);
}

/* Removes the record of a complete datagram if the pod is above its guarantee. */
static __always_inline void end_datagram(const struct sl_packet *p, const struct sl_fragment *key)
{
	if (SL_PROGRAM != SL_PROGRAM_FROM_POD || !p->last_fragment ||
	    !has_guarantee(SL_BOUND_FRAGMENTS, p->src_slot))
		return;
	if (!delete_fragment(key))
		give_back(SL_BOUND_FRAGMENTS, p->src_slot, 1);
}

/* Looks up the ports of a later fragment, and the path of its datagram. */
__noinline enum sl_reason find_ports(struct sl_packet *p)
{
	struct sl_fragment key;
	__u32 *found, ports;

	if (!p)
		return SL_REASON_FRAGMENT_UNKNOWN;
	if (!has_ports(p))
		return SL_CONTINUE;
	fragment_key(p, &key);
	found = find_fragment(&key);
	if (!found) {
		key.family |= SL_FRAGMENT_BY_STACK;
		found = find_fragment(&key);
		if (!found)
			return SL_REASON_FRAGMENT_UNKNOWN;
		p->by_stack = 1;
	}
	ports = *found;
	end_datagram(p, &key);
	p->dport = (__u16)ports;
	if (p->proto == SL_ICMP || p->proto == SL_ICMPV6)
		p->echo = (__u16)(ports >> 16);
	else
		p->sport = (__u16)(ports >> 16);
	return SL_CONTINUE;
}

/* The record that a first fragment leaves for later fragments. */
enum sl_lead {
	SL_LEAD_NONE = 0, /* nothing, because it is dropped */
	SL_LEAD_ON = 1, /* its ports; a path that is already recorded stays */
	SL_LEAD_PAST_STACK = 2,
	SL_LEAD_BY_STACK = 3,
};

/* The record of a first fragment, by the path that a program has chosen for it. */
static __always_inline enum sl_lead lead_of(enum sl_reason reason)
{
	switch (reason) {
	case SL_REASON_FORWARDED_TO_POD:
	case SL_REASON_FORWARDED_TO_POD_DEVICE:
	case SL_REASON_FORWARDED_OVERLAY:
	case SL_REASON_FORWARDED_NATIVE:
		return SL_LEAD_PAST_STACK;
	case SL_REASON_FORWARDED_TO_HOST:
	case SL_REASON_FORWARDED_OUTSIDE:
	case SL_REASON_FORWARDED_TO_STACK:
	case SL_REASON_STACK_TIME_EXCEEDED:
	case SL_REASON_STACK_TOO_BIG:
		return SL_LEAD_BY_STACK;
	case SL_REASON_FORWARDED_TO_PROXY: /* before its path is chosen */
	case SL_REASON_ANSWERED_TOO_BIG: /* the later ones are dropped, too */
		return SL_LEAD_ON;
	default:
		return SL_LEAD_NONE;
	}
}

/* Whether the existing element has the ports and path that this first fragment would record. If
 * not, deletes the element. */
static __always_inline bool keep_fragment(const struct sl_fragment *key, __u32 ports, bool wanted)
{
	__u32 *found = find_fragment(key);

	if (!found)
		return false;
	if (wanted && *found == ports)
		return true;
	/* the sender reuses the identification; an element's value is never changed */
	delete_fragment(key);
	return false;
}

/*
 * Records the ports and the path of a first fragment that passes. A denied fragment records
 * nothing, so the later fragments of its datagram are dropped, and it uses no element of the map.
 * Returns 1 if the datagram exceeds the share of the sending pod.
 */
__noinline int lead_fragments(struct sl_packet *p, __u32 lead)
{
	struct sl_fragment key;
	bool icmp, past, by;
	__u32 ports;

	if (!p || !has_ports(p))
		return 0;
	icmp = p->proto == SL_ICMP || p->proto == SL_ICMPV6;
	fragment_key(p, &key);
	ports = (__u32)(icmp ? p->echo : p->sport) << 16 |
		(p->translated ? p->asked_port : p->dport);
	past = keep_fragment(&key, ports, lead == SL_LEAD_ON || lead == SL_LEAD_PAST_STACK);
	key.family |= SL_FRAGMENT_BY_STACK;
	by = keep_fragment(&key, ports, !past && (lead == SL_LEAD_ON || lead == SL_LEAD_BY_STACK));
	if (past || by || lead == SL_LEAD_NONE)
		return 0;
	if (SL_PROGRAM == SL_PROGRAM_FROM_POD && !take_of_bound(SL_BOUND_FRAGMENTS, p->src_slot, 1))
		return 1;
	if (lead != SL_LEAD_BY_STACK)
		key.family &= (__u8)~SL_FRAGMENT_BY_STACK;
	insert_fragment(&key, &ports);
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
