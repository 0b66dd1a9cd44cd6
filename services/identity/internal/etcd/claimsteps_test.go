// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// joined returns a store with a session.
func joined(t *testing.T, s *etcdtest.Server, node string) *Store {
	t.Helper()
	store := newStore(t, s.Endpoint, node)
	if _, err := store.Join(servicetest.Context(t)); err != nil {
		t.Fatal(err)
	}
	return store
}

// TestClaimsThatComeTogetherShareTransactions proves INV-13 for batched claims: each claim gets its number or its own
// error, independently of the other claims in the transaction.
func TestClaimsThatComeTogetherShareTransactions(t *testing.T) {
	s := etcdtest.Start(t)
	a := joined(t, s, "a")
	revision := func() int64 {
		t.Helper()
		resp, err := s.Client().Get(servicetest.Context(t), "none")
		if err != nil {
			t.Fatal(err)
		}
		return resp.Header.Revision
	}
	taken := storetest.Labels(t, "taken")
	if _, err := a.Claim(servicetest.Context(t), taken, 0, 300); err != nil {
		t.Fatal(err)
	}
	const sets, callers = 200, 2
	before := revision()
	type outcome struct {
		claim allocator.Claim
		err   error
	}
	var got [sets][callers]outcome
	var wg sync.WaitGroup
	for i := range sets {
		for c := range callers {
			candidate := identity.MinCluster + 1000 + identity.Numeric(i)
			if i%10 == 9 {
				candidate-- // that of the set before
			}
			if i%10 == 5 {
				candidate = 300
			}
			wg.Go(func() {
				o := &got[i][c]
				o.claim, o.err = a.Claim(servicetest.Context(t), storetest.Labels(t, fmt.Sprint(i)), 0, candidate)
			})
		}
	}
	wg.Wait()
	if n := revision() - before; n >= sets*callers/2 {
		t.Errorf("%d claims took %d transactions, want them to share", sets*callers, n)
	}
	holder := map[identity.Numeric]int{}
	for i := range sets {
		created := 0
		for c, o := range got[i] {
			if o.claim.Created {
				created++
			}
			switch {
			case i%10 == 5 || i%10 >= 8: // may be refused: the candidate is another's
				if o.err != nil && !errors.Is(o.err, allocator.ErrOccupied) {
					t.Errorf("set %d: %v", i, o.err)
				}
			case o.err != nil:
				t.Errorf("set %d, caller %d: %v", i, c, o.err)
			}
			if o.err != nil {
				continue
			}
			if other, ok := holder[o.claim.Number]; ok && other != i {
				t.Errorf("sets %d and %d have the number %d", other, i, o.claim.Number)
			}
			holder[o.claim.Number] = i
		}
		if i%10 == 5 && created != 0 || i%10 < 8 && i%10 != 5 && created != 1 {
			t.Errorf("set %d was created %d times", i, created)
		}
	}
	// etcd and the results of the claims agree.
	resp, err := s.Client().Get(servicetest.Context(t), testPrefix+"/id/", clientv3.WithPrefix())
	if err != nil {
		t.Fatal(err)
	}
	for _, kv := range resp.Kvs {
		id, err := testKeys.read(kv)
		if err != nil {
			t.Fatal(err)
		}
		i, ok := holder[id.Number]
		if id.Number != 300 && (!ok || id.Labels.Text() != storetest.Labels(t, fmt.Sprint(i)).Text()) {
			t.Errorf("etcd has %d for %s, claimed was %v by set %d", id.Number, id.Labels, ok, i)
		}
	}
	if n := len(resp.Kvs); n != len(holder)+1 {
		t.Errorf("etcd has %d identities, want %d", n, len(holder)+1)
	}
}

// TestLostSessionIsToldToAllClaimsOfATransaction: all claims fail, and no claim is written in part.
func TestLostSessionIsToldToAllClaimsOfATransaction(t *testing.T) {
	s := etcdtest.Start(t)
	a := joined(t, s, "a")
	lease, err := a.session.Lease()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Client().Revoke(servicetest.Context(t), lease); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			set, number := storetest.Labels(t, fmt.Sprint(i)), identity.MinCluster+identity.Numeric(i)
			_, err := a.Claim(servicetest.Context(t), set, 0, number)
			if !errors.Is(err, allocator.ErrSessionLost) {
				t.Errorf("claim %d: %v, want ErrSessionLost", i, err)
			}
		})
	}
	wg.Wait()
	resp, err := s.Client().Get(servicetest.Context(t), testPrefix+"/id/", clientv3.WithPrefix())
	if err != nil || resp.Count != 0 {
		t.Errorf("etcd has %d identities, %v; want none", resp.Count, err)
	}
}

// TestLargeLabelSetsFitIntoATransaction: claims of any number and size are divided into transactions that etcd accepts.
func TestLargeLabelSetsFitIntoATransaction(t *testing.T) {
	s := etcdtest.Start(t)
	a := joined(t, s, "a")
	var wg sync.WaitGroup
	for i := range 40 {
		var list []label.Label
		for k := range 1 + i%40 {
			value := strings.Repeat("v", label.MaxValue)
			list = append(list, label.Label{Source: "k8s", Key: fmt.Sprintf("k%d-%d", i, k), Value: value})
		}
		set, err := label.Canonicalize(list...)
		if err != nil {
			t.Fatal(err)
		}
		wg.Go(func() {
			c, err := a.Claim(servicetest.Context(t), set, 0, identity.MinCluster+identity.Numeric(i))
			if err != nil || !c.Created {
				t.Errorf("%d labels: %+v, %v", len(list), c, err)
			}
			if c, err = a.Claim(servicetest.Context(t), set, c.Number, 0); err != nil || c.Created {
				t.Errorf("%d labels, again: %+v, %v", len(list), c, err)
			}
		})
	}
	wg.Wait()
}
