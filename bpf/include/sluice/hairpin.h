/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_HAIRPIN_H
#define SLUICE_HAIRPIN_H

/*
 * Hairpins: a service whose backend is the requesting pod itself. If the pod saw its own address as
 * source, it would answer inside its namespace, where nothing translates the answer. Therefore the
 * source is replaced by a reserved address, to which the pod answers. No policy applies, because
 * the packets never leave the pod.
 */

#include <linux/in6.h>

#include <sluice/answers.h>
#include <sluice/deliver.h>
#include <sluice/quote.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

static __always_inline void hairpin_address(__u8 *addr, __u8 family)
{
	__be32 *word = (__be32 *)addr;

	word[0] = family == 4 ? SL_HAIRPIN4 : SL_HAIRPIN6_0;
	word[1] = family == 4 ? 0 : SL_HAIRPIN6_1;
	word[2] = 0;
	word[3] = family == 4 ? 0 : SL_HAIRPIN6_3;
}

/*
 * Stores the translation for the pod's answers back to the service. False if the port already has
 * a translation back to another service.
 */
static __noinline bool store_way_back(struct sl_packet *p)
{
	struct sl_xl *xl;

	if (p->family == 4) {
		p->xl4.dst = SL_HAIRPIN4;
		p->xl4.sport = p->dport;
		p->xl4.dport = p->sport;
	} else {
		hairpin_address(p->xl6.dst, 6);
		p->xl6.sport = p->dport;
		p->xl6.dport = p->sport;
	}
	xl = find_translation(p->family);
	if (xl)
		return xl->port == p->asked_port && equal16(xl->addr, p->asked);
	__builtin_memset(&p->xl, 0, sizeof(p->xl));
	__builtin_memcpy(p->xl.addr, p->asked, sizeof(p->xl.addr));
	p->xl.port = p->asked_port;
	p->xl.front = p->front;
	p->xl.back = 1;
	/* As if written a second ago, so that the first answer already stores the copy. */
	p->xl.last_s = now_seconds() - 1;
	return !insert_translation(p->family);
}

/*
 * Stores a copy of the return translation, with the same key, in sl_pod_answers4 or
 * sl_pod_answers6. If the translation is lost and the pod's server is the next to send,
 * find_service uses the copy. It counts against the pod's share; without it, the hairpin works
 * until the map evicts the translation. Called once a second, because nothing else would renew the
 * copy.
 */
static __noinline void keep_way_back(struct sl_packet *p)
{
	struct sl_xl *xl = find_answer(true, p->family, SL_XL_ANSWERS);
	__u32 now = now_seconds();

	if (xl && xl->port == p->dport && equal16(xl->addr, p->dst)) {
		*(volatile __u32 *)&xl->last_s = now;
		return;
	}
	if (!xl && !take_spare_translation(p, p->src_slot))
		return;
	__builtin_memset(&p->xl, 0, sizeof(p->xl));
	__builtin_memcpy(p->xl.addr, p->dst, sizeof(p->xl.addr));
	p->xl.port = p->dport;
	p->xl.front = p->front;
	p->xl.back = 1;
	p->xl.last_s = now;
	store_answer(true, p->family, SL_XL_ANSWERS);
}

/*
 * Like remember_request, for a hairpin. The destination of its answer has already been replaced by
 * the service.
 */
static __noinline void keep_request(struct sl_packet *p)
{
	struct sl_end asked = { .port = p->dport };

	if (p->proto != SL_TCP)
		return;
	__builtin_memcpy(asked.addr, p->dst, sizeof(asked.addr));
	write_requests_key(p, p->src, p->asked_port, &asked);
	store_copy(p, p->src_slot);
}

/* Sends the packet back to the pod. */
__noinline enum sl_reason return_to_pod(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_end from = { .source = 1 }, to = {};
	struct sl_endpoint *src;
	enum sl_reason reason;

	if (!p)
		return SL_REASON_NO_ENDPOINT;
	src = endpoint_at(p->src_slot);
	if (!src)
		return SL_REASON_NO_ENDPOINT;
	p->dst_slot = p->src_slot;
	p->dst_identity = p->src_identity;
	reason = needs_stack(skb, p, src);
	if (reason)
		return reason;
	if (p->translated == SL_TRANSLATED_HAIRPIN) {
		if (!store_way_back(p))
			return SL_REASON_SERVICE_PORT_IN_USE;
		hairpin_address(from.addr, p->family);
		from.port = p->sport;
		to.port = p->dport;
	} else {
		/* after a RST, no answer follows */
		if (p->first_in_second && !(p->tcp_flags & SL_TCP_RST)) {
			keep_way_back(p);
			keep_request(p);
		}
		__builtin_memcpy(from.addr, p->dst, sizeof(from.addr));
		from.port = p->dport;
		to.port = p->asked_port;
	}
	__builtin_memcpy(to.addr, p->src, sizeof(to.addr));
	if (rewrite_end(skb, p, &from) || rewrite_end(skb, p, &to))
		return SL_REASON_REWRITE_FAILED;
	return deliver_local(skb, p, src);
}

/*
 * Returns an ICMP error about a hairpin packet to the pod: it appears to come from the service
 * and quotes the packet that the pod had sent. SL_CONTINUE: the error is about another packet.
 */
__noinline enum sl_reason return_error(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_end sender = { .source = 1 }, service = {};
	struct sl_endpoint *src;
	struct sl_quote q = {};
	enum sl_reason reason;
	struct sl_xl *xl;

	if (!p || !read_quote(skb, p, &q) || !equal16(q.dst, p->src))
		return SL_CONTINUE;
	src = endpoint_at(p->src_slot);
	if (!src)
		return SL_REASON_NO_ENDPOINT;
	write_quoted_key(p, &q, SL_XL_SERVICE);
	xl = find_translation(p->family);
	if (!xl || !xl->back)
		return SL_CONTINUE;
	reason = needs_stack(skb, p, src);
	if (reason)
		return reason;
	__builtin_memcpy(sender.addr, p->src, sizeof(sender.addr));
	sender.port = q.sport;
	__builtin_memcpy(service.addr, xl->addr, sizeof(service.addr));
	service.port = xl->port;
	if (rewrite_quoted(skb, p, &q, &sender) || rewrite_quoted(skb, p, &q, &service))
		return SL_REASON_REWRITE_FAILED;
	sender.source = 0;
	service.source = 1;
	if (rewrite_end(skb, p, &sender) || rewrite_end(skb, p, &service))
		return SL_REASON_REWRITE_FAILED;
	return deliver_local(skb, p, src);
}

#endif
