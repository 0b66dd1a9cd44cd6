/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_ABI_H
#define SLUICE_ABI_H

/*
 * Types shared by the programs and the Go side: keys and values of maps, events and their
 * constants. The Go types are generated from this file. Every field has a fixed width, padding is
 * explicit, and sizes are asserted. If the layout of a key or value changes, the map gets another
 * pin name, and is created anew. Renaming a field changes nothing.
 */

#include <linux/types.h>

#include <sluice/describe.h>
#include <sluice/reason.h>
#include <sluice/service_abi.h>

#define SL_MAX_SLOTS 4096
#define SL_MAX_DEVICES 8192
#define SL_MAX_ADDRESSES 16384
#define SL_MAX_IPCACHE 524288
#define SL_MAX_REASONS 256
#define SL_MAX_TABLES 4096
#define SL_MAX_PORT_NODES 16384
#define SL_MAX_CLASSES 65536
#define SL_MAX_RULES 262144
#define SL_MAX_PEERS 262144
#define SL_MAX_BLOCKS 65536
#define SL_MAX_NODE_CLASSES 32768
/* cluster-wide identities, then node-local identities from 0xff0000 on */
#define SL_MAX_IDENTITIES (65536 + 4096)
#define SL_MAX_CT4 131072
#define SL_MAX_CT6 65536
#define SL_MAX_REVOKED 12288 /* per family; both maps together take 3 MiB */
#define SL_MAX_FRAGMENTS 8192
#define SL_MAX_POD_FRAGMENTS 4096
#define SL_ADDRESS_EPOCHS 4096
#define SL_EVENT_BYTES (1 << 20)
#define SL_MAX_PROGRAMS 8
#define SL_MAX_NODES 16384
#define SL_MAX_NODE_ADDRESSES 16384

/* Slot 0 is the local host. */
#define SL_SLOT_HOST 0
#define SL_SLOT_NONE 0xffff

/* Well-known identities that the programs test for. */
#define SL_ID_HOST 1
#define SL_ID_REMOTE_NODE 6
#define SL_ID_KUBE_APISERVER 7 /* a remote node too */
#define SL_NODE_LOCAL 0xff0000 /* the first node-local identity */

/* Reserved policy tables. An all-zero policy entry selects SL_TABLE_DENY. */
#define SL_TABLE_DENY 0
#define SL_TABLE_ALLOW 1
#define SL_TABLE_PENDING 2
#define SL_TABLE_FIRST 16 /* the first table that is compiled from a policy */

/* How a packet from another local pod is delivered to the endpoint. */
#define SL_DELIVER_PEER 1
#define SL_DELIVER_REDIRECT 2

/*
 * sl_ipcache.flags: the prefix is the local node's pod CIDR. Every address of the prefix that is in
 * use has an endpoint.
 */
#define SL_IP_POD_RANGE 0x1
/* an address outside of all nodes that the cluster knows; no program reads this flag */
#define SL_IP_OUTSIDE 0x2
/* an address of another node; packets to it go through the host's stack */
#define SL_IP_BY_STACK 0x4
/* a device address of another node; requests for a service may arrive from it outside the tunnel */
#define SL_IP_OF_DEVICE 0x8

/* Flags in the upper 16 bits of sl_node.way4 and way6 */
#define SL_WAY_OVERLAY 0x1 /* through the tunnel */
#define SL_WAY_UNDERLAY6 0x2 /* the tunnel's outer packets are IPv6 */
#define SL_WAY_HOP 0x4 /* native routing; the node itself is the next hop */
#define SL_WAY_LOOKUP 0x8 /* native routing; the kernel's routing table gives the next hop */
/* element 0 only, without SL_WAY_OVERLAY: the cluster uses native routing */
#define SL_WAY_NATIVE 0x10
#define SL_WAY_PIECES 0x20 /* routers may fragment the tunnel's outer packets */
/* element 0 only, with SL_WAY_NATIVE: packets between pods of two nodes go through the stack */
#define SL_WAY_STACK 0x40

/* 16-bit fields of way6 of element 0 of sl_node, from the lowest; the IPv6 address follows the
 * IPv4 address.
 */
#define SL_SOURCE_OVERLAY 0 /* source of packets into the tunnel */
#define SL_SOURCE_UPLINK 2 /* source of natively routed packets */

/* sl_endpoint.flags */
#define SL_EP_AUDIT 0x1 /* audit mode: packets that policy would deny pass and are reported */

/* sl_endpoint.state; programs change it only by atomic OR and AND */
#define SL_EP_NO_PICK_UP 0x1 /* do not pick up connections: revoked ones may lack a record */

/* Rule numbers that mean "no rule" in the value of a port interval: bits 30..16 hold the Admin
 * rule, bits 15..0 the best rule of the other tiers; bit 31 marks a child node.
 */
#define SL_NO_ADMIN 0x7fff
#define SL_NO_REST 0xffff
#define SL_CHILD 0x80000000
#define SL_FANOUT 16
#define SL_DEPTH 3

/* sl_table.flags */
#define SL_TF_DEFAULT_ALLOW 0x1 /* allow peers that no rule matches */
#define SL_TF_HOST_ALLOW 0x2 /* allow the local node unless a rule denies it */
#define SL_TF_ADDRESSES 0x4 /* the table has prefix rules: look the peer's address up, too */

/* Kinds of peers: indices of sl_table.def_class. */
enum sl_kind {
	SL_KIND_IN_CLUSTER = 0,
	SL_KIND_WORLD4 = 1,
	SL_KIND_WORLD6 = 2,
	SL_KIND_HOST = 3,
	SL_KIND_REMOTE_NODE = 4,
	SL_KIND_KUBE_APISERVER = 5,
	SL_KIND_UNKNOWN = 6,
	SL_KIND_OTHER = 7,
	SL_KINDS = 8,
};

/* Scopes of peers: indices of the address classes. */
enum sl_scope {
	SL_SCOPE_CLUSTER = 0,
	SL_SCOPE_NODE = 1,
	SL_SCOPE_OUTSIDE = 2,
	SL_SCOPES = 3,
};

/*
 * Value of sl_id, one 32-bit entry: identity class in bits 15..0, kind in bits 18..16, scope in
 * bits 25..24, SL_ID_KNOWN in bit 31. An entry of 0 means that the identity is unknown to this
 * node.
 */
#define SL_ID_KIND_SHIFT 16
#define SL_ID_SCOPE_SHIFT 24
#define SL_ID_KNOWN 0x80000000

/* Action of a rule: sl_rule.action. */
enum sl_action {
	SL_ACTION_DENY = 0,
	SL_ACTION_REDIRECT = 1,
	SL_ACTION_ALLOW = 2,
	SL_ACTION_PASS = 3,
};

/* The source of one side's verdict. */
enum sl_by {
	SL_BY_NOBODY = 0, /* the side was not evaluated */
	SL_BY_RULE = 1,
	SL_BY_DEFAULT = 2,
	SL_BY_HOST_ALLOW = 3,
	SL_BY_UNKNOWN_IDENTITY = 4,
	SL_BY_TABLE = 5, /* a reserved table */
};

/* Type of an event. */
enum sl_event_type {
	SL_EVENT_DROP = 1,
	SL_EVENT_VERDICT = 2, /* a connection was evaluated */
	SL_EVENT_CLOSED = 3, /* a connection has ended */
};

enum sl_direction {
	SL_EGRESS = 1, /* sent by the endpoint */
	SL_INGRESS = 2, /* received by the endpoint */
};

_Static_assert(SL_REASONS <= SL_MAX_REASONS, "each reason has its cells");

/*
 * In sl_endpoint.pol: the endpoint's identity is the field "second". One store of pol changes the
 * identity together with the tables and the epoch.
 */
#define SL_POL_SECOND 0x8000

/* Keys and values of a single word. */
typedef __u32 sl_endpoint_id SL_BITS("endpoint@0:32=endpoint"); /* the slot */
typedef __u32 sl_ifindex SL_BITS("device@0:32");
typedef __u32 sl_node_id SL_BITS("node@0:32=node");
typedef __u32 sl_identity_index SL_AS("identity-index");
typedef __u32 sl_identity_word
	SL_BITS("class@0:16 kind@16:3=enum:sl_kind scope@24:2=enum:sl_scope known@31");
typedef __u32 sl_class_nr SL_BITS("class@0:32");
typedef __u32 sl_root_nr SL_BITS("root@0:32");
typedef __u32 sl_ports_word SL_BITS("sport@16:16 dport@0:16");
typedef __u32 sl_cell_index SL_BITS("@1:31=enum:sl_reason @0:1=egress|ingress");
typedef __u32 sl_reason_index SL_AS("enum:sl_reason");
typedef __u32 sl_stat_index SL_AS("enum:sl_ct_stat");
typedef __u32 sl_rate_index SL_AS("answers-to-pods|answers-outside|errors-too-big|errors-outside");
typedef __u32 sl_budget_index SL_BITS("endpoint@1:31=endpoint @0:1=IPv4|IPv6");
typedef __u32 sl_bound_index SL_AS(
	"translations-ipv4|translations-ipv6|fragments|affinity-ipv4|affinity-ipv6|events|"
	"answers|too-big");
typedef __u32 sl_share_index SL_BITS("endpoint@0:32=endpoint");
typedef __u32 sl_proxy_kind SL_AS("-|dns|http|tls|listener");

/* Value of sl_ep. */
struct sl_endpoint {
	/* egress table, SL_POL_SECOND, ingress table << 16, epoch << 32 */
	__u64 pol SL_BITS("egress@0:15 second@15 ingress@16:16 epoch@32:32");
	__u32 ifindex; /* host end */
	__u32 identity;
	__be32 ip4; /* 0: none */
	__u16 mtu;
	__u8 deliver SL_AS("-|peer|redirect");
	__u8 flags SL_BITS("audit@0");
	__u8 mac[6]; /* of the pod's device */
	__u8 hmac[6]; /* of the host end */
	__u8 second[4] SL_AS("number"); /* identity while SL_POL_SECOND is set */
	__u8 ip6[16]; /* zero: none */
	__u64 state SL_BITS("no-pick-up@0"); /* SL_EP_NO_PICK_UP */
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
	__u16 node SL_AS("node");
	__u16 flags SL_BITS("pod-range@0 outside@1 by-stack@2 of-device@3"); /* SL_IP_... */
};
_Static_assert(sizeof(struct sl_ipcache) == 8, "replaced in one piece");

#define SL_WAY_BITS                                                         \
	SL_PART("device@0:32 mtu@32:16 overlay@48 underlay-ipv6@49 hop@50 " \
		"lookup@51 native@52 pieces@53 stack@54")

/*
 * Value of sl_node, at the node ID of another node. way4 and way6 tell how packets to the node's
 * pods travel; 0: there is no route to the node. Each is written by one aligned 64-bit store: the
 * device that the packets leave by, the MTU << 32 and the SL_WAY_ flags << 48. The node's addresses
 * are written before anything refers to the node ID, and never change.
 *
 * Element 0 is the local node. Its way4 holds the tunnel device and how the node's own packets
 * travel. Its way6 holds indices into sl_own, plus 1, of the source addresses for packets to
 * backends on other nodes, 16 bits each: SL_SOURCE_....
 */
struct sl_node {
	__u64 way4 SL_WAY_BITS; /* for IPv4 packets */
	__u64 way6 SL_WAY_BITS;
	__u8 ip6[16]; /* where the node is reached; zero: no IPv6 address */
	__be32 ip4; /* where the node is reached; 0: no IPv4 address */
	__u8 pad[28];
};
_Static_assert(sizeof(struct sl_node) == 64, "one cache line");

/*
 * Value of sl_direct, at the node ID of another node: the path of tunnel packets that the programs
 * encapsulate and decapsulate themselves, without the tunnel device. One aligned 64-bit store
 * writes the uplink and, << 32, the IPv4 address of the next hop; 0: packets go through the tunnel
 * device. The local address is written before that store.
 *
 * Element 0 is the local node. Its hop is the time until which the other elements are valid,
 * CLOCK_MONOTONIC in ns. The datapath extends this time while it follows the kernel's routes. Its
 * ports are the range of the outer source ports.
 */
struct sl_direct {
	__u64 hop SL_BITS("device@0:32 next-hop@32:32");
	__be32 local; /* source of packets to the node, and destination of packets from it */
	__u32 ports SL_BITS("lowest@0:16 highest@16:16");
};
_Static_assert(sizeof(struct sl_direct) == 16, "no padding");

/* Key of sl_node_addr; the value is the node ID. */
struct sl_node_addr {
	__u8 addr[16] SL_ADDR("family=family"); /* IPv4: the first four bytes */
	__u32 family; /* 4 or 6 */
};
_Static_assert(sizeof(struct sl_node_addr) == 20, "no padding");

/* Value of sl_metrics, at index reason << 1 | (direction - 1). */
struct sl_counter {
	__u64 packets;
	__u64 bytes; /* with Ethernet headers */
};

/* Value of sl_limits, at index reason. */
struct sl_limit {
	__u64 since SL_AS("hidden"); /* start of the window, ns */
	__u64 lost_total;
	__u32 common SL_AS("hidden"); /* sent in this window, beyond the guarantees of endpoints */
	__u32 lost; /* since the last event */
	__u32 outside SL_AS("hidden"); /* sent in this window, of packets of no endpoint */
	__u32 pad SL_AS("hidden");
};
_Static_assert(sizeof(struct sl_limit) == 32, "no implicit padding");

/* Cells of sl_rate; see rate.h. */
#define SL_RATE_ANSWERS_TO_PODS 0
#define SL_RATE_ANSWERS_OUTSIDE 1
#define SL_RATE_TOO_BIG 2
#define SL_RATE_ERRORS_OUTSIDE 3
#define SL_MAX_RATES 8

/* Value of sl_rate. */
struct sl_rate {
	__u64 since SL_AS("hidden"); /* start of the window, ns */
	__u64 refused; /* since the map was made */
	__u32 given SL_AS("hidden"); /* in this window */
	__u32 common SL_AS("hidden"); /* part of given, beyond the guarantees */
	__u32 takers SL_AS("hidden"); /* endpoints that used the rate in this window */
	__u32 last_takers SL_AS("hidden"); /* endpoints that used it in the window before */
};
_Static_assert(sizeof(struct sl_rate) == 32, "no padding");

#define SL_LIMIT_KINDS 8

/*
 * Value of sl_ep_limits, at the slot: how many events of each kind the endpoint has caused in the
 * current second. The upper half holds the second. Two reasons count as the same kind if they are
 * equal modulo SL_LIMIT_KINDS.
 */
struct sl_ep_limit {
	__u64 sent[SL_LIMIT_KINDS] SL_BITS("@0:32 second@32:32");
};
_Static_assert(sizeof(struct sl_ep_limit) == 64, "one cache line");

/*
 * Beyond the guarantees, each CPU may send the events of this many endpoints, and as many again for
 * packets without an endpoint. The guarantees of all endpoints together are as many again.
 */
#define SL_EVENT_SHARERS 8

/*
 * Value of sl_table: one direction of one policy. The whole element is written before any endpoint
 * refers to the table. Afterwards only the three 64-bit fields with bases and counts may change,
 * each by one aligned store, when the table grows.
 */
struct sl_table {
	__u32 peer_set; /* selects the table's keys in sl_peer */
	__u32 cidr_set; /* selects the table's keys in sl_cidr4 and sl_cidr6; 0: none */
	__u32 class_base; /* index in sl_class of class 0 */
	__u32 rule_base; /* index in sl_rule of rule 1 */
	__u16 n_class;
	__u16 n_rule;
	__u16 flags SL_BITS("default-allow@0 host-allow@1 addresses@2"); /* SL_TF_... */
	__u16 pad;
	__u16 def_class[SL_KINDS]; /* class of peers without an entry in sl_peer */
	__u16 addr_def[SL_SCOPES]; /* class of addresses in no prefix */
	__u16 pad2[9];
};
_Static_assert(sizeof(struct sl_table) == 64, "one cache line");

/* Key of sl_peer; the value is the peer class. */
struct sl_peer_key {
	__u32 peer_set;
	__u32 node_class;
};

/* Keys of sl_cidr4 and sl_cidr6. */
struct sl_cidr_key4 {
	__u32 bits; /* 32 for the set, plus the length of the prefix */
	__be32 set SL_AS("be32");
	__u8 addr[4];
};

struct sl_cidr_key6 {
	__u32 bits;
	__be32 set SL_AS("be32");
	__u8 addr[16];
};

/* Value of sl_cidr4 and sl_cidr6. */
struct sl_cidr {
	__u16 class[SL_SCOPES];
	__u16 flags;
};
_Static_assert(sizeof(struct sl_cidr) == 8, "replaced in one piece");

/*
 * Value of sl_ports: sorted intervals. A packet belongs to the first interval whose hi is not below
 * the packet's protocol and port. Unused intervals repeat the last one.
 */
struct sl_port_node {
	__u32 hi[SL_FANOUT] SL_BITS("proto@16:16 port@0:16");
	__u32 val[SL_FANOUT] SL_BITS("child@31 admin@16:15=unless:32767 rule@0:16=unless:65535");
};
_Static_assert(sizeof(struct sl_port_node) == 128, "two cache lines");

/* sl_rule.flags of a redirect: the number of its set of layer 7 rules (0: none), and whether
 * packets pass while the proxy is unavailable. */
#define SL_RULE_SET 0xffff
#define SL_RULE_PASSES_AWAY 0x10000

/* Value of sl_rule, at index rule_base + number - 1. */
struct sl_rule {
	__u8 action SL_AS("enum:sl_action"); /* enum sl_action */
	__u8 tier SL_AS("admin|normal|isolation|baseline");
	__u16 redirect SL_AS("-|dns|http|tls|listener"); /* kind of proxy */
	__u32 flags SL_BITS("set@0:16 passes-away@16"); /* SL_RULE_... */
};
_Static_assert(sizeof(struct sl_rule) == 8, "one word");

/*
 * Kinds of proxies: sl_rule.redirect, and indices of sl_proxy and sl_proxy_beat. The HTTP proxy
 * takes TCP connections only, so its index of sl_proxy has its proxy namespace. It evaluates the
 * server names of TLS, too.
 */
#define SL_PROXY_DNS 1
#define SL_PROXY_HTTP 2
#define SL_PROXY_TLS 3
#define SL_MAX_PROXIES 8

/* Index of sl_proxy for the proxy namespace, to which the DNS proxy's TCP connections go. */
#define SL_PROXY_DNS_TCP 5

/* sl_proxy.state */
#define SL_PROXY_AWAY 0
#define SL_PROXY_ATTACHED 1

/*
 * Value of sl_proxy. The datapath changes device and state by one 64-bit store; programs change the
 * other fields, by which endpoints share the device's queue: see proxy.h. A device of 0 means that
 * no proxy of the kind was ever attached.
 */
struct sl_proxy {
	__u32 device; /* the TAP device, or the node's end of the proxy namespace's device */
	__u32 state SL_AS("away|attached"); /* SL_PROXY_... */
	__u64 window SL_AS("hidden"); /* heartbeat at which the window began */
	__u32 given SL_AS("hidden"); /* packets in this window */
	__u32 common SL_AS("hidden"); /* part of given, beyond the guarantees */
	__u32 takers SL_AS("hidden"); /* endpoints with packets in this window */
	__u32 last_takers SL_AS("hidden"); /* endpoints with packets in the window before */
};
_Static_assert(sizeof(struct sl_proxy) == 32, "no padding");

/* Value of sl_proxy_taken and sl_http_taken, at the slot: how many packets for a proxy the endpoint
 * has sent in a window. */
struct sl_proxy_taken {
	__u64 packets SL_BITS("@0:32"); /* upper half: the window */
};

/* The queue of a TAP device, in packets, and how many packets may enter it between two heartbeats
 * of the proxy. The queue holds the packets of two such windows, even with new endpoints.
 */
#define SL_PROXY_QUEUE 4096
#define SL_PROXY_WINDOW (SL_PROXY_QUEUE / 4)

/* Values of sl_class_key and sl_table_key, which no program reads. They identify the identity
 * classes and tables for a restarted datapath process that adopts the maps.
 */
struct sl_class_key {
	__u8 key[16] SL_AS("hex"); /* zero: the number is free */
};

struct sl_table_key {
	__u8 hash[32] SL_AS("hex"); /* zero: the number is free */
};

/*
 * Keys of sl_ct4 and sl_ct6. The lower address comes first; if the addresses are equal, the lower
 * port comes first. For ICMP echo both ports hold the identifier.
 */
struct sl_ct_key4 {
	__be32 lo SL_ADDR("port=plo");
	__be32 hi SL_ADDR("port=phi");
	__u16 plo;
	__u16 phi;
	__u8 proto;
	__u8 zone SL_AS("-|transit|asked"); /* SL_ZONE_... */
	__u16 pad;
};
_Static_assert(sizeof(struct sl_ct_key4) == 16, "no padding");

struct sl_ct_key6 {
	__u8 lo[16] SL_ADDR("port=plo");
	__u8 hi[16] SL_ADDR("port=phi");
	__u16 plo;
	__u16 phi;
	__u8 proto;
	__u8 zone SL_AS("-|transit|asked");
	__u16 pad;
};
_Static_assert(sizeof(struct sl_ct_key6) == 40, "no padding");

#define SL_ZONE_POD 0 /* connection of a local pod or the local host */
/*
 * A connection between an outside client and a backend on another node. A service of this node has
 * translated it; no policy of this node applies to it.
 */
#define SL_ZONE_TRANSIT 1
/*
 * Record of the host address that a pod has sent a UDP request to: see asked.h. The host's address
 * in the key is 0.
 */
#define SL_ZONE_ASKED 2

/* sl_ct.flags */
#define SL_CT_ORIG_LO 0x0001 /* the end with the lower address is the initiator */
#define SL_CT_SEEN_REPLY 0x0002
#define SL_CT_FIN_I 0x0004 /* the initiator has sent FIN (SCTP: SHUTDOWN) */
#define SL_CT_FIN_R 0x0008
#define SL_CT_RST 0x0010 /* either end has sent RST (SCTP: ABORT), and nothing after it */
#define SL_CT_VIA_STACK 0x0020 /* the host's stack forwards its packets */
/* a rule redirects the connection, or has redirected it before: each packet is evaluated */
#define SL_CT_PROXY 0x0040
#define SL_CT_HAIRPIN 0x0080
#define SL_CT_PICKED_UP 0x0100 /* picked up in mid-flow */
#define SL_CT_CLOSED_SENT 0x0200 /* its end was reported */
#define SL_CT_BY_RESPONDER 0x0400 /* it was picked up from a packet of the responder */
#define SL_CT_UNORIENTED 0x0800 /* picked up; either end may be the initiator */
#define SL_CT_ESTABLISHED 0x1000 /* both ends have taken part: see establishes() */
#define SL_CT_REVOKED 0x2000 /* a policy has terminated it */
#define SL_CT_RST_R 0x4000 /* with SL_CT_RST: the responder sent it */
#define SL_CT_ASKS 0x8000 /* the record of SL_ZONE_ASKED has its responder: see asked.h */
/* begun outside; a later connection may replace it in its ring: see ring.h */
#define SL_CT_IN_RING 0x10000
/* The connection has ended, and no longer counts against its endpoint's share: see answers.h,
 * budget.h. */
#define SL_CT_RETURNED 0x20000
/* UDP: packets of the connection go through the tunnel device, because one was large: see
 * from_underlay.c */
#define SL_CT_BY_DEVICE 0x40000
/* TCP, with SL_CT_PROXY: the proxy ends it. Without a rule that redirects, its segments still go to
 * the proxy. Such a connection has no position in a ring.
 */
#define SL_CT_HELD 0x80000
/* With SL_CT_HELD: the HTTP proxy ends it, otherwise the DNS proxy. */
#define SL_CT_HELD_HTTP 0x100000
#define SL_CT_HELD_BITS (SL_CT_HELD | SL_CT_HELD_HTTP)
/*
 * bits 31..19, without SL_CT_PROXY: the position in its ring; 0: unknown, because an earlier
 * version created the entry
 */
#define SL_CT_RING_SHIFT 19
#define SL_CT_BELOW_RING ((1 << SL_CT_RING_SHIFT) - 1)
#define SL_CT_RING_POSITIONS ((1 << (32 - SL_CT_RING_SHIFT)) - 1)

/*
 * In the upper half of sl_ct.epochs: a CPU is changing the entry; the lower half holds its number.
 */
#define SL_EPOCHS_BUSY 0xffffffff
/* Replaces the epoch of an entry that was copied while a CPU was changing it. */
#define SL_EPOCH_NONE 0xfffffffe

/*
 * There are two layouts of connection entries: the current one, and the one of the previous
 * version, from which the programs migrate entries (previous.h). A test compiles the programs
 * with the layouts swapped to test an upgrade and a downgrade.
 */
#ifdef SL_SWAP_LAYOUTS
#define SL_LAYOUT_NOW sl_ct_prev
#define SL_LAYOUT_BEFORE sl_ct
#else
#define SL_LAYOUT_NOW sl_ct
#define SL_LAYOUT_BEFORE sl_ct_prev
#endif

#define SL_WHERE_BITS                                                                  \
	SL_BITS("initiator-endpoint@48:16=endpoint responder-endpoint@32:16=endpoint " \
		"initiator-address-epoch@16:16 responder-address-epoch@0:16")

#define SL_CT_FLAG_BITS                                                                           \
	SL_BITS("begun-by-lo@0 seen-reply@1 fin-initiator@2 fin-responder@3 reset@4 via-stack@5 " \
		"proxy@6 hairpin@7 picked-up@8 end-reported@9 by-responder@10 unoriented@11 "     \
		"established@12 revoked@13 reset-by-responder@14 asks@15 in-ring@16 returned@17 " \
		"by-device@18 ring-position@19:13")

/*
 * Value of sl_ct4 and sl_ct6. The map may recycle an element for another connection while a program
 * holds a pointer to it. Therefore programs only store last_s in place, and change flags by atomic
 * OR and AND. To change the words of epochs and identities, a CPU first writes its number to
 * epochs; until it is done, no other CPU changes them: see restamp.
 */
struct SL_LAYOUT_NOW {
	/* initiator's epoch << 32 | responder's; 0: not local */
	__u64 epochs SL_BITS("initiator-epoch@32:32 responder-epoch@0:32");
	/* slot_i << 48 | slot_r << 32 | address_epoch_i << 16 | address_epoch_r */
	__u64 where SL_WHERE_BITS;
	__u32 id_init; /* identity of the initiator */
	__u32 id_resp;
	__u16 rule_eg; /* the rule that allowed egress; 0: a default */
	__u16 rule_in;
	__u32 front; /* service front by which it was opened; 0: none */
	__u16 nat_port; /* SL_ZONE_TRANSIT: the source port that the backend sees; 0: none yet */
	__u16 nat_address; /* SL_ZONE_TRANSIT: index of the source address in sl_own, plus 1 */
	/* node port or SL_ZONE_ASKED: index in sl_own, plus 1, of the requested address */
	__u16 asked_address;
	__u16 node; /* node of the remote end, if packets bypass its host stack; 0: none */
	__u32 last_s SL_AS("seconds"); /* CLOCK_MONOTONIC, seconds */
	__u32 flags SL_CT_FLAG_BITS; /* SL_CT_... */
};
_Static_assert(sizeof(struct SL_LAYOUT_NOW) == 48, "six words");

/* Value of sl_prev4 and sl_prev6: the layout of the previous version. */
struct SL_LAYOUT_BEFORE {
	__u64 epochs SL_BITS("initiator-epoch@32:32 responder-epoch@0:32");
	__u64 where SL_WHERE_BITS;
	__u32 id_init;
	__u32 id_resp;
	__u32 last_s SL_AS("seconds");
	__u32 flags SL_CT_FLAG_BITS;
	__u16 rule_eg;
	__u16 rule_in;
	__u16 rev_nat;
	__u16 pad;
	__u32 reserved[2];
};
_Static_assert(sizeof(struct SL_LAYOUT_BEFORE) == 48, "six words");

/*
 * Values of sl_ring4 and sl_ring6: the connection at one position of a ring. The ring of UDP
 * and ICMP echo follows the ring of TCP.
 */
struct sl_ring4 {
	struct sl_ct_key4 key; /* zero: none */
	/* the entry's last_s at the time when the ring last passed this position */
	__u32 seen SL_AS("seconds");
	__u32 pad SL_AS("hidden"); /* earlier versions count there */
};
_Static_assert(sizeof(struct sl_ring4) == 24, "no padding");

struct sl_ring6 {
	struct sl_ct_key6 key;
	__u32 seen SL_AS("seconds");
	__u32 pad SL_AS("hidden");
};
_Static_assert(sizeof(struct sl_ring6) == 48, "no padding");

/*
 * Each ring has a quarter of the outside senders' share of a connection map. That share is half of
 * the map; proven TCP connections get half of it.
 */
#define SL_RING4 (SL_MAX_CT4 / 8)
#define SL_RING6 (SL_MAX_CT6 / 8)
#define SL_PROVEN4 (SL_MAX_CT4 / 4)
#define SL_PROVEN6 (SL_MAX_CT6 / 4)
_Static_assert(!(SL_RING4 & (SL_RING4 - 1)) && !(SL_RING6 & (SL_RING6 - 1)), "powers of two");
/* how many positions are examined for a new connection of a protocol without handshake */
#define SL_RING_TRIES 5

/*
 * Value of sl_revoked4 and sl_revoked6: a TCP connection that a policy has terminated. Its entry
 * may be evicted. Without this record, a segment of the responder would then look like the first
 * segment of a connection that the responder began.
 */
struct sl_revoked {
	__u32 last_s SL_AS("seconds"); /* CLOCK_MONOTONIC, seconds; of the last denied packet */
	/* SL_CT_ORIG_LO, SL_CT_UNORIENTED, SL_CT_VIA_STACK; upper half: the endpoint that the
	 * record is charged to, 0: none
	 */
	__u32 flags SL_BITS("begun-by-lo@0 via-stack@5 unoriented@11 endpoint@16:16=endpoint");
};
_Static_assert(sizeof(struct sl_revoked) == 8, "one word");

/*
 * Value of sl_budget, at index slot << 1, plus 1 for IPv6. Connections from outside use
 * SL_BUDGET_OUTSIDE as slot. The collector stores a limit (0: unlimited) and sets the count to 0 at
 * each pass. If the collector does not run, a program renews part of a budget that has been used up
 * for SL_BUDGET_WAIT seconds: an eighth, at least SL_BUDGET_LEAST, at most all of it. Ended
 * connections are subtracted earlier: see budget.h.
 */
struct sl_budget {
	/* connections; upper half: when the budget was used up, or when ended connections were last
	 * subtracted, in seconds of CLOCK_MONOTONIC; 0: never */
	__u64 begun SL_BITS("begun@0:32 used-up@32:32=seconds");
	/* upper half: connections that ended since the last pass, signed */
	__u64 limit SL_BITS("limit@0:32 ended@32:32=signed");
};

#define SL_BUDGET_OUTSIDE SL_MAX_SLOTS
#define SL_MAX_BUDGETS (2 * (SL_MAX_SLOTS + 1))
#define SL_BUDGET_WAIT 10
#define SL_BUDGET_LEAST 128

/* Bounds on entries that all endpoints share; see bound.h. */
#define SL_BOUND_XL4 0 /* IPv4 translations, return entries of hairpins and answer records */
#define SL_BOUND_XL6 1
#define SL_BOUND_FRAGMENTS 2 /* fragmented datagrams */
#define SL_BOUND_AFFINITY4 3
#define SL_BOUND_AFFINITY6 4
#define SL_BOUND_EVENTS 5 /* events that wait in the ring buffer */
#define SL_BOUND_ANSWERS 6 /* a rate; see rate.h */
#define SL_BOUND_TOO_BIG 7 /* a rate; see rate.h */
#define SL_BOUND_REVOKED4 8 /* records of terminated connections; see revoked.h */
#define SL_BOUND_REVOKED6 9
#define SL_BOUNDS 10

/*
 * Value of sl_bound, at index bound. The datapath writes guarantee and common when it opens the
 * map, and the whole element at each pass of the collector.
 */
struct sl_bound {
	__u32 guarantee; /* entries that each endpoint may have; 0: unlimited */
	__u32 common; /* entries that all endpoints together may have beyond their guarantees */
	__u32 used; /* part of common that is in use */
	/* first refusal since the last pass, CLOCK_MONOTONIC, seconds; 0: none */
	__u32 refused_s SL_AS("seconds");
};
_Static_assert(sizeof(struct sl_bound) == 16, "no padding");

/* Value of sl_held, at the slot: how many entries of each bound the endpoint has. */
struct sl_held {
	__u32 n[SL_BOUNDS];
};
_Static_assert(sizeof(struct sl_held) == 40, "a multiple of 8");

/* Counters of sl_refused: the bounds above, then connections beyond the budget. */
#define SL_REFUSED_CONNECTION4 SL_BOUNDS
#define SL_REFUSED_CONNECTION6 (SL_BOUNDS + 1)
#define SL_REFUSED (SL_BOUNDS + 2)

/*
 * Value of sl_refused, at the slot or SL_BUDGET_OUTSIDE: packets, answers and events that were
 * refused because the endpoint exceeded its share; modulo 2^32.
 */
struct sl_refused {
	__u32 n[SL_REFUSED];
};
_Static_assert(sizeof(struct sl_refused) == 48, "a multiple of 8");

/* Index of sl_ct_stats. */
enum sl_ct_stat {
	SL_CT_STAT_CREATED = 0,
	SL_CT_STAT_DELETED = 1, /* by a program: revoked, or replaced by a SYN */
	SL_CT_STAT_REVOKED = 2,
	SL_CT_STAT_PICKED_UP = 3,
	SL_CT_STAT_REDECIDED = 4,
	SL_CT_STAT_RELATED = 5, /* ICMP errors about a connection */
	SL_CT_STAT_UNREMEMBERED = 6, /* revoked, and beyond the share of its endpoint */
	SL_CT_STAT_EXPIRED = 7, /* removed by the collector; no program counts it */
	SL_CT_STATS = 8,
};

/*
 * Key of sl_frag and sl_pod_frag, one element for each fragmented datagram; the value holds its
 * ports, sport << 16 | dport. The key has SL_FRAGMENT_BY_STACK if the first fragment went to the
 * host's stack, so that later fragments follow it there.
 */
#define SL_FRAGMENT_BY_STACK 0x80

struct sl_fragment {
	__u8 src[16] SL_ADDR("family=family"); /* IPv4: the first four bytes */
	__u8 dst[16] SL_ADDR("family=family");
	__u32 id;
	__u8 proto;
	__u8 family SL_BITS("by-stack@7"); /* 4 or 6, and SL_FRAGMENT_BY_STACK */
	/* the endpoint whose device the fragment came from; for a tunnel: SL_SLOT_NONE minus the
	 * node ID; for a proxy: SL_SLOT_HOST */
	__u16 slot SL_AS("endpoint");
};
_Static_assert(sizeof(struct sl_fragment) == 40, "no padding");

/* sl_side.redirects: the deciding rule redirects, and the proxy may let the packet pass */
#define SL_REDIRECTS_TO_PROXY 1
#define SL_REDIRECTS_NOT_NOW 2 /* without the proxy: it is unavailable, or audit mode is on */
#define SL_REDIRECTS_HELD 3 /* to the proxy, which has the connection; now no rule redirects it */
#define SL_REDIRECTS_HTTP 0x80 /* flag: the proxy is the HTTP proxy */

/* The verdict of one side. */
struct sl_side {
	__u32 epoch;
	__u16 table;
	__u16 rule; /* 0: no rule decided */
	__u8 by; /* enum sl_by */
	__u8 action; /* enum sl_action */
	__u8 audited; /* policy denied it, and audit mode let it pass */
	__u8 redirects; /* SL_REDIRECTS_... */
};
_Static_assert(sizeof(struct sl_side) == 12, "part of an event");

/* sl_question.may_redirect: whether and how the packet can be given to a proxy */
#define SL_REDIRECT_NOT 0
#define SL_REDIRECT_DATAGRAM 1
#define SL_REDIRECT_BEGIN 2 /* the first segment of a TCP connection */
#define SL_REDIRECT_SEGMENT 3

/* Input for the evaluation of a table: the properties of the connection. */
struct sl_question {
	__u8 addr[16]; /* of the peer; IPv4: the first four bytes */
	__u32 identity; /* of the peer */
	__u32 point; /* proto << 16 | port, as in the port intervals */
	__u16 table;
	__u8 family;
	__u8 direction; /* enum sl_direction */
	__u8 flags; /* SL_EP_... of the endpoint that the table belongs to */
	__u8 may_redirect; /* SL_REDIRECT_... */
	__u8 pad[2];
};
_Static_assert(sizeof(struct sl_question) == 32, "half a cache line");

/* The answer of sluice_judge, which it writes into its packet after the question. */
struct sl_answer {
	enum sl_reason reason;
	struct sl_side side;
};
_Static_assert(sizeof(struct sl_answer) == 16, "two words");

/*
 * Value of sl_run: scratch memory of one program on one CPU. A run keeps its struct sl_packet
 * there. The map only knows the size of this type, so that programs of two versions can share the
 * map.
 */
struct sl_run_cell {
	__u64 word[64] SL_AS("hidden");
};
_Static_assert(sizeof(struct sl_run_cell) == 512, "eight cache lines");

/* Elements of sl_run, one for each program. */
enum sl_program {
	SL_PROGRAM_FROM_POD = 0,
	SL_PROGRAM_TO_POD = 1,
	SL_PROGRAM_FROM_OVERLAY = 2,
	SL_PROGRAM_TO_OVERLAY = 3,
	SL_PROGRAM_FROM_UPLINK = 4,
	SL_PROGRAM_TO_UPLINK = 5,
	SL_PROGRAM_FROM_UNDERLAY = 6,
	SL_PROGRAM_FROM_TAP = 7,
};

/* State of a search for a free port of the node; see nat_port.h. */
struct sl_search {
	__u64 hash; /* gives the next port */
	__u64 word; /* of the claim that was examined */
	__u32 best; /* rank of the best port so far; 0: none */
	__u32 sender; /* number of the sender in shares */
	__u32 loser; /* the sender of the claim that was examined */
	__u16 port; /* the best port so far */
	__u8 over; /* 1: the sender has used up its share */
	__u8 midway; /* 1: the connection began earlier */
	__u32 unclaimed; /* ports without a claim among the examined ones */
	__u32 pad;
};
_Static_assert(sizeof(struct sl_search) == 40, "no padding");

/* The state of a packet in one run of a program; packet.h describes where it is stored. */
struct sl_packet {
	__u8 src[16]; /* IPv4: the first four bytes */
	__u8 dst[16];
	__u8 dst_mac[6]; /* both as in the frame */
	__u8 src_mac[6];
	__u16 ethertype; /* host order */
	__u16 sport;
	__u16 dport;
	__u8 family; /* 4, 6, or 0 before the IP header was parsed */
	__u8 proto; /* after extension headers */
	__u8 hops; /* TTL or hop limit */
	__u8 tcp_flags;
	_Bool fragment; /* a later fragment, without a transport header */
	_Bool more_fragments; /* the first fragment */
	__u16 src_slot;
	__u16 dst_slot;
	__u32 l4; /* offset of the header after the IP headers */
	__u32 end; /* offset of the end of the IP packet */
	__u32 src_identity;
	__u32 dst_identity;
	enum sl_direction hook; /* hook of the program; egress: packets from a pod */
	enum sl_direction direction; /* for counters: the direction that is counted */
	__u32 fragment_id; /* identification of the datagram that this fragment belongs to */
	__u16 echo; /* identifier of an ICMP echo, host order */
	__u8 chunk; /* type of the first SCTP chunk */
	__u8 news; /* SL_NEWS_... */
	/* Plain integers instead of bool: the compiler assumes that a bool in memory is 0 or 1 and
	 * uses it in address computations, but the verifier assumes that it can be any byte. */
	__u8 reply; /* 1: the packet goes to the initiator of its connection */
	__u8 via_stack; /* 1: it must pass through the host's stack */
	__u8 low; /* 1: the sender is the lower end in the connection's key */
	__u8 sides; /* SL_SIDE_...: the sides that were evaluated for it */
	__u16 ct_flags; /* SL_CT_... of its connection */
	__u16 node; /* node ID of the peer, if the packet bypasses the host stack there; 0: none */
	struct sl_side egress; /* sides of the connection that it belongs to */
	struct sl_side ingress;
	__u32 vni; /* identity in the tunnel key; 0: it did not come from a tunnel */
	__u32 front; /* service front by which its connection was opened; 0: none */
	__u16 asked_port; /* with translated: dport before translation */
	__u16 asked_at; /* node port: index in sl_own of the requested address, plus 1 */
	/* with translated: dst before translation; with readdressed: src in the frame */
	__u8 asked[16] __attribute__((aligned(8)));
	__u16 answer_mtu; /* MTU to report in a "too big" error */
	__u8 translated; /* SL_TRANSLATED_... */
	__u8 untold; /* SL_UNTOLD_..., while the translation is not stored in its map */
	__u8 zone; /* SL_ZONE_... of its connection's key */
	__u8 answers; /* 1: it is an answer, although its connection is unknown */
	/* 1: src was replaced by the address that the pod had sent to; asked holds the source
	 * address in the frame */
	__u8 readdressed;
	/* 1: a later fragment of a datagram whose first fragment went to the host's stack */
	__u8 by_stack;
	__u8 unknown; /* 1: a lookup found no connection with its key */
	/* 1: the translation was charged for a connection that has ended or is unknown */
	__u8 renews;
	/* 1: the first packet in this second, of its connection or of the answers of a hairpin */
	__u8 first_in_second;
	__u8 direct; /* 1: its tunnel packet was built by the program */
	__u16 sending_node; /* ID of the node that sent it through the tunnel; 0: none */
	__u8 held; /* 1: a proxy has held it, and sends it on */
	__u8 pad4;
	/* The fields below are not cleared: each is fully written before it is read. They are
	 * aligned so that addresses are copied as two words instead of bytes.
	 */
	struct sl_question question __attribute__((aligned(8))); /* input of evaluate() */
	struct sl_side side; /* result of evaluate() */
	__u8 in_ring; /* 1: its connection starts in a ring; written by within_budget() */
	__u8 last_fragment; /* 1: the last fragment of a datagram; written by the parser */
	__u16 ring_position; /* with in_ring: see SL_CT_RING_SHIFT */
	__u64 src_pol; /* policy words of both ends, as evaluate_sides() has read them */
	__u64 dst_pol;
	/* key of the packet's connection, by address family */
	struct sl_ct_key4 key4 __attribute__((aligned(8)));
	struct sl_ct_key6 key6 __attribute__((aligned(8)));
	struct sl_ct entry; /* entry of a new connection */
	struct sl_revoked revoked; /* record of a connection that a policy terminates */
	struct sl_xl xl; /* translation of a connection to a service */
	/* key of the packet's translation, by address family: the packet before translation */
	struct sl_xl_key4 xl4;
	struct sl_xl_key6 xl6;
	struct sl_search search; /* for a port of the node */
} __attribute__((aligned(8)));

/* sl_packet.translated */
#define SL_TRANSLATED_DESTINATION 1 /* dst and dport belong to a backend */
#define SL_TRANSLATED_HAIRPIN 2 /* as above, and the backend is the sender itself */
/* answer of a hairpin connection: dst and dport belong to the service */
#define SL_TRANSLATED_BACK 3
/*
 * dst and dport belong to a client; this answer was sent to the translated source of its requests
 */
#define SL_TRANSLATED_RESTORED 4

/* sl_packet.untold */
#define SL_UNTOLD 1
#define SL_UNTOLD_AFFINITY 2 /* as above, and session affinity is stored with it */
#define SL_UNTOLD_COPY 3 /* the translation was lost; its copy in the maps of answers has it */

/* sl_packet.news: events to send in addition to the verdict on the packet. */
#define SL_NEWS_VERDICT 0x1 /* a connection was evaluated */
#define SL_NEWS_CLOSED 0x2 /* a connection has ended */

_Static_assert(sizeof(struct sl_packet) <= sizeof(struct sl_run_cell), "fits into its cell");

/* Record of sl_events. */
struct sl_event {
	__u64 time; /* CLOCK_MONOTONIC, ns */
	enum sl_reason reason;
	enum sl_direction direction;
	enum sl_event_type type;
	__u32 lost; /* events of this reason that were suppressed on this CPU before this one */
	__u32 ifindex;
	__u32 length;
	__u32 src_identity; /* 0: not determined; the same for dst_identity */
	__u32 dst_identity;
	struct sl_side egress;
	struct sl_side ingress;
	__u16 src_slot; /* SL_SLOT_NONE: not local or not determined */
	__u16 dst_slot;
	__u16 ethertype; /* host order, as are the ports */
	__u16 sport;
	__u16 dport; /* ICMP: type << 8 | code */
	__u16 ct_flags; /* SL_CT_... of its connection */
	__u8 src_mac[6];
	__u8 family; /* 0: the addresses were not parsed; 4; 6 */
	__u8 proto;
	__u8 tcp_flags;
	__u8 reply; /* 1: it goes to the initiator of its connection */
	__u16 node; /* node ID of the peer; 0: the local node */
	__u8 src[16]; /* IPv4: the first four bytes */
	__u8 dst[16];
	__u8 orig_dst[16]; /* destination before service translation; zero: not translated */
	__u16 orig_dport;
	/* bytes 0 and 1: the slot that the event is charged to, 0: none; the rest is zero */
	__u8 charged[6];
};
_Static_assert(sizeof(struct sl_event) == 144, "read from the ring in Go");

#endif
