/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * Decapsulates tunnel packets for pods of this node, so that they bypass the tunnel device. All
 * other packets are left to the stack, which passes tunnel packets to the tunnel device. The
 * program only drops packets that it has decapsulated. Runs at the ingress hook of an uplink,
 * before sluice_from_uplink.
 *
 * All packets of a flow take one path, so that they stay in order. TCP packets of any size are
 * decapsulated here. Large UDP packets cannot be: they would keep their tunnel type, and the kernel
 * would lose them. They go through the tunnel device, and from then on so do all packets of their
 * connection. An unknown connection may begin with a large packet, so its first packets go through
 * the device, too.
 */

#define SL_PROGRAM SL_PROGRAM_FROM_UNDERLAY

#include <sluice/admit.h>
#include <sluice/deliver.h>
#include <sluice/direct.h>
#include <sluice/endpoint.h>
#include <sluice/inner.h>
#include <sluice/node.h>
#include <sluice/observe.h>

/* BPF_F_ADJ_ROOM_DECAP_L3_IPV6 of linux/bpf.h, since Linux 6.3 */
#define SL_DECAP_IP6 (1ULL << 8)

/*
 * Whether the form of the outer headers is exactly the form that nodes send, without
 * fragmentation and without a congestion mark (ECN CE). All other packets are left to the stack,
 * which accepts more forms, and copies a congestion mark to the inner packet.
 */
static __always_inline bool is_whole_tunnel_packet(const struct sl_outer *o, __u32 length)
{
	return o->version == SL_OUTER_IP4 && o->proto == SL_UDP &&
	       o->dport == bpf_htons(cfg_direct_port) && o->ttl &&
	       !(o->fragment & ~bpf_htons(SL_IP4_WHOLE)) && (o->tos & SL_ECN_MASK) != SL_ECN_CE &&
	       bpf_ntohs(o->length) == length &&
	       bpf_ntohs(o->udp_length) == length - SL_OUTER_UDP && !o->udp_check &&
	       o->flags == bpf_htonl(SL_VXLAN_HAS_VNI) && !(o->vni & bpf_htonl(0xff)) &&
	       outer_sum(o) == 0xffff;
}

/*
 * Finds the node that sent the packet. The packet must have arrived by the uplink that leads to
 * that node, and its outer addresses must be the ones that the two nodes use for each other. The
 * firewall of this node drops packets with a forged node address at other uplinks.
 */
static __always_inline bool find_sending_node(struct __sk_buff *skb, struct sl_packet *p,
					      const struct sl_outer *o)
{
	struct sl_node_addr key = { .family = 4 };
	struct sl_direct *from;
	struct sl_node *node;
	__u32 *number, ports;

	*(__be32 *)key.addr = o->saddr;
	number = bpf_map_lookup_elem(&sl_node_addr, &key);
	if (!number)
		return false;
	from = direct_path(*number, &ports);
	node = node_at(*number);
	if (!from || !node || (__u32)READ_ONCE(from->hop) != skb->ifindex ||
	    READ_ONCE(from->local) != o->daddr || node->ip4 != o->saddr)
		return false;
	p->node = (__u16)*number;
	p->sending_node = p->node;
	p->vni = bpf_ntohl(o->vni) >> 8;
	return true;
}

/* Whether the destination is a local pod whose packets bypass the host end's queues. */
static __always_inline bool find_pod(struct sl_packet *p)
{
	struct sl_endpoint *dst;

	p->dst_slot = slot_of_address(p->dst, p->family);
	if (p->dst_slot == SL_SLOT_NONE || p->dst_slot == SL_SLOT_HOST)
		return false;
	dst = endpoint_at(p->dst_slot);
	if (!dst || dst->deliver != SL_DELIVER_PEER)
		return false;
	p->dst_identity = identity_of(dst);
	return true;
}

/*
 * Whether datagrams of the connection are decapsulated here. The flag is set before the tunnel
 * device gets the large packet, so that no later packet overtakes it.
 */
static __always_inline bool is_small_udp(struct __sk_buff *skb, struct sl_ct *ct)
{
	if (!ct)
		return false;
	if (!skb->gso_size)
		return !(READ_ONCE(ct->flags) & SL_CT_BY_DEVICE);
	if (!(READ_ONCE(ct->flags) & SL_CT_BY_DEVICE))
		__sync_fetch_and_or(&ct->flags, SL_CT_BY_DEVICE);
	return false;
}

/* The beginning of a UDP header. */
struct sl_udp_ports {
	__be16 source, dest;
};

/* Whether packets of the connection are decapsulated here; "at" is the offset of the transport
 * header. */
static __always_inline bool is_taken4(struct __sk_buff *skb, const struct iphdr *ip, __u32 at)
{
	const __u8 *src = (const __u8 *)&ip->saddr, *dst = (const __u8 *)&ip->daddr;
	struct sl_ct_key4 key;
	struct sl_udp_ports ports;
	__u16 sport, dport;

	if (ip->protocol == SL_TCP)
		return true;
	if (ip->protocol != SL_UDP || ip->ihl != 5 || read_packet(skb, at, &ports))
		return false;
	sport = bpf_ntohs(ports.source);
	dport = bpf_ntohs(ports.dest);
	connection_key4(&key, is_low4(src, dst, sport, dport), src, dst, sport, dport, SL_UDP);
	return is_small_udp(skb, bpf_map_lookup_elem(&sl_ct4, &key));
}

static __always_inline bool is_taken6(struct __sk_buff *skb, const struct ipv6hdr *ip, __u32 at)
{
	__u8 src[16] __attribute__((aligned(8))), dst[16] __attribute__((aligned(8)));
	struct sl_ct_key6 key;
	struct sl_udp_ports ports;
	__u16 sport, dport;

	if (ip->nexthdr == SL_TCP)
		return true;
	if (ip->nexthdr != SL_UDP || read_packet(skb, at, &ports))
		return false;
	__builtin_memcpy(src, &ip->saddr, sizeof(src));
	__builtin_memcpy(dst, &ip->daddr, sizeof(dst));
	sport = bpf_ntohs(ports.source);
	dport = bpf_ntohs(ports.dest);
	connection_key6(&key, is_low6(src, dst, sport, dport), src, dst, sport, dport, SL_UDP);
	return is_small_udp(skb, bpf_map_lookup_elem(&sl_ct6, &key));
}

/* Whether the inner packet is for a local pod, is not a fragment, and is decapsulated here. Not
 * inlined, so that its copies of headers take no stack space from admit. */
__noinline int is_for_pod(struct __sk_buff *skb, struct sl_packet *p)
{
	const __u32 at = ETH_HLEN + SL_TUNNEL_BYTES;

	if (!p)
		return false;
	if (p->ethertype == ETH_P_IP) {
		struct iphdr ip;

		if (read_packet(skb, at, &ip) || ip.frag_off & ~bpf_htons(SL_IP4_WHOLE) ||
		    !is_taken4(skb, &ip, at + sizeof(ip)))
			return false;
		*(__be32 *)p->dst = ip.daddr;
		p->family = 4;
	} else if (p->ethertype == ETH_P_IPV6) {
		struct ipv6hdr ip;

		if (read_packet(skb, at, &ip) || !is_taken6(skb, &ip, at + sizeof(ip)))
			return false;
		__builtin_memcpy(p->dst, &ip.daddr, sizeof(p->dst));
		p->family = 6;
	} else {
		return false;
	}
	return find_pod(p);
}

/*
 * Decapsulates the packet; its frame keeps the outer addresses. false: nothing has changed. If the
 * network device has verified the inner checksum as well as the outer one, the packet keeps this
 * result, which the kernel would otherwise discard. The helper of Linux before 6.3 cannot
 * decapsulate IPv6 packets.
 */
static __always_inline bool take_out(struct __sk_buff *skb, const struct sl_packet *p)
{
	bool verified = bpf_csum_level(skb, BPF_CSUM_LEVEL_QUERY) >= 1;
	__u64 flags = BPF_F_ADJ_ROOM_FIXED_GSO;

	if (verified)
		flags |= BPF_F_ADJ_ROOM_NO_CSUM_RESET;
	if (p->family == 6)
		flags |= SL_DECAP_IP6;
	if (bpf_skb_adjust_room(skb, -SL_TUNNEL_BYTES, BPF_ADJ_ROOM_MAC, flags))
		return false;
	if (verified)
		bpf_csum_level(skb, BPF_CSUM_LEVEL_DEC);
	return true;
}

static __always_inline enum sl_reason parse(struct __sk_buff *skb, struct sl_packet *p)
{
	const __be16 type = bpf_htons(ETH_P_IPV6);

	if (p->family == 4)
		return parse_inner4(skb, p);
	if (bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_proto), &type, sizeof(type), 0))
		return SL_REASON_REWRITE_FAILED;
	return parse_inner6(skb, p);
}

static __always_inline enum sl_reason pass(struct __sk_buff *skb, struct sl_packet *p,
					   __u32 *ifindex)
{
	enum sl_reason reason = parse(skb, p);

	return reason ? reason : pass_to_pod(skb, p, ifindex);
}

/*
 * Passes a packet that needs the stack to the tunnel device, as if the device had decapsulated it:
 * sluice_from_overlay handles it there. On the uplink, the stack would drop it as forged.
 */
static __always_inline int give_to_tunnel(struct __sk_buff *skb)
{
	skb->mark = SL_MARK_TAKEN_OUT;
	return (int)bpf_redirect(way_device(local_way()), BPF_F_INGRESS);
}

static __always_inline int take(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;
	__u32 ifindex = 0;

	if (!is_for_pod(skb, p) || !take_out(skb, p))
		return TC_ACT_UNSPEC;
	reason = pass(skb, p, &ifindex);
	observe(skb, p, reason);
	switch (reason) {
	case SL_REASON_FORWARDED_TO_STACK:
	case SL_REASON_STACK_TIME_EXCEEDED:
	case SL_REASON_STACK_TOO_BIG:
		return give_to_tunnel(skb);
	case SL_REASON_FORWARDED_TO_POD:
	case SL_REASON_FORWARDED_TO_PROXY:
		return act(skb, reason, ifindex);
	default:
		return TC_ACT_SHOT;
	}
}

SEC("tc") int sluice_from_underlay(struct __sk_buff *skb)
{
	struct sl_outer outer;
	struct sl_packet *p;

	/* frames for other hosts, and tagged ones, which belong to VLAN devices on top of this one
	 */
	if (skb->protocol != bpf_htons(ETH_P_IP) || skb->pkt_type != SL_PACKET_HOST ||
	    skb->vlan_present)
		return TC_ACT_UNSPEC;
	if (read_packet(skb, ETH_HLEN, &outer) ||
	    !is_whole_tunnel_packet(&outer, skb->len - ETH_HLEN))
		return TC_ACT_UNSPEC;
	p = new_packet(SL_INGRESS);
	if (!p || !find_sending_node(skb, p, &outer))
		return TC_ACT_UNSPEC;
	__builtin_memcpy(p->dst_mac, outer.inner_dst, ETH_ALEN);
	__builtin_memcpy(p->src_mac, outer.inner_src, ETH_ALEN);
	p->ethertype = bpf_ntohs(outer.inner_type);
	return take(skb, p);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
