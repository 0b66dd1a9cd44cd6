/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_CUT_H
#define SLUICE_CUT_H

/* Packets that exceed the MTU of their path and that the stack may fragment. */

#include <linux/if_ether.h>
#include <linux/ip.h>

#include <sluice/packet.h>

#define SL_IP4_DONT_FRAGMENT 0x4000

/*
 * Whether the stack handles a packet that exceeds the MTU. It fragments IPv4 packets without DF.
 * It silently drops later fragments with DF, because the first fragment was already answered with
 * an error.
 */
static __always_inline bool may_be_cut(struct __sk_buff *skb, const struct sl_packet *p)
{
	__be16 frag = 0;

	if (p->family != 4)
		return false;
	if (p->fragment)
		return true;
	if (read_packet(skb, ETH_HLEN + offsetof(struct iphdr, frag_off), &frag))
		return false;
	return !(frag & bpf_htons(SL_IP4_DONT_FRAGMENT));
}

#endif
