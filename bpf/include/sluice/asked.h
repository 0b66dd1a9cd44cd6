/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ASKED_H
#define SLUICE_ASKED_H

/*
 * A UDP socket of the host that is bound to the wildcard address answers from the address that the
 * route to the pod selects. If the pod has sent its request to another address of the host, a
 * connected socket of the pod does not receive the answer. Therefore sluice_from_pod records the
 * destination address of each datagram from a pod to the host, in an entry of sl_ct4 or sl_ct6 with
 * zone SL_ZONE_ASKED. When the host sends a datagram to that port of the pod, the recorded address
 * becomes its source, where the datagram leaves the host.
 *
 * The key has 0 as the host's address, because the answer does not contain the requested one. The
 * latest requested address applies. If the record holds the host address of a local pod's
 * connection, that connection has SL_CT_ASKS: its packets check the record only once a second, in
 * case it was evicted.
 *
 * A host port that no pod has sent to has no record, and datagrams from it skip the lookup: see
 * SL_COUNT_ASKED.
 */

#include <sluice/claim.h>
#include <sluice/conntrack.h>
#include <sluice/count.h>
#include <sluice/fragment.h>
#include <sluice/node.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

/* Writes the key of the record for a port of a pod and a port of the host. */
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

	/* over budget: without a record, answers have whatever source address the host selects */
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

/* Whether sl_own has addr at index place - 1. */
static __always_inline bool is_at_place(__u16 place, const __u8 *addr, __u8 family)
{
	__u32 at = place - 1;
	struct sl_own *own = bpf_map_lookup_elem(&sl_own, &at);

	return own && own->family == family && equal16(own->addr, addr);
}

/* The connection between the packet's sender and addr, an address of the node, with the packet's
 * ports.
 */
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

/*
 * The record already has the packet's destination, so the next packets of the connection need not
 * look it up for a while.
 */
static __always_inline void mark_asking(struct sl_packet *p)
{
	struct sl_ct *ct;

	if (SL_PROGRAM != SL_PROGRAM_FROM_POD || p->ct_flags & SL_CT_ASKS)
		return;
	ct = connection_with(p, p->dst);
	if (ct)
		__sync_fetch_and_or(&ct->flags, SL_CT_ASKS);
}

/* The record no longer has the address at this place of sl_own. */
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

/* Stores the packet's destination in the record ct, or creates the record if ct is NULL. */
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
	/* the map may have reassigned the element to a connection since the lookup */
	if (look_up_connection(p) != ct)
		return;
	__sync_val_compare_and_swap(word, old, (old & ~(0xffffULL << 32)) | (__u64)place << 32);
	unmark_asking(p, (__u16)(old >> 32));
}

/* Records the host address that a pod's datagram is sent to. */
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

/*
 * Whether the packet is a request datagram from a pod to the host whose destination may differ from
 * the recorded address.
 */
static __always_inline bool asks_host(const struct sl_packet *p)
{
	if (p->proto != SL_UDP || p->dst_slot != SL_SLOT_HOST || p->reply)
		return false;
	return !(p->ct_flags & SL_CT_ASKS) || p->first_in_second;
}

/* Whether the source address was chosen by the route. A socket bound to a specific address keeps
 * that address as its source. */
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
 * Replaces the source of a host datagram by the address that the pod had requested. Afterwards
 * p->src is that address and p->asked is the source in the frame.
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

/* Whether the packet is a datagram sent by the host itself, from a port that a pod may have sent
 * a request to.
 */
static __always_inline bool may_answer_pod(struct __sk_buff *skb, const struct sl_packet *p)
{
	return p->proto == SL_UDP && may_have_port(SL_COUNT_ASKED, p->sport) &&
	       !is_forwarded(skb, p);
}

/* Whether the source of the host's answer may have to be replaced; ct is its connection or NULL.
 * If the packet is a reply of a known connection, its source is already the requested address.
 */
static __always_inline bool may_be_readdressed(struct __sk_buff *skb, const struct sl_packet *p,
					       const struct sl_ct *ct)
{
	return may_answer_pod(skb, p) && !(ct && is_reply(p, ct));
}

/* Writes the replaced source to the frame. */
static __always_inline long rewrite_readdressed(struct __sk_buff *skb, const struct sl_packet *p)
{
	struct sl_end from = { .source = 1, .port = p->sport };

	__builtin_memcpy(from.addr, p->src, sizeof(from.addr));
	return rewrite_end(skb, p, &from);
}

#endif
