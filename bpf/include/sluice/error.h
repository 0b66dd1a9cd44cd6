/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ERROR_H
#define SLUICE_ERROR_H

/*
 * ICMP errors to a pod about packets that it has sent to a service. They quote the backend,
 * of which the pod's kernel knows nothing: without translation it finds no socket, so that no
 * call fails with ECONNREFUSED, and no path MTU is learned.
 */

#include <sluice/quote.h>
#include <sluice/rewrite.h>

/*
 * Has the error quote the address that the pod has asked, and come from it where the backend
 * has sent it. Returns 0 on success. If the service has gone meanwhile, the error stays as
 * it is.
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
	return (int)rewrite_end(skb, p, &to);
}

/* What a frame needs before it is delivered to a pod. */
static __always_inline int rewrite_for_pod(struct __sk_buff *skb, struct sl_packet *p)
{
	return is_error(p) ? rewrite_error(skb, p) : rewrite(skb, p);
}

#endif
