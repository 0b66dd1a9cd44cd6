// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
)

// inNamespace returns a label set of a namespace.
func inNamespace(t *testing.T, namespace, app string) label.Canonical {
	t.Helper()
	l, err := label.Canonicalize(label.Kubernetes(label.KeyNamespace, namespace), label.Kubernetes("app", app))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestMirrorAndCacheAgreeAfterAnyChanges compares the indexes of the mirror, and the content written to the cache, with
// the known identities.
func TestMirrorAndCacheAgreeAfterAnyChanges(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		m, cache := newMirror(time.Time{}), map[identity.Numeric]string{}
		for step := range 300 {
			n := identity.MinCluster + identity.Numeric(r.IntN(5))
			switch what := r.IntN(10); {
			case what < 6:
				labels := inNamespace(t, fmt.Sprint("ns", r.IntN(2)), fmt.Sprint(r.IntN(4)))
				before := m.known[n]
				revision := int64(r.IntN(step + 1))
				taken, _ := m.learn(identity.Identity{Number: n, Labels: labels}, revision, time.Time{})
				if taken != (revision >= before.revision) {
					t.Fatalf("revision %d after %d: taken %t", revision, before.revision, taken)
				}
			case what < 8:
				m.remove(n)
			case what < 9:
				if _, ok := m.known[n]; ok {
					m.keep(n)
				}
			default:
				c, saved := m.take()
				if r.IntN(2) == 0 {
					m.putBack(c, saved)
					break
				}
				for _, id := range c.Put {
					cache[id.Number] = id.Labels.Text()
				}
				for _, n := range c.Drop {
					delete(cache, n)
				}
			}
			living := map[string]int{}
			for _, e := range m.known {
				living[namespaceOf(e.labels)]++
			}
			if fmt.Sprint(living) != fmt.Sprint(m.living) {
				t.Fatalf("seed %d, step %d: counts %v, want %v", seed, step, m.living, living)
			}
			for text, n := range m.byText {
				if m.known[n].labels.Text() != text {
					t.Fatalf("seed %d, step %d: %s has %d, which is %s", seed, step, text, n, m.known[n].labels)
				}
			}
		}
		c, _ := m.take()
		for _, id := range c.Put {
			cache[id.Number] = id.Labels.Text()
		}
		for _, n := range c.Drop {
			delete(cache, n)
		}
		want := map[identity.Numeric]string{}
		for n, e := range m.known {
			want[n] = e.labels.Text()
		}
		if fmt.Sprint(cache) != fmt.Sprint(want) {
			t.Errorf("seed %d: the cache has %v, want %v", seed, cache, want)
		}
	}
}

func TestMirrorAsksForTheCacheOnlyWhenItIsBehind(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	m := newMirror(now)
	asks := func(want bool, why string) {
		t.Helper()
		got := false
		select {
		case <-m.dirty:
			got = true
		default:
		}
		if got != want {
			t.Errorf("%s: it asks %t, want %t", why, got, want)
		}
	}
	web := identity.Identity{Number: 300, Labels: inNamespace(t, "a", "web")}
	m.learn(web, 5, time.Time{})
	asks(true, "a new number")
	m.learn(web, 6, time.Time{})
	asks(false, "the same at a later revision")
	m.keep(300)
	asks(false, "gone, but held")
	m.remove(300)
	asks(true, "removed")
	m.remove(300)
	asks(false, "removed again")
	m.reach(7, now.Add(time.Minute), now.Add(time.Minute), time.Minute)
	asks(false, "heard within the lag")
	m.reach(8, now.Add(time.Minute+1), now.Add(2*time.Minute), time.Minute)
	asks(true, "heard beyond the lag")
	m.reach(9, now, now.Add(2*time.Minute), time.Minute)
	if m.revision != 9 || !m.heard.Equal(now.Add(time.Minute+1)) {
		t.Errorf("an older sign of the store: revision %d, heard %s", m.revision, m.heard)
	}
	m.reach(9, now, now, time.Minute)
	if !m.heard.Equal(now) {
		t.Errorf("heard %s, which is in the future of a clock that was set back", m.heard)
	}
}
