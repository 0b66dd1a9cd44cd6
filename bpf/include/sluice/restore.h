/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_RESTORE_H
#define SLUICE_RESTORE_H

/* Answers of backends on other nodes, which are addressed to this node: see transit.h. */

#include <sluice/fragment.h>
#include <sluice/node.h>
#include <sluice/peer.h>
#include <sluice/quote.h>
#include <sluice/rewrite.h>
#include <sluice/translate.h>

/* Whether the port may be claimed for an outside client. SCTP keeps the client's port, because
 * its checksum would have to be recomputed.
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

/* struct bpf_sock.state: established (UDP: connected), and listening */
#define SL_SOCKET_NONE 0
#define SL_SOCKET_ESTABLISHED 1
#define SL_SOCKET_LISTENS 10

/* The state of the socket that a tuple finds. There are two functions, because the verifier
 * rejects one load from the results of both kinds of lookups.
 */
static __noinline __u32 udp_socket_state(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
					 __u32 size)
{
	struct bpf_sock *sk = bpf_sk_lookup_udp(skb, tuple, size, BPF_F_CURRENT_NETNS, 0);
	__u32 state;

	if (!sk)
		return SL_SOCKET_NONE;
	state = sk->state;
	bpf_sk_release(sk);
	return state;
}

static __noinline __u32 tcp_socket_state(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
					 __u32 size)
{
	struct bpf_sock *sk = bpf_skc_lookup_tcp(skb, tuple, size, BPF_F_CURRENT_NETNS, 0);
	__u32 state;

	if (!sk)
		return SL_SOCKET_NONE;
	state = sk->state;
	bpf_sk_release(sk);
	return state;
}

/* The state of the host's socket that receives packets from remote to local. */
static __noinline __u32 socket_state(struct __sk_buff *skb, const struct sl_packet *p,
				     const struct sl_end *remote, const struct sl_end *local)
{
	struct bpf_sock_tuple tuple = {};
	__u32 size = write_tuple(&tuple, p->family, remote->addr, remote->port, local->addr,
				 local->port);

	if (p->proto == SL_UDP)
		return udp_socket_state(skb, &tuple, size);
	return tcp_socket_state(skb, &tuple, size);
}

/*
 * Whether the packet looks like an answer whose claim was evicted: it is from a pod of another
 * node, does not begin a connection, goes to a port for answers, and no socket of the node matches.
 * The stack would reset the connection. If the packet is dropped instead, the backend retransmits,
 * and the client's next packet restores the claim. Connections that other components translate have
 * no socket either, so packets from outside, and packets that nf_conntrack knows, are left to the
 * stack. UDP packets are left to the stack, too, because the first packet of a UDP flow looks like
 * an answer.
 */
static __always_inline bool has_no_nat_entry(struct __sk_buff *skb, const struct sl_packet *p)
{
	struct sl_end remote = { .port = p->sport }, local = { .port = p->dport };
	struct sl_ipcache where;

	if (p->dst_slot != SL_SLOT_HOST || p->proto != SL_TCP || !may_be_claimed(p) || begins(p))
		return false;
	where = ipcache_of(p->src, p->family);
	if (!where.node || is_node_identity(where.identity))
		return false;
	__builtin_memcpy(remote.addr, p->src, sizeof(remote.addr));
	__builtin_memcpy(local.addr, p->dst, sizeof(local.addr));
	return socket_state(skb, p, &remote, &local) == SL_SOCKET_NONE && !is_tracked(skb, p);
}

/*
 * Sends an answer to the client whose source was translated. The destination is changed here, the
 * source where the packet leaves the node. SL_CONTINUE: the packet is not such an answer. On
 * success it is left to the stack.
 */
__noinline enum sl_reason restore_destination(struct __sk_buff *skb, struct sl_packet *p)
{
	enum sl_reason reason;
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
	if (unlikely(!xl))
		xl = find_claimed(p->family, p->dport);
	if (!xl)
		return SL_CONTINUE;
	now = now_seconds();
	if (READ_ONCE(xl->last_s) != now)
		*(volatile __u32 *)&xl->last_s = now;
	redirect_to(p, xl->addr, xl->port, 0, SL_TRANSLATED_RESTORED);
	reason = check_origin(skb, p);
	if (reason)
		return reason;
	if (leads_fragments(p))
		lead_fragments(p, SL_LEAD_ON);
	return rewrite_destination(skb, p) ? SL_REASON_REWRITE_FAILED
					   : SL_REASON_FORWARDED_TO_STACK;
}

#endif
