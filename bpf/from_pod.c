/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/* All packets from a pod. Runs at the ingress hook of the host end of the pod's device. */

#define SL_PROGRAM SL_PROGRAM_FROM_POD

#include <sluice/admit.h>
#include <sluice/arp.h>
#include <sluice/asked.h>
#include <sluice/cut.h>
#include <sluice/deliver.h>
#include <sluice/endpoint.h>
#include <sluice/hairpin.h>
#include <sluice/ipv4.h>
#include <sluice/ipv6.h>
#include <sluice/ndp.h>
#include <sluice/observe.h>
#include <sluice/offload.h>
#include <sluice/redirect.h>
#include <sluice/refuse.h>
#include <sluice/remote.h>

/* The device identifies the pod; the source MAC address must be the pod's. */
static __always_inline enum sl_reason find_sender(struct __sk_buff *skb, struct sl_packet *p,
						  struct sl_endpoint **src)
{
	*src = endpoint_of_device(skb->ifindex, &p->src_slot);
	if (!*src)
		return SL_REASON_NO_ENDPOINT;
	p->src_identity = identity_of(*src);
	if (!equal_mac(p->src_mac, (*src)->mac))
		return SL_REASON_SPOOFED_MAC;
	return SL_CONTINUE;
}

static __always_inline enum sl_reason check_addresses4(struct sl_packet *p,
						       const struct sl_endpoint *src)
{
	enum sl_reason reason = check_ip4_destination(p);

	/* before the source check: DHCP and IGMP packets may have no source address; that is not
	 * spoofing */
	if (reason)
		return reason;
	if (ip4_src(p) != src->ip4 || !src->ip4)
		return SL_REASON_SPOOFED_IP;
	if (!equal_mac(p->dst_mac, src->hmac))
		return SL_REASON_WRONG_MAC;
	return SL_CONTINUE;
}

static __always_inline enum sl_reason check_addresses6(struct sl_packet *p,
						       const struct sl_endpoint *src)
{
	enum sl_reason reason = check_ip6_destination(p);

	if (reason)
		return reason;
	/* the pod may use link-local addresses only for NDP with the gateway */
	if (is_link_local6(p->src) || is_link_local6(p->dst))
		return SL_REASON_LINK_LOCAL;
	if (!equal16(p->src, src->ip6) || zero16(src->ip6))
		return SL_REASON_SPOOFED_IP;
	if (!equal_mac(p->dst_mac, src->hmac))
		return SL_REASON_WRONG_MAC;
	return SL_CONTINUE;
}

/* Forwards through the stack, with the backend as destination. */
static __always_inline enum sl_reason forward_by_stack(struct __sk_buff *skb, struct sl_packet *p)
{
	if (cfg_services && p->translated && rewrite(skb, p))
		return SL_REASON_REWRITE_FAILED;
	return p->dst_slot == SL_SLOT_HOST ? SL_REASON_FORWARDED_TO_HOST
					   : SL_REASON_FORWARDED_OUTSIDE;
}

/*
 * Forwards an allowed packet. A packet whose connection the stack forwards must go through the
 * stack, too, because the stack may have translated its addresses.
 */
static __always_inline enum sl_reason forward(struct __sk_buff *skb, struct sl_packet *p,
					      __u32 *ifindex)
{
	if (p->dst_slot == SL_SLOT_HOST || p->via_stack || p->by_stack ||
	    (p->dst_slot == SL_SLOT_NONE && !p->node))
		return forward_by_stack(skb, p);
	if (p->dst_slot == SL_SLOT_NONE)
		return is_native_by_stack() ? forward_by_stack(skb, p) : forward_remote(skb, p);
	return deliver_to(skb, p, ifindex);
}

/*
 * Answers with packet too big. The stack would not: it knows neither the service nor the MTU of the
 * path to the backend.
 */
__noinline enum sl_reason answer_too_big(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_endpoint *dst;
	struct sl_node *node;

	if (!p)
		return SL_REASON_NO_ROUTE;
	if (p->dst_slot == SL_SLOT_NONE) {
		node = node_at(p->node);
		if (!node)
			return SL_REASON_NO_NODE;
		p->answer_mtu = (__u16)way_mtu(way_to(node, p->family));
	} else {
		dst = endpoint_at(p->dst_slot);
		if (!dst)
			return SL_REASON_NO_ROUTE;
		p->answer_mtu = dst->mtu;
	}
	return answer_sender(skb, p, SL_ANSWER_TOO_BIG) ? SL_REASON_REWRITE_FAILED
							: SL_REASON_ANSWERED_TOO_BIG;
}

/* Handles a packet to a service that exceeds the MTU of the path to its backend. */
static __always_inline enum sl_reason fit(struct __sk_buff *skb, struct sl_packet *p)
{
	if (p->translated != SL_TRANSLATED_DESTINATION || !may_be_cut(skb, p))
		return answer_too_big(skb, p);
	return rewrite(skb, p) ? SL_REASON_REWRITE_FAILED : SL_REASON_STACK_TOO_BIG;
}

static __always_inline enum sl_reason admit_and_forward(struct __sk_buff *skb, struct sl_packet *p,
							const struct sl_endpoint *src,
							__u32 *ifindex)
{
	enum sl_reason reason = SL_CONTINUE;

	*ifindex = src->ifindex;
	if (cfg_services && is_error(p) && is_hairpin_address(p->dst, p->family))
		reason = return_error(skb, p);
	if (!reason)
		reason = admit_piece(skb, p);
	if (reason)
		return reason;
	if (asks_host(p))
		record_asked(p);
	if (cfg_services && p->translated > SL_TRANSLATED_DESTINATION)
		reason = return_to_pod(skb, p);
	else if (is_redirected(p) && !p->held)
		return give_to_proxy(skb, p, ifindex);
	else if (p->held && !p->egress.redirects) /* the rule was changed while it was held */
		return SL_REASON_PROXY_FORGED;
	else
		reason = forward(skb, p, ifindex);
	if (cfg_services && p->translated && reason == SL_REASON_STACK_TOO_BIG)
		return fit(skb, p);
	return reason;
}

static __always_inline enum sl_reason pass(struct __sk_buff *skb, struct sl_packet *p,
					   const struct sl_endpoint *src, __u32 *ifindex)
{
	enum sl_reason reason;

	if (is_checksum_misplaced(skb, p))
		return SL_REASON_MALFORMED;
	reason = admit_and_forward(skb, p, src, ifindex);
	if (leads_fragments(p) && lead_fragments(p, lead_of(reason)))
		return SL_REASON_FRAGMENT_SHARE;
	return reason;
}

static __always_inline enum sl_reason from_pod4(struct __sk_buff *skb, struct sl_packet *p,
						struct sl_endpoint *src, __u32 *ifindex)
{
	enum sl_reason reason = parse_ip4(skb, p);

	if (reason)
		return reason;
	reason = check_addresses4(p, src);
	if (reason)
		return reason;
	return pass(skb, p, src, ifindex);
}

static __always_inline enum sl_reason from_pod6(struct __sk_buff *skb, struct sl_packet *p,
						struct sl_endpoint *src, __u32 *ifindex)
{
	enum sl_reason reason = parse_ip6(skb, p);

	if (reason)
		return reason;
	if (is_ndp(p))
		return answer_ndp(skb, p, src);
	reason = check_addresses6(p, src);
	if (reason)
		return reason;
	return pass(skb, p, src, ifindex);
}

SEC("tc") int sluice_from_pod(struct __sk_buff *skb)
{
	struct sl_endpoint *src = NULL;
	enum sl_reason reason;
	struct sl_packet *p;
	__u32 ifindex = 0;
	int action;

	p = new_packet(SL_EGRESS);
	if (!p)
		return TC_ACT_SHOT;
	/* The pod itself cannot set this mark: a packet loses its mark when it enters another
	 * network namespace. */
	p->held = (skb->mark & SL_MARK_MASK) == SL_MARK_PROXY;
	reason = parse_ethernet(skb, p);
	if (!reason)
		reason = find_sender(skb, p, &src);
	if (!reason && src) {
		switch (p->ethertype) {
		case ETH_P_IP:
			reason = from_pod4(skb, p, src, &ifindex);
			break;
		case ETH_P_IPV6:
			reason = from_pod6(skb, p, src, &ifindex);
			break;
		default:
			reason = answer_arp(skb, p, src);
		}
	}
	observe(skb, p, reason);
	if (cfg_services && is_refusal(reason) && !answer_sender(skb, p, SL_ANSWER_REFUSED))
		return act(skb, SL_REASON_ANSWERED_TOO_BIG, 0);
	/* the packet leaves by the uplink, like a packet without a tunnel */
	if (cfg_direct_port && p->direct)
		reason = SL_REASON_FORWARDED_NATIVE;
	action = act(skb, reason, ifindex);
	if (unlikely(p->held) && action == TC_ACT_OK)
		skb->mark |= mark_held(p);
	return action;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
