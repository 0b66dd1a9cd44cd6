/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_TRANSIT_H
#define SLUICE_TRANSIT_H

/*
 * Connections from outside clients that a service of this node forwards to a backend on another
 * node, or to a socket of this node. Each has one entry in sl_ct4 or sl_ct6, in its own zone,
 * with the two ends that the stack sees. A backend on another node would answer the client
 * directly; therefore it must see an address and port of this node as source:
 *
 *   from_uplink           client -> node:30080     becomes  client -> backend
 *   to_uplink/to_overlay  client -> backend        becomes  node:20000 -> backend
 *   from_uplink/_overlay  backend -> node:20000    becomes  backend -> client
 *   to_uplink             backend -> client        becomes  node:30080 -> client
 *
 * nat_port.h describes how the port is found. The search starts from the hash of the connection,
 * so that it finds an evicted claim's port again.
 */

#include <sluice/answers.h>
#include <sluice/claim.h>
#include <sluice/conntrack.h>
#include <sluice/fragment.h>
#include <sluice/nat_port.h>
#include <sluice/node.h>
#include <sluice/quote.h>
#include <sluice/restore.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

/* Creates the entry of a connection in transit. */
static __always_inline enum sl_reason open_transit(struct sl_packet *p)
{
	struct sl_ct *ct = &p->entry;
	long err;

	/* a connection in mid-stream whose entry was evicted */
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
	if (p->dst_slot == SL_SLOT_HOST) /* sluice_to_overlay translates its answers */
		keep_port(SL_COUNT_ANSWERED, p->dport);
	err = insert_connection(p);
	if (err == -SL_EEXIST)
		return SL_CONTINUE;
	if (err)
		return SL_REASON_CONNECTION_INSERT_FAILED;
	count_connection(SL_CT_STAT_CREATED);
	p->news |= SL_NEWS_VERDICT;
	return SL_CONTINUE;
}

/* Updates the connection in transit for a request. */
static __always_inline void follow(struct sl_packet *p, struct sl_ct *ct)
{
	if (unlikely(asks_otherwise(p, ct))) {
		ask_otherwise(p, ct);
		forget_answers(p);
	}
	if (p->dst_slot == SL_SLOT_HOST)
		advance(p, ct); /* no other hook sees this packet */
}

/* Finds or creates the entry of the packet's connection in transit. */
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
	else
		follow(p, ct);
	p->zone = SL_ZONE_POD;
	return reason;
}

/*
 * A client sends directly to a backend, from a port that it may have used for the service before.
 * The answers must come from the backend's own address. The latest requested address of a UDP port
 * applies, as in asked.h; a TCP connection must have ended.
 */
__noinline int leave_transit(struct sl_packet *p)
{
	struct sl_ct *ct;

	if (!p || (p->proto != SL_UDP && !begins(p)))
		return 0;
	p->zone = SL_ZONE_TRANSIT;
	write_key(p);
	ct = look_up_connection(p);
	if (ct && !is_reply(p, ct) && (p->proto == SL_UDP || has_ended(READ_ONCE(ct->flags))))
		delete_connection(p);
	p->zone = SL_ZONE_POD;
	p->reply = 0;
	write_answers_key(p);
	if (p->proto == SL_UDP && find_answer(false, p->family, SL_XL_ANSWERS))
		delete_answer(false, p->family, SL_XL_ANSWERS);
	return 0;
}

/* The index in sl_own, plus 1, of the source address for packets to backends on other nodes. */
static __always_inline __u16 source_place(const struct sl_packet *p)
{
	__u32 at = SL_PROGRAM == SL_PROGRAM_TO_OVERLAY ? SL_SOURCE_OVERLAY : SL_SOURCE_UPLINK;
	struct sl_node *local = node_at(0);

	return local ? (__u16)(READ_ONCE(local->way6) >> 16 * (at + (p->family == 6))) : 0;
}

/* Whether the connection still has its source port, or has claimed it again after an eviction. */
static __always_inline bool hold_claim(struct sl_packet *p, const struct sl_end *from)
{
	struct sl_xl *xl;

	write_claim(p, from);
	xl = find_translation(p->family);
	if (xl)
		return is_own_claim(p, xl);
	return !insert_translation(p->family) || is_own_claim(p, find_translation(p->family));
}

/* Claims a port of the node for the connection, and stores it in the connection's entry. */
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
	/* the search has overwritten the key in the cell */
	write_key(p);
	ct = look_up_connection(p);
	if (!ct)
		return SL_REASON_CONNECTION_INVALID;
	word = (__u64 *)&ct->nat_port;
	old = READ_ONCE(*word);
	new = (old & ~0xffffffffULL) | (__u64)place << 16 | from.port;
	/* If another CPU was faster, it has claimed the same port, because its search starts at the
	 * same hash. */
	if (!(__u32)old)
		__sync_val_compare_and_swap(word, old, new);
	return SL_CONTINUE;
}

/*
 * The source that the connection has claimed; the claim is renewed once a second. If the claim was
 * evicted or replaced, another connection may have the port now. Then a UDP flow claims another
 * port. So does a TCP connection with no more than a SYN: its backend has not answered yet, or sees
 * a new connection. For any other TCP connection, the backend would not recognise the new source,
 * so the connection is lost.
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
		/* treat the next answer as the first one: see remember_transit */
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

/* Finds the connection that the error quotes, in a zone. Sets p->reply if the responder has sent
 * the quoted packet.
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
 * Restores the quoted destination of an error to the address that its receiver knows.
 * SL_CONTINUE: the error is not about a service connection.
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
		/* an error to a backend about its answer: the backend knows the client by the
		 * translated source
		 */
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
 * With the first answer of a connection in transit, stores copies of its claim and of its entry's
 * translation: claim or entry may be evicted, and the backend may be the next to send.
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
	remember_request(p);
	if (!(__u32)word || own_address(from.addr, (__u16)(word >> 16), p->family))
		return 0; /* the backend is a socket of the node, which sees the client */
	from.port = (__u16)word;
	/* in this packet, the backend is the source */
	write_claimed_key(p, &from);
	keep_port(SL_COUNT_CLAIMED, from.port);
	return (int)store_answer(false, p->family, SL_XL_CLAIMED);
}

/* Whether the packet is the first answer of a responder. */
static __always_inline bool accepts(const struct sl_packet *p)
{
	const __u8 both = SL_TCP_SYN | SL_TCP_ACK;

	if (p->fragment)
		return false;
	if (p->proto == SL_SCTP)
		return p->chunk == SL_SCTP_INIT_ACK;
	return p->proto == SL_TCP && (p->tcp_flags & both) == both;
}

/*
 * Handles an answer in transit whose connection has lost its entry. The client's next packet
 * creates the entry again.
 */
static __always_inline enum sl_reason answer_without_entry(struct __sk_buff *skb,
							   struct sl_packet *p)
{
	struct sl_end from = { .source = 1 };

	/* inline, because every packet that the host itself sends runs this check */
	if (likely(!may_have_port(SL_COUNT_ANSWERED, p->sport)) || begins(p) || !find_answers(p))
		return SL_CONTINUE;
	/* a socket of the node has accepted a direct connection from the same port of the client */
	if (accepts(p) && !is_forwarded(skb, p)) {
		delete_answer(false, p->family, SL_XL_ANSWERS);
		return SL_CONTINUE;
	}
	p->reply = 1;
	if (leads_fragments(p))
		lead_fragments(p, SL_LEAD_ON);
	if (find_asked(p, &from))
		return SL_REASON_SERVICE_CORRUPT;
	return rewrite_end(skb, p, &from) ? SL_REASON_REWRITE_FAILED : SL_REASON_FORWARDED_TO_STACK;
}

/*
 * Translates the source of a packet in transit for its receiver: of a request to an address of
 * this node, of an answer to the address that the client had requested. SL_CONTINUE: the packet
 * is not in transit.
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
