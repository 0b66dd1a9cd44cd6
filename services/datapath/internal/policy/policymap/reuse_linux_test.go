// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"errors"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// TestKernelNumberOfADamagedTableInUseIsNotGivenOutAgain: a table that cannot be adopted denies
// everything to the endpoints that refer to it. If its ID were reused, they would get another
// endpoint's policy.
func TestKernelNumberOfADamagedTableInUseIsNotGivenOutAgain(t *testing.T) {
	dir := kerneltest.NewBPFFS(t)
	k := open(t, dir)
	damaged, err := k.DefineTable(smallTable(1))
	if err != nil {
		t.Fatal(err)
	}
	e := k.publish(t, 10, endpointmap.Policy{Egress: damaged, Ingress: damaged})
	h := k.store.header(damaged)
	h.PeerSet++
	if err := k.store.storeHeader(damaged, h); err != nil {
		t.Fatal(err)
	}
	k.close(t)

	k = open(t, dir)
	got, err := k.endpoints.Lookup(e.Slot)
	if err != nil || got.Policy.Egress != damaged || got.Policy.Ingress != damaged {
		t.Fatalf("after the restart: %+v, %v; want table %d", got.Policy, err, damaged)
	}
	defined := 0
	for {
		id, err := k.DefineTable(smallTable(uint64(2 + defined)))
		var full *nodetable.NoCapacityError
		if errors.As(err, &full) && full.Map == "sl_table" {
			break
		}
		if err != nil {
			t.Fatalf("table number %d: %v", defined, err)
		}
		if id == damaged {
			t.Fatalf("table ID %d, to which slot %d refers, was reused after %d others", id, e.Slot, defined)
		}
		defined++
	}
	if want := 4096 - int(firstTable) - 1; defined != want {
		t.Errorf("%d tables were defined, want all but the corrupt one, %d", defined, want)
	}
}
