/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_REWRITE_H
#define SLUICE_REWRITE_H

/*
 * Changes the frame of a packet that a service has led elsewhere: its destination on
 * the way to the backend, its source on the way back. It happens when the packet is
 * delivered, after the last question to the stack, so that an error of the stack
 * quotes what the sender knows.
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

#define SL_TCP_CHECK 16 /* offset of the checksum in its header */
#define SL_UDP_CHECK 6
#define SL_ICMP_CHECK 2

/* One end of a packet, as the frame shall have it. */
struct sl_end {
	__u8 addr[16]; /* IPv4: the first four bytes */
	__u16 port; /* host order */
	__u8 source; /* 1: the source; 0: the destination */
	__u8 pad[5];
};

/*
 * Flags for the checksum of the packet's protocol, and where it is; 0: it has none
 * that covers addresses, or lies in another fragment. UDP without a checksum stays
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

/*
 * IPv6 has no checksum of its own that would make up for the change: the store tells
 * the kernel, which may have the sum of the whole packet from the hardware.
 */
static __always_inline long rewrite_address6(struct __sk_buff *skb, const struct sl_end *to,
					     __u32 check, __u64 flags)
{
	__u32 at = ETH_HLEN +
		   (to->source ? offsetof(struct ipv6hdr, saddr) : offsetof(struct ipv6hdr, daddr));
	__be32 new[4], old[4];
	__s64 diff;

	__builtin_memcpy(new, to->addr, sizeof(new));
	if (bpf_skb_load_bytes(skb, at, old, sizeof(old)))
		return -1;
	diff = bpf_csum_diff(old, sizeof(old), new, sizeof(new), 0);
	if (check && bpf_l4_csum_replace(skb, check, 0, (__u64)diff, flags | BPF_F_PSEUDO_HDR))
		return -1;
	return bpf_skb_store_bytes(skb, at, new, sizeof(new), BPF_F_RECOMPUTE_CSUM);
}

/* Writes one end of the packet into its frame, 0 on success. */
static __noinline long rewrite_end(struct __sk_buff *skb, const struct sl_packet *p,
				   const struct sl_end *to)
{
	__u32 at = p->l4 + (to->source ? 0 : sizeof(__be16));
	__be16 new = bpf_htons(to->port), old;
	__u64 flags;
	__u32 check = checksum_at(p, &flags);

	if (p->family == 4 ? rewrite_address4(skb, to, check, flags)
			   : rewrite_address6(skb, to, check, flags))
		return -1;
	if (p->fragment || p->proto == SL_ICMP || p->proto == SL_ICMPV6)
		return 0;
	if (bpf_skb_load_bytes(skb, at, &old, sizeof(old)))
		return -1;
	if (old == new)
		return 0;
	if (!check)
		return -1;
	if (bpf_l4_csum_replace(skb, check, old, new, flags | sizeof(new)))
		return -1;
	return bpf_skb_store_bytes(skb, at, &new, sizeof(new), 0);
}

/* The frame goes where the packet was led to. */
static __always_inline long rewrite_destination(struct __sk_buff *skb, const struct sl_packet *p)
{
	struct sl_end to = { .port = p->dport };

	__builtin_memcpy(to.addr, p->dst, sizeof(to.addr));
	return rewrite_end(skb, p, &to);
}

/* The address at a place in sl_own, 0 on success. */
static __always_inline int own_address(__u8 *addr, __u16 place, __u8 family)
{
	__u32 at = place - 1;
	struct sl_own *own = bpf_map_lookup_elem(&sl_own, &at);

	if (!own || own->family != family)
		return -1;
	__builtin_memcpy(addr, own->addr, sizeof(own->addr));
	return 0;
}

/* Where an answer seems to come from: what the initiator has asked. */
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

/* The frame comes from what the initiator has asked. */
static __always_inline long rewrite_source(struct __sk_buff *skb, const struct sl_packet *p)
{
	struct sl_end from = { .source = 1 };

	if (find_asked(p, &from))
		return -1;
	return rewrite_end(skb, p, &from);
}

/* What a frame needs on its way to the end that it is delivered to. */
__noinline int rewrite(struct __sk_buff *skb, struct sl_packet *p)
{
	if (!p)
		return -1;
	if (p->translated == SL_TRANSLATED_DESTINATION)
		return (int)rewrite_destination(skb, p);
	if (p->reply && p->front)
		return (int)rewrite_source(skb, p);
	return 0;
}

static __always_inline bool needs_rewrite(const struct sl_packet *p)
{
	return cfg_services && p->front;
}

#endif
