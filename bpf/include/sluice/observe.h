/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_OBSERVE_H
#define SLUICE_OBSERVE_H

/*
 * Every packet is counted once. A drop sends an event, unless its reason is quiet; for a
 * connection, an event is sent when it is evaluated and when it ends. A packet that passes in audit
 * mode although policy denies it always sends an event.
 */

#include <sluice/bound.h>
#include <sluice/config.h>
#include <sluice/maps.h>
#include <sluice/packet.h>

#define SL_SECOND 1000000000ULL

/* Length of the packet with its Ethernet header, without a tunnel packet around it. */
static __always_inline __u32 length_of(struct __sk_buff *skb, const struct sl_packet *p)
{
	if (SL_PROGRAM == SL_PROGRAM_FROM_POD && cfg_direct_port && p->direct)
		return skb->len - SL_TUNNEL_BYTES;
	return skb->len;
}

static __always_inline void count(struct __sk_buff *skb, const struct sl_packet *p,
				  enum sl_reason reason)
{
	__u32 at = reason << 1 | (p->direction - 1);
	struct sl_counter *counter = bpf_map_lookup_elem(&sl_metrics, &at);

	if (!counter)
		return;
	counter->packets++;
	counter->bytes += length_of(skb, p);
}

/* Index in the limits for events about ended connections, which have no reason of their own. */
#define SL_LIMIT_CLOSED SL_CONTINUE

/*
 * How many events of a kind each endpoint may send in a second, regardless of the others: its part
 * of SL_EVENT_SHARERS times the limit of an endpoint. The ring's bound says how many endpoints the
 * node has. The share does not depend on how many endpoints send at the moment: counting them would
 * need a cell for each endpoint, reason and CPU.
 */
static __always_inline __u64 guaranteed_events(void)
{
	__u32 at = SL_BOUND_EVENTS, common, guarantee;
	struct sl_bound *b = bpf_map_lookup_elem(&sl_bound, &at);
	__u64 part;

	if (!b)
		return 0;
	common = READ_ONCE(b->common);
	guarantee = READ_ONCE(b->guarantee);
	if (!common || !guarantee)
		return 0;
	part = (__u64)cfg_event_rate * SL_EVENT_SHARERS * guarantee / common;
	return part ? part : 1;
}

/* Whether this CPU may send another event beyond the guarantees in this second. */
static __always_inline bool take_event(__u32 *sent)
{
	if (*sent / SL_EVENT_SHARERS >= cfg_event_rate)
		return false;
	(*sent)++;
	return true;
}

/*
 * Whether the share of the event's endpoint, or of packets that belong to no endpoint, allows
 * another event in this second. An endpoint above its guarantee uses the common part. If two CPUs
 * take the last event of a share at the same time, both may send it.
 */
static __always_inline bool within_share(struct sl_limit *limit, __u32 slot, __u32 at, __u64 now)
{
	struct sl_ep_limit *own = bpf_map_lookup_elem(&sl_ep_limits, &slot);
	__u64 second = now / SL_SECOND << 32, sent;

	if (!own) /* not caused by an endpoint */
		return take_event(&limit->outside);
	at &= SL_LIMIT_KINDS - 1;
	sent = READ_ONCE(own->sent[at]);
	if ((sent ^ second) >> 32)
		sent = second;
	if ((__u32)sent >= cfg_event_rate)
		return false;
	if ((__u32)sent >= guaranteed_events() && !take_event(&limit->common))
		return false;
	*(volatile __u64 *)&own->sent[at] = sent + 1;
	return true;
}

/*
 * Whether another event of the endpoint may be queued in the ring buffer. One half of the ring is
 * common. While it is full, events of endpoints that have used up their guarantee are suppressed,
 * and so are events about packets without an endpoint. So while the datapath does not read, neither
 * an endpoint nor an outside sender can displace the events of other endpoints.
 */
static __always_inline bool may_wait(__u32 slot)
{
	bool outside = slot >= SL_MAX_SLOTS;

	if (bpf_ringbuf_query(&sl_events, BPF_RB_AVAIL_DATA) < SL_EVENT_BYTES / 2 ||
	    !(outside || has_guarantee(SL_BOUND_EVENTS, slot)))
		return true;
	count_refused(SL_BOUND_EVENTS, outside ? SL_BUDGET_OUTSIDE : slot);
	return false;
}

/*
 * Reserves an event. NULL if the endpoint has reached its limit or its share for this second, or if
 * the reader is too slow. Suppressed events are counted, and the next event reports their
 * number.
 */
static __always_inline struct sl_event *reserve_event(__u32 slot, __u32 at, __u64 now)
{
	struct sl_limit *limit = bpf_map_lookup_elem(&sl_limits, &at);
	struct sl_event *event;

	if (!limit)
		return NULL;
	if (now - limit->since >= SL_SECOND) {
		limit->since = now;
		limit->common = 0;
		limit->outside = 0;
	}
	event = NULL;
	if (within_share(limit, slot, at, now) && may_wait(slot))
		event = bpf_ringbuf_reserve(&sl_events, sizeof(*event), 0);
	if (!event) {
		limit->lost++;
		limit->lost_total++;
		return NULL;
	}
	event->lost = limit->lost;
	limit->lost = 0;
	hold(SL_BOUND_EVENTS, slot, 1);
	__builtin_memset(event->charged, 0, sizeof(event->charged));
	if (slot < SL_MAX_SLOTS)
		__builtin_memcpy(event->charged, &slot, 2);
	return event;
}

__noinline int report(struct __sk_buff *skb, const struct sl_packet *p, enum sl_reason reason,
		      enum sl_event_type type)
{
	__u64 now = bpf_ktime_get_ns();
	struct sl_event *event;

	if (!p)
		return 0;
	event = reserve_event(p->hook == SL_EGRESS ? p->src_slot : p->dst_slot,
			      type == SL_EVENT_CLOSED ? SL_LIMIT_CLOSED : reason, now);
	if (!event)
		return 0;

	event->time = now;
	event->reason = reason;
	event->direction = p->direction;
	event->ifindex = skb->ifindex;
	event->length = length_of(skb, p);
	event->src_identity = p->src_identity;
	event->dst_identity = p->dst_identity;
	event->type = type;
	event->egress = p->egress;
	event->ingress = p->ingress;
	event->ct_flags = p->ct_flags;
	event->reply = p->reply;
	event->src_slot = p->src_slot;
	event->dst_slot = p->dst_slot;
	event->ethertype = p->ethertype;
	event->sport = p->sport;
	event->dport = p->dport;
	__builtin_memcpy(event->src_mac, p->src_mac, sizeof(event->src_mac));
	event->family = p->family;
	event->proto = p->proto;
	event->tcp_flags = p->tcp_flags;
	event->node = p->node;
	event->orig_dport = 0;
	__builtin_memset(event->orig_dst, 0, sizeof(event->orig_dst));
	if (p->translated) {
		event->orig_dport = p->asked_port;
		__builtin_memcpy(event->orig_dst, p->asked, sizeof(event->orig_dst));
	}
	__builtin_memcpy(event->src, p->src, sizeof(event->src));
	__builtin_memcpy(event->dst, p->dst, sizeof(event->dst));
	bpf_ringbuf_submit(event, 0);
	return 0;
}

/* Sends the events of a packet. */
static __always_inline void tell(struct __sk_buff *skb, const struct sl_packet *p,
				 enum sl_reason reason)
{
	bool audited = p->egress.audited || p->ingress.audited;

	if (reason >= SL_FIRST_DROP) {
		if (reason < SL_FIRST_QUIET || reason >= SL_FIRST_LATE)
			report(skb, p, reason, SL_EVENT_DROP);
	} else if (audited || (cfg_connection_events && p->news & SL_NEWS_VERDICT)) {
		report(skb, p, reason, SL_EVENT_VERDICT);
	}
	if (cfg_connection_events && p->news & SL_NEWS_CLOSED)
		report(skb, p, reason, SL_EVENT_CLOSED);
}

static __always_inline void observe(struct __sk_buff *skb, const struct sl_packet *p,
				    enum sl_reason reason)
{
	count(skb, p, reason);
	tell(skb, p, reason);
}

#endif
