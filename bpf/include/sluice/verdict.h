/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* Copyright 2026 The Sluice Authors */
#ifndef SLUICE_VERDICT_H
#define SLUICE_VERDICT_H

/*
 * The verdict of one policy table on one connection. The peer is classified by its identity and,
 * if the table requires it, by its address. Each class has a sorted list of intervals over
 * protocol and port. Each interval has two rule slots: the best rule of the Admin tier, and the
 * best rule of the other tiers. In each slot, the lower rule number of the two classes wins.
 *
 * An invalid index drops the packet; it never means "no rule".
 */

#include <linux/bpf.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <sluice/compiler.h>
#include <sluice/maps.h>
#include <sluice/proxy.h>

/* number of cluster-wide identities; node-local ones follow them in sl_id */
#define SL_CLUSTER_WIDE 65536

/* The fields of the peer's sl_id entry. */
struct sl_peer_word {
	__u32 class;
	__u32 kind;
	__u32 scope;
	bool known;
};

/* The two rule slots of an interval; SL_NO_ADMIN and SL_NO_REST: no rule. */
struct sl_rules {
	__u32 admin;
	__u32 rest;
};

static __always_inline struct sl_peer_word peer_word(__u32 identity)
{
	struct sl_peer_word unknown = { .kind = SL_KIND_UNKNOWN, .scope = SL_SCOPE_CLUSTER };
	struct sl_peer_word known;
	__u32 at = identity;
	__u32 *word, w;

	if (identity >= SL_NODE_LOCAL)
		at = identity - SL_NODE_LOCAL + SL_CLUSTER_WIDE;
	else if (identity >= SL_CLUSTER_WIDE)
		return unknown;
	word = bpf_map_lookup_elem(&sl_id, &at);
	if (!word)
		return unknown;
	w = READ_ONCE(*word);
	if (!(w & SL_ID_KNOWN))
		return unknown;
	known.class = w & 0xffff;
	known.kind = w >> SL_ID_KIND_SHIFT & (SL_KINDS - 1);
	known.scope = w >> SL_ID_SCOPE_SHIFT & 3;
	known.known = true;
	return known;
}

static __always_inline __u32 class_of_peer(const struct sl_table *table,
					   const struct sl_peer_word *peer)
{
	struct sl_peer_key key = { .peer_set = table->peer_set, .node_class = peer->class };
	__u32 *class;

	if (peer->known) {
		class = bpf_map_lookup_elem(&sl_peer, &key);
		if (class)
			return *class;
	}
	return table->def_class[peer->kind & (SL_KINDS - 1)];
}

static __always_inline __u32 class_of_address(const struct sl_table *table,
					      const struct sl_question *q, __u32 scope)
{
	struct sl_cidr_key4 key4 = { .bits = 64, .set = bpf_htonl(table->cidr_set) };
	struct sl_cidr_key6 key6 = { .bits = 160, .set = key4.set };
	const struct sl_cidr *cidr;

	if (q->family == 4) {
		__builtin_memcpy(key4.addr, q->addr, sizeof(key4.addr));
		cidr = bpf_map_lookup_elem(&sl_cidr4, &key4);
	} else {
		__builtin_memcpy(key6.addr, q->addr, sizeof(key6.addr));
		cidr = bpf_map_lookup_elem(&sl_cidr6, &key6);
	}
	return cidr ? cidr->class[scope] : table->addr_def[scope];
}

/* 1 if a is above b, without a branch. */
static __always_inline __u32 above(__u32 a, __u32 b)
{
	return (__u32)(((__u64)b - a) >> 63);
}

/* The first interval that does not end below the point. */
static __always_inline __u32 entry_of(const struct sl_port_node *node, __u32 point)
{
	__u32 i;

	_Static_assert(SL_FANOUT == 16, "four steps");
	i = above(point, node->hi[7]) << 3;
	i += above(point, node->hi[i + 3]) << 2;
	i += above(point, node->hi[i + 1]) << 1;
	i += above(point, node->hi[i]);
	return i & (SL_FANOUT - 1);
}

/* Looks the point up in the intervals of a class. */
static __always_inline enum sl_reason search(const struct sl_table *table, __u32 class, __u32 point,
					     struct sl_rules *rules)
{
	__u32 at = READ_ONCE(table->class_base) + class, i;
	const struct sl_port_node *node;
	const __u32 *root;

	if (class >= table->n_class)
		return SL_REASON_POLICY_TABLE_CORRUPT;
	root = bpf_map_lookup_elem(&sl_class, &at);
	if (!root)
		return SL_REASON_POLICY_TABLE_CORRUPT;
	at = READ_ONCE(*root);
	for (int depth = 0; depth < SL_DEPTH; depth++) {
		node = bpf_map_lookup_elem(&sl_ports, &at);
		if (!node)
			return SL_REASON_POLICY_TABLE_CORRUPT;
		i = entry_of(node, point);
		if (point > node->hi[i])
			return SL_REASON_POLICY_TABLE_CORRUPT;
		at = node->val[i];
		if (!(at & SL_CHILD)) {
			rules->admin = at >> 16;
			rules->rest = at & 0xffff;
			return SL_CONTINUE;
		}
		at &= ~SL_CHILD;
	}
	return SL_REASON_POLICY_TABLE_CORRUPT;
}

static __always_inline const struct sl_rule *rule_of(const struct sl_table *table, __u32 number)
{
	__u32 at = READ_ONCE(table->rule_base) + number - 1;

	if (number == 0 || number > table->n_rule)
		return NULL;
	return bpf_map_lookup_elem(&sl_rule, &at);
}

/* Applies the deciding rule. */
static __always_inline enum sl_reason apply_rule(const struct sl_rule *rule, __u32 number,
						 bool unknown, const struct sl_question *q,
						 struct sl_side *side)
{
	side->rule = (__u16)number;
	side->by = SL_BY_RULE;
	side->action = rule->action;
	switch (rule->action) {
	case SL_ACTION_ALLOW:
		return SL_CONTINUE;
	case SL_ACTION_REDIRECT:
		return redirect(rule, q, side);
	case SL_ACTION_DENY:
		if (!unknown)
			return SL_REASON_POLICY_DENIED;
		side->by = SL_BY_UNKNOWN_IDENTITY;
		return SL_REASON_IDENTITY_UNKNOWN;
	}
	side->action = SL_ACTION_DENY;
	return SL_REASON_POLICY_TABLE_CORRUPT;
}

/* Applies the table's default, if no rule decides. */
static __always_inline enum sl_reason apply_default(const struct sl_table *table, __u32 kind,
						    struct sl_side *side)
{
	side->rule = 0;
	side->by = SL_BY_DEFAULT;
	side->action = SL_ACTION_ALLOW;
	if (table->flags & SL_TF_DEFAULT_ALLOW)
		return SL_CONTINUE;
	if (table->flags & SL_TF_HOST_ALLOW && kind == SL_KIND_HOST) {
		side->by = SL_BY_HOST_ALLOW;
		return SL_CONTINUE;
	}
	side->action = SL_ACTION_DENY;
	if (kind == SL_KIND_UNKNOWN) {
		side->by = SL_BY_UNKNOWN_IDENTITY;
		return SL_REASON_IDENTITY_UNKNOWN;
	}
	return SL_REASON_POLICY_DENIED;
}

static __always_inline enum sl_reason ask_table(const struct sl_table *table,
						const struct sl_question *q, struct sl_side *side)
{
	struct sl_peer_word peer = peer_word(q->identity);
	struct sl_rules by_identity, rules;
	const struct sl_rule *rule;
	enum sl_reason reason;
	bool unknown = peer.kind == SL_KIND_UNKNOWN;

	reason = search(table, class_of_peer(table, &peer), q->point, &by_identity);
	if (reason)
		return reason;
	rules = by_identity;
	if (table->flags & SL_TF_ADDRESSES) {
		struct sl_rules by_address;

		if (peer.scope >= SL_SCOPES)
			return SL_REASON_POLICY_TABLE_CORRUPT;
		reason = search(table, class_of_address(table, q, peer.scope), q->point,
				&by_address);
		if (reason)
			return reason;
		if (by_address.admin < rules.admin)
			rules.admin = by_address.admin;
		if (by_address.rest < rules.rest)
			rules.rest = by_address.rest;
	}

	if (rules.admin != SL_NO_ADMIN) {
		rule = rule_of(table, rules.admin);
		if (!rule)
			return SL_REASON_POLICY_TABLE_CORRUPT;
		if (rule->action != SL_ACTION_PASS)
			return apply_rule(rule, rules.admin,
					  unknown && rules.admin == by_identity.admin, q, side);
	}
	if (rules.rest != SL_NO_REST) {
		rule = rule_of(table, rules.rest);
		if (!rule)
			return SL_REASON_POLICY_TABLE_CORRUPT;
		if (rule->action != SL_ACTION_PASS)
			return apply_rule(rule, rules.rest,
					  unknown && rules.rest == by_identity.rest, q, side);
	}
	return apply_default(table, peer.kind, side);
}

/* Evaluates reserved tables, and rejects unused table numbers. */
static __always_inline enum sl_reason ask(const struct sl_question *q, struct sl_side *side)
{
	const struct sl_table *table;
	__u32 id = q->table;

	side->by = SL_BY_TABLE;
	side->action = SL_ACTION_DENY;
	switch (id) {
	case SL_TABLE_DENY:
		return SL_REASON_POLICY_DENIED;
	case SL_TABLE_ALLOW:
		side->action = SL_ACTION_ALLOW;
		return SL_CONTINUE;
	case SL_TABLE_PENDING:
		/* allow probes from the local host; answers to them belong to their connection */
		if (q->direction != SL_INGRESS || q->identity != SL_ID_HOST)
			return SL_REASON_POLICY_PENDING;
		side->action = SL_ACTION_ALLOW;
		return SL_CONTINUE;
	}
	if (id < SL_TABLE_FIRST)
		return SL_REASON_POLICY_TABLE_UNKNOWN;
	table = bpf_map_lookup_elem(&sl_table, &id);
	if (!table || table->n_class == 0)
		return SL_REASON_POLICY_TABLE_UNKNOWN;
	return ask_table(table, q, side);
}

/*
 * The verdict of one side: SL_CONTINUE, or the reason to drop. In audit mode a packet passes and
 * is marked if the policy denies it, if there is no policy yet, or if it would be redirected to a
 * proxy. A corrupt table still drops, and so does SL_TABLE_DENY, which
 * isolates an endpoint independently of policies.
 */
__noinline enum sl_reason evaluate_side(const struct sl_question *q, struct sl_side *side)
{
	enum sl_reason reason;

	if (!q || !side)
		return SL_REASON_POLICY_TABLE_CORRUPT;
	side->table = q->table;
	reason = ask(q, side);
	switch (reason) {
	case SL_REASON_POLICY_DENIED:
	case SL_REASON_POLICY_PENDING:
	case SL_REASON_IDENTITY_UNKNOWN:
	case SL_REASON_NO_PROXY:
	case SL_REASON_PROXY_AWAY:
		if (!(q->flags & SL_EP_AUDIT) || q->table == SL_TABLE_DENY)
			return reason;
		side->audited = 1;
		return SL_CONTINUE;
	case SL_CONTINUE:
		/* the proxy would refuse traffic that its rules do not allow */
		if (redirection(side) == SL_REDIRECTS_TO_PROXY && q->flags & SL_EP_AUDIT) {
			side->redirects = SL_REDIRECTS_NOT_NOW;
			side->audited = 1;
		}
		return reason;
	default:
		return reason;
	}
}

#endif
