/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_CONFIG_H
#define SLUICE_CONFIG_H

/*
 * Constants of one load. The verifier knows their values and removes the code that they disable.
 * They must not come from a map instead: they are part of the key by which a restarted datapath
 * recognises a loaded program.
 */

#include <linux/types.h>

#define SL_TUNNEL_PORTS 4

/* UDP ports of nodes that no pod may send to, host order, 0: unused */
volatile const __u16 cfg_tunnel_ports[SL_TUNNEL_PORTS];

/* identity of addresses that the ipcache does not contain */
volatile const __u32 cfg_world4 = 2;
volatile const __u32 cfg_world6 = 2;

/* events per second, endpoint and kind; see SL_EVENT_SHARERS */
volatile const __u32 cfg_event_rate = 64;

/* 0: do not report allowed or ended connections */
volatile const __u32 cfg_connection_events = 1;

/* 1: copy the DSCP of the inner packet to the tunnel's outer packet */
volatile const __u32 cfg_tunnel_dscp = 0;

/* UDP port of tunnel packets that the programs encapsulate and decapsulate, host order; 0: all go
 * through the tunnel device
 */
volatile const __u16 cfg_direct_port = 0;

/* 1: translate service addresses to backends */
volatile const __u32 cfg_services = 0;

/* 1: native routing: pod packets travel between nodes without a tunnel */
volatile const __u32 cfg_native = 0;

/* 1: the kernel offers lookups of nf_conntrack connections */
volatile const __u32 cfg_conntrack = 0;

/* 1: the kernel has bpf_cast_to_kern_ctx */
volatile const __u32 cfg_cast = 0;

/* SL_PREVIOUS_...: the maps of the previous version that still hold connections */
#define SL_PREVIOUS_4 0x1
#define SL_PREVIOUS_6 0x2
volatile const __u32 cfg_previous = 0;

#endif
