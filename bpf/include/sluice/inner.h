/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_INNER_H
#define SLUICE_INNER_H

/*
 * Packets that were decapsulated, by the tunnel device or by sluice_from_underlay.
 */

#include <sluice/admit.h>
#include <sluice/deliver.h>
#include <sluice/ipv4.h>
#include <sluice/ipv6.h>
#include <sluice/redirect.h>

static __always_inline enum sl_reason parse_inner4(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason = parse_ip4(skb, p);

	return reason ? reason : check_ip4_destination(p);
}

static __always_inline enum sl_reason parse_inner6(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason = parse_ip6(skb, p);

	if (reason)
		return reason;
	reason = check_ip6_destination(p);
	if (reason)
		return reason;
	if (is_link_local6(p->src) || is_link_local6(p->dst))
		return SL_REASON_LINK_LOCAL;
	return SL_CONTINUE;
}

/* Evaluates a packet to a local pod, and delivers it. */
static __always_inline enum sl_reason pass_to_pod(struct __sk_buff *skb, struct sl_packet *p,
						  __u32 *ifindex)
{
	enum sl_reason reason = admit_piece(skb, p);

	if (reason)
		return reason;
	if (p->via_stack || p->by_stack)
		return SL_REASON_FORWARDED_TO_STACK;
	if (is_redirected(p))
		return give_to_proxy(skb, p, ifindex);
	return deliver_to(skb, p, ifindex);
}

#endif
