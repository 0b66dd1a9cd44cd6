// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// TestTheIndexIsThatOfTheRecords: after any changes, the index equals an index built from the records.
func TestTheIndexIsThatOfTheRecords(t *testing.T) {
	const owners, namespaces, changes = 6, 3, 2000
	phases := []endpoint.Phase{endpoint.PhaseCreating, endpoint.PhaseReady, endpoint.PhaseDeleted}
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	c := newMachine().start(t)
	for i := range changes {
		n := rng.IntN(owners)
		o := workload.Owner{ContainerID: fmt.Sprint(n), Interface: "eth0"}
		if rng.IntN(5) == 0 {
			c.forget(o)
		} else {
			r := endpoint.Record{Phase: phases[rng.IntN(len(phases))], Spec: endpoint.Spec{Owner: o}}
			if r.Phase != endpoint.PhaseDeleted {
				r.Namespace.Inode = uint64(rng.IntN(namespaces))
				r.Slot = uint16((n + 1) * rng.IntN(2))
			}
			c.set(r, endpoint.Ready)
		}
		want := NewIndex()
		for o, r := range c.records {
			want.add(r, c.states[o])
		}
		if !reflect.DeepEqual(c.Index, want) {
			t.Fatalf("seed %d, after %d changes: %+v, want %+v", seed, i+1, c.Index, want)
		}
	}
}
