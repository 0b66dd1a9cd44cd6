/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_NDP_H
#define SLUICE_NDP_H

#include <sluice/endpoint.h>
#include <sluice/ipv6.h>

#define SL_ND_FIRST 133 /* router solicitation */
#define SL_ND_SOLICIT 135
#define SL_ND_ADVERT 136
#define SL_ND_LAST 137 /* redirect */

#define SL_ND_OPT_TARGET_MAC 2
#define SL_ND_ROUTER_SOLICITED_OVERRIDE 0xe0

struct sl_nd_solicit {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be32 reserved;
	__u8 target[16];
};
_Static_assert(sizeof(struct sl_nd_solicit) == 24, "as on the wire");

struct sl_nd_advert {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__u8 flags;
	__u8 reserved[3];
	__u8 target[16];
	__u8 option;
	__u8 option_len; /* in units of 8 bytes */
	__u8 target_mac[ETH_ALEN];
};
_Static_assert(sizeof(struct sl_nd_advert) == 32, "as on the wire");

/* The pseudo-header that the ICMPv6 checksum covers in addition to the message. */
struct sl_pseudo6 {
	__u8 src[16];
	__u8 dst[16];
	__be32 len;
	__be32 next;
};
_Static_assert(sizeof(struct sl_pseudo6) == 40, "as in RFC 8200");

static __always_inline bool is_gateway6(const __u8 *addr)
{
	const __u64 *half = (const __u64 *)addr;

	return half[0] == bpf_cpu_to_be64(0xfe80000000000000) && half[1] == bpf_cpu_to_be64(1);
}

static __always_inline bool is_ndp(const struct sl_packet *p)
{
	__u8 type = (__u8)(p->dport >> 8);

	return p->proto == SL_ICMPV6 && !p->fragment && type >= SL_ND_FIRST && type <= SL_ND_LAST;
}

static __always_inline __be16 fold(__s64 sum)
{
	__u32 s = (__u32)sum;

	s = (s & 0xffff) + (s >> 16);
	s = (s & 0xffff) + (s >> 16);
	return (__be16)~s;
}

/* Turns the solicitation into the gateway's advertisement. */
static __always_inline enum sl_reason advertise(struct __sk_buff *skb, struct sl_packet *p,
						const struct sl_endpoint *src, const __u8 *gateway)
{
	struct sl_pseudo6 pseudo = {
		.len = bpf_htonl(sizeof(struct sl_nd_advert)),
		.next = bpf_htonl(SL_ICMPV6),
	};
	struct sl_nd_advert advert = {
		.type = SL_ND_ADVERT,
		.flags = SL_ND_ROUTER_SOLICITED_OVERRIDE,
		.option = SL_ND_OPT_TARGET_MAC,
		.option_len = 1,
	};
	struct ipv6hdr ip = {
		.version = 6,
		.payload_len = bpf_htons(sizeof(advert)),
		.nexthdr = SL_ICMPV6,
		.hop_limit = 255,
	};
	__s64 sum;

	__builtin_memcpy(advert.target, gateway, 16);
	__builtin_memcpy(advert.target_mac, src->hmac, ETH_ALEN);
	__builtin_memcpy(&ip.saddr, gateway, 16);
	__builtin_memcpy(&ip.daddr, p->src, 16);
	__builtin_memcpy(pseudo.src, gateway, 16);
	__builtin_memcpy(pseudo.dst, p->src, 16);

	sum = bpf_csum_diff(NULL, 0, (__be32 *)&pseudo, sizeof(pseudo), 0);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&advert, sizeof(advert), (__wsum)sum);
	advert.checksum = fold(sum);

	if (bpf_skb_change_tail(skb, ETH_HLEN + sizeof(ip) + sizeof(advert), 0) ||
	    bpf_skb_store_bytes(skb, 0, p->src_mac, ETH_ALEN, 0) ||
	    bpf_skb_store_bytes(skb, ETH_ALEN, src->hmac, ETH_ALEN, 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN, &ip, sizeof(ip), BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN + sizeof(ip), &advert, sizeof(advert),
				BPF_F_RECOMPUTE_CSUM))
		return SL_REASON_REWRITE_FAILED;
	return SL_REASON_ANSWERED_NDP;
}

/*
 * Answers solicitations for fe80::1. All other neighbour discovery and redirect messages are
 * dropped: the gateway is the only neighbour on this link.
 */
__noinline enum sl_reason answer_ndp(struct __sk_buff *skb, struct sl_packet *p,
				     const struct sl_endpoint *src)
{
	struct sl_nd_solicit ns __attribute__((aligned(8)));
	__u8 target[16] __attribute__((aligned(8)));

	if (!p || !src)
		return SL_REASON_MALFORMED;
	if (p->dport != SL_ND_SOLICIT << 8)
		return SL_REASON_NDP;
	/* RFC 4861, 7.1.1: with any other hop limit the message was routed; with extension headers
	 * it is invalid */
	if (p->hops != 255 || p->l4 != ETH_HLEN + sizeof(struct ipv6hdr))
		return SL_REASON_MALFORMED;
	if (!room_for(p, sizeof(ns)) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN + sizeof(struct ipv6hdr), &ns, sizeof(ns)))
		return SL_REASON_MALFORMED;

	__builtin_memcpy(target, ns.target, sizeof(target));
	/* a source of :: means duplicate address detection */
	if (!is_gateway6(target) || zero16(p->src))
		return SL_REASON_NDP;
	if (!is_link_local6(p->src) && !equal16(p->src, src->ip6))
		return SL_REASON_SPOOFED_IP;
	return advertise(skb, p, src, target);
}

#endif
