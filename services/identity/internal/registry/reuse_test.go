// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// failing is a Store whose publications fail at will.
type failing struct {
	writes
	mu  sync.Mutex
	err error // guarded by mu; error of the publications
}

// fail makes the publications from now on fail, or with nil succeed.
func (f *failing) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

func (f *failing) Publish(ctx context.Context, at int64, changes []Change) (int64, error) {
	f.mu.Lock()
	err := f.err
	f.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return f.writes.Publish(ctx, at, changes)
}

// TestAddressRestsUntilNoNodeCanHaveItsMapping: with native routing, an address may be reused 16 minutes after its
// mapping was removed from the store. It must not be reused while the store is unavailable.
func TestAddressRestsUntilNoNodeCanHaveItsMapping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newRegistry(t, time.Hour)
		store := &failing{}
		r.store, r.cfg.Timeout, r.cfg.StaleMappings = store, time.Second, 15*time.Minute
		r.registration = Registration{Underlay: &Underlay{Mode: ModeNative}, Ranges: &[]netip.Prefix{}}
		changed := make(chan struct{}, 1)
		var down atomic.Bool
		go r.Run(t.Context(), func() (bool, <-chan struct{}) { return !down.Load(), changed }) //nolint:errcheck // nil
		r.Observe(Update{Complete: true, Revision: 6, Nodes: []NodeKey{node("own", 1)}})
		a, never := netip.MustParseAddr("10.0.1.5"), netip.MustParseAddr("10.0.1.9")
		check := func(when string, a netip.Addr, want bool, why string) {
			t.Helper()
			synctest.Wait()
			_, _, all := r.CheckReuse([]netip.Addr{a}, false)
			if len(all) != 1 || all[0].OK != want || !strings.Contains(all[0].Reason, why) {
				t.Errorf("%s: %+v, want %v, %q", when, all, want, why)
			}
			// Another endpoint is refused the address, too, while this process knows of the mapping.
			if err := r.MayUse("other", []netip.Addr{a}); a != never && errors.Is(err, ErrResting) == want {
				t.Errorf("%s another endpoint: %v", when, err)
			}
		}
		time.Sleep(time.Hour)
		check("never used", never, true, "")
		r.Set("e", []netip.Addr{a}, 300)
		time.Sleep(time.Second)
		if err := r.MayUse("e", []netip.Addr{a}); err != nil {
			t.Errorf("the endpoint that has it: %v", err)
		}
		_, _, all := r.CheckReuse([]netip.Addr{a}, false)
		if !all[0].OK || !errors.Is(r.MayUse("other", []netip.Addr{a}), ErrResting) {
			t.Errorf("an address that an endpoint has is not that endpoint's alone: %+v", all)
		}
		store.fail(errors.New("away"))
		r.Remove("e")
		time.Sleep(2 * time.Hour)
		check("whose removal does not reach the store", a, false, "etcd still has the mapping")
		store.fail(nil)
		time.Sleep(time.Minute)
		check("whose removal reached the store a short time ago", a, false, "removed from etcd less than 16m0s ago")
		time.Sleep(14 * time.Minute)
		check("after 15 minutes", a, false, "removed from etcd less than 16m0s ago")
		time.Sleep(2 * time.Minute)
		check("after 17 minutes", a, true, "")
		down.Store(true)
		changed <- struct{}{}
		synctest.Wait()
		if _, _, all := r.CheckReuse([]netip.Addr{a}, false); all[0].OK ||
			!strings.Contains(all[0].Reason, "etcd does not answer") {
			t.Errorf("while the store is unavailable: %+v", all)
		}
		down.Store(false)
		changed <- struct{}{}
		synctest.Wait()
		if _, _, all := r.CheckReuse([]netip.Addr{a}, false); all[0].OK || all[0].Wait == 0 {
			t.Errorf("when the store is just back: %+v", all)
		}
		time.Sleep(time.Minute)
		check("a minute later", a, true, "")
	})
}

// TestPublicationThatFailedMayBeThere: a write that the store did not confirm may have succeeded, so the quarantine of
// the address begins with the confirmed removal.
func TestPublicationThatFailedMayBeThere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newRegistry(t, time.Hour)
		store := &failing{err: errors.New("no answer")}
		r.store, r.cfg.Timeout, r.cfg.StaleMappings = store, time.Second, 15*time.Minute
		r.registration = Registration{Underlay: &Underlay{Mode: ModeNative}, Ranges: &[]netip.Prefix{}}
		go r.Run(t.Context(), func() (bool, <-chan struct{}) { return true, nil }) //nolint:errcheck // nil
		r.Observe(Update{Complete: true, Revision: 6, Nodes: []NodeKey{node("own", 1)}})
		a := netip.MustParseAddr("10.0.1.5")
		r.Set("e", []netip.Addr{a}, 300)
		time.Sleep(time.Minute)
		r.Remove("e")
		time.Sleep(time.Hour)
		if err := r.MayUse("other", []netip.Addr{a}); !errors.Is(err, ErrResting) {
			t.Errorf("an address that the store may have: %v", err)
		}
		store.fail(nil)
		time.Sleep(time.Minute)
		if err := r.MayUse("other", []netip.Addr{a}); !errors.Is(err, ErrResting) || !strings.Contains(err.Error(), "ago") {
			t.Errorf("a minute after its removal: %v", err)
		}
		time.Sleep(16 * time.Minute)
		if err := r.MayUse("other", []netip.Addr{a}); err != nil {
			t.Errorf("17 minutes after its removal: %v", err)
		}
	})
}

// TestWhatAnEarlierProcessPublishedRests: a new process does not know since when addresses are free, so they begin a
// new quarantine.
func TestWhatAnEarlierProcessPublishedRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newRegistry(t, time.Hour)
		r.store, r.cfg.Timeout, r.cfg.StaleMappings = &failing{}, time.Second, 15*time.Minute
		r.registration = Registration{Underlay: &Underlay{Mode: ModeNative}, Ranges: &[]netip.Prefix{}}
		go r.Run(t.Context(), func() (bool, <-chan struct{}) { return true, nil }) //nolint:errcheck // nil
		r.Observe(Update{
			Complete: true, Revision: 6, Nodes: []NodeKey{node("own", 1)}, Addresses: []AddressesKey{at("own", 1, "10.0.1.5")},
		})
		addresses := []netip.Addr{netip.MustParseAddr("10.0.1.5"), netip.MustParseAddr("10.0.1.6")}
		free := func(when string, want ...bool) {
			t.Helper()
			synctest.Wait()
			_, _, all := r.CheckReuse(addresses, false)
			for i, reuse := range all {
				if reuse.OK != want[i] {
					t.Errorf("%s: %+v", when, reuse)
				}
			}
		}
		time.Sleep(15 * time.Minute)
		free("after 15 minutes", false, false)
		time.Sleep(2 * time.Minute)
		// The store of this test accepts the removal, but its watch does not deliver it yet.
		free("after 17 minutes", false, true)
		r.Observe(Update{Revision: 7, Removed: []Removal{{Node: "own", Endpoint: "1", Revision: 7}}})
		free("when the store has told of the removal", true, true)
	})
}

// TestTunnelNeedsNoRest: tunnelled packets contain their identity, so only a node with native routing waits.
func TestTunnelNeedsNoRest(t *testing.T) {
	r, _ := newRegistry(t, time.Hour)
	a := []netip.Addr{netip.MustParseAddr("10.0.1.5")}
	r.registration.Underlay = nil
	if _, known, _ := r.CheckReuse(a, false); known {
		t.Error("the mode is known before the datapath has said it")
	}
	for _, mode := range []RoutingMode{ModeUnset, ModeOverlay} {
		r.registration.Underlay = &Underlay{Mode: mode}
		if got, known, all := r.CheckReuse(a, false); got != mode || !known || all != nil {
			t.Errorf("mode %q: %q, %+v", mode, got, all)
		}
		if err := r.MayUse("e", a); err != nil {
			t.Errorf("mode %q: %v", mode, err)
		}
	}
}

// TestConfirmedAddressIsReusedBeforeItsTime: an address may be reused early once all nodes have confirmed the revision
// of its removal in the same store. The node requests no confirmation while addresses are not scarce, or for reusable
// addresses.
func TestConfirmedAddressIsReusedBeforeItsTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newRegistry(t, time.Hour)
		store := &failing{}
		r.store, r.cfg.Timeout, r.cfg.StaleMappings = store, time.Second, 15*time.Minute
		r.registration = Registration{Underlay: &Underlay{Mode: ModeNative}, Ranges: &[]netip.Prefix{}}
		go r.Run(t.Context(), func() (bool, <-chan struct{}) { return true, nil }) //nolint:errcheck // nil
		r.Observe(Update{Complete: true, Cluster: 7, Revision: 6, Nodes: []NodeKey{node("own", 1)}})
		time.Sleep(time.Hour)
		a := netip.MustParseAddr("10.0.1.5")
		use := func() {
			r.Set("e", []netip.Addr{a}, 300)
			time.Sleep(time.Minute)
			r.Remove("e")
			time.Sleep(time.Minute)
		}
		check := func(when string, scarce, want bool) (wanted int64) {
			t.Helper()
			_, _, all := r.CheckReuse([]netip.Addr{a}, scarce)
			if all[0].OK != want {
				t.Errorf("%s: %+v", when, all[0])
			}
			if err := r.MayUse("other", []netip.Addr{a}); errors.Is(err, ErrResting) == want {
				t.Errorf("%s: another endpoint: %v", when, err)
			}
			return r.WantsConfirmed()
		}
		use()
		if w := check("addresses are not scarce", false, false); w != 0 {
			t.Errorf("revision %d is wanted", w)
		}
		wanted := check("addresses are scarce", true, false)
		if wanted == 0 {
			t.Error("no revision is wanted")
		}
		r.SetConfirmed(Confirmed{Cluster: 7, Revision: wanted - 1})
		check("all have confirmed an earlier revision", true, false)
		r.SetConfirmed(Confirmed{Cluster: 8, Revision: wanted})
		check("all have confirmed a revision of another store", true, false)
		r.SetConfirmed(Confirmed{Cluster: 7, Revision: wanted})
		if w := check("all have confirmed", true, true); w != 0 {
			t.Errorf("revision %d is wanted of an address that may be reused", w)
		}
		r.SetConfirmed(Confirmed{})
		use()
		check("used again", true, false)
		// The store is restored to an older state: confirmations of the former history are not valid.
		r.SetConfirmed(Confirmed{Cluster: 7, Revision: 1 << 40})
		r.Observe(Update{Complete: true, Cluster: 7, Revision: 4, Nodes: []NodeKey{node("own", 1)}})
		r.SetConfirmed(Confirmed{Cluster: 7, Revision: 1 << 40})
		if w := check("after the store was rebuilt", true, false); w != 0 {
			t.Errorf("revision %d of another store is wanted", w)
		}
		time.Sleep(16 * time.Minute)
		check("after its time", true, true)
	})
}

// TestAddressRestsWhoeverRemovedItsMapping: another node removes a mapping that an earlier process of this node wrote,
// as ForgetNode does, while the endpoint is deleted here. This process has removed nothing, but the address must not be
// reused yet.
func TestAddressRestsWhoeverRemovedItsMapping(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newRegistry(t, time.Hour)
		r.store, r.cfg.Timeout, r.cfg.StaleMappings = &failing{}, time.Second, 15*time.Minute
		r.registration = Registration{Underlay: &Underlay{Mode: ModeNative}, Ranges: &[]netip.Prefix{}}
		a := netip.MustParseAddr("10.0.1.5")
		was := at("own", 1, "10.0.1.5")
		was.Value.Incarnation = "i"
		r.Set(was.Endpoint, was.Value.Addresses, was.Value.Identity)
		go r.Run(t.Context(), func() (bool, <-chan struct{}) { return true, nil }) //nolint:errcheck // nil
		r.Observe(Update{Complete: true, Revision: 6, Nodes: []NodeKey{node("own", 1)}, Addresses: []AddressesKey{was}})
		time.Sleep(time.Hour)
		r.Observe(Update{Revision: 7, Removed: []Removal{{Node: "own", Endpoint: was.Endpoint, Revision: 7}}})
		r.Remove(was.Endpoint)
		time.Sleep(2 * time.Minute)
		if _, _, all := r.CheckReuse([]netip.Addr{a}, false); all[0].OK {
			t.Errorf("two minutes later: %+v", all[0])
		}
		time.Sleep(16 * time.Minute)
		if _, _, all := r.CheckReuse([]netip.Addr{a}, false); !all[0].OK {
			t.Errorf("after its time: %+v", all[0])
		}
	})
}

// TestNodeHasHeardOnceItsDatapathHasApplied: a node reports that it is up to date with the store only once its datapath
// has applied that state. A lagging datapath delays the report, even if the service receives changes from the store.
func TestNodeHasHeardOnceItsDatapathHasApplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newRegistry(t, time.Hour)
		r.registration = Registration{Underlay: &Underlay{Mode: ModeNative}}
		note := func(revision int64, want time.Duration) {
			t.Helper()
			silence, ok := r.NoteApplied(cluster.Point{Cluster: 7, Revision: revision})
			if ok != (want >= 0) || ok && silence != want {
				t.Errorf("applied up to %d: silent for %s, %t, want %s", revision, silence, ok, want)
			}
		}
		const never = -1
		note(0, never)
		r.Observe(Update{Complete: true, Cluster: 7, Revision: 6, Heard: time.Now()})
		note(5, never)
		if at := r.Applied(); at.Revision != 5 {
			t.Errorf("applied up to %+v", at)
		}
		note(6, 0)
		time.Sleep(time.Minute)
		r.Observe(Update{Cluster: 7, Revision: 9, Heard: time.Now()})
		note(6, time.Minute)
		note(9, 0)
		time.Sleep(time.Minute)
		r.Observe(Update{Cluster: 7, Revision: 10}) // a change, after which there may be others
		note(10, time.Minute)
		r.Observe(Update{Complete: true, Cluster: 8, Revision: 3, Heard: time.Now()})
		note(10, time.Minute) // of the former store
		if at := r.Applied(); at.Revision != 0 {
			t.Errorf("applied up to %+v of the former store", at)
		}
	})
}
