/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * What the host's stack sends to pods of other nodes for pods of this one, after
 * it may have translated where to: evaluated as what it is by now. Everything
 * else passes. Runs at the egress hook of an uplink, where packets of pods travel
 * as they are.
 */

#define SL_PROGRAM SL_PROGRAM_TO_UPLINK

#include <linux/pkt_cls.h>

#include <sluice/admit.h>
#include <sluice/endpoint.h>
#include <sluice/ipv4.h>
#include <sluice/ipv6.h>
#include <sluice/mark.h>
#include <sluice/observe.h>

/* Whether it is from a pod to another node: else it is none of ours. */
static __always_inline bool is_of_pods(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_ipcache where;

	p->src_slot = slot_of_address(p->src, p->family);
	if (p->src_slot == SL_SLOT_NONE || p->src_slot == SL_SLOT_HOST)
		return false;
	if (entered_by(skb) != p->src_slot)
		return false;
	where = ipcache_of(p->dst, p->family);
	return node_past_stack(&where);
}

static __always_inline enum sl_reason pass(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;

	if (!is_of_pods(skb, p))
		return SL_FWD_STACK;
	reason = admit_piece(skb, p);
	return reason ? reason : SL_FWD_NATIVE;
}

SEC("tc") int sluice_to_uplink(struct __sk_buff *skb)
{
	enum sl_reason reason;
	struct sl_packet *p;

	/* from a pod, past the programs of its device */
	if (likely((skb->mark & SL_MARK_MASK) != SL_MARK_POD))
		return TC_ACT_UNSPEC;
	p = new_packet(SL_EGRESS);
	if (!p)
		return TC_ACT_SHOT;
	if (parse_ethernet(skb, p))
		return TC_ACT_UNSPEC;
	switch (p->ethertype) {
	case ETH_P_IP:
		reason = parse_ip4(skb, p);
		break;
	case ETH_P_IPV6:
		reason = parse_ip6(skb, p);
		break;
	default:
		return TC_ACT_UNSPEC;
	}
	if (!reason)
		reason = pass(skb, p);
	if (reason == SL_FWD_STACK)
		return TC_ACT_UNSPEC;
	observe(skb, p, reason);
	return reason == SL_FWD_NATIVE ? TC_ACT_UNSPEC : TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
