/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_CLAIM_H
#define SLUICE_CLAIM_H

/*
 * Who may have sent a packet, by what only the kernel can say. Every packet is
 * held against it, the first of a connection and every later one:
 *
 *   at the ingress hook of a pod's device   that pod: the device says so
 *   from the stack, entered by no device    the local host, or whom its source
 *                                           address names, but never a local pod
 *   from the stack, entered by a device     a local pod only by the pod's own
 *                                           device, never the local host; a pod
 *                                           of another node as node.h has it
 *   from the stack, a copied fragment       as the mark of the firewall says by
 *                                           which kind of device it entered;
 *                                           without that mark the world
 *   from a tunnel                           whom its key names, of the node that
 *                                           sent it: see node.h
 *   from an uplink                          whom its source address names, but
 *                                           nobody of this node
 *
 * The mark of a packet names no sender. Any process with CAP_NET_RAW in the node's
 * namespace can set it (SO_MARK), rules that restore connection marks replace
 * it, and a pair of devices within one namespace carries it along. It says that
 * a program of ours has seen the packet, to the rules that stop what none has,
 * and that the stack has forwarded it: a process that sets SL_MARK_FORWARDED itself
 * only loses the identity of the host.
 *
 * Copied fragments: when the stack cuts a packet into new fragments, ip6_fragment (and
 * ip_fragment before Linux 5.1) leaves skb_iif out, so ingress_ifindex is 0. Such a
 * fragment has no socket either, because the stack takes the socket off every packet
 * that it receives, and fragments of a local socket's packet keep the socket. The mark
 * counts only for these: a whole packet never loses its device.
 */

#include <sluice/endpoint.h>
#include <sluice/mark.h>
#include <sluice/packet.h>

/* The endpoint by whose device a packet that the stack sends has entered. */
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

/* Whether nothing says where a copied fragment came from: its mark was not written, or
 * was removed.
 */
static __always_inline bool is_of_unknown_origin(struct __sk_buff *skb, const struct sl_packet *p)
{
	return is_copied(skb, p) && !(skb->mark & SL_MARK_MASK);
}

/*
 * Whether the stack has forwarded the packet. A copied fragment was forwarded whatever
 * its mark is. A whole packet without a device is the host's also without a socket: the
 * kernel sends resets and SYN cookies by itself.
 */
static __always_inline bool is_forwarded(struct __sk_buff *skb, const struct sl_packet *p)
{
	return skb->ingress_ifindex || (skb->mark & SL_MARK_MASK) == SL_MARK_FORWARDED ||
	       is_copied(skb, p);
}

/*
 * Whether a packet from the stack entered by the device of the endpoint at slot. The
 * mark of a copied fragment says that it entered by the device of some pod, and
 * sluice_from_pod has held its source address against that device.
 */
static __always_inline bool is_from_pod(struct __sk_buff *skb, const struct sl_packet *p,
					__u16 slot)
{
	__u32 mark = skb->mark & SL_MARK_MASK;

	if (skb->ingress_ifindex)
		return entered_by(skb) == slot;
	return (mark == SL_MARK_POD || mark == SL_MARK_LOCAL) && is_copied(skb, p);
}

/* What the stack forwards under an address of the local host is the world's. */
static __always_inline __u32 world_of(__u8 family)
{
	return family == 4 ? cfg_world4 : cfg_world6;
}

/*
 * Whether the packet can be from the sender that its connection knows: an
 * endpoint, the local host or, with the identity of the world, a sender that the
 * host translated to its own address.
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
