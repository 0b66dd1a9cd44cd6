/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_IPV6_H
#define SLUICE_IPV6_H

#include <linux/ipv6.h>

#include <sluice/transport.h>

#define SL_IP6_MAX_EXT 6

#define SL_EXT_HOP_BY_HOP 0
#define SL_EXT_ROUTING 43
#define SL_EXT_FRAGMENT 44
#define SL_EXT_AUTH 51
#define SL_EXT_DEST_OPTIONS 60
#define SL_EXT_MOBILITY 135
#define SL_EXT_HIP 139
#define SL_EXT_SHIM6 140

static __always_inline bool is_ext_header(__u8 proto)
{
	switch (proto) {
	case SL_EXT_HOP_BY_HOP:
	case SL_EXT_ROUTING:
	case SL_EXT_FRAGMENT:
	case SL_EXT_AUTH:
	case SL_EXT_DEST_OPTIONS:
	case SL_EXT_MOBILITY:
	case SL_EXT_HIP:
	case SL_EXT_SHIM6:
		return true;
	}
	return false;
}

/*
 * Walks the extension headers up to the transport header, or up to the end of what a fragment
 * contains. Sets proto and l4. Rejects routing headers, which are source routes.
 */
__noinline enum sl_reason walk_ext_headers(struct __sk_buff *skb, struct sl_packet *p)
{
	/* next header and length; of a fragment header also the offset */
	__u8 ext[4];
	__be32 id;

	if (!p)
		return SL_REASON_MALFORMED;

	/* unrolled: Linux 6.1 rejects a loop whose back edge is not a jump, which clang may
	 * generate
	 */
#pragma unroll
	for (int i = 0; i <= SL_IP6_MAX_EXT; i++) {
		__u32 bytes;

		switch (p->proto) {
		case SL_EXT_ROUTING:
			return SL_REASON_SOURCE_ROUTE;
		case SL_EXT_HOP_BY_HOP:
			if (i > 0)
				return SL_REASON_MALFORMED;
			break;
		case SL_EXT_FRAGMENT:
		case SL_EXT_AUTH:
		case SL_EXT_DEST_OPTIONS:
		case SL_EXT_MOBILITY:
		case SL_EXT_HIP:
		case SL_EXT_SHIM6:
			break;
		default:
			return SL_CONTINUE;
		}
		if (i == SL_IP6_MAX_EXT)
			break;

		if (bpf_skb_load_bytes(skb, p->l4, ext, sizeof(ext)))
			return SL_REASON_MALFORMED;
		bytes = (ext[1] + 1) * 8;
		if (p->proto == SL_EXT_FRAGMENT)
			bytes = 8;
		else if (p->proto == SL_EXT_AUTH)
			bytes = (ext[1] + 2) * 4;
		if (!room_for(p, bytes))
			return SL_REASON_MALFORMED;

		if (p->proto == SL_EXT_FRAGMENT) {
			if (bpf_skb_load_bytes(skb, p->l4 + sizeof(ext), &id, sizeof(id)))
				return SL_REASON_MALFORMED;
			if (hides_header(ext[0], (ext[2] << 8 | ext[3]) & 0xfff8))
				return SL_REASON_MALFORMED;
			p->fragment = (ext[2] << 8 | ext[3]) & 0xfff8;
			p->more_fragments = !p->fragment && ext[3] & 1;
			p->last_fragment = p->fragment && !(ext[3] & 1);
			p->fragment_id = bpf_ntohl(id);
			/* the first fragment ends within the headers: later fragments could supply
			 * or overwrite the rest of them */
			if (p->more_fragments && is_ext_header(ext[0]))
				return SL_REASON_EXTENSION_HEADERS;
		}
		p->proto = ext[0];
		p->l4 += bytes;
		if (p->fragment)
			return SL_CONTINUE;
	}
	return SL_REASON_EXTENSION_HEADERS;
}

/* struct ipv6hdr with addresses as 64-bit words, so that each is copied by two loads. */
struct sl_ip6 {
	__u8 version; /* upper half */
	__u8 flow[3];
	__be16 payload_len;
	__u8 nexthdr;
	__u8 hop_limit;
	__u64 saddr[2];
	__u64 daddr[2];
};
_Static_assert(sizeof(struct sl_ip6) == sizeof(struct ipv6hdr), "as on the wire");

static __always_inline enum sl_reason parse_ip6(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;
	struct sl_ip6 ip;
	__u32 payload;

	if (read_packet(skb, ETH_HLEN, &ip))
		return SL_REASON_MALFORMED;

	payload = bpf_ntohs(ip.payload_len);
	/* a GSO packet above 64 KiB (BIG TCP) has length 0 */
	if (payload == 0 && skb->gso_size)
		payload = skb->len - ETH_HLEN - sizeof(ip);
	if (ip.version >> 4 != 6 || ETH_HLEN + sizeof(ip) + payload > skb->len)
		return SL_REASON_MALFORMED;

	p->family = 6;
	p->proto = ip.nexthdr;
	p->hops = ip.hop_limit;
	p->l4 = ETH_HLEN + sizeof(ip);
	p->end = ETH_HLEN + sizeof(ip) + payload;
	__builtin_memcpy(p->src, ip.saddr, sizeof(p->src));
	__builtin_memcpy(p->dst, ip.daddr, sizeof(p->dst));

	if (is_ext_header(p->proto)) {
		reason = walk_ext_headers(skb, p);
		if (reason)
			return reason;
	}
	return parse_transport(skb, p);
}

static __always_inline bool is_link_local6(const __u8 *addr)
{
	return addr[0] == 0xfe && (addr[1] & 0xc0) == 0x80;
}

/* ::, ::1 and ::ffff:0:0/96 must not appear on the wire. */
static __always_inline bool is_martian6(const __u8 *addr)
{
	const __u64 *half = (const __u64 *)addr;
	__u64 low = bpf_be64_to_cpu(half[1]);

	return half[0] == 0 && (low <= 1 || low >> 32 == 0xffff);
}

/* Rejects destinations that no unicast packet has. */
static __always_inline enum sl_reason check_ip6_destination(const struct sl_packet *p)
{
	if (p->dst[0] == 0xff)
		return SL_REASON_MULTICAST;
	if (is_martian6(p->dst))
		return SL_REASON_MARTIAN_ADDRESS;
	return SL_CONTINUE;
}

#endif
