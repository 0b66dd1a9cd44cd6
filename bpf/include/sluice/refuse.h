/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_REFUSE_H
#define SLUICE_REFUSE_H

/*
 * Answers a refused packet to a service, with the requested address as source. For TCP the answer
 * is a RST, which makes connect() fail at once; for other protocols it is an ICMP port
 * unreachable. An ICMP error about a SYN would arrive while connect() still holds the socket, and
 * would take effect only after the second SYN. A packet that exceeds the MTU on the way to the
 * backend is answered with packet too big.
 *
 * The frame itself is turned into the answer. An ICMP error quotes the IP header and the
 * transport header up to its checksum only, because the kernel may still have to fill that in.
 */

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <sluice/ndp.h>
#include <sluice/packet.h>
#include <sluice/rate.h>
#include <sluice/related.h>

#define SL_ANSWER_TTL 64

enum sl_answer_kind {
	SL_ANSWER_REFUSED = 0,
	SL_ANSWER_TOO_BIG = 1,
	SL_ANSWER_TIME_EXCEEDED = 2,
};

/*
 * Answers per CPU and second: all pods share one such rate. Outside senders have two: anybody can
 * cause refusals, and these must not use up the rate of the errors from which clients learn the
 * MTU.
 */
#define SL_ANSWER_RATE 1000

static __always_inline bool may_answer_now(const struct sl_packet *p, __u32 kind)
{
	if (SL_PROGRAM == SL_PROGRAM_FROM_POD)
		return within_rate_of(SL_RATE_ANSWERS_TO_PODS, SL_ANSWER_RATE, SL_BOUND_ANSWERS,
				      p->src_slot);
	return within_rate(kind == SL_ANSWER_REFUSED ? SL_RATE_ANSWERS_OUTSIDE
						     : SL_RATE_ERRORS_OUTSIDE,
			   SL_ANSWER_RATE);
}

/* RFC 792; RFC 4443, section 2: the layout for both families. */
struct sl_icmp_error {
	__u8 type;
	__u8 code;
	__be16 check;
	__be16 upper; /* of the MTU of IPv6; else 0 */
	__be16 mtu;
};
_Static_assert(sizeof(struct sl_icmp_error) == SL_ICMP_HEADER, "as on the wire");

/* Maximum length of a quoted packet: IPv6 and TCP headers. */
#define SL_QUOTE 60

/* How much of the transport header is quoted. */
static __always_inline __u32 quoted_transport(const struct sl_packet *p)
{
	if (p->fragment)
		return 0;
	switch (p->proto) {
	case SL_TCP:
		return 20;
	case SL_UDP:
		return 8;
	}
	return SL_SCTP_COMMON;
}

/* How many bytes are quoted, from the IP header on; 0: the headers are too long. */
static __always_inline __u32 quoted_bytes(const struct sl_packet *p)
{
	__u32 headers = p->l4 - ETH_HLEN, quote = headers + quoted_transport(p);

	if (headers + (p->fragment ? 0 : 8) > SL_QUOTE)
		return 0;
	return quote < SL_QUOTE ? quote : SL_QUOTE;
}

static __always_inline void fill_error(struct sl_icmp_error *icmp, const struct sl_packet *p,
				       enum sl_answer_kind kind)
{
	__builtin_memset(icmp, 0, sizeof(*icmp));
	if (kind == SL_ANSWER_TIME_EXCEEDED) {
		icmp->type = p->family == 4 ? 11 : 3;
	} else if (p->family == 4) {
		icmp->type = 3;
		icmp->code = kind == SL_ANSWER_TOO_BIG ? 4 : 3;
	} else {
		icmp->type = kind == SL_ANSWER_TOO_BIG ? 2 : 1;
		icmp->code = kind == SL_ANSWER_TOO_BIG ? 0 : 4;
	}
	if (kind == SL_ANSWER_TOO_BIG)
		icmp->mtu = bpf_htons(p->answer_mtu);
}

static __always_inline long store_head4(struct __sk_buff *skb, const struct sl_packet *p,
					__u8 proto, __u32 len)
{
	struct iphdr ip = {
		.version = 4,
		.ihl = sizeof(ip) / 4,
		.tot_len = bpf_htons((__u16)(sizeof(ip) + len)),
		.ttl = SL_ANSWER_TTL,
		.protocol = proto,
		.saddr = *(const __be32 *)p->asked,
		.daddr = *(const __be32 *)p->src,
	};

	ip.check = fold(bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0));
	return bpf_skb_store_bytes(skb, ETH_HLEN, &ip, sizeof(ip), 0);
}

static __always_inline long store_head6(struct __sk_buff *skb, const struct sl_packet *p,
					__u8 proto, __u32 len)
{
	struct ipv6hdr ip = {
		.version = 6,
		.payload_len = bpf_htons((__u16)len),
		.nexthdr = proto,
		.hop_limit = SL_ANSWER_TTL,
	};

	__builtin_memcpy(&ip.saddr, p->asked, sizeof(ip.saddr));
	__builtin_memcpy(&ip.daddr, p->src, sizeof(ip.daddr));
	return bpf_skb_store_bytes(skb, ETH_HLEN, &ip, sizeof(ip), 0);
}

/*
 * The checksum over the pseudo-header of the answer; RFC 8200, 8.1. The IPv4 pseudo-header, RFC
 * 9293, 3.1, has the same non-zero words.
 */
static __noinline __s64 pseudo_sum(const struct sl_packet *p, __u32 proto, __u32 len)
{
	struct sl_pseudo6 pseudo = { .len = bpf_htonl(len), .next = bpf_htonl(proto) };

	__builtin_memcpy(pseudo.src, p->asked, sizeof(pseudo.src));
	__builtin_memcpy(pseudo.dst, p->src, sizeof(pseudo.dst));
	return bpf_csum_diff(NULL, 0, (__be32 *)&pseudo, sizeof(pseudo), 0);
}

/* The checksum of the error; it quotes "quote" bytes from behind the Ethernet header. */
static __noinline __be16 error_checksum(struct __sk_buff *skb, const struct sl_packet *p,
					struct sl_icmp_error *icmp, __u32 quote)
{
	__u8 bytes[SL_QUOTE] __attribute__((aligned(4))) = {};
	__s64 sum = 0;

	if (quote < sizeof(struct iphdr) || quote > sizeof(bytes) ||
	    bpf_skb_load_bytes(skb, ETH_HLEN, bytes, quote))
		return 0;
	if (p->family == 6)
		sum = pseudo_sum(p, SL_ICMPV6, sizeof(*icmp) + quote);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)icmp, sizeof(*icmp), (__wsum)sum);
	/* bytes beyond the quote are 0 */
	return fold(bpf_csum_diff(NULL, 0, (__be32 *)bytes, sizeof(bytes), (__wsum)sum));
}

/* Writes the Ethernet and IP headers of the answer, whose remaining length is len. */
static __always_inline long store_heads(struct __sk_buff *skb, const struct sl_packet *p,
					__u8 proto, __u32 len)
{
	__u8 macs[2 * ETH_ALEN];

	__builtin_memcpy(macs, p->src_mac, ETH_ALEN);
	__builtin_memcpy(macs + ETH_ALEN, p->dst_mac, ETH_ALEN);
	if (bpf_skb_store_bytes(skb, 0, macs, sizeof(macs), 0))
		return -1;
	if (p->family == 4)
		return store_head4(skb, p, proto, len);
	return store_head6(skb, p, proto, len);
}

static __always_inline __u32 ip_header(const struct sl_packet *p)
{
	return p->family == 4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
}

/* Turns the frame into the ICMP error; 0 on success. */
static __always_inline int answer_error(struct __sk_buff *skb, struct sl_packet *p,
					enum sl_answer_kind kind)
{
	__u32 head = ip_header(p), quote = quoted_bytes(p);
	struct sl_icmp_error icmp;

	if (!quote || ETH_HLEN + quote > p->end)
		return -1;
	fill_error(&icmp, p, kind);
	icmp.check = error_checksum(skb, p, &icmp, quote);
	if (bpf_skb_change_tail(skb, ETH_HLEN + quote, 0) ||
	    bpf_skb_adjust_room(skb, (__s32)(head + sizeof(icmp)), BPF_ADJ_ROOM_MAC, 0) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN + head, &icmp, sizeof(icmp), 0))
		return -1;
	return (int)store_heads(skb, p, p->family == 4 ? SL_ICMP : SL_ICMPV6, sizeof(icmp) + quote);
}

struct sl_tcp_header {
	__be16 sport;
	__be16 dport;
	__be32 seq;
	__be32 ack;
	__u8 offset;
	__u8 flags;
	__be16 window;
	__be16 check;
	__be16 urgent;
};
_Static_assert(sizeof(struct sl_tcp_header) == 20, "as on the wire");

/* Turns the frame into a RST; 0 on success; RFC 9293, 3.10.7.1. */
static __always_inline int answer_reset(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_tcp_header tcp;
	__be16 port;
	__s64 sum;

	if (p->tcp_flags & SL_TCP_RST || bpf_skb_load_bytes(skb, p->l4, &tcp, sizeof(tcp)))
		return -1;
	port = tcp.sport;
	tcp.sport = tcp.dport;
	tcp.dport = port;
	if (p->tcp_flags & SL_TCP_ACK) {
		tcp.seq = tcp.ack;
		tcp.ack = 0;
		tcp.flags = SL_TCP_RST;
	} else {
		tcp.ack = bpf_htonl(bpf_ntohl(tcp.seq) + 1);
		tcp.seq = 0;
		tcp.flags = SL_TCP_RST | SL_TCP_ACK;
	}
	tcp.offset = sizeof(tcp) / 4 << 4;
	tcp.window = 0;
	tcp.check = 0;
	tcp.urgent = 0;
	sum = pseudo_sum(p, SL_TCP, sizeof(tcp));
	tcp.check = fold(bpf_csum_diff(NULL, 0, (__be32 *)&tcp, sizeof(tcp), (__wsum)sum));
	if (bpf_skb_change_tail(skb, p->l4 + sizeof(tcp), 0) ||
	    bpf_skb_store_bytes(skb, p->l4, &tcp, sizeof(tcp), 0))
		return -1;
	return (int)store_heads(skb, p, SL_TCP, sizeof(tcp));
}

/*
 * Whether a fragment may be answered. A later fragment is only answered with packet too big, for
 * IPv6, because each of its fragments may exceed the MTU; RFC 1122, 3.2.2.
 */
static __always_inline bool may_answer_piece(const struct sl_packet *p, __u32 kind)
{
	return !p->fragment || (p->family == 6 && kind == SL_ANSWER_TOO_BIG);
}

/*
 * Turns the frame into an answer to its sender; 0 on success. Over the rate limit the packet is
 * dropped without an answer.
 */
__noinline int answer_sender(struct __sk_buff *skb, struct sl_packet *p, __u32 kind)
{
	if (!p || !may_answer_piece(p, kind) || !may_answer_now(p, kind))
		return -1;
	if (p->proto == SL_TCP && kind == SL_ANSWER_REFUSED)
		return p->l4 == ETH_HLEN + ip_header(p) ? answer_reset(skb, p) : -1;
	return answer_error(skb, p, kind);
}

/* Whether the sender gets an answer if its packet was dropped for this reason. */
static __always_inline bool is_refusal(enum sl_reason reason)
{
	switch (reason) {
	case SL_REASON_SERVICE_NO_BACKEND:
	case SL_REASON_SERVICE_PORT_IN_USE:
	case SL_REASON_NAT_EXHAUSTED:
	case SL_REASON_NAT_SHARE:
	case SL_REASON_NAT_NO_SOURCE:
		return true;
	case SL_REASON_NO_SERVICE_PORT:
		return SL_PROGRAM == SL_PROGRAM_FROM_POD;
	default:
		return false;
	}
}

#endif
