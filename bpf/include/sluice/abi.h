/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ABI_H
#define SLUICE_ABI_H

/*
 * What the programs and the Go side share: the values of maps, the events and
 * the numbers in them. The Go types are generated from here. Every field has a
 * fixed width, padding is written out, sizes are asserted. A change of a map's
 * key or value changes the name of its pin, and with it the map.
 */

#include <linux/types.h>

#define SL_MAX_SLOTS 4096
#define SL_MAX_DEVICES 8192
#define SL_MAX_ADDRESSES 16384
#define SL_MAX_IPCACHE 65536
#define SL_MAX_REASONS 64
#define SL_EVENT_BYTES (1 << 20)

/* Slot 0 is the host. */
#define SL_SLOT_HOST 0
#define SL_SLOT_NONE 0xffff

/* Identities that the programs know by number. */
#define SL_ID_HOST 1
#define SL_ID_REMOTE_NODE 6

/* Policy tables with a fixed meaning. A zeroed word denies everything. */
#define SL_TABLE_DENY 0
#define SL_TABLE_ALLOW 1
#define SL_TABLE_PENDING 2

/* How a packet from another local pod reaches the endpoint. */
#define SL_DELIVER_PEER 1
#define SL_DELIVER_REDIRECT 2

/* sl_ipcache.flags: the node's own pod range, of which every address that is
 * in use has an endpoint.
 */
#define SL_IP_POD_RANGE 0x1

enum sl_direction {
	SL_EGRESS = 1, /* what an endpoint sends */
	SL_INGRESS = 2, /* what an endpoint receives */
};

/*
 * Why a packet was forwarded or dropped. Numbers are never reused: they are
 * read by a newer process from the counters of an older program. Forwarding
 * reasons lie below SL_FIRST_DROP, drops that send no event at the end.
 */
enum sl_reason {
	SL_CONTINUE = 0, /* undecided: the next step goes on */

	SL_FWD_PEER = 1, /* into another pod's namespace */
	SL_FWD_REDIRECT = 2, /* out of another pod's host end */
	SL_FWD_HOST = 3, /* to the own host */
	SL_FWD_OUTSIDE = 4, /* to the host's stack, for elsewhere */
	SL_FWD_FROM_STACK = 5, /* from the host's stack into the pod */
	SL_REPLY_ARP = 6, /* answered for the gateway */
	SL_REPLY_NDP = 7, /* answered for the gateway */
	SL_STACK_TTL = 8, /* to the stack, which answers time exceeded */
	SL_STACK_MTU = 9, /* to the stack, which answers too big, or fragments */

	SL_FIRST_DROP = 16,
	SL_DROP_NOT_IP = 16, /* neither IPv4, IPv6 nor ARP, or tagged */
	SL_DROP_NO_ENDPOINT = 17, /* the device leads to no slot */
	SL_DROP_MALFORMED = 18, /* a header is cut short or contradicts itself */
	SL_DROP_SPOOFED_MAC = 19, /* not the pod's Ethernet address */
	SL_DROP_SPOOFED_IP = 20, /* not the pod's address */
	SL_DROP_WRONG_MAC = 21, /* addressed to another Ethernet device */
	SL_DROP_SOURCE_ROUTE = 22, /* the packet chooses its own way */
	SL_DROP_EXT_HEADERS = 23, /* more IPv6 extension headers than we walk */
	SL_DROP_MARTIAN = 24, /* an address that is never on the wire */
	SL_DROP_LINK_LOCAL = 25, /* link-local traffic beyond the gateway */
	SL_DROP_TUNNEL_PORT = 26, /* would forge an identity */
	SL_DROP_POLICY_DENIED = 27, /* by the policy */
	SL_DROP_POLICY_PENDING = 28, /* the policy is not known yet */
	SL_DROP_POLICY_TABLE = 29, /* the table does not exist */
	SL_DROP_NO_ROUTE = 30, /* in the pod range, but nobody has it */
	SL_DROP_HAIRPIN = 31, /* the pod to itself */
	SL_DROP_WRONG_ADDRESS = 32, /* sent into a pod that has another address */
	SL_DROP_REWRITE = 33, /* the kernel refused to change the packet */
	SL_DROP_DELIVERY = 34, /* the endpoint says no way to deliver */

	SL_FIRST_QUIET = 48,
	SL_QUIET_ARP = 48, /* ARP for anything but the gateway */
	SL_QUIET_NDP = 49, /* neighbour discovery for anything but the gateway */
	SL_QUIET_MULTICAST = 50,
	SL_QUIET_BROADCAST = 51,
};

/* Value of sl_ep. */
struct sl_endpoint {
	__u64 pol; /* egress table, ingress table << 16, gen << 32 */
	__u32 ifindex; /* host end */
	__u32 identity;
	__be32 ip4; /* 0: none */
	__u16 mtu;
	__u8 deliver;
	__u8 flags;
	__u8 mac[6]; /* the pod's */
	__u8 hmac[6]; /* the host end's */
	__u8 pad[4];
	__u8 ip6[16]; /* zero: none */
	__u64 reserved;
};
_Static_assert(sizeof(struct sl_endpoint) == 64, "one cache line");

/* Key of sl_ip6. */
struct sl_addr6 {
	__u8 addr[16];
};

/* Keys of sl_ipc4 and sl_ipc6. */
struct sl_prefix4 {
	__u32 bits;
	__u8 addr[4];
};

struct sl_prefix6 {
	__u32 bits;
	__u8 addr[16];
};

/* Value of sl_ipc4 and sl_ipc6. */
struct sl_ipcache {
	__u32 identity;
	__u16 node;
	__u16 flags; /* SL_IP_... */
};
_Static_assert(sizeof(struct sl_ipcache) == 8, "replaced in one piece");

/* Value of sl_metrics, at reason << 1 | (direction - 1). */
struct sl_counter {
	__u64 packets;
	__u64 bytes; /* with Ethernet headers */
};

/* Value of sl_limits, at the reason. */
struct sl_limit {
	__u64 since; /* start of the window, ns */
	__u64 lost_total;
	__u32 sent; /* in this window */
	__u32 lost; /* since the last event */
};

/* Record of sl_events. */
struct sl_event {
	__u64 time; /* CLOCK_MONOTONIC, ns */
	enum sl_reason reason;
	enum sl_direction direction;
	__u32 lost; /* events of this reason and CPU left out before this one */
	__u32 ifindex;
	__u32 length;
	__u32 src_identity; /* 0: not determined, as for the next */
	__u32 dst_identity;
	__u32 rule; /* 0: none decided */
	__u16 src_slot; /* SL_SLOT_NONE: not local or not determined */
	__u16 dst_slot;
	__u16 ethertype; /* host order, as the ports */
	__u16 sport;
	__u16 dport; /* ICMP: type << 8 | code */
	__u8 src_mac[6];
	__u8 family; /* 0: addresses were not read; 4; 6 */
	__u8 proto;
	__u8 tcp_flags;
	__u8 pad[5];
	__u8 src[16]; /* IPv4: the first four bytes */
	__u8 dst[16];
};
_Static_assert(sizeof(struct sl_event) == 96, "read from the ring in Go");

#endif
