/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_OUTSIDE_H
#define SLUICE_OUTSIDE_H

/*
 * Services that are asked from outside of the node: by node ports, external
 * addresses and those of load balancers. Pods of other nodes come in the tunnel where
 * their packets are not masqueraded.
 *
 * The uplink's ingress hook changes destinations and its egress hook changes sources,
 * so that the stack between them sees the two ends that speak to each other: the sender
 * and the backend. It takes neither for an address of its own, and a firewall that
 * tracks connections sees a plain one. A packet goes from the ingress hook by the
 * stack, and so do the answers: SL_CT_VIA_STACK. transit.h has what is done besides where
 * the backend is no pod of this node.
 */

#include <sluice/admit.h>
#include <sluice/cut.h>
#include <sluice/deliver.h>
#include <sluice/refuse.h>
#include <sluice/remote.h>
#include <sluice/restore.h>
#include <sluice/rewrite.h>
#include <sluice/transit.h>

/*
 * The stack's own errors would quote the backend, of which the sender knows nothing:
 * they are sent here, in the service's name. SL_CONTINUE: the packet goes on.
 */
static __always_inline enum sl_reason
answer_in_its_place(struct __sk_buff *skb, struct sl_packet *p, enum sl_reason reason)
{
	__u32 kind = SL_ANSWER_TIME_EXCEEDED;

	/* what came in a tunnel cannot be sent back: the stack answers */
	if (!reason || SL_PROGRAM == SL_PROGRAM_FROM_OVERLAY)
		return SL_CONTINUE;
	if (reason == SL_REASON_STACK_TOO_BIG) {
		if (may_be_cut(skb, p))
			return SL_CONTINUE;
		kind = SL_ANSWER_TOO_BIG;
	}
	return answer_sender(skb, p, kind) ? SL_REASON_REWRITE_FAILED : SL_REASON_ANSWERED_TOO_BIG;
}

/*
 * A packet of which was found out whether it may pass ("reason") goes on to its backend,
 * unless something keeps it from the way there ("obstacle").
 */
static __always_inline enum sl_reason forward_to_backend(struct __sk_buff *skb, struct sl_packet *p,
							 enum sl_reason reason,
							 enum sl_reason obstacle)
{
	if (leads_fragments(p))
		lead_fragments(p, reason ? SL_LEAD_NONE : SL_LEAD_ON);
	if (reason)
		return reason;
	if (p->untold)
		store_translation(p);
	reason = answer_in_its_place(skb, p, obstacle);
	if (reason)
		return reason;
	return rewrite(skb, p) ? SL_REASON_REWRITE_FAILED : SL_REASON_FORWARDED_TO_STACK;
}

/* To a backend that is a pod of this node. */
static __always_inline enum sl_reason forward_to_pod(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_endpoint *dst = endpoint_at(p->dst_slot);
	enum sl_reason reason;

	if (!dst)
		return SL_REASON_NO_ROUTE;
	p->dst_identity = identity_of(dst);
	reason = admit(skb, p);
	p->answer_mtu = dst->mtu;
	return forward_to_backend(skb, p, reason, needs_stack(skb, p, dst));
}

/* What keeps the packet from the way to its backend, as far as the stack's routes do not
 * say it.
 */
static __always_inline enum sl_reason obstacle_to_node(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_node *node = p->node ? node_at(p->node) : NULL;
	__u64 way = node ? way_to(node, p->family) : 0;

	if (p->dst_slot == SL_SLOT_HOST)
		return SL_CONTINUE;
	if (!way)
		return p->hops <= 1 ? SL_REASON_STACK_TIME_EXCEEDED : SL_CONTINUE;
	p->answer_mtu = (__u16)way_mtu(way);
	return remote_needs_stack(skb, p, way);
}

/* To a backend that is no pod of this node: another node's, or a socket of this one. */
static __always_inline enum sl_reason forward_to_remote_backend(struct __sk_buff *skb,
								struct sl_packet *p)
{
	struct sl_ipcache where = ipcache_of(p->dst, p->family);
	enum sl_reason reason;

	if (where.flags & SL_IP_POD_RANGE && p->dst_slot == SL_SLOT_NONE)
		return SL_REASON_NO_ROUTE;
	p->dst_identity = p->dst_slot == SL_SLOT_HOST ? SL_ID_HOST : where.identity;
	/* whoever may name backends could have this node send what others believe */
	if (is_tunnel_packet(p))
		return SL_REASON_TUNNEL_PORT;
	reason = find_source(skb, p, 0);
	if (reason)
		return reason;
	p->node = p->dst_slot == SL_SLOT_HOST ? 0 : node_past_stack(&where);
	reason = follow_transit(p);
	return forward_to_backend(skb, p, reason, obstacle_to_node(skb, p));
}

/* The first headers of a UDP packet without options. */
struct sl_udp4 {
	struct sl_ethernet eth;
	struct iphdr ip;
	__be16 sport;
	__be16 dport;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct sl_udp4) == 38, "as on the wire");

struct sl_udp6 {
	struct sl_ethernet eth;
	struct ipv6hdr ip;
	__be16 sport;
	__be16 dport;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct sl_udp6) == 58, "as on the wire");

/*
 * Whether the frame has a packet of the tunnel, which is of no service. Most packets
 * between nodes are: they are not looked at any further. One whose headers are longer, or
 * lie elsewhere, is found by is_of_tunnel.
 */
static __always_inline bool is_outer(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct sl_udp4 *four = data;
	struct sl_udp6 *six = data;

	if (data + sizeof(*four) > end)
		return false;
	if (four->eth.type == bpf_htons(ETH_P_IP))
		return four->ip.ihl == 5 && four->ip.protocol == SL_UDP &&
		       !(four->ip.frag_off & bpf_htons(SL_IP4_OFFSET)) &&
		       is_tunnel_port(bpf_ntohs(four->dport));
	return four->eth.type == bpf_htons(ETH_P_IPV6) && data + sizeof(*six) <= end &&
	       six->ip.nexthdr == SL_UDP && is_tunnel_port(bpf_ntohs(six->dport));
}

static __always_inline bool is_of_tunnel(const struct sl_packet *p)
{
	return p->proto == SL_UDP && is_tunnel_port(p->dport);
}

/*
 * What becomes of a packet that asks for no service. Neighbours may look for an address
 * of services, which this or another machine has announced.
 */
static __always_inline enum sl_reason forward_non_service(struct __sk_buff *skb,
							  struct sl_packet *p)
{
	struct sl_ipcache where;

	/* a node port may lie among those that answers come to */
	if (has_no_nat_entry(skb, p))
		return SL_REASON_CONNECTION_INVALID;
	if (p->dst_slot != SL_SLOT_NONE || is_ndp(p) || !is_of_services(p->dst, p->family))
		return SL_REASON_FORWARDED_TO_STACK;
	where = ipcache_of(p->dst, p->family);
	return where.node ? SL_REASON_FORWARDED_TO_STACK : SL_REASON_NO_SERVICE_PORT;
}

/*
 * Leads a packet that comes from outside to the backend of the service that it asks
 * for. SL_REASON_FORWARDED_TO_STACK with p->translated says that it was led there, and without,
 * that it asks for none.
 */
static __always_inline enum sl_reason handle_nodeport(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;

	/* The tunnel's own packets are most of all, and are never a service's. A piece
	 * follows its first one.
	 */
	if (is_of_tunnel(p) || follow_fragments(p))
		return SL_REASON_FORWARDED_TO_STACK;
	p->dst_slot = slot_of_address(p->dst, p->family);
	reason = restore_destination(skb, p);
	if (reason)
		return reason;
	reason = find_service(skb, p);
	if (!p->translated && !reason)
		return forward_non_service(skb, p);
	if (reason)
		return reason;
	if (!p->unknown) /* else zone_to_backend has looked */
		p->dst_slot = slot_of_address(p->dst, p->family);
	if (p->dst_slot == SL_SLOT_NONE || p->dst_slot == SL_SLOT_HOST)
		return forward_to_remote_backend(skb, p);
	return forward_to_pod(skb, p);
}

/*
 * Has the answer of a pod to a sender outside come from what that has asked for, where
 * it leaves the node. SL_CONTINUE: it is none.
 */
static __always_inline enum sl_reason answer_outside(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_ct *ct;

	if (follow_fragments(p))
		return SL_CONTINUE;
	if (is_error(p))
		return translate_error(skb, p);
	ct = find_known(p);
	if (!ct || !is_reply(p, ct))
		return SL_CONTINUE;
	p->front = front_of_connection(ct);
	if (!p->front)
		return SL_CONTINUE;
	p->asked_at = asked_of_connection(ct);
	p->reply = 1;
	if (leads_fragments(p))
		lead_fragments(p, SL_LEAD_ON);
	return rewrite(skb, p) ? SL_REASON_REWRITE_FAILED : SL_REASON_FORWARDED_TO_STACK;
}

/*
 * Tells the sender of a packet in transit that there is no source for the way to its
 * backend, where the packet leaves for that; returns what the kernel shall do. The frame
 * asks for the service again, is turned round, and goes out by the device that it has come
 * by. What came in a tunnel cannot be sent back, and an error is not answered.
 */
static __always_inline int refuse_in_transit(struct __sk_buff *skb, struct sl_packet *p)
{
	__u32 ifindex = skb->ingress_ifindex;
	struct sl_end to = {};

	if (!ifindex || is_tunnel(ifindex) || is_error(p) || find_asked(p, &to) ||
	    rewrite_end(skb, p, &to))
		return TC_ACT_SHOT;
	__builtin_memcpy(p->asked, to.addr, sizeof(p->asked));
	if (answer_sender(skb, p, SL_ANSWER_REFUSED))
		return TC_ACT_SHOT;
	skb->mark = mark_evaluated(ifindex);
	return (int)bpf_redirect_neigh((int)ifindex, NULL, 0, 0);
}

#endif
