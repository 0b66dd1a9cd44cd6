/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_DELIVER_H
#define SLUICE_DELIVER_H

/* How packets leave a program: delivery to a pod, to the stack, or out of a device. */

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include <sluice/error.h>
#include <sluice/mark.h>
#include <sluice/node.h>
#include <sluice/packet.h>
#include <sluice/rewrite.h>

#define SL_PACKET_HOST 0 /* PACKET_HOST of linux/if_packet.h */

/*
 * Whether the packet must go through the stack, which answers with time exceeded or packet too
 * big, from the node's address and at its rate limit. A redirect checks neither the hop limit nor
 * the size.
 */
static __always_inline enum sl_reason needs_stack(struct __sk_buff *skb, const struct sl_packet *p,
						  const struct sl_endpoint *dst)
{
	__u32 len = 0;

	if (p->hops <= 1)
		return SL_REASON_STACK_TIME_EXCEEDED;
	if (likely(skb->len - ETH_HLEN <= dst->mtu))
		return SL_CONTINUE;
	/* for GSO packets, check the size of the segments, which only the kernel knows */
	if (skb->gso_size && !bpf_check_mtu(skb, dst->ifindex, &len, 0, BPF_MTU_CHK_SEGS))
		return SL_CONTINUE;
	return SL_REASON_STACK_TOO_BIG;
}

/* A frame up to the checksum of its IPv4 header. */
struct sl_head4 {
	struct sl_ethernet eth;
	__be16 head[4];
	__u8 ttl;
	__u8 protocol;
	__be16 check;
};
_Static_assert(sizeof(struct sl_head4) == 26, "as on the wire");

/*
 * Decrements the hop limit and replaces the Ethernet addresses. For IPv4 the sum over the header
 * does not change, so a hardware checksum over the whole packet (CHECKSUM_COMPLETE) stays valid.
 * For IPv6 the kernel has to recompute it.
 */
static __always_inline long forward4(struct __sk_buff *skb, const struct sl_endpoint *dst)
{
	struct sl_head4 head;
	__u32 check;

	if (read_packet(skb, 0, &head))
		return -1;
	__builtin_memcpy(head.eth.dst, dst->mac, ETH_ALEN);
	__builtin_memcpy(head.eth.src, dst->hmac, ETH_ALEN);
	/* RFC 1624: the high byte of the word is decremented */
	check = head.check;
	check += bpf_htons(0x0100);
	head.check = (__be16)(check + (check >= 0xffff));
	head.ttl--;
	return bpf_skb_store_bytes(skb, 0, &head, sizeof(head), 0);
}

static __always_inline long forward6(struct __sk_buff *skb, const struct sl_packet *p,
				     const struct sl_endpoint *dst)
{
	__u8 macs[2 * ETH_ALEN], hops = p->hops - 1;
	long err;

	__builtin_memcpy(macs, dst->mac, ETH_ALEN);
	__builtin_memcpy(macs + ETH_ALEN, dst->hmac, ETH_ALEN);
	err = bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, hop_limit), &hops,
				  sizeof(hops), BPF_F_RECOMPUTE_CSUM);
	if (err)
		return err;
	return bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0);
}

/* How packets get to the pod. */
static __always_inline enum sl_reason delivery_of(const struct sl_endpoint *dst)
{
	switch (dst->deliver) {
	case SL_DELIVER_PEER:
		return SL_REASON_FORWARDED_TO_POD;
	case SL_DELIVER_REDIRECT:
		return SL_REASON_FORWARDED_TO_POD_DEVICE;
	}
	return SL_REASON_DELIVERY_UNKNOWN;
}

/* Routes the packet to another local pod. */
static __always_inline enum sl_reason
deliver_local(struct __sk_buff *skb, const struct sl_packet *p, const struct sl_endpoint *dst)
{
	if (p->family == 4 ? forward4(skb, dst) : forward6(skb, p, dst))
		return SL_REASON_REWRITE_FAILED;
	return delivery_of(dst);
}

/*
 * Whether one of our programs has redirected the packet to this device, after evaluation and
 * counting. Such a packet entered by an endpoint's device, by the tunnel or by a proxy's device,
 * and its mark contains the index of this device.
 */
static __always_inline bool is_delivered(struct __sk_buff *skb)
{
	if (skb->mark != mark_evaluated(skb->ifindex))
		return false;
	return entered_by(skb) != SL_SLOT_NONE || is_tunnel(skb->ingress_ifindex) ||
	       is_of_proxy(skb->ingress_ifindex);
}

/* Delivers to the local pod dst, or passes the packet to the stack if the pod's packets must go
 * through it. */
static __always_inline enum sl_reason deliver_to(struct __sk_buff *skb, struct sl_packet *p,
						 __u32 *ifindex)
{
	struct sl_endpoint *dst = endpoint_at(p->dst_slot);
	enum sl_reason reason;

	if (!dst)
		return SL_REASON_NO_ROUTE;
	reason = needs_stack(skb, p, dst);
	if (reason)
		return reason;
	if (needs_rewrite(p) && rewrite_for_pod(skb, p))
		return SL_REASON_REWRITE_FAILED;
	*ifindex = dst->ifindex;
	return deliver_local(skb, p, dst);
}

/*
 * Passes a packet from another node to the stack: to the local host, or to a pod whose packets must
 * go through the stack. The destination MAC address may be the one of a device of the other node,
 * so the packet is declared to be for this host. The mark of the outer packet is replaced.
 */
static __always_inline int give_to_stack(struct __sk_buff *skb)
{
	skb->mark = SL_MARK_REMOTE;
	bpf_skb_change_type(skb, SL_PACKET_HOST);
	return TC_ACT_OK;
}

/*
 * Turns the reason into the action for the kernel. Marks, priorities and timestamps that one pod
 * has set must not reach another pod, but older kernels preserve them; so they are cleared.
 */
static __always_inline int act(struct __sk_buff *skb, enum sl_reason reason, __u32 ifindex)
{
	switch (reason) {
	case SL_REASON_FORWARDED_TO_POD:
		skb->mark = 0;
		skb->priority = 0;
		skb->tstamp = 0;
		return (int)bpf_redirect_peer(ifindex, 0);
	case SL_REASON_FORWARDED_TO_PROXY:
		skb->mark = 0;
		skb->priority = 0;
		skb->tstamp = 0;
		return (int)bpf_redirect(ifindex, 0);
	case SL_REASON_FORWARDED_TO_POD_DEVICE:
		skb->mark = mark_evaluated(ifindex);
		skb->priority = 0;
		skb->tstamp = 0;
		return (int)bpf_redirect(ifindex, 0);
	case SL_REASON_ANSWERED_ARP:
	case SL_REASON_ANSWERED_NDP:
	case SL_REASON_ANSWERED_TOO_BIG:
		skb->mark = mark_evaluated(skb->ifindex);
		return (int)bpf_redirect(skb->ifindex, 0);
	case SL_REASON_FORWARDED_TO_HOST:
	case SL_REASON_FORWARDED_OUTSIDE:
	case SL_REASON_STACK_TIME_EXCEEDED:
	case SL_REASON_STACK_TOO_BIG:
		skb->mark = SL_MARK_POD;
		skb->priority = 0;
		return TC_ACT_OK;
	case SL_REASON_FORWARDED_OVERLAY:
		skb->mark = SL_MARK_KEYED;
		skb->priority = 0;
		skb->tstamp = 0;
		return TC_ACT_REDIRECT;
	case SL_REASON_FORWARDED_NATIVE:
		skb->mark = 0;
		skb->priority = 0;
		skb->tstamp = 0;
		return TC_ACT_REDIRECT;
	case SL_REASON_FORWARDED_FROM_STACK:
		return TC_ACT_OK;
	default:
		return TC_ACT_SHOT;
	}
}

#endif
