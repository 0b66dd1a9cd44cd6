/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_SERVICE_ABI_H
#define SLUICE_SERVICE_ABI_H

/*
 * The part of the shared types of programs and Go side that concerns services; abi.h describes
 * the rules that apply to all of them.
 *
 * A packet or a socket finds its backend in four steps. The requested address is a key of sl_fe4
 * or sl_fe6, whose value gives a front (sl_front). The front's list word gives a run of members
 * (sl_member). One member is chosen, and gives a backend (sl_be4 or sl_be6). Each step after the
 * key is one aligned 64-bit load. A list is replaced by one aligned 64-bit store to
 * sl_front.list.
 */

#include <linux/types.h>

#include <sluice/describe.h>

#define SL_MAX_FRONTENDS 65536 /* per family */
#define SL_MAX_FRONTS 65536
/* Nine tenths of the backends, 280,000, are usable. A port of a Service has up to two lists. */
#define SL_MAX_BACKENDS 311296 /* per family */
#define SL_MAX_MEMBERS 622592
#define SL_MAX_NAMESPACES 8192
#define SL_MAX_AFFINITY 8192 /* per family, of clients outside */
#define SL_MAX_POD_AFFINITY 4096 /* per family, of pods and the host */
#define SL_MAX_SOURCES 16384 /* per family */
#define SL_MAX_XL4 32768
#define SL_MAX_XL6 16384
#define SL_MAX_POD_XL4 16384
#define SL_MAX_POD_XL6 8192
#define SL_MAX_ANSWERS4 16384
#define SL_MAX_ANSWERS6 8192
#define SL_MAX_POD_ANSWERS4 12288
#define SL_MAX_POD_ANSWERS6 6144

/* sl_fe_key4.kind and sl_fe_key6.kind */
#define SL_FE_ADDRESS 0 /* of one address */
#define SL_FE_NODE 1 /* of a node port; the address is 0 */
/* A virtual IP that only services use: matches all ports without a frontend; port and protocol
 * are 0. The value has no meaning.
 */
#define SL_FE_ALONE 2

/* Keys and values of a single word. */
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
 * Value of sl_fe4 and sl_fe6: the fronts. 0 means that there is no front, and packets pass as if
 * there were no frontend. The value is written once; a frontend keeps its front numbers until its
 * key is removed.
 */
struct sl_fe {
	__u32 inside; /* for pods of the node and local sockets */
	__u32 outside; /* for clients from elsewhere, which may not use a cluster IP */
};
_Static_assert(sizeof(struct sl_fe) == 8, "one word");

#define SL_LIST_BITS SL_BITS("base@0:24 count@24:16 table@40:8 drops@48 source-ranges@49 gone@50")

/*
 * Value of sl_front, at the number of a front; element 0 is unused. All fields but list are
 * written before a key refers to the number, or are changed by a single store of their own word.
 */
struct sl_front {
	__u64 list SL_LIST_BITS; /* base | count << 24 | table << 40 | SL_FRONT_... << 48 */
	__u32 timeout; /* of session affinity, in seconds; 0: no affinity */
	__u16 group; /* fronts of one group share their affinity entries */
	__u16 port; /* the frontend's, for replies; host order */
	__u8 addr[16] SL_ADDR("mixed port=port"); /* the frontend's; IPv4: the first four bytes */
};
_Static_assert(sizeof(struct sl_front) == 32, "half a cache line");

#define SL_FRONT_COUNT_SHIFT 24
#define SL_FRONT_TABLE_SHIFT 40
#define SL_FRONT_FLAGS_SHIFT 48
#define SL_FRONT_BASE_MASK 0xffffff

/* In the upper 16 bits of sl_front.list */
#define SL_FRONT_DROP 0x1 /* without a backend: drop; otherwise: refuse */
#define SL_FRONT_SOURCES 0x2 /* accept only source prefixes in sl_src4 and sl_src6 */
#define SL_FRONT_GONE 0x4 /* no frontend refers to it any more */

/*
 * A list has count members starting at base, one per backend. If table is not 0, it is the binary
 * logarithm of the number of slots of a rendezvous table. The slots follow the members and are
 * elements of sl_member, too: each slot repeats the member that it belongs to. A program that
 * does not know rendezvous tables chooses among the members, which is also correct.
 */
#define SL_FRONT_TABLE_MASK 0xff

/*
 * A list of at most SL_RENDEZVOUS members uses rendezvous hashing. In a longer list the hash
 * selects a slot of the table or, without a table, a member by the hash modulo the count.
 */
#define SL_RENDEZVOUS 16

/*
 * Value of sl_member: backend | salt << 32. The salt is derived from the backend's address and
 * port, so that all nodes choose alike, also after restarts.
 */

/* sl_be4.state and sl_be6.state */
#define SL_BE_FREE 0 /* the number is unused */
#define SL_BE_ACTIVE 1
#define SL_BE_GONE 2 /* the backend was removed; entries and sockets may still refer to it */

/*
 * Value of sl_be4, at the number of a backend, one word: address (in network order, loaded as a
 * native integer) | port << 32 | state << 48 | generation << 56. The generation changes whenever
 * the number is reassigned to another address or port. Element 0 is unused.
 */

/* Value of sl_be6. The address is only written while the state is SL_BE_FREE. */
struct sl_be6 {
	/* as sl_be4, without the address */
	__u64 word SL_BITS("port@32:16 @48:8=free|active|gone gen@56:8");
	__u8 addr[16];
};
_Static_assert(sizeof(struct sl_be6) == 24, "three words");

/*
 * Value of sl_ns, at the cookie of a network namespace: the endpoint that its sockets belong to.
 * Sockets of namespaces without an element are not translated, unless the program is configured
 * to translate sockets of all namespaces.
 */
struct sl_ns {
	__u16 slot SL_AS("endpoint"); /* of the endpoint; SL_SLOT_HOST: the host's namespace */
	__u16 flags SL_BITS("not-translated@0"); /* SL_NS_... */
	__u32 pad;
};
_Static_assert(sizeof(struct sl_ns) == 8, "one word");

#define SL_NS_LEAVE 0x1 /* do not translate its sockets */

#define SL_SOCKET_PEERS 4

/*
 * One translation that a socket remembers. The requested address is stored here and not read from
 * the front: the front of a node port has no address, and the number of a front may be
 * reassigned.
 */
struct sl_sock_peer {
	/* of the backend; IPv4: the first four bytes, the rest 0 */
	__u8 addr[16] SL_ADDR("family=family port=port");
	/* the address that the socket requested, in the same form */
	__u8 asked[16] SL_ADDR("family=family port=asked_port");
	__u16 port; /* of the backend; host order */
	__u16 asked_port; /* host order */
	__u8 family; /* 4 or 6, of both addresses; 0: unused */
	__u8 gen; /* of the backend */
	__u16 pad;
	__u32 front; /* the front that translated it */
	__u32 backend;
};
_Static_assert(sizeof(struct sl_sock_peer) == 48, "no padding");

/* Value of sl_sk, in the local storage of a socket. A connected socket uses only the first peer. */
struct sl_sock {
	__u64 cookie; /* of the socket */
	__u64 netns; /* cookie of its namespace */
	__u16 sport; /* if known; host order */
	__u8 proto;
	__u8 connected; /* 1: by connect() */
	__u32 next; /* index of the peer that is replaced next */
	struct sl_sock_peer peer[SL_SOCKET_PEERS];
};
_Static_assert(sizeof(struct sl_sock) == 216, "no padding");

/*
 * Record of list_sockets about a socket: its addresses, as inet_diag requests identify it, and
 * its translation. The addresses of an IPv6 socket are IPv6 addresses, IPv4 addresses included
 * (IPv4-mapped).
 */
struct sl_socket {
	__be16 sport;
	__be16 dport; /* 0: no longer connected */
	__be32 src[4]; /* IPv4: the first word */
	__be32 dst[4];
	__u32 device; /* that it is bound to; 0: none */
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
 * Keys of sl_xl4, sl_pod_xl4, sl_answers4, sl_pod_answers4 and their IPv6 counterparts: a packet
 * before its destination is translated.
 */
struct sl_xl_key4 {
	__be32 src SL_ADDR("port=sport");
	__be32 dst SL_ADDR("port=dport");
	__u16 sport; /* host order, as is dport */
	__u16 dport;
	__u8 proto;
	__u8 zone SL_AS("-|nat|answers|claimed|requested"); /* SL_XL_... */
	__u16 pad;
};
_Static_assert(sizeof(struct sl_xl_key4) == 16, "no padding");

struct sl_xl_key6 {
	__u8 src[16] SL_ADDR("port=sport");
	__u8 dst[16] SL_ADDR("port=dport");
	__u16 sport;
	__u16 dport;
	__u8 proto;
	__u8 zone SL_AS("-|nat|answers|claimed|requested");
	__u16 pad;
};
_Static_assert(sizeof(struct sl_xl_key6) == 40, "no padding");

#define SL_XL_SERVICE 0
/* Answer of a backend on another node, sent to an address of this node. */
#define SL_XL_NAT 1
/* In the maps of answers: an answer of a backend that has answered before. The value
 * restores the requested address and port if the connection's entry is lost. See answers.h.
 * With back: a copy of a hairpin's return translation. See hairpin.h.
 */
#define SL_XL_ANSWERS 2
/* In sl_answers4 and sl_answers6: as SL_XL_NAT, stored once the backend has answered, in case the
 * claim is lost.
 */
#define SL_XL_CLAIMED 3
/* In the maps of answers: as SL_XL_SERVICE, stored once the backend has answered over
 * TCP, in case the translation of requests is lost. The value has no backend and generation.
 */
#define SL_XL_REQUESTED 4

/* Source ports of the node for packets to backends on other nodes. */
#define SL_NAT_FIRST 20000
#define SL_NAT_PORTS 10000

/*
 * Value of these maps: the new destination of the packets of one sender. The map may recycle an
 * element while a program holds a pointer to it, so only last_s is stored in place.
 */
struct sl_xl {
	__u8 addr[16] SL_ADDR("mixed port=port"); /* IPv4: the first four bytes, the rest 0 */
	__u16 port; /* host order */
	__u16 asked_at; /* as in sl_packet */
	__u32 front;
	__u32 backend;
	__u8 gen; /* of the backend */
	__u8 back
		/* 1: return entry of a hairpin: answers of a pod to itself, sent to the service */
		SL_BITS("back@0");
	__u16 pad;
	__u32 last_s SL_AS("seconds"); /* CLOCK_MONOTONIC, seconds */
	__u32 born; /* of a claim: creation time in ms; one word with last_s */
} __attribute__((aligned(8)));
_Static_assert(sizeof(struct sl_xl) == 40, "no padding");

/* Idle time in seconds after which an open TCP connection loses its port. */
#define SL_PORT_IDLE_LIFE 8000

/*
 * Key of sl_share: an outside sender that uses ports of the node towards a backend, or all
 * senders together. Only senders with more than SL_SHARE_SMALL ports have an element.
 */
struct sl_share_key {
	/* of the backend; IPv4: the first four bytes, the rest 0 */
	__u8 addr[16] SL_ADDR("family=family port=port");
	__u16 port; /* host order */
	__u8 proto;
	__u8 family; /* 4 or 6 */
	__u32 sender SL_AS("hex"); /* hash of its address or /64; 0: all senders */
};
_Static_assert(sizeof(struct sl_share_key) == 24, "no padding");

/* Value of sl_share, changed by atomic additions. The collector writes the recounted values. */
struct sl_share {
	__u32 ports; /* of one sender */
	__u32 senders; /* of all senders: how many have a share */
};
_Static_assert(sizeof(struct sl_share) == 8, "one word");

#define SL_MAX_SHARES 8192
#define SL_SHARE_SMALL 64

/* Cells of sl_count. Backends or senders with the same hash share a cell. */
#define SL_COUNT_SEED 0 /* seed of all hashes in shares: two cells */
#define SL_COUNT_TIME 2 /* when the collector last counted, in seconds */
#define SL_COUNT_FORGET 3 /* 1: the datapath is removing direct connections to new frontends */
#define SL_COUNT_RINGS 4 /* next positions of the rings: IPv4 TCP and other, IPv6 TCP and other */
#define SL_COUNT_BACKENDS 8 /* claims of ports, by backend */
#define SL_COUNTED_BACKENDS 8192
#define SL_COUNT_SENDERS (SL_COUNT_BACKENDS + SL_COUNTED_BACKENDS) /* and by backend and sender */
#define SL_COUNTED_SENDERS 16384
/* Proven TCP connections from outside: the total of a family, then by the hash of the sender */
#define SL_COUNT_PROVEN (SL_COUNT_SENDERS + SL_COUNTED_SENDERS)
#define SL_COUNT_PROVEN_BY (SL_COUNT_PROVEN + 8)
#define SL_PROVEN_BUCKETS 1024 /* per family */
/*
 * Bitmaps of ports, not counts. If a port's bit is 0, no record of that kind has the port, and
 * programs skip the lookup. The port is the backend's for records of answers (SL_XL_ANSWERS), the
 * host's for records of requested addresses (asked.h), and the node's for copies of claims
 * (SL_XL_CLAIMED). A bit is set before the first record is stored, and is never cleared.
 */
#define SL_COUNT_ANSWERED (SL_COUNT_PROVEN_BY + 2 * SL_PROVEN_BUCKETS)
#define SL_COUNT_ASKED (SL_COUNT_ANSWERED + SL_PORT_CELLS)
#define SL_COUNT_CLAIMED (SL_COUNT_ASKED + SL_PORT_CELLS)
#define SL_PORT_CELLS (65536 / 32)
#define SL_COUNTS (SL_COUNT_CLAIMED + SL_PORT_CELLS)

#define SL_COUNTERS 8

/* Value of sl_count: several counters in one element, because the kernel rounds elements up to 8
 * bytes.
 */
struct sl_counters {
	__u32 n[SL_COUNTERS];
};
_Static_assert(sizeof(struct sl_counters) == 32, "no padding");
_Static_assert(SL_COUNTS % SL_COUNTERS == 0, "whole elements");

/* Seconds for which counts remain valid without a collector. */
#define SL_COUNT_LIFE 150

/*
 * Value of sl_own: an address of this node, at which its node ports answer. Its index is the
 * address's epoch bucket modulo SL_MAX_OWN, or up to SL_OWN_PROBES - 1 more. When the node loses
 * the address, the element stays until another address needs it.
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
 * Keys of sl_src4 and sl_src6; the value has no meaning. A front with SL_FRONT_SOURCES accepts
 * clients only from its prefixes in these maps.
 */
struct sl_src_key4 {
	__u32 bits; /* 32 for the front, plus the length of the prefix */
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
	__be32 client; /* the client's address; 0: the node itself */
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
 * Value of these maps, one word: backend | generation of the backend << 24 | last use in seconds
 * << 32. It is changed by compare-and-exchange of the whole word, because the map may recycle the
 * element.
 */

/*
 * Longer lists are not searched for the backend that a client keeps. The client gets the backend
 * that the hash of its address selects, which stays the same while the list does not change.
 */
#define SL_AFFINITY_MEMBERS 1024

#endif
