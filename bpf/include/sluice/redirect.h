/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_REDIRECT_H
#define SLUICE_REDIRECT_H

/*
 * Packets that a rule redirects to a proxy. Datagrams leave by the proxy's TAP device. The proxy
 * reads them, and sends the allowed ones on; sluice_from_tap receives these. TCP segments leave by
 * a device whose other end is in the proxy namespace. There, sockets of the proxy end the
 * connection, and open another one to the server, with the same addresses and ports. The segments
 * of these sockets arrive at sluice_from_tap, too.
 *
 * A packet of a local pod, of either direction, is redirected by sluice_from_pod, before the stack
 * can see it, and comes back to sluice_from_pod. Answers from elsewhere are redirected by the
 * program that would deliver them; if the stack has to see them, by sluice_to_pod. A pod's packet
 * that the stack has forwarded must have been held under the same set of rules; the stack may have
 * changed its destination since. Otherwise it is dropped, because sluice_from_tap could not tell
 * it from a packet that was not forwarded yet.
 */

#include <sluice/asked.h>
#include <sluice/deliver.h>
#include <sluice/mark.h>
#include <sluice/packet.h>
#include <sluice/policy.h>
#include <sluice/proxy.h>
#include <sluice/rewrite.h>
#include <sluice/tag.h>

/* Whether a proxy must hold the packet. Only egress rules of local pods redirect. */
static __always_inline bool is_redirected(const struct sl_packet *p)
{
	__u8 how = redirection(&p->egress);

	return unlikely(how == SL_REDIRECTS_TO_PROXY || how == SL_REDIRECTS_HELD);
}

static __always_inline bool is_of_pod(__u16 slot)
{
	return slot != SL_SLOT_NONE && slot != SL_SLOT_HOST;
}

/* The set of the rule that redirects the packet, or SL_SET_HELD; 0: none. */
__noinline int rule_set_of(struct sl_packet *p)
{
	const struct sl_table *table;
	const struct sl_rule *rule;
	__u32 id;

	if (!p || !is_redirected(p))
		return 0;
	if (redirection(&p->egress) == SL_REDIRECTS_HELD)
		return SL_SET_HELD;
	id = p->egress.table;
	table = bpf_map_lookup_elem(&sl_table, &id);
	if (!table)
		return 0;
	rule = rule_of(table, p->egress.rule);
	if (!rule || rule->action != SL_ACTION_REDIRECT)
		return 0;
	return rule->flags & SL_RULE_SET;
}

/* The part of the mark by which was_held recognises a packet behind the stack. */
static __always_inline __u32 mark_held(struct sl_packet *p)
{
	return (__u32)rule_set_of(p) << 16;
}

/* Whether a proxy has held this packet of a local pod, from the stack, under the same set. */
static __always_inline bool was_held(struct __sk_buff *skb, struct sl_packet *p)
{
	__u32 mark = skb->mark, by = mark & SL_MARK_MASK;

	return (by == SL_MARK_POD || by == SL_MARK_LOCAL) && mark >> 16 &&
	       mark >> 16 == (__u32)rule_set_of(p);
}

/* Writes the ends of the connection to the frame, for the proxy. */
static __always_inline int rewrite_for_proxy(struct __sk_buff *skb, struct sl_packet *p)
{
	if (SL_PROGRAM == SL_PROGRAM_FROM_POD && cfg_services && p->translated)
		return rewrite(skb, p);
	if (SL_PROGRAM == SL_PROGRAM_TO_POD && p->readdressed)
		return (int)rewrite_readdressed(skb, p);
	return 0;
}

/* How many packets of the queue the packet takes: the TAP device takes no GSO packets, and of a TCP
 * connection only its beginning waits for the proxy.
 */
static __always_inline __u32 packets_of(struct __sk_buff *skb, const struct sl_packet *p)
{
	if (p->proto == SL_TCP)
		return begins(p);
	return skb->gso_size ? skb->len / skb->gso_size + 1 : 1;
}

/* Whether sluice_into_proxy reads the segment: it has no options before the TCP header. */
static __always_inline bool is_plain_segment(const struct sl_packet *p)
{
	if (p->fragment || p->more_fragments)
		return false;
	return p->family == 4 || p->l4 == ETH_HLEN + sizeof(struct ipv6hdr);
}

/* Returns the device of the proxy in *ifindex. */
static __always_inline enum sl_reason find_proxy(const struct sl_packet *p, __u32 *ifindex)
{
	bool tcp = p->proto == SL_TCP;
	struct sl_proxy *proxy;
	__u64 word;

	proxy = proxy_of(tcp ? namespace_of(is_for_http(&p->egress)) : SL_PROXY_DNS);
	if (!proxy || (tcp && !is_plain_segment(p)))
		return SL_REASON_NO_PROXY;
	word = proxy_word(proxy);
	if (tcp ? !(__u32)word : !is_attached(word))
		return SL_REASON_PROXY_AWAY;
	*ifindex = (__u32)word;
	return SL_CONTINUE;
}

/* Sends the packet to the proxy. Called by the main function of a program only: below admit, the
 * call stack is exhausted. */
__noinline enum sl_reason give_to_proxy(struct __sk_buff *skb, struct sl_packet *p, __u32 *ifindex)
{
	struct sl_tag tag = { .local = 2, .version = SL_TAG_VERSION, .local2 = 2 };
	struct sl_endpoint *dst;
	struct sl_proxy *proxy;
	enum sl_reason reason;
	__u16 client;
	__u32 packets;
	bool http;
	int set;

	if (!p || !ifindex)
		return SL_REASON_NO_PROXY;
	http = is_for_http(&p->egress);
	proxy = proxy_of(http ? SL_PROXY_HTTP : SL_PROXY_DNS);
	if (!proxy)
		return SL_REASON_NO_PROXY;
	/* the stack answers, or fragments the packet; sluice_to_pod sees the fragments */
	if (SL_PROGRAM != SL_PROGRAM_FROM_POD && SL_PROGRAM != SL_PROGRAM_TO_POD) {
		dst = endpoint_at(p->dst_slot);
		if (!dst)
			return SL_REASON_NO_ROUTE;
		reason = needs_stack(skb, p, dst);
		if (reason)
			return reason;
	}
	reason = find_proxy(p, ifindex);
	if (reason)
		return reason;
	set = rule_set_of(p);
	if (!set)
		return SL_REASON_NO_PROXY;
	client = READ_ONCE(p->reply) ? p->dst_slot : p->src_slot;
	packets = packets_of(skb, p);
	if (packets && !within_queue(proxy, http, client, packets))
		return SL_REASON_PROXY_BUDGET;
	if (rewrite_for_proxy(skb, p))
		return SL_REASON_REWRITE_FAILED;
	tag.set = bpf_htons(set);
	tag.endpoint = bpf_htons(client);
	tag.direction = READ_ONCE(p->reply) ? SL_TAG_OF_RESPONDER : SL_TAG_OF_INITIATOR;
	if (bpf_skb_store_bytes(skb, 0, &tag, sizeof(tag), 0))
		return SL_REASON_REWRITE_FAILED;
	return SL_REASON_FORWARDED_TO_PROXY;
}

#endif
