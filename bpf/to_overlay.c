/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * Packets that leave through the tunnel. Packets that sluice_from_pod has sent there have their
 * key already; packets from the host's stack get one here. The device drops packets without a
 * key. Runs at the egress hook of the tunnel device.
 */

#define SL_PROGRAM SL_PROGRAM_TO_OVERLAY

#include <sluice/admit.h>
#include <sluice/asked.h>
#include <sluice/deliver.h>
#include <sluice/endpoint.h>
#include <sluice/ipv4.h>
#include <sluice/ipv6.h>
#include <sluice/ndp.h>
#include <sluice/observe.h>
#include <sluice/outside.h>
#include <sluice/redirect.h>
#include <sluice/remote.h>

/*
 * Handles packets from outside: a request of an outside client that a service forwards to a pod of
 * another node gets an address of this node as source. An answer to another node's pod that has
 * requested such a service gets the requested address. All other packets from outside are dropped.
 */
static __always_inline enum sl_reason find_sender_outside(struct __sk_buff *skb,
							  struct sl_packet *p, __u32 *identity)
{
	enum sl_reason reason = cfg_services ? translate_source(skb, p) : SL_CONTINUE;

	if (!reason)
		return SL_REASON_TRANSIT;
	if (reason != SL_REASON_FORWARDED_TO_STACK)
		return reason;
	if (READ_ONCE(p->reply)) {
		*identity = SL_ID_REMOTE_NODE;
		p->src_identity = SL_ID_HOST;
		return SL_CONTINUE;
	}
	*identity = p->family == 4 ? SL_VNI_WORLD4 : SL_VNI_WORLD6;
	p->src_identity = world_of(p->family);
	return SL_CONTINUE;
}

/* A local pod's answer to a pod of another node that has requested a service of this node. */
static __always_inline enum sl_reason find_service_sender(struct __sk_buff *skb,
							  struct sl_packet *p, __u32 *identity)
{
	enum sl_reason reason = cfg_services ? answer_outside(skb, p) : SL_CONTINUE;

	if (reason != SL_REASON_FORWARDED_TO_STACK)
		return reason;
	*identity = SL_ID_REMOTE_NODE;
	return SL_CONTINUE;
}

/* Replaces the source of a host's datagram, and of its later fragments, by the address that the
 * pod had requested.
 */
static __always_inline enum sl_reason answer_pod(struct __sk_buff *skb, struct sl_packet *p)
{
	if (p->proto != SL_UDP || follow_fragments(p) || !may_answer_pod(skb, p))
		return SL_CONTINUE;
	answer_from_asked(p);
	if (!p->readdressed)
		return SL_CONTINUE;
	if (leads_fragments(p))
		lead_fragments(p, SL_LEAD_ON);
	return rewrite_readdressed(skb, p) ? SL_REASON_REWRITE_FAILED : SL_CONTINUE;
}

/* Translates the source of a host's packet: a socket of the node may be the backend of a service
 * that a pod of another node has requested here.
 */
static __always_inline enum sl_reason answer_of_host(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;

	if (cfg_services && !is_forwarded(skb, p) &&
	    (p->fragment || is_error(p) || may_have_port(SL_COUNT_ANSWERED, p->sport))) {
		reason = translate_source(skb, p);
		if (reason)
			return reason == SL_REASON_FORWARDED_TO_STACK ? SL_CONTINUE : reason;
	}
	return answer_pod(skb, p);
}

/*
 * Identifies the sender: a local pod, whose packet has entered by its own device; the host; or
 * the world, masqueraded behind an address of the node.
 */
static __always_inline enum sl_reason find_sender(struct __sk_buff *skb, struct sl_packet *p,
						  __u32 *identity)
{
	struct sl_endpoint *src;

	p->src_slot = slot_of_address(p->src, p->family);
	if (p->src_slot == SL_SLOT_NONE)
		return find_sender_outside(skb, p, identity);
	if (p->src_slot == SL_SLOT_HOST) {
		*identity = SL_ID_REMOTE_NODE;
		p->src_identity = SL_ID_HOST;
		if (is_forwarded(skb, p)) {
			*identity = p->family == 4 ? SL_VNI_WORLD4 : SL_VNI_WORLD6;
			p->src_identity = world_of(p->family);
		}
		return answer_of_host(skb, p);
	}
	src = endpoint_at(p->src_slot);
	if (!src || !is_from_pod(skb, p, p->src_slot))
		return SL_REASON_SPOOFED_IP;
	p->src_identity = identity_of(src);
	return find_service_sender(skb, p, identity);
}

static __always_inline enum sl_reason pass(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;
	struct sl_ipcache where;
	struct sl_node *node;
	__u32 identity = 0;
	__u64 way;

	reason = find_sender(skb, p, &identity);
	if (reason)
		return reason;
	if (identity) {
		where = ipcache_of(p->dst, p->family);
		p->dst_identity = where.identity;
		p->node = where.node;
	} else {
		/* the stack may have translated the source */
		reason = admit_behind_stack(skb, p);
		if (reason)
			return reason;
		if (is_redirected(p) && !was_held(skb, p))
			return SL_REASON_NO_PROXY;
		identity = p->src_identity;
	}
	node = p->node ? node_at(p->node) : NULL;
	if (!node)
		return SL_REASON_NO_NODE;
	way = way_to(node, p->family);
	if (!(way_flags(way) & SL_WAY_OVERLAY))
		return SL_REASON_NO_NODE;
	return set_tunnel_key(skb, p, identity, way_flags(way));
}

static __always_inline enum sl_reason to_overlay4(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason = parse_ip4(skb, p);

	if (reason)
		return reason;
	reason = check_ip4_destination(p);
	if (reason)
		return reason;
	return pass(skb, p);
}

static __always_inline enum sl_reason to_overlay6(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason = parse_ip6(skb, p);

	if (reason)
		return reason;
	reason = check_ip6_destination(p);
	if (reason)
		return reason;
	if (is_ndp(p))
		return SL_REASON_NDP;
	return pass(skb, p);
}

SEC("tc") int sluice_to_overlay(struct __sk_buff *skb)
{
	enum sl_reason reason;
	struct sl_packet *p;

	/* no later program reads the mark */
	if (skb->mark == SL_MARK_KEYED) {
		skb->mark = 0;
		return TC_ACT_OK;
	}
	p = new_packet(SL_EGRESS);
	if (!p)
		return TC_ACT_SHOT;
	reason = parse_ethernet(skb, p);
	if (!reason) {
		switch (p->ethertype) {
		case ETH_P_IP:
			reason = to_overlay4(skb, p);
			break;
		case ETH_P_IPV6:
			reason = to_overlay6(skb, p);
			break;
		default:
			reason = SL_REASON_ARP;
		}
	}
	observe(skb, p, reason);
	if (is_refusal(reason))
		return refuse_in_transit(skb, p);
	if (reason != SL_REASON_FORWARDED_OVERLAY)
		return TC_ACT_SHOT;
	skb->mark = 0;
	return TC_ACT_OK;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
