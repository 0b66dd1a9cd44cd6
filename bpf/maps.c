/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * The maps and types that programs and Go share. This object is never loaded: the Go side
 * generates specifications and types from it.
 */

#define SL_DESCRIBED

#include <sluice/maps.h>
#include <sluice/previous_maps.h>
#include <sluice/service_maps.h>

/* Never called: adds the enumerations to the type information. */
__noinline int sl_types(enum sl_kind kind, enum sl_scope scope, enum sl_action action,
			enum sl_by by, enum sl_ct_stat stat)
{
	return (int)kind + (int)scope + (int)action + (int)by + (int)stat;
}

/* Adds the types that sluice_judge exchanges in packets. */
__noinline int sl_judge_types(const struct sl_question *question, const struct sl_answer *answer)
{
	return question && answer;
}

/* Adds the types of the cells in sl_run, which the tools that dry-run programs read. */
__noinline int sl_cell_types(const struct sl_packet *packet, enum sl_program program)
{
	return packet != 0 && program;
}

/* Adds the type for listing sockets. */
__noinline int sl_socket_types(const struct sl_socket *socket)
{
	return socket != 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
