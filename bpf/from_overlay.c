/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * Packets from other nodes through the tunnel, to pods of this node and to the node itself. Runs
 * at the ingress hook of the tunnel device.
 */

#define SL_PROGRAM SL_PROGRAM_FROM_OVERLAY

#include <sluice/admit.h>
#include <sluice/asked.h>
#include <sluice/deliver.h>
#include <sluice/endpoint.h>
#include <sluice/inner.h>
#include <sluice/node.h>
#include <sluice/observe.h>
#include <sluice/outside.h>

/* Finds the node with the outer source address. The packet has that address until it is parsed,
 * for events.
 */
static __always_inline enum sl_reason find_outer_node(struct sl_packet *p, __u8 family)
{
	struct sl_node_addr key = { .family = family };
	__u32 *number;

	p->family = family;
	__builtin_memcpy(key.addr, p->src, sizeof(key.addr));
	number = bpf_map_lookup_elem(&sl_node_addr, &key);
	if (!number)
		return SL_REASON_UNKNOWN_NODE;
	p->node = (__u16)*number;
	p->sending_node = p->node;
	return SL_CONTINUE;
}

/*
 * Finds the node that sent the packet, and the identity in the tunnel key. The kernel returns the
 * key only for the family of the outer addresses.
 */
static __noinline enum sl_reason find_sending_node(struct __sk_buff *skb, struct sl_packet *p)
{
	struct bpf_tunnel_key key = {};

	if (!bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0)) {
		p->vni = key.tunnel_id;
		*(__be32 *)p->src = bpf_htonl(key.remote_ipv4);
		return find_outer_node(p, 4);
	}
	if (bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6))
		return SL_REASON_TUNNEL_KEY;
	p->vni = key.tunnel_id;
	__builtin_memcpy(p->src, key.remote_ipv6, sizeof(p->src));
	return find_outer_node(p, 6);
}

/* Finds the local endpoint or host that the packet is for. */
static __always_inline enum sl_reason find_target(struct sl_packet *p)
{
	struct sl_endpoint *dst;

	p->dst_slot = slot_of_address(p->dst, p->family);
	if (p->dst_slot == SL_SLOT_NONE)
		return SL_REASON_NO_ROUTE;
	if (p->dst_slot == SL_SLOT_HOST) {
		p->dst_identity = SL_ID_HOST;
		return SL_CONTINUE;
	}
	dst = endpoint_at(p->dst_slot);
	if (!dst)
		return SL_REASON_NO_ROUTE;
	p->dst_identity = identity_of(dst);
	return SL_CONTINUE;
}

/* Passes a packet to the host. No policy applies to the host yet, but its senders are verified. */
static __always_inline enum sl_reason pass_to_host(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;

	if (slot_of_address(p->src, p->family) != SL_SLOT_NONE)
		return SL_REASON_SPOOFED_IP;
	reason = find_tunnel_source(p);
	if (reason)
		return reason;
	if (is_tunnel_packet(p))
		return SL_REASON_TUNNEL_PORT;
	if (cfg_services) {
		reason = handle_nodeport(skb, p);
		if (reason != SL_REASON_FORWARDED_TO_STACK || p->translated)
			return reason;
	}
	if (asks_host(p) && !follow_fragments(p))
		record_asked(p);
	return SL_REASON_FORWARDED_TO_HOST;
}

static __always_inline enum sl_reason pass(struct __sk_buff *skb, struct sl_packet *p,
					   __u32 *ifindex)
{
	enum sl_reason reason = find_target(p);

	if (reason)
		return reason;
	if (p->dst_slot == SL_SLOT_HOST)
		return pass_to_host(skb, p);
	reason = pass_to_pod(skb, p, ifindex);
	if (leads_fragments(p))
		lead_fragments(p, lead_of(reason));
	return reason;
}

static __always_inline enum sl_reason from_overlay4(struct __sk_buff *skb, struct sl_packet *p,
						    __u32 *ifindex)
{
	enum sl_reason reason = parse_inner4(skb, p);

	return reason ? reason : pass(skb, p, ifindex);
}

static __always_inline enum sl_reason from_overlay6(struct __sk_buff *skb, struct sl_packet *p,
						    __u32 *ifindex)
{
	enum sl_reason reason = parse_inner6(skb, p);

	return reason ? reason : pass(skb, p, ifindex);
}

static __always_inline int act_from_overlay(struct __sk_buff *skb, enum sl_reason reason,
					    __u32 ifindex)
{
	switch (reason) {
	case SL_REASON_FORWARDED_TO_HOST:
	case SL_REASON_FORWARDED_TO_STACK:
	case SL_REASON_STACK_TIME_EXCEEDED:
	case SL_REASON_STACK_TOO_BIG:
		return give_to_stack(skb);
	case SL_REASON_FORWARDED_TO_POD:
	case SL_REASON_FORWARDED_TO_POD_DEVICE:
	case SL_REASON_FORWARDED_TO_PROXY:
		return act(skb, reason, ifindex);
	default:
		return TC_ACT_SHOT;
	}
}

/*
 * Whether sluice_from_underlay has already decapsulated, evaluated and counted the packet. Packets
 * that the tunnel device has decapsulated have a tunnel key, whatever their mark.
 */
static __always_inline bool is_taken_out(struct __sk_buff *skb)
{
	struct bpf_tunnel_key key;

	return cfg_direct_port && skb->mark == SL_MARK_TAKEN_OUT &&
	       bpf_skb_get_tunnel_key(skb, &key, sizeof(key), 0) &&
	       bpf_skb_get_tunnel_key(skb, &key, sizeof(key), BPF_F_TUNINFO_IPV6);
}

SEC("tc") int sluice_from_overlay(struct __sk_buff *skb)
{
	enum sl_reason reason;
	struct sl_packet *p;
	__u32 ifindex = 0;

	if (is_taken_out(skb))
		return give_to_stack(skb);
	p = new_packet(SL_INGRESS);
	if (!p)
		return TC_ACT_SHOT;
	reason = find_sending_node(skb, p);
	if (!reason)
		reason = parse_ethernet(skb, p);
	if (!reason) {
		switch (p->ethertype) {
		case ETH_P_IP:
			reason = from_overlay4(skb, p, &ifindex);
			break;
		case ETH_P_IPV6:
			reason = from_overlay6(skb, p, &ifindex);
			break;
		default:
			reason = SL_REASON_ARP;
		}
	}
	observe(skb, p, reason);
	return act_from_overlay(skb, reason, ifindex);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
