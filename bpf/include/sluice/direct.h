/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_DIRECT_H
#define SLUICE_DIRECT_H

/*
 * Tunnel packets that the programs encapsulate and decapsulate themselves, instead of the tunnel
 * device: sluice_from_pod sends them out of the uplink, sluice_from_underlay decapsulates them at
 * the uplink. They have the bytes that the device would send, so that the other node may use either
 * path. Only IPv4 outer packets: over IPv6 the outer UDP checksum is mandatory, and no flag of the
 * helper adds it to the segments of a GSO packet.
 */

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>

#include <sluice/clock.h>
#include <sluice/config.h>
#include <sluice/ipv4.h>
#include <sluice/node.h>
#include <sluice/packet.h>

/* TTL of outer packets: Linux's default. */
#define SL_OUTER_TTL 64

#define SL_IP4_WHOLE 0x4000 /* of a packet that is no fragment: DF or nothing */
#define SL_ECN_MASK 0x03
#define SL_ECN_ECT0 0x02
#define SL_ECN_CE 0x03
#define SL_VXLAN_HAS_VNI 0x08000000

/* The bytes of a tunnel packet between its outer Ethernet header and the inner IP header. */
struct sl_outer {
	__u8 version; /* and header length */
	__u8 tos;
	__be16 length, id, fragment;
	__u8 ttl, proto;
	__be16 check;
	__be32 saddr, daddr;
	__be16 sport, dport, udp_length, udp_check;
	__be32 flags, vni; /* VXLAN; the identity << 8 */
	__u8 inner_dst[ETH_ALEN], inner_src[ETH_ALEN];
	__be16 inner_type;
} __attribute__((packed, aligned(2)));
_Static_assert(sizeof(struct sl_outer) == SL_TUNNEL_BYTES, "as on the wire");

#define SL_OUTER_UDP 20 /* offset in it; the length of the IP header */
#define SL_OUTER_IP4 0x45 /* version 4, no options */

static __always_inline struct sl_direct *direct_at(__u32 number)
{
	return bpf_map_lookup_elem(&sl_direct, &number);
}

/* The sum over an IPv4 header without options, in host order; 0xffff if its checksum is right. */
static __always_inline __u32 outer_sum(const struct sl_outer *o)
{
	const __be16 *at = (const __be16 *)o;
	__u32 sum = 0;

	for (int i = 0; i < SL_OUTER_UDP / 2; i++)
		sum += bpf_ntohs(at[i]);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/*
 * The direct path to a node; NULL if packets must go through the tunnel device. A path is only
 * valid while the datapath confirms it: while the datapath is down, only the kernel follows changes
 * of routes.
 */
static __always_inline struct sl_direct *direct_path(__u32 number, __u32 *ports)
{
	struct sl_direct *to, *local;

	to = direct_at(number);
	if (!to || !READ_ONCE(to->hop))
		return NULL;
	local = direct_at(0);
	if (!local || READ_ONCE(local->hop) <= bpf_ktime_get_coarse_ns())
		return NULL;
	*ports = READ_ONCE(local->ports);
	return to;
}

/* The outer traffic class byte, as the tunnel device sets it (RFC 6040, 4.1). */
static __always_inline __u8 outer_tos(__u8 inner)
{
	__u8 ecn = inner & SL_ECN_MASK;

	if (ecn == SL_ECN_CE)
		ecn = SL_ECN_ECT0;
	return (cfg_tunnel_dscp ? inner & ~SL_ECN_MASK : 0) | ecn;
}

/* The outer source port that the tunnel device would choose, so that a flow has the same port on
 * both paths. */
static __always_inline __u16 outer_port(struct __sk_buff *skb, __u32 ports)
{
	__u32 hash = bpf_get_hash_recalc(skb), low = (__u16)ports, high = ports >> 16;

	hash ^= hash << 16;
	return (__u16)(low + ((__u64)hash * (high - low) >> 32));
}

/* Values of send_direct. */
#define SL_DIRECT_SENT 0
#define SL_DIRECT_UNCHANGED 1 /* not possible, and the packet is unchanged */
#define SL_DIRECT_FAILED 2 /* the packet cannot be sent any more */

/*
 * The kernel finds the inner Ethernet header by this length, so it is the length of that header
 * alone, without the VXLAN header.
 */
#define SL_DIRECT_ROOM                                                                           \
	(BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L3_IPV4 | BPF_F_ADJ_ROOM_ENCAP_L4_UDP | \
	 BPF_F_ADJ_ROOM_ENCAP_L2_ETH | BPF_F_ADJ_ROOM_ENCAP_L2(ETH_HLEN))

/*
 * Builds the tunnel packet for a pod's packet to p->node and sends it out of the uplink. The helper
 * refuses packets that have a tunnel inside already and large SCTP packets.
 */
__noinline int send_direct(struct __sk_buff *skb, struct sl_packet *p)
{
	struct bpf_redir_neigh hop = { .nh_family = 2 /* AF_INET */ };
	__u32 length = skb->len - ETH_HLEN + sizeof(struct sl_outer), ports;
	struct sl_outer o = { .version = SL_OUTER_IP4 };
	struct sl_direct *to;
	struct sl_node *node;
	__be16 head = 0;
	__u64 way;

	if (!p)
		return SL_DIRECT_UNCHANGED;
	node = node_at(p->node);
	to = direct_path(p->node, &ports);
	if (!node || !to || length > 0xffff || read_packet(skb, ETH_HLEN, &head))
		return SL_DIRECT_UNCHANGED;
	way = READ_ONCE(to->hop);
	head = bpf_ntohs(head);
	o.tos = outer_tos(p->family == 4 ? head : head >> 4);
	o.sport = bpf_htons(outer_port(skb, ports));
	if (bpf_skb_adjust_room(skb, sizeof(o), BPF_ADJ_ROOM_MAC, SL_DIRECT_ROOM))
		return SL_DIRECT_UNCHANGED;
	o.length = bpf_htons(length);
	o.fragment = bpf_htons(SL_IP4_WHOLE);
	o.ttl = SL_OUTER_TTL;
	o.proto = SL_UDP;
	o.saddr = READ_ONCE(to->local);
	o.daddr = node->ip4;
	o.check = bpf_htons(~outer_sum(&o));
	o.dport = bpf_htons(cfg_direct_port);
	o.udp_length = bpf_htons(length - SL_OUTER_UDP);
	o.flags = bpf_htonl(SL_VXLAN_HAS_VNI);
	o.vni = bpf_htonl(p->src_identity << 8);
	__builtin_memcpy(o.inner_dst, p->dst_mac, ETH_ALEN);
	__builtin_memcpy(o.inner_src, p->src_mac, ETH_ALEN);
	o.inner_type = bpf_htons(p->ethertype);
	if (bpf_skb_store_bytes(skb, ETH_HLEN, &o, sizeof(o), BPF_F_RECOMPUTE_CSUM))
		return SL_DIRECT_FAILED;
	hop.ipv4_nh = (__be32)(way >> 32);
	if (bpf_redirect_neigh((__u32)way, &hop, sizeof(hop), 0) != TC_ACT_REDIRECT)
		return SL_DIRECT_FAILED;
	return SL_DIRECT_SENT;
}

#endif
