/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_PEER_H
#define SLUICE_PEER_H

/*
 * Finds the peer of the device's pod: the destination of a packet from the pod, the source of a
 * packet to it. "known" is the identity that was found for an earlier packet of the connection, if
 * the peer's address still has that identity; 0: none.
 */

#include <sluice/arp.h>
#include <sluice/claim.h>
#include <sluice/conntrack.h>
#include <sluice/endpoint.h>
#include <sluice/node.h>
#include <sluice/policy.h>
#include <sluice/service.h>

static __always_inline enum sl_reason find_destination(struct sl_packet *p, __u32 known)
{
	struct sl_endpoint *dst;
	struct sl_ipcache where;

	p->dst_slot = slot_of_address(p->dst, p->family);
	if (p->dst_slot == SL_SLOT_HOST) {
		p->dst_identity = known ? known : SL_ID_HOST;
		return SL_CONTINUE;
	}
	if (p->dst_slot != SL_SLOT_NONE) {
		dst = endpoint_at(p->dst_slot);
		if (!dst)
			return SL_REASON_NO_ROUTE;
		p->dst_identity = identity_of(dst);
		return p->dst_slot == p->src_slot ? SL_REASON_HAIRPIN : SL_CONTINUE;
	}
	if (p->family == 4 && *(__be32 *)p->dst == SL_GATEWAY4)
		return SL_REASON_LINK_LOCAL;
	where = ipcache_of(p->dst, p->family);
	p->dst_identity = known ? known : where.identity;
	p->node = node_past_stack(&where);
	if (where.flags & SL_IP_POD_RANGE)
		return SL_REASON_NO_ROUTE;
	if (!cfg_services || SL_PROGRAM != SL_PROGRAM_FROM_POD || where.node || p->translated ||
	    !is_of_services(p->dst, p->family))
		return SL_CONTINUE;
	/* this address is the source of the answer */
	__builtin_memcpy(p->asked, p->dst, sizeof(p->asked));
	return SL_REASON_NO_SERVICE_PORT;
}

/*
 * Whether the uplink's program has redirected the packet to this pod for a service, from a device
 * address of another node. If so, the connection of the translated packet has a front. The caller
 * must have written the key.
 */
static __always_inline bool was_led(const struct sl_packet *p, const struct sl_ipcache *where)
{
	struct sl_ct *ct;

	if (!cfg_services || !(where->flags & SL_IP_OF_DEVICE))
		return false;
	ct = find_connection(p);
	return ct && front_of_connection(ct);
}

/*
 * Identifies the sender of a packet from the stack, within the limits of claim.h. A local pod is
 * identified by its device, and has the identity of its endpoint. A packet with a local pod's
 * address from any other device is forged.
 */
static __always_inline enum sl_reason find_stack_source(struct __sk_buff *skb, struct sl_packet *p,
							__u32 known)
{
	struct sl_ipcache where;
	struct sl_endpoint *src;

	if (p->src_slot == SL_SLOT_HOST && is_forwarded(skb, p)) {
		p->src_identity = world_of(p->family);
		return SL_CONTINUE;
	}
	if (p->src_slot == SL_SLOT_HOST || p->src_slot == SL_SLOT_NONE) {
		where = ipcache_of(p->src, p->family);
		p->src_identity = known ? known : where.identity;
		if (is_of_unknown_origin(skb, p))
			p->src_identity = world_of(p->family);
		if (!find_node_behind_stack(skb, p, &where))
			return SL_CONTINUE;
		if (!was_led(p, &where))
			return SL_REASON_SPOOFED_NODE;
		p->node = 0;
		return SL_CONTINUE;
	}
	src = endpoint_at(p->src_slot);
	if (!src || !is_from_pod(skb, p, p->src_slot))
		return SL_REASON_SPOOFED_IP;
	p->src_identity = identity_of(src);
	return SL_CONTINUE;
}

/*
 * Identifies the sender of a packet from an uplink, if it is a pod of another node, or another
 * node. All other packets are left to the stack, because they may need translation.
 */
static __noinline enum sl_reason find_uplink_source(struct sl_packet *p, __u32 known)
{
	struct sl_ipcache where = ipcache_of(p->src, p->family);

	if (where.flags & SL_IP_POD_RANGE)
		return SL_REASON_SPOOFED_IP;
	p->node = node_past_stack(&where);
	if (p->translated) {
		/* answers go through the stack, even answers to pods of other nodes */
		p->src_identity = known ? known : where.identity;
		if (cfg_native || !p->node)
			return SL_CONTINUE;
		/* pods of the node, and its overlay address, must use the tunnel */
		if (!(where.flags & SL_IP_OF_DEVICE))
			return SL_REASON_SPOOFED_NODE;
		p->node = 0;
		return SL_CONTINUE;
	}
	if (!p->node)
		return SL_REASON_FORWARDED_TO_STACK;
	p->src_identity = known ? known : where.identity;
	return SL_CONTINUE;
}

/* The sender of a packet that a proxy has held: a program has verified the sender before. */
static __always_inline enum sl_reason find_held_source(struct sl_packet *p, __u32 known)
{
	struct sl_ipcache where;

	if (!known) {
		where = ipcache_of(p->src, p->family);
		known = where.identity;
	}
	p->src_identity = known;
	return SL_CONTINUE;
}

static __always_inline enum sl_reason find_source(struct __sk_buff *skb, struct sl_packet *p,
						  __u32 known)
{
	p->src_slot = slot_of_address(p->src, p->family);
	if (SL_PROGRAM == SL_PROGRAM_TO_POD)
		return find_stack_source(skb, p, known);
	if (SL_PROGRAM == SL_PROGRAM_FROM_TAP)
		return find_held_source(p, known);
	/* a packet from another node or from outside with an address of this node is forged */
	if (p->src_slot != SL_SLOT_NONE)
		return SL_REASON_SPOOFED_IP;
	if (SL_FROM_TUNNEL)
		return find_tunnel_source(p);
	return find_uplink_source(p, known);
}

__noinline enum sl_reason find_peer(struct __sk_buff *skb, struct sl_packet *p, __u32 known)
{
	struct sl_endpoint *near;
	enum sl_reason reason;

	use_argument(skb);
	if (!p)
		return SL_REASON_MALFORMED;
	/* Read the identity again: the caller's value may be older than the address epochs. Epochs
	 * reveal a change of identity only if they are read before the identity. */
	near = endpoint_at(p->hook == SL_EGRESS ? p->src_slot : p->dst_slot);
	if (!near)
		return SL_REASON_NO_ENDPOINT;
	if (p->hook == SL_EGRESS)
		p->src_identity = identity_of(near);
	else
		p->dst_identity = identity_of(near);
	if (p->hook == SL_INGRESS)
		return find_source(skb, p, known);
	reason = find_destination(p, known);
	if (reason)
		return reason;
	return is_tunnel_packet(p) ? SL_REASON_TUNNEL_PORT : SL_CONTINUE;
}

#endif
