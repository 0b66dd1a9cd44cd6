/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_RING_H
#define SLUICE_RING_H

/*
 * TCP, UDP and ICMP echo connections from outside get half of sl_ct4 and of sl_ct6, in three
 * parts:
 *
 *   TCP, not proven  a quarter: a ring of keys. A new connection takes the next position,
 *                    and the entry of the key there is deleted.
 *   UDP, ICMP echo   a quarter, likewise. An entry that was used since the last round of
 *                    the ring is skipped. If SL_RING_TRIES positions in a row have such
 *                    entries, the least recently used entry is replaced.
 *   TCP, proven      half: the responder has continued after the handshake. While more than
 *                    half of this part is in use, the senders of one bucket may have an
 *                    eighth of it. A connection that exceeds this stays in the ring.
 *
 * Therefore connections with forged sources only replace each other, and no client is refused.
 * The entry of a connection in a ring has SL_CT_IN_RING, and its position: a client may use its
 * port again while the former connection still has a position.
 */

#include <sluice/count.h>
#include <sluice/packet.h>
#include <sluice/transport.h>

#define SL_RING_FREE 0xffffffff

static __always_inline bool has_ring(const struct sl_packet *p)
{
	return p->proto == SL_TCP || p->proto == SL_UDP || p->proto == SL_ICMP ||
	       p->proto == SL_ICMPV6;
}

static __always_inline __u32 ring_flag(const struct sl_packet *p)
{
	if (!p->in_ring)
		return 0;
	return SL_CT_IN_RING | (__u32)p->ring_position << SL_CT_RING_SHIFT;
}

/* The position as an entry holds it. */
static __always_inline __u32 position_of(__u32 at)
{
	return at % SL_CT_RING_POSITIONS + 1;
}

/* Whether an entry belongs to the position, and not to a later connection with the same key. */
static __always_inline bool is_at_position(const struct sl_ct *ct, __u32 at)
{
	__u32 flags = READ_ONCE(ct->flags), position;

	position = flags & SL_CT_PROXY ? 0 : flags >> SL_CT_RING_SHIFT;
	return flags & SL_CT_IN_RING && (!position || position == position_of(at));
}

/* For how many seconds the entry at a position was not used. SL_RING_FREE: the position has no
 * entry, or its entry was not used since the last round. */
static __always_inline __u32 idle_at(const struct sl_ct *ct, __u32 at, __u32 *seen)
{
	__u32 last, now = now_seconds(), was = *seen;

	if (!ct || !is_at_position(ct, at))
		return SL_RING_FREE;
	last = READ_ONCE(ct->last_s);
	*seen = last;
	if (last == was)
		return SL_RING_FREE;
	/* another CPU may have used it just now */
	return (__s32)(now - last) > 0 ? now - last : 0;
}

__noinline __u32 examine4(__u32 at)
{
	struct sl_ring4 *ring = bpf_map_lookup_elem(&sl_ring4, &at);

	if (!ring || !ring->key.proto)
		return SL_RING_FREE;
	return idle_at(bpf_map_lookup_elem(&sl_ct4, &ring->key), at, &ring->seen);
}

__noinline __u32 examine6(__u32 at)
{
	struct sl_ring6 *ring = bpf_map_lookup_elem(&sl_ring6, &at);

	if (!ring || !ring->key.proto)
		return SL_RING_FREE;
	return idle_at(bpf_map_lookup_elem(&sl_ct6, &ring->key), at, &ring->seen);
}

/* Takes a position for the connection of this run, and deletes the entry that belongs to it. */
__noinline int enter_ring4(struct sl_packet *p, __u32 at)
{
	struct sl_ring4 *ring = bpf_map_lookup_elem(&sl_ring4, &at);
	struct sl_ct *ct;

	if (!p || !ring)
		return 0;
	ct = ring->key.proto ? bpf_map_lookup_elem(&sl_ct4, &ring->key) : NULL;
	if (ct && is_at_position(ct, at) && !bpf_map_delete_elem(&sl_ct4, &ring->key))
		count_connection(SL_CT_STAT_DELETED);
	p->ring_position = (__u16)position_of(at);
	ring->key = p->key4;
	ring->seen = now_seconds();
	return 0;
}

__noinline int enter_ring6(struct sl_packet *p, __u32 at)
{
	struct sl_ring6 *ring = bpf_map_lookup_elem(&sl_ring6, &at);
	struct sl_ct *ct;

	if (!p || !ring)
		return 0;
	ct = ring->key.proto ? bpf_map_lookup_elem(&sl_ct6, &ring->key) : NULL;
	if (ct && is_at_position(ct, at) && !bpf_map_delete_elem(&sl_ct6, &ring->key))
		count_connection(SL_CT_STAT_DELETED);
	p->ring_position = (__u16)position_of(at);
	ring->key = p->key6;
	ring->seen = now_seconds();
	return 0;
}

/* Selects the position for a connection without handshake. */
static __always_inline __u32 select_position(__u32 *next, __u32 six)
{
	__u32 at, best = 0, longest = 0, i, idle;

	for (i = 0; i < SL_RING_TRIES; i++) {
		at = __sync_fetch_and_add(next, 1);
		at = six ? SL_RING6 + at % SL_RING6 : SL_RING4 + at % SL_RING4;
		idle = six ? examine6(at) : examine4(at);
		if (!i || idle > longest) {
			best = at;
			longest = idle;
		}
		if (idle == SL_RING_FREE)
			break;
	}
	return best;
}

/* Assigns a ring position to a new connection. Its key must have been written. */
__noinline int join_ring(struct sl_packet *p)
{
	__u32 other, six, *next, at;

	if (!p)
		return 0;
	p->in_ring = 1;
	p->ring_position = 0;
	other = p->proto != SL_TCP;
	six = p->family == 6;
	next = count_at(SL_COUNT_RINGS + 2 * six + other);
	if (!next)
		return 0;
	if (other)
		at = select_position(next, six);
	else
		at = __sync_fetch_and_add(next, 1) % (six ? SL_RING6 : SL_RING4);
	return six ? enter_ring6(p, at) : enter_ring4(p, at);
}

/* Whether the part for proven connections has capacity for this connection. */
__noinline int prove(struct sl_packet *p)
{
	__u32 six, part, *all, *own, sender;

	if (!p)
		return 0;
	six = p->family == 6;
	part = six ? SL_PROVEN6 : SL_PROVEN4;
	sender = sender_number(p->reply ? p->dst : p->src, p->family, count_seed());
	sender = sender / 2 % SL_PROVEN_BUCKETS + six * SL_PROVEN_BUCKETS;
	all = count_at(SL_COUNT_PROVEN + six);
	own = count_at(SL_COUNT_PROVEN_BY + sender);
	if (!all || !own || READ_ONCE(*all) >= part)
		return 0;
	if (READ_ONCE(*all) >= part / 2 && READ_ONCE(*own) >= part / 8)
		return 0;
	__sync_fetch_and_add(all, 1);
	__sync_fetch_and_add(own, 1);
	return 1;
}

/*
 * Moves a connection out of its ring when the responder continues after the handshake. A sender
 * with a forged address does not know the responder's sequence number: its segments make the
 * responder reset the connection or retransmit its SYN.
 */
static __noinline int leave_ring(struct sl_packet *p, struct sl_ct *ct, __u32 flags)
{
	if (!p->reply || p->fragment || p->tcp_flags & (SL_TCP_SYN | SL_TCP_RST))
		return 0;
	if (flags & SL_CT_ESTABLISHED && !(flags & SL_CT_RST) && prove(p))
		__sync_fetch_and_and(&ct->flags, ~SL_CT_IN_RING);
	return 0;
}

#endif
