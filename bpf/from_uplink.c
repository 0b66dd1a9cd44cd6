/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * What comes from the network. Where packets of pods travel between the nodes as
 * they are, those to pods of this node are evaluated here and delivered. Packets
 * that ask for a service from outside are led to its backend, by the stack.
 * Everything else is the stack's. Runs at the ingress hook of an uplink.
 */

#define SL_PROGRAM SL_PROGRAM_FROM_UPLINK

#include <sluice/admit.h>
#include <sluice/deliver.h>
#include <sluice/endpoint.h>
#include <sluice/ipv4.h>
#include <sluice/ipv6.h>
#include <sluice/observe.h>
#include <sluice/outside.h>

/* Reads the destination alone: most of what comes is for no pod. */
static __always_inline bool is_for_pod(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_endpoint *dst;

	if (p->ethertype == ETH_P_IP) {
		__be32 addr;

		if (read_packet(skb, ETH_HLEN + offsetof(struct iphdr, daddr), &addr))
			return false;
		*(__be32 *)p->dst = addr;
		p->family = 4;
	} else {
		struct sl_addr6 addr;

		if (read_packet(skb, ETH_HLEN + offsetof(struct ipv6hdr, daddr), &addr))
			return false;
		__builtin_memcpy(p->dst, addr.addr, sizeof(p->dst));
		p->family = 6;
	}
	p->dst_slot = slot_of_address(p->dst, p->family);
	if (p->dst_slot == SL_SLOT_NONE || p->dst_slot == SL_SLOT_HOST)
		return false;
	dst = endpoint_at(p->dst_slot);
	if (!dst)
		return false;
	p->dst_identity = identity_of(dst);
	return true;
}

/*
 * Fragments of other senders are the stack's from the first one on: none of
 * them may be missed here because the ports were left behind elsewhere.
 */
static __always_inline enum sl_reason check_fragment(const struct sl_packet *p)
{
	struct sl_ipcache where;

	if (likely(!p->fragment && !p->more_fragments))
		return SL_CONTINUE;
	where = ipcache_of(p->src, p->family);
	return node_past_stack(&where) ? SL_CONTINUE : SL_REASON_FORWARDED_TO_STACK;
}

static __always_inline enum sl_reason admit_and_deliver(struct __sk_buff *skb, struct sl_packet *p,
							__u32 *ifindex)
{
	enum sl_reason reason = admit_piece(skb, p);

	if (reason)
		return reason;
	if (p->via_stack || p->by_stack)
		return SL_REASON_FORWARDED_TO_STACK;
	return deliver_to(skb, p, ifindex);
}

static __always_inline enum sl_reason pass(struct __sk_buff *skb, struct sl_packet *p,
					   __u32 *ifindex)
{
	enum sl_reason reason;

	/* sluice_to_pod evaluates what the stack forwards */
	if (is_native_by_stack())
		return SL_REASON_FORWARDED_TO_STACK;
	reason = check_fragment(p);
	if (reason)
		return reason;
	reason = admit_and_deliver(skb, p, ifindex);
	if (leads_fragments(p))
		lead_fragments(p, lead_of(reason));
	return reason;
}

static __always_inline enum sl_reason parse(struct __sk_buff *skb, struct sl_packet *p)
{
	return p->ethertype == ETH_P_IP ? parse_ip4(skb, p) : parse_ip6(skb, p);
}

/* What is left to the stack has been looked at: the node's firewall stops pods'
 * addresses that have not, where packets of pods come this way. Others' programs on
 * the device run after this one.
 */
static __always_inline int leave_to_stack(struct __sk_buff *skb, const struct sl_packet *p)
{
	if (cfg_native || p->translated)
		skb->mark = (skb->mark & ~SL_MARK_MASK) | SL_MARK_REMOTE;
	return TC_ACT_UNSPEC;
}

/* Gives the packet to the stack, and counts it where that gives it to the pod. */
static __always_inline int give_away(struct __sk_buff *skb, const struct sl_packet *p)
{
	if (p->translated)
		tell(skb, p, SL_REASON_FORWARDED_TO_STACK);
	return leave_to_stack(skb, p);
}

SEC("tc") int sluice_from_uplink(struct __sk_buff *skb)
{
	enum sl_reason reason;
	struct sl_packet *p;
	__u32 ifindex = 0;
	bool pod;

	if (!cfg_native && is_outer(skb))
		return TC_ACT_UNSPEC;
	/* sent to another machine, or to all: a router forwards neither, and answers neither */
	if (skb->pkt_type != SL_PACKET_HOST)
		return TC_ACT_UNSPEC;
	p = new_packet(SL_INGRESS);
	if (!p)
		return TC_ACT_SHOT;
	/* tagged frames are those of devices above this one */
	if (parse_ethernet(skb, p) || p->ethertype == ETH_P_ARP)
		return TC_ACT_UNSPEC;
	pod = cfg_native && is_for_pod(skb, p);
	if (!pod && !cfg_services)
		return leave_to_stack(skb, p);
	reason = parse(skb, p);
	if (pod)
		reason = reason ? reason : pass(skb, p, &ifindex);
	else
		reason = reason ? SL_REASON_FORWARDED_TO_STACK : handle_nodeport(skb, p);
	if (reason == SL_REASON_FORWARDED_TO_STACK)
		return give_away(skb, p);
	observe(skb, p, reason);
	if (!pod && is_refusal(reason) && !answer_sender(skb, p, SL_ANSWER_REFUSED))
		return act(skb, SL_REASON_ANSWERED_TOO_BIG, 0);
	switch (reason) {
	case SL_REASON_STACK_TIME_EXCEEDED:
	case SL_REASON_STACK_TOO_BIG:
		return leave_to_stack(skb, p);
	case SL_REASON_FORWARDED_TO_POD:
	case SL_REASON_FORWARDED_TO_POD_DEVICE:
	case SL_REASON_ANSWERED_TOO_BIG:
		return act(skb, reason, ifindex);
	default:
		return TC_ACT_SHOT;
	}
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
