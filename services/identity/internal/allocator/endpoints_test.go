// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator_test

import (
	"errors"
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

var c1 = allocator.EndpointHolder("c1", "eth0")

func (n *node) relabel(app string) error {
	return n.Relabel(n.t.Context(), c1, storetest.Labels(n.t, app))
}

// sees fails unless the publication has c1 with this number and this former number.
func (n *node) sees(number, former identity.Numeric) {
	n.t.Helper()
	e, ok := n.endpoints.Get(c1)
	if ok != (number != 0) || e.Identity.Number != number || e.Former != former {
		n.t.Errorf("readers see %d, formerly %d; want %d, formerly %d", e.Identity.Number, e.Former, number, former)
	}
}

// TestMoveThatCannotBeSavedIsolates: if an administrator puts a pod into quarantine while the disk is full, the
// endpoint is isolated.
func TestMoveThatCannotBeSavedIsolates(t *testing.T) {
	for what, to := range map[string]label.Canonical{
		"another label set": storetest.Labels(t, "db"), "labels without an identity": allocator.Isolated(),
	} {
		t.Run(what, func(t *testing.T) {
			records := &memory{}
			a := startFake(t, storetest.NewFake(), "a", records)
			web := a.hold("c1", "web")
			records.setFail(errors.New("no space left on device"))
			for range 2 {
				if err := a.Relabel(t.Context(), c1, to); !errors.Is(err, allocator.ErrRecords) && !allocator.IsIsolated(to) {
					t.Errorf("a move that cannot be saved: %v, want %v", err, allocator.ErrRecords)
				}
			}
			if err := a.Relabel(t.Context(), c1, allocator.Isolated()); err != nil {
				t.Error(err)
			}
			a.sees(identity.Init, web)
			records.setFail(nil)
			want := identity.Init
			if !allocator.IsIsolated(to) {
				want = a.Find(to, false).Number
			}
			servicetest.Eventually(t, "the move to be saved", func() bool { return records.holders()[c1.String()] == want })
			servicetest.Eventually(t, "readers to see the move", func() bool {
				e, _ := a.endpoints.Get(c1)
				return e.Identity.Number == want
			})
			a.sees(want, web)
			if err := a.Relabel(t.Context(), c1, allocator.Isolated()); (err == nil) != allocator.IsIsolated(to) {
				t.Errorf("isolated although it moves: %v", err)
			}
			a.sees(want, web)
		})
	}
}

func TestRelabelledEndpointHoldsBothNumbersUntilItConfirms(t *testing.T) {
	f, records := storetest.NewFake(), &memory{}
	a := startFake(t, f, "a", records)
	web := a.hold("c1", "web")
	a.sees(web, 0)
	if err := a.relabel("db"); err != nil {
		t.Fatal(err)
	}
	db := a.Find(storetest.Labels(t, "db"), false).Number
	a.sees(db, web)
	a.refersTo(web, db)
	if err := a.relabel("db"); err != nil {
		t.Errorf("the same labels again: %v", err)
	}
	for _, app := range []string{"new", "web"} {
		if err := a.relabel(app); !errors.Is(err, allocator.ErrUnconfirmed) {
			t.Errorf("a second move: %v, want %v", err, allocator.ErrUnconfirmed)
		}
	}
	if n := a.Find(storetest.Labels(t, "new"), false).Number; n != 0 {
		t.Errorf("the refused labels got the number %d", n)
	}

	// It is so after a restart, too.
	a.stop()
	a = startFake(t, f, "a", records)
	a.sees(db, web)
	a.refersTo(web, db)
	for _, other := range []identity.Numeric{web, 7} {
		if err := a.Confirm(t.Context(), c1, other); err != nil {
			t.Fatal(err)
		}
	}
	a.sees(db, web)
	for range 2 {
		if err := a.Confirm(t.Context(), c1, db); err != nil {
			t.Fatal(err)
		}
		a.sees(db, 0)
		a.refersTo(db)
	}
	if err := a.relabel("web"); err != nil {
		t.Fatal(err)
	}
	a.sees(web, db)
	if a.release("c1") != web {
		t.Error("the release is of another number")
	}
	a.sees(0, 0)
	a.refersTo()
	if err := a.relabel("db"); err != nil {
		t.Fatal(err)
	}
	a.sees(0, 0)
}

func TestEndpointThatResolvesWhileItOwesAConfirmationMayGoBack(t *testing.T) {
	a := startFake(t, storetest.NewFake(), "a", &memory{})
	web := a.hold("c1", "web")
	if err := a.relabel("db"); err != nil {
		t.Fatal(err)
	}
	if back := a.hold("c1", "web"); back != web {
		t.Fatalf("back at %d, want %d", back, web)
	}
	a.refersTo(web)
	if err := a.Confirm(t.Context(), c1, web); err != nil {
		t.Fatal(err)
	}
	a.sees(web, 0)
	a.refersTo(web)
}

func TestRelabelWithoutStoreLeavesEverythingAsItWas(t *testing.T) {
	f := storetest.NewFake()
	a := startFake(t, f, "a", &memory{})
	web := a.hold("c1", "web")
	f.Down()
	a.disconnected()
	if err := a.relabel("never seen"); !errors.Is(err, allocator.ErrUnavailable) {
		t.Errorf("relabel: %v, want %v", err, allocator.ErrUnavailable)
	}
	a.sees(web, 0)
	f.Up()
	a.refersTo(web)
}

// TestIsolatedEndpointNeedsNeitherStoreNorNumber: an endpoint can be isolated while the store is unavailable and the
// quota is used up. Its former number stays held until the endpoint confirms the change, also across a restart.
func TestIsolatedEndpointNeedsNeitherStoreNorNumber(t *testing.T) {
	f, records := storetest.NewFake(), &memory{}
	a := startFake(t, f, "a", records)
	web := a.hold("c1", "web")
	f.Down()
	if err := a.Relabel(t.Context(), c1, allocator.Isolated()); err != nil {
		t.Fatal(err)
	}
	a.sees(identity.Init, web)
	if n := a.Summary().Isolated; n != 1 {
		t.Errorf("%d endpoints are isolated, want 1", n)
	}
	a.stop()
	f.Up()
	a = startFake(t, f, "a", records)
	a.sees(identity.Init, web)
	a.refersTo(web)
	if err := a.Confirm(t.Context(), c1, identity.Init); err != nil {
		t.Fatal(err)
	}
	a.sees(identity.Init, 0)
	a.refersTo()
	a.stop()
	a = startFake(t, f, "a", records)
	a.sees(identity.Init, 0)
	if _, holders, err := a.Get(identity.Init); err != nil || len(holders) != 1 {
		t.Errorf("holders of init: %v, %v", holders, err)
	}
	listed := 0
	for _, l := range a.List() {
		if l.Identity.Number == identity.Init {
			if listed++; l.Holders != 1 {
				t.Errorf("init has %d holders", l.Holders)
			}
		}
	}
	if listed != 1 {
		t.Errorf("init is listed %d times", listed)
	}
	// Back to a number, then gone: init stays an identity.
	if err := a.relabel("web"); err != nil {
		t.Fatal(err)
	}
	a.sees(web, identity.Init)
	if n := a.Summary().Isolated; n != 0 {
		t.Errorf("%d endpoints are isolated, want none", n)
	}
	if err := a.Confirm(t.Context(), c1, web); err != nil {
		t.Fatal(err)
	}
	if _, err := a.HoldEndpoint(t.Context(), c1, allocator.Isolated(), allocator.Workload{}); err != nil {
		t.Fatal(err)
	}
	if n, err := a.Release(t.Context(), c1); err != nil || n != identity.Init {
		t.Errorf("released %d, %v", n, err)
	}
	a.sees(0, 0)
	if _, _, err := a.Get(identity.Init); err != nil {
		t.Error(err)
	}
}
