/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_RELATED_H
#define SLUICE_RELATED_H

/*
 * An ICMP error quotes the packet that it is about. An error about a connection of its receiver is
 * related to that connection. Any router may send one, but a local pod is not a router: it may only
 * send errors about packets that were sent to itself. All other errors from pods are dropped,
 * whatever their policy. The receiver would trust such an error: by quoting a packet of the node, a
 * pod could lower the path MTU of the node and of all packets that the node forwards.
 */

#include <linux/ip.h>
#include <linux/ipv6.h>

#include <sluice/conntrack.h>
#include <sluice/ipv6.h>

#define SL_ICMP_HEADER 8

/* The first bytes of a quoted transport header: ports, or ICMP type and identifier. */
struct sl_quoted {
	__be16 word[4];
};

static __always_inline bool is_error(const struct sl_packet *p)
{
	__u8 type = (__u8)(p->dport >> 8);

	if (p->fragment)
		return false;
	if (p->proto == SL_ICMP && p->family == 4)
		return type == 3 || type == 11 || type == 12;
	return p->proto == SL_ICMPV6 && p->family == 6 && type >= 1 && type <= 4;
}

/* Messages from routers to hosts. The IPv6 counterparts are all neighbour discovery. */
static __always_inline bool is_router_message(const struct sl_packet *p)
{
	__u8 type = (__u8)(p->dport >> 8);

	return p->proto == SL_ICMP && p->family == 4 && (type == 5 || type == 9 || type == 10);
}

/* Path MTU discovery for IPv6 must work under any policy. */
static __always_inline bool is_too_big(const struct sl_packet *p)
{
	return p->proto == SL_ICMPV6 && p->family == 6 && p->dport >> 8 == 2;
}

/* How many packet-too-big errors about unknown connections each CPU passes per second, under
 * SL_RATE_TOO_BIG: any sender can forge them. The receiving pods share the rate.
 */
#define SL_TOO_BIG_RATE 100

/*
 * Copies a part of the quoted packet. Bytes of the frame after the end of the IP packet do not
 * count: the receiver never sees them, and if the error is fragmented, the next fragment supplies
 * other bytes in their place.
 */
static __always_inline bool quoted(struct __sk_buff *skb, const struct sl_packet *p, __u32 at,
				   void *to, __u32 bytes)
{
	return at + bytes <= p->end && !bpf_skb_load_bytes(skb, at, to, bytes);
}

static __always_inline bool quoted_ports(struct __sk_buff *skb, const struct sl_packet *p, __u32 at,
					 __u8 proto, __u16 *sport, __u16 *dport)
{
	struct sl_quoted l4;
	__u8 type;

	*sport = 0;
	*dport = 0;
	switch (proto) {
	case SL_TCP:
	case SL_UDP:
	case SL_SCTP:
	case SL_ICMP:
	case SL_ICMPV6:
		break;
	default:
		return true;
	}
	if (!quoted(skb, p, at, &l4, sizeof(l4)))
		return false;
	*sport = bpf_ntohs(l4.word[0]);
	*dport = bpf_ntohs(l4.word[1]);
	if (proto == SL_ICMP || proto == SL_ICMPV6) {
		type = (__u8)(*sport >> 8);
		*sport = bpf_ntohs(l4.word[2]);
		*dport = *sport;
		return proto == SL_ICMP ? type == 8 || type == 0 : type == 128 || type == 129;
	}
	return true;
}

/* The address epochs of the quoted packet's ends, in the order of the entry. */
static __always_inline __u32 quoted_epochs(const struct sl_ct *ct, const __u8 *src, const __u8 *dst,
					   __u8 family, bool low)
{
	bool low_began = READ_ONCE(ct->flags) & SL_CT_ORIG_LO;
	__u32 s = address_epoch(src, family), d = address_epoch(dst, family);

	return low_began == low ? s << 16 | d : d << 16 | s;
}

/*
 * Finds the quoted connection, and the address epochs of its ends. Its key replaces the error's own
 * key in the cell. Sets *forged in three cases: the receiver of the error did not send the quoted
 * packet; a pod sends the error but did not receive the quoted packet; or the quoted packet is too
 * short to tell.
 */
static __always_inline struct sl_ct *quoted4(struct __sk_buff *skb, struct sl_packet *p,
					     __u32 *addr_epochs, bool *forged)
{
	__u32 at = p->l4 + SL_ICMP_HEADER;
	struct sl_packet *own;
	__u16 sport, dport;
	struct sl_ct *ct;
	struct iphdr ip;
	__u8 low;

	*forged = true;
	if (!quoted(skb, p, at, &ip, sizeof(ip)) || ip.version != 4 || ip.ihl < 5 ||
	    ip.saddr != *(const __be32 *)p->dst)
		return NULL;
	if (p->hook == SL_EGRESS && ip.daddr != *(const __be32 *)p->src)
		return NULL;
	*forged = false;
	if (ip.frag_off & bpf_htons(0x1fff))
		return NULL;
	if (!quoted_ports(skb, p, at + ip.ihl * 4, ip.protocol, &sport, &dport))
		return NULL;
	own = own_packet();
	if (!own)
		return NULL;
	own->low = is_low4((__u8 *)&ip.saddr, (__u8 *)&ip.daddr, sport, dport);
	low = READ_ONCE(own->low);
	connection_key4(&own->key4, low, (__u8 *)&ip.saddr, (__u8 *)&ip.daddr, sport, dport,
			ip.protocol);
	ct = bpf_map_lookup_elem(&sl_ct4, &own->key4);
	if (ct)
		*addr_epochs = quoted_epochs(ct, (__u8 *)&ip.saddr, (__u8 *)&ip.daddr, 4, low);
	return ct;
}

static __always_inline struct sl_ct *quoted6(struct __sk_buff *skb, struct sl_packet *p,
					     __u32 *addr_epochs, bool *forged)
{
	__u8 src[16] __attribute__((aligned(8))), dst[16] __attribute__((aligned(8)));
	__u32 at = p->l4 + SL_ICMP_HEADER;
	__u8 next, ext[8], low;
	struct sl_packet *own;
	__u16 sport, dport;
	struct sl_ct *ct;

	*forged = true;
	if (!quoted(skb, p, at + offsetof(struct ipv6hdr, nexthdr), &next, 1) ||
	    !quoted(skb, p, at + offsetof(struct ipv6hdr, saddr), src, sizeof(src)) ||
	    !quoted(skb, p, at + offsetof(struct ipv6hdr, daddr), dst, sizeof(dst)) ||
	    !equal16(src, p->dst) || (p->hook == SL_EGRESS && !equal16(dst, p->src)))
		return NULL;
	*forged = false;
	at += sizeof(struct ipv6hdr);
	/* a packet that exceeded the MTU of the next link may have become a fragment */
	if (next == SL_EXT_FRAGMENT) {
		if (!quoted(skb, p, at, ext, sizeof(ext)) || ext[2] || ext[3] & 0xf8)
			return NULL;
		next = ext[0];
		at += sizeof(ext);
	}
	if (is_ext_header(next) || !quoted_ports(skb, p, at, next, &sport, &dport))
		return NULL;
	own = own_packet();
	if (!own)
		return NULL;
	own->low = is_low6(src, dst, sport, dport);
	low = READ_ONCE(own->low);
	connection_key6(&own->key6, low, src, dst, sport, dport, next);
	ct = bpf_map_lookup_elem(&sl_ct6, &own->key6);
	if (ct)
		*addr_epochs = quoted_epochs(ct, src, dst, 6, low);
	return ct;
}

/* The relation of an ICMP error to known connections. */
enum sl_relation {
	SL_UNRELATED = 0, /* an unknown connection, or one that is no longer allowed */
	SL_RELATED = 1, /* a connection of its receiver */
	SL_RELATED_VIA_STACK = 2, /* a connection that the host's stack forwards */
	/* the error's receiver did not send the quoted packet, or the pod that sends the error did
	 * not receive it */
	SL_FORGED = 3,
};

/* A connection that was evaluated under an older policy does not count as related. */
__noinline enum sl_relation relation_of(struct __sk_buff *skb, struct sl_packet *p)
{
	__u32 addr_epochs = 0;
	struct sl_ct *ct;
	bool forged;

	if (!p)
		return SL_FORGED;
	ct = p->family == 4 ? quoted4(skb, p, &addr_epochs, &forged)
			    : quoted6(skb, p, &addr_epochs, &forged);
	if (!ct)
		return forged ? SL_FORGED : SL_UNRELATED;
	if (moved_sides(READ_ONCE(ct->epochs), READ_ONCE(ct->where), addr_epochs))
		return SL_UNRELATED;
	/* about a packet of the initiator, which only knows the address that it had requested */
	if (cfg_services && p->low == !!(READ_ONCE(ct->flags) & SL_CT_ORIG_LO)) {
		p->front = front_of_connection(ct);
		p->asked_at = asked_of_connection(ct);
	}
	return READ_ONCE(ct->flags) & SL_CT_VIA_STACK ? SL_RELATED_VIA_STACK : SL_RELATED;
}

#endif
