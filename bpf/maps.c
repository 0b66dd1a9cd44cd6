/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * The maps and types that programs and Go share. Loaded by no one: the Go side
 * takes the specifications and the generated types from here.
 */

#include <sluice/maps.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";
