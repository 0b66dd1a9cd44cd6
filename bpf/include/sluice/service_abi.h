/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_SERVICE_ABI_H
#define SLUICE_SERVICE_ABI_H

/*
 * The part of the programs' and the Go side's common types that is about services;
 * abi.h says what holds for all of them.
 *
 * A packet or a socket finds its backend in four steps: the address that was asked
 * is a key of sl_fe4 or sl_fe6, which leads to a front (sl_front), whose word names
 * a run of members (sl_member), of which one is chosen, which names a backend
 * (sl_be4 or sl_be6). Each step after the key is one aligned 64-bit load, and a
 * list is exchanged by one aligned 64-bit store: of sl_front.list.
 */

#include <linux/types.h>

#include <sluice/describe.h>

#define SL_MAX_FRONTENDS 65536 /* of each family */
#define SL_MAX_FRONTS 65536
#define SL_MAX_MEMBERS 262144
#define SL_MAX_BACKENDS 131072 /* of each family */
#define SL_MAX_NAMESPACES 8192
#define SL_MAX_AFFINITY 8192 /* of each family, of senders outside */
#define SL_MAX_POD_AFFINITY 4096 /* of each family, of pods and the host */
#define SL_MAX_SOURCES 16384 /* of each family */
#define SL_MAX_XL4 32768
#define SL_MAX_XL6 16384
#define SL_MAX_POD_XL4 16384
#define SL_MAX_POD_XL6 8192
#define SL_MAX_ANSWERS4 16384
#define SL_MAX_ANSWERS6 8192

/* sl_fe_key4.kind and sl_fe_key6.kind */
#define SL_FE_ADDRESS 0 /* of an address */
#define SL_FE_NODE 1 /* of a node port; the address is 0 */
/* An address that is of services alone, for ports that none has; port and protocol are 0.
 * The value says nothing.
 */
#define SL_FE_ALONE 2

/* Keys and values that are one word each. */
typedef __u64 sl_netns_cookie SL_BITS("namespace@0:64");
typedef __u64 sl_member_word SL_BITS("backend@0:32 salt@32:32=hex");
typedef __u64 sl_be4_word SL_BITS("@0:32=address port@32:16 @48:8=free|active|gone gen@56:8");
typedef __u64 sl_affinity_word SL_BITS("backend@0:24 gen@24:8 last@32:32=seconds");

/* Keys of sl_fe4 and sl_fe6. */
struct sl_fe_key4 {
	__be32 addr SL_ADDR("port=port");
	__u16 port; /* host order */
	__u8 proto;
	__u8 kind SL_AS("-|node-port|vip"); /* SL_FE_... */
};
_Static_assert(sizeof(struct sl_fe_key4) == 8, "no padding");

struct sl_fe_key6 {
	__u8 addr[16] SL_ADDR("port=port");
	__u16 port;
	__u8 proto;
	__u8 kind SL_AS("-|node-port|vip");
};
_Static_assert(sizeof(struct sl_fe_key6) == 20, "no padding");

/*
 * Value of sl_fe4 and sl_fe6: the fronts, 0: there is none, and packets pass as if
 * there were no frontend. Written once; a frontend keeps its numbers for as long as
 * its key exists.
 */
struct sl_fe {
	__u32 inside; /* for the node's own pods and sockets */
	__u32 outside; /* for what comes from elsewhere, which may not ask that of a cluster IP */
};
_Static_assert(sizeof(struct sl_fe) == 8, "one word");

#define SL_LIST_BITS SL_BITS("base@0:24 count@24:16 table@40:8 drops@48 source-ranges@49 gone@50")

/*
 * Value of sl_front, at the number of a front; element 0 is not used. Everything
 * but list is written before a key names the number, or is changed by one store of
 * its own word.
 */
struct sl_front {
	__u64 list SL_LIST_BITS; /* base | count << 24 | table << 40 | SL_FRONT_... << 48 */
	__u32 timeout; /* of affinity, in seconds; 0: none */
	__u16 group; /* of fronts that share what affinity remembers */
	__u16 port; /* the frontend's, for the way back; host order */
	__u8 addr[16] SL_ADDR("mixed port=port"); /* the frontend's; IPv4: the first four bytes */
};
_Static_assert(sizeof(struct sl_front) == 32, "half a cache line");

#define SL_FRONT_COUNT_SHIFT 24
#define SL_FRONT_TABLE_SHIFT 40
#define SL_FRONT_FLAGS_SHIFT 48
#define SL_FRONT_BASE_MASK 0xffffff

/* In the upper 16 bits of sl_front.list */
#define SL_FRONT_DROP 0x1 /* without a backend: dropped; else it is refused */
#define SL_FRONT_SOURCES 0x2 /* only from prefixes in sl_src4 and sl_src6 */
#define SL_FRONT_GONE 0x4 /* no frontend leads to it any more */

/*
 * A list has count members from base on, each backend once. With a table, which is
 * the binary logarithm of a number of slots and 0 without one, the slots follow the
 * members: elements of sl_member too, each the member that it belongs to. Programs
 * that do not know tables choose among the members and are right as well.
 */
#define SL_FRONT_TABLE_MASK 0xff

/*
 * Up to so many members are chosen from by rendezvous, more by a hash: its slot of
 * the table or, without one, it modulo their count.
 */
#define SL_RENDEZVOUS 16

/*
 * Value of sl_member: backend | salt << 32. The salt is made of the backend's
 * address and port, so that every node and every restart chooses alike.
 */

/* sl_be4.state and sl_be6.state */
#define SL_BE_FREE 0 /* the number leads nowhere */
#define SL_BE_ACTIVE 1
#define SL_BE_GONE 2 /* it was removed; entries and sockets may name it */

/*
 * Value of sl_be4, at the number of a backend, one word:
 * address (network order, as the machine loads it) | port << 32 | state << 48 |
 * generation << 56. The generation changes whenever the number is given to another
 * address or port. Element 0 is not used.
 */

/* Value of sl_be6. The address is written while state is SL_BE_FREE. */
struct sl_be6 {
	/* as sl_be4, without the address */
	__u64 word SL_BITS("port@32:16 @48:8=free|active|gone gen@56:8");
	__u8 addr[16];
};
_Static_assert(sizeof(struct sl_be6) == 24, "three words");

/*
 * Value of sl_ns, at the cookie of a network namespace: whose sockets these are.
 * Sockets of namespaces without an element are left alone, unless the program is
 * set to translate for all.
 */
struct sl_ns {
	__u16 slot SL_AS("endpoint"); /* of the endpoint; SL_SLOT_HOST: the node's own namespace */
	__u16 flags SL_BITS("not-translated@0"); /* SL_NS_... */
	__u32 pad;
};
_Static_assert(sizeof(struct sl_ns) == 8, "one word");

#define SL_NS_LEAVE 0x1 /* its sockets are not translated */

#define SL_SOCKET_PEERS 4

/*
 * One translation that a socket remembers. The address that it asked for is kept
 * and not read from the front, which has none for a node port, and whose number
 * may be another's by then.
 */
struct sl_sock_peer {
	/* the backend's; IPv4: the first four bytes, the rest 0 */
	__u8 addr[16] SL_ADDR("family=family port=port");
	/* the address that the socket asked for, likewise */
	__u8 asked[16] SL_ADDR("family=family port=asked_port");
	__u16 port; /* the backend's; host order */
	__u16 asked_port; /* host order */
	__u8 family; /* 4 or 6, of both addresses; 0: unused */
	__u8 gen; /* of the backend */
	__u16 pad;
	__u32 front; /* that it was translated by */
	__u32 backend;
};
_Static_assert(sizeof(struct sl_sock_peer) == 48, "no padding");

/*
 * Value of sl_sk, in the storage of a socket. A connected socket uses the first
 * peer only.
 */
struct sl_sock {
	__u64 cookie; /* of the socket */
	__u64 netns; /* cookie of its namespace */
	__u16 sport; /* as far as known; host order */
	__u8 proto;
	__u8 connected; /* 1: by connect */
	__u32 next; /* the peer that is replaced next */
	struct sl_sock_peer peer[SL_SOCKET_PEERS];
};
_Static_assert(sizeof(struct sl_sock) == 216, "no padding");

/*
 * What list_sockets writes of a socket: its ends, as the kernel's requests about
 * sockets name it, and what it was translated to. The ends of an IPv6 socket have the
 * form of IPv6, also where they are IPv4.
 */
struct sl_socket {
	__be16 sport;
	__be16 dport; /* 0: it is not connected any more */
	__be32 src[4]; /* IPv4: the first word */
	__be32 dst[4];
	__u32 device; /* that it is bound to; 0: to none */
	__u64 cookie;
	__u32 front;
	__u32 backend;
	__u16 family; /* AF_INET or AF_INET6, of the socket */
	__u8 backend_family; /* 4 or 6 */
	__u8 gen; /* of the backend */
	__u32 pad;
};
_Static_assert(sizeof(struct sl_socket) == 64, "a cache line");

/*
 * Keys of sl_xl4 and sl_pod_xl4, sl_answers4 and so on: a packet as it arrives, before its
 * destination is translated.
 */
struct sl_xl_key4 {
	__be32 src SL_ADDR("port=sport");
	__be32 dst SL_ADDR("port=dport");
	__u16 sport; /* host order, as the next */
	__u16 dport;
	__u8 proto;
	__u8 zone SL_AS("-|nat|answers|claimed"); /* SL_XL_... */
	__u16 pad;
};
_Static_assert(sizeof(struct sl_xl_key4) == 16, "no padding");

struct sl_xl_key6 {
	__u8 src[16] SL_ADDR("port=sport");
	__u8 dst[16] SL_ADDR("port=dport");
	__u16 sport;
	__u16 dport;
	__u8 proto;
	__u8 zone SL_AS("-|nat|answers|claimed");
	__u16 pad;
};
_Static_assert(sizeof(struct sl_xl_key6) == 40, "no padding");

#define SL_XL_SERVICE 0
/* An answer of a backend elsewhere, to an address of this node. */
#define SL_XL_NAT 1
/* In sl_answers4 and sl_answers6: an answer of a backend, once it has given one: what its
 * connection has asked for, if the connection's entry is lost. See answers.h.
 */
#define SL_XL_ANSWERS 2
/* In sl_answers4 and sl_answers6: the same as SL_XL_NAT, once the backend has answered, if the
 * claim is lost.
 */
#define SL_XL_CLAIMED 3

/* Ports of the node from which packets go to backends elsewhere. */
#define SL_NAT_FIRST 20000
#define SL_NAT_PORTS 10000

/*
 * Value of these maps: where the packets of one sender go instead. The map
 * may recycle an element while a program holds it, so that only last_s is stored in
 * place.
 */
struct sl_xl {
	__u8 addr[16] SL_ADDR("mixed port=port"); /* IPv4: the first four bytes, the rest 0 */
	__u16 port; /* host order */
	__u16 asked_at; /* as in sl_packet */
	__u32 front;
	__u32 backend;
	__u8 gen; /* of the backend */
	__u8 back
		SL_BITS("back@0"); /* 1: the answers of a pod to itself, which go to the service */
	__u16 pad;
	__u32 last_s SL_AS("seconds"); /* CLOCK_MONOTONIC, seconds */
	__u32 born; /* of a claim: when it was made, in ms; one word with last_s */
} __attribute__((aligned(8)));
_Static_assert(sizeof(struct sl_xl) == 40, "no padding");

/* Seconds without a packet after which an open TCP connection holds its port no longer. */
#define SL_PORT_IDLE_LIFE 8000

/*
 * Key of sl_share: a sender outside that uses the ports of the node to a backend, or all
 * senders together. Only senders with more than SL_SHARE_SMALL ports have one.
 */
struct sl_share_key {
	__u8 addr[16] SL_ADDR("family=family port=port"); /* the backend's; IPv4: the first four
							     bytes, the rest 0 */
	__u16 port; /* host order */
	__u8 proto;
	__u8 family; /* 4 or 6 */
	__u32 sender SL_AS("hex"); /* hash of its address or /64; 0: all of them */
};
_Static_assert(sizeof(struct sl_share_key) == 24, "no padding");

/* Value of sl_share, changed by atomic additions. The collector writes what it has found. */
struct sl_share {
	__u32 ports; /* of a sender */
	__u32 senders; /* of all: how many have a share */
};
_Static_assert(sizeof(struct sl_share) == 8, "one word");

#define SL_MAX_SHARES 8192
#define SL_SHARE_SMALL 64

/* Cells of sl_count. A cell may be shared by backends, or senders, of the same hash. */
#define SL_COUNT_SEED 0 /* of all hashes in shares: two cells */
#define SL_COUNT_TIME 2 /* when the collector has last counted, in seconds */
#define SL_COUNT_RINGS 4 /* next positions of rings: of IPv4 TCP, UDP, of IPv6 TCP, UDP */
#define SL_COUNT_BACKENDS 8 /* claims of ports to a backend */
#define SL_COUNTED_BACKENDS 8192
#define SL_COUNT_SENDERS (SL_COUNT_BACKENDS + SL_COUNTED_BACKENDS) /* and those of one sender */
#define SL_COUNTED_SENDERS 16384
/* Proven TCP connections from outside: all of a family, and by the hash of the sender */
#define SL_COUNT_PROVEN (SL_COUNT_SENDERS + SL_COUNTED_SENDERS)
#define SL_COUNT_PROVEN_BY (SL_COUNT_PROVEN + 8)
#define SL_PROVEN_BUCKETS 1024 /* of each family */
/*
 * Bits of ports, which no count is. A port whose bit is 0 is in no record of that kind, so that
 * programs look for none: answers of a service by the port of the backend, what pods have asked
 * by the port of the host, and lost claims by the port of the node. A bit is set before the
 * first record is stored, and stays.
 */
#define SL_COUNT_ANSWERED (SL_COUNT_PROVEN_BY + 2 * SL_PROVEN_BUCKETS)
#define SL_COUNT_ASKED (SL_COUNT_ANSWERED + SL_PORT_CELLS)
#define SL_COUNT_CLAIMED (SL_COUNT_ASKED + SL_PORT_CELLS)
#define SL_PORT_CELLS (65536 / 32)
#define SL_COUNTS (SL_COUNT_CLAIMED + SL_PORT_CELLS)

#define SL_COUNTERS 8

/* Value of sl_count: several counters, because the kernel rounds elements up to 8 bytes. */
struct sl_counters {
	__u32 n[SL_COUNTERS];
};
_Static_assert(sizeof(struct sl_counters) == 32, "no padding");
_Static_assert(SL_COUNTS % SL_COUNTERS == 0, "whole elements");

/* Seconds for which counts hold without a collector. */
#define SL_COUNT_LIFE 150

/*
 * Value of sl_own: an address of this node, at which its node ports answer. It stands
 * at its address epoch's place modulo SL_MAX_OWN, or up to SL_OWN_PROBES - 1 behind,
 * and stays when the node loses it, until another needs the place.
 */
struct sl_own {
	__u8 addr[16] SL_ADDR("family=family"); /* IPv4: the first four bytes, the rest 0 */
	__u32 family; /* 4 or 6; 0: free */
	__u32 pad;
};
_Static_assert(sizeof(struct sl_own) == 24, "no padding");

#define SL_MAX_OWN 1024
#define SL_OWN_PROBES 8

/*
 * Keys of sl_src4 and sl_src6, whose value says nothing: a front with SL_FRONT_SOURCES
 * may be asked from the prefixes that it has there.
 */
struct sl_src_key4 {
	__u32 bits; /* 32 for the front, and those of the prefix */
	__u32 front;
	__u8 addr[4];
};
_Static_assert(sizeof(struct sl_src_key4) == 12, "no padding");

struct sl_src_key6 {
	__u32 bits;
	__u32 front;
	__u8 addr[16];
};
_Static_assert(sizeof(struct sl_src_key6) == 24, "no padding");

/* Keys of sl_aff4 and sl_aff6, sl_pod_aff4 and sl_pod_aff6. */
struct sl_aff_key4 {
	__be32 client; /* its address; the node itself: 0 */
	__u16 group;
	__u16 pad;
};
_Static_assert(sizeof(struct sl_aff_key4) == 8, "no padding");

struct sl_aff_key6 {
	__u8 client[16];
	__u16 group;
	__u16 pad;
};
_Static_assert(sizeof(struct sl_aff_key6) == 20, "no padding");

/*
 * Value of these maps, one word: backend | its generation << 24 | last
 * second << 32, changed by compare and exchange of the whole, as the map may
 * recycle the element.
 */

/*
 * Lists with more members are not searched for the backend that a client keeps:
 * it keeps the one that the hash of its address chooses, for as long as the list
 * stays.
 */
#define SL_AFFINITY_MEMBERS 1024

#endif
