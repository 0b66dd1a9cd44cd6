/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_POLICY_H
#define SLUICE_POLICY_H

/*
 * The word that judges an endpoint. It is read once per endpoint and packet,
 * so that both directions and the gen belong to one revision.
 */

#include <sluice/endpoint.h>
#include <sluice/transport.h>
#include <sluice/verdict.h>

static __always_inline __u64 policy_of(const struct sl_endpoint *e)
{
	return READ_ONCE(e->pol);
}

static __always_inline __u16 egress_table(__u64 pol)
{
	return (__u16)pol;
}

static __always_inline __u16 ingress_table(__u64 pol)
{
	return (__u16)(pol >> 16);
}

/* What a packet asks of the table of one of its two ends. */
static __always_inline enum sl_reason judge(const struct sl_packet *p, const struct sl_endpoint *e,
					    enum sl_direction direction, struct sl_side *side)
{
	bool egress = direction == SL_EGRESS;
	__u64 pol = policy_of(e);
	struct sl_question q = {
		.identity = egress ? p->dst_identity : p->src_identity,
		.point = (__u32)p->proto << 16 | p->dport,
		.table = egress ? egress_table(pol) : ingress_table(pol),
		.family = p->family,
		.direction = direction,
		.flags = READ_ONCE(e->flags),
	};

	__builtin_memcpy(q.addr, egress ? p->dst : p->src, sizeof(q.addr));
	side->gen = (__u32)(pol >> 32);
	return judge_side(&q, side);
}

/*
 * Before its policy is known a pod may answer its own host, whose probes reach
 * it, but open nothing by itself.
 */
static __always_inline enum sl_reason judge_egress(const struct sl_packet *p,
						   const struct sl_endpoint *src)
{
	struct sl_side side = {};

	if (egress_table(policy_of(src)) == SL_TABLE_PENDING && p->dst_slot == SL_SLOT_HOST &&
	    is_answer(p))
		return SL_CONTINUE;
	return judge(p, src, SL_EGRESS, &side);
}

static __always_inline enum sl_reason judge_ingress(const struct sl_packet *p,
						    const struct sl_endpoint *dst)
{
	struct sl_side side = {};

	return judge(p, dst, SL_INGRESS, &side);
}

/*
 * Whoever may send to a tunnel port of a node can forge the packets of any
 * pod: outer headers say which node sent them, and masquerading gives a pod
 * its node's address.
 */
static __always_inline bool is_tunnel_packet(const struct sl_packet *p)
{
	if (p->proto != SL_UDP || p->fragment)
		return false;
	if (p->dst_identity != SL_ID_HOST && p->dst_identity != SL_ID_REMOTE_NODE &&
	    p->dst_slot != SL_SLOT_HOST)
		return false;
	for (int i = 0; i < SL_TUNNEL_PORTS; i++)
		if (cfg_tunnel_ports[i] && p->dport == cfg_tunnel_ports[i])
			return true;
	return false;
}

#endif
