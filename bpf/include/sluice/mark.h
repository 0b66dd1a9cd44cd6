/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_MARK_H
#define SLUICE_MARK_H

/*
 * The mark that a packet carries from our programs through the host's stack:
 *
 *   bits 31..16  of SL_MARK_EVALUATED: the device that the packet is sent to
 *   bits 15..12  free: 0x4000 and 0x8000 are kube-proxy's
 *   bits 11..8   who set the mark; docs/datapath.md lists every value and its owner
 *   bits  7..0   0
 *
 * A packet from a pod address without any of bits 11..8 has met no program:
 * a routing rule of the node prohibits it. No mark names a sender: see claim.h.
 *
 * The node's firewall writes bits 11..8 of every packet that the stack forwards, by the
 * group of the device of arrival: SL_MARK_POD or SL_MARK_LOCAL for a device of a pod,
 * SL_MARK_REMOTE for the tunnel, SL_MARK_FORWARDED for all others. Fragments that the
 * stack copies keep the mark and lose the device.
 */

#include <linux/bpf.h>

#include <sluice/compiler.h>

#define SL_MARK_MASK 0x0f00
#define SL_MARK_FORWARDED 0x0100 /* firewall: forwarded; neither a pod nor the tunnel sent it */
#define SL_MARK_POD 0x0200 /* from a local pod, source and egress evaluated */
#define SL_MARK_REMOTE 0x0300 /* from another node, and not under an address of this one's pods */
#define SL_MARK_LOCAL 0x0900 /* firewall: forwarded from a local pod to a local pod */
#define SL_MARK_KEYED 0x0e00 /* into the tunnel, with its key */
#define SL_MARK_EVALUATED 0x0d00 /* evaluated on both sides, for one device only */

/* From sluice_from_pod to sluice_to_pod at one device. */
static __always_inline __u32 mark_evaluated(__u32 ifindex)
{
	return SL_MARK_EVALUATED | ifindex << 16;
}

#endif
