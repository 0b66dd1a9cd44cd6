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
 *
 * Later fragments take the path of the first one. A stack that tracks connections waits
 * for all fragments of a datagram, so those that a program delivers past it would be
 * missing there. A later fragment that arrives before its first one has no ports and is
 * dropped on either path.
 *
 * The pods of the node share the datagrams that are remembered; see bound.h. Those of a pod above
 * its guarantee are forgotten with their last fragment, so that a pod that sends fragments in
 * their order is never refused.
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
	else if (SL_PROGRAM == SL_PROGRAM_FROM_OVERLAY)
		key->slot = SL_SLOT_NONE - p->node;
	else
		key->slot = SL_SLOT_NONE;
}

/*
 * What pods of the node send is in a map of its own, which what comes from the stack, other nodes
 * or outside cannot fill.
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

/* Forgets a datagram of a pod above its guarantee, all of whose fragments have come. */
static __always_inline void end_datagram(const struct sl_packet *p, const struct sl_fragment *key)
{
	if (SL_PROGRAM != SL_PROGRAM_FROM_POD || !p->last_fragment ||
	    !has_guarantee(SL_BOUND_FRAGMENTS, p->src_slot))
		return;
	if (!delete_fragment(key))
		give_back(SL_BOUND_FRAGMENTS, p->src_slot, 1);
}

/* Finds the ports of a later fragment, and the path of its datagram. */
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

/* What a first fragment leaves behind for the later ones. */
enum sl_lead {
	SL_LEAD_NONE = 0, /* nothing: it is dropped */
	SL_LEAD_ON = 1, /* its ports; the path, if one is known, stays */
	SL_LEAD_PAST_STACK = 2,
	SL_LEAD_BY_STACK = 3,
};

/* What a first fragment leaves behind that a program chooses a path for. */
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
	case SL_REASON_ANSWERED_TOO_BIG: /* so are the later ones */
		return SL_LEAD_ON;
	default:
		return SL_LEAD_NONE;
	}
}

/* Whether an element is what the first fragment leaves behind; another one of
 * its datagram's key is deleted.
 */
static __always_inline bool keep_fragment(const struct sl_fragment *key, __u32 ports, bool wanted)
{
	__u32 *found = find_fragment(key);

	if (!found)
		return false;
	if (wanted && *found == ports)
		return true;
	/* an identification that is used again: values are written once */
	delete_fragment(key);
	return false;
}

/*
 * Remembers the ports and the path of a first fragment that passes. One that is denied
 * takes no room from those of others, and leaves its later ones none. 1: the datagram exceeds the
 * share of the pod that sends it.
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
