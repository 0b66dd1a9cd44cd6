/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_IPV4_H
#define SLUICE_IPV4_H

#include <linux/ip.h>

#include <sluice/transport.h>

#define SL_IP4_MORE 0x2000
#define SL_IP4_OFFSET 0x1fff

#define SL_IP4_OPT_END 0
#define SL_IP4_OPT_NOP 1
#define SL_IP4_OPT_LSRR 131
#define SL_IP4_OPT_SSRR 137
#define SL_IP4_OPT_BYTES 40

/*
 * Rejects source routes: a packet that we would evaluate as sent to the host would be forwarded
 * by the host's stack to any address that the pod chooses.
 */
__noinline enum sl_reason check_ip4_options(struct __sk_buff *skb, __u32 ihl)
{
	__u32 at = ETH_HLEN + sizeof(struct iphdr), end = ETH_HLEN + ihl;
	__u8 option[2];

	for (int i = 0; i < SL_IP4_OPT_BYTES; i++) {
		if (at >= end)
			return SL_CONTINUE;
		if (bpf_skb_load_bytes(skb, at, option, 1))
			return SL_REASON_MALFORMED;
		if (option[0] == SL_IP4_OPT_END)
			return SL_CONTINUE;
		if (option[0] == SL_IP4_OPT_NOP) {
			at++;
			continue;
		}
		if (option[0] == SL_IP4_OPT_LSRR || option[0] == SL_IP4_OPT_SSRR)
			return SL_REASON_SOURCE_ROUTE;
		if (at + 2 > end || bpf_skb_load_bytes(skb, at, option, 2) || option[1] < 2 ||
		    at + option[1] > end)
			return SL_REASON_MALFORMED;
		at += option[1];
	}
	return SL_CONTINUE;
}

static __always_inline enum sl_reason parse_ip4(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;
	struct iphdr ip;
	__u32 ihl, total, frag;

	if (read_packet(skb, ETH_HLEN, &ip))
		return SL_REASON_MALFORMED;

	ihl = ip.ihl * 4;
	total = bpf_ntohs(ip.tot_len);
	/* a GSO packet above 64 KiB (BIG TCP) has length 0 */
	if (total == 0 && skb->gso_size)
		total = skb->len - ETH_HLEN;
	if (ip.version != 4 || ihl < sizeof(ip) || total < ihl || ETH_HLEN + total > skb->len)
		return SL_REASON_MALFORMED;

	frag = bpf_ntohs(ip.frag_off);
	p->family = 4;
	p->proto = ip.protocol;
	p->hops = ip.ttl;
	p->fragment = frag & SL_IP4_OFFSET;
	p->more_fragments = !p->fragment && frag & SL_IP4_MORE;
	p->last_fragment = p->fragment && !(frag & SL_IP4_MORE);
	p->fragment_id = bpf_ntohs(ip.id);
	p->l4 = ETH_HLEN + ihl;
	p->end = ETH_HLEN + total;
	*(__be32 *)p->src = ip.saddr;
	*(__be32 *)p->dst = ip.daddr;

	if (hides_header(p->proto, (frag & SL_IP4_OFFSET) * 8))
		return SL_REASON_MALFORMED;
	if (ihl > sizeof(ip)) {
		reason = check_ip4_options(skb, ihl);
		if (reason)
			return reason;
	}
	return parse_transport(skb, p);
}

static __always_inline __be32 ip4_src(const struct sl_packet *p)
{
	return *(const __be32 *)p->src;
}

static __always_inline __be32 ip4_dst(const struct sl_packet *p)
{
	return *(const __be32 *)p->dst;
}

/* Rejects destinations that no unicast packet has. */
static __always_inline enum sl_reason check_ip4_destination(const struct sl_packet *p)
{
	__u32 dst = bpf_ntohl(ip4_dst(p));

	if (dst == 0xffffffff)
		return SL_REASON_BROADCAST;
	if (dst >> 28 == 0xe)
		return SL_REASON_MULTICAST;
	if (dst >> 28 == 0xf || dst >> 24 == 127 || dst >> 24 == 0)
		return SL_REASON_MARTIAN_ADDRESS;
	return SL_CONTINUE;
}

#endif
