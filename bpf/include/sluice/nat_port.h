/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_NAT_PORT_H
#define SLUICE_NAT_PORT_H

/*
 * Source ports of the node for connections from outside clients to backends on other nodes. A
 * connection claims a port by an element of sl_xl4 or sl_xl6, whose key is the answer as it arrives
 * at the node. For each backend and protocol there are SL_NAT_PORTS ports. A search visits them in
 * an order that the connection's hash determines:
 *
 *   the connection's own   is taken: the connection's entry was evicted, its claim was not
 *   unclaimed              is taken
 *   ended                  is taken: FIN of both ends or RST was seen, the entry is gone,
 *                          or has been idle for its lifetime. Claims in quarantine for
 *                          some seconds already are preferred.
 *   half-open TCP, UDP     is replaced if the first SL_PORT_CHOICES ports offer nothing
 *                          better: the oldest half-open one; for UDP the longest idle one
 *   open TCP               stays
 *
 * Therefore senders that do not answer, or that forge their addresses, only replace each other's
 * claims. A sender with more than SL_SHARE_SMALL ports to a backend is counted and gets a share:
 * while half of the ports are in use, each of n counted senders may have one part in 2 * (n + 1) of
 * the ports. A sender that has used up its share only gets ports of ended connections, and
 * replaceable ports of its own connections.
 */

#include <sluice/conntrack.h>
#include <sluice/count.h>
#include <sluice/restore.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

/* How many ports a search examines before it fails. That is enough if one port in 50 is free. */
#define SL_PORT_TRIES 256
/* If no port is free, the search takes the best of this many ports. */
#define SL_PORT_CHOICES 32
/*
 * If the search meets this many free ports, less than half of all ports is in use: the counts are
 * wrong.
 */
#define SL_PORT_MOSTLY_FREE (SL_PORT_CHOICES * 3 / 4)

/* Quarantine in seconds of an ended connection's port, while other ports are available. */
#define SL_PORT_REST 2
/* Seconds after which a claim without a connection entry counts as lost. */
#define SL_PORT_LOST 10

/* How suitable a port is for a connection. */
#define SL_PORT_TAKEN 0
#define SL_PORT_GIVES_WAY 1 /* plus how long it has been unused, below SL_PORT_ENDED */
#define SL_PORT_ENDED 0x40000000
#define SL_PORT_RESTED 0x40000001
#define SL_PORT_FREE 0x40000002
#define SL_PORT_OWN 0x40000003

/* The minimum share of a counted sender while no collector runs. */
#define SL_SHARE_UNCOUNTED (4 * SL_SHARE_SMALL)

/* In sl_xl.born: another CPU is replacing the claim. */
#define SL_CLAIM_BUSY 0xffffffff

_Static_assert(offsetof(struct sl_xl, last_s) % 8 == 0 &&
		       offsetof(struct sl_xl, born) == offsetof(struct sl_xl, last_s) + 4,
	       "one word");

/* Milliseconds of CLOCK_MONOTONIC, modulo 2^32. */
static __always_inline __u32 now_milliseconds(void)
{
	return (__u32)(bpf_ktime_get_coarse_ns() / 1000000);
}

/*
 * Whether a socket of the node is connected to the backend from the port, and would lose its
 * packets. Listening and unconnected sockets lose no packets, because only answers of the backend
 * match a claim.
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

/*
 * Writes the claim of a source: its key matches the answers, its value is the client to which they
 * go.
 */
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

/* Finds the claim under the key in the cell. If the map has evicted the claim, its copy in
 * sl_answers4 or sl_answers6 counts as well. */
static __always_inline struct sl_xl *find_claim(struct sl_packet *p, __u16 port)
{
	struct sl_xl *xl = find_translation(p->family);

	if (xl)
		return xl;
	xl = find_claimed(p->family, port);
	write_zone(p, SL_XL_NAT);
	return xl;
}

/* Whether the claim, if there is one, belongs to the packet's connection. */
static __always_inline bool is_own_claim(const struct sl_packet *p, const struct sl_xl *xl)
{
	return xl && xl->port == p->sport && equal16(xl->addr, p->src);
}

/* Whether the claim belongs to the sender of the packet's connection. */
static __always_inline bool is_of_sender(const struct sl_packet *p, const struct sl_xl *xl)
{
	if (p->family == 4)
		return *(const __be32 *)xl->addr == *(const __be32 *)p->src;
	return *(const __u64 *)xl->addr == *(const __u64 *)p->src;
}

/* Finds the entry of the connection that owns the claim. Overwrites the key in the cell. */
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

/* Ranks a replaceable claim by its idle time; the scale depends on the protocol. */
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
	/* a claim that was only used in its first second ranks above one that was used later */
	return age < (idle + 1) * 1000 ? worth + 1 : worth;
}

/* Ranks the port of another connection's claim, by that connection's entry. */
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
 * Ranks a port for the packet's connection. p->search keeps the claim's last_s and born, read as
 * one word: a CPU may replace the claim only if it succeeds in exchanging this word.
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

/* Cells of sl_count: of the backend, and of a sender to that backend. */
static __always_inline __u32 count_of_backend(const struct sl_packet *p, __u64 seed)
{
	return SL_COUNT_BACKENDS + (hash_of_backend(p, seed) & (SL_COUNTED_BACKENDS - 1));
}

static __always_inline __u32 count_of_sender(const struct sl_packet *p, __u64 seed, __u32 sender)
{
	__u64 hash = scramble(hash_of_backend(p, seed) ^ sender);

	return SL_COUNT_SENDERS + (hash & (SL_COUNTED_SENDERS - 1));
}

/* The share of a sender to the packet's backend; sender 0: the totals of all senders. */
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

/* Counts a port that a sender has claimed; n = -1: the sender has lost it. */
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

/* Whether the sender has used up its share of ports to the backend. */
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
	/* without a recent recount, the counted number of senders may be too large */
	if (part < SL_SHARE_UNCOUNTED && !is_recounted())
		part = SL_SHARE_UNCOUNTED;
	return READ_ONCE(share->ports) >= part;
}

/* Removes another connection's claim from the map, unless the claim has changed since it was
 * examined. */
static __always_inline bool unseat(struct sl_packet *p, __u16 port, __u64 word)
{
	struct sl_xl *xl = find_claim(p, port);

	/* if the map has reassigned the element to another key, its word differs */
	if (!xl || __sync_val_compare_and_swap((__u64 *)&xl->last_s, word,
					       (__u64)SL_CLAIM_BUSY << 32 | (__u32)word) != word)
		return false;
	delete_translation(p->family);
	delete_answer(false, p->family, SL_XL_CLAIMED);
	write_zone(p, SL_XL_NAT);
	return true;
}

/* Claims the port that the search has chosen. Returns whether the connection has it now. */
__noinline int take_port(struct sl_packet *p, const struct sl_end *from)
{
	__u32 worth, loser;

	if (!p || !from)
		return 0;
	worth = worth_of_port(p, from);
	if (!worth)
		return 0;
	if (worth == SL_PORT_OWN) {
		insert_translation(p->family); /* the map may have evicted the claim */
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
 * One step of the search: examines the next port. Returns whether the search ends. Then "from" has
 * the port to claim: this one, or the best one so far.
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
	/* in mid-flow: one of the next ports may already belong to the connection */
	if (s->best < (s->midway ? SL_PORT_OWN : SL_PORT_RESTED) &&
	    (i < SL_PORT_CHOICES - 1 || !s->best))
		return 0;
	from->port = s->port;
	s->best = 0;
	return 1;
}

/* SCTP keeps the client's port, because its checksum would have to be recomputed. The port is
 * available unless an open association of another client uses it.
 */
static __always_inline enum sl_reason claim_own_port(struct sl_packet *p, struct sl_end *from)
{
	from->port = p->sport;
	p->search.sender = sender_number(p->src, p->family, count_seed());
	p->search.over = 0;
	return take_port(p, from) ? SL_CONTINUE : SL_REASON_NAT_EXHAUSTED;
}

/* Finds a source port for the connection, at the node's address in "from". */
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
