/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * Packets from the network. With native routing, packets to pods of this node are evaluated here
 * and delivered. Requests from outside for a service are redirected to its backend, through the
 * stack. All other packets are left to the stack. Runs at the ingress hook of an uplink.
 */

#define SL_PROGRAM SL_PROGRAM_FROM_UPLINK

#include <sluice/admit.h>
#include <sluice/deliver.h>
#include <sluice/endpoint.h>
#include <sluice/ipv4.h>
#include <sluice/ipv6.h>
#include <sluice/observe.h>
#include <sluice/outside.h>
#include <sluice/redirect.h>

/* Reads only the destination, because most packets are not for a pod. */
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
 * Leaves fragments from other senders to the stack, beginning with the first one. If this program
 * handled the first fragment, it would drop later ones, because their ports are recorded in another
 * map.
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
	if (is_redirected(p))
		return give_to_proxy(skb, p, ifindex);
	return deliver_to(skb, p, ifindex);
}

static __always_inline enum sl_reason pass(struct __sk_buff *skb, struct sl_packet *p,
					   __u32 *ifindex)
{
	enum sl_reason reason;

	/* sluice_to_pod evaluates packets that the stack forwards */
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

/* Marks packets that are left to the stack as seen: with native routing, the node's firewall
 * drops unmarked packets with pod addresses. TC_ACT_UNSPEC lets other programs on the device run
 * after this one.
 */
static __always_inline int leave_to_stack(struct __sk_buff *skb, const struct sl_packet *p)
{
	if (cfg_native || p->translated)
		skb->mark = (skb->mark & ~SL_MARK_MASK) | SL_MARK_REMOTE;
	return TC_ACT_UNSPEC;
}

/* Leaves the packet to the stack. It is counted where the stack delivers it to the pod. */
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
	/* for another host, broadcast or multicast: routers neither forward nor answer these */
	if (skb->pkt_type != SL_PACKET_HOST)
		return TC_ACT_UNSPEC;
	p = new_packet(SL_INGRESS);
	if (!p)
		return TC_ACT_SHOT;
	/* tagged frames belong to VLAN devices on top of this one */
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
	case SL_REASON_FORWARDED_TO_PROXY:
	case SL_REASON_ANSWERED_TOO_BIG:
		return act(skb, reason, ifindex);
	default:
		return TC_ACT_SHOT;
	}
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
