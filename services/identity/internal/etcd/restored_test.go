// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
	"github.com/sluice-net/sluice/store"
)

// TestNothingNewIsAllocatedWhileNodesClaimInARestoredStore: what nodes hold or know is written, also an identity that
// the restored data lack. A new label set and a new block wait.
func TestNothingNewIsAllocatedWhileNodesClaimInARestoredStore(t *testing.T) {
	s := etcdtest.Start(t)
	ctx := servicetest.Context(t)
	a := joined(t, s, "a")
	web, db, cache := storetest.Labels(t, "web"), storetest.Labels(t, "db"), storetest.Labels(t, "cache")
	if _, err := a.Claim(ctx, web, 0, 300); err != nil {
		t.Fatal(err)
	}
	settings := blocks(4)
	n1 := claimer(t, s.Endpoint, "n1")
	none := registry.Registration{Ranges: &[]netip.Prefix{}, IPAM: &settings}
	if _, _, err := n1.Register(ctx, none, false); err != nil {
		t.Fatal(err)
	}
	admin := s.Client()
	if _, err := admin.Put(ctx, testPrefix+"/restored", "2"); err != nil {
		t.Fatal(err)
	}

	if c, err := a.Claim(ctx, web, 0, 301); err != nil || c.Number != 300 {
		t.Errorf("a label set of the restored data: %v, %v", c, err)
	}
	if c, err := a.Restore(ctx, identity.Identity{Number: 400, Labels: db}); err != nil || !c.Created {
		t.Errorf("an identity that this node holds: %v, %v", c, err)
	}
	if _, err := a.Claim(ctx, cache, 0, 302); !errors.Is(err, allocator.ErrRestored) ||
		!errors.Is(err, allocator.ErrUnavailable) {
		t.Errorf("a new label set: %v", err)
	}
	if _, err := n1.ClaimRange(ctx, settings, false, nil); !errors.Is(err, allocator.ErrRestored) {
		t.Errorf("a new block: %v", err)
	}
	// The number of a label set that this node knows.
	if c, err := a.Claim(ctx, cache, 303, 303); err != nil || c.Number != 303 {
		t.Errorf("a known label set: %v, %v", c, err)
	}
	for key := range keysBelow(t, admin, "/id/") {
		if key != "300" && key != "303" && key != "400" {
			t.Errorf("the number %s was allocated", key)
		}
	}

	if _, err := admin.Delete(ctx, testPrefix+"/restored"); err != nil {
		t.Fatal(err)
	}
	if c, err := a.Claim(ctx, storetest.Labels(t, "new"), 0, 302); err != nil || c.Number != 302 {
		t.Errorf("a new label set, after all have claimed: %v, %v", c, err)
	}
	if _, err := n1.ClaimRange(ctx, settings, false, nil); err != nil {
		t.Errorf("a new block, after all have claimed: %v", err)
	}
}

// TestNumbersOfARestoredStoreComeFromAnotherZone: a candidate that was chosen before the node knew the epoch is
// refused, and the allocator chooses again.
func TestNumbersOfARestoredStoreComeFromAnotherZone(t *testing.T) {
	s := etcdtest.Start(t)
	ctx := servicetest.Context(t)
	a := joined(t, s, "a")
	if a.Zone() != (allocator.Zone{}) {
		t.Errorf("zone %v without an epoch", a.Zone())
	}
	admin := s.Client()
	for _, epoch := range []uint64{1, 2} {
		if _, err := admin.Put(ctx, testPrefix+"/epoch", strconv.FormatUint(epoch, 10)); err != nil {
			t.Fatal(err)
		}
		web := storetest.Labels(t, fmt.Sprintf("web%d", epoch))
		candidate := identity.Numeric(60_000 + epoch)
		if _, err := a.Claim(ctx, web, 0, candidate); !errors.Is(err, allocator.ErrZone) {
			t.Errorf("the candidate %d of another zone: %v", candidate, err)
		}
		if a.Zone() != allocator.ZoneOf(epoch) {
			t.Errorf("zone %v in epoch %d", a.Zone(), epoch)
		}
		if c, err := a.Claim(ctx, web, 0, candidate); err != nil || c.Number != candidate {
			t.Errorf("the next candidate: %v, %v", c, err)
		}
		if c, err := a.Claim(ctx, web, 0, candidate+10); err != nil || c.Number != candidate {
			t.Errorf("the same label set again: %v, %v", c, err)
		}
	}
}

// TestNumbersOfAnEmptyStoreComeFromAnotherZone: the key of the epoch has the same revision in both stores.
func TestNumbersOfAnEmptyStoreComeFromAnotherZone(t *testing.T) {
	ctx := servicetest.Context(t)
	web := storetest.Labels(t, "web")
	var former *Store
	for _, epoch := range []uint64{1, 2} {
		s := etcdtest.Start(t)
		if _, err := s.Client().Put(ctx, testPrefix+"/epoch", strconv.FormatUint(epoch, 10)); err != nil {
			t.Fatal(err)
		}
		n := joined(t, s, "n")
		if former != nil {
			n.Identities.epoch.Store(former.Identities.epoch.Load())
		}
		if _, err := n.Claim(ctx, web, 0, identity.Numeric(60_000)); !errors.Is(err, allocator.ErrZone) {
			t.Errorf("a candidate that was chosen before the node knew epoch %d: %v", epoch, err)
		}
		if n.Zone() != allocator.ZoneOf(epoch) {
			t.Errorf("zone %v in epoch %d", n.Zone(), epoch)
		}
		former = n
	}
}

// TestNothingNewIsAllocatedWithoutTheKeyOfAStoreInKubernetes: the store renews the key only while no other store can
// begin an epoch. Known label sets do not need it.
func TestNothingNewIsAllocatedWithoutTheKeyOfAStoreInKubernetes(t *testing.T) {
	s := etcdtest.Start(t)
	ctx := servicetest.Context(t)
	a := joined(t, s, "a")
	web := storetest.Labels(t, "web")
	if _, err := a.Claim(ctx, web, 0, 300); err != nil {
		t.Fatal(err)
	}
	token := func() (string, error) { return "", errors.New("no token is needed") }
	a.Identities.cfg.Client.Store = store.NewKubernetesRenewer(t.TempDir(), "a", token, time.Now, log.Discard())
	for _, set := range []struct {
		app string
		ok  bool
	}{{"new1", false}, {"new2", true}} {
		if set.ok {
			if _, err := s.Client().Put(ctx, testPrefix+"/allocate", "1"); err != nil {
				t.Fatal(err)
			}
		}
		_, err := a.Claim(ctx, storetest.Labels(t, set.app), 0, 301)
		if set.ok != (err == nil) || !set.ok && !errors.Is(err, allocator.ErrUnleased) {
			t.Errorf("the new label set %s: %v", set.app, err)
		}
		if c, err := a.Claim(ctx, web, 0, 302); err != nil || c.Number != 300 {
			t.Errorf("a label set that the store knows: %v, %v", c, err)
		}
	}
}
