/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_SOCKET_H
#define SLUICE_SOCKET_H

/*
 * Sockets at their cgroup hooks: the endpoint that a socket belongs to, the address in a call, the
 * translations that a socket remembers, and how a call is refused.
 *
 * These programs run in process context, so they only use the stack and the socket's local
 * storage, never per-CPU memory. All of them run with the socket locked.
 */

#include <linux/bpf.h>
#include <linux/in6.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <sluice/affinity.h>
#include <sluice/compiler.h>
#include <sluice/service.h>

/* 1: translate sockets of namespaces that are not in sl_ns, too */
volatile const __u32 cfg_translate_all = 0;

/* Return values of the programs: the call continues, or fails with the error of bpf_set_retval. */
#define SL_CALL_GOES_ON 1
#define SL_CALL_FAILS 0

#define SL_ENOMEM 12
#define SL_ECONNREFUSED 111
#define SL_EHOSTUNREACH 113

#define SL_IPPROTO_TCP 6
#define SL_IPPROTO_UDP 17

/* Finds the endpoint that the socket belongs to, as a slot; SL_SLOT_NONE if its namespace is
 * unknown. False if the socket is not to be translated.
 */
static __always_inline bool find_owner(struct bpf_sock_addr *ctx, __u16 *slot)
{
	__u64 cookie = bpf_get_netns_cookie(ctx);
	struct sl_ns *ns = bpf_map_lookup_elem(&sl_ns, &cookie);

	if (!ns) {
		*slot = SL_SLOT_NONE;
		return cfg_translate_all;
	}
	*slot = ns->slot;
	return !(ns->flags & SL_NS_LEAVE);
}

/* Reads the address of an IPv6 call. An IPv4-mapped address becomes IPv4. */
static __always_inline void read_address6(struct bpf_sock_addr *ctx, __u8 *addr, __u8 *family)
{
	__u32 *word = (__u32 *)addr;
	__u32 a = ctx->user_ip6[0], b = ctx->user_ip6[1];
	__u32 c = ctx->user_ip6[2], d = ctx->user_ip6[3];

	if (!a && !b && c == bpf_htonl(0xffff)) {
		word[0] = d;
		word[1] = word[2] = word[3] = 0;
		*family = 4;
		return;
	}
	word[0] = a;
	word[1] = b;
	word[2] = c;
	word[3] = d;
	*family = 6;
}

static __always_inline void read_address4(struct bpf_sock_addr *ctx, __u8 *addr)
{
	__u32 *word = (__u32 *)addr;

	word[0] = ctx->user_ip4;
	word[1] = word[2] = word[3] = 0;
}

static __always_inline void write_address4(struct bpf_sock_addr *ctx, const __u8 *addr, __u16 port)
{
	ctx->user_ip4 = *(const __u32 *)addr;
	ctx->user_port = bpf_htons(port);
}

/* Writes the address of an IPv6 call. IPv4 is written as IPv4-mapped; the address already has the
 * prefix of such an address.
 */
static __always_inline void write_address6(struct bpf_sock_addr *ctx, const __u8 *addr, __u16 port,
					   __u8 family)
{
	const __u32 *word = (const __u32 *)addr;

	if (family == 4) {
		ctx->user_ip6[3] = word[0];
	} else {
		ctx->user_ip6[0] = word[0];
		ctx->user_ip6[1] = word[1];
		ctx->user_ip6[2] = word[2];
		ctx->user_ip6[3] = word[3];
	}
	ctx->user_port = bpf_htons(port);
}

static __always_inline int refuse(int error)
{
	bpf_set_retval(-error);
	return SL_CALL_FAILS;
}

/* Reads the client's address for affinity: the endpoint's address. The host's sockets, and
 * sockets of unknown namespaces, count as one client.
 */
static __always_inline void read_client(struct sl_choice *c, __u16 slot)
{
	__u32 at = slot;
	struct sl_endpoint *e;

	if (slot == SL_SLOT_HOST || slot == SL_SLOT_NONE)
		return;
	e = bpf_map_lookup_elem(&sl_ep, &at);
	if (!e)
		return;
	if (c->family == 4)
		*(__be32 *)c->client = e->ip4;
	else
		__builtin_memcpy(c->client, e->ip6, sizeof(c->client));
}

/* The front for local sockets at the address; 0 if it has none. */
static __always_inline __u32 find_front(const struct sl_choice *c, __u16 slot)
{
	bool loopback = is_loopback(c->addr, c->family);
	struct sl_fe *fe;

	/* every container has loopback addresses, but frontends there belong to the host */
	if (loopback && slot != SL_SLOT_HOST)
		return 0;
	fe = frontend_of(c, SL_FE_ADDRESS);
	if (fe)
		return fe->inside;
	if (!loopback && !is_own_address(c->addr, c->family))
		return 0;
	fe = frontend_of(c, SL_FE_NODE);
	return fe ? fe->inside : 0;
}

/*
 * Selects a member of the list. For UDP it is the highest-ranked member for the socket, so that
 * an unconnected socket stays with its backend while other backends are added and removed.
 */
static __always_inline __u32 next_by_socket(struct sl_choice *c, __u64 list)
{
	if (c->proto == SL_IPPROTO_UDP && list_count(list) <= SL_RENDEZVOUS)
		return (__u32)best_member(list, c);
	return member_by_hash(list, c->hash);
}

/*
 * Chooses a backend of a front: at random for TCP, by the socket for UDP. Returns 0, or the error
 * for the call. A call cannot be dropped silently; where a packet would be dropped, the call
 * fails with "no route to host". For source ranges, the host's sockets have the address 0.
 */
static __always_inline int choose(struct bpf_sock_addr *ctx, struct sl_choice *c, __u16 slot)
{
	struct sl_front *front = front_at(c->front);
	__u64 list;
	int i;

	if (!front)
		return SL_ECONNREFUSED;
	read_client(c, slot);
	c->limit = ~0ULL;
	if (c->proto == SL_IPPROTO_UDP)
		c->hash = scramble(bpf_get_socket_cookie(ctx));
	else
		c->hash = bpf_get_prandom_u32();
	if (front->timeout && list_count(READ_ONCE(front->list)) > SL_AFFINITY_MEMBERS) {
		__u64 *client = (__u64 *)c->client;

		c->hash = scramble(client[0] ^ scramble(client[1] + front->group));
	}
	for (i = 0; i < SL_SERVICE_TRIES; i++) {
		__u32 backend;

		list = READ_ONCE(front->list);
		if (list_flags(list) & SL_FRONT_SOURCES && !is_source(c))
			return SL_EHOSTUNREACH;
		if (!list_count(list))
			return list_flags(list) & SL_FRONT_DROP ? SL_EHOSTUNREACH : SL_ECONNREFUSED;
		backend = next_by_socket(c, list);
		if (has_affinity(front, list)) {
			if (choose_by_affinity(c, front, list, backend, slot))
				return 0;
		} else if (read_backend(c, backend)) {
			return 0;
		}
		c->hash = scramble(c->hash + 1);
	}
	return SL_ECONNREFUSED;
}

static __always_inline bool peer_is(const struct sl_sock_peer *p, const __u8 *addr, __u16 port,
				    __u8 family)
{
	return p->family == family && p->port == port && equal16(p->addr, addr);
}

static __always_inline void fill_peer(struct sl_sock_peer *p, const struct sl_choice *c,
				      const __u8 *asked, __u16 asked_port)
{
	__builtin_memcpy(p->addr, c->addr, sizeof(p->addr));
	__builtin_memcpy(p->asked, asked, sizeof(p->asked));
	p->port = c->port;
	p->asked_port = asked_port;
	p->family = c->family;
	p->gen = c->gen;
	p->front = c->front;
	p->backend = c->backend;
}

/*
 * Remembers a translation. A connection's translation replaces all others. For calls with an
 * explicit destination, the last SL_SOCKET_PEERS different backends are kept, each with the
 * address by which it was last requested; the backend of a connection keeps its address.
 */
static __always_inline bool remember(struct bpf_sock_addr *ctx, const struct sl_choice *c,
				     const __u8 *asked, __u16 asked_port, bool connect)
{
	struct sl_sock *s = bpf_sk_storage_get(&sl_sk, ctx->sk, 0, BPF_SK_STORAGE_GET_F_CREATE);
	__u32 i, next;

	if (!s)
		return false;
	s->cookie = bpf_get_socket_cookie(ctx);
	s->netns = bpf_get_netns_cookie(ctx);
	s->sport = (__u16)ctx->sk->src_port;
	s->proto = c->proto;
	if (connect) {
		s->connected = 1;
		for (i = 1; i < SL_SOCKET_PEERS; i++)
			s->peer[i].family = 0;
		s->next = 1;
		fill_peer(&s->peer[0], c, asked, asked_port);
		return true;
	}
	for (i = 0; i < SL_SOCKET_PEERS; i++) {
		if (peer_is(&s->peer[i], c->addr, c->port, c->family)) {
			/* a datagram does not change by which service the socket is connected */
			if (i || !s->connected)
				fill_peer(&s->peer[i], c, asked, asked_port);
			return true;
		}
	}
	next = s->next & (SL_SOCKET_PEERS - 1);
	if (!next && s->connected)
		next = 1; /* keep the peer of the connection */
	fill_peer(&s->peer[next], c, asked, asked_port);
	s->next = (next + 1) & (SL_SOCKET_PEERS - 1);
	return true;
}

/*
 * Remembers the translation of an MPTCP subflow for its MPTCP socket, too: connect runs the program
 * for the subflow, but getpeername runs it for the socket of the process.
 */
static __always_inline void remember_mptcp(struct bpf_sock_addr *ctx, const struct sl_choice *c,
					   const __u8 *asked, __u16 asked_port)
{
	struct mptcp_sock *mptcp;
	struct sl_sock *s;

	if (c->proto != SL_IPPROTO_TCP || !ctx->sk)
		return;
	mptcp = bpf_skc_to_mptcp_sock(ctx->sk);
	if (!mptcp)
		return;
	s = bpf_sk_storage_get(&sl_sk, mptcp, 0, BPF_SK_STORAGE_GET_F_CREATE);
	if (!s)
		return;
	s->proto = c->proto;
	s->connected = 1;
	fill_peer(&s->peer[0], c, asked, asked_port);
}

/* A connection to an address that is not a service deletes the translations of an earlier
 * connection.
 */
static __always_inline void forget(struct bpf_sock_addr *ctx)
{
	bpf_sk_storage_delete(&sl_sk, ctx->sk);
}

/*
 * Whether a TCP connection goes to a virtual IP that only services use, at a port without a
 * service. UDP sockets may also be connected to find out the route; therefore only their packets
 * are refused.
 */
static __always_inline bool has_no_such_port(const struct sl_choice *c)
{
	struct sl_ipcache where;

	if (c->proto != SL_IPPROTO_TCP || !is_of_services(c->addr, c->family) ||
	    slot_of_address(c->addr, c->family) != SL_SLOT_NONE)
		return false;
	where = ipcache_of(c->addr, c->family);
	return !where.node;
}

/*
 * Translates the address of a call, given by address, port and family of c. True if a backend was
 * chosen and remembered, and its address has to be written to the call. Otherwise *result is the
 * return value of the program.
 */
static __always_inline bool translate(struct bpf_sock_addr *ctx, struct sl_choice *c, bool connect,
				      int *result)
{
	__u8 asked[16] __attribute__((aligned(8)));
	__u16 asked_port = c->port, slot;
	int error;

	*result = SL_CALL_GOES_ON;
	c->proto = (__u8)ctx->protocol;
	if (ctx->protocol != SL_IPPROTO_TCP && ctx->protocol != SL_IPPROTO_UDP)
		return false;
	if (!find_owner(ctx, &slot))
		return false;
	c->front = find_front(c, slot);
	if (!c->front) {
		if (connect)
			forget(ctx);
		if (connect && has_no_such_port(c))
			*result = refuse(SL_ECONNREFUSED);
		return false;
	}
	__builtin_memcpy(asked, c->addr, sizeof(asked));
	error = choose(ctx, c, slot);
	if (!error && !remember(ctx, c, asked, asked_port, connect))
		error = SL_ENOMEM;
	if (!error && connect)
		remember_mptcp(ctx, c, asked, asked_port);
	if (error) {
		*result = refuse(error);
		return false;
	}
	return true;
}

/* The socket's translation to this backend address; NULL if it has none. */
static __always_inline struct sl_sock_peer *peer_at(struct bpf_sock_addr *ctx, const __u8 *addr,
						    __u8 family)
{
	struct sl_sock *s = bpf_sk_storage_get(&sl_sk, ctx->sk, 0, 0);
	__u16 port = bpf_ntohs((__u16)ctx->user_port);
	__u32 i;

	if (!s)
		return NULL;
	for (i = 0; i < SL_SOCKET_PEERS; i++)
		if (peer_is(&s->peer[i], addr, port, family))
			return &s->peer[i];
	return NULL;
}

#endif
