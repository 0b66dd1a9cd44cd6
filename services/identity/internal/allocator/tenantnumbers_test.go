// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/identity"
)

func TestPublishedAndCreatedNumbersBoundATenant(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	m := newMirror(now)
	s := newTenantNumbers(labelledOf("team"))
	admit := func(ns, app string, want int) {
		t.Helper()
		err := s.admit(&m, inNamespace(t, ns, app), now)
		if want == 0 && err != nil {
			t.Errorf("%s/%s: %v", ns, app, err)
		} else if want != 0 && (!errors.Is(err, ErrShare) || err.Used != want) {
			t.Errorf("%s/%s: %v, want %d used", ns, app, err, want)
		}
	}
	create := func(revision int64) { s.create(revision, inNamespace(t, "team", fmt.Sprint(revision))) }
	create(1)
	if len(s.created) != 0 {
		t.Error("without a publication a created number is counted in addition to the mirror")
	}
	// Almost all numbers are used: a tenant has its first ones and no more.
	s.publish(Numbers{Revision: 10, Used: identity.ClusterSize, Tenants: map[string]int{"tenant team": firstNumbers - 2}})
	admit("team", "a", 0)
	create(11)
	admit("team", "a", 0)
	create(12)
	admit("team", "a", firstNumbers)
	admit("other", "a", 0)
	// The collector counts the first of them; a label set of the tenant is gone.
	s.publish(Numbers{Revision: 11, Used: identity.ClusterSize, Tenants: map[string]int{"tenant team": firstNumbers - 2}})
	if len(s.created) != 1 {
		t.Errorf("%d numbers are counted in addition to the publication, want 1", len(s.created))
	}
	admit("team", "b", 0)
	// Namespaces without the label have a bound together.
	s.publish(Numbers{Revision: 13, Used: identity.ClusterSize, Unlabelled: unlabelledNumbers})
	admit("other", "a", unlabelledNumbers)
	admit("team", "b", 0)
	// The mirror has more than was published.
	for i := range firstNumbers {
		n := identity.MinCluster + identity.Numeric(i)
		m.learn(identity.Identity{Number: n, Labels: inNamespace(t, "team", fmt.Sprint(i))}, 14, now)
	}
	admit("team", "b", firstNumbers)
}

func TestLabelSetsWaitUntilTheyAreAdmittedOrNoLongerAsk(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	m := newMirror(now)
	s := newTenantNumbers(labelledOf("team"))
	full := Numbers{Revision: 1, Used: identity.ClusterSize, Tenants: map[string]int{"tenant team": firstNumbers}}
	s.publish(full)
	asked := func(want int) {
		t.Helper()
		u := s.usage(&m, now)
		if u.Asked != u.Used+want {
			t.Errorf("asked %d beyond %d, want %d", u.Asked-u.Used, u.Used, want)
		}
		if want > 0 && (len(u.Tenants) != 1 || u.Tenants[0].Share.Admitted != firstNumbers ||
			u.Tenants[0].Share.Asked != firstNumbers+want) {
			t.Errorf("tenants %+v, want one that asks for %d", u.Tenants, want)
		}
	}
	asked(0)
	for range 2 {
		_ = s.admit(&m, inNamespace(t, "team", "a"), now)
	}
	_ = s.admit(&m, inNamespace(t, "team", "b"), now)
	asked(2)
	s.publish(Numbers{Revision: 2})
	if err := s.admit(&m, inNamespace(t, "team", "a"), now); err != nil {
		t.Error(err)
	}
	s.publish(full)
	asked(1)
	now = now.Add(waitingFor)
	asked(1)
	now = now.Add(1)
	asked(0)
	for i := range maxWaiting + 1 {
		_ = s.admit(&m, inNamespace(t, "team", fmt.Sprint(i)), now)
	}
	asked(maxWaiting)
}
