/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_PREVIOUS_H
#define SLUICE_PREVIOUS_H

/*
 * Migrates connections of the previous version, if that had another layout of sl_ct. After an
 * upgrade its maps stay pinned until all their entries have been idle for too long. While they
 * exist (cfg_previous), a packet whose connection is not in the current map takes the entry over
 * from the previous map. Both maps have the same keys.
 *
 * While the filters are replaced one by one, programs of both versions run side by side, each
 * with its own map:
 *
 * - The entry is inserted before the previous one is deleted, so that a packet of this version
 * always finds one of them. If two CPUs take over the same entry, only one inserts it. A CPU that
 * comes after the deletion looks into the current map once more.
 * - A change that a program of the previous version makes between the copy and the deletion is
 * lost. If it was a verdict under new epochs, the connection is evaluated again; if it was a FIN,
 * the entry stays open until it is idle.
 * - A program of the previous version that sees the connection afterwards finds no entry, and
 * evaluates the policy for the packet: TCP is picked up; another protocol may be denied in the
 * reply direction until the device has the program of this version. The old program may create
 * the entry again. This version ignores such an entry while it has its own, deletes both
 * together, and the collector removes entries that are in both maps.
 */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>
#include <sluice/compiler.h>
#include <sluice/config.h>
#include <sluice/maps.h>
#include <sluice/packet.h>
#include <sluice/previous_maps.h>
#include <sluice/transport.h>

static __always_inline struct sl_ct_prev *find_previous(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return NULL;
	if (p->family == 4)
		return cfg_previous & SL_PREVIOUS_4 ? bpf_map_lookup_elem(&sl_prev4, &own->key4)
						    : NULL;
	return cfg_previous & SL_PREVIOUS_6 ? bpf_map_lookup_elem(&sl_prev6, &own->key6) : NULL;
}

static __always_inline bool delete_previous(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();

	if (!own)
		return false;
	if (p->family == 4)
		return cfg_previous & SL_PREVIOUS_4 && !bpf_map_delete_elem(&sl_prev4, &own->key4);
	return cfg_previous & SL_PREVIOUS_6 && !bpf_map_delete_elem(&sl_prev6, &own->key6);
}

/*
 * Converts the entry to the current layout. Epochs, slots, address epochs and identities stay, so
 * the connection is not evaluated again. If a CPU is just changing the entry, the copy would stay
 * claimed for ever; its epochs are set to SL_EPOCH_NONE, so that the next packet is evaluated.
 */
static __always_inline void convert(struct sl_ct *ct, const struct sl_ct_prev *prev, __u8 proto)
{
	__u64 epochs = READ_ONCE(prev->epochs);

	if (epochs >> 32 == SL_EPOCHS_BUSY)
		epochs = (__u64)SL_EPOCH_NONE << 32 | SL_EPOCH_NONE;
	__builtin_memset(ct, 0, sizeof(*ct));
	ct->epochs = epochs;
	ct->where = READ_ONCE(prev->where);
	ct->id_init = prev->id_init;
	ct->id_resp = prev->id_resp;
	ct->rule_eg = prev->rule_eg;
	ct->rule_in = prev->rule_in;
	ct->last_s = READ_ONCE(prev->last_s);
	ct->flags = READ_ONCE(prev->flags);
	/* In the previous version a terminated connection had only SL_CT_CLOSED_SENT. The next
	 * denied packet creates its record.
	 */
	if (proto == SL_TCP && ct->flags & SL_CT_CLOSED_SENT &&
	    !(ct->flags & (SL_CT_RST | SL_CT_REVOKED)) &&
	    (ct->flags & (SL_CT_FIN_I | SL_CT_FIN_R)) != (SL_CT_FIN_I | SL_CT_FIN_R)) {
		ct->flags |= SL_CT_REVOKED;
		ct->last_s--;
	}
	/* the previous version did not track the handshake */
	if ((proto == SL_TCP || proto == SL_SCTP) && ct->flags & SL_CT_SEEN_REPLY)
		ct->flags |= SL_CT_ESTABLISHED;
}

/* Moves the packet's connection from the previous map, if it is there. */
__noinline int take_over_connection(const struct sl_packet *p)
{
	struct sl_packet *own = own_packet();
	struct sl_ct_prev *prev;
	long err;

	if (!p || !own)
		return 0;
	prev = find_previous(p);
	if (!prev)
		return 0;
	convert(&own->entry, prev, p->proto);
	/* if the element was recycled meanwhile, it may hold another connection */
	if (find_previous(p) != prev)
		return 0;
	if (p->family == 4)
		err = bpf_map_update_elem(&sl_ct4, &own->key4, &own->entry, BPF_NOEXIST);
	else
		err = bpf_map_update_elem(&sl_ct6, &own->key6, &own->entry, BPF_NOEXIST);
	if (!err)
		delete_previous(p);
	return 0;
}

#endif
