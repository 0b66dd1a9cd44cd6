/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_TAG_H
#define SLUICE_TAG_H

/* The tag of a frame to a proxy: rule set, endpoint and direction of its packet. */

#include <linux/bpf.h>
#include <linux/if_ether.h>

/* The tag of a frame, in place of its Ethernet addresses. */
struct sl_tag {
	__u8 local; /* 2, as in a locally administered address */
	__u8 version;
	__be16 set; /* of rules */
	__be16 endpoint; /* ID of the pod whose egress policy redirects */
	__u8 local2; /* 2 */
	__u8 direction; /* SL_TAG_... */
	__u8 zero[4];
};
_Static_assert(sizeof(struct sl_tag) == 2 * ETH_ALEN, "the Ethernet addresses");

#define SL_TAG_VERSION 1
/* Instead of a set: no rule redirects the connection now, but the proxy has it. No set has this
 * number.
 */
#define SL_SET_HELD 0xffff
#define SL_TAG_OF_INITIATOR 1
#define SL_TAG_OF_RESPONDER 2

#endif
