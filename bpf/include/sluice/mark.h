/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_MARK_H
#define SLUICE_MARK_H

/*
 * The mark that a packet carries from our programs through the host's stack:
 *
 *   bits 31..16  of SL_MARK_EVALUATED: the device that the packet is sent to; of SL_MARK_POD and
 *                SL_MARK_LOCAL: the set of rules by which a proxy has evaluated the packet, or 0
 *   bits 15..12  free: 0x4000 and 0x8000 are used by kube-proxy
 *   bits 11..8   who set the mark; docs/reference/marks.md lists every value and its owner
 *   bits  7..0   0
 *
 * If a packet has a pod's source address and bits 11..8 are 0, no program has seen it; a routing
 * rule of the node drops it. A mark never identifies a sender: see claim.h.
 *
 * The node's firewall writes bits 11..8 of every forwarded packet, by the group of the incoming
 * device: SL_MARK_POD or SL_MARK_LOCAL for a pod's device, SL_MARK_REMOTE for the tunnel,
 * SL_MARK_FORWARDED for all others. Fragments that the stack copies keep the mark and lose the
 * device.
 */

#include <linux/bpf.h>

#include <sluice/compiler.h>

#define SL_MARK_MASK 0x0f00
#define SL_MARK_FORWARDED 0x0100 /* firewall: forwarded; neither a pod nor the tunnel sent it */
#define SL_MARK_POD 0x0200 /* from a local pod; source verified and egress evaluated */
#define SL_MARK_REMOTE 0x0300 /* from another node; the source is not a local pod address */
#define SL_MARK_PROXY 0x0400 /* held by a proxy and sent on; for from_pod */
#define SL_MARK_TAKEN_OUT 0x0800 /* decapsulated by a program, evaluated; for from_overlay */
#define SL_MARK_LOCAL 0x0900 /* firewall: forwarded from a local pod to a local pod */
#define SL_MARK_KEYED 0x0e00 /* goes into the tunnel and has its key */
#define SL_MARK_EVALUATED 0x0d00 /* both sides evaluated; valid for one device only */

/* Set by sluice_from_pod, checked by sluice_to_pod at the device with that index. */
static __always_inline __u32 mark_evaluated(__u32 ifindex)
{
	return SL_MARK_EVALUATED | ifindex << 16;
}

#endif
