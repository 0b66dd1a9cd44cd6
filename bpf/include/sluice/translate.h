/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_TRANSLATE_H
#define SLUICE_TRANSLATE_H

/*
 * Services for packets: from pods without socket hooks, of protocols without socket hooks, and from
 * clients outside the node. A packet to a service whose connection is unknown is evaluated as a
 * packet to the backend; the rest of the program only sees the backend. The choice is stored in a
 * map (find_translation), with the untranslated packet as key, because the list may have changed
 * when the next packet arrives. The frame itself is rewritten on delivery; see rewrite.h.
 */

#include <sluice/affinity.h>
#include <sluice/answer.h>
#include <sluice/arp.h>
#include <sluice/bound.h>
#include <sluice/clock.h>
#include <sluice/conntrack.h>
#include <sluice/count.h>
#include <sluice/service.h>

/* Writes the key of the untranslated packet to the cell. */
static __always_inline void write_arriving_key(struct sl_packet *p)
{
	struct sl_xl_key4 *key4 = &p->xl4;
	struct sl_xl_key6 *key6 = &p->xl6;

	if (p->family == 4) {
		key4->src = *(const __be32 *)p->src;
		key4->dst = *(const __be32 *)p->dst;
		key4->sport = p->sport;
		key4->dport = p->dport;
		key4->proto = p->proto;
		key4->zone = SL_XL_SERVICE;
		key4->pad = 0;
		return;
	}
	__builtin_memcpy(key6->src, p->src, sizeof(key6->src));
	__builtin_memcpy(key6->dst, p->dst, sizeof(key6->dst));
	key6->sport = p->sport;
	key6->dport = p->dport;
	key6->proto = p->proto;
	key6->zone = SL_XL_SERVICE;
	key6->pad = 0;
}

/*
 * Packets from local pods have maps of their own, which outside clients cannot fill: sl_pod_xl4
 * and sl_pod_xl6 in the program that sees packets from pods, sl_xl4 and sl_xl6 in all others.
 */
#define SL_OF_PODS (SL_PROGRAM == SL_PROGRAM_FROM_POD)

/* Looks up a translation by the key in the cell. */
static __always_inline struct sl_xl *find_translation(__u8 family)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return NULL;
	if (family == 4)
		return SL_OF_PODS ? bpf_map_lookup_elem(&sl_pod_xl4, &own->xl4)
				  : bpf_map_lookup_elem(&sl_xl4, &own->xl4);
	return SL_OF_PODS ? bpf_map_lookup_elem(&sl_pod_xl6, &own->xl6)
			  : bpf_map_lookup_elem(&sl_xl6, &own->xl6);
}

static __always_inline void delete_translation(__u8 family)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return;
	if (SL_OF_PODS && family == 4)
		bpf_map_delete_elem(&sl_pod_xl4, &own->xl4);
	else if (SL_OF_PODS)
		bpf_map_delete_elem(&sl_pod_xl6, &own->xl6);
	else if (family == 4)
		bpf_map_delete_elem(&sl_xl4, &own->xl4);
	else
		bpf_map_delete_elem(&sl_xl6, &own->xl6);
}

/* Returns 0 or -SL_EEXIST; other errors mean that the map is full. */
static __always_inline long insert_translation(__u8 family)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return -1;
	if (SL_OF_PODS && family == 4)
		return bpf_map_update_elem(&sl_pod_xl4, &own->xl4, &own->xl, BPF_NOEXIST);
	if (SL_OF_PODS)
		return bpf_map_update_elem(&sl_pod_xl6, &own->xl6, &own->xl, BPF_NOEXIST);
	if (family == 4)
		return bpf_map_update_elem(&sl_xl4, &own->xl4, &own->xl, BPF_NOEXIST);
	return bpf_map_update_elem(&sl_xl6, &own->xl6, &own->xl, BPF_NOEXIST);
}

/*
 * Records and copies of connections that a local pod begins are in maps of their own, so that
 * clients outside cannot evict them: sl_pod_answers4 and sl_pod_answers6.
 */
static __always_inline bool is_pod_slot(__u32 slot)
{
	return slot != SL_SLOT_NONE && slot != SL_SLOT_HOST;
}

/* Looks up an answer record in a zone. Writes the zone into the key in the cell. */
static __always_inline struct sl_xl *find_answer(bool of_pod, __u8 family, __u8 zone)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return NULL;
	if (family == 4) {
		own->xl4.zone = zone;
		return of_pod ? bpf_map_lookup_elem(&sl_pod_answers4, &own->xl4)
			      : bpf_map_lookup_elem(&sl_answers4, &own->xl4);
	}
	own->xl6.zone = zone;
	return of_pod ? bpf_map_lookup_elem(&sl_pod_answers6, &own->xl6)
		      : bpf_map_lookup_elem(&sl_answers6, &own->xl6);
}

/* Looks up the copy of the claim of a node's port, which replaces the claim if that is lost. */
static __always_inline struct sl_xl *find_claimed(__u8 family, __u16 port)
{
	return may_have_port(SL_COUNT_CLAIMED, port) ? find_answer(false, family, SL_XL_CLAIMED)
						     : NULL;
}

/* Returns 0 if the record existed. */
static __always_inline long delete_answer(bool of_pod, __u8 family, __u8 zone)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return -1;
	if (family == 4) {
		own->xl4.zone = zone;
		return of_pod ? bpf_map_delete_elem(&sl_pod_answers4, &own->xl4)
			      : bpf_map_delete_elem(&sl_answers4, &own->xl4);
	}
	own->xl6.zone = zone;
	return of_pod ? bpf_map_delete_elem(&sl_pod_answers6, &own->xl6)
		      : bpf_map_delete_elem(&sl_answers6, &own->xl6);
}

/* Stores the value in the cell; replaces an existing one. */
static __always_inline long store_answer(bool of_pod, __u8 family, __u8 zone)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return -1;
	if (family == 4) {
		own->xl4.zone = zone;
		if (of_pod)
			/* in place: no, an LRU map replaces the element */
			return bpf_map_update_elem(&sl_pod_answers4, &own->xl4, &own->xl, BPF_ANY);
		/* in place: no, as above */
		return bpf_map_update_elem(&sl_answers4, &own->xl4, &own->xl, BPF_ANY);
	}
	own->xl6.zone = zone;
	if (of_pod)
		/* in place: no, as above */
		return bpf_map_update_elem(&sl_pod_answers6, &own->xl6, &own->xl, BPF_ANY);
	/* in place: no, as above */
	return bpf_map_update_elem(&sl_answers6, &own->xl6, &own->xl, BPF_ANY);
}

/* Looks up the copy of the translation whose key is in the cell, and leaves the key as it was. */
static __always_inline struct sl_xl *find_requested(struct sl_packet *p)
{
	struct sl_xl *xl = find_answer(SL_OF_PODS, p->family, SL_XL_REQUESTED);

	p->xl4.zone = SL_XL_SERVICE;
	p->xl6.zone = SL_XL_SERVICE;
	return xl;
}

/* Redirects the packet to an address: from here on, the program treats it as a packet to that
 * address. */
static __always_inline void redirect_to(struct sl_packet *p, const __u8 *addr, __u16 port,
					__u32 front, __u8 kind)
{
	__builtin_memcpy(p->asked, p->dst, sizeof(p->asked));
	p->asked_port = p->dport;
	__builtin_memcpy(p->dst, addr, sizeof(p->dst));
	p->dport = port;
	p->front = front;
	p->translated = kind;
}

/*
 * Whether an earlier choice is still valid. A connection keeps its backend while it lives. A UDP
 * flow has no end. So it loses its choice if the backend was removed, or if the service has no
 * backends.
 */
static __always_inline bool leads_on(const struct sl_packet *p, const struct sl_xl *xl)
{
	struct sl_front *front;
	struct sl_choice c = { .family = p->family };

	if (p->proto != SL_UDP || xl->back)
		return true;
	front = front_at(xl->front);
	if (!front || !list_count(READ_ONCE(front->list)))
		return false;
	return read_backend(&c, xl->backend) && c.gen == xl->gen;
}

static __always_inline __u64 hash_of(const struct sl_packet *p)
{
	const __u64 *s = (const __u64 *)p->src, *d = (const __u64 *)p->dst;
	__u64 ports = (__u64)p->sport << 32 | (__u64)p->dport << 16 | p->proto;

	return scramble(scramble(s[0] ^ scramble(s[1] + ports)) ^ scramble(d[0]) ^ d[1]);
}

/* The index in sl_own of the packet's destination, plus 1; 0: it is not a known address of the
 * node.
 */
static __noinline __u32 own_address_at(const struct sl_packet *p)
{
	__u32 base = address_epoch_bucket(p->dst, p->family), i;

	for (i = 0; i < SL_OWN_PROBES; i++) {
		__u32 at = (base + i) & (SL_MAX_OWN - 1);
		struct sl_own *own = bpf_map_lookup_elem(&sl_own, &at);

		if (own && own->family == p->family && equal16(own->addr, p->dst))
			return at + 1;
	}
	return 0;
}

/* Seconds of idleness after which a UDP port may be used for another service. */
#define SL_PORT_PAUSE 2

/* Whether the service was removed. For UDP a service without backends counts as removed. */
static __always_inline bool is_gone(const struct sl_packet *p, __u64 list)
{
	return list_flags(list) & SL_FRONT_GONE || (p->proto == SL_UDP && !list_count(list));
}

/* Instead of a front number: only pods and host of this node may use the frontend. */
#define SL_FRONT_INSIDE 0xffffffff

/*
 * The front for the side that the program's packets come from. A cluster IP has one front for
 * both sides, and does not accept clients from outside; other frontends have two fronts.
 */
static __always_inline __u32 front_here(const struct sl_fe *fe)
{
	if (!SL_FROM_OUTSIDE)
		return fe->inside;
	return fe->outside == fe->inside ? SL_FRONT_INSIDE : fe->outside;
}

/* Whether the packet goes to an address of the node, at which node ports answer. */
static __always_inline bool is_to_node(const struct sl_packet *p)
{
	if (SL_FROM_OUTSIDE) /* set by handle_nodeport */
		return p->dst_slot == SL_SLOT_HOST;
	return slot_of_address(p->dst, p->family) == SL_SLOT_HOST;
}

/*
 * Finds the front for the packet's destination. A node port answers at the node's addresses, and
 * translating its answers requires the address.
 */
static __always_inline __u32 front_asked(struct sl_packet *p, const struct sl_choice *c)
{
	struct sl_fe *fe;

	/* frontends at loopback addresses are only for sockets of the host */
	if (is_loopback(c->addr, c->family))
		return 0;
	fe = frontend_of(c, SL_FE_ADDRESS);
	if (fe)
		return front_here(fe);
	fe = frontend_of(c, SL_FE_NODE);
	if (!fe || !is_to_node(p))
		return 0;
	p->asked_at = (__u16)own_address_at(p);
	return p->asked_at ? front_here(fe) : 0;
}

/*
 * Whether a local pod's request was redirected to the pod itself. An outside client that is its
 * own backend is treated like any other client.
 */
static __always_inline bool is_hairpin(const struct sl_packet *p)
{
	return SL_PROGRAM == SL_PROGRAM_FROM_POD && equal16(p->dst, p->src);
}

/* The source address that a pod sees as its own backend; the first is also its gateway's. */
#define SL_HAIRPIN4 SL_GATEWAY4 /* 169.254.1.1 */
#define SL_HAIRPIN6_0 bpf_htonl(0xfd736c75) /* fd73:6c75:6963:6500::1 */
#define SL_HAIRPIN6_1 bpf_htonl(0x69636500)
#define SL_HAIRPIN6_3 bpf_htonl(1)

static __always_inline bool is_hairpin_address(const __u8 *addr, __u8 family)
{
	const __be32 *word = (const __be32 *)addr;

	if (family == 4)
		return word[0] == SL_HAIRPIN4;
	return word[0] == SL_HAIRPIN6_0 && word[1] == SL_HAIRPIN6_1 && !word[2] &&
	       word[3] == SL_HAIRPIN6_3;
}

/*
 * Whether the connection from the sender's port to the backend is another one: a direct connection,
 * or one through another service. Their answers would be indistinguishable. A connection through a
 * removed service does not count. An idle UDP port may be used for another service: a client does
 * not alternate between two sockets on one port.
 */
static __always_inline bool is_other(const struct sl_packet *p, const struct sl_choice *c,
				     const struct sl_ct *ct)
{
	__u32 asked = front_of_connection(ct);
	struct sl_front *front;

	if (!asks_otherwise(p, ct))
		return false;
	/* the latest requested address applies, as in asked.h */
	if (p->proto == SL_UDP && asked == c->front)
		return false;
	if (p->proto == SL_UDP && now_seconds() - READ_ONCE(ct->last_s) >= SL_PORT_PAUSE)
		return false;
	front = asked ? front_at(asked) : NULL;
	return !front || !is_gone(p, READ_ONCE(front->list));
}

/* Sets the packet's destination slot; returns the zone of outside connections to that backend. */
static __always_inline __u8 zone_to_backend(struct sl_packet *p)
{
	p->dst_slot = slot_of_address(p->dst, p->family);
	return p->dst_slot == SL_SLOT_NONE || p->dst_slot == SL_SLOT_HOST ? SL_ZONE_TRANSIT
									  : SL_ZONE_POD;
}

/* Whether the sender's port is already used for another connection to the backend. */
static __always_inline bool is_in_use(struct sl_packet *p, const struct sl_choice *c)
{
	struct sl_ct *ct;

	p->unknown = 0;
	p->renews = 0;
	/* the backend is the client itself: both directions would have the same key */
	if (SL_FROM_OUTSIDE && c->port == p->sport && equal16(c->addr, p->src))
		return true;
	if (p->proto != SL_UDP && !begins(p))
		return false;
	__builtin_memcpy(p->dst, c->addr, sizeof(p->dst));
	p->dport = c->port;
	if (SL_FROM_OUTSIDE)
		p->zone = zone_to_backend(p);
	write_key(p);
	/* does not look in the previous version's maps, because the call stack is exhausted */
	ct = look_up_connection(p);
	p->zone = SL_ZONE_POD;
	p->unknown = !ct && !cfg_previous;
	p->renews = !ct || has_ended(READ_ONCE(ct->flags));
	return ct && !has_ended(READ_ONCE(ct->flags)) && (is_reply(p, ct) || is_other(p, c, ct));
}

/* The backend of the next member to try; 0 if no member is left. */
static __always_inline __u32 next_member(struct sl_choice *c, __u64 list)
{
	if (list_count(list) <= SL_RENDEZVOUS)
		return (__u32)best_member(list, c);
	c->hash = scramble(c->hash + 1);
	return member_by_hash(list, c->hash);
}

/* Chooses a backend into c. Returns SL_CONTINUE, or why the packet is refused. */
static __always_inline enum sl_reason choose_from(struct sl_packet *p, struct sl_choice *c,
						  const struct sl_front *front)
{
	enum sl_reason reason = SL_REASON_SERVICE_NO_BACKEND;
	__u32 backend;
	__u64 list;
	int i;

	for (i = 0; i < SL_SERVICE_TRIES; i++) {
		list = READ_ONCE(front->list);
		if (list_flags(list) & SL_FRONT_SOURCES && !is_source(c))
			return SL_REASON_SERVICE_SOURCE_RANGE;
		if (!list_count(list))
			return list_flags(list) & SL_FRONT_DROP ? SL_REASON_SERVICE_NO_LOCAL_BACKEND
								: SL_REASON_SERVICE_NO_BACKEND;
		backend = next_member(c, list);
		if (!(has_affinity(front, list) && recall_affinity(c, front, list)) &&
		    !read_backend(c, backend))
			continue;
		if (p->proto == SL_SCTP && c->port != p->asked_port)
			return SL_REASON_SERVICE_SCTP_PORT;
		if (!is_in_use(p, c))
			return SL_CONTINUE;
		reason = SL_REASON_SERVICE_PORT_IN_USE;
	}
	return reason;
}

/* Stores the choice in the cell until the packet has been evaluated. */
static __always_inline void propose(struct sl_packet *p, const struct sl_choice *c,
				    const struct sl_front *front)
{
	__builtin_memset(&p->xl, 0, sizeof(p->xl));
	__builtin_memcpy(p->xl.addr, c->addr, sizeof(p->xl.addr));
	p->xl.port = c->port;
	p->xl.asked_at = p->asked_at;
	p->xl.front = c->front;
	p->xl.backend = c->backend;
	p->xl.gen = c->gen;
	p->xl.last_s = now_seconds();
	p->untold = front->timeout ? SL_UNTOLD_AFFINITY : SL_UNTOLD;
}

/* Reads the requested address and port. */
static __always_inline void read_asked(const struct sl_packet *p, struct sl_choice *c)
{
	c->family = p->family;
	c->proto = p->proto;
	c->port = p->dport;
	__builtin_memcpy(c->addr, p->dst, sizeof(c->addr));
}

/* Finds the front that the packet requests; 0: it requests no service. */
__noinline __u32 find_front(struct sl_packet *p)
{
	struct sl_choice c = {};

	if (!p)
		return 0;
	read_asked(p, &c);
	return front_asked(p, &c);
}

/* Chooses a new backend of a front, regardless of an earlier choice. */
__noinline enum sl_reason choose_backend(struct sl_packet *p, __u32 number)
{
	struct sl_choice c = { .limit = ~0ULL };
	enum sl_reason reason;
	struct sl_front *front;

	if (!p)
		return SL_REASON_SERVICE_CORRUPT;
	read_asked(p, &c);
	__builtin_memcpy(c.client, p->src, sizeof(c.client));
	c.front = number;
	front = front_at(c.front);
	if (!front)
		return SL_REASON_SERVICE_CORRUPT;
	c.hash = hash_of(p);
	/* record the requested address, even if the packet is refused */
	redirect_to(p, c.addr, c.port, c.front, SL_TRANSLATED_DESTINATION);
	reason = choose_from(p, &c, front);
	__builtin_memcpy(p->dst, c.addr, sizeof(p->dst));
	p->dport = c.port;
	if (reason)
		return reason;
	if (is_hairpin(p))
		p->translated = SL_TRANSLATED_HAIRPIN;
	propose(p, &c, front);
	return SL_CONTINUE;
}

/* Whether the packet may belong to a connection that has a copy of its translation: see
 * remember_request.
 */
static __always_inline bool may_have_copy(const struct sl_packet *p)
{
	return p->proto == SL_TCP && !begins(p);
}

/*
 * Redirects a packet whose translation was lost to the backend of the translation's copy, which has
 * answered. The service's list may have changed since, so a new choice could be another backend.
 * Once the packet is allowed, the translation is stored again.
 */
__noinline int follow_copy(struct sl_packet *p)
{
	struct sl_xl *xl;

	if (!p)
		return 0;
	xl = find_requested(p);
	if (!xl)
		return 0;
	p->xl = *xl;
	p->xl.last_s = now_seconds();
	p->untold = SL_UNTOLD_COPY;
	p->asked_at = p->xl.asked_at;
	redirect_to(p, p->xl.addr, p->xl.port, p->xl.front, SL_TRANSLATED_DESTINATION);
	if (is_hairpin(p))
		p->translated = SL_TRANSLATED_HAIRPIN;
	return 1;
}

/*
 * Chooses a backend if the packet requests a service and is not an answer to a connection of the
 * node. A pod's connection that has lost its translation continues from the copy even after its
 * service was removed. For packets from outside there is no such lookup: most request no service,
 * and the lookup would slow them down.
 */
static __always_inline enum sl_reason ask_service(struct __sk_buff *skb, struct sl_packet *p)
{
	__u32 front = find_front(p);

	if (!front && !(SL_OF_PODS && may_have_copy(p)))
		return SL_CONTINUE;
	if (is_answer(skb, p)) {
		p->asked_at = 0;
		return SL_CONTINUE;
	}
	if (SL_FROM_OUTSIDE && front == SL_FRONT_INSIDE)
		return SL_REASON_SERVICE_INSIDE;
	if (may_have_copy(p) && follow_copy(p))
		return SL_CONTINUE;
	return front ? choose_backend(p, front) : SL_CONTINUE;
}

/* Finds or chooses the packet's translation, if it requests a service. */
__noinline enum sl_reason find_service(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_xl *xl;
	__u32 now;

	if (!p || (p->proto != SL_TCP && p->proto != SL_UDP && p->proto != SL_SCTP))
		return SL_CONTINUE;
	write_arriving_key(p);
	xl = find_translation(p->family);
	/* the copy of a hairpin's return translation: see keep_way_back */
	if (SL_OF_PODS && !xl && is_hairpin_address(p->dst, p->family))
		xl = find_answer(true, p->family, SL_XL_ANSWERS);
	if (!xl || (begins(p) && !xl->back) || !leads_on(p, xl))
		return ask_service(skb, p);
	now = now_seconds();
	if (!xl->back && is_answer_by_now(skb, p, READ_ONCE(xl->last_s) == now)) {
		delete_translation(p->family);
		return SL_CONTINUE;
	}
	p->asked_at = xl->asked_at;
	redirect_to(p, xl->addr, xl->port, xl->front,
		    xl->back ? SL_TRANSLATED_BACK : SL_TRANSLATED_DESTINATION);
	if (!xl->back && is_hairpin(p))
		p->translated = SL_TRANSLATED_HAIRPIN;
	if (READ_ONCE(xl->last_s) != now) {
		*(volatile __u32 *)&xl->last_s = now;
		p->first_in_second = xl->back;
	}
	return SL_CONTINUE;
}

/* Stores the backend of the client if the service has affinity. Called for allowed packets. */
__noinline int keep_backend(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();
	struct sl_choice c = {};
	struct sl_front *front;

	if (!p || !own)
		return 0;
	front = front_at(own->xl.front);
	if (!front || !has_affinity(front, READ_ONCE(front->list)))
		return 0;
	c.family = p->family;
	c.backend = own->xl.backend;
	c.gen = own->xl.gen;
	__builtin_memcpy(c.client, p->src, sizeof(c.client));
	keep_affinity(&c, front, SL_OF_PODS ? p->src_slot : SL_SLOT_NONE);
	return 0;
}

/* Reserves n translations for an endpoint; 0: they exceed its share. */
static __always_inline int take_translations(const struct sl_packet *p, __u32 slot, __u32 n)
{
	return take_of_bound(SL_BOUND_XL4 + (p->family == 6), slot, n);
}

/*
 * Reserves an entry for a record or a copy, which a connection only needs if another of its entries
 * is evicted; 0: the rest of the endpoint's share is kept for new connections.
 */
static __always_inline int take_spare_translation(const struct sl_packet *p, __u32 slot)
{
	return take_spare_of_bound(SL_BOUND_XL4 + (p->family == 6), slot);
}

/*
 * Whether a packet with an existing translation begins another connection on its port, so that the
 * translation has to be charged again. Otherwise the packet is a retransmission. Hairpins have no
 * connection that could end.
 */
static __always_inline bool counts_anew(const struct sl_packet *p)
{
	return p->renews && p->proto == SL_TCP && p->translated == SL_TRANSLATED_DESTINATION;
}

/*
 * Deletes a copy that an earlier use of the port has left, in the two cases in which no first
 * answer will replace it: the packet repeats the first packet of an open connection, or is a
 * hairpin.
 */
static __always_inline void forget_other_copy(struct sl_packet *p)
{
	struct sl_xl *xl;

	if (!begins(p) || (p->renews && p->translated != SL_TRANSLATED_HAIRPIN))
		return;
	xl = find_requested(p);
	if (!xl || (xl->port == p->dport && equal16(xl->addr, p->dst)))
		return;
	delete_answer(SL_OF_PODS, p->family, SL_XL_REQUESTED);
	p->xl4.zone = SL_XL_SERVICE;
	p->xl6.zone = SL_XL_SERVICE;
}

/*
 * Stores the choice for a packet that was allowed. Two CPUs make the same choice, unless the list
 * has changed in between; then the first one's applies from the next packet on. Returns 0 if it
 * exceeds the share of the sending pod; a connection that has a copy continues with that. A
 * hairpin is charged twice, because its return entry is stored next.
 *
 * A UDP flow of a pod only takes spare capacity. Without an entry, each packet makes the same
 * choice again until the list changes. TCP needs the rest, because it cannot change its backend.
 */
__noinline int store_translation(struct sl_packet *p)
{
	struct sl_packet *own = own_packet();
	__u32 taken = 0;
	struct sl_xl *xl;
	bool restores;

	if (!p || !own)
		return 1;
	restores = p->untold == SL_UNTOLD_COPY;
	forget_other_copy(p);
	if (SL_OF_PODS && p->proto == SL_UDP && p->translated != SL_TRANSLATED_HAIRPIN) {
		taken = 1;
		if (!take_spare_translation(p, p->src_slot)) {
			if (p->untold == SL_UNTOLD_AFFINITY)
				keep_backend(p);
			return 1;
		}
	} else if (SL_OF_PODS) {
		taken = p->translated == SL_TRANSLATED_HAIRPIN && !restores ? 2 : 1;
		if (!take_translations(p, p->src_slot, taken)) {
			if (restores)
				return 1;
			if (!find_translation(p->family))
				return 0;
			taken = 0;
		}
	}
	if (p->untold == SL_UNTOLD_AFFINITY)
		keep_backend(p);
	if (insert_translation(p->family) != -SL_EEXIST)
		return 1;
	if (taken && !counts_anew(p))
		give_back(SL_BOUND_XL4 + (p->family == 6), p->src_slot, taken);
	xl = find_translation(p->family);
	if (xl && xl->backend == own->xl.backend && xl->gen == own->xl.gen &&
	    xl->front == own->xl.front)
		return 1;
	/* values are written only once */
	delete_translation(p->family);
	insert_translation(p->family);
	return 1;
}

#endif
