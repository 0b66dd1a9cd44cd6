/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_COMPILER_H
#define SLUICE_COMPILER_H

#include <linux/types.h>

#define bool _Bool
#define true 1
#define false 0
#define NULL ((void *)0)

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* One load that the compiler neither splits nor repeats. */
#define READ_ONCE(x) (*(const volatile __typeof__(x) *)&(x))

/*
 * Keeps an argument of a function that only some programs read: clang leaves it
 * out of the call elsewhere, and the verifier refuses a function that takes a
 * context and is given none.
 */
#define use_argument(x) asm volatile("" : : "r"(x))

/* a if first is 1, b if it is 0. Without a branch, of which the verifier would walk both ways
 * to the end.
 */
static __always_inline __u64 pick(__u64 first, __u64 a, __u64 b)
{
	return b ^ ((a ^ b) & -first);
}

/* Equality of two 16-byte values at addresses that are multiples of 8. */
static __always_inline bool equal16(const void *a, const void *b)
{
	const __u64 *x = a, *y = b;

	return ((x[0] ^ y[0]) | (x[1] ^ y[1])) == 0;
}

static __always_inline bool zero16(const void *a)
{
	const __u64 *x = a;

	return (x[0] | x[1]) == 0;
}

/* Equality of two Ethernet addresses at addresses that are multiples of 2. */
static __always_inline bool equal_mac(const void *a, const void *b)
{
	const __u16 *x = a, *y = b;

	return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2])) == 0;
}

#endif
