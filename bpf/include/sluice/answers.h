/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ANSWERS_H
#define SLUICE_ANSWERS_H

/*
 * Copies of translations, in case an entry is lost. The entry of a service connection records which
 * address its answers must come from. The map may evict the entry, and an operator may flush it;
 * afterwards the server may be the next to send. Therefore the first answer stores the same
 * information in the maps of answers, under the untranslated answer as key: which end began the
 * connection, and which address and port it had requested. A record is not a verdict: the packet is
 * evaluated as an answer of that connection, under the current policy. The translation of requests
 * is copied in the same way, under the untranslated request as key.
 */

#include <sluice/conntrack.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

/* Writes the key of the connection's answers, for a packet of either direction. */
static __always_inline void write_answers_key(struct sl_packet *p)
{
	bool reply = READ_ONCE(p->reply);
	const __u8 *src = reply ? p->src : p->dst, *dst = reply ? p->dst : p->src;
	__u16 sport = reply ? p->sport : p->dport, dport = reply ? p->dport : p->sport;

	if (p->family == 4) {
		p->xl4.src = *(const __be32 *)src;
		p->xl4.dst = *(const __be32 *)dst;
		p->xl4.sport = sport;
		p->xl4.dport = dport;
		p->xl4.proto = p->proto;
		p->xl4.pad = 0;
		return;
	}
	__builtin_memcpy(p->xl6.src, src, sizeof(p->xl6.src));
	__builtin_memcpy(p->xl6.dst, dst, sizeof(p->xl6.dst));
	p->xl6.sport = sport;
	p->xl6.dport = dport;
	p->xl6.proto = p->proto;
	p->xl6.pad = 0;
}

/* Whether the initiator, if it is a pod, may store another record within its share. Without a
 * record the connection works until its entry is evicted. */
static __always_inline bool may_remember(const struct sl_packet *p)
{
	__u32 slot = p->dst_slot;

	return !is_pod_slot(slot) || take_spare_translation(p, slot);
}

/* Stores the translation of this answer and of later ones. */
__noinline int remember_answers(struct sl_packet *p)
{
	struct sl_xl *xl;
	bool of_pod;

	if (!p)
		return 0;
	of_pod = is_pod_slot(p->dst_slot);
	p->reply = 1;
	write_answers_key(p);
	xl = find_answer(of_pod, p->family, SL_XL_ANSWERS);
	if (xl && READ_ONCE(xl->front) == p->front && READ_ONCE(xl->asked_at) == p->asked_at)
		return 0;
	if (!xl && !may_remember(p))
		return 0;
	__builtin_memset(&p->xl, 0, sizeof(p->xl));
	__builtin_memcpy(p->xl.addr, p->dst, sizeof(p->xl.addr));
	p->xl.port = p->dport;
	p->xl.front = p->front;
	p->xl.asked_at = p->asked_at;
	p->xl.last_s = now_seconds();
	keep_port(SL_COUNT_ANSWERED, p->sport);
	return (int)store_answer(of_pod, p->family, SL_XL_ANSWERS);
}

/* Writes the key of requests: from the connection's initiator to the address it had requested. */
static __always_inline void write_requests_key(struct sl_packet *p, const __u8 *from, __u16 port,
					       const struct sl_end *asked)
{
	if (p->family == 4) {
		p->xl4.src = *(const __be32 *)from;
		p->xl4.dst = *(const __be32 *)asked->addr;
		p->xl4.sport = port;
		p->xl4.dport = asked->port;
		p->xl4.proto = p->proto;
		p->xl4.pad = 0;
		return;
	}
	__builtin_memcpy(p->xl6.src, from, sizeof(p->xl6.src));
	__builtin_memcpy(p->xl6.dst, asked->addr, sizeof(p->xl6.dst));
	p->xl6.sport = port;
	p->xl6.dport = asked->port;
	p->xl6.proto = p->proto;
	p->xl6.pad = 0;
}

/*
 * Stores a copy of the translation of requests; its key is in the cell. The packet's source is the
 * backend, which has answered. The copy counts against the share of the initiator at slot; without
 * it, the connection keeps its backend until the map evicts the translation.
 */
static __always_inline void store_copy(struct sl_packet *p, __u32 slot)
{
	bool of_pod = is_pod_slot(slot);
	struct sl_xl *xl = find_answer(of_pod, p->family, SL_XL_REQUESTED);
	__u32 now = now_seconds();

	if (xl && xl->port == p->sport && xl->front == p->front && xl->asked_at == p->asked_at &&
	    equal16(xl->addr, p->src)) {
		*(volatile __u32 *)&xl->last_s = now;
		return;
	}
	if (!xl && of_pod && !take_spare_translation(p, slot))
		return;
	__builtin_memset(&p->xl, 0, sizeof(p->xl));
	__builtin_memcpy(p->xl.addr, p->src, sizeof(p->xl.addr));
	p->xl.port = p->sport;
	p->xl.front = p->front;
	p->xl.asked_at = p->asked_at;
	p->xl.last_s = now;
	store_answer(of_pod, p->family, SL_XL_REQUESTED);
}

/*
 * The translation of requests may be evicted or flushed after the service's list has changed, and
 * the initiator may be the next to send. Therefore the first answer of a TCP connection also stores
 * a copy of that translation: see follow_copy. The first answer of a later connection of the same
 * tuple replaces it. UDP flows get no copy, because a third translation for each would take too
 * much of the map; they choose a backend again.
 */
__noinline int remember_request(struct sl_packet *p)
{
	struct sl_end asked = {};

	if (!p || p->proto != SL_TCP || find_asked(p, &asked))
		return 0;
	write_requests_key(p, p->dst, p->dport, &asked);
	store_copy(p, p->dst_slot);
	return 0;
}

/* Deletes the copy of the translation of the requests of a pod's connection; 0: it existed. */
__noinline int delete_request(struct sl_packet *p)
{
	struct sl_end asked = {};

	if (!p || p->proto != SL_TCP || find_asked(p, &asked))
		return -1;
	if (READ_ONCE(p->reply))
		write_requests_key(p, p->dst, p->dport, &asked);
	else
		write_requests_key(p, p->src, p->sport, &asked);
	return (int)delete_answer(true, p->family, SL_XL_REQUESTED);
}

/*
 * A pod's connection that has ended is no longer charged to the pod; otherwise short connections
 * would exceed its share until the next pass of the collector. The translation stays for late
 * packets. The answer record and the copy are deleted: they would only be needed if an entry of the
 * connection were evicted before the last packets, which is unlikely.
 */
__noinline int return_translation(struct sl_packet *p, __u32 slot)
{
	__u32 n = 1;

	if (!p)
		return 0;
	write_answers_key(p);
	if (!delete_answer(true, p->family, SL_XL_ANSWERS))
		n++;
	if (!delete_request(p))
		n++;
	give_back(SL_BOUND_XL4 + (p->family == 6), slot, n);
	return 0;
}

/* The initiator has requested another address or port, so the answer record is outdated. */
__noinline int forget_answers(struct sl_packet *p)
{
	struct sl_packet *own = own_packet();

	if (!p || !own)
		return 0;
	/* a packet that begins a service connection keeps its new translation in the same fields */
	if (p->untold)
		return 0;
	p->reply = 0;
	write_answers_key(p);
	delete_answer(is_pod_slot(p->src_slot), p->family, SL_XL_ANSWERS);
	return 0;
}

/*
 * Writes the key and the value of an answer in transit: the packet as it arrives at an address of
 * this node, and the client that it is for.
 */
static __always_inline void write_claimed_key(struct sl_packet *p, const struct sl_end *at)
{
	if (p->family == 4) {
		p->xl4.src = *(const __be32 *)p->src;
		p->xl4.dst = *(const __be32 *)at->addr;
		p->xl4.sport = p->sport;
		p->xl4.dport = at->port;
		p->xl4.proto = p->proto;
		p->xl4.pad = 0;
	} else {
		__builtin_memcpy(p->xl6.src, p->src, sizeof(p->xl6.src));
		__builtin_memcpy(p->xl6.dst, at->addr, sizeof(p->xl6.dst));
		p->xl6.sport = p->sport;
		p->xl6.dport = at->port;
		p->xl6.proto = p->proto;
		p->xl6.pad = 0;
	}
	__builtin_memset(&p->xl, 0, sizeof(p->xl));
	__builtin_memcpy(p->xl.addr, p->dst, sizeof(p->xl.addr));
	p->xl.port = p->dport;
	p->xl.front = p->front;
	p->xl.last_s = now_seconds();
}

/* Whether the packet, which has no connection entry, is an answer of a service connection. */
__noinline int find_answers(struct sl_packet *p)
{
	struct sl_xl *xl;
	__u32 now;

	if (!p || !may_have_port(SL_COUNT_ANSWERED, p->sport))
		return 0;
	p->reply = 1;
	write_answers_key(p);
	p->reply = 0;
	xl = find_answer(is_pod_slot(p->dst_slot), p->family, SL_XL_ANSWERS);
	if (!xl)
		return 0;
	p->front = READ_ONCE(xl->front);
	p->asked_at = READ_ONCE(xl->asked_at);
	p->answers = 1;
	now = now_seconds();
	if (READ_ONCE(xl->last_s) != now)
		*(volatile __u32 *)&xl->last_s = now;
	return 1;
}

#endif
