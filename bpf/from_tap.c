/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * Packets from a proxy. Runs at the ingress hooks of the proxy's TAP device, and of the device
 * whose other end is in the proxy namespace. The proxy is not trusted: it may only send packets of
 * connections that are redirected to it. The current policy applies to them. The Ethernet addresses
 * that it writes have no meaning.
 */

#define SL_PROGRAM SL_PROGRAM_FROM_TAP

#include <sluice/admit.h>
#include <sluice/deliver.h>
#include <sluice/endpoint.h>
#include <sluice/ipv4.h>
#include <sluice/ipv6.h>
#include <sluice/observe.h>
#include <sluice/redirect.h>

static __always_inline enum sl_reason parse(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason = parse_ethernet(skb, p);

	if (reason)
		return reason;
	switch (p->ethertype) {
	case ETH_P_IP:
		reason = parse_ip4(skb, p);
		return reason ? reason : check_ip4_destination(p);
	case ETH_P_IPV6:
		reason = parse_ip6(skb, p);
		return reason ? reason : check_ip6_destination(p);
	}
	return SL_REASON_NOT_IP;
}

/* Whether the device belongs to the proxy which the connection is redirected to. */
static __always_inline bool is_of_its_proxy(const struct __sk_buff *skb, __u32 flags)
{
	return is_device_of(skb->ifindex, SL_PROXY_HTTP) ==
	       (is_held(flags) && flags & SL_CT_HELD_HTTP);
}

/*
 * Finds the connection of the packet. It must be redirected to this proxy, its initiator must be a
 * local pod, and both ends must have the addresses with which the connection was evaluated.
 */
static __always_inline enum sl_reason find_redirected(const struct __sk_buff *skb,
						      struct sl_packet *p)
{
	__u16 client, server;
	struct sl_ct *ct;
	__u64 where;

	if ((p->proto != SL_UDP && p->proto != SL_TCP) || follow_fragments(p))
		return SL_REASON_PROXY_FORGED;
	ct = find_known(p);
	if (!ct || !(READ_ONCE(ct->flags) & SL_CT_PROXY) ||
	    !is_of_its_proxy(skb, READ_ONCE(ct->flags)))
		return SL_REASON_PROXY_FORGED;
	p->reply = is_reply(p, ct);
	p->node = node_of_connection(ct);
	where = READ_ONCE(ct->where);
	p->src_slot = slot_of_address(p->src, p->family);
	p->dst_slot = slot_of_address(p->dst, p->family);
	client = READ_ONCE(p->reply) ? p->dst_slot : p->src_slot;
	server = READ_ONCE(p->reply) ? p->src_slot : p->dst_slot;
	if (!is_of_pod(client) || client != initiator_slot(where) ||
	    server != responder_slot(where))
		return SL_REASON_PROXY_FORGED;
	return SL_CONTINUE;
}

/*
 * Sends on a packet of a local pod: sluice_from_pod receives it once more, from the pod's device.
 */
static __always_inline enum sl_reason send_as_pod(struct __sk_buff *skb, struct sl_packet *p,
						  __u32 *ifindex)
{
	struct sl_endpoint *src = endpoint_at(p->src_slot);
	__u8 macs[2 * ETH_ALEN];

	if (!src)
		return SL_REASON_PROXY_FORGED;
	__builtin_memcpy(macs, src->hmac, ETH_ALEN);
	__builtin_memcpy(macs + ETH_ALEN, src->mac, ETH_ALEN);
	if (bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return SL_REASON_REWRITE_FAILED;
	*ifindex = src->ifindex;
	return SL_CONTINUE;
}

/* Whether the packet, or one of its GSO segments, exceeds the MTU of the pod's device. */
static __always_inline bool is_too_large(struct __sk_buff *skb, const struct sl_endpoint *dst)
{
	__u32 len = 0;

	if (skb->len - ETH_HLEN <= dst->mtu)
		return false;
	return !skb->gso_size || bpf_check_mtu(skb, dst->ifindex, &len, 0, BPF_MTU_CHK_SEGS);
}

/*
 * Delivers an answer from another node or from outside. Its hop limit is not decremented: the stack
 * may have done that before the proxy got the packet.
 */
static __always_inline enum sl_reason deliver_answer(struct __sk_buff *skb, struct sl_packet *p,
						     __u32 *ifindex)
{
	enum sl_reason reason = admit_anew(skb, p);
	__u8 macs[2 * ETH_ALEN];
	struct sl_endpoint *dst;

	if (reason)
		/* the entry was evicted just now */
		return reason == SL_REASON_CONNECTION_INVALID ? SL_REASON_PROXY_FORGED : reason;
	dst = endpoint_at(p->dst_slot);
	/* Only a packet of the proxy itself can be too big. If no rule redirects the connection
	 * now, the proxy has no part in it, unless the proxy ends it.
	 */
	if (!dst || !p->egress.redirects || is_too_large(skb, dst))
		return SL_REASON_PROXY_FORGED;
	if (needs_rewrite(p) && rewrite_for_pod(skb, p))
		return SL_REASON_REWRITE_FAILED;
	__builtin_memcpy(macs, dst->mac, ETH_ALEN);
	__builtin_memcpy(macs + ETH_ALEN, dst->hmac, ETH_ALEN);
	/* The tag's Ethernet addresses make the kernel set this type: for another host. */
	if (bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0) ||
	    bpf_skb_change_type(skb, SL_PACKET_HOST))
		return SL_REASON_REWRITE_FAILED;
	*ifindex = dst->ifindex;
	return delivery_of(dst);
}

static __always_inline enum sl_reason pass(struct __sk_buff *skb, struct sl_packet *p,
					   __u32 *ifindex)
{
	enum sl_reason reason = parse(skb, p);

	if (!reason)
		reason = find_redirected(skb, p);
	if (reason)
		return SL_REASON_PROXY_FORGED;
	if (is_of_pod(p->src_slot))
		reason = send_as_pod(skb, p, ifindex);
	else
		reason = deliver_answer(skb, p, ifindex);
	if (leads_fragments(p))
		lead_fragments(p, reason < SL_FIRST_DROP ? SL_LEAD_ON : SL_LEAD_NONE);
	return reason;
}

SEC("tc") int sluice_from_tap(struct __sk_buff *skb)
{
	enum sl_reason reason;
	struct sl_packet *p;
	__u32 ifindex = 0;

	p = new_packet(SL_INGRESS);
	if (!p)
		return TC_ACT_SHOT;
	reason = pass(skb, p, &ifindex);
	if (reason == SL_CONTINUE) {
		/* sluice_from_pod counts it */
		skb->mark = SL_MARK_PROXY;
		return (int)bpf_redirect(ifindex, BPF_F_INGRESS);
	}
	observe(skb, p, reason);
	switch (reason) {
	case SL_REASON_FORWARDED_TO_POD:
	case SL_REASON_FORWARDED_TO_POD_DEVICE:
		return act(skb, reason, ifindex);
	default:
		return TC_ACT_SHOT;
	}
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
