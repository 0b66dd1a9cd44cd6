/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */

/*
 * Evaluates one table for one question. It is never attached. A test runs it on packets that
 * contain a question after the Ethernet header, and it writes the answer after the question. So a
 * test can also use subjects that no pod's program evaluates.
 */

#include <linux/if_ether.h>

#include <sluice/verdict.h>

SEC("tc") int sluice_judge(struct __sk_buff *skb)
{
	struct sl_question question;
	struct sl_answer answer = {};

	if (bpf_skb_load_bytes(skb, ETH_HLEN, &question, sizeof(question)))
		return 2;
	answer.reason = evaluate_side(&question, &answer.side);
	if (bpf_skb_store_bytes(skb, ETH_HLEN + sizeof(question), &answer, sizeof(answer), 0))
		return 2;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
