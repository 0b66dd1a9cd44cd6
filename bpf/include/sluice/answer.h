/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ANSWER_H
#define SLUICE_ANSWER_H

/*
 * Tells answers to connections of the node apart from requests to a service. Both go to an address
 * and port of a frontend if a host socket has that local port, or if the host's masquerading has
 * chosen it. Two kernel tables contain such connections of the node: the connected sockets, and
 * nf_conntrack.
 *
 * A listening or unconnected socket does not count, nor does the original direction of an
 * nf_conntrack entry, so no process of the node can take a frontend away from its service. A SYN is
 * never an answer.
 */

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>
#include <sluice/config.h>
#include <sluice/conntrack.h>
#include <sluice/packet.h>

/* linux/tcp_states.h and net/tcp_states.h: also the states of UDP sockets. */
#define SL_SK_ESTABLISHED 1 /* UDP: connected */
#define SL_SK_CLOSE 7
#define SL_SK_LISTEN 10
#define SL_SK_NEW_SYN_RECV 12 /* a handshake that the peer began */

#define SL_CT_DIR_REPLY 1 /* IP_CT_DIR_REPLY */

/* Only used as a pointer; the verifier compares the type with the kernel's. */
struct nf_conn {
	unsigned long status;
} __attribute__((preserve_access_index));

/* The fields that exist in all supported kernels. */
struct bpf_ct_opts {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};
_Static_assert(sizeof(struct bpf_ct_opts) == 12, "the length that every kernel takes");

/* Functions of nf_conntrack, which may be a module that is not loaded: see cfg_conntrack. */
extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
					 __u32 tuple__sz, struct bpf_ct_opts *opts,
					 __u32 opts__sz) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *ct) __ksym __weak;

/*
 * Writes the tuple by which the helpers find the socket, or the nf_conntrack entry, that receives
 * packets from remote to local. Returns the length of the tuple.
 */
static __always_inline __u32 write_tuple(struct bpf_sock_tuple *tuple, __u8 family,
					 const __u8 *remote, __u16 remote_port, const __u8 *local,
					 __u16 local_port)
{
	if (family == 4) {
		tuple->ipv4.saddr = *(const __be32 *)remote;
		tuple->ipv4.daddr = *(const __be32 *)local;
		tuple->ipv4.sport = bpf_htons(remote_port);
		tuple->ipv4.dport = bpf_htons(local_port);
		return sizeof(tuple->ipv4);
	}
	__builtin_memcpy(tuple->ipv6.saddr, remote, sizeof(tuple->ipv6.saddr));
	__builtin_memcpy(tuple->ipv6.daddr, local, sizeof(tuple->ipv6.daddr));
	tuple->ipv6.sport = bpf_htons(remote_port);
	tuple->ipv6.dport = bpf_htons(local_port);
	return sizeof(tuple->ipv6);
}

/* Whether a host socket at the packet's destination is connected to the packet's source. */
static __noinline bool is_of_connected_socket(struct __sk_buff *skb, const struct sl_packet *p)
{
	struct bpf_sock_tuple tuple = {};
	bool connected;
	struct bpf_sock *sk;
	__u32 size = write_tuple(&tuple, p->family, p->src, p->sport, p->dst, p->dport);

	if (p->proto == SL_UDP) {
		sk = bpf_sk_lookup_udp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
		if (!sk)
			return false;
		connected = sk->state == SL_SK_ESTABLISHED;
	} else {
		sk = bpf_skc_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
		if (!sk)
			return false;
		connected = sk->state != SL_SK_LISTEN && sk->state != SL_SK_CLOSE &&
			    sk->state != SL_SK_NEW_SYN_RECV;
	}
	bpf_sk_release(sk);
	return connected;
}

/* The direction of the packet in its nf_conntrack entry. */
#define SL_TRACKED_NOT 0
#define SL_TRACKED_REQUEST 1
#define SL_TRACKED_REPLY 2

static __noinline __u32 tracked_direction(struct __sk_buff *skb, const struct sl_packet *p)
{
	struct bpf_ct_opts opts = { .netns_id = BPF_F_CURRENT_NETNS, .l4proto = p->proto };
	struct bpf_sock_tuple tuple = {};
	struct nf_conn *ct;
	__u32 size;

	if (!cfg_conntrack)
		return SL_TRACKED_NOT;
	size = write_tuple(&tuple, p->family, p->src, p->sport, p->dst, p->dport);
	ct = bpf_skb_ct_lookup(skb, &tuple, size, &opts, sizeof(opts));
	if (!ct)
		return SL_TRACKED_NOT;
	bpf_ct_release(ct);
	return opts.dir == SL_CT_DIR_REPLY ? SL_TRACKED_REPLY : SL_TRACKED_REQUEST;
}

/* Whether nf_conntrack knows the packet's connection. */
static __always_inline bool is_tracked(struct __sk_buff *skb, const struct sl_packet *p)
{
	return tracked_direction(skb, p) != SL_TRACKED_NOT;
}

/* Whether the packet is in the reply direction of an nf_conntrack entry. */
static __always_inline bool is_tracked_reply(struct __sk_buff *skb, const struct sl_packet *p)
{
	return tracked_direction(skb, p) == SL_TRACKED_REPLY;
}

/*
 * Whether the packet can be an answer to the node. A packet from a pod can only be one if its
 * destination is an address of the node. Later fragments have no ports.
 */
static __always_inline bool may_be_answer(const struct sl_packet *p)
{
	if (p->fragment || begins(p) || (p->proto != SL_TCP && p->proto != SL_UDP))
		return false;
	return SL_FROM_OUTSIDE || slot_of_address(p->dst, p->family) == SL_SLOT_HOST;
}

/* Whether a packet to a frontend, for which no translation is known, is an answer to a connection
 * of the node.
 */
static __always_inline bool is_answer(struct __sk_buff *skb, const struct sl_packet *p)
{
	if (!may_be_answer(p))
		return false;
	return is_of_connected_socket(skb, p) || is_tracked_reply(skb, p);
}

/*
 * Like is_answer, but for a packet that has a translation: an earlier client with the same ports
 * may have left it. No client sends SYN+ACK. If a UDP socket of the host is connected to the
 * sender, it receives the packet; this is checked once a second.
 */
static __always_inline bool is_answer_by_now(struct __sk_buff *skb, const struct sl_packet *p,
					     bool fresh)
{
	const __u8 both = SL_TCP_SYN | SL_TCP_ACK;

	if (p->proto == SL_TCP)
		return (p->tcp_flags & both) == both && is_answer(skb, p);
	return !fresh && p->proto == SL_UDP && may_be_answer(p) && is_of_connected_socket(skb, p);
}

#endif
