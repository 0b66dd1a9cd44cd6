// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

func TestObjectsOfAWatchAreTakenOneByOne(t *testing.T) {
	dir := t.TempDir()
	config := testConfig(&clock{now: time.Unix(1e9, 0)})
	config.Limits.Services = 2
	o := start(t, config, dir, managed.SourceKubernetes)
	o.apply(web)
	given := func(text string) (service.ObjectKey, Given) {
		t.Helper()
		got, err := manifest.Options{}.Decode([]byte(text))
		if err != nil || len(got) != 1 {
			t.Fatalf("%q: %v", text, err)
		}
		return got[0].Key, Given{Object: got[0]}
	}
	set := make(map[service.ObjectKey]Given)
	for _, text := range []string{web, end, api, strings.Replace(api, "name: api", "name: other", 1)} {
		k, g := given(text)
		set[k] = g
	}
	set[serviceKey("odd")] = Given{Err: errors.New("spec.type: is odd")}
	f := o.Objects(managed.SourceKubernetes)
	apply := func(c watch.Changes[service.ObjectKey, Given]) {
		t.Helper()
		if err := f.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(o *running) string {
		t.Helper()
		_, refused, _, err := o.Reader().List(t.Context(), Filter{})
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, r := range refused {
			out = append(out, r.Key.Name.Name)
		}
		return strings.Join(out, " ")
	}
	apply(watch.Changes[service.ObjectKey, Given]{Upserts: set})
	if got := refused(o); got != "odd other web" {
		t.Errorf("refused %q", got)
	}
	select {
	case <-o.Ready():
		t.Error("the owner is ready before the listing is complete")
	default:
	}
	listed := make(map[service.ObjectKey]struct{})
	for k := range set {
		listed[k] = struct{}{}
	}
	if err := f.Complete(t.Context(), listed); err != nil {
		t.Fatal(err)
	}
	<-o.Ready()
	// A call without changes retries the objects, because capacity or the name may have become available.
	if _, err := o.Delete(t.Context(), managed.Caller{}, []service.ObjectKey{serviceKey("web")}); err != nil {
		t.Fatal(err)
	}
	apply(watch.Changes[service.ObjectKey, Given]{Deletes: map[service.ObjectKey]struct{}{serviceKey("api"): {}}})
	apply(watch.Changes[service.ObjectKey, Given]{})
	if got := refused(o); got != "odd" {
		t.Errorf("refused %q", got)
	}
	held, err := f.Held(t.Context())
	if err != nil || len(held) != 3 {
		t.Errorf("held %v, %v", held, err)
	}
	o.stop()
	o = start(t, config, dir, managed.SourceKubernetes)
	<-o.Ready()
	f = o.Objects(managed.SourceKubernetes)
	if err := f.Complete(t.Context(), map[service.ObjectKey]struct{}{serviceKey("web"): {}}); err != nil {
		t.Fatal(err)
	}
	if held, err := f.Held(t.Context()); err != nil || len(held) != 1 {
		t.Errorf("held %v, %v", held, err)
	}
}
