/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#define __BITS_PER_LONG 64
#include <asm-generic/bitsperlong.h>
