// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pods

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

// clock is a time that a test moves.
type clock struct{ at time.Time }

func (c *clock) turns() *turns {
	c.at = time.Unix(1_000_000, 0)
	return newTurns(func() time.Time { return c.at })
}

// wants returns changes of the first pods of a tenant.
func wants(t *testing.T, tenant shares.Tenant, controller string, n int, fresh bool) (all []want) {
	t.Helper()
	set, err := label.Canonicalize(label.Kubernetes(label.KeyNamespace, tenant.Name()))
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		all = append(all, want{
			holder: allocator.EndpointHolder(fmt.Sprintf("%s-%03d", tenant.Name(), i), "eth0"),
			labels: Labels{Set: set, Tenant: tenant, Controller: controller}, fresh: fresh,
		})
	}
	return all
}

// takes fails unless exactly this number of changes is allowed now, and the next one later.
func (c *clock) takes(t *testing.T, what string, turns *turns, all []want, now int, next time.Duration) []want {
	t.Helper()
	got, at := turns.take(all)
	if len(got) != now || (next == 0) != at.IsZero() || next != 0 && at.Sub(c.at) != next {
		t.Errorf("%s: %d may come now, and the next after %s; want %d and %s", what, len(got), at.Sub(c.at), now, next)
	}
	return got
}

func TestRatesOfAPod(t *testing.T) {
	var c clock
	turns := c.turns()
	one := wants(t, shares.Namespace("a"), "", 1, false)
	for i := range podRate.burst {
		c.takes(t, fmt.Sprint("change ", i), turns, one, 1, 0)
	}
	c.takes(t, "too many", turns, one, 0, podRate.every)
	c.at = c.at.Add(podRate.every - time.Second)
	c.takes(t, "later", turns, one, 0, time.Second)
	c.at = c.at.Add(time.Second)
	c.takes(t, "in time", turns, one, 1, 0)
	c.takes(t, "again too many", turns, one, 0, podRate.every)
	c.at = c.at.Add(time.Hour)
	for range podRate.burst {
		c.takes(t, "after a rest", turns, one, 1, 0)
	}
	c.takes(t, "no more than the burst", turns, one, 0, podRate.every)
}

// TestRatesOfAControllerCountWithinItsNamespace: the author of a pod chooses its controller reference, so the rate of a
// controller must not affect other namespaces.
func TestRatesOfAControllerCountWithinItsNamespace(t *testing.T) {
	var c clock
	turns := c.turns()
	all := wants(t, shares.Namespace("a"), "uid", controllerRate.burst+10, false)
	c.takes(t, "of one controller", turns, all, controllerRate.burst, controllerRate.every)
	c.takes(t, "of the same UID in another namespace", turns, wants(t, shares.Namespace("b"), "uid", 3, false), 3, 0)
	c.takes(t, "of another one", turns, wants(t, shares.Namespace("a"), "other", 3, false), 3, 0)
	c.at = c.at.Add(2 * controllerRate.every)
	c.takes(t, "later", turns, all, 2, controllerRate.every)
}

// TestRateOfTheNodeIsForNewLabelSets: only a change that allocates a new number uses the rate of the node.
func TestRateOfTheNodeIsForNewLabelSets(t *testing.T) {
	var c clock
	turns := c.turns()
	all := wants(t, shares.Namespace("a"), "", nodeRate.burst+10, true)
	took := c.takes(t, "new ones", turns, all, nodeRate.burst, nodeRate.every)
	known := wants(t, shares.Namespace("b"), "", 20, false)
	c.takes(t, "known ones", turns, known, len(known), 0)
	turns.giveBack(known[0])
	c.takes(t, "a known one that failed gives no number", turns, all, 0, nodeRate.every)
	turns.giveBack(took[0])
	turns.giveBack(took[1])
	c.takes(t, "new ones that failed", turns, all, 2, nodeRate.every)
}

// TestTenantsTakeTurns: labelled tenants and other namespaces alternate, independently of the number of their requests.
func TestTenantsTakeTurns(t *testing.T) {
	var c clock
	turns := c.turns()
	c.takes(t, "the burst", turns, wants(t, shares.Namespace("first"), "", nodeRate.burst, true), nodeRate.burst, 0)
	all := slices.Concat(
		wants(t, shares.Labelled("a"), "", 50, true), wants(t, shares.Labelled("b"), "", 1, true),
		wants(t, shares.Namespace("x"), "", 50, true), wants(t, shares.Namespace("y"), "", 50, true),
		wants(t, shares.Namespace("z"), "", 2, true),
	)
	c.at = c.at.Add(12 * nodeRate.every)
	served := map[string]int{}
	for _, w := range c.takes(t, "twelve", turns, all, 12, nodeRate.every) {
		served[w.labels.Tenant.String()]++
	}
	want := map[string]int{"tenant a": 5, "tenant b": 1, "namespace x": 2, "namespace y": 2, "namespace z": 2}
	for tenant, n := range want {
		if served[tenant] != n {
			t.Errorf("%s was served %d times, want %d: %v", tenant, served[tenant], n, served)
		}
	}
	// Of the pods of one tenant, the one that waits longest comes first.
	mine := wants(t, shares.Labelled("a"), "", 50, true)
	c.at = c.at.Add(nodeRate.every)
	if got, _ := turns.take(mine); len(got) != 1 || got[0].holder != mine[5].holder {
		t.Errorf("the next pod is %+v, want %s", got, mine[5].holder)
	}
}

// TestWhoComesNewWaitsBehindThoseThatWait: a request of a new name waits behind the waiting requests, so invented names
// get no earlier turn.
func TestWhoComesNewWaitsBehindThoseThatWait(t *testing.T) {
	var c clock
	turns := c.turns()
	c.takes(t, "the burst", turns, wants(t, shares.Namespace("first"), "", nodeRate.burst, true), nodeRate.burst, 0)
	victim := wants(t, shares.Namespace("victim"), "", 1, true)
	for i := range 50 {
		all := slices.Concat(victim, wants(t, shares.Namespace(fmt.Sprint("made-", i)), "", 1, true),
			wants(t, shares.Namespace(fmt.Sprint("also-", i)), "", 1, true))
		if got, _ := turns.take(all); slices.ContainsFunc(got, func(w want) bool { return w.holder == victim[0].holder }) {
			return
		}
		c.at = c.at.Add(nodeRate.every)
		if i > 3 {
			t.Fatalf("after %d rounds it was not served", i)
		}
	}
}

// TestManyThatWaitKeepTheirTurns: if a node has more namespaces, or a tenant more pods, than turns are stored for, the
// first names in alphabetical order get no more turns than other names.
func TestManyThatWaitKeepTheirTurns(t *testing.T) {
	crowd := func() (all []want) {
		for i := range forgetLength/2 + 100 {
			all = append(all, wants(t, shares.Namespace(fmt.Sprintf("a-%04d", i)), "", 1, true)...)
		}
		return append(all, wants(t, shares.Namespace("victim"), "", 1, true)...)
	}
	for what, all := range map[string][]want{
		"namespaces":         crowd(),
		"pods of one tenant": wants(t, shares.Labelled("a"), "", forgetLength+100, true),
	} {
		var c clock
		turns := c.turns()
		served := map[allocator.Holder]int{}
		const atOnce = 50
		for range len(all) / atOnce {
			got, _ := turns.take(all)
			for _, w := range got {
				served[w.holder]++
			}
			c.at = c.at.Add(atOnce * nodeRate.every)
		}
		for _, w := range all {
			if n := served[w.holder]; n < 1 || n > 2 {
				t.Errorf("%s: %s had %d turns while each of %d waited", what, w.holder, n, len(all))
				break
			}
		}
	}
}

// TestFullBucketsAreForgotten: full buckets are removed, and no others.
func TestFullBucketsAreForgotten(t *testing.T) {
	var c clock
	turns := c.turns()
	busy := wants(t, shares.Namespace("busy"), "uid", 1, false)
	for i := range 2 * forgetLength {
		turns.take(wants(t, shares.Namespace(fmt.Sprint("n", i)), "uid", 1, false))
		if i%100 == 0 {
			c.at = c.at.Add(time.Hour)
		}
	}
	for range podRate.burst {
		turns.take(busy)
	}
	turns.take(nil)
	if n := len(turns.pods) + len(turns.controllers) + turns.tenants.Len() + len(turns.last); n > 3*forgetLength {
		t.Errorf("%d entries are kept", n)
	}
	c.takes(t, "a pod that used its rate", turns, busy, 0, podRate.every)
}
