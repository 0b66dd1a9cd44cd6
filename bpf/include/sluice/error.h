/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ERROR_H
#define SLUICE_ERROR_H

/*
 * ICMP errors to a pod about packets that it has sent to a service. They quote the backend's
 * address, which the pod's kernel does not know. Untranslated, the error would match no socket:
 * no call would fail with ECONNREFUSED, and the path MTU would not be learned.
 */

#include <sluice/quote.h>
#include <sluice/rewrite.h>

/*
 * Rewrites the error so that it quotes the address that the pod had requested; if the backend
 * itself sent the error, its source becomes that address, too. Returns 0 on success. If the service
 * no longer exists, the error is not changed.
 */
__noinline int rewrite_error(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_end to = {};
	struct sl_quote q = {};

	if (!p || !read_quote(skb, p, &q) || find_asked(p, &to))
		return 0;
	if (rewrite_quoted(skb, p, &q, &to))
		return -1;
	if (!equal16(p->src, q.dst))
		return 0;
	to.source = 1;
	return rewrite_end(skb, p, &to);
}

/* Rewrites a frame before it is delivered to a pod. */
static __always_inline int rewrite_for_pod(struct __sk_buff *skb, struct sl_packet *p)
{
	return is_error(p) ? rewrite_error(skb, p) : rewrite(skb, p);
}

#endif
