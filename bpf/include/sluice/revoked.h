/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_REVOKED_H
#define SLUICE_REVOKED_H

/*
 * TCP connections that a policy has terminated, remembered apart from the LRU
 * map of connections: that map forgets what is not used, and the responder's
 * next segment would be taken for one of a connection that it began itself.
 *
 * A record is no verdict. It says in which direction the connection began, so
 * that a segment without an entry is evaluated as the connection: denied as
 * long as the policy denies that, and let through when it allows it again.
 */

#include <sluice/conntrack.h>

/* What a record keeps of the flags of the entry. */
#define SL_REVOKED_FLAGS (SL_CT_ORIG_LO | SL_CT_UNORIENTED | SL_CT_VIA_STACK)

static __always_inline struct sl_revoked *find_revoked(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return NULL;
	if (p->family == 4)
		return bpf_map_lookup_elem(&sl_revoked4, &own->key4);
	return bpf_map_lookup_elem(&sl_revoked6, &own->key6);
}

__noinline int forget_revoked(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();

	if (!p || !own)
		return 0;
	if (p->family == 4)
		return (int)bpf_map_delete_elem(&sl_revoked4, &own->key4);
	return (int)bpf_map_delete_elem(&sl_revoked6, &own->key6);
}

static __always_inline long insert_revoked(const struct sl_packet *p, __u32 flags)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return -1;
	own->revoked.last_s = now_seconds();
	own->revoked.flags = flags;
	if (p->family == 4)
		return bpf_map_update_elem(&sl_revoked4, &own->key4, &own->revoked, BPF_NOEXIST);
	return bpf_map_update_elem(&sl_revoked6, &own->key6, &own->revoked, BPF_NOEXIST);
}

/*
 * Nothing of this endpoint is picked up until the collector takes the flag
 * back: a revoked connection of it is remembered by its entry alone.
 */
static __always_inline void stop_pick_up(__u16 slot)
{
	struct sl_endpoint *e = endpoint_at(slot);

	if (e && !(READ_ONCE(e->state) & SL_EP_NO_PICK_UP))
		__sync_fetch_and_or(&e->state, SL_EP_NO_PICK_UP);
}

/* What allows everything can have revoked nothing. */
static __always_inline bool may_pick_up(__u16 slot)
{
	struct sl_endpoint *e = endpoint_at(slot);

	return !e || !(READ_ONCE(e->state) & SL_EP_NO_PICK_UP) ||
	       ((__u32)policy_of(e) & ~SL_POL_SECOND) == (SL_TABLE_ALLOW | SL_TABLE_ALLOW << 16);
}

/* Remembers the connection of the packet, which was denied. */
__noinline int remember_revoked(const struct sl_packet *p, __u32 flags)
{
	struct sl_revoked *known;
	long err;

	if (!p)
		return 0;
	flags &= SL_REVOKED_FLAGS;
	known = find_revoked(p);
	if (known && READ_ONCE(known->flags) == flags) {
		*(volatile __u32 *)&known->last_s = now_seconds();
		return 0;
	}
	/* of an earlier connection with these ports: values are written once */
	if (known)
		forget_revoked(p);
	err = insert_revoked(p, flags);
	if (err && err != -SL_EEXIST) {
		count_connection(SL_CT_STAT_UNREMEMBERED);
		stop_pick_up(p->src_slot);
		stop_pick_up(p->dst_slot);
	}
	return 0;
}

#endif
