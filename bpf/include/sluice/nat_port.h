/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_NAT_PORT_H
#define SLUICE_NAT_PORT_H

/*
 * Ports of the node for connections of senders outside to backends elsewhere. A port is
 * claimed by an element of sl_xl under the answer as it arrives. For each backend and
 * protocol there are SL_NAT_PORTS, which a search visits in an order that the hash of the
 * connection gives:
 *
 *   the connection's own   is taken: the entry of the connection was evicted, and the
 *                          claim was not
 *   not claimed            is taken
 *   ended                  is taken: FIN of both ends or RST was seen, the entry is gone,
 *                          or has been idle for its life. Claims that have rested for
 *                          some seconds come first.
 *   half-open TCP, UDP     gives way if the first SL_PORT_CHOICES ports offer nothing
 *                          else: the oldest half-open one, the longest idle one of UDP
 *   open TCP               stays
 *
 * So senders that do not answer, or that forge their addresses, replace each other.
 * A sender that has more than SL_SHARE_SMALL ports to a backend is counted, and has a
 * share: while half of the ports are in use, it may have one part in 2 * (n + 1) of them,
 * n being the number of counted senders. Beyond that it only takes ports of connections
 * that have ended, and of its own that give way.
 */

#include <sluice/conntrack.h>
#include <sluice/count.h>
#include <sluice/restore.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

/* Ports that are looked at before the claim fails: enough for one of 50 free ones. */
#define SL_PORT_TRIES 256
/* Ports among which the best is chosen, unless one is free. */
#define SL_PORT_CHOICES 32
/* With so many free ones among them, less than half are in use, and the counts are wrong. */
#define SL_PORT_MOSTLY_FREE (SL_PORT_CHOICES * 3 / 4)

/* Seconds for which an ended connection's port rests, while there are others. */
#define SL_PORT_REST 2
/* Seconds after which a claim without an entry is nobody's. */
#define SL_PORT_LOST 10

/* How good a port is for a connection that looks for one. */
#define SL_PORT_TAKEN 0
#define SL_PORT_GIVES_WAY 1 /* and how long it has waited, below the next */
#define SL_PORT_ENDED 0x40000000
#define SL_PORT_RESTED 0x40000001
#define SL_PORT_FREE 0x40000002
#define SL_PORT_OWN 0x40000003

/* The least that a counted sender may have while no collector counts. */
#define SL_SHARE_UNCOUNTED (4 * SL_SHARE_SMALL)

/* In sl_xl.born: another CPU replaces the claim. */
#define SL_CLAIM_BUSY 0xffffffff

_Static_assert(offsetof(struct sl_xl, last_s) % 8 == 0 &&
		       offsetof(struct sl_xl, born) == offsetof(struct sl_xl, last_s) + 4,
	       "one word");

/* Milliseconds of CLOCK_MONOTONIC, modulo 2^32. */
static __always_inline __u32 now_milliseconds(void)
{
	return (__u32)(bpf_ktime_get_coarse_ns() / 1000000);
}

/* Whether a socket of the node is connected to the backend from the port: it would lose
 * its packets. Sockets that listen or are not connected lose nothing, because answers of
 * the backend are looked up as claims first.
 */
__noinline int is_port_of_host(struct __sk_buff *skb, struct sl_packet *p,
			       const struct sl_end *from)
{
	struct sl_end backend = {};
	__u32 state;

	use_argument(skb);
	if (!p || !from)
		return 1;
	backend.port = p->dport;
	__builtin_memcpy(backend.addr, p->dst, sizeof(backend.addr));
	state = socket_state(skb, p, &backend, from);
	if (p->proto == SL_UDP)
		return state == SL_SOCKET_ESTABLISHED;
	return state != SL_SOCKET_NONE && state != SL_SOCKET_LISTENS;
}

/* The key of the answers to a source, and whom they are for. */
static __always_inline void write_claim(struct sl_packet *p, const struct sl_end *from)
{
	if (p->family == 4) {
		p->xl4.src = *(const __be32 *)p->dst;
		p->xl4.dst = *(const __be32 *)from->addr;
		p->xl4.sport = p->dport;
		p->xl4.dport = from->port;
		p->xl4.proto = p->proto;
		p->xl4.zone = SL_XL_NAT;
		p->xl4.pad = 0;
	} else {
		__builtin_memcpy(p->xl6.src, p->dst, sizeof(p->xl6.src));
		__builtin_memcpy(p->xl6.dst, from->addr, sizeof(p->xl6.dst));
		p->xl6.sport = p->dport;
		p->xl6.dport = from->port;
		p->xl6.proto = p->proto;
		p->xl6.zone = SL_XL_NAT;
		p->xl6.pad = 0;
	}
	__builtin_memset(&p->xl, 0, sizeof(p->xl));
	__builtin_memcpy(p->xl.addr, p->src, sizeof(p->xl.addr));
	p->xl.port = p->sport;
	p->xl.front = p->front;
	p->xl.last_s = now_seconds();
	p->xl.born = now_milliseconds();
	if (p->xl.born == SL_CLAIM_BUSY)
		p->xl.born = 0;
}

static __always_inline void write_zone(struct sl_packet *p, __u8 zone)
{
	if (p->family == 4)
		p->xl4.zone = zone;
	else
		p->xl6.zone = zone;
}

/* The claim under the key in the cell, or what was stored about its answers, if the map has
 * evicted the claim: the port is as much the connection's as before.
 */
static __always_inline struct sl_xl *find_claim(struct sl_packet *p, __u16 port)
{
	struct sl_xl *xl = find_translation(p->family);

	if (xl)
		return xl;
	xl = find_claimed(p->family, port);
	write_zone(p, SL_XL_NAT);
	return xl;
}

/* Whether answers to the source are the connection's, if they are anybody's. */
static __always_inline bool is_own_claim(const struct sl_packet *p, const struct sl_xl *xl)
{
	return xl && xl->port == p->sport && equal16(xl->addr, p->src);
}

/* Whether the claim is of the same sender as the connection. */
static __always_inline bool is_of_sender(const struct sl_packet *p, const struct sl_xl *xl)
{
	if (p->family == 4)
		return *(const __be32 *)xl->addr == *(const __be32 *)p->src;
	return *(const __u64 *)xl->addr == *(const __u64 *)p->src;
}

/* The entry of the connection that has the claim. Writes over the key in the cell. */
static __always_inline struct sl_ct *connection_of_claim(struct sl_packet *p,
							 const struct sl_xl *xl)
{
	__u8 addr[16];
	__u64 low;

	__builtin_memcpy(addr, xl->addr, sizeof(addr));
	if (p->family == 4) {
		low = is_low4(addr, p->dst, xl->port, p->dport);
		connection_key4(&p->key4, low, addr, p->dst, xl->port, p->dport, p->proto);
		p->key4.zone = SL_ZONE_TRANSIT;
	} else {
		low = is_low6(addr, p->dst, xl->port, p->dport);
		connection_key6(&p->key6, low, addr, p->dst, xl->port, p->dport, p->proto);
		p->key6.zone = SL_ZONE_TRANSIT;
	}
	return look_up_connection(p);
}

static __always_inline __u32 worth_of_ended(__u32 idle)
{
	return idle < SL_PORT_REST ? SL_PORT_ENDED : SL_PORT_RESTED;
}

/* How long a claim that gives way has been worth nothing, in a scale of its protocol. */
static __always_inline __u32 worth_of_rival(__u8 proto, __u32 age, __u32 idle)
{
	__u32 worth;

	if (age >= SL_PORT_ENDED)
		age = SL_PORT_ENDED - 1;
	if (proto != SL_UDP)
		return age ? age : SL_PORT_GIVES_WAY;
	if (idle >= SL_PORT_ENDED / 4)
		idle = SL_PORT_ENDED / 4 - 1;
	worth = SL_PORT_GIVES_WAY + 2 * idle;
	/* what was never used again after its first second goes before what was */
	return age < (idle + 1) * 1000 ? worth + 1 : worth;
}

/* How good the port of another connection's claim is, by the connection's entry. */
static __always_inline __u32 worth_of_claim(struct sl_packet *p, const struct sl_xl *xl, __u16 port,
					    __u64 word)
{
	__u32 now = now_seconds(), idle = now - (__u32)word, flags, nat;
	__u32 age = now_milliseconds() - (__u32)(word >> 32);
	struct sl_ct *ct = connection_of_claim(p, xl);

	if (!ct) {
		if (idle >= SL_PORT_LOST)
			return SL_PORT_RESTED;
		return worth_of_rival(p->proto, age, idle);
	}
	flags = READ_ONCE(ct->flags);
	nat = (__u32)READ_ONCE(*(__u64 *)&ct->nat_port);
	if (now - READ_ONCE(ct->last_s) < idle)
		idle = now - READ_ONCE(ct->last_s);
	if (has_ended(flags) || (nat && (__u16)nat != port))
		return worth_of_ended(idle);
	if (p->proto != SL_UDP && flags & SL_CT_ESTABLISHED)
		return idle < SL_PORT_IDLE_LIFE ? SL_PORT_TAKEN : SL_PORT_RESTED;
	return worth_of_rival(p->proto, age, idle);
}

/*
 * How good a port is for the packet's connection. The word of the claim, last_s and born,
 * is kept in p->search: only who changes it may replace the claim.
 */
static __always_inline __u32 worth_of_port(struct sl_packet *p, const struct sl_end *from)
{
	struct sl_xl *xl;
	__u32 worth;

	write_claim(p, from);
	xl = find_claim(p, from->port);
	if (!xl)
		return SL_PORT_FREE;
	if (is_own_claim(p, xl))
		return SL_PORT_OWN;
	p->search.word = READ_ONCE(*(__u64 *)&xl->last_s);
	if (p->search.word >> 32 == SL_CLAIM_BUSY)
		return SL_PORT_TAKEN;
	p->search.loser = sender_number(xl->addr, p->family, count_seed());
	worth = worth_of_claim(p, xl, from->port, p->search.word);
	if (worth < SL_PORT_ENDED && p->search.over && !is_of_sender(p, xl))
		return SL_PORT_TAKEN;
	return worth;
}

static __always_inline __u64 hash_of_backend(const struct sl_packet *p, __u64 seed)
{
	const __u64 *d = (const __u64 *)p->dst;

	return scramble(scramble(d[0] ^ seed) ^ d[1] ^ (__u64)p->dport << 16 ^ p->proto);
}

/* Cells of sl_count: of the backend, and of a sender that uses it. */
static __always_inline __u32 count_of_backend(const struct sl_packet *p, __u64 seed)
{
	return SL_COUNT_BACKENDS + (hash_of_backend(p, seed) & (SL_COUNTED_BACKENDS - 1));
}

static __always_inline __u32 count_of_sender(const struct sl_packet *p, __u64 seed, __u32 sender)
{
	__u64 hash = scramble(hash_of_backend(p, seed) ^ sender);

	return SL_COUNT_SENDERS + (hash & (SL_COUNTED_SENDERS - 1));
}

/* The share of a sender of the packet's backend; sender 0: what all have in common. */
static __always_inline struct sl_share *find_share(const struct sl_packet *p, __u32 sender,
						   bool make, __u32 count)
{
	struct sl_share_key key = {
		.port = p->dport, .proto = p->proto, .family = p->family, .sender = sender
	};
	struct sl_share fresh = { .ports = count }, *share;

	__builtin_memcpy(key.addr, p->dst, sizeof(key.addr));
	share = bpf_map_lookup_elem(&sl_share, &key);
	if (share || !make)
		return share;
	bpf_map_update_elem(&sl_share, &key, &fresh, BPF_NOEXIST);
	return bpf_map_lookup_elem(&sl_share, &key);
}

/* Counts a port that a sender has claimed, or lost. */
__noinline int count_port(struct sl_packet *p, __u32 sender, __u32 n)
{
	struct sl_share *share;
	__u64 seed;

	if (!p)
		return 0;
	seed = count_seed();
	add_to_count(count_of_sender(p, seed, sender), n);
	add_to_count(count_of_backend(p, seed), n);
	share = find_share(p, sender, false, 0);
	if (share)
		__sync_fetch_and_add(&share->ports, n);
	return 0;
}

/* Whether the sender has all the ports to the backend that it may have. */
__noinline int exceeds_share(struct sl_packet *p, __u32 sender)
{
	struct sl_share *share, *all;
	__u32 part;
	__u64 seed;

	if (!p)
		return 0;
	seed = count_seed();
	if (counted(count_of_sender(p, seed, sender)) < SL_SHARE_SMALL)
		return 0;
	share = find_share(p, sender, false, 0);
	if (!share) {
		share = find_share(p, sender, true, SL_SHARE_SMALL);
		if (!share)
			return is_recounted();
		all = find_share(p, 0, true, 0);
		if (all)
			__sync_fetch_and_add(&all->senders, 1);
	}
	if (counted(count_of_backend(p, seed)) < SL_NAT_PORTS / 2)
		return 0;
	all = find_share(p, 0, false, 0);
	part = SL_NAT_PORTS / 2 / (1 + (all ? READ_ONCE(all->senders) : 1));
	/* too many may be counted */
	if (part < SL_SHARE_UNCOUNTED && !is_recounted())
		part = SL_SHARE_UNCOUNTED;
	return READ_ONCE(share->ports) >= part;
}

/* Takes the claim of another connection out of the map, unless it has changed since it was
 * looked at.
 */
static __always_inline bool unseat(struct sl_packet *p, __u16 port, __u64 word)
{
	struct sl_xl *xl = find_claim(p, port);

	/* the map may have given the element to another key, with another word */
	if (!xl || __sync_val_compare_and_swap((__u64 *)&xl->last_s, word,
					       (__u64)SL_CLAIM_BUSY << 32 | (__u32)word) != word)
		return false;
	delete_translation(p->family);
	delete_answer(p->family, SL_XL_CLAIMED);
	write_zone(p, SL_XL_NAT);
	return true;
}

/* Claims the port that the search has chosen; whether it is the connection's now. */
__noinline int take_port(struct sl_packet *p, const struct sl_end *from)
{
	__u32 worth, loser;

	if (!p || !from)
		return 0;
	worth = worth_of_port(p, from);
	if (!worth)
		return 0;
	if (worth == SL_PORT_OWN) {
		insert_translation(p->family); /* the map may have evicted it */
		return 1;
	}
	if (worth != SL_PORT_FREE) {
		loser = p->search.loser;
		if (!unseat(p, from->port, p->search.word))
			return 0;
		count_port(p, loser, (__u32)-1);
	}
	if (insert_translation(p->family))
		return is_own_claim(p, find_translation(p->family));
	count_port(p, p->search.sender, 1);
	return 1;
}

/*
 * One step of the search: looks at the next port. Whether it is time to claim one, which
 * is in "from" then: this port, or the best so far.
 */
__noinline int try_port(struct sl_packet *p, struct sl_end *from, __u32 i)
{
	struct sl_search *s;
	__u32 worth;

	if (!p || !from)
		return 0;
	s = &p->search;
	from->port = SL_NAT_FIRST + (__u32)(s->hash >> 8) % SL_NAT_PORTS;
	s->hash = scramble(s->hash + 1);
	worth = worth_of_port(p, from);
	if (worth == SL_PORT_FREE) {
		s->unclaimed++;
		if (s->over && (i >= SL_PORT_CHOICES || s->unclaimed < SL_PORT_MOSTLY_FREE))
			return 0;
	}
	if (worth > s->best) {
		s->best = worth;
		s->port = from->port;
	}
	/* in mid-flow, the connection's own port may be one of the next */
	if (s->best < (s->midway ? SL_PORT_OWN : SL_PORT_RESTED) &&
	    (i < SL_PORT_CHOICES - 1 || !s->best))
		return 0;
	from->port = s->port;
	s->best = 0;
	return 1;
}

/* SCTP keeps the port of the sender, because no checksum could follow. It has it unless an
 * open association of another sender does.
 */
static __always_inline enum sl_reason claim_own_port(struct sl_packet *p, struct sl_end *from)
{
	from->port = p->sport;
	p->search.sender = sender_number(p->src, p->family, count_seed());
	p->search.over = 0;
	return take_port(p, from) ? SL_CONTINUE : SL_REASON_NAT_EXHAUSTED;
}

/* Finds a port of the node for the connection, from an address of the node. */
__noinline enum sl_reason find_port(struct __sk_buff *skb, struct sl_packet *p, struct sl_end *from)
{
	__u32 i;

	use_argument(skb);
	if (!p || !from)
		return SL_REASON_NAT_EXHAUSTED;
	if (p->proto == SL_SCTP)
		return claim_own_port(p, from);
	p->search.hash = hash_of(p);
	p->search.sender = sender_number(p->src, p->family, count_seed());
	p->search.over = (__u8)exceeds_share(p, p->search.sender);
	p->search.midway = p->proto == SL_TCP && !begins(p);
	p->search.best = 0;
	p->search.unclaimed = 0;
	for (i = 0; i < SL_PORT_TRIES; i++) {
		if (try_port(p, from, i) && !is_port_of_host(skb, p, from) && take_port(p, from))
			return SL_CONTINUE;
	}
	return p->search.over ? SL_REASON_NAT_SHARE : SL_REASON_NAT_EXHAUSTED;
}

#endif
