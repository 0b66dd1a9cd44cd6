/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_QUOTE_H
#define SLUICE_QUOTE_H

/*
 * ICMP errors about packets whose addresses a service has changed. The quoted packet is changed
 * back to the packet that the error's receiver had sent, at the same hooks as other packets: the
 * ingress hook changes the error's destination and the quoted source. The egress hook changes the
 * quoted destination; it also changes the error's source if that is the quoted destination, or if
 * the receiver does not know it. The quoted checksum of TCP or UDP is not changed: the quoted
 * packet is truncated, so the checksum cannot be verified.
 */

#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <sluice/ipv4.h>
#include <sluice/peer.h>
#include <sluice/related.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

/* The packet that an error quotes. */
struct sl_quote {
	__u8 src[16] __attribute__((aligned(8))); /* IPv4: the first four bytes, the rest 0 */
	__u8 dst[16] __attribute__((aligned(8)));
	__u32 at; /* offset of its IP header */
	__u32 l4; /* of the header after that */
	__u16 sport; /* host order */
	__u16 dport;
	__u8 proto;
	__u8 pad[3];
};

static __always_inline bool read_quote4(struct __sk_buff *skb, const struct sl_packet *p,
					struct sl_quote *q)
{
	struct iphdr ip;

	if (!quoted(skb, p, q->at, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5 ||
	    ip.frag_off & bpf_htons(SL_IP4_OFFSET))
		return false;
	*(__be32 *)q->src = ip.saddr;
	*(__be32 *)q->dst = ip.daddr;
	q->proto = ip.protocol;
	q->l4 = q->at + ip.ihl * 4;
	return true;
}

static __always_inline bool read_quote6(struct __sk_buff *skb, const struct sl_packet *p,
					struct sl_quote *q)
{
	__u8 ext[8];

	if (!quoted(skb, p, q->at + offsetof(struct ipv6hdr, nexthdr), &q->proto, 1) ||
	    !quoted(skb, p, q->at + offsetof(struct ipv6hdr, saddr), q->src, sizeof(q->src)) ||
	    !quoted(skb, p, q->at + offsetof(struct ipv6hdr, daddr), q->dst, sizeof(q->dst)))
		return false;
	q->l4 = q->at + sizeof(struct ipv6hdr);
	if (q->proto == SL_EXT_FRAGMENT) {
		if (!quoted(skb, p, q->l4, ext, sizeof(ext)) || ext[2] || ext[3] & 0xf8)
			return false;
		q->proto = ext[0];
		q->l4 += sizeof(ext);
	}
	return true;
}

/*
 * Reads the quoted packet. False if the error's receiver did not send the quoted packet, or if its
 * protocol has no ports.
 */
static __always_inline bool read_quote(struct __sk_buff *skb, const struct sl_packet *p,
				       struct sl_quote *q)
{
	q->at = p->l4 + SL_ICMP_HEADER;
	if (!(p->family == 4 ? read_quote4(skb, p, q) : read_quote6(skb, p, q)))
		return false;
	if (q->proto != SL_TCP && q->proto != SL_UDP && q->proto != SL_SCTP)
		return false;
	return equal16(q->src, p->dst) &&
	       quoted_ports(skb, p, q->l4, q->proto, &q->sport, &q->dport);
}

static __always_inline long rewrite_quoted4(struct __sk_buff *skb, const struct sl_quote *q,
					    const struct sl_end *to)
{
	__u32 at = q->at +
		   (to->source ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr));
	__be32 new = *(const __be32 *)to->addr, old;

	/* in the ICMP checksum, the new address and the new header checksum cancel each other out
	 */
	if (bpf_skb_load_bytes(skb, at, &old, sizeof(old)) ||
	    bpf_l3_csum_replace(skb, q->at + offsetof(struct iphdr, check), old, new, sizeof(new)))
		return -1;
	return bpf_skb_store_bytes(skb, at, &new, sizeof(new), 0);
}

static __always_inline long rewrite_quoted6(struct __sk_buff *skb, const struct sl_packet *p,
					    const struct sl_quote *q, const struct sl_end *to)
{
	__u32 at = q->at +
		   (to->source ? offsetof(struct ipv6hdr, saddr) : offsetof(struct ipv6hdr, daddr));
	__be32 new[4], old[4];
	__s64 diff;

	__builtin_memcpy(new, to->addr, sizeof(new));
	if (bpf_skb_load_bytes(skb, at, old, sizeof(old)))
		return -1;
	diff = bpf_csum_diff(old, sizeof(old), new, sizeof(new), 0);
	if (bpf_l4_csum_replace(skb, p->l4 + SL_ICMP_CHECK, 0, (__u64)diff, 0))
		return -1;
	return bpf_skb_store_bytes(skb, at, new, sizeof(new), 0);
}

/* Writes one end of the quoted packet; 0 on success. */
static __noinline long rewrite_quoted(struct __sk_buff *skb, const struct sl_packet *p,
				      const struct sl_quote *q, const struct sl_end *to)
{
	__u32 at = q->l4 + (to->source ? 0 : sizeof(__be16));
	__be16 new = bpf_htons(to->port), old;

	if (p->family == 4 ? rewrite_quoted4(skb, q, to) : rewrite_quoted6(skb, p, q, to))
		return -1;
	if (bpf_skb_load_bytes(skb, at, &old, sizeof(old)) ||
	    bpf_l4_csum_replace(skb, p->l4 + SL_ICMP_CHECK, old, new, sizeof(new)))
		return -1;
	return bpf_skb_store_bytes(skb, at, &new, sizeof(new), 0);
}

/* Writes the key of packets that the quoted packet is an answer to. */
static __always_inline void write_quoted_key(struct sl_packet *p, const struct sl_quote *q,
					     __u8 zone)
{
	if (p->family == 4) {
		p->xl4.src = *(const __be32 *)q->dst;
		p->xl4.dst = *(const __be32 *)q->src;
		p->xl4.sport = q->dport;
		p->xl4.dport = q->sport;
		p->xl4.proto = q->proto;
		p->xl4.zone = zone;
		p->xl4.pad = 0;
	} else {
		__builtin_memcpy(p->xl6.src, q->dst, sizeof(p->xl6.src));
		__builtin_memcpy(p->xl6.dst, q->src, sizeof(p->xl6.dst));
		p->xl6.sport = q->dport;
		p->xl6.dport = q->sport;
		p->xl6.proto = q->proto;
		p->xl6.zone = zone;
		p->xl6.pad = 0;
	}
}

/*
 * Whether a packet with a restored destination may come from its source through this device: for
 * an uplink, checked as for other packets to services. For a tunnel it has already been checked.
 */
static __always_inline enum sl_reason check_origin(struct __sk_buff *skb, struct sl_packet *p)
{
	return SL_PROGRAM == SL_PROGRAM_FROM_UPLINK ? find_source(skb, p, 0) : SL_CONTINUE;
}

/*
 * Sends an error on to the sender of the quoted packet, whose source was translated. SL_CONTINUE:
 * the error is not about such a packet. On success the packet is left to the stack.
 */
__noinline enum sl_reason restore_error(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_end to = { .source = 1 };
	enum sl_reason reason;
	struct sl_quote q = {};
	struct sl_xl *xl;

	if (!p || !read_quote(skb, p, &q))
		return SL_CONTINUE;
	write_quoted_key(p, &q, SL_XL_NAT);
	xl = find_translation(p->family);
	if (!xl)
		xl = find_claimed(p->family, q.sport);
	if (!xl) {
		write_quoted_key(p, &q, SL_XL_SERVICE);
		xl = find_translation(p->family);
	}
	if (!xl)
		return SL_CONTINUE;
	__builtin_memcpy(to.addr, xl->addr, sizeof(to.addr));
	to.port = xl->port;
	redirect_to(p, to.addr, p->dport, 0, SL_TRANSLATED_RESTORED);
	reason = check_origin(skb, p);
	if (reason)
		return reason;
	if (rewrite_quoted(skb, p, &q, &to))
		return SL_REASON_REWRITE_FAILED;
	to.source = 0;
	return rewrite_end(skb, p, &to) ? SL_REASON_REWRITE_FAILED : SL_REASON_FORWARDED_TO_STACK;
}

#endif
