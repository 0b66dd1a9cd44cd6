/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/* Packets from a proxy. Runs at the ingress hook of the proxy's TAP device. */

#define SL_PROGRAM SL_PROGRAM_FROM_TAP

#include <linux/pkt_cls.h>

#include <sluice/observe.h>

SEC("tc") int sluice_from_tap(struct __sk_buff *skb)
{
	struct sl_packet *p = new_packet(SL_INGRESS);

	if (!p)
		return TC_ACT_SHOT;
	observe(skb, p, SL_REASON_PROXY_FORGED);
	return TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
