// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/directory"
	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// TestObjectsOfASourceThatIsGoneBelongToEveryCaller: a source is no longer configured, so nothing manages its
// objects. Calls may change them.
func TestObjectsOfASourceThatIsGoneBelongToEveryCaller(t *testing.T) {
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	dir := t.TempDir()
	o := start(t, config, dir, managed.SourceFile)
	text := func(name string, ports int) string { return serviceText("shop", name, "10.96.0.1", ports) }
	files := []directory.File{
		{Origin: "a.yaml", Data: []byte(text("a", 1))}, {Origin: "b.yaml", Data: []byte(text("b", 1))},
	}
	if err := o.Feed(managed.SourceFile).Set(t.Context(), files); err != nil {
		t.Fatal(err)
	}
	change := func() (replace, remove error) {
		_, replace = o.Upsert(t.Context(), Request{Caller: managed.Caller{Manager: "m"}, Manifests: []byte(text("a", 2))})
		_, remove = o.Delete(t.Context(), managed.Caller{Manager: "n"},
			[]service.ObjectKey{keyOf(service.KindService, "shop", "b")})
		return replace, remove
	}
	if replace, remove := change(); !errors.Is(replace, failure.ErrOwned) || !errors.Is(remove, failure.ErrForeign) {
		t.Errorf("objects of a source that is configured: %v, %v", replace, remove)
	}
	o.stop()
	o = start(t, config, dir)
	if replace, remove := change(); replace != nil || remove != nil {
		t.Errorf("objects of a source that is no longer configured: %v, %v", replace, remove)
	}
}

// TestCallsMayShrinkWhatIsAboveALoweredLimit: a limit was lowered below the number of existing objects. Calls may
// remove objects, and may not add any.
func TestCallsMayShrinkWhatIsAboveALoweredLimit(t *testing.T) {
	for _, c := range []struct {
		what  string
		lower func(*Limits)
	}{
		{"backends", func(l *Limits) { l.Backends = 4 }},
		{"backends of a service", func(l *Limits) { l.BackendsPerService = 1 }},
		{"frontends", func(l *Limits) { l.Frontends = 1 }},
	} {
		config := testConfig(&clock{now: time.Unix(1e9, 0)})
		dir := t.TempDir()
		o := start(t, config, dir)
		ends := func(n int) string {
			var addrs []string
			for i := range n {
				addrs = append(addrs, fmt.Sprint("10.244.0.", i+1))
			}
			return sliceText("shop", "web", 2, addrs...)
		}
		o.apply(serviceText("shop", "web", "10.96.0.1", 2) + "---\n" + ends(10))
		o.stop()
		c.lower(&config.Limits)
		o = start(t, config, dir)
		if _, err := o.Upsert(t.Context(), Request{Manifests: []byte(ends(9))}); err != nil {
			t.Errorf("%s: fewer: %v", c.what, err)
		}
		ready := strings.Replace(ends(9), "[10.244.0.1]", "[10.244.0.1], conditions: {ready: false}", 1)
		if _, err := o.Upsert(t.Context(), Request{Manifests: []byte(ready)}); err != nil {
			t.Errorf("%s: as many: %v", c.what, err)
		}
		if c.what == "frontends" {
			continue
		}
		if _, err := o.Upsert(t.Context(), Request{Manifests: []byte(ends(11))}); !errors.Is(err, failure.ErrLimit) {
			t.Errorf("%s: more: %v", c.what, err)
		}
	}
}
