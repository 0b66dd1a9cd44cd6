// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package exchange

import (
	"slices"
	"testing"
	"testing/synctest"

	"github.com/sluice-net/sluice/services/dns/internal/names"
)

// other is a pod of another namespace with the same rules.
func other() Connection {
	c := client
	c.Endpoint, c.Asker = 8, names.Asker{Endpoint: 8, Tenant: "namespace bank", Namespace: "bank"}
	return c
}

// TestEachNamespaceLearnsForItself: addresses that a pod of one namespace has learned are not enforced for another
// namespace.
func TestEachNamespaceLearnsForItself(t *testing.T) {
	b := newBench(t)
	shop := client
	shop.Asker.Namespace = "shop"
	for id, c := range []Connection{shop, shop, other()} {
		b.ask(t, c, uint16(id), "www.example.com.") //nolint:gosec // three
		b.settled(t, c, answer(t, uint16(id), "www.example.com.", "192.0.2.1"))
	}
	const call = "www.example.com.[192.0.2.1] 1m40s"
	if got := b.policy.take(); !slices.Equal(got, []string{call, call}) {
		t.Errorf("calls %q, want one for each namespace", got)
	}
}

// TestPodTeachesOnlyNamesThatItsRulesSelect: sluice-policy refuses a name that no rule of the asking pod selects. The
// next answer for the name to a pod whose rules select it is held again.
func TestPodTeachesOnlyNamesThatItsRulesSelect(t *testing.T) {
	b := newBench(t)
	b.policy.err = ErrNotSelected
	b.ask(t, client, 1, "www.example.com.")
	b.settled(t, client, answer(t, 1, "www.example.com.", "192.0.2.1"))
	r := b.table.Refusals("www.example.com.")
	if names, _ := b.table.Len(); names != 0 || len(r) != 1 || b.Counts.Late.Load() != 0 {
		t.Errorf("%d names, refusals %+v, %d late", names, r, b.Counts.Late.Load())
	}
	b.policy.err = nil
	b.policy.take()
	b.ask(t, client, 2, "www.example.com.")
	b.settled(t, client, answer(t, 2, "www.example.com.", "192.0.2.1"))
	if got := b.policy.take(); len(got) != 1 {
		t.Errorf("calls %q", got)
	}
}

// TestAnswerWaitsForItsPod: an answer to an unknown pod waits until the pod is known, because the namespace that may
// use the addresses depends on the pod.
func TestAnswerWaitsForItsPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		unknown := client
		unknown.Unknown, unknown.Asker = true, names.Asker{Endpoint: 9999, Tenant: "unknown"}
		for id, known := range []bool{true, false} {
			b.ask(t, unknown, uint16(id), "www.example.com.") //nolint:gosec // two
			action, held := b.Answer(unknown, answer(t, uint16(id), "www.example.com.", "192.0.2.1"))
			if action != Hold || !held.NeedsAsker() {
				t.Fatalf("action %d", action)
			}
			if known {
				held.SetAsker(names.Asker{Endpoint: 7, Tenant: "namespace shop", Namespace: "shop"})
			}
			b.Settle(t.Context(), held)
			calls := b.policy.take()
			if (len(calls) == 1) != known {
				t.Errorf("the pod is known: %t, calls %q", known, calls)
			}
		}
		if names, _ := b.table.Len(); names != 1 || b.Counts.Late.Load() != 1 {
			t.Errorf("%d names, %d late", names, b.Counts.Late.Load())
		}
	})
}
