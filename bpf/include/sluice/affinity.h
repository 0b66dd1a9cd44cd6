/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_AFFINITY_H
#define SLUICE_AFFINITY_H

/* Session affinity: a client keeps its backend while the backend is in the list. */

#include <sluice/bound.h>
#include <sluice/clock.h>
#include <sluice/service.h>

/* A search for a backend among the members of a list. */
struct sl_member_search {
	__u32 base, backend;
	int found;
};

/* One step of is_member. Returns 1 when the search is over. */
static long compare_member(__u32 i, void *context)
{
	struct sl_member_search *s = context;
	__u32 at = s->base + i;
	__u64 *member = bpf_map_lookup_elem(&sl_member, &at);

	if (!member)
		return 1;
	s->found = (__u32)READ_ONCE(*member) == s->backend;
	return s->found;
}

/*
 * Whether the backend is a member of the list. It uses bpf_loop, whose callback the verifier checks
 * only once: a plain loop would account for a sixth of all instructions that the verifier walks. It
 * is a global function, so that the verifier does not walk it again on every path that calls it.
 */
__noinline int is_member(__u64 list, __u32 backend)
{
	struct sl_member_search s = { .base = list_base(list), .backend = backend };
	__u32 count = list_count(list);

	if (count > SL_AFFINITY_MEMBERS)
		count = SL_AFFINITY_MEMBERS;
	bpf_loop(count, compare_member, &s, 0);
	return s.found;
}

static __always_inline __u64 affinity_word(__u32 backend, __u8 gen, __u32 now)
{
	return (backend & 0xffffff) | (__u64)gen << 24 | (__u64)now << 32;
}

/* Whether the remembered backend is still valid. If so, sets the backend in c. */
static __always_inline bool read_affinity(struct sl_choice *c, __u64 word, __u64 list,
					  __u32 timeout, __u32 now)
{
	__u32 backend = word & 0xffffff;
	/* a time that is ahead of the coarse clock counts as now */
	__s32 idle = (__s32)(now - (__u32)(word >> 32));

	if (idle > 0 && (__u32)idle > timeout)
		return false;
	if (!is_member(list, backend))
		return false;
	return read_backend(c, backend) && c->gen == (__u8)(word >> 24);
}

/*
 * Local pods and sockets have maps of their own, which outside clients cannot fill. Socket
 * programs have no SL_PROGRAM.
 */
#ifdef SL_PROGRAM
#define SL_LOCAL_CLIENT (SL_PROGRAM == SL_PROGRAM_FROM_POD)
#else
#define SL_LOCAL_CLIENT 1
#endif

/* The client's affinity entry, or NULL. */
static __always_inline __u64 *find_affinity(const struct sl_choice *c, __u16 group)
{
	struct sl_aff_key4 key4 = { .client = *(__be32 *)c->client, .group = group };
	struct sl_aff_key6 key6 = { .group = group };

	if (c->family == 4)
		return SL_LOCAL_CLIENT ? bpf_map_lookup_elem(&sl_pod_aff4, &key4)
				       : bpf_map_lookup_elem(&sl_aff4, &key4);
	__builtin_memcpy(key6.client, c->client, sizeof(key6.client));
	return SL_LOCAL_CLIENT ? bpf_map_lookup_elem(&sl_pod_aff6, &key6)
			       : bpf_map_lookup_elem(&sl_aff6, &key6);
}

/* Whether the share of a pod (by slot) or the host allows another entry. Outside clients have no
 * shares: they evict each other's entries.
 */
static __always_inline int take_affinity(__u32 slot, __u8 family)
{
	if (!SL_LOCAL_CLIENT)
		return 1;
	return take_of_bound(SL_BOUND_AFFINITY4 + (family == 6), slot, 1);
}

/*
 * Stores the client's backend. If the client has used up its share, the backend is not stored, and
 * each connection of the client may get another backend.
 */
static __always_inline long insert_affinity(const struct sl_choice *c, __u16 group, __u64 word,
					    __u32 slot)
{
	struct sl_aff_key4 key4 = { .client = *(__be32 *)c->client, .group = group };
	struct sl_aff_key6 key6 = { .group = group };

	if (!take_affinity(slot, c->family))
		return -1;
	if (c->family == 4)
		return SL_LOCAL_CLIENT
			       ? bpf_map_update_elem(&sl_pod_aff4, &key4, &word, BPF_NOEXIST)
			       : bpf_map_update_elem(&sl_aff4, &key4, &word, BPF_NOEXIST);
	__builtin_memcpy(key6.client, c->client, sizeof(key6.client));
	if (SL_LOCAL_CLIENT)
		return bpf_map_update_elem(&sl_pod_aff6, &key6, &word, BPF_NOEXIST);
	return bpf_map_update_elem(&sl_aff6, &key6, &word, BPF_NOEXIST);
}

/* Whether a front with this list has affinity. */
static __always_inline bool has_affinity(const struct sl_front *front, __u64 list)
{
	return front->timeout && list_count(list) <= SL_AFFINITY_MEMBERS;
}

/*
 * Chooses the backend that the client keeps, before the packet is evaluated; stores nothing.
 * False: the client has none.
 */
static __always_inline bool recall_affinity(struct sl_choice *c, const struct sl_front *front,
					    __u64 list)
{
	__u64 *at = find_affinity(c, front->group);

	return at && read_affinity(c, READ_ONCE(*at), list, front->timeout, now_seconds());
}

/* Stores the backend of the client, a pod at slot, after its packet was allowed. */
static __always_inline void keep_affinity(const struct sl_choice *c, const struct sl_front *front,
					  __u32 slot)
{
	__u64 *at = find_affinity(c, front->group), word;
	__u64 mine = affinity_word(c->backend, c->gen, now_seconds());

	if (!at) {
		insert_affinity(c, front->group, mine, slot);
		return;
	}
	word = READ_ONCE(*at);
	if (word != mine)
		__sync_val_compare_and_swap(at, word, mine);
}

/*
 * Chooses a backend for a socket by affinity: the client's stored backend, or, without a stored
 * backend, "fresh", which is then stored as the client's backend. If two sockets of one client
 * choose at the same time, the later one uses the backend that the earlier one has stored.
 */
static __always_inline bool choose_by_affinity(struct sl_choice *c, const struct sl_front *front,
					       __u64 list, __u32 fresh, __u32 slot)
{
	__u32 timeout = front->timeout, now = now_seconds();
	__u64 *at, word, mine;
	int i;

	for (i = 0; i < 2; i++) {
		at = find_affinity(c, front->group);
		word = at ? READ_ONCE(*at) : 0;
		if (at && read_affinity(c, word, list, timeout, now)) {
			mine = affinity_word(c->backend, c->gen, now);
			if (mine != word)
				__sync_val_compare_and_swap(at, word, mine);
			return true;
		}
		if (!read_backend(c, fresh))
			return false;
		mine = affinity_word(c->backend, c->gen, now);
		if (at ? __sync_val_compare_and_swap(at, word, mine) == word
		       : !insert_affinity(c, front->group, mine, slot))
			return true;
	}
	return true; /* c has "fresh" */
}

#endif
