/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_REWRITE_H
#define SLUICE_REWRITE_H

/*
 * Rewrites the frame of a translated packet: its destination on the way to the backend, its source
 * on the way back. This happens on delivery, after the last check that may hand the packet to the
 * stack, so that an error from the stack quotes the addresses that the sender knows.
 */

#include <linux/if_ether.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>

#include <sluice/arp.h>
#include <sluice/maps.h>
#include <sluice/packet.h>
#include <sluice/service.h>
#include <sluice/transport.h>

#define SL_TCP_CHECK 16 /* offset of the checksum in the TCP header */
#define SL_UDP_CHECK 6
#define SL_ICMP_CHECK 2

/* One end of a packet, in the form that is written to the frame. */
struct sl_end {
	__u8 addr[16]; /* IPv4: the first four bytes */
	__u16 port; /* host order */
	__u8 source; /* 1: the source; 0: the destination */
	__u8 pad[5];
};

/*
 * The offset of the transport checksum, and the flags for changing it; 0: the protocol's checksum
 * does not cover addresses, or the packet is a later fragment. UDP without a checksum stays
 * without one.
 */
static __always_inline __u32 checksum_at(const struct sl_packet *p, __u64 *flags)
{
	*flags = 0;
	if (p->fragment)
		return 0;
	switch (p->proto) {
	case SL_TCP:
		return p->l4 + SL_TCP_CHECK;
	case SL_UDP:
		*flags = BPF_F_MARK_MANGLED_0;
		return p->l4 + SL_UDP_CHECK;
	case SL_ICMPV6:
		return p->l4 + SL_ICMP_CHECK;
	}
	return 0;
}

/* The end of an IPv4 header without options, from its checksum on, and the ports. */
struct sl_ends4 {
	__be16 check;
	__be32 addr[2]; /* source, destination */
	__be16 port[2];
} __attribute__((packed, aligned(2)));
_Static_assert(offsetof(struct sl_ends4, port) == 10 && sizeof(struct sl_ends4) == 14,
	       "as on the wire");

/* Adds to sum the change of a 16-bit checksum when a 32-bit word changes. */
static __always_inline __u64 sum_change(__u64 sum, __u32 old, __u32 new)
{
	return sum + (__u32)~old + new;
}

static __always_inline __u32 fold_to_32(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (__u32)(sum + (sum >> 32));
}

/* RFC 1624, for a 32-bit word. */
static __always_inline __be16 checksum_after(__be16 check, __be32 old, __be32 new)
{
	__u32 sum = fold_to_32(sum_change((__u16)~check, old, new));

	sum = (sum & 0xffff) + (sum >> 16);
	return (__be16) ~(sum + (sum >> 16));
}

/*
 * Writes one end of a packet with ports into its frame; 0 on success. Address and port need
 * separate calls for the transport checksum: if the hardware completes the checksum
 * (CHECKSUM_PARTIAL), the field only covers the addresses. Changes within the IP header cancel out,
 * because its own checksum changes, too.
 */
static __always_inline long rewrite_ports4(struct __sk_buff *skb, const struct sl_end *to,
					   __u32 check, __u64 flags)
{
	__u32 at = ETH_HLEN + offsetof(struct iphdr, check);
	__be16 port = bpf_htons(to->port), old_port;
	__be32 addr = *(const __be32 *)to->addr, old;
	__u64 source = to->source;
	struct sl_ends4 ends;

	if (read_packet(skb, at, &ends))
		return -1;
	old = (__be32)pick(source, ends.addr[0], ends.addr[1]);
	old_port = (__be16)pick(source, ends.port[0], ends.port[1]);
	if (old_port != port && !check)
		return -1;
	ends.check = checksum_after(ends.check, old, addr);
	ends.addr[0] = (__be32)pick(source, addr, ends.addr[0]);
	ends.addr[1] = (__be32)pick(source, ends.addr[1], addr);
	ends.port[0] = (__be16)pick(source, port, ends.port[0]);
	ends.port[1] = (__be16)pick(source, ends.port[1], port);
	if (check &&
	    bpf_l4_csum_replace(skb, check, old, addr, flags | BPF_F_PSEUDO_HDR | sizeof(addr)))
		return -1;
	if (old_port != port &&
	    bpf_l4_csum_replace(skb, check, old_port, port, flags | sizeof(port)))
		return -1;
	return bpf_skb_store_bytes(skb, at, &ends, sizeof(ends), 0);
}

static __always_inline long rewrite_address4(struct __sk_buff *skb, const struct sl_end *to,
					     __u32 check, __u64 flags)
{
	__u32 at = ETH_HLEN +
		   (to->source ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr));
	__be32 new = *(const __be32 *)to->addr, old;

	if (bpf_skb_load_bytes(skb, at, &old, sizeof(old)))
		return -1;
	if (bpf_l3_csum_replace(skb, ETH_HLEN + offsetof(struct iphdr, check), old, new,
				sizeof(new)))
		return -1;
	if (check &&
	    bpf_l4_csum_replace(skb, check, old, new, flags | BPF_F_PSEUDO_HDR | sizeof(new)))
		return -1;
	return bpf_skb_store_bytes(skb, at, &new, sizeof(new), 0);
}

struct sl_words6 {
	__be32 word[4];
} __attribute__((packed, aligned(2)));

/*
 * An IPv6 header has no checksum that would compensate for the change. BPF_F_RECOMPUTE_CSUM makes
 * the kernel update a checksum over the whole packet, if the hardware has supplied one.
 */
static __always_inline long rewrite_address6(struct __sk_buff *skb, const struct sl_end *to,
					     __u32 check, __u64 flags)
{
	__u32 at = ETH_HLEN +
		   (to->source ? offsetof(struct ipv6hdr, saddr) : offsetof(struct ipv6hdr, daddr));
	struct sl_words6 old;
	__u64 diff = 0;
	__be32 new[4];
	int i;

	__builtin_memcpy(new, to->addr, sizeof(new));
	if (read_packet(skb, at, &old))
		return -1;
	for (i = 0; i < 4; i++)
		diff = sum_change(diff, old.word[i], new[i]);
	if (check && bpf_l4_csum_replace(skb, check, 0, fold_to_32(diff), flags | BPF_F_PSEUDO_HDR))
		return -1;
	return bpf_skb_store_bytes(skb, at, new, sizeof(new), BPF_F_RECOMPUTE_CSUM);
}

static __always_inline long rewrite_port(struct __sk_buff *skb, const struct sl_packet *p,
					 const struct sl_end *to, __u32 check, __u64 flags)
{
	__u32 at = p->l4 + (to->source ? 0 : sizeof(__be16));
	__be16 new = bpf_htons(to->port), old;

	if (read_packet(skb, at, &old))
		return -1;
	if (old == new)
		return 0;
	if (!check)
		return -1;
	if (bpf_l4_csum_replace(skb, check, old, new, flags | sizeof(new)))
		return -1;
	return bpf_skb_store_bytes(skb, at, &new, sizeof(new), 0);
}

/*
 * Writes one end of the packet into its frame; 0 on success. It is global, because the verifier
 * would walk a static function once for each state of its callers: a tenth of the instructions of
 * all programs.
 */
__noinline int rewrite_end(struct __sk_buff *skb, const struct sl_packet *p,
			   const struct sl_end *to)
{
	bool ports;
	__u64 flags;
	__u32 check;

	if (!p || !to)
		return -1;
	ports = !p->fragment && p->proto != SL_ICMP && p->proto != SL_ICMPV6;
	check = checksum_at(p, &flags);
	if (likely(ports && p->family == 4 && p->l4 == ETH_HLEN + sizeof(struct iphdr)))
		return (int)rewrite_ports4(skb, to, check, flags);
	if (p->family == 4 ? rewrite_address4(skb, to, check, flags)
			   : rewrite_address6(skb, to, check, flags))
		return -1;
	return ports ? (int)rewrite_port(skb, p, to, check, flags) : 0;
}

/* Writes the translated destination to the frame. */
static __always_inline int rewrite_destination(struct __sk_buff *skb, const struct sl_packet *p)
{
	struct sl_end to = { .port = p->dport };

	__builtin_memcpy(to.addr, p->dst, sizeof(to.addr));
	return rewrite_end(skb, p, &to);
}

/* Reads the address at index place - 1 of sl_own; 0 on success. */
static __always_inline int own_address(__u8 *addr, __u16 place, __u8 family)
{
	__u32 at = place - 1;
	struct sl_own *own = bpf_map_lookup_elem(&sl_own, &at);

	if (!own || own->family != family)
		return -1;
	__builtin_memcpy(addr, own->addr, sizeof(own->addr));
	return 0;
}

/* The source of an answer: the address that the initiator had sent to. */
static __always_inline long find_asked(const struct sl_packet *p, struct sl_end *end)
{
	struct sl_front *front = front_at(p->front);

	if (!front)
		return -1;
	end->port = front->port;
	if (p->asked_at)
		return own_address(end->addr, p->asked_at, p->family);
	__builtin_memcpy(end->addr, front->addr, sizeof(end->addr));
	return 0;
}

/* Writes the requested address to the frame as source. */
static __always_inline int rewrite_source(struct __sk_buff *skb, const struct sl_packet *p)
{
	struct sl_end from = { .source = 1 };

	if (find_asked(p, &from))
		return -1;
	return rewrite_end(skb, p, &from);
}

/* Rewrites the frame for its receiver: the destination of a request, or the source of an answer. */
__noinline int rewrite(struct __sk_buff *skb, struct sl_packet *p)
{
	if (!p)
		return -1;
	if (p->translated == SL_TRANSLATED_DESTINATION)
		return rewrite_destination(skb, p);
	if (p->reply && p->front)
		return rewrite_source(skb, p);
	return 0;
}

static __always_inline bool needs_rewrite(const struct sl_packet *p)
{
	return cfg_services && p->front;
}

#endif
