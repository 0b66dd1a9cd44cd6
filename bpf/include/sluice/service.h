/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_SERVICE_H
#define SLUICE_SERVICE_H

/*
 * Lookups from a requested address to a backend: frontend, front, list, member, backend.
 * Addresses have 16 bytes; IPv4 uses the first four, the rest are 0. Ports are in host order.
 */

#include <linux/bpf.h>
#include <linux/in6.h>

#include <bpf/bpf_helpers.h>
#include <sluice/compiler.h>
#include <sluice/endpoint.h>
#include <sluice/maps.h>
#include <sluice/service_maps.h>

/* The maximum number of choices of a backend for one connection: a chosen backend may just have
 * been removed. */
#define SL_SERVICE_TRIES 3

/* The choice of one backend. It is on the stack of the calling program. */
struct sl_choice {
	__u8 client[16]; /* for affinity; 0: the node itself */
	__u8 addr[16]; /* the requested address; then the backend's */
	__u64 hash; /* determines the choice */
	__u64 limit; /* upper limit for the rank of the next rendezvous choice */
	__u32 front;
	__u32 backend;
	__u16 port; /* as addr */
	__u8 family;
	__u8 proto;
	__u8 gen; /* of the backend */
	__u8 pad[7];
};

static __always_inline struct sl_front *front_at(__u32 number)
{
	return bpf_map_lookup_elem(&sl_front, &number);
}

static __always_inline __u32 list_base(__u64 list)
{
	return list & SL_FRONT_BASE_MASK;
}

static __always_inline __u32 list_count(__u64 list)
{
	return (__u16)(list >> SL_FRONT_COUNT_SHIFT);
}

/* The binary logarithm of the number of slots after the members; 0: there is no table. */
static __always_inline __u32 list_table(__u64 list)
{
	return list >> SL_FRONT_TABLE_SHIFT & SL_FRONT_TABLE_MASK;
}

static __always_inline __u16 list_flags(__u64 list)
{
	return (__u16)(list >> SL_FRONT_FLAGS_SHIFT);
}

/*
 * Whether the address is a virtual IP that only services use. A packet to a port without frontend
 * must not go to the node's gateway, which may send it back. Other owners of the address (this
 * node, another node) take precedence.
 */
static __always_inline bool is_of_services(const __u8 *addr, __u8 family)
{
	struct sl_fe_key4 key4 = { .kind = SL_FE_ALONE };
	struct sl_fe_key6 key6 = { .kind = SL_FE_ALONE };

	if (family == 4) {
		key4.addr = *(const __be32 *)addr;
		return bpf_map_lookup_elem(&sl_fe4, &key4) != NULL;
	}
	__builtin_memcpy(key6.addr, addr, sizeof(key6.addr));
	return bpf_map_lookup_elem(&sl_fe6, &key6) != NULL;
}

/* The fronts of an address and port or, with kind SL_FE_NODE, of a node port. */
static __always_inline struct sl_fe *frontend_of(const struct sl_choice *c, __u8 kind)
{
	struct sl_fe_key4 key4 = { .port = c->port, .proto = c->proto, .kind = kind };
	struct sl_fe_key6 key6 = { .port = c->port, .proto = c->proto, .kind = kind };

	if (c->family == 4) {
		if (kind == SL_FE_ADDRESS)
			key4.addr = *(const __be32 *)c->addr;
		return bpf_map_lookup_elem(&sl_fe4, &key4);
	}
	if (kind == SL_FE_ADDRESS)
		__builtin_memcpy(key6.addr, c->addr, sizeof(key6.addr));
	return bpf_map_lookup_elem(&sl_fe6, &key6);
}

static __always_inline bool is_loopback(const __u8 *addr, __u8 family)
{
	const __u32 *word = (const __u32 *)addr;

	if (family == 4)
		return addr[0] == 127;
	return !(word[0] | word[1] | word[2]) && word[3] == bpf_htonl(1);
}

/* Whether it is an address of the node, at which node ports answer. */
static __always_inline bool is_own_address(const __u8 *addr, __u8 family)
{
	return slot_of_address(addr, family) == SL_SLOT_HOST;
}

/* Reads the address of a backend. False if the number is unused or the backend was removed. */
static __always_inline bool read_backend(struct sl_choice *c, __u32 number)
{
	__u64 word;

	if (c->family == 4) {
		__u64 *at = bpf_map_lookup_elem(&sl_be4, &number);

		if (!at)
			return false;
		word = READ_ONCE(*at);
		*(__u32 *)c->addr = (__u32)word;
	} else {
		struct sl_be6 *at = bpf_map_lookup_elem(&sl_be6, &number);

		if (!at)
			return false;
		word = READ_ONCE(at->word);
		__builtin_memcpy(c->addr, at->addr, sizeof(c->addr));
		/* the address is valid only if the word is the same before and after reading it */
		if (word != READ_ONCE(at->word))
			return false;
	}
	c->backend = number;
	c->port = (__u16)(word >> 32);
	c->gen = (__u8)(word >> 56);
	return (__u8)(word >> 48) == SL_BE_ACTIVE;
}

/* The host may have many addresses or none, so all its sockets count as one client, without an
 * address. */
static __always_inline bool has_address(const struct sl_choice *c)
{
	const __u64 *client = (const __u64 *)c->client;

	return client[0] | client[1];
}

/*
 * Returns whether the client is in a source range of the front. The keys of both families begin
 * with the same fields. If the client's address is unknown, only a range of length 0 matches.
 */
__noinline int is_source(const struct sl_choice *c)
{
	struct sl_src_key6 key;

	_Static_assert(offsetof(struct sl_src_key4, addr) == offsetof(struct sl_src_key6, addr),
		       "one begins like the other");
	if (!c)
		return 0;
	key.bits = !has_address(c) ? 32 : c->family == 4 ? 64 : 160;
	key.front = c->front;
	__builtin_memcpy(key.addr, c->client, sizeof(key.addr));
	if (c->family == 4)
		return bpf_map_lookup_elem(&sl_src4, &key) != NULL;
	return bpf_map_lookup_elem(&sl_src6, &key) != NULL;
}

/*
 * Mixes the bits of a number, such as a cookie, so that consecutive numbers give unrelated results.
 */
static __always_inline __u64 scramble(__u64 x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdULL;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ULL;
	x ^= x >> 33;
	return x;
}

/*
 * The backend of the member with the highest rank below c->limit, which becomes its rank; 0:
 * none. A rank only depends on the hash and the member's salt, so adding or removing a member
 * does not change other choices.
 */
__noinline int best_member(__u64 list, struct sl_choice *c)
{
	__u32 base = list_base(list), count = list_count(list), best = 0, i;
	__u64 top = 0;

	if (!c)
		return 0;
	for (i = 0; i < SL_RENDEZVOUS; i++) {
		__u32 at = base + i;
		__u64 *member, rank, word;

		if (i >= count)
			break;
		member = bpf_map_lookup_elem(&sl_member, &at);
		if (!member)
			break;
		word = READ_ONCE(*member);
		rank = scramble(c->hash ^ (word >> 32) * 0x9e3779b97f4a7c15ULL);
		if (rank < c->limit && rank >= top) {
			top = rank;
			best = (__u32)word;
		}
	}
	c->limit = top;
	return (int)best;
}

/*
 * The backend that a hash selects in a non-empty list: through the slot table or, without one,
 * directly among the members. 0 if the lookup fails.
 */
static __always_inline __u32 member_by_hash(__u64 list, __u64 hash)
{
	__u32 at = list_base(list), table = list_table(list);
	__u64 *member;

	hash &= 0xffffffff;
	if (table)
		at += list_count(list) + (__u32)(hash << table >> 32);
	else
		at += (__u32)(hash * list_count(list) >> 32);
	member = bpf_map_lookup_elem(&sl_member, &at);
	return member ? (__u32)READ_ONCE(*member) : 0;
}

#endif
