/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_PROXY_H
#define SLUICE_PROXY_H

/*
 * Which proxies run, and how endpoints share the queue to a proxy.
 *
 * A proxy is unavailable if its lease has ended: then the datapath changes sl_proxy. A late
 * heartbeat is a weaker sign: a process that gets little CPU time sends it late. Therefore it only
 * counts for rules that let packets pass without the proxy; packets of other rules wait in the
 * queue.
 *
 * TCP segments go to sockets in the proxy namespace, where the proxy ends the client's connection.
 * The heartbeat does not count for TCP, because a connection cannot change from the proxy to its
 * server. If the lease has ended, connections wait in the backlog for some seconds; then the
 * datapath marks the namespace as away, and new connections are dropped. Segments of existing
 * connections still enter the namespace, so that its stack resets connections without a proxy.
 *
 * One half of the queue's share of a window is common. Of the other half, each of the n endpoints
 * that sent in this window or in the last one is guaranteed 1/n. A window ends with a heartbeat and
 * not after a time: so the queue of a stopped proxy does not fill up.
 */

#include <bpf/bpf_helpers.h>
#include <sluice/compiler.h>
#include <sluice/maps.h>

#define SL_PROXY_LATE 100000000 /* ns without a heartbeat */
#define SL_PROXY_PERIOD 15000000 /* ns; heartbeats come every 20 ms */

static __always_inline struct sl_proxy *proxy_of(__u32 kind)
{
	return bpf_map_lookup_elem(&sl_proxy, &kind);
}

/* The device of a proxy, and its state << 32. */
static __always_inline __u64 proxy_word(const struct sl_proxy *proxy)
{
	_Static_assert(offsetof(struct sl_proxy, device) == 0 &&
			       offsetof(struct sl_proxy, state) == 4,
		       "one word");
	return READ_ONCE(*(const __u64 *)proxy);
}

static __always_inline bool is_attached(__u64 word)
{
	return (__u32)word && word >> 32 == SL_PROXY_ATTACHED;
}

static __always_inline __u64 last_beat(bool http)
{
	__u32 dns = SL_PROXY_DNS, first = 0;
	__u64 *beat;

	beat = http ? bpf_map_lookup_elem(&sl_http_beat, &first)
		    : bpf_map_lookup_elem(&sl_proxy_beat, &dns);
	return beat ? READ_ONCE(*beat) : 0;
}

static __always_inline bool is_device_of(__u32 ifindex, __u32 kind)
{
	struct sl_proxy *proxy = proxy_of(kind);

	return proxy && ifindex && (__u32)proxy_word(proxy) == ifindex;
}

/* Index of sl_proxy for the namespace with the TCP connections of the HTTP or the DNS proxy. */
static __always_inline __u32 namespace_of(bool http)
{
	return http ? SL_PROXY_HTTP : SL_PROXY_DNS_TCP;
}

static __always_inline bool has_namespace(bool http)
{
	struct sl_proxy *proxy = proxy_of(namespace_of(http));

	return proxy && (__u32)proxy_word(proxy);
}

/* How the verdict of a side redirects, without the kind of proxy: SL_REDIRECTS_... */
static __always_inline __u8 redirection(const struct sl_side *side)
{
	return side->redirects & ~SL_REDIRECTS_HTTP;
}

static __always_inline bool is_for_http(const struct sl_side *side)
{
	return side->redirects & SL_REDIRECTS_HTTP;
}

/* Whether packets of a proxy arrive by the device. */
static __always_inline bool is_of_proxy(__u32 ifindex)
{
	return is_device_of(ifindex, SL_PROXY_DNS) || is_device_of(ifindex, SL_PROXY_DNS_TCP) ||
	       is_device_of(ifindex, SL_PROXY_HTTP);
}

/* Applies a rule that redirects to a TCP segment. */
static __always_inline enum sl_reason redirect_segment(const struct sl_question *q, bool http,
						       bool passes, struct sl_side *side)
{
	struct sl_proxy *proxy = proxy_of(namespace_of(http));
	__u64 word;

	if (!proxy)
		return SL_REASON_NO_PROXY;
	word = proxy_word(proxy);
	if (passes && !is_attached(word)) {
		side->redirects = SL_REDIRECTS_NOT_NOW;
		side->action = SL_ACTION_ALLOW;
		return SL_CONTINUE;
	}
	if (!(__u32)word)
		return SL_REASON_NO_PROXY;
	if (!is_attached(word) && q->may_redirect == SL_REDIRECT_BEGIN)
		return SL_REASON_PROXY_AWAY;
	side->redirects = SL_REDIRECTS_TO_PROXY | (http ? SL_REDIRECTS_HTTP : 0);
	return SL_CONTINUE;
}

/* Applies a rule that redirects. Packets that no proxy can take are dropped. */
static __always_inline enum sl_reason redirect(const struct sl_rule *rule,
					       const struct sl_question *q, struct sl_side *side)
{
	bool passes = rule->flags & SL_RULE_PASSES_AWAY;
	__u32 kind = rule->redirect;
	bool http = kind == SL_PROXY_HTTP || kind == SL_PROXY_TLS;
	struct sl_proxy *proxy;
	__u64 word;

	if (!q->may_redirect || !(rule->flags & SL_RULE_SET) || (kind != SL_PROXY_DNS && !http))
		return SL_REASON_NO_PROXY;
	if (q->may_redirect != SL_REDIRECT_DATAGRAM)
		return redirect_segment(q, http, passes, side);
	if (http)
		return SL_REASON_NO_PROXY;
	proxy = proxy_of(kind);
	if (!proxy)
		return SL_REASON_NO_PROXY;
	word = proxy_word(proxy);
	if (is_attached(word) &&
	    !(passes && (__s64)(bpf_ktime_get_ns() - last_beat(false)) > SL_PROXY_LATE)) {
		side->redirects = SL_REDIRECTS_TO_PROXY;
		return SL_CONTINUE;
	}
	if (passes) {
		side->redirects = SL_REDIRECTS_NOT_NOW;
		side->action = SL_ACTION_ALLOW;
		return SL_CONTINUE;
	}
	return (__u32)word ? SL_REASON_PROXY_AWAY : SL_REASON_NO_PROXY;
}

/* Begins the window of the last heartbeat, unless it has begun. Returns the window. */
static __always_inline __u64 begin_window(struct sl_proxy *proxy, __u64 beat)
{
	__u64 window = READ_ONCE(proxy->window);
	__s64 since = (__s64)(beat - window);

	/* a heartbeat of an earlier boot or of a broken proxy may be in the future */
	if (since >= 0 && since < SL_PROXY_PERIOD)
		return window;
	if (__sync_val_compare_and_swap(&proxy->window, window, beat) != window)
		return READ_ONCE(proxy->window);
	proxy->last_takers = since < 4LL * SL_PROXY_PERIOD ? proxy->takers : 0;
	proxy->takers = 0;
	proxy->common = 0;
	proxy->given = 0;
	return beat;
}

/*
 * Whether the endpoint may send n more packets to the proxy. Two CPUs may both take the last ones.
 */
static __always_inline bool within_queue(struct sl_proxy *proxy, bool http, __u32 slot, __u32 n)
{
	__u64 window, packets;
	struct sl_proxy_taken *taken;
	__u32 takers, last;

	taken = http ? bpf_map_lookup_elem(&sl_http_taken, &slot)
		     : bpf_map_lookup_elem(&sl_proxy_taken, &slot);
	window = begin_window(proxy, last_beat(http)) >> 10 << 32;
	if (!taken || READ_ONCE(proxy->given) + n > 2 * SL_PROXY_WINDOW)
		return false;
	packets = READ_ONCE(taken->packets);
	if ((packets ^ window) >> 32)
		packets = window;
	takers = READ_ONCE(proxy->takers);
	last = READ_ONCE(proxy->last_takers);
	if (takers < last)
		takers = last;
	if ((__u32)packets + n > SL_PROXY_WINDOW / 2 / (takers ? takers : 1)) {
		if (READ_ONCE(proxy->common) + n > SL_PROXY_WINDOW / 2)
			return false;
		__sync_fetch_and_add(&proxy->common, n);
	}
	if (!(__u32)packets)
		__sync_fetch_and_add(&proxy->takers, 1);
	__sync_fetch_and_add(&proxy->given, n);
	*(volatile __u64 *)&taken->packets = packets + n;
	return true;
}

#endif
