/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_CLAIM_H
#define SLUICE_CLAIM_H

/*
 * Which sender a packet can be from, by facts that only the kernel provides. Every packet is
 * checked, the first of a connection and all later ones:
 *
 *   at the ingress hook of a pod's device   that pod: the device identifies it
 *   from the stack, entered by no device    the local host, or the owner of its source
 *                                           address, but never a local pod
 *   from the stack, entered by a device     a local pod only by the pod's own
 *                                           device, never the local host; a pod
 *                                           of another node as node.h has it
 *   from the stack, a copied fragment       by the firewall's mark, which tells the
 *                                           kind of device that it entered by;
 *                                           without that mark the world
 *   from a tunnel                           the identity in its key, of the node that
 *                                           sent it: see node.h
 *   from an uplink                          the owner of its source address, but never
 *                                           a pod or host of this node
 *
 * A packet's mark never identifies a sender. Any process with CAP_NET_RAW in the host's namespace
 * can set it (SO_MARK), rules that restore connection marks overwrite it, and a veth pair within
 * one namespace keeps it. The mark tells only two things: to the firewall rules that stop unseen
 * packets, that one of our programs has seen the packet; and to the programs, that the stack has
 * forwarded the packet. A process that sets SL_MARK_FORWARDED itself only loses the host's
 * identity.
 *
 * Copied fragments: when the stack refragments a packet, ip6_fragment (and ip_fragment before
 * Linux 5.1) does not copy skb_iif, so ingress_ifindex is 0. Such a fragment has no socket
 * either, because the stack removes the socket from every packet that it receives; fragments of a
 * local socket's packet keep the socket. The mark counts only for copied fragments, because a
 * whole packet never loses its device.
 */

#include <sluice/endpoint.h>
#include <sluice/mark.h>
#include <sluice/packet.h>

/* The endpoint by whose device a packet from the stack entered the node. */
static __always_inline __u16 entered_by(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ingress_ifindex;
	__u32 *slot;

	if (!ifindex)
		return SL_SLOT_NONE;
	slot = bpf_map_lookup_elem(&sl_if, &ifindex);
	return slot ? (__u16)*slot : SL_SLOT_NONE;
}

/* Whether the packet is a fragment that the stack has copied: see above. */
static __always_inline bool is_copied(struct __sk_buff *skb, const struct sl_packet *p)
{
	return !skb->ingress_ifindex && (p->fragment || p->more_fragments) && !skb->sk;
}

/* Whether the origin of a copied fragment is unknown: its mark was never written, or was removed.
 */
static __always_inline bool is_of_unknown_origin(struct __sk_buff *skb, const struct sl_packet *p)
{
	return is_copied(skb, p) && !(skb->mark & SL_MARK_MASK);
}

/*
 * Whether the stack has forwarded the packet. A copied fragment was always forwarded, whatever
 * its mark. A whole packet without a device is from the host even without a socket: the kernel
 * itself sends resets and SYN cookies.
 */
static __always_inline bool is_forwarded(struct __sk_buff *skb, const struct sl_packet *p)
{
	return skb->ingress_ifindex || (skb->mark & SL_MARK_MASK) == SL_MARK_FORWARDED ||
	       is_copied(skb, p);
}

/*
 * Whether a packet from the stack entered the node by the device of the endpoint at slot. For a
 * copied fragment, the mark only tells that it entered by the device of some pod. That is enough,
 * because sluice_from_pod has checked its source address against that device.
 */
static __always_inline bool is_from_pod(struct __sk_buff *skb, const struct sl_packet *p,
					__u16 slot)
{
	__u32 mark = skb->mark & SL_MARK_MASK;

	if (skb->ingress_ifindex)
		return entered_by(skb) == slot;
	return (mark == SL_MARK_POD || mark == SL_MARK_LOCAL) && is_copied(skb, p);
}

/* The identity of forwarded packets whose source is an address of the local host: the world. */
static __always_inline __u32 world_of(__u8 family)
{
	return family == 4 ? cfg_world4 : cfg_world6;
}

/*
 * Whether the packet can be from the sender that its connection records: an endpoint, the local
 * host or, with the identity of the world, an outside sender whose packets the host masquerades.
 */
static __always_inline bool may_be_from(struct __sk_buff *skb, const struct sl_packet *p,
					__u16 slot, __u32 identity)
{
	if (p->hook == SL_EGRESS)
		return true;
	if (slot == SL_SLOT_NONE)
		return SL_PROGRAM != SL_PROGRAM_TO_POD || identity == world_of(p->family) ||
		       !is_of_unknown_origin(skb, p);
	if (slot == SL_SLOT_HOST)
		return is_forwarded(skb, p) == (identity == world_of(p->family));
	return is_from_pod(skb, p, slot);
}

#endif
