/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_PACKET_H
#define SLUICE_PACKET_H

/*
 * What one run of a program knows about its packet (struct sl_packet). It lies in
 * memory of the CPU (sl_run) and not on the stack, of which all functions of a
 * program together have 512 bytes.
 *
 * A run is alone with its cell: both hooks run with bottom halves disabled, so
 * that no run begins on a CPU before the last one has returned, and a redirect
 * happens after the return. What an earlier packet has left there is cleared
 * first. Programs that run in the context of a process must not use it: they
 * can be interrupted by those that do.
 */

#include <linux/bpf.h>
#include <linux/if_ether.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <sluice/compiler.h>
#include <sluice/maps.h>

/*
 * The packet of a program's run, empty. It is never NULL, but the verifier of
 * older kernels does not know that the element exists.
 */
static __always_inline struct sl_packet *new_packet(enum sl_direction direction)
{
	__u32 at = SL_PROGRAM;
	struct sl_packet *p = bpf_map_lookup_elem(&sl_run, &at);

	if (!p)
		return NULL;
	__builtin_memset(p, 0, offsetof(struct sl_packet, question));
	p->src_slot = SL_SLOT_NONE;
	p->dst_slot = SL_SLOT_NONE;
	p->hook = direction;
	p->direction = direction;
	return p;
}

/*
 * The packet of this run by its own lookup. Keys and values of maps are taken
 * from there: Linux 6.1 refuses memory that a global function was given as an
 * argument. The file of a program defines SL_PROGRAM.
 */
static __always_inline struct sl_packet *own_packet(void)
{
	__u32 at = SL_PROGRAM;

	return bpf_map_lookup_elem(&sl_run, &at);
}

/*
 * Copies what "to" points at from an offset in the packet, 0 on success. Nearly
 * always the bytes lie in the linear part and cost no call.
 */
#define read_packet(skb, off, to)                                                \
	({                                                                       \
		__u32 _off = (off);                                              \
		void *_data = (void *)(long)(skb)->data;                         \
		void *_end = (void *)(long)(skb)->data_end;                      \
		long _err = 0;                                                   \
		if (_off <= SL_NEAR && _data + _off + sizeof(*(to)) <= _end)     \
			*(to) = *(__typeof__(to))(_data + _off);                 \
		else                                                             \
			_err = bpf_skb_load_bytes(skb, _off, to, sizeof(*(to))); \
		_err;                                                            \
	})

/* Beyond it an offset into the packet is checked by the kernel, not here. */
#define SL_NEAR 256

struct sl_ethernet {
	__u8 dst[ETH_ALEN];
	__u8 src[ETH_ALEN];
	__be16 type;
} __attribute__((aligned(2)));

/*
 * Only untagged IPv4, IPv6 and ARP exist for pods: a tag, in the frame or
 * already taken out of it by the kernel, would reach a VLAN device of the host
 * unevaluated.
 */
static __always_inline enum sl_reason parse_ethernet(struct __sk_buff *skb, struct sl_packet *p)
{
	struct sl_ethernet eth;

	if (read_packet(skb, 0, &eth))
		return SL_REASON_MALFORMED;

	__builtin_memcpy(p->dst_mac, eth.dst, ETH_ALEN);
	__builtin_memcpy(p->src_mac, eth.src, ETH_ALEN);
	p->ethertype = bpf_ntohs(eth.type);
	if (skb->vlan_present)
		return SL_REASON_NOT_IP;

	switch (p->ethertype) {
	case ETH_P_IP:
	case ETH_P_IPV6:
	case ETH_P_ARP:
		return SL_CONTINUE;
	}
	return SL_REASON_NOT_IP;
}

#endif
