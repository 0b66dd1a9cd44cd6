/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * Packets from the host's stack to a pod: the host's own traffic, and forwarded traffic. Runs at
 * the egress hook of the host end of the pod's device.
 */

#define SL_PROGRAM SL_PROGRAM_TO_POD

#include <sluice/admit.h>
#include <sluice/asked.h>
#include <sluice/deliver.h>
#include <sluice/endpoint.h>
#include <sluice/ipv4.h>
#include <sluice/ipv6.h>
#include <sluice/ndp.h>
#include <sluice/observe.h>
#include <sluice/redirect.h>
#include <sluice/rewrite.h>

static __always_inline enum sl_reason find_target(struct __sk_buff *skb, struct sl_packet *p,
						  struct sl_endpoint **dst)
{
	*dst = endpoint_of_device(skb->ifindex, &p->dst_slot);
	if (!*dst)
		return SL_REASON_NO_ENDPOINT;
	p->dst_identity = identity_of(*dst);
	return SL_CONTINUE;
}

/* Admits the packet. The source of an answer becomes the address that the pod had sent to. */
static __always_inline enum sl_reason take(struct __sk_buff *skb, struct sl_packet *p,
					   __u32 *ifindex)
{
	enum sl_reason reason = admit_behind_stack(skb, p);

	if (reason)
		return reason;
	if (is_redirected(p)) {
		if (!is_of_pod(p->src_slot))
			return give_to_proxy(skb, p, ifindex);
		if (!was_held(skb, p))
			return SL_REASON_NO_PROXY;
	}
	if (needs_rewrite(p) ? rewrite_for_pod(skb, p)
			     : p->readdressed && rewrite_readdressed(skb, p))
		return SL_REASON_REWRITE_FAILED;
	return SL_CONTINUE;
}

static __always_inline enum sl_reason to_pod4(struct __sk_buff *skb, struct sl_packet *p,
					      struct sl_endpoint *dst, __u32 *ifindex)
{
	enum sl_reason reason = parse_ip4(skb, p);

	if (reason)
		return reason;
	reason = check_ip4_destination(p);
	if (reason)
		return reason;
	if (ip4_dst(p) != dst->ip4)
		return SL_REASON_WRONG_ADDRESS;
	return take(skb, p, ifindex);
}

static __always_inline enum sl_reason to_pod6(struct __sk_buff *skb, struct sl_packet *p,
					      struct sl_endpoint *dst, __u32 *ifindex)
{
	enum sl_reason reason = parse_ip6(skb, p);

	if (reason)
		return reason;
	if (is_ndp(p))
		return SL_REASON_NDP;
	reason = check_ip6_destination(p);
	if (reason)
		return reason;
	if (!equal16(p->dst, dst->ip6))
		return SL_REASON_WRONG_ADDRESS;
	return take(skb, p, ifindex);
}

SEC("tc") int sluice_to_pod(struct __sk_buff *skb)
{
	struct sl_endpoint *dst = NULL;
	enum sl_reason reason;
	struct sl_packet *p;
	__u32 ifindex = 0;

	if (is_delivered(skb)) {
		skb->mark = 0;
		return TC_ACT_OK;
	}

	p = new_packet(SL_INGRESS);
	if (!p)
		return TC_ACT_SHOT;
	reason = parse_ethernet(skb, p);
	if (!reason)
		reason = find_target(skb, p, &dst);
	if (!reason && dst) {
		switch (p->ethertype) {
		case ETH_P_IP:
			reason = to_pod4(skb, p, dst, &ifindex);
			break;
		case ETH_P_IPV6:
			reason = to_pod6(skb, p, dst, &ifindex);
			break;
		default:
			reason = SL_REASON_ARP;
		}
	}
	if (!reason)
		reason = SL_REASON_FORWARDED_FROM_STACK;
	observe(skb, p, reason);
	return act(skb, reason, ifindex);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
