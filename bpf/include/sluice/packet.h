/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_PACKET_H
#define SLUICE_PACKET_H

/*
 * The state of a packet in one run of a program (struct sl_packet). It is stored in per-CPU
 * memory (sl_run), because the stack is limited to 512 bytes for all functions of a program
 * together.
 *
 * A run has its cell to itself: both hooks run with bottom halves disabled, so no other run of
 * the program starts on the CPU before this one returns, and a redirect takes effect after the
 * return. The contents left by the previous packet are cleared first. Programs that run in
 * process context must not use the cell, because programs at these hooks can interrupt them.
 */

#include <linux/bpf.h>
#include <linux/if_ether.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <sluice/compiler.h>
#include <sluice/maps.h>

/*
 * Never called and never loaded: adds struct bpf_sock to the type information (BTF). clang 19
 * writes the declarations of structs that struct __sk_buff points to and that are missing from BTF.
 * If there are several, their order depends on the directory of the build, so the object would not
 * be reproducible.
 */
__noinline int sl_sock_type(const struct bpf_sock *sk)
{
	return sk != 0;
}

/* Whether the program sees packets of other nodes that were in a tunnel. */
#define SL_FROM_TUNNEL \
	(SL_PROGRAM == SL_PROGRAM_FROM_OVERLAY || SL_PROGRAM == SL_PROGRAM_FROM_UNDERLAY)

/*
 * The cleared packet of this run. It is never NULL, but the verifiers of older kernels do not
 * know that the element exists.
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
 * The packet of this run, from a new map lookup. Use it to pass keys and values to map helpers:
 * Linux 6.1 rejects memory that a global function received as an argument. The file of each program
 * defines SL_PROGRAM.
 */
static __always_inline struct sl_packet *own_packet(void)
{
	__u32 at = SL_PROGRAM;

	return bpf_map_lookup_elem(&sl_run, &at);
}

/*
 * Copies sizeof(*to) bytes at an offset of the packet; 0 on success. The bytes are nearly always in
 * the linear part, where no helper call is needed.
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

/* For offsets beyond this limit the kernel checks the bounds, not this macro. */
#define SL_NEAR 256

/* Bytes that the tunnel adds to a packet over IPv4: see struct sl_outer. */
#define SL_TUNNEL_BYTES 50

struct sl_ethernet {
	__u8 dst[ETH_ALEN];
	__u8 src[ETH_ALEN];
	__be16 type;
} __attribute__((aligned(2)));

/*
 * Pods may only send untagged IPv4, IPv6 and ARP. A tagged frame, even if the kernel has already
 * removed the tag, would reach a VLAN device of the host without evaluation.
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
