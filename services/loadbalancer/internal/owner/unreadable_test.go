// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// TestObjectThatCannotBeReadClosesWhatWasInForce: the API server has the object of before no
// more, so its pods may be gone and their addresses another pod's.
func TestObjectThatCannotBeReadClosesWhatWasInForce(t *testing.T) {
	limits := Limits{Services: 100, Slices: 100, Frontends: 100, Backends: 100, BackendsPerService: 50}
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	config.Limits = limits
	dir := t.TempDir()
	o := start(t, config, dir, SourceKubernetes)
	apply := func(o *running, upserts map[service.ObjectKey]Given) {
		t.Helper()
		c := watch.Changes[service.ObjectKey, Given]{Upserts: upserts}
		if err := o.Objects(SourceKubernetes).Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	const led, closed = "10.96.0.1:80/TCP of shop/web inside 10.244.0.5:8080", "10.96.0.1:80/TCP of shop/web inside reject"
	web := service.ObjectKey{Kind: service.KindService, Name: service.Name{Namespace: "shop", Name: "web"}}
	ends := service.ObjectKey{Kind: service.KindSlice, Name: service.Name{Namespace: "shop", Name: "web-x"}}
	good := func() map[service.ObjectKey]Given {
		return givenOf(t, serviceText("shop", "web", "10.96.0.1", 1), sliceText("shop", "web", 1, "10.244.0.5"))
	}
	for _, bad := range []struct {
		what  string
		given map[service.ObjectKey]Given
	}{
		{"a slice", map[service.ObjectKey]Given{ends: {Err: errors.New("metadata.name: is missing")}}},
		{"a slice of another name", map[service.ObjectKey]Given{ends: good()[web]}},
		{"a Service", map[service.ObjectKey]Given{web: {Err: errors.New("metadata.name: is missing")}}},
	} {
		apply(o, good())
		if got := o.servedAt("10.96.0.1"); got != led {
			t.Fatalf("before %s: %s", bad.what, got)
		}
		apply(o, bad.given)
		if got := o.servedAt("10.96.0.1"); got != closed {
			t.Errorf("%s that cannot be read: %q, want %q", bad.what, got, closed)
		}
		_, refused, _, err := o.List(t.Context(), Filter{})
		if err != nil || len(refused) != 1 {
			t.Errorf("%s: refused %+v, %v", bad.what, refused, err)
		}
	}
	o.stop()
	o = start(t, config, dir, SourceKubernetes)
	if got := o.servedAt("10.96.0.1"); got != closed {
		t.Errorf("after a restart: %q, want %q", got, closed)
	}
}
