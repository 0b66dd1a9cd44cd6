/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_MARK_H
#define SLUICE_MARK_H

/*
 * The mark that a packet carries between our programs and through the host's
 * stack:
 *
 *   bits 31..16  identity bits 15..0
 *   bits 15..12  free: 0x4000 and 0x8000 are kube-proxy's
 *   bits 11..8   who set the mark
 *   bits  7..0   identity bits 23..16
 *
 * A packet from a pod address without any of bits 11..8 has met no program:
 * a routing rule of the node prohibits it.
 */

#include <linux/bpf.h>

#include <sluice/compiler.h>

#define SL_MARK_MASK 0x0f00
#define SL_MARK_POD 0x0200 /* from a local pod, source and egress judged */
#define SL_MARK_UPLINK 0x0a00 /* from outside, identity found by our program */
#define SL_MARK_JUDGED 0x0d00 /* judged on both sides, for one device only */

static __always_inline __u32 mark_of(__u32 magic, __u32 identity)
{
	return magic | identity << 16 | (identity >> 16 & 0xff);
}

static __always_inline __u32 mark_identity(__u32 mark)
{
	return mark >> 16 | (mark & 0xff) << 16;
}

static __always_inline bool mark_is(const struct __sk_buff *skb, __u32 magic)
{
	return (skb->mark & SL_MARK_MASK) == magic;
}

/*
 * From sluice_from_pod to sluice_to_pod at one device: it carries the device's
 * number instead of an identity, so that nobody's mark of 0xd00 opens a door.
 */
static __always_inline __u32 mark_judged(__u32 ifindex)
{
	return SL_MARK_JUDGED | ifindex << 16;
}

#endif
