/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_NODE_H
#define SLUICE_NODE_H

/*
 * Other nodes: how to reach them, and which node a packet came from.
 *
 * If packets of a connection bypass the host stacks of both nodes, p->node and the connection's
 * entry have the ID of the remote node. If the stack of this node forwards a packet, p->node is 0,
 * even if the address belongs to another node.
 */

#include <sluice/claim.h>
#include <sluice/config.h>
#include <sluice/endpoint.h>
#include <sluice/maps.h>

static __always_inline struct sl_node *node_at(__u32 number)
{
	return bpf_map_lookup_elem(&sl_node, &number);
}

static __always_inline __u32 way_device(__u64 way)
{
	return (__u32)way;
}

static __always_inline __u32 way_mtu(__u64 way)
{
	return (__u16)(way >> 32);
}

static __always_inline __u32 way_flags(__u64 way)
{
	return (__u32)(way >> 48);
}

/* The next hop for packets of a family to the node, as in sl_node; 0: there is no route. */
static __always_inline __u64 way_to(const struct sl_node *node, __u8 family)
{
	return family == 4 ? READ_ONCE(node->way4) : READ_ONCE(node->way6);
}

/*
 * The next hop of this node's own packets: how they travel, and the tunnel device; 0: there are no
 * other nodes.
 */
static __always_inline __u64 local_way(void)
{
	struct sl_node *local = node_at(0);

	return local ? READ_ONCE(local->way4) : 0;
}

/*
 * Whether packets between pods of two nodes must go through the stack, so that the operator's
 * IPsec policies apply.
 */
static __always_inline bool is_native_by_stack(void)
{
	return cfg_native && way_flags(local_way()) & SL_WAY_STACK;
}

static __always_inline bool is_tunnel(__u32 ifindex)
{
	__u64 way = local_way();

	return way_flags(way) & SL_WAY_OVERLAY && way_device(way) == ifindex;
}

/* The node that has the address, if packets to it bypass the stack. */
static __always_inline __u16 node_past_stack(const struct sl_ipcache *where)
{
	if (!where->node || where->flags & SL_IP_BY_STACK)
		return 0;
	return local_way() ? where->node : 0;
}

/*
 * Whether an address of a node belongs to the node itself rather than to a pod. The identity of a
 * node's label set is node-local.
 */
static __always_inline bool is_node_identity(__u32 identity)
{
	return identity == SL_ID_REMOTE_NODE || identity == SL_ID_KUBE_APISERVER ||
	       identity >= SL_NODE_LOCAL;
}

/*
 * Whether the mark of a copied fragment shows that it entered the node where packets of other
 * nodes' pods enter: by the tunnel or, without a tunnel, by any device except the pods' devices.
 */
static __always_inline bool came_from_node(struct __sk_buff *skb, const struct sl_packet *p,
					   __u64 way)
{
	__u32 mark = skb->mark & SL_MARK_MASK;

	if (!is_copied(skb, p))
		return false;
	return mark == SL_MARK_REMOTE ||
	       (mark == SL_MARK_FORWARDED && !(way_flags(way) & SL_WAY_OVERLAY));
}

/*
 * Finds the node that a packet from the stack came from. A source address of that node's pods is
 * only accepted from the tunnel or, without a tunnel, from any device. The node's firewall drops
 * such source addresses elsewhere.
 */
static __always_inline enum sl_reason
find_node_behind_stack(struct __sk_buff *skb, struct sl_packet *p, const struct sl_ipcache *where)
{
	__u32 ifindex = skb->ingress_ifindex;
	__u64 way = local_way();

	p->node = node_past_stack(where);
	if (!p->node)
		return SL_CONTINUE;
	if (!ifindex)
		return came_from_node(skb, p, way) ? SL_CONTINUE : SL_REASON_SPOOFED_NODE;
	if (way_flags(way) & SL_WAY_OVERLAY && ifindex != way_device(way))
		return SL_REASON_SPOOFED_NODE;
	return SL_CONTINUE;
}

/* Identities that pods may have in a tunnel key. Senders with a reserved identity are checked
 * separately. */
#define SL_VNI_FIRST 256
#define SL_VNI_LAST 65535
#define SL_VNI_WORLD4 9
#define SL_VNI_WORLD6 10

/*
 * Identifies the sender of a packet from a tunnel: the identity in the VNI, if the source address
 * belongs to the sending node. The address need not be in the ipcache, because it is in a prefix
 * of the node. Addresses of the node itself send with the identity of the node, or of the world
 * if the node masquerades; pods cannot use these identities.
 */
static __always_inline enum sl_reason find_tunnel_source(struct sl_packet *p)
{
	struct sl_ipcache where = ipcache_of(p->src, p->family);
	bool of_node = is_node_identity(where.identity);

	if (!where.node || where.node != p->node)
		return SL_REASON_SPOOFED_NODE;
	if (p->vni >= SL_VNI_FIRST && p->vni <= SL_VNI_LAST && !of_node) {
		p->src_identity = p->vni;
		return SL_CONTINUE;
	}
	if (!of_node)
		return SL_REASON_SPOOFED_IDENTITY;
	switch (p->vni) {
	case SL_ID_REMOTE_NODE:
		p->src_identity = where.identity;
		return SL_CONTINUE;
	case SL_VNI_WORLD4:
	case SL_VNI_WORLD6:
		p->src_identity = world_of(p->family);
		return SL_CONTINUE;
	}
	return SL_REASON_SPOOFED_IDENTITY;
}

/* Whether the VNI matches the identity that the sender was evaluated as. */
static __always_inline bool vni_names(const struct sl_packet *p, __u32 identity)
{
	switch (p->vni) {
	case SL_ID_REMOTE_NODE:
		return is_node_identity(identity);
	case SL_VNI_WORLD4:
	case SL_VNI_WORLD6:
		return identity == world_of(p->family);
	}
	return p->vni == identity;
}

#endif
