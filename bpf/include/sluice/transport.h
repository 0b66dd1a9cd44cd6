/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_TRANSPORT_H
#define SLUICE_TRANSPORT_H

/*
 * Checks the headers of TCP, UDP, SCTP, ICMP and ICMPv6, and reads their ports. For ICMP, type
 * and code form the destination port. Other protocols are only known by their number. Later
 * fragments have no transport header.
 */

#include <sluice/packet.h>

#define SL_ICMP 1
#define SL_TCP 6
#define SL_UDP 17
#define SL_ICMPV6 58
#define SL_SCTP 132

#define SL_TCP_FIN 0x01
#define SL_TCP_SYN 0x02
#define SL_TCP_RST 0x04
#define SL_TCP_ACK 0x10

#define SL_SCTP_INIT 1
#define SL_SCTP_INIT_ACK 2
#define SL_SCTP_ABORT 6
#define SL_SCTP_SHUTDOWN 7
#define SL_SCTP_SHUTDOWN_ACK 8
#define SL_SCTP_ERROR 9
#define SL_SCTP_SHUTDOWN_COMPLETE 14
#define SL_SCTP_COMMON 12 /* bytes before the first chunk */

/* The first fields of TCP, UDP and SCTP. */
struct sl_ports {
	__be16 src;
	__be16 dst;
};

/* The part of a TCP header that we read, starting at its data offset. */
struct sl_tcp {
	__u8 offset; /* upper half: length in 32-bit words */
	__u8 flags;
} __attribute__((aligned(2)));

struct sl_icmp {
	__u8 type;
	__u8 code;
	__be16 checksum;
	__be16 id; /* of an echo */
};

static __always_inline bool room_for(const struct sl_packet *p, __u32 bytes)
{
	return p->l4 + bytes <= p->end;
}

/*
 * Whether a later fragment would overwrite fields that were evaluated in the first one: TCP
 * flags, or the first SCTP chunk. Regular fragmentation never does that.
 */
static __always_inline bool hides_header(__u8 proto, __u32 offset)
{
	return (proto == SL_TCP || proto == SL_SCTP) && offset && offset < 20;
}

static __always_inline enum sl_reason parse_transport(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_ports ports;
	struct sl_icmp icmp;
	struct sl_tcp tcp;
	__u32 need;

	if (p->fragment)
		return SL_CONTINUE;

	switch (p->proto) {
	case SL_TCP:
		need = 20;
		break;
	case SL_UDP:
		need = 8;
		break;
	case SL_SCTP:
		need = 12;
		break;
	case SL_ICMP:
	case SL_ICMPV6:
		if (!room_for(p, 8) || read_packet(skb, p->l4, &icmp))
			return SL_REASON_MALFORMED;
		p->dport = (__u16)(icmp.type << 8 | icmp.code);
		p->echo = bpf_ntohs(icmp.id);
		return SL_CONTINUE;
	default:
		return SL_CONTINUE;
	}

	if (!room_for(p, need) || read_packet(skb, p->l4, &ports))
		return SL_REASON_MALFORMED;
	p->sport = bpf_ntohs(ports.src);
	p->dport = bpf_ntohs(ports.dst);

	if (p->proto == SL_TCP) {
		if (read_packet(skb, p->l4 + 12, &tcp))
			return SL_REASON_MALFORMED;
		need = (tcp.offset >> 4) * 4;
		if (need < 20 || !room_for(p, need))
			return SL_REASON_MALFORMED;
		p->tcp_flags = tcp.flags;
	}
	/* without a first chunk its type is 0 */
	if (p->proto == SL_SCTP && room_for(p, SL_SCTP_COMMON + 1) &&
	    read_packet(skb, p->l4 + SL_SCTP_COMMON, &p->chunk))
		return SL_REASON_MALFORMED;
	return SL_CONTINUE;
}

#endif
