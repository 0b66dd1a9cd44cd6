/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * Packets that the host's stack sends out for local pods. Replies to outside clients of a service
 * get the service's address as source. With native routing, policy is evaluated here for packets
 * to pods of other nodes, because the stack may have translated their destination (DNAT). All
 * other packets are forwarded. Runs at the egress hook of an uplink.
 */

#define SL_PROGRAM SL_PROGRAM_TO_UPLINK

#include <linux/pkt_cls.h>

#include <sluice/admit.h>
#include <sluice/endpoint.h>
#include <sluice/ipv4.h>
#include <sluice/ipv6.h>
#include <sluice/mark.h>
#include <sluice/observe.h>
#include <sluice/outside.h>
#include <sluice/redirect.h>

/*
 * Handles a packet with the mark of sluice_from_pod. Its source is an address of the node if the
 * stack has masqueraded it, otherwise the address of the sending pod.
 */
static __always_inline enum sl_reason pass_of_pod(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;
	struct sl_ipcache where;

	p->src_slot = slot_of_address(p->src, p->family);
	if (p->src_slot == SL_SLOT_NONE || p->src_slot == SL_SLOT_HOST)
		return SL_REASON_FORWARDED_TO_STACK;
	if (!is_from_pod(skb, p, p->src_slot))
		return SL_REASON_SPOOFED_IP;
	if (cfg_services) {
		reason = answer_outside(skb, p);
		if (reason)
			return reason;
	}
	if (!cfg_native)
		return SL_REASON_FORWARDED_TO_STACK;
	where = ipcache_of(p->dst, p->family);
	if (!node_past_stack(&where))
		return SL_REASON_FORWARDED_TO_STACK;
	reason = admit_behind_stack(skb, p);
	if (!reason && is_redirected(p) && !was_held(skb, p))
		reason = SL_REASON_NO_PROXY;
	return reason ? reason : SL_REASON_FORWARDED_NATIVE;
}

/* Whether the packet may be in transit: from an outside client, from a backend, or from a socket
 * of the node that is a backend.
 */
static __always_inline bool may_be_in_transit(const struct sl_packet *p)
{
	switch (p->proto) {
	case SL_TCP:
	case SL_SCTP:
		return true;
	case SL_UDP:
		return !is_of_tunnel(p);
	}
	return is_error(p);
}

static __always_inline enum sl_reason pass(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;

	if ((skb->mark & SL_MARK_MASK) == SL_MARK_POD)
		return pass_of_pod(skb, p);
	if (!may_be_in_transit(p))
		return SL_REASON_FORWARDED_TO_STACK;
	reason = translate_source(skb, p);
	return reason ? reason : SL_REASON_FORWARDED_TO_STACK;
}

SEC("tc") int sluice_to_uplink(struct __sk_buff *skb)
{
	enum sl_reason reason;
	struct sl_packet *p;

	/* packets without this mark are not from a pod that sluice_from_pod has seen */
	if (!cfg_services && likely((skb->mark & SL_MARK_MASK) != SL_MARK_POD))
		return TC_ACT_UNSPEC;
	if (!cfg_native && !(skb->mark & SL_MARK_MASK) && is_outer(skb))
		return TC_ACT_UNSPEC;
	/* an answer that a program created for a packet from this device */
	if (skb->mark == mark_evaluated(skb->ifindex))
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
	/* malformed packets of the host itself pass */
	if (reason && (skb->mark & SL_MARK_MASK) != SL_MARK_POD)
		return TC_ACT_UNSPEC;
	if (!reason)
		reason = pass(skb, p);
	if (reason == SL_REASON_FORWARDED_TO_STACK)
		return TC_ACT_UNSPEC;
	observe(skb, p, reason);
	if (is_refusal(reason))
		return refuse_in_transit(skb, p);
	return reason == SL_REASON_FORWARDED_NATIVE ? TC_ACT_UNSPEC : TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
