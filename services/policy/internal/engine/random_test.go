// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/services/policy/internal/test/scenario"
)

// diff returns the change that leads from one state to another.
func diff(have, want *scenario.State) Change {
	d := scenario.Diff(have, want)
	c := Change{
		DeletePolicies: d.DeletePolicies, UpsertPolicies: d.UpsertPolicies,
		RemoveIdentities: d.RemoveIdentities, AddIdentities: d.AddIdentities,
		RemoveSubjects: d.RemoveSubjects, AddSubjects: d.AddSubjects, Vacate: d.Vacate,
	}
	for _, n := range d.Forget {
		c.Forget = append(c.Forget, Name{dnsname.ForAll(n.Name), n.Addrs})
	}
	for _, n := range d.Learn {
		c.Learn = append(c.Learn, Name{dnsname.ForAll(n.Name), n.Addrs})
	}
	for _, l := range d.Locate {
		c.Locate = append(c.Locate, Location(l))
	}
	return c
}

// fresh compiles a state in one change.
func fresh(t testing.TB, config Config, s *scenario.State) *Engine {
	t.Helper()
	e := New(config)
	if err := e.Apply(diff(scenario.NewState(), s)); err != nil {
		t.Fatalf("apply from scratch: %v", err)
	}
	return e
}

// runs returns the number of iterations of a random test, given the number in a plain run. POLICY_RANDOM multiplies
// it for longer runs.
func runs(t *testing.T, n int) int {
	t.Helper()
	if text := os.Getenv("POLICY_RANDOM"); text != "" {
		factor, err := strconv.Atoi(text)
		if err != nil || factor < 1 {
			t.Fatalf("POLICY_RANDOM: %q is not a valid factor", text)
		}
		n *= factor
	}
	return max(n/slower, 1)
}

// seeded creates the world of a test. The number in POLICY_SEED, if set, is the seed of the random states; a failed
// test prints the seed.
func seeded(t *testing.T, stream uint64) *scenario.World {
	t.Helper()
	var seed uint64
	if text := os.Getenv("POLICY_SEED"); text != "" {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			t.Fatalf("POLICY_SEED: %v", err)
		}
		seed = n
		t.Logf("POLICY_SEED=%d", seed)
	}
	return scenario.NewWorld(rand.New(rand.NewPCG(seed, stream)))
}
