// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"fmt"
	"maps"
	"testing"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/auditmode"
)

// BenchmarkPolicyOfOneOfManySubjects changes the policy of one of 200 subjects, each with its own
// tables.
func BenchmarkPolicyOfOneOfManySubjects(b *testing.B) {
	const subjects = 200
	k := newFakeKernel()
	k.maxTables, k.maxRows, k.maxClasses = 1<<20, 1<<20, 1<<20
	st := state{map[uint32]props{}, map[uint32]testPolicies{}}
	policy := func(n, version int) testPolicies {
		var rules []testRule
		for bit := range uint8(4) {
			port := uint32(web + 100*n + 10*version + int(bit)) //nolint:gosec // small
			rules = append(rules, testRule{bit: bit, action: policytable.Allow, from: port, to: port})
		}
		p := testPolicy{enforce: true, rules: rules}
		return testPolicies{p, p}
	}
	for i := range subjects {
		id := uint32(300 + i)                                          //nolint:gosec // small
		k.endpoint(uint16(1+i), id, fmt.Sprintf("10.0.0.%d", i))       //nolint:gosec // small
		st.identities[id], st.policies[id] = props(i%16), policy(i, 0) //nolint:gosec // small
	}
	a := New(Config{Name: "bench", Kernel: k, Wait: true})
	if err := a.Adopt(func(uint16) bool { return true }, auditmode.Audited{}); err != nil {
		b.Fatal(err)
	}
	s := newService(1)
	if _, err := a.load(s.snapshot(st)); err != nil {
		b.Fatal(err)
	}
	messages := make([]policytable.Message, b.N)
	for i := range messages {
		next := state{st.identities, maps.Clone(st.policies)}
		next.policies[uint32(300+i%subjects)] = policy(i%subjects, 1+i/subjects%5) //nolint:gosec // small
		messages[i] = s.change(next)
		st = next
	}
	b.ResetTimer()
	for _, m := range messages {
		if _, err := a.apply(b.Context(), m); err != nil {
			b.Fatal(err)
		}
	}
}
