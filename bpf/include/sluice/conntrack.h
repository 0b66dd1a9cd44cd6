/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_CONNTRACK_H
#define SLUICE_CONNTRACK_H

/*
 * Connection tracking: one entry for both directions, found by a key that puts the lower address
 * first. An entry records the initiator, the policy epoch under which each local end was evaluated,
 * and the address epoch of each end's address at that time. While no epoch has changed, packets of
 * both directions pass. If an epoch has changed, the affected sides are evaluated again, for the
 * connection and not for the packet.
 *
 * The map may recycle an element while a program holds a pointer to it. Programs therefore store
 * only last_s in place, change flags by atomic OR and AND, and change the other words by
 * compare-and-exchange.
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

/* Field of the node ID in an entry, and the 64-bit word whose upper quarter it is: in the layout
 * of this version, and in the swapped layout of a test.
 */
#ifdef SL_SWAP_LAYOUTS
#define SL_CT_NODE pad
#define SL_CT_NODE_WORD rule_eg
#define SL_CT_FRONT rev_nat
#define SL_CT_ASKED rev_nat /* the old layout has one field for both */
#else
#define SL_CT_NODE node
#define SL_CT_NODE_WORD nat_port
#define SL_CT_FRONT front
#define SL_CT_ASKED asked_address
#endif

/* Whether the program handles requests of outside clients to services. */
#define SL_FROM_OUTSIDE (SL_PROGRAM == SL_PROGRAM_FROM_UPLINK || SL_FROM_TUNNEL)

/* Whether the program sees connections of SL_ZONE_TRANSIT. */
#define SL_IN_TRANSIT                                                              \
	(cfg_services && (SL_FROM_OUTSIDE || SL_PROGRAM == SL_PROGRAM_TO_UPLINK || \
			  SL_PROGRAM == SL_PROGRAM_TO_OVERLAY))

#define SL_CT_ENDED (SL_CT_FIN_I | SL_CT_FIN_R | SL_CT_RST)

static __always_inline __u16 node_of_connection(const struct sl_ct *ct)
{
	return READ_ONCE(ct->SL_CT_NODE);
}

/*
 * The service front that the connection was opened to, and which of the node's addresses the client
 * had requested.
 */
static __always_inline __u32 front_of_connection(const struct sl_ct *ct)
{
	return READ_ONCE(ct->SL_CT_FRONT);
}

static __always_inline __u16 asked_of_connection(const struct sl_ct *ct)
{
	return READ_ONCE(ct->SL_CT_ASKED);
}

/* Whether the initiator now requests another service, or the same node port at another address. */
static __always_inline bool asks_otherwise(const struct sl_packet *p, const struct sl_ct *ct)
{
	if (front_of_connection(ct) != p->front)
		return true;
#ifdef SL_SWAP_LAYOUTS
	return false;
#else
	return p->front && asked_of_connection(ct) != p->asked_at;
#endif
}

/* Whether the program sees packets with the requested address, before they are translated. */
#define SL_SEES_ASKED (SL_PROGRAM == SL_PROGRAM_FROM_POD || SL_FROM_OUTSIDE)

/*
 * The initiator now requests another service or address. Each field is written by a single store.
 * If it changes between the load and the compare-and-exchange of its word, the exchange fails.
 */
static __always_inline void ask_otherwise(const struct sl_packet *p, struct sl_ct *ct)
{
	*(volatile __typeof__(ct->SL_CT_FRONT) *)&ct->SL_CT_FRONT =
		(__typeof__(ct->SL_CT_FRONT))p->front;
	*(volatile __typeof__(ct->SL_CT_ASKED) *)&ct->SL_CT_ASKED =
		(__typeof__(ct->SL_CT_ASKED))p->asked_at;
	/* The next answer is then treated as the first one, and stores the new request. */
	__sync_fetch_and_and(&ct->flags, ~SL_CT_SEEN_REPLY);
}

/*
 * The bucket of an address in sl_pgen: start with h = 0; for each 32-bit word of the address in
 * network order, h = (h ^ word) * 0x9e3779b1 modulo 2^32. The bucket is the upper twelve bits of
 * h.
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

/* is_low4 and is_low6 tell whether the sender is the lower end of the key. */

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
 * The common tail of both kinds of keys, as one word. The kernel reads a key in larger units than
 * its fields, and a load that spans several recent stores stalls until these stores have reached
 * the cache.
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

/* The port for a key; for an echo, its identifier is used as both ports. Without ports they are
 * 0.
 */
static __always_inline __u16 key_port(const struct sl_packet *p, __u16 port)
{
	return p->proto == SL_ICMP || p->proto == SL_ICMPV6 ? p->echo : port;
}

/*
 * Writes the key of the packet's connection to the packet, for all functions but find_known. Sets
 * p->low.
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
 * Looks up the packet's connection, whose key must be written. If a map of the previous version
 * still exists, a miss overwrites p->entry.
 */
static __noinline struct sl_ct *find_connection(const struct sl_packet *p)
{
	struct sl_ct *ct = look_up_connection(p);

	if (ct || !cfg_previous)
		return ct;
	take_over_connection(p);
	/* even if nothing was migrated here: another CPU may have migrated the entry since the
	 * first lookup */
	return look_up_connection(p);
}

/*
 * Looks up the connection of any packet; for most packets this is the only lookup. The key is on
 * the stack, which is faster, and is not written to the cell. Sets p->low.
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

/* Only late packets can follow. */
static __always_inline bool has_ended(__u32 flags)
{
	return flags & (SL_CT_RST | SL_CT_CLOSED_SENT) ||
	       (flags & SL_CT_ENDED) == (SL_CT_FIN_I | SL_CT_FIN_R);
}

/* Whether only the first packet of a connection can look like this. */
static __always_inline bool begins(const struct sl_packet *p)
{
	if (p->fragment)
		return false;
	if (p->proto == SL_TCP)
		return (p->tcp_flags & (SL_TCP_SYN | SL_TCP_ACK)) == SL_TCP_SYN;
	return p->proto == SL_SCTP && p->chunk == SL_SCTP_INIT;
}

/* The flags that this packet sets in the entry: its sender's FIN or RST (SCTP: SHUTDOWN, ABORT). */
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

/* The lower half of the where word: address epochs of initiator and responder. */
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

/* The sides whose verdict may have changed. */
static __always_inline __u32 moved_sides(__u64 epochs, __u64 where, __u32 addr_epochs)
{
	__u32 differ = (__u32)where ^ addr_epochs, moved = 0;

	/* If the identity of one end has changed, the policy of the other end is affected. */
	if (epoch_moved((__u32)(epochs >> 32), initiator_slot(where)) || differ & 0xffff)
		moved |= SL_SIDE_EGRESS;
	if (epoch_moved((__u32)epochs, responder_slot(where)) || differ >> 16)
		moved |= SL_SIDE_INGRESS;
	return moved;
}

/* The where word of p's connection: both slots and the address epochs. */
static __always_inline __u64 evaluated_where(const struct sl_packet *p, __u32 addr_epochs)
{
	__u16 slot_i = p->reply ? p->dst_slot : p->src_slot;
	__u16 slot_r = p->reply ? p->src_slot : p->dst_slot;

	return (__u64)slot_i << 48 | (__u64)slot_r << 32 | addr_epochs;
}

/* The epochs of this evaluation; a side that was not evaluated keeps its old epoch. */
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
 * Charges a new connection to the budget of the endpoint whose packet creates the entry, so that
 * no endpoint uses up the budget of another. Forwarded packets with an address of the host count
 * as outside. TCP, UDP and ICMP echo connections from outside use rings instead of a budget.
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
 * Whether the host's stack carries the connection and may translate it: packets from the stack,
 * packets to the host, packets that leave the node through the stack, and outside requests for
 * services.
 */
static __always_inline bool begins_in_stack(const struct sl_packet *p)
{
	if (SL_FROM_OUTSIDE)
		return p->translated;
	if (SL_PROGRAM == SL_PROGRAM_FROM_POD)
		return p->dst_slot == SL_SLOT_HOST || (p->dst_slot == SL_SLOT_NONE && !p->node);
	return true;
}

/* Whether the proxy ends the connection. Without SL_CT_PROXY, the bit is part of a position. */
static __always_inline bool is_held(__u32 flags)
{
	return (flags & (SL_CT_PROXY | SL_CT_HELD)) == (SL_CT_PROXY | SL_CT_HELD);
}

/* SL_CT_HELD and the kind of proxy, if a rule sends the segment to a proxy. */
static __always_inline __u32 held_flags(const struct sl_packet *p)
{
	if (p->proto != SL_TCP || redirection(&p->egress) != SL_REDIRECTS_TO_PROXY)
		return 0;
	return is_for_http(&p->egress) ? SL_CT_HELD | SL_CT_HELD_HTTP : SL_CT_HELD;
}

/* Creates the entry of a connection that both sides allow. */
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
	if (p->egress.redirects)
		ct->flags = (ct->flags & SL_CT_BELOW_RING) | SL_CT_PROXY | held_flags(p);
	if (p->reply ? !p->low : p->low)
		ct->flags |= SL_CT_ORIG_LO;

	err = insert_connection(p);
	if (err == -SL_EEXIST) {
		/* another CPU was faster: it has created the entry, for this connection or for one
		 * that the other end began */
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

/* Reconstructs a side that allowed the connection; its table is not recorded. */
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

/* Fills in the sides for the event about the connection's end. */
static __always_inline void recall_sides(struct sl_packet *p, const struct sl_ct *ct)
{
	__u64 epochs = READ_ONCE(ct->epochs);

	if (p->egress.by == SL_BY_NOBODY)
		p->egress = recalled_side((__u32)(epochs >> 32), ct->rule_eg);
	if (p->ingress.by == SL_BY_NOBODY)
		p->ingress = recalled_side((__u32)epochs, ct->rule_in);
}

/* Reports the end of a connection, once. */
static __always_inline bool report_end(struct sl_packet *p, struct sl_ct *ct)
{
	if (__sync_fetch_and_or(&ct->flags, SL_CT_CLOSED_SENT) & SL_CT_CLOSED_SENT)
		return false;
	recall_sides(p, ct);
	p->news |= SL_NEWS_CLOSED;
	return true;
}

/*
 * Whether the packet must go through the stack, because the stack may have to translate it. For a
 * picked-up connection it is unknown which direction the stack translates, so packets of both
 * directions go through the stack.
 */
static __always_inline bool goes_via_stack(const struct sl_packet *p, __u32 flags)
{
	return flags & SL_CT_VIA_STACK && (p->reply || flags & SL_CT_PICKED_UP);
}

/* SCTP chunks that an end may send without an association: RFC 9260, 5.1 and 8.4. */
#define SL_SCTP_WITHOUT                                                                            \
	(1U << SL_SCTP_INIT | 1U << SL_SCTP_INIT_ACK | 1U << SL_SCTP_ABORT | 1U << SL_SCTP_ERROR | \
	 1U << SL_SCTP_SHUTDOWN_COMPLETE)

/*
 * Whether the packet proves that both ends take part. For TCP: the initiator continues after an
 * answer; a responder resets a segment with a wrong acknowledgement number. An answer to a SYN
 * alone is no proof: SYNs with forged sources would fill the map with connections that no end
 * holds. For a picked-up connection, the first answer is enough.
 *
 * An SCTP responder ignores a wrong cookie, so the first answer that requires an association is
 * enough.
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
 * Whether the segment has none of the flags SYN, ACK and RST. An end with a half-open connection
 * ignores or acknowledges such a segment, whatever its sequence numbers.
 */
static __always_inline bool lacks_flags(const struct sl_packet *p)
{
	return p->proto == SL_TCP && !p->fragment &&
	       !(p->tcp_flags & (SL_TCP_SYN | SL_TCP_ACK | SL_TCP_RST));
}

/*
 * Whether the end continues after it has apparently sent a RST. Then the RST was forged, or was
 * crafted so that the other end ignores it. After a genuine RST an end sends nothing but further
 * RSTs.
 */
static __always_inline bool belies_reset(const struct sl_packet *p, __u32 flags)
{
	bool by_responder = flags & SL_CT_RST_R;

	return flags & SL_CT_RST && p->proto == SL_TCP && !p->fragment &&
	       !(p->tcp_flags & (SL_TCP_RST | SL_TCP_SYN)) && (by_responder ? p->reply : !p->reply);
}

/* Flags that a connection loses if it continues after a RST. */
#define SL_CT_BELIED (SL_CT_RST | SL_CT_RST_R | SL_CT_CLOSED_SENT | SL_CT_RETURNED)

/* The connection continues, so it is charged again to the pod that began it. */
static __always_inline void count_again(const struct sl_packet *p, const struct sl_ct *ct)
{
	__u16 slot = initiator_slot(READ_ONCE(ct->where));

	count_ended(slot, p->family, -1);
	if (cfg_services && front_of_connection(ct))
		hold(SL_BOUND_XL4 + (p->family == 6), slot, 1);
}

/* Updates the connection for a packet that passes. */
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
	/* do not mark the end of another connection, if the map has recycled the element */
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
 * A policy that had terminated the connection allows it again: a later change can terminate it
 * again, and its end is reported again. The record of the terminated connection can stay, because
 * the entry takes precedence while it exists.
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
 * Stores the epochs of the current evaluation. The words must stay consistent: address epochs of
 * one evaluation with policy epochs of another would confirm a combination that was never
 * evaluated. Therefore a CPU first claims the entry with SL_EPOCHS_BUSY; this fails if the entry
 * has changed since the evaluation. If another CPU was faster, the epochs stored by that CPU stay.
 * No endpoint ever has the epoch SL_EPOCHS_BUSY, so other CPUs evaluate the policy for their
 * packets while an entry is claimed. Always returns 0: the verifier walks a function only once if
 * it is global, and a global function must return a value.
 */
__noinline int restamp(struct sl_packet *p, struct sl_ct *ct, __u64 epochs, __u64 where,
		       __u32 addr_epochs)
{
	__u64 busy = (__u64)SL_EPOCHS_BUSY << 32 | (SL_EPOCHS_BUSY - bpf_get_smp_processor_id());
	__u64 new_where, new_epochs, new_ids, new_rules, old;
	__u64 *ids, *rules, *nat;
	__u32 id_i, id_r, proxy;

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
	if (!p || !ct)
		return 0;
	new_where = evaluated_where(p, addr_epochs);
	new_epochs = evaluated_epochs(p, epochs, new_where);
	ids = (__u64 *)&ct->id_init;
	rules = (__u64 *)&ct->rule_eg;
	nat = (__u64 *)&ct->SL_CT_NODE_WORD;
	id_i = p->reply ? p->dst_identity : p->src_identity;
	id_r = p->reply ? p->src_identity : p->dst_identity;
	revive(ct);
	/* Set before the epochs: with new epochs but no flag, packets would bypass the proxy. Never
	 * cleared: if the map has reassigned the element to another connection, the packets of that
	 * connection would bypass the proxy. */
	proxy = p->egress.redirects ? SL_CT_PROXY | held_flags(p) : 0;
	if (proxy & ~READ_ONCE(ct->flags)) {
		if (!(READ_ONCE(ct->flags) & SL_CT_PROXY))
			__sync_fetch_and_and(&ct->flags, SL_CT_BELOW_RING);
		__sync_fetch_and_or(&ct->flags, proxy);
	}
	new_ids = (__u64)id_r << 32 | id_i;
	if (epochs == new_epochs && where == new_where && READ_ONCE(*ids) == new_ids &&
	    node_of_connection(ct) == p->node)
		return 0;
	if (epochs >> 32 == SL_EPOCHS_BUSY ||
	    __sync_val_compare_and_swap(&ct->epochs, epochs, busy) != epochs)
		return 0;
	/* Since the lookup, the map may have reassigned the element to another connection of the
	 * same ends that was evaluated under the same epochs.
	 */
	if (find_connection(p) != ct ||
	    __sync_val_compare_and_swap(&ct->where, where, new_where) != where) {
		__sync_val_compare_and_swap(&ct->epochs, busy, epochs);
		return 0;
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
	return 0;
}

#endif
