/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_REVOKED_H
#define SLUICE_REVOKED_H

/*
 * TCP connections that a policy has terminated. They are recorded outside the LRU map of
 * connections, which evicts unused entries: without a record, the responder's next segment would
 * look like a connection that the responder began.
 *
 * A record is not a verdict. It tells in which direction the connection began, so that a segment
 * without an entry is evaluated as part of it: denied while the policy denies the connection, and
 * passed when the policy allows it again.
 *
 * The endpoints share the maps of records: a record is charged to the endpoint whose policy denied
 * the connection. Above its share, only this endpoint picks up no connections for a while.
 */

#include <sluice/bound.h>
#include <sluice/conntrack.h>

/* The flags of the entry that a record keeps. */
#define SL_REVOKED_FLAGS (SL_CT_ORIG_LO | SL_CT_UNORIENTED | SL_CT_VIA_STACK)

/* The upper half of sl_revoked.flags: the endpoint that the record is charged to. */
#define SL_REVOKED_SLOT_SHIFT 16

static __always_inline __u32 bound_of_revoked(const struct sl_packet *p)
{
	return p->family == 4 ? SL_BOUND_REVOKED4 : SL_BOUND_REVOKED6;
}

static __always_inline struct sl_revoked *find_revoked(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return NULL;
	if (p->family == 4)
		return bpf_map_lookup_elem(&sl_revoked4, &own->key4);
	return bpf_map_lookup_elem(&sl_revoked6, &own->key6);
}

static __always_inline long delete_revoked(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return -1;
	if (p->family == 4)
		return bpf_map_delete_elem(&sl_revoked4, &own->key4);
	return bpf_map_delete_elem(&sl_revoked6, &own->key6);
}

__noinline int forget_revoked(const struct sl_packet *p)
{
	struct sl_revoked *known;
	__u32 slot;

	if (!p)
		return 0;
	known = find_revoked(p);
	if (!known)
		return 0;
	slot = READ_ONCE(known->flags) >> SL_REVOKED_SLOT_SHIFT;
	if (!delete_revoked(p) && slot)
		give_back(bound_of_revoked(p), slot, 1);
	return 0;
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
 * Makes this endpoint pick up no connections until the collector clears the flag: a revoked
 * connection could not be recorded, so only its conntrack entry tells that it was revoked, and that
 * may be evicted.
 */
static __always_inline void stop_pick_up(__u16 slot)
{
	struct sl_endpoint *e = endpoint_at(slot);

	if (e && !(READ_ONCE(e->state) & SL_EP_NO_PICK_UP))
		__sync_fetch_and_or(&e->state, SL_EP_NO_PICK_UP);
}

/* Whether connections may be picked up. An endpoint that allows everything has revoked none. */
static __always_inline bool may_pick_up(__u16 slot)
{
	struct sl_endpoint *e = endpoint_at(slot);

	return !e || !(READ_ONCE(e->state) & SL_EP_NO_PICK_UP) ||
	       ((__u32)policy_of(e) & ~SL_POL_SECOND) == (SL_TABLE_ALLOW | SL_TABLE_ALLOW << 16);
}

/* The endpoint whose policy denied the packet: evaluate() has left its side in p->direction. */
static __always_inline __u16 denied_by(const struct sl_packet *p)
{
	return p->direction == SL_EGRESS ? p->src_slot : p->dst_slot;
}

/*
 * Records the connection of the packet, which was denied. If the share of the endpoint whose policy
 * denied it is used up, that endpoint picks up no connections for a while. The endpoint is an end
 * of this connection, so its own flag is enough.
 */
__noinline int remember_revoked(const struct sl_packet *p, __u32 flags)
{
	struct sl_revoked *known;
	__u32 slot;
	long err;

	if (!p)
		return 0;
	flags &= SL_REVOKED_FLAGS;
	known = find_revoked(p);
	if (known && (READ_ONCE(known->flags) & SL_REVOKED_FLAGS) == flags) {
		*(volatile __u32 *)&known->last_s = now_seconds();
		return 0;
	}
	/* the record belongs to an earlier connection with these ports; it is deleted, because
	 * values are written only once */
	if (known)
		forget_revoked(p);
	slot = denied_by(p);
	if (slot >= SL_MAX_SLOTS) /* not reached: only endpoints of this node have policies */
		slot = SL_SLOT_HOST;
	err = -1;
	if (take_of_bound(bound_of_revoked(p), slot, 1)) {
		err = insert_revoked(p, flags | slot << SL_REVOKED_SLOT_SHIFT);
		if (err)
			give_back(bound_of_revoked(p), slot, 1);
	}
	if (err && err != -SL_EEXIST) {
		count_connection(SL_CT_STAT_UNREMEMBERED);
		stop_pick_up((__u16)slot);
	}
	return 0;
}

#endif
