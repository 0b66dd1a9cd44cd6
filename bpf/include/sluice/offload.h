/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_OFFLOAD_H
#define SLUICE_OFFLOAD_H

/*
 * Checksum offload: the packet tells the device where to write the checksum. A packet socket
 * (PACKET_VNET_HDR) lets its owner choose that offset, for example the one of the destination port,
 * which the programs have evaluated. The device, or the kernel if the device cannot, writes the
 * checksum there after the last program has run.
 *
 * A checksum at a later offset belongs to the inner packet of the pod's own tunnel.
 */

#include <bpf/bpf_helpers.h>
#include <sluice/config.h>
#include <sluice/packet.h>
#include <sluice/related.h>
#include <sluice/rewrite.h>
#include <sluice/transport.h>

#define SL_CHECKSUM_PARTIAL 3 /* CHECKSUM_PARTIAL of linux/skbuff.h */

/* Values of enum bpf_field_info_kind, which compilers and loaders share. */
#define SL_FIELD_BYTE_OFFSET 0
#define SL_FIELD_LSHIFT_U64 4
#define SL_FIELD_RSHIFT_U64 5

/* The fields of the kernel's sk_buff that are read here. The loader relocates them to the running
 * kernel's layout.
 */
struct sk_buff {
	__u8 ip_summed : 2;
	__u16 csum_start; /* relative to head */
	__u16 csum_offset;
	unsigned char *head;
	unsigned char *data;
} __attribute__((preserve_access_index));

/* Available since Linux 6.2, see cfg_cast: converts a program's packet to the kernel's sk_buff. */
extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym __weak;

/* Reads a field of the kernel's sk_buff. */
#define read_kernel(to, from)                                           \
	({                                                              \
		if (cfg_cast)                                           \
			(to) = *(from);                                 \
		else                                                    \
			bpf_probe_read_kernel(&(to), sizeof(to), from); \
	})

/* The packet as sk_buff, to be accessed by read_kernel. */
static __always_inline struct sk_buff *as_kernel(struct __sk_buff *skb)
{
	return cfg_cast ? bpf_cast_to_kern_ctx(skb) : (void *)skb;
}

/* Whether a device still has to write the checksum of the packet. */
static __always_inline bool leaves_checksum(struct __sk_buff *skb)
{
	struct sk_buff *k = as_kernel(skb);
	__u8 summed = 0;
	__u64 bits;

	read_kernel(summed,
		    (__u8 *)k + __builtin_preserve_field_info(k->ip_summed, SL_FIELD_BYTE_OFFSET));
	bits = (__u64)summed << __builtin_preserve_field_info(k->ip_summed, SL_FIELD_LSHIFT_U64);
	bits >>= __builtin_preserve_field_info(k->ip_summed, SL_FIELD_RSHIFT_U64);
	return bits == SL_CHECKSUM_PARTIAL;
}

/* Offset in the frame at which a device writes the checksum. */
static __noinline __s32 checksum_place(struct __sk_buff *skb)
{
	struct sk_buff *k = as_kernel(skb);
	unsigned char *head = NULL, *data = NULL;
	__u16 start = 0, offset = 0;

	read_kernel(start, &k->csum_start);
	read_kernel(offset, &k->csum_offset);
	read_kernel(head, &k->head);
	read_kernel(data, &k->data);
	return start + offset - (__s32)(data - head);
}

/* Whether the device would write the checksum over an evaluated field. */
static __always_inline bool is_checksum_misplaced(struct __sk_buff *skb, const struct sl_packet *p)
{
	__s32 at;

	if (!leaves_checksum(skb))
		return false;
	at = checksum_place(skb) - (__s32)p->l4;
	if (at < 0)
		return true;
	if (p->fragment)
		return false;
	switch (p->proto) {
	case SL_TCP:
		return at < 20 && at != 16;
	case SL_UDP:
		return at < 8 && at != 6;
	case SL_SCTP:
		return at < SL_SCTP_COMMON + 4 && at != 8;
	case SL_ICMP:
	case SL_ICMPV6:
		return (at < SL_ICMP_HEADER || is_error(p)) && at != SL_ICMP_CHECK;
	default:
		return false;
	}
}

#endif
