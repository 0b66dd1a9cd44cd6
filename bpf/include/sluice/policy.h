/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_POLICY_H
#define SLUICE_POLICY_H

/*
 * Evaluates both sides of a connection, each by the policy table of its local endpoint. The policy
 * entry of each end is read once, so that table, epoch and identity are consistent: no packet is
 * evaluated by the tables of one identity together with another identity. The connection is
 * evaluated and not the packet; p->reply tells that the packet goes from the responder to the
 * initiator.
 */

#include <sluice/endpoint.h>
#include <sluice/transport.h>
#include <sluice/verdict.h>

#define SL_SIDE_EGRESS 0x1 /* of the initiator */
#define SL_SIDE_INGRESS 0x2
#define SL_BOTH_SIDES 0x3

static __always_inline __u16 egress_table(__u64 pol)
{
	return (__u16)pol & ~SL_POL_SECOND;
}

static __always_inline __u16 ingress_table(__u64 pol)
{
	return (__u16)(pol >> 16);
}

static __always_inline __u32 epoch_of(__u64 pol)
{
	return (__u32)(pol >> 32);
}

/* Echo requests and replies. With a non-zero code a message is not an echo: no host answers it,
 * and a rule may distinguish codes.
 */
static __always_inline bool is_echo(const struct sl_packet *p)
{
	__u8 type = (__u8)(p->dport >> 8);

	if (p->dport & 0xff)
		return false;
	return (p->proto == SL_ICMP && p->family == 4 && (type == 8 || type == 0)) ||
	       (p->proto == SL_ICMPV6 && p->family == 6 && (type == 128 || type == 129));
}

/* Protocol and port of the connection's first packet. */
static __always_inline __u32 point_of(const struct sl_packet *p)
{
	__u16 port = p->dport;

	if (p->reply) {
		port = p->sport;
		if (is_echo(p))
			port = p->family == 4 ? 8 << 8 : 128 << 8;
	}
	return (__u32)p->proto << 16 | port;
}

/* How the packet can be given to a proxy: SL_REDIRECT_... */
static __always_inline __u8 redirection_of(const struct sl_packet *p)
{
	if (p->proto == SL_UDP)
		return SL_REDIRECT_DATAGRAM;
	if (p->proto != SL_TCP)
		return SL_REDIRECT_NOT;
	if (!p->fragment && (p->tcp_flags & (SL_TCP_SYN | SL_TCP_ACK)) == SL_TCP_SYN)
		return SL_REDIRECT_BEGIN;
	return SL_REDIRECT_SEGMENT;
}

/* Evaluates one side of the connection, if its end is local. */
static __always_inline enum sl_reason evaluate(struct sl_packet *p, enum sl_direction direction)
{
	bool egress = direction == SL_EGRESS;
	bool from_source = egress != p->reply; /* the end of this side is the packet's source */
	__u16 slot = from_source ? p->src_slot : p->dst_slot;
	struct sl_question *q = &p->question;
	struct sl_side *side = &p->side;
	struct sl_endpoint *e;
	enum sl_reason reason;
	__u64 pol;

	if (slot == SL_SLOT_NONE)
		return SL_CONTINUE;
	p->direction = from_source ? SL_EGRESS : SL_INGRESS;
	e = endpoint_at(slot);
	if (!e)
		return SL_REASON_POLICY_TABLE_UNKNOWN;
	pol = from_source ? p->src_pol : p->dst_pol;
	__builtin_memset(q, 0, sizeof(*q));
	__builtin_memset(side, 0, sizeof(*side));
	q->identity = from_source ? p->dst_identity : p->src_identity;
	q->point = point_of(p);
	q->table = egress ? egress_table(pol) : ingress_table(pol);
	q->family = p->family;
	q->direction = direction;
	q->flags = READ_ONCE(e->flags);
	if (egress && slot != SL_SLOT_HOST)
		q->may_redirect = redirection_of(p);
	if (from_source)
		__builtin_memcpy(q->addr, p->dst, sizeof(q->addr));
	else
		__builtin_memcpy(q->addr, p->src, sizeof(q->addr));
	side->epoch = epoch_of(pol);
	reason = evaluate_side(q, side);
	if (egress)
		p->egress = *side;
	else
		p->ingress = *side;
	return reason;
}

/*
 * Reads the policy entry of an end into *pol. Returns true if the pod's identity is no longer
 * *identity; then *identity is updated, and both sides must be evaluated.
 */
static __always_inline bool read_end(__u16 slot, __u64 *pol, __u32 *identity)
{
	struct sl_endpoint *e = endpoint_at(slot); /* SL_SLOT_NONE has no endpoint */
	__u32 known = *identity, now;

	if (!e)
		return false;
	*pol = policy_of(e);
	if (slot == SL_SLOT_HOST)
		return false;
	now = identity_under(e, *pol);
	*identity = now;
	return now != known;
}

__noinline enum sl_reason evaluate_sides(struct sl_packet *p, __u32 sides)
{
	enum sl_reason reason = SL_CONTINUE;

	if (!p)
		return SL_REASON_MALFORMED;
	if (read_end(p->src_slot, &p->src_pol, &p->src_identity))
		sides = SL_BOTH_SIDES;
	if (read_end(p->dst_slot, &p->dst_pol, &p->dst_identity))
		sides = SL_BOTH_SIDES;
	p->sides = (__u8)sides;
	if (sides & SL_SIDE_EGRESS)
		reason = evaluate(p, SL_EGRESS);
	if (!reason && sides & SL_SIDE_INGRESS)
		reason = evaluate(p, SL_INGRESS);
	/* a packet that passes is counted for the side that this program belongs to */
	if (!reason)
		p->direction = p->hook;
	return reason;
}

/* IP protocols whose payload a node's tunnel device would decapsulate: IPv4, IPv6, GRE, IP in IP,
 * L2TP, MPLS. ESP and AH require a key.
 */
static __always_inline bool is_tunnel_protocol(__u8 proto)
{
	switch (proto) {
	case 4:
	case 41:
	case 47:
	case 94:
	case 115:
	case 137:
		return true;
	}
	return false;
}

/* Whether the UDP port belongs to a tunnel. */
static __always_inline bool is_tunnel_port(__u16 port)
{
	for (int i = 0; i < SL_TUNNEL_PORTS; i++)
		if (cfg_tunnel_ports[i] && port == cfg_tunnel_ports[i])
			return true;
	return false;
}

/*
 * Rejects tunnel packets that pods send to nodes. A sender that can reach a node's tunnel port can
 * forge packets of any pod: the outer source identifies the sending node, and masquerading gives a
 * pod its node's address. A tunnel device without a port would deliver the inner packet with the
 * mark of the outer packet.
 */
static __always_inline bool is_tunnel_packet(const struct sl_packet *p)
{
	bool ports = p->proto == SL_UDP;

	if (likely(!ports && !is_tunnel_protocol(p->proto)))
		return false;
	/* Node-local identities belong to the label sets of nodes and API servers. */
	if (p->dst_identity != SL_ID_HOST && p->dst_identity != SL_ID_REMOTE_NODE &&
	    p->dst_identity != SL_ID_KUBE_APISERVER && p->dst_identity < SL_NODE_LOCAL &&
	    p->dst_slot != SL_SLOT_HOST)
		return false;
	return !ports || is_tunnel_port(p->dport);
}

#endif
