/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_TRANSIT_H
#define SLUICE_TRANSIT_H

/*
 * Connections of senders outside that a service of this node leads to a backend
 * elsewhere, or to a socket of the node. Each has one entry in sl_ct, in a zone of its
 * own, with the two ends that the stack sees. A backend elsewhere would answer the sender
 * itself, so it sees an address and a port of this node:
 *
 *   from_uplink           client -> node:30080     becomes  client -> backend
 *   to_uplink/to_overlay  client -> backend        becomes  node:20000 -> backend
 *   from_uplink/_overlay  backend -> node:20000    becomes  backend -> client
 *   to_uplink             backend -> client        becomes  node:30080 -> client
 *
 * nat_port.h says how the port is found. It is looked for from the hash of the connection
 * on, so that a claim that the map has evicted is found, or made, again at the same port.
 */

#include <sluice/answers.h>
#include <sluice/conntrack.h>
#include <sluice/fragment.h>
#include <sluice/nat_port.h>
#include <sluice/node.h>
#include <sluice/quote.h>
#include <sluice/restore.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

/* Makes the entry of a connection in transit. */
static __always_inline enum sl_reason open_transit(struct sl_packet *p)
{
	struct sl_ct *ct = &p->entry;
	long err;

	/* in the middle of a connection that has lost its entry */
	if (p->proto == SL_TCP && !begins(p) &&
	    (p->tcp_flags & (SL_TCP_SYN | SL_TCP_ACK)) != SL_TCP_ACK)
		return SL_REASON_CONNECTION_INVALID;
	if (!within_budget(p))
		return SL_REASON_CONNECTION_BUDGET;
	__builtin_memset(ct, 0, sizeof(*ct));
	ct->where = evaluated_where(p, 0);
	ct->id_init = p->src_identity;
	ct->id_resp = p->dst_identity;
	ct->last_s = now_seconds();
	ct->flags = steps_of(p) | ring_flag(p) | SL_CT_VIA_STACK | (p->low ? SL_CT_ORIG_LO : 0);
	if (p->proto == SL_TCP && !begins(p))
		ct->flags |= SL_CT_PICKED_UP;
	ct->node = p->node;
	ct->front = p->front;
	ct->asked_address = p->asked_at;
	err = insert_connection(p);
	if (err == -SL_EEXIST)
		return SL_CONTINUE;
	if (err)
		return SL_REASON_CONNECTION_INSERT_FAILED;
	count_connection(SL_CT_STAT_CREATED);
	p->news |= SL_NEWS_VERDICT;
	return SL_CONTINUE;
}

/* Finds or makes the entry of the packet's connection in transit. */
__noinline enum sl_reason follow_transit(struct sl_packet *p)
{
	enum sl_reason reason = SL_CONTINUE;
	struct sl_ct *ct;

	if (!p)
		return SL_REASON_CONNECTION_INVALID;
	p->zone = SL_ZONE_TRANSIT;
	write_key(p);
	ct = p->unknown ? NULL : look_up_connection(p);
	if (ct && begins(p) && has_ended(READ_ONCE(ct->flags))) {
		delete_connection(p);
		ct = NULL;
	}
	if (!ct)
		reason = open_transit(p);
	else if (is_reply(p, ct) || lacks_flags(p))
		reason = SL_REASON_CONNECTION_INVALID;
	else if (p->dst_slot == SL_SLOT_HOST)
		advance(p, ct); /* no hook sees it again */
	p->zone = SL_ZONE_POD;
	return reason;
}

/* The place of the address that packets to backends elsewhere come from, plus 1. */
static __always_inline __u16 source_place(const struct sl_packet *p)
{
	__u32 at = SL_PROGRAM == SL_PROGRAM_TO_OVERLAY ? SL_SOURCE_OVERLAY : SL_SOURCE_UPLINK;
	struct sl_node *local = node_at(0);

	return local ? (__u16)(READ_ONCE(local->way6) >> 16 * (at + (p->family == 6))) : 0;
}

/* Whether the source is the connection's, or is again: its claim may have been evicted. */
static __always_inline bool hold_claim(struct sl_packet *p, const struct sl_end *from)
{
	struct sl_xl *xl;

	write_claim(p, from);
	xl = find_translation(p->family);
	if (xl)
		return is_own_claim(p, xl);
	return !insert_translation(p->family) || is_own_claim(p, find_translation(p->family));
}

/* Finds a port of the node for the connection, whose entry keeps it. */
__noinline enum sl_reason claim_source(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_end from = { .source = 1 };
	enum sl_reason reason;
	__u64 old, new, *word;
	struct sl_ct *ct;
	__u16 place;

	if (!p)
		return SL_REASON_NAT_EXHAUSTED;
	place = source_place(p);
	if (!place || own_address(from.addr, place, p->family))
		return SL_REASON_NAT_NO_SOURCE;
	reason = find_port(skb, p, &from);
	if (reason)
		return reason;
	/* the search has looked at entries of others */
	write_key(p);
	ct = look_up_connection(p);
	if (!ct)
		return SL_REASON_CONNECTION_INVALID;
	word = (__u64 *)&ct->nat_port;
	old = READ_ONCE(*word);
	new = (old & ~0xffffffffULL) | (__u64)place << 16 | from.port;
	/* another CPU has claimed the same, because it has looked from the same place on */
	if (!(__u32)old)
		__sync_val_compare_and_swap(word, old, new);
	return SL_CONTINUE;
}

/*
 * The source that the connection has claimed, and holds on to once a second. The port may
 * have given way, or its claim was evicted, and it is another connection's by now. A flow
 * of UDP takes another one then, as a connection of TCP does that still begins: its backend
 * has not answered, or sees a new one. Any other has lost its backend.
 */
static __always_inline enum sl_reason claimed_source(struct __sk_buff *skb, struct sl_packet *p,
						     struct sl_ct *ct, struct sl_end *from)
{
	__u64 *claim = (__u64 *)&ct->nat_port, word = READ_ONCE(*claim);
	enum sl_reason reason;

	if ((__u32)word) {
		from->port = (__u16)word;
		if (own_address(from->addr, (__u16)(word >> 16), p->family))
			return SL_REASON_NAT_NO_SOURCE;
		if (READ_ONCE(ct->last_s) == now_seconds() || hold_claim(p, from))
			return SL_CONTINUE;
		if (has_ended(READ_ONCE(ct->flags)))
			return SL_REASON_CONNECTION_INVALID;
		if (p->proto != SL_UDP && !begins(p))
			return SL_REASON_NAT_EXHAUSTED;
		__sync_val_compare_and_swap(claim, word, word & ~0xffffffffULL);
		/* the next answer is the first one again: see remember_transit */
		__sync_fetch_and_and(&ct->flags, ~SL_CT_SEEN_REPLY);
	}
	reason = claim_source(skb, p);
	if (reason)
		return reason;
	word = READ_ONCE(*claim);
	from->port = (__u16)word;
	return own_address(from->addr, (__u16)(word >> 16), p->family) ? SL_REASON_NAT_NO_SOURCE
								       : SL_CONTINUE;
}

/* The connection that the error quotes, in a zone; whether the quoted packet is of its
 * responder is in p->reply then.
 */
static __always_inline struct sl_ct *quoted_connection(struct sl_packet *p,
						       const struct sl_quote *q, __u8 zone)
{
	struct sl_ct *ct;

	if (p->family == 4) {
		p->low = is_low4(q->src, q->dst, q->sport, q->dport);
		connection_key4(&p->key4, READ_ONCE(p->low), q->src, q->dst, q->sport, q->dport,
				q->proto);
		p->key4.zone = zone;
	} else {
		p->low = is_low6(q->src, q->dst, q->sport, q->dport);
		connection_key6(&p->key6, READ_ONCE(p->low), q->src, q->dst, q->sport, q->dport,
				q->proto);
		p->key6.zone = zone;
	}
	ct = look_up_connection(p);
	if (ct)
		p->reply = is_reply(p, ct);
	return ct;
}

/*
 * Has an error quote the destination that its receiver knows. SL_CONTINUE: it is about
 * no connection of a service.
 */
__noinline enum sl_reason translate_error(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_end to = {};
	struct sl_quote q = {};
	struct sl_ct *ct;
	__u64 word;

	if (!p || !read_quote(skb, p, &q))
		return SL_CONTINUE;
	ct = quoted_connection(p, &q, SL_ZONE_POD);
	if (!ct || !front_of_connection(ct))
		ct = quoted_connection(p, &q, SL_ZONE_TRANSIT);
	if (!ct)
		return SL_CONTINUE;
	p->front = front_of_connection(ct);
	p->asked_at = asked_of_connection(ct);
	if (READ_ONCE(p->reply)) {
		/* to a backend, about an answer: it knows the sender by another source */
		word = READ_ONCE(*(__u64 *)&ct->nat_port);
		p->reply = 0;
		if (!(__u32)word)
			return SL_CONTINUE;
		to.port = (__u16)word;
		if (own_address(to.addr, (__u16)(word >> 16), p->family))
			return SL_REASON_NAT_NO_SOURCE;
	} else {
		if (find_asked(p, &to))
			return SL_REASON_SERVICE_CORRUPT;
	}
	if (rewrite_quoted(skb, p, &q, &to))
		return SL_REASON_REWRITE_FAILED;
	if (!equal16(p->src, q.dst) && SL_PROGRAM != SL_PROGRAM_TO_OVERLAY)
		return SL_REASON_FORWARDED_TO_STACK;
	to.source = 1;
	return rewrite_end(skb, p, &to) ? SL_REASON_REWRITE_FAILED : SL_REASON_FORWARDED_TO_STACK;
}

/*
 * The first answer of a connection in transit stores what the claim and the entry say a second
 * time: either may be evicted, and the backend may speak next.
 */
__noinline int remember_transit(struct sl_packet *p)
{
	__u64 word;
	struct sl_end from = {};
	struct sl_ct *ct;

	if (!p)
		return 0;
	ct = look_up_connection(p);
	if (!ct)
		return 0;
	word = READ_ONCE(*(__u64 *)&ct->nat_port);
	remember_answers(p);
	if (!(__u32)word || own_address(from.addr, (__u16)(word >> 16), p->family))
		return 0; /* a socket of the node, which sees the sender */
	from.port = (__u16)word;
	/* the backend is the source here */
	write_claimed_key(p, &from);
	keep_port(SL_COUNT_CLAIMED, from.port);
	return (int)store_answer(p->family, SL_XL_CLAIMED);
}

/*
 * An answer in transit whose connection has lost its entry. The sender's next packet makes
 * it again.
 */
static __always_inline enum sl_reason answer_without_entry(struct __sk_buff *skb,
							   struct sl_packet *p)
{
	struct sl_end from = { .source = 1 };

	/* of no socket of the node: the stack forwards it */
	if (!(skb->mark & SL_MARK_MASK) && !skb->ingress_ifindex)
		return SL_CONTINUE;
	if (begins(p) || !find_answers(p))
		return SL_CONTINUE;
	p->reply = 1;
	if (leads_fragments(p))
		lead_fragments(p, SL_LEAD_ON);
	if (find_asked(p, &from))
		return SL_REASON_SERVICE_CORRUPT;
	return rewrite_end(skb, p, &from) ? SL_REASON_REWRITE_FAILED : SL_REASON_FORWARDED_TO_STACK;
}

/*
 * Has a packet in transit come from what its receiver is to see: a request from an
 * address of this node, an answer from what the sender has asked. SL_CONTINUE: it is of
 * no such connection.
 */
__noinline enum sl_reason translate_source(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_end from = { .source = 1 };
	enum sl_reason reason;
	struct sl_ct *ct;

	if (!p || follow_fragments(p))
		return SL_CONTINUE;
	if (is_error(p))
		return translate_error(skb, p);
	p->zone = SL_ZONE_TRANSIT;
	write_key(p);
	ct = look_up_connection(p);
	if (!ct) {
		p->zone = SL_ZONE_POD;
		return answer_without_entry(skb, p);
	}
	p->reply = is_reply(p, ct);
	p->front = front_of_connection(ct);
	p->asked_at = asked_of_connection(ct);
	if (unlikely(READ_ONCE(p->reply) && !(READ_ONCE(ct->flags) & SL_CT_SEEN_REPLY)))
		remember_transit(p);
	if (leads_fragments(p))
		lead_fragments(p, SL_LEAD_ON);
	if (READ_ONCE(p->reply))
		reason = find_asked(p, &from) ? SL_REASON_SERVICE_CORRUPT : SL_CONTINUE;
	else
		reason = claimed_source(skb, p, ct, &from);
	if (reason)
		return reason;
	advance(p, ct);
	return rewrite_end(skb, p, &from) ? SL_REASON_REWRITE_FAILED : SL_REASON_FORWARDED_TO_STACK;
}

#endif
