/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_CONFIG_H
#define SLUICE_CONFIG_H

/*
 * Constants of one load. The verifier knows their values and removes what they
 * switch off. None of them may be read from a map instead: they are part of
 * the key under which a loaded program is found again.
 */

#include <linux/types.h>

#define SL_TUNNEL_PORTS 4

/* UDP ports that no pod may reach on a node, host order, 0: unused */
volatile const __u16 cfg_tunnel_ports[SL_TUNNEL_PORTS];

/* identity of an address that the ipcache does not know */
volatile const __u32 cfg_world4 = 2;
volatile const __u32 cfg_world6 = 2;

/* events per endpoint, kind and second; SL_EVENT_SHARERS times as many per CPU
 * and reason
 */
volatile const __u32 cfg_event_rate = 64;

/* 0: no events about connections that are allowed or end */
volatile const __u32 cfg_connection_events = 1;

/* 1: the packet around one in a tunnel has its DSCP */
volatile const __u32 cfg_tunnel_dscp = 0;

/* 1: addresses of services lead to backends */
volatile const __u32 cfg_services = 0;

/* 1: packets of pods travel between the nodes as they are */
volatile const __u32 cfg_native = 0;

/* 1: the kernel can be asked for connections that nf_conntrack tracks */
volatile const __u32 cfg_conntrack = 0;

/* 1: the kernel has bpf_cast_to_kern_ctx */
volatile const __u32 cfg_cast = 0;

/* SL_PREVIOUS_...: the maps of the version before that still hold connections */
#define SL_PREVIOUS_4 0x1
#define SL_PREVIOUS_6 0x2
volatile const __u32 cfg_previous = 0;

#endif
