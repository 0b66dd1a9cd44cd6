/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * Lists the connected UDP sockets of a network namespace that a service has translated to a
 * backend. It runs when its iterator is read, once for each UDP socket of the namespace in which
 * the iterator was opened.
 */

#include <linux/bpf.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <sluice/compiler.h>
#include <sluice/service_maps.h>
#include <sluice/sock.h>

#define SL_AF_INET6 10

static __always_inline void copy_words(__be32 *to, const struct in6_addr *from)
{
	to[0] = from->in6_u.u6_addr32[0];
	to[1] = from->in6_u.u6_addr32[1];
	to[2] = from->in6_u.u6_addr32[2];
	to[3] = from->in6_u.u6_addr32[3];
}

static __always_inline void read_ends(struct sl_socket *s, const struct sock_common *sk)
{
	s->family = sk->skc_family;
	s->sport = bpf_htons(sk->skc_num);
	s->dport = sk->skc_dport;
	s->device = sk->skc_bound_dev_if;
	if (s->family == SL_AF_INET6) {
		copy_words(s->src, &sk->skc_v6_rcv_saddr);
		copy_words(s->dst, &sk->skc_v6_daddr);
	} else {
		s->src[0] = sk->skc_rcv_saddr;
		s->dst[0] = sk->skc_daddr;
	}
}

SEC("iter/udp") int sluice_list_sockets(struct bpf_iter__udp *ctx)
{
	struct udp_sock *udp = ctx->udp_sk;
	const struct sl_sock *storage;
	struct sl_socket s = {};

	if (!udp)
		return 0;
	storage = bpf_sk_storage_get(&sl_sk, udp, 0, 0);
	if (!storage || !storage->connected || !storage->peer[0].family)
		return 0;
	s.cookie = storage->cookie;
	s.front = storage->peer[0].front;
	s.backend = storage->peer[0].backend;
	s.backend_family = storage->peer[0].family;
	s.gen = storage->peer[0].gen;
	read_ends(&s, &udp->inet.sk.__sk_common);
	bpf_seq_write(ctx->meta->seq, &s, sizeof(s));
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
