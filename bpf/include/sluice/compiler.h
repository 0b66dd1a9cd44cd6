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

/* A single load that the compiler neither splits nor repeats. */
#define READ_ONCE(x) (*(const volatile __typeof__(x) *)&(x))

/*
 * Keeps a function argument that only some programs use. Otherwise clang would omit it from the
 * call in the other programs, and the verifier rejects a call of a function with a context
 * argument without a context.
 */
#define use_argument(x) asm volatile("" : : "r"(x))

/*
 * Stops the compiler from moving arithmetic on a pointer before the check that it is not NULL,
 * which the verifier of Linux 6.1 rejects.
 */
#define is_checked(x) asm volatile("" : "+r"(x))

/* Returns a if first is 1, b if it is 0, without a branch: the verifier would follow both ways of
 * a branch to the end.
 */
static __always_inline __u64 pick(__u64 first, __u64 a, __u64 b)
{
	return b ^ ((a ^ b) & -first);
}

/* Compares two 16-byte values, aligned to 8 bytes. */
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

/* Compares two Ethernet addresses, aligned to 2 bytes. */
static __always_inline bool equal_mac(const void *a, const void *b)
{
	const __u16 *x = a, *y = b;

	return ((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2])) == 0;
}

#endif
