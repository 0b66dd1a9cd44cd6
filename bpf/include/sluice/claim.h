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
 *   from a tunnel                           whom its key names, of the node that
 *                                           sent it: see node.h
 *   from an uplink                          whom its source address names, but
 *                                           nobody of this node
 *
 * The mark of a packet names no sender. Any process with CAP_NET_RAW in the node's
 * namespace can set it (SO_MARK), rules that restore connection marks replace
 * it, and a pair of devices within one namespace carries it along. It says that
 * a program of ours has seen the packet, to the rules that stop what none has,
 * and that the stack has forwarded it: a process that sets this bit itself only
 * loses the identity of the host.
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

/*
 * Whether the stack has forwarded the packet. It forgets the device by which
 * IPv6 fragments came in when it has to copy them, as a sender outside can bring
 * about; the mark that the node's firewall gives to all that is forwarded stays.
 */
static __always_inline bool is_forwarded(struct __sk_buff *skb)
{
	return skb->ingress_ifindex || (skb->mark & SL_MARK_MASK) == SL_MARK_FORWARDED;
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
	if (p->hook == SL_EGRESS || slot == SL_SLOT_NONE)
		return true;
	if (slot == SL_SLOT_HOST)
		return is_forwarded(skb) == (identity == world_of(p->family));
	return entered_by(skb) == slot;
}

#endif
