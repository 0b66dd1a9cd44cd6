/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * TCP segments of redirected connections that enter the proxy namespace. Runs at the ingress hook
 * of its device. A new connection goes to the listener of the proxy, whatever its destination is.
 * The socket that the listener returns has a mark that names the set of rules and the client.
 *
 * If the policy of the client has changed, a segment may name another set than its socket. The
 * program then turns the segment into a reset: the socket ends, and the client opens a new
 * connection, which gets the new set.
 * If no rule redirects any more, the segment names SL_SET_HELD, and the socket keeps its set: a
 * connection cannot leave the proxy.
 */

#include <linux/if_ether.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <sluice/compiler.h>
#include <sluice/maps.h>
#include <sluice/tag.h>

#define SL_PACKET_HOST 0 /* PACKET_HOST of linux/if_packet.h */
#define SL_IP4_FRAGMENT 0x3fff /* more fragments, and the offset */
#define SL_TCP 6
#define SL_TCP_SYN 0x02
#define SL_TCP_RST 0x04
#define SL_TCP_ACK 0x10
#define SL_TCP_FLAGS 12 /* offset of the data offset and the flags */
#define SL_TCP_SUM 16 /* offset of the checksum */

/* The listeners have the loopback address and this port: no packet of a pod can have both. */
#define SL_LISTENER_PORT 1

/* States of sockets, as in struct bpf_sock */
#define SL_STATE_TIME_WAIT 6
#define SL_STATE_LISTEN 10

struct segment {
	struct bpf_sock_tuple tuple;
	struct bpf_sock_tuple listener;
	__u32 tcp; /* offset of the TCP header */
	__be16 flags; /* with the data offset */
};

/* Reads the ports and flags, which follow each other in a tuple as in the header. */
static __always_inline long read_tcp(struct __sk_buff *skb, struct segment *s, void *ports)
{
	return bpf_skb_load_bytes(skb, s->tcp, ports, 4) ||
	       bpf_skb_load_bytes(skb, s->tcp + SL_TCP_FLAGS, &s->flags, sizeof(s->flags));
}

/* Reads a segment. Returns false for other packets. */
static __always_inline bool parse4(struct __sk_buff *skb, struct segment *s)
{
	struct iphdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.protocol != SL_TCP ||
	    ip.frag_off & bpf_htons(SL_IP4_FRAGMENT))
		return false;
	s->tcp = ETH_HLEN + ip.ihl * 4;
	s->tuple.ipv4.saddr = ip.saddr;
	s->tuple.ipv4.daddr = ip.daddr;
	if (read_tcp(skb, s, &s->tuple.ipv4.sport))
		return false;
	s->listener.ipv4 = s->tuple.ipv4;
	s->listener.ipv4.daddr = bpf_htonl(0x7f000001);
	s->listener.ipv4.dport = bpf_htons(SL_LISTENER_PORT);
	return true;
}

static __always_inline bool parse6(struct __sk_buff *skb, struct segment *s)
{
	struct ipv6hdr ip;

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &ip, sizeof(ip)) || ip.nexthdr != SL_TCP)
		return false;
	s->tcp = ETH_HLEN + sizeof(ip);
	__builtin_memcpy(s->tuple.ipv6.saddr, &ip.saddr, sizeof(s->tuple.ipv6.saddr));
	__builtin_memcpy(s->tuple.ipv6.daddr, &ip.daddr, sizeof(s->tuple.ipv6.daddr));
	if (read_tcp(skb, s, &s->tuple.ipv6.sport))
		return false;
	s->listener.ipv6 = s->tuple.ipv6;
	__builtin_memset(s->listener.ipv6.daddr, 0, sizeof(s->listener.ipv6.daddr));
	s->listener.ipv6.daddr[3] = bpf_htonl(1);
	s->listener.ipv6.dport = bpf_htons(SL_LISTENER_PORT);
	return true;
}

/*
 * Gives the segment to the listener. If it does not begin a connection, the listener resets it: the
 * stack itself could not, because it sends no reset from an address that is not its own.
 */
static __always_inline int give_to_listener(struct __sk_buff *skb, struct segment *s, __u32 size)
{
	struct bpf_sock *sk;
	long err = -1;

	sk = bpf_skc_lookup_tcp(skb, &s->listener, size, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return TC_ACT_OK;
	if (sk->state == SL_STATE_LISTEN)
		err = bpf_sk_assign(skb, sk, 0);
	bpf_sk_release(sk);
	return err ? TC_ACT_SHOT : TC_ACT_OK;
}

/* Makes the segment a reset. */
static __always_inline int reset(struct __sk_buff *skb, const struct segment *s)
{
	__be16 flags = s->flags | bpf_htons(SL_TCP_RST);

	if (bpf_l4_csum_replace(skb, s->tcp + SL_TCP_SUM, s->flags, flags, sizeof(flags)) ||
	    bpf_skb_store_bytes(skb, s->tcp + SL_TCP_FLAGS, &flags, sizeof(flags), 0))
		return TC_ACT_SHOT;
	return TC_ACT_OK;
}

/* Whether the rule set or client in a segment differs from the mark of its socket. */
static __always_inline bool is_stale(const struct bpf_sock *sk, __u32 mark)
{
	if (!sk || sk->state == SL_STATE_LISTEN)
		return false;
	if ((mark & 0xffff) == SL_SET_HELD)
		return sk->mark >> 16 != mark >> 16;
	return sk->mark != mark;
}

/* size is the size of the tuples. */
static __always_inline int deliver(struct __sk_buff *skb, struct segment *s, __u32 size,
				   const struct sl_tag *tag, __u32 mark)
{
	bool known = false, stale = false, begins = s->flags & bpf_htons(SL_TCP_SYN);
	struct bpf_sock *sk;

	sk = bpf_skc_lookup_tcp(skb, &s->tuple, size, BPF_F_CURRENT_NETNS, 0);
	if (sk) {
		/* after TIME_WAIT begins, a new connection may use the same addresses and ports */
		known = sk->state != SL_STATE_LISTEN &&
			!(sk->state == SL_STATE_TIME_WAIT && begins);
		if (tag->direction == SL_TAG_OF_INITIATOR)
			stale = is_stale(bpf_sk_fullsock(sk), mark);
		bpf_sk_release(sk);
	}
	if (stale)
		return reset(skb, s);
	if (known)
		return TC_ACT_OK;
	/* a server never opens a connection to the proxy */
	if (tag->direction != SL_TAG_OF_INITIATOR && begins && !(s->flags & bpf_htons(SL_TCP_ACK)))
		return TC_ACT_SHOT;
	return give_to_listener(skb, s, size);
}

SEC("tc") int sluice_into_proxy(struct __sk_buff *skb)
{
	struct segment s = {};
	struct sl_tag tag;
	__u32 mark;

	if (bpf_skb_load_bytes(skb, 0, &tag, sizeof(tag)) || tag.local != 2 ||
	    tag.version != SL_TAG_VERSION)
		return TC_ACT_SHOT;
	/* the type by the Ethernet address of the tag: for another host */
	if (bpf_skb_change_type(skb, SL_PACKET_HOST))
		return TC_ACT_SHOT;
	mark = (__u32)bpf_ntohs(tag.endpoint) << 16 | bpf_ntohs(tag.set);
	skb->mark = mark;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		if (parse4(skb, &s))
			return deliver(skb, &s, sizeof(s.tuple.ipv4), &tag, mark);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		if (parse6(skb, &s))
			return deliver(skb, &s, sizeof(s.tuple.ipv6), &tag, mark);
	}
	return TC_ACT_SHOT;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
