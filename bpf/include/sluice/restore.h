/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_RESTORE_H
#define SLUICE_RESTORE_H

/* Answers of backends elsewhere, which see an address of this node: see transit.h. */

#include <sluice/fragment.h>
#include <sluice/quote.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

/* Whether a port of the node may have been given to a sender outside. SCTP keeps the
 * sender's, because no checksum could follow.
 */
static __always_inline bool may_be_claimed(const struct sl_packet *p)
{
	switch (p->proto) {
	case SL_TCP:
	case SL_UDP:
		return p->dport - SL_NAT_FIRST < (__u32)SL_NAT_PORTS;
	}
	return p->proto == SL_SCTP;
}

/*
 * Leads an answer to the sender whose source was translated: its destination changes
 * here, its source where it leaves the node. SL_CONTINUE: it is none, else the packet is
 * the stack's.
 */
__noinline enum sl_reason restore_destination(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_xl *xl;
	__u32 now;

	if (!p || follow_fragments(p))
		return SL_CONTINUE;
	if (is_error(p))
		return restore_error(skb, p);
	if (!may_be_claimed(p))
		return SL_CONTINUE;
	write_arriving_key(p);
	p->xl4.zone = SL_XL_NAT;
	p->xl6.zone = SL_XL_NAT;
	xl = find_translation(p->family);
	if (!xl)
		return SL_CONTINUE;
	now = now_seconds();
	if (READ_ONCE(xl->last_s) != now)
		*(volatile __u32 *)&xl->last_s = now;
	redirect_to(p, xl->addr, xl->port, 0, SL_TRANSLATED_RESTORED);
	if (leads_fragments(p))
		lead_fragments(p, 0);
	return rewrite_destination(skb, p) ? SL_DROP_REWRITE : SL_FWD_STACK;
}

#endif
