/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ADMIT_H
#define SLUICE_ADMIT_H

/*
 * Decides whether a packet may pass: as part of an allowed connection, as the first packet of a
 * new connection, or on its own.
 */

#include <sluice/answers.h>
#include <sluice/asked.h>
#include <sluice/conntrack.h>
#include <sluice/fragment.h>
#include <sluice/peer.h>
#include <sluice/rate.h>
#include <sluice/related.h>
#include <sluice/revoked.h>
#include <sluice/translate.h>

/* Whether the program translates packets to services. */
#define SL_TRANSLATES (SL_PROGRAM == SL_PROGRAM_FROM_POD && cfg_services)

/* Evaluates a packet on its own, without a connection. */
__noinline enum sl_reason admit_once(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason = find_peer(skb, p, 0);

	if (reason || !p)
		return reason;
	return evaluate_sides(p, SL_BOTH_SIDES);
}

__noinline enum sl_reason admit_error(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason = find_peer(skb, p, 0);

	if (reason || !p)
		return reason;
	/* ICMP errors are short: a pod would only fragment one to hide the packet that it quotes */
	if (p->hook == SL_EGRESS && p->more_fragments)
		return SL_REASON_CONNECTION_INVALID;
	switch (relation_of(skb, p)) {
	case SL_FORGED:
		if (p->hook == SL_EGRESS)
			return SL_REASON_CONNECTION_INVALID;
		return evaluate_sides(p, SL_BOTH_SIDES);
	case SL_RELATED_VIA_STACK:
		/* the stack has to translate the quoted packet back, too */
		p->via_stack = 1;
		break;
	case SL_RELATED:
		break;
	default:
		if (!is_too_big(p) || p->hook != SL_INGRESS ||
		    !within_rate_of(SL_RATE_TOO_BIG, SL_TOO_BIG_RATE, SL_BOUND_TOO_BIG,
				    p->dst_slot))
			return evaluate_sides(p, SL_BOTH_SIDES);
	}
	count_connection(SL_CT_STAT_RELATED);
	return SL_CONTINUE;
}

/*
 * Evaluates the connection in the reverse direction. If it is allowed, returns SL_CONTINUE and
 * restores p->reply, p->egress and p->ingress. Otherwise returns the reason of the drop, and leaves
 * the results of the reverse evaluation in these fields.
 */
static __noinline enum sl_reason evaluate_reverse(struct sl_packet *p)
{
	struct sl_side egress = p->egress, ingress = p->ingress;
	enum sl_reason reason;

	__builtin_memset(&p->egress, 0, sizeof(p->egress));
	__builtin_memset(&p->ingress, 0, sizeof(p->ingress));
	p->reply = !p->reply;
	reason = evaluate_sides(p, SL_BOTH_SIDES);
	if (reason)
		return reason;
	p->reply = !p->reply;
	p->egress = egress;
	p->ingress = ingress;
	return SL_CONTINUE;
}

/*
 * Whether a segment without an entry is an answer to the proxy: the policy redirects a connection
 * of the receiver to the sender. The segment must not reach the receiver, whose socket has other
 * sequence numbers. So it tells the sender nothing about the receiver's ports either: the proxy
 * resets it, unless it has the connection. Returns 1 and leaves the sides of that connection in
 * the packet, or 0.
 */
__noinline int answers_proxy(struct sl_packet *p)
{
	if (!p || p->dst_slot == SL_SLOT_NONE || p->dst_slot == SL_SLOT_HOST ||
	    (!has_namespace(false) && !has_namespace(true)))
		return 0;
	p->reply = 1;
	if (!evaluate_sides(p, SL_BOTH_SIDES) && redirection(&p->egress) == SL_REDIRECTS_TO_PROXY)
		return 1;
	p->reply = 0;
	__builtin_memset(&p->egress, 0, sizeof(p->egress));
	__builtin_memset(&p->ingress, 0, sizeof(p->ingress));
	return 0;
}

/*
 * Picks up a TCP connection in mid-stream after its entry was evicted. The segment is evaluated in
 * its own direction. If only the reverse direction is allowed, the segment is dropped: otherwise
 * any segment but a SYN could be used to scan a port that policy closes. So a server whose client
 * is silent cannot send until the client does, unless a proxy has the connection.
 *
 * If both directions are allowed, the initiator is unknown. The entry records that, and the
 * connection lives as long as both directions stay allowed. *flags receives the flags of the
 * entry.
 */
static __always_inline enum sl_reason pick_up(struct sl_packet *p, __u32 *flags)
{
	struct sl_side egress, ingress;
	enum sl_reason reason;

	if (!may_pick_up(p->src_slot) || !may_pick_up(p->dst_slot))
		return SL_REASON_CONNECTION_INVALID;
	if (answers_proxy(p)) {
		/* the answer alone does not establish it: its source may be forged */
		*flags = SL_CT_SEEN_REPLY;
		return SL_CONTINUE;
	}
	reason = evaluate_sides(p, SL_BOTH_SIDES);
	if (reason)
		return reason;
	*flags = SL_CT_PICKED_UP;
	egress = p->egress;
	ingress = p->ingress;
	if (!evaluate_reverse(p)) {
		*flags |= SL_CT_UNORIENTED;
		return SL_CONTINUE;
	}
	p->reply = 0;
	p->direction = p->hook;
	p->egress = egress;
	p->ingress = ingress;
	return SL_CONTINUE;
}

/*
 * A segment of a connection that a policy has terminated and whose entry was evicted: evaluated
 * as part of that connection.
 */
static __always_inline enum sl_reason pick_up_revoked(struct sl_packet *p,
						      struct sl_revoked *revoked, __u32 *flags)
{
	__u32 began = READ_ONCE(revoked->flags), now = now_seconds();
	enum sl_reason reason;

	p->reply = began & SL_CT_ORIG_LO ? !p->low : p->low;
	reason = evaluate_sides(p, SL_BOTH_SIDES);
	if (!reason && began & SL_CT_UNORIENTED)
		reason = evaluate_reverse(p);
	if (reason) {
		if (READ_ONCE(revoked->last_s) != now)
			*(volatile __u32 *)&revoked->last_s = now;
		return reason;
	}
	*flags = SL_CT_PICKED_UP | (began & (SL_CT_UNORIENTED | SL_CT_VIA_STACK));
	return SL_CONTINUE;
}

/* An answer of a service's backend whose connection entry was lost. */
static __always_inline enum sl_reason pick_up_answer(struct sl_packet *p, __u32 *flags)
{
	p->reply = 1;
	*flags = SL_CT_SEEN_REPLY | SL_CT_ESTABLISHED;
	return evaluate_sides(p, SL_BOTH_SIDES);
}

/*
 * Whether the client of such an answer is outside of this node. The connection records the node of
 * a client that is another node's pod. With overlay mode it does not record the node of a client
 * that is another node itself: see find_uplink_source.
 */
__noinline int answers_elsewhere(struct sl_packet *p)
{
	struct sl_ipcache where;

	if (!p || p->dst_slot != SL_SLOT_NONE)
		return 0;
	if (!cfg_native && p->node) {
		where = ipcache_of(p->dst, p->family);
		if (where.flags & SL_IP_OF_DEVICE)
			p->node = 0;
	}
	return 1;
}

/* Whether a packet without a connection entry may be an answer of a service's backend. */
static __always_inline bool may_answer(const struct sl_packet *p, bool midway)
{
	return cfg_services && !p->translated &&
	       (midway || p->proto == SL_UDP || (p->proto == SL_SCTP && !begins(p)));
}

/* Admits the first packet that we see of a connection. */
__noinline enum sl_reason admit_first(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_revoked *revoked = NULL;
	enum sl_reason reason;
	__u32 addr_epochs, flags = 0;
	bool midway;

	if (!p)
		return SL_REASON_MALFORMED;
	write_key(p);
	p->reply = false;
	midway = p->proto == SL_TCP && !begins(p);
	if (midway && (p->tcp_flags & (SL_TCP_SYN | SL_TCP_ACK)) != SL_TCP_ACK)
		return SL_REASON_CONNECTION_INVALID;
	/* read before the peer is looked up, so that later changes are noticed */
	addr_epochs = address_epochs(p);
	reason = find_peer(skb, p, 0);
	if (reason)
		return reason;
	if (may_answer(p, midway))
		find_answers(p);
	if (!midway && !p->answers) {
		reason = evaluate_sides(p, SL_BOTH_SIDES);
		if (reason)
			return reason;
	} else {
		revoked = midway ? find_revoked(p) : NULL;
		if (revoked)
			reason = pick_up_revoked(p, revoked, &flags);
		else if (p->answers)
			reason = pick_up_answer(p, &flags);
		else
			reason = pick_up(p, &flags);
		/* a RST of an unknown connection ends it, so there is no entry to create */
		if (reason || p->tcp_flags & SL_TCP_RST)
			return reason;
		/* It is unknown whether the lost entry had a translation. Send the packet through
		 * the stack, which can translate it. If there was no translation, the stack only
		 * forwards it. An answer to an outside client gets its source where it leaves the
		 * stack. */
		if (p->hook == SL_EGRESS && (!p->answers || answers_elsewhere(p)))
			flags |= SL_CT_VIA_STACK;
		if (p->reply) {
			addr_epochs = addr_epochs << 16 | addr_epochs >> 16;
			if (!p->answers)
				flags |= SL_CT_BY_RESPONDER;
		}
		count_connection(SL_CT_STAT_PICKED_UP);
	}
	reason = open_connection(p, addr_epochs, flags);
	if (revoked && !reason)
		forget_revoked(p);
	p->via_stack = goes_via_stack(p, p->ct_flags);
	return reason;
}

/*
 * Finds the node that sent a packet which the stack has forwarded. Returns 0 if no node is found,
 * or if the sender cannot be verified.
 */
__noinline int recall_node(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_ipcache where;

	use_argument(skb);
	if (!p)
		return 0;
	where = ipcache_of(p->src, p->family);
	if (find_node_behind_stack(skb, p, &where))
		p->node = 0;
	return p->node;
}

/*
 * Whether the packet comes from the node that its connection records. A tunnel identifies the
 * sending node. A packet on an uplink names no node. For a packet from the stack, p->node is still
 * 0, as for a local packet, so this function looks the node up.
 */
static __always_inline bool is_from_node(struct __sk_buff *skb, struct sl_packet *p,
					 const struct sl_ct *ct)
{
	__u16 node = node_of_connection(ct);

	if (SL_PROGRAM == SL_PROGRAM_FROM_UPLINK)
		p->node = node;
	if (likely(node == p->node))
		return true;
	return SL_PROGRAM == SL_PROGRAM_TO_POD && recall_node(skb, p) == node;
}

/*
 * Whether the sender of the packet can be the end of the connection that has its source address. If
 * that address has moved to another endpoint or node, the packet must come from its current owner.
 */
static __always_inline bool agrees(struct __sk_buff *skb, struct sl_packet *p,
				   const struct sl_ct *ct, __u64 where, __u32 addr_epochs)
{
	__u32 differ = (__u32)where ^ addr_epochs, identity;
	__u16 slot;

	if (p->hook == SL_EGRESS)
		return true;
	if (p->reply) {
		slot = responder_slot(where);
		identity = READ_ONCE(ct->id_resp);
		differ &= 0xffff;
	} else {
		slot = initiator_slot(where);
		identity = READ_ONCE(ct->id_init);
		differ >>= 16;
	}
	if (unlikely(differ))
		slot = slot_of_address(p->src, p->family);
	else if (!is_from_node(skb, p, ct))
		return false;
	return may_be_from(skb, p, slot, identity);
}

/*
 * Reads from the entry which service address the initiator has requested, to translate replies back
 * to it. If the entry is outdated, updates it instead: a reply may have recreated the entry after
 * an eviction, or an earlier socket with this port may have requested another service.
 */
static __always_inline void recall_service(struct sl_packet *p, struct sl_ct *ct)
{
	if (!cfg_services)
		return;
	/* a proxy sends to the backend, whatever the initiator has requested */
	if (!SL_SEES_ASKED || READ_ONCE(p->reply) || p->held) {
		if (p->translated)
			return;
		p->front = front_of_connection(ct);
		p->asked_at = asked_of_connection(ct);
		if (unlikely(p->front && READ_ONCE(p->reply) &&
			     !(READ_ONCE(ct->flags) & SL_CT_SEEN_REPLY))) {
			remember_answers(p);
			remember_request(p);
		}
		return;
	}
	if (unlikely(asks_otherwise(p, ct))) {
		ask_otherwise(p, ct);
		forget_answers(p);
	}
}

/*
 * The connection has ended: it no longer counts against the pod that began it, neither against the
 * pod's budget nor against its share of translations.
 */
static __always_inline void return_share(struct sl_packet *p, struct sl_ct *ct, __u64 where)
{
	__u16 slot = initiator_slot(where);

	if (slot == SL_SLOT_NONE || slot == SL_SLOT_HOST)
		return;
	if (__sync_fetch_and_or(&ct->flags, SL_CT_RETURNED) & SL_CT_RETURNED)
		return;
	count_ended(slot, p->family, 1);
	if (cfg_services && front_of_connection(ct))
		return_translation(p, slot);
}

/*
 * A first packet of a connection that already has an entry. It is evaluated in its own direction,
 * regardless of the verdict on the other direction. From the initiator, it is a retransmission, or
 * the port is used again. From the other end, it is accepted only after the earlier connection has
 * ended.
 */
__noinline enum sl_reason admit_again(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;
	struct sl_ct *ct;
	bool opposite;
	__u32 addr_epochs, flags;

	if (!p)
		return SL_REASON_MALFORMED;
	write_key(p);
	p->reply = false;
	addr_epochs = address_epochs(p);
	reason = find_peer(skb, p, 0);
	if (reason)
		return reason;
	reason = evaluate_sides(p, SL_BOTH_SIDES);
	if (reason)
		return reason;
	ct = find_connection(p);
	if (!ct)
		return open_connection(p, addr_epochs, 0);

	opposite = is_reply(p, ct);
	flags = READ_ONCE(ct->flags);
	/* if the connection was picked up, the other end may be its initiator, and may begin it
	 * again */
	if (opposite && !has_ended(flags) &&
	    (flags & (SL_CT_UNORIENTED | SL_CT_REVOKED)) != SL_CT_UNORIENTED)
		return SL_REASON_CONNECTION_INVALID;
	if (!opposite && !(flags & (SL_CT_ENDED | SL_CT_CLOSED_SENT))) {
		/* from another sender that has the same addresses and ports */
		if (!agrees(skb, p, ct, READ_ONCE(ct->where), addr_epochs))
			return SL_CONTINUE;
		/* earlier packets may have bypassed the stack; answers must take the path of this
		 * packet */
		if (p->hook == SL_INGRESS)
			__sync_fetch_and_or(&ct->flags, SL_CT_VIA_STACK);
		if (unlikely(is_held(flags)) && (flags & SL_CT_HELD_BITS) != held_flags(p))
			__sync_fetch_and_and(&ct->flags, ~SL_CT_HELD_BITS);
		restamp(p, ct, READ_ONCE(ct->epochs), READ_ONCE(ct->where), addr_epochs);
		recall_service(p, ct);
		advance(p, ct);
		return SL_CONTINUE;
	}
	delete_connection(p);
	return open_connection(p, addr_epochs, 0);
}

/*
 * The policy no longer allows the connection. A TCP connection keeps its entry, so that its next
 * segments are evaluated as part of it. It is also recorded in sl_revoked4 or sl_revoked6, because
 * the entry may be evicted. Further packets keep entry and record alive.
 */
static __always_inline void terminate(struct sl_packet *p, struct sl_ct *ct)
{
	__u32 now = now_seconds(), flags;

	/* The map has recycled the element, so the direction of the connection is unknown. Both
	 * directions must be allowed before the connection can continue. */
	if (find_connection(p) != ct) {
		if (p->proto == SL_TCP)
			remember_revoked(p, SL_CT_UNORIENTED | (p->low ? SL_CT_ORIG_LO : 0));
		return;
	}
	if (report_end(p, ct))
		count_connection(SL_CT_STAT_REVOKED);
	if (p->proto != SL_TCP) {
		delete_connection(p);
		return;
	}
	flags = __sync_fetch_and_or(&ct->flags, SL_CT_REVOKED);
	if (flags & SL_CT_REVOKED && READ_ONCE(ct->last_s) == now)
		return;
	*(volatile __u32 *)&ct->last_s = now;
	remember_revoked(p, flags);
}

/* Whether the responder is the remote end: the end that is not the pod at this device. */
static __always_inline bool responder_is_far(const struct sl_packet *p)
{
	return (p->hook == SL_EGRESS) != p->reply;
}

/* The identity of the remote end, or 0 if the identity of its address has changed. */
static __always_inline __u32 known_peer(const struct sl_packet *p, const struct sl_ct *ct,
					__u64 where, __u32 addr_epochs)
{
	__u32 differ = (__u32)where ^ addr_epochs;

	if (responder_is_far(p))
		return differ & 0xffff ? 0 : ct->id_resp;
	return differ >> 16 ? 0 : ct->id_init;
}

/*
 * A connection that the proxy has stays with it: the server knows only the sequence numbers of the
 * proxy's socket. If the proxy has ended, the stack of its namespace resets the connection. If a
 * rule redirects it to the other kind of proxy now, the namespace of that one resets it.
 */
static __always_inline void keep_with_proxy(struct sl_packet *p, struct sl_ct *ct)
{
	__u32 flags = READ_ONCE(ct->flags);
	bool http = flags & SL_CT_HELD_HTTP;

	if (!is_held(flags))
		return;
	if (redirection(&p->egress) != SL_REDIRECTS_TO_PROXY) {
		if (has_namespace(http))
			p->egress.redirects = SL_REDIRECTS_HELD | (http ? SL_REDIRECTS_HTTP : 0);
	} else if (http && !is_for_http(&p->egress)) {
		__sync_fetch_and_and(&ct->flags, ~SL_CT_HELD_HTTP);
	}
}

/* A client that the host masquerades is evaluated with the identity of the world. */
static __always_inline void keep_outside(struct sl_packet *p, const struct sl_ct *ct, __u64 where)
{
	bool responder = responder_is_far(p);
	__u16 slot = responder ? responder_slot(where) : initiator_slot(where);

	if (p->hook == SL_EGRESS && p->dst_slot == SL_SLOT_HOST && slot == SL_SLOT_HOST &&
	    (responder ? ct->id_resp : ct->id_init) == world_of(p->family))
		p->dst_identity = world_of(p->family);
}

/*
 * Re-evaluates a connection after something that its verdict depends on has changed. Only the
 * affected sides are evaluated, with the ports of the connection, whatever the direction of this
 * packet. If the initiator is unknown, both directions are evaluated.
 * SL_REASON_CONNECTION_INVALID means that the entry was evicted since the caller found it.
 */
__noinline enum sl_reason admit_anew(struct __sk_buff *skb, struct sl_packet *p)
{
	__u64 epochs, where, now_where;
	enum sl_reason reason;
	__u32 addr_epochs, moved;
	struct sl_ct *ct;

	if (!p)
		return SL_REASON_MALFORMED;
	write_key(p);
	ct = find_connection(p);
	if (!ct)
		return SL_REASON_CONNECTION_INVALID;
	p->reply = is_reply(p, ct);
	epochs = READ_ONCE(ct->epochs);
	where = READ_ONCE(ct->where);
	addr_epochs = address_epochs(p);

	/* A packet that cannot be delivered, or is forged, must not change its connection. */
	reason = find_peer(skb, p, known_peer(p, ct, where, addr_epochs));
	if (reason)
		return reason;
	keep_outside(p, ct, where);
	moved = moved_sides(epochs, where, addr_epochs);
	now_where = evaluated_where(p, addr_epochs);
	if (now_where >> 32 != where >> 32)
		moved = SL_BOTH_SIDES;
	/* If the remote pod or its labels changed, the policy of the local pod has to be evaluated
	 * again. */
	if ((p->reply ? p->src_identity : p->dst_identity) != ct->id_resp)
		moved |= SL_SIDE_EGRESS;
	if ((p->reply ? p->dst_identity : p->src_identity) != ct->id_init)
		moved |= SL_SIDE_INGRESS;
	if (READ_ONCE(ct->flags) & SL_CT_UNORIENTED)
		moved = SL_BOTH_SIDES;
	reason = evaluate_sides(p, READ_ONCE(ct->flags) & SL_CT_PROXY ? SL_BOTH_SIDES : moved);
	if (!reason && READ_ONCE(ct->flags) & SL_CT_UNORIENTED)
		reason = evaluate_reverse(p);
	if (reason) {
		/* the policy still allows the connection */
		if (reason != SL_REASON_PROXY_AWAY)
			terminate(p, ct);
		return reason;
	}
	keep_with_proxy(p, ct);
	restamp(p, ct, epochs, where, addr_epochs);
	recall_service(p, ct);
	if (moved) {
		count_connection(SL_CT_STAT_REDECIDED);
		p->news |= SL_NEWS_VERDICT;
	}
	advance(p, ct);
	return SL_CONTINUE;
}

/* Whether the identity in the tunnel key differs from the one that was evaluated. */
static __always_inline bool was_relabelled(const struct sl_packet *p, const struct sl_ct *ct)
{
	if (!SL_FROM_TUNNEL)
		return false;
	return !vni_names(p, p->reply ? READ_ONCE(ct->id_resp) : READ_ONCE(ct->id_init));
}

/* Sets the packet's remote end to the one in the entry. */
static __always_inline void recall_peer(struct sl_packet *p, const struct sl_ct *ct, __u64 where)
{
	__u16 slot_i = initiator_slot(where), slot_r = responder_slot(where);

	if (p->hook == SL_EGRESS) {
		p->dst_slot = p->reply ? slot_i : slot_r;
		p->dst_identity = p->reply ? ct->id_init : ct->id_resp;
		p->node = node_of_connection(ct);
	} else {
		p->src_slot = p->reply ? slot_r : slot_i;
		p->src_identity = p->reply ? ct->id_resp : ct->id_init;
	}
}

/* Whether the local end of the entry is the pod at this device. */
static __always_inline bool is_own(const struct sl_packet *p, __u64 where)
{
	__u16 slot_i = initiator_slot(where), slot_r = responder_slot(where);

	if (p->hook == SL_EGRESS)
		return p->src_slot == (p->reply ? slot_r : slot_i);
	return p->dst_slot == (p->reply ? slot_i : slot_r);
}

static __always_inline bool is_request(const struct sl_packet *p)
{
	return is_echo(p) && p->dport >> 8 == (p->family == 4 ? 8 : 128);
}

/* An echo reply does not begin a connection. */
static __always_inline enum sl_reason admit_unknown(struct __sk_buff *skb, struct sl_packet *p)
{
	if (is_echo(p) && !is_request(p))
		return admit_once(skb, p);
	return admit_first(skb, p);
}

/*
 * Do not keep any property of the packet in a register across the call of find_known. On Linux 6.1,
 * with a flag "is a request" in a register, the branch on the flag was never taken, as if the
 * verifier had explored only one value and removed the other branch; newer kernels took it.
 */
__noinline enum sl_reason admit(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;
	struct sl_ct *ct;
	__u64 where;
	__u32 addr_epochs;

	if (!p)
		return SL_REASON_MALFORMED;
	if (p->proto == SL_ICMP || p->proto == SL_ICMPV6) {
		if (is_error(p))
			return admit_error(skb, p);
		if (p->hook == SL_EGRESS && is_router_message(p))
			return SL_REASON_CONNECTION_INVALID;
		if (!is_echo(p))
			return admit_once(skb, p);
	}
	/* no TCP stack combines SYN with FIN or RST */
	if (p->proto == SL_TCP && !p->fragment && p->tcp_flags & SL_TCP_SYN &&
	    p->tcp_flags & (SL_TCP_FIN | SL_TCP_RST))
		return SL_REASON_CONNECTION_INVALID;
	if (lacks_flags(p))
		return SL_REASON_CONNECTION_INVALID;
	ct = SL_FROM_OUTSIDE && p->unknown ? NULL : find_known(p);
	if (SL_PROGRAM == SL_PROGRAM_TO_POD && may_be_readdressed(skb, p, ct)) {
		answer_from_asked(p);
		if (p->readdressed)
			ct = find_known(p);
	}
	if (!ct && SL_TRANSLATES && !p->translated)
		return SL_ASK_SERVICE;
	if (!ct)
		return admit_unknown(skb, p);
	/* without a remote node, the stack forwards the packet and may translate it */
	if (SL_PROGRAM == SL_PROGRAM_FROM_UPLINK && !node_of_connection(ct) && !p->translated) {
		if (!is_reply(p, ct))
			recall_service(p, ct);
		return SL_REASON_FORWARDED_TO_STACK;
	}
	if (begins(p))
		return admit_again(skb, p);
	p->reply = is_reply(p, ct);
	/* only requests of the initiator and replies of the responder belong to the connection */
	if (is_echo(p) && READ_ONCE(p->reply) == is_request(p)) {
		p->reply = 0;
		return admit_once(skb, p);
	}
	where = READ_ONCE(ct->where);
	addr_epochs = address_epochs(p);
	/* from a sender that is not an end of the connection: do not change the connection */
	if (unlikely(!agrees(skb, p, ct, where, addr_epochs))) {
		p->reply = 0;
		return admit_once(skb, p);
	}
	if (unlikely(moved_sides(READ_ONCE(ct->epochs), where, addr_epochs) || !is_own(p, where) ||
		     was_relabelled(p, ct) || READ_ONCE(ct->flags) & SL_CT_PROXY)) {
		reason = admit_anew(skb, p);
		if (reason != SL_REASON_CONNECTION_INVALID)
			return reason;
		return admit_unknown(skb, p);
	}
	recall_peer(p, ct, where);
	recall_service(p, ct);
	if (p->hook == SL_EGRESS && is_tunnel_packet(p))
		return SL_REASON_TUNNEL_PORT;
	advance(p, ct);
	if (unlikely(p->news & SL_NEWS_CLOSED))
		return_share(p, ct, where);
	return SL_CONTINUE;
}

/*
 * A packet of an unknown connection may be a request to a service. The lookup is here and not in
 * admit, because the call stack below admit is exhausted.
 */
static __always_inline enum sl_reason admit_to_service(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason = find_service(skb, p);

	if (reason)
		return reason;
	if (!p->translated)
		return admit_unknown(skb, p);
	/* a hairpin, the pod's connection to itself: no policy applies, and there is no connection
	 * entry */
	if (p->translated > SL_TRANSLATED_DESTINATION)
		return SL_CONTINUE;
	return p->unknown ? admit_first(skb, p) : admit(skb, p);
}

/*
 * Decides whether a packet or fragment may pass. After a first fragment, the caller records which
 * path it takes, so that later fragments follow it.
 */
static __always_inline enum sl_reason admit_piece(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason = follow_fragments(p);

	if (reason)
		return reason;
	reason = admit(skb, p);
	if (SL_TRANSLATES && reason == SL_ASK_SERVICE)
		reason = admit_to_service(skb, p);
	if (SL_TRANSLATES && p->untold && !reason && !store_translation(p))
		return SL_REASON_TRANSLATION_SHARE;
	return reason;
}

/* Decides whether a packet or fragment from the stack may pass. */
static __always_inline enum sl_reason admit_behind_stack(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason = admit_piece(skb, p);

	if (leads_fragments(p))
		lead_fragments(p, reason ? SL_LEAD_NONE : SL_LEAD_ON);
	return reason;
}

#endif
