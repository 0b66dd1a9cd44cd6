// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// TestHalfAnIdentityIsWholeAgainAfterAClaim: a claim restores the keys of an identity after one of them was deleted by
// hand.
func TestHalfAnIdentityIsWholeAgainAfterAClaim(t *testing.T) {
	c := newCluster(t)
	st := newStore(t, c.Endpoint, "a")
	if _, err := st.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, without := range []string{"id", "labels", "fence"} {
		for k, known := range []identity.Numeric{0, identity.Numeric(300 + 10*i + 1)} {
			n, l := identity.Numeric(300+10*i+k), storetest.Labels(t, fmt.Sprint(without, k))
			if _, err := st.Claim(t.Context(), l, 0, n); err != nil {
				t.Fatal(err)
			}
			key := map[string]string{"id": testKeys.id(n), "labels": testKeys.labels(l), "fence": testKeys.fence(n)}[without]
			if _, err := c.admin.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
			candidate := known
			if candidate == 0 {
				candidate = n
			}
			claim, err := st.Claim(t.Context(), l, known, candidate)
			if err != nil || claim.Number != n {
				t.Errorf("without %s: claim: %+v, %v, want %d again", key, claim, err, n)
			}
		}
	}
	if numbers, _ := content(t, c.admin); len(numbers) != 6 {
		t.Errorf("etcd has %v, want 6 identities", numbers)
	}
}

// TestStrayLabelSetOfANumberInQuarantineIsRemoved: the number now belongs to another label set, so this label set gets
// a new number.
func TestStrayLabelSetOfANumberInQuarantineIsRemoved(t *testing.T) {
	c := newCluster(t)
	st := newStore(t, c.Endpoint, "a")
	if _, err := st.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	web, db := storetest.Labels(t, "web"), storetest.Labels(t, "db")
	for k, v := range map[string]string{testKeys.labels(web): "300", testKeys.quarantine(300): hashText(db)} {
		if _, err := c.admin.Put(t.Context(), k, v); err != nil {
			t.Fatal(err)
		}
	}
	if claim, err := st.Claim(t.Context(), web, 0, 301); err != nil || claim.Number != 301 {
		t.Errorf("claim: %+v, %v, want 301", claim, err)
	}
}

// TestStrayKeysAreTidiedUp: stray keys are deleted even if etcd accepts no writes, because deletions free space.
func TestStrayKeysAreTidiedUp(t *testing.T) {
	c := newCluster(t)
	st := newStore(t, c.Endpoint, "a")
	if _, err := st.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	kept := storetest.Labels(t, "kept")
	if _, err := st.Claim(t.Context(), kept, 0, 300); err != nil {
		t.Fatal(err)
	}
	lost, held := storetest.Labels(t, "lost"), storetest.Labels(t, "held")
	for k, v := range map[string]string{
		testKeys.labels(lost): "301", testKeys.fence(301): "", testKeys.fence(302): "", // nothing refers to them
		testKeys.labels(held): "303", testKeys.fence(303): "", testPrefix + "/ref/b/303": "", // its node will create it again
	} {
		if _, err := c.admin.Put(t.Context(), k, v); err != nil {
			t.Fatal(err)
		}
	}
	c.Full(true)
	ctx, cancel := context.WithCancel(t.Context())
	var refs allocator.References
	st.FollowReferences(ctx, func(r allocator.References) { refs = r; cancel() }) //nolint:errcheck // ends by cancel
	if err := st.Tidy(t.Context(), refs); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]int64{
		testKeys.labels(lost): 0, testKeys.fence(301): 0, testKeys.fence(302): 0,
		testKeys.labels(held): 1, testKeys.fence(303): 1, testKeys.labels(kept): 1, testKeys.fence(300): 1, testKeys.id(300): 1,
	} {
		if resp, err := c.admin.Get(t.Context(), key, clientv3.WithCountOnly()); err != nil || resp.Count != want {
			t.Errorf("%s: %d keys, %v, want %d", key, resp.Count, err, want)
		}
	}
}

// TestFullEtcdIsSaidAndEndsNoSession: a full etcd answers but accepts no writes. The status reports it, and the session
// continues.
func TestFullEtcdIsSaidAndEndsNoSession(t *testing.T) {
	t.Parallel() // it mostly waits
	s := etcdtest.Start(t)
	cfg := quick()
	cfg.Grace = 0
	a, b := startNode(t, s.Endpoint, "a", t.TempDir(), cfg), startNode(t, s.Endpoint, "b", t.TempDir(), cfg)
	a.connected()
	held, err := a.Hold(t.Context(), holder(1), storetest.Labels(t, "held"), false)
	if err != nil {
		t.Fatal(err)
	}
	known, err := b.Hold(t.Context(), holder(1), storetest.Labels(t, "known"), false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := a.Hold(t.Context(), holder(2), storetest.Labels(t, "released"), false); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "a knows b's", func() bool { _, _, err := a.Get(known.Number); return err == nil })
	s.Full(true)
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err = a.Hold(ctx, holder(3), storetest.Labels(t, "new"), false)
	if !errors.Is(err, allocator.ErrUnavailable) || !strings.Contains(err.Error(), "no space left; compact") {
		t.Errorf("new set: %v, want ErrUnavailable that says what to do", err)
	}
	// Known identities are still returned: while etcd accepts no writes, no identity is collected.
	for h, want := range map[int]identity.Identity{4: held, 5: known} {
		if got, err := a.Hold(t.Context(), holder(h), want.Labels, false); err != nil || got.Number != want.Number {
			t.Errorf("hold: %v, %v, want %v", got, err, want)
		}
	}
	// Deletions are permitted.
	if _, err := a.Release(t.Context(), holder(2)); err != nil {
		t.Fatal(err)
	}
	admin := s.Client()
	servicetest.Eventually(t, "the reference goes", func() bool { _, refs := content(t, admin); return len(refs) == 2 })
	// etcd deletes the reference before node a receives the answer.
	servicetest.Eventually(t, "status is connected, no space, one pending write", func() bool {
		sum := a.Summary()
		return sum.Connected && strings.Contains(sum.StoreError, "no space left; compact") && sum.PendingWrites == 1
	})
	s.Full(false)
	a.settled()
	if sum := a.Summary(); sum.StoreError != "" {
		t.Errorf("status %+v after etcd has space again", sum)
	}
	if _, err := a.Hold(t.Context(), holder(3), storetest.Labels(t, "new"), false); err != nil {
		t.Errorf("new set: %v", err)
	}
}

// TestLargestLabelSetFitsIntoARequest: a label set that reaches all limits fits into one request.
func TestLargestLabelSetFitsIntoARequest(t *testing.T) {
	c := newCluster(t)
	st := newStore(t, c.Endpoint, "a")
	if _, err := c.admin.Put(t.Context(), testPrefix+"/id/256", "cni:old=;"); err != nil { // layout 1 has the text twice
		t.Fatal(err)
	}
	if _, err := st.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	var all []label.Label
	for i := range 63 {
		all = append(all, label.Label{Source: "cni", Key: fmt.Sprint("key", i), Value: strings.Repeat("v", 4096)})
	}
	l, err := label.Canonicalize(all...)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if claim, err := st.Claim(t.Context(), l, 0, 300); err != nil || claim.Number != 300 {
			t.Fatalf("claim of %d bytes: %+v, %v", len(l.Text()), claim, err)
		}
	}
	if claim, err := st.Restore(t.Context(), identity.Identity{Number: 300, Labels: l}); err != nil || claim.Number != 300 {
		t.Errorf("restore: %+v, %v", claim, err)
	}
	unused, err := st.Candidates(t.Context(), []identity.Identity{{Number: 300, Labels: l}})
	if err != nil {
		t.Fatal(err)
	}
	if gone, err := st.Collect(t.Context(), unused, time.Hour); err != nil || len(gone) != 1 {
		t.Errorf("collect: %v, %v", gone, err)
	}
}
