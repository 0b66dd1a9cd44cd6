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

/*
 * While the policy of an endpoint is not known, "pending" is what may pass
 * nevertheless. A table that does not exist denies.
 */
static __always_inline enum sl_reason judge(__u16 table, bool pending)
{
	switch (table) {
	case SL_TABLE_ALLOW:
		return SL_CONTINUE;
	case SL_TABLE_DENY:
		return SL_DROP_POLICY_DENIED;
	case SL_TABLE_PENDING:
		return pending ? SL_CONTINUE : SL_DROP_POLICY_PENDING;
	}
	return SL_DROP_POLICY_TABLE;
}

/*
 * Before its policy is known a pod may answer its own host, whose probes reach
 * it, but open nothing by itself.
 */
static __always_inline enum sl_reason judge_egress(const struct sl_packet *p,
						   const struct sl_endpoint *src)
{
	return judge(egress_table(policy_of(src)), p->dst_slot == SL_SLOT_HOST && is_answer(p));
}

static __always_inline enum sl_reason judge_ingress(const struct sl_packet *p,
						    const struct sl_endpoint *dst)
{
	return judge(ingress_table(policy_of(dst)), p->src_identity == SL_ID_HOST);
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
