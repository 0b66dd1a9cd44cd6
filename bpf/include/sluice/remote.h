/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_REMOTE_H
#define SLUICE_REMOTE_H

/*
 * Sends packets to pods of other nodes: through a tunnel whose key contains the sender's
 * identity, or natively routed.
 */

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include <sluice/config.h>
#include <sluice/direct.h>
#include <sluice/node.h>
#include <sluice/packet.h>
#include <sluice/rewrite.h>
#include <sluice/transport.h>

#define SL_AF_INET 2
#define SL_AF_INET6 10

/* Length of the IP and transport headers, which each segment of a GSO packet repeats. */
static __always_inline __u32 segment_headers(struct __sk_buff *skb, const struct sl_packet *p)
{
	__u32 bytes = p->l4 - ETH_HLEN;
	struct sl_tcp tcp;

	if (p->proto != SL_TCP)
		return bytes + 8;
	if (read_packet(skb, p->l4 + 12, &tcp))
		return bytes + 20;
	return bytes + (tcp.offset >> 4) * 4;
}

/*
 * Whether the packet must go through the stack, which answers with time exceeded or packet too
 * big; its routes lead to the same node. The path MTU may be lower than the device's MTU.
 */
static __always_inline enum sl_reason remote_needs_stack(struct __sk_buff *skb,
							 const struct sl_packet *p, __u64 way)
{
	if (p->hops <= 1)
		return SL_REASON_STACK_TIME_EXCEEDED;
	if (likely(skb->len - ETH_HLEN <= way_mtu(way)))
		return SL_CONTINUE;
	if (skb->gso_size && skb->gso_size + segment_headers(skb, p) <= way_mtu(way))
		return SL_CONTINUE;
	return SL_REASON_STACK_TOO_BIG;
}

/* TTL, protocol and checksum of an IPv4 header. */
struct sl_hop4 {
	__u8 ttl;
	__u8 protocol;
	__be16 check;
};

/* Decrements the hop limit; see forward4 for the checksums. */
static __always_inline long lower_hops(struct __sk_buff *skb, const struct sl_packet *p)
{
	__u8 hops = p->hops - 1;
	struct sl_hop4 hop;
	__u32 check;

	if (p->family == 6)
		return bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct ipv6hdr, hop_limit),
					   &hops, sizeof(hops), BPF_F_RECOMPUTE_CSUM);
	if (read_packet(skb, ETH_HLEN + offsetof(struct iphdr, ttl), &hop))
		return -1;
	check = hop.check;
	check += bpf_htons(0x0100);
	hop.check = (__be16)(check + (check >= 0xffff));
	hop.ttl = hops;
	return bpf_skb_store_bytes(skb, ETH_HLEN + offsetof(struct iphdr, ttl), &hop, sizeof(hop),
				   0);
}

/* The DSCP of the packet in the traffic class byte; the tunnel device copies the ECN bits. */
static __always_inline __u8 dscp_of(struct __sk_buff *skb, const struct sl_packet *p)
{
	__be16 head = 0;

	if (read_packet(skb, ETH_HLEN, &head))
		return 0;
	head = bpf_ntohs(head);
	return (p->family == 4 ? head : head >> 4) & 0xfc;
}

/*
 * Sets the packet's tunnel key for a node. Over IPv4 the outer UDP checksum is omitted: it costs
 * time and detects nothing that Ethernet and the inner packet's checksums do not. Over IPv6 a
 * receiver drops packets without it.
 */
__noinline enum sl_reason set_tunnel_key(struct __sk_buff *skb, struct sl_packet *p, __u32 identity,
					 __u32 way)
{
	__u64 flags = way & SL_WAY_PIECES ? 0 : BPF_F_DONT_FRAGMENT;
	struct bpf_tunnel_key key = {};
	struct sl_node *node;

	if (!p)
		return SL_REASON_MALFORMED;
	node = node_at(p->node);
	if (!node)
		return SL_REASON_NO_NODE;
	key.tunnel_id = identity;
	key.tunnel_ttl = SL_OUTER_TTL;
	if (cfg_tunnel_dscp)
		key.tunnel_tos = dscp_of(skb, p);
	if (way & SL_WAY_UNDERLAY6) {
		flags |= BPF_F_TUNINFO_IPV6;
		__builtin_memcpy(key.remote_ipv6, node->ip6, sizeof(key.remote_ipv6));
	} else {
		flags |= BPF_F_ZERO_CSUM_TX;
		key.remote_ipv4 = bpf_ntohl(node->ip4);
	}
	if (bpf_skb_set_tunnel_key(skb, &key, sizeof(key), flags))
		return SL_REASON_TUNNEL_KEY;
	return SL_REASON_FORWARDED_OVERLAY;
}

/* Sends to the node as next hop, through its device. */
static __always_inline long send_to_hop(const struct sl_packet *p, const struct sl_node *node,
					__u64 way)
{
	struct bpf_redir_neigh hop = {};

	if (p->family == 4) {
		hop.nh_family = SL_AF_INET;
		hop.ipv4_nh = node->ip4;
	} else {
		hop.nh_family = SL_AF_INET6;
		__builtin_memcpy(hop.ipv6_nh, node->ip6, sizeof(hop.ipv6_nh));
	}
	return bpf_redirect_neigh(way_device(way), &hop, sizeof(hop), 0);
}

/*
 * Sends by the routes of the main table, with their next hop; without a next hop, the kernel would
 * treat any destination as a neighbour. Routing rules are bypassed, because the rule against
 * unmarked packets would drop the packet.
 */
static __always_inline long send_by_routes(struct __sk_buff *skb, const struct sl_packet *p)
{
	struct bpf_fib_lookup fib = {};
	struct bpf_redir_neigh hop = {};
	long err;

	fib.ifindex = skb->ifindex;
	fib.l4_protocol = p->proto;
	fib.sport = bpf_htons(p->sport);
	fib.dport = bpf_htons(p->dport);
	if (p->family == 4) {
		fib.family = SL_AF_INET;
		fib.ipv4_src = *(const __be32 *)p->src;
		fib.ipv4_dst = *(const __be32 *)p->dst;
	} else {
		fib.family = SL_AF_INET6;
		__builtin_memcpy(fib.ipv6_src, p->src, sizeof(fib.ipv6_src));
		__builtin_memcpy(fib.ipv6_dst, p->dst, sizeof(fib.ipv6_dst));
	}
	err = bpf_fib_lookup(skb, &fib, sizeof(fib), BPF_FIB_LOOKUP_DIRECT);
	/* redirect_neigh resolves the neighbour */
	if (err != BPF_FIB_LKUP_RET_SUCCESS && err != BPF_FIB_LKUP_RET_NO_NEIGH)
		return TC_ACT_SHOT;
	hop.nh_family = fib.family;
	__builtin_memcpy(hop.ipv6_nh, fib.ipv6_dst, sizeof(hop.ipv6_nh));
	return bpf_redirect_neigh(fib.ifindex, &hop, sizeof(hop), 0);
}

/* Sends a pod's packet in a tunnel, without the tunnel device if possible. */
static __always_inline enum sl_reason send_in_tunnel(struct __sk_buff *skb, struct sl_packet *p,
						     __u64 way)
{
	enum sl_reason reason;

	/* the kernel has to compute the checksums of the outer packets, or to fragment them */
	if (SL_PROGRAM == SL_PROGRAM_FROM_POD && cfg_direct_port &&
	    !(way_flags(way) & (SL_WAY_UNDERLAY6 | SL_WAY_PIECES))) {
		switch (send_direct(skb, p)) {
		case SL_DIRECT_SENT:
			p->direct = 1;
			return SL_REASON_FORWARDED_OVERLAY;
		case SL_DIRECT_FAILED:
			return SL_REASON_REWRITE_FAILED;
		}
	}
	reason = set_tunnel_key(skb, p, p->src_identity, way_flags(way));
	if (reason == SL_REASON_FORWARDED_OVERLAY &&
	    bpf_redirect(way_device(way), 0) != TC_ACT_REDIRECT)
		return SL_REASON_NO_NODE;
	return reason;
}

/* Forwards a pod's packet to a pod of another node, or to that node. */
__noinline enum sl_reason forward_remote(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;
	struct sl_node *node;
	__u64 way;

	if (!p)
		return SL_REASON_MALFORMED;
	node = node_at(p->node);
	if (!node)
		return SL_REASON_NO_NODE;
	way = way_to(node, p->family);
	if (!way)
		return SL_REASON_NO_NODE;
	reason = remote_needs_stack(skb, p, way);
	if (reason)
		return reason;
	if ((needs_rewrite(p) && p->translated && rewrite(skb, p)) || lower_hops(skb, p))
		return SL_REASON_REWRITE_FAILED;
	if (way_flags(way) & SL_WAY_OVERLAY)
		return send_in_tunnel(skb, p, way);
	if (way_flags(way) & SL_WAY_LOOKUP)
		return send_by_routes(skb, p) == TC_ACT_REDIRECT ? SL_REASON_FORWARDED_NATIVE
								 : SL_REASON_NO_NODE;
	return send_to_hop(p, node, way) == TC_ACT_REDIRECT ? SL_REASON_FORWARDED_NATIVE
							    : SL_REASON_NO_NODE;
}

#endif
