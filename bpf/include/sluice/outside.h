/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_OUTSIDE_H
#define SLUICE_OUTSIDE_H

/*
 * Services for clients outside the node: node ports, external addresses and load balancer
 * addresses. Packets of other nodes' pods arrive through the tunnel if they are not masqueraded.
 *
 * The uplink's ingress hook changes destinations, and its egress hook changes sources. The stack
 * between them sees the real ends, the client and the backend. So it takes neither for a local
 * address, and a firewall with connection tracking sees an ordinary connection. Requests and
 * answers both go through the stack: SL_CT_VIA_STACK. transit.h adds what is needed if the backend
 * is not a pod of this node.
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
 * Sends ICMP errors on behalf of the service. The stack's own errors would quote the backend,
 * which the client does not know. SL_CONTINUE: no error is needed.
 */
static __always_inline enum sl_reason
answer_in_its_place(struct __sk_buff *skb, struct sl_packet *p, enum sl_reason reason)
{
	__u32 kind = SL_ANSWER_TIME_EXCEEDED;

	/* a packet from a tunnel cannot be sent back: the stack answers */
	if (!reason || SL_FROM_TUNNEL)
		return SL_CONTINUE;
	if (reason == SL_REASON_STACK_TOO_BIG) {
		if (may_be_cut(skb, p))
			return SL_CONTINUE;
		kind = SL_ANSWER_TOO_BIG;
	}
	return answer_sender(skb, p, kind) ? SL_REASON_REWRITE_FAILED : SL_REASON_ANSWERED_TOO_BIG;
}

/*
 * Sends an already evaluated packet ("reason") on to its backend. If the path requires an ICMP
 * error ("obstacle"), sends that error instead.
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

/* Forwards to a backend that is a pod of this node. */
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

/* Why the packet cannot reach its backend, apart from reasons that only the stack's routes know. */
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

/* Forwards to a backend that is not a pod of this node: on another node, or a socket of this
 * node.
 */
static __always_inline enum sl_reason forward_to_remote_backend(struct __sk_buff *skb,
								struct sl_packet *p)
{
	struct sl_ipcache where = ipcache_of(p->dst, p->family);
	enum sl_reason reason;

	if (where.flags & SL_IP_POD_RANGE && p->dst_slot == SL_SLOT_NONE)
		return SL_REASON_NO_ROUTE;
	p->dst_identity = p->dst_slot == SL_SLOT_HOST ? SL_ID_HOST : where.identity;
	/* Otherwise a user who may define backends could make this node send tunnel packets that
	 * other nodes trust. */
	if (is_tunnel_packet(p))
		return SL_REASON_TUNNEL_PORT;
	reason = find_source(skb, p, 0);
	if (reason)
		return reason;
	p->node = p->dst_slot == SL_SLOT_HOST ? 0 : node_past_stack(&where);
	reason = follow_transit(p);
	return forward_to_backend(skb, p, reason, obstacle_to_node(skb, p));
}

/* The first headers of a UDP packet without IP options. */
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
 * Whether the frame contains an outer packet of the tunnel, which never belongs to a service. This
 * fast check recognises most of them. is_of_tunnel recognises outer packets with longer headers, or
 * with headers outside the linear part.
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
 * Handles a packet that is not a request to a service. ARP and neighbour discovery must work for a
 * service address that this or another machine announces.
 */
static __always_inline enum sl_reason forward_non_service(struct __sk_buff *skb,
							  struct sl_packet *p)
{
	struct sl_ipcache where;

	if (may_have_port(SL_COUNT_ANSWERED, p->dport))
		leave_transit(p);
	/* a node port may lie in the range of ports that answers are sent to */
	if (has_no_nat_entry(skb, p))
		return SL_REASON_CONNECTION_INVALID;
	if (p->dst_slot != SL_SLOT_NONE || is_ndp(p) || !is_of_services(p->dst, p->family))
		return SL_REASON_FORWARDED_TO_STACK;
	where = ipcache_of(p->dst, p->family);
	return where.node ? SL_REASON_FORWARDED_TO_STACK : SL_REASON_NO_SERVICE_PORT;
}

/*
 * Redirects a packet from outside to the backend of the service that it requests.
 * SL_REASON_FORWARDED_TO_STACK with p->translated: it was redirected. Without p->translated: it
 * does not request a service.
 */
static __always_inline enum sl_reason handle_nodeport(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;

	/* Outer packets of the tunnel are the majority of packets, and never belong to a service. A
	 * later fragment takes the path of the first fragment. */
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
	if (!p->unknown) /* otherwise set by zone_to_backend */
		p->dst_slot = slot_of_address(p->dst, p->family);
	if (p->dst_slot == SL_SLOT_NONE || p->dst_slot == SL_SLOT_HOST)
		return forward_to_remote_backend(skb, p);
	return forward_to_pod(skb, p);
}

/*
 * Translates the source of a pod's answer to an outside client, where it leaves the node, to the
 * address that the client had requested. SL_CONTINUE: the packet is not such an answer.
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
 * Refuses a packet in transit, where it leaves the node, because there is no source address or
 * port for the path to its backend. Returns the action for the kernel. The original destination
 * is restored, the frame is turned into an answer, and goes out by the device that it came from.
 * A packet from a tunnel cannot be sent back, and an error is not answered.
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
