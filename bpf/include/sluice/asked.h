/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ASKED_H
#define SLUICE_ASKED_H

/*
 * A UDP socket of the host that is bound to every address answers from the address that
 * the route to the pod names, and not from the one that the pod has asked. The kernel of the
 * pod delivers such an answer to no connected socket. So each datagram of a pod to the host
 * records which address it asks, in an entry of sl_ct4 or sl_ct6 in SL_ZONE_ASKED; the host's
 * datagrams to that port of the pod get it as their source, where they leave the host.
 *
 * The key has 0 for the address of the host, which the answer does not tell. The last
 * address that was asked counts. A connection of a pod of this node whose address stands in the
 * record has SL_CT_ASKS, so that its packets look at the record once a second: it may have been
 * evicted.
 *
 * A port of the host that no pod has asked has no record, so that other datagrams of the host
 * look for none: see SL_COUNT_ASKED.
 */

#include <sluice/claim.h>
#include <sluice/conntrack.h>
#include <sluice/count.h>
#include <sluice/fragment.h>
#include <sluice/node.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

/* The key of the address that a port of a pod has asked at a port of the host. */
static __always_inline void write_asked_key(struct sl_packet *p, const __u8 *pod, __u16 pod_port,
					    __u16 host_port)
{
	if (p->family == 4) {
		p->key4.lo = 0;
		p->key4.hi = *(const __be32 *)pod;
		p->key4.plo = host_port;
		p->key4.phi = pod_port;
		p->key4.proto = SL_UDP;
		p->key4.zone = SL_ZONE_ASKED;
		p->key4.pad = 0;
	} else {
		__builtin_memset(p->key6.lo, 0, sizeof(p->key6.lo));
		__builtin_memcpy(p->key6.hi, pod, sizeof(p->key6.hi));
		p->key6.plo = host_port;
		p->key6.phi = pod_port;
		p->key6.proto = SL_UDP;
		p->key6.zone = SL_ZONE_ASKED;
		p->key6.pad = 0;
	}
}

static __always_inline void insert_asked(struct sl_packet *p, __u16 place)
{
	struct sl_ct *ct = &p->entry;

	/* without room the answer comes from whatever address the host chooses */
	if (!within_budget(p))
		return;
	__builtin_memset(ct, 0, sizeof(*ct));
	ct->where = evaluated_where(p, 0);
	ct->id_init = p->src_identity;
	ct->id_resp = p->dst_identity;
	ct->SL_CT_ASKED = place;
	ct->last_s = now_seconds();
	ct->flags = ring_flag(p);
	keep_port(SL_COUNT_ASKED, p->dport);
	insert_connection(p);
}

/* Whether an address of the node stands at a place. */
static __always_inline bool is_at_place(__u16 place, const __u8 *addr, __u8 family)
{
	__u32 at = place - 1;
	struct sl_own *own = bpf_map_lookup_elem(&sl_own, &at);

	return own && own->family == family && equal16(own->addr, addr);
}

/* The connection of the packet's sender and ports with an address of the node. */
static __always_inline struct sl_ct *connection_with(struct sl_packet *p, const __u8 *addr)
{
	if (p->family == 4) {
		p->low = is_low4(p->src, addr, p->sport, p->dport);
		connection_key4(&p->key4, READ_ONCE(p->low), p->src, addr, p->sport, p->dport,
				SL_UDP);
	} else {
		p->low = is_low6(p->src, addr, p->sport, p->dport);
		connection_key6(&p->key6, READ_ONCE(p->low), p->src, addr, p->sport, p->dport,
				SL_UDP);
	}
	return look_up_connection(p);
}

/* The record names the packet's destination: its connection need not look for a while. */
static __always_inline void mark_asking(struct sl_packet *p)
{
	struct sl_ct *ct;

	if (SL_PROGRAM != SL_PROGRAM_FROM_POD || p->ct_flags & SL_CT_ASKS)
		return;
	ct = connection_with(p, p->dst);
	if (ct)
		__sync_fetch_and_or(&ct->flags, SL_CT_ASKS);
}

/* The record no longer names the address at a place. */
static __always_inline void unmark_asking(struct sl_packet *p, __u16 place)
{
	struct sl_end former = {};
	struct sl_ct *ct;

	if (SL_PROGRAM != SL_PROGRAM_FROM_POD || own_address(former.addr, place, p->family))
		return;
	ct = connection_with(p, former.addr);
	if (ct)
		__sync_fetch_and_and(&ct->flags, ~SL_CT_ASKS);
}

/* Stores another address in the record ct, or makes the record. */
static __noinline void change_asked(struct sl_packet *p, struct sl_ct *ct)
{
	__u32 place = own_address_at(p);
	__u64 old, *word;

	_Static_assert(offsetof(struct sl_ct, SL_CT_NODE_WORD) % 8 == 0 &&
			       offsetof(struct sl_ct, SL_CT_ASKED) ==
				       offsetof(struct sl_ct, SL_CT_NODE_WORD) + 4,
		       "the third quarter of a word");
	if (!place)
		return;
	if (!ct) {
		insert_asked(p, (__u16)place);
		return;
	}
	word = (__u64 *)&ct->SL_CT_NODE_WORD;
	old = READ_ONCE(*word);
	/* the map may have given the element to a connection since it was found */
	if (look_up_connection(p) != ct)
		return;
	__sync_val_compare_and_swap(word, old, (old & ~(0xffffULL << 32)) | (__u64)place << 32);
	unmark_asking(p, (__u16)(old >> 32));
}

/* Records the address of the host that a pod's datagram asks. */
__noinline int record_asked(struct sl_packet *p)
{
	struct sl_ct *ct;
	__u32 now;

	if (!p)
		return 0;
	write_asked_key(p, p->src, p->sport, p->dport);
	ct = look_up_connection(p);
	if (!ct) {
		change_asked(p, ct);
		return 0;
	}
	now = now_seconds();
	if (READ_ONCE(ct->last_s) != now)
		*(volatile __u32 *)&ct->last_s = now;
	if (is_at_place(asked_of_connection(ct), p->dst, p->family))
		mark_asking(p);
	else
		change_asked(p, ct);
	return 0;
}

/* Whether the packet is a datagram of a pod that asks the host, and the record may name another
 * address.
 */
static __always_inline bool asks_host(const struct sl_packet *p)
{
	if (p->proto != SL_UDP || p->dst_slot != SL_SLOT_HOST || p->reply)
		return false;
	return !(p->ct_flags & SL_CT_ASKS) || p->first_in_second;
}

/* Whether the source is one that the route has chosen: a socket that is bound to another
 * address answers from that.
 */
static __always_inline bool is_route_source(struct sl_packet *p)
{
	struct sl_end chosen = {};
	struct sl_node *local;
	__u16 place;

	if (SL_PROGRAM == SL_PROGRAM_TO_POD)
		return true; /* see may_be_readdressed */
	local = node_at(0);
	if (!local)
		return true;
	place = (__u16)(READ_ONCE(local->way6) >> 16 * (SL_SOURCE_OVERLAY + (p->family == 6)));
	return !place || own_address(chosen.addr, place, p->family) || equal16(chosen.addr, p->src);
}

/*
 * Has a datagram of the host come from the address that the pod has asked: p->src is that
 * address afterwards, and p->asked the one in the frame.
 */
__noinline int answer_from_asked(struct sl_packet *p)
{
	struct sl_end from = {};
	struct sl_ct *ct;

	if (!p)
		return 0;
	write_asked_key(p, p->dst, p->dport, p->sport);
	ct = look_up_connection(p);
	if (!ct || own_address(from.addr, asked_of_connection(ct), p->family) ||
	    equal16(from.addr, p->src))
		return 0;
	if (!(READ_ONCE(ct->flags) & SL_CT_SEEN_REPLY))
		__sync_fetch_and_or(&ct->flags, SL_CT_SEEN_REPLY);
	if (!is_route_source(p))
		return 0;
	__builtin_memcpy(p->asked, p->src, sizeof(p->asked));
	__builtin_memcpy(p->src, from.addr, sizeof(p->src));
	p->readdressed = 1;
	return 0;
}

/* Whether the packet is a datagram that the host itself has sent, from a port that a pod may
 * have asked.
 */
static __always_inline bool may_answer_pod(struct __sk_buff *skb, const struct sl_packet *p)
{
	return p->proto == SL_UDP && may_have_port(SL_COUNT_ASKED, p->sport) &&
	       !is_forwarded(skb, p);
}

/* Whether the host's answer, whose connection is ct or not known, may have to come from another
 * address. What the pod has asked of this one is answered from this one.
 */
static __always_inline bool may_be_readdressed(struct __sk_buff *skb, const struct sl_packet *p,
					       const struct sl_ct *ct)
{
	return may_answer_pod(skb, p) && !(ct && is_reply(p, ct));
}

/* Writes the source into the frame. */
static __always_inline long rewrite_readdressed(struct __sk_buff *skb, const struct sl_packet *p)
{
	struct sl_end from = { .source = 1, .port = p->sport };

	__builtin_memcpy(from.addr, p->src, sizeof(from.addr));
	return rewrite_end(skb, p, &from);
}

#endif
