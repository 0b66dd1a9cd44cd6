/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_CONNTRACK_H
#define SLUICE_CONNTRACK_H

/*
 * Connections: one entry for both directions, found by a key that puts the
 * lower address first. An entry says who began, and under which epochs each
 * local end and under which address epochs each address was evaluated. While none
 * of them has moved, a packet of either direction passes; else the sides that
 * have moved are evaluated anew, as the connection and not as the packet.
 *
 * The map may recycle an element while a program holds it. So in place only
 * last_s is stored, flags change by atomic OR and AND, and the other words by
 * compare and exchange.
 */

#include <sluice/bound.h>
#include <sluice/budget.h>
#include <sluice/claim.h>
#include <sluice/clock.h>
#include <sluice/maps.h>
#include <sluice/packet.h>
#include <sluice/policy.h>
#include <sluice/previous.h>
#include <sluice/ring.h>
#include <sluice/transport.h>

#define SL_EEXIST 17

/* Where an entry has its node, and the word in whose upper quarter that is: in the
 * layout of this version, and in the one that a test compiles in its place.
 */
#ifdef SL_SWAP_LAYOUTS
#define SL_CT_NODE pad
#define SL_CT_NODE_WORD rule_eg
#define SL_CT_FRONT rev_nat
#define SL_CT_ASKED rev_nat /* which has room for one of the two */
#else
#define SL_CT_NODE node
#define SL_CT_NODE_WORD nat_port
#define SL_CT_FRONT front
#define SL_CT_ASKED asked_address
#endif

/* Whether the program is where senders outside of the node ask for services. */
#define SL_FROM_OUTSIDE \
	(SL_PROGRAM == SL_PROGRAM_FROM_UPLINK || SL_PROGRAM == SL_PROGRAM_FROM_OVERLAY)

/* Whether the program sees connections of SL_ZONE_TRANSIT. */
#define SL_IN_TRANSIT                                                              \
	(cfg_services && (SL_FROM_OUTSIDE || SL_PROGRAM == SL_PROGRAM_TO_UPLINK || \
			  SL_PROGRAM == SL_PROGRAM_TO_OVERLAY))

#define SL_CT_ENDED (SL_CT_FIN_I | SL_CT_FIN_R | SL_CT_RST)

static __always_inline __u16 node_of_connection(const struct sl_ct *ct)
{
	return READ_ONCE(ct->SL_CT_NODE);
}

/* The service that the connection began with, and which of the node's addresses was
 * asked for it.
 */
static __always_inline __u32 front_of_connection(const struct sl_ct *ct)
{
	return READ_ONCE(ct->SL_CT_FRONT);
}

static __always_inline __u16 asked_of_connection(const struct sl_ct *ct)
{
	return READ_ONCE(ct->SL_CT_ASKED);
}

/* Whether the program sees what initiators ask for, before it is translated. */
#define SL_SEES_ASKED (SL_PROGRAM == SL_PROGRAM_FROM_POD || SL_FROM_OUTSIDE)

/* The initiator asks for what the packet says now. Each store is whole, and one that comes
 * between a load and a compare-and-exchange of the word makes that fail.
 */
static __always_inline void ask_otherwise(const struct sl_packet *p, struct sl_ct *ct)
{
	*(volatile __typeof__(ct->SL_CT_FRONT) *)&ct->SL_CT_FRONT =
		(__typeof__(ct->SL_CT_FRONT))p->front;
	*(volatile __typeof__(ct->SL_CT_ASKED) *)&ct->SL_CT_ASKED =
		(__typeof__(ct->SL_CT_ASKED))p->asked_at;
	/* the next answer is the first one again */
	__sync_fetch_and_and(&ct->flags, ~SL_CT_SEEN_REPLY);
}

/*
 * The place of an address in sl_pgen: with h = 0, for each 32-bit word of the
 * address in network order h = (h ^ word) * 0x9e3779b1 modulo 2^32; the upper
 * twelve bits of h.
 */
static __always_inline __u32 address_epoch_bucket(const __u8 *addr, __u8 family)
{
	const __be32 *word = (const __be32 *)addr;
	const __u32 odd = 0x9e3779b1;
	__u32 h = bpf_ntohl(word[0]) * odd;

	_Static_assert(SL_ADDRESS_EPOCHS == 1 << 12, "upper bits of a product");
	if (family == 6) {
		h = (h ^ bpf_ntohl(word[1])) * odd;
		h = (h ^ bpf_ntohl(word[2])) * odd;
		h = (h ^ bpf_ntohl(word[3])) * odd;
	}
	return h >> 20;
}

static __always_inline __u16 address_epoch(const __u8 *addr, __u8 family)
{
	__u32 at = address_epoch_bucket(addr, family);
	__u64 *epoch = bpf_map_lookup_elem(&sl_pgen, &at);

	return epoch ? (__u16)READ_ONCE(*epoch) : 0;
}

/* Whether the sender is the lower end. */

static __always_inline bool is_low4(const __u8 *src, const __u8 *dst, __u16 sport, __u16 dport)
{
	__be32 s = *(const __be32 *)src, d = *(const __be32 *)dst;

	return s == d ? sport <= dport : bpf_ntohl(s) < bpf_ntohl(d);
}

static __always_inline bool is_low6(const __u8 *src, const __u8 *dst, __u16 sport, __u16 dport)
{
	const __u64 *s = (const __u64 *)src, *d = (const __u64 *)dst;

	if (s[0] != d[0])
		return bpf_be64_to_cpu(s[0]) < bpf_be64_to_cpu(d[0]);
	if (s[1] != d[1])
		return bpf_be64_to_cpu(s[1]) < bpf_be64_to_cpu(d[1]);
	return sport <= dport;
}

/*
 * What both keys end with, as one word: the kernel reads a key in larger pieces
 * than its fields, and a load of bytes that several stores have just written
 * waits until they are in the cache.
 */
static __always_inline __u64 key_tail(__u64 low, __u16 sport, __u16 dport, __u8 proto)
{
	__u64 lesser = pick(low, sport, dport), greater = pick(low, dport, sport);

	_Static_assert(offsetof(struct sl_ct_key4, hi) == 4 &&
			       offsetof(struct sl_ct_key4, plo) == 8 &&
			       offsetof(struct sl_ct_key4, phi) == 10 &&
			       offsetof(struct sl_ct_key4, proto) == 12 &&
			       offsetof(struct sl_ct_key4, zone) == 13,
		       "words");
	_Static_assert(offsetof(struct sl_ct_key6, plo) == 32 &&
			       offsetof(struct sl_ct_key6, phi) == 34 &&
			       offsetof(struct sl_ct_key6, proto) == 36 &&
			       offsetof(struct sl_ct_key6, zone) == 37,
		       "words");
	return (__u64)(SL_ZONE_POD << 8 | proto) << 32 | greater << 16 | lesser;
}

static __always_inline void connection_key4(struct sl_ct_key4 *key, __u64 low, const __u8 *src,
					    const __u8 *dst, __u16 sport, __u16 dport, __u8 proto)
{
	__u64 s = *(const __be32 *)src, d = *(const __be32 *)dst;
	__u64 *word = (__u64 *)key;

	word[0] = pick(low, d, s) << 32 | pick(low, s, d);
	word[1] = key_tail(low, sport, dport, proto);
}

static __always_inline void connection_key6(struct sl_ct_key6 *key, __u64 low, const __u8 *src,
					    const __u8 *dst, __u16 sport, __u16 dport, __u8 proto)
{
	const __u64 *s = (const __u64 *)src, *d = (const __u64 *)dst;
	__u64 *word = (__u64 *)key;

	word[0] = pick(low, s[0], d[0]);
	word[1] = pick(low, s[1], d[1]);
	word[2] = pick(low, d[0], s[0]);
	word[3] = pick(low, d[1], s[1]);
	word[4] = key_tail(low, sport, dport, proto);
}

/* Ports in keys: the identifier of an echo twice. Without ports they are 0. */
static __always_inline __u16 key_port(const struct sl_packet *p, __u16 port)
{
	return p->proto == SL_ICMP || p->proto == SL_ICMPV6 ? p->echo : port;
}

/*
 * Writes the key of the packet's connection where all but find_known take it
 * from. Sets p->low.
 */
__noinline int write_key(struct sl_packet *p)
{
	__u16 sport, dport;

	if (!p)
		return 0;
	sport = key_port(p, p->sport);
	dport = key_port(p, p->dport);
	if (p->family == 4) {
		p->low = is_low4(p->src, p->dst, sport, dport);
		connection_key4(&p->key4, READ_ONCE(p->low), p->src, p->dst, sport, dport,
				p->proto);
	} else {
		p->low = is_low6(p->src, p->dst, sport, dport);
		connection_key6(&p->key6, READ_ONCE(p->low), p->src, p->dst, sport, dport,
				p->proto);
	}
	if (SL_IN_TRANSIT && p->zone) {
		p->key4.zone = p->zone;
		p->key6.zone = p->zone;
	}
	return 0;
}

static __always_inline struct sl_ct *look_up_connection(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return NULL;
	if (p->family == 4)
		return bpf_map_lookup_elem(&sl_ct4, &own->key4);
	return bpf_map_lookup_elem(&sl_ct6, &own->key6);
}

/*
 * The entry of the packet's connection, whose key is written already. Where a
 * map of the version before is left, a miss overwrites p->entry.
 */
static __noinline struct sl_ct *find_connection(const struct sl_packet *p)
{
	struct sl_ct *ct = look_up_connection(p);

	if (ct || !cfg_previous)
		return ct;
	take_over_connection(p);
	/* also if there was none: another CPU may have taken it over since */
	return look_up_connection(p);
}

/*
 * The same for every packet, of which most need no more than this look-up. The
 * key lies on the stack, which is faster, and is not written to the cell. Sets
 * p->low.
 */
static __noinline struct sl_ct *find_known(struct sl_packet *p)
{
	__u16 sport = key_port(p, p->sport), dport = key_port(p, p->dport);
	struct sl_ct *ct;

	if (p->family == 4) {
		struct sl_ct_key4 key4;

		p->low = is_low4(p->src, p->dst, sport, dport);
		connection_key4(&key4, READ_ONCE(p->low), p->src, p->dst, sport, dport, p->proto);
		ct = bpf_map_lookup_elem(&sl_ct4, &key4);
	} else {
		struct sl_ct_key6 key6;

		p->low = is_low6(p->src, p->dst, sport, dport);
		connection_key6(&key6, READ_ONCE(p->low), p->src, p->dst, sport, dport, p->proto);
		ct = bpf_map_lookup_elem(&sl_ct6, &key6);
	}
	if (ct || !cfg_previous)
		return ct;
	write_key(p);
	return find_connection(p);
}

static __noinline long delete_connection(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();
	long err;

	if (!own)
		return -1;
	if (p->family == 4)
		err = bpf_map_delete_elem(&sl_ct4, &own->key4);
	else
		err = bpf_map_delete_elem(&sl_ct6, &own->key6);
	if (!err)
		count_connection(SL_CT_STAT_DELETED);
	if (delete_previous(p))
		count_connection(SL_CT_STAT_DELETED);
	return err;
}

static __always_inline bool is_reply(const struct sl_packet *p, const struct sl_ct *ct)
{
	bool low_began = READ_ONCE(ct->flags) & SL_CT_ORIG_LO;

	return low_began ? !p->low : p->low != 0;
}

/* Nothing but late packets is to come. */
static __always_inline bool has_ended(__u32 flags)
{
	return flags & (SL_CT_RST | SL_CT_CLOSED_SENT) ||
	       (flags & SL_CT_ENDED) == (SL_CT_FIN_I | SL_CT_FIN_R);
}

/* A packet with which a connection can only begin. */
static __always_inline bool begins(const struct sl_packet *p)
{
	if (p->fragment)
		return false;
	if (p->proto == SL_TCP)
		return (p->tcp_flags & (SL_TCP_SYN | SL_TCP_ACK)) == SL_TCP_SYN;
	return p->proto == SL_SCTP && p->chunk == SL_SCTP_INIT;
}

/* The steps towards the end that this packet takes, as flags of the entry. */
static __always_inline __u32 steps_of(const struct sl_packet *p)
{
	__u32 fin = p->reply ? SL_CT_FIN_R : SL_CT_FIN_I, steps = 0;
	__u32 reset = p->reply ? SL_CT_RST | SL_CT_RST_R : SL_CT_RST;

	if (p->fragment)
		return 0;
	if (p->proto == SL_TCP) {
		if (p->tcp_flags & SL_TCP_FIN)
			steps |= fin;
		if (p->tcp_flags & SL_TCP_RST)
			steps |= reset;
	} else if (p->proto == SL_SCTP) {
		if (p->chunk == SL_SCTP_SHUTDOWN || p->chunk == SL_SCTP_SHUTDOWN_ACK)
			steps |= fin;
		if (p->chunk == SL_SCTP_ABORT)
			steps |= reset;
	}
	return steps;
}

static __always_inline __u16 initiator_slot(__u64 where)
{
	return (__u16)(where >> 48);
}

static __always_inline __u16 responder_slot(__u64 where)
{
	return (__u16)(where >> 32);
}

/* The lower half of the word: address epochs of initiator and responder. */
static __always_inline __u32 address_epochs(const struct sl_packet *p)
{
	__u32 src = address_epoch(p->src, p->family), dst = address_epoch(p->dst, p->family);

	return p->reply ? dst << 16 | src : src << 16 | dst;
}

static __always_inline bool epoch_moved(__u32 epoch, __u16 slot)
{
	struct sl_endpoint *e;

	if (!epoch) /* not local */
		return false;
	e = endpoint_at(slot);
	return !e || epoch_of(policy_of(e)) != epoch;
}

/* The sides whose verdict may be another by now. */
static __always_inline __u32 moved_sides(__u64 epochs, __u64 where, __u32 addr_epochs)
{
	__u32 differ = (__u32)where ^ addr_epochs, moved = 0;

	/* who the peer is, is the other side's question */
	if (epoch_moved((__u32)(epochs >> 32), initiator_slot(where)) || differ & 0xffff)
		moved |= SL_SIDE_EGRESS;
	if (epoch_moved((__u32)epochs, responder_slot(where)) || differ >> 16)
		moved |= SL_SIDE_INGRESS;
	return moved;
}

/* The slots of p's connection, and the address epochs, as the entry holds them. */
static __always_inline __u64 evaluated_where(const struct sl_packet *p, __u32 addr_epochs)
{
	__u16 slot_i = p->reply ? p->dst_slot : p->src_slot;
	__u16 slot_r = p->reply ? p->src_slot : p->dst_slot;

	return (__u64)slot_i << 48 | (__u64)slot_r << 32 | addr_epochs;
}

/* The epochs under which it was evaluated; a side that was not keeps its old one. */
static __always_inline __u64 evaluated_epochs(const struct sl_packet *p, __u64 old, __u64 where)
{
	__u32 initiator = (__u32)(old >> 32), responder = (__u32)old;

	if (p->sides & SL_SIDE_EGRESS)
		initiator = initiator_slot(where) == SL_SLOT_NONE ? 0 : p->egress.epoch;
	if (p->sides & SL_SIDE_INGRESS)
		responder = responder_slot(where) == SL_SLOT_NONE ? 0 : p->ingress.epoch;
	return (__u64)initiator << 32 | responder;
}

/*
 * Takes a connection out of the budget of the sender whose packet makes the
 * entry, so that no endpoint uses up another's. What the host forwards under its
 * own address comes from outside. TCP and UDP from outside have rings, not a budget.
 */
static __always_inline bool within_budget(struct sl_packet *p)
{
	__u32 slot = p->src_slot, at, limit;
	struct sl_budget *budget;
	__u64 begun;

	p->in_ring = 0;
	if (slot == SL_SLOT_NONE ||
	    (slot == SL_SLOT_HOST && p->src_identity == world_of(p->family)))
		slot = SL_BUDGET_OUTSIDE;
	if (slot == SL_BUDGET_OUTSIDE && has_ring(p)) {
		join_ring(p);
		return true;
	}
	at = slot << 1 | (p->family == 6);
	budget = bpf_map_lookup_elem(&sl_budget, &at);
	if (!budget)
		return true;
	limit = (__u32)READ_ONCE(budget->limit);
	if (!limit)
		return true;
	begun = READ_ONCE(budget->begun);
	if ((__u32)begun >= limit)
		return renew_budget(at);
	__sync_fetch_and_add(&budget->begun, 1);
	return true;
}

static __always_inline long insert_connection(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return -1;
	if (p->family == 4)
		return bpf_map_update_elem(&sl_ct4, &own->key4, &own->entry, BPF_NOEXIST);
	return bpf_map_update_elem(&sl_ct6, &own->key6, &own->entry, BPF_NOEXIST);
}

/*
 * Whether the stack carries what begins a connection, and may translate it: what
 * comes from it, what goes to it, what goes on from it to another node, and what
 * comes from outside for a service.
 */
static __always_inline bool begins_in_stack(const struct sl_packet *p)
{
	if (SL_FROM_OUTSIDE)
		return p->translated;
	if (SL_PROGRAM == SL_PROGRAM_FROM_POD)
		return p->dst_slot == SL_SLOT_HOST || (p->dst_slot == SL_SLOT_NONE && !p->node);
	return true;
}

/* Makes the entry of a connection whose two sides have agreed. */
__noinline enum sl_reason open_connection(struct sl_packet *p, __u32 addr_epochs, __u32 flags)
{
	struct sl_ct *ct, *other;
	long err;

	if (!p)
		return SL_REASON_CONNECTION_INSERT_FAILED;
	if (!within_budget(p))
		return SL_REASON_CONNECTION_BUDGET;
	ct = &p->entry;
	__builtin_memset(ct, 0, sizeof(*ct));
	ct->where = evaluated_where(p, addr_epochs);
	ct->epochs = evaluated_epochs(p, 0, ct->where);
	ct->id_init = p->reply ? p->dst_identity : p->src_identity;
	ct->id_resp = p->reply ? p->src_identity : p->dst_identity;
	ct->last_s = now_seconds();
	ct->rule_eg = p->egress.rule;
	ct->rule_in = p->ingress.rule;
	ct->flags = flags | steps_of(p) | ring_flag(p);
	ct->SL_CT_NODE = p->node;
	if (p->translated || p->answers) {
		ct->SL_CT_ASKED = p->asked_at;
		ct->SL_CT_FRONT = (__typeof__(ct->SL_CT_FRONT))p->front;
	}
	if (begins_in_stack(p))
		ct->flags |= SL_CT_VIA_STACK;
	if (p->reply ? !p->low : p->low)
		ct->flags |= SL_CT_ORIG_LO;

	err = insert_connection(p);
	if (err == -SL_EEXIST) {
		/* another CPU was faster: with the same, or from the other end */
		other = find_connection(p);
		if (other && begins(p) && is_reply(p, other))
			return SL_REASON_CONNECTION_INVALID;
		return SL_CONTINUE;
	}
	if (err)
		return SL_REASON_CONNECTION_INSERT_FAILED;
	p->ct_flags = (__u16)ct->flags;
	p->news |= SL_NEWS_VERDICT;
	count_connection(SL_CT_STAT_CREATED);
	return SL_CONTINUE;
}

/* What is known of a side that let a connection through; its table is not. */
static __always_inline struct sl_side recalled_side(__u32 epoch, __u16 rule)
{
	struct sl_side side = {};

	if (epoch) {
		side.epoch = epoch;
		side.rule = rule;
		side.by = rule ? SL_BY_RULE : SL_BY_DEFAULT;
		side.action = SL_ACTION_ALLOW;
	}
	return side;
}

/* What the event about the end of a connection says of its sides. */
static __always_inline void recall_sides(struct sl_packet *p, const struct sl_ct *ct)
{
	__u64 epochs = READ_ONCE(ct->epochs);

	if (p->egress.by == SL_BY_NOBODY)
		p->egress = recalled_side((__u32)(epochs >> 32), ct->rule_eg);
	if (p->ingress.by == SL_BY_NOBODY)
		p->ingress = recalled_side((__u32)epochs, ct->rule_in);
}

/* Says once that a connection has ended. */
static __always_inline bool report_end(struct sl_packet *p, struct sl_ct *ct)
{
	if (__sync_fetch_and_or(&ct->flags, SL_CT_CLOSED_SENT) & SL_CT_CLOSED_SENT)
		return false;
	recall_sides(p, ct);
	p->news |= SL_NEWS_CLOSED;
	return true;
}

/*
 * Whether the stack forwards the packet, which may have to translate it. Of a
 * connection that was picked up it is not known which end the stack stands
 * for.
 */
static __always_inline bool goes_via_stack(const struct sl_packet *p, __u32 flags)
{
	return flags & SL_CT_VIA_STACK && (p->reply || flags & SL_CT_PICKED_UP);
}

/* Chunks of SCTP that an end also sends without an association: RFC 9260 5.1 and 8.4. */
#define SL_SCTP_WITHOUT                                                                            \
	(1U << SL_SCTP_INIT | 1U << SL_SCTP_INIT_ACK | 1U << SL_SCTP_ABORT | 1U << SL_SCTP_ERROR | \
	 1U << SL_SCTP_SHUTDOWN_COMPLETE)

/*
 * Whether the packet shows that both ends take part. Of TCP: the initiator goes on after
 * an answer. An answer to a SYN alone does not: SYNs with forged sources would fill the
 * map with connections that no end holds. A responder resets what goes on with a wrong
 * number. A connection that was picked up counts from the first answer.
 *
 * A responder ignores a wrong cookie of SCTP, so the association counts from the first
 * answer that needs one.
 */
static __always_inline bool establishes(const struct sl_packet *p, __u32 flags)
{
	if (p->proto == SL_SCTP)
		return p->reply && !p->fragment &&
		       (p->chunk > 31 || !(SL_SCTP_WITHOUT >> p->chunk & 1));
	if (p->proto != SL_TCP)
		return false;
	if (p->reply)
		return flags & SL_CT_PICKED_UP;
	return flags & SL_CT_SEEN_REPLY && !begins(p);
}

/*
 * Whether the segment has none of the flags that every segment has. An end with a half-open
 * connection ignores it or acknowledges it, whatever its numbers are.
 */
static __always_inline bool lacks_flags(const struct sl_packet *p)
{
	return p->proto == SL_TCP && !p->fragment &&
	       !(p->tcp_flags & (SL_TCP_SYN | SL_TCP_ACK | SL_TCP_RST));
}

/*
 * Whether the end that has reset the connection goes on all the same: the reset
 * was forged, or so made that the other end ignores it. One that is meant is
 * the last that an end sends, but for more of them.
 */
static __always_inline bool belies_reset(const struct sl_packet *p, __u32 flags)
{
	bool by_responder = flags & SL_CT_RST_R;

	return flags & SL_CT_RST && p->proto == SL_TCP && !p->fragment &&
	       !(p->tcp_flags & (SL_TCP_RST | SL_TCP_SYN)) && (by_responder ? p->reply : !p->reply);
}

/* What is not true of a connection that goes on after a reset. */
#define SL_CT_BELIED (SL_CT_RST | SL_CT_RST_R | SL_CT_CLOSED_SENT | SL_CT_RETURNED)

/* The connection goes on: it counts for the pod that began it. */
static __always_inline void count_again(const struct sl_packet *p, const struct sl_ct *ct)
{
	__u16 slot = initiator_slot(READ_ONCE(ct->where));

	count_ended(slot, p->family, -1);
	if (cfg_services && front_of_connection(ct))
		hold(SL_BOUND_XL4 + (p->family == 6), slot, 1);
}

/* What a packet that passes changes in its connection. */
static __always_inline void advance(struct sl_packet *p, struct sl_ct *ct)
{
	__u32 flags = READ_ONCE(ct->flags), set, now = now_seconds();

	if (unlikely(belies_reset(p, flags))) {
		if (flags & SL_CT_RETURNED)
			count_again(p, ct);
		flags &= ~SL_CT_BELIED;
		__sync_fetch_and_and(&ct->flags, ~SL_CT_BELIED);
	}
	set = steps_of(p) | (p->reply ? SL_CT_SEEN_REPLY : 0);
	if (establishes(p, flags))
		set |= SL_CT_ESTABLISHED;
	set &= ~flags;
	/* the end of another connection, if the map has recycled the element */
	if (set & SL_CT_ENDED) {
		write_key(p);
		if (find_connection(p) != ct)
			set = 0;
	}
	if (set) {
		__sync_fetch_and_or(&ct->flags, set);
		flags |= set;
		if (set & SL_CT_ENDED && has_ended(flags))
			report_end(p, ct);
	}
	if (unlikely(flags & SL_CT_IN_RING))
		leave_ring(p, ct, flags);
	p->ct_flags = (__u16)flags;
	p->via_stack = goes_via_stack(p, flags);
	if (READ_ONCE(ct->last_s) != now) {
		*(volatile __u32 *)&ct->last_s = now;
		p->first_in_second = 1;
	}
}

/*
 * A policy that had terminated the connection allows it again: it can be
 * terminated, and said to have ended, once more. What is remembered of it does
 * not matter while its entry is there, and says the same.
 */
static __always_inline void revive(struct sl_ct *ct)
{
	__u32 flags = READ_ONCE(ct->flags), take = SL_CT_REVOKED;

	if (!(flags & SL_CT_REVOKED))
		return;
	if (!has_ended(flags & ~SL_CT_CLOSED_SENT))
		take |= SL_CT_CLOSED_SENT;
	__sync_fetch_and_and(&ct->flags, ~take);
}

/*
 * Stores under what a connection was evaluated now. The words belong together: the
 * address epochs of one evaluation beside the epochs of another would vouch for
 * what nobody has evaluated. So a CPU claims the entry first (SL_EPOCHS_BUSY), and
 * only if all is as it was when it evaluated. If another CPU was faster, its words
 * count. No epoch of an endpoint is ever SL_EPOCHS_BUSY, so that other CPUs
 * evaluate the policy for their packets meanwhile.
 */
static __noinline void restamp(struct sl_packet *p, struct sl_ct *ct, __u64 epochs, __u64 where,
			       __u32 addr_epochs)
{
	__u64 new_where = evaluated_where(p, addr_epochs),
	      new_epochs = evaluated_epochs(p, epochs, new_where);
	__u64 *ids = (__u64 *)&ct->id_init, *rules = (__u64 *)&ct->rule_eg;
	__u64 *nat = (__u64 *)&ct->SL_CT_NODE_WORD, new_ids;
	__u64 busy = (__u64)SL_EPOCHS_BUSY << 32 | (SL_EPOCHS_BUSY - bpf_get_smp_processor_id());
	__u32 id_i = p->reply ? p->dst_identity : p->src_identity;
	__u32 id_r = p->reply ? p->src_identity : p->dst_identity;
	__u64 old, new_rules;

	_Static_assert(offsetof(struct sl_ct, id_init) == 16 &&
			       offsetof(struct sl_ct, id_resp) == 20,
		       "one word");
	_Static_assert(offsetof(struct sl_ct, rule_eg) % 8 == 0 &&
			       offsetof(struct sl_ct, rule_in) ==
				       offsetof(struct sl_ct, rule_eg) + 2,
		       "half a word");
	_Static_assert(offsetof(struct sl_ct, SL_CT_NODE_WORD) % 8 == 0 &&
			       offsetof(struct sl_ct, SL_CT_NODE) ==
				       offsetof(struct sl_ct, SL_CT_NODE_WORD) + 6,
		       "the upper quarter of a word");
	revive(ct);
	new_ids = (__u64)id_r << 32 | id_i;
	if (epochs == new_epochs && where == new_where && READ_ONCE(*ids) == new_ids &&
	    node_of_connection(ct) == p->node)
		return;
	if (epochs >> 32 == SL_EPOCHS_BUSY ||
	    __sync_val_compare_and_swap(&ct->epochs, epochs, busy) != epochs)
		return;
	/* The map may have given the element to another connection of the same
	 * ends, evaluated under the same epochs, since it was found.
	 */
	if (find_connection(p) != ct ||
	    __sync_val_compare_and_swap(&ct->where, where, new_where) != where) {
		__sync_val_compare_and_swap(&ct->epochs, busy, epochs);
		return;
	}
	old = READ_ONCE(*ids);
	__sync_val_compare_and_swap(ids, old, new_ids);
	old = READ_ONCE(*rules);
	new_rules = old & ~0xffffffffULL;
	new_rules |= p->egress.by ? p->egress.rule : old & 0xffff;
	new_rules |= p->ingress.by ? (__u64)p->ingress.rule << 16 : old & 0xffff0000;
	__sync_val_compare_and_swap(rules, old, new_rules);
	old = READ_ONCE(*nat);
	__sync_val_compare_and_swap(nat, old, (old & 0xffffffffffff) | (__u64)p->node << 48);
	__sync_val_compare_and_swap(&ct->epochs, busy, new_epochs);
}

#endif
