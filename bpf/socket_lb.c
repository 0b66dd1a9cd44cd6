/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * Services for sockets. The service address of a call is replaced by a backend address before the
 * stack sees it: no packet to the service address exists, and no packet is translated. Calls that
 * return a peer's address return the requested one. The programs are attached to a cgroup and run
 * for the sockets that its processes have opened.
 */

#include <sluice/socket.h>

static __always_inline int ask4(struct bpf_sock_addr *ctx, bool connect)
{
	struct sl_choice c = { .family = 4, .port = bpf_ntohs((__u16)ctx->user_port) };
	int result;

	read_address4(ctx, c.addr);
	if (translate(ctx, &c, connect, &result))
		write_address4(ctx, c.addr, c.port);
	return result;
}

static __always_inline int ask6(struct bpf_sock_addr *ctx, bool connect)
{
	struct sl_choice c = { .port = bpf_ntohs((__u16)ctx->user_port) };
	int result;

	read_address6(ctx, c.addr, &c.family);
	if (translate(ctx, &c, connect, &result))
		write_address6(ctx, c.addr, c.port, c.family);
	return result;
}

static __always_inline int tell4(struct bpf_sock_addr *ctx)
{
	__u8 addr[16] __attribute__((aligned(8)));
	struct sl_sock_peer *peer;

	read_address4(ctx, addr);
	peer = peer_at(ctx, addr, 4);
	if (peer)
		write_address4(ctx, peer->asked, peer->asked_port);
	return SL_CALL_GOES_ON;
}

static __always_inline int tell6(struct bpf_sock_addr *ctx)
{
	__u8 addr[16] __attribute__((aligned(8))), family;
	struct sl_sock_peer *peer;

	read_address6(ctx, addr, &family);
	peer = peer_at(ctx, addr, family);
	if (peer)
		write_address6(ctx, peer->asked, peer->asked_port, family);
	return SL_CALL_GOES_ON;
}

SEC("cgroup/connect4") int sluice_connect4(struct bpf_sock_addr *ctx)
{
	return ask4(ctx, true);
}

SEC("cgroup/connect6") int sluice_connect6(struct bpf_sock_addr *ctx)
{
	return ask6(ctx, true);
}

SEC("cgroup/sendmsg4") int sluice_sendmsg4(struct bpf_sock_addr *ctx)
{
	return ask4(ctx, false);
}

SEC("cgroup/sendmsg6") int sluice_sendmsg6(struct bpf_sock_addr *ctx)
{
	return ask6(ctx, false);
}

SEC("cgroup/recvmsg4") int sluice_recvmsg4(struct bpf_sock_addr *ctx)
{
	return tell4(ctx);
}

SEC("cgroup/recvmsg6") int sluice_recvmsg6(struct bpf_sock_addr *ctx)
{
	return tell6(ctx);
}

SEC("cgroup/getpeername4") int sluice_getpeername4(struct bpf_sock_addr *ctx)
{
	return tell4(ctx);
}

SEC("cgroup/getpeername6") int sluice_getpeername6(struct bpf_sock_addr *ctx)
{
	return tell6(ctx);
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
