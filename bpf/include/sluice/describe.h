/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_DESCRIBE_H
#define SLUICE_DESCRIBE_H

/*
 * Directives that tell `sluice map dump` how to render a field if its C type is not enough. By
 * default a field is a number, __be32 and fields of 4 or 16 bytes are addresses, and fields of 6
 * bytes are MAC addresses. The directives become BTF declaration tags of maps.o, which package
 * mapdump reads; programs are compiled without them.
 *
 *   SL_AS("R")      the field as R, which is one of "seconds" (of CLOCK_MONOTONIC), "endpoint",
 *                   "node", "identity-index", "address", "number", "signed", "be32", "hex",
 *                   "enum:E", "unless:N" (a number; N is not written), "a|b|c" (names of
 *                   values from 0 on; "-" is not written) and "hidden"
 *   SL_BITS("…")    a packed word: name@FIRST for a flag, name@FIRST:COUNT=R for a part
 *   SL_PART("…")    the same, with the field's name as prefix
 *   SL_ADDR("…")    an address; port=F: field F is its port; family=F: field F is 4 or 6;
 *                   mixed: IPv4 if all but the first four bytes are 0
 */
#ifdef SL_DESCRIBED
#define SL_DESCRIBE(text) __attribute__((btf_decl_tag(text)))
#else
#define SL_DESCRIBE(text)
#endif

#define SL_AS(text) SL_DESCRIBE("as:" text)
#define SL_BITS(text) SL_DESCRIBE("bits:" text)
#define SL_PART(text) SL_DESCRIBE("part:" text)
#define SL_ADDR(text) SL_DESCRIBE("addr:" text)

#endif
