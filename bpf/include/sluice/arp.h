/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ARP_H
#define SLUICE_ARP_H

#include <sluice/endpoint.h>

#define SL_GATEWAY4 bpf_htonl(0xa9fe0101) /* 169.254.1.1 */

struct sl_arp {
	__be16 hardware;
	__be16 protocol;
	__u8 hardware_len;
	__u8 protocol_len;
	__be16 operation;
	__u8 sender_mac[ETH_ALEN];
	__u8 sender_ip[4];
	__u8 target_mac[ETH_ALEN];
	__u8 target_ip[4];
};
_Static_assert(sizeof(struct sl_arp) == 28, "as on the wire");

static __always_inline __be32 arp_ip(const __u8 *ip)
{
	__be32 v;

	__builtin_memcpy(&v, ip, sizeof(v));
	return v;
}

/* Answers an ARP request for 169.254.1.1 on the device that it came from. */
static __always_inline enum sl_reason answer_arp(struct __sk_buff *skb, const struct sl_packet *p,
						 const struct sl_endpoint *src)
{
	const __be32 gateway = SL_GATEWAY4;
	struct sl_arp arp;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &arp, sizeof(arp)))
		return SL_REASON_MALFORMED;

	if (arp.hardware != bpf_htons(1) || arp.protocol != bpf_htons(ETH_P_IP) ||
	    arp.hardware_len != ETH_ALEN || arp.protocol_len != 4 ||
	    arp.operation != bpf_htons(1) || arp_ip(arp.target_ip) != gateway ||
	    arp_ip(arp.sender_ip) == 0)
		return SL_REASON_ARP;
	if (!equal_mac(arp.sender_mac, p->src_mac))
		return SL_REASON_SPOOFED_MAC;
	if (arp_ip(arp.sender_ip) != src->ip4)
		return SL_REASON_SPOOFED_IP;

	arp.operation = bpf_htons(2);
	__builtin_memcpy(arp.target_mac, arp.sender_mac, ETH_ALEN);
	__builtin_memcpy(arp.target_ip, arp.sender_ip, 4);
	__builtin_memcpy(arp.sender_mac, src->hmac, ETH_ALEN);
	__builtin_memcpy(arp.sender_ip, &gateway, 4);

	if (bpf_skb_store_bytes(skb, 0, p->src_mac, ETH_ALEN, 0) ||
	    bpf_skb_store_bytes(skb, ETH_ALEN, src->hmac, ETH_ALEN, 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &arp, sizeof(arp), BPF_F_RECOMPUTE_CSUM))
		return SL_REASON_REWRITE_FAILED;
	return SL_REASON_ANSWERED_ARP;
}

#endif
