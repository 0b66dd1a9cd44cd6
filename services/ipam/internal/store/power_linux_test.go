// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/disktest"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/store"
)

// TestPowerCutLosesNoAddress proves INV-10: after a power loss at any moment, the file contains every address whose
// confirmation was returned, and no lease.
func TestPowerCutLosesNoAddress(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "ipam")
	s, err := store.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	disk := disktest.New(t, root) // behind the creation, which kit/store tests
	a, err := ipam.New(s, ipam.Options{Field: "pools", Ranges: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/16")}, Lease: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	answered := 0
	calls := make(chan error, 1)
	go func() {
		defer cancel()
		for i := range 40 {
			o := workload.Owner{ContainerID: fmt.Sprintf("%064x", i), Interface: "eth0"}
			got, err := a.Allocate(ctx, ipam.Request{Owner: o})
			if err != nil {
				calls <- err
				return
			}
			if _, err = a.Confirm(ctx, o, []netip.Addr{got.Addresses[0].Addr}); err != nil {
				calls <- err
				return
			}
			answered++
			disk.Mark(answered)
		}
		calls <- nil
	}()
	var ran error
	disk.Run(t, func() { ran = a.Run(ctx) })
	if err := <-calls; err != nil || ran != nil {
		t.Fatal(err, ran)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(7, 8)) //nolint:gosec // the same cuts in each run
	for range 100 {
		after := t.TempDir()
		marked := disk.Cut(t, random.IntN(len(disk.Ops())+1), random, after)
		s, err := store.Open(filepath.Join(after, "ipam"))
		if err != nil {
			t.Fatal(err)
		}
		c, err := s.Load()
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range c.Allocations {
			if x.State != ipam.Confirmed {
				t.Errorf("the file has a lease: %+v", x)
			}
		}
		// The last one may be written and not answered.
		if n := len(c.Allocations); n < marked || n > marked+1 {
			t.Errorf("%d allocations, %d were answered", n, marked)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
}
